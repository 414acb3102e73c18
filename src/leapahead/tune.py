"""Measures what drafting costs on this machine, and derives which drafts pay.

    price of a draft of n nodes, in tokens      T(n) / T(1) - 1      the tokens of plain steps of the same duration
    it pays, if its nodes are accepted with     p > price / (n - 1)  on average

T(n) is the latency profile. This module does not know the command line. What was not measured is None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from time import perf_counter
from typing import Any

import numpy as np

from leapahead.bench.conditions import Data, Progress, Tokens, conditions, silent
from leapahead.bench.formula import compression_formula
from leapahead.core.errors import LeapaheadError
from leapahead.core.stats import Stats
from leapahead.core.stop import StopParams
from leapahead.drafters import registry
from leapahead.drafters.auto import Auto
from leapahead.drafters.draft_models import INSTEAD, copyable
from leapahead.drafters.lookahead import PRESETS
from leapahead.drafters.plain import Plain
from leapahead.engine.request import Request
from leapahead.engine.scheduler import Engine
from leapahead.models.base import Target, require
from leapahead.planner.draft import Step
from leapahead.planner.latency import LatencyProfile
from leapahead.planner.measurement import Round, agree, fitted, rounds, samples
from leapahead.planner.profile import LatencyProfiles, processor

FREE = 1.1  # T(n) / T(1) up to which nodes are called free
ALPHA, F = 0.425, 3.106  # of 7B chat on MT-Bench (2402.02057, figure 4)
WARM_UP = 0.2  # part of the time for texts of `auto` that are not counted
FEW_TOKENS = 200  # of texts with auto, below which its gain is uncertain
BUSY = 1.3  # ratio of the quartiles of a plain step from which the machine counts as busy
LEAST_TIMES = 3  # forwards of each size for a profile that is stored
ATTEMPTS = 3  # measurements, each given twice the time of the one before
WORTH = 1.1  # speed-up from which a window is recommended
SMALL = ((3, 3, 3), (5, 4, 5), (7, 5, 7), (10, 5, 10))  # (W, N, G) that are considered beside the presets


def tune(
    target: Target,
    sequences: int = 1,
    seconds: float = 5.0,
    progress: Progress = silent,
    clock: Callable[[], float] = perf_counter,
) -> tuple[Data, LatencyProfiles]:
    """Measures the latency profile anew, and stores it if the measurement can be relied upon.

    The measurement is repeated, each time with twice the time, until most sizes have `LEAST_TIMES` samples and the
    samples agree. If they still do not after `ATTEMPTS` measurements, nothing is stored.

    Args:
        sequences: stepped together; their rows are counted together.
        seconds: time of the first measurement.

    Returns:
        The measurement, and the profiles of the target with it. The measurement has

        rows, one for each size: nodes (rows of the forward), times (samples), milliseconds and relative (median, low
        and high quartile of the samples), cost (T(n)/T(1) of the profile, where T(1) is a plain step), last_node (price
        of one more node, in tokens), needs (mean probability from which a draft of this size pays).
        context: tokens before the forwards, about. free: number of drafted nodes that cost nearly nothing.
        busy: the samples disagree, so something else kept the machine busy. few: most sizes have too few samples.
        stored: the file of the profile; None where it was not stored because of `busy` or `few`, or cannot be written.

    Raises:
        LeapaheadError: the target has no room for the sessions.
    """
    for attempt in range(ATTEMPTS):
        allowed = seconds * 2**attempt

        def tell(spent: float, total: float) -> None:
            progress("measuring forwards", round(1000 * min(spent, total)), round(1000 * total))

        found = rounds(target, seconds=allowed, sequences=sequences, clock=clock, progress=tell)
        busy, few = _busy(found, sequences), _few(found)
        if not (busy or few):
            break
    info, doubtful = target.info, busy or few
    profile = LatencyProfile(fitted(found), assumed=doubtful, bucket=info.bucket, prepared=info.prepared)
    profiles = LatencyProfiles(info, clock=clock)
    if sequences > 1:
        profiles.prepare(target)  # of one sequence; a later measurement of it would replace this one
    stored = profiles.put(sequences, profile, store=not doubtful)
    rows = _rows(found, profile, sequences)
    measured: Data = {
        "figure": "tune",
        "conditions": conditions(target, rounds=max(len(found) - 1, 1)),
        "sequences": sequences,
        "context": sum(n // sequences for n in profile.sizes),
        "rows": rows,
        "free": free(profile, max(profile.sizes), sequences),
        "busy": busy,
        "few": few,
        "stored": str(profiles.store.path) if stored else None,
        "processor": processor(),
    }
    return measured, profiles


def _busy(found: Sequence[Round], sequences: int) -> bool:
    """Whether the samples of a size differ by more than an idle machine's would."""
    plain = samples(found)[sequences]
    spread = np.quantile(plain, 0.75) > BUSY * np.quantile(plain, 0.25)
    return bool(len(plain) > 1 and (spread or not agree(found)))


