"""A simulated world for planning: a clock, a machine whose speed changes, and texts of which a source knows a part.

The real engine and the real planner run in it. A forward takes the time of a true curve by its rows, with lognormal
noise, stretched by the load. Nothing of it needs a model.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp
from threading import RLock
from typing import Any, ClassVar

import numpy as np

from leapahead.core.sampling import Sampler, SamplingParams
from leapahead.core.tree import UNLIMITED, TokenTree
from leapahead.core.verify import Verdict
from leapahead.drafters.planned import Planned
from leapahead.models.base import CHAIN, NOTHING, TREE, Capture, Cost, TargetInfo
from leapahead.models.choices import Choices, PromptRows
from leapahead.planner.draft import SequenceView
from leapahead.planner.latency import SIZES, LatencyProfile
from leapahead.planner.profile import LatencyProfiles, ProfileStore
from leapahead.planner.source import Candidate, Source

PLAIN = 0.05  # seconds of a forward over one row
DRAFTING = 0.01  # of that: what asking the source takes
QUICK_PLAIN, QUICK_DRAFTING = 0.001, 0.35  # the same of a quick target
TOKENS = 240  # of a text, at least
CHANGING = ((700, "good"), (150, "useless"), (700, "good"))  # tokens and acceptance of the parts of a text that changes
MOST_NODES = 40  # drafted nodes of a sequence: beyond, there is little to gain, and the simulation is slow
VOCABULARY = 64
WRONG = 0  # a token that no text contains
LONG = 4000  # plain steps for which load is made

CURVES: dict[str, dict[int, float]] = {  # rows -> time relative to one row
    "cheap": {1: 1.0, 16: 1.4, 64: 2.7, 256: 8.0},
    "llama.cpp": {1: 1.0, 2: 1.7, 3: 2.3, 4: 2.8, 8: 3.8, 16: 5.9, 32: 11.0, 256: 85.0},
    "sawtooth": dict(
        zip(
            (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 64, 256),
            (1.0, 1.35, 1.9, 1.4, 1.6, 1.9, 2.1, 1.7, 2.1, 2.6, 2.9, 2.2, 2.9, 3.4, 3.9, 3.2, 6.0, 24.0),
            strict=True,
        )
    ),
    "flat": {1: 1.0, 64: 1.02, 65: 1.6, 128: 1.65, 129: 2.6, 256: 3.0},
    "prepared": {1: 1.0, 4: 1.5, 8: 1.7, 16: 2.1, 32: 3.0, 64: 5.0, 256: 18.0},
    "buckets": {1: 1.0, 8: 1.15, 16: 1.4, 32: 1.9, 64: 3.0, 256: 9.0},
    "four bits": {1: 1.0, 4: 1.3, 8: 1.67, 16: 1.95, 32: 2.9, 64: 5.0, 256: 18.0},
}
BUCKETS = {"buckets": 8, "prepared": 4, "four bits": 4}  # rows to whose multiples steps with drafts are padded
PREPARED = {"prepared": 3}  # so many sizes of drafted steps stay prepared
CHANGE = {"buckets": 0.6, "prepared": 0.6, "four bits": 0.7}  # plain steps that a size that is not prepared adds there
ACCEPTANCE = {"good": (0.8, 0.4), "fair": (0.45, 0.2), "useless": (0.03, 0.01)}  # of the first and second candidate
# Chances of the first candidate, and in which share of the places it has them, as the source knows.
UNEVEN = {
    "uneven": ((0.05, 0.55), (0.3, 0.3), (0.65, 0.15)),
    "mostly wrong": ((0.02, 0.75), (0.3, 0.2), (0.6, 0.05)),
}
SECOND = 0.15  # chance of the second candidate there, where the first one is wrong
NOISE = {"": (0.03, 0.08), "contention": (0.08, 0.18)}  # log seconds of a forward, at least and at most, by load
STRETCHES = (5, 40)  # tokens for which acceptance is good or useless in turns, where it is mixed
STARTS = ("right", "flat", "flat to 16", "steep", "times 3", "shuffled", "none", "measured busy")
LOADS = ("stretches", "interruptions", "contention")


@dataclass(frozen=True)
class Case:
    """What is simulated.

    Attributes:
        start: the latency profile at the first step, of `STARTS`.
        curve: of `CURVES`.
        acceptance: of `ACCEPTANCE` or `UNEVEN`, "changing", or "mixed".
        load: of `LOADS`; "" for none.
        sequences: decoded together.
        padded: whether all of them take as many rows as the longest.
        quick: whether forwards take so little time that drafting takes a good part of it.
        length: tokens of each text, where many short ones are decoded one after another; 0 for one long text.
    """

    start: str = "right"
    curve: str = "cheap"
    acceptance: str = "good"
    load: str = ""
    sequences: int = 1
    padded: bool = False
    quick: bool = field(default=False, repr=False)  # the same worlds
    length: int = field(default=0, repr=False)

    @property
    def what(self) -> str:
        """The start, the load and the batch."""
        batch = f"batch of {self.sequences}{', padded' if self.padded else ''}" if self.sequences > 1 else ""
        quick = "quick forwards" if self.quick else ""
        short = f"texts of {self.length} tokens" if self.length else ""
        return ", ".join(each for each in (self.start, self.load, batch, short, quick) if each)

    @property
    def texts(self) -> int:
        """How many there are."""
        return -(-TOKENS // self.length) if self.length else self.sequences

    @property
    def name(self) -> str:
        """All of it."""
        return f"{self.what}, {self.curve}, {self.acceptance}"


class World:
    """The clock of one run, what slows the machine, and the texts.

    Args:
        case: of the table.
        seed: of everything that is random.

    Attributes:
        unit: seconds of a forward over one row.
        drafting: seconds that asking the source takes.
        now: seconds since the first step.
        paused: of these, seconds for which the process stood still.
        worked: seconds that all work would have taken on the idle machine.
        texts: for each sequence its tokens; the source's first and second candidate after each, right or `WRONG`; and
            what the source knows of its chances there.
        chances: for each sequence and token, those of the first candidate and of the second one.
    """

    def __init__(self, case: Case, seed: int) -> None:
        self.case, self.random = case, random.Random(f"{seed} of {replace(case, start='')}")
        self.unit = QUICK_PLAIN if case.quick else PLAIN
        self.drafting = self.unit * (QUICK_DRAFTING if case.quick else DRAFTING)
        self.now = self.paused = self.worked = 0.0
        self.busy = False
        curve = CURVES[case.curve]
        self.relative = np.interp(range(max(curve) + 1), list(curve), list(curve.values())).tolist()
        self.noise = self.random.uniform(*NOISE["contention" if case.load == "contention" else ""])
        self.changes = sorted(self._changes())  # (second, factor) and
        self.pauses = sorted(self._pauses())  # (second, length)
        self.chances: list[list[tuple[float, float]]] = []
        self.texts = [self._text() for _ in range(case.texts)]

    @property
    def phases(self) -> list[tuple[int, str]]:
        """Tokens and acceptance of each part of the text."""
        return list(CHANGING) if self.case.acceptance == "changing" else [(TOKENS, self.case.acceptance)]

    def _changes(self) -> Iterator[tuple[float, float]]:
        at, loaded = 0.0, False
        yield at, 1.0
        while self.case.load == "contention" and at < LONG * self.unit:  # others use the same cores, now more, now less
            at += self.random.uniform(3, 120) * self.unit
            yield at, self.random.uniform(1.0, 2.5)
        while self.case.load == "stretches" and at < LONG * self.unit:
            at += self.random.uniform(20, 200) * self.unit
            loaded = not loaded
            yield at, self.random.uniform(1.5, 4.0) if loaded else 1.0

    def _pauses(self) -> Iterator[tuple[float, float]]:
        at = 0.0
        while self.case.load == "interruptions" and at < LONG * self.unit:
            at += self.random.expovariate(1 / 60) * self.unit
            yield at, self.random.uniform(5, 50) * self.unit

    def _text(self) -> tuple[list[int], list[int], list[int], list[tuple[int, ...]]]:
        length = 8 * sum(length for length, _ in self.phases) + 400
        rng = np.random.default_rng(self.random.getrandbits(32))
        tokens = rng.integers(2, VOCABULARY, length)
        first, second, hints = self._chances(length, rng)
        self.chances.append(list(zip(first.tolist(), ((1 - first) * second).tolist(), strict=True)))
        known, other = rng.random(length) < first, rng.random(length) < second
        firsts, seconds = np.where(known, tokens, WRONG), np.where(~known & other, tokens, 1)
        return tokens.tolist(), firsts.tolist(), seconds.tolist(), hints

    def _chances(self, length: int, rng: np.random.Generator) -> tuple[Any, Any, list[tuple[int, ...]]]:
        """At each place the chances of the first and of the second candidate, and what the source knows of them."""
        acceptance = self.case.acceptance
        if acceptance in UNEVEN:
            chances, shares = np.array(UNEVEN[acceptance]).T
            which = rng.choice(len(chances), length, p=shares)
            return chances[which], np.full(length, SECOND), [(int(each),) for each in which]
        kinds = [kind for tokens, kind in self.phases for _ in range(tokens)]
        if acceptance == "mixed":
            kinds = []
            while len(kinds) < length:
                kinds += ["good"] * self.random.randint(*STRETCHES) + ["useless"] * self.random.randint(*STRETCHES)
            del kinds[length:]
        kinds += [kinds[-1]] * (length - len(kinds))
        first, second = np.array([ACCEPTANCE[kind] for kind in kinds]).T
        is_known = acceptance == "mixed"
        return first, second, [(int(kind == "good"),) if is_known else () for kind in kinds]

    def expected(self, which: int, place: int, tree: TokenTree) -> float:
        """Tokens that a step commits on average over all texts of which the source knows as much.

        Args:
            which: number of the text.
            place: in it, of the root.
            tree: of this source's candidates.
        """
        first, found = self.texts[which][1], [1.0]
        for token, parent, depth in zip(tree.token_list[1:], tree.parent_list[1:], tree.depth_list[1:], strict=True):
            at = place + depth - 1
            is_second = token == 1 or (token > 1 and first[at] == WRONG)
            found.append(found[parent] * self.chances[which][at][is_second])
        return sum(found)

    def seconds(self, rows: int) -> float:
        """Of a forward on the idle machine."""
        return self.unit * self.relative[rows]

    def after(self, start: float, seconds: float) -> tuple[float, float]:
        """When work of so many seconds on the idle machine ends, and for how long the process stands still before."""
        paused = 0.0
        while True:
            factor = [factor for at, factor in self.changes if at <= start][-1]
            change = min((at for at, _ in self.changes if at > start), default=float("inf"))
            pause, length = min((each for each in self.pauses if each[0] > start), default=(float("inf"), 0.0))
            until = min(change, pause)
            if start + seconds * factor <= until:
                return start + seconds * factor, paused
            seconds -= (until - start) / factor
            length = length if pause < change else 0.0
            start, paused = until + length, paused + length

    def work(self, seconds: float, noise: bool = True) -> None:
        """Lets time pass."""
        factor = exp(self.random.gauss(0, self.noise)) if noise else 1.0
        if self.busy:
            factor *= self.random.choice((1.0, 2.0, 3.0, 4.0))
        self.worked += seconds * factor
        self.now, paused = self.after(self.now, seconds * factor)
        self.paused += paused

    def plain(self, steps: float) -> float:
        """Seconds of so many plain steps on the idle machine."""
        return steps * self.seconds(self.case.sequences) * exp(self.noise**2 / 2)


class Target:
    """Writes the texts of a world. The first token of a prompt is the number of the text.

    Attributes:
        expected: tokens that the last step committed on average, see `World.expected`.
    """

    def __init__(self, world: World) -> None:
        self.world, self.lock = world, RLock()
        self.expected = 0.0
        self.max_nodes = self.max_leaves = 200
        capabilities = frozenset({CHAIN, TREE})
        name = world.case.name
        self.bucket, self.prepared = BUCKETS.get(world.case.curve, 1), PREPARED.get(world.case.curve, 0)
        self.info = TargetInfo(
            name,
            VOCABULARY,
            UNLIMITED,
            0.0,
            capabilities,
            name,
            padded=world.case.padded,
            bucket=self.bucket,
            prepared=self.prepared,
        )
        self._ready: list[int] = []  # rows of forwards whose sizes are prepared; the one used last at the end

    def open(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        capture: Capture = NOTHING,
        reserve: int = 0,
        owner: str = "",
    ) -> Any:
        return Session(list(tokens), params)

    def prefill(self, session: Session, max_tokens: int) -> PromptRows | None:
        raise AssertionError("prompts of one token are read")

    def fork(self, session: Session, params: SamplingParams) -> Session:
        raise AssertionError("there is one sample of each text")

    def step(self, sessions: Any, trees: Sequence[TokenTree], num_computed: Any = None, capture: Any = None) -> Any:
        rows = self.cost(sessions, trees).rows
        is_ready = rows in self._ready or (self.prepared and rows == len(sessions))
        change = 0.0 if is_ready else CHANGE.get(self.world.case.curve, 0.0) * self.world.unit
        self.world.work(self.world.seconds(rows) + change)
        if not self.prepared or rows > len(sessions):  # plain steps stay prepared beside so many drafted ones
            self._ready = [*(each for each in self._ready if each != rows), rows][-max(self.prepared, 1) :]
        self.expected = sum(
            self.world.expected(session.tokens[0] % len(self.world.texts), len(session.tokens) - 1, tree)
            for session, tree in zip(sessions, trees, strict=True)
        )
        return [self._choices(session, tree) for session, tree in zip(sessions, trees, strict=True)]

    def _choices(self, session: Session, tree: TokenTree) -> Choices:
        text, place = self.world.texts[session.tokens[0] % len(self.world.texts)][0], len(session.tokens) - 1
        right, chosen = [True], [text[place]]
        for node in range(1, len(tree)):
            depth = tree.depth_list[node]
            right.append(right[tree.parent_list[node]] and tree.token_list[node] == text[place + depth - 1])
            chosen.append(text[place + depth] if right[node] else 2)
        return Choices(None, tree, session.sampler, chosen=np.array(chosen))

    def cost(self, sessions: Sequence[Any], trees: Sequence[TokenTree]) -> Cost:
        rows = len(trees) * max(map(len, trees)) if self.info.padded else sum(map(len, trees))
        if rows > len(trees):
            rows = -(-rows // self.bucket) * self.bucket
        return Cost(rows, len(trees), max(len(session.tokens) for session in sessions))


class Session:
    """A text in the making."""

    unread = replay = 0

    def __init__(self, tokens: list[int], params: SamplingParams) -> None:
        self.tokens, self.sampler = tokens, Sampler(params, tokens, VOCABULARY)

    def commit(self, verdict: Verdict) -> None:
        self.tokens += verdict.tokens
        self.sampler.committed()

    def close(self) -> None:
        pass


class Guesses(Source):
    """Two candidates after every token, right as often as the world says.

    A state is the number of the text, a place in it, and whether the tokens before are those of the text. What the
    source knows of its chances is told off the text as well, or it would tell which candidates are right.
    """

    name: ClassVar[str] = "guesses"

    def __init__(self, world: World) -> None:
        self.world = world

    def root(self, sequence: SequenceView) -> tuple[int, int, bool]:
        self.world.work(self.world.drafting, noise=False)
        return sequence.tokens[0], len(sequence.tokens) - 1, True

    def follow(self, state: tuple[int, int, bool], token: int) -> tuple[int, int, bool]:
        which, place, is_text = state
        return which, place + 1, is_text and self.world.texts[which][0][place] == token

    def candidates(self, state: tuple[int, int, bool], limit: int) -> list[Candidate]:
        which, place, is_text = state
        _, first, second, hints = self.world.texts[which]
        tokens = (first[place], second[place]) if is_text else (WRONG, 1)
        return [Candidate(tokens[0], -0.3, hints[place]), Candidate(tokens[1], -1.5, hints[place])]


class Guessing(Planned):
    """Drafts as many of these guesses as pay."""

    name: ClassVar[str] = "guessing"

    def __init__(self, world: World) -> None:
        super().__init__(max_nodes=MOST_NODES)
        self.world = world

    def make_sources(self, sequence: SequenceView | None) -> list[Source]:
        return [Guesses(self.world)]


# ------------------------------------------------------------------------------------------------------- the start


class Stored(ProfileStore):
    """Has one profile of one sequence, or none, and keeps what is written to itself."""

    def __init__(self, seconds: Mapping[int, float] | None) -> None:
        self.seconds = seconds

    def read(self, sequences: int, bucket: int = 1, prepared: int = 0) -> LatencyProfile | None:
        if self.seconds is None or sequences > 1:
            return None
        return LatencyProfile(self.seconds, bucket=bucket, prepared=prepared)

    def write(self, profiles: Mapping[int, LatencyProfile], measured: bool) -> bool:
        for profile in profiles.values():
            profile.contradicted = False
        return True


class Fixed(LatencyProfiles):
    """Knows what forwards take, and learns nothing.

    Args:
        info: of the target.
        seconds: of a forward by its rows.
        now: gives the time in seconds.
    """

    def __init__(self, info: TargetInfo, seconds: Mapping[int, float], now: Callable[[], float]) -> None:
        super().__init__(info, Stored(None), now)
        self.right = LatencyProfile(seconds, fixed=True, bucket=info.bucket, prepared=info.prepared)

    def prepare(self, target: Any) -> bool:
        return False

    def profile(self, sequences: int) -> LatencyProfile:
        return self.right

    def known(self, sequences: int) -> LatencyProfile:
        return self.right


class Right(Fixed):
    """Knows the true curve."""

    def __init__(self, world: World) -> None:
        info, first = Target(world).info, world.case.sequences
        sizes = (n for n in range(first, len(world.relative)) if n == first or n % info.bucket == 0)
        super().__init__(info, {n: world.seconds(n) for n in sizes}, lambda: world.now)


def start(world: World, target: Target, kind: str) -> LatencyProfiles:
    """The latency profiles of a process that begins with a profile of some kind."""
    rng = random.Random(world.random.random())
    true = {n: world.seconds(n) for n in SIZES}
    values = list(true.values())
    rng.shuffle(values)
    stored: dict[str, dict[int, float]] = {
        "right": true,
        "flat": dict.fromkeys(SIZES, 5 * world.unit),
        "flat to 16": {n: 5 * world.unit for n in SIZES if n <= 16},
        "steep": {n: n * world.unit for n in SIZES},
        "times 3": {n: 3 * seconds for n, seconds in true.items()},
        "shuffled": dict(zip(SIZES, values, strict=True)),
    }
    found = LatencyProfiles(target.info, Stored(stored.get(kind)), lambda: world.now)
    if kind == "none":
        found.put(1, LatencyProfile.guessed(target.bucket, target.prepared))
    if kind == "measured busy":
        world.busy = True
        found.prepare(target)
        world.busy, world.now = False, 0.0
    return found
