"""`python -m research overhead --toy`: microseconds of a step outside the forward and the drafting, on the toy target.

The drafts are scripted: trees of a fixed shape whose tokens are known before the step, given as the lists that a
compiled planner returns. What is left is the engine's own work: making and checking trees, verification, the commit,
counters, outputs and the scheduler.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import Any, ClassVar

import numpy as np

from leapahead.core.sampling import SamplingParams
from leapahead.core.stats import PHASES
from leapahead.core.stop import StopParams
from leapahead.core.tree import Budget, TokenTree
from leapahead.drafters.base import Drafter
from leapahead.drafters.plain import Plain
from leapahead.engine.request import Handle, Request
from leapahead.engine.scheduler import Engine
from leapahead.models.base import Target
from leapahead.planner.draft import Proposal, SequenceView

# 16 drafted nodes under the root: a path of six nodes and siblings at the first four depths.
PARENTS = [-1, 0, 0, 0, 0, 1, 1, 1, 2, 5, 5, 6, 9, 9, 12, 14, 3]
DEPTHS = [0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 4, 4, 5, 6, 2]
PATH = (1, 5, 9, 12, 14, 15)
ACCEPTED = 2  # drafted nodes that a step commits
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
    gc.collect()
    gc.disable()  # a collection in between would be charged to one step
    try:
        found = [_step(engine, handles) for _ in range(steps)][WARM_UP:]
    finally:
        gc.enable()
        engine.close()
    medians = {phase: round(median(each[phase] for each in found), 1) for phase in found[0]}
    committed = sum(handle.stats.committed for handle in handles) / sum(handle.stats.steps for handle in handles)
    return {"batch": batch, "temperature": temperature, "committed": round(committed, 2), **medians}


def _step(engine: Engine, handles: Sequence[Handle]) -> dict[str, float]:
    """Microseconds a sequence of one step."""
    before = [dict(handle.stats.seconds) for handle in handles]
    began = perf_counter()
    engine.step()
    whole = perf_counter() - began
    phases = {
        phase: sum(handle.stats.seconds[phase] - old[phase] for handle, old in zip(handles, before, strict=True))
        for phase in PHASES
    }
    outside = whole - phases["forward"] - phases["choose"]
    phases["rest"] = whole - sum(phases.values())
    del phases["forward"], phases["choose"]
    return {name: 1e6 * seconds / len(handles) for name, seconds in {**phases, "outside": outside}.items()}
