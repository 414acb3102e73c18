"""The latency profiles of one target: measured once, stored in a file, corrected by the time of every step.

    CACHE/latency/DIGEST.json    {"format", "target", "processor",
                                  "profiles": {sequences: {"measured", "steps", "seconds"}}}

There is one file per target, by its fingerprint (model, precision, device, threads) and the processor; it has a profile
for each number of sequences that are stepped together. The cache directory is `LEAPAHEAD_CACHE`, by default
`leapahead` in the user's cache directory. The file is written after a measurement whose rounds agree, at most once a
minute as steps correct it, and at once where they contradict it. Sizes that neither such a measurement nor a step has
had are not written. A profile of one sequence that consists of what steps have shown, since no measurement was stored
or steps have contradicted it, is measured again after an hour. Each writer writes a temporary file beside it and
renames it, so processes may share the file; the last writer wins. A file that cannot be read, or is older than a week,
is measured again. Without a writable cache directory nothing fails: every process then measures for itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from time import perf_counter, time
from typing import Any

from leapahead.core.errors import LeapaheadError
from leapahead.core.forks import Mutex
from leapahead.core.processor import described
from leapahead.core.storage import cache_directory, write_json
from leapahead.models.base import KeepsPrefixes, Target, TargetInfo
from leapahead.planner.draft import Forward
from leapahead.planner.latency import LatencyProfile
from leapahead.planner.measurement import Round, agree, fitted, rounds
from leapahead.planner.recent import Recent, RecentSizes

FORMAT = 3
LEAST_STEPS = 30  # after which a corrected profile is written
WRITE_SECONDS = 60.0  # least time between two writes
STEPS_AGE = 3600.0  # seconds; of one sequence's profile that only steps have shown, in place of a measurement
MOST_AGE = 7 * 24 * 3600.0  # seconds; where nothing is drafted, steps do not correct the shape of a profile

MOST_ROWS = 1 << 20  # of a stored profile; more than this, and times outside of these, only a damaged file has
LEAST_SECONDS, MOST_SECONDS = 1e-9, 1e6

DRAFTING_RATE = 0.05  # weight of the newest step in the estimate of drafting time
DRAFTING_BASE, DRAFTING_PER_NODE = 1e-4, 2e-5  # seconds assumed before it was observed
USUAL_NODES = 8.0  # unit in which nodes are counted, so that both parameters are learned at the same rate
EXTENSIONS = ("amx_bf16", "avx512_bf16", "avx512_vnni", "avx512f", "avx_vnni", "avx2", "sve", "asimd")  # best first
MOST_UNSEEN = 32  # forwards, at most, that were observed and are not yet taken into account
SHORT_BITS = 10  # texts of fewer than 2 ** 10 tokens share a profile, as do those of up to twice as many, and so on
MOST_RATIO = 5.0  # an observation counts as at most so many times the expected time


class LatencyProfiles:
    """The latency profiles of a target by number of sequences. Thread-safe; an engine has one object and passes it on.

    Sizes are those of `Cost`: the rows and the sequences of the whole forward, whether they draft or not. Attention to
    a long text makes further rows dearer, so there is a profile for each doubling of the length (`at`), which begins as
    that of the nearest length. The file has one of them, that of short texts if steps have had such.

    Args:
        info: of the target.
        store: the file; by default the one for the target's fingerprint.
        clock: gives the time in seconds; the engine and its drafters read the same one.
    """

    def __init__(
        self, info: TargetInfo, store: ProfileStore | None = None, clock: Callable[[], float] = perf_counter
    ) -> None:
        self.store = store or ProfileStore(info.fingerprint or info.name)
        self.clock, self._padding = clock, (info.bucket, info.prepared)
        self._profiles: dict[tuple[int, int], LatencyProfile] = {}  # by number of sequences, and by length
        self._length = 0  # of the texts that are decoded now: its doublings
        self._reported: dict[int, tuple[LatencyProfile, int, dict[str, float]]] = {}  # see `as_dict`; at which step
        self._last: Forward | None = None  # that was observed
        self._unseen: list[tuple[Forward, int]] = []  # observed, but not yet taken into account; and the length then
        self._sizes = RecentSizes(info.prepared)
        self._written = clock()
        self._lock = Mutex()

    def prepare(self, target: Target) -> bool:
        """Loads the stored profile of one sequence, or measures it. Does nothing from the second call on.

        To be called outside of any request's time: measuring takes one or two seconds. Where the target has no room
        for a session, the profile is guessed, and steps correct it.

        Returns:
            Whether it measured.
        """
        with target.lock:
            if self.load():
                return False
            self.measure(target)
            if isinstance(target, KeepsPrefixes):
                target.forget()  # the cache rows of the measurement
            return True

    def load(self) -> bool:
        """Whether the profile of one sequence is in use or stored; a stored one is used from now on."""
        with self._lock:
            if self.known(1) is None and (stored := self.store.read(1, *self._padding)) is not None:
                self._profiles[1, 0] = stored
            return self.known(1) is not None

    def measure(self, target: Target) -> None:
        """Measures the profile of one sequence anew and stores it if the rounds agree.

        The profiles of several sequences are derived from it again. Where the target has no room for a session,
        nothing changes.
        """
        try:
            found = rounds(target, clock=self.clock)
        except LeapaheadError:
            with self._lock:
                self._profiles.setdefault((1, 0), LatencyProfile.guessed(*self._padding))
            return
        self.use(found)

    def use(self, found: Sequence[Round]) -> None:
        """Replaces all profiles by what was measured of one sequence, and stores it if the rounds agree."""
        with self._lock:
            self._see()
            bucket, prepared = self._padding
            profile = LatencyProfile(fitted(found), assumed=not agree(found), bucket=bucket, prepared=prepared)
            self._profiles = {(1, 0): profile}
            if agree(found):
                self.store.write({1: profile}, measured=True)

    def at(self, length: int) -> None:
        """To be called before a step is planned: the tokens of its texts, on average. 0 where it is never called."""
        self._length = (max(length, 0) >> SHORT_BITS).bit_length()

    def profile(self, sequences: int) -> LatencyProfile:
        """The profile of forwards over so many sequences.

        Where none is stored, it is derived from that of one sequence, since the time depends mostly on the rows; steps
        correct it. Nothing is measured here: without `prepare`, and with nothing stored, it is a guess.
        """
        with self._lock:
            if (found := self._known(sequences)) is not None:
                return found
            if (found := self.store.read(sequences, *self._padding)) is not None:
                self._profiles[sequences, 0] = found
            else:
                one = self.profile(1) if sequences > 1 else None
                found = LatencyProfile.guessed(*self._padding) if one is None else _derived(one, sequences)
                self._profiles[sequences, self._length] = found
            return self._known(sequences) or found

    def known(self, sequences: int) -> LatencyProfile | None:
        """The profile of so many sequences, if one is in use already, whatever the length of the texts."""
        with self._lock:
            return self._known(sequences)

    def _known(self, sequences: int) -> LatencyProfile | None:
        """See `known`; the lock is held."""
        self._see()
        key = sequences, self._length
        if (found := self._profiles.get(key)) is None and (nearest := self._nearest(sequences)) is not None:
            found = self._profiles[key] = _again(nearest)
        return found

    def _nearest(self, sequences: int) -> LatencyProfile | None:
        """The profile in use of so many sequences with texts of the length that is nearest to the present one."""
        lengths = [length for count, length in self._profiles if count == sequences]
        nearest = min(lengths, key=lambda length: (abs(length - self._length), length), default=0)
        return self._profiles.get((sequences, nearest))

    def put(self, sequences: int, profile: LatencyProfile, store: bool = True) -> bool:
        """Replaces a profile by one that was just measured, and stores it if `store`. Returns whether it is stored."""
        with self._lock:
            self._see()
            self._profiles = {key: known for key, known in self._profiles.items() if key[0] != sequences}
            self._profiles[sequences, 0] = profile
            return store and self.store.write({sequences: profile}, measured=True)

    def observe(self, forward: Forward) -> None:
        """Corrects the profile of the forward's number of sequences.

        A forward that several sequences report, one after the other, counts once. It is taken into account when a
        profile is read next, so that the steps in between, which plan nothing, take no time for it.
        """
        with self._lock:
            if forward is self._last:
                return
            self._last = forward
            self._unseen.append((forward, self._length))
            if len(self._unseen) >= MOST_UNSEEN:
                self._see()

    def _see(self) -> None:
        """Takes the forwards into account that were observed since the last call; called before anything is read."""
        if not self._unseen:
            return
        unseen, self._unseen = self._unseen, []
        is_refuted = False  # whether steps have contradicted a profile since it was written
        for forward, length in unseen:
            if not forward.is_usual:
                self._sizes.interrupt()
                continue
            changes = self._sizes.observe(forward.cost)
            if (profile := self._profiles.get((forward.cost.sequences, length))) is not None:
                profile.observe(forward.cost.rows, forward.seconds, *changes)
                refuted = profile.contradicted and profile.steps >= LEAST_STEPS and not length
                is_refuted |= refuted and len(profile.to_store()) > 1  # else `keep` leaves it out
        now = self.clock()
        if is_refuted or now - self._written >= WRITE_SECONDS:
            self._written = now
            self.keep()

    def recent(self, sequences: int) -> Recent:
        """What the target is prepared for in steps of so many sequences."""
        with self._lock:
            self._see()
            return self._sizes.of(sequences)

    def interrupt(self) -> None:
        """To be called when another kind of forward was computed, such as a prompt's."""
        with self._lock:
            self._see()
            self._last = None
            self._sizes.interrupt()

    def keep(self) -> bool:
        """Writes the profiles that enough steps have corrected; False if there are none or they cannot be written."""
        with self._lock:
            self._see()
            corrected: dict[int, LatencyProfile] = {}
            for (n, length), profile in sorted(self._profiles.items(), key=lambda item: item[0]):
                is_other = length and (n, 0) in self._profiles and not self._profiles[n, 0].assumed
                if profile.steps >= LEAST_STEPS and len(profile.to_store()) > 1 and not is_other:
                    corrected.setdefault(n, profile)
            return bool(corrected) and self.store.write(corrected, measured=False)

    def as_dict(self) -> dict[str, dict[str, float]]:
        """Milliseconds by sequences and rows with texts as long as now, for `Stats.drafter`.

        What no step has changed is not computed again.
        """
        with self._lock:
            self._see()
            found = {n: profile for n, _ in self._profiles if (profile := self._nearest(n)) is not None}
            for sequences, profile in found.items():
                known = self._reported.get(sequences)
                if known is None or known[0] is not profile or known[1] != profile.steps:
                    milliseconds = {str(n): round(1e3 * profile(n), 3) for n in profile.sizes}
                    self._reported[sequences] = profile, profile.steps, milliseconds
            return {str(sequences): dict(self._reported[sequences][2]) for sequences in sorted(found)}


