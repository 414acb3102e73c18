"""Searches the sub-layers that a model can skip when it drafts for itself, as in Draft & Verify (2309.08168).

    texts     prompts with greedy continuations by the target
    a         agreement: share of the continuations' tokens that the model without the sub-layers chooses as well, given
              the target's text before them; one forward per text
    c         cost: time of a token without the sub-layers, relative to the whole model; measured by kind of sub-layer
    speed     tokens in the time of one plain token with drafted chains of the best length k:

                  (1 - a^(k+1)) / (1 - a) / (k c + 1)          Leviathan et al., 2211.17192, theorem 3.8

This assumes that a target forward over k + 1 tokens costs as much as one over a single token, and that tokens are
accepted independently. A Bayesian optimiser (optuna's TPE) maximises the speed. Its first trials are fixed: some single
layers, then several of those whose absence changes the choices least.

The result is stored by `drafters.saved_skips`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from leapahead.core.errors import BadParameter, needing
from leapahead.core.parameters import whole
from leapahead.core.stop import StopParams
from leapahead.core.tree import IntArray
from leapahead.drafters.plain import Plain
from leapahead.drafters.saved_skips import Found, expected
from leapahead.engine.request import Request
from leapahead.engine.scheduler import Engine
from leapahead.models import loading
from leapahead.models.self_draft.layer_skip import Skip, SubLayers, sub_layers
from leapahead.models.transformers.arguments import accepts
from leapahead.models.transformers.forward import inputs
from leapahead.models.transformers.model import TransformersTarget

ROUNDS = 9  # rounds of timing
MOST_SEED = 2**32 - 1  # of numpy's generators, which the optimiser uses
TOGETHER = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)  # shares of the layers that the fixed trials skip together


Progress = Callable[[int, Found], None]  # number of trials so far, and the best of them


def silent(trials: int, best: Found) -> None:
    """A `Progress` that shows nothing."""


@dataclass(frozen=True)
class Costs:
    """Time per token of parts of the model, as shares of the whole model's.

    Attributes:
        layers: number of layers.
        attention, mlp: the share of all attention (MLP) sub-layers, without their norms.
        whole: the share of all layers.
    """

    layers: int
    attention: float
    mlp: float
    whole: float

    @classmethod
    def measure(cls, parts: SubLayers, token: int, rounds: int = ROUNDS) -> Costs:
        """Medians of forwards over a single token, with and without all sub-layers of a kind, interleaved."""
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
        """The cost c without these sub-layers; layers of a kind are assumed to cost the same."""
        both = len(skip.attention & skip.mlp)
        saved = both * self.whole
        saved += (len(skip.attention) - both) * self.attention + (len(skip.mlp) - both) * self.mlp
        return max(1 - saved / self.layers, 0.01)


class Agreement:
    """How often a model chooses the same tokens as the target.

    Args:
        target: continues each text greedily.
        texts: token ids of prompts.
        new: greatest number of tokens of each continuation.

    Attributes:
        tokens: number of tokens of all continuations.
    """

    def __init__(self, target: TransformersTarget, texts: Sequence[Sequence[int]], new: int) -> None:
        self._texts = [(text, _continued(target, text, new)) for text in texts]
        # By one forward per text, as in the trials: in half precision, decoding may have broken ties differently.
        self._chosen = [self._choices(target.model, *each) for each in self._texts]
        self.tokens = sum(len(chosen) for chosen in self._chosen)

    def of(self, model: Any) -> float:
        """The agreement of a model, in [0, 1]."""
        same = sum(
            int((self._choices(model, *each) == chosen).sum())
            for each, chosen in zip(self._texts, self._chosen, strict=True)
        )
        return same / self.tokens

    @staticmethod
    def _choices(model: Any, text: Sequence[int], new: Sequence[int]) -> IntArray:
        """The model's choices for the tokens of a continuation, int64 [len(new)]."""
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
    """Searches the set of skipped sub-layers with the greatest expected speed.

    Args:
        texts: token ids of prompts; drafts are compared with the target's continuations of them.
        trials: number of sets that are tried.
        seed: of the optimiser, from 0 to `MOST_SEED`.
        progress: called after every trial.
        new: greatest number of tokens of each continuation.

    Raises:
        Refused: the model's layers cannot be skipped.
        BadParameter: no texts, no trials, no new tokens, or an impossible seed.
        LeapaheadError: optuna is not installed.
    """
    with needing("the search for layers to skip", "skip", "optuna"):
        import optuna
    if not texts:
        raise BadParameter("there are no texts to search with; give at least one")
    if trials < 1 or new < 1:
        raise BadParameter(f"trials={trials}, new={new} is not possible: both must be at least 1")
    whole("seed", seed, most=MOST_SEED)
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
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # optuna logs every new study
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
    """The fixed first trials: single layers, then sets of those whose absence changes the choices least."""
    single = [
        Skip.layers([layer]) for layer in sorted({*np.linspace(0, count - 1, min(count, trials // 2), dtype=int)})
    ]
    yield from single
    order = sorted((skip for skip in single if skip in tried), key=lambda skip: -tried[skip])
    for size in sorted({round(share * len(order)) for share in TOGETHER} - {0, 1}):
        yield Skip.layers(layer for skip in order[:size] for layer in skip.mlp)


def _names(skip: Skip) -> set[str]:
    """The skipped sub-layers by the names of the optimiser's parameters."""
    return {f"{layer}a" for layer in skip.attention} | {f"{layer}m" for layer in skip.mlp}


def _found(skip: Skip, agreement: float, cost: float, trials: int) -> Found:
    return Found(skip, agreement, cost, expected(agreement, cost)[0], trials)


def _continued(target: TransformersTarget, text: Sequence[int], new: int) -> list[int]:
    """The target's greedy continuation."""
    stop = StopParams(max_new_tokens=new, eos_token_ids=loading.eos_token_ids(target, None))
    engine = Engine(target, max_batch=1)
    handle = engine.submit(Request(text, engine.drafter(Plain), stop=stop))
    engine.run([handle])
    return handle.tokens


def _logits(model: Any, tokens: Sequence[int], last: int) -> torch.Tensor:
    """Logits after each of the last tokens, [last, vocab], by one forward."""
    device = model.get_input_embeddings().weight.device
    keep = {"logits_to_keep": last} if accepts(model, "logits_to_keep") else {}
    with torch.no_grad():
        logits: torch.Tensor = model(**inputs(model, np.array([tokens]), 0, device), use_cache=False, **keep).logits
    return logits[0, -last:]
