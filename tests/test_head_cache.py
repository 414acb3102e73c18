"""The rows that heads keep of their texts: any number of planes, which grow, and which later texts take over."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from leapahead.drafters.heads import cache  # noqa: E402
from leapahead.drafters.heads.cache import KEYS, VALUES, CachedHead, CachedText, Planes  # noqa: E402
from leapahead.drafters.heads.config import HeadConfig  # noqa: E402
from leapahead.models.base import TargetInfo  # noqa: E402

TOKENS = [5, 6, 7, 8, 9, 10]


class ATextOfRows(CachedText):
    def discard(self) -> None: ...

    def key(self, path: Any) -> Any:
        return path

    def computable(self, path: Any) -> bool:
        return True


class AHeadOfRows(CachedHead):
    def new_text(self, tokens: Sequence[int], known: int, planes: Planes) -> CachedText:
        return ATextOfRows(tokens, known, planes)

    def forward(self, wanted: Any) -> Any:
        raise NotImplementedError


def head_of(has_attention: bool) -> AHeadOfRows:
    module = SimpleNamespace(
        has_attention=has_attention, d2t=None, parameters=lambda: iter([torch.zeros(1)]), modules=list
    )
    info = TargetInfo(
        name="tiny", vocab_size=16, context_length=64, precision=1e-7, capabilities=frozenset(), fingerprint="tiny"
    )
    return AHeadOfRows(HeadConfig("medusa", 4, 4, 16, 16), module, info, "head")


def rows(count: int, start: int = 0, heads: int = 2) -> Any:
    """float [heads, count, 3], of which no two entries are equal."""
    return torch.arange(heads * count * 3, dtype=torch.float32).view(heads, count, 3) + 1000 * start


def test_planes_grow_on_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "FIRST_CAPACITY", 2)
    text = ATextOfRows(TOKENS, 0, {})
    expected = []
    for begin, count in ((0, 1), (1, 3), (4, 9)):
        expected.append(rows(count, begin))
        assert torch.equal(text.write((0, KEYS), begin, expected[-1]), torch.cat(expected, dim=1))
    other = rows(2, 50, heads=1)
    assert torch.equal(text.write((7, VALUES), 0, other), other)
    assert torch.equal(text.write((0, KEYS), 2, rows(1, 99))[:, :2], torch.cat(expected, dim=1)[:, :2])
    text.length = 2
    kept = text.planes()
    assert set(kept) == {(0, KEYS), (7, VALUES)}
    text.write((7, VALUES), 0, 0 * other)
    assert torch.equal(kept[7, VALUES], other)  # a copy


def test_a_text_takes_over_the_rows_of_one_that_begins_like_it() -> None:
    head = head_of(has_attention=True)
    first = head.open(TOKENS, "me")
    first.append(torch.zeros(5, 4))
    assert (first.length, first.missing) == (0, 5)
    for plane in ((0, KEYS), (0, VALUES), (3, KEYS)):
        first.write(plane, 0, rows(7, sum(plane)))  # the last two are of drafted nodes
    first.length = 5
    head.keep(first, "me")
    prompt = [*TOKENS[:4], 1, 2]
    assert head.known(prompt, "somebody else") == 0
    assert head.known(prompt, "me") == 3
    second = head.open(prompt, "me")
    assert (second.length, second.known) == (3, 3)
    for plane, found in second.planes().items():
        assert torch.equal(found, rows(7, sum(plane))[:, :3])
    assert set(second.planes()) == {(0, KEYS), (0, VALUES), (3, KEYS)}
    second.write((3, KEYS), 0, rows(3, 77))
    assert torch.equal(head.open(prompt, "me").planes()[3, KEYS], rows(7, 3)[:, :3])  # no text changes another's
    assert not head.open(prompt, "somebody else").planes()


def test_states_that_the_head_has_not_read_are_kept_behind_its_rows() -> None:
    head, states = head_of(has_attention=True), torch.arange(20.0).view(5, 4)
    first = head.open(TOKENS, "me")
    first.append(states[:3])
    first.append(states[3:])
    first.take(2)
    first.write((0, KEYS), 0, rows(2))
    first.length = 2
    head.keep(first, "me")
    for prompt, read, known in (([*TOKENS[:2], 1], 1, 1), ([*TOKENS[:4], 1, 2], 2, 3), ([*TOKENS, 1], 2, 5)):
        text = head.open(prompt, "me")
        assert (head.known(prompt, "me"), text.known, text.length) == (known, known, read)
        assert torch.equal(text.planes()[0, KEYS], rows(2)[:, :read])
        assert torch.equal(torch.zeros(0, 4) if (waiting := text.take(9)) is None else waiting, states[read:known])
    untouched = head.open([*TOKENS, 1], "me").take(9)
    assert untouched is not None
    assert torch.equal(untouched, states[2:])


def test_the_newest_text_is_kept_whatever_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text takes the place of its own beginning; others are dropped where they are too long together."""
    monkeypatch.setattr(cache, "KEPT_ROWS", 9)
    head = head_of(has_attention=True)

    def keep(tokens: Sequence[int], owner: str, unread: int = 0) -> list[int]:
        text = head.new_text(tokens, 0, {})
        text.append(torch.zeros(len(tokens) - 1, 4))
        text.take(len(tokens) - 1 - unread)
        text.length = len(tokens) - 1 - unread
        head.keep(text, owner)
        return [len(kept.tokens) for kept in head._kept]

    assert keep(TOKENS[:2], "me") == [2]
    assert keep(TOKENS[:3], "somebody else") == [2, 3]
    assert keep(TOKENS[:4], "me") == [3, 4]
    assert keep(TOKENS, "me") == [3, 6]
    assert keep([3, 3], "me") == [6, 2]
    assert keep([4] * 20, "me") == [20]
    assert keep([5, 5], "me", unread=1) == [2]  # states take more room than rows


def test_a_head_without_attention_needs_the_newest_state_alone() -> None:
    head = head_of(has_attention=False)
    text = head.open(TOKENS)
    assert (text.known, text.length, head.known(TOKENS, "")) == (4, 4, 4)
    text.append(torch.zeros(1, 4))
    assert text.missing == 1
    head.keep(text, "me")
    assert head.known([5], "me") == 0


def test_rows_may_be_left_out() -> None:
    """As those of nodes that a layer of the head does not compute, where the plane grows beyond them."""
    text = head_of(has_attention=True).open(TOKENS)
    text.write((0, KEYS), 0, rows(2, 1))
    end = cache.FIRST_CAPACITY + 3
    found = text.write((0, KEYS), end, rows(2, 5))
    assert torch.equal(found[:, :2], rows(2, 1))
    assert not found[:, 2:end].any()
    assert torch.equal(found[:, end:], rows(2, 5))
