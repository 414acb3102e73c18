"""Relaxed acceptance rules: they accept drafted tokens that the target would not have chosen, so the text is lossy.

The text is neither plain decoding's nor a sample of the target's distribution; it depends on the drafter, the tree and
the batch. No rule is a default. Their names begin with "lossy-", and every result that was made with one carries it.

    rule             accepts the token x after a node, where p is the target's distribution there      paper
    lossy-typical    p(x) > min(epsilon, delta exp(-H(p))), H the entropy                               2401.10774
    lossy-top-beta   x is one of the beta likeliest, and log max p - log p(x) <= tau                    2203.16487
    lossy-bild       -log p(x) <= rollback, the target's loss of the draft                              2302.07863

p is what the target samples from, with the temperature and all filters; of greedy decoding, the distribution at
temperature 1 after penalties, bans, processors and grammar. The target's own choice is always accepted, so a rule
accepts what exact matching (`core.verify`) does, and more. This module knows neither models nor caches.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from leapahead.core.errors import BadParameter
from leapahead.core.parameters import number, whole
from leapahead.core.tree import TokenTree
from leapahead.core.verify import Chosen, Verdict

FloatArray = npt.NDArray[np.float64]

EXACT = "exact"  # the name of exact matching, the default
LOSSY = "lossy-"  # with which the name of every rule begins


@dataclass(frozen=True)
class Relaxed(ABC):
    """A rule. Its fields are its parameters."""

    name: ClassVar[str]

    @abstractmethod
    def accepts(self, logp: FloatArray, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Whether each of some drafted tokens is accepted after one node.

        Args:
            logp: float64 [vocab], log p; -inf where a token is banned.
            tokens: int64 [drafted].

        Returns:
            bool [drafted]; false for banned tokens.
        """

    def __str__(self) -> str:
        """As `rule` reads it: "lossy-typical:epsilon=0.09,delta=0.3"."""
        values = {field.name: repr(float(getattr(self, field.name))).removesuffix(".0") for field in fields(self)}
        return f"{self.name}:" + ",".join(f"{name}={value}" for name, value in values.items())

    def _check(self, name: str, allowed: str, possible: Callable[[float], bool]) -> None:
        value = number(getattr(self, name))
        if value is None or not possible(value):
            raise BadParameter(f"{self.name} with {name}={getattr(self, name)!r} is not possible: it must be {allowed}")


