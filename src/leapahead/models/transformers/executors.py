"""Chooses how a model is run: the most able executor that gives the model's own logits in the self-test.

What a model does not pass is kept, with the reason, for reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from leapahead.core.errors import BadLogits, LeapaheadError, Refused, first_line
from leapahead.core.tree import UNLIMITED, IntArray
from leapahead.models.base import BRANCHES, CHAIN
from leapahead.models.transformers import devices, exacttest, families, grouped, selftest, statetest
from leapahead.models.transformers.arguments import accepts, takes_cache
from leapahead.models.transformers.exact import ExactCache, ExactExecutor
from leapahead.models.transformers.forward import (
    CachedExecutor,
    ChainExecutor,
    Executor,
    Layers,
    MaskedExecutor,
)
from leapahead.models.transformers.kv_cache import KVCache
from leapahead.models.transformers.recurrent import NativeExecutor
from leapahead.models.transformers.replay import ReplayExecutor, own_settings
from leapahead.models.transformers.states import stateful_cache
from leapahead.models.transformers.static.exact import CapturedExactExecutor
from leapahead.models.transformers.static.executor import StaticExecutor
from leapahead.models.transformers.twin import twin

EXACT_DEVICES = ("cpu", "cuda")
BY_TOKEN = "token by token"

Named = tuple[str, Callable[[], Executor]]  # what an executor gives, and what makes it


def executors(model: Any, exclusive: bool, usual_length: int) -> Iterator[Named]:
    """What may fit a model, from the most able to the least.

    Args:
        exclusive: whether nobody else runs the model.
        usual_length: of the rows of its cache.
    """
    config = families.text_config(model)
    patterns = families.patterns(config)
    if patterns is not None and not model._is_stateful:
        yield from _without_states(model, patterns, exclusive, lambda: KVCache(usual_length))
    if families.is_recurrent(model) and (beside := families.patterns(config, recurrent=True)) is not None:
        yield from _with_states(model, beside, exclusive, usual_length)
    yield BY_TOKEN, lambda: NativeExecutor(model, config, shared=False)
    yield "token by token, one session at a time", lambda: NativeExecutor(model, config, shared=True)


def _without_states(
    model: Any, patterns: dict[str, families.Pattern], exclusive: bool, cache: Callable[[], KVCache]
) -> Iterator[Named]:
    implementation, config = families.attention_implementation(model), families.text_config(model)
    if not takes_cache(model):
        return
    if accepts(model, "position_ids") and not families.counts_slots(config):
        if exclusive and grouped.fits(implementation, model.get_input_embeddings().weight.device):
            name = "trees by a boolean mask, attention grouped and packed"
            yield name, lambda: MaskedExecutor(model, cache(), patterns, True, config)
        if families.MASKS[implementation]:
            yield "trees by a boolean mask", lambda: MaskedExecutor(model, cache(), patterns, True)
        yield "trees by an additive mask", lambda: MaskedExecutor(model, cache(), patterns, False)
    yield "chains", lambda: ChainExecutor(model, cache())


def _with_states(
    model: Any, patterns: dict[str, families.Pattern], exclusive: bool, usual_length: int
) -> Iterator[Named]:
    """For models with recurrent layers; these are the patterns of their attention layers."""

    def build(boolean: bool, config: Any, masked: bool, settings: bool = False) -> Executor:
        cache = stateful_cache(model, usual_length)
        return ReplayExecutor(model, cache, patterns, boolean, config, masked, settings)

    own = families.text_config(model)
    implementation, device = own._attn_implementation, model.get_input_embeddings().weight.device
    boolean = families.MASKS.get(implementation)
    config = own if exclusive and grouped.fits(implementation, device) else None
    what = "chains with replay" + ("" if config is None else ", attention grouped")
    if boolean is not None and accepts(model, "attention_mask"):
        if exclusive or not own_settings(model):
            yield f"{what}, with settings for drafts", lambda: build(bool(boolean), config, True, True)
        if config is not None:
            yield what, lambda: build(True, config, True)
        yield "chains with replay", lambda: build(bool(boolean), None, True)
    yield "chains with replay, one session at a time", lambda: build(True, None, False)


def first_logits(model: Any, name: str) -> Tensor:
    """A model's logits for one token, to know their width and device.

    Args:
        name: of the model, for the messages.

    Raises:
        Refused: its first weights are nowhere, or it takes other inputs.
        BadLogits: they are not finite.
    """
    if model.device.type == "meta":
        raise Refused(
            f"the first weights of {name} are on the meta device, as where they are offloaded; load the model where "
            "they fit, for example with device_map='cpu'"
        )
    try:
        logits = selftest.own_logits(model, selftest.ONE_TOKEN)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise Refused(
            f"{name} does not give logits for token ids alone ({first_line(error)}); load a causal language model, as "
            "AutoModelForCausalLM does"
        ) from error
    if logits.isnan().any() or logits.isposinf().any():
        raise BadLogits(f"{name} gives NaN or infinite logits for a single token; try dtype float32")
    return logits


def own_outputs(model: Any, hidden_states: bool) -> selftest.OwnOutputs:
    """A model's own values for the tests.

    Args:
        hidden_states: with those of all layers, if the model gives any. A copy of the model computes them, since the
            first output of hidden states installs hooks for good.
    """
    if not hidden_states:
        return selftest.OwnOutputs(model)
    try:
        copied = twin(model)
        return selftest.OwnOutputs(model, copied, *selftest.layers_of(copied, selftest.ONE_TOKEN))
    except Exception as error:  # also where memory ran out, which the logits may not need
        return selftest.OwnOutputs(model, refusal=first_line(error))


def tested(
    model: Any, name: str, ids: IntArray, every: Iterable[Named], own: selftest.OwnOutputs
) -> tuple[Executor, dict[str, str]]:
    """The first of the executors that gives the model's own logits, and why those before it do not.

    Args:
        name: of the model, for the message.
        ids: token ids without a special meaning.
        own: the model's own values.

    Raises:
        Refused: none of them does, or the model is an encoder.
    """
    config, refusals = families.text_config(model), dict[str, str]()
    if others := families.other_layers(config):
        refusals["drafts"] = f"layers of the kind {', '.join(others)} select or compress what they attend to"
    # Only a cached token is final where attention is sparse by ranks, or where the model has a state.
    plain = families.patterns(config) is None or model._is_stateful
    for kind, build in every:
        if kind == BY_TOKEN and not plain:
            _refuse_encoder(own, name, ids)
        try:
            executor = build()
            is_native = isinstance(executor, NativeExecutor)
            cached = NativeExecutor(model, config, shared=True) if plain and is_native else None
            result = selftest.run(executor, own, ids, test_prompts(model), cached, _native(executor))
            if result.passed and isinstance(executor, ReplayExecutor):
                statetest.check(executor, model, ids, result.tolerance)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            name_of_error = "" if isinstance(error, LeapaheadError) else f"{type(error).__name__}: "
            refusals[kind] = name_of_error + first_line(error)
            continue
        if result.passed:
            if BRANCHES in executor.capabilities and (reason := _refusal_of_branches(model, ids, executor)):
                executor.capabilities -= {BRANCHES}
                refusals[BRANCHES] = reason
            return executor, refusals
        refusals[kind] = f"logits differ by {result.error:.2g} standard deviations"
    tried = "; ".join(f"{kind}: {reason}" for kind, reason in refusals.items())
    raise Refused(f"{name} cannot be decoded exactly ({_instability(own, ids)}{tried})")


def _refuse_encoder(own: selftest.OwnOutputs, name: str, ids: IntArray) -> None:
    """Refuses a model whose tokens attend to later ones: token by token it would write a text, but not its own.

    Raises:
        Refused: it is one.
    """
    try:
        is_encoder = selftest.reads_ahead(own, ids)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # the executors' tests name it
        return
    if is_encoder:
        remedy = (
            "" if getattr(own.model.config, "is_decoder", True) else ", or set is_decoder in the config of a decoder"
        )
        raise Refused(
            f"{name} is no causal language model: its logits change with later tokens, as those of an encoder "
            f"({own.model.__class__.__name__}); load a causal language model{remedy}"
        )


def _instability(own: selftest.OwnOutputs, ids: IntArray) -> str:
    """For the end of a refusal: how far a model in full precision is from itself, where that is more than rounding."""
    try:
        noise = selftest.own_noise(own.model, ids) if own.precision in selftest.FULL else 0.0
    except Exception:  # the refusal names it
        return ""
    if noise <= selftest.FULL_CEILING:
        return ""
    return (
        f"its own logits change by {noise:.2g} standard deviations with the rows that are computed beside them, as "
        "where activations are quantised by their range, while weights alone may be quantised; "
    )


def tested_exact(model: Any, name: str, ids: IntArray, usual_length: int) -> ExactExecutor:
    """The executor of exact mode, if it gives the model's own logits, and the same bits whatever is drafted.

    Args:
        model: that nobody else runs.
        name: of the model, for the message.
        ids: token ids without a special meaning.
        usual_length: of the rows of its cache.

    Raises:
        Refused: it does not.
    """
    config = families.text_config(model)
    try:
        patterns = families.patterns(config)
        there = devices.of(model)
        if len(there) > 1 or there[0].type not in EXACT_DEVICES:
            on = " and ".join(map(str, there))
            raise Refused(f"exact mode is for models on the CPU or on one CUDA device; this one is on {on}")
        if patterns is None or model._is_stateful or not (accepts(model, "position_ids") and takes_cache(model)):
            raise Refused("not all of its layers are attention over a KV cache with positions and masks that are given")
        executor = ExactExecutor(model, ExactCache(usual_length), patterns)
        result = selftest.run(
            executor, selftest.OwnOutputs(model), ids, test_prompts(model), floor=exacttest.floor(model.dtype)
        )
        if not result.passed:
            raise Refused(f"logits differ from its own by {result.error:.2g} standard deviations")
        exacttest.check(executor, ids)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        what = first_line(error)
        if not isinstance(error, LeapaheadError):
            what = f"its layers do not work with the attention of exact mode: {type(error).__name__}: {what}"
        raise Refused(f"{name} cannot be decoded in exact mode ({what}); leave out exact") from error
    return executor


def no_drafts(model: Any, executor: Executor, refusals: dict[str, str]) -> str:
    """Why a model takes no drafts; "" where it takes some, or where its recurrent state is why none were tested.

    Args:
        refusals: see `tested`.
    """
    tests = [reason for kind, reason in refusals.items() if kind.startswith("chains")]
    if CHAIN in executor.capabilities:
        return ""
    if "drafts" in refusals or (families.is_recurrent(model) and not tests):
        return refusals.get("drafts", "")
    return f"drafts fail the test of the model: {[*tests, 'they are not tested'][0]}"


def manner(executor: Executor) -> str:
    """How an executor runs forwards, where that makes their time another, for fingerprints."""
    kinds = {ExactExecutor: " exact", StaticExecutor: " captured", CapturedExactExecutor: " exact captured"}
    return kinds.get(type(executor), "")


def _refusal_of_branches(model: Any, ids: IntArray, executor: Any) -> str:
    """Why an executor should not be given drafts with branches; "" if it should."""
    if executor.device.type == "cpu":
        return "they cost more than they bring on a CPU, where two rows of three tokens take 1.4 times one row of six"
    try:
        prompts = test_prompts(model)[:1]
        result = selftest.run(
            executor, selftest.OwnOutputs(model), ids, prompts, native=_native(executor), branches=True
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"
    return "" if result.passed else f"logits differ by {result.error:.2g} standard deviations"


def tested_layers(own: selftest.OwnOutputs, ids: IntArray, executor: Executor) -> tuple[Layers, str]:
    """The layers whose hidden states an executor gives as the model itself does, and why it gives none.

    Args:
        own: the model's own values. The executor is tested on the copy of the model that computes them.
    """
    if not isinstance(executor, CachedExecutor) or not own.layers:
        return (), own.refusal if isinstance(executor, CachedExecutor) else ""
    try:
        another = executor.another(own.copied)
        prompts = test_prompts(own.model)
        result = selftest.run(another, own, ids, prompts, native=_native(another), layers=own.layers)
        another.forget()
    except Exception as error:  # also where memory ran out: drafts without hidden states need less
        return (), first_line(error)
    return (own.layers, "") if result.hidden else ((), "they differ from the model's own")


def test_prompts(model: Any) -> tuple[int, int]:
    """The lengths of the prompts of the self-test; small attention windows and convolutions are left behind."""
    recurrent = families.is_recurrent(model)
    patterns = families.patterns(families.text_config(model), recurrent) or {}
    reaches = [each.window or each.chunk or UNLIMITED for each in patterns.values()]
    return max((reach for reach in reaches if reach <= 24), default=13 if recurrent else 1) + 3, 1


def _native(executor: Executor) -> NativeExecutor | None:
    """For the test of an executor of chains with recurrent states."""
    if not isinstance(executor, ReplayExecutor):
        return None
    return NativeExecutor(executor.model, families.text_config(executor.model), shared=False)
