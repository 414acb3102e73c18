"""The target as its own draft model over a retrieved part of its cache: TriForce's middle level (2404.11912).

    target    all layers, attention to all entries of the sequence's row
    draft     all layers, attention to a block of `budget` entries that are copied from that row, and to its own nodes

It shares the weights (`twin`) and reads no prompt: its entries are the target's. At long contexts, where reading the
cache takes most of a forward, its forward is faster by that part. Which entries are copied is decided in
`models.transformers.retrieval`.

For a `MaskedExecutor` whose layers all attend to the whole text, with attention "sdpa". With a budget that holds the
whole text it is the target; that this is so is tested when it is made, with all chunks chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from leapahead.core.errors import Refused, first_line
from leapahead.core.sampling import SamplingParams
from leapahead.core.tree import UNLIMITED, TokenTree
from leapahead.models.base import Capture
from leapahead.models.self_draft.sharing import SharedSession, SharingExecutor, SharingTarget
from leapahead.models.transformers import families, grouped, retrieval, selftest
from leapahead.models.transformers.exact import ExactExecutor
from leapahead.models.transformers.families import Pattern
from leapahead.models.transformers.forward import Batch, CachedState, Executor, Layers, MaskedExecutor, Outputs
from leapahead.models.transformers.kv_cache import Row
from leapahead.models.transformers.model import TransformersSession, TransformersTarget
from leapahead.models.transformers.modes import computing
from leapahead.models.transformers.retrieval import BlockCache, Fill, Retrieval, Retrieved
from leapahead.models.transformers.twin import twin

REHEARSAL = Retrieval(budget=UNLIMITED, chunk=2, refresh=1, newest=1)  # all chunks are chosen, in every step
REHEARSED = 24  # tokens of the prompt of that test
MARGIN = 4.0  # of the least tolerance there: rounding may change a draft, and never a text


class RetrievalExecutor(MaskedExecutor):
    """Runs a copy of the model over blocks of another executor's rows.

    Args:
        model: the copy, which nobody else runs.
        own: runs the model itself.
        settings: of the retrieval.
    """

    attention = retrieval.NAME
    cache: BlockCache

    def __init__(self, model: Any, own: MaskedExecutor, settings: Retrieval) -> None:
        super().__init__(model, BlockCache(), own.patterns, True, families.text_config(model))
        self.source, self.settings = own.cache, settings
        self._fills: dict[int, Fill] = {}  # of the forward that is under way, by number of the sequence

    def retrieved(self, row: Row) -> Retrieved:
        """A new block for the sequence of a row."""
        return Retrieved(self.settings, row, self.source, self.cache)

    def draft(
        self, states: Sequence[Retrieved], trees: Sequence[TokenTree], num_computed: Sequence[int] | None = None
    ) -> list[Outputs]:
        """See `Executor.forward`. The blocks of trees of which nothing is computed are renewed."""
        computed = num_computed or [0] * len(states)
        try:
            self._fills = {at: state.renew() for at, state in enumerate(states) if not computed[at]}
            return self.run([state.block for state in states], trees, num_computed)
        except BaseException:
            self.discard([state.block for state in states])
            for state in states:
                state.forget()
            raise
        finally:
            self._fills = {}

    def call(self, model: Any, batch: Batch, layers: Layers = (), **options: Any) -> Outputs:
        packed, fills, begin = batch.packing is not None, [], 0
        for place, at in enumerate(batch.order):
            if at in self._fills:
                fills.append((self._fills[at], begin if packed else place))
            begin += batch.new[at]
        with retrieval.filling(self.cache, fills, packed) if fills else nullcontext():
            return super().call(model, batch, layers, **options)


class RetrievedSession(SharedSession):
    """A sequence of the target with a block of its entries."""

    def close(self) -> None:
        """Gives the block back."""
        self.state.close()


class DraftExecutor(SharingExecutor):
    """Drafts over blocks for the target's sequences, or over all entries for others, in a cache of their own."""

    def __init__(self, own: Executor, blocks: RetrievalExecutor) -> None:
        super().__init__(own)
        self.blocks = blocks

    def shares(self, state: Any) -> bool:
        return isinstance(state, Retrieved)

    def draft(
        self, states: Sequence[Any], trees: Sequence[TokenTree], num_computed: Sequence[int] | None
    ) -> list[Outputs]:
        return self.blocks.draft(states, trees, num_computed)

    def forget(self) -> None:
        super().forget()
        self.blocks.forget()


