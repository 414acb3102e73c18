"""Exchanged drafter caches: merging is commutative, associative, idempotent and bounded, and takes only what fits."""

from __future__ import annotations

import io
import random
import zipfile
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leapahead import LLM, BadParameter, native
from leapahead.drafters import cache_file, cache_sections
from leapahead.drafters.cache import EXCHANGED, DrafterCache
from leapahead.drafters.cache_ledger import MAX_VALUE, Ledger
from leapahead.drafters.sources.past_texts import PastTexts
from leapahead.drafters.sources.recycling import Adjacency
from leapahead.models.toy import ToyTarget

VOCAB = 100
PROMPT = [1, 2, 3]
CAPACITY = 12  # bytes of keys

keys = st.binary(min_size=1, max_size=CAPACITY // 2)
values = st.binary(max_size=2)


@st.composite
def ledgers(draw: st.DrawFn) -> Ledger:
    """What a process has after it learned and received in turns, with more than there is room for."""
    ledger = Ledger(CAPACITY)
    for _ in range(draw(st.integers(0, 3))):
        live = dict(draw(st.lists(st.tuples(keys, values), max_size=4)))
        kept = [entry for entry in ledger.listed() if entry[0] not in live]
        ledger.learn([*kept, *live.items()])
        if draw(st.booleans()):
            other = Ledger(CAPACITY)
            other.learn([*dict(draw(st.lists(st.tuples(keys, values), max_size=4))).items()])
            ledger = ledger.join(other)
    return ledger


def state(ledger: Ledger) -> tuple[Any, ...]:
    """With the order of the entries, which a comparison of dictionaries leaves out."""
    return list(ledger.entries.items()), ledger.horizon, ledger.capacity


@settings(max_examples=150, deadline=None)
@given(ledgers(), ledgers(), ledgers())
def test_join_is_commutative_associative_idempotent_and_bounded(a: Ledger, b: Ledger, c: Ledger) -> None:
    joined = a.join(b).join(c)
    for one, two, three in permutations((a, b, c)):
        assert state(one.join(two).join(three)) == state(one.join(two.join(three))) == state(joined)
    for each in (a, b, c, joined):
        assert state(joined.join(each)) == state(each.join(joined)) == state(joined)
    assert sum(map(len, joined.entries)) <= CAPACITY
    assert all((stamp, key) > joined.horizon for key, (stamp, _) in joined.entries.items())
    assert state(Ledger.of(joined.arrays())) == state(joined)


@settings(max_examples=100, deadline=None)
@given(ledgers(), st.lists(st.tuples(keys, values), min_size=1, max_size=2, unique_by=lambda entry: entry[0]))
def test_what_is_learned_is_the_newest(ledger: Ledger, learned: list[tuple[bytes, bytes]]) -> None:
    others = [entry for entry in ledger.listed() if entry[0] not in dict(learned)]
    before = ledger.clock
    ledger.learn([*others, *learned])
    assert ledger.listed()[-len(learned) :] == learned or all(
        ledger.entries[key][1] == value for key, value in learned
    )  # what had been the newest already is not stamped again
    assert ledger.clock <= before + len(others) + len(learned)
    known = state(ledger)
    ledger.learn(ledger.listed())
    assert state(ledger) == known


def test_what_is_learned_is_not_dropped_for_what_has_no_room_any_more() -> None:
    old, again, new = (b"o" * 6, b""), (b"a", b""), (b"n" * 6, b"")
    ledger = Ledger(CAPACITY)
    ledger.learn([again, old])
    ledger.learn([old, again, new])
    assert ledger.listed() == [again, new]


def test_without_a_horizon_a_dropped_entry_would_be_forgotten() -> None:
    """The case that a plain bound gets wrong: y keeps out x, which is older and would fit, whatever the order."""
    a, y, x = Ledger(10), Ledger(10), Ledger(10)
    a.entries, y.entries, x.entries = {b"aaaaa": (3, b"")}, {b"yyyyyy": (2, b"")}, {b"x": (1, b"")}
    for one, two, three in permutations((a, y, x)):
        joined = one.join(two).join(three)
        assert list(joined.entries) == [b"aaaaa"]
        assert joined.horizon == (2, b"yyyyyy")


def test_of_equal_stamps_the_greater_value_counts_and_of_keys_the_greater_is_newer() -> None:
    one, two = Ledger(CAPACITY), Ledger(CAPACITY)
    one.learn([(b"a", b"1"), (b"b", b"1")])
    two.learn([(b"a", b"2"), (b"c", b"1")])
    assert one.join(two).listed() == [(b"a", b"2"), (b"b", b"1"), (b"c", b"1")]


def test_what_is_too_large_is_not_exchanged() -> None:
    ledger = Ledger(CAPACITY)
    ledger.learn([(b"k" * 7, b""), (b"k", b"v" * (MAX_VALUE + 1)), (b"", b""), (b"a", b"1")])
    assert ledger.listed() == [(b"a", b"1")]


# ------------------------------------------------------------------------------------------------- drafter caches


def made(vocab_size: int = VOCAB, tokenizer: str = "T") -> DrafterCache:
    cache = DrafterCache()
    cache.belong(tokenizer, vocab_size)
    return cache


def taught(texts: Sequence[Sequence[int]], contexts: Sequence[tuple[int, ...]] = ()) -> DrafterCache:
    """A cache with texts, and contexts each followed by its own sum."""
    cache = made()
    past, adjacency = cache.section("suffix", PastTexts), cache.section("recycling", Adjacency)
    for text in texts:
        past.add(text)
    for n, context in enumerate(contexts):
        row = np.array([sum(context) % VOCAB, n], np.int32), np.array([-0.5, -1.0 - n], np.float32)
        adjacency.put([(context, row)])
    return cache


def contents(cache: DrafterCache) -> dict[str, Any]:
    """The sections themselves, as drafters see them."""
    cache.activate()
    return {
        name: {key: array.tolist() for key, array in section.arrays().items()}
        for name, section in sorted(cache.sections.items())
    }


TEXTS = st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=4), max_size=3)
CONTEXTS = st.lists(st.tuples(st.integers(0, 3)) | st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=4)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(TEXTS, CONTEXTS), min_size=2, max_size=4), st.randoms(use_true_random=False))
def test_caches_merge_to_the_same_in_every_order(parts: list[Any], rng: random.Random) -> None:
    sent = [taught(*part).to_bytes() for part in parts]
    order = sent + rng.choices(sent, k=2)
    found = set()
    for _ in range(3):
        rng.shuffle(order)
        cache = made()
        for data in order:
            cache.merge_bytes(data)
        found.add((cache.to_bytes(), str(contents(cache)), cache.to_bytes()))
    assert len(found) == 1
    ((before, _, after),) = found
    assert before == after  # a section that drafters have begun to use teaches nothing by itself
    relay = made()  # has no sections, as the actor
    relay.merge_bytes(before)
    assert relay.to_bytes() == before


