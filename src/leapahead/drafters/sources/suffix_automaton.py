"""An online suffix automaton over token ids: the longest earlier occurrence of any suffix of a text.

    state ──token──> state of its substrings extended by the token        one transition a token, O(1) amortised
      │ suffix link: the state of the longest suffix that occurred in more contexts

A state stands for the substrings that end at the same positions. Construction is Blumer's: online, linear, with at most
two states a token. Several texts can be added; a new text starts from the empty string, so that no substring spans two
of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import islice
from typing import TypeAlias

from leapahead import native

COUNT_LINKS = 8  # states along the suffix links whose counts grow with each token; all of them would be quadratic

NONE, SEVERAL = -1, -2  # values of `_next`


class SuffixAutomaton:
    """A suffix automaton over texts of token ids from 0 up. State 0 is the empty string.

    `new_automaton` gives the compiled one where it is installed, which is the same, state for state.

    A state with one transition, as most have, keeps it as one integer, because a dict for each would take most of the
    memory. One thread may add while others read; they may miss the latest tokens.
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
        """Number of states."""
        return len(self._link)

    def step(self, state: int, token: int) -> int | None:
        """The state after a transition; None where there is none."""
        target = self._next[state]
        if target >> 32 == token:
            return target & 0xFFFFFFFF
        return self._several[state].get(token) if target == SEVERAL else None

    def followers(self, state: int, limit: int) -> list[tuple[int, int]]:
        """At most `limit` tokens that followed a state, each with its count, which is approximate.

        Of more tokens than `limit` it gives those seen first and those seen last; frequent ones are among the first.
        """
        target, count = self._next[state], self._count
        if target >= 0:
            return [(target >> 32, count[target & 0xFFFFFFFF])]
        if target == NONE:
            return []
        targets = self._several[state]
        if len(targets) <= limit:
            few = list(targets.items())
        else:  # each list is built in one call, so that a thread that adds cannot change the dict meanwhile
            few = list(islice(targets.items(), limit - limit // 2))
            few += list(islice(reversed(targets.items()), limit // 2))
        return [(token, count[target]) for token, target in few]

    def link(self, state: int) -> int:
        """The suffix link of a state; -1 for state 0."""
        return self._link[state]

    def length(self, state: int) -> int:
        """Length of the longest substring of the state."""
        return self._length[state]

    def settled(self, state: int, length: int) -> int:
        """The state of a substring of `length` tokens that was in `state`, which may have been split since."""
        while state > 0 and length <= self._length[self._link[state]]:
            state = self._link[state]
        return state

    def advance(self, state: int, length: int, token: int, max_links: int = -1) -> tuple[int, int]:
        """Extends a match by a token, shortening it as far as necessary.

        Fewer than `length` suffix links are followed, so over a text fewer than it has tokens.

        Args:
            state: of the match.
            length: of the match, in tokens.
            token: that comes next.
            max_links: follow at most so many suffix links and then try the empty string; -1 for no limit.

        Returns:
            State and length of the longest suffix of (match + token) that occurred.
        """
        state = self.settled(state, length)
        while (target := self.step(state, token)) is None:
            if state == 0:
                return 0, 0
            max_links -= 1
            state = self._link[state] if max_links else 0
            length = self._length[state]
        return target, length + 1

    def add(self, token: int) -> None:
        """Appends a token to the current text."""
        self.tokens += 1
        state, current = self._last, 0
        target = self.step(state, token)
        if target is None:
            current = self._new(self._length[state] + 1, 0)
            while state >= 0 and (target := self.step(state, token)) is None:
                self._set(state, token, current)
                state = self._link[state]
        if target is not None:  # a suffix of the text occurred before, or the whole text is the beginning of another
            if self._length[state] + 1 != self._length[target]:
                target = self._split(state, token, target)
            if current:
                self._link[current] = target
            else:
                current = target
        self._last = current
        for _ in range(COUNT_LINKS):
            if current <= 0:
                break
            self._count[current] += 1
            current = self._link[current]

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends tokens to the current text."""
        for token in tokens:
            self.add(token)

    def restart(self) -> None:
        """Begins a new text."""
        self._last = 0

    @property
    def end(self) -> int:
        """The state of the longest suffix of the text that occurred earlier in it. For a single text."""
        return max(self._link[self._last], 0)

    def _set(self, state: int, token: int, target: int) -> None:
        following = self._next[state]
        if following == SEVERAL:
            self._several[state][token] = target
        elif following == NONE or following >> 32 == token:
            self._next[state] = token << 32 | target
        else:
            self._several[state] = {following >> 32: following & 0xFFFFFFFF, token: target}
            self._next[state] = SEVERAL

    def _new(self, length: int, link: int) -> int:
        self._link.append(link)
        self._length.append(length)
        self._count.append(0)
        self._next.append(NONE)
        return len(self._next) - 1

    def _split(self, state: int, token: int, target: int) -> int:
        """Gives the substrings of `target` that are not longer than those of `state` plus a token their own state."""
        clone = self._new(self._length[state] + 1, self._link[target])
        self._count[clone] = self._count[target]
        if (following := self._next[target]) == SEVERAL:
            self._several[clone] = dict(self._several[target])
        self._next[clone] = following
        while state >= 0 and self.step(state, token) == target:
            self._set(state, token, clone)
            state = self._link[state]
        self._link[target] = clone
        return clone


Automaton: TypeAlias = "SuffixAutomaton | native.module.SuffixAutomaton"


def new_automaton() -> Automaton:
    """An empty automaton: the compiled one, where this installation has it."""
    return native.module.SuffixAutomaton() if native.available else SuffixAutomaton()
