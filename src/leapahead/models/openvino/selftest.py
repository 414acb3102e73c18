"""The test of a model, run when its target is made: which of chains and trees it gives correctly.

A model's own logits are those of one token at a time, nothing discarded. This module uses the public interface of the
target only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from leapahead.core.errors import Refused
from leapahead.core.sampling import SamplingParams
from leapahead.core.tree import TokenTree
from leapahead.core.verify import Verdict
from leapahead.models.base import CHAIN, TREE, KeepsPrefixes, Target, read_prompt
from leapahead.models.selftest import differ, own_logits, spread, tree_logits

LONGEST_WINDOW = 1024  # that the test reaches beyond
LEAST_WINDOW = 512  # before which there is room for trees
DRAFTS = ((3, 0), (0, 4), (2, 5), (0, 0), (1, 30), (0, 1), (5, 2))  # right and wrong tokens of the drafts in exact mode
BLOCK = 32  # tokens of a block of the cache on CPUs; the drafts of the test begin in one and end in the next


def capabilities(target: Target, window: int = 0) -> frozenset[str]:
    """What the model can do.

    Args:
        window: the smallest sliding window of the layers; 0 for none. Chains are tested beyond it, where that takes a
            short time; trees before it, and not at all for a narrow one.

    Raises:
        Refused: the model's logits of several tokens at once are not those of one token at a time.
    """
    size = min(BLOCK - 3, target.info.context_length // 2)
    text, own = _own_text(target, size + (window if window <= LONGEST_WINDOW else 0))
    begin = len(text) - len(own)
    chain = TokenTree.chain(text[begin], [*text[begin + 1 : begin + 3], text[0], text[0]])
    rows, after = tree_logits(target, text[: begin + 1], chain, (0, 1, 2), tuple(text[begin + 1 : begin + 4]))
    if differ(rows[:3], own[:3]) or differ(after, own[3:4]):
        raise Refused(
            f"{target.info.name} does not give its own logits when it reads several tokens at once; load the model "
            "with Transformers, or as a GGUF file with llama.cpp"
        )
    able = target.info.capabilities | {CHAIN}
    if TREE not in able or 0 < window < LEAST_WINDOW:
        return able - {TREE}
    if window:
        text, own = _own_text(target, size)
    return able if _trees_are_right(target, text, own) else able - {TREE}


def _own_text(target: Target, size: int) -> tuple[list[int], npt.NDArray[np.float32]]:
    """A text of a prompt of `size` tokens and five more, and the logits after the last six, one token at a time."""
    ids = spread(target.info.vocab_size)
    text = [ids[(7 * index + index // 3 + 3) % len(ids)] for index in range(size + 5)]
    return text, own_logits(target, text, size)


def _trees_are_right(target: Target, text: list[int], own: npt.NDArray[np.float32]) -> bool:
    """Whether a tree gives the logits of its paths, alone and beside a sequence of another length.

    root ─┬─ w                the path root b c d is what the text goes on with
          ├─ b ─┬─ w ── w
          │     └─ c ── d
    """
    begin = len(text) - len(own)
    root, b, c, d, e, wrong = *text[begin : begin + 5], text[0]
    tree = TokenTree([root, wrong, b, wrong, c, wrong, d], [-1, 0, 0, 2, 2, 3, 4])
    path = (0, 2, 4, 6)
    rows, after = tree_logits(target, text[: begin + 1], tree, path, (b, c, d, e))
    if differ(rows[list(path)], own[:4]) or differ(after, own[4:5]):
        return False
    sessions = [target.open(text[:length], SamplingParams()) for length in (begin + 1, begin + 3)]
    for session in sessions:
        read_prompt(target, session)
    both = target.step(sessions, [tree, TokenTree.chain(c, [d])])
    beside, chained = (choices.logits for choices in both)
    for session in sessions:
        session.close()
    return not differ(beside[list(path)], own[:4]) and not differ(chained, own[2:4])


def differing_bits(target: Target) -> int:
    """How many logits of drafted tokens are not those of plain steps bit for bit.

    A text that passes the border of a block is decoded plainly, then with chains of right and wrong tokens, its prompt
    read in chunks of another size, alone and beside other sequences.
    """
    ids, length = spread(target.info.vocab_size), target.info.context_length
    begin = min(BLOCK - 8, length // 2)
    text = [ids[(11 * index + index // 5 + 2) % len(ids)] for index in range(min(begin + 24, length - 8))]
    plain = _drafted(target, text, begin, [(0, 0)])
    others = ({"chunk": 7}, {"beside": 1}, {"beside": 3})
    found = (_drafted(target, text, begin, DRAFTS, **options) for options in others)
    return sum(int((plain != each).any(axis=1).sum()) for each in found)


def _drafted(
    target: Target,
    text: list[int],
    begin: int,
    drafts: Sequence[tuple[int, int]],
    chunk: int = 512,
    beside: int = 0,
) -> npt.NDArray[np.float32]:
    """The logits after each token of the text behind the first `begin`, when it is decoded with drafts in turns.

    Args:
        drafts: numbers of right and of wrong tokens.
        chunk: tokens of the prompt in a forward.
        beside: number of other sequences.
    """
    sessions = [target.open(text[: begin - 2 * number], SamplingParams()) for number in range(beside + 1)]
    for session in sessions:
        read_prompt(target, session, chunk)
    first, found, turn = sessions[0], list[npt.NDArray[np.float32]](), 0
    while (at := len(first.tokens)) < len(text):
        right, wrong = drafts[turn % len(drafts)]
        right = min(right, len(text) - at)
        chain = TokenTree.chain(text[at - 1], [*text[at : at + right], *text[:wrong]])
        rows = target.step(sessions, [chain, *(TokenTree.root(each.tokens[-1]) for each in sessions[1:])])[0].logits
        found += list(rows[: right + 1])
        first.commit(Verdict(tuple(range(right + 1)), tuple([*text, 0][at : at + right + 1]), right))
        for each in sessions[1:]:
            each.commit(Verdict((0,), (text[0],), 0))
        turn += 1
    for session in sessions:
        session.close()
    if isinstance(target, KeepsPrefixes):
        target.forget()  # the next one is to compute its own entries
    return np.stack(found[: len(text) - begin])
