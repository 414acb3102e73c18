"""leapahead inside Hugging Face `generate`: the same greedy text in fewer forwards.

    model.generate(**inputs, custom_generate=leapahead.hf.generate, drafter="lookahead", window=15)

    leapahead.hf.run(model, **inputs, streamer=streamer, tokenizer=tokenizer, stop_strings=["\\n\\n"])

Transformers prepares the generation config, the logits processors and the stopping criteria. `generate` replaces the
decoding loop, and decodes every row of the batch as a sequence of its own.

**With a streamer, stop strings or an assistant model, call `run`.** Transformers keeps `streamer`, `tokenizer` and
`assistant_model` from a callable. With `model.generate(..., streamer=..., custom_generate=leapahead.hf.generate)` the
streamer receives the prompt only, and a `TextIteratorStreamer` waits forever. `run`, and the string form of
`custom_generate` (`model.generate(..., custom_generate="FOLDER", trust_remote_code=True)`), take all three.

Which settings of `generation_config` are honoured and which are refused is listed in `hf_fields`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from leapahead.core.errors import BadParameter, Refused
from leapahead.core.parameters import is_left_out, whole
from leapahead.core.stats import Stats
from leapahead.drafters import registry
from leapahead.drafters.base import Drafter, SequenceDrafter
from leapahead.drafters.cache import DrafterCache
from leapahead.engine.request import Handle
from leapahead.inputs import Inputs, encoded_predictions
from leapahead.integrations.hf_batch import Batch
from leapahead.integrations.hf_encoded import encoder_inputs
from leapahead.integrations.hf_engine import ModelEngine, engine_of
from leapahead.integrations.hf_fields import FIELDS, SYNCED, refuse, refuse_cache, refuse_field
from leapahead.integrations.hf_streaming import Streaming, guarded
from leapahead.models.transformers import families
from leapahead.models.transformers.encoder_decoder import refuse_other_inputs

# The options of all built-in drafters by name, without the seed, which is the text's own.
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
    prediction: Any = None,
    stats: list[Stats] | None = None,
    drafter_cache: DrafterCache | bool = True,
    leapahead_streamer: Any = None,
    inputs_tensor: Tensor | None = None,
    **model_kwargs: Any,
) -> Any:
    """The decoding loop for `model.generate(**inputs, custom_generate=leapahead.hf.generate, ...)`.

    Greedy text equals that of Transformers, but in padded batches of models that count the padding, where it is that of
    the row alone. Sampled text has the distribution of Transformers, and with a given seed it is the text of
    `drafter="plain"` with that seed, whatever the batch and the drafter (but "speculative_sampling", which keeps the
    distribution only). It is not the text that Transformers draws, which uses its random numbers in another order.

    A `streamer`, a `tokenizer` (for `stop_strings`, or a `prediction` as text) and an `assistant_model` never reach a
    callable. Use `run` with them.

    Args:
        model, logits_processor, stopping_criteria, generation_config, model_kwargs: as Transformers prepared them.
            Processors must be functions of their arguments. They are called with the prefixes of drafted nodes,
            `([nodes, length], [nodes, vocab])`, all of one row of the batch. Criteria are called with all rows, once
            for each length, `([batch, length], scores)`, but those of Transformers with each row alone. Images, video
            and sound of decoder-only models are read by the model itself, with the prompts of all rows in one forward.
        input_ids: int64 [batch, length], left-padded where `attention_mask` [batch, length] is 0. Of an encoder-decoder
            model, the ids of the decoder, and the mask is that of the encoder's input.
        drafter: what proposes drafts: a registered name (`leapahead drafters` lists them), or a subclass of
            `leapahead.Drafter` or `leapahead.SequenceDrafter`.
        drafter_options: its options by name. Those of the built-in drafters may also be given directly:
            `drafter="lookahead", window=15`. A draft model that is given as a loaded model is kept as long as `model`.
        seed: of the Gumbel noise when sampling: one for each row, or a number, of which row i takes `seed + i`. By
            default they are drawn from torch's generator, so that `torch.manual_seed` (or `set_seed`) makes a run
            repeatable.
        prediction: token ids that the new text is expected to consist of, for all rows, or a list with one (or None)
            for each row. Wrong parts cost time, never text. A drafter that makes no use of it is refused.
        stats: a list that receives one `Stats` for each row.
        drafter_cache: what drafters keep from one call to the next, which changes speed and never text. True keeps it
            as long as the model lives, False keeps nothing. A `DrafterCache` may be shared and saved.
        leapahead_streamer: a streamer of Transformers; what `run` takes as `streamer`.
        inputs_tensor: what Transformers was given: of an encoder-decoder model, the encoder's input, from which
            drafters copy.

    Returns:
        int64 [batch, length + new], rows that end early filled up with `pad_token_id`. With `return_dict_in_generate`,
        a `GenerateDecoderOnlyOutput` or a `GenerateEncoderDecoderOutput`: its `scores` and `logits` are those of
        Transformers, for which the positions behind the end of a row take forwards of their own; its
        `past_key_values` (`cache` in Transformers 5.24) is None, since the KV cache is leapahead's.

    Raises:
        Refused: a setting, processor, input or model that cannot be honoured, by name.
        BadParameter: an unknown drafter or option, an impossible value, an empty prompt.
        ContextOverflow: a prompt that fills the model's context.
    """
    direct = {name: model_kwargs.pop(name) for name in OPTIONS if name in model_kwargs}
    options = {name: value for name, value in direct.items() if value is not None} | dict(drafter_options or {})
    with guarded(leapahead_streamer) as streamer:
        _check(model, drafter, options, stats)
        refuse(model, generation_config, logits_processor, model_kwargs)
        in_float64 = model.dtype == torch.float64
        prepared = input_ids, logits_processor, stopping_criteria, generation_config
        encoded = encoder_inputs(model, model_kwargs, inputs_tensor) if model.config.is_encoder_decoder else None
        batch = Batch(*prepared, model_kwargs, in_float64, encoded)
        seeds = _seeds(seed, len(batch.rows)) if generation_config.do_sample else [0] * len(batch.rows)
        with engine_of(model) as kept:
            found = kept.engine.drafter(drafter, **options)
            if batch.read_once:
                batch.read(model, kept.target, model_kwargs)
            predictions = _predictions(prediction, found, kept, len(batch.rows))
            cache = kept.drafter_cache(drafter_cache)
            streaming = Streaming(streamer, batch)
            requests = [
                row.request(found, row_seed, expected, cache, lambda step: streaming.send())
                for row, row_seed, expected in zip(batch.rows, seeds, predictions, strict=True)
            ]
            handles: list[Handle] = []
            try:
                for request in requests:
                    handles.append(kept.engine.submit(request))
                if stats is not None:
                    stats += [handle.stats for handle in handles]
                kept.engine.run(handles)
            finally:  # where a row is refused, those before it must not stay in the queue
                kept.engine.cancel(*handles)
            sequences = batch.finish(kept.target)
        streaming.end(sequences)
    if not generation_config.return_dict_in_generate:
        return sequences
    scores, logits = batch.stacked("scores"), batch.stacked("logits")
    kind = GenerateEncoderDecoderOutput if encoded is not None else GenerateDecoderOnlyOutput
    return kind(sequences=sequences, scores=scores, logits=logits)


def _check(model: Any, drafter: Any, options: Mapping[str, Any], stats: Any) -> None:
    """Refuses arguments of `generate` that are not possible."""
    if not isinstance(stats, list | None):
        raise BadParameter(f"stats={stats!r} is not possible: it must be a list, which takes the Stats of each row")
    if options.get("draft") is model:
        raise BadParameter("the model cannot be its own draft model; use draft='self:first=N' or draft='self:skip'")
    if drafter == "draft_model" and not is_left_out(learned := options.get("learned")):
        raise Refused(
            f"learned={learned!r} is not supported by leapahead.hf: it is written when an engine is closed, which "
            "leapahead.hf does not do; use leapahead.LLM"
        )


def _showing_options(function: Any) -> inspect.Signature:
    """The signature of a function with every option of the built-in drafters.

    Transformers passes on only those arguments that it finds there by name.
    """
    shown = inspect.signature(function)
    *named, rest = shown.parameters.values()
    options = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in OPTIONS]
    return shown.replace(parameters=[*named, *options, rest])


generate.__signature__ = _showing_options(generate)  # type: ignore[attr-defined]


def run(
    model: Any,
    inputs: Tensor | None = None,
    generation_config: Any = None,
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
    """`model.generate` through leapahead, with the arguments that Transformers keeps from a callable.

        leapahead.hf.run(model, **inputs, streamer=TextStreamer(tokenizer))
        leapahead.hf.run(model, **inputs, tokenizer=tokenizer, stop_strings=["\\n\\n"])

    The string form of `custom_generate` calls this.

    Args:
        model: a model of Transformers, or one with PEFT adapters.
        inputs: int64 [batch, length], or `input_ids` in `kwargs`.
        generation_config: as in `model.generate`.
        drafter, drafter_options: see `generate`; the options of any drafter may also be given directly.
        streamer: receives the prompt, then the tokens, as in Transformers. It is ended also where the call fails, so
            that a thread that reads a `TextIteratorStreamer` never waits forever.
        tokenizer: needed for `stop_strings`, and for a `prediction` that is text.
        assistant_model: a loaded model that drafts: the option `draft` of the drafters that take one.
        synced_gpus, assistant_tokenizer: refused.
        kwargs: everything else that `model.generate` takes, and the other arguments of `generate`.

    Returns:
        What `generate` returns.

    Raises:
        As `generate`.
    """
    kwargs["generation_config"] = generation_config
    with guarded(streamer) as ended:
        if not (language_model := families.language_model(model)).can_generate():
            raise BadParameter(f"a {type(model).__name__} cannot generate; load the model with AutoModelForCausalLM")
        refuse_other_inputs(language_model)
        if assistant_tokenizer is not None:
            raise Refused("assistant_tokenizer is not supported: a draft model must have the target's tokenizer")
        if synced_gpus:
            raise Refused(SYNCED)
        if kwargs.pop("custom_generate", None) not in (None, generate):  # where this has replaced `model.generate`
            raise Refused("custom_generate is not supported by leapahead.hf.run, which passes its own")
        if kwargs.get("cache_implementation") == "paged":  # Transformers would not call `generate`
            refuse_field("cache_implementation", "paged")
        refuse_field("token_healing", _effective(model, kwargs, "token_healing"))
        if kwargs.get("past_key_values") is not None:  # which Transformers 5.24 renames
            refuse_cache("past_key_values")
        _take_stop_strings(model, kwargs, tokenizer)
        if tokenizer is not None and (given := kwargs.get("prediction")) is not None:
            kwargs["prediction"] = encoded_predictions(given, tokenizer)
        # Not by position: speech and image models have another first parameter, PEFT has none.
        named = "input_ids" if "input_ids" in inspect.signature(type(language_model).generate).parameters else "inputs"
        return type(model).generate(
            model,
            **({} if inputs is None else {named: inputs}),
            custom_generate=generate,
            drafter=drafter,
            drafter_options={**_taken_options(drafter, kwargs, assistant_model), **(drafter_options or {})},
            leapahead_streamer=ended,
            **kwargs,
        )


def _taken_options(drafter: Any, kwargs: dict[str, Any], assistant_model: Any) -> dict[str, Any]:
    """Takes the drafter's options out of `kwargs`; an assistant model becomes the option `draft`."""
    known = registry.options(registry.load(drafter) if isinstance(drafter, str) else drafter)
    names = known.keys() - FIELDS - {"seed"}  # these are the text's own
    options = {name: kwargs.pop(name) for name in list(kwargs) if name in names}
    if assistant_model is not None:
        if "draft" not in known:
            raise BadParameter(f"assistant_model cannot be used by drafter {drafter!r}; use auto or draft_model")
        options["draft"] = assistant_model
    return options


