"""The decoder of an encoder-decoder model with the interface of a causal language model, for the executors.

Positions. A decoder counts its new tokens from the number of its cached entries, and cannot be told positions as other
models can. In a tree a node's position is not its slot. What a model adds for positions is corrected in its inputs:

    learned, sinusoidal   embeddings given for tokens = e(token) + p(position of the node) - p(position counted)
    relative (T5)         mask added to scores        = mask + b(distance of node and entry) - b(distance counted)

Where every node's position is the one counted, as in a plain step of one sequence, nothing is corrected, so that these
are the model's own numbers, bit by bit. The self-test compares all of it with the model's own plain forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from leapahead.core.errors import Refused
from leapahead.core.tree import IntArray
from leapahead.models.transformers import families
from leapahead.models.transformers.arguments import cache_name
from leapahead.models.transformers.crossed import BothCaches, Cross, CrossedCache
from leapahead.models.transformers.masks import Inputs

if TYPE_CHECKING:
    from typing import Self


class DecoderView(torch.nn.Module):
    """See the module.

    Args:
        model: of Transformers, with an encoder and a decoder.
        start: the tokens that its texts begin with.

    Attributes:
        relative: whether positions are distances, so that a text may have any length.
        bias: the relative position bias of its decoder; None for other kinds of positions, and where layers differ.
        embeds: the positions that its decoder embeds; None for other kinds.
        boolean: whether masks are boolean; else they are added to the scores.
        ids: the token ids of which the self-test draws sources.
    """

    def __init__(self, model: Any, start: Sequence[int]) -> None:
        super().__init__()
        self.__dict__["model"] = model  # not a part of this module: it may be a weak reference
        self.start = list(start)
        self.cache_name = cache_name(model)
        self.ids: IntArray = np.zeros(1, dtype=np.int64)
        self.boolean = families.MASKS[families.attention_implementation(model)]
        decoder = model.get_decoder()
        found = [part for part in decoder.modules() if getattr(part, "has_relative_attention_bias", False)]
        self.relative = bool(found)
        self.bias = RelativeBias(found[0]) if len(found) == 1 else None  # a mask is shared by all layers
        self.embeds = PositionEmbeddings(decoder) if PositionEmbeddings.fit(decoder) else None

    # What executors and tests read of a model

    model: Any

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def generation_config(self) -> Any:
        return self.model.generation_config

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def _is_stateful(self) -> bool:
        return bool(self.model._is_stateful)

    def named_parameters(self, *args: Any, **options: Any) -> Any:
        return self.model.named_parameters(*args, **options)

    def train(self, mode: bool = True) -> Self:
        self.model.train(mode)
        return self

    def get_input_embeddings(self) -> Any:
        return self.model.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        return self.model.get_output_embeddings()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: CrossedCache | None = None,
        places: Tensor | None = None,
        use_cache: bool = True,
    ) -> Any:
        """The logits of the decoder's new tokens.

        Args:
            input_ids: int64 [batch, n].
            attention_mask: [batch, heads or 1, n, entries], as the model takes it; None for its own, for chains.
            cache: its rows have the sources. Without it this is the model's own plain forward, for the
                self-test: of every row from its beginning, with a source that is drawn from its first token.
            places: int64 [batch, n]; the positions. None where they are those that the model counts.
            use_cache: not read.
        """
        if cache is None:
            return self.from_beginning(input_ids, [self.drawn(row) for row in input_ids.tolist()])
        for row in cache.stepped:
            if row.cross is None:
                row.cross = self.encode(row.source or self.drawn(row.tokens), row.states)
        cross = cache.cross()
        given = {"decoder_input_ids": input_ids}
        if places is not None and self.embeds is not None:
            given = {"decoder_inputs_embeds": self.embeds(input_ids, places)}
        shape = len(input_ids), max(cross.lengths), self.get_input_embeddings().weight.shape[-1]
        unread = BaseModelOutput(last_hidden_state=torch.empty(1, device=self.device, dtype=self.dtype).expand(shape))
        begin = cache.longest if places is None else 0
        return self.model(
            **given,
            encoder_outputs=unread,  # its keys and values are in the cache
            attention_mask=self._cross_mask(cross),
            decoder_attention_mask=attention_mask,
            use_cache=True,
            **{self.cache_name: BothCaches(cache, cross, begin)},
        )

    def _cross_mask(self, cross: Cross) -> Tensor | None:
        mask = cross.mask
        if mask is None or self.boolean:
            return mask
        return torch.zeros(mask.shape, dtype=self.dtype, device=self.device).masked_fill_(
            ~mask, torch.finfo(self.dtype).min
        )

    def masks(self, inputs: Inputs, mask: Tensor) -> Tensor:
        """The mask with the correction of the relative bias, [batch, heads, n, entries], of an additive one."""
        assert self.bias is not None
        n, end = inputs.tokens.shape[1], inputs.end
        counted = torch.arange(n, device=mask.device)[:, None] - torch.arange(end, device=mask.device)
        wanted = inputs.positions[:, :, None] - inputs.key_positions[:, None]
        bias = self.bias(end + n)
        return mask + bias[:, wanted.clamp_min(0)].transpose(0, 1) - bias[:, counted.clamp_min(0)]

    def forget(self) -> None:
        """Drops what was computed from weights, which may change before the next forward."""
        if self.bias is not None:
            self.bias.forget()

    def encode(self, source: Sequence[int], states: Tensor | None = None) -> Cross:
        """Runs the encoder, and one step of the decoder, which computes the keys and values of the source.

        Args:
            source: token ids of the encoder's input.
            states: the encoder's output for it, [tokens, width], where it is known.
        """
        caches = EncoderDecoderCache(DynamicCache(), DynamicCache())
        given = {"input_ids": torch.tensor([list(source)], device=self.device)}
        if states is not None:
            given = {"encoder_outputs": BaseModelOutput(last_hidden_state=states[None].to(self.device, self.dtype))}
        begin = torch.tensor([self.start[:1]], device=self.device)
        with families.unchanged_attention(self.model):
            self.model(**given, decoder_input_ids=begin, use_cache=True, **{self.cache_name: caches})
        entries = caches.cross_attention_cache
        if not entries.layers:
            raise Refused("its decoder gives no keys and values of the encoder's output")
        return Cross(entries, (entries.get_seq_length(),))

    def drawn(self, tokens: Sequence[int]) -> list[int]:
        """The source of a text of the self-test: 2 to 24 tokens, nearly always of another length for another text."""
        rng = np.random.default_rng(int(tokens[0]))
        return [int(token) for token in rng.choice(self.ids, size=2 + int(tokens[0]) % 23)]

    def from_beginning(self, tokens: Tensor, sources: Sequence[list[int]]) -> Any:
        """The model's own plain forward over whole texts.

        Args:
            tokens: int64 [batch, n], of the decoder.
            sources: token ids of the encoder's input, one for each text.
        """
        longest = max(map(len, sources))
        given = [[*source, *source[:1] * (longest - len(source))] for source in sources]
        mask = [[1] * len(source) + [0] * (longest - len(source)) for source in sources]
        with families.unchanged_attention(self.model):
            return self.model(
                input_ids=torch.tensor(given, device=self.device),
                attention_mask=torch.tensor(mask, device=self.device),
                decoder_input_ids=tokens,
                use_cache=False,
            )


class RelativeBias:
    """The bias of T5's decoder by distance, computed by the layer that owns it.

    Args:
        layer: an attention layer with `compute_bias(query_length, key_length, device, past_seen_tokens)`.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self.forget()

    def forget(self) -> None:
        self._found = torch.empty(0, 0)

    def __call__(self, length: int) -> Tensor:
        """[heads, length or more]: what is added to the score of an entry at each distance before a token."""
        weight = self._layer.relative_attention_bias.weight
        if self._found.shape[1] < length or self._found.dtype != weight.dtype or self._found.device != weight.device:
            length = 1 << (length - 1).bit_length()
            found = self._layer.compute_bias(1, length, device=weight.device, past_seen_tokens=length - 1)
            self._found = found[0, :, 0].flip(-1)
        return self._found


class PositionEmbeddings:
    """Embeddings of tokens that correct the positions which a decoder counts from 0.

    Args:
        decoder: with `embed_tokens` and `embed_positions`, as those of BART, Marian, Pegasus and Blenderbot.
    """

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self._scale = float(getattr(decoder, "embed_scale", 1.0))  # of embeddings, before positions are added

    @staticmethod
    def fit(decoder: Any) -> bool:
        """Whether a decoder has both, and gives the embeddings of positions that are named."""
        positions = getattr(decoder, "embed_positions", None)
        named = positions is not None and "position_ids" in inspect.signature(positions.forward).parameters
        return named and getattr(decoder, "embed_tokens", None) is not None

    def __call__(self, tokens: Tensor, places: Tensor) -> Tensor:
        """[batch, n, width] for tokens and positions [batch, n]."""
        counted = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        moved = self._of(tokens, places) - self._of(tokens, counted)
        return self._decoder.embed_tokens(tokens) + moved / self._scale  # type: ignore[no-any-return]

    def _of(self, tokens: Tensor, places: Tensor) -> Tensor:
        found: Tensor = self._decoder.embed_positions(tokens, position_ids=places.flatten())
        return found.view(*places.shape, -1)
