"""The files of a trained head, in the formats that are published (see `leapahead.drafters.heads.config`).

    EAGLE-3    speculators: `transformer_layer_config`, `eagle_aux_hidden_state_layer_ids`, perhaps d2t and t2d; and of
               P-EAGLE `mask_token_id`
    DFlash     speculators: `transformer_layer_config`, `aux_hidden_state_layer_ids`, `mask_token_id`, `block_size`,
               and of DFlash 2 `conv_kernel_size`, `conv_group_size`, `selector_rank`, `selector_top_k`
    EAGLE      EAGLE's own: the configuration of one Llama layer
    Medusa     vLLM's: "model_type": "medusa", lm_heads.{k} and, of a draft vocabulary, token_map
    Hydra      Hydra's own configuration, and of Hydra++ `transformer_layer_config`; token_map as Medusa

The embedding and the output layer of EAGLE, DFlash and DFlash 2 are not written: they are the target's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leapahead.drafters.heads import checkpoint
from leapahead.drafters.heads.config import (
    DFLASH,
    DFLASH2,
    EAGLE,
    EAGLE3,
    HYDRA,
    HYDRA_ARCHITECTURES,
    HYDRA_PREFIX,
    HYDRAS,
    MEDUSA,
    PEAGLE,
    TYPE,
    BlocksConfig,
    DFlash2Config,
    DFlashConfig,
    EagleConfig,
)
from leapahead.training.evaluate import DEPTH
from leapahead.training.recipe import Recipe


def export(recipe: Recipe, folder: Path) -> None:
    """Writes `config.json` and `model.safetensors`, in the precision of the target.

    Raises:
        BadParameter: the folder cannot be written.
    """
    checkpoint.write(folder, config_of(recipe), tensors_of(recipe))


def tensors_of(recipe: Recipe) -> dict[str, Tensor]:
    """What `model.safetensors` holds."""
    dtype = recipe.target.output.dtype
    found = {name: each.detach().to("cpu", dtype) for name, each in recipe.parameters.items()}
    ids, kind = recipe.vocabulary, recipe.config.kind
    if kind in (MEDUSA, *HYDRAS) and ids is not None:
        found["token_map"] = ids.cpu()
    if kind in (EAGLE3, PEAGLE) and ids is not None:  # vLLM refuses them beside a complete vocabulary
        own = ids.cpu()
        found["d2t"] = own - torch.arange(len(own))
        found["t2d"] = torch.zeros(recipe.target.vocab_size, dtype=torch.bool).index_fill_(0, own, True)
    return found


def config_of(recipe: Recipe) -> dict[str, Any]:
    """What `config.json` holds."""
    makers: dict[str, Callable[[Recipe, Any], dict[str, Any]]]
    makers = {MEDUSA: _medusa, EAGLE: _eagle, EAGLE3: _eagle3, HYDRA: _hydra, HYDRA_PREFIX: _hydra, DFLASH: _dflash}
    makers |= {DFLASH2: _dflash2, PEAGLE: _parallel}
    return {**makers[recipe.config.kind](recipe, recipe.config), "torch_dtype": _dtype(recipe)}


def _medusa(recipe: Recipe, config: BlocksConfig) -> dict[str, Any]:
    return {
        "architectures": ["MedusaModel"],
        "model_type": MEDUSA,
        "num_heads": config.depths,
        "num_hidden_layers": config.blocks,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.draft_vocab_size,
        "medusa_fc_bias": config.bias,
        "original_lm_head": False,
        "base_model_name_or_path": config.target,
    }


def _eagle(recipe: Recipe, config: EagleConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        **(config.decoder or {}),
        "bias": config.bias,
        "base_model_name_or_path": config.target,
    }


def _hydra(recipe: Recipe, config: BlocksConfig) -> dict[str, Any]:
    architecture = next(name for name, kind in HYDRA_ARCHITECTURES.items() if kind == config.kind)
    found = {
        "hydra_num_heads": config.depths,
        "hydra_num_layers": config.blocks,
        "hydra_head_arch": architecture,
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "vocab_size": config.vocab_size,
        "base_model_name_or_path": config.target,
    }
    return found | ({"transformer_layer_config": dict(config.decoder)} if config.decoder else {})


def _eagle3(recipe: Recipe, config: EagleConfig) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": list(config.layers),
        **_speculators(recipe, DEPTH),
    }


def _parallel(recipe: Recipe, config: EagleConfig) -> dict[str, Any]:
    found = {**_eagle3(recipe, config), **_speculators(recipe, config.depths)}
    return {**found, "architectures": ["PEagleSpeculator"], "mask_token_id": config.mask_token}


def _dflash(recipe: Recipe, config: DFlashConfig) -> dict[str, Any]:
    return {
        "architectures": ["DFlashSpeculator"],
        "aux_hidden_state_layer_ids": list(config.layers),
        "mask_token_id": config.mask_token,
        "block_size": config.depths + 1,
        "sample_from_anchor": False,
        **_speculators(recipe, config.depths),
    }


def _dflash2(recipe: Recipe, config: DFlash2Config) -> dict[str, Any]:
    return {
        **_dflash(recipe, config),
        "architectures": ["DFlash2DraftModel"],
        "conv_kernel_size": config.taps,
        "conv_group_size": config.group,
        "selector_rank": config.selector_rank,
        "selector_top_k": config.candidates,
        "sliding_window_non_causal": True,
    }


def _speculators(recipe: Recipe, tokens: int) -> dict[str, Any]:
    """What heads in the format of speculators share; `tokens` are drafted by its usual method."""
    config = recipe.config
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    architectures = getattr(recipe.target.config, "architectures", None) or [type(recipe.target.model).__name__]
    return {
        TYPE: config.kind,
        "draft_vocab_size": config.draft_vocab_size,
        "speculators_config": {
            "algorithm": config.kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": config.target, "architectures": list(architectures)},
        },
        "transformer_layer_config": dict(config.decoder or {}),
    }


def _dtype(recipe: Recipe) -> str:
    return str(recipe.target.output.dtype).removeprefix("torch.")
