"""Lookahead decoding inside Hugging Face `generate`, with exactly the text that it would have produced.

    model.generate(**inputs, custom_generate=leapahead.hf.generate, drafter="lookahead", window=15)

Transformers prepares everything (`generation_config`, logits processors, stopping criteria) and hands it to `generate`
below, which decodes every row of the batch as a sequence of its own. Left padding is taken off for the target and shown
to processors and criteria, which read what they would have read in Transformers.

    input_ids            row 0   p p p a b c     pads | prompt      the target, the drafter and positions: prompt + new
                         row 1   d e f g h i                        processors, criteria: pads + prompt + new
    sequences            row 0   p p p a b c | x y E p p            rows that ended early are padded with pad_token_id
                         row 1   d e f g h i | u v w x E

What of `generation_config` is honoured and what is refused stands in `hf_fields`. Three arguments of `model.generate`
never reach a callable, because Transformers drops them: `streamer`, `assistant_model` and `tokenizer` (so that it
refuses `stop_strings` by itself). `run`, and the string form of `custom_generate`, take them under their own names.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary, proxy

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from leapahead.core.errors import BadParameter, Refused
from leapahead.core.stats import Stats
from leapahead.drafters import registry
from leapahead.drafters.base import Drafter, SequenceDrafter
from leapahead.drafters.cache import DrafterCache
from leapahead.engine.scheduler import Engine
from leapahead.integrations.hf_batch import Batch, Streaming
from leapahead.integrations.hf_fields import FIELDS, SYNCED, refuse, refuse_field
from leapahead.models.transformers.model import TransformersTarget

# Of all built-in drafters, by name; a seed is the text's own.
OPTIONS = sorted({each for name in registry.BUILT_IN for each in registry.options(registry.load(name))} - {"seed"})


def generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Sequence[Any],
    stopping_criteria: Sequence[Any],
    generation_config: Any,
    *,
    drafter: str | type[Drafter] | type[SequenceDrafter] = "auto",
    drafter_options: Mapping[str, Any] | None = None,
    seed: int | Sequence[int] | None = None,
    stats: list[Stats] | None = None,
    drafter_cache: DrafterCache | bool = True,
    leapahead_streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """The decoding loop for `model.generate(**inputs, custom_generate=leapahead.hf.generate, ...)`.

    Greedy text equals that of Transformers. Sampled text has the distribution of Transformers, and with a given seed it
    is the text of `drafter="plain"` with that seed, whatever the drafter and the batch; it is another text than the one
    that Transformers draws, whose random numbers are used in another order.

    Args:
        model, logits_processor, stopping_criteria, generation_config, model_kwargs: as Transformers prepared them.
            Processors must be functions of their arguments; they are called with the prefixes of drafted nodes,
            `([nodes, length], [nodes, vocab])`, all of one row of the batch. Criteria are called after every token of
            every row with that row alone, `([1, length], scores)`.
        input_ids: int64 [batch, length], left-padded where `attention_mask` [batch, length] is 0.
        drafter: what proposes drafts: a registered name (`leapahead drafters` lists them), or a subclass of
            `leapahead.Drafter` or `leapahead.SequenceDrafter`.
        drafter_options: its options by name. Those of the built-in drafters (`leapahead drafters` lists them) may also
            be given directly: `drafter="lookahead", window=15`.
        seed: of the Gumbel noise when sampling: one for each row, or a number, of which row i takes `seed + i`. By
            default they are drawn from torch's generator, so that `torch.manual_seed` (or `set_seed`) makes a run
            repeatable.
        stats: a list that receives one `Stats` for each row.
        drafter_cache: what drafters learn from one call for the next, which changes speed and never text. True keeps it
            as long as the model lives, False keeps nothing; a `DrafterCache` may be shared and saved.
        leapahead_streamer: a Transformers streamer. Transformers withholds its own `streamer` argument from callables;
            `run` takes it under its own name.

    Returns:
        int64 [batch, length + new], or, with `return_dict_in_generate`, a `GenerateDecoderOnlyOutput`: `scores` and
        `logits` as Transformers gives them (what it would have computed for rows that had ended already is computed
        too, by forwards of their own); `past_key_values` is None, since the cache is the target's.

    Raises:
        Refused: a setting, processor, input or model that cannot be honoured, by name.
        BadParameter: an unknown drafter or option, an impossible value, an empty prompt.
        ContextOverflow: a prompt that fills the model's context.
    """
    direct = {name: model_kwargs.pop(name) for name in OPTIONS if name in model_kwargs}
    options = {name: value for name, value in direct.items() if value is not None} | dict(drafter_options or {})
    registry.make(drafter, **options)  # refuses what is not possible before anything is computed
    refuse(model, generation_config, logits_processor, model_kwargs)
    in_float64 = model.dtype == torch.float64
    batch = Batch(input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs, in_float64)
    seeds = _seeds(seed, len(batch.rows)) if generation_config.do_sample else [0] * len(batch.rows)
    streaming = Streaming(leapahead_streamer, batch)
    with _served(model) as served:
        found = served.engine.drafter(drafter, **options)
        cache = served.drafter_cache if drafter_cache is True else drafter_cache or None
        requests = [
            row.request(found, row_seed, cache, lambda step: streaming.columns())
            for row, row_seed in zip(batch.rows, seeds, strict=True)
        ]
        handles = [served.engine.submit(request) for request in requests]
        if stats is not None:
            stats += [handle.stats for handle in handles]
        served.engine.run(handles)
        sequences = batch.finish(served.target)
    streaming.end(sequences)
    if not generation_config.return_dict_in_generate:
        return sequences
    return GenerateDecoderOnlyOutput(
        sequences=sequences, scores=batch.stacked("scores"), logits=batch.stacked("logits")
    )


def _showing_options(function: Any) -> inspect.Signature:
    """Its signature with every option of the built-in drafters: Transformers passes on what it finds there by name."""
    shown = inspect.signature(function)
    *named, rest = shown.parameters.values()
    options = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in OPTIONS]
    return shown.replace(parameters=[*named, *options, rest])


generate.__signature__ = _showing_options(generate)  # type: ignore[attr-defined]


def run(
    model: Any,
    inputs: Tensor | None = None,
    *,
    drafter: str | type[Drafter] | type[SequenceDrafter] = "auto",
    drafter_options: Mapping[str, Any] | None = None,
    streamer: Any = None,
    tokenizer: Any = None,
    synced_gpus: bool | None = None,
    assistant_model: Any = None,
    assistant_tokenizer: Any = None,
    **kwargs: Any,
) -> Any:
    """`model.generate` through leapahead, with the arguments that a `custom_generate` callable never sees.

    `leapahead.hf.run(model, **inputs, tokenizer=tokenizer, stop_strings=["\\n\\n"], streamer=TextStreamer(tokenizer))`.
    The string form of `custom_generate` calls this.

    Args:
        model: a Transformers model.
        inputs: int64 [batch, length], or `input_ids` in `kwargs`.
        drafter, drafter_options: see `generate`; the options of any drafter may also be given directly.
        streamer: gets the prompt, then the tokens, then `end`, as in Transformers.
        tokenizer: needed for `stop_strings`.
        assistant_model: a loaded model that drafts: the option `draft` of the drafters that take one.
        synced_gpus, assistant_tokenizer: refused.
        kwargs: everything else that `model.generate` takes, and the other arguments of `generate`.

    Returns:
        What `generate` returns.

    Raises:
        As `generate`.
    """
    if assistant_tokenizer is not None:
        raise Refused(
            "assistant_tokenizer is not supported by leapahead.hf: a draft model must have the target's tokenizer"
        )
    if synced_gpus:
        raise Refused(SYNCED)
    if kwargs.pop("custom_generate", None) not in (None, generate):  # where this has replaced `model.generate`
        raise Refused("custom_generate is not supported by leapahead.hf.run: it would replace leapahead itself")
    if kwargs.get("cache_implementation") == "paged":  # Transformers would not even ask us
        refuse_field("cache_implementation", "paged")
    refuse_field("token_healing", _effective(model, kwargs, "token_healing"))
    _take_stop_strings(model, kwargs, tokenizer)
    known = registry.options(registry.load(drafter) if isinstance(drafter, str) else drafter)
    direct = known.keys() - FIELDS - {"seed"}  # these are the text's own
    options = {name: kwargs.pop(name) for name in list(kwargs) if name in direct}
    if assistant_model is not None:
        if "draft" not in known:
            raise BadParameter(f"assistant_model cannot be used by drafter {drafter!r}; use auto or draft_model")
        options["draft"] = assistant_model
    return type(model).generate(
        model,
        inputs,
        custom_generate=generate,
        drafter=drafter,
        drafter_options={**options, **(drafter_options or {})},
        leapahead_streamer=streamer,
        **kwargs,
    )


def _effective(model: Any, kwargs: Mapping[str, Any], field: str) -> Any:
    """The value of a field of the generation config, by the priorities of Transformers."""
    if field in kwargs:
        return kwargs[field]
    configs = (kwargs.get("generation_config"), getattr(model, "generation_config", None))
    return next((value for config in configs if (value := getattr(config, field, None)) is not None), None)


def _take_stop_strings(model: Any, kwargs: dict[str, Any], tokenizer: Any) -> None:
    """Turns `stop_strings` into a criterion, since Transformers withholds the tokenizer from callables."""
    strings = _effective(model, kwargs, "stop_strings")
    if strings is None:
        return
    if tokenizer is None:
        raise BadParameter(f"stop_strings={strings!r} need the tokenizer; pass tokenizer=...")
    kwargs["stopping_criteria"] = [*(kwargs.get("stopping_criteria") or ()), StopStringCriteria(tokenizer, strings)]
    kwargs["stopping_criteria"] = StoppingCriteriaList(kwargs["stopping_criteria"])
    if getattr(kwargs.get("generation_config"), "stop_strings", None) is not None:
        kwargs["generation_config"] = copy.deepcopy(kwargs["generation_config"])
        kwargs["generation_config"].stop_strings = None
    kwargs.pop("stop_strings", None)
    if getattr(model.generation_config, "stop_strings", None) is not None:
        kwargs["stop_strings"] = None  # overrides the model's own


def _seeds(seed: int | Sequence[int] | None, rows: int) -> list[int]:
    """One for each row."""
    if seed is None:
        return [int(each) for each in torch.randint(0, 2**63 - 1, (rows,), dtype=torch.int64)]
    if isinstance(seed, (list, tuple)):
        if len(seed) != rows:
            raise BadParameter(
                f"seed has {len(seed)} numbers and the batch {rows} rows; give one for each, or one in all"
            )
        return list(seed)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise BadParameter(f"seed={seed!r} is not possible: it must be a whole number from 0 to 2**64 - 1")
    return [(seed + row) % 2**64 for row in range(rows)]


class _Served:
    """What is kept for one model between calls: its engine, and what its drafters have learned.

    The target refers to the model weakly, so both are released with the model. Nothing that was computed from weights
    is kept while no call is running, so weights may change between calls.

    Args:
        shape: device, dtype, attention and configuration that the target was made and tested for.
    """

    def __init__(self, model: Any, shape: object) -> None:
        config = model.config.get_text_config(decoder=True)
        self.target = TransformersTarget(proxy(model), name=config.name_or_path or type(model).__name__)
        self.engine, self.drafter_cache, self.shape = Engine(self.target, max_batch=ALL_ROWS), DrafterCache(), shape
        vocab_size = self.target.info.vocab_size
        self.drafter_cache.belong(f"vocabulary of {vocab_size}", vocab_size)
        self.calls = 0
        self.training: list[torch.nn.Module] = []


ALL_ROWS = 1 << 16  # the rows of a call are decoded together, however many they are
_kept: WeakKeyDictionary[torch.nn.Module, _Served] = WeakKeyDictionary()
_lock = Lock()


@contextmanager
def _served(model: Any) -> Iterator[_Served]:
    """The model's engine, shared by the calls of all threads; the model is in evaluation mode meanwhile.

    `generate` is a function that is given a model, so what belongs to the model is found by the model itself.
    """
    config = model.config.get_text_config(decoder=True)
    shape = (model.device, model.dtype, config._attn_implementation, config.to_json_string())
    with _lock:
        found = _kept.get(model)
        training = [part for part in model.modules() if part.training]
        model.eval()
        try:
            if found is None or found.shape != shape:
                found = _kept[model] = _Served(model, shape)
        except BaseException:
            _restore(training)
            raise
        if found.calls == 0:
            found.training = training
            found.target.forget()
        found.calls += 1
    try:
        yield found
    finally:
        with _lock:
            found.calls -= 1
            if found.calls == 0:
                found.target.forget()
                _restore(found.training)
                found.training = []


def _restore(training: list[torch.nn.Module]) -> None:
    for part in training:
        part.training = True
