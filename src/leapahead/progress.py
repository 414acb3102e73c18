"""Progress bars on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING

from leapahead.core.errors import BadParameter

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

Told = Callable[[int, int], None]  # is called with how much is done, and how much there is


@contextmanager
def shown(progress: bool | Told, total: int) -> Iterator[Callable[[], None] | None]:
    """Shows how many of so many texts are over while the block runs.

    Args:
        progress: whether there is a progress bar, or what is called instead.

    Yields:
        What is to be called whenever one more is over; None where nobody wants to know.

    Raises:
        BadParameter: `progress` is something else.
    """
    if not (isinstance(progress, bool) or callable(progress)):
        raise BadParameter(
            f"progress={progress!r} is not possible: it must be True, False or a function of two numbers, the texts "
            "that are over and all"
        )
    if progress is False:
        yield None
        return
    numbers = count(1)
    if progress is not True:
        yield lambda: progress(next(numbers), total)
        return
    from rich.console import Console

    console = Console(stderr=True)
    with bars(console, disable=not (console.is_terminal or console.is_jupyter)) as bar:
        task = bar.add_task("decoding", total=total, count=f"0/{total}")

        def one_is_over() -> None:
            done = next(numbers)
            bar.update(task, completed=done, count=f"{done}/{total}")

        yield one_is_over


def bars(console: Console, disable: bool = False) -> Progress:
    """Progress bars with a field `count` and times, which are gone at the end."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    class Bars(Progress):
        def stop(self) -> None:
            if not self.disable:  # Rich before 15 writes an empty line then
                super().stop()

    columns = (
        *(TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[count]}")),
        *(TimeElapsedColumn(), TimeRemainingColumn()),
    )
    return Bars(*columns, console=console, transient=True, disable=disable)
