"""`check` over settings: greedy and sampled, alone and in a batch; a row per setting and drafter."""

from __future__ import annotations

from itertools import product
from typing import Any

from rich.console import Console

from leapahead.api import LLM
from leapahead.check import DrafterReport, Report, check
from leapahead.core.sampling import SamplingParams
from research.kept import Kept

USUAL = "all drafters that need none"
# Draft models, beside those: name in the table -> drafter and options.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "draft_model, chains of 4": ("draft_model", {"draft": "bundled", "nodes": 4, "depth": 4, "chain": True}),
    "draft_model, trees of 16": ("draft_model", {"draft": "bundled", "nodes": 16, "depth": 4}),
    "draft_model, two drafts": ("draft_model", {"draft": ["bundled", "self:skip=2-3"], "nodes": 12, "depth": 4}),
    "draft_model, first half": ("draft_model", {"draft": "self:first=3", "nodes": 8, "depth": 2}),
    "cascade, trees of 8": ("cascade", {"draft": "bundled", "nodes": 8}),
    "ouroboros, trees of 8": ("ouroboros", {"draft": "bundled", "nodes": 8}),
    "auto, with a draft model": ("auto", {"draft": "bundled"}),
}


def exactness(
    llm: LLM, prompts: dict[str, list[str]], console: Console, kept: Kept | None = None
) -> list[dict[str, Any]]:
    """Every drafter against plain decoding, at temperature 0 and 1, in batches of 1 and 4, up to 128 tokens a text.

    Args:
        kept: rows of an earlier run, which are not measured again.
    """
    texts = [text for each in prompts.values() for text in each]
    variants: dict[str, tuple[str | None, dict[str, Any]]] = {USUAL: (None, {}), **VARIANTS}
    rows: list[dict[str, Any]] = []
    kept = kept or Kept()
    for temperature, batch in product((0.0, 1.0), (1, 4)):
        for name, (drafter, options) in variants.items():
            key = f"temperature {temperature:g}, batch {batch}, {name}"
            found = kept.get(key)
            if found is None:
                with console.status(f"check: {key}"):
                    report = check(
                        llm.target,
                        llm.tokenizer,
                        texts,
                        None if drafter is None else [drafter],
                        options=options,
                        sampling=SamplingParams(temperature=temperature),
                        eos_token_ids=llm.eos_token_ids,
                        batch=batch,
                    )
                common = {"temperature": temperature, "batch": batch}
                found = [common | _row(report, each, name if drafter else each.name) for each in report.drafters]
                kept.add(key, found)
            rows += found
    return rows


def _row(report: Report, row: DrafterReport, name: str) -> dict[str, Any]:
    return {
        "drafter": name,
        "prompts": report.prompts,
        "tokens": row.tokens,
        "mismatches": len(row.mismatches),
        "ties": len(row.ties),
        "largest_tie_gap": row.largest_tie,
        "acceptance_length": round(row.stats.acceptance_length, 3),
        "distinct_4": round(report.distinct_4_grams, 3),
    }
