"""The choices after all nodes of a step on an accelerator, and the likeliest tokens there, by one copy to the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from leapahead.core.sampling import UNSETTLED, Sampler, choose_together
from leapahead.core.tree import IntArray, TokenTree
from leapahead.models.choices import FloatArray, Rows
from leapahead.models.transformers.forward import Outputs


class Chosen(NamedTuple):
    """What is known of one session's nodes.

    Attributes:
        tokens: int64 [nodes], the choices; None where a processor raises: its error is raised when they are read.
        best: the likeliest tokens, int64 [nodes, k], and their logits, float64 [nodes, k], falling; None for none.
    """

    tokens: IntArray | None = None
    best: tuple[IntArray, FloatArray] | None = None


NOT_YET = Chosen()
MOST_ROWS = 128  # that choices are made after at once, since some filters need several arrays of the size of the logits


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A copy of an array on a device, for which nothing waits on CUDA.

    A copy from usual memory would wait for all that the device has to do before, as a whole forward. Pinned memory is
    given to others by torch only when the copy from it is made.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda" or not tensor.numel():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def divided(tree: TokenTree, first: int, outputs: Outputs) -> tuple[Outputs, tuple[Rows, ...]]:
    """The rows of a tree's nodes from `first` on, and those of each of its probes."""
    if not tree.probes:
        return outputs, ()
    (logits, hidden), nodes = outputs, len(tree) - first
    probes = torch.split(logits[nodes:], [len(each.tokens) for each in tree.probes])
    return Outputs(logits[:nodes], None if hidden is None else hidden[:nodes]), tuple(map(Rows, probes))


def choose(
    samplers: Sequence[Sampler], trees: Sequence[TokenTree], logits: Sequence[Tensor], top_k: int
) -> list[Chosen]:
    """Chooses after all nodes of all sessions.

    Nothing is transferred but the result, and the rare choices that could not be made without knowing what the device
    had found.

    Args:
        samplers, trees: one for each session.
        logits: [nodes, vocab] of each session.
        top_k: likeliest tokens after each node; 0 for none.
    """
    together = torch.cat(list(logits)) if len(logits) > 1 else logits[0]
    ends = np.cumsum([len(each) for each in logits])
    able, columns = _chosen(samplers, trees, logits, together)
    k = min(top_k, together.shape[-1])
    kind = torch.float64 if together.dtype == torch.float64 else torch.float32
    if k:
        values, tokens = together.topk(k, dim=-1)
        bits = values.to(kind).view(torch.int64 if kind == torch.float64 else torch.int32)
        columns = torch.cat((columns, tokens, bits.long()), dim=1)
    parts = np.split(columns.numpy(force=True), ends[:-1])
    return [
        Chosen(_settled(part[:, 0], *each) if can else None, _best(part[:, 1:], k, kind) if k else None)
        for can, part, each in zip(able, parts, zip(samplers, trees, logits, strict=True), strict=True)
    ]


def _chosen(
    samplers: Sequence[Sampler], trees: Sequence[TokenTree], logits: Sequence[Tensor], together: Tensor
) -> tuple[list[bool], Tensor]:
    """For which sessions choices were made, and int64 [nodes of all sessions, 1]."""
    if all(sampler.takes_argmax for sampler in samplers):  # the common case, in as few operations as for one session
        nodes = np.arange(len(together))
        chosen: Tensor = samplers[0].choose(together, trees[0], nodes)
        return [True] * len(samplers), chosen[:, None]
    able, found, row = list[bool](), list[Tensor](), 0
    for some in _alike(samplers, logits):
        rows = together[row : row + sum(map(len, logits[some]))]
        row += len(rows)
        if len(samplers[some]) > 1:
            found.append(choose_together(samplers[some], trees[some], rows))
            able += [True] * len(samplers[some])
            continue
        sampler, tree = samplers[some][0], trees[some][0]
        processors = sampler.params.processors
        try:
            found.append(sampler.choose(rows, tree, np.arange(len(tree)), settle=bool(processors)))
            able.append(True)
        except Exception:
            if not processors:
                raise
            found.append(torch.full((len(tree),), UNSETTLED, device=rows.device))
            able.append(False)
    return able, torch.cat(found)[:, None]


def _alike(samplers: Sequence[Sampler], logits: Sequence[Tensor]) -> Iterator[slice]:
    """All sessions, those behind each other together whose choices are made together."""
    begin, rows = 0, 0
    for end in range(1, len(samplers) + 1):
        rows += len(logits[end - 1])
        known = samplers[end - 1].alike
        is_last = end == len(samplers) or known is None or samplers[end].alike != known
        if is_last or rows + len(logits[end]) > MOST_ROWS:
            yield slice(begin, end)
            begin, rows = end, 0


def _settled(tokens: IntArray, sampler: Sampler, tree: TokenTree, logits: Tensor) -> IntArray:
    """Choices with those that were left open."""
    tokens = np.ascontiguousarray(tokens)
    if len(nodes := np.flatnonzero(tokens == UNSETTLED)):
        rows = logits[torch.from_numpy(nodes).to(logits.device)]
        tokens[nodes] = sampler.choose(rows, tree, nodes).numpy(force=True)
    return tokens


def _best(columns: IntArray, k: int, kind: torch.dtype) -> tuple[IntArray, FloatArray]:
    """Both of one layout in memory, as compiled code reads them."""
    tokens, bits = np.ascontiguousarray(columns[:, :k]), np.ascontiguousarray(columns[:, k:])
    if kind == torch.float64:
        return tokens, bits.view(np.float64)
    return tokens, bits.astype(np.int32).view(np.float32).astype(np.float64)


def host_logits(logits: Tensor) -> npt.NDArray[np.floating[Any]]:
    """Logits on the CPU as float32 or float64 for numpy, which processes a row in one thread, in its own cache.

    torch wakes a second thread for a row of a large vocabulary, and its argmax takes 20 to 50 times as long as numpy's:
    together about a millisecond a step.
    """
    logits = logits.detach()
    if logits.dtype == torch.bfloat16:  # the upper half of a float32
        bits = logits.view(torch.int16).numpy().astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    return logits.numpy() if logits.dtype == torch.float64 else logits.float().numpy()
