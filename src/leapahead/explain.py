"""Records a generation step by step, to be shown on one HTML page that needs no network, or in a terminal.

    for each step    the tree, the source of each node and the target's probability of it
                     the target's next token after every node, the accepted nodes, the bonus token
                     lookahead's n-gram pool before the step, and its n-grams of the root
                     the text that became final

Recording does not change the generation. The page is the template `assets/explain.html` with this data inserted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt
from array_api_compat import array_namespace, to_device

from leapahead.core.sampling import Array, SamplingParams
from leapahead.core.stop import StopParams
from leapahead.core.text import REPLACEMENT, Tokenizer, id_bound
from leapahead.core.tree import TokenTree
from leapahead.drafters import registry
from leapahead.drafters.base import Drafter, SequenceDrafter
from leapahead.drafters.lookahead import Lookahead
from leapahead.drafters.registry import DrafterClass
from leapahead.engine.request import Request
from leapahead.engine.scheduler import Engine
from leapahead.inputs import Inputs, Prediction, Prompt, check_prediction, encode
from leapahead.models.base import Target
from leapahead.models.choices import Choices
from leapahead.planner.draft import Proposal, SequenceView, Step
from leapahead.results import Writer

LIKELIEST = 3  # tokens recorded after each node
SHOWN = {" ": "·", "\n": "↵", "\t": "⇥", "\x7f": "␡"}


@dataclass(frozen=True)
class Node:
    """One node of a step's tree.

    Attributes:
        token, parent, depth: as in `TokenTree`.
        source: what drafted it: "guess" or "window" of lookahead, a source of auto, or the drafter's name; "" for the
            root.
        p: the target's probability of the token after its parent: softmax of the unprocessed logits. None for the root
            and where the logits are not finite.
        q: name of a draft model -> its probability of the same; without draft models that did not compute it.
        chosen: the target's next token after the node, as sampled; -1 where none can be chosen.
        likeliest: the target's likeliest tokens after the node and their probabilities, falling; empty where the logits
            are not finite.
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
    """Lookahead's n-gram pool before a step.

    Attributes:
        size: number of n-grams.
        key: the root's token.
        tails: the continuations of the key in the pool, most recent first.
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
        accepted: indices of the accepted nodes, by depth.
        tokens: the committed tokens; the first `len(accepted)` were drafted, and the next one is the bonus token.
        bonus_p: the target's probability of the bonus token, as `Node.p`; None where the text ended before it.
        spans: (text, drafted) parts that became final with this step.
        pool: of the drafter lookahead, else None.
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
        prompt_tokens: number of the prompt's tokens.
        target, drafter, temperature, seed: of the generation; the seed is None when greedy.
        steps: in order.
        finish_reason: "stop" or "length".
        texts: token id -> its text in printable characters, for every token of `steps`.
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
    drafter: str | DrafterClass,
    options: Mapping[str, Any] | None = None,
    *,
    sampling: SamplingParams | None = None,
    max_new_tokens: int = 48,
    prediction: Prediction | None = None,
    eos_token_ids: Sequence[int] = (),
) -> Recording:
    """Completes `prompt` as `LLM.generate` does, and records every step.

    Args:
        target: the model.
        tokenizer: its tokenizer; without one the prompt is token ids and there is no text.
        prompt: text, token ids or chat messages.
        drafter: name or class.
        options: of the drafter.
        sampling: greedy by default.
        max_new_tokens: length limit of the text.
        prediction: text or token ids that the user expects, for drafters that make use of it.
        eos_token_ids: tokens that end the text.

    Raises:
        LeapaheadError: one clear sentence for whatever is wrong.
    """
    sampling = sampling or SamplingParams()
    tokens = encode(prompt, tokenizer, target.info)
    stop = StopParams(max_new_tokens=max_new_tokens, eos_token_ids=tuple(eos_token_ids))
    engine, recorder = Engine(target, tokenizer=tokenizer, max_batch=1), _Recorder()
    chosen = engine.drafter(recorder.watched(drafter), **(options or {}))
    check_prediction(prediction, chosen)
    request = Request(
        tokens,
        chosen,
        sampling=sampling,
        stop=stop,
        prediction=Inputs(target.info, tokenizer, tuple(eos_token_ids)).prediction(prediction),
        logprobs=0,  # so that the logits of every node are kept
        stream=True,
        on_choices=recorder.on_choices,
        on_step=recorder.on_step,
    )
    handle, writer = engine.submit(request), Writer(tokenizer, (), False)
    for output in engine.outputs(handle):
        recorder.steps[-1] = replace(recorder.steps[-1], spans=writer.piece(handle, output).spans)
    return Recording(
        prompt=tokenizer.decode(tokens) if tokenizer is not None else "",
        prompt_tokens=len(tokens),
        target=target.info.name,
        drafter=chosen.name,
        temperature=sampling.temperature,
        seed=sampling.seed if sampling.temperature > 0 else None,
        steps=tuple(recorder.steps),
        finish_reason=str(handle.finish_reason),
        texts=_texts(tokenizer, recorder.steps),
    )


class _Recorder:
    """Collects the steps of one request.

    Attributes:
        steps: the steps so far, without their text.
        drafter: the object that drafts the request, with its view of the sequence, once the request has begun.
    """

    def __init__(self) -> None:
        self.steps: list[Moment] = []
        self.drafter: tuple[Drafter | SequenceDrafter, SequenceView] | None = None
        self._pool: Pool | None = None

    def watched(self, drafter: str | DrafterClass) -> DrafterClass:
        """A subclass of the drafter's class that reports which object drafts the request."""
        kind: Any = registry.load(drafter) if isinstance(drafter, str) else drafter

        def begin(drafter: Any, sequence: SequenceView) -> None:
            sequence.explained = True
            kind.begin(drafter, sequence)
            self.drafter = (drafter, sequence)

        found: DrafterClass = type(kind.__name__, (kind,), {"begin": begin, "__doc__": kind.__doc__})
        return found

    def on_choices(self, proposal: Proposal, choices: Choices) -> None:
        assert self.drafter is not None  # it begins before its first step
        drafter, sequence = self.drafter
        self._pool = None
        if isinstance(drafter, Lookahead):
            tails = [tail for key, tail in reversed(drafter.pool.ngrams()) if key == sequence.root]
            self._pool = Pool(len(drafter.pool), sequence.root, tuple(tails))

    def on_step(self, step: Step) -> None:
        assert self.drafter is not None
        self.steps.append(_moment(step, *self.drafter, self._pool))


