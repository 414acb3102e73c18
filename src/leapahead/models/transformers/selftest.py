"""Tests an executor on the loaded model before any text: small random trees against the model's own plain forward.

Two sequences of different lengths take two steps each; between them a commit moves entries in the cache. The logits of
every node must be those that the model itself, without our cache and masks, gives after the node's path:

    step 1   A: 0 ┬ 1 ┬ 3          B: 0 ┬ 1 ── 2      commits 0-2-5 of A and 0-3 of B, which are apart in the cache
                  │   └ 4               └ 3
                  └ 2 ── 5
    step 2   A: 0 ┬ 1 ── 2         B: 0 ┬ 1
                  └ 3                   └ 2 ── 3

An executor that gets a model's masks, positions or state wrong fails here, whatever the architecture. So a model of an
unknown architecture is decoded correctly or refused. Hidden states are tested in the same way.

How far logits may differ is measured on the model: its own forward is computed twice, in batches of different shapes,
over few cached entries and over more, which are masked, as those of a tree's other branches are. Kernels compute many
entries in vectors and a few one by one; on some processors nothing else changes the rounding.

In half precision a node of a mixture of experts may also be routed to another expert in one of the computations, which
changes its logits by more than rounding does. Such a change depends on the tokens, and a wrong mask on the shape of the
tree. So every node must agree with one of the model's two computations in at least one of several draws of tokens.

The model's own values are most of the rows that the test computes. All executors of a model are compared with the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leapahead.core.errors import Refused, first_line
from leapahead.core.tree import IntArray, TokenTree
from leapahead.models.base import BRANCHES, CHAIN, TREE
from leapahead.models.transformers import families
from leapahead.models.transformers.forward import Executor, Layers, Outputs, inputs, side_by_side
from leapahead.models.transformers.modes import precision

FULL = (torch.float32, torch.float64)
# Values may always be this far apart, in standard deviations, ...
FLOOR = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
# (where the model's own state is tested token by token, a recurrence has other formulas for many tokens) ...
RECURRENT_FLOOR = 0.05
# ... or so many times as far as the model's two computations are, but never further than this: in half precision, ...
MARGIN = 8.0
CEILING = 0.5
# ... and in full precision, where what is further apart is no rounding: a wrong state, or rows that influence each
# other, as under dynamic quantisation, so that a draft would change the text.
FULL_CEILING = 0.01
ONE_TOKEN = np.zeros((1, 1), dtype=np.int64)
VECTOR = 16  # numbers of the widest vector of a processor
DRAWS = 3  # of tokens, in half precision

# Some models give tokens that they never choose the lowest number there is; those have no part in the distances.
BANNED = 1e4

Shape = tuple[tuple[list[int], list[int]], ...]  # of a sequence, by step: parents, committed path

SHAPES: dict[str, tuple[Shape, ...]] = {
    TREE: (
        (([-1, 0, 0, 1, 1, 2], [0, 2, 5]), ([-1, 0, 1, 0], [0])),
        (([-1, 0, 1, 0], [0, 3]), ([-1, 0, 0, 2], [0])),
    ),
    # Two plain steps at the end: where tokens are replayed, the first catches up with them, and the last one is a
    # forward of one token of each sequence.
    CHAIN: (
        (([-1, 0, 1, 2], [0, 1]), ([-1, 0, 1], [0]), ([-1], [0]), ([-1], [0])),
        (([-1, 0, 1], [0]), ([-1, 0], [0]), ([-1], [0]), ([-1], [0])),
    ),
    # One sequence: a branch that is accepted whole, one that is not, and a chain behind replayed tokens.
    BRANCHES: (
        (
            ([-1, 0, 0, 1, 1, 2], [0, 2, 5]),
            ([-1, 0, 0, 2], [0, 1]),
            ([-1, 0, 1, 0], [0, 1, 2]),
            ([-1, 0], [0, 1]),
            ([-1], [0]),
        ),
    ),
    "": (
        (([-1], [0]), ([-1], [0])),
        (([-1], [0]), ([-1], [0])),
    ),
}


@dataclass(frozen=True)
class Result:
    """How far an executor's values were from the model's own.

    Attributes:
        error: the greatest distance of a node's logits, in standard deviations of the logits.
        tolerance: as much as rounding explains, at that node.
        hidden: whether the hidden states agree as well; false where none were asked for.
    """

    error: float
    tolerance: float
    hidden: bool = False

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance  # false for NaN


@dataclass(frozen=True)
class Distances:
    """How far the values of each node are from the nearest of the model's own computations.

    Attributes:
        errors: [nodes], in standard deviations.
        tolerances: [nodes].
    """

    errors: Tensor
    tolerances: Tensor

    @property
    def small(self) -> bool:
        return bool((self.errors <= self.tolerances).all())  # false for NaN

    def least(self, other: Distances | None) -> Distances:
        """At each node the smaller one, relative to its tolerance; NaN where one is."""
        if other is None:
            return self
        mine, theirs = self.errors / self.tolerances, other.errors / other.tolerances
        worse = (theirs < mine) & ~mine.isnan()
        return Distances(
            torch.where(worse, other.errors, self.errors), torch.where(worse, other.tolerances, self.tolerances)
        )


class OwnOutputs:
    """A model's own values after paths, see `references`. Those of the last paths are kept.

    Args:
        model: the model.
        copied: a copy of it that shares its weights, which computes the hidden states, and the logits with them.
        layers: whose hidden states are computed; none where that fails.
        hidden_size: the width of one.
        refusal: why there are none.

    Attributes:
        precision: in which the model computes.
    """

    def __init__(
        self, model: Any, copied: Any = None, layers: Layers = (), hidden_size: int = 0, refusal: str = ""
    ) -> None:
        self.model, self.copied, self.layers, self.hidden_size = model, copied, layers, hidden_size
        self.refusal, self.precision = refusal, precision(model, lambda: own_logits(model, ONE_TOKEN))
        self._paths: list[list[int]] = []
        self._found: list[Outputs] = []

    def after(self, paths: list[list[int]]) -> list[Outputs]:
        """By each of the model's two computations, the values after each path."""
        if paths != self._paths:
            self._paths, self._found = paths, self._computed(paths)
        return list(self._found)

    def _computed(self, paths: list[list[int]]) -> list[Outputs]:
        if self.layers:
            try:
                return references(self.copied, paths, self.layers)
            except Exception as error:  # the model may still give its logits, which need less memory
                self.layers, self.refusal = (), first_line(error)
        return references(self.model, paths)


