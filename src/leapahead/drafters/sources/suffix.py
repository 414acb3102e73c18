"""Suffix automata: the longest earlier place that ends like the text, in this text and in past ones, of any length.

    state of an ending ──token──> state of that ending grown by it          one transition a token, O(1)
          │ suffix link: the longest ending of it that was followed by something else too

    own       prompt and output of this request; its place is the link of its newest state
    shared    past texts, in two volumes, old and young; a place in each is moved on with every token of this text

After SAM Decoding (2411.10666), with branches by count as in SuffixDecoding (2411.04975). Construction is Blumer's:
online, linear, at most two states a token; a new text begins at the empty ending again, so no match crosses from one
into another.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from itertools import islice
from math import log
from threading import Lock
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from leapahead.core.errors import BadParameter
from leapahead.drafters.base import Context
from leapahead.drafters.cache import Arrays, Section
from leapahead.planner.source import Candidate, Feature, Source
from leapahead.models.base import CHAIN

COUNTED = 8  # endings of each token's place, longest first, whose counts grow; all of them would be quadratic
FALLS = 16  # links that a drafted token may fall through; a text of one token has as many as tokens
ENDINGS = 3  # that are asked for continuations, longest first
BACKED_OFF = 0.3  # weight of a shorter ending's continuations
LENGTHS = (1, 2, 3, 5, 8, 12, 20, 40)
ENOUGH = 8  # continuations
FOUND = 32  # tokens by which a place in past texts is found
CAPACITY = 200_000  # tokens of past texts

NONE, SEVERAL = -1, -2  # transitions


class SuffixAutomaton:
    """Over texts that grow one behind the other, of token ids from 0 up. State 0 is the empty ending.

    A state with one transition, as most have, keeps it as a number: a dict for each would be most of the memory. One
    thread may add while others read: what they see is some moments old at worst.
    """

    def __init__(self) -> None:
        self._next = array("q", [NONE])  # token << 32 | state, or SEVERAL
        self._several: dict[int, dict[int, int]] = {}  # state -> token -> state
        self._link = array("i", [-1])
        self._length = array("i", [0])
        self._count = array("i", [0])
        self._last = 0
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._link)

    def step(self, state: int, token: int) -> int | None:
        """Along a transition; None where there is none."""
        after = self._next[state]
        if after >> 32 == token:
            return after & 0xFFFFFFFF
        return self._several[state].get(token) if after == SEVERAL else None

    def after(self, state: int, most: int) -> list[tuple[int, int]]:
        """(token, how often it was seen there) of a state: of more than `most` tokens the first seen and the last seen.

        Those that come often are among the first.
        """
        after, count = self._next[state], self._count
        if after >= 0:
            return [(after >> 32, count[after & 0xFFFFFFFF])]
        if after == NONE:
            return []
        targets = self._several[state]
        if len(targets) <= most:
            few = list(targets.items())
        else:  # each of the two lists is made in one go, whatever another thread adds
            few = list(islice(targets.items(), most - most // 2)) + list(islice(reversed(targets.items()), most // 2))
        return [(token, count[target]) for token, target in few]

    def link(self, state: int) -> int:
        return self._link[state]

    def length(self, state: int) -> int:
        """Of the longest ending of the state."""
        return self._length[state]

    def settled(self, state: int, length: int) -> int:
        """The state of an ending whose state was `state`, which may have been split since."""
        while state > 0 and length <= self._length[self._link[state]]:
            state = self._link[state]
        return state

    def advance(self, state: int, length: int, token: int, falls: int = -1) -> tuple[int, int]:
        """The longest ending of (an ending grown by a token) that stood in the texts: its state and its length.

        The links that are fallen through are fewer than `length`, so over a text they are fewer than its tokens.

        Args:
            falls: fall through so many links and then to the empty ending; -1 for as many as there are.
        """
        state = self.settled(state, length)
        while (target := self.step(state, token)) is None:
            if state == 0:
                return 0, 0
            falls -= 1
            state = self._link[state] if falls else 0
            length = self._length[state]
        return target, length + 1

    def _set(self, state: int, token: int, target: int) -> None:
        after = self._next[state]
        if after == SEVERAL:
            self._several[state][token] = target
        elif after == NONE or after >> 32 == token:
            self._next[state] = token << 32 | target
        else:
            self._several[state] = {after >> 32: after & 0xFFFFFFFF, token: target}
            self._next[state] = SEVERAL

    def _new(self, length: int, link: int) -> int:
        self._link.append(link)
        self._length.append(length)
        self._count.append(0)
        self._next.append(NONE)
        return len(self._next) - 1

    def _split(self, state: int, token: int, target: int) -> int:
        """The endings of `target` that are no longer than those of `state` grown by a token: a state of their own."""
        clone = self._new(self._length[state] + 1, self._link[target])
        self._count[clone] = self._count[target]
        if (after := self._next[target]) == SEVERAL:
            self._several[clone] = dict(self._several[target])
        self._next[clone] = after
        while state >= 0 and self.step(state, token) == target:
            self._set(state, token, clone)
            state = self._link[state]
        self._link[target] = clone
        return clone

    def add(self, token: int) -> None:
        """The text grows by a token."""
        self.tokens += 1
        state, current = self._last, 0
        target = self.step(state, token)
        if target is None:
            current = self._new(self._length[state] + 1, 0)
            while state >= 0 and (target := self.step(state, token)) is None:
                self._set(state, token, current)
                state = self._link[state]
        if target is not None:  # this ending has been there, or the text is new and begins like another
            if self._length[state] + 1 != self._length[target]:
                target = self._split(state, token, target)
            if current:
                self._link[current] = target
            else:
                current = target
        self._last = current
        for _ in range(COUNTED):
            if current <= 0:
                break
            self._count[current] += 1
            current = self._link[current]

    def restart(self) -> None:
        """What is added from now on is another text."""
        self._last = 0

    @property
    def end(self) -> int:
        """The longest ending of the text that stood in it before; the text itself did not. For a single text."""
        return max(self._link[self._last], 0)


class Volume:
    """Some past texts."""

    def __init__(self) -> None:
        self.automaton = SuffixAutomaton()
        self.texts: dict[bytes, int] = {}  # int32 ids -> how many, in order

    @property
    def tokens(self) -> int:
        return self.automaton.tokens

    def add(self, text: bytes) -> None:
        self.automaton.restart()
        for token in array("i", text):
            self.automaton.add(token)
        self.texts[text] = len(text) // 4


class SharedTexts(Section):
    """Past texts, and a suffix automaton over each of two volumes of them.

    Texts enter the young volume. When it is full it becomes the old one, and what was old is forgotten. A text that the
    young volume holds already does not enter again.

    Args:
        capacity: tokens, in both volumes together. The default of 200,000 holds up to 28 MB.

    Attributes:
        volumes: old and young; replaced as a whole, so that who reads keeps what he has.
    """

    token_arrays: ClassVar[tuple[str, ...]] = ("tokens",)

    def __init__(self, capacity: int = CAPACITY) -> None:
        if capacity < 4:
            raise BadParameter(f"capacity={capacity} is not possible: past texts need room for at least 4 tokens")
        self.capacity = capacity
        self.volumes = (Volume(), Volume())
        self._lock = Lock()

    @property
    def longest(self) -> int:
        """Tokens of a text that are kept, its last: half of the capacity, as much as a volume holds."""
        return self.capacity // 2

    def add(self, tokens: Sequence[int]) -> None:
        """Enters a finished text."""
        with self._lock:
            self.volumes = self._with(self.volumes, array("i", tokens[-self.longest :]))

    def _with(self, volumes: tuple[Volume, Volume], text: array[int]) -> tuple[Volume, Volume]:
        """The volumes with a text more; a young one that has room for it grows."""
        _, young = volumes
        if len(text) < 2:
            return volumes  # says nothing of what follows
        if (key := text.tobytes()) in young.texts:
            young.texts[key] = young.texts.pop(key)  # the latest again
            return volumes
        if young.tokens + len(text) > self.longest:
            volumes = young, Volume()
        volumes[1].add(key)
        return volumes

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The texts, oldest first: `tokens`, int32, one text behind the other, and `lengths`, int64, of each."""
        with self._lock:
            texts = self._texts()
        return {
            "tokens": np.array([token for text in texts for token in text], dtype=np.int32),
            "lengths": np.array([len(text) for text in texts], dtype=np.int64),
        }

    def _texts(self) -> list[array[int]]:
        old, young = self.volumes
        return [array("i", text) for text in (*(t for t in old.texts if t not in young.texts), *young.texts)]

    def merge(self, arrays: Arrays) -> None:
        """Takes over another's texts, as if they had come before its own; the oldest of all leave."""
        others = _checked(arrays)
        with self._lock:
            last = {text[-self.longest :].tobytes(): None for text in reversed(others + self._texts())}  # each once
            texts = [array("i", text) for text in reversed(last)]
            first, room = len(texts), self.capacity
            while first and (room := room - len(texts[first - 1])) >= 0:
                first -= 1
            volumes = Volume(), Volume()
            for text in texts[first:]:
                volumes = self._with(volumes, text)
            self.volumes = volumes

    def figures(self) -> dict[str, Any]:
        volumes = self.volumes
        return {
            "texts": sum(len(volume.texts) for volume in volumes),
            "tokens": sum(volume.tokens for volume in volumes),
            "capacity": self.capacity,
            "states": sum(len(volume.automaton) for volume in volumes),
        }


