"""Streamers of Transformers: they receive the prompt, then the new tokens, column by column."""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from leapahead.integrations.hf_batch import Batch, Row


class Guarded:
    """A streamer that is ended exactly once, also when the call fails, so that its reader does not wait forever.

    Used as a context manager around the call.

    Args:
        streamer: a streamer of Transformers, or None.
    """

    def __init__(self, streamer: Any) -> None:
        self.streamer = streamer
        self._ended = False

    def put(self, tokens: Tensor) -> None:
        """Passes tokens on, int64 on the host."""
        if self.streamer is not None:
            self.streamer.put(tokens.cpu())

    def end(self) -> None:
        """Ends the streamer."""
        if self.streamer is not None and not self._ended:
            self._ended = True
            self.streamer.end()

    def __enter__(self) -> Guarded:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            with suppress(Exception):  # the error that is under way is the one to report
                self.end()


def guarded(streamer: Any) -> Guarded:
    """The streamer with a guard; one that is guarded already is returned as it is."""
    return streamer if isinstance(streamer, Guarded) else Guarded(streamer)


class Streaming:
    """Hands a streamer the tokens as Transformers does: the prompt [batch, length], then one column [batch] at a time.

    Rows advance by different numbers of tokens. A column is complete, and is sent, when every row that still runs has
    reached it.
    """

    def __init__(self, streamer: Guarded, batch: Batch) -> None:
        self.streamer, self.batch = streamer, batch
        self.sent = 0  # columns
        streamer.put(batch.input_ids)

    def send(self) -> None:
        """Sends the columns that are complete."""
        if self.streamer.streamer is None:
            return
        while not self.batch.settled(self.sent):
            tokens = [self._token(row) for row in self.batch.rows]
            if None in tokens:
                return
            self.streamer.put(torch.tensor(tokens))
            self.sent += 1

    def _token(self, row: Row) -> int | None:
        """The token of a row in the next column; None while it is not known."""
        if self.batch.pads_after and row.length is not None and row.length <= self.sent:
            return self.batch.pad
        return row.new[self.sent] if self.sent < len(row.new) else None

    def end(self, sequences: Tensor) -> None:
        """Sends the remaining columns of the result, int64 [batch, length + new], and ends the streamer."""
        for column in sequences[:, self.batch.input_ids.shape[1] + self.sent :].unbind(dim=1):
            self.streamer.put(column)
        self.streamer.end()
