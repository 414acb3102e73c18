"""Every way in which a text can end, each inside an accepted path: the text is plain decoding's, and nothing behind its
end stays in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
import pytest
from helpers import GREEDY, PROMPT, Oracle, Run, assert_same_text, full_text, run
from hypothesis import given
from hypothesis import strategies as st

from leapahead.core.errors import BadParameter, ContextOverflow
from leapahead.core.sampling import SamplingParams
from leapahead.core.stop import StopParams, Stopper, check_lengths
from leapahead.core.verify import Verdict
from leapahead.models.toy import ToyTarget

PIECES = ["a", "b", "ab", "ba", "aab", "c", "", "bca", "x", "yx", "xy", "zz"]


def piece(token: int) -> str:
    return PIECES[token]


def verdict_of(tokens: Sequence[int]) -> Verdict:
    """All drafted but the last."""
    return Verdict(tuple(range(len(tokens))), tuple(tokens), len(tokens) - 1)


def cut(params: StopParams, *verdicts: Sequence[int], context_length: int = 1 << 30) -> tuple[list[int], Stopper]:
    stopper = Stopper(params, PROMPT, context_length, piece)
    emitted: list[int] = []
    for tokens in verdicts:
        if stopper.finish_reason is None:
            emitted += stopper.cut(verdict_of(tokens)).tokens
    return emitted, stopper


# ----------------------------------------------------------------------------------------------- what a stop does


CASES: list[tuple[str, StopParams, list[int], str, int | str | None]] = [
    ("eos", StopParams(eos_token_ids=(8, 5)), [0, 1, 5], "stop", None),
    ("stop token", StopParams(stop_token_ids=(5,)), [0, 1, 5], "stop", 5),
    ("eos before stop token", StopParams(eos_token_ids=(5,), stop_token_ids=(5,)), [0, 1, 5], "stop", None),
    ("first token", StopParams(eos_token_ids=(0,)), [0], "stop", None),
    ("bonus token", StopParams(eos_token_ids=(9,)), [0, 1, 5, 8, 9], "stop", None),
    ("length", StopParams(max_new_tokens=3), [0, 1, 5], "length", None),
    ("length is no stop", StopParams(max_new_tokens=3, eos_token_ids=(5,)), [0, 1, 5], "stop", None),
    ("criterion", StopParams(criteria=(lambda tokens: list(tokens) == [*PROMPT, 0, 1],)), [0, 1], "stop", None),
    ("string in one token", StopParams(stop_strings=("x",)), [0, 1, 5, 8], "stop", "x"),
    ("string across tokens", StopParams(stop_strings=("bcx",)), [0, 1, 5, 8], "stop", "bcx"),
    ("string ends within a token", StopParams(stop_strings=("xy",)), [0, 1, 5, 8, 9], "stop", "xy"),
    ("string in a stop token", StopParams(stop_strings=("bc",), stop_token_ids=(5,)), [0, 1, 5], "stop", "bc"),
    ("the earlier of two", StopParams(stop_strings=("x", "bc")), [0, 1, 5], "stop", "bc"),
]


@pytest.mark.parametrize(("name", "params", "emitted", "finish", "why"), CASES, ids=[case[0] for case in CASES])
@pytest.mark.parametrize("split", [1, 2, 5])
def test_a_stop_cuts_at_its_token(
    name: str, params: StopParams, emitted: list[int], finish: str, why: int | str | None, split: int
) -> None:
    """The same text in verdicts of 1, 2 or 5 tokens: pieces "a", "b", "c", "x", "yx"."""
    text = [0, 1, 5, 8, 9]
    done, stopper = cut(params, *(text[i : i + split] for i in range(0, len(text), split)))
    assert (done, stopper.finish_reason, stopper.stop_reason) == (emitted, finish, why)


def test_of_two_strings_in_one_token_the_earlier_wins() -> None:
    for strings in [("ca", "bc"), ("bc", "ca")]:
        assert cut(StopParams(stop_strings=strings), [0, 7, 8])[1].stop_reason == "bc"  # token 7 is "bca"


def test_a_stop_string_in_the_prompt_does_not_count() -> None:
    """Nor does its beginning there: it must lie in the new text."""
    prompt_text = "".join(map(piece, PROMPT))
    assert prompt_text.endswith("ab")
    done, stopper = cut(StopParams(stop_strings=("ba", "abc", prompt_text)), [5, 8])
    assert (done, stopper.finish_reason) == ([5, 8], None)


def test_a_text_that_never_stops_is_left_alone() -> None:
    params = StopParams(eos_token_ids=(3,), stop_token_ids=(4,), stop_strings=("zz",), criteria=(lambda _: False,))
    verdict = verdict_of([0, 1, 5, 8])
    assert Stopper(params, PROMPT, text=piece).cut(verdict) is verdict


@given(
    st.lists(st.integers(0, len(PIECES) - 1), max_size=30),
    st.lists(st.text("abcxyz", min_size=1, max_size=5), min_size=1, max_size=3),
    st.integers(1, 6),
)
def test_stop_strings_end_the_text_at_the_token_that_completes_the_first_one(
    text: list[int], strings: list[str], split: int
) -> None:
    """Against the naive search in the whole text so far, whatever the verdicts' sizes; never a second time."""

    def naive() -> list[int]:
        for count in range(1, len(text) + 1):
            so_far = "".join(map(piece, text[:count]))
            if any(string in so_far for string in strings):
                return text[:count]
        return text

    verdicts = [text[i : i + split] for i in range(0, len(text), split)]
    done, stopper = cut(StopParams(stop_strings=tuple(strings)), *verdicts)
    assert done == naive()
    so_far = "".join(map(piece, done))
    found = [string for string in strings if string in so_far]
    assert (stopper.finish_reason == "stop") == bool(found)
    if found:
        assert stopper.stop_reason == min(found, key=lambda string: (so_far.find(string), string))


