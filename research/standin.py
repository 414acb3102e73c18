"""Stand-in models: the text of a small Llama at the cost of a large one. Knows nothing of decoding.

How fast decoding is depends on the text (what can be guessed) and on the shapes (what a forward costs). A stand-in has
its source's text, so that acceptance is that of a trained model, in the shapes of a published one. d and D are the
source's and the stand-in's hidden sizes:

    residual     [ x | s x | 0 ]      d + d + (D - 2 d) entries, s chosen below
    RMSNorm      g -> [ g / 2^k | 0 | 0 ], eps -> eps / 4^k
    q, k, v, gate, up, lm_head        [ W | random ]: the norm before them is 0 where they are random
    o, down      [ W ; s W ; 0 ]      columns of heads and units that the source lacks are 0
    embedding    [ E | s E | 0 ]      of one row a token; tied to lm_head where the source's is

The norm divides by the root of the mean over D entries. Zeros alone would make the normalised values sqrt(D/d) times
too large, and norm weights scaled by sqrt(d/D) are no longer numbers of bfloat16. A second, scaled copy of the residual
makes the factor a power of two: (1 + s^2) d/D = 1/4^k. Nothing reads the copy but the mean, so its rounding nearly
averages out. Where D < 2 d there is no room for it, and the norm weights are scaled by sqrt(d/D) after all.

Heads: source heads keep their key-value head. Where the stand-in has fewer heads to each, a key-value head is doubled.
The output columns of all other heads are zero. Where the head dimension grows f-fold (3b and 7b from 64), rotary pair i
of the source becomes pair f i, whose frequency is the same: theta^(-2 f i / (f dim)). Queries are zero in the other
pairs, and grow by sqrt(f) as attention divides by the root of the head dimension.

Layers: the source's are spread, each after its share of layers that add zero, so that leaving out or exiting after the
last layers is no better a guess than it is with the source. The vocabulary stays, as widening it would change sampled
text; what the large model's head would read beyond the source's is made up in layers.

Random numbers have the spread of the source's matrix, so that no product is denormal, and only those are zero that must
be. Weights that the source has in a wider dtype than the stand-in are rounded, and its logits are then the rounded
source's.

How equal the logits are, measured with the bundled model, whose weights are bfloat16, over 14 prompts: the largest
difference from the source in float32, over the standard deviation of the logits (2.7).

    computed in   weights    135m      1b        3b, 7b (head dimension 64 -> 128)   the source itself
    float32       float32    6e-6      7e-6      7e-6                                0
    float32       bfloat16   1.2e-3    7e-6      3e-3, as queries grow by sqrt(2)    0
    bfloat16      bfloat16   0.06      0.06      0.05                                0.06

1b in bfloat16 was the source bit for bit. With scaled norm weights in place of the copy the second line would be 2e-2
for 135m. 3b and 7b were measured on smaller shapes with their head dimension.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

from leapahead.core.errors import BadParameter, Refused
from leapahead.models import loading

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BUNDLED = "leapahead's bundled model"
SHARD_BYTES = 2 * 10**9  # so that no more than this is held in memory
KEPT = (  # what a stand-in takes over as it is
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


@dataclass(frozen=True)
class Shapes:
    """The shapes of a Llama, and so its cost.

    Attributes:
        source: where the numbers are from.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    source: str

    @property
    def layer(self) -> int:
        """Parameters of one layer."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def per_token(self) -> int:
        """Parameters that a forward of one token reads: all but the embedding, of which it reads one row."""
        return self.layers * self.layer + (self.vocab + 2) * self.hidden


COSTS = {
    "135m": Shapes(576, 1536, 30, 9, 3, 64, 49152, "config.json of HuggingFaceTB/SmolLM2-135M"),
    "360m": Shapes(960, 2560, 32, 15, 5, 64, 49152, "config.json of HuggingFaceTB/SmolLM2-360M"),
    "1b": Shapes(2048, 8192, 16, 32, 8, 64, 128256, "config.json of meta-llama/Llama-3.2-1B"),
    "3b": Shapes(3072, 8192, 28, 24, 8, 128, 128256, "config.json of meta-llama/Llama-3.2-3B"),
    "7b": Shapes(4096, 11008, 32, 32, 32, 128, 32000, "config.json of meta-llama/Llama-2-7b-hf"),
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
    real = _shapes(cost)
    if dtype not in DTYPES:
        raise BadParameter(f"a stand-in's dtype is {' or '.join(DTYPES)}, not {dtype!r}")
    weights = _Weights(Path(loading.bundled()), BUNDLED) if source is None else _Weights(Path(source))
    small = weights.shapes
    _check_fit(weights, real, cost if isinstance(cost, str) else "the cost")
    head_layers = round((real.vocab - small.vocab) * real.hidden / real.layer)
    shapes = replace(real, layers=max(small.layers, real.layers + head_layers), vocab=small.vocab, source=small.source)

    plan = list(_Widening(small, shapes, weights.tied, seed).plan())
    size = sum(tensor.count for tensor in plan) * DTYPES[dtype].itemsize
    out = Path(out)
    weights.check(tensor.origin for tensor in plan)
    _make_folder(out, size)
    _write_weights(out, plan, weights, DTYPES[dtype], progress or (lambda what, done, total: None))
    result = StandIn(out, shapes, real, size)
    for pattern in KEPT:
        for file in weights.folder.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, out / file.name)
    (out / "README.md").write_text(_card(result, dtype, seed), encoding="utf-8")
    config = weights.config | {
        "hidden_size": shapes.hidden,
        "intermediate_size": shapes.intermediate,
        "num_hidden_layers": shapes.layers,
        "num_attention_heads": shapes.heads,
        "num_key_value_heads": shapes.kv_heads,
        "head_dim": shapes.head_dim,
        "rms_norm_eps": weights.eps * _residual(small.hidden, shapes.hidden)[1] ** 2,
        "torch_dtype": dtype,
    }
    config.pop("dtype", None)  # the new name of torch_dtype, which everyone reads
    # Last, so that a folder that was left half written does not look like a model.
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return result


class _Weights:
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


@dataclass(frozen=True)
class _Slots:
    """Where the source's heads or units lie among the stand-in's.

    Attributes:
        origin: rows of the source's matrix, [n].
        place: the stand-in's rows that they become, [n].
        size: rows of the stand-in's matrix.
    """

    origin: Tensor
    place: Tensor
    size: int

    def none(self) -> _Slots:
        """Those of a layer that holds nothing of the source."""
        return replace(self, origin=self.origin[:0], place=self.place[:0])


@dataclass(frozen=True)
class _Planned:
    """A tensor to be written: its name, its shape, the source's tensor that it is made of, and how."""

    name: str
    shape: tuple[int, ...]
    origin: str
    make: Callable[[Tensor], Tensor]

    @property
    def count(self) -> int:
        return math.prod(self.shape)


