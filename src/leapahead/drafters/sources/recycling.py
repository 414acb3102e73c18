"""Token Recycling (2408.08696): the target's own best next tokens, whenever it last stood there, are what may follow.

    after a step, of every node:   (.., b, a) ──> the k best next tokens at that node, with their log-probabilities
    asked for a node (.., b, a):   what is kept for its last three tokens, else for two, else for one

Of rejected nodes too: their logits are paid for. And of the prompt, whose logits the prefill has computed. Logits that
were seen at the same token predict what follows it better than the last logits do (RACER's "copy-logit", 2604.14885).
Log-probabilities are kept with the tokens, so that the dice rank them when sampling, for which we know of no precedent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from threading import Lock
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from leapahead.core.errors import BadParameter
from leapahead.drafters.base import Context, Step
from leapahead.drafters.cache import Arrays, Section
from leapahead.planner.source import Candidate, Feature, Score, Source
from leapahead.models.base import CHAIN, TOP_K

CAPACITY = 40_000  # places that are kept: with k = 128 at most 50 MB, with k = 8 about 15 MB
USUAL, SAMPLED = 8, 128  # k when greedy; and when sampling, where the dice may take a token from far down
AGES = (1, 4, 16, 64)  # steps since a place was seen last

Place = tuple[int, ...]  # the last tokens, oldest first
Kept = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]  # tokens, likeliest first; their log-probabilities


class Adjacency(Section):
    """Places of one and of two tokens and what may follow them, of all texts; the least recently written go.

    Args:
        capacity: greatest number of places.
    """

    token_arrays: ClassVar[tuple[str, ...]] = ("tokens", "following")

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self._after: dict[Place, Kept] = {}
        self._lock = Lock()

    def get(self, place: Place) -> tuple[Kept, int] | None:
        """What follows a place's last two tokens, or its last one, and how many they were."""
        for length in (2, 1):
            if len(place) >= length and (found := self._after.get(place[-length:])) is not None:
                return found, length
        return None

    def put(self, places: Iterable[tuple[Place, Kept]]) -> None:
        """The later ones stand where a place comes twice."""
        after = self._after
        with self._lock:
            for place, kept in places:
                after.pop(place, None)
                after[place] = kept
            while len(after) > self.capacity:
                del after[next(iter(after))]

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Flat: `counts` says how many continuations each place has, `before` is -1 where one token is the place."""
        with self._lock:
            items = list(self._after.items())
        kept = [kept for _, kept in items]
        return {
            "before": np.array([place[0] if len(place) == 2 else -1 for place, _ in items], dtype=np.int32),
            "tokens": np.array([place[-1] for place, _ in items], dtype=np.int32),
            "counts": np.array([len(following) for following, _ in kept], dtype=np.int32),
            "following": np.concatenate([np.zeros(0, np.int32), *(following for following, _ in kept)]),
            "logp": np.concatenate([np.zeros(0, np.float32), *(logp for _, logp in kept)]),
        }

    def merge(self, arrays: Arrays) -> None:
        names = ("before", "tokens", "counts", "following", "logp")
        if missing := [name for name in names if name not in arrays]:
            raise ValueError(f"an adjacency needs the array {missing[0]!r}")
        before, tokens, counts, following, logp = (arrays[name] for name in names)
        if any(arrays[name].ndim != 1 for name in names):
            raise ValueError("an adjacency is made of flat arrays")
        if any(each.dtype != np.int32 for each in (before, tokens, counts, following)) or logp.dtype != np.float32:
            raise ValueError("an adjacency has int32 for tokens and counts and float32 for log-probabilities")
        if not len(before) == len(tokens) == len(counts) or not counts.sum() == len(following) == len(logp):
            raise ValueError("an adjacency whose counts do not go with its tokens")
        if (counts < 1).any() or not np.isfinite(logp).all():
            raise ValueError("an adjacency has continuations for each place, and finite log-probabilities")
        ends = np.cumsum(counts)[:-1]
        rows = zip(np.split(following, ends), np.split(logp, ends), strict=True) if len(tokens) else ()
        places = [(one, two) if one >= 0 else (two,) for one, two in zip(before.tolist(), tokens.tolist(), strict=True)]
        with self._lock:
            ours, self._after = self._after, {}
        self.put(zip(places, rows, strict=True))
        self.put(ours.items())

    def figures(self) -> dict[str, Any]:
        return {"places": len(self._after)}


class Recycling(Source):
    """What the target thought might follow, wherever it has been.

    Args:
        k: continuations of a place that are kept; 0 for 8 when greedy and 128 when sampling.
        longest: tokens of a place, at most.
    """

    name: ClassVar[str] = "recycling"
    needs: ClassVar[frozenset[str]] = frozenset({CHAIN, TOP_K})

    def __init__(self, k: int = 0, longest: int = 4) -> None:
        if k < 0 or longest < 1:
            raise BadParameter(f"k={k}, longest={longest} is not possible: k must be at least 0 and longest 1")
        self.k, self.longest = k, longest
        self._after: dict[Place, tuple[Kept, int]] = {}  # and in which step it was seen last
        self._shared: Adjacency | None = None
        self._now = 0

    def begin(self, context: Context) -> None:
        self.k = min(self.k or (SAMPLED if context.sampled else USUAL), context.vocab_size)
        if context.drafter_cache is not None:
            self._shared = context.drafter_cache.section("recycling", Adjacency)
        if (seen := context.prompt_top_k) is not None:
            tokens = seen.tokens.tolist()
            places = [tuple(tokens[max(0, end - self.longest) : end]) for end in range(1, len(tokens) + 1)]
            self._keep(places, seen.following[:, : self.k], seen.logits[:, : self.k])

    def _keep(self, places: Sequence[Place], following: npt.NDArray[np.int64], logits: npt.NDArray[np.float64]) -> None:
        """Later places stand where one comes twice."""
        logp = logits - logits[:, :1]
        logp -= np.log(np.exp(logp).sum(axis=1, keepdims=True))
        # Rows of their own: a view would keep all of a step's alive.
        rows = [
            (one.copy(), other.copy())
            for one, other in zip(following.astype(np.int32), logp.astype(np.float32), strict=True)
        ]
        after, now = self._after, self._now
        for place, row in zip(places, rows, strict=True):
            kept = row, now
            for start in range(len(place)):
                after[place[start:]] = kept
        if len(after) > CAPACITY:
            for place in list(after)[: CAPACITY // 4]:
                del after[place]
        if self._shared is not None:
            self._shared.put(
                (place[-n:], row) for place, row in zip(places, rows, strict=True) for n in (1, 2) if len(place) >= n
            )

    def root(self, context: Context) -> Place:
        return tuple(context.tokens[-self.longest :])

    def follow(self, state: Place, token: int) -> Place:
        return (*state, token)[-self.longest :]

    def _found(self, state: Place) -> tuple[Kept, Feature] | None:
        shared = self._shared.get(state) if self._shared is not None else None
        least = shared[1] if shared is not None else 0  # of equally long places one's own is better
        for start in range(min(len(state), len(state) - least + 1)):
            if (found := self._after.get(state[start:])) is not None:
                kept, when = found
                return kept, (len(state) - start, sum(self._now - when > age for age in AGES))
        return (shared[0], (shared[1], len(AGES) + 1)) if shared is not None else None

    def candidates(self, state: Place, limit: int) -> list[Candidate]:
        if (found := self._found(state)) is None:
            return []
        (tokens, logp), feature = found
        return [
            Candidate(token, value, feature)
            for token, value in zip(tokens[:limit].tolist(), logp[:limit].tolist(), strict=True)
        ]

    def drawn(self, state: Place, limit: int, score: Score) -> list[Candidate]:
        if (found := self._found(state)) is None:
            return []
        (tokens, logp), feature = found
        if len(tokens) > limit:
            best = np.argpartition(score(tokens, logp), -limit)[-limit:]
            tokens, logp = tokens[best], logp[best]
        return [Candidate(token, value, feature) for token, value in zip(tokens.tolist(), logp.tolist(), strict=True)]

    def observe(self, context: Context, step: Step) -> None:
        self._now += 1
        following, logits = step.choices.top_k(self.k)
        tokens, parents = step.tree.tokens.tolist(), step.tree.parents.tolist()
        places: list[Place] = [tuple(context.tokens[: step.position + 1][-self.longest :])]
        for node in range(1, len(tokens)):
            places.append((*places[parents[node]], tokens[node])[-self.longest :])
        # The path last, so that what was really said after a token stands.
        path = step.verdict.path
        order = [*(node for node in range(len(tokens)) if node not in set(path)), *path] if len(tokens) > 1 else [0]
        self._keep([places[node] for node in order], following[order], logits[order])

    def figures(self) -> dict[str, Any]:
        return {"places": len(self._after)}
