"""What training brings a drafter of the bundled model: distilled draft models, and the target tuned for Jacobi."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from leapahead.api import LLM
from leapahead.core.errors import BadParameter
from leapahead.inputs import encode
from leapahead.training.cllm_run import MEASURED, losses_of
from leapahead.training.texts import Text
from research.acceptance import Compared, acceptance

FOLDER = Path("build/distilled")  # of `make train-draft`, `make train-pard` and `make train-cllm`
DRAFT, PARD, TUNED = FOLDER / "draft" / "draft", FOLDER / "pard" / "draft", FOLDER / "cllm" / "tuned"
DFLASH = Path("build/heads/dflash/head")  # of `make train-heads`
CHAIN, TREE = {"depth": 4, "nodes": 4, "chain": True}, {"depth": 4, "nodes": 16}
PLAIN: Compared = ("plain", "plain", {})  # what the texts are compared with
DRAFTS: list[Compared] = [
    PLAIN,
    *(
        (f"{name}, {shape}", "draft_model", {"draft": draft, **options})
        for shape, options in (("chains of 4", CHAIN), ("trees of 16", TREE))
        for name, draft in (("bundled draft", "bundled"), ("distilled draft", str(DRAFT)))
    ),
]
ONCE: list[Compared] = [
    (f"draft of PARD, one forward, {name}", "draft_model", {"draft": str(PARD), "depth": 1, **options})
    for name, options in (("chains of 4", {"nodes": 4, "chain": True}), ("trees of 16", {"nodes": 16}))
]
BLOCK = 5  # depths that are compared
PARALLEL: list[Compared] = [
    PLAIN,
    *(
        (f"{name}, {BLOCK} draft forwards", "draft_model", {"draft": draft, "nodes": BLOCK, "chain": True})
        for name, draft in (("bundled draft", "bundled"), ("distilled draft", str(DRAFT)))
    ),
    ("PARD, one draft forward", "draft_model", {"draft": str(PARD), "depth": 1, "nodes": BLOCK, "chain": True}),
    ("DFlash, one forward of the head", "head", {"head": str(DFLASH), "nodes": BLOCK, "chain": True}),
]
JACOBI: list[Compared] = [PLAIN, *((f"Jacobi, blocks of {block}", "jacobi", {"block": block}) for block in (4, 8))]


def distilled(llm: LLM, prompts: dict[str, list[str]]) -> list[dict[str, Any]]:
    """Acceptance lengths with the bundled draft model and with distilled ones; rows as of `acceptance`.

    Args:
        llm: the bundled model.
        prompts: by task.

    Raises:
        BadParameter: a distilled draft model is not there.
    """
    _require(DRAFT, "train-draft")
    _require(PARD, "train-pard")
    return acceptance(llm, prompts, configurations=[*DRAFTS, *ONCE])


def parallel(llm: LLM, prompts: dict[str, list[str]]) -> list[dict[str, Any]]:
    """Acceptance by depth in chains, of drafters that run a forward for every token and of those that run one for all.

    Args:
        llm: the bundled model.
        prompts: by task.

    Returns:
        Rows as of `acceptance`.

    Raises:
        BadParameter: a draft model or the head is not there.
    """
    for folder, recipe in ((DRAFT, "train-draft"), (PARD, "train-pard"), (DFLASH, "train-heads")):
        _require(folder, recipe)
    return acceptance(llm, prompts, configurations=PARALLEL)


def tuned(llm: LLM, prompts: dict[str, list[str]]) -> list[dict[str, Any]]:
    """Acceptance lengths of Jacobi decoding with the bundled model and with the tuned one, greedily.

    Args:
        llm: the bundled model.
        prompts: by task.

    Returns:
        Rows as of `acceptance`, and in each `prompt_loss`: nats a token of the prompts, which neither model wrote.

    Raises:
        BadParameter: the tuned model is not there.
    """
    _require(TUNED, "train-cllm")
    rows = []
    for name, each in (("bundled model", llm), ("tuned model", LLM(str(TUNED), dtype="float32", drafter_cache=False))):
        losses = {}
        for task, texts in prompts.items():
            tokens = [encode(text, each.tokenizer, each.target.info) for text in texts]
            losses[task] = round(losses_of(each.target, [Text(0, prompt, []) for prompt in tokens])[0], 3)
        found = acceptance(each, prompts, (0.0,), configurations=JACOBI)
        rows += [{**row, "name": f"{row['name']}, {name}", "prompt_loss": losses[row["task"]]} for row in found]
    return rows


def tuning() -> dict[str, Any]:
    """How the tuned model was made, and what its training measured before and after; see its model card.

    Raises:
        BadParameter: the tuned model is not there, or an earlier version has tuned it.
    """
    _require(TUNED, "train-cllm")
    if not (TUNED / MEASURED).is_file():
        raise BadParameter(f"there is no {TUNED / MEASURED}; run `leapahead train-cllm --resume` as it was begun")
    found: dict[str, Any] = json.loads((TUNED / MEASURED).read_text(encoding="utf-8"))
    return found


def _require(folder: Path, recipe: str) -> None:
    if not (folder / "config.json").is_file():
        raise BadParameter(f"there is no {folder}; run `make {recipe}` first")
