"""`python -m research overhead --toy`: microseconds of a step outside the forward and the drafting, on the toy target.

The drafts are scripted: trees of a fixed shape whose tokens are known before the step, given as the lists that a
compiled planner returns. What is left is the engine's own work: making and checking trees, verification, the commit,
counters, outputs and the scheduler.

A second table adds the drafting: whole steps of the usual sources of `auto`, which draft as many nodes.

A third table has the steps of the drafter `auto` in which it drafts nothing, beside those of `plain`.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from math import nan
from statistics import median
from time import perf_counter
from typing import Any, ClassVar

import numpy as np

from leapahead.core.sampling import SamplingParams
from leapahead.core.stats import PHASES
from leapahead.core.stop import StopParams
from leapahead.core.tree import Budget, TokenTree
from leapahead.drafters.auto import Auto
from leapahead.drafters.base import Drafter
from leapahead.drafters.plain import Plain
from leapahead.engine.request import Handle, Request
from leapahead.engine.scheduler import Engine
from leapahead.models.base import Target
from leapahead.models.toy import ToyTarget
from leapahead.planner.draft import Proposal, SequenceView
from leapahead.planner.latency import LatencyProfile
from leapahead.planner.profile import LatencyProfiles
from research.drafting import Usual, started
from research.simulation import Stored

# 16 drafted nodes under the root: a path of six nodes and siblings at the first four depths.
PARENTS = [-1, 0, 0, 0, 0, 1, 1, 1, 2, 5, 5, 6, 9, 9, 12, 14, 3]
DEPTHS = [0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 4, 4, 5, 6, 2]
PATH = (1, 5, 9, 12, 14, 15)
ACCEPTED = 2  # drafted nodes that a step commits
NODES = len(PARENTS) - 1
WARM_UP = 20  # steps


class Scripted(Drafter):
    """Drafts trees of one shape whose first `ACCEPTED` nodes along the path are right.

    Args:
        text: of every sequence, the prompt included.
    """

    name: ClassVar[str] = "scripted"

    def __init__(self, text: Sequence[int], vocab_size: int) -> None:
        self._tokens = {at: _draft(text, at, vocab_size) for at in range(len(text) - len(PATH))}
        self._sources = (self.name,) * len(PARENTS)
        self._expected = np.full(len(PARENTS), 0.5)

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Proposal]:
        found = []
        for sequence, budget in zip(sequences, budgets, strict=True):
            tokens = self._tokens[len(sequence.tokens) - 1]
            if tokens[0] == sequence.root and budget.depth >= len(PATH):
                tree = TokenTree.of_lists(tokens, PARENTS, DEPTHS)
                found.append(Proposal(tree, self._sources, self._expected))
            else:  # in half precision a forward of many rows may choose another token than one of a single row
                found.append(Proposal(TokenTree.root(sequence.root)))
        return found


def _draft(text: Sequence[int], at: int, vocab_size: int) -> list[int]:
    """The tokens of the tree over position `at`: the text's own, but for nodes that are to be rejected."""
    right = (0, *PATH[:ACCEPTED])
    tokens = [text[at + depth] + (node not in right) * node for node, depth in enumerate(DEPTHS)]
    return [token % vocab_size for token in tokens]


def overhead(
    target: Target, batches: Sequence[int] = (1, 4, 16), context: int = 8192, steps: int = 200
) -> list[dict[str, Any]]:
    """Median microseconds a sequence and step, greedy and sampled, in batches of these sizes.

    Args:
        target: the toy target, or another one, whose commit takes what it takes.
        batches: numbers of sequences.
        context: tokens of the prompt.
        steps: measured steps of each batch.

    Returns:
        Rows with batch, temperature, tokens committed a step; the phases but the forward and the choosing, `rest` for
        what no phase has (outputs and the scheduler), and their sum, `outside`, in microseconds.
    """
    prompt = np.random.default_rng(0).integers(0, target.info.vocab_size, context).tolist()
    return [
        _measured(target, prompt, temperature, batch, steps + WARM_UP)
        for temperature in (0.0, 1.0)
        for batch in batches
    ]


def _measured(target: Target, prompt: list[int], temperature: float, batch: int, steps: int) -> dict[str, Any]:
    sampling = SamplingParams(temperature=temperature, seed=1)
    engine = Engine(target, max_batch=batch)
    length = (steps + WARM_UP) * (ACCEPTED + 1) + 2 * len(PATH)  # a little more than is read
    plain = engine.submit(Request(prompt, engine.drafter(Plain), sampling, StopParams(max_new_tokens=length)))
    engine.run([plain])
    drafter = engine.drafter(Scripted([*prompt, *plain.tokens], target.info.vocab_size))
    request = Request(prompt, drafter, sampling, StopParams(max_new_tokens=length - len(PATH)))
    handles = [engine.submit(request) for _ in range(batch)]
    while any(handle.stats.steps == 0 for handle in handles):
        engine.step()
    return {"batch": batch, "temperature": temperature, **_medians(engine, handles, steps)}


def _medians(engine: Engine, handles: Sequence[Handle], steps: int) -> dict[str, float]:
    """Of so many steps of an engine, which is closed then: tokens committed, and medians of the parts, see `_step`."""
    gc.collect()
    gc.disable()  # a collection in between would be charged to one step
    try:
        found = [_step(engine, handles) for _ in range(steps)][WARM_UP:]
    finally:
        gc.enable()
        engine.close()
    committed = sum(handle.stats.committed for handle in handles) / sum(handle.stats.steps for handle in handles)
    medians = {phase: round(median(each[phase] for each in found), 1) for phase in found[0]}
    return {"committed": round(committed, 2), **medians}


