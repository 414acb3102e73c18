"""One cell of a bench: all contenders take turns on the same prompts, and every text is compared with plain decoding's.

    warm-up        every contender once on the first group of prompts; its times are not kept
    round 1 ..     for each group: every contender once, in a random order for this group and round

A group is one prompt, or of a batch size of n, 4 n prompts: a text that ends is followed by the next one, as where
requests wait. The texts of a batch differ in length, see `Setting.limit`.

The speed of a machine drifts, so a ratio is formed within a round: tokens per second of the contender over all prompts,
divided by those of plain decoding. The speed-up is the median over the rounds. Its interval is a percentile bootstrap
over rounds and groups of prompts. From a single prompt there is no interval, because nothing is known of how much other
prompts differ from it; from a single batch of several, it is over the rounds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from leapahead.bench.contender import Contender, Pass, Setting, Text, aligned
from leapahead.bench.peak_memory import Peak
from leapahead.check import distinct
from leapahead.core.stats import PHASES, Stats
from leapahead.core.text import Tokenizer
from leapahead.models.base import Target
from leapahead.ties import measure

PLAIN = "plain"
BATCHES = 4  # of a group
RESAMPLES = 2000
LEVEL = 95  # percent

FloatArray = npt.NDArray[np.float64]
Judge = Callable[[list[int], list[int], list[int], Setting], bool]  # prompt, expected, got -> whether it is a tie


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

    def keep(self, turn: int, done: Pass) -> None:
        """Keeps a pass over one group in a measured round."""
        if len(self.tokens) < turn:
            self.tokens.append([])
            self.seconds.append([])
            self.first_token.append([])
        self.tokens[-1].append(sum(len(text.tokens) if text.timed is None else text.timed for text in done.texts))
        self.seconds[-1].append(done.seconds)
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


def order(names: Sequence[str], seed: int, turn: int, group: int) -> list[str]:
    """The order in which the contenders run on a group in a round."""
    shuffled = list(names)
    random.Random(f"{seed}, round {turn}, group {group}").shuffle(shuffled)
    return shuffled


def measure_cell(
    contenders: Sequence[Contender],
    prompts: Sequence[list[int]],
    setting: Setting,
    *,
    rounds: int,
    seed: int,
    judge: Judge,
    tokenizer: Tokenizer | None = None,
    progress: Callable[[str], None] = lambda what: None,
    expected: dict[int, list[int]] | None = None,
) -> list[dict[str, Any]]:
    """A row for each contender, see `row`.

    Args:
        contenders: plain decoding first.
        prompts: token ids of each.
        setting: of the cell.
        rounds: measured rounds, after the warm-up.
        seed: of the order.
        judge: whether a difference is a numeric tie.
        tokenizer: for contenders that give only text.
        progress: called with a contender's name after each of its passes; there are `passes` of each.
        expected: prompt -> plain decoding's tokens, decoded alone, where they are known of another batch size; those
            that are missing are added.
    """
    by_name = {contender.name: contender for contender in contenders}
    plain = contenders[0]
    found = {name: Measured(lossy=set() if each.lossy else None) for name, each in by_name.items()}
    comparison = _Comparison(prompts, setting, judge, tokenizer, {} if expected is None else expected)
    for index in range(len(prompts)) if setting.batch > 1 else ():
        if index not in comparison.expected:
            text = plain.run([prompts[index]], replace(setting, batch=1)).texts[0]
            found[plain.name].count([text])
            comparison.expected[index] = text.tokens
    groups = groups_of(prompts, setting.batch)
    for turn in range(rounds + 1):
        for contender in contenders:
            contender.begin_round()
        for group, members in enumerate(groups if turn else groups[:1]):
            given = [prompts[index] for index in members]
            done: dict[str, Pass] = {}
            for name in order(list(by_name), seed, turn, group):
                mine, peak = found[name], Peak() if turn == 1 else None
                done[name] = by_name[name].run(given, setting)
                for prompt, text in zip(given, done[name].texts, strict=True):
                    text.cut(setting.limit(prompt))
                if peak is not None:
                    mine.memory = _larger(mine.memory, done[name].memory or peak.mib())
                    mine.gpu_memory = _larger(mine.gpu_memory, peak.gpu_mib())
                progress(name)
            for index, text in zip(members, done[plain.name].texts, strict=True):
                comparison.expected.setdefault(index, text.tokens)
            for name, each in done.items():
                mine = found[name]
                for index, text in zip(members, each.texts, strict=True):
                    comparison.compare(index, text, by_name[name], mine)
                mine.count(each.texts)
                if turn:
                    mine.keep(turn, each)
    return [row(name, found[name], found[plain.name], setting, len(groups), seed) for name in by_name]


class _Comparison:
    """Compares texts with plain decoding's.

    Attributes:
        expected: prompt -> plain decoding's tokens, decoded alone.
    """

    def __init__(
        self,
        prompts: Sequence[list[int]],
        setting: Setting,
        judge: Judge,
        tokenizer: Tokenizer | None,
        expected: dict[int, list[int]],
    ) -> None:
        self._prompts, self._setting, self._judge, self._tokenizer = prompts, setting, judge, tokenizer
        self.expected = expected
        self._known: dict[tuple[int, tuple[int, ...]], bool] = {}  # differing texts that were judged before

    def compare(self, index: int, text: Text, contender: Contender, measured: Measured) -> None:
        """Records whether the text of a prompt differs; makes its tokens where the contender gave only text."""
        setting = self._setting
        limit = setting.limit(self._prompts[index])
        expected = self.expected[index][:limit]
        if text.written is not None:
            assert self._tokenizer is not None  # it was loaded with the model that the text came from
            text.tokens = aligned(text.written, expected, self._tokenizer, setting)[:limit]
        if text.tokens == expected or (setting.temperature and not contender.same_text):
            return
        if measured.lossy is not None:
            measured.lossy.add(index)
            return
        key = (index, tuple(text.tokens))
        if key not in self._known:
            self._known[key] = self._judge(self._prompts[index], expected, text.tokens, setting)
        measured.differing[index] = measured.differing.get(index, True) and self._known[key]


def passes(prompts: int, batch: int, rounds: int) -> int:
    """Number of passes of each contender in a cell."""
    return 1 + rounds * len(groups_of(range(prompts), batch))


def groups_of(prompts: Sequence[Any], batch: int) -> list[range]:
    """Indices of the prompts of each group."""
    size = 1 if batch == 1 else BATCHES * batch
    return [range(start, min(start + size, len(prompts))) for start in range(0, len(prompts), size)]


def tie_on(target: Target) -> Judge:
    """Judges texts by their first difference. What follows a tie is not compared; `check` does that.

    On an exact target there are no ties.
    """

    def judge(prompt: list[int], expected: list[int], got: list[int], setting: Setting) -> bool:
        at = next((i for i, (e, t) in enumerate(zip(expected, got, strict=False)) if e != t), None)
        if at is None or target.info.exact:  # one text ended where the other, with the same tokens, did not
            return False
        what = (target, prompt, expected[:at], (expected[at], got[at]), setting.params, setting.batch)
        return measure(*what, thorough=False).tie or measure(*what).tie  # the cheap measurement first

    return judge


# ------------------------------------------------------------------------------------------------------- figures


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
        counters = ("steps", "nodes", "replayed", "drafted_by", "accepted_by", "accepted_at")
        return dict.fromkeys(("acceptance_length", "nodes_per_step", *counters))
    return {
        "acceptance_length": round(stats.acceptance_length, 4),
        "nodes_per_step": round(stats.nodes_per_step, 3),
        "steps": stats.steps,
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
        total.committed += each["tokens"]
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
    """The samples of several tasks: in each round, the groups of all tasks one after the other."""
    return {
        key: [[*chain.from_iterable(turn)] for turn in zip(*(each["samples"][key] for each in rows), strict=True)]
        for key in ("tokens", "seconds", "first_token")
    }


def _speed(samples: dict[str, Any]) -> float:
    """Tokens per second, median of the rounds."""
    pairs = zip(samples["tokens"], samples["seconds"], strict=True)
    speed: float = median(sum(tokens) / sum(seconds) for tokens, seconds in pairs)
    return round(speed, 3)


def _larger(one: float | None, other: float | None) -> float | None:
    return _largest((one, other))


def _largest(values: Any) -> float | None:
    return max((value for value in values if value is not None), default=None)
