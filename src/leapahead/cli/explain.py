"""`leapahead explain`: shows a generation step by step, on an HTML page or in the terminal."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import click
from rich.text import Text
from rich.tree import Tree

from leapahead import drafters
from leapahead.cli import screen
from leapahead.cli.command import Command, option
from leapahead.cli.options import (
    DRAFTER,
    IGNORE_EOS,
    INPUT,
    MODEL,
    SAMPLING,
    TEXT_GROUP,
    all_of,
    drafter_arguments,
    model_arguments,
)
from leapahead.cli.screen import Console, harmless
from leapahead.cli.text_input import prompt_text, to_complete, utf8_only
from leapahead.cli.typed import HomePath
from leapahead.core.errors import counted
from leapahead.core.sampling import SamplingParams
from leapahead.explain import Moment, Node, Recording, page, record
from leapahead.inputs import check_prediction, check_values
from leapahead.models import loading

PAGE = Path("explain.html")
STYLES = {"guess": "cyan", "window": "magenta"}  # style of a node by its source; other sources take these in turn:
OTHERS = ("yellow", "red", "bright_cyan", "bright_magenta")
ACCEPTED, BONUS = "bold green", "bold blue"


@click.command(
    cls=Command,
    examples=(
        'leapahead explain "def fibonacci(n):" -d lookahead --out page.html',
        'leapahead explain "Once upon a time" --terminal --max-new-tokens 16',
        "leapahead explain -f old.py --prediction old.py",
    ),
)
@click.argument("prompt", required=False, callback=utf8_only)
@all_of(INPUT, MODEL, DRAFTER)
@option("-n", "--max-new-tokens", type=int, default=48, group=TEXT_GROUP, help="Greatest length of the text in tokens.")
@all_of(SAMPLING, [IGNORE_EOS])
@option(
    "--out",
    type=HomePath(path_type=Path),
    metavar="FILE",
    show_default=f"{PAGE}; none with --terminal",
    help="Where the page is written.",
)
@option("--terminal", is_flag=True, help="Show the steps in the terminal.")
def explain(
    prompt: str | None,
    file: Path | None,
    prediction: Path | None,
    as_chat: bool,
    max_new_tokens: int,
    seed: int | None,
    ignore_eos: bool,
    out: Path | None,
    terminal: bool,
    **values: Any,
) -> None:
    """Complete PROMPT and show every step: its token tree, which nodes were accepted, and lookahead's n-gram pool.

    `-` reads the prompt from standard input. The result is one HTML page that needs no network; the arrow keys step
    through it.
    """
    place = out or (None if terminal else PAGE)
    if place is not None:
        screen.check_place("the page", place)
    if seed is None:
        seed = secrets.randbits(32) if values["temperature"] > 0 else 0
    filters = {name: values.pop(name) for name in ("temperature", "top_k", "top_p", "min_p")}
    sampling = SamplingParams(seed=seed, **{name: value for name, value in filters.items() if value is not None})
    given = to_complete(prompt_text(prompt, file), as_chat)
    expected = None if prediction is None else prompt_text(None, prediction)
    check_values({"max_new_tokens": max_new_tokens})
    name = values.pop("drafter")
    options = drafter_arguments(values, [name])
    drafter = drafters.make(name, **options)  # refuses what is not possible before the model is loaded
    check_prediction(expected, drafter)
    model = model_arguments(values)
    with screen.loading(model["model"]):
        loaded = loading.load(**model)
    with screen.progress("decoding"):
        recording = record(
            loaded.target,
            loaded.tokenizer,
            given,
            name,
            options,
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            prediction=expected,
            eos_token_ids=() if ignore_eos else loaded.eos_token_ids,
        )
    try:
        if terminal:
            show(recording, Console())
    finally:  # also where standard output cannot be written
        if place is not None:
            screen.write_file(place, page(recording))
            counts = f"{counted(len(recording.steps), 'step')}, {counted(len(recording.tokens), 'token')}"
            screen.say(f"{place}: {counts}; open it in a browser")


def show(recording: Recording, console: Console) -> None:
    """Prints the prompt, then every step as a tree, with the text so far."""
    texts, written = recording.texts, Text()
    console.print(Text(harmless(recording.prompt), style="dim"))
    styles, tokens = _styles(recording), 0
    for number, step in enumerate(recording.steps, start=1):
        tokens += len(step.tokens)
        console.rule(f"step {number} of {len(recording.steps)}", align="left")
        console.print(_tree(step, texts, styles))
        if step.pool is not None:
            console.print(f"pool: {step.pool.size} n-grams, {len(step.pool.tails)} of them begin with the root")
        console.print(
            f"committed {len(step.tokens)}, of them drafted {len(step.accepted)}; tokens so far {tokens}, "
            f"acceptance length {tokens / number:.2f}"
        )
        for text, drafted in step.spans:
            written.append(harmless(text), style=ACCEPTED if drafted else "")
        console.print(written)
        console.print()
    console.print(_legend(styles))


def _tree(step: Moment, texts: dict[int, str], styles: dict[str, str]) -> Tree:
    accepted, last = set(step.accepted), step.accepted[-1] if step.accepted else 0
    branches = [Tree(Text.assemble((texts[step.nodes[0].token], "bold"), (f"  position {step.position}", "dim")))]
    for index, node in enumerate(step.nodes[1:], start=1):
        style = ACCEPTED if index in accepted else styles[node.source]
        label = Text.assemble(
            (texts[node.token], style), (f"  {node.source} {_probability(node.p)}{_draft_probabilities(node)}", "dim")
        )
        if index in accepted:
            label.append("  accepted", style=ACCEPTED)
        branches.append(branches[node.parent].add(label))
    if len(step.tokens) > len(step.accepted):
        label = Text.assemble((texts[step.tokens[-1]], BONUS), (f"  bonus {_probability(step.bonus_p)}", "dim"))
        branches[last].add(label)
    return branches[0]


def _styles(recording: Recording) -> dict[str, str]:
    """Source of nodes -> style, for all sources of the recording."""
    sources = dict.fromkeys(node.source for step in recording.steps for node in step.nodes[1:])
    others = [source for source in sources if source not in STYLES]
    return {s: STYLES.get(s) or OTHERS[others.index(s) % len(OTHERS)] for s in sources}


def _legend(styles: dict[str, str]) -> Text:
    legend = Text("drafted by ") if styles else Text()
    for name, style in (*styles.items(), ("accepted", ACCEPTED), ("bonus: added by the target", BONUS)):
        legend.append(name, style=style)
        legend.append(", ")
    legend.append("p: probability of the token given those before it, by the target; q: by a draft model")
    return legend


def _probability(p: float | None) -> str:
    if p is None:
        return "p ?"
    return "p <.001" if p < 0.001 else f"p {p:.3f}"


def _draft_probabilities(node: Node) -> str:
    """The probabilities that the draft models gave to a node's token."""
    return "".join(f" {name} q {q:.3f}" for name, q in node.q.items())
