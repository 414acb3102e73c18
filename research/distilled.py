"""What training brings a drafter of the bundled model: the distilled draft model, and the target tuned for Jacobi."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from leapahead.api import LLM
from leapahead.core.errors import BadParameter
from leapahead.inputs import encode
from leapahead.training.cllm_run import losses_of
from leapahead.training.texts import Text
from research.acceptance import Compared, acceptance

FOLDER = Path("build/distilled")  # of `make train-draft` and `make train-cllm`
DRAFT, TUNED = FOLDER / "draft" / "draft", FOLDER / "cllm" / "tuned"
CHAIN, TREE = {"depth": 4, "nodes": 4, "chain": True}, {"depth": 4, "nodes": 16}
DRAFTS: list[Compared] = [
    (f"{name}, {shape}", "draft_model", {"draft": draft, **options})
    for shape, options in (("chains of 4", CHAIN), ("trees of 16", TREE))
    for name, draft in (("bundled draft", "bundled"), ("distilled draft", str(DRAFT)))
]
JACOBI: list[Compared] = [("Jacobi", "jacobi", {})]


def distilled(llm: LLM, prompts: dict[str, list[str]]) -> dict[str, Any]:
    """Acceptance lengths before and after both trainings, and the held-out loss of the tuned target.

    Args:
        llm: the bundled model.
        prompts: by task.

    Returns:
        `distilled`: rows as of `acceptance`; those of Jacobi decoding are greedy, as the tuning is.
        `distilled_loss`: for each task and model, nats a token of the prompts.

    Raises:
        BadParameter: the trained models are not there.
    """
    if missing := [folder for folder in (DRAFT, TUNED) if not (folder / "config.json").is_file()]:
        raise BadParameter(f"there is no {missing[0]}; run `make train-draft train-cllm` first")
    tuned = LLM(str(TUNED), dtype="float32", drafter_cache=False)
    rows = acceptance(llm, prompts, configurations=DRAFTS)
    losses = []
    for name, each in (("untuned", llm), ("tuned", tuned)):
        found = acceptance(each, prompts, (0.0,), configurations=JACOBI)
        rows += [{**row, "name": f"{row['name']}, {name} target"} for row in found]
        for task, some in prompts.items():
            loss, _ = losses_of(
                each.target, [Text(0, encode(text, each.tokenizer, each.target.info), []) for text in some]
            )
            losses.append({"task": task, "name": name, "loss": round(loss, 4)})
    return {"distilled": rows, "distilled_loss": losses}
