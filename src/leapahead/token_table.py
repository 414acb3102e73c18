"""Computes the token table of a target: its own likeliest next tokens after each token of its vocabulary alone.

    context ─┬─ token 0     ONE forward for as many tokens as a tree may have leaves; every token attends to the context
             ├─ token 1     and itself. The k likeliest tokens after each are its row of the table.
             └─ ...

"Alone" needs a context: many models take whatever token comes first for the beginning of a text and predict poorly
after it. A full stop serves; some models need the token that begins a text before it, and others then predict the
beginnings of documents. So both contexts are tried on a sample text. Targets without trees get batches of prompts,
with the same result.

`leapahead.drafters.token_table` stores the table, and the drafter `auto` uses a stored one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from leapahead.core.errors import BadParameter, Refused
from leapahead.core.sampling import SamplingParams
from leapahead.core.text import Tokenizer
from leapahead.core.tree import IntArray, TokenTree
from leapahead.drafters.token_table import MOST_K, NAME, TokenTable, writable_place
from leapahead.models.base import (
    CHAIN,
    NOTHING,
    TOP_K,
    TREE,
    Capture,
    IdentifiesWeights,
    KeepsPrefixes,
    Session,
    Target,
    require,
)
from leapahead.models.base import read_prompt as read
from leapahead.models.choices import FloatArray
from leapahead.models.decoder import DecoderInput
from leapahead.models.encoder_decoder import EncodesPrompts

__all__ = ["NAME", "K", "TokenTable", "best_context", "build", "make", "size"]

K = 64  # tokens kept after each one
ROWS = 128  # tokens of a forward, at most
PROMPTS = 8  # the same of a target without trees
COMPARED = 8  # likeliest tokens by which contexts are compared
LEAST = -100.0  # log-probability; the logit of a token that cannot be chosen is -inf

SAMPLE = """The river rises in the hills north of the town and flows through a wide valley. In 1932 the villages built a
bridge, because the old one had been carried away, and most of the people who lived there could not get to work.

def average(values: list[float]) -> float:
    total = 0.0
    for value in values:
        if value is not None:
            total += value
    return total / len(values)

Question: A shop sells 12 boxes of pens, and each box has 8 pens. It gives 15 of them away. How many are left?
Answer: There are 12 * 8 = 96 pens. After that, 96 - 15 = 81 are left. The answer is 81.
"""

Progress = Callable[[str, int, int], None]  # what is being done, how much of it is done, how much there is


def silent(what: str, done: int, total: int) -> None:
    """A `Progress` that shows nothing."""


def build(
    target: Target,
    tokenizer: Tokenizer | None = None,
    k: int = K,
    progress: Progress = silent,
    context: Sequence[int] = (),
) -> TokenTable:
    """Computes the token table of a target. `TokenTable.save` stores it for later processes.

    The target's lock is held for one forward at a time, so an engine may decode meanwhile.

    Args:
        target: any that can draft and capture top-k tokens.
        tokenizer: of the target; without one, the context is token 0.
        k: number of tokens to keep after each one.
        progress: called after every forward.
        context: the tokens before each one, instead of the better one of two.

    Raises:
        Refused: the target cannot verify drafts, or does not give top-k tokens.
        BadParameter: k or the context is not possible.
    """
    info = target.info
    require(info, frozenset({CHAIN, TOP_K}), "a token table", "decode without one")
    if not 1 <= k <= MOST_K:
        raise BadParameter(f"k={k} is not possible: a token table keeps 1 to {MOST_K} tokens after each one")
    k = min(k, info.vocab_size)
    try:
        before = list(context) or best_context(target, tokenizer)
        tokens = np.empty((info.vocab_size, k), dtype=np.int32)
        logp = np.empty((info.vocab_size, k), dtype=np.float16)
        done = 0
        while done < info.vocab_size:
            following, logits = _rows(target, before, range(done, info.vocab_size), k)
            rows = slice(done, done + len(following))
            tokens[rows], logp[rows] = following, _log_probabilities(logits)
            done = rows.stop
            progress("token table", done, info.vocab_size)
    finally:
        if isinstance(target, KeepsPrefixes):
            with target.lock:
                target.forget()
    weights = target.weights_digest() if isinstance(target, IdentifiesWeights) else ""
    tokens.flags.writeable = logp.flags.writeable = False
    return TokenTable(tokens, logp, tuple(before), weights, info.name)


def make(target: Target, tokenizer: Tokenizer | None = None, k: int = K, progress: Progress = silent) -> Path:
    """Computes the token table of a target and stores it where `auto` finds it, from the next `LLM` on.

    Arguments and errors as of `build`.

    Returns:
        The file.

    Raises:
        Refused: the target does not identify its weights.
        BadParameter: the file cannot be written.
    """
    weights = target.weights_digest() if isinstance(target, IdentifiesWeights) else ""
    if not weights:
        raise Refused(
            f"a token table of {target.info.name} cannot be stored, because its weights cannot be read to tell it from "
            "other models"
        )
    writable_place(weights, size(target.info.vocab_size, k))
    return build(target, tokenizer, k, progress).save()


def size(vocab_size: int, k: int = K) -> int:
    """Bytes of a table."""
    return vocab_size * min(k, vocab_size) * (np.dtype(np.int32).itemsize + np.dtype(np.float16).itemsize)


def best_context(target: Target, tokenizer: Tokenizer | None) -> list[int]:
    """A full stop, or the token that begins a text and a full stop: what predicts a sample text better.

    Compared is how often the target's choice after a token of the text is among the likeliest after that token alone.
    """
    if tokenizer is None:
        return [0]
    stop = [int(token) for token in tokenizer.encode(".", add_special_tokens=False)][-1:] or [0]
    first: int | None = getattr(tokenizer, "bos_token_id", None)
    if first is None:
        return stop
    text = tokenizer.encode(SAMPLE)[: target.info.context_length - 1]
    with target.lock:
        session = _opened(target, text, Capture(top_k=1))
        try:
            rows = [(rows.tokens, rows.top_k(1)[0][:, 0]) for rows in read(target, session, chunk=len(text))]
        finally:
            session.close()
    tokens, chosen = (np.concatenate(each) for each in zip(*rows, strict=True))
    return max(stop, [first, *stop], key=lambda before: _share(target, before, tokens, chosen))


def _share(target: Target, context: Sequence[int], tokens: IntArray, chosen: IntArray) -> float:
    """The share of tokens after which the target's choice is among the likeliest after that token alone."""
    different, place = np.unique(tokens, return_inverse=True)
    rows: list[IntArray] = []
    while len(rows) < len(different):
        rows += list(_rows(target, context, different[len(rows) :].tolist(), min(COMPARED, target.info.vocab_size))[0])
    return float((np.array(rows)[place] == chosen[:, None]).any(axis=1).mean())


