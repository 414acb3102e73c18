"""What several processes exchange of one section of their drafter caches: stamped entries whose merge is a join.

    ledger    key -> (stamp, value), a horizon, and a capacity
    order     entries are ordered by (stamp, key); a greater one was learned later
    join      of each key the greater (stamp, value) of both, of the capacities the smaller one, and of the horizons the
              greater one; then the bound
    bound     entries up to the horizon are dropped. If the keys of the rest, newest first, exceed the capacity, the
              first one that does not fit becomes the horizon, and it is dropped with everything before it

Join is commutative, associative and idempotent, so a set of ledgers gives the same ledger in whatever order and however
often its members are joined. Without the horizon it would not be associative: what was dropped once would no longer
keep out a smaller, older entry that comes later. For that proof the size of an entry has to be a function of its key.

Stamps are Lamport's clock (Time, clocks, and the ordering of events): what a process learns is stamped later than all
that it has seen. This module does not know what keys and values mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from leapahead.drafters.cache_file import Arrays

Entry = tuple[bytes, bytes]  # key, value
Stamped = tuple[int, bytes]  # stamp, value
Place = tuple[int, bytes]  # stamp, key: the order of entries

MAX_VALUE = 4096  # bytes
MAX_STAMP = 2**62
NOTHING: Place = (0, b"")  # a horizon below every entry


@dataclass
class Ledger:
    """The entries of a section. Nothing is changed in place but by `learn`.

    Attributes:
        capacity: greatest sum of the lengths of keys, in bytes.
        entries: key -> (stamp, value), in the order of (stamp, key). A stamp is at least 1.
        horizon: the greatest entry that was dropped.
    """

    capacity: int
    entries: dict[bytes, Stamped] = field(default_factory=dict)
    horizon: Place = NOTHING

    def learn(self, live: Sequence[Entry]) -> None:
        """Stamps those entries that a section has learned since this ledger was made or `learn` was called last.

        A section lists its entries in the order in which they were written. So everything from the first entry on that
        the ledger does not have, has with another value, or has in another order, was written since.

        Args:
            live: all entries of the section, least recently written first.
        """
        given, live = live, self._that_fit(live)
        fitting = {key for key, _ in live}
        # What was written before all that fits, and must be older, since the bound would keep it instead.
        before = [(self.entries[key][0], key) for key, _ in given if key in self.entries and key not in fitting]
        fresh, last = len(live), max(before, default=NOTHING)
        for index, (key, value) in enumerate(live):
            stamp, known = self.entries.get(key, NOTHING)
            if not stamp or known != value or (stamp, key) < last:
                fresh = index
                break
            last = stamp, key
        if fresh == len(live):
            return
        clock = self.clock
        self._set({**self.entries, **{key: (clock + 1 + n, value) for n, (key, value) in enumerate(live[fresh:])}})

    def _that_fit(self, live: Sequence[Entry]) -> list[Entry]:
        """The latest entries as far as there is room for them, without those that are too large."""
        found, room = list[Entry](), self.capacity
        for key, value in reversed(live):
            if 0 < len(key) <= self.capacity // 2 and len(value) <= MAX_VALUE:
                if (room := room - len(key)) < 0:
                    break
                found.append((key, value))
        return found[::-1]

    @property
    def clock(self) -> int:
        """The greatest stamp that was seen."""
        last = next(reversed(self.entries.values()), NOTHING)[0]
        return max(last, self.horizon[0])

    def join(self, other: Ledger) -> Ledger:
        """The least ledger that holds what both know; see the module."""
        entries = dict(self.entries)
        for key, stamped in other.entries.items():
            if key not in entries or stamped > entries[key]:
                entries[key] = stamped
        joined = Ledger(min(self.capacity, other.capacity), {}, max(self.horizon, other.horizon))
        joined._set(entries)
        return joined

    def _set(self, entries: dict[bytes, Stamped]) -> None:
        """Takes these entries instead, ordered and bounded."""
        places = sorted(((stamp, key) for key, (stamp, _) in entries.items()), reverse=True)
        kept, room = list[Place](), self.capacity
        for place in places:
            room -= len(place[1])
            if place <= self.horizon:
                break
            if room < 0:
                self.horizon = place
                break
            kept.append(place)
        self.entries = {key: entries[key] for _, key in reversed(kept)}

    def listed(self) -> list[Entry]:
        """Keys and values, oldest first."""
        return [(key, value) for key, (_, value) in self.entries.items()]

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """The ledger as arrays of integers. Equal ledgers give equal arrays."""
        return {
            "keys": _bytes(self.entries),
            "key_lengths": np.array([len(key) for key in self.entries], dtype=np.int64),
            "values": _bytes(value for _, value in self.entries.values()),
            "value_lengths": np.array([len(value) for _, value in self.entries.values()], dtype=np.int64),
            "stamps": np.array([stamp for stamp, _ in self.entries.values()], dtype=np.int64),
            "bounds": np.array([self.capacity, self.horizon[0]], dtype=np.int64),
            "horizon": _bytes([self.horizon[1]]),
        }

    @classmethod
    def of(cls, arrays: Arrays) -> Ledger:
        """The ledger that `arrays` gave.

        Raises:
            ValueError: the arrays are something else.
        """
        for name in ("keys", "values", "horizon"):
            _expect(name, arrays[name], np.uint8)
        for name in ("key_lengths", "value_lengths", "stamps", "bounds"):
            _expect(name, arrays[name], np.int64)
        stamps: list[int] = arrays["stamps"].tolist()
        capacity, horizon = arrays["bounds"].tolist()
        if capacity < 1:
            raise ValueError(f"a capacity of {capacity} bytes is not possible")
        keys = _parts(arrays["keys"], arrays["key_lengths"], 1, capacity // 2)
        values = _parts(arrays["values"], arrays["value_lengths"], 0, MAX_VALUE)
        if len(set(keys)) != len(keys) or not len(keys) == len(values) == len(stamps):
            raise ValueError("its keys, values and stamps do not belong together")
        if not all(1 <= stamp <= MAX_STAMP for stamp in stamps) or not 0 <= horizon <= MAX_STAMP:
            raise ValueError("it has a stamp that no drafter cache gives")
        ledger = cls(capacity, {}, (horizon, arrays["horizon"].tobytes()))
        ledger._set(dict(zip(keys, zip(stamps, values, strict=True), strict=True)))
        if len(ledger.entries) != len(keys):
            raise ValueError("it has more entries than its capacity")
        return ledger


def _bytes(parts: Iterable[bytes]) -> npt.NDArray[np.generic]:
    return np.frombuffer(b"".join(parts), dtype=np.uint8)


def _expect(name: str, found: npt.NDArray[np.generic], kind: type[np.generic]) -> None:
    if found.ndim != 1 or found.dtype != kind:
        raise ValueError(f"{name} must be {np.dtype(kind)} with one dimension")


def _parts(joined: npt.NDArray[np.generic], lengths: npt.NDArray[np.generic], least: int, most: int) -> list[bytes]:
    """The parts of these lengths, each of `least` to `most` bytes."""
    sizes: list[int] = lengths.tolist()
    if sum(sizes) != joined.size or not all(least <= size <= most for size in sizes):
        raise ValueError("the lengths of its keys or values are not possible")
    data, ends = joined.tobytes(), np.cumsum(lengths).tolist()
    return [data[end - size : end] for end, size in zip(ends, sizes, strict=True)]
