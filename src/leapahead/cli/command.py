"""The classes of all commands: options in groups, examples in the help text, errors as one sentence, exit codes.

Each command is a `Command` with `examples`; its options are made by `option(..., group=...)`. `Program` is the root
command, which alone decides the exit code of the process.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TextIO, TypeVar

import click
from click.exceptions import Exit
from click.shell_completion import CompletionItem

from leapahead import interrupts
from leapahead.core.errors import LeapaheadError

DIFFERENT, ERROR, INTERRUPTED, PIPE_CLOSED = 1, 2, interrupts.STATUS, 141
EXIT_CODES = (
    ("0", "success"),
    (
        str(DIFFERENT),
        "generate --compare, demo, check, bench: a text differs from that of plain decoding; run-batch: a request has "
        "failed",
    ),
    (str(ERROR), "an error, described by one sentence on standard error"),
    (str(INTERRUPTED), "interrupted by Ctrl-C"),
    (str(PIPE_CLOSED), "the reader of standard output closed the pipe"),
)
Decorated = TypeVar("Decorated", bound=Callable[..., Any])
SENTENCE = 200  # characters of the longest first sentence of a help text
# Options of vLLM and llama.cpp that no similar name here would lead to the right one.
OTHER_NAMES = {
    **dict.fromkeys(("--max-model-len", "--gpu-memory-utilization"), ("--cache-tokens", "--ctx-size")),
    **dict.fromkeys(("--max-num-seqs", "--parallel"), ("--max-batch",)),
    **dict.fromkeys(("--max-num-batched-tokens", "--batch-size", "--ubatch-size"), ("--prefill-chunk",)),
    **dict.fromkeys(("--n-predict", "--predict", "--max-tokens"), ("--max-new-tokens",)),
    **dict.fromkeys(("--split-mode", "--tensor-split"), ("--device",)),
    "--tensor-parallel-size": ("--devices", "--tensor-parallel"),
    **dict.fromkeys(("--speculative-config", "--spec-type"), ("--drafter", "--draft")),
    **dict.fromkeys(("--model-draft", "--speculative-model", "--spec-draft-model"), ("--draft",)),
    "--num-speculative-tokens": ("--option",),
    "--quantization": ("--weights",),
    "--temp": ("--temperature",),
}
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


@contextmanager
def beside_the_output() -> Iterator[None]:
    """Within the block, standard error is written: where that is not possible, neither output nor exit code change."""
    try:
        yield
    except OSError:
        _silence(sys.stderr)


def say(line: str) -> None:
    """Writes a line that is not part of the command's output to standard error."""
    with beside_the_output():
        click.echo(line, err=True)


class Failure(click.ClickException):
    """An error that is shown as one line on standard error, with exit code 2."""

    exit_code = ERROR

    def show(self, file: Any = None) -> None:
        say(f"error: {self.message}")

    @classmethod
    def of(cls, error: LeapaheadError, parameters: Sequence[click.Parameter] = ()) -> Failure:
        """The failure of a command whose library calls take the values of `parameters`."""
        return cls(name_options(" ".join(str(error).split()), parameters))


def name_options(message: str, parameters: Sequence[click.Parameter]) -> str:
    """Replaces the names of Python parameters in a message by the options that the user types.

    `max_new_tokens=0` becomes `--max-new-tokens=0`, `n_ctx` becomes `--ctx-size`, `kv_unified=False` becomes
    `--no-kv-unified`, and `option 'window'` becomes `option --window`. Names of a single word are replaced only before
    `=`, after `option` and after `leave out`, because elsewhere they may be words of the sentence, and none is in what
    the message quotes. Options that name files are left out unless they have an `Option.argument`: no library call
    takes the others under that name.
    """
    options = {
        name: parameter
        for parameter in parameters
        if isinstance(parameter, click.Option)
        and (not isinstance(parameter.type, click.Path) or getattr(parameter, "argument", None))
        for name in filter(None, (parameter.name, getattr(parameter, "argument", None)))
    }

    def replacement(match: re.Match[str]) -> str:
        quoted, name, equals, switch = match["quoted"], match["name"], match["equals"], match["switch"]
        if quoted in options:
            return f"option {_long(options[quoted].opts)}"
        if name in options and switch:
            return _switched(options[name], switch == "True")
        if name in options and ("_" in name or equals or message.endswith("leave out ", 0, match.start())):
            return _long(options[name].opts) + equals
        return match[0]

    pattern = (
        r"(?<![\w./=-])(?<!--option )"
        r"(?:option '(?P<quoted>\w+)'|(?P<name>\w+)(?P<equals>=?)(?P<switch>(?:True|False)\b)?)"
        r"|(?<!\w)'[^']*'(?!\w)"
    )
    return re.sub(pattern, replacement, message)


def _long(names: Sequence[str]) -> str:
    return next(name for name in reversed(names) if name.startswith("--"))


def _switched(option: click.Option, value: bool) -> str:
    """How an option is given that means true or false."""
    if option.secondary_opts:
        return _long(option.opts if value else option.secondary_opts)
    if option.is_flag and (option.flag_value is not False) == value:
        return _long(option.opts)
    if isinstance(option.type, click.Choice) and set(option.type.choices) == {"on", "off"}:
        return f"{_long(option.opts)}={'on' if value else 'off'}"
    return f"{_long(option.opts)}={value}"


