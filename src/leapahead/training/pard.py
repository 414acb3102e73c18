"""How a draft model learns to predict several tokens in one forward, with mask tokens (PARD, 2504.18583).

    text      x1 ─ x2 ─ x3 ─ x4 ─ x5 ─ x6       a chain of masks hangs below places of every text; the row of x3
                         └── m ── m ── m        predicts x4 as ever, and the masks below it x5, x6, x7

Every row learns what the target predicts at the place of the text that it stands for, so a mask of depth d learns the
mean over the d tokens that it does not know. The text and its masks are one token tree and one forward.

So many masks would make a training several times as long. A mask of depth d is kept at a share of

    max(r^d, r_min)                                                    (conditional drop-token, section 3.3)

of the places, and with it all masks above it in its chain, whose keys and values it needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from leapahead.core.errors import BadParameter, Refused
from leapahead.core.tree import Probes, TokenTree
from leapahead.drafters.sources.draft import MASKED
from leapahead.models import loading
from leapahead.models.transformers import families
from leapahead.models.transformers.forward import MaskedExecutor
from leapahead.models.transformers.model import TransformersTarget
from leapahead.training.draft_model import DraftRecipe
from leapahead.training.recipe import Found
from leapahead.training.sequences import Sequences
from leapahead.training.settings import DraftSettings
from leapahead.training.student import Student
from leapahead.training.texts import Text
from leapahead.training.trees import TreeForward

FIXED = 1  # seed of the places in held-out texts
MASKS = MASKED - 1  # below a place, at most


def executor_of(student: Student) -> MaskedExecutor:
    """How the draft model is run over trees.

    Raises:
        Refused: it takes none.
    """
    target = loading.load(student.model).target
    if isinstance(target, TransformersTarget) and isinstance(target.executor, MaskedExecutor):
        return target.executor
    raise Refused(
        f"{student.name} cannot be trained with mask tokens, which needs a model of Transformers that takes tree "
        "masks; distil it with --kind draft"
    )


def mask_token(student: Student, texts: Iterable[Text], ends: Sequence[int]) -> int:
    """The id of the mask: the draft model's own if it has one, or the highest one that occurs in no text.

    The highest ids are most often rows that no token has, or tokens that are reserved.

    Args:
        student: the draft model.
        texts: all that are trained on or evaluated.
        ends: the token ids that end a text.

    Raises:
        BadParameter: the texts have every id of the vocabulary.
    """
    if (own := families.mask_token(student.model.config)) >= 0:
        return own
    used = set(ends).union(*(text.tokens for text in texts))
    free = set(range(student.model.get_input_embeddings().weight.shape[0])) - used
    if not free:
        raise BadParameter(
            f"the texts have every token of {student.name}, so none can be the mask; add a row to its embedding, and "
            "name it as pard_token in its config.json"
        )
    return max(free)


class PardRecipe(DraftRecipe):
    """Trains a draft model, see the module.

    Args:
        student: the draft model.
        target: the model that it drafts for; it is not changed.
        settings: complete.
        ends: the token ids that end a text.
        executor: how the draft model is run over trees.
        mask: the id of the mask.

    Attributes:
        AGREEMENT: empty; `Found.agreement` holds how often the likeliest token was the text's, at each depth.
    """

    AGREEMENT: tuple[str, ...] = ()

    def __init__(
        self,
        student: Student,
        target: TransformersTarget,
        settings: DraftSettings,
        ends: Sequence[int],
        executor: MaskedExecutor,
        mask: int,
    ) -> None:
        super().__init__(student, target, settings, ends)
        self.forward, self.mask = TreeForward(student.model, executor), mask
        self.shares = [
            max(settings.retention**depth, settings.least_retention) for depth in range(1, MASKS + 1)
        ]  # of the places, by depth

    def loss(self, batch: Sequences, generator: torch.Generator | None = None) -> Found:
        """The loss of a batch: the mean over the rows of its answers and of the masks that are kept."""
        batch = self.with_answers(batch, generator)
        generator = generator or torch.Generator().manual_seed(FIXED)
        trees = [self.tree(text, generator) for text in batch.texts]
        logits = self.forward.logits([tree.computed for tree in trees])
        with torch.no_grad():
            p = batch.logits(self.target)
        tree, node, depth, goal = self._rows(batch.texts, trees)
        size = min(p.shape[-1], logits.shape[-1])  # one of the models may have rows for no token
        q, p, tokens = logits[tree, node, :size].float(), p[goal, :size], batch.next[goal]
        with torch.no_grad():
            right = (q.argmax(-1) == tokens).float()
            counts = torch.bincount(depth, minlength=MASKED)
            agreement = torch.bincount(depth, right, minlength=MASKED) / counts.clamp(min=1)
        return Found(self.divergence(q, p, tokens).mean(), agreement)

    def tree(self, text: Text, generator: torch.Generator) -> TokenTree:
        """A text with chains of masks below some of its places, as probes; they end where the text does."""
        tokens = text.tokens
        first, count = len(text.prompt) - 1, len(text.answer) - 1  # the places that a mask can be below
        kept = [int(share * count) for share in self.shares]
        groups = []
        for rank, place in enumerate(torch.randperm(max(0, count), generator=generator).tolist()):
            length = min(sum(rank < most for most in kept), count - place)
            if length:
                groups.append(Probes(first + place, (self.mask,) * length))
        return TokenTree.chain(tokens[0], tokens[1:]).with_probes(sorted(groups))

    def _rows(self, texts: Sequence[Text], trees: Sequence[TokenTree]) -> tuple[Tensor, ...]:
        """The rows that are trained: tree, node, depth, 0 of the text's own, and the row of the target to learn from.

        The target has a row for every token of the answers.
        """
        found: list[tuple[int, int, int, int]] = []
        start = 0  # the target's row of the first token of an answer
        for number, (text, tree) in enumerate(zip(texts, trees, strict=True)):
            first, row = len(text.prompt) - 1, len(tree)
            found += [(number, first + place, 0, start + place) for place in range(len(text.answer))]
            for node, ids in tree.probes:
                below = start + node - first
                found += [(number, row + place, place + 1, below + 1 + place) for place in range(len(ids))]
                row += len(ids)
            start += len(text.answer)
        return torch.tensor(found, dtype=torch.long, device=self.device).unbind(1)
