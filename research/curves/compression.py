"""Step compression S of lookahead decoding against log2(W = G)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from leapahead.bench.conditions import Data, Progress, Tokens, conditions, silent
from leapahead.check import distinct
from leapahead.core.errors import BadParameter
from leapahead.core.sampling import SamplingParams
from leapahead.core.stats import Stats
from leapahead.drafters.lookahead import Lookahead
from leapahead.engine.scheduler import Engine
from leapahead.models.base import Target
from research.curves.fit import fit, optimizer, require_points
from research.curves.run import decode, request, require_prompts


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

    S is the acceptance length, new tokens divided by steps (2402.02057, equation 6), summed over all prompts without
    their prefill. The n-grams of the prompt are in the pool.

    Returns:
        rows of ngram, window, step_compression, nodes_per_step, steps and different_texts (should be 0); `fit` (of all
        rows, see `Fit`; None with the reason in `note`) and `fits` (for each N alone); tokens and distinct_4 of the
        texts.
    """
    pairs = [(ngram, window) for ngram in dict.fromkeys(ngrams) for window in dict.fromkeys(windows)]
    require_points(pairs)  # what the fit needs is checked before anything is measured
    optimizer()
    require_prompts(prompts)
    engine = Engine(target, max_batch=1)
    drafters = [engine.drafter(Lookahead, window=w, guesses=w, ngram=n) for n, w in pairs]
    params = SamplingParams(temperature=temperature, seed=seed)
    rows: list[Data] = []
    texts: list[list[int]] = []
    for number, ((ngram, window), drafter) in enumerate(zip(pairs, drafters, strict=True)):
        stats, here = Stats(), list[list[int]]()
        for index, prompt in enumerate(prompts):
            progress(f"N = {ngram}, W = G = {window}", number * len(prompts) + index, len(pairs) * len(prompts))
            handle = decode(engine, request(prompt, drafter, max_new_tokens, eos_token_ids, params))
            here.append(handle.tokens)
            stats += handle.stats
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
    whole, note = fitted(rows)
    alone = {str(ngram): fitted([row for row in rows if row["ngram"] == ngram])[0] for ngram in ngrams}
    return {
        "figure": "compression",
        "conditions": conditions(
            target, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, prompts=len(prompts)
        ),
        "tokens": sum(map(len, texts)),
        "distinct_4": round(distinct(texts), 4),
        "rows": rows,
        "fit": whole,
        "fits": {ngram: fit for ngram, fit in alone.items() if fit is not None},
        "note": note,
    }


def fitted(rows: Sequence[Data]) -> tuple[Data | None, str]:
    """The fit and no note, or no fit and why."""
    try:
        return asdict(fit([(row["ngram"], row["window"], row["step_compression"]) for row in rows])), ""
    except BadParameter as error:
        return None, str(error)
