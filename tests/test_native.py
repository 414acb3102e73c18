"""The compiled module does what the Python code does: state for state, and bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leapahead import native
from leapahead.core.filters import largest_at
from leapahead.drafters.sources.suffix_automaton import SuffixAutomaton

pytestmark = pytest.mark.skipif(not native.available, reason="installed without the compiled module")

few_tokens = st.lists(st.integers(0, 3), max_size=80)
many_tokens = st.lists(st.integers(0, 30), max_size=120)  # states with more followers than are searched one by one


def both(texts: list[list[int]]) -> tuple[SuffixAutomaton, native.module.SuffixAutomaton]:
    slow, fast = SuffixAutomaton(), native.module.SuffixAutomaton()
    for text in texts:
        slow.restart()
        fast.restart()
        slow.extend(text)
        for token in text[:3]:
            fast.add(token)
        fast.extend(text[3:])
    return slow, fast


@given(st.lists(few_tokens | many_tokens, max_size=3), few_tokens, st.integers(1, 9))
def test_suffix_automata_are_equal(texts: list[list[int]], query: list[int], limit: int) -> None:
    slow, fast = both(texts)
    assert (len(slow), slow.tokens, slow.end) == (len(fast), fast.tokens, fast.end)
    for state in range(len(slow)):
        assert slow.followers(state, limit) == fast.followers(state, limit)
        assert (slow.link(state), slow.length(state)) == (fast.link(state), fast.length(state))
        assert [slow.step(state, token) for token in range(5)] == [fast.step(state, token) for token in range(5)]
        assert slow.settled(state, limit) == fast.settled(state, limit)
    for max_links in (-1, 1, 2):
        at = 0, 0
        for token in query:
            assert slow.advance(*at, token, max_links) == fast.advance(*at, token, max_links)
            at = fast.advance(*at, token, max_links)


def test_an_automaton_refuses_states_that_it_does_not_have() -> None:
    automaton = native.module.SuffixAutomaton()
    with pytest.raises(IndexError, match="no such state"):
        automaton.followers(1, 4)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.lists(st.integers(0, 4000), max_size=40))
def test_the_words_of_the_noise_are_those_of_numpy(seed: int, position: int, tokens: list[int]) -> None:
    generator = np.random.Philox(key=np.array([seed, position], dtype=np.uint64))
    whole = generator.random_raw(2001).astype("<u8").view("<u4")
    found = native.module.words(seed, position, np.array(tokens, dtype=np.int64))
    assert found.tolist() == whole[tokens].tolist()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("size", "k"), [(1, 1), (8, 8), (63, 8), (65, 32), (200, 3), (4096, 8), (4096, 256), (50_000, 32)]
)
def test_the_greatest_numbers_are_those_of_numpy(
    size: int, k: int, dtype: type[np.floating[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = np.random.default_rng(size).normal(size=(5, size)).astype(dtype)
    found = largest_at(rows, k)
    for strided in (rows[::2], np.asfortranarray(rows)):
        step = 2 if len(strided) == 3 else 1
        assert largest_at(strided, k)[0].tolist() == found[0][::step].tolist()
    monkeypatch.setattr(native, "available", False)
    for mine, numpys in zip(found, largest_at(rows, k), strict=True):
        assert mine.dtype == numpys.dtype
        assert mine.tolist() == numpys.tolist()


def test_of_equal_numbers_the_first_are_the_greatest_and_nan_is_the_least() -> None:
    rows = np.full((3, 300), -np.inf, dtype=np.float32)
    rows[0, 200], rows[1, 3], rows[1, 250], rows[2] = 1.0, np.nan, 5.0, np.nan
    tokens, values = largest_at(rows, 4)
    assert tokens.tolist() == [[200, 0, 1, 2], [250, 0, 1, 2], [0, 1, 2, 3]]
    assert values.tolist() == [[1.0, *3 * [-np.inf]], [5.0, *3 * [-np.inf]], 4 * [-np.inf]]


@pytest.mark.parametrize("size", [40, 500, 4096])
@pytest.mark.parametrize("k", [1, 8, 32])
def test_the_greatest_of_many_equal_numbers_and_of_banned_tokens(size: int, k: int) -> None:
    generator = np.random.default_rng(size + k)
    rows = generator.integers(0, 5, (6, size)).astype(np.float32)
    rows[1:3][generator.random((2, size)) > 5 / size] = -np.inf  # a grammar allows few tokens
    rows[3] = 7.0
    rows[4] = np.sort(generator.normal(size=size))
    rows[5] = -rows[4]
    order = np.argsort(-rows, axis=1, kind="stable")[:, :k]
    tokens, values = largest_at(rows, k)
    assert tokens.tolist() == order.tolist()
    assert values.tolist() == np.take_along_axis(rows, order, axis=1).tolist()


@pytest.mark.parametrize("k", [1, 8, 40])
def test_recycling_keeps_log_probabilities(k: int) -> None:
    rng = np.random.default_rng(k)
    logits = -np.sort(rng.exponential(9.0, (3, k)), axis=1)
    logits[1, -1] -= 2000.0
    following = np.array([rng.permutation(k) for _ in logits])
    shared = native.module.Adjacency(100)
    native.module.Recycling(k, 4, shared).read_rows([5, 6, 7], following, logits)
    for row, context in enumerate([(5,), (5, 6), (6, 7)]):
        found = shared.get(context)
        assert found is not None
        (tokens, logp), length = found
        assert length == len(context)
        assert tokens.tolist() == following[row].tolist()
        expected = logits[row] - logits[row, 0]
        np.testing.assert_allclose(logp, expected - np.log(np.exp(expected).sum()), rtol=1e-6, atol=1e-7)


@pytest.mark.skipif(sys.platform != "linux", reason="tables are in memory of their own on Linux alone")
def test_tables_give_their_memory_back() -> None:
    def kilobytes() -> int:
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmSize"))
        return int(line.split()[1])

    def automata(length: int) -> list[native.module.SuffixAutomaton]:
        found = [native.module.SuffixAutomaton() for _ in range(3)]
        for automaton in found:
            automaton.extend(np.random.default_rng(length).integers(0, 500, length).tolist())
        return found

    kept = automata(2000)
    automata(100_000)  # what Python's own memory keeps
    before, most = kilobytes(), 0
    for length in (100, 3000, 100_000, 20_000, 100_000, 300):
        found = automata(length)
        most = max(most, kilobytes())
        del found
    assert most - before > 10_000
    assert kilobytes() - before < 4000
    assert [len(each) for each in kept] == [len(each) for each in automata(2000)]
