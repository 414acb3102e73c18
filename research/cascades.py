"""The configurations in which draft models are decoded speculatively themselves, and those beside them."""

from __future__ import annotations

from research.acceptance import Compared

BUNDLED = {"draft": "bundled"}
CHAIN, TREE = {"nodes": 5, "chain": True}, {"nodes": 16}
FIRST = "self:first=3"  # half of the layers of the bundled model
CASCADES: list[Compared] = [
    ("plain", "plain", {}),
    ("draft_model, chains of 5", "draft_model", {**BUNDLED, **CHAIN}),
    ("cascade, chains of 5", "cascade", {**BUNDLED, **CHAIN}),
    ("cascade, chains of 5, bigram", "cascade", {**BUNDLED, **CHAIN, "longest": 1}),
    ("cascade, chains of 5, 2 of them by the draft", "cascade", {**BUNDLED, **CHAIN, "lengths": "2"}),
    ("ouroboros, chains of 5", "ouroboros", {**BUNDLED, **CHAIN, "length": 5, "phrases": 0}),
    ("ouroboros, chains of 5 and phrases", "ouroboros", {**BUNDLED, **CHAIN, "length": 5, "nodes": 14}),
    ("draft_model, trees of 16", "draft_model", {**BUNDLED, **TREE}),
    ("cascade, trees of 16", "cascade", {**BUNDLED, **TREE}),
    ("ouroboros, trees of 16", "ouroboros", {**BUNDLED, **TREE}),
    ("draft_model, the first half, chains of 5", "draft_model", {"draft": FIRST, **CHAIN}),
    ("cascade, the first half, guessed by the draft", "cascade", {"draft": [FIRST, "bundled"], **CHAIN}),
]