@dataclass(frozen=True)
class Typical(Relaxed):
    """Typical acceptance (Medusa, 2401.10774, section 2.3.1): p(x) > min(epsilon, delta exp(-H(p))).

    Attributes:
        epsilon: the threshold of flat distributions; the paper's program has 0.09.
        delta: of the entropy's part, which is about the root of epsilon. Where it is large, only the target's choice is
            accepted if epsilon is 1.
    """

    name: ClassVar[str] = LOSSY + "typical"
    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        self._check("epsilon", "above 0 and at most 1", lambda value: 0 < value <= 1)
        self._check("delta", "a finite number above 0", lambda value: 0 < value < math.inf)

    def accepts(self, logp: FloatArray, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        finite = logp[np.isfinite(logp)]
        entropy = -float((np.exp(finite) * finite).sum())
        found: npt.NDArray[np.bool_] = np.exp(logp[tokens]) > min(self.epsilon, self.delta * math.exp(-entropy))
        return found


@dataclass(frozen=True)
class TopBeta(Relaxed):
    """Relaxed verification of SpecDec (2203.16487, section 3.2): among the beta likeliest, and not tau less likely.

    Attributes:
        beta: the rank that is accepted, at most; tokens as likely as it are accepted too. With 1, only the likeliest.
        tau: greatest log-probability, in nats, by which a token may be less likely than the likeliest one.
    """

    name: ClassVar[str] = LOSSY + "top-beta"
    beta: int = 5
    tau: float = 3.0

    def __post_init__(self) -> None:
        whole(f"{self.name}: beta", self.beta, least=1)
        self._check("tau", "at least 0", lambda value: value >= 0)

    def accepts(self, logp: FloatArray, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        last = len(logp) - min(self.beta, len(logp))
        floor = max(float(np.partition(logp, last)[last]), float(logp.max()) - self.tau)
        found: npt.NDArray[np.bool_] = (logp[tokens] >= floor) & np.isfinite(logp[tokens])
        return found


@dataclass(frozen=True)
class Rollback(Relaxed):
    """BiLD's rollback (2302.07863, section 3.3): a drafted token is kept while the target's loss of it is small.

    Its other half, falling back to the target where the draft model is unsure, is the option `unsure` of the drafter
    `draft_model`.

    Attributes:
        rollback: greatest loss -log p(x), in nats; the paper has 2 to 5.
    """

    name: ClassVar[str] = LOSSY + "bild"
    rollback: float = 5.0

    def __post_init__(self) -> None:
        self._check("rollback", "at least 0", lambda value: value >= 0)

    def accepts(self, logp: FloatArray, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        found: npt.NDArray[np.bool_] = (-logp[tokens] <= self.rollback) & np.isfinite(logp[tokens])
        return found


RULES: dict[str, type[Relaxed]] = {rule.name: rule for rule in (Typical, TopBeta, Rollback)}


def rule(given: str | Relaxed) -> Relaxed | None:
    """The rule of a name, perhaps with parameters, such as "lossy-typical:epsilon=0.1,delta=0.3".

    Returns:
        The rule; None for "exact", which is exact matching.

    Raises:
        BadParameter: there is no such rule or parameter, one is given twice, or a value is not possible.
    """
    if isinstance(given, Relaxed):
        return given
    name, _, rest = given.partition(":") if isinstance(given, str) else ("", "", "")
    if name == EXACT and not rest:
        return None
    if (kind := RULES.get(name)) is None:
        raise BadParameter(f"acceptance={given!r} is not possible; there are {EXACT}, {', '.join(RULES)}")
    known = {field.name: int if field.type == "int" else float for field in fields(kind)}
    values: dict[str, float] = {}
    for pair in (part.strip() for part in rest.split(",") if part.strip()):
        key, equals, text = (part.strip() for part in pair.partition("="))
        if key not in known or not equals:
            raise BadParameter(
                f"acceptance={given!r} is not possible: {pair!r} must be KEY=VALUE, where KEY is {' or '.join(known)}"
            )
        if key in values:
            raise BadParameter(f"acceptance={given!r} is not possible: {key} was given twice; give it once")
        try:
            values[key] = known[key](text)
        except ValueError:
            raise BadParameter(
                f"acceptance={given!r} is not possible: {key} must be a {'whole ' * (known[key] is int)}number"
            ) from None
    return kind(**values)


def verify_relaxed(tree: TokenTree, chosen: Chosen, logp: Callable[[int], FloatArray], rule: Relaxed) -> Verdict:
    """The longest path whose tokens are all accepted; of several, the likeliest. The target's choice follows it.

    Args:
        tree: the draft.
        chosen: the target's own next token after each node, see `core.verify`.
        logp: gives log p after a node, float64 [vocab]; called for accepted nodes with children only.
        rule: decides of the children that are not the target's choice.

    Returns:
        As `core.verify.verify`: at least one token, all but the last of them drafted.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parent_list[1:], start=1):
        children.setdefault(parent, []).append(node)
    chance = {0: 0.0}  # accepted node -> log-probability of its path
    for node, below in sorted(children.items()):
        if node not in chance:
            continue
        row, tokens = logp(node), tree.tokens[below]
        possible = bool(np.isfinite(row.max()))  # not where everything is banned, which only a text's end reaches
        accepted = (rule.accepts(row, tokens) if possible else np.zeros(len(below), bool)) | (tokens == chosen[node])
        chance.update((below[i], chance[node] + float(row[tokens[i]])) for i in np.flatnonzero(accepted))
    node = max(chance, key=lambda each: (tree.depth_list[each], chance[each], -each))
    last, path = int(chosen[node]), [node]
    while (node := tree.parent_list[node]) >= 0:
        path.append(node)
    path.reverse()
    return Verdict(tuple(path), (*(tree.token_list[each] for each in path[1:]), last), accepted=len(path) - 1)