def _checked(arrays: Arrays) -> list[array[int]]:
    """The texts that `arrays` gave."""
    if set(arrays) != {"tokens", "lengths"}:
        raise ValueError(f"past texts are the arrays tokens and lengths, not {', '.join(sorted(arrays)) or 'none'}")
    tokens, lengths = arrays["tokens"], arrays["lengths"]
    for name, found, kind in (("tokens", tokens, np.int32), ("lengths", lengths, np.int64)):
        if found.ndim != 1 or found.dtype != kind:
            raise ValueError(
                f"{name} of past texts is {found.dtype} with {found.ndim} dimensions; it must be "
                f"{np.dtype(kind)} with one"
            )
    if len(lengths) and lengths.min() < 1:
        raise ValueError(f"a past text of {lengths.min()} tokens is not possible")
    if lengths.sum() != len(tokens):
        raise ValueError(f"the lengths of past texts add up to {lengths.sum()}, but there are {len(tokens)} tokens")
    if len(tokens) and tokens.min() < 0:
        raise ValueError(f"a past text holds {tokens.min()}, which is no token id")
    ends = np.cumsum(lengths).tolist()
    return [
        array("i", tokens[end - length : end].tobytes()) for end, length in zip(ends, lengths.tolist(), strict=True)
    ]


