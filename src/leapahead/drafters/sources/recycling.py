"""Token Recycling (2408.08696): the target's own top-k tokens, kept for every context in which it computed them.

    after a step, of every node:   (.., b, a) ──> the k likeliest next tokens after that node, with log-probabilities
    to propose after (.., b, a):   what is kept for its last three tokens, else for two, else for one

Rejected nodes count too, because their logits were computed anyway; so do the prompt's last rows. Logits that were seen
after the same token predict its continuation better than the latest logits do (RACER's "copy-logit", 2604.14885). When
sampling, the kept log-probabilities are ranked with the Gumbel noise of the position.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from leapahead import native
from leapahead.core.forks import Mutex
from leapahead.core.parameters import whole
from leapahead.drafters.cache import Arrays, Entry, Section
from leapahead.models.base import CHAIN, TOP_K, Capture
from leapahead.models.choices import PromptRows
from leapahead.planner.draft import SequenceView, Step
from leapahead.planner.source import Candidate, Feature, Score, Source

CAPACITY = 40_000  # contexts that are kept: with k = 128 at most 50 MB, with k = 8 about 15 MB
GREEDY, SAMPLED = 8, 128  # k when greedy and when sampling, where the noise may choose an unlikely token
AGES = (1, 4, 16, 64)  # bucket edges: steps since a context was seen last
ARRAYS = ("before", "tokens", "counts", "following", "logp")  # of a saved adjacency

Key = tuple[int, ...]  # the last tokens of a context, oldest first
TopK = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]  # tokens, likeliest first; their log-probabilities


class Adjacency(Section):
    """The section "recycling" of the drafter cache: top-k tokens by the last one and the last two tokens of a context.

    Args:
        capacity: greatest number of contexts; those written least recently are dropped.

    Attributes:
        compiled: what holds the contexts where the compiled module is installed.
    """

    token_arrays: ClassVar[tuple[str, ...]] = ("tokens", "following")
    exchanged: ClassVar[int] = 8 * CAPACITY

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self.compiled = native.module.Adjacency(capacity) if native.available else None
        self._top_k: dict[Key, TopK] = {}
        self._lock = Mutex()

    def get(self, key: Key) -> tuple[TopK, int] | None:
        """The top-k tokens after the last two tokens of a key, else after its last one, and how many matched."""
        if self.compiled is not None:
            return self.compiled.get(key)
        for length in (2, 1):
            if len(key) >= length and (found := self._top_k.get(key[-length:])) is not None:
                return found, length
        return None

    def put(self, entries: Iterable[tuple[Key, TopK]]) -> None:
        """Enters contexts; of equal keys the last one counts.

        Tokens that the model excludes, whose log-probabilities are not finite, are left out: they are last.
        """
        if self.compiled is not None:
            for key, (tokens, logp) in entries:
                self.compiled.put(key, tokens, logp)
            return
        finite = ((key, (tokens, logp), int(np.isfinite(logp).sum())) for key, (tokens, logp) in entries)
        with self._lock:
            kept = ((key, (tokens[:count], logp[:count])) for key, (tokens, logp), count in finite if count)
            _enter(self._top_k, kept, self.capacity)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """All contexts, least recently written first.

        `tokens`, int32 [contexts], is the last token and `before`, int32 [contexts], the one before it, or -1 in a
        context of one token; `counts`, int32 [contexts], is the number of top-k tokens of each. These tokens,
        `following`, int32, and their log-probabilities, `logp`, float32, are concatenated.
        """
        if self.compiled is not None:
            return dict(zip(ARRAYS, self.compiled.arrays(), strict=True))
        with self._lock:
            entries = list(self._top_k.items())
        top_k = [found for _, found in entries]
        return {
            "before": np.array([key[0] if len(key) == 2 else -1 for key, _ in entries], dtype=np.int32),
            "tokens": np.array([key[-1] for key, _ in entries], dtype=np.int32),
            "counts": np.array([len(following) for following, _ in top_k], dtype=np.int32),
            "following": np.concatenate([np.zeros(0, np.int32), *(following for following, _ in top_k)]),
            "logp": np.concatenate([np.zeros(0, np.float32), *(logp for _, logp in top_k)]),
        }

    @staticmethod
    def entries_of(arrays: Arrays) -> list[Entry]:
        """A key is `before` and the token, int32; a value is the row of `following`, then that of `logp`."""
        pairs = np.stack([arrays["before"], arrays["tokens"]], axis=1).astype(np.int32).tobytes()
        following, logp = arrays["following"].tobytes(), arrays["logp"].tobytes()
        ends = (4 * np.cumsum(arrays["counts"])).tolist()
        return [
            (pairs[8 * row : 8 * row + 8], following[first:end] + logp[first:end])
            for row, (first, end) in enumerate(zip([0, *ends], ends, strict=False))
        ]

    @staticmethod
    def arrays_of(entries: Sequence[Entry]) -> dict[str, npt.NDArray[Any]]:
        if any(len(key) != 8 or len(value) % 8 or not value for key, value in entries):
            raise ValueError("a context of an adjacency has 8 bytes, and as many for each of its top-k tokens")
        pairs = np.frombuffer(b"".join(key for key, _ in entries), dtype=np.int32)
        halves = [(value[: len(value) // 2], value[len(value) // 2 :]) for _, value in entries]
        return {
            "before": pairs[::2],
            "tokens": pairs[1::2],
            "counts": np.array([len(value) // 8 for _, value in entries], dtype=np.int32),
            "following": np.frombuffer(b"".join(following for following, _ in halves), dtype=np.int32),
            "logp": np.frombuffer(b"".join(logp for _, logp in halves), dtype=np.float32),
        }

    def replace(self, arrays: Arrays) -> None:
        """See `Section.replace`. Texts that are being decoded go on with what was held before."""
        new = Adjacency(self.capacity)
        new.merge(arrays)
        with self._lock:
            self.compiled, self._top_k = new.compiled, new._top_k

    def merge(self, arrays: Arrays) -> None:
        if missing := [name for name in ARRAYS if name not in arrays]:
            raise ValueError(f"an adjacency needs the array {missing[0]!r}")
        before, tokens, counts, following, logp = (arrays[name] for name in ARRAYS)
        if any(arrays[name].ndim != 1 for name in ARRAYS):
            raise ValueError("the arrays of an adjacency must have one dimension")
        if any(each.dtype != np.int32 for each in (before, tokens, counts, following)) or logp.dtype != np.float32:
            raise ValueError("an adjacency has int32 tokens and counts and float32 log-probabilities")
        if not len(before) == len(tokens) == len(counts) or not counts.sum() == len(following) == len(logp):
            raise ValueError("the counts of an adjacency do not match its tokens")
        if (counts < 1).any() or not np.isfinite(logp).all():
            raise ValueError("each context of an adjacency needs at least one token, and finite log-probabilities")
        if self.compiled is not None:
            self.compiled.merge(*(np.ascontiguousarray(arrays[name]) for name in ARRAYS))
            return
        ends = np.cumsum(counts)[:-1]
        rows = zip(np.split(following, ends), np.split(logp, ends), strict=True) if len(tokens) else ()
        keys = [(one, two) if one >= 0 else (two,) for one, two in zip(before.tolist(), tokens.tolist(), strict=True)]
        merged: dict[Key, TopK] = {}
        _enter(merged, zip(keys, rows, strict=True), self.capacity)
        with self._lock:
            _enter(merged, self._top_k.items(), self.capacity)
            self._top_k = merged

    def figures(self) -> dict[str, Any]:
        return {"contexts": len(self._top_k if self.compiled is None else self.compiled)}


def _enter(top_k: dict[Key, TopK], entries: Iterable[tuple[Key, TopK]], capacity: int) -> None:
    """Makes entries the most recently written ones, and drops the oldest beyond the capacity."""
    for key, found in entries:
        top_k.pop(key, None)
        top_k[key] = found
    while len(top_k) > capacity:
        del top_k[next(iter(top_k))]


class Recycling(Source):
    """Proposes the target's own top-k tokens of the last time that it was in the same context.

    Args:
        k: tokens that are kept for a context; 0 for 8 when greedy and 128 when sampling.
        longest: greatest number of tokens of a context that are compared.
    """

    name: ClassVar[str] = "recycling"
    needs: ClassVar[frozenset[str]] = frozenset({CHAIN, TOP_K})
    capture: ClassVar[Capture] = Capture(top_k=SAMPLED)

    def __init__(self, k: int = 0, longest: int = 4) -> None:
        self.k, self.longest = whole("k", k), whole("longest", longest, least=1)
        self.capture = Capture(top_k=max(SAMPLED, k))  # type: ignore[misc]
        self._top_k: dict[Key, tuple[TopK, int]] = {}  # by 1 to `longest` last tokens; and the step of the entry
        self._shared: Adjacency | None = None
        self._num_steps = 0

    def begin(self, sequence: SequenceView) -> None:
        self.k = min(self.k or (SAMPLED if sequence.sampled else GREEDY), sequence.vocab_size)
        if sequence.drafter_cache is not None:
            self._shared = sequence.drafter_cache.section(self.name, Adjacency)

    def read_prompt(self, sequence: SequenceView, rows: PromptRows) -> None:
        if rows.top_k_start == rows.end:
            return
        tokens = sequence.tokens
        ends = range(rows.top_k_start + 1, rows.end + 1)
        self.keep([tuple(tokens[max(0, end - self.longest) : end]) for end in ends], *rows.top_k(self.k))

    def keep(self, keys: Sequence[Key], following: npt.NDArray[np.int64], logits: npt.NDArray[np.float64]) -> None:
        """Enters the top-k tokens of contexts; of equal ones the last counts.

        Args:
            keys: the last tokens of each context.
            following: int64 [contexts, k].
            logits: float64 [contexts, k], falling.
        """
        logp = logits - logits[:, :1]
        logp -= np.log(np.exp(logp).sum(axis=1, keepdims=True))
        # Copies, because a view of one row would keep the arrays of the whole step in memory.
        rows = [
            (tokens.copy(), values.copy())
            for tokens, values in zip(following.astype(np.int32), logp.astype(np.float32), strict=True)
        ]
        top_k, now = self._top_k, self._num_steps
        for key, row in zip(keys, rows, strict=True):
            entry = row, now
            for start in range(len(key)):
                top_k[key[start:]] = entry
        if len(top_k) > CAPACITY:
            for key in list(top_k)[: CAPACITY // 4]:
                del top_k[key]
        if self._shared is not None:
            self._shared.put(
                (key[-n:], row) for key, row in zip(keys, rows, strict=True) for n in (1, 2) if len(key) >= n
            )

    def root(self, sequence: SequenceView) -> Key:
        return tuple(sequence.tokens[-self.longest :])

    def follow(self, state: Key, token: int) -> Key:
        return (*state, token)[-self.longest :]

    def _found(self, state: Key) -> tuple[TopK, Feature] | None:
        """The top-k tokens of the longest context that is known; of equally long ones this text's own is preferred."""
        shared = self._shared.get(state) if self._shared is not None else None
        least = shared[1] if shared is not None else 0
        for start in range(min(len(state), len(state) - least + 1)):
            if (found := self._top_k.get(state[start:])) is not None:
                top_k, step = found
                return top_k, (len(state) - start, sum(self._num_steps - step > age for age in AGES))
        return (shared[0], (shared[1], len(AGES) + 1)) if shared is not None else None

    def candidates(self, state: Key, limit: int) -> list[Candidate]:
        if (found := self._found(state)) is None:
            return []
        (tokens, logp), feature = found
        return [
            Candidate(token, value, feature)
            for token, value in zip(tokens[:limit].tolist(), logp[:limit].tolist(), strict=True)
        ]

    def seed_aware_candidates(self, state: Key, limit: int, score: Score) -> list[Candidate]:
        if (found := self._found(state)) is None:
            return []
        (tokens, logp), feature = found
        if len(tokens) > limit:
            best = np.argpartition(score(tokens, logp), -limit)[-limit:]
            tokens, logp = tokens[best], logp[best]
        return [Candidate(token, value, feature) for token, value in zip(tokens.tolist(), logp.tolist(), strict=True)]

    def observe(self, sequence: SequenceView, step: Step) -> None:
        self._num_steps += 1
        following, logits = step.choices.top_k(self.k)
        tokens, parents = step.tree.tokens.tolist(), step.tree.parents.tolist()
        keys: list[Key] = [tuple(sequence.tokens[max(0, step.position + 1 - self.longest) : step.position + 1])]
        for node in range(1, len(tokens)):
            keys.append((*keys[parents[node]], tokens[node])[-self.longest :])
        # The accepted path last, so that of equal contexts the committed one counts.
        path = step.verdict.path
        order = [*(node for node in range(len(tokens)) if node not in set(path)), *path] if len(tokens) > 1 else [0]
        self.keep([keys[node] for node in order], following[order], logits[order])

    def figures(self) -> dict[str, Any]:
        return {"contexts": len(self._top_k)}
