"""Makes a loaded head of a checkpoint, beside its target, whose embedding and output layer it may share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from leapahead.core.errors import BadParameter, LeapaheadError, Refused
from leapahead.drafters.heads import networks
from leapahead.drafters.heads.block_head import BlockHead
from leapahead.drafters.heads.config import (
    DFLASH,
    DFLASH2,
    DSPARK,
    EAGLE,
    EAGLE3,
    HYDRA,
    HYDRA_PREFIX,
    LAST,
    MEDUSA,
    MTP,
    PEAGLE,
    SPACE,
    HeadConfig,
)
from leapahead.drafters.heads.dflash_head import DFlash2Head, DFlashHead
from leapahead.drafters.heads.head import Head
from leapahead.drafters.heads.hydra_head import HydraHead
from leapahead.drafters.heads.mtp import MtpHead
from leapahead.drafters.heads.parallel_head import ParallelHead
from leapahead.drafters.heads.row_head import RowHead
from leapahead.models.base import TargetInfo
from leapahead.models.transformers.families import text_config
from leapahead.models.transformers.linears import PackedLinear, is_packed, pack, weight_of

HEADS: dict[str, type[Head]] = {
    MEDUSA: BlockHead,
    EAGLE: RowHead,
    EAGLE3: RowHead,
    PEAGLE: ParallelHead,
    HYDRA: HydraHead,
    HYDRA_PREFIX: HydraHead,
    DFLASH: DFlashHead,
    DFLASH2: DFlash2Head,
    DSPARK: DFlashHead,
    MTP: MtpHead,
}


def load(config: HeadConfig, tensors: dict[str, Tensor], target: Any, name: str) -> Head:
    """A head beside its target.

    Args:
        config, tensors: of the checkpoint.
        target: that it drafts for. A head without an embedding or an output layer of its own uses the target's.
        name: of the head, for messages.

    Raises:
        LeapaheadError: it was made for another target, or tensors are missing or of the wrong shape.
    """
    info: TargetInfo = target.info
    _check(config, info, name)
    network = _network(target)
    if network is None and (layers := config.layers_of(info.layers)) != (LAST,):
        raise Refused(
            f"the head {name} reads the hidden states of layers {', '.join(map(str, layers))}, and {info.name} gives "
            "those of the last one only; use a model of Transformers, or a Medusa head"
        )
    tensors = dict(tensors)
    offsets = _offsets(tensors, config, name)
    device, dtype = _place(target, network)
    tensors = {key: each.to(device, dtype) for key, each in tensors.items()}
    if config.kind == HYDRA_PREFIX and config.decoder is None:
        config = replace(config, decoder=_decoder(network, info.name, name))
    with _named(name), torch.device("meta"):
        module: Any = networks.make(config)
    shared = _shared(module, tensors, target, name, device)
    tensors |= shared
    _check_tensors(module, tensors, name)
    with _named(name):  # a rotary embedding is computed, so its size must be known to be that of the tensors
        for place, each in list(module.named_modules()):
            if isinstance(each, LlamaRotaryEmbedding):
                module.set_submodule(place, LlamaRotaryEmbedding(each.config).to(device))
        if config.kind == MTP:
            module.rotary.to(device)
    module.load_state_dict(tensors, strict=False, assign=True)
    module.d2t = offsets
    module.requires_grad_(False).eval()
    if network is not None and is_packed(network):
        _pack(module, network, shared)
    return HEADS[config.kind](config, module, info, name)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Turns what Transformers and PyTorch raise of odd fields of a head's configuration into one error."""
    try:
        yield
    except LeapaheadError:
        raise
    except Exception as error:  # of whatever class
        what = f"{type(error).__name__}: {shorten(str(error), 200)}"
        raise BadParameter(
            f"the head {name} cannot be made of its config.json ({what}); a field has a wrong value"
        ) from error


def _offsets(tensors: dict[str, Tensor], config: HeadConfig, name: str) -> Tensor | None:
    """What is added to the head's token ids to get the target's, taken out of the tensors; None for nothing."""
    given = {own: tensors.pop(own) for own in ("d2t", "token_map") if own in tensors}
    for own, each in given.items():
        if each.dim() != 1 or not len(each) or each.is_floating_point() or each.is_complex():
            raise BadParameter(
                f"the head {name} has {own} of shape {list(each.shape)} and type {each.dtype}, where one whole number "
                "for each of its tokens was expected; the file is broken"
            )
    if (mapped := given.get("token_map")) is not None:  # vLLM's Medusa: target ids, not offsets
        return mapped - torch.arange(len(mapped))
    if "d2t" not in given and 0 < config.draft_vocab_size < config.vocab_size:
        raise BadParameter(
            f"the head {name} lacks the tensor d2t, which tells the {config.draft_vocab_size} of {config.vocab_size} "
            "tokens that it can propose; the file is incomplete"
        )
    return given.get("d2t")