class _Widening:
    """How each tensor of the stand-in is made of the source's."""

    def __init__(self, small: Shapes, large: Shapes, tied: bool, seed: int) -> None:
        self.small, self.large, self.tied = small, large, tied
        self.copy, self.norm_scale = _residual(small.hidden, large.hidden)
        self.queries, self.keys = _heads(small, large)
        self.units = _Slots(torch.arange(small.intermediate), torch.arange(small.intermediate), large.intermediate)
        self.tokens = _Slots(torch.arange(small.vocab), torch.arange(small.vocab), large.vocab)
        self.generator = torch.Generator().manual_seed(seed)

    def plan(self) -> Iterator[_Planned]:
        """All tensors, in the order of the forward."""
        yield self._planned("model.embed_tokens", lambda w: self._writes(w.T, self.tokens).T, self.large.vocab)
        place = {(i + 1) * self.large.layers // self.small.layers - 1 for i in range(self.small.layers)}
        origin = 0  # a layer that adds zero is drawn like the source's layer that follows it
        for layer in range(self.large.layers):
            yield from self._layer(layer, origin, filled=layer in place)
            origin += layer in place
        yield self._planned("model.norm", self._norm)
        if not self.tied:
            yield self._planned("lm_head", lambda w: self._reads(w, self.tokens), self.large.vocab)

    def _layer(self, layer: int, origin: int, filled: bool) -> Iterator[_Planned]:
        slots = (self.queries, self.keys, self.units)
        queries, keys, units = slots if filled else (part.none() for part in slots)

        def planned(name: str, make: Callable[[Tensor], Tensor], rows: int | None = None, columns: int = 0) -> _Planned:
            return self._planned(f"model.layers.{layer}.{name}", make, rows, columns, f"model.layers.{origin}.{name}")

        yield planned("input_layernorm", self._norm)
        yield planned("self_attn.q_proj", lambda w: self._asks(w, queries), queries.size)
        yield planned("self_attn.k_proj", lambda w: self._reads(w, keys), keys.size)
        yield planned("self_attn.v_proj", lambda w: self._reads(w, keys), keys.size)
        yield planned("self_attn.o_proj", lambda w: self._writes(w, queries), self.large.hidden, queries.size)
        yield planned("post_attention_layernorm", self._norm)
        yield planned("mlp.gate_proj", lambda w: self._reads(w, units), units.size)
        yield planned("mlp.up_proj", lambda w: self._reads(w, units), units.size)
        yield planned("mlp.down_proj", lambda w: self._writes(w, units), self.large.hidden, units.size)

    def _planned(
        self,
        name: str,
        make: Callable[[Tensor], Tensor],
        rows: int | None = None,
        columns: int = 0,
        origin: str | None = None,
    ) -> _Planned:
        """Of the source's tensor `origin`; a matrix if it has `rows`, D columns unless told."""
        shape = (self.large.hidden,) if rows is None else (rows, columns or self.large.hidden)
        return _Planned(f"{name}.weight", shape, f"{origin or name}.weight", make)

    def _norm(self, weight: Tensor) -> Tensor:
        """[d] -> [D], zero where it must not be read."""
        wide = torch.zeros(self.large.hidden)
        wide[: weight.numel()] = weight * self.norm_scale
        return wide

    def _reads(self, weight: Tensor, slots: _Slots) -> Tensor:
        """A matrix that reads the residual, [n, d] -> [size, D]."""
        std = weight.std().item()
        wide = torch.randn(slots.size, self.large.hidden, generator=self.generator) * std
        wide[slots.place, : weight.shape[1]] = weight[slots.origin]
        return wide

    def _asks(self, weight: Tensor, slots: _Slots) -> Tensor:
        """The same of the queries: a head of the source asks in the source's rotary pairs only, and louder."""
        wide = self._reads(weight, slots)
        dim = self.large.head_dim
        silent = torch.zeros(self.large.heads, dim, dtype=torch.bool)
        silent[slots.place // dim] = True
        silent.view(-1)[slots.place] = False
        wide[silent.view(-1)] = 0
        wide[slots.place, : weight.shape[1]] = weight[slots.origin] * math.sqrt(dim / self.small.head_dim)
        return wide

    def _writes(self, weight: Tensor, slots: _Slots) -> Tensor:
        """A matrix that writes to the residual, [d, n] -> [D, size]."""
        d = weight.shape[0]
        wide = torch.zeros(self.large.hidden, slots.size)
        wide[:d, slots.place] = weight[:, slots.origin]
        if self.copy:
            wide[d : 2 * d] = wide[:d] * self.copy
        return wide


def _residual(d: int, wide: int) -> tuple[float, float]:
    """What the residual's copy and the norm weights are scaled by, see the module's docstring."""
    excess, norm_scale = wide / d, 1.0
    while excess >= 4:
        excess, norm_scale = excess / 4, norm_scale / 2
    if excess > 1 and wide < 2 * d:
        return 0.0, math.sqrt(d / wide)
    return math.sqrt(excess - 1), norm_scale


def _heads(small: Shapes, large: Shapes) -> tuple[_Slots, _Slots]:
    """Where the rows of the queries and those of the keys and values go.

    Source heads [kv, head of its group] become [kv, part, head of the new group]: a group that is larger than the new
    groups is parted, and each part has a key-value head of its own, with the same weights.
    """
    group, new_group = small.heads // small.kv_heads, large.heads // large.kv_heads
    parts = _parts(small, large)
    head = torch.arange(small.heads)
    new_head = (head // group * parts + head % group // new_group) * new_group + head % group % new_group
    kv = torch.arange(small.kv_heads * parts)
    pair, factor = torch.arange(small.head_dim // 2), large.head_dim // small.head_dim
    dims = torch.cat([pair, pair + small.head_dim // 2])  # a rotary pair is an entry of each half
    new_dims = torch.cat([pair * factor, pair * factor + large.head_dim // 2])

    def rows(heads: Tensor, dims: Tensor, dim: int) -> Tensor:
        return (heads[:, None] * dim + dims).flatten()

    return (
        _Slots(
            rows(head, dims, small.head_dim),
            rows(new_head, new_dims, large.head_dim),
            large.heads * large.head_dim,
        ),
        _Slots(
            rows(kv // parts, dims, small.head_dim),
            rows(kv, new_dims, large.head_dim),
            large.kv_heads * large.head_dim,
        ),
    )


def _parts(small: Shapes, large: Shapes) -> int:
    """Key-value heads for each of the source's."""
    return math.ceil((small.heads // small.kv_heads) / (large.heads // large.kv_heads))


def _shapes(cost: str | Shapes) -> Shapes:
    if isinstance(cost, Shapes):
        return cost
    if cost not in COSTS:
        raise BadParameter(f"unknown cost {cost!r}; there are {', '.join(COSTS)}")
    return COSTS[cost]


def _check_fit(weights: _Weights, real: Shapes, name: str) -> None:
    """Refuses a source that is larger than the model to stand in for, or whose rotary pairs cannot be spread."""
    small = weights.shapes
    for what, have, room in (
        ("hidden size", small.hidden, real.hidden),
        ("intermediate size", small.intermediate, real.intermediate),
        ("number of layers", small.layers, real.layers),
        ("head dimension", small.head_dim, real.head_dim),
    ):
        if have > room:
            raise BadParameter(f"{name} is smaller than {small.source}: its {what} is {room}, the source's is {have}")
    if (needed := small.kv_heads * _parts(small, real)) > real.kv_heads:
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
    out: Path, plan: list[_Planned], weights: _Weights, dtype: torch.dtype, progress: Callable[[str, int, int], None]
) -> None:
    """One shard at a time is in memory."""
    shards: list[list[_Planned]] = [[]]
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
            tensors[tensor.name] = made = tensor.make(weights[tensor.origin]).to(dtype).contiguous()
            assert made.shape == tensor.shape, (tensor.name, made.shape)
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
| Layers | {shapes.layers} | {real.layers} |
| Hidden size | {shapes.hidden} | {real.hidden} |
| Intermediate size | {shapes.intermediate} | {real.intermediate} |
| Heads, key-value heads, head dimension | {heads[0]} | {heads[1]} |
| Vocabulary | {shapes.vocab} | {real.vocab} |
| Parameters read per token | {shapes.per_token:,} | {real.per_token:,} |

The vocabulary is the source's; {made.head_layers} layers make up for the difference in the head. Parameters read per
token are all but the embedding, of which one row is read. Weights are {dtype}, random numbers of seed {seed}. All that
is not the source's is multiplied by zero before it reaches the logits.

The source's licence applies. Made by `leapahead lab standin`.
"""


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
