"""The second verification rule, for drafts *sampled* from distributions: accept by a ratio test, or sample the rest.

Lossless in distribution only: what is emitted after a node is distributed as p, the target's processed distribution
there, but it is not the text that plain decoding gives with the same seed. Use `verify` where that is promised.

    rule        the draws of a node are                              draw them with           paper
    specinfer   independent, each from a q of its own or all from one   draw_independent          2305.09781
    sequoia     the first b of one q, never a token twice            draw_without_replacement  2402.12374
    spectr      independent, all from one q                          draw_independent          2310.15141

With one draw each of them is speculative sampling (Leviathan et al., 2211.17192; Chen et al., 2302.01318).

What exactness rests on, and no check here can see:
- q is the distribution that was drawn *from*: after the temperature and the filters. Likely tokens that were picked and
  not drawn have no q at all: `verify` is for them.
- Whether a node gets an i-th draw is decided before that draw is known. A draw dropped because its token did not fit a
  budget biases, when a duplicate, which needs no new node, would have been kept. So does reordering siblings.
- Drawing, accept tests and residual are three *independent* uses of randomness. Take all from one generator that goes
  on, never from copies of it, and never from the noise by which the target samples elsewhere (the dice of a position):
  shared noise is right where a draft is accepted if equal, and biased here. A well-known engine shipped that
  (vLLM #47386, #54282; ALGORITHMS 4.3.5 has more such rules).

Knows neither models nor caches: float64 arrays [vocab] on the host, and trees.
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

OFF_BY = 1e-3  # a softmax in a narrow dtype may miss a sum of 1 by so much; more is no distribution
HALVINGS = 60  # of an interval shorter than the number of draws: down to the last bit


@dataclass(frozen=True, eq=False)
class Selection:
    """What a rule makes of the draws at one node.

    Attributes:
        accept: for each draw, the probability that it is accepted, given that all before it were rejected.
        residual: float64 [vocab], sums to 1: what is sampled from once all were rejected; p if there were no draws.
            None of it lies where p is 0, nor, if all draws can be rejected, on one of them.
    """

    accept: tuple[float, ...]
    residual: FloatArray


Rule = Callable[[FloatArray, Sequence[int], Sequence[FloatArray]], Selection]
"""`(p, tokens, qs)`: the target's distribution, float64 [vocab]; the drawn tokens in the order of drawing; and for each
draw the distribution, float64 [vocab], that it came from before anything was removed (one array may be repeated).

Raises DraftError where that cannot be: other lengths, no distribution, a token drawn where its probability is 0."""


# --------------------------------------------------------------------------------------------------------- rules


def independent(p: FloatArray, tokens: Sequence[int], qs: Sequence[FloatArray]) -> Selection:
    """SpecInfer's multi-step rule (2305.09781): draw i is independent of the others, from its own q_i.

    Accept with min(1, r(t) / q_i(t)), r being p at first; after a rejection r becomes norm(max(r - q_i, 0)). A
    duplicate is a draw of its own.
    """
    p, tokens, qs = _checked(p, tokens, qs)
    return _one_by_one(p, tokens, qs)


def without_replacement(p: FloatArray, tokens: Sequence[int], qs: Sequence[FloatArray]) -> Selection:
    """Sequoia's rule (2402.12374): draw i is from q_i without the tokens drawn before, renormalised.

    The same test and residual as in `independent`, against that distribution. If all of q's support is drafted and p
    has none beyond it, some draw is accepted for certain (their "cover property"). Where the support runs out drawing
    stops, as `draw_without_replacement` does.
    """
    p, tokens, qs = _checked(p, tokens, qs)
    left = []
    for i, q in enumerate(qs):
        d = q.copy()
        d[tokens[:i]] = 0.0
        left.append(_normalised(d, otherwise=d))
    return _one_by_one(p, tokens, left)


def k_sequential(p: FloatArray, tokens: Sequence[int], qs: Sequence[FloatArray]) -> Selection:
    """SpecTr's K-SEQ (2310.15141): k independent draws from one q, each against p / gamma.

    Accept with min(1, p(t) / (gamma q(t))); gamma in [1, k] solves 1 - (1 - beta)^k = gamma beta, their gamma*,
    where beta = sum min(q, p / gamma). There the residual, in general (p - min(q, p / gamma) (1 - (1 -
    beta)^k) / beta) normalised, is norm(max(p - gamma q, 0)).
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
    """Each draw against what the ones before it left of p; ds[i] may depend on the tokens before i."""
    accept, residual = [], p
    for token, d in zip(tokens, ds, strict=True):
        accept.append(_ratio(residual, d, token))
        residual = _normalised(np.maximum(residual - d, 0.0), otherwise=residual)
    return Selection(tuple(accept), residual)


