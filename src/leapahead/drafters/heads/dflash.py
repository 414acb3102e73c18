"""The network of DFlash (2602.06036), which predicts a block of tokens in one forward, and of DSpark (2607.05147).

    context row i   hidden_norm(fc([states of several layers at position i]))    read by every layer as keys and values
    block           x, mask, mask, ...      x the last committed token; its rows see the context and one another

The rows of the block, normed, give the logits of its positions. DSpark adds a bias to the logits after each token
d: W2 W1[d], of which W1 may be gated by the row's state. It predicts from the row of x too. DFlash 2 is in `dflash2`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from leapahead.drafters.heads.config import GATED, DFlashConfig
from leapahead.drafters.heads.modules import Attend, DecoderLayer


class Markov(nn.Module):
    """DSpark's bias of the logits after a token.

    Args:
        config: of the head.
        gated: whether the row's state scales it.
    """

    def __init__(self, config: DFlashConfig, gated: bool) -> None:
        super().__init__()
        rank = config.markov_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if gated:
            self.gate_proj = nn.Linear(config.hidden_size + rank, rank)
        self.gated = gated

    def forward(self, tokens: Tensor, states: Tensor) -> Tensor:
        """float [..., draft vocabulary], of tokens int64 [...] before the rows with states float [..., hidden_size]."""
        x = self.markov_w1(tokens)
        if self.gated:
            states = states.expand(*tokens.shape, -1)
            x = torch.sigmoid(self.gate_proj(torch.cat((states, x), dim=-1))) * x
        found: Tensor = self.markov_w2(x)
        return found


class DFlash(nn.Module):
    """See the module.

    Attributes:
        d2t: int64 [draft vocabulary], what is added to a draft token's id to get the target's; None for nothing.
    """

    has_attention = True
    d2t: Tensor | None

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        assert config.decoder is not None, "DFlash has decoder layers"
        self.llama = llama = LlamaConfig(**{**config.decoder, "hidden_size": config.hidden_size})
        size, eps = config.hidden_size, llama.rms_norm_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(llama)
        self.fc = nn.Linear(len(config.layers) * config.target_hidden_size, size, bias=config.bias)
        self.hidden_norm = LlamaRMSNorm(size, eps)
        self.layers = nn.ModuleList(self.new_layer() for _ in range(llama.num_hidden_layers))
        self.norm = LlamaRMSNorm(size, eps)
        if config.markov:
            self.markov_head = Markov(config, config.markov == GATED)

    def new_layer(self) -> DecoderLayer:
        """A decoder layer."""
        return DecoderLayer(self.llama, self.config.hidden_size, norms_heads=True)

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return self.config.rows

    def context(self, states: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of committed tokens, of each layer: [batch, key heads, rows, dim] each.

        Args:
            states: float [batch, rows, layers * target_hidden_size], the target's.
            positions: int64 [batch, rows].
        """
        x = self.hidden_norm(self.fc(states))
        angles = self.rotary(x, positions)
        return [layer.self_attn.projected(x, angles)[1:] for layer in self.layers]  # type: ignore[operator, union-attr]

    def block(self, tokens: Tensor) -> Tensor:
        """The tokens of blocks, int64 [..., rows], behind the last committed tokens int64 [...]."""
        masks = torch.full((*tokens.shape, self.rows - 1), self.config.mask_token, device=tokens.device)
        return torch.cat((tokens[..., None], masks), dim=-1)

    def embedded(self, tokens: Tensor) -> Tensor:
        """What the first layer adds to, float [..., hidden_size]."""
        found: Tensor = self.embed_tokens(tokens)
        return found

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """What the output layer reads of the rows of blocks, float [batch, rows, hidden_size].

        Args:
            tokens: int64 [batch, rows], of `block`.
            positions: int64 [batch, rows].
            attend: computes the attention over the context and the block.
        """
        x = self.embedded(tokens)
        angles = self.rotary(x, positions)
        for index, layer in enumerate(self.layers):
            x = layer(index, x, layer.input_layernorm(x), angles, attend)  # type: ignore[operator]
        found: Tensor = self.norm(x)
        return found

    def predicting(self, states: Tensor) -> Tensor:
        """Of the rows of a block, float [..., rows, hidden_size], those that predict: [..., depths, hidden_size]."""
        return states[..., self.rows - self.config.depths :, :]

    def logits(self, states: Tensor) -> Tensor:
        """float [..., draft vocabulary], of rows that predict, float [..., hidden_size], whatever is before them."""
        found: Tensor = self.lm_head(states)
        return found

    def after(self, logits: Tensor, states: Tensor, tokens: Tensor) -> Tensor:
        """The logits of rows after the tokens before them; only DSpark and DFlash 2 read those.

        Args:
            logits: float [..., draft vocabulary], those of `states`. The dimensions in front may be 1, or left out.
            states: float [..., hidden_size].
            tokens: int64 [...], the token before the predicted one.

        Returns:
            float [..., draft vocabulary].
        """
        return logits + self.markov_head(tokens, states) if self.config.markov else logits

    def one(self, states: Tensor, tokens: Tensor) -> Tensor:
        """The logits of rows that predict; see `after`."""
        return self.after(self.logits(states), states, tokens)
