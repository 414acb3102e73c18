"""`leapahead generate` and `demo`: text on standard output, drafted tokens in colour."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from click.exceptions import Exit

from leapahead import drafters
from leapahead.api import LLM
from leapahead.bench.compare import ROUNDS, Comparison, compare
from leapahead.bench.prompts import DEMO
from leapahead.cli import screen
from leapahead.cli.acceptance import ACCEPTANCE
from leapahead.cli.cache import DRAFTER_CACHE, drafter_cache_argument, save_at_exit
from leapahead.cli.command import DIFFERENT, Command, option
from leapahead.cli.grammar import GRAMMAR, grammar_argument
from leapahead.cli.options import (
    DRAFTER,
    INPUT,
    MODEL,
    TEXT,
    all_of,
    drafter_arguments,
    model_arguments,
    text_arguments,
)
from leapahead.cli.text_input import prompt_text, to_complete, utf8_only
from leapahead.core.errors import BadParameter, counted
from leapahead.core.relaxed import EXACT
from leapahead.drafters import registry
from leapahead.inputs import OneText, Options, check_prediction, check_values
from leapahead.results import Result

OUTPUT = "Output options"


@click.command(
    cls=Command,
    examples=(
        'leapahead generate "def fibonacci(n):"',
        "leapahead generate -m model.gguf --chat 'Why is the sky blue?' -t 0.8 --seed 1",
        "leapahead generate -f old.py --prediction old.py -d prediction --compare",
        "git diff | leapahead generate - -d lookahead -W 7 -N 5 -G 7 --json",
    ),
)
@click.argument("prompt", required=False, callback=utf8_only)
@all_of(INPUT, MODEL, DRAFTER, ACCEPTANCE, DRAFTER_CACHE, TEXT, GRAMMAR)
@option("--json", "as_json", is_flag=True, group=OUTPUT, help="Print one JSON object with the text and all figures.")
@option(
    "--compare",
    "with_plain",
    is_flag=True,
    group=OUTPUT,
    help="Time plain decoding of the same prompt too, and compare the texts.",
)
@option(
    "--rounds",
    type=click.IntRange(min=1),
    default=ROUNDS,
    metavar="N",
    group=OUTPUT,
    help="Rounds that --compare measures.",
)
@option("-q", "--quiet", is_flag=True, group=OUTPUT, help="Print the text only, without any figures.")
@option(
    "--stream/--no-stream",
    "streamed",
    default=True,
    group=OUTPUT,
    help="Show the text while it is decoded or at its end.",
)
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
    """Complete PROMPT; `-` reads it from standard input.

    The text goes to standard output, on a terminal with drafted tokens in colour, and a line of figures to standard
    error. With --compare, the exit code is 1 if the text differs from that of plain decoding.
    """
    if not with_plain and click.get_current_context().get_parameter_source("rounds") is ParameterSource.COMMANDLINE:
        raise BadParameter("--rounds counts the rounds of --compare; give --compare too, or leave it out")
    given = to_complete(prompt_text(prompt, file), as_chat)
    options: Options = {**text_arguments(values), **grammar_argument(values)}
    if prediction is not None:
        options["prediction"] = prompt_text(None, prediction)
    check_prediction(options.get("prediction"), drafters.load(values["drafter"]))
    check_values(options)
    llm = open_llm(values)
    result = streamed_result(llm, given, options) if streamed and not as_json else _whole(llm, given, options, as_json)
    if not streamed and not as_json:
        screen.show_text(result.text)  # before a comparison, which may be interrupted
    if result.finish_reason == "length" and len(result.tokens) < options["max_new_tokens"]:
        info = llm.target.info
        full = f"the context of {info.context_length} tokens"
        if info.cache_tokens and info.cache_tokens < info.context_length:
            full = f"the KV cache of {info.cache_tokens} tokens"
        screen.say(f"the text ends after {counted(len(result.tokens), 'token')}, because {full} is full")
    comparison = _compare(llm, given, result, rounds, options) if with_plain else None
    if as_json:
        found = screen.as_dict(llm, result)
        click.echo(json.dumps(found if comparison is None else {**found, "compare": comparison.as_dict()}))
    elif comparison is not None and not quiet:
        _show(llm, result, comparison, options)
    elif not quiet:
        screen.say(screen.figures(result))
    if comparison is not None and not comparison.equal:
        raise Exit(DIFFERENT)


@click.command(
    cls=Command,
    examples=("leapahead demo", "leapahead demo -m model.gguf -d lookahead", "leapahead demo --draft bundled"),
)
@all_of(MODEL, DRAFTER)
@option("-n", "--max-new-tokens", type=int, default=128, metavar="N", help="Greatest length of the text in tokens.")
@option("--rounds", type=click.IntRange(min=1), default=ROUNDS, metavar="N", help="Rounds that are measured.")
def demo(max_new_tokens: int, rounds: int, **values: Any) -> None:
    """Complete a piece of Python code, and compare text and speed with plain decoding.

    Drafted tokens are shown in colour. The exit code is 1 if the text differs from that of plain decoding.
    """
    options: Options = {"max_new_tokens": max_new_tokens}
    check_values(options)
    llm = open_llm(values)
    click.echo(DEMO, nl=False)
    result = streamed_result(llm, DEMO, options)
    comparison = _compare(llm, DEMO, result, rounds, options)
    click.echo()
    _show(llm, result, comparison, options)
    if not comparison.equal:
        raise Exit(DIFFERENT)


def open_llm(values: dict[str, Any], max_batch: int = 1, prefill_chunk: int | None = None, saves: bool = True) -> LLM:
    """The model and drafter of a command's values, closed when the command ends; before, its drafter cache is saved."""
    drafter = values.pop("drafter")
    drafter_options = drafter_arguments(values, [drafter])
    registry.check_options(drafters.load(drafter), drafter_options)  # or others would be arguments of `LLM`
    model = model_arguments(values)
    with screen.loading(model["model"]):
        llm = LLM(
            **model,
            drafter=drafter,
            max_batch=max_batch,
            prefill_chunk=prefill_chunk,
            drafter_cache=drafter_cache_argument(values),
            acceptance=values.pop("acceptance", EXACT),
            **drafter_options,
        )
    click.get_current_context().call_on_close(llm.close)
    if llm.target.info.reference:
        screen.say(llm.target.info.reference)
    if llm.drafter.plans and llm.engine.latency.store.read(1) is None:
        with screen.progress("measuring this machine once"):
            llm.engine.prepare(llm.drafter)
    return save_at_exit(llm) if saves else llm


