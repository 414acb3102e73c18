"""Schedules of methods that use several devices, simulated event by event, and the closed formulas beside them.

    lookahead    branches of every tree divided over devices, tokens exchanged once a step (2402.02057, section 3.3)
    pipelined    predictive pipelined decoding: an early exit starts the next token's layers (PPD, 2307.05908)
    overlapped   the draft model drafts ahead on a device of its own while the target verifies (PEARL, 2408.11850)
    serial       drafting and verification in turns on one device (2211.17192), for comparison

Nothing here computes with a model: a schedule is made of measured times of forwards and of recorded texts, in which it
is known which draft would have been right. Times are in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from leapahead.core.tree import TokenTree
from leapahead.models.parallel.split import split

Times = Callable[[int], float]  # rows -> seconds of a forward of the target


@dataclass(frozen=True)
class Run:
    """A simulated decoding.

    Attributes:
        seconds: from its first forward to its last token.
        tokens: that were committed.
        steps: forwards of the target, of all devices at once.
        busy: seconds that the devices have computed, all together.
    """

    seconds: float
    tokens: int
    steps: int
    busy: float

    def __add__(self, other: Run) -> Run:
        return Run(
            self.seconds + other.seconds,
            self.tokens + other.tokens,
            self.steps + other.steps,
            self.busy + other.busy,
        )


NOTHING = Run(0.0, 0, 0, 0.0)


# ---------------------------------------------------------------------------------------------- lookahead parallelism


@dataclass(frozen=True)
class Step:
    """A recorded step of a drafter.

    Attributes:
        parents: of the tree's nodes.
        path: the accepted nodes, the root first.
    """

    parents: tuple[int, ...]
    path: tuple[int, ...]


def rows_of(steps: Sequence[Step], devices: int) -> list[list[int]]:
    """The rows that each device computes in each step, as `models.parallel` divides trees and catches up."""
    lacking = [0] * devices  # committed tokens that a device has not computed
    found = []
    for step in steps:
        depths = [0]
        for parent in step.parents[1:]:
            depths.append(depths[parent] + 1)
        parts = split(TokenTree.of_lists([0] * len(depths), list(step.parents), depths), lacking)
        found.append([len(part) + ahead for part, ahead in zip(parts, lacking, strict=True)])
        lacking = [len(step.path) - len({*part} & {*step.path}) for part in parts]
    return found


def lookahead(steps: Sequence[Step], devices: int, times: Times, message: float) -> Run:
    """Every device runs one forward over its part; a step ends when the last of them has sent its tokens.

    Args:
        steps: of one text.
        devices: that the branches are divided over; 1 for none.
        times: of a forward.
        message: seconds from one device to another; the trees and the chosen tokens are one message each.
    """
    now = busy = 0.0
    for rows in rows_of(steps, devices):
        durations = [times(n) for n in rows]
        arrived = [now + took + (2 * message if rank else 0.0) for rank, took in enumerate(durations)]
        now, busy = max(arrived), busy + sum(durations)
    return Run(now, sum(len(step.path) for step in steps), len(steps), busy)


# --------------------------------------------------------------------------------------- predictive pipelined decoding


@dataclass(frozen=True)
class Layers:
    """The times of a forward in parts.

    Attributes:
        count: of the layers.
        layer: rows -> seconds of one layer.
        head: seconds of the final norm and the output layer, after the last layer or at an early exit.
    """

    count: int
    layer: Times
    head: float


def pipelined(
    ranks: Sequence[int], layers: Layers, exit_after: int, candidates: int, devices: int, message: float
) -> Run:
    """Predictive pipelined decoding of one text (2307.05908, section 3).

    When the layers up to the exit have been computed for a token, the likeliest candidates for the next one are chosen,
    and other devices start to compute it, one row for each candidate. When the token's last layer is done, the row of
    the right candidate goes on alone, if there is one; otherwise the next token begins with its first layer. A layer of
    a token needs the keys and values of the same layer of the token before it.

    Args:
        ranks: for each token, the rank of the next token at the exit; anything from `candidates` on is a miss.
        layers: the times.
        exit_after: layers before the exit, at least half of all, so that one token at a time is computed ahead.
        candidates: k.
        devices: in all, at least 2; the candidates are divided over all but one of them.
        message: seconds from one device to another.
    """
    assert devices >= 2
    assert layers.count <= 2 * exit_after <= 2 * layers.count, "the exit is in the second half"
    rows = -(-candidates // (devices - 1))
    used = -(-candidates // rows)  # devices that compute candidates
    before = [0.0] * (layers.count + 1)  # when each layer of the token before was done
    start, ahead, busy, now = 0.0, False, 0.0, 0.0
    for rank in ranks:
        finished, at = [], start
        for number in range(layers.count):
            beside = ahead and at < now  # the token before it is not known yet
            duration = layers.layer(rows if beside else 1)
            at = max(at, before[number] + (message if ahead else 0.0)) + duration
            busy += duration * (used if beside else 1)
            finished.append(at)
        now = at + layers.head
        chosen = finished[exit_after - 1] + layers.head + message
        ahead = rank < candidates and chosen < now
        busy += 2 * layers.head
        if not ahead:  # what the others have computed until now is lost
            most = int((now - chosen) / layers.layer(rows)) if now > chosen else 0
            busy += min(most, layers.count - exit_after) * layers.layer(rows) * used
        start = chosen if ahead else now
        before = finished
    return Run(now, len(ranks), len(ranks), busy)


def pipelined_formula(layers: int, exit_after: int, tokens: int, correct: float) -> float:
    """Expected time of a text, in layers: each token after the first begins early with probability `correct`.

    d l - (d - e) (l - 1) p for d layers, the exit after e of them, l tokens (2307.05908, section 3). Exits, messages
    and further rows take no time there.
    """
    return layers * tokens - (layers - exit_after) * (tokens - 1) * correct


# ------------------------------------------------------------------------------------------------- draft-target overlap


def overlapped(right: Sequence[bool], gamma: int, draft: float, times: Times, message: float) -> Run:
    """Drafting ahead on a device of its own (PEARL, 2408.11850) of one text, decoded greedily.

    In every step the target verifies the tokens that wait for it, none at first, and the draft model drafts `gamma`
    further ones behind them. The target's choice after the last token that it has verified tests the first of those
    (pre-verify). If all are right, the others wait for the next step (post-verify); otherwise they are lost.

    Args:
        right: for each token of the text, whether the draft model drafts it behind the right tokens before it.
        gamma: tokens drafted in a step.
        draft: seconds of one draft forward.
        times: of a forward of the target.
        message: seconds from one device to another; each step sends one message each way.
    """
    now, busy, at, waiting, steps = 0.0, 0.0, 0, 0, 0
    while at < len(right):
        verified, drafted = times(1 + waiting), gamma * draft
        now += max(verified, drafted) + 2 * message
        busy, steps = busy + verified + drafted, steps + 1
        accepted = _accepted(right, at, waiting)
        at += accepted + 1  # and the target's own choice behind them
        tested = accepted == waiting and at <= len(right) and right[at - 1]
        waiting = gamma - 1 if tested else 0
    return Run(now, len(right), steps, busy)


def serial(right: Sequence[bool], gamma: int, draft: float, times: Times) -> Run:
    """Drafting and verification in turns on one device; arguments as of `overlapped`."""
    now, at, steps = 0.0, 0, 0
    while at < len(right):
        now += gamma * draft + times(1 + gamma)
        at, steps = at + _accepted(right, at, gamma) + 1, steps + 1
    return Run(now, len(right), steps, now)


def _accepted(right: Sequence[bool], start: int, count: int) -> int:
    """How many of `count` tokens from `start` on are right, up to the first that is not."""
    some = right[start : start + count]
    return next((at for at, each in enumerate(some) if not each), len(some))


def serial_formula(alpha: float, gamma: int, draft: float, times: Times) -> float:
    """Expected seconds of a token: (gamma t + T(gamma + 1)) / (1 + a + ... + a^gamma) (2211.17192, theorem 3.8)."""
    return (gamma * draft + times(1 + gamma)) / sum(alpha**power for power in range(gamma + 1))


def overlapped_formula(alpha: float, gamma: int, draft: float, times: Times, message: float) -> float:
    """Expected seconds of a token where each draft is right with probability `alpha`, independently of the others.

    Derived for the schedule above. Let P be a step in which no token waits, and S one in which gamma - 1 do. P commits
    one token and is followed by S with probability a. S commits 1 + a + ... + a^(gamma - 1) tokens on average and is
    followed by S with probability a^gamma. So there are a / (1 - a^gamma) steps S to each step P, and together they
    commit 1 / (1 - a) tokens, the expected number of drafted tokens up to the first rejection, which PEARL's adaptive
    draft length reaches (2408.11850).
    """
    plain = max(times(1), gamma * draft) + 2 * message
    full = max(times(gamma), gamma * draft) + 2 * message
    return (1 - alpha) * (plain + full * alpha / (1 - alpha**gamma))


def fitted_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Intercept and slope of the least-squares line through points."""
    n = len(points)
    *_, x = accumulate(x for x, _ in points)
    *_, y = accumulate(y for _, y in points)
    slope = sum((a - x / n) * (b - y / n) for a, b in points) / sum((a - x / n) ** 2 for a, _ in points)
    return y / n - slope * x / n, slope
