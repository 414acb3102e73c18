"""`python -m research drafting`: microseconds that drafting takes a sequence and step, on the toy target.

The drafter has the usual sources of `auto`: suffix, recycling, siblings and a token table. Compiled and Python code
draft for the same texts in turns. What the target does is not counted: its forward, its choices, and the selection of
its top-k tokens, which is made before the clock starts.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from time import perf_counter
from typing import Any, ClassVar, TypeVar

import click
import numpy as np

from leapahead import native
from leapahead.cli.command import Command
from leapahead.core.errors import BadParameter
from leapahead.core.sampling import SamplingParams
from leapahead.core.stop import StopParams
from leapahead.core.tree import Budget
from leapahead.drafters.planned import Planned
from leapahead.drafters.sources.recycling import SAMPLED, Recycling
from leapahead.drafters.sources.siblings import Siblings
from leapahead.drafters.sources.suffix import Suffix
from leapahead.drafters.sources.token_table import TableSource
from leapahead.drafters.token_table import TokenTable
from leapahead.engine.request import Handle, Request
from leapahead.engine.scheduler import Engine
from leapahead.models.toy import ToyTarget
from leapahead.planner.acceptance import AcceptanceTable, priors
from leapahead.planner.compiled import CompiledTable, take_all
from leapahead.planner.draft import Proposal, SequenceView, Step
from leapahead.planner.source import Source
from research.command_parts import show

VOCAB, TABLE_K = 2048, 32
WARM_UP = 20  # steps
D = TypeVar("D", bound="Usual")
KINDS: dict[str, type[AcceptanceTable]] = {"compiled": CompiledTable, "Python": AcceptanceTable}


class Usual(Planned):
    """Drafts a fixed number of nodes from the usual sources of `auto`."""

    name: ClassVar[str] = "usual"

    def __init__(self, table: TokenTable, nodes: int) -> None:
        super().__init__(nodes)
        self.table = table

    def make_sources(self, sequence: SequenceView | None) -> list[Source]:
        return [Suffix(), Recycling(), Siblings(), TableSource(self.table)]


class Timed(Usual):
    """The usual sources, and a clock.

    Args:
        table: the token table of the target.
        pieces: measure the parts of a step one by one, without the planner's own work around them.

    Attributes:
        seconds: part of a step -> seconds of the present step, all sequences together.
    """

    name: ClassVar[str] = "timed"

    def __init__(self, table: TokenTable, nodes: int, pieces: bool) -> None:
        super().__init__(table, nodes)
        self.pieces = pieces
        self.seconds: dict[str, float] = {}
        self._began = 0.0

    def charge(self, part: str) -> None:
        """Charges the time since the last charge to a part of the step."""
        now = perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._began
        self._began = perf_counter()

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Proposal]:
        self.seconds, self._began = {}, perf_counter()
        if not self.pieces:
            found = super().propose(sequences, budgets)
            self.charge("propose")
            return found
        drafting = [self._sequences[sequence] for sequence in sequences]
        for each in drafting:
            for source in each.sources:
                source.read(each.sequence)
        self.charge("read the text")
        searches = self._searches(dict(enumerate(drafting)), budgets)
        self.charge("begin the searches")
        take_all(searches, self.nodes)
        self.charge("search")
        for each in drafting:
            each.asked = True
        found = [search.proposal() for search in searches.values()]
        self.charge("make the trees")
        return found

    def observe(self, sequences: Sequence[SequenceView], steps: Sequence[Step]) -> None:
        for step in steps:
            step.choices.top_k(SAMPLED)
        self._began = perf_counter()
        if not self.pieces:
            super().observe(sequences, steps)
            self.charge("observe")
            return
        for sequence, step in zip(sequences, steps, strict=True):
            drafting = self._sequences[sequence]
            if drafting.search is not None:
                drafting.search.observe(step)
        self.charge("observe")


def toy_table(target: ToyTarget) -> TokenTable:
    """The target's likeliest tokens after each token alone."""
    rows = np.stack([target.row(((0, token),)) for token in range(VOCAB)])
    tokens = np.argsort(-rows, axis=1, kind="stable")[:, :TABLE_K]
    logits = np.take_along_axis(rows, tokens, axis=1)
    logp = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return TokenTable(tokens.astype(np.int32), logp.astype(np.float16))


