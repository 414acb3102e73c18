"""Exact mode with captured forwards of two shapes.

    a step        forwards of `TOGETHER` sequences with `STEP_ROWS` rows each; both padded
    a prompt      forwards of one sequence with `CHUNK` rows, which begin and end at multiples of `CHUNK`; padded

As in `exact`, a row's logits are the same bits whatever the other rows are; there the sequences of a step share a
forward, whose shapes depend on the trees, so that it cannot be captured. The attention is that of `compacted`. Whether
the bits are the same is tested on the model when it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from leapahead.core.errors import LeapaheadError, Refused, first_line
from leapahead.core.tree import UNLIMITED, IntArray, TokenTree
from leapahead.models.transformers import compacted, exacttest, packed, products, selftest
from leapahead.models.transformers.compacted import BLOCK
from leapahead.models.transformers.exact import Draft, ExactExecutor, ExactRow, has_experts
from leapahead.models.transformers.families import text_config
from leapahead.models.transformers.forward import Layers, MaskedExecutor, Outputs
from leapahead.models.transformers.kv_cache import Row
from leapahead.models.transformers.static import gate
from leapahead.models.transformers.static.cache import Placed, StaticCache, StaticRow
from leapahead.models.transformers.static.executor import StaticExecutor
from leapahead.models.transformers.static.graphs import GraphBackend, Graphs
from leapahead.models.transformers.static.shapes import Shape, own_of

STEP_ROWS, TOGETHER = 16, 4  # a GPU takes hardly longer for 64 rows than for 16


@dataclass(eq=False)
class CompactedRow(ExactRow, StaticRow):
    """A row whose commit may be outstanding, and of which whole chunks of a prompt are given to other sequences."""


class CompactedCache(StaticCache):
    """Forwards read whole blocks of it."""

    row_class = CompactedRow
    first_capacity = BLOCK

    def __init__(self, usual_length: int = UNLIMITED) -> None:
        super().__init__(min(_whole_blocks(usual_length), UNLIMITED))

    def begin_static(self, rows: Sequence[Row], num_computed: Sequence[int], n: int) -> Placed:
        self._make_room(len(self.rows), self.capacity)
        return super().begin_static(rows, num_computed, n)

    def begin_exact(self, rows: Sequence[Row], num_computed: Sequence[int], batch: int, n: int) -> Placed:
        """Prepares a forward of `batch` sequences."""
        placed = self.begin_static(rows, num_computed, n)._replace(batch=batch)
        while len(self.rows) < TOGETHER:  # also where slots have grown, for which rows of closed sequences give way
            self.flush()
            self._make_room(len(self.rows) + 1, self.capacity)
        for group in self.groups:
            self._first_places(group, batch)
        return placed

    def _make_room(self, count: int, need: int) -> None:
        """Has rows for one forward, of whole blocks, even where the limit allows fewer."""
        need, before = _whole_blocks(need), self.limit
        self.limit = max(before, TOGETHER * max(need, _whole_blocks(self.capacity)))
        try:
            super()._make_room(count, need)
        finally:
            self.limit = before

    def _most(self, rows: int) -> int:
        return super()._most(rows) // BLOCK * BLOCK


class CompactedExecutor(StaticExecutor):
    """Forwards of a given number of sequences."""

    cache: CompactedCache
    _batch = 1

    def together(self, drafts: Sequence[Draft], batch: int, n: int, layers: Layers = ()) -> list[Outputs]:
        """Of the new nodes of at most `batch` drafts, in a forward of so many sequences with `n` rows each."""
        rows, trees, computed = map(list, zip(*drafts, strict=True))
        if not self.cache.is_ready:  # which makes the tensors of the cache; what it computes is computed again
            with packed.attention(text_config(self.model)):
                MaskedExecutor.run(self, rows, trees, computed, layers)
        self._batch = batch
        found = self._recorded(rows, trees, computed, n, layers)
        assert found is not None, "the inputs of so few rows fit"
        return found

    def _placed(self, rows: Sequence[Row], computed: Sequence[int], n: int, layers: Layers) -> tuple[Placed, Shape]:
        placed = self.cache.begin_exact(rows, computed, self._batch, n)
        return placed, Shape(self._batch, n, own_of(n, max(computed)), placed.end, layers)

    def _most_rows(self, batch: int) -> int:
        return 0  # the forwards are equally large, so none of them comes first


class CapturedExactExecutor(ExactExecutor):
    """See the module.

    Args:
        executor: of exact mode without captures.
        backend: what records forwards.
    """

    step_rows = STEP_ROWS

    def __init__(self, executor: ExactExecutor, backend: GraphBackend) -> None:
        model = executor.model
        self.static = CompactedExecutor(
            model,
            CompactedCache(executor.cache.usual_length),
            dict(executor.patterns),
            True,
            None,
            backend,
            partial(packed.attention, name=compacted.NAME),
        )
        super().__init__(model, self.static.cache, executor.patterns)

    def another(self, model: Any, backend: GraphBackend | None = None) -> CapturedExactExecutor:
        return CapturedExactExecutor(ExactExecutor.another(self, model), backend or self.graphs.backend)

    @property
    def graphs(self) -> Graphs:
        """The recorded forwards."""
        return self.static.graphs

    @property
    def prepares(self) -> bool:
        """Whether the last step recorded a forward, which took longer than the forward."""
        return self.static.prepares

    def run(
        self,
        rows: Sequence[Row],
        trees: Sequence[TokenTree],
        num_computed: Sequence[int] | None = None,
        layers: Layers = (),
        **options: Any,
    ) -> list[Outputs]:
        self.static.prepares = False
        return super().run(rows, trees, num_computed, layers, **options)

    def _together(self, drafts: Sequence[Draft]) -> Iterator[list[Draft]]:
        for at in range(0, len(drafts), TOGETHER):
            yield list(drafts[at : at + TOGETHER])

    def _forward(self, drafts: Sequence[Draft], size: int, layers: Layers, **options: Any) -> list[Outputs]:
        with products.in_one_order(self.device):
            return self.static.together(drafts, 1 if size == self.chunk else TOGETHER, size, layers)

    def clear(self) -> None:
        """Drops the entries. Their memory stays, since recordings read and write it."""
        self.static.clear()

    def forget(self) -> None:
        self.static.forget()


def tested(
    executor: ExactExecutor, ids: IntArray, prompts: Sequence[int], backend: GraphBackend
) -> CapturedExactExecutor:
    """An executor of exact mode that records its forwards, if the model passes.

    Args:
        executor: of exact mode without captures, which was tested on the model.
        ids: token ids without a special meaning.
        prompts: see `selftest.run`.
        backend: what records forwards.

    Raises:
        Refused: it does not pass; the message says why.
    """
    gate.check_by_name(executor.model)
    if has_experts(text_config(executor.model).to_dict()):
        raise Refused("its experts are computed by the number of tokens that go to each of them")
    try:
        return _tested(executor, ids, prompts, backend)
    except (LeapaheadError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise Refused(f"its forward cannot be recorded: {type(error).__name__}: {first_line(error)}") from error


def _tested(
    executor: ExactExecutor, ids: IntArray, prompts: Sequence[int], backend: GraphBackend
) -> CapturedExactExecutor:
    model = executor.model
    recording = CapturedExactExecutor(executor, backend)
    calling = recording.another(model, gate.Watched(executor.device))
    result = selftest.run(calling, selftest.OwnOutputs(model), ids, prompts, floor=exacttest.floor(model.dtype))
    if not result.passed:
        raise Refused(f"logits of captured forwards differ from its own by {result.error:.2g} standard deviations")
    gate.compare(recording, calling, ids)
    exacttest.check(recording, ids, BLOCK)
    recording.forget()
    recording.graphs.tolerant = True
    return recording


def _whole_blocks(slots: int) -> int:
    return -(-slots // BLOCK) * BLOCK
