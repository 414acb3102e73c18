"""The test of a model, run when its target is made: which of chains, trees and hidden states it gives correctly.

A model's own logits are those of one token at a time, nothing discarded. This module uses the public interface of the
target only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import llama_cpp as c
import numpy as np

from leapahead.core.errors import LeapaheadError, Refused
from leapahead.core.sampling import SamplingParams
from leapahead.core.tree import TokenTree
from leapahead.core.verify import Verdict
from leapahead.models.base import CHAIN, HIDDEN, LOGITS, TOP_K, TREE, Capture, Session, Target, read_prompt
from leapahead.models.llama_cpp.context import Context, FloatArray, Model
from leapahead.models.selftest import differ, own_logits, spread, tree_logits


class TestedTarget(Target, Protocol):
    """As much of the target as is tested here."""

    model: Model
    context: Context


def capabilities(target: TestedTarget) -> frozenset[str]:
    """What the model can do. A recurrent state, which cannot discard tokens, has chains where it can be kept.

    Raises:
        Refused: the model's logits of several tokens at once are not those of one token at a time.
    """
    if no_room(target):
        return frozenset({LOGITS})
    if target.model.stateful:
        return _with_state(target)
    a, b, d, e, f, g = _ordinary_tokens(target, 6)
    tree = TokenTree(np.array([d, e, f, g, a]), np.array([-1, 0, 0, 1, 2]))
    paths = [[a, b, d, e, g], [a, b, d, f, a]]
    own = [own_logits(target, path) for path in paths]
    if not _can_discard(target, [a, b, d]):
        return frozenset({LOGITS})
    able = {LOGITS, TOP_K, HIDDEN}
    chained, _ = tree_logits(target, [a, b, d], TokenTree.chain(d, [e, g]), (0,), (f,))
    if differ(chained, own[0][2:]):
        raise Refused(f"{target.info.name} does not give its own logits when it reads several tokens at once")
    able.add(CHAIN)
    if target.max_leaves > 1:
        rows, after = tree_logits(target, [a, b, d], tree, (0, 2, 4), (f, a, e))
        wrong = [differ(rows[nodes], each[2:]) for nodes, each in zip(([0, 1, 3], [0, 2, 4]), own, strict=True)]
        if not any(wrong) and not differ(after, own_logits(target, [*paths[1], e])[-1:]):
            able.add(TREE)
    return frozenset(able)


def no_room(target: TestedTarget) -> str:
    """Why drafts cannot be tested, where steps may not have as many rows as the test has; "" elsewhere."""
    least, most = (3 + 4 * len(_sizes(target)), 15) if target.model.stateful else (5, 5)
    wanted = f"drafts are tested with steps of up to {most} tokens; load it with so large an n_batch and n_ubatch"
    return wanted if target.context.n_step < least else ""


def _sizes(target: TestedTarget) -> tuple[int, ...]:
    """Lengths of the texts by which a recurrent state is tested, as many as can have a draft at once."""
    return (1, 2, 4)[: max(1, target.context.n_seq_max // 2)]


# The drafts of each step, for three texts: (drafted tokens that are right, that are wrong). One text grows its second.
STEPS = (((1, 3), (0, 0), (0, 2)), ((2, 2), (3, 0), (1, 1)), ((1, 0), (0, 3), (2, 0)), ((0, 1), (2, 1), (1, 0)))


def _with_state(target: TestedTarget) -> frozenset[str]:
    """Finds out how states can be kept: shared by two sequence ids, copied out and back, or not at all."""
    if not target.model.keeps:
        return frozenset({LOGITS})
    context, text = target.context, _ordinary_tokens(target, 16)
    own = own_logits(target, text)
    context.shares_states = True
    shares = _drafts_are_right(target, text, own)
    # Not beside a sliding window: llama.cpp uses cells again that have left it, which a copy that comes back may need.
    context.shares_states, context.saves_states = False, not context.windowed
    context.saves_states = context.saves_states and _drafts_are_right(target, text, own)
    context.shares_states = shares
    return frozenset({CHAIN, LOGITS, TOP_K, HIDDEN}) if shares or context.saves_states else frozenset({LOGITS})


def _drafts_are_right(target: TestedTarget, text: Sequence[int], own: FloatArray) -> bool:
    """Whether three sessions of different lengths, in the same forwards, give `own`, the logits of the text."""
    sessions: list[Session] = []
    try:
        for size in _sizes(target):
            sessions.append(target.open(text[:size], SamplingParams()))
            read_prompt(target, sessions[-1])
        right = all([_step_is_right(target, sessions, step, text, own) for step in STEPS])
        first, begin = sessions[0], len(sessions[0].tokens)
        for size in (1, 2, 4):  # a draft that grows, of which less is accepted than was computed
            tree = TokenTree.chain(text[begin - 1], [text[begin], *text[:2]][: size - 1])
            target.step([first], [tree], [size // 2])
        first.commit(Verdict((0, 1), tuple(text[begin : begin + 2]), 1))
        rows = target.step([first], [TokenTree.root(first.tokens[-1])])[0].logits
        return right and not differ(rows, own[begin + 1 : begin + 2])
    except LeapaheadError:  # llama.cpp has noticed a state that is not where it should be
        return False
    finally:
        for session in sessions:
            session.close()


def _step_is_right(
    target: TestedTarget,
    sessions: Sequence[Session],
    step: Sequence[tuple[int, int]],
    text: Sequence[int],
    own: FloatArray,
) -> bool:
    """Drafts tokens of the text and then wrong ones, commits the former, and compares their logits."""
    begins = [len(session.tokens) for session in sessions]
    trees = [
        TokenTree.chain(text[begin - 1], [*text[begin : begin + right], *text[:wrong]])
        for begin, (right, wrong) in zip(begins, step, strict=False)
    ]
    rows = [choices.logits for choices in target.step(sessions, trees)]
    for session, begin, (right, _) in zip(sessions, begins, step, strict=False):
        session.commit(Verdict(tuple(range(right + 1)), tuple(text[begin : begin + right + 1]), right))
    return not any(
        differ(each[: right + 1], own[begin - 1 : begin + right])
        for each, begin, (right, _) in zip(rows, begins, step, strict=False)
    )


def differing_bits(target: TestedTarget, rows: int) -> int:
    """How many logits of drafted tokens are not those of plain steps bit for bit, for an exact target.

    Args:
        rows: greatest number of nodes of a tree.
    """
    text = _ordinary_tokens(target, 40)
    begin, own = 4, list[FloatArray]()
    for drafts in ((0,), tuple(range(1, rows)), (rows - 1,)):  # right tokens of the drafts, in turns
        session, found, turn = target.open(text[:begin], SamplingParams()), list[FloatArray](), 0
        read_prompt(target, session)
        while (at := len(session.tokens)) < len(text):
            right = min(drafts[turn % len(drafts)], len(text) - at)
            wrong = (rows - 1 - right) // 2 if drafts != (0,) else 0
            tree = TokenTree.chain(text[at - 1], [*text[at : at + right], *text[:wrong]])
            found += list(np.array(target.step([session], [tree])[0].logits[: right + 1]))
            session.commit(Verdict(tuple(range(right + 1)), tuple([*text, 0][at : at + right + 1]), right))
            turn += 1
        session.close()
        own.append(np.stack(found[: len(text) - begin]))
    return sum(int((own[0] != each).any(axis=1).sum()) for each in own[1:])


def reads_in_chunks(target: TestedTarget) -> bool:
    """Whether a prompt that is read at once leaves the same state as one that is read token by token."""
    tokens = _ordinary_tokens(target, 4)
    session = target.open(tokens, SamplingParams())
    read_prompt(target, session)
    row = target.step([session], [TokenTree.root(tokens[-1])])[0].logits
    session.close()
    return not differ(row, own_logits(target, tokens)[-1:])


def gives_logits_with_hidden_states(target: TestedTarget) -> bool:
    """Whether a forward that gives hidden states gives the logits too; LFM2's leaves them out."""
    tokens = _ordinary_tokens(target, 2)
    session = target.open(tokens[:1], SamplingParams())
    row = target.step([session], [TokenTree.root(tokens[0])], capture=Capture(hidden=(-1,)))[0].logits
    session.close()
    return not differ(row, own_logits(target, tokens[:1]))


def _can_discard(target: TestedTarget, tokens: Sequence[int]) -> bool:
    """Whether the cache can discard its last token."""
    session: Any = target.open(tokens, SamplingParams())
    read_prompt(target, session)
    target.step([session], [TokenTree.root(tokens[-1])])
    able = bool(session.track.discard_tree())
    session.close()
    return able


def _ordinary_tokens(target: TestedTarget, count: int) -> list[int]:
    """Ids without a special meaning, spread over the vocabulary."""
    every = spread(target.info.vocab_size)
    found = [token for token in every if not c.llama_vocab_is_control(target.model.vocab, token)] or every
    return [found[(7 * i + 3) % len(found)] for i in range(count)]
