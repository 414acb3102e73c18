"""Trained heads with random weights for a tiny model, and what they compute without cache, tree or batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from leapahead.drafters.heads import checkpoint, modules
from leapahead.drafters.heads.config import DFLASH2, DFLASHES, DSPARK, HYDRA_PREFIX, HYDRAS, MEDUSA, TYPE, DFlashConfig
from leapahead.drafters.heads.dflash import DFlash
from leapahead.drafters.heads.hydra import Hydra
from leapahead.drafters.sources.head import HeadSource

EVERY = 1 << 20  # candidates
LAYERS: dict[str, tuple[int, ...]] = {"medusa": (-1,), "eagle": (-1,), "eagle3": (0, 1, 2), "peagle": (0, 1, 2)}
LAYERS |= {"hydra": (-1,), "hydra++": (-1,), "dflash": (1, 2), "dflash2": (0, 2), "dspark": (0, 1)}
ANY_LAYER = "layers.0.mlp.up_proj.weight"
# That a head needs.
A_TENSOR = {"medusa": "blocks.1.layers.1.weight", "eagle": ANY_LAYER, "eagle3": ANY_LAYER, "peagle": "norm.weight"}
A_TENSOR |= {"hydra": "blocks.1.0.residual.weight", "hydra++": "prefix.layers.0.mlp.up_proj.weight"}
A_TENSOR |= {"dflash": ANY_LAYER, "dspark": "markov_head.markov_w2.weight"}
A_TENSOR |= {"dflash2": "layers.1.mlp_conv.kernel_projection.weight"}
DECODER = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def config_of(kind: str, vocabulary: int, **changes: Any) -> dict[str, Any]:
    """A `config.json` for a head of the tiny model."""
    decoder = {**DECODER, "vocab_size": vocabulary}
    found: dict[str, dict[str, Any]] = {
        "medusa": {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": 2, "vocab_size": vocabulary},
        "eagle": decoder,
        "eagle3": {
            TYPE: "eagle3",
            "transformer_layer_config": {**decoder, "num_hidden_layers": 2},
            "eagle_aux_hidden_state_layer_ids": list(LAYERS["eagle3"]),
        },
        "peagle": {
            TYPE: "peagle",
            "transformer_layer_config": {**decoder, "num_hidden_layers": 2},
            "eagle_aux_hidden_state_layer_ids": list(LAYERS["peagle"]),
            "mask_token_id": 3,
            "speculators_config": {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}]},
        },
        "hydra": {"hydra_num_heads": 3, "grounded_heads": True, "base_model_name_or_path": "tiny"},
    }
    found["hydra++"] = {**found["hydra"], "hydra_head_arch": "prefix-mlp", "transformer_layer_config": decoder}
    for name in DFLASHES:
        found[name] = {
            TYPE: name,
            "transformer_layer_config": {**decoder, "model_type": "qwen3", "num_hidden_layers": 2},
            "aux_hidden_state_layer_ids": list(LAYERS[name]),
            "block_size": 4,
            "mask_token_id": 3,
            "sample_from_anchor": name == "dspark",
        }
    found["dflash2"] |= {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 6, "selector_top_k": 5}
    return {**found[kind], **changes}


def tensors_of(
    kind: str, vocabulary: int, drafted: int = 0, size: int = 32, **variant: bool
) -> dict[str, torch.Tensor]:
    """Random weights of a head, whose vocabulary has every second token if `drafted` says how many it has.

    Args:
        size: of the target's hidden states; another one for Medusa only.
        variant: fields of the configuration.
    """
    random = torch.Generator().manual_seed(len(kind))
    rows = drafted or vocabulary

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random) * 0.4

    if kind == MEDUSA:
        found = {f"blocks.{k}.layers.{j}.weight": matrix(size, size) for k in range(3) for j in range(2)}
        return {**found, **{f"lm_heads.{k}.weight": matrix(rows, size) for k in range(3)}}
    if kind in HYDRAS:
        return _hydra(kind, matrix, size, vocabulary)
    if kind in DFLASHES:
        return _dflash(kind, matrix, size, vocabulary)
    layers, wide = (1, 1) if kind == "eagle" else (2, 2)
    found = {"fc.weight": matrix(size, (2 if kind == "eagle" else 3) * size)}
    for layer in range(layers):
        width = size * (wide if layer == 0 else 1)
        found |= _layer(f"layers.{layer}.", matrix, size, width)
        if kind != "eagle":
            found[f"layers.{layer}.input_layernorm.weight"] = 1 + matrix(size)
    if kind == "peagle":
        found["mask_hidden"] = matrix(1, 1, 3 * size)
    if kind != "eagle":
        found |= {"norm.weight": 1 + matrix(size), "lm_head.weight": matrix(rows, size)}
        found |= {"layers.0.hidden_norm.weight": 1 + matrix(size), "embed_tokens.weight": matrix(vocabulary, size)}
        if variant.get("norm_before_fc"):
            found["input_norm.weight"] = 1 + matrix(3 * size)
        if variant.get("fc_norm"):
            found |= {f"fc_norm.{each}.weight": 1 + matrix(size) for each in range(3)}
        if variant.get("norms_heads"):
            for layer in range(2):
                found |= {f"layers.{layer}.self_attn.{name}_norm.weight": 1 + matrix(8) for name in "qk"}
        if drafted:
            found["d2t"] = torch.arange(drafted)  # token i is the target's 2 i
    return found


Matrix = Callable[..., torch.Tensor]


def _layer(prefix: str, matrix: Matrix, size: int, width: int) -> dict[str, torch.Tensor]:
    """A decoder layer without its first norm, whose attention reads vectors of this width."""
    found = {f"{prefix}post_attention_layernorm.weight": 1 + matrix(size)}
    for name, out, into in (("q", 32, width), ("k", 16, width), ("v", 16, width), ("o", size, 32)):
        found[f"{prefix}self_attn.{name}_proj.weight"] = matrix(out, into)
    for name, out, into in (("gate", 48, size), ("up", 48, size), ("down", size, 48)):
        found[f"{prefix}mlp.{name}_proj.weight"] = matrix(out, into)
    return found


def _hydra(kind: str, matrix: Matrix, size: int, vocabulary: int) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for k in range(3):
        found |= {f"blocks.{k}.0.{each}.weight": matrix(size, (k + 2) * size) for each in ("linear", "residual")}
        found |= {f"blocks.{k}.0.{each}.bias": matrix(size) for each in ("linear", "residual")}
        found |= {f"blocks.{k}.1.linear.weight": matrix(size, size), f"blocks.{k}.1.linear.bias": matrix(size)}
        found |= {f"lm_heads.{k}.weight": matrix(vocabulary, size), f"lm_heads.{k}.bias": matrix(vocabulary)}
    if kind == HYDRA_PREFIX:
        found |= _layer("prefix.layers.0.", matrix, size, size)
        found |= {f"prefix.{name}.weight": 1 + matrix(size) for name in ("norm", "layers.0.input_layernorm")}
    return found


def _dflash(kind: str, matrix: Matrix, size: int, vocabulary: int) -> dict[str, torch.Tensor]:
    found = {"fc.weight": matrix(size, 2 * size)}
    for layer in range(2):
        found |= _layer(f"layers.{layer}.", matrix, size, size)
        found |= {f"layers.{layer}.self_attn.{name}_norm.weight": 1 + matrix(8) for name in "qk"}
        found[f"layers.{layer}.input_layernorm.weight"] = 1 + matrix(size)
    found |= {"norm.weight": 1 + matrix(size), "hidden_norm.weight": 1 + matrix(size)}
    if kind == DFLASH2:
        for name in (f"layers.{layer}.{part}_conv" for layer in range(2) for part in ("attention", "mlp")):
            found[f"{name}.base_kernel"] = matrix(2, 2, size)
            found[f"{name}.kernel_projection.weight"] = matrix(8, size)  # 2 convolutions of 2 taps in 2 groups
        found |= {f"candidate_selector.{name}_codebook": matrix(vocabulary, 6) for name in ("predecessor", "successor")}
        found["candidate_selector.hidden_projection.weight"] = 4 * matrix(6, size)
    if kind == DSPARK:
        found |= {"markov_head.markov_w1.weight": matrix(vocabulary, 6)}
        found |= {"markov_head.markov_w2.weight": 4 * matrix(vocabulary, 6)}
        found |= {"confidence_head.proj.weight": matrix(1, size + 6), "confidence_head.proj.bias": matrix(1)}
    return found


def write(folder: Path, kind: str, vocabulary: int, drafted: int = 0, size: int = 32, **variant: bool) -> Path:
    """A folder with a head of random weights; arguments as of `tensors_of`."""
    changes = {name: value for name, value in variant.items() if name in ("norm_before_residual", "norm_output")}
    tensors = tensors_of(kind, vocabulary, drafted, size, **variant)
    checkpoint.write(folder, config_of(kind, vocabulary, **changes), tensors)
    return folder


def causal(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@lru_cache(maxsize=64)  # many paths are compared after each text
def hidden_states(model: Any, tokens: tuple[int, ...]) -> Sequence[torch.Tensor]:
    """Those of one forward over the text, before every layer and after the last one; the model's weights are fixed."""
    with torch.no_grad():
        return tuple(model(torch.tensor([tokens]), output_hidden_states=True).hidden_states)


