"""Top-k, top-p and min-p as the least score that is kept, and the greatest numbers of rows.

Written for numpy and torch arrays through the Python array API; imports no backend.
"""

from __future__ import annotations

import math
from math import log2
from typing import Any

import numpy as np
import numpy.typing as npt
from array_api_compat import array_namespace, is_torch_array

from leapahead import native

Array = Any

# How many of the likeliest tokens are sorted for top-p, where they hold the mass that it asks for; otherwise all are.
FEW, MANY = 64, 1024
MOST_SCANNED, SCANNED_PART = 32, 16  # the compiled module finds so many numbers of a row, or one in so many
UNITS = 2.0**40  # of a mass, in the sums of a device
ROUNDING = 1e-3  # by which the mass of few tokens must exceed top-p, so that rounding cannot let a later one in


def floors(
    scores: Array, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, settle: bool = True
) -> tuple[Array, Array]:
    """The least score of each row that top-k, then top-p, then min-p keep.

    Args:
        scores: float32 or float64 [rows, vocab].
        top_k, top_p, min_p: see `SamplingParams`.
        settle: whether rows are sorted whole where the mass of the `MANY` likeliest tokens does not reach `top_p`.
            Knowing that waits for the device of the scores.

    Returns:
        float [rows, 1], or None where nothing is filtered; bool [rows], whether it is known, or None where all are.
    """
    xp = array_namespace(scores)
    floor = settled = None
    if 0 < top_k < scores.shape[-1]:
        floor = largest(scores, top_k)[:, -1:]
    if top_p < 1:
        found, settled = _top_p_floor(scores, floor, top_p, settle)
        floor = found if floor is None else xp.maximum(floor, found)
    if min_p > 0:
        found = xp.max(scores, axis=-1, keepdims=True) + math.log(min_p)
        floor = found if floor is None else xp.maximum(floor, found)
    return floor, settled


def _top_p_floor(scores: Array, floor: Array, p: float, settle: bool) -> tuple[Array, Array]:
    """As `floors`; only scores from `floor` on count."""
    xp = array_namespace(scores)
    vocab = scores.shape[-1]
    best = xp.max(scores, axis=-1, keepdims=True)
    mass = _masses(scores - best)
    if floor is not None:
        mass = mass * xp.astype(scores >= floor, mass.dtype)
    total = xp.sum(mass, axis=-1, keepdims=True)
    settled = None
    for count in (FEW, MANY, vocab):
        if count == FEW and not settle:
            continue
        top = largest(scores, min(count, vocab))  # falling
        if floor is not None:
            top = xp.where(top < floor, -math.inf, top)
        mass = _masses(top - best)
        if count < vocab:
            least = p + ROUNDING if count == FEW else p
            reached = xp.sum(mass, axis=-1) >= least * total[:, 0]
            if not settle:
                settled = reached
                break
            if not bool(xp.all(reached)):
                continue
        break
    mass, total = (mass, total) if is_torch_array(scores) else (mass / total, 1)
    above = xp.cumulative_sum(mass, axis=-1) - mass  # of the tokens likelier than each
    above = xp.astype(above, scores.dtype) / total
    kept = xp.sum(xp.astype(above < p, xp.int64), axis=-1, keepdims=True)
    return xp.take_along_axis(top, xp.where(kept > 0, kept - 1, kept), axis=-1), settled


def _masses(scores: Array) -> Array:
    """The exponentials of scores, none of them above 0. numpy adds up each row alone; a device adds in an order that
    depends on the number of rows, so there they are whole numbers of `UNITS`, whose sums are the same in any order."""
    xp = array_namespace(scores)
    mass = xp.exp(scores)
    return xp.astype(mass * UNITS, xp.int64) if is_torch_array(scores) else mass


def largest(rows: Array, k: int) -> Array:
    """[rows, k], the k greatest numbers of each row, falling."""
    if is_torch_array(rows):
        if rows.device.type != "cpu":
            return rows.topk(k, dim=-1).values
        return array_namespace(rows).asarray(largest(rows.detach().numpy(), k))  # several times as fast
    if _is_scanned(rows, k):
        return native.module.largest_at(np.ascontiguousarray(rows), k)[1]
    if k < rows.shape[-1]:
        inside = _around_largest(rows, k)
        some = rows if inside is None else rows[np.arange(len(rows))[:, None], inside]
        rows = np.partition(some, -k, axis=-1)[:, -k:]
    return -np.sort(-rows, axis=-1)


def largest_at(rows: npt.NDArray[Any], k: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
    """Where the k greatest numbers of each row are, and the numbers, falling: two arrays [rows, k].

    For few of them by the compiled module, which takes the first ones of equal numbers, and NaN for the least.
    """
    if _is_scanned(rows, k):
        return native.module.largest_at(np.ascontiguousarray(rows), k)
    at, inside = np.arange(len(rows))[:, None], _around_largest(rows, k)
    some = rows if inside is None else rows[at, inside]
    found = np.argpartition(some, -k, axis=-1)[:, -k:] if k < some.shape[-1] else np.argsort(some, axis=-1)
    found = found if inside is None else inside[at, found]
    values = rows[at, found]
    order = np.argsort(-values, axis=-1, kind="stable")
    return found[at, order], values[at, order]


def _is_scanned(rows: npt.NDArray[Any], k: int) -> bool:
    """Whether the compiled module finds the k greatest numbers of these rows; numpy is faster where they are many."""
    most = min(rows.shape[-1], max(MOST_SCANNED, rows.shape[-1] // SCANNED_PART))
    return native.available and rows.dtype in (np.float32, np.float64) and k <= most


def _around_largest(rows: npt.NDArray[Any], k: int) -> npt.NDArray[np.int64] | None:
    """[rows, some]: indices with those of the k greatest numbers among them; None where a row is short.

    A row is read as a matrix. The k greatest numbers lie in the k columns of greatest maxima, so few are sorted.
    """
    size = rows.shape[-1]
    width = 2 << round(log2(max(1.0, size * k)) / 2)
    height = size // width
    if height < 4 or width <= k:
        return None
    maxima = rows[:, : height * width].reshape(-1, height, width).max(axis=1)
    columns = np.argpartition(maxima, -k, axis=-1)[:, -k:]
    inside = (columns[:, :, None] + width * np.arange(height)).reshape(len(rows), -1)
    rest = np.arange(height * width, size)
    return np.concatenate((inside, np.broadcast_to(rest, (len(rows), len(rest)))), axis=-1) if len(rest) else inside