def _few(found: Sequence[Round]) -> bool:
    times = [len(some) for some in samples(found).values()]
    return 2 * sum(count < LEAST_TIMES for count in times) > len(times)


def _rows(found: Sequence[Round], profile: LatencyProfile, sequences: int) -> list[Data]:
    times, one = samples(found), profile(sequences)
    rows: list[Data] = []
    before: int | None = None
    for n, some in times.items():
        cost = profile(n) / one
        drafted = n - sequences
        last = None if before is None else (profile(n) - profile(before)) / (n - before) / one * sequences
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


def free(profile: LatencyProfile, largest: int, sequences: int = 1) -> int:
    """Greatest number of drafted nodes with a forward of at most `FREE` times a plain one, up to the largest size."""
    nodes = sequences
    while nodes < largest and profile(nodes + 1) <= FREE * profile(sequences) * (1 + 1e-9):
        nodes += 1
    return nodes - sequences


def served(target: Target) -> list[Data]:
    """Every registered drafter, and why this target cannot serve it; `refused` is None where it can."""
    found = []
    for name in registry.names():
        refused = None
        try:
            drafter = registry.load(name)
            require(target.info, drafter.needs, f"drafter {name!r}")
            if drafter.copies_target:
                copyable(target, f"drafter {name!r}", INSTEAD)
        except LeapaheadError as error:  # refused; or another package's drafter that cannot be loaded
            refused = str(error)
        found.append({"name": name, "refused": refused})
    return found


