"""Is a difference between two texts rounding, or a bug? Measured at the position where they part.

Two drafts lead a target through forwards of different shapes, which are equal in exact arithmetic and not in floating
point. Where the two best scores lie closer than that noise, the choice between them is a tie (ALGORITHMS 5.3, point 4).
The noise is not assumed: the position is computed again in several ways that are equal in exact arithmetic,

    root only        prefill of all tokens, then a step
    chain of k       prefill of all but the last k tokens, which then go through one step
    siblings         the same with nodes beside the path that nobody may see
    rebuilt by k     every token through steps of k nodes, so that the cache is another one; then a step
    batch            several copies of the sequence in one step

and noise = the largest change, among them, of the difference between two of the position's best tokens; not only of the
two in question, since a dozen ways sample coarse rounding too thinly for one pair (in bfloat16 a logit moves by a whole
step or not at all). A broken mask or position changes these ways too, and by more than rounding can: where they part by
more than the ceiling, they are not equal and no tie is granted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from array_api_compat import array_namespace, to_device

from leapahead.core.errors import CacheFull
from leapahead.core.sampling import Array, Sampler, SamplingParams
from leapahead.core.tree import Budget, TokenTree, TreeBuilder
from leapahead.core.verify import Verdict
from leapahead.models.base import CHAIN, TREE, Forgetful, Session, Target

CHAINS = (1, 2, 3, 4, 8, 16, 32)
REBUILT = (5, 16, 64, 256)
STEPS = 100  # at most, to rebuild a cache
SIBLINGS = (1, 3, 7, 15, 31)
NEAR = 64  # best tokens whose differences are watched
CEILING_STEPS = 256  # of the target's precision, relative to the largest of them ...
CEILING_SHARE = 1 / 16  # ... and in no precision more than this share of it


@dataclass(frozen=True)
class Gap:
    """How far apart two tokens are at one position.

    Attributes:
        gap: score of plain decoding's token minus the other's, computed in plain decoding's way.
        noise: the largest change of a difference between two likely tokens, among equal ways of computing it.
        tie: whether rounding explains the difference.
    """

    gap: float
    noise: float
    tie: bool


def measure(
    target: Target,
    prompt: Sequence[int],
    text: Sequence[int],
    pair: tuple[int, int],
    params: SamplingParams,
    batch: int,
    thorough: bool = True,
) -> Gap:
    """Judges the choice between two tokens after `prompt` and `text`.

    Args:
        target: the model.
        prompt: what plain decoding was given.
        text: what it had decoded from there.
        pair: plain decoding's next token, and the other.
        params: of the sampling; the scores compared are those that the choice was made from, dice included.
        batch: how many sequences the other text was decoded with.
        thorough: compute the position in every way. Otherwise the first way that explains the gap ends it, the cheap
            ones before the others, and `noise` is that of the ways so far: where only the verdict counts.
    """
    session = target.open(prompt, params)
    try:
        for token in text:  # plain decoding's own way, its cache entries included
            target.step([session], [TokenTree.root(session.tokens[-1])])
            session.commit(Verdict((0,), (token,), 0))
        plain = target.step([session], [TokenTree.root(session.tokens[-1])])[0].logits[:1]
        here, scores = _host(plain), _scores(session.sampler, plain)
        with np.errstate(invalid="ignore"):
            gap = float(scores[pair[0]] - scores[pair[1]])
        if (gumbel := session.sampler.noise) is not None:  # the same in both decodings, so no part of the rounding noise
            gap += float(gumbel.at(len(session.tokens))[pair[0]] - gumbel.at(len(session.tokens))[pair[1]])
        near = np.union1d(np.argsort(-here)[:NEAR], pair)
        share = min(CEILING_STEPS * target.precision, CEILING_SHARE)
        ceiling = share * float(np.max(np.abs(here[np.isfinite(here)]), initial=0.0))
        noise = drift = 0.0
        for row in _ways(target, session, params, batch, thorough):
            noise = max(noise, _spread(_scores(session.sampler, row), scores, near, pair))
            drift = max(drift, _spread(_host(row), here, near, pair))
            if not thorough and abs(gap) <= noise:
                break
    finally:
        session.close()
    return Gap(gap, noise, tie=abs(gap) <= noise and drift <= ceiling)


def _scores(sampler: Sampler, row: Array) -> npt.NDArray[np.float64]:
    """float64 [vocab]; what the choice is made from, but for the dice."""
    return _host(sampler.scores(row, TokenTree.root(sampler.tokens[-1]), np.array([0])))


def _spread(
    there: npt.NDArray[np.float64], here: npt.NDArray[np.float64], near: npt.NDArray[np.int64], pair: tuple[int, int]
) -> float:
    """The largest change of a difference between two of the tokens `near`."""
    if (np.isfinite(there[list(pair)]) != np.isfinite(here[list(pair)])).any():
        return math.inf  # one of the pair is filtered out in one of the two
    with np.errstate(invalid="ignore"):
        moved = (there - here)[near]
    moved = moved[np.isfinite(moved)]
    return float(np.ptp(moved)) if len(moved) else 0.0


def _host(row: Array) -> npt.NDArray[np.float64]:
    """[1, vocab], anywhere and of any precision -> float64 [vocab]."""
    xp = array_namespace(row)
    found: Any = to_device(xp.astype(row, xp.float64 if row.dtype == xp.float64 else xp.float32), "cpu")
    host: npt.NDArray[np.float64] = np.asarray(found, dtype=np.float64)[0]
    return host


def _ways(
    target: Target, session: Session, params: SamplingParams, batch: int, thorough: bool = True
) -> Iterator[Array]:
    """Raw logits [1, vocab] after the session's last token, computed in every way that the target can."""
    tokens, space = list(session.tokens), _Space(target, session, params)
    yield _row(space, tokens, TokenTree.root(tokens[-1]), 0)
    if thorough:
        yield from _rebuilt_ways(space, tokens)
    for k in (k for k in CHAINS if CHAIN in target.capabilities and k < len(tokens)):
        yield _row(space, tokens[:-k], TokenTree.chain(tokens[-k - 1], tokens[-k:]), k)
    leaves = target.max_leaves // 2  # another session is open beside it
    for s in (s for s in SIBLINGS if TREE in target.capabilities and s < leaves):
        k = min(4, len(tokens) - 1)
        builder = TreeBuilder(tokens[-k - 1], Budget(leaves=leaves))
        path = [0, *builder.add_path(tokens[len(tokens) - k :])]
        for parent in path[: 1 + s // 4]:
            for token in range(s):
                builder.add(parent, token % target.vocab_size)
        yield _row(space, tokens[: len(tokens) - k], builder.build(), path[-1])
    if not thorough:  # each takes many steps
        yield from _rebuilt_ways(space, tokens)
    if (
        batch > 1 and not space.alone
    ):  # the session itself is one of them, so that no more are open than the text was decoded with
        lengths = [max(1, len(tokens) - 7 * index) for index in range(batch - 1)]
        others = [target.open(tokens[:length], params) for length in lengths]  # ragged, as a batch is
        together = [session, *others] if CHAIN in target.capabilities else others  # else it cannot step twice
        try:
            choices = target.step(together, [TokenTree.root(each.tokens[-1]) for each in together])
            for each, chosen in zip(together, choices, strict=True):
                if len(each.tokens) == len(tokens):
                    yield chosen.logits[:1]
        finally:
            for other in others:
                other.close()


@dataclass
class _Space:
    """Opens sequences beside the one in question; where its cells are needed for that, it leaves.

    Attributes:
        alone: it has left.
    """

    target: Target
    session: Session
    params: SamplingParams
    alone: bool = False

    def open(self, tokens: Sequence[int], reserve: int) -> Session:
        """A session that may grow to `reserve` tokens."""
        try:
            return self.target.open(tokens, self.params, reserve=reserve)
        except CacheFull:
            if self.alone:
                raise
            self.alone = True
            self.session.close()
            if isinstance(self.target, Forgetful):
                self.target.forget()  # its cells would be read instead of computed again
            return self.target.open(tokens, self.params, reserve=reserve)


def _rebuilt_ways(space: _Space, tokens: list[int]) -> Iterator[Array]:
    for k in (k for k in REBUILT if CHAIN in space.target.capabilities and len(tokens) / k <= STEPS):
        yield _rebuilt(space, tokens, k)


def _row(space: _Space, tokens: list[int], tree: TokenTree, node: int) -> Array:
    session = space.open(tokens, len(tokens) + len(tree))
    try:
        return space.target.step([session], [tree])[0].logits[node : node + 1]
    finally:
        session.close()


def _rebuilt(space: _Space, tokens: list[int], k: int) -> Array:
    session = space.open(tokens[:1], len(tokens) + k)
    try:
        while rest := tokens[len(session.tokens) :][:k]:
            space.target.step([session], [TokenTree.chain(session.tokens[-1], rest[:-1])])
            session.commit(Verdict(tuple(range(len(rest))), tuple(rest), 0))
        return space.target.step([session], [TokenTree.root(session.tokens[-1])])[0].logits[:1]
    finally:
        session.close()
