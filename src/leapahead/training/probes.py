"""How probes are trained: PaSS, of which only they are, and SPACE, which tunes the target with them.

    text      x1 ─ x2 ─ x3 ─ x4 ─ x5 ─ x6       a group of probes hangs below some places of every text; after x3,
                         └── p1 ── p2           x4 is what the target chooses itself, and p1, p2 predict x5, x6

    PaSS      sum over depths d of 0.8^d loss(p_d, what the text's own row predicts there)        (2311.13581)
    SPACE     the same + w times the cross entropy of the text; the mask is one embedding         (2402.11809)

The text and its groups are one token tree, as in a step of decoding, so one forward with a tree mask gives both sides
of the loss. What the text's own rows predict is a constant in the first part, also where the target itself is tuned.
Of SPACE, decoding is lossless with respect to the tuned model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leapahead.core.errors import Refused
from leapahead.core.tree import Probes, TokenTree
from leapahead.drafters.heads.config import SPACE
from leapahead.models.base import EMBEDDINGS, HIDDEN, Target
from leapahead.models.transformers import families
from leapahead.models.transformers.embeddings import AddedEmbeddings
from leapahead.models.transformers.forward import MaskedExecutor
from leapahead.models.transformers.model import TransformersTarget
from leapahead.training import losses
from leapahead.training.recipe import DECAY, Found
from leapahead.training.settings import ProbeSettings
from leapahead.training.texts import Text
from leapahead.training.trees import TreeForward

FIXED = 1  # seed of the places in held-out texts
NOISE = 0.5  # of the first embeddings, as a part of the spread of the model's own


def masked_executor(target: Target) -> MaskedExecutor:
    """How the target is run over trees with probes.

    Raises:
        Refused: it takes none.
    """
    if EMBEDDINGS in target.info.capabilities and isinstance(target, TransformersTarget):
        assert isinstance(target.executor, MaskedExecutor), "others do not have the capability"
        return target.executor
    has_hidden = HIDDEN in target.info.capabilities
    instead = "a head with `leapahead train-head`" if has_hidden else "a draft model with `leapahead train-draft`"
    raise Refused(
        f"no probes can be trained for {target.info.name}, which must be a model of Transformers that takes tree masks "
        f"and embeddings; train {instead}"
    )


class ProbeNetwork(nn.Module):
    """What is trained.

    Args:
        rows: number of embeddings.
        own: the model's embedding, float [vocabulary, hidden_size]; the new ones begin near the mean of it.
        model: that is trained too; None where it is not.
    """

    def __init__(self, rows: int, own: Tensor, model: nn.Module | None) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(rows, own.shape[1], device=own.device)
        own = own.detach().float()
        with torch.no_grad():
            self.embeddings.weight.mul_(NOISE * own.std(0)).add_(own.mean(0))
        self.model = model


class ProbeRecipe:
    """Trains probes, see the module.

    Args:
        model: of Transformers; for SPACE a copy of the target, in float32, which is trained too.
        executor: how the target is run over trees.
        settings: complete.

    Attributes:
        module: what is trained.
        depths: probes of a group.
    """

    AGREEMENT: tuple[str, ...] = ()

    def __init__(self, model: Any, executor: MaskedExecutor, settings: ProbeSettings) -> None:
        self.model, self.settings, self.forward = model, settings, TreeForward(model, executor)
        self.device: torch.device = executor.device
        self.depths, self.is_tuned = settings.depths, settings.kind == SPACE
        self.loss_of = losses.LOSSES[settings.loss]
        model.requires_grad_(self.is_tuned)
        torch.manual_seed(settings.seed)
        own = model.get_input_embeddings().weight
        self.module = ProbeNetwork(1 if self.is_tuned else self.depths, own, model if self.is_tuned else None).to(
            self.device
        )
        self.first = max(families.text_config(model).vocab_size, len(own))
        self.ids = (self.first,) * self.depths if self.is_tuned else tuple(range(self.first, self.first + self.depths))

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """What is trained, by name."""
        return {name: each for name, each in self.module.named_parameters() if each.requires_grad}

    def batch(self, texts: Sequence[Text]) -> Sequence[Text]:
        """The batch of some texts."""
        return texts

    def loss(self, batch: Sequence[Text], generator: torch.Generator | None = None) -> Found:
        """The loss of a batch, at places of its texts that are drawn."""
        generator = generator or torch.Generator().manual_seed(FIXED)
        trees = [self._tree(text, generator) for text in batch]
        logits = self.logits(trees)
        total, agreement = logits.new_zeros((), dtype=torch.float32), []
        for depth in range(self.depths):
            tree, row, place, token = self._rows(batch, trees, depth)
            q, p = logits[tree, row].float(), logits[tree, place].float().detach()
            if not len(token):
                agreement.append(torch.zeros_like(total))
                continue
            total = total + DECAY**depth * self.loss_of(q, p, token).mean()
            agreement.append((q.argmax(-1) == token).float().mean())
        if self.is_tuned:
            total = total + self.settings.ar_weight * self._text_loss(batch, logits)
        return Found(total, torch.stack(agreement).detach())

    def logits(self, trees: Sequence[TokenTree]) -> Tensor:
        """[trees, nodes and probes, vocabulary], in one forward."""
        added = AddedEmbeddings(self.model, self.first)
        added.rows = self.module.embeddings.weight.to(added.rows.dtype)
        return self.forward.logits([tree.computed for tree in trees], added.look_up)

    def _tree(self, text: Text, generator: torch.Generator) -> TokenTree:
        """A text with groups below some of the places where one may be decoded from; they end where it does."""
        tokens = text.tokens
        first, last = len(text.prompt) - 1, len(tokens) - 3  # the first probe predicts the token after the next
        drawn = torch.randperm(max(0, last + 1 - first), generator=generator)[: self.settings.groups]
        groups = [Probes(first + place, self.ids[: last + 1 - first - place]) for place in sorted(drawn.tolist())]
        return TokenTree.chain(tokens[0], tokens[1:]).with_probes(groups)

    def _rows(self, texts: Sequence[Text], trees: Sequence[TokenTree], depth: int) -> tuple[Tensor, ...]:
        """The probes of one depth: tree, row, the place of the text that predicts the same, and the token there."""
        found = []
        for number, (text, tree) in enumerate(zip(texts, trees, strict=True)):
            tokens, row = text.tokens, len(tree)
            for node, ids in tree.probes:
                if depth < len(ids):
                    found.append((number, row + depth, node + 1 + depth, tokens[node + 2 + depth]))
                row += len(ids)
        return torch.tensor(found, dtype=torch.long, device=self.device).reshape(-1, 4).unbind(1)

    def _text_loss(self, texts: Sequence[Text], logits: Tensor) -> Tensor:
        """The cross entropy of the answers' tokens."""
        rows = torch.tensor(
            [
                (number, place, text.tokens[place + 1])
                for number, text in enumerate(texts)
                for place in range(len(text.prompt) - 1, len(text.tokens) - 1)
            ],
            device=self.device,
        )
        tree, place, token = rows.unbind(1)
        return F.cross_entropy(logits[tree, place].float(), token)