def page(recording: Recording) -> str:
    """The recording as one HTML page without references to other files."""
    data = json.dumps(asdict(recording), allow_nan=False, separators=(",", ":"))
    for character in "<>&":  # so that text cannot end the script element or start another
        data = data.replace(character, f"\\u{ord(character):04x}")
    template = resources.files("leapahead").joinpath("assets", "explain.html").read_text(encoding="utf-8")
    before, after = template.split("{{DATA}}")
    return before + data + after


def visible(text: str) -> str:
    """`text` in printable characters: a space as ·, a newline as ↵, control characters as their pictures."""
    return "".join(map(_shown, text))


def _shown(character: str) -> str:
    if character in SHOWN:
        return SHOWN[character]
    if character < " ":
        return chr(0x2400 + ord(character))  # the control pictures
    return character if character.isprintable() else f"\\u{ord(character):04x}"


def _moment(step: Step, drafter: Drafter | SequenceDrafter, sequence: SequenceView, pool: Pool | None) -> Moment:
    """A step as it is recorded, read inside the step: the next forward may overwrite the logits."""
    tree, tokens, accepted = step.tree, step.tokens, list[int]()
    for token in tokens[: step.verdict.accepted]:
        node = tree.child(accepted[-1] if accepted else 0, token)
        assert node is not None  # an accepted token was drafted
        accepted.append(node)
    sources = step.proposal.sources or (drafter.name,) * len(tree)
    logits = step.choices.logits
    drafted = drafter.draft_probabilities(sequence, tree) if isinstance(drafter, Drafter) else {}
    after = [_probabilities(logits[node : node + 1]) for node in range(len(tree))]
    nodes = tuple(
        Node(
            token=token,
            parent=parent,
            depth=depth,
            source=sources[node] if node else "",
            p=_number(after[parent][token]) if node else None,
            q={name: number for name, row in drafted.items() if (number := _number(row[node])) is not None},
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
        spans=(),
        pool=pool,
    )


def _probabilities(row: Array) -> npt.NDArray[np.float64]:
    """Softmax of logits [1, vocab] of any array kind and precision: float64 [vocab], NaN where they are not finite."""
    xp = array_namespace(row)
    found: Any = to_device(xp.astype(row, xp.float64 if row.dtype == xp.float64 else xp.float32), "cpu")
    scores = np.asarray(found, dtype=np.float64)[0]
    with np.errstate(invalid="ignore"):
        mass = np.exp(scores - scores.max())
        probabilities: npt.NDArray[np.float64] = mass / mass.sum()
    return probabilities


def _likeliest(probabilities: npt.NDArray[np.float64]) -> tuple[tuple[int, float], ...]:
    """The likeliest tokens and their probabilities."""
    if not np.isfinite(probabilities).all():
        return ()
    count = min(LIKELIEST, len(probabilities))
    best = np.argpartition(-probabilities, count - 1)[:count]
    best = best[np.lexsort((best, -probabilities[best]))]  # of equals the lowest id first, as in greedy decoding
    return tuple((int(token), round(float(probabilities[token]), 6)) for token in best)


def _number(p: np.floating[Any]) -> float | None:
    """Rounded; None where it is not finite."""
    return round(float(p), 6) if math.isfinite(p) else None


def _spine(drafter: Drafter | SequenceDrafter, tree: TokenTree, sources: Sequence[str]) -> tuple[int, ...]:
    """Row 0 of lookahead's window: the beginning of the path to the deepest window node (see `drafters.lookahead`)."""
    window = [node for node in range(1, len(tree)) if sources[node] == "window"]
    if not isinstance(drafter, Lookahead) or not window:
        return ()
    foot = max(window, key=lambda node: (tree.depths[node], node))
    return tuple(tree.path(foot)[1 : drafter.window])


def _texts(tokenizer: Tokenizer | None, steps: Iterable[Moment]) -> dict[int, str]:
    """The printable text of every token that was recorded."""
    ids: set[int] = set()
    for step in steps:
        ids.update(step.tokens)
        for node in step.nodes:
            ids.update((node.token, node.chosen), (token for token, _ in node.likeliest))
        if step.pool is not None:
            ids.update((step.pool.key,), *step.pool.tails)
    if tokenizer is None:
        return {token: f"#{token}" for token in sorted(ids - {-1})}
    known = id_bound(tokenizer)
    # Decoded after another token, because some tokenizers drop a leading space.
    anchor = tokenizer.encode("a", add_special_tokens=False)[-1:]
    before = tokenizer.decode(anchor)
    texts = {}
    for token in sorted(ids - {-1}):
        text = tokenizer.decode([*anchor, token]) if token < known else ""
        text = text[len(before) :] if text.startswith(before) else tokenizer.decode([token])
        # Bytes that are not a whole character, and ids without text, are identified by their number.
        texts[token] = visible(text) + (f"#{token}" if not text or REPLACEMENT in text else "")
    return texts
