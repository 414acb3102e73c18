"""The tree search, its acceptance estimates and its mixer, compiled, with the interfaces of those in Python.

    AcceptanceTable  <──  CompiledTable         what an engine has decides how its drafters search
    TreeSearch       <──  CompiledSearch        its sources: compiled ones, and Python ones behind an adapter

Both give the same trees and the same numbers, which the tests compare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import ref

import numpy as np

from leapahead import native
from leapahead.core.tree import Budget, TokenTree
from leapahead.planner.acceptance import UNKNOWN, AcceptanceTable, Key
from leapahead.planner.draft import Proposal, SequenceView, Step
from leapahead.planner.mixer import Mixer, Row
from leapahead.planner.sizing import StepPlan, best_sizes
from leapahead.planner.source import Source
from leapahead.planner.tree_search import TreeSearch

MODES = {"greedy": 0, "sampled": 1, "unaware": 2}


def acceptance_table() -> AcceptanceTable:
    """A table that begins with the measured priors: a compiled one, where this installation has the module."""
    return CompiledTable.with_priors() if native.available else AcceptanceTable.with_priors()


class CompiledMixer(Mixer):
    """The parameters of a compiled table, which the compiled search reads and changes."""

    def __init__(self, table: native.module.AcceptanceTable) -> None:
        super().__init__()
        self._table = table

    def rows(self) -> list[Row]:
        return [
            (mode, place, source, [[round(value, 4) for value in values] for values in found])
            for mode, place, source, found in sorted(self._table.mixer_rows())
        ]


class CompiledTable(AcceptanceTable):
    """See `AcceptanceTable`. After its source and its mode, a key has numbers from 0 to 31.

    Attributes:
        table: of the compiled module.
    """

    def __init__(self, priors: Mapping[Key, float] | None = None, mixer: Iterable[Row] = ()) -> None:
        super().__init__(priors)
        self.table = native.module.AcceptanceTable()
        self.mixer = CompiledMixer(self.table)
        for key, estimate in self.priors.items():
            self.table.set_prior(key, estimate)
        for row in mixer:
            self.table.set_mixer(*row)

    def probability(self, key: Key) -> float:
        return self.table.probability(key)

    def estimate(self, key: Key, unknown: float = UNKNOWN) -> float:
        return self.table.estimate(key, unknown)

    def learn(self, key: Key, hit: bool) -> None:
        self.table.learn(key, hit)

    def rows(self, longest: int = 99) -> list[dict[str, Any]]:
        return [
            {"key": list(key), "hits": round(hits, 2), "trials": round(trials, 2), "p": round(p, 4)}
            for key, hits, trials, p in sorted(self.table.rows(longest), key=lambda row: repr(row[0]))
        ]


class CompiledSearch(TreeSearch):
    """See `TreeSearch`.

    Sources of which the compiled module has no counterpart take part through an adapter, which calls their methods. The
    correction that it is given is where its own begins.

    Attributes:
        compiled: the search of the compiled module.
    """

    acceptance: CompiledTable

    def begin(self, budget: Budget) -> None:
        self.budget, sequence = budget, self.sequence
        if not hasattr(self, "compiled"):
            params = sequence.params
            self._adapters = [_adapter(source, sequence) for source in self.sources]
            self._uncompiled = [source for source in self.sources if source.compiled is None]
            self.compiled = native.module.Search(
                self._adapters,
                self.acceptance.table,
                MODES[self.mode],
                params.seed,
                params.temperature,
                self.correction.factor,
                _filter(self) if sequence.grammar is not None else None,
            )
        self.compiled.begin(sequence.tokens, budget.nodes, budget.depth, budget.leaves)

    def __len__(self) -> int:
        return len(self.compiled)

    @property
    def bound(self) -> float:
        return self.compiled.bound

    @property
    def next(self) -> float:
        return self.compiled.next

    @property
    def likeliest(self) -> int | None:
        return self.compiled.likeliest

    @property
    def leaves(self) -> int:
        return self.compiled.leaves

    @property
    def deepest(self) -> int:
        return self.compiled.deepest

    @property
    def expected(self) -> list[float]:  # type: ignore[override]
        return self.compiled.expected

    def take(self) -> bool:
        return self.compiled.take()

    def take_all(self, nodes: int) -> int:
        return self.compiled.take_all(nodes)

    def states(self, which: int) -> list[tuple[Any, float, float]]:
        adapter = self._adapters[which]
        found = self.compiled.states(which)
        if isinstance(adapter, native.module.PythonSource):
            return [(adapter.state(state), chance, known) for state, chance, known in found]
        return list(found)

    def proposal(self, nodes: int | None = None) -> Proposal:
        tokens, parents, depths, sources, expected = self.compiled.tree(len(self.compiled) if nodes is None else nodes)
        return Proposal(TokenTree.of_lists(tokens, parents, depths), sources, np.frombuffer(expected))

    def observe(self, step: Step) -> None:
        sequence, tree, verdict = self.sequence, step.proposal.tree, step.verdict
        for source in self._uncompiled:
            source.observe(sequence, step)
        self.compiled.observe(
            sequence.tokens,
            step.position,
            tree.token_list,
            tree.parent_list,
            verdict.path,
            verdict.tokens,
            step.choices.top_k,
        )


def _filter(search: TreeSearch) -> Callable[[list[int], list[int]], list[bool]]:
    """`TreeSearch.allowed` for the compiled search, which is part of this one.

    It holds no reference back: the garbage collector does not see those of compiled objects, and the cycle would live
    for ever.
    """
    weak = ref(search)

    def allowed(path: list[int], tokens: list[int]) -> list[bool]:
        found = weak()
        assert found is not None, "the compiled search is used by this one only"
        return found.allowed(path, tokens)

    return allowed


def _adapter(source: Source, sequence: SequenceView) -> native.module.Source:
    return native.module.PythonSource(source, sequence) if source.compiled is None else source.compiled


def search_class(acceptance: AcceptanceTable) -> type[TreeSearch]:
    """The search that estimates with a table: compiled if the table is."""
    return CompiledSearch if isinstance(acceptance, CompiledTable) else TreeSearch


def take_all(searches: Mapping[int, TreeSearch], nodes: int) -> dict[int, int]:
    """`TreeSearch.take_all` of the searches of one step: key -> size of the tree, the root counted."""
    if compiled := _compiled(searches):
        return dict(zip(searches, native.module.take_all(compiled, nodes), strict=True))
    return {index: search.take_all(nodes) for index, search in searches.items()}


def sizes_that_pay(searches: Mapping[int, TreeSearch], plan: StepPlan, spent: float) -> dict[int, int]:
    """How many nodes of each tree are drafted, the root counted, so that tokens come fastest; see `best_sizes`.

    Args:
        searches: of the sequences that draft, with nothing taken.
        plan: of the step.
        spent: seconds that draft forwards have taken in this step.
    """
    profile, drafting, ahead = plan.profile, plan.drafting, plan.ahead(searches)
    compiled = _compiled(searches)
    if compiled and not profile.fixed:
        found = native.module.best_sizes(
            compiled,
            profile.plans(plan.recent),
            profile.sizes,
            ahead.replay,
            plan.sequences,
            ahead.others,
            ahead.longest,
            ahead.replays,
            ahead.branches,
            plan.padded,
            spent,
            plan.resizing,
            *drafting.parameters,
        )
        return dict(zip(searches, found, strict=True))
    found = best_sizes(
        list(searches.values()),
        plan.seconds,
        profile.sizes,
        lambda nodes: spent + (plan.resizing if nodes else 0.0) + drafting(nodes),
        padded=plan.padded,
        sequences=plan.sequences,
        ahead=ahead,
    )
    return dict(zip(searches, found, strict=True))


def _compiled(searches: Mapping[int, TreeSearch]) -> list[native.module.Search]:
    """The compiled searches; none if one of them is not compiled."""
    found = [search.compiled for search in searches.values() if isinstance(search, CompiledSearch)]
    return found if len(found) == len(searches) else []