def started(
    kind: str, batch: int, temperature: float, context: int, make: Callable[[TokenTable], D]
) -> tuple[Engine, D, list[Handle]]:
    """An engine with a batch of texts in the making, all of whose prompts are read; its drafter, and their handles.

    Args:
        kind: of `KINDS`.
        make: makes the drafter, given the target's token table.
    """
    target = ToyTarget(VOCAB, sharpness=5.0)
    engine = Engine(target, max_batch=batch, acceptance=KINDS[kind](*priors()))
    drafter = make(toy_table(target))
    attached, handles = engine.drafter(drafter), []
    for index in range(batch):
        rng = np.random.default_rng(index)
        phrases = [rng.integers(0, VOCAB, rng.integers(4, 40)).tolist() for _ in range(context // 80)]
        prompt = [token for _ in range(context // 10) for token in phrases[rng.integers(len(phrases))]][:context]
        params = SamplingParams(temperature=temperature, seed=index)
        handles.append(engine.submit(Request(prompt, attached, params, StopParams(max_new_tokens=1 << 20))))
    while any(handle.stats.steps == 0 for handle in handles):  # their prompts are read one after the other
        engine.step()
    return engine, drafter, handles


def steps_of(kind: str, batch: int, temperature: float, context: int, nodes: int, pieces: bool) -> Iterator[Timed]:
    """A batch of texts in the making: the drafter, after each step of all of them."""
    engine, drafter, _ = started(kind, batch, temperature, context, lambda table: Timed(table, nodes, pieces))
    while True:
        engine.step()
        if drafter.seconds:
            yield drafter


def drafting(
    batches: Sequence[int], temperatures: Sequence[float], context: int, nodes: int, steps: int, pieces: bool
) -> list[dict[str, Any]]:
    """Median microseconds a sequence and step by part, of compiled code and of Python.

    Args:
        batches: numbers of sequences.
        temperatures: 0 is greedy.
        context: tokens of the prompts.
        nodes: drafted for each sequence in every step.
        steps: that are measured.
        pieces: by part of the step; in all otherwise.
    """
    rows = []
    for batch in batches:
        for temperature in temperatures:
            running = {kind: steps_of(kind, batch, temperature, context, nodes, pieces) for kind in KINDS}
            seen: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
            gc.disable()  # its pauses belong to no part
            for _ in range(WARM_UP + steps):
                for kind, each in running.items():
                    seen[kind].append(dict(next(each).seconds))
            gc.enable()
            rows += _rows(seen, batch, temperature)
    return rows


def _rows(seen: dict[str, list[dict[str, float]]], batch: int, temperature: float) -> list[dict[str, Any]]:
    measured = {kind: each[WARM_UP:] for kind, each in seen.items()}
    parts = list(measured["Python"][0])
    found = []
    for part in (*parts, "in all"):
        row: dict[str, Any] = {"sequences": batch, "temperature": temperature, "part": part}
        for kind, each in measured.items():
            values = [sum(one.values()) if part == "in all" else one[part] for one in each]
            row[kind] = round(1e6 * median(values) / batch, 1)
        found.append(row)
    return found


@click.command(cls=Command)
@click.option("--steps", type=click.IntRange(min=1), default=100, show_default=True, help="Measured steps of each row.")
@click.option("--nodes", type=click.IntRange(min=1), default=16, show_default=True, help="Drafted in every step.")
@click.option("--context", type=click.IntRange(min=800), default=8192, show_default=True, help="Tokens of the prompts.")
def main(steps: int, nodes: int, context: int) -> None:
    """Print the median microseconds of drafting a sequence and step, compiled and in Python."""
    if not native.available:
        raise BadParameter("this installation has no compiled module; install the package where there is a compiler")
    rows = drafting((1, 4, 16), (0.0, 1.0), context, nodes, steps, pieces=False)
    rows += drafting((1,), (0.0, 1.0), context, nodes, steps, pieces=True)
    show(list(rows[0]), [list(row.values()) for row in rows])