def run(
    executor: Executor,
    own: OwnOutputs,
    ids: IntArray,
    prompts: Sequence[int],
    cached: Executor | None = None,
    native: Executor | None = None,
    layers: Layers = (),
    branches: bool = False,
    floor: float | None = None,
) -> Result:
    """Tests an executor.

    Args:
        own: of the model that the executor runs.
        ids: token ids without a special meaning for the model.
        prompts: lengths of the two sequences' prompts.
        cached: compare with this executor, one sequence after the other, instead of with plain forwards. For models
            whose own logits depend on what follows: then their own state, one token at a time, is what is preserved.
        native: counts as one more of the model's own computations: all tokens of a path but the last in one forward,
            then that one. A recurrence has other formulas for many tokens than for one, which round differently.
        layers: whose hidden states are tested too: none, or those of `own`.
        branches: test those of a single sequence, and nothing else.
        floor: how far values may always be apart; by default by the precision.
    """
    kind = BRANCHES if branches else next((name for name in (TREE, CHAIN) if name in executor.capabilities), "")
    dtype = own.precision if own.precision in FLOOR else torch.float16
    if floor is None:
        floor = FLOOR[dtype] if kind else max(FLOOR[dtype], RECURRENT_FLOOR)
    is_half = dtype not in FULL
    logits: Distances | None = None
    hidden: Distances | None = None
    for draw in range(DRAWS if is_half else 1):
        executor.forget()  # so that every draw uses the same rows and slots
        paths, ours = _nodes(executor, ids, prompts, SHAPES[kind], layers, draw)
        theirs = own.after(paths) if cached is None else [one_by_one(cached, paths)]
        if native is not None:
            theirs.append(last_alone(native, paths, layers))
        ceiling = CEILING if is_half else FULL_CEILING
        logits = distances(ours.logits, [each.logits for each in theirs], floor, ceiling, is_half).least(logits)
        if layers:
            hidden = _of_layers(ours, theirs, len(layers), floor, ceiling, is_half).least(hidden)
        if logits.small and (hidden is None or hidden.small):
            break
    assert logits is not None
    worst = int((logits.errors / logits.tolerances).nan_to_num(nan=float("inf")).argmax())
    return Result(float(logits.errors[worst]), float(logits.tolerances[worst]), hidden is not None and hidden.small)


