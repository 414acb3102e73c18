"""The commands that measure and draw one curve each: a small table on stdout, the data as JSON, and a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from leapahead.bench.plots import sampling as sampling_name
from leapahead.cli import screen
from leapahead.cli.command import Command
from leapahead.cli.options import DRAFTER_OPTIONS, MODEL, all_of, drafter_arguments
from leapahead.core.errors import BadParameter
from leapahead.core.parameters import within
from research import curves
from research.command_parts import (
    DATA,
    SAMPLING,
    data_options,
    length_option,
    loaded_prompts,
    numbers,
    out_option,
    prefix_of,
    sampling_of,
    show,
    spread,
    write,
)
from research.curves.growth import SIZES
from research.curves.match import LEAST_DRAFTS


@click.command(cls=Command)
@all_of(MODEL, DATA)
@click.option("--contexts", default="128,512", show_default=True, metavar="N,...", help="Context lengths.")
@click.option("--sizes", default="1,2,4,8,16,32,64,128", show_default=True, metavar="N,...", help="Rows of a forward.")
@click.option(
    "--rounds", type=click.IntRange(min=1), default=15, show_default=True, help="Rounds; each measures every size."
)
@out_option("cost")
def cost(contexts: str, sizes: str, rounds: int, out: Path, **values: Any) -> None:
    """Draw the latency profile: the time of a forward over n tokens relative to a forward over one.

    The concatenated prompts fill the context. Rounds are interleaved; the figure shows medians and quartiles.
    """
    prefix = prefix_of(out)
    context_lengths, chain_lengths = numbers("contexts", contexts, int), numbers("sizes", sizes, int)
    loaded, prompts, _ = loaded_prompts(values)
    text = [token for prompt in prompts for token in prompt]
    with screen.progress("cost") as bar:
        found = curves.cost(loaded.target, text, context_lengths, chain_lengths, rounds, progress=bar)
    rows = [
        (row["context"], row["nodes"], *spread(row["milliseconds"], ".2f"), *spread(row["relative"], ".2f"))
        for row in found["rows"]
    ]
    show(("context", "n", "T(n) ms", "quartiles", "T(n)/T(1)", "quartiles"), rows)
    write(found, prefix)


@click.command(cls=Command)
@all_of(MODEL, DATA)
@click.option("--windows", default="1,2,4,8,16,32", show_default=True, metavar="W,...", help="Values of W = G.")
@click.option("--ngrams", default="3,5,7", show_default=True, metavar="N,...", help="Values of N, a curve each.")
@all_of(SAMPLING)
@length_option(128)
@out_option("compression")
def compression(windows: str, ngrams: str, max_new_tokens: int, out: Path, **values: Any) -> None:
    """Draw lookahead's step compression S against log2(W = G) and fit the paper's formula.

    S = (f - 1 + E(alpha, N-1, W)) / f (2402.02057, equations 5 and 7). Repetitive texts, with few distinct 4-grams,
    overstate S.
    """
    prefix = prefix_of(out)
    sampling = sampling_of(values)
    sizes, lengths = numbers("windows", windows, int), numbers("ngrams", ngrams, int)
    loaded, prompts, named = loaded_prompts(values, max_new_tokens)
    with screen.progress("compression") as bar:
        found = curves.compression(
            loaded.target,
            prompts,
            lengths,
            sizes,
            max_new_tokens,
            loaded.eos_token_ids,
            **sampling,
            progress=bar,
        )
    found["conditions"]["data"] = named
    show(
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
    write(found, prefix)


@click.command(cls=Command)
@all_of(MODEL, DATA)
@click.option("--block", type=int, default=16, show_default=True, help="Tokens iterated together.")
@click.option(
    "-t", "--temperature", type=float, default=1.0, show_default=True, help="Temperature of the second panel."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of sampling and of the initial tokens.")
@length_option(128)
@out_option("jacobi")
def jacobi(
    block: int,
    temperature: float,
    seed: int,
    max_new_tokens: int,
    out: Path,
    **values: Any,
) -> None:
    """Draw the convergence of Jacobi iteration: which tokens of a block are correct after k iterations.

    One panel for greedy decoding and one with a temperature, where the Gumbel noise of a position stays the same over
    the iterations (2305.10427, algorithm 1).
    """
    prefix = prefix_of(out)
    loaded, prompts, named = loaded_prompts(values, max_new_tokens)
    temperatures = tuple(dict.fromkeys((0.0, temperature)))
    with screen.progress("jacobi") as bar:
        found = curves.jacobi(
            loaded.target, prompts, block, temperatures, max_new_tokens, loaded.eos_token_ids, seed, progress=bar
        )
    found["conditions"]["data"] = named
    shown = [k for k in (0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32) if k <= block]
    columns = [curve[name] for curve in found["curves"] for name in ("mean", "settled")]
    kinds = [sampling_name(curve["temperature"]) for curve in found["curves"]]
    names = [f"{kind}: {name}" for kind in kinds for name in ("correct", "to keep")]
    show(("iterations", *names), [(k, *(f"{column[k]:.1%}" for column in columns)) for k in shown])
    for kind, curve in zip(kinds, found["curves"], strict=True):
        taken = curve["iterations"]
        click.echo(
            f"{kind}: {curve['blocks']} blocks of {block}, all correct after {taken['mean']:.2f} "
            f"iterations (at most {taken['greatest']}), {curve['tokens_per_iteration']:.2f} tokens per iteration"
        )
    write(found, prefix)


@click.command(cls=Command)
@all_of(MODEL, DATA, DRAFTER_OPTIONS)
@all_of(SAMPLING)
@length_option(256)
@out_option("pool")
def pool(max_new_tokens: int, out: Path, **values: Any) -> None:
    """Draw size and hit rate of lookahead's n-gram pool as generation proceeds.

    A hit is a step in which the pool has an n-gram for the root; it saves time only where the n-gram is accepted.
    """
    prefix = prefix_of(out)
    options, sampling = drafter_arguments(values, ["lookahead"]), sampling_of(values)
    loaded, prompts, named = loaded_prompts(values, max_new_tokens)
    with screen.progress("pool") as bar:
        found = curves.pool(
            loaded.target, prompts, options, max_new_tokens, loaded.eos_token_ids, **sampling, progress=bar
        )
    found["conditions"]["data"] = named
    show(
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
    write(found, prefix)


@click.command(cls=Command)
@all_of(MODEL, DATA)
@click.option("--max-ngram", type=int, default=8, show_default=True, help="Longest match with a row of its own.")
@click.option("--min-ngram", type=int, default=1, show_default=True, help="Shortest match that drafts.")
@click.option("--num-tokens", type=int, default=10, show_default=True, help="Tokens of a draft.")
@all_of(SAMPLING)
@length_option(128)
@out_option("match")
def match(
    max_ngram: int,
    min_ngram: int,
    num_tokens: int,
    max_new_tokens: int,
    out: Path,
    **values: Any,
) -> None:
    """Draw how many tokens of prompt lookup's drafts are accepted, by the length of the match."""
    prefix, sampling = prefix_of(out), sampling_of(values)
    loaded, prompts, named = loaded_prompts(values, max_new_tokens)
    with screen.progress("match") as bar:
        found = curves.match(
            loaded.target,
            prompts,
            max_ngram,
            min_ngram,
            num_tokens,
            max_new_tokens,
            loaded.eos_token_ids,
            **sampling,
            progress=bar,
        )
    found["conditions"]["data"] = named
    show(
        ("match", "drafts", "accepted", "95 %", "first accepted", "all accepted"),
        [
            (
                f">={row['match']}" if row["match"] == max_ngram else row["match"],
                row["drafts"],
                f"{row['accepted']['mean']:.2f}",
                "-"
                if row["drafts"] < LEAST_DRAFTS
                else f"{row['accepted']['low']:.2f} to {row['accepted']['high']:.2f}",
                f"{row['first_right']:.1%}",
                f"{row['all_right']:.1%}",
            )
            for row in found["rows"]
        ],
    )
    click.echo(f"{found['without_match']} of {found['steps']} steps had no match")
    write(found, prefix)


