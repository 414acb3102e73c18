"""What relaxed acceptance rules bring and what they cost: acceptance, texts that differ, and log-likelihood."""

from __future__ import annotations

from typing import Any

from rich.progress import Progress

from leapahead.api import LLM
from leapahead.core.stats import Stats
from leapahead.models.base import KeepsPrefixes

AUTO = ("auto", {"nodes": 16})
# BiLD's fallback policy: a chain of at most 4, which ends where the draft model's likeliest token has less than 0.6.
BILD = ("draft_model", {"draft": "bundled", "depth": 4, "nodes": 4, "chain": True, "unsure": 0.6})
# (drafter and its options, rule); the first row is plain decoding, with which the others are compared.
COMPARED: list[tuple[tuple[str, dict[str, Any]], str]] = [
    (("plain", {}), "exact"),
    (AUTO, "exact"),
    (AUTO, "lossy-typical"),
    (AUTO, "lossy-top-beta"),
    (AUTO, "lossy-top-beta:beta=3,tau=1"),
    (BILD, "exact"),
    (BILD, "lossy-bild:rollback=2"),
    (BILD, "lossy-bild"),
]


def relaxed(
    llm: LLM,
    tasks: dict[str, list[str]],
    temperatures: tuple[float, ...] = (0.0, 1.0),
    max_new_tokens: int = 128,
) -> list[dict[str, Any]]:
    """One row per task x temperature x drafter and rule.

    Returns:
        Rows with task, temperature, drafter, rule ("exact" or as it is reported), prompts, tokens, steps,
        acceptance_length, different (texts that differ from plain decoding's with the same seed), and log_likelihood:
        mean log-probability of a token of the texts, in nats, by the target's unprocessed logits.
    """
    rows = []
    runs = [(task, temperature) for task in tasks for temperature in temperatures]
    with Progress() as progress:
        bar = progress.add_task("relaxed", total=len(runs) * len(COMPARED))
        for task, temperature in runs:
            plain: list[list[int]] = []
            for (drafter, options), rule in COMPARED:
                progress.update(bar, description=f"{task}, temperature {temperature:g}: {drafter}, {rule}")
                if isinstance(llm.target, KeepsPrefixes):
                    llm.target.forget()  # rows of a reused prefix are not captured
                # A new LLM for each, and so a drafter cache of its own, which never sees a prompt twice.
                own = LLM(llm.target, tokenizer=llm.tokenizer, drafter=drafter, max_batch=1, acceptance=rule, **options)
                given: dict[str, Any] = {"temperature": temperature, "seed": 1, "logprobs": 0}
                results = [own.generate(prompt, max_new_tokens=max_new_tokens, **given) for prompt in tasks[task]]
                texts = [result.tokens for result in results]
                plain = plain or texts
                stats = sum((result.stats for result in results), Stats())
                spent = sum(each.logprob for result in results for each in result.logprobs)
                rows.append(
                    {
                        "task": task,
                        "temperature": temperature,
                        "drafter": drafter,
                        "rule": results[0].lossy or "exact",
                        "prompts": len(texts),
                        "tokens": stats.committed,
                        "steps": stats.steps,
                        "acceptance_length": round(stats.acceptance_length, 3),
                        "different": sum(a != b for a, b in zip(texts, plain, strict=True)),
                        "log_likelihood": round(spent / stats.committed, 4),
                    }
                )
                progress.advance(bar)
    return rows
