"""Step compression S of lookahead decoding against log2(W = G)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from leapahead import drafters
from leapahead.check import distinct
from leapahead.core.errors import BadParameter
from leapahead.core.sampling import SamplingParams
from leapahead.core.stats import Stats
from leapahead.drafters.lookahead import Lookahead
from leapahead.models.base import Target
from research.curves.formula import enough, fit, optimizer
from research.curves.run import Data, Progress, Tokens, begin, check, conditions, silent, walk


def compression(
    target: Target,
    prompts: Sequence[Tokens],
    ngrams: Sequence[int] = (3, 5, 7),
    windows: Sequence[int] = (1, 2, 4, 8, 16, 32),
    max_new_tokens: int = 128,
    eos_token_ids: Tokens = (),
    temperature: float = 0.0,
    seed: int = 0,
    progress: Progress = silent,
) -> Data:
    """Step compression S of lookahead decoding by N and W = G, and the formula fitted to all of it.

    S is the acceptance length, new tokens by steps (2402.02057, equation 6); prompts share one sum, the prefill is not
    counted. The n-grams of the prompt are in the pool.

    Returns:
        rows of ngram, window, step_compression, nodes_per_step and steps; `fit` (of all rows, see `Fit`; None with the
        reason in `note`) and `fits` (for each N alone); distinct_4 of the texts.
    """
    pairs = [(ngram, window) for ngram in dict.fromkeys(ngrams) for window in dict.fromkeys(windows)]
    enough(pairs)  # and all else that the fit needs, before anything is measured
    optimizer()
    makers = [drafters.factory(Lookahead, window=w, guesses=w, ngram=n) for n, w in pairs]
    check(target, prompts, Lookahead)
    params = SamplingParams(temperature=temperature, seed=seed)
    rows: list[Data] = []
    texts: list[list[int]] = []
    for number, ((ngram, window), make) in enumerate(zip(pairs, makers, strict=True)):
        stats, here = Stats(), list[list[int]]()
        for index, prompt in enumerate(prompts):
            progress(f"N = {ngram}, W = G = {window}", number * len(prompts) + index, len(pairs) * len(prompts))
            generation = begin(target, prompt, make(), max_new_tokens, eos_token_ids, params)
            here.append([token for step in walk(target, generation) for token in step.tokens])
            stats += generation.stats
        texts = texts or here
        rows.append(
            {
                "ngram": ngram,
                "window": window,
                "step_compression": round(stats.acceptance_length, 4),
                "nodes_per_step": round(stats.nodes_per_step, 2),
                "steps": stats.steps,
                "different_texts": sum(a != b for a, b in zip(here, texts, strict=True)),
            }
        )
    fits: dict[str, Data] = {}
    whole, note = _fitted(rows)
    for ngram in dict.fromkeys(ngrams):
        alone, _ = _fitted([row for row in rows if row["ngram"] == ngram])
        if alone is not None:
            fits[str(ngram)] = alone
    return {
        "figure": "compression",
        "conditions": conditions(
            target, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, prompts=len(prompts)
        ),
        "tokens": sum(map(len, texts)),
        "distinct_4": round(distinct(texts), 4),
        "rows": rows,
        "fit": whole,
        "fits": fits,
        "note": note,
    }


def _fitted(rows: Sequence[Data]) -> tuple[Data | None, str]:
    try:
        return asdict(fit([(row["ngram"], row["window"], row["step_compression"]) for row in rows])), ""
    except BadParameter as error:
        return None, str(error)