def _gamma(p: FloatArray, q: FloatArray, k: int) -> float:
    """gamma* of K-SEQ by bisection. The upper end is kept, where the residual is a distribution for certain."""
    unlikelier, likelier = p <= q, p >= k * q  # min(q, p / gamma) is p / gamma, and q, whatever gamma is in [1, k]
    between = ~(unlikelier | likelier)
    small, large, p, q = p[unlikelier].sum(), q[likelier].sum(), p[between], q[between]
    low, high = 1.0, float(k)
    for _ in range(HALVINGS):
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
    """Sums to 1. No mass at all is left where a draw is accepted for certain: nobody needs what is returned then."""
    total = mass.sum()
    return mass / total if total > 0 else otherwise


def _checked(
    p: FloatArray, tokens: Sequence[int], qs: Sequence[FloatArray]
) -> tuple[FloatArray, list[int], list[FloatArray]]:
    """The arguments of a rule, the distributions normalised."""
    if len(tokens) != len(qs):
        raise DraftError(f"{len(tokens)} draws with {len(qs)} distributions: each needs the one it was drawn from")
    if any(np.shape(q) != np.shape(p) for q in qs):
        raise DraftError(f"p has shape {np.shape(p)} and the q of its draws {[np.shape(q) for q in qs]}")
    if not all(0 <= token < len(p) for token in tokens):
        raise DraftError(f"the drawn tokens {list(tokens)} are not all in a vocabulary of {len(p)}")
    once = {id(q): q for q in qs}  # most often one array, repeated
    mended = {key: _distribution(q) for key, q in once.items()}
    return _distribution(p), [int(token) for token in tokens], [mended[id(q)] for q in qs]


def _distribution(values: FloatArray) -> FloatArray:
    """float64 [vocab], summing to 1 to the last bit; small misses of a narrow softmax are mended."""
    values = np.asarray(values, dtype=np.float64)
    total = float(values.sum())
    # Comparisons with NaN are false, so these refuse it.
    if values.ndim != 1 or not values.min(initial=0.0) >= 0 or not abs(total - 1) <= OFF_BY:
        raise DraftError(f"not a distribution over one vocabulary: shape {values.shape}, sum {total:.6g}")
    return values / total


# ------------------------------------------------------------------------------------------------------- drawing


def draw_independent(q: FloatArray, count: int, rng: np.random.Generator) -> list[int]:
    """`count` independent draws from q, float64 [vocab]; a token may come twice, one of probability 0 never comes.

    Raises:
        DraftError: q is not a distribution.
    """
    edges = np.cumsum(_distribution(q))
    # The side "right" steps over tokens of width 0; a uniform below 1 times the last edge is below that edge.
    return [int(token) for token in np.searchsorted(edges, rng.random(count) * edges[-1], side="right")]


def draw_without_replacement(q: FloatArray, count: int, rng: np.random.Generator) -> list[int]:
    """`count` draws from q, float64 [vocab], in the order of drawing, each from what the ones before left of q.

    The Gumbel-top-k trick (1903.06059): the largest of log q + Gumbel noise, falling. Fewer than `count` if the support
    of q is smaller; a token of probability 0 never comes.

    Raises:
        DraftError: q is not a distribution.
    """
    q = _distribution(q)
    support = np.flatnonzero(q)
    race = np.log(q[support]) + rng.gumbel(size=len(support))
    count = min(count, len(support))
    first = np.argpartition(-race, count - 1)[:count] if count else np.arange(0)
    return [int(token) for token in support[first[np.argsort(-race[first])]]]


# ------------------------------------------------------------------------------------------------------ the walk


@dataclass(frozen=True, eq=False)
class Draws:
    """What was drawn for a tree.

    Attributes:
        tree: every node that is a draw, and perhaps others, which are not looked at.
        children: for a node, the child of each draw, in the order of drawing. Siblings with equal tokens are one node,
            so a duplicate draw repeats its child.
        qs: for a node, the distribution of each draw, float64 [vocab], before anything was removed.

    Raises:
        DraftError: a draw is no child of its node, or has no distribution.
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
    """Walk from the root to a child that is accepted; where none is, the last token is sampled from the residual.

    At a node without draws the residual is p itself. The walk ends with that sample even if a node of the tree happens
    to carry its token.

    Args:
        draws: what was drawn, in the way that `rule` supposes.
        p: gives the target's processed distribution after a node, float64 [vocab]; called along the path only.
        rng: independent of what drew the drafts: the same generator going on, or another one.
        rule: one of `RULES`.

    Returns:
        As `verify` does: at least one token, and all but the last were drafted.
    """
    path, tokens = [0], []
    while True:
        node = path[-1]
        selection = rule(p(node), draws.tokens(node), draws.qs.get(node, ()))
        trials = zip(draws.children.get(node, ()), selection.accept, strict=True)
        child = next((child for child, accept in trials if rng.random() < accept), None)
        if child is None:
            tokens += draw_independent(selection.residual, 1, rng)
            return Verdict(tuple(path), tuple(tokens), accepted=len(path) - 1)
        path.append(child)
        tokens.append(int(draws.tree.tokens[child]))
