"""What the draft models have in common that share the cache of the target's own sessions.

Such a session is opened with the live token list of a session of the target, reads no prompt, and commits nothing: its
committed tokens and their entries are the target's. See `leapahead.models.base.SharesCache`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from leapahead.core.errors import LeapaheadError
from leapahead.core.sampling import SamplingParams
from leapahead.core.tree import TokenTree
from leapahead.core.verify import Verdict
from leapahead.models.base import NOTHING, Capture
from leapahead.models.transformers.changes import Parts
from leapahead.models.transformers.forward import CachedState, Executor, Layers, Outputs, State
from leapahead.models.transformers.kv_cache import KVCache, Row
from leapahead.models.transformers.model import TransformersSession, TransformersTarget


class SharedState(CachedState):
    """A row of the target's: that of the sequence with these tokens, which has another one after it was preempted."""

    _row: Row

    @property
    def row(self) -> Row:
        if self._row.tokens is not self.tokens:
            self._row = self.cache.row_of(self.tokens) or self._row
        return self._row

    @row.setter
    def row(self, row: Row) -> None:
        self._row = row


class SharedSession(TransformersSession):
    """A sequence of the target, as its draft model sees it: its tokens and its row are the target's."""

    def commit(self, verdict: Verdict) -> None:
        """Nothing but the sampler's part: the target has committed already, whatever was drafted."""
        self.sampler.committed()

    def close(self) -> None:
        """Nothing: the row is the target's."""


class SharingExecutor:
    """Drafts for sequences of the target, and runs sequences that the target does not have in a cache of its own.

    Args:
        own: for the latter.
    """

    def __init__(self, own: Executor) -> None:
        self.own = own
        self.capabilities = own.capabilities

    @abstractmethod
    def shares(self, state: Any) -> bool:
        """Whether this is a state of one of the target's sequences."""

    @abstractmethod
    def draft(
        self, states: Sequence[Any], trees: Sequence[TokenTree], num_computed: Sequence[int] | None
    ) -> list[Outputs]:
        """See `Executor.forward`, for states of the target's sequences."""

    def open(self, tokens: list[int], reuse: int = 0, reserve: int = 0, owner: str = "") -> State:
        return self.own.open(tokens, reuse, reserve, owner)

    def prefill(self, state: Any, count: int, rows: int = 1, layers: Layers = ()) -> Outputs:
        return self.own.prefill(state, count, rows, layers)

    def fork(self, state: Any, tokens: list[int]) -> State:
        return self.own.fork(state, tokens)

    def forward(
        self,
        states: Sequence[Any],
        trees: Sequence[TokenTree],
        num_computed: Sequence[int] | None = None,
        layers: Layers = (),
    ) -> list[Outputs]:
        shared = [self.shares(state) for state in states]
        assert all(shared) or not any(shared), "a step is for sequences of the target or for others"
        if not all(shared):
            return self.own.forward(states, trees, num_computed, layers)
        return self.draft(states, trees, num_computed)

    def rows(self, states: Sequence[Any], trees: Sequence[TokenTree]) -> int:
        return self.own.rows(states, trees)

    def forget(self) -> None:
        self.own.forget()


class SharingTarget(TransformersTarget):
    """A draft model that is made of the target and shares the cache of its sessions.

    Attributes:
        shared: the target's cache; None where the draft model keeps a cache of its own after all.
        parts: of the target's model.
    """

    shared: KVCache | None = None

    def share(self, target: TransformersTarget, what: str) -> None:
        """Takes the target's lock. To be called when it is made; `what` tells its forwards from the target's."""
        self.info = replace(self.info, fingerprint=f"{target.info.fingerprint} {what}")
        self.lock = target.lock
        self.parts = Parts(target.model)  # of copies of which the draft model consists

    @abstractmethod
    def session(self, row: Row, params: SamplingParams, capture: Capture) -> TransformersSession:
        """A session for the sequence of the target that this row belongs to."""

    def shares(self, tokens: Sequence[int]) -> bool:
        """Whether these are the live tokens of a session of the target, so that opening it costs nothing."""
        return self.shared is not None and self.shared.row_of(tokens) is not None

    def open(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        capture: Capture = NOTHING,
        reserve: int = 0,
        owner: str = "",
    ) -> TransformersSession:
        """A session that shares the row of the target's session with this token list, or one with a row of its own."""
        if self.shared is None or (row := self.shared.row_of(tokens)) is None:
            return super().open(tokens, params, capture, reserve, owner)
        if not self.parts.are_all():
            raise self.changed("modules of the model were replaced")
        return self.session(row, params, capture)

    def changed(self, what: str) -> LeapaheadError:
        """The error of a model that is not the one any more that the draft model was made of."""
        return LeapaheadError(
            f"{what} since {self.info.name} was made of it, so it cannot draft; make a new LLM of the model as it is "
            "now"
        )
