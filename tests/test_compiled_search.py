"""The compiled search proposes what the search in Python proposes: the same nodes, and P bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from helpers import GREEDY, run
from hypothesis import given, settings
from hypothesis import strategies as st

from leapahead import native
from leapahead.core.sampling import Sampler, SamplingParams
from leapahead.core.stop import StopParams
from leapahead.core.tree import Budget
from leapahead.drafters.auto import SOURCES
from leapahead.drafters.cache import DrafterCache
from leapahead.drafters.planned import Planned
from leapahead.drafters.sources.compiled import counterpart
from leapahead.drafters.sources.recycling import Adjacency
from leapahead.drafters.sources.suffix import Suffix
from leapahead.drafters.sources.token_table import TableSource
from leapahead.drafters.token_table import TokenTable
from leapahead.models.toy import ToyTarget
from leapahead.planner.acceptance import AcceptanceTable, priors
from leapahead.planner.compiled import CompiledSearch, CompiledTable, search_class
from leapahead.planner.draft import SequenceView
from leapahead.planner.sizing import Ahead, best_sizes
from leapahead.planner.source import Candidate, Source
from leapahead.planner.tree_search import TreeSearch

pytestmark = pytest.mark.skipif(not native.available, reason="installed without the compiled module")

VOCAB = 60
Nodes = list[tuple[list[int], list[int], tuple[str, ...], list[float]]]


class Mixed(Planned):
    """A drafter with the given sources, and a table of the toy target's vocabulary."""

    name = "mixed"

    def __init__(self, names: tuple[str, ...], **options: Any) -> None:
        super().__init__(**options)
        rng = np.random.default_rng(3)
        tokens = np.array([rng.permutation(VOCAB)[:12] for _ in range(VOCAB)], dtype=np.int32)
        logp = -np.sort(rng.random((VOCAB, 12)) * 6, axis=1).astype(np.float16)
        self.names, self.table = names, TokenTable(tokens, logp)

    def make_sources(self, sequence: SequenceView | None) -> list[Source]:
        return [TableSource(self.table) if name == "table" else SOURCES[name]() for name in self.names]


def texts(
    drafter: Callable[[], Planned], compiled: bool, temperature: float, seed: int, length: int = 60, **more: Any
) -> Nodes:
    """The proposals of several texts that share a drafter cache and an acceptance table."""
    table = (CompiledTable if compiled else AcceptanceTable)(*priors())
    target, cache = ToyTarget(VOCAB, sharpness=6.0), DrafterCache()
    found: Nodes = []
    for text in range(3):
        prompt = [random.Random(100 * seed + text).randrange(VOCAB) for _ in range(12)] * 2
        done = run(
            target,
            drafter(),
            prompt,
            SamplingParams(temperature=temperature, seed=seed + text, **more),
            StopParams(max_new_tokens=length),
            drafter_cache=cache,
            acceptance=table,
        )
        for step in done.steps:
            tree, expected = step.tree, step.proposal.expected
            numbers = [] if expected is None else expected.tolist()
            found.append((tree.token_list, tree.parent_list, step.proposal.sources, numbers))
    return found


