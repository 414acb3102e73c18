"""The sources that read text: n-grams in hash chains and suffix automata, compared with brute force on the same text.

Work is counted, not timed; memory is traced.
"""

from __future__ import annotations

import random
import tracemalloc
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any

import numpy as np
import pytest
from helpers import GREEDY, PROMPT, run
from hypothesis import given
from hypothesis import strategies as st

from leapahead import Engine, Request
from leapahead.core.errors import BadParameter
from leapahead.core.sampling import Sampler
from leapahead.core.stop import StopParams
from leapahead.core.tree import TokenTree
from leapahead.core.verify import Verdict
from leapahead.drafters.cache import DrafterCache
from leapahead.drafters.sources import ngram
from leapahead.drafters.sources.ngram import LEVELS, MAX_WALKED, Ngrams
from leapahead.drafters.sources.past_texts import PastTexts
from leapahead.drafters.sources.siblings import ASIDE, OLDER, Siblings
from leapahead.drafters.sources.suffix import DRAFT_LINKS, LOCATE_TOKENS, Suffix
from leapahead.drafters.sources.suffix_automaton import SuffixAutomaton
from leapahead.models.base import Cost
from leapahead.models.choices import Choices
from leapahead.models.toy import ToyTarget
from leapahead.planner.draft import Forward, Proposal, SequenceView, Step
from research.curves.growth import growth

VOCAB = 300
few_tokens = st.lists(st.integers(0, 2), min_size=1, max_size=60)


def view_of(tokens: Sequence[int], drafter_cache: DrafterCache | None = None) -> SequenceView:
    return SequenceView(Sampler(GREEDY, list(tokens), VOCAB), drafter_cache)


def grow(source: Suffix, sequence: SequenceView, token: int) -> None:
    """A step commits a token."""
    sequence.tokens.append(token)
    source.read(sequence)


def words(seed: int, length: int, vocab: int = 40) -> list[int]:
    """Phrases of a small stock, one behind the other: text repeats itself in pieces."""
    rng = random.Random(seed)
    stock = [[rng.randrange(vocab) for _ in range(rng.randint(2, 9))] for _ in range(12)]
    text: list[int] = []
    while len(text) < length:
        text += rng.choice(stock)
    return text[:length]


def agreeing(text: Sequence[int], place: int, tail: Sequence[int]) -> int:
    """How many tokens before `place` are those at the end of `tail`."""
    length = 0
    while length < min(place, len(tail)) and text[place - 1 - length] == tail[-1 - length]:
        length += 1
    return length


# -------------------------------------------------------------------------------------------------------- n-grams


@given(few_tokens, st.integers(1, 10))
def test_ngrams_find_what_brute_force_finds(text: list[int], longest: int) -> None:
    source = Ngrams(longest)
    sequence = view_of(text)
    source.begin(sequence)
    state = source.root(sequence)
    assert state is not None
    tail = text[-longest:]
    matches = {place: agreeing(text, place, tail) for place in range(1, len(text))}
    assert list(state.positions) == sorted(state.positions, reverse=True)  # most recent first
    assert all(matches[place] == length >= 1 for place, length in state.positions)
    assert len(state.positions) <= MAX_WALKED
    # What the longest level with a match finds is all there is of it, but for those beyond the walk.
    level = next((n for n in LEVELS if n <= longest and max(matches.values(), default=0) >= n), None)
    if level is None:
        assert state.positions == ()
    else:
        latest = sorted((place for place, length in matches.items() if length >= level), reverse=True)
        assert set(latest[:MAX_WALKED]) <= dict(state.positions).keys()


@given(few_tokens, st.lists(st.integers(1, 7), max_size=8))
def test_a_text_that_grows_in_steps_is_the_text(text: list[int], sizes: list[int]) -> None:
    whole, steps = Ngrams(), Ngrams()
    sequence = view_of(text)
    whole.begin(sequence)
    at = 1
    for size in sizes:
        steps.index(text[:at])
        at = min(at + size, len(text))
    steps.index(text)
    assert steps.root(sequence) == whole.root(sequence)


