"""A sequence of a GGUF target, and its part in a forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from leapahead.core.errors import BadParameter, Refused
from leapahead.core.sampling import Sampler
from leapahead.core.tree import TokenTree
from leapahead.core.verify import Verdict
from leapahead.models.base import NOTHING, Capture, TargetInfo, require
from leapahead.models.captured import first_row
from leapahead.models.llama_cpp.context import Model
from leapahead.models.llama_cpp.state_track import CHAINS_ONLY
from leapahead.models.llama_cpp.track import Track


class Owner(Protocol):
    """The target that a session belongs to."""

    model: Model

    def release(self, session: LlamaCppSession) -> None: ...


class LlamaCppSession:
    """One sequence. Once its prompt is read, its track holds every committed token but the last, the next root.

    A recurrent state may lag behind: the tokens that it has not read are replayed.

    Attributes:
        is_read: whether the prompt is read.
        ahead: tokens in front of the last step's tree: replayed ones, or the end of the prompt.
        rows_given: positions of the prompt up to which captured rows were returned.
        chunked: in exact mode, the first tokens that are read as a prompt.
    """

    def __init__(self, target: Owner, track: Track, sampler: Sampler, capture: Capture) -> None:
        self.tokens, self.sampler = sampler.tokens, sampler
        self.ahead = self.rows_given = self.chunked = 0
        self._target = target
        self.begin_again(track, capture)

    def begin_again(self, track: Track, capture: Capture = NOTHING) -> None:
        """Takes a track that has the first of its tokens at most; what it lacks is read as a prompt."""
        self.track, self.capture = track, capture
        self.is_read = track.length == len(self.tokens) - 1

    @property
    def unread(self) -> int:
        return 0 if self.is_read else len(self.tokens) - 1 - self.track.length

    @property
    def replay(self) -> int:
        return len(self.tokens) - 1 - self.track.length if self.is_read else 0

    def commit(self, verdict: Verdict) -> None:
        ahead = self.ahead
        self.track.commit([*range(ahead), *(ahead + node for node in verdict.path)] if ahead else verdict.path)
        self.is_read = True
        self.tokens += verdict.tokens
        self.sampler.committed()
        assert 0 <= self.replay <= ahead + len(verdict.path)
        assert self.replay == 0 or self._target.model.stateful  # else it holds every committed token but the last

    def close(self) -> None:
        self._target.release(self)


def check_capture(capture: Capture, info: TargetInfo) -> None:
    """Refuses by name what cannot be captured."""
    require(info, capture.needs, "this capture")
    if others := [layer for layer in capture.hidden if layer != -1]:
        raise Refused(
            f"{info.name} cannot give the hidden states of layer {others[0]}: llama.cpp's public interface gives those "
            "of the last layer only; capture layer -1, or load the model with Transformers"
        )


def check_step(trees: Sequence[TokenTree], rows: int, most: int, chains_only: str = "", fixed: bool = False) -> None:
    """Refuses a step that a target cannot compute.

    Args:
        trees: of its sessions.
        rows: that it takes, padding included.
        most: rows that it may have.
        chains_only: where trees must be chains, as messages name it; "" where they need not be.
        fixed: whether `most` is the same with all options.

    Raises:
        BadParameter: a tree has branches where it must not, or there are too many rows.
    """
    if chains_only and not all(tree.is_chain for tree in trees):
        raise BadParameter(f"a draft with branches is not possible {chains_only}; give a chain")
    if rows > most:
        larger = "" if fixed else ", or load the model with a larger n_batch and n_ubatch"
        raise BadParameter(
            f"a step of {rows} rows is more than the {most} that one may have; give shorter drafts{larger}"
        )


class Part:
    """One session of a step, whose `ahead` is known.

    Args:
        index: of the caller's sessions.
        session: see above.
        tree: its tree; None where the prompt is not read to its end by this forward.
        num_computed: nodes of the tree that the last step has computed.

    Attributes:
        placed: the tree, behind what is replayed or read of the prompt.
        begin: nodes of `placed` that the last step has computed.
        new: nodes of `placed` that go through the model.
        rows: nodes of the tree that go through the model.
        captured: tokens in front of the tree, the last of them, whose top-k tokens are captured.
        wanted_rows: nodes whose outputs are wanted; they are its last ones.

    Raises:
        BadParameter: a tree behind tokens that are replayed is no chain.
    """

    def __init__(self, index: int, session: LlamaCppSession, tree: TokenTree | None, num_computed: int) -> None:
        self.index, self.session, self.tree, self.num_computed = index, session, tree, num_computed
        start, ahead = session.track.length, session.ahead
        tokens = session.tokens[start : start + ahead] if ahead else []
        if tree is None:
            self.placed = TokenTree.chain(tokens[0], tokens[1:])
        elif ahead and session.replay and not tree.is_chain:
            raise BadParameter(CHAINS_ONLY)
        else:
            self.placed = tree.behind(tokens)
        self.begin = num_computed and ahead + num_computed
        self.new = len(self.placed) - self.begin
        self.rows = 0 if tree is None else len(tree) - num_computed
        self.captured = 0
        if not session.is_read:
            self.captured = start + ahead - first_row(start, start + ahead, len(session.tokens) - 1, session.capture)
        self.wanted_rows = self.captured + self.rows

    @property
    def wanted(self) -> list[bool]:
        """Of its nodes that go through the model, whether outputs are wanted."""
        return [False] * (self.new - self.wanted_rows) + [True] * self.wanted_rows
