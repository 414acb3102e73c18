"""Rows of a data set as prompts: the columns of a batch, checked, and the seed of each row. Ray is not imported."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np

from leapahead.core.errors import BadParameter, first_line
from leapahead.core.parameters import is_whole
from leapahead.inputs import is_single

INPUTS = ("prompt", "row_id", "prediction", "seed", "max_new_tokens")
OUTPUTS = ("text", "tokens", "finish_reason", "acceptance_length", "error")
LARGEST_FLOAT = 2**53  # up to here a float tells every whole number from the next one


@dataclass(frozen=True)
class Row:
    """What a row asks for; None where it has nothing in a column.

    Attributes:
        prompt: text, token ids, or chat messages, in Python's own types.
        seed: of its Gumbel noise.
        options: those of `LLM.generate` that the row has of its own.
    """

    prompt: Any
    seed: int
    options: dict[str, Any]


def row_seed(seed: int, identity: Any) -> int:
    """The seed of a row: a function of the job's seed and of what identifies the row, never of its place.

    Args:
        seed: of the job.
        identity: a row id, or the prompt. A whole number counts as one in a column of floats, too, which is what Arrow
            makes of whole numbers where some are missing.

    Returns:
        63 bits of a SHA-256 hash, so that a signed integer of 64 bits holds it.

    Raises:
        BadParameter: it is something that JSON cannot express, such as a date or bytes.
    """
    if isinstance(identity, float) and identity.is_integer():
        identity = int(identity)
    try:
        written = json.dumps([seed, identity], ensure_ascii=True, sort_keys=True, separators=(",", ":"))
    except TypeError as error:
        raise BadParameter(
            f"the seed of a row cannot be derived from {str(identity)[:60]} ({first_line(error)}); give the row a "
            "number or text as its id"
        ) from None
    return int.from_bytes(sha256(written.encode()).digest()[:8], "big") >> 1


class Columns:
    """The columns of a data set by what they mean.

    Args:
        names: meaning (one of `INPUTS` or `OUTPUTS`) -> name of the column, where it has another one.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        for meaning, name in names.items():
            if meaning not in INPUTS + OUTPUTS or not isinstance(name, str):
                raise BadParameter(
                    f"columns={{{meaning!r}: {name!r}}} is not possible: the key must be one of "
                    f"{', '.join(INPUTS + OUTPUTS)}, and the value the name of a column"
                )
        self._given = set(names)
        self.names = {meaning: meaning for meaning in INPUTS + OUTPUTS} | dict(names)
        if len(set(self.names.values())) < len(self.names):
            raise BadParameter(f"columns={dict(names)!r} is not possible: two of them have the same name")

    def read(self, batch: Any) -> dict[str, Sequence[Any]]:
        """Meaning -> values of the input columns that a batch has.

        Raises:
            BadParameter: it is no batch of numpy arrays, lacks a column, or has one that would be overwritten.
        """
        if not isinstance(batch, Mapping):
            raise BadParameter(
                f"a batch must be a dictionary of numpy arrays, got {type(batch).__name__}; leave batch_format out"
            )
        has = ", ".join(map(str, batch)) or "none"
        for meaning in INPUTS:
            if self.names[meaning] not in batch and (meaning == "prompt" or meaning in self._given):
                raise BadParameter(
                    f"there is no column {self.names[meaning]!r} for the {meaning}; the data set has {has}; name "
                    f"another one by columns={{{meaning!r}: ...}}"
                )
        for meaning in OUTPUTS:
            if self.names[meaning] in batch:
                raise BadParameter(
                    f"the data set has a column {self.names[meaning]!r} already, which would be overwritten; name "
                    f"another one for the result by columns={{{meaning!r}: ...}}"
                )
        return {meaning: batch[self.names[meaning]] for meaning in INPUTS if self.names[meaning] in batch}


def rows(found: Mapping[str, Sequence[Any]], seed: int) -> Iterator[Row | BadParameter]:
    """Each row of a batch; the error in place of one that is not possible.

    Args:
        found: from `Columns.read`.
        seed: of the job.
    """
    for index in range(len(found["prompt"])):
        try:
            yield _row({meaning: _plain(values[index]) for meaning, values in found.items()}, seed)
        except BadParameter as error:
            yield error


def _row(values: dict[str, Any], seed: int) -> Row:
    prompt = values["prompt"]
    if prompt is None:
        raise BadParameter("the prompt is missing; give some text, token ids or chat messages")
    if prompt in ("", []):
        raise BadParameter("the prompt is empty; give some text, or at least one token id")
    if not is_single(prompt):
        raise BadParameter("a row takes one prompt; give each prompt a row of its own")
    options = {}
    if (prediction := values.get("prediction")) is not None:
        options["prediction"] = prediction
    if (length := _whole("max_new_tokens", values.get("max_new_tokens"))) is not None:
        options["max_new_tokens"] = length
    own = _whole("seed", values.get("seed"))
    if own is None:
        if "row_id" in values and values["row_id"] is None:
            raise BadParameter("the row id is missing, from which the seed is derived; give every row one, or none")
        identity = values.get("row_id", prompt)
        if isinstance(identity, float) and abs(identity) >= LARGEST_FLOAT:
            raise BadParameter(
                f"row_id={identity!r} is not possible: a column of floats does not tell numbers of this size apart; "
                "give every row an id, or text as ids"
            )
        own = row_seed(seed, identity)
    return Row(prompt, own, options)


def as_lists(values: Sequence[Any]) -> np.ndarray[Any, Any]:
    """A column of objects, with lists in place of arrays.

    Ray makes tensors of arrays, of lists of any length one kind of column: blocks of both kinds cannot be put together.
    """
    column = np.empty(len(values), dtype=object)
    column[:] = [value.tolist() if isinstance(value, np.ndarray) else value for value in values]
    return column


def _whole(name: str, value: Any) -> int | None:
    """A whole number or None. A column with missing values holds floats."""
    if isinstance(value, float) and value.is_integer() and abs(value) < LARGEST_FLOAT:
        value = int(value)
    if value is None:
        return None
    if not is_whole(value):
        raise BadParameter(f"{name}={value!r} is not possible: it must be a whole number")
    return int(value)


def _plain(value: Any) -> Any:
    """A value in Python's own types; None for NaN, too, by which columns of numbers say that there is none.

    Fields of messages that are None are left out: a column has the fields of all its messages in each of them.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        plain = {str(key): _plain(each) for key, each in value.items()}
        return {key: each for key, each in plain.items() if each is not None or key == "content"}
    return value