Place = tuple[SuffixAutomaton, int, int]  # automaton, state, length of the match; a length of 0 is no match


class Suffix(Source):
    """Continuations of the longest ending that this text or a past one has had before, then of shorter ones."""

    name: ClassVar[str] = "suffix"
    needs: ClassVar[frozenset[str]] = frozenset({CHAIN})

    def __init__(self) -> None:
        self.automaton = SuffixAutomaton()
        self._shared: SharedTexts | None = None
        self._places: dict[Volume, tuple[int, int, int]] = {}  # state, length, texts of the volume as it was read

    def begin(self, context: Context) -> None:
        if context.drafter_cache is not None:
            self._shared = context.drafter_cache.section(self.name, SharedTexts)
        self._grow(context.tokens)

    def read(self, context: Context) -> None:
        self._grow(context.tokens)

    def finish(self, context: Context) -> None:
        if context.drafter_cache is not None:
            context.drafter_cache.section(self.name, SharedTexts).add(context.tokens)

    def _grow(self, tokens: Sequence[int]) -> None:
        known = self.automaton.tokens
        for index in range(known, len(tokens)):
            self.automaton.add(tokens[index])
        if self._shared is not None:
            self._places = {volume: self._place(volume, tokens, known) for volume in self._shared.volumes}

    def _place(self, volume: Volume, tokens: Sequence[int], known: int) -> tuple[int, int, int]:
        """Where the text stands in a volume: moved on with what is new; found by its last tokens if the volume grew."""
        texts, automaton = len(volume.texts), volume.automaton
        state, length, read = self._places.get(volume, (0, 0, -1))
        if read >= 0:
            for index in range(known, len(tokens)):
                state, length = automaton.advance(state, length, tokens[index])
        if read != texts:
            found = 0, 0
            for token in tokens[-FOUND:]:
                found = automaton.advance(*found, token)
            if found[1] > length:
                state, length = found
        return state, length, texts

    def root(self, context: Context) -> tuple[Place, ...]:
        """The own place first."""
        own, state = self.automaton, self.automaton.end
        places = [(own, state, own.length(state))]
        for volume, (there, length, _) in self._places.items():
            places.append((volume.automaton, volume.automaton.settled(there, length), length))
        return tuple(places)

    def follow(self, state: tuple[Place, ...], token: int) -> tuple[Place, ...]:
        return tuple([(automaton, *automaton.advance(at, length, token, FALLS)) for automaton, at, length in state])

    def candidates(self, state: tuple[Place, ...], limit: int) -> list[Candidate]:
        own, wanted, factor = state[0][0], min(limit, ENOUGH), 1.0
        weights: dict[int, float] = {}
        features: dict[int, Feature] = {}
        places = [place for place in state if place[2]]
        for _ in range(ENDINGS):
            if not places or len(weights) >= wanted:
                break
            longest = max([place[2] for place in places])
            here = [place for place in places if place[2] == longest]  # as long as each other: the same ending
            places = [place for place in places if place[2] < longest]
            most = max(wanted // len(here), 4)
            counts: dict[int, int] = {}
            who: dict[int, str] = {}
            for automaton, at, _ in here:
                for token, times in automaton.after(at, most):
                    if token in counts:
                        counts[token] += times or 1
                    else:
                        counts[token] = times or 1
                        who[token] = "own" if automaton is own else "shared"
                if (at := automaton.link(at)) > 0:
                    places.append((automaton, at, automaton.length(at)))
            if counts:
                bucket, share = bisect_left(LENGTHS, longest), factor / sum(counts.values())
                for token, times in counts.items():
                    if token in weights:
                        weights[token] += times * share
                    else:
                        weights[token] = times * share
                        features[token] = (bucket, times if times < 3 else 3, who[token])
                factor *= BACKED_OFF
        whole = sum(weights.values())
        chosen = sorted(weights, key=weights.__getitem__, reverse=True)[:limit]
        return [Candidate(token, log(weights[token] / whole), features[token]) for token in chosen]

    def figures(self) -> dict[str, Any]:
        told: dict[str, Any] = {"states": len(self.automaton), "tokens": self.automaton.tokens}
        if self._shared is not None:
            told["shared"] = self._shared.figures()
        return told
