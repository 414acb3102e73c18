"""Tests on the loaded model whether its forwards may be recorded; a model that fails keeps its usual executor.

What a recorded forward must not have: a value that the host reads from the device, and a number that differs from one
forward to the next and is computed on the host. The first is seen in the operations of a forward. The second is seen
when a recording is repeated on other trees, lengths and batches: its logits must be the bits of a forward of the same
shape that is called.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from leapahead.core.errors import LeapaheadError, Refused, first_line
from leapahead.core.tree import IntArray, TokenTree
from leapahead.models.transformers import packed, selftest
from leapahead.models.transformers.forward import Executor, MaskedExecutor, State
from leapahead.models.transformers.static.executor import PATIENCE, Attention, StaticExecutor, own_attention
from leapahead.models.transformers.static.graphs import Called, Forward, GraphBackend, Graphs, Recording

# Operations whose result, or the shape of it, the host must know.
HOST_READS = {
    "_local_scalar_dense",
    "argwhere",
    "equal",
    "is_nonzero",
    "item",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
    "_unique2",
}
ROUNDS = 2  # trees and lengths of each shape: one is recorded, the others are repeated
BATCHES = (1, 2, 3)  # three sequences leave a padding row
# Drafted nodes of a tree, from and below, and of the same tree when it has grown: of one bucket, roots counted.
NODES, MORE = (6, 8), 2
LONGEST = 12  # tokens of a text


class HostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises `Refused` when the host reads a value of a tensor, or a tensor leaves the device.

    Args:
        device: of the model.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in HOST_READS:
            raise Refused(f"the host reads a value in its forward (aten.{name})")
        found = func(*args, **(kwargs or {}))
        if any(self._is_here(each) for each in tree_leaves((args, kwargs))):
            results = [each for each in tree_leaves(found) if isinstance(each, Tensor)]
            # Beside its result, attention returns the state of its random numbers, some kernels' in the host's memory.
            if results and not any(self._is_here(each) for each in results):
                raise Refused(f"a tensor leaves the device in its forward (aten.{name})")
        return found

    def _is_here(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.device.type == self._device.type


class Watched:
    """Calls every forward, and raises `Refused` when the host reads a value in it.

    Only the first forward of each shape is watched, which takes many times as long on an accelerator: the others have
    the same operations unless the host reads a value.

    Args:
        device: of the model.
    """

    most_bytes, pooled = 0, False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def record(self, forward: Forward) -> Recording:
        def first() -> None:
            with HostReads(self._device):
                forward()
            called.replay = forward

        called = Called(first)
        return called

    def restart(self) -> None:
        """There is nothing to share."""


def tested(
    executor: MaskedExecutor,
    ids: IntArray,
    prompts: Sequence[int],
    backend: GraphBackend,
) -> StaticExecutor:
    """An executor that records forwards, if the model passes.

    Args:
        executor: that was tested on the model.
        ids: token ids without a special meaning.
        prompts: see `selftest.run`.
        backend: what records forwards.

    Raises:
        Refused: it does not pass; the message says why.
    """
    model = executor.model
    if type(executor) is not MaskedExecutor:
        raise Refused("it takes no token trees")
    check_by_name(model)
    attentions: list[Attention] = [packed.attention, own_attention]
    reasons = list[str]()
    for attention in attentions:
        try:
            return _tested(executor, ids, prompts, backend, attention)
        except torch.OutOfMemoryError:
            raise
        except LeapaheadError as error:
            reasons.append(str(error))
        except Exception as error:
            reasons.append(f"its forward cannot be recorded: {type(error).__name__}: {first_line(error)}")
    raise Refused("; ".join(dict.fromkeys(reasons)))


def check_by_name(model: Any) -> None:
    """Raises `Refused` for a model whose forwards cannot be recorded, as far as that is known without running it."""
    if not getattr(model, "_can_compile_fullgraph", False):
        raise Refused(
            f"Transformers does not say of {type(model).__name__} that its forward can be compiled as a whole"
        )
    devices = {str(each.device) for each in model.parameters()}
    if len(devices) > 1:
        raise Refused(f"its weights lie on {' and '.join(sorted(devices))}")


def _tested(
    executor: MaskedExecutor, ids: IntArray, prompts: Sequence[int], backend: GraphBackend, attention: Attention
) -> StaticExecutor:
    recording = StaticExecutor.of(executor, backend, attention)
    calling = recording.another(executor.model, Watched(recording.device))
    result = selftest.run(calling, selftest.OwnOutputs(executor.model), ids, prompts)
    if not result.passed:
        raise Refused(f"logits of padded forwards differ by {result.error:.2g} standard deviations")
    compare(recording, calling, ids)
    recording.graphs.tolerant, recording.patience = True, PATIENCE
    return recording


class Records(Executor, Protocol):
    """An executor that records forwards."""

    @property
    def graphs(self) -> Graphs:
        """The recorded ones."""


def compare(recording: Records, calling: Records, ids: IntArray) -> None:
    """Raises `Refused` unless two executors of one model give the same bits, in steps of several shapes.

    Args:
        recording: each of its forwards is recorded once and repeated on other trees and lengths.
        calling: its forwards are called.
        ids: token ids without a special meaning.
    """
    random = np.random.default_rng(0)
    both = (recording, calling)
    for batch in BATCHES:
        for each in both:
            each.forget()
        recorded = 0
        for _ in range(ROUNDS):
            texts = [_drawn(random, ids, int(random.integers(2, LONGEST))) for _ in range(batch)]
            with _opened(both, texts) as states:
                for _ in range(ROUNDS):
                    _step(both, states, random, ids)
                    recorded = recorded or len(recording.graphs)
        assert len(recording.graphs) == recorded > 0, "forwards of the test were recorded, and not repeated"
    for each in both:
        each.forget()


States = list[list[State]]  # of each executor, those of the texts


@contextmanager
def _opened(both: Sequence[Records], texts: Sequence[list[int]]) -> Iterator[States]:
    """The texts in each of the executors, read."""
    states = [[each.open(list(text)) for text in texts] for each in both]
    try:
        for executor, mine in zip(both, states, strict=True):
            for state in mine:
                executor.prefill(state, len(state.tokens) - 1 - state.length)
        yield states
    finally:
        for state in (state for mine in states for state in mine):
            state.close()


def _step(both: Sequence[Records], states: States, random: np.random.Generator, ids: IntArray) -> None:
    """A forward over trees, one over more nodes of them, and a commit, compared."""
    last = [state.tokens[-1] for state in states[0]]
    trees = [_grown(random, ids, TokenTree.root(token), int(random.integers(*NODES))) for token in last]
    more = [_grown(random, ids, tree, MORE) for tree in trees]
    for drafts, computed in ((trees, None), (more, [len(tree) for tree in trees])):
        found = [executor.forward(mine, drafts, computed) for executor, mine in zip(both, states, strict=True)]
        for ours, theirs in zip(*found, strict=True):
            if not torch.equal(ours.logits, theirs.logits):
                raise Refused("a repeated forward gives other logits than the first one of its shape would")
    ends = [int(random.integers(len(tree))) for tree in more]
    tokens = [[*tree.path_tokens(end), *_drawn(random, ids, 1)] for tree, end in zip(more, ends, strict=True)]
    for mine in states:
        for state, tree, end, new in zip(mine, more, ends, tokens, strict=True):
            state.commit(tree.path(end))
            state.tokens += new


def _grown(random: np.random.Generator, ids: IntArray, tree: TokenTree, count: int) -> TokenTree:
    """A tree with so many random nodes more."""
    size = len(tree)
    parents = [int(random.integers(node)) for node in range(size, size + count)]
    return TokenTree(
        np.array([*tree.token_list, *_drawn(random, ids, count)]), np.array([*tree.parents.tolist(), *parents])
    )


def _drawn(random: np.random.Generator, ids: IntArray, count: int) -> list[int]:
    return [int(token) for token in random.choice(ids, size=count)]
