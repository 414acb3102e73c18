"""Which layers a model can do without when it drafts for itself: what a search has found, kept for later processes.

    CACHE/skip/DIGEST.json    {"format", "model", "target", "skip", "agreement", "cost", "speedup", "trials"}

One file a model, by its name and its fingerprint. The search is `lab.skipping`.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from leapahead.models.self_draft.layer_skip import Skip
from leapahead.models.transformers.model import TransformersTarget
from leapahead.planner.profile import Place

FORMAT = 1
LONGEST = 16  # drafted tokens of a chain


@dataclass(frozen=True)
class Found:
    """What a search has found.

    Attributes:
        skip: the sub-layers to leave out.
        agreement: a, in [0, 1].
        cost: c, in times of the whole model's token.
        speedup: expected, over plain decoding; not more than 1 where leaving out does not pay.
        trials: that it took.
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
    """The speed-up of chains of the best length up to `longest`, and that length. See the module for the formula."""
    tokens, power, best = 1.0, 1.0, (0.0, 1)
    for length in range(1, longest + 1):
        power *= agreement
        tokens += power  # the sum of a^0 .. a^k, which is the fraction, and is defined at a = 1
        best = max(best, (tokens / (length * cost + 1), length), key=lambda each: each[0])
    return best


def save(target: TransformersTarget, found: Found) -> bool:
    """Keeps what was found for the next process; false where it cannot be written."""
    path, part = _path(target), ""
    content = {
        "format": FORMAT,
        "model": target.name,
        "target": target.fingerprint,
        "skip": str(found.skip),
        "agreement": found.agreement,
        "cost": found.cost,
        "speedup": found.speedup,
        "trials": found.trials,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(prefix=f"{path.stem}.", suffix=".part", dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(part, path)
    except OSError:
        if part:
            Path(part).unlink(missing_ok=True)
        return False
    return True


def saved(target: TransformersTarget) -> Skip | None:
    """What a search has found for this model: nothing to leave out, `Skip()`, where that did not pay.

    None if there was no search, or its file is broken or another's.
    """
    try:
        content = json.loads(_path(target).read_text(encoding="utf-8"))
        if (content["format"], content["model"], content["target"]) != (FORMAT, target.name, target.fingerprint):
            return None
        skip = Skip.parse(content["skip"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return skip if max(skip.attention | skip.mlp, default=0) < target.config.num_hidden_layers else None


def _path(target: TransformersTarget) -> Path:
    """The fingerprint knows shapes, not weights: two models of one shape differ in their names."""
    name = hashlib.sha256(f"{target.name} {target.fingerprint}".encode()).hexdigest()[:16]
    return Place.of(target).path.parent.parent / "skip" / f"{name}.json"
