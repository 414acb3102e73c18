"""The measurements of which targets' tests of themselves consist: logits of one token at a time, and of trees.

Uses the public interface of a target only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from leapahead.core.sampling import SamplingParams
from leapahead.core.tree import TokenTree
from leapahead.core.verify import Verdict
from leapahead.models.base import Target, read_prompt

TOLERANCE = 0.1  # of the standard deviation of logits; a wrong mask moves them by about one, 4-bit rounding by 0.03

Logits = npt.NDArray[Any]


def differ(here: Logits, there: Logits) -> bool:
    """Whether two sets of logits differ by more than rounding; NaN differs from everything."""
    return not float(np.sqrt(np.mean((here - there) ** 2))) <= TOLERANCE * float(np.std(there))


def own_logits(target: Target, tokens: Sequence[int], prompt: int = 1) -> Logits:
    """Float [tokens - prompt + 1, vocab]: after a prompt of so many tokens, one forward a token, nothing discarded."""
    session, rows = target.open(tokens[:prompt], SamplingParams()), []
    read_prompt(target, session)
    for following in (*tokens[prompt:], 0):
        rows.append(target.step([session], [TokenTree.root(session.tokens[-1])])[0].logits)
        session.commit(Verdict((0,), (following,), 0))
    session.close()
    return np.concatenate(rows)


def tree_logits(
    target: Target, prompt: Sequence[int], tree: TokenTree, path: tuple[int, ...], tokens: tuple[int, ...]
) -> tuple[Logits, Logits]:
    """Of the tree over the prompt [nodes, vocab]; after `path` and `tokens` are committed, of the last [1, vocab]."""
    session = target.open(prompt, SamplingParams())
    read_prompt(target, session)
    rows = target.step([session], [tree])[0].logits
    session.commit(Verdict(path, tokens, len(tokens) - 1))
    after = target.step([session], [TokenTree.root(tokens[-1])])[0].logits
    session.close()
    return rows, after


def spread(vocab_size: int) -> list[int]:
    """Up to 64 ids, spread over a vocabulary."""
    return [int(token) for token in np.linspace(0, vocab_size - 1, min(vocab_size, 64)).astype(int)]
