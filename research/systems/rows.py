"""All rows of the table of systems, in its order, and what the library does not cover."""

from __future__ import annotations

from research.systems.draft_models import DRAFT_MODELS
from research.systems.heads import HEADS
from research.systems.system import System
from research.systems.training_free import TRAINING_FREE

ROWS: tuple[System, ...] = (*TRAINING_FREE, *DRAFT_MODELS, *HEADS)

NOT_COVERED: tuple[tuple[str, str, str], ...] = (
    ("Jacobi Forcing", "2512.14681", "Its training is not there; `train-cllm` is its predecessor's."),
    ("Medusa-2", "2401.10774", "Heads are trained for a target that does not change, which is Medusa-1."),
    (
        "Kangaroo",
        "2404.18911",
        "An early exit drafts, but no adapter is trained behind it; `self:first` is without one.",
    ),
    ("SWIFT", "2410.06916", "Layers to skip are searched beforehand, not while decoding; see Draft & Verify."),
    (
        "LogitSpec, RACER, GOOSE, STAND",
        "2507.01449, 2604.14885, 2604.02047, 2506.04708",
        "Not as published. `auto` joins suffixes and recycled tokens in one tree, and ranks them with the noise of the "
        "seed when sampling, which serves the same purpose.",
    ),
    ("Block verification", "2403.10444", "The rejection rules of trees are those of the table."),
    ("XPress", "speculators", "Heads of this kind are refused by name."),
)
