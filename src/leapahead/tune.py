"""What drafting is worth on this machine: the cost curve measured thoroughly, and what follows from it for drafters.

    price of a draft of n nodes, in tokens      T(n) / T(1) - 1      time in which plain steps would have given so many
    it pays, if its nodes are accepted with     p > price / (n - 1)  on average

Knows targets and drafters; neither the command line nor how its numbers are shown. What was not measured is None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from time import perf_counter
from typing import Any

import numpy as np

from leapahead import drafters
from leapahead.core.errors import LeapaheadError, Refused
from leapahead.core.stats import Stats
from leapahead.core.stop import StopParams
from leapahead.drafters.auto import Auto
from leapahead.drafters.base import Step
from leapahead.drafters.lookahead import PRESETS
from leapahead.drafters.plain import Plain
from leapahead.drafters.sources.lookahead import SHAPES
from leapahead.engine.loop import Generation, decode
from leapahead.models.base import Target, require
from leapahead.planner.latency import CostCurve, Round, fitted, rounds, samples
from leapahead.planner.profile import Place, machine_of, processor
from research.curves.formula import compression_formula
from research.curves.run import GREEDY, Data, Progress, Tokens, conditions, silent

FREE = 1.1  # T(n) / T(1) up to which nodes are called free
ALPHA, F = 0.425, 3.106  # of 7B chat on MT-Bench (2402.02057, figure 4)
BUSY = 1.3  # quartiles of a plain step, high / low, from which the machine is said to be busy
FEW = 3  # times that a size should be measured
WORTH = 1.1  # speed-up from which a window is recommended


def tune(
    target: Target,
    sequences: int = 1,
    seconds: float = 5.0,
    progress: Progress = silent,
    clock: Callable[[], float] = perf_counter,
) -> Data:
    """Measures the cost curve afresh and keeps it, in the cache and for this process.

    Args:
        sequences: that are stepped together; their rows are counted together.
        seconds: that it may take.

    Returns:
        rows, one for each size: nodes (rows of the forward), times, milliseconds and relative (median, low and high
        quartile of what was measured), cost (T(n)/T(1) of the smoothed curve, where a plain step is T(1)), last_node
        (price of a further node just there, in tokens), needs (mean probability from which a draft of this size pays).
        context: tokens that the forwards had before them, about. free: nodes beside the roots that cost nearly nothing.
        busy: the times of a plain step differ so much that something else kept the machine busy. few: most sizes were
        measured less than three times. stored: the cache's file, None if it cannot be written.

    Raises:
        LeapaheadError: no room for the sessions.
    """

    def tell(spent: float, total: float) -> None:
        progress("measuring forwards", round(1000 * min(spent, total)), round(1000 * total))

    found = rounds(target, seconds=seconds, sequences=sequences, clock=clock, progress=tell)
    seconds_of = fitted(found)
    curve = CostCurve(seconds_of)
    stored = machine_of(target).put(target, sequences, CostCurve(seconds_of))
    rows = _rows(found, curve, sequences)
    one = rows[0]["milliseconds"]
    return {
        "figure": "tune",
        "conditions": conditions(target, rounds=max(len(found) - 1, 1)),
        "sequences": sequences,
        "context": sum(n // sequences for n in seconds_of),
        "rows": rows,
        "free": free(curve, max(seconds_of), sequences),
        "busy": one["high"] > BUSY * one["low"],
        "few": 2 * sum(row["times"] < FEW for row in rows) > len(rows),
        "stored": str(Place.of(target).path) if stored else None,
        "processor": processor(),
    }


def _rows(found: Sequence[Round], curve: CostCurve, sequences: int) -> list[Data]:
    times, one = samples(found), curve(sequences)
    rows: list[Data] = []
    before: int | None = None
    for n, some in times.items():
        cost = curve(n) / one
        drafted = n - sequences
        last = None if before is None else (curve(n) - curve(before)) / (n - before) / one * sequences
        ratios = [each[n] / each[sequences] for each in found if n in each and sequences in each]
        rows.append(
            {
                "nodes": n,
                "times": len(some),
                "milliseconds": _quartiles([1e3 * each for each in some]),
                "relative": _quartiles(ratios[1:] or ratios),
                "cost": round(cost, 4),
                "last_node": None if last is None else round(last, 4),
                "needs": round(max(cost - 1, 0.0) * sequences / drafted, 4) if drafted else None,
            }
        )
        before = n
    return rows


def free(curve: CostCurve, largest: int, sequences: int = 1) -> int:
    """Nodes that may be drafted with the forward at most `FREE` times a plain one, among sizes up to the largest."""
    nodes = sequences
    while nodes < largest and curve(nodes + 1) <= FREE * curve(sequences) * (1 + 1e-9):
        nodes += 1
    return nodes - sequences


def served(target: Target) -> list[Data]:
    """Every registered drafter, and why this target refuses it; `refused` is None where it does not."""
    found = []
    for name in drafters.names():
        refused = None
        try:
            require(target, drafters.load(name).needs, name)
        except Refused as error:
            refused = str(error)
        except LeapaheadError as error:  # a third party's that cannot be loaded
            refused = str(error)
        found.append({"name": name, "refused": refused})
    return found


def lookahead(curve: CostCurve, largest: int) -> list[Data]:
    """What lookahead's shapes would cost here, measured, and yield by the paper's formula, which is not.

    A step has (W + G)(N - 1) rows; S is equation 7 of 2402.02057 with the two numbers that its authors fitted to a chat
    model. `speedup` is S / cost; beyond the sizes that were measured it is None, and `at_most` what it were if all
    further nodes were free.

    Returns:
        rows of window, ngram, guesses, nodes, cost, compression, speedup, at_most; the fastest has best=True, if it is
        worth it.
    """
    shapes = {*PRESETS.values(), *((w, n, w) for w, n in SHAPES if w)}
    rows: list[Data] = []
    for w, n, g in sorted(shapes, key=lambda shape: ((shape[0] + shape[2]) * (shape[1] - 1), shape)):
        nodes, s = (w + g) * (n - 1), compression_formula(ALPHA, F, n, w)
        cost = curve(nodes) / curve(1) if nodes <= largest else None
        rows.append(
            {
                "window": w,
                "ngram": n,
                "guesses": g,
                "nodes": nodes,
                "cost": None if cost is None else round(cost, 4),
                "compression": round(s, 4),
                "speedup": None if cost is None else round(s / cost, 4),
                "at_most": round(s * curve(1) / curve(min(nodes, largest)), 4),
                "best": False,
            }
        )
    known = [row for row in rows if row["speedup"] is not None]
    best = max(known, key=lambda row: float(row["speedup"]), default=None)
    if best is not None and best["speedup"] >= WORTH:
        best["best"] = True
    return rows


def practise(
    target: Target,
    prompts: Sequence[Tokens],
    cost: CostCurve,
    sequences: int = 1,
    max_new_tokens: int = 64,
    eos_token_ids: Tokens = (),
    seconds: float = 10.0,
    progress: Progress = silent,
    clock: Callable[[], float] = perf_counter,
) -> Data:
    """Runs `auto` and plain decoding over some texts in turn, greedily, and counts what each source brought and cost.

    A forward with drafted nodes takes T(rows) - T(roots) more than without. The tokens that plain steps would have
    committed in that time are their `price`, shared alike; a source pays if more of its nodes were accepted.

    Args:
        cost: prices the nodes.
        sequences: that are decoded together.
        seconds: after which no further text is begun, and the present one is broken off.

    Returns:
        sources: name, drafted, accepted, price (None if nothing was drafted), first (how often its first candidate was
        right, drafted or not), probe (its nodes are to bring candidates later), pays (None for those, and if nothing
        was drafted); steps, plain_steps (without a draft), nodes_per_step
        (drafted), acceptance_length, tokens_per_second of auto and of plain.
    """
    began = clock()
    price: Counter[str] = Counter()
    probes: set[str] = set()
    total, plain, rested, texts = Stats(), Stats(), 0, 0
    groups = [prompts[start : start + sequences] for start in range(0, len(prompts), sequences)]
    for index, group in enumerate(groups):
        progress("decoding with auto", index, len(groups))
        if len(group) < sequences:
            group = [*group, *prompts[: sequences - len(group)]]
        if clock() - began > seconds:
            break
        ends = began + seconds + 1.0
        for kind in (Plain, Auto) if index % 2 else (Auto, Plain):
            stop = StopParams(max_new_tokens=max_new_tokens, eos_token_ids=tuple(eos_token_ids))
            batch = [Generation.begin(target, prompt, kind(), GREEDY, stop) for prompt in group]
            for steps in _forwards(target, batch, lambda ends=ends: clock() > ends):  # type: ignore[misc]
                if kind is Auto:
                    price.update(_prices(steps, cost, sequences))
                    probes |= {name for step in steps for name in _probes(step)}
                    rested += sum(len(step.tree) == 1 for step in steps)
            for generation in batch:
                if kind is Auto:
                    total, texts = total + generation.stats, texts + 1
                else:
                    plain += generation.stats
    return {
        "texts": texts,
        "steps": total.steps,
        "plain_steps": rested,
        "nodes_per_step": round(total.drafted / total.steps, 3) if total.steps else None,
        "acceptance_length": round(total.acceptance_length, 4) if total.steps else None,
        "tokens_per_second": {
            "auto": round(total.tokens_per_second, 3) if total.steps else None,
            "plain": round(plain.tokens_per_second, 3) if plain.steps else None,
        },
        "sources": _sources(total, price, probes, machine_of(target).calibration.rows()),
    }


def _forwards(target: Target, batch: Sequence[Generation], late: Callable[[], bool]) -> Iterable[list[Step]]:
    """The steps of each forward together."""
    with closing(decode(target, list(batch))) as loop:
        together: list[Step] = []
        for _, step in loop:
            if together and step.forward is not together[0].forward:
                yield together
                together = []
                if late():
                    return
            together.append(step)
        if together:
            yield together


def _prices(steps: Sequence[Step], cost: CostCurve, sequences: int) -> dict[str, float]:
    """Source -> tokens that its nodes of one forward cost. When some texts have ended a plain step yields fewer."""
    drafted = Counter(source for step in steps for source in step.proposal.sources[1:])
    extra = max(cost(sequences + drafted.total()) / cost(sequences) - 1, 0.0) * len(steps)
    return {source: extra * count / drafted.total() for source, count in drafted.items()}


def _probes(step: Step) -> Iterable[str]:
    """Who drafted nodes that are not meant to be accepted."""
    expected = step.proposal.expected
    unhoped = [] if expected is None else np.flatnonzero(np.isnan(expected)).tolist()
    return [step.proposal.sources[node] for node in unhoped]


def _sources(total: Stats, price: Counter[str], probes: set[str], cells: Sequence[Data]) -> list[Data]:
    first = {
        cell["key"][0]: cell["hits"] / cell["trials"]
        for cell in cells
        if len(cell["key"]) == 3 and cell["key"][1:] == ["greedy", 0] and cell["trials"] > 0
    }
    names = sorted({*total.drafted_by, *(name for name in first if "+" not in str(name))}, key=str)
    rows: list[dict[str, Any]] = []
    for name in names:
        drafted, accepted = total.drafted_by[name], total.accepted_by[name]
        rows.append(
            {
                "name": name,
                "first": round(first[name], 4) if name in first else None,
                "drafted": drafted,
                "accepted": accepted,
                "price": round(price[name], 3) if drafted else None,
                "probe": name in probes,
                "pays": accepted > price[name] if drafted and name not in probes else None,
            }
        )
    return rows


def figure(found: Data) -> Data:
    """The curve as data of the figure `cost`."""
    rows = [{"context": found["context"], **row} for row in found["rows"]]
    return {"figure": "cost", "conditions": found["conditions"], "rows": rows}


def _quartiles(values: Sequence[float]) -> dict[str, float]:
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return {"median": round(middle, 4), "low": round(low, 4), "high": round(high, 4)}