def test_candidates_by_hand() -> None:
    #        0  1  2  3  4  5  6  7  8  9 10 11
    text = [7, 1, 2, 3, 9, 1, 2, 4, 8, 2, 5, 1, 2]
    source, sequence = Ngrams(), view_of(text)
    state = source.root(sequence)
    assert state is not None
    assert state.positions == ((10, 1), (7, 2), (3, 2))
    found = source.candidates(state, 8)
    assert [candidate.token for candidate in found] == [4, 3, 5]  # equal matches: see below; the shortest last
    assert sum(np.exp([candidate.logp for candidate in found])) == pytest.approx(1)
    features = {candidate.token: candidate.feature for candidate in found}
    assert features == {4: (2, 1, 0), 3: (2, 1, 0), 5: (1, 1, 1)}
    assert [candidate.token for candidate in source.candidates(state, 1)] == [4]


def test_longer_matches_and_many_and_recent_ones_are_likelier() -> None:
    def order(text: list[int]) -> list[int]:
        source, sequence = Ngrams(), view_of(text)
        state = source.root(sequence)
        assert state is not None
        return [candidate.token for candidate in source.candidates(state, 8)]

    assert order([1, 2, 3, 4, 50, 9, 4, 51, 1, 2, 3, 4]) == [50, 51]  # longer, though older
    assert order([4, 50, 9, 4, 50, 8, 4, 50, 7, 4, 50, 6, 4, 51, 5, 4])[0] == 50  # four against the latest
    assert order([4, 50, 9, 4, 50, 8, 4, 51, 7, 4])[0] == 51  # the latest against two


def test_places_move_on_with_a_drafted_token_and_chain_when_none_is_left() -> None:
    text = [1, 2, 3, 4, 20, 21, 22, 3, 4, 30, 31, 1, 2]
    source, sequence = Ngrams(), view_of(text)
    state = source.root(sequence)
    assert state is not None
    assert state.positions == ((2, 2),)
    one = source.follow(state, 3)
    assert one.positions == ((3, 3),)
    assert state.positions == ((2, 2),)  # a state is never changed
    # Token 30 was not behind 1 2 3 4: what is left is looked up by text and draft, 4 30.
    other = source.follow(source.follow(one, 4), 30)
    assert other.positions == ((10, 3),)  # 3 4 30
    assert [candidate.token for candidate in source.candidates(other, 4)] == [31]
    # A place at the end of the text has no next token; the draft goes on from an older place.
    period = Ngrams()
    state = period.root(view_of([5, 6, 7] * 4))
    for depth in range(40):
        assert state is not None
        (candidate,) = period.candidates(state, 4)
        assert candidate.token == (5, 6, 7)[depth % 3]
        state = period.follow(state, candidate.token)
    assert period.follow(state, 99).positions == ()  # type: ignore[arg-type]
    assert period.candidates(period.follow(state, 99), 4) == []  # type: ignore[arg-type]


