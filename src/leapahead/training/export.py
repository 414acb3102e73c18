"""The files of a trained head, in the formats that are published (see `leapahead.drafters.heads.config`).

    EAGLE-3    speculators: `transformer_layer_config`, `eagle_aux_hidden_state_layer_ids`, perhaps d2t and t2d
    EAGLE      EAGLE's own: the configuration of one Llama layer
    Medusa     vLLM's: "model_type": "medusa", lm_heads.{k} and, of a draft vocabulary, token_map

The embedding and EAGLE's output layer are not written: they are the target's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leapahead.drafters.heads import checkpoint
from leapahead.drafters.heads.config import EAGLE, EAGLE3, MEDUSA, TYPE
from leapahead.training.evaluate import DEPTH
from leapahead.training.recipes import Recipe


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
    if kind == MEDUSA and ids is not None:
        found["token_map"] = ids.cpu()
    if kind == EAGLE3 and ids is not None:  # vLLM refuses them beside a complete vocabulary
        own = ids.cpu()
        found["d2t"] = own - torch.arange(len(own))
        found["t2d"] = torch.zeros(recipe.target.vocab_size, dtype=torch.bool).index_fill_(0, own, True)
    return found


def config_of(recipe: Recipe) -> dict[str, Any]:
    """What `config.json` holds."""
    return {MEDUSA: _medusa, EAGLE: _eagle, EAGLE3: _speculators}[recipe.config.kind](recipe)


def _medusa(recipe: Recipe) -> dict[str, Any]:
    config = recipe.config
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
        "torch_dtype": _dtype(recipe),
    }


def _eagle(recipe: Recipe) -> dict[str, Any]:
    config = recipe.config
    return {
        "architectures": ["LlamaForCausalLM"],
        **(config.decoder or {}),
        "bias": config.bias,
        "base_model_name_or_path": config.target,
        "torch_dtype": _dtype(recipe),
    }


def _speculators(recipe: Recipe) -> dict[str, Any]:
    config = recipe.config
    proposal = {"proposal_type": "greedy", "speculative_tokens": DEPTH, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    architectures = getattr(recipe.target.config, "architectures", None) or [type(recipe.target.model).__name__]
    return {
        "architectures": ["Eagle3Speculator"],
        TYPE: EAGLE3,
        "draft_vocab_size": config.draft_vocab_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": list(config.layers),
        "speculators_config": {
            "algorithm": EAGLE3,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": config.target, "architectures": list(architectures)},
        },
        "transformer_layer_config": dict(config.decoder or {}),
        "torch_dtype": _dtype(recipe),
    }


def _dtype(recipe: Recipe) -> str:
    return str(recipe.target.output.dtype).removeprefix("torch.")
