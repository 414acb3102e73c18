"""Messages between the processes of several devices, from one to another, by the Gloo backend of torch.distributed.

What is exchanged in a step are some hundred bytes that begin and end in the memory of the hosts (tokens of trees and
chosen tokens), so that Gloo carries them for GPUs as well: NCCL would copy them to the GPUs and back, and its kernels
would occupy a GPU for as long as its process waits for the next step.

A message is one frame of a fixed size, which holds its length and its beginning, and a second one if that is too short.
Messages are pickled, as by the object collectives of torch.distributed: whoever can reach the ports of these processes
must be trusted.
"""

from __future__ import annotations

import pickle
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
from torch.distributed import HashStore, ProcessGroupGloo  # type: ignore[attr-defined]

from leapahead.core.errors import LeapaheadError, first_line

FRAME = 8192  # bytes
HEAD = 8  # of them for the length
FOREVER = timedelta(days=3650)
TIMEOUT = 600.0  # seconds; a process that ends is noticed at once, this is for one that hangs


class Disconnected(LeapaheadError):
    """Another process has ended or does not answer."""


class Link:
    """The connections of one process to the others.

    Args:
        group: of all processes; made for this alone.
        rank: of this process; the one that decodes has 0.
        size: the number of processes.
        timeout: seconds after which a process that does not answer is given up.

    Attributes:
        problem: why nothing can be sent any more; "" while all is well.
    """

    def __init__(self, group: ProcessGroupGloo, rank: int, size: int, timeout: float = TIMEOUT) -> None:
        self.rank, self.size = rank, size
        self.problem = ""
        self._timeout = timedelta(seconds=timeout)
        self._group: Any = group  # whose methods torch's annotations lack

    def send(self, to: int, message: object, timeout: timedelta | None = None) -> None:
        """Sends a message, for which the other process may have to wait already.

        Args:
            to: the process that receives it.
            message: what can be pickled.
            timeout: instead of the link's own.

        Raises:
            Disconnected: the process has ended, or does not receive it in time.
        """
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        frame = bytearray(FRAME)
        frame[:HEAD] = len(data).to_bytes(HEAD, "little")
        frame[HEAD : HEAD + len(data)] = data[: FRAME - HEAD]
        try:
            self._send(to, frame[:FRAME], timeout)
            if len(data) > FRAME - HEAD:
                self._send(to, bytearray(data[FRAME - HEAD :]), timeout)
        except RuntimeError as error:
            raise self._lost(to, error) from None

    def receive(self, source: int, timeout: timedelta | None = None) -> Any:
        """Waits for a message.

        Args:
            source: the process that sends it.
            timeout: instead of the link's own.

        Raises:
            Disconnected: the process has ended, or nothing came in time.
        """
        try:
            frame = self._receive(source, FRAME, timeout)
            length = int.from_bytes(frame[:HEAD], "little")
            data = frame[HEAD : HEAD + length]
            if length > FRAME - HEAD:
                data += self._receive(source, length - len(data), timeout)
        except RuntimeError as error:
            raise self._lost(source, error) from None
        except BaseException:
            self.problem = "it was interrupted in the middle of a message"
            raise
        return pickle.loads(data)

    def _send(self, to: int, data: bytearray, timeout: timedelta | None) -> None:
        self._group.send([torch.frombuffer(data, dtype=torch.uint8)], to, 0).wait(timeout or self._timeout)

    def _receive(self, source: int, length: int, timeout: timedelta | None) -> bytes:
        data = torch.empty(length, dtype=torch.uint8)
        self._group.recv([data], source, 0).wait(timeout or self._timeout)
        return data.numpy().tobytes()

    def _lost(self, other: int, error: RuntimeError) -> Disconnected:
        what = "does not answer" if "imed out" in first_line(error) else "has ended"
        self.problem = f"process {other} of {self.size}, which computes a part of every step, {what}"
        return Disconnected(f"{self.problem}; make a new LLM")


def connected(size: int, timeout: float = TIMEOUT) -> list[Link]:
    """The links of so many processes, all of them within this one, for threads; for tests and measurements."""
    store, found = HashStore(), dict[int, Link]()

    def connect(rank: int) -> None:
        group = ProcessGroupGloo(store, rank, size, timedelta(seconds=TIMEOUT))
        found[rank] = Link(group, rank, size, timeout)

    threads = [Thread(target=connect, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(size)]
