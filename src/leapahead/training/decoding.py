"""How many tokens a forward of the target commits with a drafter, measured by decoding the prompts of sets of texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from leapahead.api import LLM
from leapahead.core.stats import Stats
from leapahead.core.text import Tokenizer
from leapahead.models.base import Target
from leapahead.training.evaluate import DEPTH, NODES, Evaluation
from leapahead.training.texts import Progress, Text

TOGETHER = 8  # texts that are decoded together

Sets = dict[str, list[Text]]


def acceptance(
    target: Target, tokenizer: Tokenizer | None, sets: Sets, progress: Progress, what: str, **drafter: Any
) -> dict[str, Stats]:
    """Decodes the prompts of each set with a drafter, as long as the longest answer of the set.

    Args:
        target: decodes. It must have no open sessions.
        tokenizer: of the target.
        sets: texts by the name of the set, all of one temperature; empty ones are left out.
        progress: is called after every few texts.
        what: is measured, for `progress`.
        drafter: its name and options, as of `LLM`.

    Returns:
        The counters of each set, summed over its texts.
    """
    found: dict[str, Stats] = {}
    for name, texts in sets.items():
        if not texts:
            continue
        with LLM(target, tokenizer=tokenizer, max_batch=TOGETHER, drafter_cache=False, **drafter) as llm:
            total = Stats()
            for done in range(0, len(texts), TOGETHER):
                some = texts[done : done + TOGETHER]
                results = llm.generate(
                    [text.prompt for text in some],
                    max_new_tokens=max(len(text.answer) for text in texts),
                    temperature=texts[0].temperature,
                    seed=[text.index for text in some],
                )
                total = sum((result.stats for result in results), total)
                progress(f"{what}, {name}", min(done + TOGETHER, len(texts)), len(texts))
        found[name] = total
    return found


def evaluations(
    target: Target,
    tokenizer: Tokenizer | None,
    sets: Sets,
    progress: Progress,
    what: str,
    forwards: int | None = None,
    **drafter: Any,
) -> list[Evaluation]:
    """What a drafter saves, with chains of 5 tokens and with trees of 16 nodes; arguments as of `acceptance`.

    Args:
        forwards: of the draft model in every step; None for one for each token of a chain, and for a tree those that
            bring nodes.
    """
    chain = {"nodes": DEPTH, "depth": forwards or DEPTH, "chain": True}
    tree = {"nodes": NODES, **({"depth": forwards} if forwards else {})}
    chains = acceptance(target, tokenizer, sets, progress, what, **drafter, **chain)
    trees = acceptance(target, tokenizer, sets, progress, what, **drafter, **tree)
    return [
        Evaluation(
            name,
            len(sets[name]),
            stats.committed,
            _by_depth(stats),
            stats.acceptance_length,
            trees[name].acceptance_length,
        )
        for name, stats in chains.items()
    ]


def _by_depth(stats: Stats) -> tuple[float, ...]:
    """How often the token at each depth of a chain was accepted where those before it were."""
    reached: Sequence[int] = [stats.steps, *(stats.accepted_at[depth] for depth in range(1, DEPTH + 1))]
    return tuple(reached[depth + 1] / max(1, reached[depth]) for depth in range(DEPTH))
