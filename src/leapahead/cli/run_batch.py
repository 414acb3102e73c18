"""`leapahead run-batch`: a file of requests becomes a file of results, without a server."""

from __future__ import annotations

import asyncio
import io
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click
from click.exceptions import Exit

from leapahead.cli import screen
from leapahead.cli.cache import DRAFTER_CACHE
from leapahead.cli.command import DIFFERENT, INTERRUPTED, Command, file_names, option
from leapahead.cli.options import DRAFTER_BESIDE_OUTPUT, MODEL, all_of
from leapahead.cli.served import BOUNDS, PACKAGES, SERVED, application, limits_given, named_model
from leapahead.cli.training import sigterm_interrupts
from leapahead.cli.typed import HomePath
from leapahead.core.errors import BadParameter, counted, needing
from leapahead.core.stats import Stats
from leapahead.serve.settings import Limits, Settings

if TYPE_CHECKING:
    from leapahead.serve.batch_lines import Result
    from leapahead.serve.batch_results import Results

FILES = "Files"
AHEAD = 2  # requests at a time, times --max-batch: where all texts end in one step, others are ready
BODY_BYTES = 2**40  # no limit, since lines have one


@click.command(
    cls=Command,
    examples=(
        "leapahead run-batch model.gguf -i requests.jsonl -o results.jsonl",
        "leapahead run-batch model.gguf -i requests.jsonl -o results.jsonl --resume",
        "leapahead run-batch Qwen/Qwen3-0.6B -i - -o - --served-model-name gpt-4o-mini --max-batch 16",
    ),
)
@click.argument("name", required=False, metavar="[MODEL]", shell_complete=file_names)
@option(
    "-i",
    "--input-file",
    "source",
    type=HomePath(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
    required=True,
    metavar="FILE",
    group=FILES,
    help="Requests, in the format of OpenAI's Batch API; `-` is standard input.",
)
@option(
    "-o",
    "--output-file",
    "output",
    type=HomePath(dir_okay=False, allow_dash=True, path_type=Path),
    required=True,
    metavar="FILE",
    group=FILES,
    help="Results, one line for each request, written when it ends; `-` is standard output.",
)
@option("--resume", is_flag=True, group=FILES, help="Continue the batch whose results are in --output-file.")
@all_of(SERVED, MODEL, DRAFTER_BESIDE_OUTPUT, DRAFTER_CACHE, BOUNDS)
def run_batch(
    name: str | None,
    source: Path,
    output: Path,
    resume: bool,
    names: tuple[str, ...],
    max_batch: int,
    prefill_chunk: int | None,
    generation_config: bool,
    tool_call_parser: str | None,
    reasoning_parser: str | None,
    **values: Any,
) -> None:
    """Answer a file of requests to MODEL, as `leapahead serve` would answer them.

    Each line has custom_id, method (POST), url and body; the url is /v1/chat/completions, /v1/completions,
    /v1/responses or /v1/messages. The body's model may be left out; another one than MODEL, as it is given here, needs
    --served-model-name.

    A result is written when it is there, so that Ctrl-C, SIGTERM or an error loses none: the same command with --resume
    keeps the answers in --output-file, and computes what is missing or has failed. A request that cannot be answered
    has an error in its result; the exit code is 1 if there is one.
    """
    with needing("leapahead run-batch", "serve", *PACKAGES):
        from leapahead.serve import batch, batch_lines, batch_results
    model, width = named_model(name, values), AHEAD * max_batch
    models = tuple(dict.fromkeys(names)) or (model,)
    limits = Limits(**limits_given(values), body_bytes=BODY_BYTES)
    chosen = Settings(
        names=models,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        limits=replace(limits, queue=width * limits.samples * limits.prompts),  # which is never full
    )
    results = None if _is_dash(output) else batch_results.Results(output, resume, models)
    if results is not None:
        screen.check_place("the results", output)
    elif resume:
        raise BadParameter("--resume is not possible with --output-file -, which keeps no results; name a file")
    if _is_dash(source) and sys.stdin is None:
        raise BadParameter("standard input is closed, so no requests can be read from it; name a file")
    served, worker = application(values, chosen, max_batch, prefill_chunk, generation_config)
    if worker.llm.llm.target.info.kv_cache:
        screen.say(worker.llm.llm.target.info.kv_cache)
    written = Written(results)
    items = batch_lines.requests(lambda: _opened(source), written.before)
    try:
        with sigterm_interrupts(), screen.progress("answering") as bar, _log_shown(), written:
            written.show = partial(bar, "answering", total=_number(source))
            asyncio.run(batch.run(served, worker, items, width, written.add))
    except KeyboardInterrupt:
        written.report(worker.total)
        if results is None:
            raise
        screen.say(f"interrupted; {written.number} results are in {output}, and --resume continues")
        raise Exit(INTERRUPTED) from None
    written.report(worker.total)
    if written.failed:
        raise Exit(DIFFERENT)


class Written:
    """Writes results, and counts them.

    Args:
        results: the file that they are added to; None for standard output.

    Attributes:
        before: custom_id -> id, of the requests that were answered before.
        answered, failed: number of requests.
        show: is called with the number of all results.
    """

    def __init__(self, results: Results | None) -> None:
        self._results = results
        self._file = sys.stdout.buffer if results is None else results.open()
        self.before = {} if results is None else results.kept
        self.answered, self.failed = 0, 0
        self.show: Callable[[int], None] = lambda _: None

    @property
    def number(self) -> int:
        """Results that are there."""
        return len(self.before) + self.answered + self.failed

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        if self._results is not None:
            with suppress(OSError):  # of what could not be written before
                self._file.close()

    def add(self, result: Result) -> None:
        """Writes a result.

        Raises:
            LeapaheadError: the file cannot be written.
            OSError: standard output cannot.
        """
        try:
            self._file.write(result.line())
            self._file.flush()
        except OSError as error:
            if self._results is None:
                raise
            raise self._results.unwritable(error) from None
        if result.error is None:
            self.answered += 1
        else:
            self.failed += 1
        self.show(self.number)

    def report(self, stats: Stats) -> None:
        """Says how many requests were answered, and how fast."""
        line = f"{counted(self.answered, 'request')} answered"
        if self.before:
            line += f", {len(self.before)} answered before"
        if self.failed:
            line += f", {self.failed} failed: the error is in the result"
        screen.say(line)
        if stats.steps:
            screen.say(screen.rates(stats))


def _is_dash(path: Path) -> bool:
    return str(path) == "-"


def _opened(source: Path) -> BinaryIO:
    """The file of requests, not to be shared with anything: a thread that waits for a line in it is left alone."""
    if not _is_dash(source):
        return source.open("rb")
    try:
        return open(sys.stdin.fileno(), "rb", closefd=False)
    except io.UnsupportedOperation:  # in tests
        return sys.stdin.buffer


def _number(source: Path) -> int | None:
    """The number of results that there will be, where somebody looks at it and it can be known."""
    if not (source.is_file() and sys.stderr.isatty()):
        return None
    from leapahead.serve.batch_lines import lines

    with source.open("rb") as file:
        return sum(1 for _ in lines(file))


class LogLines(logging.Handler):
    """Shows faults of the service, and caches that cannot be saved, as a line each."""

    def emit(self, record: logging.LogRecord) -> None:
        members = [f"{name}={value}" for name, value in getattr(record, "members", {}).items()]
        if record.exc_info and record.exc_info[1] is not None:
            members.append(f"{type(record.exc_info[1]).__name__}: {record.exc_info[1]}")
        screen.say(f"{record.levelname.lower()}: {record.getMessage()}: {', '.join(members)}")


@contextmanager
def _log_shown() -> Iterator[None]:
    """Within the block, what the service logs as an error is shown."""
    from leapahead.serve.logs import logger

    before = logger.handlers, logger.propagate, logger.level
    logger.handlers, logger.propagate = [LogLines()], False
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.handlers, logger.propagate = before[:2]
        logger.setLevel(before[2])