def test_two_replicas_converge_while_they_learn() -> None:
    one, two = taught([[1, 2, 3]], [(1,)]), taught([[3, 2, 1]], [(1,), (2, 3)])
    for token in range(4, 9):
        for here, there in ((one, two), (two, one)):
            here.section("suffix", PastTexts).add([token, 2, 3])
            there.merge_bytes(here.to_bytes())
            here.merge_bytes(there.to_bytes())
    assert one.to_bytes() == two.to_bytes()
    assert contents(one) == contents(two)
    texts = one.section("suffix", PastTexts).figures()
    assert texts["texts"] == 2 + 5
    sent = one.to_bytes()
    two.merge_bytes(sent)
    two.merge_bytes(sent)
    assert two.to_bytes() == sent


def test_a_text_that_is_used_again_is_kept_longer() -> None:
    """Recency goes through: what comes again is the newest on the other side."""
    cache, other = taught([[1, 2], [3, 4]]), made()
    other.merge_bytes(cache.to_bytes())
    cache.section("suffix", PastTexts).add([1, 2])
    other.merge_bytes(cache.to_bytes())
    assert other.section("suffix", PastTexts).arrays()["tokens"].tolist() == [3, 4, 1, 2]


def test_a_cache_is_bounded() -> None:
    """More texts and contexts than there is room for: the newest stay, everywhere the same."""
    rng, hub = np.random.default_rng(0), made()
    texts = [[int(token) for token in rng.integers(0, VOCAB, 30_000)] for _ in range(9)]
    caches = [taught(texts[n : n + 3], [(n, k) for k in range(50)]) for n in (0, 3, 6)]
    for cache in caches:
        hub.merge_bytes(cache.to_bytes())
    data = hub.to_bytes()
    assert len(data) < 1.1 * PastTexts.exchanged
    for cache in caches:
        cache.merge_bytes(data)
        past = cache.section("suffix", PastTexts)
        assert past.figures()["tokens"] <= past.capacity
        assert len(cache.section("recycling", Adjacency).arrays()["tokens"]) == 150
        assert cache.to_bytes() == data