class Option(click.Option):
    """An option that the help text shows under the heading `group`.

    Attributes:
        group: the heading.
        argument: the Python parameter that it is in errors of the library, where the command calls it otherwise.
    """

    def __init__(self, *args: Any, group: str = "Options", argument: str | None = None, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.group, self.argument = group, argument

    def get_help_extra(self, ctx: click.Context) -> Any:
        extra = super().get_help_extra(ctx)
        if isinstance(self.show_default, str):
            extra["default"] = self.show_default  # without click's parentheses
        return extra

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        found = super().shell_complete(ctx, incomplete)
        return file_names(ctx, self, incomplete) if not found and self.type is click.STRING else found


def file_names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Lets the shell complete names of files, which a text may be: a model's. Without any item it completes nothing."""
    return [CompletionItem(incomplete, type="file")]


def drafter_names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Completes names of drafters."""
    from leapahead.drafters import registry

    return [name for name in registry.names() if name.startswith(incomplete)]


def option(*declarations: str, group: str = "Options", **attributes: Any) -> Callable[[Decorated], Decorated]:
    """A decorator for an `Option`, with the arguments of `click.option`. Its default is shown in the help text."""
    return click.option(*declarations, cls=Option, group=group, **{"show_default": True, **attributes})


class Command(click.Command):
    """A command whose help text shows its options in groups, and examples below them.

    Attributes:
        examples: command lines as the user types them.
    """

    def __init__(self, *args: Any, examples: Sequence[str] = (), **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.examples = tuple(examples)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            known = {name for parameter in self.params for name in parameter.opts}
            meant = [name for name in OTHER_NAMES.get(error.option_name, ()) if name in known]
            if not meant:
                raise
            message = f"No such option {error.option_name!r}; use {' or '.join(meant)}."
            raise click.NoSuchOption(error.option_name, message, ctx=error.ctx) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                group = parameter.group if isinstance(parameter, Option) else "Options"
                groups.setdefault(group, []).append(record)
        general = groups.pop("Options", [])  # comes last, with --help
        for group, records in [*groups.items(), ("Options", general)]:
            if records:
                with formatter.section(group):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        if self.examples:
            with formatter.section("Examples"):
                for example in self.examples:
                    formatter.write(f"{'':{formatter.current_indent}}{example}\n")

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except LeapaheadError as error:
            raise Failure.of(error, self.params) from None


class Group(click.Group):
    """A command with subcommands of the class `Command`, listed in the order in which they were added."""

    command_class = Command

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the commands with the whole first sentence of their help, which click would cut."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.commands[name].get_short_help_str(SENTENCE)) for name in self.commands])


class Program(Group):
    """The root command: prepares the standard streams, shows warnings, and turns every outcome into an exit code."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        with formatter.section("Exit codes"):
            formatter.write_dl(EXIT_CODES)

    def main(self, *args: Any, **extra: Any) -> Any:
        _prepare_streams()
        try:
            # click would take $NAME, %%, and wildcards in prompts for variables and files, under Windows alone.
            return super().main(*args, **{"windows_expand_args": False, **extra})
        except Exception:  # a bug; Python's exit code for it would be 1, which means that texts differ
            with suppress(OSError):
                traceback.print_exc()
            sys.exit(ERROR)

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        with _outcome():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with _outcome():
            before = interrupts.raises()
            try:
                _check_working_directory()
                with _shown_warnings():
                    return super().invoke(ctx)
            finally:
                if before:  # the process has yet to end, which takes a while
                    interrupts.ends_process()


def _check_working_directory() -> None:
    """Refuses a working directory that was deleted: libraries fail there in many ways, in which they cannot be caught.

    Raises:
        Failure: it was.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        raise Failure("the working directory does not exist any more; change to another one") from None


def _prepare_streams() -> None:
    """Makes the standard streams such that no character of a prompt or a text can raise an error."""
    if sys.stderr is None:  # closed by the caller
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (for the life of the process)
    if sys.stdout is None:
        Failure("standard output is closed").show()
        sys.exit(ERROR)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a character that the terminal cannot show becomes "?"
    if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.isatty() and "PYTHONIOENCODING" not in os.environ:
        # As texts are read. Under Windows it would be the encoding of its language.
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # invalid bytes are refused by `text_of`


@contextmanager
def _outcome() -> Iterator[None]:
    """Turns an interrupt, an error of the library and an output that cannot be written into click's exceptions."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        say("interrupted")
        raise Exit(INTERRUPTED) from None
    except ImportError as error:
        if not _interrupted(error):
            raise
        say("interrupted")
        raise Exit(INTERRUPTED) from None
    except LeapaheadError as error:
        raise Failure.of(error) from None
    except BrokenPipeError:
        _silence(sys.stdout)
        raise Exit(PIPE_CLOSED) from None
    except OSError as error:
        if os.name == "nt" and error.errno == errno.EINVAL and error.filename is None:  # a closed pipe, there
            _silence(sys.stdout)
            raise Exit(PIPE_CLOSED) from None
        if error.filename is not None:
            raise Failure(f"{error.filename}: {error.strerror}") from None
        if error.errno not in UNWRITABLE:
            raise
        _silence(sys.stdout)
        raise Failure(f"standard output cannot be written: {error.strerror}") from None


def _interrupted(error: BaseException | None) -> bool:
    """Whether an error came from Ctrl-C, which compiled modules turn into an ImportError while they are imported."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _silence(stream: TextIO) -> None:
    """Discards what the stream still holds, so that the interpreter does not fail to write it at its end."""
    with suppress(io.UnsupportedOperation), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


@contextmanager
def _shown_warnings() -> Iterator[None]:
    """Shows this package's warnings as one line each on standard error; those of other packages are discarded.

    So are the log messages of other packages, which Python would write where nothing takes them.
    """

    def show(message: Warning | str, *where: Any, **more: Any) -> None:
        say(f"warning: {' '.join(str(message).split())}")

    discarded = logging.NullHandler()
    logging.getLogger().addHandler(discarded)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("default", category=UserWarning, module=r"leapahead(\.|$)")
            warnings.showwarning = show
            yield
    finally:
        logging.getLogger().removeHandler(discarded)