def _again(known: LatencyProfile) -> LatencyProfile:
    """A profile that begins with what another one says, of which steps have shown nothing yet."""
    seconds = {n: known(n) for n in known.sizes}
    return LatencyProfile(seconds, known.fixed, known.assumed, known.bucket, known.prepared)


def _derived(one: LatencyProfile, sequences: int) -> LatencyProfile:
    """The profile of several sequences from that of one. A plain step has one row for each sequence, none has fewer."""
    rows = sorted({sequences, 2 * sequences, 4 * sequences, *(n for n in one.sizes if n > sequences)})
    return LatencyProfile({n: one(n) for n in rows}, assumed=True, bucket=one.bucket, prepared=one.prepared)


class DraftingTime:
    """Seconds that a step takes for drafting, beside the forward: a constant and a part for each drafted node.

    Learned by normalised least mean squares.
    """

    def __init__(self) -> None:
        self._base, self._per_node = DRAFTING_BASE, DRAFTING_PER_NODE

    def __call__(self, nodes: int) -> float:
        """Seconds for so many drafted nodes, all sequences together."""
        return self._base + self._per_node * nodes

    @property
    def parameters(self) -> tuple[float, float]:
        """The constant, and the part of each drafted node."""
        return self._base, self._per_node

    def observe(self, seconds: float, nodes: int) -> None:
        """Corrects the estimate: drafting so many nodes took so long."""
        if not 0 <= seconds < float("inf"):
            return
        expected = self(nodes)
        error = min(seconds, MOST_RATIO * expected) - expected  # a single slow step must not change much
        units = nodes / USUAL_NODES
        change = DRAFTING_RATE * error / (1 + units**2)
        self._base = max(self._base + change, 0.0)
        self._per_node = max(self._per_node + change * units / USUAL_NODES, 0.0)
        if self._base == 0.0 and seconds > 0:  # five times an expected 0 would stay 0
            self._base = DRAFTING_RATE * seconds


