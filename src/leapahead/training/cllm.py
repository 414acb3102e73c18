"""Consistency tuning of a target, so that Jacobi decoding converges in fewer steps (CLLM, 2403.00835).

    L_GC = E over states y of mean over i of KL( stopgrad p(. | x, y*_<i) || p(. | x, y_<i) )       (global consistency)
    L_AR = E over texts of mean over i of -log p(y*_i | x, y*_<i)                                    (autoregressive)
    L_0  = mean over i of KL( p_0(. | x_<i) || p(. | x_<i) ), of prompts and texts       p_0 is the target as it was
    L    = L_GC + w L_AR + v L_0                                    (section 3.2, but for L_0, which is leapahead's)

y* is the text, the fixed point of Jacobi decoding, and y a state on the way to it. The cross entropy of greedy texts
alone makes every distribution narrower; L_0 holds the tuned model near the one that it came from. The text and some of
its states are one token tree, the states being branches that leave the text where they are first wrong:

    text      x1 ─ x2 ─ y*1 ─ y*2 ─ y*3 ─ y*4
    states                └── g2 ── g3 ── g4          every node predicts what the node of the text at its depth does

so one forward with a tree mask computes both sides of L_GC, and nothing twice. Of a state, positions before its
first wrong guess are nodes of the text, where both sides are equal.

The target itself is changed: Jacobi decoding is lossless with respect to the tuned model, not to the one it came from.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leapahead.core.errors import Refused
from leapahead.core.tree import TokenTree, TreeBuilder
from leapahead.models.base import Target
from leapahead.models.transformers.forward import MaskedExecutor
from leapahead.models.transformers.model import TransformersTarget
from leapahead.training import losses
from leapahead.training.recipe import Found
from leapahead.training.settings import CllmSettings
from leapahead.training.student import Student
from leapahead.training.texts import Text
from leapahead.training.trajectories import Trajectory
from leapahead.training.trees import TreeForward

FIXED = 1  # seed of the states of held-out texts


class Rows(NamedTuple):
    """Rows of a forward over several trees, int64 [rows] each.

    Attributes:
        tree: which of the trees.
        node: which of its nodes.
        goal: of a node of the text the next token; of a guess the node of the text at its depth.
    """

    tree: Tensor
    node: Tensor
    goal: Tensor

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, int]], device: torch.device) -> Rows:
        """From triples of tree, node and goal."""
        return cls(*torch.tensor(rows, dtype=torch.long, device=device).reshape(-1, 3).unbind(1))


@dataclass(frozen=True)
class Trajectories:
    """A batch: texts with their states."""

    texts: Sequence[Trajectory]


def masked_executor(target: Target) -> MaskedExecutor:
    """How the target is run over trees, which tuning needs.

    Raises:
        Refused: it takes no trees, has an encoder, or is no model of Transformers.
    """
    executor = target.executor if isinstance(target, TransformersTarget) and target.info.decoder is None else None
    if isinstance(executor, MaskedExecutor):
        return executor
    raise Refused(
        f"{target.info.name} cannot be tuned for Jacobi decoding, which needs a decoder-only model of Transformers "
        "that takes tree masks; give another model"
    )


class CllmRecipe:
    """Tunes a target, see the module.

    Args:
        student: a copy of the target.
        executor: how the target is run over trees.
        settings: complete.
        trajectories: of the texts, by their index.
        original: the target as it was, as Transformers loaded it, where `settings.keep_weight` is not 0.

    Attributes:
        AGREEMENT: what `Found.agreement` holds.
        module: the copy, in float32.
    """

    AGREEMENT: tuple[str, ...] = ("likeliest token is the text's", "the same after wrong guesses")

    def __init__(
        self,
        student: Student,
        executor: MaskedExecutor,
        settings: CllmSettings,
        trajectories: Sequence[Trajectory],
        original: Any = None,
    ) -> None:
        self.module, self.forward = student.model, TreeForward(student.model, executor)
        self.original = TreeForward(original, executor) if settings.keep_weight else None
        self.device: torch.device = executor.device
        self.states, self.ar_weight, self.keep_weight = settings.states, settings.ar_weight, settings.keep_weight
        self._of = {each.index: each for each in trajectories}

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """What is trained, by name."""
        return {name: each for name, each in self.module.named_parameters() if each.requires_grad}

    def batch(self, texts: Sequence[Text]) -> Trajectories:
        """The batch of some texts."""
        return Trajectories([self._of[text.index] for text in texts])

    def loss(self, batch: Trajectories, generator: torch.Generator | None = None) -> Found:
        """The loss of a batch, of whose states some are drawn."""
        seed = FIXED if generator is None else int(torch.randint(1 << 62, (), generator=generator))
        draw = random.Random(seed)
        trees = [tree_of(each, self.states, draw) for each in batch.texts]
        logits = self.forward.logits(trees)
        text, guessed = self._rows(batch.texts, trees)
        chosen = logits[text.tree, text.node].float()
        loss = self.ar_weight * F.cross_entropy(chosen, text.goal)
        right = (chosen.argmax(-1) == text.goal).float().mean()
        after_wrong = torch.zeros_like(right)
        if len(guessed.node):
            p = logits[guessed.tree, guessed.goal].float().detach()
            q = logits[guessed.tree, guessed.node].float()
            loss = loss + losses.kl(q, p, guessed.goal).mean()
            after_wrong = (q.argmax(-1) == p.argmax(-1)).float().mean()
        if self.original is not None:
            loss = loss + self.keep_weight * self._change(batch.texts, logits, self.original)
        return Found(loss, torch.stack([right, after_wrong]).detach())

    def _change(self, texts: Sequence[Trajectory], logits: Tensor, original: TreeForward) -> Tensor:
        """The mean divergence from the original target's distributions, after every token of the prompts and texts.

        Args:
            texts: of the batch.
            logits: of the tuned model, [texts, nodes, vocabulary], the nodes of the texts first.
            original: the target as it was.
        """
        chains = [TokenTree.chain(each.text.tokens[0], each.text.tokens[1:]) for each in texts]
        rows = [(number, node, 0) for number, chain in enumerate(chains) for node in range(len(chain))]
        tree, node, goal = Rows.of(rows, self.device)
        with torch.no_grad():
            p = original.logits(chains)[tree, node].float()
        return losses.kl(logits[tree, node].float(), p, goal).mean()

    def _rows(self, texts: Sequence[Trajectory], trees: Sequence[TokenTree]) -> tuple[Rows, Rows]:
        """The rows of the texts' answers, and those of wrong guesses."""
        text, guessed = [], []
        for number, (each, tree) in enumerate(zip(texts, trees, strict=True)):
            tokens = each.prompt + each.answer
            text += [(number, place, tokens[place + 1]) for place in range(len(each.prompt) - 1, len(tokens) - 1)]
            guessed += [
                (number, node, tree.depth_list[node])
                for node in range(len(tokens), len(tree))
                if tree.depth_list[node] < len(tokens) - 1
            ]
        return Rows.of(text, self.device), Rows.of(guessed, self.device)


def tree_of(trajectory: Trajectory, states: int, draw: random.Random) -> TokenTree:
    """A text, whose nodes come first, with some of its states as branches.

    Args:
        trajectory: the text and its states.
        states: that are drawn, at most.
        draw: draws them.
    """
    tokens = trajectory.prompt + trajectory.answer
    builder = TreeBuilder(tokens[0])
    builder.add_path(tokens[1:])
    for length, guesses in draw.sample(trajectory.states, min(states, len(trajectory.states))):
        builder.add_path(guesses, length - 1)
    return builder.build()
