"""The figures of `leapahead lab`, a command each: it measures, prints a small table, and writes the data and a plot."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from rich import box
from rich.console import Console
from rich.table import Table

from leapahead.bench import tasks
from leapahead.cli import screen
from leapahead.cli.options import DRAFTER_OPTIONS, MODEL, Option, all_of, drafter_arguments, model_arguments
from leapahead.core.errors import BadParameter, LeapaheadError
from leapahead.core.sampling import SamplingParams
from leapahead.models import loading
from leapahead.models.loading import LLAMA_CPP_OPTIONS
from research import curves, plots
from research.curves.calibration import ENOUGH as JUDGED
from research.curves.growth import SIZES
from research.curves.match import ENOUGH
from research.curves.run import Data
from research.curves.sequoia import LOOKED
from research.curves.sequoia import sequoia as draft_tree
from research.plots import how

Number = TypeVar("Number", int, float)
KINDS = (".json", ".png", ".svg")


def _out(name: str) -> Option:
    return click.option(
        "--out",
        type=click.Path(path_type=Path),
        default=name,
        show_default=True,
        metavar="PREFIX",
        help="Writes PREFIX.json, PREFIX.png and PREFIX.svg.",
    )


DATA: tuple[Option, ...] = (
    click.option(
        "--data",
        type=click.Path(path_type=Path),
        metavar="FOLDER",
        help=f"Prompts: {', '.join((*tasks.FILES, *tasks.CONVERSATIONS))}.  [default: a small set of our own]",
    ),
    click.option("--task", "names", multiple=True, metavar="T", help="May be repeated.  [default: all]"),
    click.option("--limit", type=click.IntRange(min=1), metavar="K", help="Only K prompts of each task."),
)
DICE: tuple[Option, ...] = (
    click.option("-t", "--temperature", type=float, default=0.0, show_default=True, help="0 is greedy."),
    click.option("--seed", type=int, default=0, show_default=True, help="Of the dice, with a temperature."),
)


def _length(default: int) -> Option:
    return click.option(
        "--max-new-tokens", type=click.IntRange(min=1), default=default, show_default=True, help="Limit of each text."
    )


@click.command()
@all_of(MODEL, DATA)
@click.option("--contexts", default="128,512", show_default=True, metavar="N,...", help="Lengths of context.")
@click.option("--sizes", default="1,2,4,8,16,32,64,128", show_default=True, metavar="N,...", help="Tokens a forward.")
@click.option("--rounds", type=click.IntRange(min=1), default=15, show_default=True, help="Each measures every size.")
@_out("cost")
def cost(contexts: str, sizes: str, rounds: int, out: Path, **values: Any) -> None:
    """Draw the cost curve: the time of a forward over n tokens, against that of one.

    The prompts, one behind the other, fill the context. Rounds are interleaved; the median is drawn, with quartiles.
    """
    prefix = _prefix(out)
    context_lengths, chain_lengths = _numbers("contexts", contexts, int), _numbers("sizes", sizes, int)
    loaded, prompts, _ = _loaded(values)
    text = [token for prompt in prompts for token in prompt]
    with screen.progress("cost") as bar:
        found = curves.cost(loaded.target, text, context_lengths, chain_lengths, rounds, progress=bar)
    rows = [
        (row["context"], row["nodes"], *_spread(row["milliseconds"], ".2f"), *_spread(row["relative"], ".2f"))
        for row in found["rows"]
    ]
    _show(("context", "n", "T(n) ms", "quartiles", "T(n)/T(1)", "quartiles"), rows)
    _write(found, prefix)


@click.command()
@all_of(MODEL, DATA)
@click.option("--windows", default="1,2,4,8,16,32", show_default=True, metavar="W,...", help="Of W = G.")
@click.option("--ngrams", default="3,5,7", show_default=True, metavar="N,...", help="Of N, a curve each.")
@all_of(DICE)
@_length(128)
@_out("compression")
def compression(windows: str, ngrams: str, max_new_tokens: int, out: Path, **values: Any) -> None:
    """Draw lookahead's step compression S against log2(W = G) and fit the paper's formula.

    S = (f - 1 + E(alpha, N-1, W)) / f (2402.02057, equations 5 and 7). A text of few distinct 4-grams repeats
    itself, and flatters S.
    """
    prefix = _prefix(out)
    dice = _dice(values)
    sizes, lengths = _numbers("windows", windows, int), _numbers("ngrams", ngrams, int)
    loaded, prompts, named = _loaded(values, max_new_tokens)
    with screen.progress("compression") as bar:
        found = curves.compression(
            loaded.target,
            prompts,
            lengths,
            sizes,
            max_new_tokens,
            loaded.eos_token_ids,
            **dice,
            progress=bar,
        )
    found["conditions"]["data"] = named
    _show(
        ("N", "W = G", "S", "nodes per step"),
        [
            (row["ngram"], row["window"], f"{row['step_compression']:.3f}", f"{row['nodes_per_step']:.1f}")
            for row in found["rows"]
        ],
    )
    for which, fitted in {"all": found["fit"], **found["fits"]}.items():
        if fitted is not None:
            name = "fitted to all" if which == "all" else f"to N = {which} alone"
            click.echo(f"{name}: alpha = {fitted['alpha']:.3f}, f = {fitted['f']:.3f}, rms error {fitted['rms']:.3f}")
    if found["note"]:
        click.echo(found["note"])
    click.echo(f"distinct 4-grams of the texts: {found['distinct_4']:.1%} of {found['tokens']} tokens")
    _write(found, prefix)


@click.command()
@all_of(MODEL, DATA)
@click.option("--block", type=int, default=16, show_default=True, help="Tokens that are iterated together.")
@click.option("-t", "--temperature", type=float, default=1.0, show_default=True, help="Of the second panel.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the dice and of the blocks' first tokens.")
@_length(128)
@_out("jacobi")
def jacobi(
    block: int,
    temperature: float,
    seed: int,
    max_new_tokens: int,
    out: Path,
    **values: Any,
) -> None:
    """Draw the convergence of Jacobi iteration: which tokens of a block are right after k iterations.

    Greedy, and with a temperature, where the dice of a position stay the same (2305.10427, algorithm 1).
    """
    prefix = _prefix(out)
    loaded, prompts, named = _loaded(values, max_new_tokens)
    temperatures = tuple(dict.fromkeys((0.0, temperature)))
    with screen.progress("jacobi") as bar:
        found = curves.jacobi(
            loaded.target, prompts, block, temperatures, max_new_tokens, loaded.eos_token_ids, seed, progress=bar
        )
    found["conditions"]["data"] = named
    shown = [k for k in (0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32) if k <= block]
    columns = [curve[name] for curve in found["curves"] for name in ("mean", "settled")]
    names = [f"{how(curve['temperature'])}: {name}" for curve in found["curves"] for name in ("right", "to keep")]
    _show(("iterations", *names), [(k, *(f"{column[k]:.1%}" for column in columns)) for k in shown])
    for curve in found["curves"]:
        taken = curve["iterations"]
        click.echo(
            f"{how(curve['temperature'])}: {curve['blocks']} blocks of {block}, right after {taken['mean']:.2f} "
            f"iterations (at most {taken['greatest']}), {curve['tokens_per_iteration']:.2f} tokens per iteration"
        )
    _write(found, prefix)


@click.command()
@all_of(MODEL, DATA, DRAFTER_OPTIONS)
@all_of(DICE)
@_length(256)
@_out("pool")
def pool(max_new_tokens: int, out: Path, **values: Any) -> None:
    """Draw size and hit rate of lookahead's n-gram pool as generation proceeds.

    A hit is a step in which the pool has a guess; it is worth something where the guess is accepted.
    """
    prefix = _prefix(out)
    options, dice = drafter_arguments(values, ["lookahead"]), _dice(values)
    loaded, prompts, named = _loaded(values, max_new_tokens)
    with screen.progress("pool") as bar:
        found = curves.pool(loaded.target, prompts, options, max_new_tokens, loaded.eos_token_ids, **dice, progress=bar)
    found["conditions"]["data"] = named
    _show(
        ("new tokens", "texts", "keys", "n-grams", "hit rate", "accepted"),
        [
            (
                row["tokens"],
                row["prompts"],
                f"{row['keys']:.0f}",
                f"{row['ngrams']:.0f}",
                *("-" if row[name] is None else f"{row[name]:.1%}" for name in ("hit", "accepted")),
            )
            for row in found["at"]
        ],
    )
    _write(found, prefix)


@click.command()
@all_of(MODEL, DATA)
@click.option("--max-ngram", type=int, default=8, show_default=True, help="The longest match that is told apart.")
@click.option("--min-ngram", type=int, default=1, show_default=True, help="The shortest match that drafts.")
@click.option("--num-tokens", type=int, default=10, show_default=True, help="Length of a draft.")
@all_of(DICE)
@_length(128)
@_out("match")
def match(
    max_ngram: int,
    min_ngram: int,
    num_tokens: int,
    max_new_tokens: int,
    out: Path,
    **values: Any,
) -> None:
    """Draw how many tokens of prompt lookup's drafts are accepted, by the length of the match."""
    prefix, dice = _prefix(out), _dice(values)
    loaded, prompts, named = _loaded(values, max_new_tokens)
    with screen.progress("match") as bar:
        found = curves.match(
            loaded.target,
            prompts,
            max_ngram,
            min_ngram,
            num_tokens,
            max_new_tokens,
            loaded.eos_token_ids,
            **dice,
            progress=bar,
        )
    found["conditions"]["data"] = named
    _show(
        ("match", "drafts", "accepted", "95 %", "first right", "all right"),
        [
            (
                f">={row['match']}" if row["match"] == max_ngram else row["match"],
                row["drafts"],
                f"{row['accepted']['mean']:.2f}",
                "-" if row["drafts"] < ENOUGH else f"{row['accepted']['low']:.2f} to {row['accepted']['high']:.2f}",
                f"{row['first_right']:.1%}",
                f"{row['all_right']:.1%}",
            )
            for row in found["rows"]
        ],
    )
    click.echo(f"{found['without_match']} of {found['steps']} steps had no match")
    _write(found, prefix)


