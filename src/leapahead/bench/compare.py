"""Measures how much faster a drafter is than plain decoding on one prompt, for `--compare`.

The speed of a machine drifts, so each round times both, in alternating order, and gives one ratio. The result is the
median of the rounds; their range shows how far it can be relied upon. Before the rounds, both are run once as warm-up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, Unpack

from leapahead.api import LLM
from leapahead.drafters import cache_sections
from leapahead.inputs import OneText, Prompt
from leapahead.results import Result

ROUNDS = 5


@dataclass(frozen=True)
class Comparison:
    """A drafter against plain decoding.

    Attributes:
        ratios: for each round, the drafter's tokens per second divided by plain decoding's, without the prefill.
        equal: whether every text equals plain decoding's, token for token.
        plain: plain decoding's result.
        first_difference: index of the first token that differs; None if none does.
    """

    ratios: list[float]
    equal: bool
    plain: Result
    first_difference: int | None

    @property
    def ratio(self) -> float:
        """The median round."""
        return median(self.ratios)

    @property
    def spread(self) -> tuple[float, float]:
        """The slowest and the fastest round."""
        return min(self.ratios), max(self.ratios)

    def as_dict(self) -> dict[str, Any]:
        low, high = self.spread
        return {
            "ratio": round(self.ratio, 4),
            "low": round(low, 4),
            "high": round(high, 4),
            "rounds": len(self.ratios),
            "equal": self.equal,
            "first_difference": self.first_difference,
            "plain": self.plain.stats.as_dict(),
        }


def compare(
    llm: LLM,
    prompt: Prompt,
    drafted: Result,
    *,
    rounds: int = ROUNDS,
    progress: Callable[[int, int], None] = lambda done, total: None,
    **options: Unpack[OneText],
) -> Comparison:
    """Times the drafter of the LLM and plain decoding on one prompt.

    Every round drafts from the file of the drafter cache, if there is one, and from no text of this process.

    Args:
        llm: the model and its drafter.
        prompt: as for `LLM.generate`.
        drafted: the drafter's result for this prompt and these options, which serves as its warm-up; its seed is used.
        rounds: number of rounds.
        progress: called before each decoding with the numbers of decodings done and in all.
        options: as for `LLM.generate`.
    """
    options["seed"] = drafted.seed
    plainly: OneText = {**options, "drafter": "plain", "drafter_options": {}, "prediction": None}
    file = None if llm.drafter_cache is None else llm.drafter_cache.path
    done, total = 0, 2 * rounds + 1

    def run(plain: bool) -> Result:
        nonlocal done
        progress(done, total)
        done += 1
        with llm.without_drafter_cache():  # which holds this text already; its file does not
            if file is not None and file.exists() and not plain:
                llm.drafter_cache = cache_sections.load(file)
            return llm.generate(prompt, **(plainly if plain else options))

    reference = run(plain=True)
    texts, ratios = [drafted.tokens], []
    for turn in range(rounds):
        pair = {plain: run(plain) for plain in (turn % 2 == 0, turn % 2 == 1)}
        ratios.append(pair[False].stats.tokens_per_second / pair[True].stats.tokens_per_second)
        texts += [result.tokens for result in pair.values()]
    differing = next((text for text in texts if text != reference.tokens), None)
    return Comparison(ratios, differing is None, reference, _first_difference(reference.tokens, differing))


def _first_difference(expected: list[int], text: list[int] | None) -> int | None:
    if text is None:
        return None
    for index, (e, t) in enumerate(zip(expected, text, strict=False)):
        if e != t:
            return index
    return min(len(expected), len(text))