@torch.no_grad()
def recomputed(model: Any, module: Any, layers: Sequence[int], tokens: Sequence[int], path: Sequence[int]) -> Any:
    """The head's logits after a path, from one forward of the target over the text and none of its caches.

    Returns:
        float64 [draft vocabulary].
    """
    states = states_of(model, layers, tokens)
    if isinstance(module, Hydra):
        states = module.read(states, torch.arange(len(tokens) - 1)[None], causal)[0, -1]
        return module.one(len(path), states, torch.tensor([tokens[-1], *path])).double().numpy()
    if isinstance(module, DFlash):
        return of_block(module, states, tokens, path).double().numpy()
    if isinstance(module, modules.Medusa):
        return module.one(len(path), states[0, -1]).double().numpy()
    if isinstance(module, modules.ParallelEagle):
        return of_masks(module, states, tokens, path).double().numpy()
    return module.logits(after(model, module, tuple(layers), tuple(tokens), tuple(path))[0, -1]).double().numpy()


@lru_cache(maxsize=256)  # many paths begin alike
def after(
    model: Any, module: Any, layers: tuple[int, ...], tokens: tuple[int, ...], path: tuple[int, ...]
) -> torch.Tensor:
    """What an EAGLE head computes at every place of the text and of the path, [1, places, width]."""
    states = module.fuse(states_of(model, layers, tokens))
    drafted = [after(model, module, layers, tokens, path[:depth])[:, -1:] for depth in range(len(path))]
    rows = torch.tensor([[*tokens[1:], *path]])
    found: torch.Tensor = module(rows, torch.cat((states, *drafted), dim=1), torch.arange(rows.shape[1])[None], causal)
    return found


