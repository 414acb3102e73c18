"""Decides whether a difference between two texts is a numeric tie or a mismatch, by measuring the rounding noise.

Two drafters lead a target through forwards of different shapes, whose results are equal in exact arithmetic but not in
floating point. Where the scores of two tokens are closer than the rounding noise, the choice between them is a tie. The
noise is measured: the position is computed again in several ways that are equal in exact arithmetic,

    root only        prefill of all tokens, then a step
    chain of k       prefill of all but the last k tokens, which then go through one step
    siblings         the same with nodes beside the path, which the path must not attend to
    rebuilt by k     the whole cache computed by steps of k nodes; then a step
    scattered        the last tokens committed from steps with nodes beside the path, so that their cache entries lie
                     apart, as those of accepted drafts may
    batch            several copies of the sequence in one step

and the noise is the largest change, among these ways, of the difference between the scores of two likely tokens. All
pairs of likely tokens count, because a dozen ways sample coarse rounding too thinly for a single pair (in bfloat16 a
logit changes by a whole step or not at all). A wrong mask or position changes these ways as well, by more than rounding
can: where they differ by more than a ceiling, no tie is granted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from array_api_compat import array_namespace, to_device

from leapahead.core.errors import CacheFull
from leapahead.core.sampling import Array, Sampler, SamplingParams
from leapahead.core.tree import Budget, TokenTree, TreeBuilder
from leapahead.core.verify import Verdict
from leapahead.models.base import CHAIN, TREE, KeepsPrefixes, Session, Target, read_prompt
from leapahead.models.choices import Choices
from leapahead.models.encoder_decoder import open_beside

CHAINS = (1, 2, 3, 4, 8, 16, 32)
REBUILT = (5, 16, 64, 256)
STEPS = 100  # greatest number of steps to rebuild a cache
SCATTERED, BESIDE = 32, 5  # last tokens that are scattered, and nodes beside each of them
SIBLINGS = (1, 3, 7, 15, 31)
NEAR = 64  # likeliest tokens whose differences are measured
# The ceiling, relative to the largest logit: so many steps of the target's precision, and at most this share.
CEILING_STEPS, CEILING_SHARE = 256, 1 / 16


@dataclass(frozen=True)
class Gap:
    """How far apart two tokens are at one position.

    Attributes:
        gap: score of plain decoding's token minus that of the other, as computed by plain decoding.
        noise: the rounding noise, see the module.
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
        prompt: the prompt of plain decoding.
        text: its new tokens before the position.
        pair: plain decoding's next token, and the other.
        params: of the sampling; compared are the scores from which tokens are chosen, Gumbel noise included.
        batch: number of sequences that were decoded together with the other text.
        thorough: compute the position in every way. Otherwise the cheap ways come first, the first one that explains
            the gap ends the measurement, and `noise` is that of the ways so far.
    """
    with target.lock:
        return _measure(target, prompt, text, pair, params, batch, thorough)


def _measure(
    target: Target,
    prompt: Sequence[int],
    text: Sequence[int],
    pair: tuple[int, int],
    params: SamplingParams,
    batch: int,
    thorough: bool,
) -> Gap:
    """`measure`, under the target's lock."""
    session = target.open(prompt, params)
    try:
        read_prompt(target, session)
        for token in text:  # one at a time, so that the cache entries are plain decoding's
            target.step([session], [TokenTree.root(session.tokens[-1])])
            session.commit(Verdict((0,), (token,), 0))
        plain = target.step([session], [TokenTree.root(session.tokens[-1])])[0].logits[:1]
        here, scores = _host(plain), _scores(session.sampler, plain)
        with np.errstate(invalid="ignore"):
            gap = float(scores[pair[0]] - scores[pair[1]])
        if (gumbel := session.sampler.noise) is not None:  # equal in both decodings, so it adds no rounding noise
            at = gumbel.at(len(session.tokens))
            gap += float(at[pair[0]] - at[pair[1]])
        near = np.union1d(np.argsort(-here)[:NEAR], pair)
        share = min(CEILING_STEPS * target.info.precision, CEILING_SHARE)
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
    """float64 [vocab], the scores from which tokens are chosen, without the Gumbel noise."""
    return _host(sampler.scores(row, TokenTree.root(sampler.tokens[-1]), np.array([0])))


def _spread(
    there: npt.NDArray[np.float64], here: npt.NDArray[np.float64], near: npt.NDArray[np.int64], pair: tuple[int, int]
) -> float:
    """The largest change of the difference between two of the tokens `near`."""
    if (np.isfinite(there[list(pair)]) != np.isfinite(here[list(pair)])).any():
        return math.inf  # a token of the pair is filtered out in only one of the computations
    with np.errstate(invalid="ignore"):
        moved = (there - here)[near]
    moved = moved[np.isfinite(moved)]
    return float(np.ptp(moved)) if len(moved) else 0.0


def _host(row: Array) -> npt.NDArray[np.float64]:
    """A row [1, vocab] of any array kind and precision as float64 [vocab]."""
    xp = array_namespace(row)
    found: Any = to_device(xp.astype(row, xp.float64 if row.dtype == xp.float64 else xp.float32), "cpu")
    host: npt.NDArray[np.float64] = np.asarray(found, dtype=np.float64)[0]
    return host


