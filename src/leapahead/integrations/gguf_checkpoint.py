"""The safetensors of a Hugging Face folder, read one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from leapahead.core.errors import BadParameter, Refused, needing
from leapahead.integrations.gguf_shape import Shape, Tensor
from leapahead.integrations.gguf_vocabulary import ELSEWHERE, read_json

TORCH_TYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a folder, each read when it is asked for.

    Attributes:
        shards: name of a tensor -> its open safetensors file.
        dtypes: name of a tensor -> its type in the terms of safetensors, such as "BF16".
    """

    folder: Path
    shards: Mapping[str, Any]
    dtypes: Mapping[str, str]

    def plan(self, shape: Shape) -> dict[str, Tensor]:
        """Name in the folder -> tensor of the file.

        Raises:
            BadParameter: a tensor is missing or has another shape than config.json implies.
            Refused: a tensor that a Llama does not have, or one of another type than F32, BF16 and F16.
        """
        plan = dict(shape.tensors())
        for source, tensor in plan.items():
            if source not in self.shards:
                raise BadParameter(f"{self.folder} lacks the tensor {source}: its safetensors are incomplete")
            found = tuple(self.shards[source].get_slice(source).get_shape())
            if found != tensor.shape:
                raise BadParameter(
                    f"{self.folder} has {source} of shape {found}, where config.json says {tensor.shape}: "
                    "config and weights do not belong together"
                )
            if self.dtypes[source] not in TORCH_TYPES:
                raise Refused(
                    f"{self.folder} has {source} in {self.dtypes[source]}, and only F32, BF16 and F16 can be exported"
                )
        known = plan.keys() | ({"lm_head.weight"} if shape.tied else set())
        extra = [name for name in self.shards if name not in known and not name.endswith("rotary_emb.inv_freq")]
        if extra:
            raise Refused(f"{self.folder} has the tensor {min(extra)}, which a Llama does not have: {ELSEWHERE}")
        return plan

    def read(self, source: str, tensor: Tensor, dtype: str) -> Any:
        """The numbers of a tensor in the order and type of the file, [shape]; BF16 as 16-bit integers, for numpy."""
        import torch

        weight = self.shards[source].get_tensor(source).to(getattr(torch, TORCH_TYPES[dtype]))
        if tensor.heads:
            rows = weight.view(tensor.heads, 2, tensor.shape[0] // tensor.heads // 2, -1)
            weight = rows.transpose(1, 2).reshape(tensor.shape)  # x0 x1 .. y0 y1 ..  ->  x0 y0 x1 y1 ..
        return (weight.contiguous().view(torch.int16) if dtype == "BF16" else weight.contiguous()).numpy()


@contextmanager
def open_checkpoint(folder: Path) -> Iterator[Checkpoint]:
    """Opens the safetensors of a folder: one file, or the shards that its index names."""
    with needing("the export", "transformers", "safetensors", "torch"):
        safetensors: Any = import_module("safetensors")
        import_module("torch")  # whose tensors safetensors makes
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        where = read_json(index).get("weight_map")
        if not isinstance(where, dict) or not where:
            raise BadParameter(f"{index} has no weight_map: save the model again")
        files = sorted(set(map(str, where.values())))
    else:
        files = ["model.safetensors"]
    shards, dtypes, opened = {}, {}, []
    try:
        for name in files:
            if not (folder / name).is_file():
                raise BadParameter(f"{folder} has no {name}: save the model there with save_pretrained, or download it")
            try:
                opened.append(safetensors.safe_open(folder / name, framework="pt"))
                for tensor in opened[-1].keys():  # noqa: SIM118  (it is not a mapping)
                    shards[tensor] = opened[-1]
                    dtypes[tensor] = opened[-1].get_slice(tensor).get_dtype()
            except (safetensors.SafetensorError, OSError) as error:
                raise BadParameter(f"{folder / name} is broken ({error}): download or save it again") from None
        yield Checkpoint(folder, shards, dtypes)
    finally:
        for handle in opened:
            handle.__exit__(None, None, None)
