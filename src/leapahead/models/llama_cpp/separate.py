"""GGUF files under llama.cpp with a KV cache for each sequence, for servers of many requests (`kv_unified=False`).

With one cache for all sequences, the attention of every row passes over the cells of all of them. Here it passes over
those of its own sequence. In exchange a token belongs to one sequence id, so that drafts are chains, and a forward has
the same number of rows for every sequence, from one id to the next:

    id 0    root a  b  c        a draft of three tokens
    id 1    root x  .  .        padding; its cells are freed after the forward
    id 2    .    .  .  .        not in the step: padding, where that costs less than a forward of its own for id 3
    id 3    root .  .  .

llama.cpp computes rows beyond that in further passes over the model, so that prompts are read in forwards of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from leapahead.core.errors import Refused
from leapahead.models.base import TREE
from leapahead.models.llama_cpp import selftest
from leapahead.models.llama_cpp.context import Context, Model, Outputs
from leapahead.models.llama_cpp.model import LlamaCppTarget
from leapahead.models.llama_cpp.options import LlamaCppOptions

MOST_NODES = 32  # of a draft and its root; so many cells lie behind the end of each sequence
USUAL_SEQUENCES = 8
NO_TREES = "a KV cache for each sequence (kv_unified gives one for all)"
PADDING = 0  # the token of padding rows
PASS_ROWS = 3  # a further pass over the model takes about as long as so many more rows


class SeparateContext(Context):
    """A KV cache for each sequence, and forwards whose rows are padded; see the module."""

    def __init__(self, model: Model, options: LlamaCppOptions) -> None:
        super().__init__(model, options, beyond=MOST_NODES)
        self.copies_states = not self.windowed  # a copy leaves out what a window has passed

    def decode(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        ids: Sequence[Sequence[int]],
        wanted: Sequence[bool],
        hidden: bool = False,
    ) -> Outputs:
        """See `Context.decode`. The tokens are in the order of their sequences, each of which takes as many rows."""
        parts = dict[int, list[int]]()  # the rows of each id
        for row, (each,) in enumerate(ids):
            parts.setdefault(each, []).append(row)
        longest = max(map(len, parts.values()))
        padding = {each: positions[rows[-1]] + 1 for each, rows in parts.items() if len(rows) < longest}
        filled = _filled(list(parts), longest)
        if longest * (len(parts) + len(filled)) <= self.n_step:
            padding |= {each: self.last_position(each) + 1 for each in filled}
        if not padding:
            return super().decode(tokens, positions, ids, wanted, hidden)
        order, all_ids, all_positions = list[int](), list[list[int]](), list[int]()  # order: rows; -1 for padding
        for each in sorted({*parts, *padding}):
            rows = parts.get(each, [])
            more = longest - len(rows)
            order += [*rows, *[-1] * more]
            all_ids += [[each]] * longest
            all_positions += [positions[row] for row in rows]
            all_positions += range(padding.get(each, 0), padding.get(each, 0) + more)
        try:
            outputs = super().decode(
                [PADDING if row < 0 else tokens[row] for row in order],
                all_positions,
                all_ids,
                [row >= 0 and wanted[row] for row in order],
                hidden,
            )
        finally:
            for each, start in padding.items():
                self.remove(each, start)
        if not hidden:
            return outputs
        own = [row >= 0 for row in order]  # with hidden states, padding has outputs too
        return Outputs(*(None if each is None else each[own] for each in outputs))


class SeparateLlamaCppTarget(LlamaCppTarget):
    """A GGUF file whose sequences have caches of their own; see `LlamaCppTarget`.

    Args:
        options: of the context. Every sequence has `n_ctx` cells, and `n_seq_max` is the number of sequences that can
            be open, by default 8.

    Raises:
        Refused: the model has a recurrent state.
    """

    chains_only = "with a KV cache for each sequence (kv_unified=False)"

    def __init__(self, model: Model, options: LlamaCppOptions | None = None, name: str | None = None) -> None:
        options = options or LlamaCppOptions(kv_unified=False)
        if model.stateful:
            raise Refused(
                f"kv_unified=False is not possible for {model.path!r}: each of its sequences has a recurrent state of "
                "its own anyway; leave it out"
            )
        usual = 1 if model.alone else USUAL_SEQUENCES
        super().__init__(model, replace(options, n_seq_max=options.n_seq_max or usual), name)
        fingerprint = f"{self.info.fingerprint} separate caches"
        self.info = replace(self.info, padded=True, reads_in_steps=0, fingerprint=fingerprint, no_trees=NO_TREES)

    @property
    def max_leaves(self) -> int:
        return 1

    @property
    def max_nodes(self) -> int:
        return min(MOST_NODES, super().max_nodes)

    def _make_context(self, model: Model, options: LlamaCppOptions) -> Context:
        return SeparateContext(model, options)

    def _tested(self) -> frozenset[str]:
        """See `LlamaCppTarget`: everything but trees."""
        return selftest.capabilities(self) - {TREE}

    def _rows(self, sizes: Sequence[int]) -> int:
        return len(sizes) * max(sizes, default=0)


def _filled(ids: Sequence[int], rows: int) -> list[int]:
    """The ids between these that take padding, since llama.cpp computes ids that follow one another in one pass.

    Args:
        ids: of a step, rising.
        rows: of each.
    """
    gaps = [range(one + 1, other) for one, other in pairwise(ids)]
    return [each for gap in gaps if len(gap) * rows <= PASS_ROWS for each in gap]