def lookahead(profile: LatencyProfile, largest: int) -> list[Data]:
    """The measured cost of lookahead's shapes on this machine, and their yield by the published formula.

    A step has (W + G)(N - 1) rows. S is equation 7 of 2402.02057 with the parameters that its authors fitted to a chat
    model. `speedup` is S / cost. Beyond the measured sizes it is None, and `at_most` is its value if all further nodes
    were free.

    Returns:
        rows of window, ngram, guesses, nodes, cost, compression, speedup, at_most; the fastest has best=True if its
        speed-up is at least `WORTH`.
    """
    shapes = {*PRESETS.values(), *SMALL}
    rows: list[Data] = []
    for w, n, g in sorted(shapes, key=lambda shape: ((shape[0] + shape[2]) * (shape[1] - 1), shape)):
        nodes, s = (w + g) * (n - 1), compression_formula(ALPHA, F, n, w)
        cost = profile(nodes) / profile(1) if nodes <= largest else None
        rows.append(
            {
                "window": w,
                "ngram": n,
                "guesses": g,
                "nodes": nodes,
                "cost": None if cost is None else round(cost, 4),
                "compression": round(s, 4),
                "speedup": None if cost is None else round(s / cost, 4),
                "at_most": round(s * profile(1) / profile(min(nodes, largest)), 4),
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
    latency: LatencyProfiles,
    prompts: Sequence[Tokens],
    sequences: int = 1,
    max_new_tokens: int = 64,
    eos_token_ids: Tokens = (),
    seconds: float = 10.0,
    progress: Progress = silent,
    clock: Callable[[], float] = perf_counter,
) -> Data:
    """Decodes some texts with `auto` and plainly in turn, greedily, and counts the yield and the price of each source.

    First `auto` decodes the last prompts for a part of the time, which is not counted, since its first steps try drafts
    of several sizes.

    The price of a forward's drafted nodes is split among the sources by number of nodes. A source pays if more of its
    nodes were accepted than their price in tokens.

    Args:
        latency: of the target; the profile of so many sequences gives the prices.
        sequences: decoded together, for which prompts are repeated where there are too few.
        seconds: time after which no further text is begun, and the present one is ended.

    Returns:
        texts; tokens, of them with auto; sources: name, drafted, accepted, price (None if nothing was drafted), first
        (how often its first candidate was right, drafted or not), pays (None if nothing was drafted); steps,
        plain_steps (without a draft), nodes_per_step (drafted), acceptance_length, tokens_per_second of auto and of
        plain decoding; expected, the same if every forward had taken what the profile says, so that a busy machine does
        not count.
    """
    began = clock()
    engine = Engine(target, max_batch=sequences, latency=latency)
    kinds = [engine.drafter(Plain), engine.drafter(Auto)]
    stop = StopParams(max_new_tokens=max_new_tokens, eos_token_ids=tuple(eos_token_ids))
    prompts = [*prompts, *islice(cycle(prompts), -len(prompts) % sequences)]  # the profile is of full steps
    first = [Request(prompt, kinds[1], stop=stop) for prompt in prompts[-sequences:]]
    _decoded(engine, first, lambda: clock() > began + WARM_UP * seconds)
    plainly, count = (_Count(latency.profile(sequences), sequences) for _ in kinds)
    total, plain, texts = Stats(), Stats(), 0
    groups = [prompts[start : start + sequences] for start in range(0, len(prompts), sequences)]
    for index, group in enumerate(groups):
        progress("decoding with auto", index, len(groups))
        if clock() - began > seconds:
            break
        for drafter in kinds if index % 2 else kinds[::-1]:
            watch = count if drafter is kinds[1] else plainly
            requests = [Request(prompt, drafter, stop=stop, on_step=watch.add) for prompt in group]
            stats = _decoded(engine, requests, lambda: clock() > began + seconds + 1.0)
            if drafter is kinds[1]:
                total, texts = total + stats, texts + len(group)
            else:
                plain += stats
    count.close()
    plainly.close()
    return {
        "texts": texts,
        "tokens": total.committed,
        "steps": total.steps,
        "plain_steps": count.plain_steps,
        "nodes_per_step": round(total.drafted / total.steps, 3) if total.steps else None,
        "acceptance_length": round(total.acceptance_length, 4) if total.steps else None,
        "tokens_per_second": {
            "auto": round(total.tokens_per_second, 3) if total.steps else None,
            "plain": round(plain.tokens_per_second, 3) if plain.steps else None,
        },
        "expected": {
            "auto": round(total.committed / (count.seconds + _outside(total)), 3) if total.steps else None,
            "plain": round(plain.committed / (plainly.seconds + _outside(plain)), 3) if plain.steps else None,
        },
        "sources": _sources(total, count, engine.acceptance.rows(longest=3)),
    }


def _decoded(engine: Engine, requests: Sequence[Request], late: Callable[[], bool]) -> Stats:
    """The sum of the requests' statistics; they are cancelled once it is late."""
    handles = [engine.submit(request) for request in requests]
    try:
        while not all(handle.done for handle in handles) and not late():
            engine.step()
    finally:
        engine.cancel(*handles)
    for handle in handles:
        if handle.error is not None:
            raise handle.error
    return sum((handle.stats for handle in handles), Stats())


def _outside(stats: Stats) -> float:
    """Seconds outside the forwards."""
    return stats.decode_seconds - stats.seconds["forward"]


class _Count:
    """Prices of drafted nodes by source, from the steps as they come.

    Attributes:
        price: source -> tokens that its nodes cost.
        plain_steps: steps without a draft.
        seconds: of all forwards, by the profile as it was at first.
    """

    def __init__(self, profile: LatencyProfile, sequences: int) -> None:
        self.price: Counter[str] = Counter()
        self.plain_steps, self.seconds = 0, 0.0
        self._profile, self._sequences = profile, sequences
        self._measured = LatencyProfile({n: profile(n) for n in profile.sizes}, fixed=True)
        self._together: list[Step] = []  # steps of one forward

    def add(self, step: Step) -> None:
        if self._together and self._together[0].forward is not step.forward:
            self.close()
        self._together.append(step)
        self.plain_steps += len(step.tree) == 1

    def close(self) -> None:
        """Counts the last forward."""
        if self._together:
            self.price.update(_prices(self._together, self._profile, self._sequences))
            self.seconds += self._measured(self._together[0].forward.cost.rows)
        self._together = []


def _prices(steps: Sequence[Step], profile: LatencyProfile, sequences: int) -> dict[str, float]:
    """Source -> tokens that its nodes of one forward cost. A plain step yields a token for each unfinished text."""
    drafted = Counter(source for step in steps for source in step.proposal.sources[1:])
    extra = max(profile(sequences + drafted.total()) / profile(sequences) - 1, 0.0) * len(steps)
    return {source: extra * count / drafted.total() for source, count in drafted.items()}


def _sources(total: Stats, count: _Count, cells: Sequence[Data]) -> list[Data]:
    """A row for each source that drafted or could have drafted."""
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
                "price": round(count.price[name], 3) if drafted else None,
                "pays": accepted > count.price[name] if drafted else None,
            }
        )
    return rows


def figure(found: Data) -> Data:
    """The measurement as data of the figure `bench.plots.latency`."""
    rows = [{"context": found["context"], **row} for row in found["rows"]]
    return {"figure": "cost", "conditions": found["conditions"], "rows": rows}


def _quartiles(values: Sequence[float]) -> dict[str, float]:
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return {"median": round(middle, 4), "low": round(low, 4), "high": round(high, 4)}
