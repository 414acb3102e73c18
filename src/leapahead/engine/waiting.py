"""Waiting for requests: what ended them, whether they are over, and waking a task of asyncio."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import ref

from leapahead.core.errors import LeapaheadError
from leapahead.engine.request import Handle

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Runs the function in a thread, so that the event loop goes on meanwhile.

    Raises:
        RuntimeError: the function raised StopIteration, which a future of asyncio does not take, so that it would stay
            pending. A generator raises the same.
    """
    import asyncio

    def run() -> T:
        try:
            return function(*args)
        except StopIteration as error:
            raise RuntimeError("StopIteration was raised and not caught; give next(...) a default") from error

    return await asyncio.to_thread(run)


def wake_up() -> tuple[asyncio.Event, Callable[[], None]]:
    """An event of the running loop, and a function that sets it from any thread."""
    import asyncio

    loop, event = asyncio.get_running_loop(), asyncio.Event()

    def notify() -> None:
        with suppress(RuntimeError):  # the loop was closed, so nobody waits
            loop.call_soon_threadsafe(event.set)

    return event, notify


def of_this_task(handles: Iterable[Handle]) -> None:
    """Notes that the task that is running waits for these requests, or reads them."""
    import asyncio

    if (task := asyncio.current_task()) is not None:
        for handle in handles:
            handle.task = ref(task)  # a weak one, since the task refers to the handle


def over(handles: Sequence[Handle]) -> bool:
    """Whether nothing is to be waited for: all of them are over, or one has failed."""
    return all(handle.done for handle in handles) or any(handle.error is not None for handle in handles)


def raise_error(handles: Iterable[Handle]) -> None:
    """Raises what ended the first of these that has failed."""
    for handle in handles:
        if handle.error is not None:
            raise handle.error


def check(handle: Handle) -> None:
    """Raises what ended a request before its text was complete."""
    raise_error([handle])
    if handle.finish_reason == "cancelled":
        raise LeapaheadError("the request was cancelled, since the LLM was closed")
