"""Rejection rules for drafts *sampled* from draft distributions: accept by a ratio test, or sample from the residual.

They preserve the distribution only: the token after a node is distributed as p, the target's processed distribution
there, but the text is not the one that plain decoding gives with the same seed. Exact matching (`core.verify`) is.

    rule        the draws of a node are                              drawn by                 paper
    specinfer   independent, each from a q of its own or all from one   draw_independent          2305.09781
    sequoia     the first b of one q, never a token twice            draw_without_replacement  2402.12374
    spectr      independent, all from one q                          draw_independent          2310.15141

With one draw, each of them is speculative sampling (Leviathan et al., 2211.17192; Chen et al., 2302.01318).

The result is exact only under these conditions, which this module cannot check:
- q is the distribution that was drawn *from*, after temperature and filters. Tokens that were selected as the likeliest
  instead of drawn have no q; use exact matching for them.
- Whether a node gets an i-th draw is decided before that draw is known. Dropping a draw because its token does not fit
  the budget is biased, since a duplicate, which needs no new node, would have been kept. So is reordering siblings.
- Drawing, acceptance tests and residual are three *independent* uses of randomness. All numbers come from one generator
  in sequence, never from copies of it, and never from the Gumbel noise of a position, by which the target chooses
  elsewhere: sharing noise is correct for exact matching and biased for the ratio test (vLLM #47386, #54282).

This module knows neither models nor caches; it works on trees and on float64 arrays [vocab] on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from leapahead.core.errors import DraftError
from leapahead.core.tree import TokenTree
from leapahead.core.verify import Verdict

FloatArray = npt.NDArray[np.float64]

MOST_SUM_ERROR = 1e-3  # by which the sum of a softmax in a narrow dtype may differ from 1
BISECTIONS = 60  # enough for double precision


@dataclass(frozen=True, eq=False)
class Selection:
    """A rule's decision about the draws of one node.

    Attributes:
        accept: for each draw, the probability that it is accepted, given that all before it were rejected.
        residual: float64 [vocab], sums to 1: the distribution of the token if all draws are rejected; p if there are
            none. It is 0 where p is 0 and, if all draws can be rejected, at every draw.
    """

    accept: tuple[float, ...]
    residual: FloatArray


Rule = Callable[[FloatArray, Sequence[int], Sequence[FloatArray]], Selection]
"""Called with `(p, tokens, qs)`: the target's distribution, float64 [vocab]; the drawn tokens in the order of drawing;
and for each draw its distribution, float64 [vocab], before any token was removed (one array may be repeated).