def distances(
    mine: Tensor, theirs: Sequence[Tensor], floor: float, ceiling: float, is_half: bool, banned: float = BANNED
) -> Distances:
    """Compares values [nodes, width] with the model's own, computed once or in several ways."""
    mine = mine.to(theirs[0])
    real = theirs[0].abs() < banned
    if (real != (mine.abs() < banned)).any():
        return Distances(mine.new_full((len(mine),), torch.nan), mine.new_ones(len(mine)))
    spread = theirs[0][real].std().clamp_min(torch.finfo(mine.dtype).tiny)

    def apart(one: Tensor, other: Tensor) -> Tensor:
        return (one - other).abs().where(real, 0).amax(dim=1) / spread

    errors = torch.stack([apart(mine, each) for each in theirs]).amin(dim=0)  # NaN stays NaN
    noise = torch.stack([apart(theirs[0], each) for each in theirs]).amax(dim=0)
    tolerance = max(floor, min(MARGIN * float(noise.median() if is_half else noise.max()), ceiling))
    return Distances(errors, torch.full_like(errors, tolerance))


def _of_layers(
    ours: Outputs, theirs: Sequence[Outputs], count: int, floor: float, ceiling: float, is_half: bool
) -> Distances:
    """The distances of hidden states, at each node those of the worst layer."""
    mine, *own = [each.hidden.chunk(count, dim=-1) for each in (ours, *theirs) if each.hidden is not None]
    infinite = float("inf")
    found = [
        distances(layer, [each[at] for each in own], floor, ceiling, is_half, infinite) for at, layer in enumerate(mine)
    ]
    ratios = torch.stack([each.errors / each.tolerances for each in found]).amax(dim=0)
    return Distances(ratios, torch.ones_like(ratios))


