"""Acceptance length of every drafter on the same prompts, with every text compared with plain decoding's."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

from rich.progress import Progress

from leapahead.api import LLM
from leapahead.check import distinct
from leapahead.core.stats import Stats
from leapahead.models.base import KeepsPrefixes
from leapahead.results import Result
from research.kept import Kept

# A compared configuration: (name in the table, drafter, options)
Compared = tuple[str, str, dict[str, Any]]
CONFIGURATIONS: list[Compared] = [
    ("plain", "plain", {}),
    ("jacobi (8)", "jacobi", {}),
    ("prompt_lookup (10)", "prompt_lookup", {}),
    ("lookahead (7, 5, 7)", "lookahead", {"window": 7, "ngram": 5, "guesses": 7}),
    ("lookahead (15, 5, 15)", "lookahead", {"window": 15, "ngram": 5, "guesses": 15}),
    ("suffix (16)", "suffix", {"nodes": 16}),
    ("recycling (16), as published", "recycling", {"nodes": 16, "longest": 1}),
    ("recycling (16)", "recycling", {"nodes": 16}),
    ("auto (16), seed-unaware", "auto", {"nodes": 16, "seed_aware": False}),
    ("auto (16)", "auto", {"nodes": 16}),
    ("draft_model (16)", "draft_model", {"draft": "bundled", "depth": 4, "nodes": 16}),
]
CHAIN, WIDE = {"draft": "bundled", "depth": 4}, {"draft": "bundled", "depth": 4, "nodes": 16}
# Exact matching and the rejection rule on one pair of models, with chains of 4 and trees of 16.
RULES: list[Compared] = [
    ("chain, match", "draft_model", {**CHAIN, "nodes": 4, "chain": True}),
    ("chain, match, seed-unaware", "draft_model", {**CHAIN, "nodes": 4, "chain": True, "seed_aware": False}),
    ("chain, rejection", "speculative_sampling", CHAIN),
    ("tree, match", "draft_model", WIDE),
    ("tree, match, seed-unaware", "draft_model", {**WIDE, "seed_aware": False}),
    ("tree, rejection: sequoia", "speculative_sampling", {**WIDE, "width": 4, "rule": "sequoia"}),
    ("tree, rejection: specinfer", "speculative_sampling", {**WIDE, "width": 4, "rule": "specinfer"}),
    ("tree, rejection: spectr", "speculative_sampling", {**WIDE, "width": 4, "rule": "spectr"}),
]
TEMPERATURES = (0.3, 0.7, 1.0, 1.5)  # of `RULES`
# The bundled model's trained head, alone and as one more source.
HEADS: list[Compared] = [
    ("recycling", "recycling", {"nodes": 16}),
    ("head", "head", {"head": "bundled", "nodes": 16}),
    ("auto", "auto", {"nodes": 16}),
    ("auto with the head", "auto", {"head": "bundled", "nodes": 16}),
]


def acceptance(
    llm: LLM,
    tasks: dict[str, list[str]],
    temperatures: tuple[float, ...] = (0.0, 1.0),
    max_new_tokens: int = 128,
    ignore_eos: tuple[bool, ...] = (False,),
    configurations: list[Compared] = CONFIGURATIONS,
    kept: Kept | None = None,
) -> list[dict[str, Any]]:
    """One row per task x temperature x EOS rule x configuration.

    Args:
        kept: rows of an earlier run, which are not measured again.

    Returns:
        Rows with task, temperature, ignore_eos, name, prompts, tokens, steps, acceptance_length, nodes_per_step,
        by_depth (see the function), distinct_4 (mean over prompts) and different (texts that differ from plain
        decoding's); of draft models also draft_forwards, per step, by the names of their sources.
    """
    rows: list[dict[str, Any]] = []
    kept = kept or Kept()
    runs = [(t, temp, ignore) for t in tasks for temp in temperatures for ignore in ignore_eos]
    with Progress() as progress:
        bar = progress.add_task("acceptance", total=len(runs) * len(configurations))
        for task, temperature, ignore in runs:
            plain: list[tuple[int, ...]] = []
            given = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": 1, "ignore_eos": ignore}
            for compared in configurations:
                if temperature == 0 and "seed_aware" in compared[2]:
                    progress.advance(bar)
                    continue
                progress.update(bar, description=f"{task}, temperature {temperature:g}: {compared[0]}")
                key = f"{task}, {temperature:g}, {ignore}, {compared[0]}"
                found = kept.get(key)
                if found is None:
                    if not plain and compared != configurations[0]:  # its row was kept, not its texts
                        plain = _texts(_decoded(llm, tasks[task], configurations[0], given))
                    results = _decoded(llm, tasks[task], compared, given)
                    plain = plain or _texts(results)
                    named = {"task": task, "temperature": temperature, "ignore_eos": ignore, "name": compared[0]}
                    found = [named | _row(results, plain)]
                    kept.add(key, found)
                rows += found
                progress.advance(bar)
    return rows


def _decoded(llm: LLM, prompts: list[str], compared: Compared, options: dict[str, Any]) -> list[Result]:
    _, drafter, drafter_options = compared
    if isinstance(llm.target, KeepsPrefixes):
        llm.target.forget()  # rows of a reused prefix are not captured
    # A new LLM for each, and so a drafter cache of its own, which never sees a prompt twice.
    with_drafter = LLM(llm.target, tokenizer=llm.tokenizer, drafter=drafter, max_batch=1, **drafter_options)
    return [with_drafter.generate(prompt, **options) for prompt in prompts]


def _texts(results: list[Result]) -> list[tuple[int, ...]]:
    return [tuple(result.tokens) for result in results]


def _row(results: list[Result], plain: list[tuple[int, ...]]) -> dict[str, Any]:
    texts = _texts(results)
    stats = sum((result.stats for result in results), Stats())
    forwards = Counter[str]()
    for result in results:
        figures = result.stats.drafter.items()
        forwards.update(
            {name: each["forwards"] for name, each in figures if isinstance(each, dict) and "forwards" in each}
        )
    return {
        "prompts": len(texts),
        "tokens": stats.committed,
        "steps": stats.steps,
        "acceptance_length": round(stats.acceptance_length, 3),
        "nodes_per_step": round(stats.nodes_per_step, 1),
        "by_depth": by_depth(stats),
        "distinct_4": round(distinct(texts), 3),
        "different": sum(a != b for a, b in zip(texts, plain, strict=True)),
        "draft_forwards": {name: round(n / stats.steps, 2) for name, n in forwards.items()},
    }


def by_depth(stats: Stats) -> list[float]:
    """How often a token at each depth was accepted where those before it were, up to the deepest one that ever was."""
    reached = [stats.steps, *(stats.accepted_at[depth] for depth in range(1, max(stats.accepted_at, default=0) + 1))]
    return [round(after / before, 3) for before, after in pairwise(reached) if before]
