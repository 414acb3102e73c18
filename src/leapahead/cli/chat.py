"""`leapahead chat`: a conversation on the terminal, or with the lines of a pipe as the user's messages."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from typing import Any

import click

from leapahead.api import LLM
from leapahead.cli import screen
from leapahead.cli.acceptance import ACCEPTANCE
from leapahead.cli.cache import DRAFTER_CACHE
from leapahead.cli.command import Command, Failure, option
from leapahead.cli.generate import open_llm
from leapahead.cli.options import DRAFTER, MODEL, TEXT, all_of, text_arguments
from leapahead.cli.text_input import BYTE_ORDER_MARK, utf8, utf8_only
from leapahead.core.errors import BadParameter, ContextOverflow, LeapaheadError
from leapahead.core.parameters import meant
from leapahead.inputs import Options, check_values

COMMANDS = {
    "/reset": "forget the conversation",
    "/exit": "leave, as end of file (Ctrl-D) and Ctrl-C at the prompt do",
    "/help": "show this",
}
COMMAND = re.compile(r"/[\w?-]*(\s|$)")  # what is meant as a command; a path such as /usr/bin is part of a message


@click.command(
    cls=Command,
    examples=(
        "leapahead chat -m model.gguf",
        "leapahead chat -m Qwen/Qwen3-0.6B --system 'Answer in one sentence.' -t 0.7",
        "printf 'Hi\\nWhat did I say?\\n' | leapahead chat -q",
    ),
)
@all_of(MODEL, DRAFTER, ACCEPTANCE, DRAFTER_CACHE, TEXT)
@option("--system", callback=utf8_only, metavar="TEXT", group="Chat options", help="A system message to begin with.")
@option("-q", "--quiet", is_flag=True, group="Chat options", help="No line of figures after each answer.")
def chat(system: str | None, quiet: bool, **values: Any) -> None:
    """Talk with a model; drafted tokens are in colour.

    The whole conversation is the prompt of each answer. At the prompt, /reset forgets the conversation, /help lists the
    commands, and /exit, end of file or Ctrl-C leaves; Ctrl-C during an answer ends the answer, and a second one the
    command. Without a terminal, each line of standard input is a message, and the first error ends the command with
    exit code 2.
    """
    if sys.stdin is None:
        raise BadParameter("standard input is closed, so no messages can be read from it")
    options = text_arguments(values)
    check_values(options)
    llm = open_llm(values)
    conversation = Conversation(llm, options, system, quiet)
    interactive = sys.stdin.isatty()
    if interactive:
        with suppress(ImportError):  # Windows, whose terminal does the same, and some builds of Python
            import readline  # noqa: F401  (gives `input` line editing and a history)

        screen.say(f"{llm.target.info.name}, {llm.drafter_name}. /help lists the commands, /exit leaves.")
    while True:
        try:
            line = input("> " if interactive else "").removeprefix(BYTE_ORDER_MARK).strip()
        except EOFError:
            line = "/exit"
        except KeyboardInterrupt:
            if not interactive:
                raise
            line = "/exit"
        if line == "/exit":
            if interactive:
                click.echo()
            return
        try:
            conversation.take(line)
        except LeapaheadError as error:
            if not interactive:
                raise
            Failure.of(error, click.get_current_context().command.params).show()


class Conversation:
    """The messages so far, which each answer has as its prompt."""

    def __init__(self, llm: LLM, options: Options, system: str | None, quiet: bool) -> None:
        self._llm, self._options, self._quiet = llm, options, quiet
        self._opening = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._opening)

    def take(self, line: str) -> None:
        """Obeys a command, or answers a message. An error leaves the conversation as it was.

        Raises:
            BadParameter: there is no such command, or the line is not UTF-8 text.
            ContextOverflow: the conversation no longer fits the context.
        """
        if line == "/reset":
            self._messages = list(self._opening)
        elif line == "/help":
            for name, meaning in COMMANDS.items():
                screen.say(f"{name}  {meaning}")
        elif COMMAND.match(line):
            raise BadParameter(f"there is no command {line!r}{meant(line, COMMANDS)}; there are {', '.join(COMMANDS)}")
        elif line:
            self._answer(utf8(line, "the line"))

    def _answer(self, message: str) -> None:
        messages = [*self._messages, {"role": "user", "content": message}]
        answer = screen.Answer()
        try:
            if sys.stdin.isatty():
                with screen.interrupts_between_steps() as stop:
                    screen.show_stream(self._llm, messages, self._options, answer, stop)
            else:
                screen.show_stream(self._llm, messages, self._options, answer)
        except KeyboardInterrupt:
            screen.say(answer.figures())
            raise
        except ContextOverflow as error:
            raise ContextOverflow(f"{error}; /reset forgets the conversation") from None
        if not self._quiet:
            screen.say(answer.figures())
        self._messages = [*messages, {"role": "assistant", "content": answer.text}]
