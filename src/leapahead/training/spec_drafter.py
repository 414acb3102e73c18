"""How the draft model of an encoder-decoder model learns, with mask tokens (Spec-Drafter of SpecDec, 2203.16487).

    source    s s s s s ── encoder ──> states, read by every row of the decoder
    decoder   . y1 y2 y3  m  m  m      a text up to a place, and a block of masks behind it
              y1 y2 y3 y4 y5 y6 y7     what the rows learn to predict: one forward drafts the whole block

Every row learns the target's distribution at the place of the text that it stands for. In each step the block stands at
several places of every text, which are drawn. A mask sees the text and the masks before it. Without masks this is the
ordinary distillation of a smaller encoder-decoder model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from leapahead.core.errors import BadParameter
from leapahead.drafters.sources.draft import MASKED
from leapahead.models.transformers.encoder_decoder import EncoderDecoderTarget
from leapahead.training.draft_model import DraftRecipe
from leapahead.training.pard import FIXED, MASKS
from leapahead.training.recipe import Found
from leapahead.training.sequences import Sequences
from leapahead.training.settings import DraftSettings
from leapahead.training.student import Student
from leapahead.training.texts import Text

PLACES = 4  # of every text, behind which a block of masks stands in a step


class SpecDrafterRecipe(DraftRecipe):
    """Trains a draft model, see the module.

    Args:
        student: the draft model.
        target: the model that it drafts for; it is not changed.
        settings: complete.
        ends: the token ids that end a text.
        mask: the id of the mask; None to train without masks.

    Attributes:
        AGREEMENT: empty; `Found.agreement` holds how often the likeliest token was the text's, at each depth.

    Raises:
        BadParameter: the draft model is to sample answers, which is for decoder-only models.
    """

    AGREEMENT: tuple[str, ...] = ()

    def __init__(
        self,
        student: Student,
        target: EncoderDecoderTarget,
        settings: DraftSettings,
        ends: Sequence[int],
        mask: int | None,
    ) -> None:
        check(settings)
        super().__init__(student, target, settings, ends)
        self.target, self.start, self.mask = target.model.model, list(target.model.start), mask

    def loss(self, batch: Sequences, generator: torch.Generator | None = None) -> Found:
        """The loss of a batch: the mean over the rows of its answers up to the places, and of the masks behind."""
        blocks = self.blocks(batch.texts, generator or torch.Generator().manual_seed(FIXED))
        with torch.no_grad():
            whole = [[*self.start, *text.answer[:-1]] for text in batch.texts]
            p = self._logits(self.target, batch.texts, whole, range(len(whole)))
        q = self._logits(
            self.module,
            batch.texts,
            [self._inputs(batch.texts[text].answer, *block) for text, *block in blocks],
            [text for text, *_ in blocks],
        )
        rows = [
            (number, row, text, max(0, row - place))
            for number, (text, place, masks) in enumerate(blocks)
            for row in range(place + masks + 1)
        ]
        number, row, text, depth = torch.tensor(rows, dtype=torch.long, device=self.device).unbind(1)
        tokens = torch.tensor([batch.texts[each].answer[place] for _, place, each, _ in rows], device=self.device)
        begin, size = len(self.start) - 1, min(p.shape[-1], q.shape[-1])  # one may have rows for no token
        p, q = p[text, row + begin, :size].float(), q[number, row + begin, :size].float()
        with torch.no_grad():
            depths = 1 if self.mask is None else MASKED
            right = (q.argmax(-1) == tokens).float()
            counts = torch.bincount(depth, minlength=depths)
            agreement = torch.bincount(depth, right, minlength=depths) / counts.clamp(min=1)
        return Found(self.divergence(q, p, tokens).mean(), agreement)

    def blocks(self, texts: Sequence[Text], generator: torch.Generator) -> list[tuple[int, int, int]]:
        """What the draft model is run over: a text's number, the tokens of its answer that are given, and the masks.

        With k tokens and m masks, the last row predicts token k + m of the answer, which is its last one at most.
        """
        if self.mask is None:
            return [(number, len(text.answer) - 1, 0) for number, text in enumerate(texts)]
        return [
            (number, place, min(MASKS, len(text.answer) - 1 - place))
            for number, text in enumerate(texts)
            for place in torch.randperm(len(text.answer), generator=generator)[:PLACES].tolist()
        ]

    def _inputs(self, answer: Sequence[int], place: int, masks: int) -> list[int]:
        """The decoder's tokens of a block."""
        return [*self.start, *answer[:place], *[0 if self.mask is None else self.mask] * masks]

    def _logits(self, model: Any, texts: Sequence[Text], inputs: Sequence[list[int]], of: Sequence[int]) -> Tensor:
        """[inputs, tokens, vocabulary] of a model, whose encoder reads each prompt once.

        Args:
            model: of Transformers.
            texts: with the prompts.
            inputs: tokens of the decoder, filled up at the end, which no earlier token sees.
            of: the number of the text of each.
        """
        sources, seen = self._padded([text.prompt for text in texts])
        tokens, _ = self._padded(inputs)
        states = model.get_encoder()(input_ids=sources, attention_mask=seen).last_hidden_state
        owners = torch.tensor(list(of), device=self.device)
        found: Tensor = model(
            encoder_outputs=BaseModelOutput(last_hidden_state=states[owners]),
            attention_mask=seen[owners],
            decoder_input_ids=tokens,
            use_cache=False,
        ).logits
        return found

    def _padded(self, rows: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
        """Token ids, filled up at the end, and what of them is none of that, int64 [rows, tokens] each."""
        longest = max(map(len, rows))
        tokens = [[*row, *[0] * (longest - len(row))] for row in rows]
        seen = [[1] * len(row) + [0] * (longest - len(row)) for row in rows]
        return torch.tensor(tokens, device=self.device), torch.tensor(seen, device=self.device)


def check(settings: DraftSettings) -> None:
    """Refuses settings that are not for encoder-decoder models.

    Raises:
        BadParameter: naming the setting.
    """
    if settings.on_policy:
        raise BadParameter(
            f"on_policy={settings.on_policy:g} is not possible with an encoder-decoder model, whose draft model learns "
            "from the target's own texts; leave on_policy out"
        )
