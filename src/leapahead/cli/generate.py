"""`leapahead generate`, `chat` and `demo`: text on standard output, drafted tokens in colour."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from leapahead.api import LLM, Result
from leapahead.bench.compare import ROUNDS, Comparison, compare
from leapahead.bench.prompts import DEMO
from leapahead.cli import screen
from leapahead.cli.cache import MEMORY, memory_argument, saved_at_the_end
from leapahead.cli.options import (
    DRAFTER,
    MODEL,
    TEXT,
    all_of,
    drafter_arguments,
    model_arguments,
    prompt_text,
    text_arguments,
)
from leapahead.core.errors import ContextOverflow


@click.command()
@click.argument("prompt", required=False)
@click.option(
    "-f", "--file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Read the prompt from a file."
)
@click.option(
    "--prediction",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file with what the text will be, about; for the drafters auto and prediction.",
)
@click.option("--chat", "as_chat", is_flag=True, help="Send the prompt as a user's message, by the chat template.")
@all_of(MODEL, DRAFTER, TEXT, MEMORY)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with all figures.")
@click.option("--compare", "with_plain", is_flag=True, help="Time plain decoding beside it, and compare the texts.")
@click.option("--rounds", type=click.IntRange(min=1), default=ROUNDS, show_default=True, help="Of --compare.")
@click.option("-q", "--quiet", is_flag=True, help="The text only, without the line of figures.")
@click.option("--stream/--no-stream", "streamed", default=True, help="Show the text as it comes, or at the end.")
def generate(
    prompt: str | None,
    file: Path | None,
    prediction: Path | None,
    as_chat: bool,
    as_json: bool,
    with_plain: bool,
    rounds: int,
    quiet: bool,
    streamed: bool,
    **values: Any,
) -> None:
    """Complete PROMPT (- reads standard input).

    The text goes to standard output, drafted tokens in colour, and a line of figures to standard error. With --compare
    the exit code is 1 if the text differs from plain decoding's.
    """
    text = prompt_text(prompt, file)
    options = text_arguments(values)
    if prediction is not None:
        options["prediction"] = prompt_text(None, prediction)
    llm = _llm(values)
    given: Any = [{"role": "user", "content": text}] if as_chat else text
    if as_json or not streamed:
        with screen.progress("decoding"):
            result = llm.generate(given, **options)
        if not as_json:
            writer = screen.TextWriter()
            click.echo(result.text, nl=not result.text.endswith("\n"), color=True)
            writer.end()
    else:
        result = screen.stream(llm, given, options)
    comparison = _compare(llm, given, result, rounds, options) if with_plain else None
    if as_json:
        found = screen.as_dict(llm, result)
        click.echo(json.dumps(found if comparison is None else {**found, "compare": comparison.as_dict()}))
    elif comparison is not None:
        click.echo(screen.figures(result, comparison))
        click.echo(screen.verdict(comparison))
    elif not quiet:
        screen.say(screen.figures(result))
    if comparison is not None and not comparison.equal:
        sys.exit(1)


@click.command()
@all_of(MODEL, DRAFTER, TEXT, MEMORY)
@click.option("--system", metavar="TEXT", help="A system message to begin with.")
@click.option("-q", "--quiet", is_flag=True, help="Without the line of figures after each answer.")
def chat(system: str | None, quiet: bool, **values: Any) -> None:
    """Talk with a model, drafted tokens in colour.

    The whole conversation is the prompt of each answer. /reset forgets it; /exit, end of file or Ctrl-C at the prompt
    leaves; Ctrl-C during an answer ends the answer.
    """
    options = text_arguments(values)
    llm = _llm(values)
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    if sys.stdin.isatty():
        import readline  # noqa: F401  (gives `input` line editing and a history)

        screen.say(f"{llm.target.name}, {llm.drafter_name}. /reset forgets the conversation, /exit leaves.")
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            if sys.stdin.isatty():
                click.echo()
            return
        if line == "/exit":
            return
        if line == "/reset":
            messages = list(opening)
        elif line:
            messages.append({"role": "user", "content": line})
            answer = _answer(llm, messages, options, quiet)
            if answer is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})


def _answer(llm: LLM, messages: list[dict[str, str]], options: dict[str, Any], quiet: bool) -> str | None:
    """Shows the answer and gives it back, as far as it went; None if the conversation no longer fits."""
    writer, texts = screen.TextWriter(), list[str]()
    try:
        for piece in llm.stream(messages, **options):
            writer.write(piece)
            texts.append(piece.text)
            if piece.result is not None and not quiet:
                writer.end()
                screen.say(screen.figures(piece.result))
    except KeyboardInterrupt:
        pass
    except ContextOverflow as error:
        screen.say(f"error: {error}; /reset forgets the conversation")
        return None
    finally:
        writer.end()
    return "".join(texts)


@click.command()
@all_of(MODEL, DRAFTER)
@click.option("--max-new-tokens", type=int, default=128, show_default=True, help="Length limit of the text.")
@click.option("--rounds", type=click.IntRange(min=1), default=ROUNDS, show_default=True, help="Of the measurement.")
def demo(max_new_tokens: int, rounds: int, **values: Any) -> None:
    """Complete a piece of Python code, and measure it against plain decoding.

    Drafted tokens are shown in colour. The exit code is 1 if the text differs from plain decoding's.
    """
    llm = _llm(values)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens}
    click.echo(DEMO, nl=False)
    result = screen.stream(llm, DEMO, options)
    comparison = _compare(llm, DEMO, result, rounds, options)
    click.echo()
    click.echo(screen.figures(result, comparison))
    click.echo(screen.verdict(comparison))
    if not comparison.equal:
        sys.exit(1)


def _llm(values: dict[str, Any]) -> LLM:
    drafter = values.pop("drafter")
    drafter_options = drafter_arguments(values, [drafter])
    model = model_arguments(values)
    with screen.loading(model["model"]):
        llm = LLM(**model, drafter=drafter, max_batch=1, drafter_cache=memory_argument(values), **drafter_options)
    return saved_at_the_end(llm)


def _compare(llm: LLM, prompt: Any, result: Result, rounds: int, options: dict[str, Any]) -> Comparison:
    what = "measuring against plain decoding"
    with screen.progress(what) as bar:
        return compare(
            llm, prompt, result, rounds=rounds, progress=lambda done, total: bar(what, done, total), **options
        )
