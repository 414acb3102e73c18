"""Which sub-layers a model can do without when it drafts for itself: the search of Draft & Verify (2309.08168).

    texts     prompts that the target has continued greedily
    a         agreement: share of the continuation's tokens that the model without the sub-layers would have chosen too,
              given the target's text up to there; one forward a text
    c         cost: time of a token without them, in times of a token of the whole model; measured by kind of sub-layer
    speed     tokens in the time of one plain token when chains of k are drafted, for the best k:

                  (1 - a^(k+1)) / (1 - a) / (k c + 1)          Leviathan et al., 2211.17192, theorem 3.8

It takes the target's forward over k + 1 tokens for one over a single token, and tokens to be accepted independently.
A Bayesian optimiser (optuna's TPE) looks for the greatest speed, after a few trials of ours: each layer alone, and then
the least missed ones together.

What is found is kept by `planner.skips`.

Knows targets and their layers; neither drafters nor text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from leapahead.core.errors import BadParameter, needing
from leapahead.core.sampling import SamplingParams
from leapahead.core.stop import StopParams
from leapahead.core.tree import IntArray
from leapahead.drafters.plain import Plain
from leapahead.drafters.saved_skips import Found, expected
from leapahead.engine.loop import Generation, decode
from leapahead.models import loading
from leapahead.models.self_draft.layer_skip import Skip, SubLayers, sub_layers
from leapahead.models.transformers.forward import accepts, inputs
from leapahead.models.transformers.model import TransformersTarget

ROUNDS = 9  # of timing
TOGETHER = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)  # shares of the layers, left out together before it is asked


Progress = Callable[[int, Found], None]  # trials made, and the best of them


def silent(trials: int, best: Found) -> None:
    """Shows nothing."""


@dataclass(frozen=True)
class Costs:
    """What a token takes, in shares of the whole model's: the sub-layers of all layers, and all layers as a whole.

    Attributes:
        layers: their number.
        attention, mlp: of the sub-layers alone, their norms left out.
        whole: of the layers with norms and all.
    """

    layers: int
    attention: float
    mlp: float
    whole: float

    @classmethod
    def measure(cls, parts: SubLayers, token: int, rounds: int = ROUNDS) -> Costs:
        """By forwards of a single token without context, with and without all of a kind in turn; medians."""
        every = frozenset(range(parts.count))
        skips = (Skip(), Skip(attention=every), Skip(mlp=every), Skip(every, every))
        models = [parts.without(skip) for skip in skips]
        seconds: list[list[float]] = [[] for _ in models]
        for _ in range(rounds + 1):
            for model, times in zip(models, seconds, strict=True):
                began = perf_counter()
                _logits(model, [token], 1).sum().item()  # waits for the device
                times.append(perf_counter() - began)
        full, attention, mlp, whole = (median(times[1:]) for times in seconds)  # the first one warms up
        return cls(parts.count, *(min(max(1 - each / full, 0.0), 1.0) for each in (attention, mlp, whole)))

    def left(self, skip: Skip) -> float:
        """c, of a model without these sub-layers; layers of a kind are taken to be equal."""
        both = len(skip.attention & skip.mlp)
        saved = both * self.whole
        saved += (len(skip.attention) - both) * self.attention + (len(skip.mlp) - both) * self.mlp
        return max(1 - saved / self.layers, 0.01)


class Agreement:
    """How often a model chooses what the target has chosen.

    Args:
        target: continues each text, greedily.
        texts: prompts, tokens.
        new: tokens of each continuation, fewer where it ends or the context does.

    Attributes:
        tokens: of all continuations.
    """

    def __init__(self, target: TransformersTarget, texts: Sequence[Sequence[int]], new: int) -> None:
        self._texts = [(text, _continued(target, text, new)) for text in texts]
        # What one forward chooses, as the trials do: in half precision a tie may have gone the other way in decoding.
        self._chosen = [self._choices(target.model, *each) for each in self._texts]
        self.tokens = sum(len(chosen) for chosen in self._chosen)

    def of(self, model: Any) -> float:
        """In [0, 1]."""
        same = sum(
            int((self._choices(model, *each) == chosen).sum())
            for each, chosen in zip(self._texts, self._chosen, strict=True)
        )
        return same / self.tokens

    @staticmethod
    def _choices(model: Any, text: Sequence[int], new: Sequence[int]) -> IntArray:
        """int64 [len(new)]."""
        logits = _logits(model, [*text, *new[:-1]], len(new))
        chosen: IntArray = logits.argmax(-1).numpy(force=True)
        return chosen


def search(
    target: TransformersTarget,
    texts: Sequence[Sequence[int]],
    trials: int = 100,
    seed: int = 0,
    progress: Progress = silent,
    new: int = 64,
) -> Found:
    """Looks for the sub-layers whose absence makes the fastest draft.

    Args:
        texts: prompts, tokens; what the target says to them is what drafts are judged by.
        trials: sets of sub-layers that are tried, the empty one not counted.
        seed: of the optimiser.
        progress: is shown each trial's number and the best so far.
        new: tokens that the target adds to each text.

    Raises:
        Refused: the model's layers cannot be left out.
        BadParameter: no texts, no trials or no new tokens.
        LeapaheadError: optuna is not installed.
    """
    with needing("the search for layers to leave out", "skip", "optuna"):
        import optuna
    if not texts:
        raise BadParameter("there are no texts to search with; give at least one")
    if trials < 1 or new < 1:
        raise BadParameter(f"trials={trials}, new={new} is not possible: both must be at least 1")
    parts = sub_layers(target)
    agreement = Agreement(target, texts, new)
    costs = Costs.measure(parts, int(texts[0][-1]))
    names = [f"{layer}{kind}" for layer in range(parts.count) for kind in "am"]
    tried: dict[Skip, float] = {Skip(): 1.0}

    def speed(skip: Skip) -> float:
        if skip not in tried:
            tried[skip] = agreement.of(parts.without(skip))
        return expected(tried[skip], costs.left(skip))[0]

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # a study is told as it is made
    try:
        study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
        first = _first(parts.count, trials, tried)
        best = _found(Skip(), 1.0, 1.0, 0)
        for number in range(1, trials + 1):
            if (start := next(first, None)) is not None:
                study.enqueue_trial({name: name in _names(start) for name in names})
            trial = study.ask()
            left_out = [name for name in names if trial.suggest_categorical(name, [False, True])]
            skip = Skip.parse(",".join(left_out))
            study.tell(trial, speed(skip))
            kept = _found(best.skip, best.agreement, best.cost, number)
            best = max((kept, _found(skip, tried[skip], costs.left(skip), number)), key=lambda each: each.speedup)
            progress(number, best)
    finally:
        optuna.logging.set_verbosity(before)
    return best


def _first(count: int, trials: int, tried: dict[Skip, float]) -> Iterator[Skip]:
    """What to try before the optimiser has learned anything: layers alone, then the least missed ones together."""
    single = [
        Skip.layers([layer]) for layer in sorted({*np.linspace(0, count - 1, min(count, trials // 2), dtype=int)})
    ]
    yield from single
    order = sorted((skip for skip in single if skip in tried), key=lambda skip: -tried[skip])
    for size in sorted({round(share * len(order)) for share in TOGETHER} - {0, 1}):
        yield Skip.layers(layer for skip in order[:size] for layer in skip.mlp)


def _names(skip: Skip) -> set[str]:
    return {f"{layer}a" for layer in skip.attention} | {f"{layer}m" for layer in skip.mlp}


def _found(skip: Skip, agreement: float, cost: float, trials: int) -> Found:
    return Found(skip, agreement, cost, expected(agreement, cost)[0], trials)


def _continued(target: TransformersTarget, text: Sequence[int], new: int) -> list[int]:
    """What the target says next, greedily."""
    stop = StopParams(max_new_tokens=new, eos_token_ids=loading.eos_token_ids(target, None))
    with closing(Generation.begin(target, text, Plain(), SamplingParams(), stop)) as generation:
        return [token for _, step in decode(target, [generation]) for token in step.tokens]


def _logits(model: Any, tokens: Sequence[int], last: int) -> torch.Tensor:
    """By one forward: after each of the `last` tokens, [last, vocab]."""
    device = model.get_input_embeddings().weight.device
    keep = {"logits_to_keep": last} if accepts(model, "logits_to_keep") else {}
    with torch.no_grad():
        logits: torch.Tensor = model(**inputs(model, np.array([tokens]), 0, device), use_cache=False, **keep).logits
    return logits[0, -last:]