class CountedArray(array):  # type: ignore[type-arg]
    """Counts how often it is read."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("text", [[3] * 10_000, [1, 2] * 5_000, words(0, 10_000)], ids=["one", "two", "words"])
def test_a_look_up_visits_few_positions_whatever_the_text(text: list[int]) -> None:
    source, sequence = Ngrams(), view_of(text)
    source.begin(sequence)
    for chains in source.chains:
        chains.earlier = CountedArray("i", chains.earlier)
    state = source.root(sequence)
    assert state is not None
    assert 1 <= len(state.positions) <= MAX_WALKED
    assert sum(chains.earlier.reads for chains in source.chains) <= MAX_WALKED  # type: ignore[attr-defined]


def test_indexing_is_linear() -> None:
    """One entry a token and level, whatever the text; chains are as long as the text at most."""
    for text in ([3] * 5_000, words(1, 5_000)):
        source = Ngrams()
        for size in (1, 2, 3, 1_000, 1_001, 5_000):
            source.index(text[:size])
            assert [len(chains.earlier) for chains in source.chains] == [size] * len(LEVELS)
        assert all(0 <= earlier < at or at == 0 for c in source.chains for at, earlier in enumerate(c.earlier))
        assert source.figures()["tokens"] == 5_000
    assert len(Ngrams(3).chains) == 2
    with pytest.raises(BadParameter, match="longest=0 is not possible"):
        Ngrams(0)


def index_ngrams(text: list[int]) -> Ngrams:
    source = Ngrams()
    source.index(text)
    return source


def index_suffixes(text: list[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for token in text:
        automaton.add(token)
    return automaton


@pytest.mark.slow
@pytest.mark.parametrize("build", [index_ngrams, index_suffixes])
def test_memory_is_linear(build: Callable[[list[int]], object]) -> None:
    """At most 400 bytes a token, on random tokens, which share least."""
    rng = random.Random(0)
    text = [rng.randrange(20_000) for _ in range(20_000)]
    tracemalloc.start()
    kept = build(text)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept is not None
    assert 10 < held / len(text) < 400


def test_two_ngrams_with_one_key_do_not_match(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "MASK", 3)
    text = words(2, 300)
    source, sequence = Ngrams(), view_of(text)
    state = source.root(sequence)
    assert state is not None
    assert all(agreeing(text, place, text[-8:]) == length >= 1 for place, length in state.positions)


# --------------------------------------------------------------------------------------------- the suffix automaton


def occurrences(texts: Sequence[Sequence[int]], ending: Sequence[int]) -> list[int | None]:
    """What follows each place where `ending` stands; None behind the last token of a text."""
    n = len(ending)
    return [
        text[at + n] if at + n < len(text) else None
        for text in texts
        for at in range(len(text) - n + 1)
        if list(text[at : at + n]) == list(ending)
    ]


def longest_in(texts: Sequence[Sequence[int]], tokens: Sequence[int]) -> int:
    """Of the endings of `tokens`, the longest that stands in a text."""
    return next((n for n in range(len(tokens), 0, -1) if occurrences(texts, tokens[-n:])), 0)


@given(few_tokens)
def test_the_own_place_is_the_longest_earlier_one(text: list[int]) -> None:
    source = Suffix()
    sequence = view_of(text[:1])
    source.begin(sequence)
    for end in range(1, len(text) + 1):
        ((automaton, place, length),) = source.root(sequence)
        before = text[:end]
        expected = longest_in([before[:-1]], before)
        assert length == expected
        if expected:
            followed = {token for token in occurrences([before], before[-expected:]) if token is not None}
            assert {token for token, _ in automaton.followers(place, 99)} == followed
        if end < len(text):
            grow(source, sequence, text[end])


@given(st.lists(few_tokens, min_size=1, max_size=5), st.lists(st.integers(0, 3), max_size=40))
def test_places_in_past_texts_are_those_of_brute_force(texts: list[list[int]], query: list[int]) -> None:
    """No match crosses from one text into another, and texts that begin alike share their states."""
    automaton = SuffixAutomaton()
    for text in texts:
        automaton.restart()
        for token in text:
            automaton.add(token)
    assert len(automaton) <= 2 * sum(map(len, texts)) + 1
    place, length = 0, 0
    for end in range(1, len(query) + 1):
        place, length = automaton.advance(place, length, query[end - 1])
        assert length == longest_in(texts, query[:end])
        if length:
            seen = occurrences(texts, query[end - length : end])
            assert {token for token, _ in automaton.followers(place, 99)} == {
                token for token in seen if token is not None
            }


@given(few_tokens, few_tokens, st.lists(st.integers(0, 2), min_size=1, max_size=20))
def test_a_place_stays_right_while_the_automaton_grows(first: list[int], then: list[int], query: list[int]) -> None:
    """A state may be split after it was found: `settled` gives the new one, and the length is never too great."""
    automaton = SuffixAutomaton()
    for token in first:
        automaton.add(token)
    place, length = 0, 0
    added: list[int] = []
    for end, token in enumerate(query, start=1):
        place, length = automaton.advance(place, length, token)
        whole = [first + added]
        assert length <= longest_in(whole, query[:end])
        assert occurrences(whole, query[end - length : end]) or not length
        if then:
            added.append(then.pop())
            automaton.add(added[-1])
        place = automaton.settled(place, length)
        if length:
            seen = {t for t in occurrences([first + added], query[end - length : end]) if t is not None}
            assert {t for t, _ in automaton.followers(place, 99)} == seen


def test_counts_are_those_of_the_text() -> None:
    text = [1, 2, 5, 1, 2, 6, 1, 2, 5, 3, 1, 2]
    source, sequence = Suffix(), view_of(text)
    source.begin(sequence)
    state = source.root(sequence)
    assert [length for _, _, length in state] == [2]
    automaton, place, _ = state[0]
    assert dict(automaton.followers(place, 99)) == {5: 2, 6: 1}
    found = source.candidates(state, 8)
    assert [candidate.token for candidate in found][:2] == [5, 6]
    assert found[0].feature == (1, 2, 1)
    assert found[1].feature == (1, 1, 1)
    assert sum(np.exp([candidate.logp for candidate in found])) == pytest.approx(1)
    below = source.follow(state, 6)
    assert source.candidates(below, 4)[0].token == 1
    assert source.candidates(below, 4)[0].feature[0] == 2  # 1 2 6: a match of three


class CountedAutomaton(SuffixAutomaton):
    """Counts the transitions that are asked for."""

    asked = 0

    def step(self, state: int, token: int) -> int | None:
        self.asked += 1
        return super().step(state, token)

    def followers(self, state: int, limit: int) -> list[tuple[int, int]]:
        self.asked += 1
        return super().followers(state, limit)


@pytest.mark.parametrize("text", [[3] * 4_000, words(3, 4_000)], ids=["one", "words"])
def test_the_work_of_a_suffix_automaton_is_linear(text: list[int]) -> None:
    source, sequence = Suffix(), view_of(text)
    source.automaton = automaton = CountedAutomaton()
    source.begin(sequence)
    assert automaton.asked < 12 * len(text)
    state = source.root(sequence)
    automaton.asked = 0
    source.candidates(state, 8)
    assert automaton.asked <= 3
    automaton.asked = 0
    source.follow(state, 200)  # which never occurred: few links are followed, not thousands
    assert automaton.asked <= DRAFT_LINKS + 1


def test_a_state_of_many_continuations_is_not_read_whole() -> None:
    text = [token for other in range(1, 200) for token in (0, other)] + [0]
    source, sequence = Suffix(), view_of(text)
    source.begin(sequence)
    found = source.candidates(source.root(sequence), 8)
    assert len(found) == 8
    assert {1, 199} <= {candidate.token for candidate in found}  # the first seen and the last seen


# ------------------------------------------------------------------------------------------------------- past texts


def shared_lengths(source: Suffix, sequence: SequenceView) -> int:
    return max(length for _, _, length in source.root(sequence)[1:])


@pytest.mark.slow
@given(st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=30), max_size=6), st.data())
def test_own_and_shared_places_are_those_of_brute_force(past: list[list[int]], data: st.DataObject) -> None:
    cache = DrafterCache()
    past_texts = cache.section("suffix", lambda: PastTexts(capacity=400))
    for text in past:
        past_texts.add(text)
    text = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=25))
    source, sequence = Suffix(), view_of(text[:1], cache)
    source.begin(sequence)
    for end in range(1, len(text) + 1):
        state = source.root(sequence)
        own = longest_in([text[: end - 1]], text[:end])
        shared = longest_in(past, text[:end])
        assert state[0][2] == own
        assert max(length for _, _, length in state[1:]) == shared
        longest = max(own, shared)
        followed = Counter(t for t in occurrences([*past, text[:end]], text[end - longest : end]) if t is not None)
        found = source.candidates(state, 99)
        if followed and longest:
            mine = set(occurrences([text[:end]], text[end - longest : end]))
            top = [candidate for candidate in found if candidate.token in followed]
            assert {candidate.token for candidate in top} == set(followed)
            for candidate in top:
                assert candidate.feature[2] == int(candidate.token in mine)
        if end < len(text):
            grow(source, sequence, text[end])


def test_no_match_crosses_the_border_of_two_texts() -> None:
    cache = DrafterCache()
    past_texts = cache.section("suffix", PastTexts)
    past_texts.add([1, 2, 3])
    past_texts.add([4, 5, 6])
    source, sequence = Suffix(), view_of([9, 2, 3], cache)
    source.begin(sequence)
    assert shared_lengths(source, sequence) == 2
    assert source.candidates(source.root(sequence), 8) == []  # nothing stood behind 2 3
    grow(source, sequence, 4)
    assert shared_lengths(source, sequence) == 1
    assert [candidate.token for candidate in source.candidates(source.root(sequence), 8)] == [5]


def test_the_bound_holds_whatever_comes() -> None:
    past_texts = PastTexts(capacity=2_000)
    rng = random.Random(0)
    for index in range(3_000):
        past_texts.add([rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))])
        if index % 100 == 0:
            assert sum(len(volume.automaton) for volume in past_texts.volumes) <= 2 * 2_000 + 2
    figures = past_texts.figures()
    assert 1_000 < figures["tokens"] <= 2_000
    held = past_texts.arrays()
    assert held["tokens"].nbytes <= 4 * 2_000
    assert figures["texts"] == len(held["lengths"])
    # The same prompt many times is one text, and drives out no other.
    same = [rng.randrange(VOCAB) for _ in range(50)]
    before = past_texts.figures()["texts"]
    for _ in range(500):
        past_texts.add(same)
    assert past_texts.figures()["texts"] <= before + 1
    # A text that is too long enters with its end.
    past_texts.add(long := list(range(5_000)))
    assert past_texts.arrays()["tokens"][-1_000:].tolist() == long[-1_000:]
    assert past_texts.figures()["tokens"] <= 2_000
    past_texts.add([5])  # one token has no continuation
    assert past_texts.arrays()["lengths"][-1] == 1_000
    with pytest.raises(BadParameter, match="capacity=3"):
        PastTexts(3)


def texts_of(past_texts: PastTexts) -> list[list[int]]:
    arrays = past_texts.arrays()
    assert arrays["tokens"].dtype == np.int32
    assert arrays["lengths"].dtype == np.int64
    return [text.tolist() for text in np.split(arrays["tokens"], np.cumsum(arrays["lengths"])[:-1]) if len(text)]


def test_arrays_and_merge() -> None:
    first, second = PastTexts(40), PastTexts(40)
    assert texts_of(first) == []
    first.merge(second.arrays())
    assert texts_of(first) == []
    for text in ([1, 2, 3], [4, 5], [6, 7, 8]):
        first.add(text)
    second.add([9, 10, 11])
    second.add([4, 5])
    second.merge(first.arrays())
    assert texts_of(second) == [[1, 2, 3], [6, 7, 8], [9, 10, 11], [4, 5]]  # the other's first, each once
    again = PastTexts(40)
    again.merge(second.arrays())
    assert texts_of(again) == texts_of(second)
    small = PastTexts(12)
    small.add([20, 21, 22])
    small.merge(second.arrays())
    kept = texts_of(small)
    assert kept[-1] == [20, 21, 22]  # its own are the youngest
    assert kept == [*texts_of(second), [20, 21, 22]][-len(kept) :]  # and the oldest left
    assert 6 < small.figures()["tokens"] <= 12


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "are the arrays tokens and lengths, not none"),
        ({"tokens": np.zeros(2, np.int32)}, "are the arrays tokens and lengths, not tokens"),
        ({"tokens": np.zeros(2, np.int64), "lengths": np.array([2])}, "tokens of past texts is int64"),
        ({"tokens": np.zeros((1, 2), np.int32), "lengths": np.array([2])}, "with 2 dimensions"),
        ({"tokens": np.zeros(2, np.int32), "lengths": np.array([2.0])}, "lengths of past texts is float64"),
        ({"tokens": np.zeros(2, np.int32), "lengths": np.array([2, 1])}, "add up to 3, but there are 2 tokens"),
        ({"tokens": np.zeros(2, np.int32), "lengths": np.array([3, -1])}, "a past text of -1 tokens"),
        ({"tokens": np.array([1, -1], np.int32), "lengths": np.array([2])}, "holds -1, which is not a token id"),
    ],
)
def test_merge_refuses_what_is_not_of_its_kind(arrays: dict[str, Any], message: str) -> None:
    past_texts = PastTexts()
    past_texts.add([1, 2, 3])
    with pytest.raises(ValueError, match=message):
        past_texts.merge(arrays)
    assert texts_of(past_texts) == [[1, 2, 3]]


@pytest.mark.slow
def test_places_stay_right_when_volumes_change() -> None:
    """Requests that finish meanwhile turn the volumes over, more than once, and so does a merge."""
    cache = DrafterCache()
    past_texts = cache.section("suffix", lambda: PastTexts(capacity=300))
    text = words(5, 400)
    source, sequence = Suffix(), view_of(text[:1], cache)
    source.begin(sequence)
    seen, checked = set(past_texts.volumes), 0
    for end in range(2, len(text) + 1):
        grow(source, sequence, text[end - 1])
        expected = longest_in(texts_of(past_texts), text[:end])
        found = shared_lengths(source, sequence)
        assert min(expected, LOCATE_TOKENS) <= found <= expected
        checked += expected > 3
        if end % 5 == 0:
            past_texts.add(words(5, end)[-37:])
            seen |= set(past_texts.volumes)
        if end == 200:
            past_texts.merge(PastTexts(50).arrays())
    assert checked > 100
    assert len(seen) > 5


def test_a_text_that_enters_meanwhile_is_found() -> None:
    """Not only from its first token on that comes after it entered."""
    cache = DrafterCache()
    past_texts = cache.section("suffix", PastTexts)
    past_texts.add([9, 12, 200, 201])
    source, sequence = Suffix(), view_of([10, 11, 12], cache)
    source.begin(sequence)
    assert shared_lengths(source, sequence) == 1
    past_texts.add([10, 11, 12, 13, 14])
    grow(source, sequence, 13)
    assert shared_lengths(source, sequence) == 4
    assert [candidate.token for candidate in source.candidates(source.root(sequence), 8)] == [14]


@pytest.mark.slow
def test_texts_enter_while_others_are_read() -> None:
    cache = DrafterCache()
    past_texts = cache.section("suffix", lambda: PastTexts(capacity=3_000))
    failures: list[BaseException] = []

    def read(seed: int) -> None:
        try:
            text = words(seed % 3, 1_500)
            source, sequence = Suffix(), view_of(text[:1], cache)
            source.begin(sequence)
            for token in text[1:]:
                grow(source, sequence, token)
                state = source.root(sequence)
                for candidate in source.candidates(state, 4):
                    source.candidates(source.follow(state, candidate.token), 4)
            source.finish(sequence)
        except BaseException as error:
            failures.append(error)

    threads = [Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for seed in range(60):
        past_texts.add(words(seed % 3, 200 + seed))
    for thread in threads:
        thread.join()
    assert failures == []
    assert past_texts.figures()["tokens"] <= 3_000


# --------------------------------------------------------------------------------------------------------- decoding


def test_a_second_request_is_drafted_from_the_first() -> None:
    target = ToyTarget(vocab_size=VOCAB, order=3)  # its text does not repeat itself soon
    cache, stop = DrafterCache(), StopParams(max_new_tokens=60)
    plain = run(target, None, stop=stop).tokens
    first, second = (run(target, "suffix", stop=stop, drafter_cache=cache) for _ in range(2))
    assert first.tokens == second.tokens == plain
    assert first.stats.acceptance_length < 1.5
    assert second.stats.acceptance_length > 3 * first.stats.acceptance_length
    assert texts_of(cache.section("suffix", PastTexts)) == [[*PROMPT, *plain]]
    alone = run(target, "suffix", stop=stop)
    assert alone.tokens == plain
    assert "shared" not in alone.stats.drafter["suffix"]


def test_a_cancelled_request_teaches_the_next() -> None:
    target = ToyTarget(vocab_size=VOCAB, order=3)
    cache, engine = DrafterCache(), Engine(target)
    drafter = engine.drafter("suffix")
    handle = engine.submit(Request(PROMPT, drafter, stop=StopParams(max_new_tokens=60), drafter_cache=cache))
    while len(handle.tokens) < 30:
        engine.step()
    engine.cancel(handle)
    engine.run([handle])
    (text,) = texts_of(cache.section("suffix", PastTexts))
    assert text == [*PROMPT, *handle.tokens]


# --------------------------------------------------------------------------------------- the figure of their growth


@pytest.mark.slow
def test_growth_with_a_clock_of_its_own() -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.25
        return now

    found = growth(sizes=(1_000, 200, 2_000), rounds=2, prefill=0.01, clock=clock)
    assert {row["index"] for row in found["rows"]} == {"n-grams", "suffix automaton", "lookahead pool"}
    assert [row["tokens"] for row in found["rows"]][:3] == [200, 1_000, 2_000]
    for row in found["rows"]:
        assert row["seconds"] == 0.25
        assert row["of_prefill"] == pytest.approx(0.25 / (0.01 * row["tokens"]))
        assert row["bytes"] > row["tokens"]
    for linear in found["linear"]:
        assert (linear["from"], linear["to"]) == (200, 2_000)
        assert linear["ratio"] == pytest.approx(0.1)  # the time of this clock does not grow with the text
    with pytest.raises(BadParameter, match="3 tokens"):
        growth([1, 2, 3], sizes=(10,))


# --------------------------------------------------------------------------------------------------------- siblings


def committed(sequence: SequenceView, tree: TokenTree, rows: dict[int, int], path: list[int], bonus: int) -> Step:
    """A step over `tree`: after node i the token rows[i] is all but certain; the path and a bonus token are kept."""
    logits = np.zeros((len(tree), VOCAB))
    for node, token in rows.items():
        logits[node, token] = 30.0
    position = len(sequence.tokens) - 1
    choices = Choices(logits, tree, Sampler(GREEDY, list(sequence.tokens), VOCAB))
    tokens = (*(tree.token_list[node] for node in path[1:]), bonus)
    sequence.tokens.extend(tokens)
    verdict = Verdict(tuple(path), tokens, len(path) - 1)
    return Step(Proposal(tree), choices, verdict, position, Forward(0.0, Cost(len(tree), 1, position)))


def test_rows_of_rejected_nodes_are_candidates_at_their_positions() -> None:
    r"""The text is 1 2 | 3 9; drafted were

    2 ─ 3 ─ 4 ─ 5      after the last token of the path: their rows have the full weight
      └ 6 ─ 7          beside the path
    """
    sequence, source = view_of([1, 2]), Siblings()
    source.begin(sequence)
    assert source.candidates(source.root(sequence), 8) == []
    tree = TokenTree([2, 3, 4, 5, 6, 7], [-1, 0, 1, 2, 0, 4])
    source.observe(sequence, committed(sequence, tree, {0: 3, 1: 9, 2: 50, 3: 51, 4: 60, 5: 61}, [0, 1], bonus=9))
    state = source.root(sequence)
    assert state == 4
    found = source.candidates(state, 2)  # the rows of 4 and of 7, both for position 4
    assert [each.token for each in found] == [50, 61]
    assert np.exp([each.logp for each in found]) == pytest.approx([1 / (1 + ASIDE), ASIDE / (1 + ASIDE)], rel=1e-4)
    below = source.follow(state, 77)  # whatever is drafted there
    assert [each.token for each in source.candidates(below, 1)] == [51]
    assert source.candidates(source.follow(below, 77), 1) == []


def test_older_rows_count_less_and_rows_of_the_past_are_dropped() -> None:
    sequence, source = view_of([1, 2]), Siblings()
    source.begin(sequence)
    chain = TokenTree.chain(2, [3, 4, 5, 6])
    source.observe(sequence, committed(sequence, chain, {1: 20, 2: 21, 3: 22, 4: 23}, [0], bonus=9))
    assert source.figures() == {"positions": 4}
    source.observe(sequence, committed(sequence, TokenTree.chain(9, [8]), {1: 30}, [0], bonus=7))
    assert source.figures() == {"positions": 3}
    (new, old) = source.candidates(source.root(sequence), 2)
    assert (new.token, old.token) == (30, 21)
    assert new.logp - old.logp == pytest.approx(-np.log(OLDER), rel=1e-4)
    source.observe(sequence, committed(sequence, TokenTree.root(7), {}, [0], bonus=7))
    assert source.figures() == {"positions": 2}
