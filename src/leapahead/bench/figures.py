"""The samples of a contender in a cell of a bench, and the figures that are made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from leapahead.bench.contender import Pass, Setting, Text
from leapahead.check import distinct
from leapahead.core.stats import PHASES, Stats

RESAMPLES = 2000
LEVEL = 95  # percent

FloatArray = npt.NDArray[np.float64]


@dataclass
class Measured:
    """The samples of one contender in a cell.

    Attributes:
        tokens, seconds: [rounds][groups].
        first_token: [rounds][prompts], seconds.
        detokenise, prefill: seconds of all measured rounds.
        stats: of the first measured round; the others repeat the same work.
        phases: `Stats.seconds` of all measured rounds, where the contender reports them.
        texts: of the first measured round.
        forwards: of every sequence in every pass, the warm-up and the prefill included.
        differing: prompt -> whether all its differences are ties.
        lossy: prompts whose text differs by a relaxed rule; None where the rule is exact.
        memory, gpu_memory: peak in the first measured round, MiB.
    """

    tokens: list[list[int]] = field(default_factory=list)
    seconds: list[list[float]] = field(default_factory=list)
    first_token: list[list[float]] = field(default_factory=list)
    detokenise: float = 0.0
    prefill: float = 0.0
    stats: Stats | None = None
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    texts: list[list[int]] = field(default_factory=list)
    forwards: int = 0
    differing: dict[int, bool] = field(default_factory=dict)
    lossy: set[int] | None = None
    memory: float | None = None
    gpu_memory: float | None = None

    def count(self, texts: Sequence[Text]) -> None:
        """Counts the forwards of a pass."""
        self.forwards += sum(text.stats.steps + text.stats.prefill_forwards for text in texts if text.stats)

    def reach(self, memory: float | None, gpu_memory: float | None) -> None:
        """Keeps the greatest memory of the passes."""
        self.memory = _largest((self.memory, memory))
        self.gpu_memory = _largest((self.gpu_memory, gpu_memory))

    def keep(self, turn: int, done: Pass) -> None:
        """Keeps a pass over one group in a measured round."""
        if len(self.tokens) < turn:
            self.tokens.append([])
            self.seconds.append([])
            self.first_token.append([])
        self.tokens[-1].append(sum(len(text.tokens) if text.timed is None else text.timed for text in done.texts))
        self.seconds[-1].append(max(done.seconds, 1e-6))  # none, where a peer's texts ended with the prefill
        self.first_token[-1] += [text.first_token for text in done.texts]
        self.detokenise += done.detokenise
        self.prefill += done.prefill
        for text in done.texts:
            if text.stats is not None:
                for phase, seconds in text.stats.seconds.items():
                    self.phases[phase] += seconds
            if turn == 1:
                self.texts.append(text.tokens)
                if text.stats is not None:
                    self.stats = (self.stats or Stats()) + text.stats


def speedup(mine: dict[str, Any], plain: dict[str, Any], seed: int = 0, prompts: int = 1) -> dict[str, float | None]:
    """{"median", "low", "high"} of two rows' samples, see the module; low and high are None for a single prompt.

    Args:
        mine, plain: see `row`.
        seed: of the bootstrap.
        prompts: of a single group.
    """
    tokens, seconds = np.array(mine["tokens"], float), np.array(mine["seconds"], float)  # [rounds, groups]
    others, theirs = np.array(plain["tokens"], float), np.array(plain["seconds"], float)
    rounds, groups = tokens.shape
    middle = round(float(np.median(_ratio(*(each.sum(axis=-1) for each in (tokens, seconds, others, theirs))))), 4)
    if groups == 1 and min(prompts, rounds) == 1:
        return {"median": middle, "low": None, "high": None}
    rng = np.random.default_rng(seed)
    turns = rng.integers(rounds, size=(RESAMPLES, rounds))[:, :, None]
    picks = rng.integers(groups, size=(RESAMPLES, groups))[:, None, :]

    def total(values: FloatArray) -> FloatArray:
        drawn: FloatArray = values[turns, picks].sum(axis=-1)  # [resamples, rounds]
        return drawn

    drawn = np.median(_ratio(total(tokens), total(seconds), total(others), total(theirs)), axis=-1)
    low, high = np.percentile(drawn, [(100 - LEVEL) / 2, (100 + LEVEL) / 2])
    return {"median": middle, "low": round(float(low), 4), "high": round(float(high), 4)}


def _ratio(tokens: FloatArray, seconds: FloatArray, others: FloatArray, theirs: FloatArray) -> FloatArray:
    return (tokens / seconds) / (others / theirs)


def row(name: str, mine: Measured, plain: Measured, setting: Setting, groups: int, seed: int) -> dict[str, Any]:
    """A contender's figures in a cell, as plain types.

    `seconds` are the mean over the rounds of one pass over the prompts, by phase; `rest` is the wall clock without the
    named phases (bookkeeping). `samples` are what the speed-up is computed from. `lossy`, where a relaxed rule decoded,
    is the number of texts that differ from plain decoding's; they are no mismatches.
    """
    rounds = len(mine.tokens)
    wall = sum(map(sum, mine.seconds))
    named = {**mine.phases, "detokenise": mine.detokenise} if mine.stats is not None else {}
    split = {"prefill": mine.prefill, **named, "rest": wall - sum(named.values())}
    samples = _samples(mine)
    return {
        "drafter": name,
        "temperature": setting.temperature,
        "batch": setting.batch,
        "speedup": speedup(samples, _samples(plain), seed, len(mine.texts)),
        "tokens_per_second": _speed(samples),
        **_counted(mine.stats),
        "time_to_first_token": round(median(time for each in mine.first_token for time in each), 6),
        "seconds": {phase: round(spent / rounds, 6) for phase, spent in split.items()},
        "peak_memory_mib": mine.memory,
        "peak_gpu_memory_mib": mine.gpu_memory,
        "distinct_4": round(distinct(mine.texts), 4),
        "forwards": mine.forwards,
        "mismatches": sum(not tie for tie in mine.differing.values()),
        "ties": sum(mine.differing.values()),
        **({} if mine.lossy is None else {"lossy": len(mine.lossy)}),
        "prompts": len(mine.texts),
        "groups": groups,
        "tokens": sum(mine.tokens[0]),
        "samples": samples,
    }


def beside(rows: Sequence[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """The rows of the forms of one model, with `beside`: the ratio of a row's speed to that of the first form's.

    Args:
        rows: of one cell, in which all forms took turns; each with its `target`.
        seed: of the bootstrap.
    """
    first = {row["drafter"]: row for row in rows if row["target"] == rows[0]["target"]}
    return [
        {**row, "beside": {"target": base["target"], **speedup(row["samples"], base["samples"], seed, row["prompts"])}}
        if (base := first.get(row["drafter"])) is not None and base is not row
        else row
        for row in rows
    ]


def overall_beside(
    rows: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]], seed: int
) -> dict[str, float | None]:
    """The ratio of the speeds of two forms over several tasks, which are the same for both."""
    return speedup(_joined(rows), _joined(base), seed, sum(each["prompts"] for each in rows))


def overall(rows: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]], seed: int) -> dict[str, Any]:
    """One contender's rows of several tasks as one row; every prompt has the same weight.

    Args:
        rows: of the contender.
        plain: of plain decoding, for the same tasks in the same order.
        seed: of the bootstrap.
    """
    samples, others = _joined(rows), _joined(plain)
    counted = all(each["steps"] is not None for each in rows)
    prompts = sum(each["prompts"] for each in rows)
    return {
        **{key: rows[0][key] for key in ("drafter", "temperature", "batch")},
        "speedup": speedup(samples, others, seed, prompts),
        "tokens_per_second": _speed(samples),
        **_counted(_stats(rows) if counted else None),
        "time_to_first_token": round(median(time for times in samples["first_token"] for time in times), 6),
        "seconds": {phase: round(sum(each["seconds"][phase] for each in rows), 6) for phase in rows[0]["seconds"]},
        "peak_memory_mib": _largest(each["peak_memory_mib"] for each in rows),
        "peak_gpu_memory_mib": _largest(each["peak_gpu_memory_mib"] for each in rows),
        "distinct_4": round(sum(each["distinct_4"] * each["prompts"] for each in rows) / prompts, 4),
        **{key: sum(each[key] for each in rows) for key in ("forwards", "mismatches", "ties")},
        **({"lossy": sum(each["lossy"] for each in rows)} if "lossy" in rows[0] else {}),
        "prompts": prompts,
        **{key: sum(each[key] for each in rows) for key in ("groups", "tokens")},
    }


def _counted(stats: Stats | None) -> dict[str, Any]:
    """The counters of one pass; None where a contender reports none."""
    if stats is None:
        counters = ("steps", "committed", "nodes", "replayed", "drafted_by", "accepted_by", "accepted_at")
        return dict.fromkeys(("acceptance_length", "nodes_per_step", *counters))
    return {
        "acceptance_length": round(stats.acceptance_length, 4),
        "nodes_per_step": round(stats.nodes_per_step, 3),
        "steps": stats.steps,
        "committed": stats.committed,
        "nodes": stats.nodes,
        "replayed": stats.replayed,
        "drafted_by": dict(stats.drafted_by),
        "accepted_by": dict(stats.accepted_by),
        "accepted_at": {str(depth): count for depth, count in sorted(stats.accepted_at.items())},
    }


def _stats(rows: Sequence[dict[str, Any]]) -> Stats:
    total = Stats()
    for each in rows:
        total.steps += each["steps"]
        total.nodes += each["nodes"]
        total.replayed += each["replayed"]
        total.committed += each.get("committed", each["tokens"])  # absent in rows of earlier versions
        total.drafted_by.update(each["drafted_by"])
        total.accepted_by.update(each["accepted_by"])
        total.accepted_at.update({int(depth): count for depth, count in each["accepted_at"].items()})
    return total


def _samples(measured: Measured) -> dict[str, Any]:
    return {
        "tokens": measured.tokens,
        "seconds": [[round(time, 6) for time in times] for times in measured.seconds],
        "first_token": [[round(time, 6) for time in times] for times in measured.first_token],
    }


def _joined(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The samples of several tasks: in each round, the groups of all tasks one after the other.

    A task of few batches has more rounds than the others (`Plan.rounds_of`); those that not all have are left out.
    """
    return {
        key: [[*chain.from_iterable(turn)] for turn in zip(*(each["samples"][key] for each in rows), strict=False)]
        for key in ("tokens", "seconds", "first_token")
    }


def _speed(samples: dict[str, Any]) -> float:
    """Tokens per second, median of the rounds."""
    pairs = zip(samples["tokens"], samples["seconds"], strict=True)
    speed: float = median(sum(tokens) / sum(seconds) for tokens, seconds in pairs)
    return round(speed, 3)


def _largest(values: Any) -> float | None:
    return max((value for value in values if value is not None), default=None)