@click.command()
@click.option("-a", "--alpha", default="0.3,0.5,0.7,0.8,0.9", show_default=True, metavar="A,...", help="Acceptance.")
@click.option("-k", "--length", type=int, default=5, show_default=True, help="K, drafted tokens of a step.")
@click.option("-c", "--cost", type=float, default=0.05, show_default=True, help="Of a drafted token, in target steps.")
@click.option("--longest", type=int, default=16, show_default=True, help="K where the curves end.")
@_out("expected")
def expected(alpha: str, length: int, cost: float, longest: int, out: Path) -> None:
    """Compute the tokens and the speed-up to be expected of one draft of K tokens. Needs no model.

    Tokens of a step are (1 - alpha^(K+1)) / (1 - alpha), the speed-up is that over 1 + c K (Leviathan et al.,
    2211.17192, equation 1 and theorem 3.8). alpha is the probability that a drafted token is right if all before are.
    """
    prefix = _prefix(out)
    found = curves.expected(_numbers("alpha", alpha, float), length, cost, longest)
    _show(
        ("alpha", f"tokens at K = {length}", f"speed-up at K = {length}", "best K", "speed-up there"),
        [
            (
                f"{row['alpha']:g}",
                f"{row['tokens']:.3f}",
                f"{row['speedup']:.3f}",
                "any more" if row["best_length"] is None else row["best_length"],
                "-" if row["best_speedup"] is None else f"{row['best_speedup']:.3f}",
            )
            for row in found["rows"]
        ],
    )
    _write(found, prefix)


