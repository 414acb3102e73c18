"""OpenVINO models as targets: trees by a mask over the new tokens, or chains, over one cache for all sessions.

How a forward is given to OpenVINO is in `paged`, with the cache in `blocks`; and, for models that paged attention
cannot compute, in `stateful`. This module knows neither drafters nor text.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from threading import RLock
from time import perf_counter
from typing import Any

import numpy as np

from leapahead.core.errors import BadParameter, LeapaheadError, Refused
from leapahead.core.sampling import Sampler, SamplingParams
from leapahead.core.tree import UNLIMITED, BoolArray, TokenTree
from leapahead.core.verify import Verdict
from leapahead.models.base import (
    ALL,
    NOTHING,
    TREE,
    Capture,
    Cost,
    TargetInfo,
    checked_prompt,
    require,
)
from leapahead.models.captured import TopK, first_row, prompt_rows
from leapahead.models.choices import Choices, FloatArray, PromptRows, best
from leapahead.models.openvino import selftest
from leapahead.models.openvino.compiled import CompiledModel, Part
from leapahead.models.openvino.holding import HELD_BUCKETS, Holding
from leapahead.models.openvino.tracks import Cache, Track

CHUNK = 512  # greatest number of tokens of a prompt in one forward
EXACT_ROWS = 2  # tokens of a sequence in a forward, at least, with which all forwards give the same bits
TREE_ROOM = 256  # nodes of all trees that are possible while no sequence has filled a sliding window


class OpenVinoSession:
    """One sequence. Once its prompt is read, its track holds every committed token but the last, the next root."""

    def __init__(self, target: OpenVinoTarget, track: Track, sampler: Sampler, capture: Capture) -> None:
        self.tokens, self.track, self.sampler, self.capture = sampler.tokens, track, sampler, capture
        self.rows_given = 0  # positions of the prompt up to which captured rows were returned
        self._target = target

    @property
    def unread(self) -> int:
        return len(self.tokens) - 1 - self.track.length

    @property
    def replay(self) -> int:
        return 0

    def commit(self, verdict: Verdict) -> None:
        self._target.pool.keep(self.track, verdict.path)
        self.tokens += verdict.tokens
        self.sampler.committed()
        assert self.unread == 0  # the cache holds every committed token but the last

    def close(self) -> None:
        self._target.release(self)


class OpenVinoTarget:
    """A compiled model; see `leapahead.models.base.Target`.

    Hidden states are those of the last layer (-1), after the final norm.

    Args:
        model: compiled.
        context_length: greatest number of tokens of a sequence.
        cache_tokens: greatest number of tokens in the KV cache, all sequences together.
        name: for reports and messages.
        window: the smallest sliding window of its layers; 0 for none.
        exact: whether a token's logits must be the same bits with every draft, batch and schedule. OpenVINO's kernels
            for a single token add up in another order than those for several, so no sequence has fewer than two in a
            forward then; and drafts are chains, since masked nodes between those of a path move its sums. That this is
            enough is tested.

    Attributes:
        has_threads: OpenVINO computes in threads of its own, which a forked process does not have.

    Raises:
        Refused: the model's logits of several tokens at once are not those of one token at a time; or, in exact mode,
            not bit for bit.
    """

    has_threads = True

    def __init__(
        self,
        model: CompiledModel,
        *,
        context_length: int,
        cache_tokens: int,
        name: str,
        window: int = 0,
        exact: bool = False,
    ) -> None:
        self.model, self.lock = model, RLock()
        self.pool: Cache[Any] = model.new_cache(cache_tokens)
        limit, self.pool.limit = self.pool.limit, UNLIMITED  # for the texts of the test
        self._window = UNLIMITED
        self._sessions: list[OpenVinoSession] = []
        self._last_rows, self._plain_steps = 0, 0  # of the last step, and how many were plain since one was not
        self._holding = Holding()
        self._given: list[Choices] = []  # of the last step: their logits are OpenVINO's memory
        self.info = TargetInfo(
            name=name,
            vocab_size=model.vocab_size,
            context_length=context_length,
            precision=model.precision,
            capabilities=ALL - {TREE} if exact or not model.trees else ALL,
            fingerprint=f"OpenVINO {model.fingerprint}" + " exact" * exact,
            layers=model.layers,
            hidden_size=model.hidden_size,
            exact=exact,
            bucket=model.bucket,
            prepared=model.prepared,
            cache_tokens=limit,
        )
        self.info = replace(self.info, capabilities=selftest.capabilities(self, window))
        if exact and (wrong := selftest.differing_bits(self)):
            raise Refused(
                f"{name} cannot be decoded in exact mode: the logits of {wrong} drafted tokens are not those of plain "
                "decoding bit for bit on this processor; leave out exact"
            )
        self._warm_up()
        self._holding = Holding()  # without the forwards of the test
        self.pool.forget()
        self.pool.limit = limit
        # OpenVINO counts a sliding window by the row of a node and not by its depth, which differ in a tree.
        self._window = 0 if TREE not in self.info.capabilities else window or UNLIMITED

    def _warm_up(self) -> None:
        """Computes a step with every copy for drafted steps, since the first forward of each takes far longer."""
        for copy in range(self.info.prepared):
            rows = (copy + 1) * self.info.bucket
            if rows + 1 >= min(self.info.context_length, self.info.cache_tokens):
                return
            with closing(self.open([0], SamplingParams())) as session:
                self.step([session], [TokenTree.chain(0, [0] * (rows - 1))])

    @property
    def _within_window(self) -> bool:
        """Whether every sequence may have a tree without reaching beyond the smallest window."""
        longest = max((len(session.tokens) for session in self._sessions), default=0)
        return longest + TREE_ROOM <= self._window

    @property
    def max_leaves(self) -> int:
        """One where only chains are right: in exact mode, and beyond a sliding window."""
        return UNLIMITED if TREE in self.info.capabilities and self._within_window else 1

    @property
    def max_nodes(self) -> int:
        return TREE_ROOM if self._within_window and self._window < UNLIMITED else UNLIMITED

    def open(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        capture: Capture = NOTHING,
        reserve: int = 0,
        owner: str = "",
    ) -> OpenVinoSession:
        """See `Target.open`. The entries of a prompt that begins like an earlier one are taken from the cache.

        Hidden states are not kept with the entries, so that no token is taken whose hidden states are captured.
        Top-k tokens are; at least one row of a prompt is read where they are captured.
        """
        self._check(capture)
        prompt = checked_prompt(tokens, self.info)
        sampler = Sampler(params, prompt, self.info.vocab_size)
        self.pool.reclaim([session.track for session in self._sessions])
        reuse = capture.reusable(len(prompt), capture.top_k > 0)
        track = self.pool.take(sampler.tokens, reuse, min(reserve, self.info.context_length), owner)
        session = OpenVinoSession(self, track, sampler, capture)
        self._sessions.append(session)
        return session

    def reserve(self, session: OpenVinoSession, length: int) -> None:
        """See `Reopens`."""
        session.track.reserve = min(length, self.info.context_length)

    def reopen(self, session: OpenVinoSession, reserve: int, owner: str) -> None:
        """See `Reopens`."""
        self.pool.reclaim([session.track for session in self._sessions])
        tokens = session.tokens
        session.track = self.pool.take(tokens, len(tokens) - 1, min(reserve, self.info.context_length), owner)
        self._sessions.append(session)

    def prefill(self, session: OpenVinoSession, max_tokens: int) -> PromptRows | None:
        """See `Target.prefill`."""
        track, last = session.track, len(session.tokens) - 1
        self.pool.discard(track)
        start = track.length
        end = min(start + min(max_tokens, CHUNK), last)
        assert end > start, "the prompt is read already"
        # Committed tokens that must be read again, after an interrupt, were captured before.
        capture = session.capture if len(session.tokens) == session.sampler.prompt_length else NOTHING
        first = first_row(start, end, last, capture)
        rows = range(min(first, end - 1) - start, end - start)
        tokens = session.tokens[start:end]
        part = self._padded(Part(track, start, tokens, range(start, end), None))
        logits, hidden = self._forward([part], rows)
        self._last_rows = 0
        self.pool.keep(track, range(end - start))
        found = TopK(first, *best(logits, min(capture.top_k, self.info.vocab_size))) if first < end else None
        states = self.model.states(hidden[: end - start]) if capture.hidden else None
        captured = prompt_rows(track, session.tokens, (start, end), session.rows_given, found, states)
        session.rows_given = end if found else session.rows_given
        return captured

    def fork(self, session: OpenVinoSession, params: SamplingParams) -> OpenVinoSession:
        if session.unread:
            raise BadParameter(f"a session with {session.unread} unread tokens cannot be forked; read its prompt first")
        self.pool.discard(session.track)
        sampler = Sampler(params, list(session.tokens), self.info.vocab_size)
        twin = OpenVinoSession(self, self.pool.fork(session.track, sampler.tokens), sampler, session.capture)
        self._sessions.append(twin)
        return twin

    def step(
        self,
        sessions: Sequence[OpenVinoSession],
        trees: Sequence[TokenTree],
        num_computed: Sequence[int] | None = None,
        capture: Capture = NOTHING,
    ) -> list[Choices]:
        """See `Target.step`.

        The mask of a forward is over its own tokens, so that a tree which grows and branches is computed whole again.
        """
        self._check(capture)
        if any(session.unread for session in sessions):
            raise LeapaheadError("a session whose prompt is not read cannot be stepped; call target.prefill first")
        known = list(num_computed or [0] * len(trees))
        parts, first, at = list[Part](), list[int](), 0  # of each session: the row of its first node not computed yet
        for session, tree, computed in zip(sessions, trees, known, strict=True):
            part = self._padded(_part(session, tree, computed))
            if part.mask is not None and part.past + len(part.tokens) > self._window:
                raise BadParameter(
                    f"a tree of {len(tree)} nodes after {part.past} tokens is not possible: {self.info.name} "
                    + (f"has a sliding window of {self._window} tokens" if self._window else "takes chains only")
                    + "; draft a chain"
                )
            first.append(at + computed - (part.past - session.track.length))
            at += len(part.tokens)
            parts.append(part)
        drafts = any(len(tree) - computed > 1 for tree, computed in zip(trees, known, strict=True))
        rows = self._rows(at, drafts)
        parts[-1] = _filled(parts[-1], rows - at)
        began = perf_counter()
        logits, hidden = self._forward(parts, range(rows), drafts)
        self._holding.observe(rows, self._last_rows, perf_counter() - began)
        self._last_rows, self._plain_steps = rows, 0 if drafts else self._plain_steps + 1
        states = self.model.states(hidden) if capture.hidden else None
        found = []
        for session, tree, computed, begin in zip(sessions, trees, known, first, strict=True):
            mine = slice(begin, begin + len(tree) - computed)
            own = None if states is None else states[mine]
            found.append(Choices(logits[mine], tree, session.sampler, borrowed=True, num_computed=computed, hidden=own))
        self._given = found
        return found

    def cost(self, sessions: Sequence[OpenVinoSession], trees: Sequence[TokenTree]) -> Cost:
        drafts, least = any(len(tree) > 1 for tree in trees), EXACT_ROWS if self.info.exact else 1
        rows = self._rows(sum(max(len(tree), least) for tree in trees), drafts)
        if rows <= least * len(trees):
            rows = len(trees)  # a plain step, whatever it takes to be exact
        return Cost(rows, len(trees), max(len(session.tokens) for session in sessions))

    def _rows(self, count: int, drafts: bool) -> int:
        """Rows of a step with so many nodes, padding included.

        Args:
            count: of the nodes.
            drafts: whether there are drafted ones among them.
        """
        if drafts:
            return -(-count // self.info.bucket) * self.info.bucket
        last, bucket = self._last_rows, 1 if self.info.prepared else self.info.bucket
        # Where the model is compiled once, the rows of a small drafted step are kept for a while.
        may = bucket > 1 and count < last <= HELD_BUCKETS * bucket
        return last if may and self._plain_steps < self._holding.steps(count, last) else count

    def release(self, session: OpenVinoSession) -> None:
        """Ends a session; its blocks stay for a prompt that begins with its tokens, while there is room."""
        if session in self._sessions:
            self._sessions.remove(session)
            self.pool.release(session.track)

    def forget(self) -> None:
        """Drops the entries kept of closed sessions, and releases the cache's memory unless a session is open."""
        self.pool.forget()

    def weights_digest(self) -> str:
        """See `IdentifiesWeights`."""
        return self.model.digest()

    def _check(self, capture: Capture) -> None:
        """Refuses by name what cannot be captured."""
        if capture == NOTHING:
            return
        require(self.info, capture.needs, "this capture")
        others = [layer for layer in capture.hidden if layer != -1]
        if others:
            raise Refused(
                f"{self.info.name} cannot give the hidden states of layer {others[0]}: an exported model gives those "
                "of the last layer only; capture layer -1, or load the model with Transformers"
            )

    def _padded(self, part: Part) -> Part:
        """In exact mode, a token that is alone is followed by one that nobody attends to or reads."""
        if not self.info.exact or len(part.tokens) >= EXACT_ROWS:
            return part
        return replace(part, tokens=[*part.tokens] * EXACT_ROWS, positions=[*part.positions] * EXACT_ROWS, mask=None)

    def _forward(
        self, parts: Sequence[Part], rows: Sequence[int], drafts: bool = False
    ) -> tuple[FloatArray, FloatArray]:
        """ONE forward, see `CompiledModel.forward`; its entries are pending behind the committed ones."""
        for given in self._given:
            given.expire()
        self._given = []
        counts = [part.past - part.track.length + len(part.tokens) for part in parts]
        try:
            self.pool.extend([part.track for part in parts], counts)
            outputs = self.model.forward(self.pool, parts, rows, drafts)
        except BaseException:
            for part in parts:
                self.pool.discard(part.track)
            raise
        for part, count in zip(parts, counts, strict=True):
            part.track.pending = count
        return outputs


def _part(session: OpenVinoSession, tree: TokenTree, computed: int) -> Part:
    """The nodes of a tree that go through the model: those behind the computed ones, or all."""
    track = session.track
    assert computed <= track.pending or not computed, "nodes that never went through"
    if not tree.is_chain:
        computed = 0
    mask: BoolArray | None = None if tree.is_chain else tree.ancestor_mask
    past = track.length + computed
    positions: Sequence[int] = [track.length + depth for depth in tree.depth_list[computed:]]
    return Part(track, past, tree.token_list[computed:], positions, mask)


def _filled(part: Part, count: int) -> Part:
    """A part with so many tokens more behind its own, to which these do not attend."""
    if not count:
        return part
    tokens, positions = [*part.tokens, *[part.tokens[0]] * count], [*part.positions, *[part.positions[0]] * count]
    mask = part.mask
    if mask is not None:
        mask = np.eye(len(tokens), dtype=np.bool_)
        mask[: len(part.tokens), : len(part.tokens)] = part.mask
    return replace(part, tokens=tokens, positions=positions, mask=mask)
