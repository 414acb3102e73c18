"""The test of a model, run when its target is made: which of chains and trees it gives correctly.

A model's own logits are those of one token at a time, nothing discarded. This module uses the public interface of the
target only.
"""

from __future__ import annotations

import numpy as np

from leapahead.core.errors import Refused
from leapahead.core.sampling import SamplingParams
from leapahead.core.tree import TokenTree
from leapahead.models.base import CHAIN, TREE, Target, read_prompt
from leapahead.models.selftest import differ, own_logits, spread, tree_logits

BLOCK = 32  # tokens of a block of the cache on CPUs; the drafts of the test begin in one and end in the next


def capabilities(target: Target, window: int = 0) -> frozenset[str]:
    """What the model can do.

    Args:
        window: the smallest sliding window that the test can reach; 0 for none.

    Raises:
        Refused: the model's logits of several tokens at once are not those of one token at a time.
    """
    ids = spread(target.info.vocab_size)
    size = -(-max(window, 1) // BLOCK) * BLOCK - 3
    prompt = [ids[(7 * index + 3) % len(ids)] for index in range(size)]
    a, b, c, d, e, f = (ids[(5 * index + 1) % len(ids)] for index in range(6))
    text = [*prompt[:-1], a, b, c, d, e, f]
    own = own_logits(target, text, len(prompt))  # after a, b, c, d, e, f
    chained, after = tree_logits(target, text[:size], TokenTree.chain(a, [b, c, f, f]), (0, 1, 2), (b, c, d))
    if differ(chained[:3], own[:3]) or differ(after, own[3:4]):
        raise Refused(
            f"{target.info.name} does not give its own logits when it reads several tokens at once; load the model "
            "with Transformers, or as a GGUF file with llama.cpp"
        )
    able = target.info.capabilities | {CHAIN}
    # a ─┬─ e
    #    ├─ b ─┬─ f ── e
    #    │     └─ c ── d      the path a b c d is what the text goes on with
    tree = TokenTree(np.array([a, e, b, f, c, e, d]), np.array([-1, 0, 0, 2, 2, 3, 4]))
    rows, after = tree_logits(target, text[:size], tree, (0, 2, 4, 6), (b, c, d, e))
    right = not differ(rows[[0, 2, 4, 6]], own[:4]) and not differ(after, own[4:5])
    return able if right and _beside_a_chain(target, text, size, tree, own) else able - {TREE}


def _beside_a_chain(
    target: Target, text: list[int], size: int, tree: TokenTree, own: np.typing.NDArray[np.float32]
) -> bool:
    """Whether the tree gives the same in a forward with sequences of other lengths."""
    sessions = [target.open(text[:length], SamplingParams()) for length in (size, size + 2)]
    for session in sessions:
        read_prompt(target, session)
    tree_rows, chain_rows = (
        choices.logits for choices in target.step(sessions, [tree, TokenTree.chain(text[size + 1], [text[size + 2]])])
    )
    for session in sessions:
        session.close()
    return not differ(tree_rows[[0, 2, 4, 6]], own[:4]) and not differ(chain_rows, own[2:4])
