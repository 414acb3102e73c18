"""Runs a draft model along a text: its own session and cache, and nothing is computed twice.

    text            t0 t1 t2 t3 t4 t5 t6          committed by the target
    session         t0 t1 t2 t3                   what the draft model's cache holds, and its root t3
    tree            t3 ─ t4 ─ t5 ─ t6 ┬─ a ─ c    the missing tokens as a chain, then the paths that are asked for
                                      └─ b

Each draft forward computes what is new in this tree (`Target.step` with `num_computed`). When the text has grown, the
nodes along it are committed and the others discarded. This module knows neither sampling nor planning.

With a window, the draft model reads a long text without its middle, so that its forwards do not become slower:

    text            s s s s . . . . . . . . . . . t t t t t t t       s the first `SINKS` tokens, attention sinks
    session         s s s s t t t t t t t                             t at most `window` of the newest ones

It sees them as a text, so positions are those in its cache, as in StreamingLLM (2309.17453). When the window is full,
its newer half is read again behind the sinks, in one forward for `window / 2` tokens. So no key is rotated to another
position, entries are those of the tokens that the draft model still sees, and any engine and kind of positions will do;
the draft model may also follow a text that is longer than its own context.

A draft model is used under its target's lock. Long prompts are read in chunks, one for each call of `read_ahead`, so
that the requests that are decoded meanwhile do not wait for a whole prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

from leapahead.core.errors import CacheFull, LeapaheadError
from leapahead.core.sampling import SamplingParams
from leapahead.core.tree import Budget, TokenTree, TreeBuilder
from leapahead.core.verify import Verdict
from leapahead.models.base import TREE, Cost, Session, SharesCache, Target
from leapahead.models.choices import Choices
from leapahead.models.decoder import DecoderInput
from leapahead.models.encoder_decoder import opened
from leapahead.planner.backoff import BackOff
from leapahead.planner.draft import Forward

Path = tuple[int, ...]  # drafted tokens from below the last committed one
CHUNK = 512  # prompt tokens that are read in one step; a shorter prompt is read at once
SINKS = 16  # first tokens that stay in front of a window; models give them much attention whatever they are
LEAST_WINDOW = 32
LONGEST_CHAIN = 64  # missing tokens that are computed together with a draft; more are computed before, without one
LONGEST_WAIT = 64  # tokens of the text until a draft model whose cache was full is tried again, at most


class Draft(NamedTuple):
    """The result of one draft forward for one text.

    Attributes:
        paths: those that were computed.
        nodes: the node of the runner's tree for each of them.
        choices: of the forward. To be read before the draft model's next one, under its lock.
    """

    paths: list[Path]
    nodes: list[int]
    choices: Choices


class DraftRunner:
    """Follows one text with a draft model.

    Args:
        target: the draft model.
        tokens: the committed tokens of the text, live.
        params: of the sampling, for callers that read processed probabilities.
        owner: see `Target.open`.
        source: the encoder's input, where both models are encoder-decoder models.
        window: newest tokens of the text that the draft model sees at most; 0 for all.

    Attributes:
        forwards, seconds: of all draft forwards and prompt chunks.
    """

    def __init__(
        self,
        target: Target,
        tokens: Sequence[int],
        params: SamplingParams | None = None,
        owner: str = "",
        source: Sequence[int] = (),
        window: int = 0,
    ) -> None:
        self.target, self.tokens, self.params, self.owner = target, tokens, params or SamplingParams(), owner
        self.source, self.window = source, window
        self.forwards, self.seconds = 0, 0.0
        self._session: Session | None = None
        self._tree: TreeBuilder | None = None
        self._paths: list[Path | None] = []  # of the tree's nodes; None for those that are committed
        self._at = 0  # the node of the text's last token
        self._computed = 0  # nodes that went through the draft model
        self._length = 0  # of the text that the tree stands on
        self._left_out = 0  # tokens between the sinks and the window
        self._failed = self._full = ""  # why it ended, and why it had no room when that was tried last
        self._back_off, self._again = BackOff(), 0  # after no room, and the length of the text that it lasts until
        if isinstance(target, SharesCache):
            with target.lock:
                if target.shares(tokens):  # the prompt is in the cache
                    self._session = target.open(tokens, self.params)

    @property
    def failed(self) -> str:
        """Why the draft model cannot follow this text; "" while it can.

        Its context is full, a token is outside its vocabulary, ...; or its cache has no room beside other texts, which
        is tried again.
        """
        return self._failed or (self._full if len(self.tokens) < self._again else "")

    @property
    def opened(self) -> bool:
        """Whether the draft model has begun to read the prompt."""
        return self._session is not None

    @property
    def reading(self) -> bool:
        """Whether it has begun to and is not through, so that it cannot draft yet."""
        return self._session is not None and self._session.unread > 0

    @property
    def missing(self) -> int:
        """Committed tokens that the next draft forward must compute beside what it is asked for."""
        if self._session is None:
            return len(self.tokens) - self._leaving_out - 1
        if self._tree is not None and self._length == len(self.tokens):
            return max(0, self._at - self._computed)
        return len(self.tokens) - self._known(self._session)

    @property
    def _leaving_out(self) -> int:
        """Tokens that are left out of a session that is opened now."""
        is_longer = self.window and len(self.tokens) - self._left_out > SINKS + self.window
        return len(self.tokens) - SINKS - self.window // 2 if is_longer else self._left_out

    def _known(self, session: Session) -> int:
        """The length of the text up to the session's last token."""
        return len(session.tokens) + self._left_out

    @property
    def crowded(self) -> bool:
        """Whether the draft model's limits leave room for what must be drafted only, and for no guesses."""
        if self._tree is None:
            return False
        nodes, _, leaves = self._tree.budget
        return 2 * len(self._tree) > nodes or 2 * self._tree.leaves > leaves

    def read_ahead(self) -> bool:
        """Opens the session, or reads the next chunk of its prompt.

        Returns:
            Whether the prompt is read, so that the draft model can draft. False too where it has failed.
        """
        if self.failed:
            return False
        began = perf_counter()
        with self.target.lock:
            try:
                if self._session is None:
                    self._left_out = self._leaving_out
                    tokens = [*self.tokens[:SINKS], *self.tokens[SINKS + self._left_out :]]
                    begin = DecoderInput(tuple(tokens))
                    prompt = self.source if self.target.info.decoder is not None else tokens
                    self._session = opened(self.target, prompt, self.params, begin, owner=self.owner)
                if self._session.unread:
                    self.target.prefill(self._session, CHUNK)
            except LeapaheadError as error:
                self._stop(error)
        self.seconds += perf_counter() - began
        return self._session is not None and not self._session.unread

    def fail(self, reason: str) -> None:
        """Stops following the text and releases the cache."""
        self.close()
        self._failed = reason

    def _stop(self, error: LeapaheadError) -> None:
        """Stops following the text; where the cache is full for some tokens only, since other texts may end meanwhile.

        What was computed in this step is discarded then, and the rest of the cache kept.
        """
        if isinstance(error, CacheFull):
            self._tree = None
            self._back_off.update(paid=False, longest=LONGEST_WAIT)
            self._full, self._again = str(error), len(self.tokens) + self._back_off.remaining
        else:
            self.fail(str(error))

    def close(self) -> None:
        """Releases the cache. Closing twice is harmless."""
        if self._session is not None:
            with self.target.lock:
                self._session.close()
        self._session = self._tree = None

    def commit(self) -> None:
        """Commits what was computed along the text, which may have grown, and discards the rest of the tree.

        A session whose window is full is closed, so that it is to be read again.
        """
        if self._leaving_out > self._left_out:
            self.close()
        tree, session = self._tree, self._session
        if tree is None or session is None or self._length == len(self.tokens):
            return
        begin, path = self._known(session), [0]
        while begin + len(path) < len(self.tokens):
            node = tree.child(path[-1], self.tokens[begin + len(path) - 1])
            if node is None or node >= self._computed:
                break
            path.append(node)
        self._tree = None  # before: should the rest be interrupted, its tokens are unread and are read again
        if self._computed:
            self._back_off.update(paid=True, longest=LONGEST_WAIT)
            tokens = tuple(self.tokens[begin : begin + len(path)])
            with self.target.lock:
                session.commit(Verdict(tuple(path), tokens, len(path) - 1))

    def add(self, paths: Sequence[Path]) -> None:
        """Puts paths into the tree, as far as the draft model's limits allow. Its prompt must have been read."""
        self.commit()
        if self._tree is None and (self.failed or not self._start()):
            return
        assert self._tree is not None
        vocabulary = self.target.info.vocab_size
        for path in paths:
            node, so_far = self._at, Path()
            for token in path:
                so_far = (*so_far, token)
                found = self._tree.add(node, token) if token < vocabulary else None
                if found is None:
                    break
                node = found
                if node == len(self._paths):
                    self._paths.append(so_far)

    def _start(self) -> bool:
        """A new tree with the missing tokens as a chain; false if the draft model cannot follow the text."""
        session, info = self._session, self.target.info
        assert session is not None, "the prompt was not read"
        session.sampler.committed()  # an idle session that shares the target's cache was not told of new tokens
        missing = self.tokens[self._known(session) :]
        if max(missing, default=0) >= info.vocab_size:
            self.fail(f"the text has a token outside the vocabulary of {info.vocab_size} of {info.name}")
        elif len(self.tokens) - self._left_out + 1 >= info.context_length:
            self.fail(f"the context of {info.context_length} tokens of {info.name} is full")
        else:
            self._catch_up(session, max(1, min(LONGEST_CHAIN, self.target.max_nodes // 2)))
        if not self.failed and len(self.tokens) - self._known(session) >= self.target.max_nodes:
            self._stop(CacheFull(f"the KV cache of {info.name} has no room for a draft beside other texts"))
        if self.failed:
            return False
        depth = info.context_length - len(session.tokens) - 1
        leaves = self.target.max_leaves if TREE in info.capabilities else 1
        self._tree = TreeBuilder(session.tokens[-1], Budget(self.target.max_nodes - 1, depth, leaves))
        self._at = ([0, *self._tree.add_path(self.tokens[self._known(session) :])])[-1]
        self._paths = [None] * self._at + [()]
        self._computed, self._length = 0, len(self.tokens)
        return True

    def _catch_up(self, session: Session, longest: int) -> None:
        """Computes and commits missing tokens, `longest` in a forward, until no more than that are left."""
        try:
            with self.target.lock:
                while len(self.tokens) - self._known(session) > longest:
                    tokens = self.tokens[self._known(session) :][:longest]
                    self.target.step([session], [TokenTree.chain(session.tokens[-1], tokens[:-1])])
                    session.commit(Verdict(tuple(range(longest)), tuple(tokens), longest - 1))
        except LeapaheadError as error:
            self._stop(error)

    @staticmethod
    def forward(runners: Sequence[DraftRunner]) -> tuple[list[Draft | None], Forward | None]:
        """ONE draft forward over what was added to all of these, which share the draft model and whose lock is held.

        Returns:
            For each runner its draft, None where nothing was added; and the forward, None where there was none.
        """
        able = [each for each in runners if each._tree is not None and len(each._tree) > each._computed]
        if not able:
            return [None] * len(runners), None
        target, began = able[0].target, perf_counter()
        builders = [each._tree for each in able if each._tree is not None]
        sessions = [each._session for each in able if each._session is not None]
        try:
            found = target.step(sessions, [each.build() for each in builders], [each._computed for each in able])
        except LeapaheadError as error:
            for each in able:
                each._stop(error)
            return [None] * len(runners), None
        except BaseException:  # an interrupt, after which other texts go on: what their sessions computed is discarded
            for each in able:
                each._tree = None
            raise
        sizes = [len(builder) - each._computed for builder, each in zip(builders, able, strict=True)]
        rows = len(able) * max(sizes) if target.info.padded else sum(sizes)
        cost = Cost(rows, len(able), max(len(session.tokens) for session in sessions))
        forward = Forward(perf_counter() - began, cost)
        drafts: dict[DraftRunner, Draft] = {}
        for each, builder, choices in zip(able, builders, found, strict=True):
            new = [(path, node) for node, path in enumerate(each._paths) if node >= each._computed and path is not None]
            drafts[each] = Draft([path for path, _ in new], [node for _, node in new], choices)
            each._computed = len(builder)
            each.forwards += 1
            each.seconds += forward.seconds / len(able)
        return [drafts.get(each) for each in runners], forward