class EvenAfterOdd:
    """A grammar of the toy's tokens: numbers rise or fall by an odd number."""

    def follow(self, tokens: list[int], vocab_size: int) -> Any:
        return self.State(tokens, vocab_size)

    class State:
        problem = ""

        def __init__(self, tokens: list[int], vocab_size: int) -> None:
            self.tokens, self.vocab_size = tokens, vocab_size

        def mask(self, length: int, path: Any) -> Any:
            last = [*self.tokens[:length], *path][-1]
            return (np.arange(self.vocab_size) - last) % 2 == 1

        def allows(self, length: int, path: Any, tokens: Any) -> list[bool]:
            return self.mask(length, path)[list(tokens)].tolist()

        def admitted(self, length: int, path: Any) -> int:
            good = [self.allows(length, path[:at], [token])[0] for at, token in enumerate(path)]
            return good.index(False) if False in good else len(good)

        def forced(self, length: int, path: Any) -> list[int]:
            last = [*self.tokens[:length], *path][-1]
            return [last + 1] if last % 5 == 0 else []

        def ended(self, length: int, path: Any) -> bool:
            return False


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_same_nodes_under_a_grammar(temperature: float) -> None:
    drafter: dict[str, Any] = {"names": ("grammar", "ngram", "suffix", "recycling", "siblings", "table"), "nodes": 9}
    here = texts(partial(Mixed, **drafter), False, temperature, 1, grammar=EvenAfterOdd())
    assert texts(partial(Mixed, **drafter), True, temperature, 1, grammar=EvenAfterOdd()) == here
    assert {source for _, _, sources, _ in here for source in sources[1:]} >= {"grammar", "suffix", "recycling"}
    for tokens, parents, _, _ in here:
        assert all((tokens[node] - tokens[parents[node]]) % 2 for node in range(1, len(tokens)))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(
    "names",
    [
        ("suffix",),
        ("suffix", "recycling", "siblings", "table"),
        ("ngram", "recycling"),  # the first is a source in Python, behind the adapter
    ],
)
def test_proposals_are_equal(names: tuple[str, ...], temperature: float) -> None:
    reference, compiled = (texts(partial(Mixed, names, nodes=12), kind, temperature, seed=4) for kind in (False, True))
    assert len(reference) > 60
    assert compiled == reference


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_same_nodes_beside_a_prediction(temperature: float) -> None:
    params, stop = SamplingParams(temperature=temperature, seed=2), StopParams(max_new_tokens=60)
    prompt = list(range(9)) * 2
    plain = run(ToyTarget(VOCAB, sharpness=6.0), None, prompt, params, stop).handle.tokens
    edited = [*plain[:20], 7, 7, *plain[23:40], *plain[45:]]
    found = []
    for kind in (AcceptanceTable, CompiledTable):
        drafter, table = Mixed(("prediction", "suffix", "recycling", "table"), nodes=8), kind(*priors())
        target = ToyTarget(VOCAB, sharpness=6.0)
        done = run(target, drafter, prompt, params, stop, prediction=edited, acceptance=table)
        found.append([(step.tree.token_list, step.tree.parent_list, step.proposal.sources) for step in done.steps])
        assert done.handle.tokens == plain
    assert found[0] == found[1]
    assert len(found[0]) < 30
    assert any("prediction" in sources for _, _, sources in found[0])


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(
    st.integers(0, 1000),
    st.sampled_from([0.0, 1.0]),
    st.integers(1, 20),
    st.booleans(),
    st.booleans(),
)
def test_proposals_are_equal_with_any_options(
    seed: int, temperature: float, nodes: int, seed_aware: bool, chain: bool
) -> None:
    def drafter() -> Mixed:
        names = ("suffix", "recycling", "siblings", "table")
        return Mixed(names, nodes=nodes, seed_aware=seed_aware, chain=chain)

    reference, compiled = (texts(drafter, kind, temperature, seed, length=24) for kind in (False, True))
    assert compiled == reference


