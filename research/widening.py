"""How the tensors of a stand-in model are made from those of a small Llama.

A stand-in has the logits of its source, and so its text and acceptance, in the shapes of a published larger model, and
so its cost. d and D are the hidden sizes of the source and of the stand-in:

    residual     [ x | s x | 0 ]      d + d + (D - 2 d) entries, s chosen below
    RMSNorm      g -> [ g / 2^k | 0 | 0 ], eps -> eps / 4^k
    q, k, v, gate, up, lm_head        [ W | random ]: the norm before them is 0 where they are random
    o, down      [ W ; s W ; 0 ]      columns of heads and units that the source lacks are 0
    embedding    [ E | s E | 0 ]      one row for each token; tied to lm_head where the source's is

RMSNorm divides by the root of the mean over D entries. With zeros alone the normalised values would be sqrt(D/d) times
too large, and norm weights scaled by sqrt(d/D) cannot be represented in bfloat16. A second, scaled copy of the residual
makes the factor a power of two: (1 + s^2) d/D = 1/4^k. Only the mean reads the copy, so its rounding nearly averages
out. Where D < 2 d there is no room for the copy, and the norm weights are scaled by sqrt(d/D) instead.

Heads: source heads keep their key-value head. Where the stand-in has fewer heads per key-value head, a key-value head
is duplicated. The output columns of all other heads are zero. Where the head dimension grows f-fold (3b and 7b from
64), rotary pair i of the source becomes pair f i, whose frequency is the same: theta^(-2 f i / (f dim)). Queries are
zero in the other pairs, and are scaled by sqrt(f), since attention divides by the root of the head dimension.

Layers: the source's layers are spread evenly, each after its share of layers that add zero, so that skipping or exiting
after the last layers predicts no better than it does with the source. The vocabulary stays, because a larger one would
change sampled text; extra layers make up for the smaller output head.

Random numbers have the standard deviation of the source's matrix, so that no product is denormal; only what must be
zero is zero. Weights that the stand-in's dtype cannot represent are rounded, and the logits are then those of the
rounded source.

Largest difference of the logits from the source in float32, divided by the standard deviation of the logits (2.7),
measured with the bundled model, whose weights are bfloat16, over 14 prompts:

    computed in   weights    135m      1b        3b, 7b (head dimension 64 -> 128)   the source itself
    float32       float32    6e-6      7e-6      7e-6                                0
    float32       bfloat16   1.2e-3    7e-6      3e-3, as queries grow by sqrt(2)    0
    bfloat16      bfloat16   0.06      0.06      0.05                                0.06

1b in bfloat16 equalled the source bit for bit. With scaled norm weights in place of the copy, the second line would be
2e-2 for 135m. 3b and 7b were measured on smaller shapes with their head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Recurrent:
    """The recurrent layers of a hybrid: Mamba-2 layers, which take the place of attention in most layers.

    Attributes:
        attention: number of layers with attention; all others are recurrent.
        heads, head_dim, state: a recurrent layer's state has heads x head_dim x state numbers.
        kernel: width of the convolution.
        chunk: tokens of a prompt that are computed at a time.
    """

    attention: int
    heads: int
    head_dim: int
    state: int
    kernel: int = 4
    chunk: int = 256

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def convolved(self) -> int:
        """Channels of the convolution: inputs, B and C, in one group."""
        return self.inner + 2 * self.state


@dataclass(frozen=True)
class Shapes:
    """The shapes of a Llama or of a hybrid, which determine its cost.

    Attributes:
        source: origin of the numbers.
        recurrent: None for a Llama.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    source: str
    recurrent: Recurrent | None = None

    @property
    def attention(self) -> int:
        """Number of layers with attention."""
        return self.recurrent.attention if self.recurrent else self.layers

    @property
    def layer(self) -> int:
        """Parameters of one layer with attention."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def recurrent_layer(self) -> int:
        """Parameters of one recurrent layer, or of one layer where there is none."""
        if not (own := self.recurrent):
            return self.layer
        mixer = self.hidden * (own.inner + own.convolved + own.heads) + own.inner * self.hidden
        small = (own.kernel + 1) * own.convolved + 3 * own.heads + own.inner
        return mixer + small + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def per_token(self) -> int:
        """Parameters that a forward of one token reads: all but the embedding, of which it reads one row."""
        recurrent = (self.layers - self.attention) * self.recurrent_layer
        return self.attention * self.layer + recurrent + (self.vocab + 2) * self.hidden

    def holding(self, small: Shapes) -> Shapes:
        """The shapes of a stand-in: the vocabulary of `small`, room for its layers, parameters per token as here."""
        own = self.recurrent and replace(self.recurrent, attention=max(small.layers, self.attention))
        least = replace(self, layers=small.layers, vocab=small.vocab, source=small.source, recurrent=own)
        least = replace(least, layers=own.attention + 1) if own else least
        more = round((self.per_token - least.per_token) / self.recurrent_layer)
        return replace(least, layers=least.layers + max(0, more))


@dataclass(frozen=True)
class Slots:
    """Which rows of a stand-in's matrix hold which rows of the source's (heads, units or tokens).

    Attributes:
        origin: int64 [n], rows of the source's matrix.
        place: int64 [n], the rows of the stand-in's matrix that they become.
        size: rows of the stand-in's matrix.
    """

    origin: Tensor
    place: Tensor
    size: int

    def none(self) -> Slots:
        """The same for a layer that adds zero: no row is taken from the source."""
        return replace(self, origin=self.origin[:0], place=self.place[:0])


@dataclass(frozen=True)
class Planned:
    """A tensor to be written: its name and shape, the names of the source's tensors, and what makes it of them."""

    name: str
    shape: tuple[int, ...]
    origins: tuple[str, ...]
    make: Callable[..., Tensor]

    @property
    def count(self) -> int:
        return math.prod(self.shape)