class ProfileStore:
    """The file with the stored profiles of one target on this processor.

    Args:
        fingerprint: of the target.

    Attributes:
        path: where the file is.
    """

    def __init__(self, fingerprint: str) -> None:
        self.fingerprint = fingerprint
        name = hashlib.sha256(f"{fingerprint} on {processor()}".encode()).hexdigest()[:16]
        self.path = cache_directory() / "latency" / f"{name}.json"

    def read(self, sequences: int, bucket: int = 1, prepared: int = 0) -> LatencyProfile | None:
        """The stored profile of so many sequences; None if there is none, or it is too old or broken.

        Args:
            bucket, prepared: see `TargetInfo`.
        """
        try:
            found = self._entries()[str(sequences)]
            if not _is_young(found["measured"]):
                return None
            seconds = {int(n): float(seconds) for n, seconds in found["seconds"].items()}
            if max(seconds) > MOST_ROWS or not all(LEAST_SECONDS <= each <= MOST_SECONDS for each in seconds.values()):
                return None
            profile = LatencyProfile(seconds, bucket=bucket, prepared=prepared)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            return None
        return profile if profile.sizes[0] == sequences else None

    def write(self, profiles: Mapping[int, LatencyProfile], measured: bool) -> bool:
        """Replaces these profiles and leaves the others in the file as they are.

        Args:
            profiles: by number of sequences.
            measured: whether they were measured just now. Otherwise they keep the age that they had, unless that is too
                great to be read.

        Returns:
            False where the file cannot be written.
        """
        now = time()
        entries = self._entries()
        for sequences, profile in profiles.items():
            before = entries.get(str(sequences))
            is_new = measured or profile.contradicted
            age = before.get("measured") if isinstance(before, dict) and not is_new else None
            if not _is_young(age):  # nobody reads such an entry, so this profile does not come from it
                age = None
            if sequences == 1 and age is None and not measured:  # sizes that pay may be among those never seen
                age = now + STEPS_AGE - MOST_AGE
            profile.contradicted = False
            entries[str(sequences)] = {
                "measured": now if age is None else age,
                "steps": profile.steps,
                "seconds": {n: float(f"{seconds:.6g}") for n, seconds in profile.to_store().items()},
            }
        content = {"format": FORMAT, "target": self.fingerprint, "processor": processor(), "profiles": entries}
        return write_json(self.path, content)

    def _entries(self) -> dict[str, Any]:
        """Number of sequences -> entry of the file; empty where the file is missing, broken or of another target."""
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            if (found["format"], found["target"], found["processor"]) == (FORMAT, self.fingerprint, processor()):
                return dict(found["profiles"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            pass
        return {}


def _is_young(measured: Any) -> bool:
    """Whether a profile of that time may be read: it is not too old, and the clock was not set back since."""
    return isinstance(measured, (int, float)) and 0 <= time() - measured <= MOST_AGE


@cache
def processor() -> str:
    """The processor's name, its best extension for matrices, and the number of cores that the system shows.

    Clouds give processors of several generations the same name; their latency differs most by these extensions.
    """
    name, extensions = described()
    best = next((f" with {each.upper()}" for each in EXTENSIONS if each in extensions), "")
    return f"{os.cpu_count()} cores of {name or platform.processor() or platform.machine()}{best}"
