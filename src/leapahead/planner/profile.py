"""What is known of a target on this machine, shared by all sequences of a process: cost curves, calibration, own time.

    CACHE/cost/DIGEST.json    {"format", "target", "processor", "curves": {sequences: {"measured", "steps", "seconds"}}}

One file a target, by its fingerprint (model, precision, device, threads) and the processor; in it a curve for each
number of sequences. It is written after a measurement, and again as steps correct it, at most once a minute, so that
the next process begins with what this one has learned. Files are replaced whole, and each writer has a name of its own
for the new one, so several processes may share them: the last one wins. What cannot be read, is another's, or was
measured long ago, is measured again; what cannot be written costs the next process a second.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from threading import Lock, RLock
from time import monotonic, time
from typing import Any
from weakref import WeakKeyDictionary

from leapahead.core.errors import LeapaheadError
from leapahead.drafters.base import Forward
from leapahead.drafters.sources.lookahead import Judge
from leapahead.models.base import Target
from leapahead.planner.acceptance import Calibration, Key
from leapahead.planner.latency import CostCurve, measure

FORMAT = 1
PRIORS = Path(__file__).parent / "priors.json"
OWN = 0.05  # weight of the newest step in the time that drafting takes
FIRST, EACH = 1e-4, 2e-5  # seconds that drafting is taken to need before it has been timed: in any case, and a node
USUAL = 8.0  # drafted nodes; in units of them the two are learned alike
FARTHEST = 5.0  # times of what was expected; one slow step is no measure
ENOUGH = 30  # steps before a corrected curve is worth keeping
MINUTE = 60.0  # seconds between two writes
OLD = 7 * 24 * 3600.0  # seconds; a curve that says too much is never corrected where nothing is drafted


class Machine:
    """One per target.

    Attributes:
        calibration: of all sources on this target's texts.
        first, each: seconds of drafting, whatever is drafted, and for each node.
    """

    def __init__(self) -> None:
        self.calibration = Calibration(priors())
        self.first, self.each = FIRST, EACH
        self._curves: dict[int, CostCurve] = {}
        self._judges: dict[bool, Judge] = {}
        self._seen: Forward | None = None
        self._lock = RLock()
        self._place: Place | None = None
        self._kept = monotonic()

    def curve(self, target: Target, sequences: int) -> CostCurve:
        """Of forwards for so many sequences, by rows; measured when it is first asked for.

        Of several sequences it begins as that of one, since what costs is rows; steps correct it.
        """
        with self._lock:
            if (found := self._curves.get(sequences)) is not None:
                return found
            self._place = self._place or Place.of(target)
            found = self._place.read(sequences)
            if found is None and sequences == 1:
                found = _measured(target)
                if found is not None:
                    self._place.write({1: found}, measured=True)
                found = found or CostCurve.guessed()  # the steps will tell
            elif found is None:
                found = _of_more(self.curve(target, 1), sequences)
            self._curves[sequences] = found
            return found

    def again(self, target: Target) -> None:
        """Measures anew: what was kept may be of a busier hour, or of an idler one."""
        found = _measured(target)
        with self._lock:
            if found is not None:
                self._curves = {}  # those of several sequences begin as that of one
                self.put(target, 1, found)

    def put(self, target: Target, sequences: int, curve: CostCurve) -> bool:
        """Takes over a curve that has just been measured; false if it could not be written."""
        with self._lock:
            self._place = self._place or Place.of(target)
            self._curves[sequences] = curve
            return self._place.write({sequences: curve}, measured=True)

    def known_curve(self, sequences: int) -> CostCurve | None:
        """The curve, if it has been asked for already."""
        return self._curves.get(sequences)

    def judge(self, sampled: bool) -> Judge:
        """Of the lookahead window: one for greedy texts and one for sampled ones."""
        with self._lock:
            return self._judges.setdefault(sampled, Judge())

    def drafting(self, nodes: int) -> float:
        """Seconds that everything but the forward takes more than in a plain step."""
        return self.first + self.each * nodes

    def drafted(self, seconds: float, nodes: int) -> None:
        """Drafting took so long."""
        expected = self.drafting(nodes)
        if not 0 <= seconds < float("inf"):
            return
        off = min(seconds, FARTHEST * expected) - expected
        many = nodes / USUAL
        share = OWN * off / (1 + many**2)  # normalised least mean squares
        self.first = max(self.first + share, 0.0)
        self.each = max(self.each + share * many / USUAL, 0.0)
        if self.drafting(0) == 0.0 and seconds > 0:
            self.first = OWN * seconds  # else nothing could be learned from there

    def figures(self) -> dict[str, Any]:
        """Plain types, for `Stats.drafter`: how often what was guessed is right, by source and rank; T(n) in ms."""
        coarse = self.calibration.rows(longest=3)
        return {
            "calibration": {" ".join(map(str, row["key"])): row["p"] for row in coarse if len(row["key"]) == 3},
            "milliseconds": {
                str(sequences): {str(n): round(1e3 * curve(n), 3) for n in curve.sizes}
                for sequences, curve in sorted(self._curves.items())
            },
        }

    def observed(self, forward: Forward) -> None:
        """A forward is over; each of its sequences may tell of it."""
        with self._lock:
            if forward is self._seen:
                return
            self._seen = forward
            if (curve := self._curves.get(forward.sequences)) is not None:
                curve.observe(forward.rows, forward.seconds)
            if (now := monotonic()) - self._kept >= MINUTE:
                self._kept = now
                self.keep()

    def keep(self) -> bool:
        """Writes what steps have taught; false if there is nothing, or nowhere to write it."""
        with self._lock:
            taught = {sequences: curve for sequences, curve in self._curves.items() if curve.steps >= ENOUGH}
            return bool(taught) and self._place is not None and self._place.write(taught, measured=False)


@cache
def priors() -> dict[Key, float]:
    """What is believed of candidates before any was seen: the shares that `research.priors` has measured."""
    if not PRIORS.is_file():
        return {}
    return {tuple(key): p for key, p in json.loads(PRIORS.read_text(encoding="utf-8"))}


_machines: WeakKeyDictionary[Target, Machine] = WeakKeyDictionary()
_lock = Lock()


def machine_of(target: Target) -> Machine:
    """The one of this target."""
    with _lock:
        if (found := _machines.get(target)) is None:
            found = _machines[target] = Machine()
        return found


def _measured(target: Target) -> CostCurve | None:
    try:
        return measure(target)
    except LeapaheadError:  # no room for a session of its own
        return None


def _of_more(one: CostCurve, sequences: int) -> CostCurve:
    """A plain step has a row for each sequence; what lies below is never decoded."""
    rows = sorted({sequences, 2 * sequences, 4 * sequences, *(n for n in one.sizes if n > sequences)})
    return CostCurve({n: one(n) for n in rows}, pace=1.0)


@cache
def processor() -> str:
    """The processor's name and the number of its cores that the system shows."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{os.cpu_count()} cores of {model or platform.processor() or platform.machine()}"


