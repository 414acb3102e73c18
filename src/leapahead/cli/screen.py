"""What the commands show: the text with its drafted tokens in colour, a line of figures, progress on standard error."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click
from rich import box
from rich.console import Console as RichConsole
from rich.progress import Progress
from rich.table import Table

from leapahead.api import LLM
from leapahead.cli.command import beside_the_output
from leapahead.cli.command import say as say
from leapahead.core.errors import BadParameter, LeapaheadError, counted
from leapahead.core.stats import Stats
from leapahead.core.storage import replacing
from leapahead.drafters import registry
from leapahead.inputs import Options
from leapahead.models import loading as models
from leapahead.progress import bars
from leapahead.results import Piece, Result

if TYPE_CHECKING:
    from leapahead.bench.compare import Comparison

DRAFTED = "\x1b[32m"  # green
PLAIN = "\x1b[0m"
WIDTH = 120  # of a table that is not shown on a terminal
# What begins a command to the terminal: ESC, and the control characters of 8 bits but for the line break among them.
CONTROLS = {0x1B: "\u241b", **{code: "\ufffd" for code in range(0x80, 0xA0) if code != 0x85}}


class Console(RichConsole):
    """Standard output for tables. An output that is no terminal has a width of 120 columns, unless COLUMNS is set.

    Names of models and drafters are shown as they are, also where they have brackets or colons.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)
        if not self.is_terminal and "COLUMNS" not in os.environ:
            self.width = WIDTH

    def on_broken_pipe(self) -> None:
        """Lets the root command end the process; rich would do so with exit code 1."""
        raise BrokenPipeError


def coloured() -> bool:
    """Whether standard output is coloured: on a terminal, unless NO_COLOR is set (no-color.org)."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (sys.stdout.isatty() and os.environ.get("TERM") != "dumb")


def harmless(text: str) -> str:
    """The text without the escape characters by which it could control the terminal, of 7 and of 8 bits."""
    return text.translate(CONTROLS)


class TextWriter:
    """Writes the pieces of a text to standard output as they come, unchanged where that is no terminal."""

    def __init__(self) -> None:
        self._colour = coloured()
        self._is_shown = self._colour or sys.stdout.isatty()
        self._ended = True  # with a newline

    def write(self, piece: Piece) -> None:
        for text, drafted in piece.spans:
            if self._is_shown:
                text = harmless(text)
            sys.stdout.write(f"{DRAFTED}{text}{PLAIN}" if self._colour and drafted else text)
            self._ended = text.endswith("\n")
        sys.stdout.flush()

    def end(self) -> None:
        """Ends the last line."""
        if not self._ended:
            sys.stdout.write("\n")
            sys.stdout.flush()
            self._ended = True


def show_text(text: str) -> None:
    """Writes a whole text to standard output, unchanged where that is no terminal."""
    shown = harmless(text) if sys.stdout.isatty() else text
    click.echo(shown, nl=not text.endswith("\n"), color=True)


@dataclass
class Answer:
    """A text while it is shown, complete or not.

    Attributes:
        texts: the text of every step.
        tokens: their number.
        began: when the first step ended, which is when the prompt had been read; the times are those of `perf_counter`.
        ended: when the last step ended.
        result: the whole, once the text is complete.
    """

    texts: list[str] = field(default_factory=list)
    tokens: int = 0
    first: int = 0
    began: float = 0.0
    ended: float = 0.0
    result: Result | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, piece: Piece) -> None:
        self.ended = perf_counter()
        if not self.texts:
            self.began, self.first = self.ended, len(piece.tokens)
        self.texts.append(piece.text)
        self.tokens += len(piece.tokens)
        self.result = piece.result

    def figures(self) -> str:
        """One line: the figures of the whole text, or those of the part that was decoded before an interrupt."""
        if self.result is not None:
            return figures(self.result)
        if not self.texts:
            return "interrupted before the first token"
        line = f"interrupted: {counted(self.tokens, 'token')}, {counted(len(self.texts), 'step')}"
        line += f", acceptance length {self.tokens / len(self.texts):.2f}"
        if self.ended > self.began:
            line += f", {(self.tokens - self.first) / (self.ended - self.began):.1f} tokens/s"
        return line


def show_stream(
    llm: LLM, prompt: Any, options: Options, answer: Answer, stop: Callable[[], bool] = lambda: False
) -> None:
    """Decodes and shows a text, piece by piece, until `stop` says true after a piece.

    `answer` holds what came so far, after an error or interrupt too.
    """
    writer = TextWriter()
    try:
        with closing(llm.stream(prompt, **options)) as pieces:
            for piece in pieces:
                answer.add(piece)
                writer.write(piece)
                if stop():
                    break
    finally:
        writer.end()


@contextmanager
def interrupts_between_steps() -> Iterator[Callable[[], bool]]:
    """Within the block, the first Ctrl-C raises nothing: the function that is yielded returns true after it.

    So a model that is used again is not interrupted in the middle of a forward. A second Ctrl-C raises
    KeyboardInterrupt as usual.
    """
    seen: list[int] = []

    def handler(number: int, _: object) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, before)


def figures(result: Result, comparison: Comparison | None = None) -> str:
    """One line with the number of tokens and steps, the acceptance length and the speed."""
    stats, line = result.stats, rates(result.stats)
    if comparison is not None:
        low, high = comparison.spread
        line += f", {comparison.ratio:.2f} times plain decoding's speed ({low:.2f} to {high:.2f})"
    if result.lossy:
        line += f", lossy text ({result.lossy})"
    reports = {name: each for name, each in stats.drafter.items() if isinstance(each, dict)}
    return "\n".join([line, *(f"{name}: {each['stopped']}" for name, each in reports.items() if "stopped" in each)])


def rates(stats: Stats) -> str:
    """The number of tokens and steps, the acceptance length and the speed."""
    return (
        f"{counted(stats.committed, 'token')}, {counted(stats.steps, 'step')}, "
        f"acceptance length {stats.acceptance_length:.2f}, {stats.tokens_per_second:.1f} tokens/s"
    )


def verdict(comparison: Comparison, lossy: str = "", same_text: bool = True) -> str:
    """One line: whether the text is that of plain decoding.

    Args:
        lossy: the relaxed rule that it was decoded with, if there was one.
        same_text: whether the drafter is to give plain decoding's text, and not only its distribution.
    """
    if comparison.equal:
        tokens = counted(len(comparison.plain.tokens), "token")
        return f"The text equals that of plain decoding, token for token ({tokens})."
    differs = f"The text differs from that of plain decoding at token {comparison.first_difference}"
    if lossy:
        return f"{differs}: {lossy} is lossy."
    if not same_text:
        return f"{differs}: the drafter preserves the distribution of sampled texts, not each text."
    return f"{differs}; `leapahead check` distinguishes a numeric tie from an error."


def as_dict(llm: LLM, result: Result) -> dict[str, Any]:
    """The object of `generate --json`."""
    return {
        "text": result.text,
        "tokens": result.tokens,
        "finish_reason": result.finish_reason,
        "stop_reason": result.stop_reason,
        "target": llm.target.info.name,
        "drafter": llm.drafter_name,
        "seed": result.seed,
        **({"lossy": result.lossy} if result.lossy else {}),
        **({"reference": llm.target.info.reference} if llm.target.info.reference else {}),
        "stats": result.stats.as_dict(),
    }


class Bar:
    """A progress bar; call it with what is being done, how much of it is done, and how much there is, if known."""

    def __init__(self, progress: Progress, what: str) -> None:
        self._progress = progress
        self._task = progress.add_task(what, total=None, count="")

    def __call__(self, what: str, done: int, total: int | None) -> None:
        count = str(done) if total is None else f"{done}/{total}"
        self._progress.update(self._task, description=what, completed=done, total=total, count=count)

    def say(self, line: str) -> None:
        """Writes a line above the bar."""
        with beside_the_output():
            self._progress.console.print(line, markup=False, soft_wrap=True)


@contextmanager
def progress(what: str) -> Iterator[Bar]:
    """A progress bar on standard error while the block runs; only its lines (`Bar.say`) where that is no terminal."""
    with bars(Console(stderr=True), disable=not sys.stderr.isatty()) as shown:
        yield Bar(shown, what)


@contextmanager
def loading(model: str | None) -> Iterator[None]:
    """Shows a progress bar while a local model is loaded; the download of a model shows that of the hub's client."""
    kind = models.engine_of(model)
    if kind != "llama.cpp":
        quiet_transformers()  # which loads the tokenizers of OpenVINO's folders, too
    if kind != "transformers":
        with progress(f"loading {model}"):
            yield
        return
    if model is None or Path(model).exists():
        with progress(f"loading {model or 'the bundled model'}"):
            yield
    else:
        yield


