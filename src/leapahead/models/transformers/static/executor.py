"""Runs trees by recorded forwards of fixed shapes, and what does not fit these as a `MaskedExecutor` does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import proxy

import torch
from torch import Tensor

from leapahead.core.errors import CacheFull
from leapahead.core.tree import TokenTree
from leapahead.models.transformers import selftest
from leapahead.models.transformers.families import Pattern, text_config
from leapahead.models.transformers.forward import Batch, CachedState, Layers, MaskedExecutor, Outputs, side_by_side
from leapahead.models.transformers.kv_cache import Row
from leapahead.models.transformers.modes import casting_anew
from leapahead.models.transformers.static.buffers import Buffers, Draft
from leapahead.models.transformers.static.cache import MOVES, Placed, StaticCache, StaticRow
from leapahead.models.transformers.static.compiled import Compiler
from leapahead.models.transformers.static.graphs import GraphBackend, Graphs
from leapahead.models.transformers.static.shapes import (
    ROWS,
    USUAL_ROWS,
    Shape,
    doubled,
    most_covering,
    most_rows,
    own_of,
    rows_of,
    usual_rows,
)
from leapahead.models.transformers.twin import twin

Attention = Callable[[Any], AbstractContextManager[None]]

PATIENCE = 64
NEW = 256  # tokens of a text that is expected
FEWEST_ROWS = 128  # for whose outputs there is memory


def own_attention(config: Any) -> AbstractContextManager[None]:
    """Leaves a model its own attention."""
    return nullcontext()


def agree(mine: Tensor, own: Tensor) -> bool:
    """Whether logits [rows, vocab] of compiled and of other code differ by rounding only, as in the self-test."""
    floor = selftest.FLOOR.get(own.dtype, selftest.FLOOR[torch.float16])
    wide = torch.float64 if own.dtype == torch.float64 else torch.float32
    return selftest.distances(mine.to(wide), [own.to(wide)], selftest.MARGIN * floor, selftest.CEILING, False).small


class StaticExecutor(MaskedExecutor):
    """Trees of any shape, all sessions in one forward, padded to a shape of the buckets.

    Prompts, probes, early exits and forwards beyond the largest bucket are computed by forwards that are not recorded,
    over the same cache.

    Args:
        model, cache, patterns, boolean, config: see `MaskedExecutor`; the cache's `block` is 1.
        backend: what records forwards.
        attention: makes a model's layers with this configuration use another attention, which takes this kind of mask,
            within a block that is one forward; by default the model's own.

    Attributes:
        compiler: compiles the forwards that are used most; None where none are compiled.
        prepares: whether the last forward was recorded or compiled, or was a plain one in a larger shape, and so took
            longer than it will.
        patience: how often a batch's shape is asked for before it is recorded, where a larger one is; a quarter as
            often where that one is large.
    """

    cache: StaticCache
    compiler: Compiler | None = None
    prepares = False
    patience = 0

    def __init__(
        self,
        model: Any,
        cache: StaticCache,
        patterns: dict[str, Pattern],
        boolean: bool,
        config: Any,
        backend: GraphBackend,
        attention: Attention = own_attention,
    ) -> None:
        super().__init__(model, cache, patterns, boolean, config)
        self.graphs = Graphs(backend)
        self._model = twin(model)  # whose configuration is ours
        self._config = text_config(self._model)
        self._attention = attention
        self._buffers = Buffers(self.device)
        self._asked = Counter[tuple[int, int]]()  # by batch and rows
        self._logits: Tensor | None = None  # [rows, vocab], of the last recorded forward
        self._hidden: dict[Layers, Tensor] = {}  # [rows, layers * hidden_size]

    @classmethod
    def of(
        cls, executor: MaskedExecutor, backend: GraphBackend, attention: Attention = own_attention
    ) -> StaticExecutor:
        """The same as an executor, with an empty cache."""
        cache, boolean = StaticCache(executor.cache.usual_length), executor.dtype is None
        return cls(executor.model, cache, executor.patterns, boolean, executor.config, backend, attention)

    def another(self, model: Any, backend: GraphBackend | None = None) -> StaticExecutor:
        backend = backend or self.graphs.backend
        return StaticExecutor(
            model, StaticCache(), self.patterns, self.dtype is None, self.config, backend, self._attention
        )

    @property
    def pads(self) -> bool:
        return True

    def run(
        self,
        rows: Sequence[Row],
        trees: Sequence[TokenTree],
        num_computed: Sequence[int] | None = None,
        layers: Layers = (),
        **options: Any,
    ) -> list[Outputs]:
        self.prepares = False
        has_probes = self.added is not None and self.added.used_by(trees)
        is_begun = self.exits is not None and self.exits.has(rows)
        if options or has_probes or is_begun or not self.cache.is_ready:
            return super().run(rows, trees, num_computed, layers, **options)
        computed = list(num_computed or [0] * len(trees))
        n = rows_of(max(len(tree) - first for tree, first in zip(trees, computed, strict=True)), len(rows))
        found = None if n is None else self._recorded(rows, trees, computed, n, layers)
        return super().run(rows, trees, num_computed, layers) if found is None else found

    def forget(self) -> None:
        super().forget()
        self.graphs.over(self._memory)

    def clear(self) -> None:
        """Drops the entries. Their memory stays, since recordings read and write it."""
        self.cache.clear()
        if self.exits is not None:
            self.exits.forget()

    def warm_up(self, sequences: int, token: int) -> None:
        """Captures the forwards of plain steps of up to so many sequences, and those that others with drafts run in.

        Args:
            token: of the text that is decoded for it.
        """
        if not self.graphs.backend.pooled:
            return
        states, patience = list[CachedState](), self.patience
        self.patience = 0
        try:
            while len(states) < sequences:
                states.append(self.open([token], reserve=NEW))
            counts = {1 << power for power in range((sequences - 1).bit_length())} | {sequences}
            # The largest first, whose memory the others share, behind a forward that makes the cache's tensors.
            sizes = [(1, 1), *((count, usual_rows(ROWS[1], doubled(count))) for count in sorted(counts, reverse=True))]
            sizes += [(count, 1) for count in counts] + [(1, rows) for rows in ROWS]
            for count, rows in sizes:
                self.forward(states[:count], [TokenTree.chain(token, [token] * (rows - 1))] * count)
                self.discard([state.row for state in states])
        except CacheFull:  # so many sequences are decoded one after another
            return
        finally:
            self.patience = patience
            for state in states:
                state.close()

    def _recorded(
        self, rows: Sequence[Row], trees: Sequence[TokenTree], computed: Sequence[int], n: int, layers: Layers
    ) -> list[Outputs] | None:
        """One recorded forward of `n` rows of each sequence; None where its inputs are too large."""
        placed, shape = self._placed(rows, computed, n, layers)
        if not self._buffers.fits(shape):
            return None
        if not self._holds(shape):
            self._write(shape, rows, trees, computed, placed, moves=False)
            self._hold(shape, self._compute(shape))
        self.graphs.over(self._memory)
        largest = self._most_rows(placed.batch)
        if self.graphs.backend.pooled and not self.graphs.has_begun and shape.rows < largest:
            # All recordings share memory, and the smaller ones find room in that of the largest.
            self._recorded(rows, trees, computed, largest, layers)
            placed, shape = self._placed(rows, computed, n, layers)
        self.prepares |= self.graphs.is_new(shape)
        # Recording may run a forward several times; moves must be made once.
        self._write(shape, rows, trees, computed, placed, moves=shape in self.graphs)
        with self.cache.moving(rows):
            executor = proxy(self)  # the recording, which may keep the function, belongs to this
            self.graphs.run(shape, lambda: executor._run(shape))
        if self.compiler is not None:
            self._compile(shape, self.compiler, lambda: self._write(shape, rows, trees, computed, placed, moves=False))
        return self._outputs(shape, trees, computed, placed)

    def rows(self, states: Sequence[Any], trees: Sequence[TokenTree]) -> int:
        n = max(map(len, trees))
        return len(trees) * (n if n == 1 or len(trees) == 1 else self._likely_rows(doubled(len(trees)), n))

    def _likely_rows(self, batch: int, n: int) -> int:
        """Of each sequence in a batch's forward of `n` nodes, as `_placed` will find."""
        bucket = rows_of(n, batch)
        if bucket is None or not self.patience:
            return bucket or n
        other = self._larger(batch, bucket)
        if self._has_patience_ended(self._asked[batch, bucket] + 1, other):
            return bucket
        return usual_rows(bucket, batch) if other is None else other.rows

    def _placed(self, rows: Sequence[Row], computed: Sequence[int], n: int, layers: Layers) -> tuple[Placed, Shape]:
        """Prepares the cache for a forward of at least `n` rows, and the shape of the forward.

        A capture takes as long as ten plain steps, and batches have many shapes, since texts join and end. So a batch's
        forward of a shape that was seldom asked for runs in a larger one that is captured.
        """
        placed = self.cache.begin_static(rows, computed, n)
        shape = Shape(placed.batch, n, own_of(n, max(computed)), placed.end, layers)
        self.graphs.over(self._memory)
        if placed.batch == 1 or shape in self.graphs or not self.patience:
            return placed, shape
        if not self.graphs.has_begun:
            self._asked.clear()
        self._asked[shape.batch, n] = asked = self._asked[shape.batch, n] + 1
        need = 1 + max(row.length + first for row, first in zip(rows, computed, strict=True))

        def fits(each: Shape) -> bool:
            has_slots = need + each.rows <= each.end and each.own - each.rows >= max(computed)
            return each.layers == layers and has_slots

        other = self._larger(shape.batch, n, fits)
        if self._has_patience_ended(asked, other):
            return placed, shape
        self.prepares |= n == 1  # a plain step's time would be that of a step with drafts
        if other is None:
            more = usual_rows(n, placed.batch)
            placed = self.cache.begin_static(rows, computed, more)
            return placed, Shape(placed.batch, more, own_of(more, max(computed)), placed.end, layers)
        placed = self.cache.begin_static(rows, computed, other.rows)
        return placed._replace(batch=other.batch, end=other.end), other

    def _larger(self, batch: int, n: int, fits: Callable[[Shape], bool] = lambda shape: True) -> Shape | None:
        """The smallest captured shape with room for `n` rows of each sequence, if it is not much larger."""
        some = [
            each
            for each in self.graphs
            if isinstance(each, Shape) and each.batch >= batch and each.rows >= n and fits(each)
        ]
        found = min(some, key=lambda each: (each.all_rows, each.end, each.own), default=None)
        return found if found is not None and found.all_rows <= most_covering(batch * n) else None

    def _has_patience_ended(self, asked: int, other: Shape | None) -> bool:
        """Whether a shape that was asked for so often is captured rather than run in another one."""
        is_near = other is None or other.all_rows <= USUAL_ROWS
        return asked > (self.patience if is_near else self.patience // 4)

    def _most_rows(self, batch: int) -> int:
        """Of one sequence in the largest forward that is recorded."""
        return most_rows(batch)

    def _write(
        self,
        shape: Shape,
        rows: Sequence[Row],
        trees: Sequence[TokenTree],
        computed: Sequence[int],
        placed: Placed,
        moves: bool,
    ) -> None:
        """Fills the inputs; outstanding moves become part of them, or are made before."""
        if not moves or any(isinstance(row, StaticRow) and len(row.moves) > MOVES for row in rows):
            self.cache.flush()
        drafts = []
        for i in placed.order:
            row = rows[i]
            assert isinstance(row, StaticRow)
            drafts.append(Draft(trees[i], row.length, computed[i], row.moves))
        self._buffers.write(shape, drafts)

    def _run(self, shape: Shape) -> None:
        """What is recorded: everything that depends on the content of the buffers is on the device."""
        self.cache.move(shape, self._buffers.read(shape)[1])
        compiled = None if self.compiler is None else self.compiler.get(self._code(shape))
        if compiled is None:
            self._keep(shape, self._compute(shape))
        else:
            compiled(*self._tensors(shape))

    def _code(self, shape: Shape) -> tuple[object, ...]:
        """What compiled code of a forward depends on."""
        return shape, tuple((*each.shape, *each.stride()) for each in self._tensors(shape))

    def _tensors(self, shape: Shape) -> list[Tensor]:
        """All that a forward writes, and its inputs."""
        assert self._logits is not None
        hidden = [self._hidden[shape.layers]] if shape.layers else []
        return [self._buffers.device, self._logits, *hidden, *self.cache.flat]

    def _compile(self, shape: Shape, compiler: Compiler, rewrite: Callable[[], None]) -> None:
        """Has the forward that was just run compiled, or uses what was compiled, if it agrees with it.

        Both run the forward again.

        Args:
            rewrite: writes its inputs again, without moves.
        """
        code = self._code(shape)
        if (compiled := compiler.ready(code)) is not None:
            assert self._logits is not None
            self.prepares = True
            rewrite()
            before = self._logits[: shape.all_rows].clone()
            compiled(*self._tensors(shape))
            if agree(self._logits[: shape.all_rows], before):
                compiler.accept(code, compiled)
                self.graphs.drop(shape)
            else:
                rewrite()
                self._keep(shape, self._compute(shape))  # and the entries that the compiled code has written
                compiler.give_up(f"{shape} has other logits when it is compiled")
        elif compiler.wants(code):
            self.prepares = True
            rewrite()
            compiler.order(code, str(shape), lambda: self._keep(shape, self._compute(shape)), self._tensors(shape))

    def _compute(self, shape: Shape) -> Outputs:
        """One forward over the buffers: [batch, rows, ...]."""
        inputs, slots = self._buffers.read(shape)
        options = {"output_hidden_states": list(shape.layers)} if shape.layers else {}
        self.cache.enter(shape, slots)
        try:
            with self._attention(self._config), casting_anew():
                output = self._model(
                    input_ids=inputs.tokens,
                    position_ids=inputs.positions,
                    attention_mask=inputs.masks(self.patterns, self.dtype),
                    use_cache=True,
                    **{self.cache_name: self.cache},
                    **options,
                )
        finally:
            self.cache.leave()
        hidden = side_by_side(output.hidden_states, shape.layers) if shape.layers else None
        return Outputs(output.logits, hidden)

    # What a forward gives lies in memory of its own, which all recordings write to.

    @property
    def _memory(self) -> object:
        """What recordings read and write beside the inputs."""
        outputs = (self._logits, *self._hidden.values())
        return self.cache.storage, tuple(each.data_ptr() for each in outputs if each is not None)

    def _holds(self, shape: Shape) -> bool:
        """Whether there is memory for the outputs of a forward."""
        needed = [self._logits, *([self._hidden.get(shape.layers)] if shape.layers else [])]
        return all(each is not None and len(each) >= shape.all_rows for each in needed)

    def _hold(self, shape: Shape, outputs: Outputs) -> None:
        """Makes memory for outputs like these."""
        rows = max(FEWEST_ROWS, doubled(shape.all_rows))
        if self._logits is None or len(self._logits) < rows:
            self._logits = outputs.logits.new_empty(rows, outputs.logits.shape[-1])
        held = self._hidden.get(shape.layers)
        if outputs.hidden is not None and (held is None or len(held) < rows):
            self._hidden[shape.layers] = outputs.hidden.new_empty(rows, outputs.hidden.shape[-1])

    def _keep(self, shape: Shape, outputs: Outputs) -> None:
        """Copies outputs to their memory."""
        assert self._logits is not None
        self._logits[: shape.all_rows].copy_(outputs.logits.flatten(0, 1))
        if outputs.hidden is not None:
            self._hidden[shape.layers][: shape.all_rows].copy_(outputs.hidden.flatten(0, 1))

    def _outputs(
        self, shape: Shape, trees: Sequence[TokenTree], computed: Sequence[int], placed: Placed
    ) -> list[Outputs]:
        """A copy of what the recording has written, apart by sequence; the next one overwrites the original."""
        assert self._logits is not None
        stepped = len(trees)
        new = [len(tree) - first for tree, first in zip(trees, computed, strict=True)]
        batch = Batch(self._buffers.read(shape)[0], placed.order, new)

        def apart(held: Tensor) -> list[Tensor]:
            return batch.apart(held[: stepped * shape.rows].view(stepped, shape.rows, -1).clone())

        hidden = apart(self._hidden[shape.layers]) if shape.layers else [None] * stepped
        return [Outputs(*each) for each in zip(apart(self._logits), hidden, strict=True)]
