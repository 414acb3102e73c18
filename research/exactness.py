"""`check` over settings: greedy and sampled, alone and in a batch; a row per setting and drafter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rich.console import Console

from leapahead.api import LLM
from leapahead.check import check
from leapahead.core.sampling import SamplingParams

# Draft models, beside the drafters that need none: name in the table -> drafter and options.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "draft_model, chains of 4": ("draft_model", {"draft": "bundled", "nodes": 4, "depth": 4, "chain": True}),
    "draft_model, trees of 16": ("draft_model", {"draft": "bundled", "nodes": 16, "depth": 4}),
    "draft_model, two drafts": ("draft_model", {"draft": ["bundled", "self:skip=2-3"], "nodes": 12, "depth": 4}),
    "draft_model, first half": ("draft_model", {"draft": "self:first=3", "nodes": 8, "depth": 2}),
    "cascade, trees of 8": ("cascade", {"draft": "bundled", "nodes": 8}),
    "ouroboros, trees of 8": ("ouroboros", {"draft": "bundled", "nodes": 8}),
    "auto, with a draft model": ("auto", {"draft": "bundled"}),
}


def exactness(llm: LLM, prompts: dict[str, list[str]], console: Console) -> list[dict[str, Any]]:
    """Every drafter against plain decoding, at temperature 0 and 1, in batches of 1 and 4, up to 128 tokens a text."""
    texts = [text for each in prompts.values() for text in each]
    rows = []
    for temperature in (0.0, 1.0):
        for batch in (1, 4):
            with console.status(f"check: temperature {temperature:g}, batch {batch}"):
                report = check(
                    llm.target,
                    llm.tokenizer,
                    texts,
                    sampling=SamplingParams(temperature=temperature),
                    eos_token_ids=llm.eos_token_ids,
                    batch=batch,
                )
                for name, (drafter, options) in VARIANTS.items():
                    one = check(
                        llm.target,
                        llm.tokenizer,
                        texts,
                        [drafter],
                        options=options,
                        sampling=SamplingParams(temperature=temperature),
                        eos_token_ids=llm.eos_token_ids,
                        batch=batch,
                    )
                    report.drafters.append(replace(one.drafters[0], name=name))
            for row in report.drafters:
                rows.append(
                    {
                        "temperature": temperature,
                        "batch": batch,
                        "drafter": row.name,
                        "prompts": report.prompts,
                        "tokens": row.tokens,
                        "mismatches": len(row.mismatches),
                        "ties": len(row.ties),
                        "largest_tie_gap": row.largest_tie,
                        "acceptance_length": round(row.stats.acceptance_length, 3),
                        "distinct_4": round(report.distinct_4_grams, 3),
                    }
                )
    return rows