class RetrievalDraft(SharingTarget):
    """The target over a retrieved part of its cache, as a draft model.

    Args:
        target: that it drafts for.
        settings: of the retrieval.

    Raises:
        Refused: the target keeps no cache of all entries, or its attention cannot be given a part of them.
    """

    def __init__(self, target: TransformersTarget, settings: Retrieval) -> None:
        own = retrievable(target)
        what = f"over {settings.budget} retrieved entries"
        view = twin(target.model)
        super().__init__(
            view,
            name=f"{target.info.name} {what}",
            eager_choice=target.eager_choice,
            hidden_states=False,
            exclusive=True,
        )
        self.share(target, what)
        if reason := self._refusal(target, view):
            raise Refused(
                f"{target.info.name} cannot draft over a part of its cache ({reason}); use drafter='draft_model' with "
                "a smaller model"
            )
        self.blocks = RetrievalExecutor(view, own, settings)
        self.executor = DraftExecutor(self.executor, self.blocks)
        self.shared = own.cache

    def _refusal(self, target: TransformersTarget, view: Any) -> str:
        """Why copied entries do not give the target's logits; "" if they do."""
        if not (isinstance(self.executor, MaskedExecutor) and self.executor.config is not None):
            return "its attention is not computed by Transformers' attention interface"
        try:
            with computing(target.autocast):
                rehearsal = Rehearsal(target, view)
                prompts = max(REHEARSED, *target.test_prompts()), 1
                floor = MARGIN * selftest.FLOOR.get(target.model.dtype, selftest.FLOOR[torch.float16])
                result = selftest.run(
                    rehearsal, selftest.OwnOutputs(target.model), target.ordinary_ids(), prompts, floor=floor
                )
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return f"{type(error).__name__}: {first_line(error)}"
        return "" if result.passed else f"copied entries give logits that differ by {result.error:.2g} deviations"

    def session(self, row: Row, params: SamplingParams, capture: Capture) -> TransformersSession:
        return RetrievedSession(row.tokens, self.blocks.retrieved(row), self._sampler(params, row.tokens), capture)


class Rehearsal:
    """An executor that computes trees by the draft, with blocks of all entries, over sequences of the target's.

    Args:
        target: the target.
        view: the copy of its model that drafts.
    """

    def __init__(self, target: TransformersTarget, view: Any) -> None:
        own = target.executor
        assert isinstance(own, MaskedExecutor)
        self.whole = own.another(target.model)
        self.blocks = RetrievalExecutor(view, self.whole, REHEARSAL)
        self.capabilities = own.capabilities
        self._retrieved: dict[CachedState, Retrieved] = {}

    def open(self, tokens: list[int], reuse: int = 0, reserve: int = 0, owner: str = "") -> CachedState:
        return self.whole.open(tokens, reuse, reserve, owner)

    def prefill(self, state: Any, count: int, rows: int = 1, layers: Layers = ()) -> Outputs:
        return self.whole.prefill(state, count, rows, layers)

    def fork(self, state: Any, tokens: list[int]) -> CachedState:
        return self.whole.fork(state, tokens)

    def forward(
        self,
        states: Sequence[CachedState],
        trees: Sequence[TokenTree],
        num_computed: Sequence[int] | None = None,
        layers: Layers = (),
    ) -> list[Outputs]:
        self.whole.forward(states, trees, num_computed, layers)  # whose entries are committed
        for state in states:
            if state not in self._retrieved:
                self._retrieved[state] = self.blocks.retrieved(state.row)
        return self.blocks.draft([self._retrieved[state] for state in states], trees, num_computed)

    def rows(self, states: Sequence[Any], trees: Sequence[TokenTree]) -> int:
        return self.whole.rows(states, trees)

    def forget(self) -> None:
        self._retrieved.clear()


def retrievable(target: TransformersTarget) -> MaskedExecutor:
    """The target's executor, if a part of its cache can be retrieved.

    Raises:
        Refused: it cannot; the message says why.
    """
    own, name = target.executor, target.info.name
    if target.info.replays:
        raise Refused(
            f"{name} has recurrent layers, whose state is not divided into entries, so it cannot draft over a part of "
            "its cache; use drafter='draft_model' with a smaller model"
        )
    if isinstance(own, ExactExecutor):
        raise Refused(f"{name} is in exact mode, in which it cannot draft over a part of its cache; leave out exact")
    if not isinstance(own, MaskedExecutor):
        raise Refused(
            f"{name} takes no tree mask over a cache of all entries, so it cannot draft over a part of its cache; use "
            "drafter='draft_model' with a smaller model"
        )
    if limited := [kind for kind, pattern in own.patterns.items() if pattern != Pattern()]:
        raise Refused(
            f"{name} has layers of the kind {' and '.join(limited)}, which attend to a part of the text by themselves, "
            "so it cannot draft over a retrieved part; use drafter='draft_model' with a smaller model"
        )
    implementation = families.attention_implementation(target.model)
    if not grouped.fits(implementation, target.device):
        raise Refused(
            f'drafting over a part of the cache needs attention "sdpa" on a CPU or a CUDA device, and {name} has '
            f'{implementation!r} on {target.device.type}; load it with attn_implementation="sdpa"'
        )
    return own
