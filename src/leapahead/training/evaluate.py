"""How many tokens a head would save, measured on texts that are known: at every place of a text it drafts once.

The target chooses the text's own tokens, whatever was drafted, so no text is decoded. What counts is the number of
drafted tokens that the text goes on with: of a chain, and of a tree of the likeliest nodes, grown as in EAGLE-2
(2406.16858, section 4.1). Going through a text by what was accepted gives the tokens per forward; plain decoding has 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from leapahead.training.attention import DraftedAttention
from leapahead.training.batches import Batch, batch_of
from leapahead.training.block_recipes import DFlashRecipe, HydraRecipe
from leapahead.training.features import Features
from leapahead.training.recipe import Recipe
from leapahead.training.recipes import ParallelRecipe, RowRecipe
from leapahead.training.texts import Progress, Text

DEPTH, NODES = 5, 16
FRONTIER, CANDIDATES = 4, 8  # nodes of a level that are continued, and tokens after each of them
TOGETHER = 32  # places of a text that are drafted at together
ROWS = 1 << 15  # of a text, times these places: EAGLE's attention copies the keys and values of a text for each place
EVERYTHING = 1 << 30  # tokens of a prompt


@dataclass(frozen=True)
class Evaluation:
    """What was measured on one set of texts.

    Attributes:
        name: of the set.
        texts, tokens: number of texts, and of tokens of their answers.
        depths: of a chain of 5, how often the token at each depth was right where those before it were.
        chain: tokens per forward with that chain.
        tree: tokens per forward with a tree of 16 nodes.
    """

    name: str
    texts: int
    tokens: int
    depths: tuple[float, ...]
    chain: float
    tree: float


class Drafts(ABC):
    """Drafts at several places of one text together.

    Attributes:
        depths: of which there are logits.
    """

    depths = DEPTH

    @abstractmethod
    def first(self) -> Tensor:
        """Logits after each place, [places, 1, draft vocabulary]."""

    @abstractmethod
    def next(self, depth: int, parents: Tensor, tokens: Tensor) -> Tensor:
        """Logits after drafted tokens, [places, nodes, draft vocabulary].

        Args:
            depth: of these tokens, from 1.
            parents: int64 [places, nodes], which of the nodes of the call before each one is below.
            tokens: int64 [places, nodes], their ids in the target's vocabulary.
        """


class BlockDrafts(Drafts):
    """Medusa and DFlash: the candidates of a depth are the same below every node."""

    def __init__(self, recipe: Recipe, batch: Batch, rows: Tensor) -> None:
        self._recipe, self.depths = recipe, recipe.depths
        drawn = torch.zeros_like(batch.tokens, dtype=torch.bool)
        drawn[0, rows] = True
        found = recipe.states(replace(batch, drawn=drawn), None)
        self._states = [states[0, rows - batch.first] for states in found]

    def first(self) -> Tensor:
        return self._at(0)

    def next(self, depth: int, parents: Tensor, tokens: Tensor) -> Tensor:
        return self._at(depth).expand(-1, tokens.shape[1], -1)

    def _at(self, depth: int) -> Tensor:
        return self._recipe.logits(depth, self._states[depth])[:, None].float()


class ChainedDrafts(BlockDrafts):
    """DFlash 2: the candidates of a depth depend on the token before."""

    def __init__(self, recipe: Recipe, batch: Batch, rows: Tensor) -> None:
        super().__init__(recipe, batch, rows)
        self._last = batch.tokens[0, rows + 1][:, None]

    def first(self) -> Tensor:
        return self._after(0, self._last)

    def next(self, depth: int, parents: Tensor, tokens: Tensor) -> Tensor:
        return self._after(depth, tokens)

    def _after(self, depth: int, tokens: Tensor) -> Tensor:
        states = self._states[depth][:, None]
        found: Tensor = self._recipe.module.after(self._recipe.logits(depth, states).float(), states, tokens)
        return found


class HydraDrafts(Drafts):
    """Hydra: every node is a row of its own, of the state and the tokens before it."""

    def __init__(self, recipe: HydraRecipe, batch: Batch, rows: Tensor) -> None:
        self._recipe, self.depths = recipe, recipe.depths
        self._states = recipe.read(batch)[0, rows]
        self._paths = batch.tokens[0, rows + 1][:, None, None]  # [places, nodes, tokens]

    def first(self) -> Tensor:
        return self._at(0)

    def next(self, depth: int, parents: Tensor, tokens: Tensor) -> Tensor:
        above = self._paths.gather(1, parents[..., None].expand(-1, -1, depth))
        self._paths = torch.cat((above, tokens[..., None]), dim=-1)
        return self._at(depth)

    def _at(self, depth: int) -> Tensor:
        states = self._states[:, None].expand(-1, self._paths.shape[1], -1)
        found: Tensor = self._recipe.module.one(depth, states, self._paths)
        return found.float()


@dataclass(frozen=True)
class Committed:
    """The rows of a text that are not drafted, which are computed once.

    Attributes:
        attend: their keys and values.
        visible: bool [1, rows, rows], which of them each one sees.
        states: [1, rows, hidden_size], the outputs.
    """

    attend: DraftedAttention
    visible: Tensor
    states: Tensor

    @classmethod
    def of(cls, recipe: RowRecipe, batch: Batch) -> Committed:
        """Those of a batch of one text."""
        count = batch.tokens.shape[1] - 1
        visible = batch.visible[:, :count, :count]
        attend = DraftedAttention(visible)
        positions = torch.arange(count, device=visible.device)[None]
        states = recipe.module(batch.tokens[:, 1:], recipe.read(batch.states[:, :count]), positions, attend)
        return cls(attend, visible, states)


class RowDrafts(Drafts):
    """EAGLE and EAGLE-3: every node is a row below that of its parent."""

    def __init__(self, recipe: RowRecipe, committed: Committed, rows: Tensor) -> None:
        self._recipe, self._rows, self._attend = recipe, rows, committed.attend
        self._attend.select(committed.visible[0, rows][:, None])
        self._states = committed.states[0, rows][:, None]

    def first(self) -> Tensor:
        return self._recipe.logits(0, self._states).float()

    def next(self, depth: int, parents: Tensor, tokens: Tensor) -> Tensor:
        above = self._states.gather(1, parents[..., None].expand(-1, -1, self._states.shape[-1]))
        self._attend.descend(parents)
        positions = (self._rows + depth)[:, None].expand_as(tokens)
        self._states = self._recipe.module(*self._recipe.drafted(tokens, above), positions, self._attend)
        return self._recipe.logits(depth, self._states).float()


class ParallelDrafts(RowDrafts):
    """P-EAGLE: the rows of all depths are masks, so the candidates of a depth are the same below every node."""

    def __init__(self, recipe: RowRecipe, committed: Committed, rows: Tensor) -> None:
        super().__init__(recipe, committed, rows)
        self.depths, self._found = recipe.depths, [super().first()]
        for depth in range(1, recipe.depths):
            parents = torch.zeros_like(rows)[:, None]
            self._found.append(super().next(depth, parents, parents))

    def first(self) -> Tensor:
        return self._found[0]

    def next(self, depth: int, parents: Tensor, tokens: Tensor) -> Tensor:
        return self._found[depth].expand(-1, tokens.shape[1], -1)


def drafts_of(recipe: Recipe, batch: Batch) -> Callable[[Tensor], Drafts]:
    """Makes drafts below rows of a batch of one text; a row has the state up to its position and the token behind it.

    Drafts are made when those before are not asked any more.
    """
    if isinstance(recipe, RowRecipe):
        kind = ParallelDrafts if isinstance(recipe, ParallelRecipe) else RowDrafts
        return partial(kind, recipe, Committed.of(recipe, batch))
    if isinstance(recipe, HydraRecipe):
        return partial(HydraDrafts, recipe, batch)
    if isinstance(recipe, DFlashRecipe) and recipe.config.is_chained:
        return partial(ChainedDrafts, recipe, batch)
    return partial(BlockDrafts, recipe, batch)


@dataclass(frozen=True)
class Level:
    """The candidates of one depth.

    Attributes:
        paths: int64 [places, candidates, depth], the tokens up to each of them.
        scores: [places, candidates], the log-probability of each path.
    """

    paths: Tensor
    scores: Tensor


def grow(drafts: Drafts, vocabulary: Tensor | None, depth: int, frontier: int, candidates: int) -> list[Level]:
    """The candidates of all depths: those of the likeliest nodes of the level before.

    Args:
        drafts: at several places.
        vocabulary: the target's ids of the draft vocabulary; None for all.
        depth: number of levels, at most; there are no more than `drafts.depths`.
        frontier: nodes of a level that are continued. With 1, and one candidate, the result is a chain.
        candidates: tokens after each of them.
    """
    depth, logits = min(depth, drafts.depths), drafts.first()
    candidates = min(candidates, logits.shape[-1])
    scores = logits.new_zeros(logits.shape[:2])
    paths = torch.zeros(*logits.shape[:2], 0, dtype=torch.long, device=logits.device)
    levels: list[Level] = []
    for level in range(1, depth + 1):
        best = logits.log_softmax(-1).topk(candidates, dim=-1)
        tokens = best.indices if vocabulary is None else vocabulary[best.indices]
        longer = torch.cat([paths[:, :, None].expand(*tokens.shape, -1), tokens[..., None]], dim=-1)
        found = Level(longer.flatten(1, 2), (scores[..., None] + best.values).flatten(1, 2))
        levels.append(found)
        if level < depth:
            kept = found.scores.topk(min(frontier, found.scores.shape[1]), dim=-1)
            scores = kept.values
            paths = found.paths.gather(1, kept.indices[..., None].expand(-1, -1, level))
            logits = drafts.next(level, kept.indices // candidates, paths[..., -1])
    return levels


def accepted(levels: Sequence[Level], truth: Tensor, nodes: int) -> Tensor:
    """How many drafted tokens of the likeliest `nodes` candidates the text goes on with: int64 [places].

    Args:
        levels: of all places.
        truth: int64 [places, depths], the tokens of the text below each place; -1 behind its end.
        nodes: that are drafted. A node is never likelier than its parent, so they are a tree.
    """
    scores = torch.cat([level.scores for level in levels], dim=1)
    least = scores.topk(min(nodes, scores.shape[1]), dim=-1).values[:, -1:]
    alive = torch.ones(len(truth), dtype=torch.bool, device=truth.device)
    count = torch.zeros(len(truth), dtype=torch.long, device=truth.device)
    for depth, level in enumerate(levels, start=1):
        is_right = (level.paths == truth[:, None, :depth]).all(-1)
        alive = alive & (is_right & (level.scores >= least)).any(-1)
        count += alive
    return count


def passes(counts: Sequence[int]) -> int:
    """The steps that a text takes, given how many drafted tokens are accepted at each of its places."""
    place = steps = 0
    while place < len(counts):
        place += counts[place] + 1
        steps += 1
    return steps


@torch.no_grad()
def evaluate(recipe: Recipe, features: Features, sets: dict[str, list[Text]], progress: Progress) -> list[Evaluation]:
    """Measures a head on sets of texts.

    Args:
        recipe: with the trained head.
        features: gives the hidden states of the texts.
        sets: texts by the name of the set; empty ones are left out.
        progress: is called after every text.
    """
    recipe.module.eval()
    found = []
    for name, texts in sets.items():
        totals = _Totals()
        for done, text in enumerate(texts):
            progress(f"evaluating on {name}", done, len(texts))
            _measure(recipe, batch_of([text], features, EVERYTHING, recipe.target.hidden_size), totals)
        if totals.chain_steps:
            found.append(totals.evaluation(name, len(texts)))
    return found


def _measure(recipe: Recipe, batch: Batch, totals: _Totals) -> None:
    """Adds what is measured on one text."""
    begin, length = batch.begin, batch.tokens.shape[1]
    places = torch.arange(max(begin - 1, 1), length - 1, device=batch.tokens.device)  # the newest committed tokens
    chains: list[Tensor] = []
    trees: list[Tensor] = []
    drafts_at = drafts_of(recipe, batch)
    together = min(TOGETHER, max(1, ROWS // length)) if isinstance(recipe, RowRecipe) else TOGETHER
    for some in torch.split(places, together):
        below = some[:, None] + 1 + torch.arange(DEPTH, device=some.device)
        truth = torch.where(below < length, batch.tokens[0, below.clamp(max=length - 1)], -1)
        for counts, nodes, frontier, candidates in ((chains, DEPTH, 1, 1), (trees, NODES, FRONTIER, CANDIDATES)):
            levels = grow(drafts_at(some - 1), recipe.vocabulary, DEPTH, frontier, candidates)
            counts.append(accepted(levels, truth, nodes))
    totals.add(torch.cat(chains).tolist(), torch.cat(trees).tolist())


class _Totals:
    """Sums over the texts of a set."""

    def __init__(self) -> None:
        self.tokens = self.chain_steps = self.tree_steps = 0
        self.reached, self.right = [0] * DEPTH, [0] * DEPTH

    def add(self, chain: list[int], tree: list[int]) -> None:
        """One text: the accepted tokens at each of its places."""
        self.tokens += len(chain)
        self.chain_steps += passes(chain)
        self.tree_steps += passes(tree)
        for depth in range(DEPTH):
            within = chain[: len(chain) - depth]  # places that have so many tokens below them
            self.reached[depth] += sum(count >= depth for count in within)
            self.right[depth] += sum(count > depth for count in within)

    def evaluation(self, name: str, texts: int) -> Evaluation:
        rates = tuple(right / max(1, reached) for right, reached in zip(self.right, self.reached, strict=True))
        return Evaluation(
            name, texts, self.tokens, rates, self.tokens / self.chain_steps, self.tokens / self.tree_steps
        )
