"""One row against plain decoding: its speed and acceptance length by the bench's code, its texts by `check`'s."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from leapahead.bench.cell import PLAIN, measure_cell, tie_on
from leapahead.bench.contender import Configuration, Ours, Setting
from leapahead.check import References, check
from leapahead.core.sampling import SamplingParams
from leapahead.models.loading import Loaded
from leapahead.planner.profile import LatencyProfiles

KEPT = (
    *("speedup", "acceptance_length", "nodes_per_step", "distinct_4", "mismatches", "ties", "lossy"),
    *("prompts", "tokens", "tokens_per_second"),
)
FIRST = 32  # prompts that are compared before the number of those that are needed is estimated

Tokens = list[int]


@dataclass(frozen=True)
class Plan:
    """How rows are measured.

    Attributes:
        max_new_tokens: of each text.
        rounds: measured rounds, after one text that warms up.
        seed: of the sampled texts and of the order.
    """

    max_new_tokens: int
    rounds: int
    seed: int = 0


def measured(
    loaded: Loaded,
    configuration: Configuration,
    prompts: Sequence[Tokens],
    plan: Plan,
    temperature: float,
    progress: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Figures of a configuration that took turns with plain decoding on every prompt; see `bench.figures.row`.

    Args:
        loaded: the model.
        configuration: drafter, options and rule.
        prompts: token ids of each.
        plan: how.
        temperature: 0 is greedy.
        progress: called after every text.
    """
    target, latency = loaded.target, LatencyProfiles(loaded.target.info)
    both = (Configuration(PLAIN), configuration)
    contenders = [
        Ours(each.name, target, loaded.tokenizer, each.drafter, each.options, latency, each.acceptance) for each in both
    ]
    # What learns from the texts would have learned from the same ones in a second round.
    rounds = 1 if configuration.options.get("learn") else plan.rounds
    try:
        rows = measure_cell(
            contenders,
            prompts,
            Setting(temperature, 1, plan.max_new_tokens, loaded.eos_token_ids, plan.seed),
            rounds=rounds,
            seed=plan.seed,
            judge=tie_on(target),
            tokenizer=loaded.tokenizer,
            progress=progress,
        )
    finally:
        for contender in contenders:
            contender.close()
    found = {name: rows[-1][name] for name in KEPT if name in rows[-1]}
    return {**found, "rounds": rounds, "plain_tokens_per_second": rows[0]["tokens_per_second"]}


def compared(
    loaded: Loaded,
    configuration: Configuration,
    prompts: Sequence[Tokens],
    tokens: int,
    temperature: float,
    *,
    max_new_tokens: int = 128,
    batch: int = 1,
    references: References | None = None,
) -> dict[str, Any]:
    """Compares texts with plain decoding's, as `leapahead check` does, until so many tokens are compared.

    Args:
        loaded: the model.
        configuration: drafter and options of an exact rule.
        prompts: token ids of each; at most all of them are used.
        tokens: least number to compare.
        temperature: 0 is greedy; else sampled with seed 0.
        max_new_tokens: of each text.
        batch: texts that are decoded together.
        references: plain decoding's texts, see `check`.

    Returns:
        Numbers of tokens compared, mismatches, ties and prompts.
    """
    found = {"tokens": 0, "mismatches": 0, "ties": 0, "prompts": 0}
    left, size = list(prompts), FIRST
    while left and found["tokens"] < tokens:
        some, left = left[:size], left[size:]
        report = check(
            loaded.target,
            loaded.tokenizer,
            some,
            [configuration.drafter],
            options=configuration.options,
            max_new_tokens=max_new_tokens,
            sampling=SamplingParams(temperature=temperature),
            eos_token_ids=loaded.eos_token_ids,
            batch=batch,
            references=references,
        )
        (row,) = report.drafters
        found["tokens"] += row.tokens
        found["mismatches"] += len(row.mismatches)
        found["ties"] += len(row.ties)
        found["prompts"] += len(some)
        size = 1 + (tokens - found["tokens"]) * found["prompts"] // max(found["tokens"], 1)
    return found