@click.command()
@all_of(MODEL, DATA)
@click.option("-d", "--drafter", default="auto", show_default=True, metavar="D", help="One that says what it expects.")
@all_of(DRAFTER_OPTIONS)
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Prompts decoded together.")
@all_of(DICE)
@_length(128)
@_out("calibration")
def calibration(drafter: str, batch: int, max_new_tokens: int, out: Path, **values: Any) -> None:
    """Draw how often drafted nodes are accepted against how often the drafter thought they would be.

    Once for whole paths from the root, once for nodes whose parent was accepted.
    """
    prefix = _prefix(out)
    options, dice = drafter_arguments(values, [drafter]), _dice(values)
    loaded, prompts, named = _loaded(values, max_new_tokens)
    with screen.progress("calibration") as bar:
        found = curves.calibration(
            loaded.target,
            prompts,
            drafter,
            options,
            max_new_tokens,
            loaded.eos_token_ids,
            **dice,
            batch=batch,
            progress=bar,
        )
    found["conditions"]["data"] = named
    for kind in ("path", "conditional"):
        click.echo(f"{kind}: {found[kind]['nodes']} nodes")
        _show(
            ("predicted", "nodes", "mean", "observed", "95 %"),
            [
                (
                    f"{row['low']:.1f} to {row['high']:.1f}",
                    row["nodes"],
                    f"{row['predicted']:.3f}",
                    f"{row['observed']:.3f}",
                    f"{row['interval']['low']:.3f} to {row['interval']['high']:.3f}",
                )
                for row in found[kind]["rows"]
            ],
        )
        if (off := found[kind]["deviation"]) is not None:
            click.echo(f"greatest deviation of a bin with {JUDGED} nodes or more: {off:.3f}")
    _write(found, prefix)


