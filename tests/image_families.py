"""Tiny random models that take images or sounds beside text, and prompts for them as their processors would make them.

A row of a prompt is a list of token ids and images; an image is a `Picture` and takes as many placeholder tokens as the
model's encoder gives vectors for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import transformers
from architectures import MIXED, SIZES, sharpen
from torch import Tensor

IMAGE, VIDEO, BEGIN, END, PAD = 110, 111, 112, 113, 0
TEXT = {**SIZES, "bos_token_id": None, "eos_token_id": None, "head_dim": 8}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SQUARE = {**VISION, "image_size": 8, "patch_size": 4}  # four patches
LARGE = {**VISION, "image_size": 16, "patch_size": 4}  # sixteen, of which a family puts four together


class Picture(NamedTuple):
    """An image of random values.

    Attributes:
        seed: of the values.
        wide: whether it is wider than others, in the families whose images have different sizes.
    """

    seed: int
    wide: bool = False


@dataclass(frozen=True)
class Family:
    """A kind of model.

    Attributes:
        config: name of its configuration class, without "Config".
        options: for the configuration.
        encode: the inputs beside the tokens, of the pictures of each row.
        count: the placeholder tokens of a picture.
        model: name of its class, where that is not the configuration's with "ForConditionalGeneration".
    """

    config: str
    options: dict[str, Any]
    encode: Callable[[Sequence[Sequence[Picture]]], dict[str, Tensor]]
    count: Callable[[Picture], int]
    types: str = ""
    model: str = ""
    ids: dict[str, int] = field(default_factory=lambda: {"image_token_id": IMAGE})

    @property
    def installed(self) -> bool:
        return hasattr(transformers, f"{self.config}Config")

    def build(self, seed: int = 0) -> Any:
        """The model, with weights whose logits are not flat."""
        config = getattr(transformers, f"{self.config}Config")(**self.options, **self.ids)
        torch.manual_seed(seed)
        kind = getattr(transformers, self.model or f"{self.config}ForConditionalGeneration")
        return sharpen(kind(config).eval())

    def inputs(self, *rows: Sequence[int | Picture]) -> dict[str, Tensor]:
        """What the family's processor would give for these rows, padded on the left."""
        ids = []
        for row in rows:
            ids.append(
                [t for each in row for t in ([IMAGE] * self.count(each) if isinstance(each, Picture) else [each])]
            )
        longest = max(map(len, ids))
        padded = torch.tensor([[PAD] * (longest - len(row)) + row for row in ids])
        inputs = {
            "input_ids": padded,
            "attention_mask": torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids]),
        }
        pictures = [[each for each in row if isinstance(each, Picture)] for row in rows]
        if any(pictures):
            inputs |= self.encode(pictures)
        if self.types:
            inputs[self.types] = (padded == IMAGE).long()
        return inputs


def _values(picture: Picture, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(picture.seed))


def _flat(rows: Sequence[Sequence[Picture]]) -> list[Picture]:
    return [picture for row in rows for picture in row]


def _square(size: int) -> Callable[[Sequence[Sequence[Picture]]], dict[str, Tensor]]:
    return lambda rows: {"pixel_values": torch.stack([_values(each, 3, size, size) for each in _flat(rows)])}


def _grid(picture: Picture) -> tuple[int, int, int]:
    return (1, 4, 6 if picture.wide else 4)


def _patches(rows: Sequence[Sequence[Picture]]) -> dict[str, Tensor]:
    """As Qwen-VL has them: patches of all images in one sequence, and the grid of each."""
    grids = [_grid(each) for each in _flat(rows)]
    patches = [_values(each, h * w, 3 * 2 * 4 * 4) for each, (_, h, w) in zip(_flat(rows), grids, strict=True)]
    return {"pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(grids)}


def _merged(picture: Picture) -> int:
    _, height, width = _grid(picture)
    return height * width // 4


def _by_row(rows: Sequence[Sequence[Picture]]) -> dict[str, Tensor]:
    """As Idefics has them: [rows, images, ...], with images of zeros where a row has fewer."""
    most = max(map(len, rows))
    found = torch.zeros(len(rows), most, 3, 16, 16)
    for at, row in enumerate(rows):
        for place, each in enumerate(row):
            found[at, place] = _values(each, 3, 16, 16)
    return {"pixel_values": found}


def _sized(rows: Sequence[Sequence[Picture]]) -> dict[str, Tensor]:
    """As Pixtral has them: padded to the largest, and the size of each."""
    sizes = [(16, 24 if each.wide else 16) for each in _flat(rows)]
    found = torch.zeros(len(sizes), 3, 16, max(width for _, width in sizes))
    for place, (each, (height, width)) in enumerate(zip(_flat(rows), sizes, strict=True)):
        found[place, :, :, :width] = _values(each, 3, height, width)
    return {"pixel_values": found, "image_sizes": torch.tensor(sizes)}


def _tiles(rows: Sequence[Sequence[Picture]]) -> dict[str, Tensor]:
    """As LLaVA-NeXT has them: the whole image and its two halves, and the size of each."""
    sizes = [(8, 16) if each.wide else (16, 8) for each in _flat(rows)]
    return {
        "pixel_values": torch.stack([_values(each, 3, 3, 8, 8) for each in _flat(rows)]),
        "image_sizes": torch.tensor(sizes),
    }


def _sounds(rows: Sequence[Sequence[Picture]]) -> dict[str, Tensor]:
    """As Voxtral has them: the spectrum of each."""
    return {"input_features": torch.stack([_values(each, 8, 32) for each in _flat(rows)])}


def _masked_sounds(rows: Sequence[Sequence[Picture]]) -> dict[str, Tensor]:
    """As Qwen2-Audio has them: the spectrum of each, and how long it is."""
    lengths = torch.tensor([32 if each.wide else 20 for each in _flat(rows)])
    return {**_sounds(rows), "feature_attention_mask": (torch.arange(32) < lengths[:, None]).long()}


QWEN = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_heads": 2, "depth": 1}
QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
}
MM = "mm_token_type_ids"
MROPE = {**TEXT, **ROPE}

