"""`python -m research standin`: writes a stand-in model, with the text of a small Llama and the cost of a larger one.

How fast speculative decoding is depends on the text (how much of it can be guessed) and on the shapes (what a forward
costs). A stand-in combines the text of a trained small model with published shapes; `research.widening` says how.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

from leapahead.cli import screen
from leapahead.cli.command import Command
from leapahead.core.errors import BadParameter, Refused
from leapahead.models import loading
from research import hybrid
from research.widening import Planned, Recurrent, Shapes, Widening, kv_parts, residual

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BUNDLED = "leapahead's bundled model"
SHARD_BYTES = 2 * 10**9  # at most one shard is held in memory
KEPT = (  # files that are copied unchanged
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "LICENSE*",
)
ROTARY_BY_PAIR = ("default", "linear", "llama3")  # rope types whose scaling of a pair depends on its frequency alone


COSTS = {
    "135m": Shapes(576, 1536, 30, 9, 3, 64, 49152, "config.json of HuggingFaceTB/SmolLM2-135M"),
    "360m": Shapes(960, 2560, 32, 15, 5, 64, 49152, "config.json of HuggingFaceTB/SmolLM2-360M"),
    "1b": Shapes(2048, 8192, 16, 32, 8, 64, 128256, "config.json of meta-llama/Llama-3.2-1B"),
    "3b": Shapes(3072, 8192, 28, 24, 8, 128, 128256, "config.json of meta-llama/Llama-3.2-3B"),
    "7b": Shapes(4096, 11008, 32, 32, 32, 128, 32000, "config.json of meta-llama/Llama-2-7b-hf"),
    # No such model is published: SmolLM2-135M in the manner of the next, with as many parameters and fewer layers.
    "hybrid-135m": Shapes(
        576,
        1536,
        23,
        9,
        3,
        64,
        49152,
        "config.json of HuggingFaceTB/SmolLM2-135M, with recurrent layers as in ibm-granite/granite-4.0-h-350m",
        Recurrent(3, 36, 32, 128),
    ),
    "hybrid-350m": Shapes(
        768, 2048, 32, 12, 4, 64, 100352, "config.json of ibm-granite/granite-4.0-h-350m", Recurrent(4, 48, 32, 128)
    ),
}


@dataclass(frozen=True)
class StandIn:
    """A stand-in that was written.

    Attributes:
        shapes: its own.
        real: those of the model that it stands in for.
        weights: bytes of its weights.
    """

    folder: Path
    shapes: Shapes
    real: Shapes
    weights: int

    @property
    def head_layers(self) -> int:
        """Layers added for the part of the real model's head that it lacks; negative where it has more."""
        return self.shapes.layers - self.real.layers


def standin(
    source: str | Path | None,
    cost: str | Shapes,
    out: str | Path,
    dtype: str = "bfloat16",
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
) -> StandIn:
    """Writes a stand-in: the logits of `source`, up to rounding, in the shapes of `cost`.

    A hybrid's differ from those of `source` by what its recurrent layers add, see `research.hybrid`.

    Args:
        source: folder of a Llama in safetensors; None for the bundled one. Weights that `dtype` cannot hold are
            rounded, and then it is the rounded source whose logits the stand-in has.
        cost: a name of `COSTS`, or shapes.
        out: a folder that is new or empty.
        dtype: of the weights, float32 or bfloat16.
        seed: of the random numbers.
        progress: called with (what, tensors done, tensors in all) before each tensor and at the end.

    Raises:
        BadParameter: no model in `source`, an unknown cost or dtype, a `cost` smaller than `source`, `out` not empty.
        Refused: `source` is not a plain Llama, its rotary pairs cannot be spread, or the disk is too small.
    """
    plan = planned(source, cost, dtype, seed)
    out = Path(out)
    _make_folder(out, plan.size)
    _write_weights(out, plan.tensors, plan.weights, DTYPES[dtype], progress or (lambda what, done, total: None))
    result = StandIn(out, plan.shapes, plan.real, plan.size)
    for pattern in KEPT:
        for file in plan.weights.folder.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, out / file.name)
    (out / "README.md").write_text(_card(result, dtype, seed), encoding="utf-8")
    # Last, so that a folder that was left half written does not look like a model.
    (out / "config.json").write_text(json.dumps(plan.config, indent=2) + "\n", encoding="utf-8")
    return result