@click.command(cls=Command)
@click.option(
    "-a", "--alpha", default="0.3,0.5,0.7,0.8,0.9", show_default=True, metavar="A,...", help="Acceptance rates."
)
@click.option("-k", "--length", type=int, default=5, show_default=True, help="K, drafted tokens per step.")
@click.option(
    "-c", "--cost", type=float, default=0.05, show_default=True, help="Cost of a drafted token, in target steps."
)
@click.option("--longest", type=int, default=16, show_default=True, help="Last K of the curves.")
@out_option("expected")
def expected(alpha: str, length: int, cost: float, longest: int, out: Path) -> None:
    """Compute the expected tokens and speed-up of one draft of K tokens. Needs no model.

    A step yields (1 - alpha^(K+1)) / (1 - alpha) tokens; the speed-up is that divided by 1 + c K (Leviathan et al.,
    2211.17192, equation 1 and theorem 3.8). alpha is the probability that a drafted token is accepted if all before it
    are.
    """
    prefix = prefix_of(out)
    found = curves.expected(numbers("alpha", alpha, float), length, cost, longest)
    show(
        ("alpha", f"tokens at K = {length}", f"speed-up at K = {length}", "best K", "speed-up there"),
        [
            (
                f"{row['alpha']:g}",
                f"{row['tokens']:.3f}",
                f"{row['speedup']:.3f}",
                "unbounded" if row["best_length"] is None else row["best_length"],
                "-" if row["best_speedup"] is None else f"{row['best_speedup']:.3f}",
            )
            for row in found["rows"]
        ],
    )
    write(found, prefix)


@click.command(cls=Command)
@all_of(MODEL, data_options("random text, and no model"))
@click.option(
    "--sizes",
    default=",".join(map(str, SIZES)),
    show_default=True,
    metavar="N,...",
    help="Lengths of the text in tokens.",
)
@click.option(
    "--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Rounds; each indexes every size."
)
@click.option("--prefill", type=float, metavar="S", help="Prefill time of the target, seconds per token.")
@out_option("growth")
def growth(sizes: str, rounds: int, prefill: float | None, out: Path, **values: Any) -> None:
    """Draw time and memory of the drafters' text indexes against the length of the text.

    Without --data the text is random and no model is loaded.
    """
    if prefill is not None:
        within("prefill", prefill, 1e-9, 3600, "a number of seconds from 1e-9 to 3600")
    if values["data"] is None and (values["names"] or values["limit"]):
        given = f"--task {values['names'][0]}" if values["names"] else f"--limit {values['limit']}"
        raise BadParameter(f"{given} chooses among the prompts of --data; give --data, too, or leave it out")
    prefix, lengths = prefix_of(out), numbers("sizes", sizes, int)
    text, named = None, ""
    if values["data"] is not None:
        _, prompts, named = loaded_prompts(values)
        text = [token for prompt in prompts for token in prompt]
    with screen.progress("growth") as bar:
        found = curves.growth(text, lengths, rounds, prefill, progress=bar)
    found["text"] = named or found["text"]
    show(
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
        click.echo(
            f"{row['index']}: indexing a token takes {row['ratio']:.2f} times as long at {row['to']:,} tokens "
            f"as at {row['from']:,}"
        )
    write(found, prefix)