def test_a_long_stop_string_does_not_make_the_search_for_others_slow() -> None:
    def seconds(longest: int) -> float:
        """Of the search in one short token after a long text."""
        stops = (*(f"{number} never" for number in range(500)), "z" * longest)
        stopper = Stopper(StopParams(stop_strings=stops), PROMPT, text=lambda token: "abc" * (1 + token))
        stopper.cut(verdict_of([50_000]))
        times = []
        for _ in range(5):
            begun = perf_counter()
            stopper.cut(verdict_of([0]))
            times.append(perf_counter() - begun)
        return min(times)

    assert seconds(50_000) < 8 * seconds(10)


def test_impossible_parameters_are_refused_by_name() -> None:
    for wrong in (0, -1, 2.5, "3", None, True):
        with pytest.raises(BadParameter, match=f"max_new_tokens={wrong!r} .*whole number of at least 1"):
            StopParams(max_new_tokens=wrong)
    for wrong in (5, [5], ("a",), (1.5,)):
        with pytest.raises(BadParameter, match=r"stop_token_ids=.* tuple of token ids"):
            StopParams(stop_token_ids=wrong)
    with pytest.raises(BadParameter, match="empty stop string"):
        StopParams(stop_strings=("a", ""))
    with pytest.raises(BadParameter, match=r"stop strings \['a'\] need a tokenizer"):
        Stopper(StopParams(stop_strings=("a",)), PROMPT)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"stop_strings": "self"}, "stop_strings='self' .*a tuple of strings"),
        ({"stop_strings": (5,)}, r"stop_strings=\(5,\) .*a tuple of strings"),
        ({"criteria": len}, "criteria=<built-in function len> .*a tuple of functions"),
        ({"criteria": (5,)}, r"criteria=\(5,\) .*a tuple of functions"),
    ],
)
def test_what_is_no_tuple_of_strings_or_functions_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(BadParameter, match=says):
        StopParams(**given)


def test_lists_become_tuples() -> None:
    found = StopParams(stop_strings=["a"], criteria=[any])  # type: ignore[arg-type]
    assert (found.stop_strings, found.criteria) == (("a",), (any,))


def test_numpy_integers_are_accepted() -> None:
    params = StopParams(max_new_tokens=np.int64(3), eos_token_ids=(np.int32(5),))
    assert cut(params, [0, 5, 1])[0] == [0, 5]
    assert cut(params, [0, 1, 2, 3])[0] == [0, 1, 2]
    assert all(type(value) is int for value in (params.max_new_tokens, *params.eos_token_ids))


def test_a_least_length_beyond_the_length_limit_is_refused() -> None:
    check_lengths(4, 4)
    check_lengths(np.int64(0), 1)
    with pytest.raises(BadParameter, match=r"min_new_tokens=10 is not possible with max_new_tokens=4"):
        check_lengths(10, 4)
    with pytest.raises(BadParameter, match=r"min_new_tokens='3' is not possible"):
        check_lengths("3", 4)  # type: ignore[arg-type]