def load(model: dict[str, Any], batch: int = 1, drafters: Sequence[str] = ()) -> models.Loaded:
    """The model of a command that measures it, loaded for so many sequences at a time and for these drafters.

    What was chosen for several is said on standard error.
    """
    with loading(model["model"]):
        found = models.load(**model, sequences=batch, branching=registry.branching(*drafters))
    if batch > 1 and found.target.info.kv_cache:
        say(found.target.info.kv_cache)
    return found


def quiet_transformers() -> None:
    """Turns off the progress bars and log messages of Transformers; those of downloads stay."""
    try:
        from huggingface_hub.utils.tqdm import enable_progress_bars
        from transformers.utils import logging
    except ModuleNotFoundError:
        return  # loading the model will name what is missing
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    enable_progress_bars()


def check_place(what: str, file: Path) -> None:
    """Refuses, before anything is computed, a place where `write_file` cannot write.

    Raises:
        BadParameter: it cannot.
    """
    if file.is_dir():
        raise BadParameter(f"{what} cannot be written to {file}, which is a folder; give the name of a file")
    if not file.parent.is_dir():
        raise BadParameter(f"{what} cannot be written to {file}: there is no folder {file.parent}")
    place = file if file.exists() and not file.is_file() else file.parent  # a device or a pipe is not replaced
    if not os.access(place, os.W_OK):
        raise BadParameter(f"{what} cannot be written to {file}: {place.absolute()} is not writable; name another")


def write_file(path: Path, content: str | bytes) -> None:
    """Writes a file beside its place and renames it, so that an error never leaves a part of it.

    Raises:
        LeapaheadError: it cannot be written.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    try:
        if path.exists() and not path.is_file():  # a device or a pipe, which resolve may not find: /dev/stdout
            path.write_bytes(data)
            return
        with replacing(path.resolve()) as part:
            part.write_bytes(data)
    except OSError as error:
        raise LeapaheadError(f"{path} cannot be written: {error.strerror}") from None


def new_table(columns: Sequence[str], head: Sequence[str] = (), left: Sequence[str] = ()) -> Table:
    """A table of columns aligned to the right, between `head` and `left` columns aligned to the left."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in head:
        table.add_column(column, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for column in left:
        table.add_column(column, no_wrap=True)
    return table


def number(value: float | None, form: str) -> str:
    """The value in that format, "-" where it was not measured."""
    return "-" if value is None else f"{value:{form}}"