def _effective(model: Any, kwargs: Mapping[str, Any], field: str) -> Any:
    """The value of a field of the generation config, by the priorities of Transformers."""
    if field in kwargs:
        return kwargs[field]
    configs = (kwargs.get("generation_config"), getattr(model, "generation_config", None))
    return next((value for config in configs if (value := getattr(config, field, None)) is not None), None)


def _take_stop_strings(model: Any, kwargs: dict[str, Any], tokenizer: Any) -> None:
    """Turns `stop_strings` into a criterion, since Transformers keeps the tokenizer from callables."""
    strings = _effective(model, kwargs, "stop_strings")
    if strings is None:
        return
    if tokenizer is None:
        raise BadParameter(f"stop_strings={strings!r} need the tokenizer; pass tokenizer=...")
    criteria = list(kwargs.get("stopping_criteria") or ())
    if not any(type(each) is StopStringCriteria for each in criteria):  # which takes precedence in Transformers
        criteria.append(StopStringCriteria(tokenizer, strings))
    kwargs["stopping_criteria"] = StoppingCriteriaList(criteria)
    if getattr(kwargs.get("generation_config"), "stop_strings", None) is not None:
        kwargs["generation_config"] = copy.deepcopy(kwargs["generation_config"])
        kwargs["generation_config"].stop_strings = None
    kwargs.pop("stop_strings", None)
    if getattr(model.generation_config, "stop_strings", None) is not None:
        kwargs["stop_strings"] = None  # overrides the model's own


def _seeds(seed: int | Sequence[int] | None, rows: int) -> list[int]:
    """The seed of each row."""
    if seed is None:
        return [int(each) for each in torch.randint(0, 2**63 - 1, (rows,), dtype=torch.int64)]
    if isinstance(seed, (list, tuple)):
        if len(seed) != rows:
            raise BadParameter(f"seed has {len(seed)} numbers and the batch {rows} rows; give one number for each row")
        return list(seed)
    first = whole("seed", seed, most=2**64 - 1)
    return [(first + row) % 2**64 for row in range(rows)]


def _predictions(given: Any, drafter: Drafter, kept: ModelEngine, rows: int) -> list[tuple[int, ...]]:
    """The prediction of each row."""
    if isinstance(given, Tensor):
        given = given.tolist()
    if any(isinstance(each, str) for each in (given if isinstance(given, (list, tuple)) else [given])):
        raise BadParameter(
            "a prediction as text needs a tokenizer, which Transformers keeps from custom_generate; call "
            "leapahead.hf.run with tokenizer=..., or give the prediction's token ids"
        )
    return Inputs(kept.target.info, None, ()).predictions(given, rows, drafter)