def _step(engine: Engine, handles: Sequence[Handle]) -> dict[str, float]:
    """Microseconds a sequence of one step."""
    before = [dict(handle.stats.seconds) for handle in handles]
    began = engine.latency.clock()
    engine.step()
    whole = engine.latency.clock() - began
    phases = {
        phase: sum(handle.stats.seconds[phase] - old[phase] for handle, old in zip(handles, before, strict=True))
        for phase in PHASES
    }
    outside = whole - phases["forward"] - phases["choose"]
    phases["rest"] = whole - sum(phases.values())
    del phases["forward"], phases["choose"]
    return {name: 1e6 * seconds / len(handles) for name, seconds in {**phases, "outside": outside}.items()}


# ------------------------------------------------------------------------------------------ steps with all they need


def whole_steps(batches: Sequence[int] = (1, 4, 16), context: int = 8192, steps: int = 200) -> list[dict[str, Any]]:
    """As `overhead`, with drafts of 16 nodes from the usual sources of `auto`, which is counted: see `drafting`."""
    rows = []
    for temperature in (0.0, 1.0):
        for batch in batches:
            engine, _, handles = started("compiled", batch, temperature, context, lambda table: Usual(table, NODES))
            rows.append({"batch": batch, "temperature": temperature, **_medians(engine, handles, steps + WARM_UP)})
    return rows


# ------------------------------------------------------------------------------------------- plain steps of `auto`

VOCAB = 64
PLAIN_SECONDS = 0.001  # of a plain step: it sets how many steps a back-off takes, see `StepPlan.longest_back_off`
ROW_SECONDS = 0.01  # of each further row: nothing that is drafted pays


class SteepTarget(ToyTarget):
    """The toy target on a clock of its own, on which a forward takes long and longer with each row.

    Attributes:
        added: seconds by which the clock is ahead of the machine's.
    """

    def __init__(self) -> None:
        super().__init__(VOCAB)
        self.added = 0.0

    def now(self) -> float:
        """The time in seconds."""
        return perf_counter() + self.added

    def step(self, sessions: Any, trees: Sequence[TokenTree], *args: Any, **options: Any) -> Any:
        seconds = PLAIN_SECONDS + (sum(map(len, trees)) - len(sessions)) * ROW_SECONDS
        began = perf_counter()
        found = super().step(sessions, trees, *args, **options)
        self.added += seconds - (perf_counter() - began)
        return found


class Watched(Auto):
    """`auto`, which says whether its sources were asked in the last step."""

    _were_asked = False

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Proposal]:
        found = super().propose(sequences, budgets)
        self._were_asked = any(self._sequences[sequence].asked for sequence in sequences)
        return found

    def asked(self) -> bool:
        return self._were_asked


def plain_steps(batches: Sequence[int] = (1, 4, 16), context: int = 8192, steps: int = 200) -> list[dict[str, Any]]:
    """Median microseconds a sequence and step without drafted nodes, greedy and sampled.

    The columns `auto` are steps of that drafter where no draft pays: those in which drafting is suspended, so that no
    source is asked, and those in which the sources are asked in vain.

    Args:
        batches, context, steps: see `overhead`.
    """
    rows = []
    for temperature in (0.0, 1.0):
        for batch in batches:
            plain = _plain_steps(Plain, batch, temperature, context, steps)
            auto = _plain_steps(Watched, batch, temperature, context, 4 * steps)
            rows.append(
                {
                    "batch": batch,
                    "temperature": temperature,
                    "plain": round(median(plain[False]), 1),
                    "auto, suspended": round(median(auto[False] or [nan]), 1),  # few steps may have none of a kind
                    "auto, asking": round(median(auto[True] or [nan]), 1),
                    "share asking": round(len(auto[True]) / (len(auto[True]) + len(auto[False])), 2),
                }
            )
    return rows


def _plain_steps(
    kind: type[Plain] | type[Watched], batch: int, temperature: float, context: int, steps: int
) -> dict[bool, list[float]]:
    """Whether the sources were asked -> microseconds a sequence of such steps."""
    target = SteepTarget()
    latency = LatencyProfiles(target.info, Stored(None), target.now)
    for count in {1, batch}:
        latency.put(count, LatencyProfile({count: PLAIN_SECONDS, count + 1: PLAIN_SECONDS + ROW_SECONDS}))
    engine = Engine(target, max_batch=batch, latency=latency)
    drafter, handles = engine.drafter(kind), []
    for seed in range(batch):
        prompt = np.random.default_rng(seed).integers(0, VOCAB, context).tolist()
        sampling = SamplingParams(temperature=temperature, seed=seed)
        handles.append(engine.submit(Request(prompt, drafter, sampling, StopParams(max_new_tokens=1 << 20))))
    while any(handle.stats.steps < WARM_UP for handle in handles):
        engine.step()
    found: dict[bool, list[float]] = {False: [], True: []}
    gc.collect()
    gc.disable()
    try:
        for _ in range(steps):
            nodes = handles[0].stats.nodes
            seconds = _step(engine, handles)["outside"]
            if handles[0].stats.nodes == nodes + 1:
                found[isinstance(drafter, Watched) and drafter.asked()].append(seconds)
    finally:
        gc.enable()
        engine.close()
    return found
