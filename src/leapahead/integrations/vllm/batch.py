"""What the adapter is told of one forward and of a request, in plain types: a recorded or simulated host will do."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Request:
    """What is known of a request beside its tokens.

    Attributes:
        prompt_length: tokens of its prompt; 0 where that is not known.
        longest: tokens of prompt and text together, at most.
        temperature: 0 for greedy decoding.
        prediction: the tokens that its text is expected to consist of.
        drafts: whether anything may be drafted for it.
    """

    prompt_length: int = 0
    longest: int = 1 << 30
    temperature: float = 0.0
    prediction: tuple[int, ...] = ()
    drafts: bool = True


@dataclass(frozen=True)
class Batch:
    """One forward of the host, after its tokens were verified and committed.

    Attributes:
        ids: of the requests, in the order of the rows.
        new: the tokens that each has got; none where its prompt was not read to its end.
        lengths: int [requests or more], committed tokens of each, the new ones included.
        texts: int [requests or more, longest], the committed tokens of each.
        alive: the ids of all requests that are not over, those that wait included.
        describe: tells of a request that is seen for the first time.
        verified: how many drafted tokens of each went through the forward; None where that is not known.
        rows: tokens that went through the forward; None where that is not known.
        logits: float [rows of all requests, vocab], one row for each drafted token and one more for each request; None
            where they are not known.
        most: drafted tokens of each request, at most; None for the limit of the configuration.
    """

    ids: Sequence[str]
    new: Sequence[Sequence[int]]
    lengths: npt.NDArray[np.integer[Any]]
    texts: npt.NDArray[np.integer[Any]]
    alive: Container[str]
    describe: Callable[[str], Request]
    verified: Sequence[int] | None = None
    rows: int | None = None
    logits: Any = None
    most: int | None = None
