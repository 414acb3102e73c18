"""What the commands show: the text with its drafted tokens in colour, one line of figures, progress on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from leapahead.api import LLM, Piece, Result
from leapahead.core.errors import LeapaheadError

if TYPE_CHECKING:
    from leapahead.bench.compare import Comparison

DRAFTED = "\x1b[32m"  # green
PLAIN = "\x1b[0m"


def coloured() -> bool:
    """Whether to colour standard output: on a terminal, unless NO_COLOR is set (no-color.org)."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (sys.stdout.isatty() and os.environ.get("TERM") != "dumb")


class TextWriter:
    """Writes pieces as they come, byte for byte where the output is no terminal."""

    def __init__(self) -> None:
        self._colour = coloured()
        self._ended = True  # with a newline

    def write(self, piece: Piece) -> None:
        for text, drafted in piece.spans:
            if self._colour:
                text = text.replace("\x1b", "\u241b")  # a model shall not steer the terminal
            sys.stdout.write(f"{DRAFTED}{text}{PLAIN}" if self._colour and drafted else text)
            self._ended = text.endswith("\n")
        sys.stdout.flush()

    def end(self) -> None:
        """Ends the last line."""
        if not self._ended:
            sys.stdout.write("\n")
            sys.stdout.flush()
            self._ended = True


def stream(llm: LLM, prompt: Any, options: dict[str, Any]) -> Result:
    """Decodes and shows the text."""
    writer, result = TextWriter(), None
    try:
        for piece in llm.stream(prompt, **options):
            writer.write(piece)
            result = piece.result
    finally:
        writer.end()
    assert result is not None
    return result


def figures(result: Result, comparison: Comparison | None = None) -> str:
    """One line: what the text cost."""
    stats = result.stats
    line = (
        f"{stats.committed} tokens, {stats.steps} steps, acceptance length {stats.acceptance_length:.2f}, "
        f"{stats.tokens_per_second:.1f} tokens/s"
    )
    if comparison is not None:
        low, high = comparison.spread
        line += f", {comparison.ratio:.2f} times plain decoding's speed ({low:.2f} to {high:.2f})"
    stopped = {name: each["stopped"] for name, each in stats.drafter.items() if "stopped" in each}
    return "\n".join([line, *(f"{name}: {why}" for name, why in stopped.items())])


def verdict(comparison: Comparison) -> str:
    """One line: whether the text is plain decoding's."""
    if comparison.equal:
        return f"The text equals plain decoding's, token for token ({len(comparison.plain.tokens)} tokens)."
    return (
        f"The text differs from plain decoding's at token {comparison.first_difference}; "
        "`leapahead check` tells a numeric tie from a bug."
    )


def as_dict(llm: LLM, result: Result) -> dict[str, Any]:
    """The object of `generate --json`."""
    return {
        "text": result.text,
        "tokens": result.tokens,
        "finish_reason": result.finish_reason,
        "stop_reason": result.stop_reason,
        "target": llm.target.name,
        "drafter": llm.drafter_name,
        "seed": result.seed,
        "stats": result.stats.as_dict(),
    }


def say(line: str) -> None:
    """A line for the user that is not the text, on stderr."""
    click.echo(line, err=True)


@contextmanager
def progress(what: str) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr, if that is a terminal; call it with (what, done, total)."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(what, total=None, count="")
        yield lambda what, done, total: bar.update(
            task, description=what, completed=done, total=total, count=f"{done}/{total}"
        )


@contextmanager
def loading(model: str | None) -> Iterator[None]:
    """While a model is loaded: a bar of ours in place of Transformers'. A hub download shows the hub's own."""
    quiet_transformers()
    if model is None or Path(model).exists():
        with progress(f"loading {model or 'the bundled model'}"):
            yield
    else:
        yield


def quiet_transformers() -> None:
    try:
        from huggingface_hub.utils.tqdm import enable_progress_bars
        from transformers.utils import logging
    except ModuleNotFoundError:
        return  # the load says what is missing
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    enable_progress_bars()  # of downloads


class Failure(click.ClickException):
    """A `LeapaheadError` as one line."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        click.echo(f"error: {self.message}", err=True)

    @classmethod
    def of(cls, error: LeapaheadError) -> Failure:
        return cls(" ".join(str(error).split()))
