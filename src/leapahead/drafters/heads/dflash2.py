"""The network of DFlash 2 (Z Lab and Inco AI, 2026; vLLM #52816): DFlash with convolutions and a candidate selector.

    convolution   y[i] = sum over taps t of (base[t] + change[i, t]) * x[i - t]    by channel, within one block
    selector      score(c after p) = logit[i, c] + <A[p] * W h[i], B[c]>           of the likeliest tokens c of row i

Convolutions stand before and behind the attention and the MLP of every layer. The change is a projection of the
sublayer's input, the same for all channels of a group. So a row of a block knows the rows before it, and the selector
which token was drafted before.

The published implementations draft from the candidates of the selector alone. Here it divides the probability that the
logits give to its candidates among them, and all other tokens keep theirs: when sampling, the noise of a seed often
makes one of those the next token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig

from leapahead.drafters.heads.config import DFlash2Config
from leapahead.drafters.heads.dflash import DFlash
from leapahead.drafters.heads.modules import Angles, Attend, DecoderLayer


class Convolution(nn.Module):
    """The two convolutions of a sublayer, which are the identity at the start.

    Args:
        size: channels.
        taps: rows that are added up, the newest one and those before it.
        group: channels that have the same change.
        rows: of a block, which the taps do not leave.
    """

    def __init__(self, size: int, taps: int, group: int, rows: int) -> None:
        super().__init__()
        self.taps, self.group, self.rows = taps, group, rows
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, size))
        self.kernel_projection = nn.Linear(size, 2 * taps * size // group, bias=False)
        with torch.no_grad():
            self.base_kernel[:, 0] = 1
            self.kernel_projection.weight.zero_()

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What the sublayer reads instead of `x`, float [batch, blocks * rows, size], and the change behind it."""
        change = self.kernel_projection(x).view(*x.shape[:-1], 2, self.taps, -1)
        return self._convolved(x, self.base_kernel[0], change[..., 0, :, :]), change[..., 1, :, :]

    def behind(self, x: Tensor, change: Tensor) -> Tensor:
        """What is added to the residual stream instead of `x`, the output of the sublayer."""
        return self._convolved(x, self.base_kernel[1], change)

    def _convolved(self, x: Tensor, base: Tensor, change: Tensor) -> Tensor:
        """float [batch, blocks * rows, size], of change [batch, blocks * rows, taps, groups]."""
        blocks = x.reshape(len(x), -1, self.rows, x.shape[-1] // self.group, self.group)
        factors = base.view(self.taps, -1, self.group) + change.reshape(*blocks.shape[:3], self.taps, -1, 1)
        found: Tensor = factors[..., 0, :, :] * blocks
        for tap in range(1, self.taps):
            shifted = F.pad(blocks, (0, 0, 0, 0, tap, 0))[:, :, : self.rows]
            found = found + factors[..., tap, :, :] * shifted
        return found.flatten(-2).flatten(1, 2)


class ConvolvedLayer(DecoderLayer):
    """A decoder layer with convolutions around its sublayers."""

    def __init__(self, config: LlamaConfig, size: int, head: DFlash2Config) -> None:
        super().__init__(config, size, norms_heads=True)
        self.attention_conv = Convolution(size, head.taps, head.group, head.rows)
        self.mlp_conv = Convolution(size, head.taps, head.group, head.rows)

    def forward(self, layer: int, residual: Tensor, x: Tensor, angles: Angles, attend: Attend) -> Tensor:
        x, change = self.attention_conv.before(x)
        residual = residual + self.attention_conv.behind(self.self_attn(layer, x, angles, attend), change)
        x, change = self.mlp_conv.before(self.post_attention_layernorm(residual))
        return residual + self.mlp_conv.behind(self.mlp(x), change)


class Selector(nn.Module):
    """Scores the likeliest tokens of a row after a token that is drafted before it."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        self.count = config.candidates
        shape = config.vocab_size, config.selector_rank
        self.predecessor_codebook = nn.Parameter(torch.empty(shape))
        self.successor_codebook = nn.Parameter(torch.zeros(shape))  # so that at the start the logits decide alone
        nn.init.normal_(self.predecessor_codebook)
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def scores(self, logits: Tensor, tokens: Tensor, states: Tensor, before: Tensor) -> Tensor:
        """Logits of candidates, float [..., candidates], which together have the probability that they had before.

        The dimensions in front are those of all arguments together.

        Args:
            logits: float [..., candidates], theirs.
            tokens: int64 [..., candidates], the candidates.
            states: float [..., hidden_size], of the row that predicts them.
            before: int64 [...], the token before them.
        """
        # Not by indexing, whose gradient several threads add up in any order.
        context = F.embedding(before, self.predecessor_codebook) * self.hidden_projection(states)
        found: Tensor = logits + (context[..., None, :] * F.embedding(tokens, self.successor_codebook)).sum(-1)
        return found + logits.logsumexp(-1, keepdim=True) - found.logsumexp(-1, keepdim=True)


class DFlash2(DFlash):
    """See the module."""

    config: DFlash2Config

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config)
        self.candidate_selector = Selector(config)

    def new_layer(self) -> DecoderLayer:
        return ConvolvedLayer(self.llama, self.config.hidden_size, self.config)

    def embedded(self, tokens: Tensor) -> Tensor:
        return super().embedded(tokens) * self.config.embedding_scale

    def logits(self, states: Tensor) -> Tensor:
        found = super().logits(states)
        if cap := self.config.softcap:
            found = cap * torch.tanh(found / cap)
        return found * self.config.output_scale

    def after(self, logits: Tensor, states: Tensor, tokens: Tensor) -> Tensor:
        best = logits.topk(self.candidate_selector.count, dim=-1)
        scores = self.candidate_selector.scores(best.values, best.indices, states, tokens)
        return logits.expand(*scores.shape[:-1], -1).scatter(-1, best.indices.expand_as(scores), scores)