@click.command()
@all_of(MODEL, DATA)
@click.option("--sizes", default=",".join(map(str, SIZES)), show_default=True, metavar="N,...", help="Tokens.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Each indexes every size.")
@click.option("--prefill", type=float, metavar="S", help="Seconds that a target takes for a token of a prompt.")
@_out("growth")
def growth(sizes: str, rounds: int, prefill: float | None, out: Path, **values: Any) -> None:
    """Draw what an index of the text costs as it grows.

    Without --data the text is random and no model is loaded.
    """
    prefix, lengths = _prefix(out), _numbers("sizes", sizes, int)
    text, named = None, ""
    if values["data"] is not None:
        _, prompts, named = _loaded(values)
        text = [token for prompt in prompts for token in prompt]
    with screen.progress("growth") as bar:
        found = curves.growth(text, lengths, rounds, prefill, progress=bar)
    found["text"] = named or found["text"]
    _show(
        ("index", "tokens", "seconds", "µs/token", "MB", "of prefill"),
        [
            (
                row["index"],
                row["tokens"],
                f"{row['seconds']:.3f}",
                row["microseconds_per_token"],
                f"{row['bytes'] / 1e6:.1f}",
                "-" if row["of_prefill"] is None else f"{row['of_prefill']:.2%}",
            )
            for row in found["rows"]
        ],
    )
    for row in found["linear"]:
        times = f"{row['ratio']:.2f} times what it takes at {row['from']:,}"
        click.echo(f"{row['index']}: a token at {row['to']:,} takes {times}")
    _write(found, prefix)


@click.command()
@all_of(MODEL)
@click.option(
    "--draft", metavar="M", help="The model that guesses, of the same tokens as the other.  [default: the bundled one]"
)
@all_of(DATA)
@click.option("--nodes", type=click.IntRange(min=1), default=64, show_default=True, help="Of the largest tree.")
@click.option("--depth", type=click.IntRange(min=0), default=10, show_default=True, help="Of the deepest tree.")
@click.option("--looked", type=int, default=LOOKED, show_default=True, help="Sampling: tokens that the dice may take.")
@all_of(DICE)
@_length(128)
@_out("sequoia")
def sequoia(
    draft: str | None, nodes: int, depth: int, looked: int, max_new_tokens: int, out: Path, **values: Any
) -> None:
    """Draw the tree that a draft model should draft, by how often its first, second, ... guess is right.

    Of all sizes and depths, that of the least time for a token on this machine (Sequoia, 2402.12374, with the choice of
    this library: a token of the draft is accepted where it is the target's own).
    """
    prefix, dice = _prefix(out), _dice(values)
    other = _other_model(draft, values)
    loaded, prompts, named = _loaded(values, max_new_tokens)
    with screen.loading(draft):
        guessing = loading.load(**other)
    with screen.progress("sequoia") as bar:
        found = draft_tree(
            loaded.target,
            guessing.target,
            prompts,
            nodes,
            depth,
            max_new_tokens,
            loaded.eos_token_ids,
            **dice,
            looked=looked,
            tokenizers=(loaded.tokenizer, guessing.tokenizer),
            progress=bar,
        )
    found["conditions"]["data"] = named
    shares = [*enumerate(found["ranks"]), ("none", max(1 - sum(found["ranks"]), 0.0))]
    _show(("rank", "accepted"), [(rank, f"{share:.1%}") for rank, share in shares])
    depths = list(found["rows"][0]["best"])
    _show(
        ("nodes", *(f"depth {depth}" for depth in depths), "any depth"),
        [
            (row["nodes"], *(f"{row['best'][depth]:.3f}" for depth in depths), f"{row['greedy']:.3f}")
            for row in found["rows"]
            if row["nodes"] & (row["nodes"] - 1) == 0
        ],
    )
    for name, tree in (("the tree that pays", found["tree"]), ("the likeliest nodes at any depth", found["greedy"])):
        click.echo(
            f"{name}: {tree['nodes']} nodes, {tree['depth']} forwards of the draft, {tree['expected']:.2f} tokens a "
            f"step, {1e3 * tree['seconds_per_token']:.2f} ms a token, {tree['speedup']:.2f} times plain decoding"
        )
    if found["tree"]["depth"] == depth or found["tree"]["nodes"] == nodes:
        click.echo("this is as many nodes, or as deep, as --nodes and --depth allow: more may pay more")
    _write(found, prefix)