def states_of(model: Any, layers: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """The target's hidden states of all tokens but the last one, those of several layers side by side."""
    every = hidden_states(model, tuple(tokens[:-1]))
    return torch.cat([every[layer] for layer in layers], dim=-1)


def of_block(module: DFlash, states: torch.Tensor, tokens: Sequence[int], path: Sequence[int]) -> torch.Tensor:
    """The logits after a path of one block, whose layers attend to all that is before it and to the block."""
    last = len(tokens) - 1
    context = module.context(states, torch.arange(last)[None])

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = (torch.cat(each, dim=2) for each in zip(context[layer], (k, v), strict=True))
        mask = visible(module.config, layer, q.shape[2], last)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)

    block = torch.tensor([[tokens[-1], *[module.config.mask_token] * (module.rows - 1)]])
    found = module(block, torch.arange(last, last + module.rows)[None], attend)[0]
    row = found[len(path) + module.rows - module.config.depths]
    return module.one(row, torch.tensor([*tokens, *path][-1]))


def of_masks(module: Any, states: torch.Tensor, tokens: Sequence[int], path: Sequence[int]) -> torch.Tensor:
    """P-EAGLE's logits after a path: those of the last committed row, or of the mask at that depth behind it."""
    rows = torch.tensor([[*tokens[1:], *[module.config.mask_token] * len(path)]])
    masked = module.fuse(module.mask_hidden).expand(-1, len(path), -1)
    given = torch.cat((module.fuse(states), masked), dim=1)
    found: torch.Tensor = module.logits(module(rows, given, torch.arange(rows.shape[1])[None], causal)[0, -1])
    return found


def visible(config: DFlashConfig, layer: int, rows: int, last: int) -> torch.Tensor:
    """What the rows of a block see behind `last` committed ones, bool [rows, last + rows]."""
    mask = torch.ones(rows, last + rows, dtype=torch.bool)
    is_sliding = layer in config.sliding
    if config.causal or (is_sliding and config.sliding_causal):  # JetSpec's is causal
        mask = mask.tril(last)
    if is_sliding:
        mask[:, : max(0, last - config.window)] = False
    return mask


class Computed(NamedTuple):
    """Candidates that a head gave during decoding.

    Attributes:
        tokens: of the text at that time.
        path: after which they are.
        candidates: target's token -> log-probability among those that were kept.
    """

    tokens: tuple[int, ...]
    path: tuple[int, ...]
    candidates: Mapping[int, float]


def recording(monkeypatch: Any) -> list[Computed]:
    """Records every candidate list that a draft forward of a head gives from now on."""
    found: list[Computed] = []
    draft = HeadSource.draft.__func__  # type: ignore[attr-defined]

    def recorded(cls: Any, wanted: Sequence[tuple[HeadSource, Sequence[tuple[int, ...]]]]) -> Any:
        forward = draft(cls, wanted)
        for source, paths in wanted:
            reached = [path + (0,) * depth for path in paths for depth in range(source.reach(path))]
            if getattr(source.head.config, "is_chained", False):  # candidates after the likeliest of the depth before
                keys: Any = source._rows
                reached = [key[1:] if len(key) < 2 else (0,) * (key[0] - 1) + key[1:] for key in keys]
            for path in reached:
                candidates = {each.token: each.logp for each in source.candidates(path, EVERY)}
                found.append(Computed(tuple(source.text.tokens), path, candidates))
        return forward

    monkeypatch.setattr(HeadSource, "draft", classmethod(recorded))
    return found


def worst(found: Sequence[Computed], model: Any, module: Any, layers: Sequence[int], ids: np.ndarray) -> float:
    """The greatest difference of a log-probability from the recomputed one.

    Args:
        ids: the target's id of each token of the head's vocabulary.
    """
    errors = [0.0]
    for computed in found:
        logits = recomputed(model, module, layers, computed.tokens, computed.path)
        own = dict(zip(ids.tolist(), logits.tolist(), strict=True))
        values = np.array([own[token] for token in computed.candidates])
        values -= np.log(np.exp(values - values.max()).sum()) + values.max()
        errors.append(float(np.abs(values - np.array([*computed.candidates.values()])).max()))
        best = sorted(own.values())[-len(values) :]
        errors.append(float(abs(min(best) - min(own[token] for token in computed.candidates))))
    return max(errors)