FAMILIES: dict[str, Family] = {
    "qwen2_vl": Family(
        "Qwen2VL",
        {"text_config": MROPE, "vision_config": {**QWEN, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 1}},
        _patches,
        _merged,
        types=MM,
        ids=QWEN_IDS,
    ),
    "qwen2_5_vl": Family(
        "Qwen2_5_VL",
        {
            "text_config": MROPE,
            "vision_config": {
                **QWEN,
                "hidden_size": 16,
                "out_hidden_size": 32,
                "intermediate_size": 16,
                "window_size": 16,
                "fullatt_block_indexes": [0],
            },
        },
        _patches,
        _merged,
        types=MM,
        ids=QWEN_IDS,
    ),
    "qwen3_vl": Family(
        "Qwen3VL",
        {
            "text_config": MROPE,
            "vision_config": {
                **QWEN,
                "hidden_size": 16,
                "out_hidden_size": 32,
                "intermediate_size": 16,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
        },
        _patches,
        _merged,
        types=MM,
        ids=QWEN_IDS,
    ),
    "gemma3": Family(
        "Gemma3",
        {
            "text_config": {**TEXT, **MIXED, "sliding_window": 8, "tie_word_embeddings": False},
            "vision_config": SQUARE,
            "mm_tokens_per_image": 4,
            "tie_word_embeddings": False,
        },
        _square(8),
        lambda picture: 4,
        types="token_type_ids",
    ),
    "llava": Family(
        "Llava",
        {
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**SQUARE, "model_type": "clip_vision_model"},
        },
        _square(8),
        lambda picture: 4,
    ),
    "internvl": Family(
        "InternVL",
        {
            "text_config": {**TEXT, "model_type": "qwen2"},
            "vision_config": {**LARGE, "image_size": [16, 16], "patch_size": [4, 4]},
        },
        _square(16),
        lambda picture: 4,
    ),
    "idefics3": Family(
        "Idefics3",
        {"text_config": {**TEXT, "model_type": "llama"}, "vision_config": LARGE},
        _by_row,
        lambda picture: 4,
    ),
    "smolvlm": Family(
        "SmolVLM",
        {"text_config": {**TEXT, "model_type": "llama"}, "vision_config": LARGE},
        _by_row,
        lambda picture: 4,
    ),
    "mistral3": Family(
        "Mistral3",
        {
            "text_config": {**TEXT, "model_type": "mistral", "sliding_window": None},
            "vision_config": {**LARGE, "image_size": 32, "model_type": "pixtral", "head_dim": 8},
        },
        _sized,
        lambda picture: 6 if picture.wide else 4,
    ),
    "llava_pixtral": Family(
        "Llava",
        {
            "text_config": {**TEXT, "model_type": "mistral", "sliding_window": 40},
            "vision_config": {**LARGE, "image_size": 32, "model_type": "pixtral", "head_dim": 8},
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        _sized,
        lambda picture: 24 if picture.wide else 16,
    ),
    "llava_next": Family(
        "LlavaNext",
        {
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**SQUARE, "model_type": "clip_vision_model"},
            "image_grid_pinpoints": [[8, 16], [16, 8]],
        },
        _tiles,
        lambda picture: 14 if picture.wide else 16,
        ids={"image_token_index": IMAGE},
    ),
    "llava_onevision": Family(
        "LlavaOnevision",
        {
            "text_config": {**TEXT, "model_type": "qwen2"},
            "vision_config": {**SQUARE, "model_type": "siglip_vision_model"},
            "image_grid_pinpoints": [[8, 16], [16, 8]],
        },
        _tiles,
        lambda picture: 14 if picture.wide else 16,
        ids={"image_token_index": IMAGE, "video_token_index": VIDEO},
    ),
    "qwen2_audio": Family(
        "Qwen2Audio",
        {
            "text_config": {**TEXT, "model_type": "qwen2"},
            "audio_config": {
                "num_mel_bins": 8,
                "encoder_layers": 1,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 16,
                "d_model": 16,
                "max_source_positions": 16,
            },
        },
        _masked_sounds,
        lambda picture: 8 if picture.wide else 5,
        ids={"audio_token_index": IMAGE},
    ),
    "voxtral": Family(
        "Voxtral",
        {
            "text_config": {**TEXT, "model_type": "llama"},
            "audio_config": {**VISION, "intermediate_size": 64, "num_mel_bins": 8, "max_source_positions": 16},
        },
        _sounds,
        lambda picture: 4,
        ids={"audio_token_id": IMAGE},
    ),
    "glm4v": Family(
        "Glm4v",
        {
            "text_config": {**MROPE, "partial_rotary_factor": 1.0},
            "vision_config": {
                **QWEN,
                "hidden_size": 16,
                "out_hidden_size": 32,
                "intermediate_size": 16,
                "image_size": 16,
            },
        },
        _patches,
        _merged,
        types=MM,
        ids={
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "image_start_token_id": BEGIN,
            "image_end_token_id": END,
        },
    ),
}

# Its own forward of text attends to later tokens.
PALIGEMMA = Family(
    "PaliGemma",
    {
        "text_config": {**TEXT, "model_type": "gemma"},
        "vision_config": {**SQUARE, "projection_dim": 32},
        "projection_dim": 32,
    },
    _square(8),
    lambda picture: 4,
    types="token_type_ids",
)