@settings(deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.floats(0.1, 3.0), min_size=1, max_size=40),
    st.booleans(),
    st.lists(st.integers(1, 4), max_size=3),
    st.lists(st.integers(0, 4), min_size=4, max_size=4),
    st.booleans(),
    st.booleans(),
    st.floats(0.0, 0.5),
)
def test_sizes_are_equal(
    known: list[list[tuple[int, int]]],
    times: list[float],
    padded: bool,
    others: list[int],
    replay: list[int],
    replays: bool,
    branches: bool,
    per_node: float,
) -> None:
    """Searches whose only source is a suffix automaton, planned with any times."""
    searches: list[list[TreeSearch]] = [[], []]
    for repeats in known:
        text = [token for token, times_over in repeats for _ in range(times_over)] * 2
        view = SequenceView(Sampler(GREEDY, text, VOCAB))
        for kind, found in zip((AcceptanceTable, CompiledTable), searches, strict=True):
            source = Suffix() if kind is AcceptanceTable else counterpart(Suffix())
            source.begin(view)
            table = kind(*priors())
            found.append(search_class(table)(view, [source], table, Budget(6, 4, 3)))
    roots = len(known)
    sequences = roots + len(others)
    ahead = Ahead(
        [again if replays else 0 for again in replay[:roots]], sum(others), max(others, default=1), replays, branches
    )
    sizes = [1, 2, 3, 5, 8, 12, 16, 32]

    def seconds(rows: int) -> float:
        return times[rows] if rows < len(times) else float("inf")

    def drafting(nodes: int) -> float:
        return 0.01 + (0.03 if nodes else 0.0) + (0.02 + per_node * nodes)

    first = sequences * max(1, *ahead.replay) if padded and not branches else roots + sum(ahead.replay)
    if seconds(first + ahead.others) == float("inf"):
        return
    expected = best_sizes(searches[0], seconds, sizes, drafting, padded=padded, sequences=sequences, ahead=ahead)
    compiled = [search.compiled for search in searches[1] if isinstance(search, CompiledSearch)]
    found = native.module.best_sizes(
        compiled, times, sizes, ahead.replay, sequences, *ahead[1:], padded, 0.01, 0.03, 0.02, per_node
    )
    assert found == expected
    assert [search.expected for search in searches[1]] == [search.expected for search in searches[0]]
    assert [search.likeliest for search in searches[1]] == [search.likeliest for search in searches[0]]


keys = st.tuples(
    st.sampled_from(["a", "b"]), st.sampled_from(["greedy", "sampled"]), st.integers(0, 2), st.integers(0, 31)
)


@given(st.dictionaries(keys, st.floats(0.01, 0.99), max_size=6), st.lists(st.tuples(keys, st.booleans()), max_size=200))
def test_acceptance_tables_are_equal(
    priors: dict[tuple[Any, ...], float], trials: list[tuple[tuple[Any, ...], bool]]
) -> None:
    tables = AcceptanceTable(priors), CompiledTable(priors)
    for key, hit in trials * 3:
        seen = [(table.probability(key), table.estimate(key[:3]), table.estimate(key, 0.4)) for table in tables]
        assert seen[0] == seen[1]
        for table in tables:
            table.learn(key, hit)
    assert tables[0].rows() == tables[1].rows()
    assert tables[0].rows(longest=3) == tables[1].rows(longest=3)


def test_the_compiled_table_refuses_keys_that_it_cannot_hold() -> None:
    table = CompiledTable()
    for key in (("a", "often"), ("a", "greedy", 32), ("a", "greedy", -1), ("a", "greedy", *range(10)), ()):
        with pytest.raises(ValueError, match="key"):
            table.estimate(key)


def test_the_mixers_of_both_tables_report_the_same() -> None:
    _, mixer = priors()
    assert CompiledTable(*priors()).mixer.rows() == AcceptanceTable(*priors()).mixer.rows()
    assert all(values for *_, values in mixer)


contexts = st.lists(st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=2), st.integers(1, 3)), max_size=40)