def _pack(module: torch.nn.Module, network: Any, shared: dict[str, Tensor]) -> None:
    """Packs a head as its target is. An output layer that is the target's is taken as it lies there, not copied."""
    output = network.get_output_embeddings()
    for name in shared:
        layer = name.removesuffix(".weight")
        if isinstance(output, PackedLinear) and isinstance(module.get_submodule(layer), torch.nn.Linear):
            module.set_submodule(layer, output)
    pack(module)


def probes(config: HeadConfig, tensors: dict[str, Tensor], target: Any, name: str) -> tuple[int, ...]:
    """Adds the embeddings of probes to a target.

    Args:
        config, tensors: of the checkpoint.
        target: that they draft for, which `AddsEmbeddings`.
        name: of the head, for messages.

    Returns:
        Their ids in the target, one for each depth: those of SPACE are the same.

    Raises:
        LeapaheadError: they were made for another target, or it does not take them.
    """
    info: TargetInfo = target.info
    _check(config, info, name)
    if extra := sorted(tensors.keys() - {"embeddings.weight"}):
        raise Refused(f"the head {name} has the tensor {extra[0]}, which is not known; it is of another kind")
    ids = target.add_embeddings(tensors["embeddings.weight"])
    return (ids[0],) * config.depths if config.kind == SPACE else tuple(ids)


def _check(config: HeadConfig, info: TargetInfo, name: str) -> None:
    for what, own, expected in (
        ("hidden states of width", config.target_hidden_size, info.hidden_size),
        ("a vocabulary of", config.vocab_size, info.vocab_size),
    ):
        if own and expected and own != expected:
            trained = f"; it was trained for {config.target}" if config.target not in ("", None, info.name) else ""
            raise BadParameter(
                f"the head {name} expects {what} {own}, and the target {info.name} has {expected}{trained}; use a head "
                "that was trained for this target"
            )
    config.layers_of(info.layers)


def _network(target: Any) -> Any:
    """The model of a target of Transformers; None for the others."""
    found = getattr(target, "model", None)
    return found if isinstance(found, torch.nn.Module) else None


def _place(target: Any, network: Any) -> tuple[torch.device, torch.dtype]:
    """Where the head computes, and in which type: as a target of Transformers, or in float32 on the CPU."""
    if network is None:
        return torch.device("cpu"), torch.float32
    return torch.device(target.device), next(each.dtype for each in network.parameters() if each.is_floating_point())


def _decoder(network: Any, target: str, name: str) -> dict[str, Any]:
    """The fields of the decoder layer of a head whose file does not tell them, since it is one of the target's."""
    found = None if network is None else text_config(network)
    if found is None or found.model_type != "llama":
        raise Refused(
            f"the head {name} has a decoder layer of its target's shape, and {target} has no layers of type llama; use "
            "a head that was trained for this target"
        )
    return dict(found.to_dict())


def _shared(
    module: torch.nn.Module, tensors: dict[str, Tensor], target: Any, name: str, device: torch.device
) -> dict[str, Tensor]:
    """The embedding and the output layer of the target, for a head that has none of its own.

    They are copied to the head's device where they lie on another one, as those of a target on several devices do.
    """
    network, title = _network(target), target.info.name
    gathered = getattr(target, "whole_weight", None)  # of a target whose weights are divided among processes
    expected = module.state_dict().keys()
    wanted = {
        own: of
        for own, of in (
            ("embed_tokens.weight", "get_input_embeddings"),
            ("lm_head.weight", "get_output_embeddings"),
            ("lm_heads.0.weight", "get_output_embeddings"),
        )
        if own in expected and own not in tensors
    }
    if not wanted:
        return {}
    if network is None:
        raise Refused(
            f"the head {name} has no {' and no '.join(sorted(wanted))} of its own, and uses those of a model of "
            f"Transformers, which {title} is not; use a head that has them"
        )
    found = {}
    for own, of in wanted.items():
        weight = weight_of(getattr(network, of)()) if gathered is None else gathered(of)
        if weight is None or weight.is_meta:
            raise Refused(
                f"the head {name} has no {own} of its own, and the target {title} shows none, as where it is "
                "offloaded; load the target where it fits, or use a head that has one"
            )
        found[own] = weight.detach().to(device)
    return found


def _check_tensors(module: torch.nn.Module, tensors: dict[str, Tensor], name: str) -> None:
    expected = {key: tuple(each.shape) for key, each in module.state_dict().items() if "rotary." not in key}
    if missing := sorted(expected.keys() - tensors.keys()):
        raise BadParameter(f"the head {name} lacks the tensor {missing[0]}; the file is incomplete")
    if extra := sorted(tensors.keys() - expected.keys()):
        raise Refused(f"the head {name} has the tensor {extra[0]}, which is not known; it is of another kind")
    for key, shape in expected.items():
        if tuple(tensors[key].shape) != shape:
            raise BadParameter(
                f"the head {name} has {key} of shape {list(tensors[key].shape)}, where {list(shape)} was expected"
            )