def _opened(target: Target, text: Sequence[int], capture: Capture = NOTHING) -> Session:
    """A session with this text; that of an encoder-decoder model is written by its decoder, over its first token."""
    if isinstance(target, EncodesPrompts):
        start = target.info.decoder.start if target.info.decoder is not None else ()
        begin = DecoderInput((*start, *map(int, text)))
        return target.open_decoder(text[:1], SamplingParams(), begin, capture)
    return target.open(text, SamplingParams(), capture)


def _rows(target: Target, context: Sequence[int], wanted: Sequence[int], k: int) -> tuple[IntArray, FloatArray]:
    """By ONE forward, the k likeliest tokens after the first of the wanted tokens, and their logits: [tokens, k]."""
    with target.lock:
        return (_by_tree if TREE in target.info.capabilities else _by_prompts)(target, context, wanted, k)


def _by_tree(target: Target, context: Sequence[int], wanted: Sequence[int], k: int) -> tuple[IntArray, FloatArray]:
    session = _opened(target, context)
    try:
        read(target, session)
        some = wanted[: max(1, min(ROWS, target.max_leaves, target.max_nodes - 1))]
        tree = TokenTree(np.array([context[-1], *some]), np.array([-1, *[0] * len(some)]))
        (choices,) = target.step([session], [tree], capture=Capture(top_k=k))
        following, logits = choices.top_k(k)
        return following[1:], logits[1:]
    finally:
        session.close()


def _by_prompts(target: Target, context: Sequence[int], wanted: Sequence[int], k: int) -> tuple[IntArray, FloatArray]:
    sessions = []
    try:
        for token in wanted[:PROMPTS]:
            sessions.append(_opened(target, [*context, token]))
            read(target, sessions[-1])
        trees = [TokenTree.root(token) for token in wanted[: len(sessions)]]
        rows = [choices.top_k(k) for choices in target.step(sessions, trees, capture=Capture(top_k=k))]
        return np.concatenate([row[0] for row in rows]), np.concatenate([row[1] for row in rows])
    finally:
        for session in sessions:
            session.close()


def _log_probabilities(logits: FloatArray) -> FloatArray:
    """Log-softmax over the k tokens of each row, [rows, k]."""
    shifted = logits - logits[:, :1]
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return np.clip(np.nan_to_num(shifted, nan=LEAST), LEAST, 0.0)