def _ways(
    target: Target, session: Session, params: SamplingParams, batch: int, thorough: bool = True
) -> Iterator[Array]:
    """Unprocessed logits [1, vocab] after the session's last token, in every way that the target is capable of."""
    tokens, space = list(session.tokens), _Space(target, session, params)
    yield _row(space, tokens, TokenTree.root(tokens[-1]), 0)
    if thorough:
        yield from _rebuilt_ways(space, tokens)
    for k in (k for k in CHAINS if CHAIN in target.info.capabilities and k < len(tokens)):
        yield _row(space, tokens[:-k], TokenTree.chain(tokens[-k - 1], tokens[-k:]), k)
    leaves = target.max_leaves // 2  # another session is open beside it
    for s in (s for s in SIBLINGS if TREE in target.info.capabilities and s < leaves):
        k = min(4, len(tokens) - 1)
        builder = TreeBuilder(tokens[-k - 1], Budget(leaves=leaves))
        path = [0, *builder.add_path(tokens[len(tokens) - k :])]
        for parent in path[: 1 + s // 4]:
            for token in range(s):
                builder.add(parent, token % target.info.vocab_size)
        yield _row(space, tokens[: len(tokens) - k], builder.build(), path[-1])
    if TREE in target.info.capabilities and leaves > BESIDE and len(tokens) > 2:
        yield _scattered(space, tokens)
    if not thorough:  # last, since each takes many steps
        yield from _rebuilt_ways(space, tokens)
    if batch > 1 and not space.alone:
        yield from _batch_ways(space, tokens, batch)


def _batch_ways(space: _Space, tokens: list[int], batch: int) -> Iterator[Array]:
    """The position in a batch of ragged copies, as many as there is room for.

    The session is one of them, so that no more are open than before.
    """
    target, others = space.target, list[Session]()
    try:
        with suppress(CacheFull):
            for index in range(batch - 1):
                before = tokens[: max(1, len(tokens) - 7 * index)]
                others.append(open_beside(target, space.session, before, space.params))
                read_prompt(target, others[-1])
        # Without chains, a session cannot step a second time over the same root.
        together = [space.session] if CHAIN in target.info.capabilities else []
        together += [each for each in others if not each.unread]
        choices = list[Choices]()
        with suppress(CacheFull):
            choices = target.step(together, [TokenTree.root(each.tokens[-1]) for each in together])
        together = together[: len(choices)]
        for each, chosen in zip(together, choices, strict=True):
            if len(each.tokens) == len(tokens):
                yield chosen.logits[:1]
    finally:
        for other in others:
            other.close()


@dataclass
class _Space:
    """Opens further sessions beside the one in question, which is closed where the cache has no room for both.

    Attributes:
        alone: whether it was closed.
    """

    target: Target
    session: Session
    params: SamplingParams
    alone: bool = False

    def open(self, tokens: Sequence[int], reserve: int) -> Session:
        """A session with its prompt read, which may grow to `reserve` tokens."""
        session = self._opened(tokens, reserve)
        read_prompt(self.target, session)
        return session

    def _opened(self, tokens: Sequence[int], reserve: int) -> Session:
        try:
            return open_beside(self.target, self.session, tokens, self.params, reserve)
        except CacheFull:
            if self.alone:
                raise
            self.alone = True
            self.session.close()
            if isinstance(self.target, KeepsPrefixes):
                self.target.forget()  # its cache entries would be reused instead of computed again
            return open_beside(self.target, self.session, tokens, self.params, reserve)


def _rebuilt_ways(space: _Space, tokens: list[int]) -> Iterator[Array]:
    """The position after caches that were computed by steps of several nodes."""
    for k in (k for k in REBUILT if CHAIN in space.target.info.capabilities and len(tokens) / k <= STEPS):
        yield _rebuilt(space, tokens, k)


def _row(space: _Space, tokens: list[int], tree: TokenTree, node: int) -> Array:
    """Logits after a node of a tree, over a prompt."""
    session = space.open(tokens, len(tokens) + len(tree))
    try:
        return space.target.step([session], [tree])[0].logits[node : node + 1]
    finally:
        session.close()


def _scattered(space: _Space, tokens: list[int]) -> Array:
    """The position after a cache whose last entries lie apart."""
    begin = max(1, len(tokens) - SCATTERED)
    session = space.open(tokens[:begin], len(tokens) + 2 * BESIDE + 3)
    try:
        while rest := tokens[len(session.tokens) :][:2]:
            builder = TreeBuilder(session.tokens[-1], Budget(leaves=BESIDE + 1))
            for other in range(BESIDE):
                builder.add(0, (rest[0] + 1 + other) % space.target.info.vocab_size)
            path = [0, *builder.add_path(rest[:-1])]
            space.target.step([session], [builder.build()])
            session.commit(Verdict(tuple(path), tuple(rest), 0))
        return space.target.step([session], [TokenTree.root(session.tokens[-1])])[0].logits[:1]
    finally:
        session.close()


def _rebuilt(space: _Space, tokens: list[int], k: int) -> Array:
    """Logits after the tokens, of which every step computed k."""
    session = space.open(tokens[:1], len(tokens) + k)
    try:
        while rest := tokens[len(session.tokens) :][:k]:
            space.target.step([session], [TokenTree.chain(session.tokens[-1], rest[:-1])])
            session.commit(Verdict(tuple(range(len(rest))), tuple(rest), 0))
        return space.target.step([session], [TokenTree.root(session.tokens[-1])])[0].logits[:1]
    finally:
        session.close()
