"""What the tests of training share: a tiny random model, its greedy texts, and a training of a few steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from leapahead import LLM
from leapahead.bench.conditions import silent
from leapahead.training import decoding, recipes
from leapahead.training.batches import Order, batch_of
from leapahead.training.features import Online, TrainingTarget
from leapahead.training.loop import Training, Watch
from leapahead.training.recipe import Recipe
from leapahead.training.settings import Settings
from leapahead.training.student import Student
from leapahead.training.texts import Text

VOCABULARY = 64
KINDS = ("medusa", "eagle", "eagle3", "peagle", "hydra", "hydra++", "dflash", "dflash2")
QUIET = Watch(silent, lambda line: None)


def model_of(seed: int = 0) -> Any:
    """A llama of two layers that writes for ever."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def small_model(vocabulary: int = VOCABULARY) -> Any:
    """A llama of one layer with random weights, as a draft model."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.4,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return LlamaForCausalLM(config).eval()


def texts_of(model: Any, count: int = 24) -> list[Text]:
    """Greedy texts, some of a single token of prompt."""
    llm = LLM(model, drafter="plain")
    prompts = [[1 + (7 * number + place) % 60 for place in range(1 + number % 5)] for number in range(count)]
    results = llm.generate(prompts, max_new_tokens=20)
    llm.close()
    return [Text(number, result.prompt_tokens, result.tokens) for number, result in enumerate(results)]


def settings_of(kind: str, **more: Any) -> Settings:
    rate = 2e-2 if kind in ("dflash", "dflash2", "eagle", "peagle") else 5e-3  # those of Muon are greater
    given = {"kind": kind, "data": "prompts.jsonl", "steps": 30, "batch": 4, "lr": rate, **more}
    return Settings(**given).complete(32)


def made(
    target: TrainingTarget, texts: Sequence[Text], settings: Settings, path: Path, **more: Any
) -> tuple[Recipe, Training]:
    own = recipes.recipe(target, settings, texts)
    batches = partial(
        batch_of,
        features=Online(target, own.layers),
        prompt_tokens=settings.prompt_tokens,
        width=target.hidden_size,
    )
    order = Order(texts, settings.batch, settings.seed)
    return own, Training(own, order, batches, settings, path, **more)


def stopping(after: int) -> Callable[[], Any]:
    """Interrupts that come after so many steps."""

    @contextmanager
    def interrupts() -> Iterator[Callable[[], bool]]:
        left = iter([False] * after)
        yield lambda: next(left, True)

    return interrupts


def trained_chains(
    training: Training, student: Student, target: Any, texts: list[Text], folder: Path
) -> tuple[float, float, dict[str, Any]]:
    """The acceptance length with chains of a draft model of one forward a step, before its training and after, and the
    options of the drafter that has the trained one."""
    lengths = []
    given: dict[str, Any] = {"drafter": "draft_model"}
    for name in ("before", "after"):
        if name == "after":
            training.run(QUIET)
        student.save(folder / name)
        given["draft"] = str(folder / name)
        (found,) = decoding.evaluations(target, None, {"all": texts}, silent, "", 1, **given)
        lengths.append(found.chain)
    return lengths[0], lengths[1], given
