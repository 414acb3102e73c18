"""`leapahead tune`: measures the latency profile of a target on this machine, and which drafts pay with it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import click

from leapahead import token_table
from leapahead import tune as tuning
from leapahead.bench import plots, tasks
from leapahead.bench.conditions import Data
from leapahead.cli import screen, tune_forms
from leapahead.cli.command import Command, option
from leapahead.cli.options import MODEL, all_of, batch_option, data_option, loading_arguments, model_arguments
from leapahead.cli.screen import Console
from leapahead.cli.typed import Finite, HomePath
from leapahead.core.errors import BadParameter, LeapaheadError, counted
from leapahead.core.storage import replaceable
from leapahead.drafters.token_table import MOST_K, TokenTable, stored
from leapahead.models.base import CHAIN, TargetInfo
from leapahead.models.loading import BUNDLED, Loaded

KINDS = (".png", ".svg")
PAYS = {None: "never drafted", True: "yes", False: "no"}
WIDTH = 8  # characters of the longest bar


@click.command(
    cls=Command,
    examples=(
        "leapahead tune",
        "leapahead tune -m model.gguf --threads 8 --seconds 20 --plot latency.png",
        "leapahead tune model-q8_0.gguf model-q4_0.gguf 'model-q8_0.gguf(engine=openvino)' --prompts mine.jsonl",
        "leapahead tune -m Qwen/Qwen3-0.6B --table",
    ),
)
@click.argument("forms", nargs=-1, metavar="[MODEL]...")
@all_of(MODEL)
@batch_option("Number of texts decoded together.", default=1)
@data_option("Prompts on which the drafter auto is tried: a file of your own, or a folder, see `leapahead bench`.")
@option("--limit", type=click.IntRange(min=1), default=2, metavar="K", help="Number of prompts of each task.")
@option(
    "-n",
    "--max-new-tokens",
    type=click.IntRange(min=1),
    default=64,
    metavar="N",
    help="Greatest length of each text in tokens.",
)
@option(
    "--seconds",
    type=Finite(min=0.1),
    default=5.0,
    metavar="SECONDS",
    help="Time for the measurement of the latency profile.",
)
@option(
    "--text-seconds",
    type=Finite(min=0),
    default=10.0,
    metavar="SECONDS",
    help="Time for trying auto on texts; 0 decodes none.",
)
@option(
    "--table",
    is_flag=True,
    help="First compute and store the token table of the model, from which auto then drafts: the likeliest next tokens "
    "after each token of its vocabulary.",
)
@option(
    "--table-k",
    type=click.IntRange(min=1, max=MOST_K),
    metavar="K",
    show_default=str(token_table.K),
    help="Number of tokens that the token table keeps after each one; 8 are enough for greedy decoding.",
)
@option("--plot", type=HomePath(path_type=Path), metavar="FILE", help="Draw the latency profile: a .png or .svg file.")
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def tune(
    forms: tuple[str, ...],
    batch: int,
    data: Path | None,
    limit: int,
    max_new_tokens: int,
    seconds: float,
    text_seconds: float,
    table: bool,
    table_k: int | None,
    plot: Path | None,
    as_json: bool,
    **values: Any,
) -> None:
    """Measure the latency profile of a model on this machine, and show which drafts pay.

    The profile is stored, and the drafter auto plans with it. Without this command, auto measures one within a second
    or two before its first text, and corrects it while it decodes. With --table, the token table of the model is
    computed as well, once per model.

    Given several forms of one model, it compares them: T(n), plain decoding, decoding with auto, and which is fastest.
    They are GGUF files of different types, or a model with options in parentheses, as of `bench`, such as its engine.
    """
    if table_k is not None and not table:
        raise BadParameter(f"--table-k {table_k} needs --table")
    if forms:
        _compare(forms, values, data, limit, batch, max_new_tokens, seconds, text_seconds, as_json, table, plot)
        return
    if plot is not None:
        _check(plot)
    sets = tasks.read(data, (), limit)  # also where none is decoded: what is no file is refused
    model, loaded = values["model"], screen.load(model_arguments(values), batch)
    prompts = tasks.fitting(sets, loaded, max_new_tokens) if text_seconds else []
    with screen.progress("tune") as bar:
        target = loaded.target
        seconds_of_table = _make_table(loaded, table_k or token_table.K, bar) if table else None
        found, profiles = tuning.tune(target, batch, seconds, progress=bar)
        largest = max(row["nodes"] for row in found["rows"])
        found["drafters"] = tuning.served(target)
        found["lookahead"] = tuning.lookahead(profiles.profile(1), largest) if batch == 1 and largest > 1 else []
        found["table"] = _table_data(stored(target), seconds_of_table)
        found["compare"] = comparison(model, found["conditions"], target.info)
        found["auto"] = None
        if prompts:
            found["auto"] = tuning.practise(
                target, profiles, prompts, batch, max_new_tokens, loaded.eos_token_ids, text_seconds, progress=bar
            )
    try:
        if as_json:
            click.echo(json.dumps(found))
        else:
            _show(found)
    finally:  # also where standard output cannot be written
        if plot is not None:
            _draw(found, plot)
    if plot is not None and not as_json:
        click.echo(f"written: {plot}")


def _compare(
    given: tuple[str, ...],
    values: dict[str, Any],
    data: Path | None,
    limit: int,
    batch: int,
    max_new_tokens: int,
    seconds: float,
    text_seconds: float,
    as_json: bool,
    table: bool,
    plot: Path | None,
) -> None:
    """Compares several forms of a model."""
    model, common = values["model"], loading_arguments(values)
    unused = {"--model": model, "--table": table, "--plot": plot, "--text-seconds 0": not text_seconds}
    if wrong := [name for name, value in unused.items() if value]:
        raise BadParameter(f"{wrong[0]} is not possible where models are compared; leave it out")
    sets = tasks.read(data, (), limit)
    found = tune_forms.compare(
        tune_forms.forms(given, common), common, sets, batch, max_new_tokens, seconds, text_seconds
    )
    if as_json:
        click.echo(json.dumps(found))
    else:
        tune_forms.show(found)


def _make_table(loaded: Loaded, k: int, bar: screen.Bar) -> float:
    """Computes and stores the token table; returns the seconds that it took. Says before how long it will take."""
    target, began = loaded.target, perf_counter()
    times: list[tuple[int, float]] = []

    def tell(what: str, done: int, total: int) -> None:
        bar(what, done, total)
        times.append((done, perf_counter()))
        if len(times) == 2:  # the first forward is slower than those that follow
            (first, then), (second, now) = times
            seconds = (total - second) * (now - then) / (second - first)
            size = f"{token_table.size(total, k) / 1e6:.1f} MB"
            bar.say(
                f"token table: {total} tokens, {size}, about {_duration(seconds)}; nothing is stored before the end"
            )

    token_table.make(target, loaded.tokenizer, k, tell)
    return perf_counter() - began


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"


def _table_data(table: TokenTable | None, seconds: float | None) -> Data | None:
    """The stored token table of the target; `seconds` is None where it was not computed now."""
    if table is None:
        return None
    return {
        "tokens": len(table.tokens),
        "k": table.k,
        "bytes": table.nbytes,
        "context": list(table.context),
        "seconds": None if seconds is None else round(seconds, 3),
        "stored": str(table.path),
    }


def _check(plot: Path) -> None:
    """Refuses, before anything is measured, a plot that cannot be drawn or written."""
    if plot.suffix not in KINDS:
        raise BadParameter(f"--plot {plot} is not possible: the file must end in {' or '.join(KINDS)}")
    screen.check_place("the plot", plot)
    replaceable(plot)
    plots.require()


def _draw(found: Data, plot: Path) -> None:
    try:
        plots.save(plots.latency, tuning.figure(found), plot.with_suffix(""), kinds=(plot.suffix[1:],))
    except OSError as error:
        raise LeapaheadError(f"{plot} cannot be written: {error.strerror or error}") from None


# ---------------------------------------------------------------------------------------------------------- tables


def _show(found: Data) -> None:
    sequences = found["sequences"]
    batch = "" if sequences == 1 else f", {sequences} sequences a step"
    click.echo(f"{found['conditions']['target']}{batch}, {found['processor']}")
    _curve(found)
    _drafters(found["drafters"])
    _table_line(found["table"])
    if found["auto"] is not None:
        show_auto(found["auto"])
    if found["lookahead"]:
        _lookahead(found["lookahead"])
    if found["stored"] is not None:
        click.echo(f"The profile is stored in {found['stored']}.")
    elif found["busy"] or found["few"]:
        click.echo("The profile is not stored, because its measurement cannot be relied upon.")
    else:
        click.echo(
            "The profile could not be stored, so every process measures its own; set LEAPAHEAD_CACHE to a folder that "
            "is writable."
        )
    if found["compare"] is not None:
        click.echo(f"OpenVINO may be faster here, if it can read this model. To compare them:\n  {found['compare']}")


def comparison(model: str | None, conditions: Data, info: TargetInfo) -> str | None:
    """The command that compares a model with itself under OpenVINO, which reads decoders with plain attention only."""
    with_options = {"transformers": "engine=openvino, weights=bf16", "llama.cpp": "engine=openvino"}
    options = with_options.get(conditions.get("backend", ""))  # a model on several devices has none
    on_cpu = conditions["gpu"] is None and conditions.get("device", "cpu") == "cpu"
    is_plain = info.decoder is None and not info.replays and CHAIN in info.capabilities
    if model in (None, BUNDLED) or options is None or not (is_plain and on_cpu):
        return None
    return f"leapahead tune {shlex.quote(str(model))} {shlex.quote(f'{model}({options})')}"


def _curve(found: Data) -> None:
    rows = found["rows"]
    most = max(row["cost"] for row in rows)
    table = screen.new_table(("n", "ms", "quartiles", "samples", "T(n)/T(1)", "marginal", "pays from p"), left=("",))
    for row in rows:
        spread = row["milliseconds"]
        table.add_row(
            str(row["nodes"]),
            f"{spread['median']:.4g}",
            f"{spread['low']:.4g}-{spread['high']:.4g}",
            str(row["times"]),
            f"{row['cost']:.2f}",
            screen.number(row["last_node"], ".3f"),
            "never" if row["needs"] is not None and row["needs"] >= 1 else screen.number(row["needs"], ".2f"),
            "█" * max(1, round(WIDTH * row["cost"] / most)),
        )
    Console().print(table)
    click.echo(
        "marginal: cost of one more node at that size, in forwards of plain decoding\n"
        "pays from p: a draft of this size pays if its nodes are accepted with at least that probability, on average\n"
    )
    if found["busy"]:
        click.echo(
            "The machine was busy: the times vary widely, and what follows is not reliable. Measure again when it is "
            "idle."
        )
    elif found["few"]:
        click.echo("Most sizes were measured only once or twice; give more time with --seconds.")
    many, largest = found["free"], rows[-1]["nodes"] - found["sequences"]
    if not largest:
        click.echo(
            "Only a plain step was measured: the model is too slow for the time given, or it cannot verify drafts."
        )
    elif many:
        nodes = f"{many} drafted node{'' if many == 1 else 's'}"
        least = "at least " * (many == largest)
        click.echo(f"A step with {least}{nodes} takes at most {tuning.FREE:g} times as long as a plain step.")
    else:
        click.echo(f"A single drafted node makes a step more than {tuning.FREE:g} times as long as a plain step.")


def _drafters(rows: Sequence[Data]) -> None:
    able = [row["name"] for row in rows if row["refused"] is None]
    click.echo(f"Drafters that can draft for this model: {', '.join(able)}.")
    for row in rows:
        if row["refused"] is not None:
            click.echo(f"{row['name']}: refused: {row['refused']}")


def _table_line(table: Data | None) -> None:
    if table is None:
        click.echo("No token table is stored for this model; --table computes one, from which auto then drafts.")
        return
    took = "" if table["seconds"] is None else f", computed in {_duration(table['seconds'])}"
    click.echo(
        f"Token table: the {table['k']} likeliest tokens after each of {table['tokens']}, {table['bytes'] / 1e6:.1f} MB"
        f"{took}, stored in {table['stored']}."
    )


def show_auto(auto: Data) -> None:
    """Prints what `tuning.practise` has measured."""
    if not auto["steps"]:
        click.echo("auto: the time was too short for a text; give more with --text-seconds.")
        return
    click.echo(
        f"\nauto on {counted(auto['texts'], 'text')}, greedy: {auto['nodes_per_step']:.1f} drafted nodes a step, "
        f"{auto['plain_steps'] / auto['steps']:.0%} of its {counted(auto['steps'], 'step')} without a draft, "
        f"acceptance length {auto['acceptance_length']:.2f}"
    )
    speeds, expected = auto["tokens_per_second"], auto["expected"]
    if speeds["plain"]:
        click.echo(
            f"{speeds['auto']:.1f} tokens/s, plain decoding of the same texts {speeds['plain']:.1f}: "
            f"{speeds['auto'] / speeds['plain']:.2f} times as fast"
        )
        if any(speeds[which] * tuning.BUSY < expected[which] for which in ("auto", "plain")):
            click.echo(
                "The machine was busy while these texts were decoded. With every forward at the time above, it would "
                f"have been {expected['auto']:.1f} tokens/s, plain decoding {expected['plain']:.1f}: "
                f"{expected['auto'] / expected['plain']:.2f} times as fast"
            )
    if auto["tokens"] < tuning.FEW_TOKENS:
        click.echo(tune_forms.UNCERTAIN)
    table = screen.new_table(("first correct", "drafted", "accepted", "cost", "pays"), head=("source",))
    for row in auto["sources"]:
        table.add_row(
            str(row["name"]),
            screen.number(row["first"], ".1%"),
            str(row["drafted"]),
            str(row["accepted"]) if row["drafted"] else "-",
            screen.number(row["price"], ".1f"),
            PAYS[row["pays"]],
        )
    Console().print(table)
    click.echo(
        "first correct: share of steps in which the source's likeliest candidate was the target's choice, drafted or "
        "not; cost: number of tokens that plain decoding commits in the time that the source's nodes took"
    )


def _lookahead(rows: Sequence[Data]) -> None:
    click.echo(
        f"\nlookahead: S is computed by equation 7 of 2402.02057 with α = {tuning.ALPHA}, f = {tuning.F}; only the "
        "cost is measured:"
    )
    table = screen.new_table(("(W, N, G)", "n", "T(n)/T(1)", "expected S", "expected speed-up"))
    for row in rows:
        table.add_row(
            f"({row['window']}, {row['ngram']}, {row['guesses']})",
            str(row["nodes"]),
            screen.number(row["cost"], ".2f"),
            f"{row['compression']:.2f}",
            f"{row['speedup']:.2f}" if row["speedup"] is not None else f"< {row['at_most']:.2f}",
            style="bold" if row["best"] else None,
        )
    Console().print(table)
    best = next((row for row in rows if row["best"]), None)
    if best is None and all(row["at_most"] < tuning.WORTH for row in rows):
        click.echo("No window of lookahead pays on this machine; use drafters without a window.")
    elif best is None:
        click.echo(
            "Whether a window pays is unknown, because forwards that large were not measured; give more --seconds."
        )
    else:
        options = f"-W {best['window']} -N {best['ngram']} -G {best['guesses']}"
        click.echo(f"The best window of lookahead on this machine: {options}.")
