"""What the other processes do: they answer the commands of the process that decodes, until it stops or ends."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from leapahead.core.errors import BadParameter, CacheFull, Refused, first_line
from leapahead.models.base import Target
from leapahead.models.parallel.device import Device
from leapahead.models.parallel.link import FOREVER, Disconnected, Link

DONE, FULL, FAILED = "done", "full", "failed"
EVERYWHERE = (CacheFull, BadParameter, Refused)  # what all processes raise alike, before they compute


@dataclass(frozen=True)
class Reply:
    """The answer to a message.

    Attributes:
        kind: DONE; FULL where the cache has no room; FAILED for any other error.
        value: of the last command of the message, or the error in words.
    """

    kind: str
    value: Any


@dataclass(frozen=True)
class Stop:
    """Ends a process. It is the last command and has no answer."""


def follow(target: Target, link: Link, together: bool = False) -> None:
    """Introduces this process and runs commands until it is told to stop, or the process that decodes has ended.

    Args:
        target: of this process.
        link: to the others.
        together: whether all processes compute each forward together. After an error in the middle of one, this process
            ends, so that the others do not wait for it there.
    """
    device = Device(target)
    with suppress(Disconnected):
        link.send(0, Reply(DONE, (device.identity, target.info.cache_tokens)))
        while True:
            commands = link.receive(0, FOREVER)
            if any(isinstance(command, Stop) for command in commands):
                return
            reply, error = _run(device, commands)
            link.send(0, reply)
            if together and not isinstance(error, (*EVERYWHERE, type(None))):
                return


def _run(device: Device, commands: list[Any]) -> tuple[Reply, Exception | None]:
    answer = None
    try:
        for command in commands:
            answer = device.run(command)
    except CacheFull as error:
        return Reply(FULL, first_line(error)), error
    except Exception as error:  # whatever it is, the other process must hear of it
        return Reply(FAILED, first_line(error)), error
    return Reply(DONE, answer), None
