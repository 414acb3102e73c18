"""Prompts with images, video or sound: the model reads them once, in its own way, and leapahead goes on from there.

    processor ──> model.generate ──> encoders ──> hf.generate ──> ONE forward of the model over all rows
                                                     |                 |  KV entries of each row, logits after it
                                                     └── sessions <────┘

That forward is the first one of Transformers' own loop: which embeddings take the place of which tokens, which of them
attend to later ones, and their positions are left to the model. The forwards behind it hold text only, in both loops,
except in a model that reads the image again in each of them (`mllama`). So the first step, which computes the last
token of the prompt again, must give the logits of the model's own forward; where it does not, the model is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicCache

from leapahead.core.errors import BadLogits, Refused
from leapahead.integrations.hf_fields import CACHES
from leapahead.models.base import NOTHING
from leapahead.models.prompt_entries import PromptEntries
from leapahead.models.transformers import entries, selftest
from leapahead.models.transformers.arguments import cache_name
from leapahead.models.transformers.model import TransformersTarget
from leapahead.models.transformers.modes import forwards

# How far logits may be from those of the same tokens in another forward, in standard deviations: far more than rounding
# makes of them, and far less than another position or a missing image does.
MOST, MOST_IN_HALF = 0.1, selftest.CEILING


@dataclass(frozen=True, eq=False)
class ReadPrompt:
    """What the model made of the prompt of one row.

    Attributes:
        entries: of all its tokens but the last one.
        logits: [vocab], after its last one.
        name: of the model.
    """

    entries: PromptEntries
    logits: Tensor
    name: str

    def check(self, logits: Tensor) -> None:
        """Compares them with those of our own forward over the last token, [vocab].

        Raises:
            Refused: the model does not go on from the entries as it does by itself.
            BadLogits: it gives NaN.
        """
        own, found = self.logits.float(), logits.to(self.logits.device).float()
        if bool(own.isnan().any()):
            raise BadLogits(
                f"{self.name} gives NaN logits after the prompt; try dtype float32, or rows without padding"
            )
        counted = own.abs() < selftest.BANNED
        error = float(((found - own).abs() / own[counted].std()).where(counted, 0.0).max())
        if error > (MOST if self.logits.dtype in selftest.FULL else MOST_IN_HALF):
            raise Refused(
                f"{self.name} does not go on from this prompt as model.generate does (the logits after it differ by "
                f"{error:.2g} standard deviations), since the prompt ends within an image or a sound, or the model "
                f"looks at it again in every forward; {entries.INSTEAD}"
            )


def read(
    model: Any, target: TransformersTarget, input_ids: Tensor, pads: Sequence[int], model_kwargs: Mapping[str, Any]
) -> list[ReadPrompt]:
    """Reads the prompts of all rows in one forward of the model.

    Args:
        model, input_ids, model_kwargs: as Transformers prepared them.
        target: of the model.
        pads: tokens of padding on the left of each row.

    Raises:
        Refused: the text that follows cannot be decoded as `model.generate` does.
    """
    entries.require(target.info, target.executor, NOTHING)
    name = next((name for name in CACHES if name in model_kwargs), cache_name(model))
    cache = DynamicCache()  # not that of Transformers, whose layers with a window drop what is outside of it
    kwargs = {**model_kwargs, name: cache, "use_cache": True}
    what = f"a prompt of {input_ids.shape[1]} tokens"
    with target.lock, forwards(what, len(input_ids), target.device, target.autocast):
        given = model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **kwargs)
        logits = model(**given, return_dict=True).logits[:, -1].clone()
    offsets = _offsets(given.get("position_ids"), input_ids.shape[1], pads)
    layers = {index: (layer.keys, layer.values) for index, layer in enumerate(cache.layers) if layer.is_initialized}
    last = input_ids.shape[1] - 1  # its entry is computed again, by the first step
    if not layers or any(part.shape[:3:2] != (len(input_ids), last + 1) for parts in layers.values() for part in parts):
        raise Refused(
            f"{target.info.name} keeps other KV entries than one for each token of a prompt with images or sounds; "
            f"{entries.INSTEAD}"
        )
    return [
        ReadPrompt(
            PromptEntries(
                {i: (keys[row, :, pad:last], values[row, :, pad:last]) for i, (keys, values) in layers.items()}, offset
            ),
            logits[row],
            target.info.name,
        )
        for row, (pad, offset) in enumerate(zip(pads, offsets, strict=True))
    ]


def _offsets(position_ids: Tensor | None, length: int, pads: Sequence[int]) -> list[int]:
    """How far the position of each row's last token is beyond its index; those of the new tokens follow it.

    Args:
        position_ids: as the model was given them, [rows, length] or [1, length], or for several positions of each
            token [3, rows, length], or [4, ...] with the plain one in front; None where the model counts itself.
        length: tokens of a row.
        pads: of them, padding.
    """
    if position_ids is None:
        return [0] * len(pads)
    own = position_ids if position_ids.ndim == 3 else position_ids[None]
    last = own[1 if len(own) > 3 else 0 :, :, -1].expand(-1, len(pads)).cpu()
    if bool((last != last[0]).any()):
        raise Refused(
            "a prompt that ends within an image or a video is not supported by leapahead.hf: its last token has "
            "several positions; let text follow, as a chat template does"
        )
    return [int(position) - (length - pad - 1) for position, pad in zip(last[0], pads, strict=True)]
