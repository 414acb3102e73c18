"""How Hydra, DFlash and DFlash 2 are trained: what they predict, and the weights that they start with.

Hydra     head k predicts token i + 2 + k from the target's last state and tokens i + 1 .. i + 1 + k of the text
          (2402.05109, section 3); Hydra++ learns the target's distribution, from its layer's state (section 4)
DFlash    a block of masks behind token i + 1 predicts the tokens behind it (2602.06036, section 4); in training,
          some blocks of each text, which see the states before them and nothing of one another
DFlash 2  the same, and its selector learns, by the same loss, which of the likeliest tokens of each row follows the
          one before in the text; where it is not among them, it takes the place of the last one (speculators #1006)

block a   x m m m        keys:   states 0 .. i of the text | rows of block a | rows of block b
block b         x m m m          the first ones up to its own i, and its own rows
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leapahead.drafters.heads.config import DFlash2Config, DFlashConfig
from leapahead.training.attention import DraftedAttention
from leapahead.training.batches import Batch
from leapahead.training.recipe import Found, Goal, Recipe

PROBED = 16  # tokens whose states tell how large the target's are
BLOCKS = 16  # of each text that are trained in one step


class HydraRecipe(Recipe):
    """See the module."""

    def start(self) -> None:
        self.module.embed_tokens.weight = nn.Parameter(self.target.embedding, requires_grad=False)
        for layer in self.module.lm_heads:
            layer.weight = nn.Parameter(self.rows_of_output())
        if self.module.has_attention:
            self.start_layer(self.module.prefix.layers[0])
            (states,) = self.target.hidden([list(range(PROBED))], [self.target.layers])
            nn.init.constant_(self.module.prefix.norm.weight, states.float().pow(2).mean().sqrt().item())

    def read(self, batch: Batch) -> Tensor:
        """What the heads read of every row, float [texts, tokens, hidden_size]."""
        positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)[None]
        found: Tensor = self.module.read(batch.last, positions, DraftedAttention(batch.visible))
        return found

    def states(self, batch: Batch, generator: torch.Generator | None) -> Iterator[Tensor]:
        states = self.read(batch)[:, batch.first :]
        tokens = F.pad(batch.tokens[:, batch.first + 1 :], (0, 1 + self.depths))
        following = tokens.unfold(1, self.depths, 1)[:, : states.shape[1]]
        for depth in range(self.depths):
            yield self.module.hidden(depth, states, following[..., : depth + 1])

    def logits(self, depth: int, states: Tensor) -> Tensor:
        found: Tensor = self.module.lm_heads[depth](states)
        return found


class DFlashRecipe(Recipe):
    """See the module."""

    config: DFlashConfig

    def start(self) -> None:
        self.module.embed_tokens.weight = nn.Parameter(self.target.embedding, requires_grad=False)
        self.module.lm_head.weight = nn.Parameter(self.target.output, requires_grad=False)
        for layer in self.module.layers:
            self.start_layer(layer)

    def loss(self, batch: Batch, generator: torch.Generator | None = None) -> Found:
        """Of `BLOCKS` blocks of each text, drawn at random, or without a generator of all."""
        if generator is not None:
            text, position = (each.cpu() for each in batch.rows)
            order = torch.zeros(batch.tokens.shape)
            order[text, position] = torch.rand(len(text), generator=generator) + 1
            least = order.topk(min(BLOCKS, order.shape[1])).values[:, -1:]
            batch = replace(batch, drawn=(order >= least).to(batch.tokens.device))
        return super().loss(batch, generator)

    def states(self, batch: Batch, generator: torch.Generator | None) -> Iterator[Tensor]:
        text, position = batch.rows
        count = torch.bincount(text, minlength=len(batch.tokens))
        place = torch.arange(len(text), device=text.device) - (count.cumsum(0) - count)[text]
        last = torch.zeros(len(batch.tokens), int(count.max()), dtype=torch.long, device=text.device)
        last[text, place] = position  # of blocks that fill up, the state of position 0
        found = self._blocks(batch, last)[text, place]
        for depth in range(self.depths):
            states = found.new_zeros(*batch.tokens.shape, found.shape[-1])
            states[text, position] = found[:, depth]
            yield states[:, batch.first :]

    def _blocks(self, batch: Batch, last: Tensor) -> Tensor:
        """What the output layer reads of blocks, float [texts, blocks, depths, hidden_size].

        Args:
            batch: of texts.
            last: int64 [texts, blocks], the last position whose state each block sees.
        """
        rows, blocks = self.module.rows, last.shape[1]
        positions = torch.arange(batch.tokens.shape[1], device=last.device)[None]
        context = self.module.context(batch.states[..., : -self.target.hidden_size], positions)
        own = torch.arange(blocks, device=last.device).repeat_interleave(rows)
        seen = batch.visible.gather(1, last[..., None].expand(-1, -1, positions.shape[1])).repeat_interleave(rows, 1)
        mask = torch.cat((seen, (own[:, None] == own).expand(len(last), -1, -1)), dim=-1)[:, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = (torch.cat(each, dim=2).to(v.dtype) for each in zip(context[layer], (k, v), strict=True))
            return F.scaled_dot_product_attention(q.to(v.dtype), keys, values, attn_mask=mask, enable_gqa=True)

        tokens = self.module.block(batch.tokens.gather(1, last + 1)).flatten(1)
        places = (last[..., None] + 1 + torch.arange(rows, device=last.device)).flatten(1)
        states = self.module(tokens, places, attend).unflatten(1, (blocks, rows))
        found: Tensor = self.module.predicting(states)
        return found

    def logits(self, depth: int, states: Tensor) -> Tensor:
        return self.target.logits(states)


class DFlash2Recipe(DFlashRecipe):
    """See the module."""

    config: DFlash2Config

    def row_loss(self, depth: int, states: Tensor, goal: Goal) -> tuple[Tensor, Tensor]:
        logits = self.logits(depth, states).float()
        best = logits.detach().topk(self.config.candidates, dim=-1).indices
        is_right = best == goal.tokens[:, None]
        found = is_right.any(-1)
        trained = torch.where(found[:, None], best, torch.cat((best[:, :-1], goal.tokens[:, None]), dim=-1))
        place = torch.where(found, is_right.int().argmax(-1), best.shape[-1] - 1)
        scores = self.module.candidate_selector.scores(logits.gather(-1, trained), trained, states, goal.before).float()
        wanted = goal.logits.gather(-1, trained) if goal.logits.shape[-1] else goal.logits
        loss = self.loss_of(logits, goal.logits, goal.tokens) + self.loss_of(scores, wanted, place)
        likeliest = trained.gather(-1, scores.detach().argmax(-1, keepdim=True))[:, 0]
        return loss, torch.where(found, likeliest, -1)