@pytest.mark.slow
@given(contexts, contexts)
def test_adjacencies_are_equal(entries: list[tuple[list[int], int]], others: list[tuple[list[int], int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "available", False)
        reference, merged = Adjacency(capacity=7), Adjacency(capacity=7)
    compiled = Adjacency(capacity=7)
    assert reference.compiled is None
    assert compiled.compiled is not None
    rows = [(tuple(key), (np.arange(k, dtype=np.int32), -np.arange(k, dtype=np.float32))) for key, k in entries]
    merged.put((tuple(key), (np.arange(k, dtype=np.int32), -np.ones(k, dtype=np.float32))) for key, k in others)
    for adjacency in (reference, compiled):
        adjacency.put(rows)
    for round in range(2):
        for name, expected in reference.arrays().items():
            assert compiled.arrays()[name].tolist() == expected.tolist()
            assert compiled.arrays()[name].dtype == expected.dtype
        for key, _ in rows:
            assert repr(compiled.get((9, *key))) == repr(reference.get((9, *key)))
        if round == 0:
            for adjacency in (reference, compiled):
                adjacency.merge(merged.arrays())
    assert compiled.figures() == reference.figures()


@pytest.mark.parametrize("compiled", [True, False])
def test_tokens_that_the_model_excludes_are_not_kept(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their log-probabilities are not finite, and an adjacency with those would not be read from its file."""
    monkeypatch.setattr(native, "available", compiled)
    adjacency, other = Adjacency(), Adjacency()
    for key, logp in enumerate(([-1.0, -np.inf], [np.nan, np.nan], [-1.0, -2.0])):
        adjacency.put([((key,), (np.array([5, 6], dtype=np.int32), np.array(logp, dtype=np.float32)))])
    other.merge(adjacency.arrays())
    assert [other.arrays()[name].tolist() for name in ("tokens", "counts", "following")] == [[0, 2], [1, 2], [5, 5, 6]]


class Strange(SOURCES["ngram"]):  # type: ignore[misc]
    """A source whose features do not fit into a key, or whose candidates are none."""

    found: Any = (1, -0.1, (77,))

    def candidates(self, state: Any, limit: int) -> Any:
        return [self.found]


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ((1, -0.1, (77,)), "a feature of the source 'ngram' is not at most four integers from 0 to 31"),
        ((1, -0.1, (1.0,)), "a feature of the source 'ngram' is not at most four integers from 0 to 31"),
        ((1, None, ()), "a candidate of the source 'ngram' is not a token id with its log-probability"),
        ((2**40, -0.1, ()), "a candidate of the source 'ngram' is not a token id with its log-probability"),
        ((1, -0.1), "index out of range"),
    ],
)
def test_a_candidate_that_is_none_is_refused(found: Any, message: str) -> None:
    target, source = ToyTarget(VOCAB), Strange()
    drafter, source.found = Mixed(()), found
    drafter.make_sources = lambda sequence: [source]  # type: ignore[method-assign]
    with pytest.raises((ValueError, IndexError), match=message):
        run(target, drafter, acceptance=CompiledTable())


class Merging(Source):
    """A source during whose calls the adjacency that all texts share is merged, as by another thread."""

    name = "merging"

    def __init__(self, shared: Adjacency) -> None:
        self.shared, self.others = shared, list[Adjacency]()

    def root(self, sequence: SequenceView) -> int:
        return 0

    def follow(self, state: int, token: int) -> int:
        return 0

    def candidates(self, state: int, limit: int) -> list[Candidate]:
        self.shared.merge(Adjacency().arrays())
        self.others += [Adjacency() for _ in range(20)]  # which take the memory that the merge gave back
        for each in self.others:
            each.put([((0,), top_k([VOCAB + 1] * 8))])
        return []


def top_k(tokens: list[int]) -> tuple[Any, Any]:
    return np.array(tokens, dtype=np.int32), -np.ones(len(tokens), dtype=np.float32)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_candidates_are_valid_where_the_drafter_cache_changes_while_sources_are_asked(temperature: float) -> None:
    cache = DrafterCache()
    shared = cache.section("recycling", Adjacency)
    shared.put([((5,), top_k(list(range(10, 18))))])
    sequence = SequenceView(Sampler(SamplingParams(temperature=temperature), [1, 5], VOCAB), cache)
    recycling = counterpart(SOURCES["recycling"]())
    recycling.begin(sequence)
    search = CompiledSearch(sequence, [Merging(shared), recycling], CompiledTable(*priors()), Budget(8, 1, 8))
    search.take_all(8)
    assert sorted(search.proposal().tree.token_list[1:]) == list(range(10, 18))


def test_only_the_package_s_own_sources_have_counterparts() -> None:
    assert counterpart(SOURCES["suffix"]()).compiled is not None
    assert isinstance(counterpart(Strange()), Strange)
    longer = SOURCES["recycling"](longest=5)  # type: ignore[call-arg]
    assert counterpart(longer) is longer
