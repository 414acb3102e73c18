"""A sequence of a GGUF target, and its part in a forward."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from leapahead.core.errors import BadParameter
from leapahead.core.sampling import Sampler
from leapahead.core.tree import TokenTree
from leapahead.core.verify import Verdict
from leapahead.models.base import Capture
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
        self.tokens, self.track, self.sampler, self.capture = sampler.tokens, track, sampler, capture
        self.is_read = track.length == len(self.tokens) - 1
        self.ahead = self.rows_given = self.chunked = 0
        self._target = target

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


@dataclass(frozen=True)
class Part:
    """One session of a step.

    Attributes:
        index: of the caller's sessions.
        tree: its tree; None where the prompt is not read to its end by this forward.
        num_computed: nodes of the tree that the last step has computed.
    """

    index: int
    session: LlamaCppSession
    tree: TokenTree | None
    num_computed: int

    @cached_property
    def placed(self) -> TokenTree:
        """The tree, behind what is replayed or read of the prompt."""
        session = self.session
        start = session.track.length
        tokens = session.tokens[start : start + session.ahead]
        if self.tree is None:
            return TokenTree.chain(tokens[0], tokens[1:])
        if session.replay and not self.tree.is_chain:
            raise BadParameter(CHAINS_ONLY)
        return self.tree.behind(tokens)

    @cached_property
    def begin(self) -> int:
        """Nodes of `placed` that the last step has computed."""
        return self.num_computed and self.session.ahead + self.num_computed

    @property
    def new(self) -> int:
        """Nodes of `placed` that go through the model."""
        return len(self.placed) - self.begin

    @cached_property
    def rows(self) -> int:
        """Nodes of the tree that go through the model."""
        return 0 if self.tree is None else len(self.tree) - self.num_computed

    @cached_property
    def captured(self) -> int:
        """Tokens in front of the tree, the last of them, whose top-k tokens are captured."""
        session = self.session
        if session.is_read:
            return 0
        start, end = session.track.length, session.track.length + session.ahead
        return end - first_row(start, end, len(session.tokens) - 1, session.capture)

    @property
    def wanted_rows(self) -> int:
        """Nodes whose outputs are wanted; they are its last ones."""
        return self.captured + self.rows

    @cached_property
    def wanted(self) -> list[bool]:
        """Of its nodes that go through the model, whether outputs are wanted."""
        return [False] * (self.new - self.wanted_rows) + [True] * self.wanted_rows
