"""Checkpoints of tiny models with MTP modules, and what the modules compute without our cache, tree or batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from architectures import BY_NAME, SIZES, Architecture, sharpen
from heads import Computed
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3ForCausalLM, Glm4MoeForCausalLM, PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from leapahead.drafters.heads import mtp as our_mtp

COMPARED = 30  # lists of candidates
MELLUM = {
    **{name: size for name, size in SIZES.items() if name != "intermediate_size"},
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "head_dim": 8,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_mtp_layers": 1,
    "mtp_layer_types": ["sliding_attention"],
    "mtp_mlp_layer_types": ["sparse"],
}
OF_MELLUM = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "post_norm": "norm"}


def published(state: dict[str, torch.Tensor], model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Weights of modules by the names of checkpoints: DeepSeek's, as layers behind the model's own, or Mellum's."""
    mellum, first = model.config.model_type in ("mellum", *our_mtp.UNTOLD), int(model.config.num_hidden_layers)
    found = {}
    for name, tensor in state.items():
        if not name.startswith("layers."):
            continue
        _, layer, rest = name.split(".", 2)
        part = rest.split(".")[0]
        if mellum and part in OF_MELLUM:
            found[f"mtp.{rest.replace(part, OF_MELLUM[part])}"] = tensor.clone()
            continue
        rest = rest.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        before = "mtp.layers.0." if mellum else f"model.layers.{first + int(layer)}."
        if rest == "mlp.experts.gate_up_proj":
            for index, both in enumerate(tensor):
                for which, own in zip(("gate", "up"), both.chunk(2), strict=True):
                    found[f"{before}mlp.experts.{index}.{which}_proj.weight"] = own.clone()
        elif rest == "mlp.experts.down_proj":
            found |= {f"{before}mlp.experts.{index}.down_proj.weight": own.clone() for index, own in enumerate(tensor)}
        else:
            found[before + rest] = tensor.clone()
    return found


def write(folder: Path, name: str, modules: int, complete: bool = True) -> Path:
    """A folder with a tiny model of an architecture, and so many MTP modules of random weights.

    Args:
        complete: whether their weights are written.
    """
    architecture = BY_NAME[name] if name != "mellum" else Architecture("mellum", "Mellum", options=MELLUM)
    model = architecture.build()
    setattr(model.config, our_mtp.UNTOLD.get(model.config.model_type, "num_mtp_layers"), modules)
    model.save_pretrained(folder)
    if complete:
        torch.manual_seed(1)
        weights = load_file(folder / "model.safetensors")
        with our_mtp._told(model.config):
            weights |= published(sharpen(MtpModel(model, modules)).state_dict(), model)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def load(folder: Path, patch: Any) -> PreTrainedModel:
    """The model of a folder, in float32: Transformers computes experts in no wider type.

    Transformers knows which layers are modules by their numbers in the published models, which have more layers.
    """
    for kind in (Glm4MoeForCausalLM, DeepseekV3ForCausalLM):
        patch.setattr(kind, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.[2-9]\..*"])
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
    return loaded.eval()


@torch.no_grad()
def recomputed(model: Any, modules: MtpModel, tokens: Sequence[int], path: Sequence[int]) -> np.ndarray:
    """The logits after a path, float64 [vocab], from one forward of the model over the text and Transformers' modules.

    Module k reads the tokens from the one k + 1 places further on. Below the last module, its outputs are appended.
    """
    rows, count = len(tokens) - 1, len(modules.layers)
    states = model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states[-1]
    text = torch.tensor([[*tokens, *path]])

    def run(layer: int, states: torch.Tensor) -> torch.Tensor:
        at = torch.arange(layer + 1, layer + 1 + states.shape[1])[None]
        cache = MtpCache(config=modules.config)
        found: torch.Tensor = modules.forward_layer(layer, states, at, cache, input_ids=text[:, at[0]])
        return found

    for layer in range(min(len(path), count - 1) + 1):
        before, states = states, run(layer, states)
    while before.shape[1] < rows + len(path) - layer:
        before = torch.cat((before, states[:, -1:]), dim=1)
        states = run(layer, before)
    return np.asarray(modules.shared_head(states[0, -1]).double())


def worst(found: Sequence[Computed], model: Any) -> float:
    """The greatest difference of a candidate's log-probability, among those that are kept, from the recomputed one.

    Of many lists of candidates, some are compared.
    """
    greatest = 0.0
    with our_mtp._told(model.config):
        modules = MtpModel.from_pretrained(model).eval()
    for each in found[:: 1 + len(found) // COMPARED]:
        logits = recomputed(model, modules, each.tokens, each.path)
        values = logits[[*each.candidates]]
        values = values - np.log(np.exp(values - values.max()).sum()) - values.max()
        greatest = max(greatest, float(np.abs(values - np.array([*each.candidates.values()])).max()))
        left_out = np.delete(logits, [*each.candidates])
        greatest = max(greatest, float(left_out.max(initial=-np.inf) - logits[[*each.candidates]].min()))
    return greatest