Raises DraftError for unequal lengths, arrays that are not distributions, and drawn tokens of probability 0."""


# --------------------------------------------------------------------------------------------------------- rules


def independent(p: FloatArray, tokens: Sequence[int], qs: Sequence[FloatArray]) -> Selection:
    """SpecInfer's multi-step rule (2305.09781): draw i is independent of the others, from its own q_i.

    Accepts with probability min(1, r(t) / q_i(t)), where r is p at first; after a rejection r becomes
    norm(max(r - q_i, 0)). A duplicate is a draw of its own.
    """
    p, tokens, qs = _checked(p, tokens, qs)
    return _one_by_one(p, tokens, qs)


def without_replacement(p: FloatArray, tokens: Sequence[int], qs: Sequence[FloatArray]) -> Selection:
    """Sequoia's rule (2402.12374): draw i is from q_i without the tokens drawn before, renormalised.

    Test and residual are those of `independent` with that distribution. If all of q's support is drafted and p is 0
    outside of it, one of the draws is accepted with certainty (the paper's "cover property"). There are no more draws
    than q has tokens, as in `draw_without_replacement`.
    """
    p, tokens, qs = _checked(p, tokens, qs)
    left = []
    for i, q in enumerate(qs):
        d = q.copy()
        d[tokens[:i]] = 0.0
        left.append(_normalised(d, otherwise=d))
    return _one_by_one(p, tokens, left)


def k_sequential(p: FloatArray, tokens: Sequence[int], qs: Sequence[FloatArray]) -> Selection:
    """SpecTr's K-SEQ (2310.15141): k independent draws from one q, each tested against p / gamma.

    Accepts with probability min(1, p(t) / (gamma q(t))), where gamma in [1, k], the paper's gamma*, solves
    1 - (1 - beta)^k = gamma beta with beta = sum min(q, p / gamma). For this gamma the residual, in general
    norm(p - min(q, p / gamma) (1 - (1 - beta)^k) / beta), is norm(max(p - gamma q, 0)).
    """
    p, tokens, qs = _checked(p, tokens, qs)
    if not tokens:
        return Selection((), p)
    q = qs[0]
    if not all(other is q or np.array_equal(other, q) for other in qs):
        raise DraftError("k_sequential needs all draws of a node from one distribution; independent takes several")
    gamma = _gamma(p, q, len(tokens))
    wanted = gamma * q
    accept = tuple(_ratio(p, wanted, token) for token in tokens)
    return Selection(accept, _normalised(np.maximum(p - wanted, 0.0), otherwise=p))


RULES: dict[str, Rule] = {"specinfer": independent, "sequoia": without_replacement, "spectr": k_sequential}


def _one_by_one(p: FloatArray, tokens: Sequence[int], ds: Sequence[FloatArray]) -> Selection:
    """Tests each draw against the residual of those before it; ds[i] may depend on the tokens before i."""
    accept, residual = [], p
    for token, d in zip(tokens, ds, strict=True):
        accept.append(_ratio(residual, d, token))
        residual = _normalised(np.maximum(residual - d, 0.0), otherwise=residual)
    return Selection(tuple(accept), residual)


def _gamma(p: FloatArray, q: FloatArray, k: int) -> float:
    """gamma* of K-SEQ by bisection. Returns the upper end of the interval, for which the residual is a distribution."""
    unlikelier, likelier = p <= q, p >= k * q  # here min(q, p / gamma) is p / gamma, and q, for every gamma in [1, k]
    between = ~(unlikelier | likelier)
    small, large, p, q = p[unlikelier].sum(), q[likelier].sum(), p[between], q[between]
    low, high = 1.0, float(k)
    for _ in range(BISECTIONS):
        gamma = (low + high) / 2
        beta = float(small / gamma + large + np.minimum(q, p / gamma).sum())
        tries = sum((1 - beta) ** i for i in range(k))  # (1 - (1 - beta)^k) / beta, without the division by 0
        low, high = (low, gamma) if tries <= gamma else (gamma, high)
    return high


def _ratio(p: FloatArray, q: FloatArray, token: int) -> float:
    """min(1, p / q) of a token drawn from q."""
    if not q[token] > 0:
        raise DraftError(f"token {token} cannot have been drawn: its probability is 0")
    return 1.0 if p[token] >= q[token] else float(p[token] / q[token])


def _normalised(mass: FloatArray, otherwise: FloatArray) -> FloatArray:
    """`mass` scaled to a sum of 1; `otherwise` if it is all 0, which happens if a draw is accepted with certainty."""
    total = mass.sum()
    return mass / total if total > 0 else otherwise


def _checked(
    p: FloatArray, tokens: Sequence[int], qs: Sequence[FloatArray]
) -> tuple[FloatArray, list[int], list[FloatArray]]:
    """The arguments of a rule, validated, the distributions normalised."""
    if len(tokens) != len(qs):
        raise DraftError(f"{len(tokens)} draws with {len(qs)} distributions: each needs the one it was drawn from")
    if any(np.shape(q) != np.shape(p) for q in qs):
        raise DraftError(f"p has shape {np.shape(p)} and the q of its draws {[np.shape(q) for q in qs]}")
    if not all(0 <= token < len(p) for token in tokens):
        raise DraftError(f"the drawn tokens {list(tokens)} are not all in a vocabulary of {len(p)}")
    distinct = {id(q): q for q in qs}  # usually one array, repeated
    once = {key: _distribution(q) for key, q in distinct.items()}
    return _distribution(p), [int(token) for token in tokens], [once[id(q)] for q in qs]


def _distribution(values: FloatArray) -> FloatArray:
    """float64 [vocab], scaled to a sum of 1, from which a softmax in a narrow dtype may differ slightly."""
    values = np.asarray(values, dtype=np.float64)
    total = float(values.sum())
    # Comparisons with NaN are false, so NaN is refused.
    if values.ndim != 1 or not values.min(initial=0.0) >= 0 or not abs(total - 1) <= MOST_SUM_ERROR:
        raise DraftError(f"not a distribution over one vocabulary: shape {values.shape}, sum {total:.6g}")
    return values / total


# ------------------------------------------------------------------------------------------------------- drawing


def draw_independent(q: FloatArray, count: int, rng: np.random.Generator) -> list[int]:
    """`count` independent draws from q, float64 [vocab]; a token may be drawn twice, one of probability 0 never.

    Raises:
        DraftError: q is not a distribution.
    """
    edges = np.cumsum(_distribution(q))
    # side="right" skips tokens of probability 0; a uniform below 1, times the last edge, is below that edge.
    return [int(token) for token in np.searchsorted(edges, rng.random(count) * edges[-1], side="right")]


def draw_without_replacement(q: FloatArray, count: int, rng: np.random.Generator) -> list[int]:
    """`count` draws from q, float64 [vocab], in the order of drawing, each from q without the tokens drawn before.

    The Gumbel-top-k trick (1903.06059): the largest of log q + Gumbel noise, falling. Fewer than `count` if the support
    of q is smaller; a token of probability 0 is never drawn.

    Raises:
        DraftError: q is not a distribution.
    """
    q = _distribution(q)
    support = np.flatnonzero(q)
    keys = np.log(q[support]) + rng.gumbel(size=len(support))
    count = min(count, len(support))
    first = np.argpartition(-keys, count - 1)[:count] if count else np.arange(0)
    return [int(token) for token in support[first[np.argsort(-keys[first])]]]


# ------------------------------------------------------------------------------------------------ verification


@dataclass(frozen=True, eq=False)
class Draws:
    """The draws of a tree.

    Attributes:
        tree: contains every drawn node; other nodes are ignored.
        children: for a node, the child of each draw, in the order of drawing. Siblings with equal tokens are one node,
            so a duplicate draw repeats its child.
        qs: for a node, the distribution of each draw, float64 [vocab], before any token was removed.

    Raises:
        DraftError: a draw is not a child of its node, or has no distribution.
    """

    tree: TokenTree
    children: Mapping[int, tuple[int, ...]]
    qs: Mapping[int, Sequence[FloatArray]]

    def __post_init__(self) -> None:
        for node in {**self.children, **self.qs}:
            children = self.children.get(node, ())
            if len(children) != len(self.qs.get(node, ())):
                raise DraftError(
                    f"node {node} has {len(children)} draws and {len(self.qs.get(node, ()))} distributions"
                )
            if any(not 0 < child < len(self.tree) or self.tree.parents[child] != node for child in children):
                raise DraftError(f"the draws {children} of node {node} are not all children of it")

    def tokens(self, node: int) -> list[int]:
        """The tokens drawn after `node`, in the order of drawing."""
        return [int(self.tree.tokens[child]) for child in self.children.get(node, ())]


def verify_draws(draws: Draws, p: Callable[[int], FloatArray], rng: np.random.Generator, rule: Rule) -> Verdict:
    """Walks from the root along accepted children; where none is accepted, samples the last token from the residual.

    At a node without draws the residual is p itself. The walk ends with the sampled token even if a child happens to
    have it.

    Args:
        draws: drawn in the way that `rule` requires.
        p: gives the target's processed distribution after a node, float64 [vocab]; called along the path only. All 0
            where no token can be chosen, as behind an EOS: the last token is -1 then.
        rng: independent of the drawing: the same generator, continued, or another one.
        rule: one of `RULES`.

    Returns:
        As `verify`: at least one token, all but the last of them drafted.
    """
    path, tokens = [0], list[int]()
    while True:
        node = path[-1]
        if not (possible := p(node)).any():
            return Verdict(tuple(path), (*tokens, -1), accepted=len(path) - 1)
        selection = rule(possible, draws.tokens(node), draws.qs.get(node, ()))
        trials = zip(draws.children.get(node, ()), selection.accept, strict=True)
        child = next((child for child, accept in trials if rng.random() < accept), None)
        if child is None:
            tokens += draw_independent(selection.residual, 1, rng)
            return Verdict(tuple(path), tuple(tokens), accepted=len(path) - 1)
        path.append(child)
        tokens.append(int(draws.tree.tokens[child]))