class Widening:
    """Plans every tensor of a stand-in.

    Args:
        small: shapes of the source.
        large: shapes of the stand-in.
        tied: whether the output head is the embedding.
        seed: of the random numbers, which differ from device to device.
        device: where the tensors are made.
    """

    def __init__(self, small: Shapes, large: Shapes, tied: bool, seed: int, device: torch.device | str = "cpu") -> None:
        self.small, self.large, self.tied = small, large, tied
        self.copy, self.norm_scale = residual(small.hidden, large.hidden)
        self.queries, self.keys = _heads(small, large)
        self.units = Slots(torch.arange(small.intermediate), torch.arange(small.intermediate), large.intermediate)
        self.tokens = Slots(torch.arange(small.vocab), torch.arange(small.vocab), large.vocab)
        self.attention = spread(large.attention, large.layers)
        self.generator = torch.Generator(device).manual_seed(seed)

    def plan(self) -> Iterator[Planned]:
        """All tensors, in the order of the forward."""
        yield self._planned("model.embed_tokens", lambda w: self._writes(w.T, self.tokens).T, self.large.vocab)
        place = {self.attention[i] for i in spread(self.small.layers, self.large.attention)}
        origin = 0  # the random numbers of a layer that adds zero follow the next source layer's
        for layer in range(self.large.layers):
            yield from self._layer(layer, origin, filled=layer in place)
            origin += layer in place
        yield self._planned("model.norm", self._norm)
        if not self.tied:
            yield self._planned("lm_head", lambda w: self._reads(w, self.tokens), self.large.vocab)

    def _layer(self, layer: int, origin: int, filled: bool) -> Iterator[Planned]:
        slots = (self.queries, self.keys, self.units)
        queries, keys, units = slots if filled else (part.none() for part in slots)

        def planned(name: str, make: Callable[[Tensor], Tensor], rows: int | None = None, columns: int = 0) -> Planned:
            return self._planned(f"model.layers.{layer}.{name}", make, rows, columns, f"model.layers.{origin}.{name}")

        yield planned("input_layernorm", self._norm)
        yield planned("self_attn.q_proj", lambda w: self._queries(w, queries), queries.size)
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
    ) -> Planned:
        """A tensor made from the source's `origin` (`name` by default): a matrix if `rows` is given, with D columns."""
        shape = (self.large.hidden,) if rows is None else (rows, columns or self.large.hidden)
        return Planned(f"{name}.weight", shape, (f"{origin or name}.weight",), make)

    def _norm(self, weight: Tensor) -> Tensor:
        """[d] -> [D], zero for entries that must not be read."""
        wide = weight.new_zeros(self.large.hidden)
        wide[: weight.numel()] = weight * self.norm_scale
        return wide

    def _reads(self, weight: Tensor, slots: Slots) -> Tensor:
        """A matrix that reads the residual, [n, d] -> [size, D]."""
        std = weight.std().item()
        random = self.generator
        wide = torch.randn(slots.size, self.large.hidden, generator=random, device=random.device) * std
        wide[slots.place, : weight.shape[1]] = weight[slots.origin]
        return wide

    def _queries(self, weight: Tensor, slots: Slots) -> Tensor:
        """The matrix of the queries: a source head uses the source's rotary pairs only, scaled by sqrt(f)."""
        wide = self._reads(weight, slots)
        dim = self.large.head_dim
        unused = torch.zeros(self.large.heads, dim, dtype=torch.bool)
        unused[slots.place // dim] = True
        unused.view(-1)[slots.place] = False
        wide[unused.view(-1)] = 0
        wide[slots.place, : weight.shape[1]] = weight[slots.origin] * math.sqrt(dim / self.small.head_dim)
        return wide

    def _writes(self, weight: Tensor, slots: Slots) -> Tensor:
        """A matrix that writes to the residual, [d, n] -> [D, size]."""
        narrow = weight.new_zeros(weight.shape[0], slots.size)
        narrow[:, slots.place] = weight[:, slots.origin]
        return self._copied(narrow)

    def _copied(self, weight: Tensor) -> Tensor:
        """[d, n] -> [D, n]: the source's entries of the residual, and their copy."""
        d = weight.shape[0]
        wide = weight.new_zeros(self.large.hidden, weight.shape[1])
        wide[:d] = weight
        if self.copy:
            wide[d : 2 * d] = wide[:d] * self.copy
        return wide


def residual(d: int, wide: int) -> tuple[float, float]:
    """Scales of the residual's copy (s; 0 without one) and of the norm weights, see the module's docstring."""
    excess, norm_scale = wide / d, 1.0
    while excess >= 4:
        excess, norm_scale = excess / 4, norm_scale / 2
    if excess > 1 and wide < 2 * d:
        return 0.0, math.sqrt(d / wide)
    return math.sqrt(excess - 1), norm_scale


def spread(count: int, places: int) -> list[int]:
    """Evenly, each after its share of the other places."""
    return [(i + 1) * places // count - 1 for i in range(count)]


def _heads(small: Shapes, large: Shapes) -> tuple[Slots, Slots]:
    """The slots of the queries, and those of the keys and values.

    Source heads [kv, head of its group] become [kv, part, head of the new group]: a group that is larger than the new
    groups is split, and each part gets a copy of the key-value head.
    """
    group, new_group = small.heads // small.kv_heads, large.heads // large.kv_heads
    parts = kv_parts(small, large)
    head = torch.arange(small.heads)
    new_head = (head // group * parts + head % group // new_group) * new_group + head % group % new_group
    kv = torch.arange(small.kv_heads * parts)
    pair, factor = torch.arange(small.head_dim // 2), large.head_dim // small.head_dim
    dims = torch.cat([pair, pair + small.head_dim // 2])  # a rotary pair is an entry of each half
    new_dims = torch.cat([pair * factor, pair * factor + large.head_dim // 2])

    def rows(heads: Tensor, dims: Tensor, dim: int) -> Tensor:
        return (heads[:, None] * dim + dims).flatten()

    return (
        Slots(
            rows(head, dims, small.head_dim),
            rows(new_head, new_dims, large.head_dim),
            large.heads * large.head_dim,
        ),
        Slots(
            rows(kv // parts, dims, small.head_dim),
            rows(kv, new_dims, large.head_dim),
            large.kv_heads * large.head_dim,
        ),
    )


def kv_parts(small: Shapes, large: Shapes) -> int:
    """Number of key-value heads for each of the source's."""
    return math.ceil((small.heads // small.kv_heads) / (large.heads // large.kv_heads))