@dataclass(frozen=True)
class Plan:
    """What a stand-in will be.

    Attributes:
        weights: of the source.
        shapes, real: see `StandIn`.
        tensors: in the order of the forward.
        size: bytes of its weights.
        config: the content of its config.json.
    """

    weights: Weights
    shapes: Shapes
    real: Shapes
    tensors: list[Planned]
    size: int
    config: dict[str, Any]


def planned(
    source: str | Path | None, cost: str | Shapes, dtype: str, seed: int = 0, device: torch.device | str = "cpu"
) -> Plan:
    """Checks what a stand-in would be made of, and plans its tensors.

    Args:
        source, cost, dtype, seed: see `standin`.
        device: where the tensors will be made; of a hybrid, the CPU.

    Raises:
        BadParameter, Refused: see `standin`.
    """
    real = _shapes(cost)
    if dtype not in DTYPES:
        raise BadParameter(f"a stand-in's dtype is {' or '.join(DTYPES)}, not {dtype!r}")
    weights = Weights(Path(loading.bundled()), BUNDLED) if source is None else Weights(Path(source))
    small = weights.shapes
    _check_fit(weights, real, cost if isinstance(cost, str) else "the cost")
    shapes = real.holding(small)
    if shapes.recurrent:
        tensors = list(hybrid.HybridWidening(small, shapes, weights.tied, seed).plan())
    else:
        tensors = list(Widening(small, shapes, weights.tied, seed, device).plan())
    weights.check(origin for tensor in tensors for origin in tensor.origins)
    config = weights.config | {
        "hidden_size": shapes.hidden,
        "intermediate_size": shapes.intermediate,
        "num_hidden_layers": shapes.layers,
        "num_attention_heads": shapes.heads,
        "num_key_value_heads": shapes.kv_heads,
        "head_dim": shapes.head_dim,
        "rms_norm_eps": weights.eps * residual(small.hidden, shapes.hidden)[1] ** 2,
        "torch_dtype": dtype,
    }
    if shapes.recurrent:
        config |= hybrid.config(shapes)
    config.pop("dtype", None)  # the new name of torch_dtype, which everyone reads
    size = sum(tensor.count for tensor in tensors) * DTYPES[dtype].itemsize
    return Plan(weights, shapes, real, tensors, size, config)