def _nodes(
    executor: Executor, ids: IntArray, prompts: Sequence[int], shapes: Sequence[Shape], layers: Layers, draw: int
) -> tuple[list[list[int]], Outputs]:
    """Runs the steps of the module's picture; returns the path of every node and the executor's values after it."""
    rng = np.random.default_rng(draw)

    def drawn(count: int) -> list[int]:
        return [int(token) for token in rng.choice(ids, size=count)]

    texts = [drawn(length) for length in prompts]
    states = [executor.open(text) for text in texts]
    found: list[Outputs] = []
    paths: list[list[int]] = []
    try:
        for state, text in zip(states, texts, strict=True):
            while state.length < len(text) - 1:  # in two chunks
                executor.prefill(state, min(len(text) // 2, len(text) - 1 - state.length))
        for plan in zip(*shapes, strict=True):
            trees = [
                TokenTree(np.array([text[-1], *drawn(len(parents) - 1)]), np.array(parents))
                for text, (parents, _) in zip(texts, plan, strict=True)
            ]
            outputs = executor.forward(states, trees, None, layers)
            for text, tree, state, output, (_, path) in zip(texts, trees, states, outputs, plan, strict=True):
                found.append(output)
                paths += [text + tree.path_tokens(node) for node in range(len(tree))]
                state.commit(path)
                text += tree.path_tokens(path[-1]) + drawn(1)
    finally:
        for state in states:
            state.close()
    hidden = torch.cat([each.hidden for each in found if each.hidden is not None]) if layers else None
    return paths, Outputs(torch.cat([each.logits for each in found]), hidden)


def references(model: Any, paths: Sequence[Sequence[int]], layers: Layers = (), least: int = VECTOR) -> list[Outputs]:
    """The model's own values after each path, by plain forwards without any cache: in one batch, and in two halves.

    Args:
        least: each row of the one batch has at least so many tokens. The halves, the first of which has the shorter
            texts, are as wide as their own longest text. 0 for the same width in both computations.
    """
    whole = [path for path in paths if not any(len(path) < len(o) and o[: len(path)] == path for o in paths)]
    whole.sort(key=len)
    rows = [next(i for i, each in enumerate(whole) if each[: len(path)] == path) for path in paths]
    half, length = (len(whole) + 1) // 2, len(whole[-1])
    least = min(least, families.context_length(families.text_config(model)))

    def computed(part: Sequence[Sequence[int]], width: int) -> Outputs:
        # What follows a path is not attended to.
        return own_outputs(model, np.array([[*path, *[path[0]] * (width - len(path))] for path in part]), layers)

    every = [computed(whole, max(length, least))]
    halves = [computed(part, len(part[-1]) if least else length) for part in (whole[:half], whole[half:]) if part]
    last = [len(path) - 1 for path in paths]
    found = []
    for outputs in (every, halves):
        hidden = _at([each.hidden for each in outputs if each.hidden is not None], rows, last) if layers else None
        found.append(Outputs(_at([each.logits for each in outputs], rows, last), hidden))
    return found


def _at(parts: Sequence[Tensor], rows: Sequence[int], places: Sequence[int]) -> Tensor:
    """Of rows [length, width], which are the parts' one after the other, the values at these places."""
    every = [row for part in parts for row in part]
    return torch.stack([every[row][place] for row, place in zip(rows, places, strict=True)])


def own_noise(model: Any, ids: IntArray) -> float:
    """How far a model's own logits change with what is computed beside them, in standard deviations."""
    rng = np.random.default_rng(0)
    paths = [rng.choice(ids, size=length).tolist() for length in (4, 4, 8, 8)]
    first, second = references(model, paths, least=0)
    return float(distances(first.logits, [second.logits], 0.0, 0.0, False).errors.max())


def reads_ahead(own: OwnOutputs, ids: IntArray) -> bool:
    """Whether a model's logits change with later tokens, as an encoder's do, and not only with rows beside them."""
    texts = np.random.default_rng(0).choice(ids, size=(2, 4))
    texts[1, :2] = texts[0, :2]
    first, second = own_logits(own.model, texts)[:, :2]
    ceiling = FULL_CEILING if own.precision in FULL else CEILING
    change = distances(first, [second], 0.0, 0.0, False).errors.max()
    return bool(change > ceiling) and own_noise(own.model, ids) <= ceiling


def one_by_one(executor: Executor, paths: Sequence[Sequence[int]]) -> Outputs:
    """The same by `executor`, for paths that are two sequences in turns, each a token longer than the last."""
    rows: dict[int, Tensor] = {}
    for first in (0, 1):
        tokens = list(paths[first])
        state = executor.open(tokens)
        if len(tokens) > 1:
            executor.prefill(state, len(tokens) - 1)
        for index in range(first, len(paths), 2):
            tokens += paths[index][len(tokens) :]
            rows[index] = executor.forward([state], [TokenTree.root(tokens[-1])])[0].logits[0]
            state.commit([0])
        state.close()
    return Outputs(_wide(torch.stack([rows[index] for index in range(len(paths))])))


def last_alone(executor: Executor, paths: Sequence[Sequence[int]], layers: Layers = ()) -> Outputs:
    """The values after each path by `executor`, which reads its last token in a forward of its own."""
    found = []
    for path in paths:
        state = executor.open(list(path))
        if len(path) > 1:
            executor.prefill(state, len(path) - 1)
        found += executor.forward([state], [TokenTree.root(path[-1])], None, layers)
        state.close()
    hidden = torch.cat([each.hidden for each in found if each.hidden is not None]) if layers else None
    return Outputs(_wide(torch.cat([each.logits for each in found])), None if hidden is None else _wide(hidden))


def own_outputs(model: Any, tokens: IntArray, layers: Layers = ()) -> Outputs:
    """Of a plain forward: logits [batch, length, vocab] and hidden states, float32 or float64."""
    options = {"output_hidden_states": True} if layers else {}
    output = model(**inputs(model, tokens, 0, model.get_input_embeddings().weight.device), use_cache=False, **options)
    hidden = side_by_side(output.hidden_states, layers) if layers else None
    return Outputs(_wide(output.logits), None if hidden is None else _wide(hidden))


def own_logits(model: Any, tokens: IntArray) -> Tensor:
    """[batch, length, vocab], float32 or float64."""
    return own_outputs(model, tokens).logits


def layers_of(model: Any, tokens: IntArray) -> tuple[Layers, int]:
    """The layers whose hidden states a model gives, and the width of one.

    Raises:
        Refused: it gives none, or some that are not [batch, length, width].
    """
    device = model.get_input_embeddings().weight.device
    states = model(**inputs(model, tokens, 0, device), use_cache=False, output_hidden_states=True).hidden_states
    shapes = {tuple(each.shape) for each in states or ()}
    if len(shapes) != 1 or len(shape := shapes.pop()) != 3 or shape[:2] != tokens.shape:
        raise Refused("the model's forward gives no hidden states of one width")
    return tuple(range(len(states))), shape[-1]


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()