def test_a_received_section_waits_for_who_asks_for_it() -> None:
    cache = made()
    cache.merge_bytes(taught([[1, 2, 3]]).to_bytes())
    assert cache.sections == {}
    assert cache.section("suffix", PastTexts).arrays()["tokens"].tolist() == [1, 2, 3]


def test_a_save_tells_what_it_cannot_save(tmp_path: Path) -> None:
    cache, file = DrafterCache(), tmp_path / "cache"
    cache.merge_bytes(taught([[1, 2, 3]]).to_bytes())
    with pytest.warns(UserWarning, match="has nothing of what was received of .*suffix; pass the cache to an LLM"):
        cache.save(file)
    cache.activate()
    cache.save(file)
    assert cache_sections.load(file).sections["suffix"].figures()["texts"] == 1


def test_sections_that_a_cache_in_use_has_received_are_saved(tmp_path: Path) -> None:
    """Also those that the drafters of its LLM do not ask for."""
    for number, chosen in enumerate((True, DrafterCache(), tmp_path / "new")):
        cache, file = cache_sections.given(chosen), tmp_path / str(number)
        assert cache is not None
        cache.merge_bytes(taught([[1, 2, 3]]).to_bytes())
        cache.save(file)  # a warning is an error here
        assert cache_sections.load(file).sections["suffix"].figures()["texts"] == 1


class Unshared(PastTexts):
    """A third party's section that knows nothing of exchanges."""

    exchanged: ClassVar[int] = 0


def test_a_section_that_is_not_exchanged_stays_as_it_is() -> None:
    cache, other = made(), made()
    cache.section("suffix", Unshared).add([1, 2])
    other.section("suffix", PastTexts).add([3, 4])
    cache.merge_bytes(other.to_bytes())
    assert cache.section("suffix", Unshared).arrays()["tokens"].tolist() == [1, 2]


