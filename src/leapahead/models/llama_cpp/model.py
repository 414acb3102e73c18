"""GGUF files under llama.cpp as targets: trees by sequence ids, over one KV cache for all sessions.

How a tree is encoded is in `track`, how the cache is divided in `cells`. This module knows neither drafters nor text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import RLock

import numpy as np

from leapahead.core.errors import BadParameter, CacheFull, LeapaheadError
from leapahead.core.sampling import Sampler, SamplingParams
from leapahead.core.tree import TokenTree
from leapahead.models.base import CHAIN, HIDDEN, NOTHING, Capture, Cost, TargetInfo, checked_prompt
from leapahead.models.captured import TopK, first_row, prompt_rows
from leapahead.models.choices import Choices, PromptRows, best
from leapahead.models.llama_cpp import selftest
from leapahead.models.llama_cpp.cells import Cells
from leapahead.models.llama_cpp.context import Context, FloatArray, Model, Outputs
from leapahead.models.llama_cpp.file import weights_digest
from leapahead.models.llama_cpp.options import LlamaCppOptions
from leapahead.models.llama_cpp.session import LlamaCppSession, Part, check_capture, check_step
from leapahead.models.llama_cpp.tokenizer import GgufTokenizer

# First tokens of a prompt that are read in the forwards of steps. Over a longer text, flash attention takes longer for
# rows of several sequences together than for those of each alone.
READ_IN_STEPS = 1024
LONGEST_REPLAY = 8  # tokens; more are read by themselves, since the next rejection would repeat all of them


class LlamaCppTarget:
    """A GGUF file; see `leapahead.models.base.Target`. Hidden states are those of the last layer (-1) only.

    Args:
        model: the file, loaded.
        options: of the context.
        name: for reports and messages; by default the file's name.
        cells: of one KV cache for all sequences, of which `n_ctx` bounds the length of each then; 0 for `n_ctx`.

    Raises:
        LeapaheadError: no memory for the context.
        Refused: the model's logits of a chain are not those of one token at a time.
    """

    chains_only = ""  # where drafts have no branches, as messages name it
    has_threads = False  # on a GPU, which a forked process cannot use

    def __init__(
        self, model: Model, options: LlamaCppOptions | None = None, name: str | None = None, cells: int = 0
    ) -> None:
        options, self._shared = options or LlamaCppOptions(), cells
        self.model, self.lock, self._sessions = model, RLock(), list[LlamaCppSession]()
        self.context = self._make_context(model, options)
        self._cells = Cells(self.context, self.context.n_ctx if options.kept_tokens is None else options.kept_tokens)
        self._checked = NOTHING  # the last capture that was found possible
        self._given: list[Choices] = []  # of the last step: their logits are llama.cpp's memory
        self._chunk = self.context.n_batch  # greatest number of tokens of a prompt in one forward
        self.info = TargetInfo(
            name=name or Path(model.path).name,
            vocab_size=model.vocab_size,
            context_length=self.context.longest,
            precision=self.context.precision,
            capabilities=frozenset(),
            fingerprint=f"llama.cpp {model.fingerprint} {self.context.fingerprint}",
            layers=model.layers,
            hidden_size=model.hidden_size,
            cache_tokens=self.context.n_ctx if model.cells else 0,
            no_drafts=selftest.no_room(self),
            suppressed=model.suppressed,
            length_option="n_ctx" if self.context.may_grow else "",
            no_trees="n_seq_max=1" if self.context.n_seq_max == 1 and not model.stateful else "",
        )
        able = self._tested()
        replays, reads = model.stateful and CHAIN in able, CHAIN in able and not model.stateful
        self.info = replace(self.info, capabilities=able, replays=replays, reads_in_steps=READ_IN_STEPS * reads)
        if HIDDEN in able and not selftest.gives_logits_with_hidden_states(self):
            self.info = replace(self.info, capabilities=able - {HIDDEN})
        if CHAIN not in self.info.capabilities and not selftest.reads_in_chunks(self):
            self._chunk = 1

    def _make_context(self, model: Model, options: LlamaCppOptions) -> Context:
        return Context(model, options, cells=self._shared)

    def _rows(self, sizes: Sequence[int]) -> int:
        """Rows of a forward over so many tokens of each sequence."""
        return sum(sizes)

    def _tested(self) -> frozenset[str]:
        """The capabilities that a test of the model finds."""
        return selftest.capabilities(self)

    @property
    def max_leaves(self) -> int:
        """A tree's fair share of the sequence ids; trees over a recurrent state are chains."""
        return 1 if self.model.stateful else self.context.n_seq_max // max(1, len(self._sessions))

    @property
    def max_nodes(self) -> int:
        """A tree's fair share of a batch, and of the cells that are left."""
        room = min(self._cells.room, self.context.n_step)
        if self.model.stateful:
            room -= sum(session.replay for session in self._sessions)
        return max(1, room // max(1, len(self._sessions)))

    def open(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        capture: Capture = NOTHING,
        reserve: int = 0,
        owner: str = "",
    ) -> LlamaCppSession:
        """See `Target.open`. Cells of a closed session whose tokens begin like the prompt are taken over.

        Hidden states are not kept, so that a prompt whose hidden states are captured is read whole. Top-k tokens are;
        at least one row is read where they are captured, but for a recurrent state, which cannot go back by a token.
        """
        self._check(capture)
        tokens = checked_prompt(tokens, self.info)
        sampler = Sampler(params, tokens, self.info.vocab_size)
        self._cells.reclaim([each.track for each in self._sessions])
        again = capture.top_k > 0 and not self.model.stateful
        reuse = capture.reusable(len(tokens), again)
        session = LlamaCppSession(self, self._cells.acquire(tokens[:-1], reserve, reuse, owner), sampler, capture)
        self._keep_state(session)
        self._sessions.append(session)  # last: what is not in this list is reclaimed
        return session

    def reserve(self, session: LlamaCppSession, length: int) -> None:
        """See `Reopens`."""
        session.track.reserve = min(length, self.context.longest)

    def reopen(self, session: LlamaCppSession, reserve: int, owner: str) -> None:
        """See `Reopens`."""
        self._cells.reclaim([each.track for each in self._sessions])
        last = len(session.tokens) - 1
        session.begin_again(self._cells.acquire(session.tokens[:last], reserve, last, owner))
        self._sessions.append(session)

    def prefill(self, session: LlamaCppSession, max_tokens: int) -> PromptRows | None:
        """See `Target.prefill`. The forward is the same whatever is captured, but for the rows of the output layer."""
        track, capture, last = session.track, session.capture, len(session.tokens) - 1
        self._cells.discard_tree(track)
        start = track.length
        end = min(self._chunk_end(start, max_tokens), last)
        if start >= end:
            return None
        first = first_row(start, end, last, capture)
        rows = end - start if capture.hidden else end - first
        self._cells.make_room(0, f"a prompt of {last + 1} tokens")
        tree = TokenTree.chain(session.tokens[start], session.tokens[start + 1 : end])
        wanted = [index >= end - start - rows for index in range(end - start)]
        outputs = self._forward([session], [tree], wanted, [0], capture)
        track.commit(range(end - start))
        session.is_read = end == last
        self._keep_state(session)
        return self._prompt_rows(session, start, end, outputs.logits, _copy(outputs))

    def _prompt_rows(
        self,
        session: LlamaCppSession,
        start: int,
        end: int,
        logits: FloatArray | None,
        hidden: FloatArray | None = None,
    ) -> PromptRows | None:
        """The captured rows of the tokens [start, end) of a prompt; the logits are those of the last ones."""
        first = first_row(start, end, len(session.tokens) - 1, session.capture)
        found = None
        if first < end:
            assert logits is not None
            found = TopK(first, *best(logits[first - end :], min(session.capture.top_k, self.info.vocab_size)))
        rows = prompt_rows(session.track, session.tokens, (start, end), session.rows_given, found, hidden)
        session.rows_given = end if found else session.rows_given
        return rows

    def _chunk_end(self, start: int, max_tokens: int) -> int:
        """Where the forward of a prompt ends that begins at this position, if the prompt does not end before."""
        return start + min(max_tokens, self._chunk)

    def fork(self, session: LlamaCppSession, params: SamplingParams) -> LlamaCppSession:
        if session.unread:
            raise BadParameter(f"a session with {session.unread} unread tokens cannot be forked; read its prompt first")
        self._cells.discard_tree(session.track)
        sampler = Sampler(params, list(session.tokens), self.info.vocab_size)
        twin = LlamaCppSession(self, self._cells.fork(session.track), sampler, session.capture)
        twin.is_read = True
        self._sessions.append(twin)
        return twin

    def step(
        self,
        sessions: Sequence[LlamaCppSession],
        trees: Sequence[TokenTree],
        num_computed: Sequence[int] | None = None,
        capture: Capture = NOTHING,
    ) -> list[Choices]:
        if any(session.unread for session in sessions):
            raise LeapaheadError("a session whose prompt is not read cannot be stepped; call target.prefill first")
        nothing = [0] * len(trees)
        return self._step(sessions, trees, num_computed or nothing, nothing, capture)

    def step_and_read(
        self,
        sessions: Sequence[LlamaCppSession],
        trees: Sequence[TokenTree],
        reads: Sequence[int],
        capture: Capture = NOTHING,
    ) -> list[Choices]:
        return self._step(sessions, trees, [0] * len(trees), reads, capture)

    def _step(
        self,
        sessions: Sequence[LlamaCppSession],
        trees: Sequence[TokenTree],
        num_computed: Sequence[int],
        reads: Sequence[int],
        capture: Capture,
    ) -> list[Choices]:
        self._check(capture)
        parts = self._parts(sessions, trees, num_computed, reads)
        if not (self.model.cells and self.context.unified):  # computed side by side where the ids follow one another
            parts.sort(key=lambda part: part.session.track.main)
        rows = self._rows([part.new for part in parts])
        check_step(trees, rows, max(self.context.n_step, len(trees)), self.chains_only)
        need = sum([part.new if part.session.is_read else part.rows for part in parts])  # a prompt has its cells
        self._cells.make_room(need, f"a step of {need} nodes")
        for part in parts:
            if len(part.placed) > 1:
                part.session.track.keep(part.begin)
        outputs = self._forward(
            [part.session for part in parts],
            [part.placed for part in parts],
            [each for part in parts for each in part.wanted],
            [part.begin for part in parts],
            capture,
        )
        found: dict[int, Choices] = {}
        hidden, at = _copy(outputs), 0
        logits = np.empty((0, self.info.vocab_size), np.float32) if outputs.logits is None else outputs.logits
        for part in parts:
            at += 0 if hidden is None else part.new - part.wanted_rows  # with hidden states, all tokens have outputs
            found[part.index] = self._chosen(part, logits, hidden, at)
            at += part.wanted_rows
        for index, (session, tree) in enumerate(zip(sessions, trees, strict=True)):
            if index not in found:  # there was no room for its prompt
                found[index] = Choices(logits[:0], tree, session.sampler)
                found[index].took_part = False
        self._given = [found[index] for index in range(len(trees))]
        return self._given

    def _chosen(self, part: Part, logits: FloatArray, hidden: FloatArray | None, at: int) -> Choices:
        """The choices of one session, whose rows begin at `at`, those captured of its prompt first."""
        session, track = part.session, part.session.track
        prompt = None
        if not session.is_read:
            start, end = track.length, track.length + session.ahead
            if part.tree is None:
                track.commit(range(session.ahead))
                session.is_read = end == len(session.tokens) - 1
            prompt = self._prompt_rows(session, start, end, logits[at : at + part.captured])
        rows = slice(at + part.captured, at + part.wanted_rows)
        choices = Choices(
            logits[rows],
            part.tree or TokenTree.root(session.tokens[-1]),
            session.sampler,
            borrowed=True,
            num_computed=part.num_computed,
            hidden=None if hidden is None else hidden[rows],
        )
        choices.prompt, choices.took_part = prompt, part.tree is not None
        return choices

    def _parts(
        self,
        sessions: Sequence[LlamaCppSession],
        trees: Sequence[TokenTree],
        num_computed: Sequence[int],
        reads: Sequence[int],
    ) -> list[Part]:
        """What each session has in a forward: its tree, behind what is replayed or, of its prompt, read."""
        parts: list[Part] = []
        longest = min(LONGEST_REPLAY, self.context.n_step // (2 * len(trees)))
        nodes = sum(len(tree) for session, tree in zip(sessions, trees, strict=True) if session.is_read)
        room = self.context.n_step - nodes + sum(num_computed)  # for tokens of prompts, and trees behind them
        for index, (session, tree, first, most) in enumerate(zip(sessions, trees, num_computed, reads, strict=True)):
            placed: TokenTree | None = tree
            if first == 0:
                self._cells.discard_tree(session.track)
                if session.is_read:
                    self._catch_up(session, longest)
                session.ahead = session.replay or min(session.unread, most, max(room, 0))
                if not session.is_read:
                    room -= session.ahead
                    placed = tree if session.ahead == session.unread and len(tree) <= room else None
                    room -= len(tree) if placed else 0
            if placed or session.ahead:
                parts.append(Part(index, session, placed, first))
        return parts

    def cost(self, sessions: Sequence[LlamaCppSession], trees: Sequence[TokenTree]) -> Cost:
        replay = sum(session.replay for session in sessions) if self.model.stateful else 0
        rows = self._rows([len(t) for t in trees]) + replay
        return Cost(rows, len(trees), max(len(session.tokens) for session in sessions))

    def release(self, session: LlamaCppSession) -> None:
        """Ends a session; its cells stay for a prompt that begins with its tokens, while there is room."""
        if session in self._sessions:
            self._sessions.remove(session)
            if self.context.alive:
                self._cells.release(session.track, session.tokens, keep=CHAIN in self.info.capabilities)

    def forget(self) -> None:
        """Empties the cache of what is kept for prompts to come."""
        if self.context.alive:
            self._cells.forget()

    def weights_digest(self) -> str:
        """See `IdentifiesWeights`."""
        return weights_digest(Path(self.model.path).expanduser())

    def _check(self, capture: Capture) -> None:
        if capture is not self._checked:
            check_capture(capture, self.info)
            self._checked = capture

    def _catch_up(self, session: LlamaCppSession, most: int) -> None:
        """Reads committed tokens that a state has not read, unless no more than `most` are to be replayed."""
        track, last = session.track, len(session.tokens) - 1
        if last - track.length <= most:
            return
        while track.length < last:
            tokens = session.tokens[track.length : min(track.length + self._chunk, last)]
            self._cells.make_room(len(tokens), f"a text of {last + 1} tokens, part of which is read again,")
            self._forward([session], [TokenTree.chain(tokens[0], tokens[1:])], [False] * len(tokens), [0], NOTHING)
            track.commit(range(len(tokens)))

    def _keep_state(self, session: LlamaCppSession) -> None:
        """Keeps the state behind a prompt that is read, for other prompts that begin with it."""
        if self.info.replays and session.is_read and session.track.length:
            self._cells.keep(session.track, session.tokens[: session.track.length])

    def _forward(
        self,
        sessions: Sequence[LlamaCppSession],
        trees: Sequence[TokenTree],
        wanted: Sequence[bool],
        num_computed: Sequence[int],
        capture: Capture,
    ) -> Outputs:
        """ONE forward; `wanted` as of `Context.decode`. If it fails, the cells that it touched are freed."""
        for given in self._given:
            given.expire()
        self._given = []
        try:
            tokens, positions, ids = list[int](), list[int](), list[list[int]]()
            for session, tree, first in zip(sessions, trees, num_computed, strict=True):
                ids += session.track.place(tree, first)
                tokens += tree.token_list[first:]
                positions += [session.track.length + depth for depth in tree.depth_list[first:]]
            return self.context.decode(tokens, positions, ids, wanted, bool(capture.hidden))
        except BaseException as error:
            if self.model.stateful and isinstance(error, LeapaheadError) and not isinstance(error, CacheFull):
                self._cells.lose()  # llama.cpp moves states of other sequences in its forwards
            for session in sessions:
                if not session.track.discard_tree():  # a state that may have read any of the tokens
                    self._cells.reset(session.track)
            raise


def _copy(outputs: Outputs) -> FloatArray | None:
    """The hidden states of a forward, float32 [rows, hidden_size], in memory of their own."""
    return None if outputs.hidden is None else np.array(outputs.hidden)


def load(
    path: str | Path, options: LlamaCppOptions | None = None, kind: type[LlamaCppTarget] = LlamaCppTarget
) -> tuple[LlamaCppTarget, GgufTokenizer]:
    """Loads a GGUF file.

    Args:
        path: the file; of a model in several files the first.
        options: how.
        kind: of target.

    Returns:
        The target and the tokenizer that the file holds.

    Raises:
        LeapaheadError: whatever is wrong with the file or the options, in one sentence.
    """
    options = options or LlamaCppOptions()
    model = Model(path, options)
    return kind(model, options), GgufTokenizer(model)
