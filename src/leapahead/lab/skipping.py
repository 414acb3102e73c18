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

What is found is kept in CACHE/skip/DIGEST.json, by the target's name and fingerprint.

Knows targets and their layers; neither drafters nor text.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from leapahead import targets
from leapahead.decode import Generation, decode
from leapahead.drafters.plain import Plain
from leapahead.errors import BadParameter, needing
from leapahead.planner.machine import Place
from leapahead.sampling import SamplingParams
from leapahead.stop import StopParams
from leapahead.targets.engines import accepts, inputs
from leapahead.targets.layers import Skip, SubLayers, sub_layers
from leapahead.targets.transformers import TransformersTarget
from leapahead.tree import IntArray

FORMAT = 1
LONGEST = 16  # drafted tokens of a chain
ROUNDS = 9  # of timing
TOGETHER = (
    0.125,
    0.25,
    0.375,
    0.5,
    0.625,
    0.75,
)  # shares of the layers that are left out together before the optimiser


@dataclass(frozen=True)
class Found:
    """What a search has found.

    Attributes:
        skip: the sub-layers to leave out.
        agreement: a, in [0, 1].
        cost: c, in times of the whole model's token.
        speedup: expected, over plain decoding; not more than 1 where leaving out does not pay.
        trials: that it took.
    """

    skip: Skip
    agreement: float
    cost: float
    speedup: float
    trials: int

    @property
    def length(self) -> int:
        """Drafted tokens of the best chain."""
        return expected(self.agreement, self.cost)[1]


Progress = Callable[[int, Found], None]  # trials made, and the best of them


def silent(trials: int, best: Found) -> None:
    """Shows nothing."""


def expected(agreement: float, cost: float, longest: int = LONGEST) -> tuple[float, int]:
    """The speed-up of chains of the best length up to `longest`, and that length. See the module for the formula."""
    tokens, power, best = 1.0, 1.0, (0.0, 1)
    for length in range(1, longest + 1):
        power *= agreement
        tokens += power  # the sum of a^0 .. a^k, which is the fraction, and is defined at a = 1
        best = max(best, (tokens / (length * cost + 1), length), key=lambda each: each[0])
    return best


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
    stop = StopParams(max_new_tokens=new, eos_token_ids=targets.eos_token_ids(target, None))
    with closing(Generation.begin(target, text, Plain(), SamplingParams(), stop)) as generation:
        return [token for _, step in decode(target, [generation]) for token in step.tokens]


def _logits(model: Any, tokens: Sequence[int], last: int) -> torch.Tensor:
    """By one forward: after each of the `last` tokens, [last, vocab]."""
    device = model.get_input_embeddings().weight.device
    keep = {"logits_to_keep": last} if accepts(model, "logits_to_keep") else {}
    with torch.no_grad():
        logits: torch.Tensor = model(**inputs(model, np.array([tokens]), 0, device), use_cache=False, **keep).logits
    return logits[0, -last:]


# ------------------------------------------------------------------------------------------------------ what is kept


def save(target: TransformersTarget, found: Found) -> bool:
    """Keeps what was found for the next process; false where it cannot be written."""
    path, part = _path(target), ""
    content = {
        "format": FORMAT,
        "model": target.name,
        "target": target.fingerprint,
        "skip": str(found.skip),
        "agreement": found.agreement,
        "cost": found.cost,
        "speedup": found.speedup,
        "trials": found.trials,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(prefix=f"{path.stem}.", suffix=".part", dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(part, path)
    except OSError:
        if part:
            Path(part).unlink(missing_ok=True)
        return False
    return True


def saved(target: TransformersTarget) -> Skip | None:
    """What a search has found for this model: nothing to leave out, `Skip()`, where that did not pay.

    None if there was no search, or its file is broken or another's.
    """
    try:
        content = json.loads(_path(target).read_text(encoding="utf-8"))
        if (content["format"], content["model"], content["target"]) != (FORMAT, target.name, target.fingerprint):
            return None
        skip = Skip.parse(content["skip"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return skip if max(skip.attention | skip.mlp, default=0) < target.config.num_hidden_layers else None


def _path(target: TransformersTarget) -> Path:
    """The fingerprint knows shapes, not weights: two models of one shape differ in their names."""
    name = hashlib.sha256(f"{target.name} {target.fingerprint}".encode()).hexdigest()[:16]
    return Place.of(target).path.parent.parent / "skip" / f"{name}.json"


# ------------------------------------------------------------------------------------------------ when drafting stops


class Threshold:
    """The probability of a drafted token below which no further one is drafted, so that enough of them are accepted.

    Draft & Verify, 2309.08168, section 3.4, with the constants of its code (the token that falls below is still part of
    the draft there, so that at least one is always drafted):

        rate  = old rate + (1 - old) accepted / drafted
        aim   = value + step if rate < wanted, else value - step; value itself where the draft was as long as it may be
        value = kept value + (1 - kept) aim

    Args:
        wanted: share of drafted tokens that shall be accepted.
        value: to begin with.
        step: epsilon.
        old: weight of the past in the acceptance rate.
        kept: weight of the past in the value.
        longest: greatest number of drafted tokens, if there is one: such a draft was not ended by the threshold, and
            one that was accepted is no reason to lower it.

    Attributes:
        value: theta, in [0, 1].
        rate: accepted tokens of the drafted ones, of late.
    """

    def __init__(
        self,
        wanted: float = 0.9,
        value: float = 0.8,
        step: float = 0.01,
        old: float = 0.5,
        kept: float = 0.9,
        longest: int | None = None,
    ) -> None:
        for name, each in (("wanted", wanted), ("value", value), ("step", step), ("old", old), ("kept", kept)):
            if not 0 <= each <= 1:
                raise BadParameter(f"{name}={each} is not possible: it must be from 0 to 1")
        self.wanted, self.value, self.rate = wanted, value, 0.0
        self._step, self._old, self._kept, self._longest = step, old, kept, longest

    def learn(self, accepted: int, drafted: int) -> None:
        """A draft was verified; one of no tokens teaches nothing."""
        if drafted < 1:
            return
        self.rate = self._old * self.rate + (1 - self._old) * accepted / drafted
        if self.rate < self.wanted:
            aim = self.value + self._step
        else:
            aim = self.value if drafted == self._longest else self.value - self._step
        self.value = min(max(self._kept * self.value + (1 - self._kept) * aim, 0.0), 1.0)
