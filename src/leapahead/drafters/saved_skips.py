"""Stores the layers that a model can leave out when it drafts for itself, as found by `leapahead search-layers`.

    CACHE/skip/DIGEST.json    {"format", "model", "weights", "target", "skip", "agreement", "cost", "speedup", "trials"}

There is one file per model, by the digest of its weights and its fingerprint, whatever the model is called. The search
is `leapahead.layer_search`.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from leapahead.core.errors import BadParameter
from leapahead.core.storage import cache_directory, write_json
from leapahead.models.self_draft.layer_skip import Skip
from leapahead.models.transformers.model import TransformersTarget

FORMAT = 2
LONGEST = 16  # drafted tokens of a chain


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        skip: the sub-layers to leave out; empty where leaving out does not pay.
        agreement: share of the target's tokens that the model without them would have chosen too, in [0, 1].
        cost: time of a token without them, in times of a token of the whole model.
        speedup: expected, over plain decoding; at most 1 where leaving out does not pay.
        trials: sets of layers that were tried.
    """

    skip: Skip
    agreement: float
    cost: float
    speedup: float
    trials: int

    @property
    def length(self) -> int:
        """Drafted tokens of the best chain."""
        return expected(self.agreement, self.cost)[1]


def expected(agreement: float, cost: float, longest: int = LONGEST) -> tuple[float, int]:
    """The expected speed-up with chains of the best length, and that length. Formula: see `leapahead.layer_search`.

    Args:
        agreement: probability that a drafted token is accepted.
        cost: of a draft forward, in plain steps.
        longest: greatest length that is considered.
    """
    tokens, power, best = 1.0, 1.0, (0.0, 1)
    for length in range(1, longest + 1):
        power *= agreement
        tokens += power  # the sum of a^0 .. a^k, which unlike the closed form is defined at a = 1
        best = max(best, (tokens / (length * cost + 1), length), key=lambda each: each[0])
    return best


def save(target: TransformersTarget, found: Found) -> bool:
    """Stores the result of a search for later processes; false where it cannot be written."""
    content = {
        "format": FORMAT,
        "model": target.info.name,
        "weights": _weights(target),
        "target": target.info.fingerprint,
        "skip": str(found.skip),
        "agreement": found.agreement,
        "cost": found.cost,
        "speedup": found.speedup,
        "trials": found.trials,
    }
    return write_json(_path(target), content)


def saved(target: TransformersTarget) -> Skip | None:
    """The stored result of a search for this model; an empty `Skip` where leaving out does not pay.

    None if there was no search, or its file is broken or belongs to another model.
    """
    wanted = FORMAT, _weights(target), target.info.fingerprint
    try:
        content = json.loads(_path(target).read_text(encoding="utf-8"))
        if (content["format"], content["weights"], content["target"]) != wanted:
            return None
        skip = Skip.parse(content["skip"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return skip if max(skip.attention | skip.mlp, default=0) < target.config.num_hidden_layers else None


def chosen(target: TransformersTarget, draft: str, layers: str) -> Skip:
    """The sub-layers to leave out: those named, or those that a search has found.

    Args:
        draft: the option, for the message.
        layers: as it names them; "" where it names none.

    Raises:
        BadParameter: it names none, and there was no search, or leaving out does not pay.
    """
    skip = Skip.parse(layers) if layers else saved(target)
    if skip is None:
        raise BadParameter(
            f"draft={draft!r} needs a search, and there was none for {target.info.name}: run "
            "`leapahead search-layers`, or name the layers, as in self:skip=2m,4-6"
        )
    if not skip:
        raise BadParameter(
            f"draft={draft!r} does not pay: the search found no layers of {target.info.name} that are worth leaving out"
        )
    return skip


def _weights(target: TransformersTarget) -> str:
    """The digest of the weights; the name of a model whose weights cannot be read, a path as an absolute one."""
    return target.weights_digest() or (os.path.realpath(name) if os.path.exists(name := target.info.name) else name)


def _path(target: TransformersTarget) -> Path:
    """The fingerprint describes shapes and precision, not weights."""
    name = hashlib.sha256(f"{_weights(target)} {target.info.fingerprint}".encode()).hexdigest()[:16]
    return cache_directory() / "skip" / f"{name}.json"