@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.skipif(not native.available, reason=""))]
)
def test_contexts_are_replaced_as_a_whole(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Python as in the compiled module: of two rows for one context the later one counts on both sides."""
    monkeypatch.setattr(native, "available", compiled)
    one, two = taught([], [(1,), (1, 2)]), taught([], [(9,), (9, 9), (1,)])
    for here, there in ((one, two), (two, one)):
        there.merge_bytes(here.to_bytes())
    assert one.section("recycling", Adjacency).compiled is not None or not compiled
    for cache in (one, two):
        found = cache.section("recycling", Adjacency).get((5, 1))
        assert found is not None
        assert (found[0][0].tolist(), found[1]) == ([1, 2], 1)
    assert contents(one) == contents(two)
    assert one.to_bytes() == two.to_bytes()


def test_what_others_learned_raises_acceptance_and_keeps_the_text() -> None:
    """Right entries help, wrong ones cost time: with both the text is that of plain decoding."""
    plain = LLM(ToyTarget(), drafter="plain").generate(PROMPT, max_new_tokens=40).tokens
    teacher, fresh = LLM(ToyTarget(), drafter="suffix"), LLM(ToyTarget(), drafter="suffix")
    teacher.generate(PROMPT, max_new_tokens=40)
    pupil = LLM(ToyTarget(), drafter="suffix")
    assert teacher.drafter_cache is not None
    assert pupil.drafter_cache is not None
    pupil.drafter_cache.merge_bytes(teacher.drafter_cache.to_bytes())
    taught_text, alone = (each.generate(PROMPT, max_new_tokens=40) for each in (pupil, fresh))
    assert taught_text.tokens == alone.tokens == plain
    assert taught_text.stats.acceptance_length > 1.5 * alone.stats.acceptance_length
    wrong = DrafterCache()
    wrong.belong(teacher.drafter_cache.tokenizer, teacher.drafter_cache.vocab_size)
    rng = np.random.default_rng(0)
    for _ in range(20):
        start = int(rng.integers(len(plain) - 3))
        wrong.section("suffix", PastTexts).add([*plain[start : start + 3], *rng.integers(0, 12, 9).tolist()])
    misled = LLM(ToyTarget(), drafter="suffix")
    assert misled.drafter_cache is not None
    misled.drafter_cache.merge_bytes(wrong.to_bytes())
    found = misled.generate(PROMPT, max_new_tokens=40)
    assert found.tokens == plain
    assert found.stats.drafted > found.stats.accepted


# ------------------------------------------------------------------------------------------------------- bad input


def refusal(data: bytes, cache: DrafterCache | None = None) -> str:
    cache = made() if cache is None else cache
    with pytest.raises(BadParameter) as refused:
        cache.merge_bytes(data)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def packed(header: dict[str, Any], arrays: dict[str, Any]) -> bytes:
    stream = io.BytesIO()
    cache_file.pack(stream, header, arrays)
    return stream.getvalue()


def altered(name: str, array: Any) -> bytes:
    """What a cache with one text sends, with another array in it."""
    ledger = Ledger(40)
    ledger.learn([(np.array([1, 2], np.int32).tobytes(), b"")])
    arrays = {f"suffix/{key}": found for key, found in ledger.arrays().items()} | {f"suffix/{name}": np.array(array)}
    header = {"magic": EXCHANGED, "format": 1, "tokenizer": "T", "vocab_size": VOCAB, "sections": ["suffix"]}
    return packed(header, arrays)


def test_damaged_bytes_are_refused_or_give_the_same() -> None:
    sent = taught([[1, 2, 3]], [(1, 2)]).to_bytes()
    for length in range(0, len(sent), 31):
        assert "is not a drafter cache of leapahead, or it is damaged" in refusal(sent[:length])
    for index in range(0, len(sent), 17):
        cache = made()
        try:
            cache.merge_bytes(sent[:index] + bytes([sent[index] ^ 0xFF]) + sent[index + 1 :])
        except BadParameter:
            assert cache.sections == {}
        else:
            assert cache.to_bytes() == sent


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("stamps", np.array([0], np.int64)),
        ("stamps", np.array([2**62 + 1], np.int64)),
        ("stamps", np.array([1, 2], np.int64)),
        ("stamps", np.array([1.0])),
        ("key_lengths", np.array([-8], np.int64)),
        ("key_lengths", np.array([4], np.int64)),
        ("key_lengths", np.array([8, 0], np.int64)),
        ("key_lengths", np.array([[8]], np.int64)),
        ("value_lengths", np.array([3], np.int64)),
        ("bounds", np.array([4, 0], np.int64)),
        ("bounds", np.array([-40, 0], np.int64)),
        ("bounds", np.array([40], np.int64)),
        ("bounds", np.array([40, 7], np.int64)),
        ("horizon", np.array([1], np.int8)),
        ("keys", np.array(["a"])),
    ],
)
def test_arrays_that_no_cache_sends_are_refused(name: str, array: Any) -> None:
    assert "damaged" in refusal(altered(name, array))


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    key = np.frombuffer(np.array([1, VOCAB], np.int32).tobytes(), np.uint8)
    cache = taught([[5, 6]])
    before = contents(cache)
    message = refusal(altered("keys", key), cache)
    assert message.startswith("what was received is damaged in its section 'suffix' (tokens has a token outside the")
    assert contents(cache) == before


def test_nothing_received_is_executed() -> None:
    """An array of objects would be unpickled; it is refused before that."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive, archive.open("header.npy", "w") as member:
        np.lib.format.write_array(member, np.array([print], dtype=object), allow_pickle=True)
    assert "not a number type" in refusal(stream.getvalue())


def test_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = taught([[1, 2, 3]]).to_bytes()
    monkeypatch.setattr(cache_file, "MAX_BYTES", len(sent) - 1)
    assert "MB and a drafter cache takes at most" in refusal(sent)
    with pytest.raises(BadParameter, match="a drafter cache takes at most"):
        taught([[1] * 10_000]).to_bytes()


def test_another_vocabulary_and_a_file_are_refused(tmp_path: Any) -> None:
    cache = taught([[1, 2]])
    assert refusal(made(VOCAB, "U").to_bytes(), cache) == (
        "what was received belongs to the tokenizer 'U' and cannot be merged with a drafter cache of the tokenizer "
        "'T'; use another exchange for each vocabulary"
    )
    assert "a vocabulary of 99" in refusal(made(99).to_bytes(), cache)
    file = cache.save(tmp_path / "cache.npz")
    assert "its header is not that of an exchanged drafter cache" in refusal(file.read_bytes())
    file.write_bytes(cache.to_bytes())
    with pytest.raises(BadParameter, match="is not a drafter cache of leapahead"):
        DrafterCache.load(file)
    with pytest.raises(BadParameter, match="belongs to no vocabulary yet"):
        DrafterCache().to_bytes()
