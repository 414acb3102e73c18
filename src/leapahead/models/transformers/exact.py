"""Runs a model so that every token's logits are the same bits, whatever else is computed beside it.

    a step        forwards of `STEP_ROWS` rows, into which the trees of all sequences are packed; padded
    a prompt      forwards of `CHUNK` rows, which begin and end at multiples of `CHUNK`; padded

Matrix products choose their kernels by the number of rows, and within one shape a row's result does not depend on the
other rows or on its place. So the number of rows is fixed. The attention adds up in the order of positions (`ordered`).
Whether this holds for a model on this machine is tested when it is loaded (`exacttest`). On CUDA, products are summed
in full precision and without split-K (`products`).

Entries of a prompt and entries of a step are computed by forwards of different shapes. Plain decoding has those of the
first kind for the prompt and those of the second behind it, so only the first kind is taken over from other sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leapahead.core.errors import BadParameter, Refused
from leapahead.core.tree import UNLIMITED, TokenTree
from leapahead.models.base import CHAIN, LOGITS, TOP_K, TREE
from leapahead.models.transformers import ordered, products
from leapahead.models.transformers.families import Pattern, text_config
from leapahead.models.transformers.forward import CachedExecutor, CachedState, Layers, Outputs, side_by_side
from leapahead.models.transformers.kv_cache import KVCache, Row
from leapahead.models.transformers.ordered import BLOCK, Part, Visible

STEP_ROWS = 8
CHUNK = 64


@dataclass(eq=False)
class ExactRow(Row):
    """A row of an exact cache.

    Attributes:
        read: how many of the first entries were computed as a prompt.
        prompt: how many are, in plain decoding.
    """

    read: int = 0
    prompt: int = 0

    def common(self, prefix: list[int]) -> int:
        """Of those that were computed as a prompt, whole chunks."""
        return min(super().common(prefix), self.read) // CHUNK * CHUNK


class ExactCache(KVCache):
    """A cache of float32 at least, in which the attention reads whole blocks."""

    row_class = ExactRow

    def __init__(self, usual_length: int = UNLIMITED) -> None:
        super().__init__(min(-(-usual_length // BLOCK) * BLOCK, UNLIMITED), BLOCK)

    def write(self, place: tuple[int, int], states: Tensor) -> Tensor:
        return super().write(place, states if states.dtype == torch.float64 else states.float())


class Draft(NamedTuple):
    """The tree of one sequence; its nodes from `first` on are to be computed."""

    row: Row
    tree: TokenTree
    first: int

    @property
    def new(self) -> int:
        return len(self.tree) - self.first


class ExactExecutor(CachedExecutor):
    """Trees of at most `STEP_ROWS` nodes, with the same bits whatever is computed beside them.

    Args:
        patterns: the attention patterns of the model's layers.
        cache: empty.
    """

    capabilities = frozenset({CHAIN, TREE, LOGITS, TOP_K})
    step_rows, chunk = STEP_ROWS, CHUNK

    def __init__(self, model: Any, cache: ExactCache, patterns: Mapping[str, Pattern]) -> None:
        super().__init__(model, cache)
        self.patterns = patterns
        self._visible = {name: Visible(each.window, each.chunk) for name, each in patterns.items()}
        self._dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
        if has_experts(text_config(model).to_dict()) and not model._can_set_experts_implementation():
            raise Refused("its experts are computed by the number of tokens that go to each of them")

    def another(self, model: Any) -> ExactExecutor:
        return ExactExecutor(model, ExactCache(), self.patterns)

    def open(self, tokens: list[int], reuse: int = 0, reserve: int = 0, owner: str = "") -> CachedState:
        state = super().open(tokens, reuse, reserve, owner)
        assert isinstance(state.row, ExactRow)
        state.row.read, state.row.prompt = state.row.length, len(tokens) - 1
        return state

    def fork(self, state: CachedState, tokens: list[int]) -> CachedState:
        twin = self.open(tokens, 0, state.row.reserved, state.row.owner)
        assert isinstance(twin.row, ExactRow)
        assert isinstance(state.row, ExactRow)
        self.cache.share(twin.row, state.row, state.length)
        twin.row.length, twin.row.extent = state.length, max(twin.row.extent, state.length)
        twin.row.read, twin.row.prompt = state.row.read, state.row.prompt
        return twin

    def prefill(self, state: CachedState, count: int, rows: int = 1, layers: Layers = ()) -> Outputs:
        assert isinstance(state.row, ExactRow)
        found: list[Outputs] = []
        end, prompt = state.length + count, state.row.prompt
        try:
            while (start := state.length) < end:
                is_prompt = start < prompt  # what follows it is read again, after an interrupt, as steps have read it
                last = min(prompt, self.chunk_end(start)) if is_prompt else start + self.step_rows
                chunk = state.tokens[start : min(end, last)]
                draft = Draft(state.row, TokenTree.chain(chunk[0], chunk[1:]), 0)
                if is_prompt:
                    keep = {name: self.chunk - max(0, len(chunk) - rows) for name in self.few_logits}
                    found += self._forward([draft], self.chunk, layers, **keep)
                else:
                    found += self._forward([draft], self.step_rows, layers)
                state.commit(range(len(chunk)))
                state.row.read = min(prompt, state.row.length)
        except BaseException:
            self.discard([state.row])
            raise
        hidden = [each.hidden for each in found if each.hidden is not None]
        return Outputs(torch.cat([each.logits for each in found]), torch.cat(hidden) if hidden else None)

    def chunk_end(self, start: int) -> int:
        """Where the chunk of a prompt ends that begins at this position."""
        return (start // self.chunk + 1) * self.chunk

    def run(
        self,
        rows: Sequence[Row],
        trees: Sequence[TokenTree],
        num_computed: Sequence[int] | None = None,
        layers: Layers = (),
        **options: Any,
    ) -> list[Outputs]:
        drafts = [Draft(*each) for each in zip(rows, trees, num_computed or [0] * len(trees), strict=True)]
        for draft in drafts:
            if draft.new > self.step_rows:
                raise BadParameter(
                    f"a tree of {draft.new} nodes is more than the {self.step_rows} rows of a forward in exact mode; "
                    "use smaller drafts"
                )
        return [each for some in self._together(drafts) for each in self._forward(some, self.step_rows, layers)]

    def _together(self, drafts: Sequence[Draft]) -> Iterator[list[Draft]]:
        """Those that share a forward, one after another."""
        some: list[Draft] = []
        for draft in drafts:
            if sum(each.new for each in some) + draft.new > self.step_rows:
                yield some
                some = []
            some.append(draft)
        yield some

    def _forward(self, drafts: Sequence[Draft], size: int, layers: Layers, **options: Any) -> list[Outputs]:
        """One forward of `size` rows; `options` are the model's."""
        new = [draft.new for draft in drafts]
        new[-1] += size - sum(new)  # padding, which is discarded with what is not accepted
        order = self.cache.begin([each.row for each in drafts], new, [each.first for each in drafts], len(drafts) > 1)
        tokens, positions, places = list[int](), list[int](), list[int]()
        parts: list[Part] = []
        for batch, i in enumerate(order):
            row, tree, first = drafts[i]
            places.append(len(tokens))
            rows, padding = slice(len(tokens), len(tokens) + new[i]), new[i] - drafts[i].new
            patterns = self._visible, self._dtype, self.device
            parts.append(Part.of(batch, rows, size, tree, first, row.length, *patterns))
            tokens += tree.token_list[first:] + tree.token_list[:1] * padding
            positions += [row.length + depth for depth in tree.depth_list[first:]] + [row.length] * padding
        output = self._call(torch.tensor([tokens]), torch.tensor([positions]), parts, layers, **options)
        self.cache.end()
        hidden = side_by_side(output.hidden_states, layers) if layers else None
        found = {}
        for i, place in zip(order, places, strict=True):
            mine = slice(place, place + drafts[i].new)
            without = size - output.logits.shape[1]  # the first rows, whose logits were not asked for
            logits = output.logits[0, max(0, place - without) : place - without + drafts[i].new]
            found[i] = Outputs(logits, None if hidden is None else hidden[0, mine])
        return [found[i] for i in range(len(drafts))]

    def _call(self, tokens: Tensor, positions: Tensor, parts: Sequence[Part], layers: Layers, **options: Any) -> Any:
        if layers:
            options["output_hidden_states"] = list(layers)
        shape = (1, 1, tokens.shape[1], max(part.end for part in parts))
        masks = {name: torch.zeros(1, 1, 1, 1, device=self.device).expand(shape) for name in self.patterns}
        with products.in_one_order(self.device), ordered.attention(text_config(self.model), parts, masks):
            return self.model(
                input_ids=tokens.to(self.device),
                position_ids=positions.to(self.device),
                attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
                use_cache=True,
                **{self.cache_name: self.cache},
                **options,
            )


def has_experts(values: Mapping[str, Any]) -> bool:
    """Whether layers choose among experts for each token, by the values of a configuration and of those inside it."""
    return any(
        has_experts(value)
        if isinstance(value, Mapping)
        else "experts" in str(name) and isinstance(value, int) and value > 1
        for name, value in values.items()
    )
