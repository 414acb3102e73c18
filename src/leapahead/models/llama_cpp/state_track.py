"""A sequence of a model with a recurrent state, which cannot discard tokens: the state before a draft is kept.

    step 1    a b | c d e f         c is the root, d e f the draft; the kept state has read a and b
              accepted: d           the kept state comes back, and c and d are replayed
    step 2    a b | c d e' x y z    c and d ride at the head of the next forward; e', the bonus token, is the new root
              accepted: x y z       all of it: the state after z is the one to go on from

A state is kept by a second sequence id. llama.cpp lets both ids share one state until a forward of the main id writes
it, which goes to another place then, so that keeping copies nothing. The second id owns the attention cells of the
committed tokens too, and is never part of a batch: no token sees a position twice. Where no id is left, a copy of the
state is kept in the memory of this process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from leapahead.core.errors import BadParameter, CacheFull
from leapahead.core.tree import TokenTree
from leapahead.models.llama_cpp.context import State
from leapahead.models.llama_cpp.track import Track

Kept: TypeAlias = "int | State"  # a sequence id, or a copy
CHAINS_ONLY = "a model with a recurrent state takes chains only; give a draft without branches"
MOST_KEPT = 2  # states of a draft that grows: before it, and behind its first forward, which is often accepted whole


class StateTrack(Track):
    """The state of one sequence, and its attention cells where it has some. Trees are chains; see `Track`."""

    def _reset(self) -> None:
        super()._reset()
        self.kept: list[tuple[int, Kept]] = []  # for the tree: how many tokens each state has read, least first

    def keep(self, num_computed: int) -> None:
        """Keeps the state, which has read the committed tokens and the first nodes of the tree that grows."""
        if num_computed == 0:
            self.kept = []
        if len(self.kept) == (MOST_KEPT if self.context.saves_states else 1):  # else others need the ids
            return
        read = self.length + num_computed
        spare = self._spare()
        if spare is not None:
            if self.copies[spare] != read:
                self._copy(self.main, spare, read)
            self.kept.append((read, spare))
        elif not self.kept:
            if not self.context.saves_states:
                raise CacheFull(
                    f"no sequence id of n_seq_max={self.context.n_seq_max} is left, and a draft needs one for the "
                    "state before it; close a sequence, or load the model with a larger n_seq_max"
                )
            self.kept.append((read, self.context.save_state(self.main)))

    def place(self, tree: TokenTree, num_computed: int = 0) -> list[list[int]]:
        if not tree.is_chain:
            raise BadParameter(CHAINS_ONLY)
        assert num_computed in (0, len(self.tree or ())), "nodes that never went through"
        self.tree = tree
        return [[self.main]] * (len(tree) - num_computed)

    def commit(self, path: Sequence[int]) -> None:
        """Makes the path final. Where it is not the whole tree, `length` may fall behind it: see the module."""
        assert self.tree is not None, "commit without a step"
        end = self.length + len(path)
        if len(path) < len(self.tree):
            end, state = [each for each in self.kept if each[0] <= end][-1]
            self._restore(end, state)
        self.length = end
        self.kept, self.tree = [], None

    def discard_tree(self) -> bool:
        """Restores the state before a tree that is not committed; false where none was kept.

        The state itself says how many tokens it has read: an interrupted step may not have reached it.
        """
        if self.context.last_position(self.main) != self.length - 1:
            states = [state for read, state in self.kept if read == self.length]
            if not states:
                return False
            self._restore(self.length, states[0])
        self.context.remove(self.main, self.length)  # attention cells of a restoration that was interrupted
        self.kept, self.tree = [], None
        return True

    def _spare(self) -> int | None:
        """An id that holds no state of the tree; None where all are in use, or cannot hold one."""
        if not self.context.shares_states:
            return None
        used = self._in_use()
        for each in self.copies:
            if each not in used:
                return each
        try:
            new = self._new_id(self)
        except CacheFull:
            return None
        self.copies[new] = 0
        return new

    def _in_use(self) -> set[int]:
        return {state for _, state in self.kept if isinstance(state, int)}

    def _restore(self, read: int, state: Kept) -> None:
        """Takes the sequence back to a kept state. Later states, of tokens that were rejected, are dropped."""
        if isinstance(state, int):
            self.context.remove(self.main)
            self.context.copy(state, self.main)
        else:
            self.context.load_state(self.main, state)
            self.context.remove(self.main, read)
        for other, own in self.copies.items():
            if own > read:
                self.context.remove(other)
                self.copies[other] = 0

    def _copy(self, source: int, goal: int, read: int) -> None:
        self.copies[goal] = 0  # until it is done
        self.context.remove(goal)
        self.context.copy(source, goal)
        self.copies[goal] = read
