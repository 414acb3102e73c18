"""Proves an engine on the model at hand, before any text: small random trees against the model's own plain forward.

Two sequences of different lengths take two steps each; between them a commit moves entries in the cache. The logits of
every node must be those that the model itself, without any cache or mask of ours, gives after the node's path:

    step 1   A: 0 ┬ 1 ┬ 3          B: 0 ┬ 1 ── 2      commits 0-2-5 of A and 0-3 of B, which lie apart in the cache
                  │   └ 4               └ 3
                  └ 2 ── 5
    step 2   A: 0 ┬ 1 ── 2         B: 0 ┬ 1
                  └ 3                   └ 2 ── 3

A model whose masks, positions or state an engine gets wrong fails here, whatever its name; so an architecture that
nobody has tried is right or refused, not silently wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leapahead.core.tree import IntArray, TokenTree
from leapahead.models.base import CHAIN, TREE
from leapahead.models.transformers.forward import Engine, inputs

# Logits may be this far apart in any case, in standard deviations of the logits, ...
FLOOR = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
# (token by token it is the model's own state that is tested, and a recurrence has other formulas for many tokens) ...
RECURRENT_FLOOR = 0.05
# ... or so many times as far as the model's own logits are when it computes them in a batch of another shape.
MARGIN = 8.0

# Some models give tokens that they never say the lowest number there is; those have no part in the distances.
BANNED = 1e4

Shapes = tuple[tuple[tuple[list[int], list[int]], ...], ...]  # by sequence and step: parents, committed path

SHAPES: dict[str, Shapes] = {
    TREE: (
        (([-1, 0, 0, 1, 1, 2], [0, 2, 5]), ([-1, 0, 1, 0], [0])),
        (([-1, 0, 1, 0], [0, 3]), ([-1, 0, 0, 2], [0])),
    ),
    CHAIN: (
        (([-1, 0, 1, 2], [0, 1]), ([-1, 0, 1], [0])),
        (([-1, 0, 1], [0]), ([-1, 0], [0])),
    ),
    "": (
        (([-1], [0]), ([-1], [0])),
        (([-1], [0]), ([-1], [0])),
    ),
}


@dataclass(frozen=True)
class Result:
    """How far an engine's logits were from the model's own.

    Attributes:
        error: distance, in standard deviations of the logits.
        tolerance: as much as rounding explains.
    """

    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance  # false for NaN


def run(engine: Engine, model: Any, ids: IntArray, prompts: tuple[int, int], cached: Engine | None = None) -> Result:
    """Tests `engine` on `model`.

    Args:
        ids: token ids that mean nothing special to the model.
        prompts: lengths of the two sequences' prompts.
        cached: compare with this engine, one sequence after the other, instead of with plain forwards. For models
            whose own logits depend on what follows: then their own state, one token at a time, is what is preserved.
    """
    rng = np.random.default_rng(0)

    def draw(count: int) -> list[int]:
        return [int(token) for token in rng.choice(ids, size=count)]

    kind = next((name for name in (TREE, CHAIN) if name in engine.capabilities), "")
    texts = [draw(length) for length in prompts]
    states = [engine.open(text)[0] for text in texts]
    ours: list[Tensor] = []  # [vocab] each
    paths: list[list[int]] = []  # the tokens up to each of them
    try:
        for plan in zip(*SHAPES[kind], strict=True):
            trees = [
                TokenTree(np.array([text[-1], *draw(len(parents) - 1)]), np.array(parents))
                for text, (parents, _) in zip(texts, plan, strict=True)
            ]
            logits = engine.forward(states, trees)
            for text, tree, state, rows, (_, path) in zip(texts, trees, states, logits, plan, strict=True):
                ours += rows
                paths += [text + tree.path_tokens(node) for node in range(len(tree))]
                state.commit(path)
                text += tree.path_tokens(path[-1]) + draw(1)
    finally:
        for state in states:
            state.close()
    theirs, noise = reference(model, paths) if cached is None else one_by_one(cached, paths)
    mine = torch.stack(ours).to(theirs)
    real = theirs.abs() < BANNED
    if (real != (mine.abs() < BANNED)).any():
        return Result(float("inf"), 0.0)
    spread = theirs[real].std().clamp_min(torch.finfo(theirs.dtype).tiny)
    error = (mine - theirs).abs().where(real, 0).amax(dim=1)  # [paths]
    # In half precision a single node may fall on the other side of a router's decision; a wrong mask moves many.
    strict = ours[0].dtype in (torch.float32, torch.float64)
    measured = error.max() if strict else error.quantile(0.75)
    floor = FLOOR[ours[0].dtype] if kind else RECURRENT_FLOOR
    return Result(float(measured / spread), max(floor, MARGIN * float(noise / spread)))


def reference(model: Any, paths: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """The model's own logits after each path, by plain forwards without any cache.

    Returns:
        [paths, vocab], and the greatest difference when the longest path is computed alone.
    """
    whole = [path for path in paths if not any(len(path) < len(o) and o[: len(path)] == path for o in paths)]
    longest = max(range(len(whole)), key=lambda i: len(whole[i]))
    length = len(whole[longest])
    batch = np.array([[*path, *[path[0]] * (length - len(path))] for path in whole])  # what follows cannot be seen
    logits = own_logits(model, batch)
    rows = [next(i for i, each in enumerate(whole) if each[: len(path)] == path) for path in paths]
    alone = own_logits(model, batch[longest : longest + 1])[0]
    noise = (alone - logits[longest]).abs().where(alone.abs() < BANNED, 0).max()
    return logits[rows, [len(path) - 1 for path in paths]], noise


def one_by_one(engine: Engine, paths: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """The same by `engine`, for paths that are two sequences in turns, each a token longer than the last."""
    rows: dict[int, Tensor] = {}
    for first in (0, 1):
        tokens = list(paths[first])
        state = engine.open(tokens)[0]
        for index in range(first, len(paths), 2):
            tokens += paths[index][len(tokens) :]
            rows[index] = engine.forward([state], [TokenTree.root(tokens[-1])])[0][0]
            state.commit([0])
        state.close()
    logits = torch.stack([rows[index] for index in range(len(paths))])
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits, logits.new_zeros(())


def own_logits(model: Any, tokens: IntArray) -> Tensor:
    """[batch, length, vocab], float32 or float64."""
    device = model.get_input_embeddings().weight.device
    logits: Tensor = model(**inputs(model, tokens, 0, device), use_cache=False).logits
    return logits if logits.dtype == torch.float64 else logits.float()
