"""A generation written down step by step, to be looked at: on one page that needs no network, or in a terminal.

    for each step    the tree, who drafted each node and how probable the target finds it
                     the target's own next token after every node, the accepted nodes, the bonus
                     lookahead's pool, before the step, and its n-grams of the root
                     the text that became certain

Recording only reads: the steps come from `decode` as they come to anybody. Knows no browser; the page itself is
explain.html, and what stands in it is this data.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt
from array_api_compat import array_namespace, to_device

from leapahead.api import Prompt, encode
from leapahead.core.sampling import Array, SamplingParams
from leapahead.core.stop import StopParams
from leapahead.core.text import REPLACEMENT, TextStream, Tokenizer
from leapahead.core.tree import TokenTree
from leapahead.drafters.base import Drafter, Step
from leapahead.drafters.lookahead import Lookahead
from leapahead.engine.loop import Generation, decode
from leapahead.models.base import Target

LIKELIEST = 3  # of the target's next tokens after a node, how many are written down
SHOWN = {" ": "·", "\n": "↵", "\t": "⇥", "\x7f": "␡"}


@dataclass(frozen=True)
class Node:
    """One node of a step's tree.

    Attributes:
        token, parent, depth: as in `TokenTree`.
        source: who drafted it: "guess" and "window" of lookahead, else a drafter's name; "" for the root.
        p: the target's probability of the token after its parent: softmax of the raw logits, before penalties, bans,
            temperature and filters. None for the root, and where the logits are no numbers.
        q: draft model -> its probability of the same; without those that did not look there.
        chosen: the target's own next token after the node, dice included; -1 where there is none.
        likeliest: the target's likeliest next tokens after the node and their probabilities, best first; empty where
            the logits are no numbers.
    """

    token: int
    parent: int
    depth: int
    source: str
    p: float | None
    q: dict[str, float]
    chosen: int
    likeliest: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Pool:
    """Lookahead's n-gram pool when a step's draft was made.

    Attributes:
        size: n-grams in all.
        key: the root's token.
        tails: what was seen to follow it, most recent first.
    """

    size: int
    key: int
    tails: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Moment:
    """One step.

    Attributes:
        position: of the root.
        nodes: of the tree; the root is the first.
        spine: indices of the nodes that are row 0 of lookahead's window.
        accepted: indices of the accepted nodes, from below the root downwards.
        tokens: what was committed; the first `len(accepted)` were drafted, and the one behind them is the bonus.
        bonus_p: the target's probability of the bonus, as of `Node.p`; None where a stop left none.
        spans: (text, drafted) parts that became certain with this step.
        pool: of lookahead, else None.
    """

    position: int
    nodes: tuple[Node, ...]
    spine: tuple[int, ...]
    accepted: tuple[int, ...]
    tokens: tuple[int, ...]
    bonus_p: float | None
    spans: tuple[tuple[str, bool], ...]
    pool: Pool | None


@dataclass(frozen=True)
class Recording:
    """A whole generation.

    Attributes:
        prompt: the prompt's tokens as text, special ones included; "" without a tokenizer.
        prompt_tokens: how many they are.
        target, drafter, temperature, seed: under what it was recorded; the seed is None when greedy.
        steps: in order.
        finish_reason: "stop" or "length".
        texts: token id -> its text, made visible, for every token of `steps`.
    """

    prompt: str
    prompt_tokens: int
    target: str
    drafter: str
    temperature: float
    seed: int | None
    steps: tuple[Moment, ...]
    finish_reason: str
    texts: dict[int, str]

    @property
    def text(self) -> str:
        return "".join(text for step in self.steps for text, _ in step.spans)

    @property
    def tokens(self) -> list[int]:
        return [token for step in self.steps for token in step.tokens]


def record(
    target: Target,
    tokenizer: Tokenizer | None,
    prompt: Prompt,
    drafter: Drafter,
    *,
    sampling: SamplingParams | None = None,
    max_new_tokens: int = 48,
    eos_token_ids: Sequence[int] = (),
) -> Recording:
    """Completes `prompt` as `LLM.generate` does, and writes everything down.

    Args:
        target: the model.
        tokenizer: its tokenizer; without one the prompt is token ids and there is no text.
        prompt: text, token ids or chat messages.
        drafter: a fresh one, which has not begun.
        sampling: greedy by default.
        max_new_tokens: length limit of the text.
        eos_token_ids: tokens that end the text.

    Raises:
        LeapaheadError: one clear sentence for whatever is wrong.
    """
    sampling = sampling or SamplingParams()
    drafter.fits(target, tokenizer)
    tokens = encode(prompt, tokenizer, target)
    stops = StopParams(max_new_tokens=max_new_tokens, eos_token_ids=tuple(eos_token_ids))
    generation = Generation.begin(target, tokens, drafter, sampling, stops)
    stream, steps, pool = TextStream(tokenizer), list[Moment](), _pool(drafter, tokens[-1])
    with closing(decode(target, [generation])) as decoding:
        for _, step in decoding:
            for index, token in enumerate(step.tokens):
                stream.add(token, index < step.verdict.accepted)
            spans = stream.finish(generation.stopper.stop_reason) if generation.finished else stream.take()
            steps.append(_moment(step, drafter, spans, pool))  # now: the next step may overwrite the logits
            pool = _pool(drafter, step.tokens[-1])
    assert generation.stopper.finish_reason is not None  # the loop ends with it
    return Recording(
        prompt=tokenizer.decode(tokens) if tokenizer is not None else "",
        prompt_tokens=len(tokens),
        target=target.name,
        drafter=drafter.name,
        temperature=sampling.temperature,
        seed=sampling.seed if sampling.temperature > 0 else None,
        steps=tuple(steps),
        finish_reason=generation.stopper.finish_reason,
        texts=_texts(tokenizer, steps),
    )


def page(recording: Recording) -> str:
    """The recording as one HTML page that needs nothing but itself."""
    data = json.dumps(asdict(recording), allow_nan=False, separators=(",", ":"))
    for character in "<>&":  # so that no text can end the script element or begin another
        data = data.replace(character, f"\\u{ord(character):04x}")
    template = resources.files("leapahead").joinpath("assets", "explain.html").read_text(encoding="utf-8")
    before, after = template.split("{{DATA}}")
    return before + data + after


def visible(text: str) -> str:
    """`text` on one line of printable characters: a space as ·, a newline as ↵, what steers a screen as its picture."""
    return "".join(map(_shown, text))


def _shown(character: str) -> str:
    if character in SHOWN:
        return SHOWN[character]
    if character < " ":
        return chr(0x2400 + ord(character))  # the control pictures
    return character if character.isprintable() else f"\\u{ord(character):04x}"


def _moment(step: Step, drafter: Drafter, spans: tuple[tuple[str, bool], ...], pool: Pool | None) -> Moment:
    tree, tokens, accepted = step.tree, step.tokens, list[int]()
    for token in tokens[: step.verdict.accepted]:
        node = tree.child(accepted[-1] if accepted else 0, token)
        assert node is not None  # an accepted token was drafted
        accepted.append(node)
    sources = step.proposal.sources or (drafter.name,) * len(tree)
    logits = step.choices.logits
    thought = drafter.opinions(tree)
    after = [_probabilities(logits[node : node + 1]) for node in range(len(tree))]
    nodes = tuple(
        Node(
            token=token,
            parent=parent,
            depth=depth,
            source=sources[node] if node else "",
            p=_number(after[parent][token]) if node else None,
            q={name: number for name, row in thought.items() if (number := _number(row[node])) is not None},
            chosen=step.choices[node],
            likeliest=_likeliest(after[node]),
        )
        for node, (token, parent, depth) in enumerate(
            zip(tree.tokens.tolist(), tree.parents.tolist(), tree.depths.tolist(), strict=True)
        )
    )
    bonus = tokens[len(accepted)] if len(tokens) > len(accepted) else None
    return Moment(
        position=step.position,
        nodes=nodes,
        spine=_spine(drafter, tree, sources),
        accepted=tuple(accepted),
        tokens=tokens,
        bonus_p=_number(after[accepted[-1] if accepted else 0][bonus]) if bonus is not None else None,
        spans=spans,
        pool=pool,
    )


def _probabilities(row: Array) -> npt.NDArray[np.float64]:
    """[1, vocab] logits, anywhere and of any precision -> float64 [vocab]; NaN where the logits are no numbers."""
    xp = array_namespace(row)
    found: Any = to_device(xp.astype(row, xp.float64 if row.dtype == xp.float64 else xp.float32), "cpu")
    scores = np.asarray(found, dtype=np.float64)[0]
    with np.errstate(invalid="ignore"):
        mass = np.exp(scores - scores.max())
        probabilities: npt.NDArray[np.float64] = mass / mass.sum()
    return probabilities


def _likeliest(probabilities: npt.NDArray[np.float64]) -> tuple[tuple[int, float], ...]:
    if not np.isfinite(probabilities).all():
        return ()
    count = min(LIKELIEST, len(probabilities))
    best = np.argpartition(-probabilities, count - 1)[:count]
    best = best[np.lexsort((best, -probabilities[best]))]  # of equals the lowest id first, as in choosing
    return tuple((int(token), round(float(probabilities[token]), 6)) for token in best)


def _number(p: np.floating[Any]) -> float | None:
    return round(float(p), 6) if math.isfinite(p) else None


def _spine(drafter: Drafter, tree: TokenTree, sources: Sequence[str]) -> tuple[int, ...]:
    """Row 0 of the window: the path to the foot of the last column begins with it (see `drafters.lookahead`)."""
    window = [node for node in range(1, len(tree)) if sources[node] == "window"]
    if not isinstance(drafter, Lookahead) or not window:
        return ()
    foot = max(window, key=lambda node: (tree.depths[node], node))
    return tuple(tree.path(foot)[1 : drafter.window])


def _pool(drafter: Drafter, key: int) -> Pool | None:
    if not isinstance(drafter, Lookahead):
        return None
    copied = copy.deepcopy(drafter.pool)  # a look-up counts as use, and would change what is forgotten first
    return Pool(len(copied), key, tuple(copied.get(key)))


def _texts(tokenizer: Tokenizer | None, steps: Iterable[Moment]) -> dict[int, str]:
    ids: set[int] = set()
    for step in steps:
        ids.update(step.tokens)
        for node in step.nodes:
            ids.update((node.token, node.chosen), (token for token, _ in node.likeliest))
        if step.pool is not None:
            ids.update((step.pool.key,), *step.pool.tails)
    if tokenizer is None:
        return {token: f"#{token}" for token in sorted(ids - {-1})}
    known = len(tokenizer)
    # Behind another token, since some tokenizers drop the space that a text begins with.
    anchor = tokenizer.encode("a", add_special_tokens=False)[-1:]
    before = tokenizer.decode(anchor)
    texts = {}
    for token in sorted(ids - {-1}):
        text = tokenizer.decode([*anchor, token]) if token < known else ""
        text = text[len(before) :] if text.startswith(before) else tokenizer.decode([token])
        # Bytes that are no character of their own, and ids that have no text, are told apart by their number.
        texts[token] = visible(text) + (f"#{token}" if not text or REPLACEMENT in text else "")
    return texts
