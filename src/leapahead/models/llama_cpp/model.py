"""GGUF files under llama.cpp as a target: trees by sequence ids, over one KV cache for all sessions.

    root 0 ─┬─ 1 ─ 3      leaves 3, 4, 5 get the ids 0, 7, 8; a node belongs to the ids of all leaves below it:
            └─ 2 ─┬─ 4       node 0: {0, 7, 8}    1: {0}    2: {7, 8}    3: {0}    4: {7}    5: {8}
                  └─ 5    A node attends to the cells of its first id at positions up to its own: its ancestors, itself.

For that, every id in use has the session's committed cells too. An id costs nothing but a bit in each cell, so a commit
moves no keys or values: ids of rejected leaves leave the cells behind the last node that they share with the accepted
path, a cell without ids is free, and an accepted leaf's id becomes the session's main one.

Knows neither drafters nor text.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import llama_cpp as c
import numpy as np
import numpy.typing as npt

from leapahead.core.errors import BadParameter, CacheFull, Refused
from leapahead.core.sampling import Sampler, SamplingParams
from leapahead.core.stats import Stats
from leapahead.core.tree import IntArray, TokenTree
from leapahead.core.verify import Verdict
from leapahead.models.base import (
    CHAIN,
    LOGITS,
    PROMPT_ROWS,
    TOP_K,
    TREE,
    Choices,
    KeptPrompt,
    PromptTopK,
    checked_prompt,
)
from leapahead.models.llama_cpp.context import Context, FloatArray, LlamaCppOptions, Model
from leapahead.models.llama_cpp.tokenizer import GgufTokenizer

TOLERANCE = 0.1  # of the standard deviation of logits; a wrong mask moves them by about one, 4-bit rounding by 0.03


class Track:
    """The cells of one session, and which sequence ids they belong to.

    Attributes:
        main: the id that all `length` committed cells belong to.
        held: other ids -> how many of the first committed cells belong to them.
        laid: (leaf, id) of the last tree, until it is committed or forgotten.
    """

    def __init__(self, target: LlamaCppTarget, main: int, length: int = 0) -> None:
        self.target, self.context = target, target.context
        self.main, self.length = main, length
        self.held: dict[int, int] = {}
        self.laid: list[tuple[int, int]] = []
        self.tree: TokenTree | None = None

    @property
    def cells(self) -> int:
        """Those that it takes now, a tree that waits for its commit included."""
        return self.length + (len(self.tree) if self.tree is not None else 0)

    def lay(self, tree: TokenTree, known: int = 0) -> list[list[int]]:
        """The ids of every node behind the first `known`, those of its first leaf first."""
        if known:
            return self._lay_more(tree, known)
        self.tree = tree
        if len(tree) == 1:
            self.laid = [(0, self.main)]
            return [[self.main]]
        leaves = tree.leaves.tolist()
        self.laid = list(zip(leaves, [self.main, *self._others(len(leaves) - 1)], strict=True))
        return self._ids(tree)

    def _lay_more(self, tree: TokenTree, known: int) -> list[list[int]]:
        """A leaf that goes on keeps its id; a second branch has one that owns the cells down to where it begins."""
        assert self.tree is not None, "nodes that never went through"
        assert known == len(self.tree), "nodes that never went through"
        owner_of, parents = dict(self.laid), tree.parents.tolist()
        before = {node: owner for owner, nodes in self._paths() for node in nodes}  # one that owns each known node
        laid, begun = list[tuple[int, int]](), list[tuple[int, int]]()  # begun: (leaf, known node above it)
        for leaf in tree.leaves.tolist():
            node = leaf
            while node >= known:
                node = parents[node]
            if node in owner_of:
                laid.append((leaf, owner_of.pop(node)))
            else:
                begun.append((leaf, node))
        used = {owner for _, owner in self.laid}
        fresh = self._others(len(begun), used)
        for (leaf, node), owner in zip(begun, fresh, strict=True):
            self.context.copy(before[node], owner, self.length, self.length + int(tree.depths[node]) + 1)
            laid.append((leaf, owner))
        self.tree, self.laid = tree, laid
        return self._ids(tree)[known:]

    def _others(self, count: int, used: Collection[int] = ()) -> list[int]:
        """So many ids beside the main one and those in use, that own all committed cells."""
        while len(self.held) + 1 < count + max(len(used), 1):
            self.held[self.target.free_id(self)] = 0
        others = [other for other in self.held if other not in used][:count]
        for other in others:
            if self.held[other] and self.context.windowed and self._lost(other):
                self.context.remove(other)
                self.held[other] = 0
            if self.held[other] < self.length:
                self.context.copy(self.main, other, self.held[other], self.length)
                self.held[other] = self.length
        return others

    def _paths(self) -> list[tuple[int, list[int]]]:
        """Every id that is laid, with its nodes, the leaf first."""
        assert self.tree is not None
        parents, found = self.tree.parents.tolist(), []
        for leaf, owner in self.laid:
            nodes = [leaf]
            while (parent := parents[nodes[-1]]) >= 0:
                nodes.append(parent)
            found.append((owner, nodes))
        return found

    def _ids(self, tree: TokenTree) -> list[list[int]]:
        ids: list[list[int]] = [[] for _ in range(len(tree))]
        for owner, nodes in self._paths():
            for node in nodes:
                ids[node].append(owner)
        return ids

    def _lost(self, other: int) -> bool:
        """Whether llama.cpp has given cells that a sliding window has passed to others, of one of the two alone.

        It refuses a batch with a token of both then.
        """
        return self.context.first_position(other) != self.context.first_position(self.main)

    def keep(self, path: Sequence[int]) -> None:
        """Keeps the nodes `path` of the tree that was laid, and frees the cells of all others."""
        assert self.tree is not None, "commit without a step"
        if len(self.tree) > 1:
            place = {node: index for index, node in enumerate(path)}
            parents, winner = self.tree.parents.tolist(), -1
            for leaf, owner in self.laid:
                node = leaf
                while node not in place:
                    node = parents[node]
                shared = place[node] + 1
                if node != leaf:
                    self.context.remove(owner, self.length + shared)
                self.held[owner] = self.length + shared
                if shared == len(path) and winner < 0:
                    winner = owner
            self.main = winner
            del self.held[winner]
        self.length += len(path)
        self.laid, self.tree = [], None

    def forget(self) -> bool:
        """Frees the cells of a tree that is not to be committed; False where the model cannot."""
        done = all([self.context.remove(owner, self.length) for _, owner in self.laid])
        self.laid, self.tree = [], None
        return done

    def release(self, keep: int = 0) -> list[int]:
        """Gives ids back that no tree uses now, all but `keep` of them; returns them."""
        used = {owner for _, owner in self.laid}
        given = [other for other in self.held if other not in used][keep:]
        for other in given:
            self.context.remove(other)
            del self.held[other]
        return given


class LlamaCppSession:
    """One sequence. Its track holds every committed token but the last, which is the next root.

    Args:
        reserve: so many cells are kept free for it, those that it has taken included.
    """

    def __init__(self, tokens: list[int], track: Track, sampler: Sampler, reserve: int) -> None:
        self.tokens = tokens
        self.track = track
        self.sampler = sampler
        self.reserve = reserve
        self.prompt_top_k: PromptTopK | None = None

    def commit(self, verdict: Verdict) -> None:
        self.track.keep(verdict.path)
        self.tokens += verdict.tokens
        self.sampler.committed()
        assert self.track.length == len(self.tokens) - 1  # every committed token but the last

    def close(self) -> None:
        self.track.target.closed(self)


class LlamaCppTarget:
    """A GGUF file; see `leapahead.models.base.Target`.

    Args:
        model: the file, loaded.
        options: of the context.
        name: for reports and messages; by default the file's name.

    Raises:
        LeapaheadError: no memory for the context.
        Refused: the model's logits of a chain are not those of one token at a time.
    """

    def __init__(self, model: Model, options: LlamaCppOptions | None = None, name: str | None = None) -> None:
        options = options or LlamaCppOptions()
        self.model = model
        self.name = name or Path(model.path).name
        self.vocab_size = model.vocab_size
        self.context = Context(model, options)
        # A window that is longer than what the model was trained with is the user's to choose, as in llama.cpp.
        self.context_length = self.context.n_ctx
        self.precision = self.context.precision
        self.pads = False
        self.fingerprint = f"llama.cpp {model.fingerprint} {self.context.fingerprint}"
        self._free = list(range(self.context.n_seq_max))[::-1]
        self._open: list[LlamaCppSession] = []
        self._idle: list[tuple[Track, list[int]]] = []  # closed ones, least recently used first
        self._shown: list[Choices] = []  # of the last step: their logits are llama.cpp's memory
        self._chunk = self.context.n_batch  # tokens of a prompt in one forward
        self.capabilities: frozenset[str] = frozenset()
        self.capabilities = self._tested()

    @property
    def max_leaves(self) -> int:
        """A tree's fair share of the sequence ids."""
        return self.context.n_seq_max // max(1, len(self._open))

    @property
    def max_nodes(self) -> int:
        """A tree's fair share of a batch, and of the cells that are left."""
        room = self.context.n_ctx - sum(session.track.length for session in self._open)
        return max(1, min(room, self.context.n_step) // max(1, len(self._open)))

    def open(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        stats: Stats | None = None,
        reserve: int = 0,
        top_k: int = 0,
    ) -> LlamaCppSession:
        tokens = checked_prompt(tokens, self.vocab_size, self.context_length)
        sampler = Sampler(params, tokens, self.vocab_size)
        began = perf_counter()
        track = self._known(tokens[:-1]) or Track(self, self.free_id())
        reused, forwards = track.length, 0
        session = LlamaCppSession(tokens, track, sampler, min(reserve, self.context_length))
        self._open.append(session)
        try:
            reserved = sum(max(each.reserve - each.track.length, 0) for each in self._open[:-1])
            wanted = max(len(tokens), session.reserve) - track.length
            self._make_room(wanted, f"a prompt of {len(tokens)} tokens", reserved)
            kept = KeptPrompt(min(top_k, self.vocab_size)) if top_k and TOP_K in self.capabilities else None
            forwards = self._read(track, tokens[:-1], kept)
            session.prompt_top_k = kept.found(tokens) if kept is not None else None
        except BaseException:
            self.closed(session)
            raise
        if stats is not None:
            stats.prompt_tokens += len(tokens)
            stats.prefill_forwards += forwards
            stats.reused_tokens += reused
            stats.prefill_seconds += perf_counter() - began
        return session

    def step(
        self, sessions: Sequence[LlamaCppSession], trees: Sequence[TokenTree], known: Sequence[int] | None = None
    ) -> list[Choices]:
        known = known or [0] * len(trees)
        for session, first in zip(sessions, known, strict=True):
            track = session.track
            if first == 0 and (
                (track.tree is not None and not track.forget()) or track.length < len(session.tokens) - 1
            ):
                self._reread(session)
        total = sum(len(tree) - first for tree, first in zip(trees, known, strict=True))
        if total > max(self.context.n_step, len(trees)):
            raise BadParameter(
                f"trees of {total} nodes are more than the {self.context.n_step} that a step may have (n_batch, and "
                "n_ubatch for a model with a sliding window); use a larger one"
            )
        self._make_room(total, f"a step of {total} nodes")
        logits = self._forward([session.track for session in sessions], trees, total, known)
        assert logits is not None
        self._shown, at = [], 0
        for session, tree, first in zip(sessions, trees, known, strict=True):
            rows = logits[at : at + len(tree) - first]
            self._shown.append(Choices(rows, tree, session.sampler, borrowed=True, first=first))
            at += len(rows)
        return self._shown

    def closed(self, session: LlamaCppSession) -> None:
        """Takes a session's ids back; its cells stay for a prompt that begins with its tokens, while there is room."""
        if session not in self._open:
            return
        self._open.remove(session)
        track = session.track
        forgotten = track.tree is None or track.forget()
        self._free += track.release()
        if forgotten and track.length > 0 and CHAIN in self.capabilities:
            self._idle.append((track, session.tokens[: track.length]))
        else:
            self._discard(track)

    def forget(self) -> None:
        """Empties the cache of what is kept for prompts to come."""
        while self._idle:
            self._discard(self._idle.pop(0)[0])

    def free_id(self, wanting: Track | None = None) -> int:
        """A sequence id that is not in use, if need be one that a session other than the wanting holds for nothing."""
        if not self._free and self._idle:
            self._discard(self._idle.pop(0)[0])
        if not self._free:
            others = [session.track for session in self._open if session.track is not wanting]
            share = self.context.n_seq_max // (len(others) + 1)
            self._free += [owner for track in others for owner in track.release(keep=share - 1)]
        if not self._free:
            raise CacheFull(
                f"{len(self._open)} sequences are open and all {self.context.n_seq_max} sequence ids in use; "
                "close a sequence, or load the model with a larger n_seq_max (at most "
                f"{c.llama_max_parallel_sequences()})"
            )
        return self._free.pop()

    def _discard(self, track: Track) -> None:
        self.context.remove(track.main)
        self._free.append(track.main)

    def _known(self, tokens: list[int]) -> Track | None:
        """A closed session's track, cut to what it has in common with `tokens`."""
        best, most = -1, 0
        for index, (track, theirs) in enumerate(self._idle):
            common = _common(theirs, tokens)
            if common > most and self.context.first_position(track.main) == 0:  # a window may have moved on
                best, most = index, common
        if best < 0:
            return None
        track, _ = self._idle.pop(best)
        self.context.remove(track.main, most)
        track.length = most
        return track

    def _make_room(self, need: int, what: str, reserved: int = 0) -> None:
        """Refuses, with nothing lost, what does not fit beside the open sequences and what is reserved for them."""
        if not self.model.cells:
            return
        used = sum(session.track.cells for session in self._open)
        while self._idle and used + sum(track.length for track, _ in self._idle) + need > self.context.n_ctx:
            self._discard(self._idle.pop(0)[0])
        if used + reserved + need > self.context.n_ctx:
            raise CacheFull(
                f"the KV cache of {self.context.n_ctx} cells is full: {used + reserved} are taken by other sequences, "
                f"and {what} needs {need}; close a sequence, or load the model with a larger n_ctx"
            )

    def _read(self, track: Track, tokens: list[int], kept: KeptPrompt | None = None) -> int:
        """Brings `tokens` into the cache, but those that are there; returns the forwards it took.

        In the same parts whether or not what may follow is kept: the cache shall not depend on it.
        """
        forwards = 0
        while rest := tokens[track.length : track.length + self._chunk]:
            wanted = min(len(rest), track.length + len(rest) + PROMPT_ROWS - len(tokens)) if kept is not None else 0
            logits = self._forward([track], [TokenTree.chain(rest[0], rest[1:])], max(wanted, 0))
            if kept is not None and logits is not None:
                kept.see(logits)
            track.keep(range(len(rest)))
            forwards += 1
        return forwards

    def _reread(self, session: LlamaCppSession) -> None:
        """For a model that cannot forget a step which was not committed."""
        session.track.context.remove(session.track.main)
        session.track.length = 0
        self._read(session.track, session.tokens[:-1])

    def _forward(
        self, tracks: Sequence[Track], trees: Sequence[TokenTree], logits: int, known: Sequence[int] | None = None
    ) -> FloatArray | None:
        for choices in self._shown:
            choices.expire()
        self._shown = []
        try:
            tokens, positions, ids = list[int](), list[int](), list[list[int]]()
            for track, tree, first in zip(tracks, trees, known or [0] * len(trees), strict=True):
                ids += track.lay(tree, first)
                tokens += tree.tokens[first:].tolist()
                positions += [track.length + depth for depth in tree.depths[first:].tolist()]
            return self.context.decode(tokens, positions, ids, logits)
        except BaseException:
            for track in tracks:
                if not track.forget():  # a state that has read who knows what: it is made anew from the tokens
                    self.context.remove(track.main)
                    track.length = 0
            raise

    # The test of the model

    def _tested(self) -> frozenset[str]:
        """What the model can do, found out on itself."""
        a, b, d, e, f, g = self._ordinary_tokens(6)
        tree = TokenTree(np.array([d, e, f, g, a]), np.array([-1, 0, 0, 1, 2]))
        paths = [[a, b, d, e, g], [a, b, d, f, a]]
        own = [self._logits_of(path) for path in paths]  # each [2 + depth, vocab], one token at a time
        if self.model.stateful or not self._can_forget([a, b, d]):
            if _differ(self._after_chunk([a, b, d, e]), own[0][3:4]):
                self._chunk = 1  # a recurrence in chunks need not be the recurrence
            return frozenset()
        able = {LOGITS, TOP_K}
        chained = self._session_logits([a, b, d], TokenTree.chain(d, [e, g]))
        if _differ(chained[0], own[0][2:]):
            raise Refused(f"{self.name} does not give its own logits when it reads several tokens at once")
        able.add(CHAIN)
        if self.context.n_seq_max > 1:
            rows, after = self._session_logits([a, b, d], tree, (0, 2, 4))
            wrong = [_differ(rows[nodes], each[2:]) for nodes, each in zip(([0, 1, 3], [0, 2, 4]), own, strict=True)]
            if not any(wrong) and not _differ(after, self._logits_of([*paths[1], e])[-1:]):
                able.add(TREE)
        return frozenset(able)

    def _can_forget(self, tokens: list[int]) -> bool:
        track = Track(self, self.free_id())
        self._read(track, tokens)
        able = self.context.remove(track.main, len(tokens) - 1)
        self._discard(track)
        return able

    def _after_chunk(self, tokens: list[int]) -> FloatArray:
        """float32 [1, vocab], after the last of `tokens`, the others read at once."""
        track = Track(self, self.free_id())
        self._read(track, tokens[:-1])
        row = np.array(self._forward([track], [TokenTree.root(tokens[-1])], logits=1))
        self._discard(track)
        return row

    def _logits_of(self, tokens: list[int]) -> FloatArray:
        """float32 [tokens, vocab], one forward a token, nothing forgotten."""
        track, rows = Track(self, self.free_id()), []
        for token in tokens:
            rows.append(np.array(self._forward([track], [TokenTree.root(token)], logits=1)))
            track.keep([0])
        self._discard(track)
        return np.concatenate(rows)

    def _session_logits(
        self, prompt: list[int], tree: TokenTree, path: Sequence[int] = (0,)
    ) -> tuple[FloatArray, FloatArray]:
        """Of the tree over the prompt [nodes, vocab]; of its first token once more after `path`, [1, vocab]."""
        session = self.open(prompt, SamplingParams())
        rows = self.step([session], [tree])[0].logits
        session.track.keep(path)
        after = np.array(self._forward([session.track], [TokenTree.root(int(tree.tokens[1]))], logits=1))
        session.track.forget()
        self._open.remove(session)
        self._free += session.track.release()
        self._discard(session.track)
        return rows, after

    def _ordinary_tokens(self, count: int) -> list[int]:
        """Ids without a special meaning, spread over the vocabulary."""
        spread = np.linspace(0, self.vocab_size - 1, min(self.vocab_size, 64)).astype(int).tolist()
        found = [token for token in spread if not c.llama_vocab_is_control(self.model.vocab, token)]
        return [(found or spread)[(7 * i + 3) % len(found or spread)] for i in range(count)]


def _differ(here: npt.NDArray[Any], there: npt.NDArray[Any]) -> bool:
    return not float(np.sqrt(np.mean((here - there) ** 2))) <= TOLERANCE * float(np.std(there))  # NaN differs


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    size = min(len(one), len(other))
    unlike: IntArray = np.flatnonzero(np.asarray(one[:size]) != np.asarray(other[:size]))
    return int(unlike[0]) if len(unlike) else size


def load(path: str | Path, options: LlamaCppOptions | None = None) -> tuple[LlamaCppTarget, GgufTokenizer]:
    """Loads a GGUF file.

    Args:
        path: the file; of a model in several files the first.
        options: how.

    Returns:
        The target and the tokenizer that the file holds.

    Raises:
        LeapaheadError: one clear sentence for whatever is wrong.
    """
    options = options or LlamaCppOptions()
    model = Model(path, options)
    return LlamaCppTarget(model, options), GgufTokenizer(model)