def test_room_is_the_number_of_tokens_still_allowed() -> None:
    stopper = Stopper(StopParams(max_new_tokens=10), PROMPT, longest=len(PROMPT) + 7)
    assert stopper.room == 7
    stopper.cut(verdict_of([0, 1, 2]))
    assert stopper.room == 4


# ------------------------------------------------------------------------------------- inside an accepted path


class Recording(ToyTarget):
    """Keeps the cache entries of each session as they are when it is closed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.caches: list[list[tuple[int, int]]] = []

    def open(self, *args: Any, **options: Any) -> Any:
        session = super().open(*args, **options)
        close = session.close

        def closing() -> None:
            self.caches += [session.cache] if session.cache else []
            close()

        session.close = closing  # type: ignore[method-assign]
        return session


TARGET = Recording(vocab_size=12, order=2, seed=3)
PARAMS = [GREEDY, SamplingParams(temperature=0.9, seed=1)]
TEXTS = [full_text(TARGET, params=params, stop=StopParams(max_new_tokens=40)) for params in PARAMS]


def inside_a_path(stop: StopParams, params: SamplingParams) -> Run:
    """Decodes with correct drafts of 5 tokens; the text and the cache entries must be those of plain decoding."""
    TARGET.caches.clear()
    drafter = Oracle(TEXTS[PARAMS.index(params)], depth=5)
    done = assert_same_text(TARGET, drafter, params=params, stop=stop, text=piece)
    assert len(done.steps) < len(done.tokens) or len(done.tokens) < 3
    assert TARGET.caches == [list(enumerate([*PROMPT, *done.tokens][:-1]))] * 2  # all committed tokens but the last
    return done


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("length", [1, 2, 5, 6, 7, 12])
def test_length_at_every_place_of_a_path(length: int, params: SamplingParams) -> None:
    done = inside_a_path(StopParams(max_new_tokens=length), params)
    assert (len(done.tokens), done.finish) == (length, ("length", None))


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("room", [1, 2, 5, 6, 7])
def test_the_context_ends_at_every_place_of_a_path(room: int, params: SamplingParams) -> None:
    target = ToyTarget(vocab_size=12, order=2, seed=3, context_length=len(PROMPT) + room)
    drafter = Oracle(TEXTS[PARAMS.index(params)], depth=5)
    done = assert_same_text(target, drafter, params=params, stop=StopParams(max_new_tokens=20))
    assert (len(done.tokens), done.finish) == (room, ("length", None))


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    for length in (len(PROMPT), len(PROMPT) - 1):
        with pytest.raises(ContextOverflow, match="shorten the prompt"):
            ToyTarget(context_length=length).open(PROMPT, GREEDY)


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("at", [0, 1, 4, 5, 6, 11])
@pytest.mark.parametrize("way", ["eos", "stop token", "criterion", "string"])
def test_a_stop_at_every_place_of_a_path(way: str, at: int, params: SamplingParams) -> None:
    text = TEXTS[PARAMS.index(params)][len(PROMPT) :]
    token, prefix = text[at], [*PROMPT, *text[: at + 1]]
    ways: dict[str, dict[str, Any]] = {
        "eos": {"eos_token_ids": (token,)},
        "stop token": {"stop_token_ids": (token,)},
        "criterion": {"criteria": (lambda tokens: list(tokens) == prefix,)},
        "string": {"stop_strings": ("".join(map(piece, text[max(at - 2, 0) : at + 1])) or "no",)},
    }
    done = inside_a_path(StopParams(max_new_tokens=20, **ways[way]), params)
    if way == "criterion":
        assert done.tokens == text[: at + 1]
    elif way != "string":
        assert done.tokens == text[: text.index(token) + 1]
    elif done.finish[0] == "stop":
        assert str(done.finish[1]) in "".join(map(piece, done.tokens))
        assert str(done.finish[1]) not in "".join(map(piece, done.tokens[:-1]))


def test_eos_is_put_off_by_min_new_tokens_on_every_node() -> None:
    text = run(TARGET).tokens
    params = SamplingParams(min_new_tokens=7, eos_token_ids=tuple(set(text[:3])))
    stop = StopParams(max_new_tokens=30, eos_token_ids=params.eos_token_ids)
    drafter = Oracle(full_text(TARGET, params=params, stop=stop), depth=5)
    done = assert_same_text(TARGET, drafter, params=params, stop=stop)
    assert len(done.tokens) >= 8
    assert not set(done.tokens[:7]) & set(params.eos_token_ids)
