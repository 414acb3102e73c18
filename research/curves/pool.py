"""Size and hits of lookahead's n-gram pool as the text grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from leapahead.bench.conditions import Data, Progress, Tokens, conditions, silent
from leapahead.check import distinct
from leapahead.core.sampling import SamplingParams
from leapahead.drafters.lookahead import Lookahead
from leapahead.engine.request import Request
from leapahead.engine.scheduler import Engine
from leapahead.models.base import Target
from leapahead.planner.draft import SequenceView, Step
from research.curves.run import decode, request, require_prompts

CHECKPOINTS = (0, 16, 32, 64, 128, 256, 512, 1024)  # new tokens

History = list[dict[str, int]]  # after each step: tokens, keys, ngrams, hit, accepted


def pool(
    target: Target,
    prompts: Sequence[Tokens],
    options: dict[str, Any] | None = None,
    max_new_tokens: int = 256,
    eos_token_ids: Tokens = (),
    temperature: float = 0.0,
    seed: int = 0,
    progress: Progress = silent,
) -> Data:
    """Size and use of lookahead's n-gram pool as generation proceeds.

    Args:
        options: of the drafter `lookahead`.

    Returns:
        steps, a row for each: step (0 is the pool filled by the prompt), prompts (texts that have this step), and means
        over them of tokens (committed so far), keys, ngrams, hit (the look-up found n-grams) and accepted (an n-gram of
        the pool was accepted).
        at, a row for each number of new tokens: keys, ngrams, and hit and accepted as shares of all steps up to there.
        overall: steps with a look-up; hit and accepted as shares of them; tokens per step over all steps, those with a
        hit, those with an accepted n-gram and the others (acceptance_length, per_hit, per_accepted, per_other; None
        without such steps); distinct_4 of the texts.
    """
    require_prompts(prompts)
    engine, begun = Engine(target, max_batch=1), list[Lookahead]()

    class Watched(Lookahead):
        """Lookahead whose object for each sequence is known to the caller."""

        def begin(self, sequence: SequenceView) -> None:
            super().begin(sequence)
            begun.append(self)

    drafter = engine.drafter(Watched, **(options or {}))
    params = SamplingParams(temperature=temperature, seed=seed)
    histories, texts = list[History](), list[list[int]]()
    for index, prompt in enumerate(prompts):
        progress("lookahead", index, len(prompts))
        asked = request(prompt, drafter, max_new_tokens, eos_token_ids, params)
        history, text = _pool_history(engine, asked, begun)
        histories.append(history)
        texts.append(text)
    first = begun[0]
    return {
        "figure": "pool",
        "conditions": conditions(
            target, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, prompts=len(prompts)
        ),
        "lookahead": {"window": first.window, "ngram": first.ngram, "guesses": first.guesses},
        "steps": by_step(histories),
        "at": by_tokens(histories, max_new_tokens),
        "overall": {**_overall(histories), "distinct_4": round(distinct(texts), 4)},
    }


def _pool_history(engine: Engine, asked: Request, begun: list[Lookahead]) -> tuple[History, list[int]]:
    """The history of one text, and the text.

    Args:
        begun: the drafters of the texts so far; that of this text is the last one, once its prompt has been read.
    """
    history: History = []
    tokens = hits = lookups = 0

    def row(hit: int, accepted: bool) -> None:
        pool = begun[-1].pool
        counts = {"tokens": tokens, "keys": pool.figures()["prefixes"], "ngrams": len(pool)}
        history.append({**counts, "hit": hit, "accepted": int(accepted)})

    def before(*_: object) -> None:
        if not history:  # before the first step is committed, the pool holds the prompt alone
            row(0, False)

    def after(step: Step) -> None:
        nonlocal tokens, hits, lookups
        tokens += len(step.tokens)
        pool = begun[-1].pool
        if pool.lookups > lookups:  # the last token of a text has no room for a draft
            row(pool.hits - hits, any(step.proposal.sources[node] == "guess" for node in step.verdict.path[1:]))
        hits, lookups = pool.hits, pool.lookups

    handle = decode(engine, replace(asked, on_choices=before, on_step=after))
    return history, handle.tokens


def by_step(histories: Sequence[History]) -> list[Data]:
    """Means over the texts, a row for each step."""
    rows = []
    for number in range(max(map(len, histories))):
        here = [history[number] for history in histories if number < len(history)]
        rows.append({"step": number, "prompts": len(here), **{name: _mean(here, name) for name in here[0]}})
    return rows


def by_tokens(histories: Sequence[History], longest: int) -> list[Data]:
    """A row for each number of new tokens of `CHECKPOINTS` and for the longest."""
    rows = []
    for tokens in (*(n for n in CHECKPOINTS if n < longest), longest):
        parts = []  # of each text with that many tokens: its history up to there
        for history in histories:
            end = next((index for index, row in enumerate(history) if row["tokens"] >= tokens), None)
            if end is not None:
                parts.append(history[: end + 1])
        if parts:
            steps = [row for part in parts for row in part[1:]]
            ends = [part[-1] for part in parts]
            rows.append(
                {
                    "tokens": tokens,
                    "prompts": len(parts),
                    "keys": _mean(ends, "keys"),
                    "ngrams": _mean(ends, "ngrams"),
                    "hit": _mean(steps, "hit") if steps else None,
                    "accepted": _mean(steps, "accepted") if steps else None,
                }
            )
    return rows


def _overall(histories: Sequence[History]) -> Data:
    steps = [
        {**after, "new": after["tokens"] - before["tokens"], "all": 1, "other": 1 - after["accepted"]}
        for history in histories
        for before, after in pairwise(history)
    ]
    lengths = {
        name: [step["new"] for step in steps if step[kind]]
        for name, kind in (
            ("acceptance_length", "all"),
            ("per_hit", "hit"),
            ("per_accepted", "accepted"),
            ("per_other", "other"),
        )
    }
    return {
        "steps": len(steps),
        "hit": _mean(steps, "hit") if steps else None,
        "accepted": _mean(steps, "accepted") if steps else None,
        **{name: round(sum(new) / len(new), 4) if new else None for name, new in lengths.items()},
    }


def _mean(rows: Sequence[dict[str, int]], name: str) -> float:
    return round(sum(row[name] for row in rows) / len(rows), 4)