def streamed_result(llm: LLM, prompt: Any, options: Options) -> Result:
    """Decodes and shows a text; an interrupt shows the figures of what was decoded."""
    answer = screen.Answer()
    try:
        screen.show_stream(llm, prompt, options, answer)
    except KeyboardInterrupt:
        screen.say(answer.figures())
        raise
    assert answer.result is not None
    return answer.result


def _whole(llm: LLM, prompt: Any, options: Options, as_json: bool) -> Result:
    """Decodes a text before anything of it is shown; an interrupt shows what there is, unless JSON is wanted."""
    answer = screen.Answer()
    try:
        with screen.progress("decoding"), closing(llm.stream(prompt, **options)) as pieces:
            for piece in pieces:
                answer.add(piece)
    except KeyboardInterrupt:
        if not as_json:
            if answer.text:
                screen.show_text(answer.text)
            screen.say(answer.figures())
        raise
    assert answer.result is not None
    return answer.result


def _compare(llm: LLM, prompt: Any, result: Result, rounds: int, options: OneText) -> Comparison:
    what = "measuring against plain decoding"
    with screen.progress(what) as bar:
        return compare(
            llm, prompt, result, rounds=rounds, progress=lambda done, total: bar(what, done, total), **options
        )


def _show(llm: LLM, result: Result, comparison: Comparison, options: OneText) -> None:
    click.echo(screen.figures(result, comparison))
    same_text = llm.drafter.same_text or not options.get("temperature")
    click.echo(screen.verdict(comparison, result.lossy, same_text))