class Place:
    """The file of a target's curves.

    Args:
        target: its fingerprint.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        folder = os.environ.get("LEAPAHEAD_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "leapahead"
        name = hashlib.sha256(f"{target} on {processor()}".encode()).hexdigest()[:16]
        try:
            folder = Path(folder).expanduser()
        except RuntimeError:  # nobody's home is known
            folder = Path(tempfile.gettempdir()) / "leapahead"
        self.path = folder / "cost" / f"{name}.json"

    @classmethod
    def of(cls, target: Target) -> Place:
        return cls(target.fingerprint or f"{type(target).__name__} {target.name}")

    def read(self, sequences: int) -> CostCurve | None:
        """The curve of so many sequences, if there is one of use."""
        try:
            found = self._entries()[str(sequences)]
            if not 0 <= time() - found["measured"] <= OLD:
                return None
            curve = CostCurve({int(n): float(seconds) for n, seconds in found["seconds"].items()})
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            return None
        return curve if curve.sizes[0] == sequences else None

    def write(self, curves: Mapping[int, CostCurve], measured: bool) -> bool:
        """Replaces these curves and leaves the file's others; false where nothing can be written.

        Args:
            curves: by number of sequences.
            measured: just now; else they keep the age that they had.
        """
        now = time()
        entries = self._entries()
        for sequences, curve in curves.items():
            before = entries.get(str(sequences))
            age = before.get("measured") if isinstance(before, dict) and not measured else None
            entries[str(sequences)] = {
                "measured": age if isinstance(age, (int, float)) else now,
                "steps": curve.steps,
                "seconds": {n: float(f"{seconds:.6g}") for n, seconds in curve.as_dict().items()},
            }
        content = {"format": FORMAT, "target": self.target, "processor": processor(), "curves": entries}
        part = ""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, part = tempfile.mkstemp(prefix=f"{self.path.stem}.", suffix=".part", dir=self.path.parent)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(content, file)
            os.replace(part, self.path)
        except OSError:
            if part:
                Path(part).unlink(missing_ok=True)
            return False
        return True

    def _entries(self) -> dict[str, Any]:
        """Number of sequences -> what the file says of them; empty where it is broken or another's."""
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            if (found["format"], found["target"], found["processor"]) == (FORMAT, self.target, processor()):
                return dict(found["curves"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            pass
        return {}
