"""Accepted tokens of prompt lookup's drafts by match length."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from leapahead.bench.conditions import Data, Progress, Tokens, conditions, silent
from leapahead.check import distinct
from leapahead.core.sampling import SamplingParams
from leapahead.drafters.prompt_lookup import PromptLookup
from leapahead.engine.scheduler import Engine
from leapahead.models.base import Target
from leapahead.planner.draft import Step
from research.curves.run import decode, request, require_prompts

LEAST_DRAFTS = 5  # for an interval; a bootstrap of fewer drafts is too narrow


def match_length(tokens: Tokens, longest: int) -> int:
    """Length, at most `longest`, of the longest suffix of `tokens` that also occurs earlier, followed by a token."""
    best = 0
    for end in range(len(tokens) - 1, 0, -1):
        length = 0
        while length < min(longest, end) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        best = max(best, length)
        if best == longest:
            break
    return best


def match(
    target: Target,
    prompts: Sequence[Tokens],
    max_ngram: int = 8,
    min_ngram: int = 1,
    num_tokens: int = 10,
    max_new_tokens: int = 128,
    eos_token_ids: Tokens = (),
    temperature: float = 0.0,
    seed: int = 0,
    progress: Progress = silent,
) -> Data:
    """Accepted tokens of prompt lookup's drafts by the length of the match that they follow.

    Drafts shortened by the end of the text are left out.

    Returns:
        rows of match (`max_ngram` stands for all matches at least as long), drafts, `accepted` (mean tokens of a draft,
        with low and high, a bootstrap interval of 95 %, None with fewer than five drafts), first_right (share of drafts
        with an accepted token) and all_right (share accepted to the last token); steps, and how many of them had no
        match at all; acceptance_length and distinct_4 of the texts.
    """
    require_prompts(prompts)
    engine = Engine(target, max_batch=1)
    drafter = engine.drafter(PromptLookup, max_ngram=max_ngram, min_ngram=min_ngram, num_tokens=num_tokens)
    params = SamplingParams(temperature=temperature, seed=seed)
    accepted: dict[int, list[int]] = defaultdict(list)
    steps = without = 0
    texts: list[list[int]] = []
    for index, prompt in enumerate(prompts):
        progress("prompt_lookup", index, len(prompts))
        before = list(prompt)

        def count(step: Step, before: list[int] = before) -> None:
            nonlocal steps, without
            steps += 1
            length = match_length(before, max_ngram)
            without += length < min_ngram
            if len(step.tree) - 1 == num_tokens:
                accepted[length].append(step.verdict.accepted)
            before += step.tokens

        handle = decode(engine, request(prompt, drafter, max_new_tokens, eos_token_ids, params, count))
        texts.append(handle.tokens)
    return {
        "figure": "match",
        "conditions": conditions(
            target, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, prompts=len(prompts)
        ),
        "max_ngram": max_ngram,
        "min_ngram": min_ngram,
        "num_tokens": num_tokens,
        "steps": steps,
        "without_match": without,
        "acceptance_length": round(sum(map(len, texts)) / steps, 4) if steps else None,
        "distinct_4": round(distinct(texts), 4),
        "rows": [_row(length, values, num_tokens) for length, values in sorted(accepted.items())],
    }


def _row(length: int, accepted: Sequence[int], num_tokens: int) -> Data:
    """The row of one length of match, from the accepted tokens of its drafts."""
    low, high = _bootstrap(accepted)
    return {
        "match": length,
        "drafts": len(accepted),
        "accepted": {"mean": round(float(np.mean(accepted)), 4), "low": low, "high": high},
        "first_right": round(sum(value > 0 for value in accepted) / len(accepted), 4),
        "all_right": round(sum(value == num_tokens for value in accepted) / len(accepted), 4),
    }


def _bootstrap(values: Sequence[int], draws: int = 2000) -> tuple[float | None, float | None]:
    """95 % interval of the mean. Drafts are treated as independent, which those of one text are only approximately."""
    if len(values) < LEAST_DRAFTS:
        return None, None
    picked = np.random.default_rng(0).choice(np.array(values), size=(draws, len(values)))
    low, high = np.quantile(picked.mean(axis=1), (0.025, 0.975)).tolist()
    return round(low, 4), round(high, 4)