class Weights:
    """The source's config, shapes and tensors, read one at a time."""

    def __init__(self, folder: Path, name: str = "") -> None:
        self.folder = folder
        self.config = _json(folder / "config.json", f"{folder} is no model folder")
        kind = self.config.get("model_type")
        if kind != "llama":
            raise Refused(f"a stand-in is made from a model of the Llama architecture, and {folder} holds {kind!r}")
        if "quantization_config" in self.config:
            raise Refused(f"a stand-in is made from plain weights, and those of {folder} are quantised")
        try:
            config = LlamaConfig.from_dict(self.config)
        except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
            raise BadParameter(f"{folder}/config.json describes no Llama: {str(error).strip()}") from None
        if config.attention_bias or config.mlp_bias:
            raise Refused(f"the model in {folder} has biases, which the models to stand in for have not")
        self.eps: float = config.rms_norm_eps
        self.tied: bool = config.tie_word_embeddings
        self.rope_type: str = config.rope_parameters["rope_type"]
        self.shapes = Shapes(
            config.hidden_size,
            config.intermediate_size,
            config.num_hidden_layers,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.vocab_size,
            name or folder.resolve().name,
        )
        self._files = self._find()

    def __getitem__(self, name: str) -> Tensor:
        """A tensor in float32."""
        try:
            with safe_open(self._files[name], framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise BadParameter(f"{self._files[name]} cannot be read: {error}") from None
        return tensor.float()

    def check(self, names: Iterable[str]) -> None:
        """Refuses, before any work is done, if a tensor is missing."""
        for name in names:
            if name not in self._files:
                raise BadParameter(f"the weights in {self.folder} lack {name}")

    def _find(self) -> dict[str, Path]:
        """Tensor name -> file."""
        index, single = self.folder / "model.safetensors.index.json", self.folder / "model.safetensors"
        if index.is_file():
            names: dict[str, str] = _json(index, "the index of the weights is damaged")["weight_map"]
            return {name: self.folder / file for name, file in names.items()}
        if not single.is_file():
            raise BadParameter(f"{self.folder} holds no weights in safetensors (model.safetensors)")
        try:
            with safe_open(single, framework="pt") as file:
                return dict.fromkeys(file.keys(), single)
        except (OSError, SafetensorError) as error:
            raise BadParameter(f"{single} cannot be read: {error}") from None


def _shapes(cost: str | Shapes) -> Shapes:
    if isinstance(cost, Shapes):
        return cost
    if cost not in COSTS:
        raise BadParameter(f"unknown cost {cost!r}; there are {', '.join(COSTS)}")
    return COSTS[cost]


def _check_fit(weights: Weights, real: Shapes, name: str) -> None:
    """Refuses a source that is larger than the model to stand in for, or whose rotary pairs cannot be spread."""
    small = weights.shapes
    for what, have, room in (
        ("hidden size", small.hidden, real.hidden),
        ("intermediate size", small.intermediate, real.intermediate),
        # the layers with attention of a hybrid become as many as the source needs
        ("number of layers", small.layers, real.layers),
        ("head dimension", small.head_dim, real.head_dim),
    ):
        if have > room:
            raise BadParameter(f"{name} is smaller than {small.source}: its {what} is {room}, the source's is {have}")
    if (needed := small.kv_heads * kv_parts(small, real)) > real.kv_heads:
        raise BadParameter(
            f"{name} is smaller than {small.source}: it has {real.kv_heads} key-value heads, and the source's "
            f"{small.heads} heads on {small.kv_heads} need {needed}"
        )
    if real.head_dim % small.head_dim:
        raise BadParameter(
            f"{name} has a head dimension of {real.head_dim}, which is no multiple of {small.head_dim}, the source's"
        )
    if real.head_dim > small.head_dim and weights.rope_type not in ROTARY_BY_PAIR:
        raise Refused(
            f"{name} has another head dimension than {small.source}, whose rotary embedding of type "
            f"{weights.rope_type!r} cannot be spread over it"
        )


def _make_folder(out: Path, size: int) -> None:
    if out.exists() and not out.is_dir():
        raise BadParameter(f"{out} is a file; name a folder for the stand-in")
    if out.is_dir() and any(out.iterdir()):
        raise BadParameter(f"{out} is not empty; name a new folder for the stand-in")
    existing = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if size > free:
        raise Refused(f"the stand-in needs {size / 1e9:.1f} GB, and {existing} has {free / 1e9:.1f} GB free")
    out.mkdir(parents=True, exist_ok=True)


def _write_weights(
    out: Path, plan: list[Planned], weights: Weights, dtype: torch.dtype, progress: Callable[[str, int, int], None]
) -> None:
    """One shard at a time is in memory."""
    shards: list[list[Planned]] = [[]]
    for tensor in plan:
        if shards[-1] and sum(other.count for other in (*shards[-1], tensor)) * dtype.itemsize > SHARD_BYTES:
            shards.append([])
        shards[-1].append(tensor)
    done = 0
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        tensors: dict[str, Tensor] = {}
        for tensor in shard:
            progress(f"writing {name}", done, len(plan))
            made = tensor.make(*(weights[origin] for origin in tensor.origins))
            assert made.shape == tensor.shape, (tensor.name, made.shape)
            tensors[tensor.name] = made.to(dtype).contiguous()
            where[tensor.name] = name
            done += 1
        save_file(tensors, out / name, metadata={"format": "pt"})
        (out / name).chmod(0o644)  # safetensors writes files that only their owner can read
    progress("written", done, len(plan))
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(tensor.count for tensor in plan) * dtype.itemsize}, "weight_map": where}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _card(made: StandIn, dtype: str, seed: int) -> str:
    shapes, real = made.shapes, made.real
    heads = [f"{model.heads}, {model.kv_heads}, {model.head_dim}" for model in (shapes, real)]
    rest = "All that\nis not the source's is multiplied by zero before it reaches the logits."
    if own := shapes.recurrent:
        rest = (
            f"The\nrecurrent layers (Mamba-2: {own.heads} heads of {own.head_dim}, state {own.state}) are random and "
            "change the logits a little; all else that\nis not the source's is multiplied by zero."
        )
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [speculative-decoding, stand-in]
---