COMMANDS: list[click.Command] = [cost, compression, jacobi, pool, match, expected, calibration, growth, sequoia]


# --------------------------------------------------------------------------------------------------------- parts


def _loaded(values: dict[str, Any], room: int = 0) -> tuple[loading.Loaded, list[list[int]], str]:
    """The model, the encoded prompts that fit with `room` new tokens, and what they are, in words.

    The prompts are read first: a model loads slowly.
    """
    data, names, limit = (values.pop(name) for name in ("data", "names", "limit"))
    if data is not None and not data.is_dir():
        raise BadParameter(f"there is no folder {str(data)!r} of prompts")
    sets = tasks.read(data, names, limit)
    model = model_arguments(values)
    with screen.loading(model["model"]):
        loaded = loading.load(**model)
    fitting = {task.name: tasks.encoded(task, loaded, room) for task in sets}
    for task in sets:
        if room and (left := len(task.prompts) - len(fitting[task.name])):
            screen.say(
                f"{task.name}: {left} of {len(task.prompts)} prompts left out: with {room} new tokens they do not fit "
                f"the context of {loaded.target.context_length}"
            )
    return loaded, [tokens for each in fitting.values() for tokens in each], tasks.in_words(fitting)


def _other_model(name: str | None, values: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `loading.load` for a second model, loaded as the first one is; what is not for its kind is left."""
    found = model_arguments(dict(values))
    if not str(name).lower().endswith(".gguf"):
        found = {key: value for key, value in found.items() if key not in LLAMA_CPP_OPTIONS}
    return {**found, "model": name}


def _dice(values: dict[str, Any]) -> dict[str, Any]:
    """Temperature and seed; what cannot be is refused before a model is loaded."""
    found = {name: values.pop(name) for name in ("temperature", "seed")}
    SamplingParams(**found)
    return found


def _numbers(name: str, text: str, kind: Callable[[str], Number]) -> list[Number]:
    """Of a list with commas."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise BadParameter(f"--{name} {text} is not possible: it must be numbers with commas between them") from None


def _prefix(out: Path) -> Path:
    """Where to write, looked at before anything is measured; a name with the ending of one of the files will do."""
    prefix = out.with_suffix("") if out.suffix in KINDS else out
    if not prefix.name:
        raise BadParameter(f"--out {out} is not possible: it must end in the beginning of a file name")
    if not prefix.parent.is_dir():
        raise BadParameter(f"--out {out} cannot be written: there is no folder {prefix.parent}")
    for file in _files(prefix):
        if file.is_dir() or not os.access(file if file.exists() else prefix.parent, os.W_OK):
            raise BadParameter(f"--out {out} cannot be written: no permission, or {file} is a folder")
    plots.require()
    return prefix


def _files(prefix: Path) -> list[Path]:
    return [prefix.with_name(prefix.name + kind) for kind in KINDS]


def _write(found: Data, prefix: Path) -> None:
    """The data first: they are what took the time."""
    files = _files(prefix)
    try:
        files[0].write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        plots.save(found, prefix)
    except OSError as error:
        raise LeapaheadError(f"{error.filename or prefix} cannot be written: {error.strerror or error}") from None
    click.echo(f"written: {', '.join(map(str, files))}")


def _show(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*map(str, row))
    Console(highlight=False).print(table)


def _spread(value: dict[str, float], form: str) -> tuple[str, str]:
    return f"{value['median']:{form}}", f"{value['low']:{form}} to {value['high']:{form}}"
