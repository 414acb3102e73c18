"""Tests on the loaded model that drafted steps give the bits of plain ones, in exact mode.

A text of random tokens is decoded plainly, one token a step, and then again with drafts: chains and trees with wrong
nodes before, between and behind the right ones, alone and beside another sequence. The logits of every right node must
be those of the plain step, bit for bit. The text passes the border of a block of positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leapahead.core.errors import Refused
from leapahead.core.tree import IntArray, TokenTree
from leapahead.models.transformers import selftest
from leapahead.models.transformers.exact import ExactExecutor
from leapahead.models.transformers.ordered import BLOCK

# Of each draft: parents, and the node of each right token; its last entry is the node behind which the text goes on.
SHAPES: tuple[tuple[list[int], list[int]], ...] = (
    ([-1, 0, 1, 2], [0, 1, 2, 3]),
    ([-1, 0, 0, 1, 2, 4, 5, 0], [0, 2, 4, 5, 6]),
    ([-1, 0, 1, 2, 3, 4, 5, 6], [0, 1, 2]),
    ([-1, 0, 0, 0, 1, 3, 5], [0, 3, 5]),
    ([-1], [0]),
)
# In half precision, exact mode's attention in float32 differs from the model's own by more than two forwards do.
FLOOR = 4.0
STEPS = 24  # plain steps; the block's border lies among them


def floor(dtype: torch.dtype) -> float:
    """How far logits of exact mode may always be from the model's own, see `selftest.run`."""
    return FLOOR * selftest.FLOOR.get(dtype, selftest.FLOOR[torch.float16])


def check(executor: ExactExecutor, ids: IntArray, border: int = BLOCK) -> None:
    """Tests an executor, with contexts as long as the model allows, up to a little more than one block.

    Args:
        ids: token ids without a special meaning.
        border: the position among those of the text at which a block begins.

    Raises:
        Refused: some logits differ.
    """
    longest = int(getattr(executor.model.config, "max_position_embeddings", border)) - STEPS - 8
    length = min(border - STEPS // 2, longest)
    text = np.random.default_rng(0).choice(ids, size=max(length, 2) + STEPS).tolist()
    plain = _plain(executor, text)
    for beside in (False, True):
        wrong = _drafted(executor, text, plain, beside)
        if wrong:
            raise Refused(
                f"the logits of {wrong} of {len(plain)} drafted tokens are not those of plain decoding bit for bit on "
                "this machine"
            )


def _plain(executor: ExactExecutor, text: Sequence[int]) -> list[Tensor]:
    """The logits after each of the last `STEPS` tokens, one step each."""
    tokens = list(text[: len(text) - STEPS + 1])
    state, found = executor.open(tokens), []
    try:
        executor.prefill(state, len(tokens) - 1)
        for following in [*text[len(tokens) :], 0]:
            found.append(executor.forward([state], [TokenTree.root(tokens[-1])])[0].logits[0].clone())
            state.commit([0])
            tokens.append(following)
    finally:
        state.close()
    return found


def _drafted(executor: ExactExecutor, text: Sequence[int], plain: Sequence[Tensor], beside: bool) -> int:
    """How many of these logits differ when the text is drafted."""
    begin = len(text) - len(plain) + 1
    tokens, others, wrong = list(text[:begin]), list(text[1:9]), 0
    state = executor.open(tokens)
    states: list[Any] = [state] + ([executor.open(others)] if beside else [])
    try:
        executor.prefill(state, begin - 1)
        for other in states[1:]:
            executor.prefill(other, len(others) - 1)
        for turn in range(len(plain)):
            parents, right = SHAPES[turn % len(SHAPES)]
            right = right[: len(text) - len(tokens) + 1]
            drafted = [text[0]] * len(parents)  # wrong nodes
            for node, token in zip(right, text[len(tokens) - 1 :], strict=False):
                drafted[node] = token
            trees = [TokenTree(np.array(drafted), np.array(parents)), TokenTree.root(others[-1])][: len(states)]
            logits = executor.forward(states[::-1], trees[::-1])[-1].logits
            at = len(tokens) - begin
            wrong += sum(not torch.equal(logits[node], row) for node, row in zip(right, plain[at:], strict=False))
            state.commit(right)
            tokens += [*text[len(tokens) : len(tokens) + len(right)]]
            for other in states[1:]:
                other.commit([0])
                others.append(text[2])
            if len(tokens) >= len(text):
                break
    finally:
        for each in states:
            each.close()
    return wrong