# A stand-in for speed measurements

This is {shapes.source}, widened and deepened: its logits are the same up to rounding, and so is its text,
but a forward costs what that of a larger model costs. It knows nothing that its source does not know. Use it to measure
the speed of decoding, and for nothing else.

| | this model | the model it stands in for |
| --- | ---: | ---: |
| Shapes from | | {real.source} |
| Layers | {_layers(shapes)} | {_layers(real)} |
| Hidden size | {shapes.hidden} | {real.hidden} |
| Intermediate size | {shapes.intermediate} | {real.intermediate} |
| Heads, key-value heads, head dimension | {heads[0]} | {heads[1]} |
| Vocabulary | {shapes.vocab} | {real.vocab} |
| Parameters read per token | {shapes.per_token:,} | {real.per_token:,} |

The vocabulary is the source's; {made.head_layers} layers make up for the difference in the head. Parameters read per
token are all but the embedding, of which one row is read. Weights are {dtype}, random numbers of seed {seed}. {rest}

The source's licence applies. Made by `python -m research standin`.
"""


def _layers(shapes: Shapes) -> str:
    return f"{shapes.layers}, {shapes.attention} with attention" if shapes.recurrent else f"{shapes.layers}"


def _json(file: Path, problem: str) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadParameter(f"{problem}: there is no {file.name}") from None
    except (OSError, ValueError) as error:
        raise BadParameter(f"{problem}: {file.name} cannot be read ({error})") from None
    if not isinstance(found, dict):
        raise BadParameter(f"{problem}: {file.name} is no JSON object")
    return found


@click.command(cls=Command)
@click.option("--from", "source", metavar="MODEL_DIR", help="Folder of a Llama.  [default: the bundled model]")
@click.option("--cost", required=True, metavar="|".join(COSTS), help="The published model whose shapes it gets.")
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="DIR", help="A new or empty folder.")
@click.option("--dtype", default="bfloat16", show_default=True, help="float32 or bfloat16.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the random filling.")
def main(source: str | None, cost: str, out: Path, dtype: str, seed: int) -> None:
    """Write a stand-in: a small model's text at a larger model's cost.

    The logits are those of the small model, up to rounding; the shapes are those of SmolLM2-135M or -360M, Llama 3.2 1B
    or 3B, or Llama 2 7B. The vocabulary stays the small model's; extra layers make up for the smaller output head.

    hybrid-350m has the shapes of Granite 4.0 H 350M, with attention in a few layers and a recurrent state in the
    others, and hybrid-135m those of SmolLM2-135M with such layers. The state changes the logits by about 0.2 % of
    their spread. `python -m research hybrid-gguf` writes them for llama.cpp.
    """
    with screen.progress("reading") as progress:
        made = standin(source, cost, out, dtype=dtype, seed=seed, progress=progress)
    real = made.real
    click.echo(
        f"{out}: {made.shapes.layers} layers, "
        + (f"{made.shapes.attention} of them with attention, " if made.shapes.recurrent else "")
        + f"{made.head_layers} of them in place of the larger vocabulary's head; "
        f"{made.shapes.per_token / 1e6:.1f} million parameters read per token "
        f"({made.shapes.per_token / real.per_token - 1:+.1%} compared with the real model's "
        f"{real.per_token / 1e6:.1f}); {made.weights / 1e9:.2f} GB"
    )
