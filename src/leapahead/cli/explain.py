"""`leapahead explain`: a generation to step through, as a page for the browser or in the terminal."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from leapahead import drafters
from leapahead.cli import screen
from leapahead.cli.options import DRAFTER, MODEL, all_of, drafter_arguments, model_arguments
from leapahead.core.errors import BadParameter, LeapaheadError
from leapahead.core.sampling import SamplingParams
from leapahead.explain import Moment, Node, Recording, page, record
from leapahead.models import loading

PAGE = Path("explain.html")
STYLES = {"guess": "cyan", "window": "magenta"}  # of a node, by who drafted it ...
OTHERS = ("yellow", "red", "bright_cyan", "bright_magenta")  # ... and of other drafters in turn
ACCEPTED, BONUS = "bold green", "bold blue"


@click.command()
@click.argument("prompt")
@click.option("--chat", "as_chat", is_flag=True, help="Send the prompt as a user's message, by the chat template.")
@all_of(MODEL, DRAFTER)
@click.option("--max-new-tokens", type=int, default=48, show_default=True, help="Length limit of the text.")
@click.option("-t", "--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=int, default=0, help="Sample from the k likeliest tokens.")
@click.option("--top-p", type=float, default=1.0, help="Sample from the likeliest tokens of mass p.")
@click.option(
    "--min-p", type=float, default=0.0, help="Sample from tokens at least p times as likely as the likeliest."
)
@click.option("--seed", type=int, help="The same seed gives the same text.  [default: random]")
@click.option("--ignore-eos", is_flag=True, help="Go on after the model's end of text.")
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="FILE", help=f"Where the page is written.  [default: {PAGE}]"
)
@click.option("--terminal", is_flag=True, help="Show the steps here; the page is then written only with --out.")
def explain(
    prompt: str,
    as_chat: bool,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int | None,
    ignore_eos: bool,
    out: Path | None,
    terminal: bool,
    **values: Any,
) -> None:
    """Complete PROMPT and show how: the tree of every step, what was accepted, and the pool.

    Writes one HTML page that needs no network; the arrow keys step through it.
    """
    file = out or (None if terminal else PAGE)
    if file is not None:
        _writable(file)  # before the work
    if seed is None:
        seed = secrets.randbits(32) if temperature > 0 else 0
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    name = values.pop("drafter")
    drafter = drafters.factory(name, **drafter_arguments(values, [name]))()
    model = model_arguments(values)
    with screen.loading(model["model"]):
        loaded = loading.load(**model)
    with screen.progress("decoding"):
        recording = record(
            loaded.target,
            loaded.tokenizer,
            [{"role": "user", "content": prompt}] if as_chat else prompt,
            drafter,
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            eos_token_ids=() if ignore_eos else loaded.eos_token_ids,
        )
    if terminal:
        show(recording, Console(highlight=False, emoji=False))
    if file is not None:
        try:
            file.write_text(page(recording), encoding="utf-8")
        except OSError as error:
            raise LeapaheadError(f"the page cannot be written to {file}: {error.strerror}") from None
        screen.say(f"{file}: {len(recording.steps)} steps, {len(recording.tokens)} tokens; open it in a browser")


def _writable(file: Path) -> None:
    if file.is_dir():
        raise BadParameter(f"the page cannot be written to {file}, which is a folder; give the name of a file")
    if not file.parent.is_dir():
        raise BadParameter(f"the page cannot be written to {file}: there is no folder {file.parent}")


def show(recording: Recording, console: Console) -> None:
    """The prompt, then every step as a tree with the text so far."""
    texts, written = recording.texts, Text()
    console.print(Text(_harmless(recording.prompt), style="dim"))
    styles, tokens = _styles(recording), 0
    for number, step in enumerate(recording.steps, start=1):
        tokens += len(step.tokens)
        console.rule(f"step {number} of {len(recording.steps)}", align="left")
        console.print(_tree(step, texts, styles))
        if step.pool is not None:
            console.print(f"pool: n-grams {step.pool.size}, of the root {len(step.pool.tails)}")
        console.print(
            f"committed {len(step.tokens)}, drafted {len(step.accepted)}; so far {tokens}, "
            f"acceptance length {tokens / number:.2f}"
        )
        for text, drafted in step.spans:
            written.append(_harmless(text), style=ACCEPTED if drafted else "")
        console.print(written)
        console.print()
    console.print(_legend(styles))


def _tree(step: Moment, texts: dict[int, str], styles: dict[str, str]) -> Tree:
    accepted, last = set(step.accepted), step.accepted[-1] if step.accepted else 0
    branches = [Tree(Text.assemble((texts[step.nodes[0].token], "bold"), (f"  position {step.position}", "dim")))]
    for index, node in enumerate(step.nodes[1:], start=1):
        style = ACCEPTED if index in accepted else styles[node.source]
        label = Text.assemble(
            (texts[node.token], style), (f"  {node.source} {_probability(node.p)}{_opinions(node)}", "dim")
        )
        if index in accepted:
            label.append("  accepted", style=ACCEPTED)
        branches.append(branches[node.parent].add(label))
    if len(step.tokens) > len(step.accepted):
        label = Text.assemble((texts[step.tokens[-1]], BONUS), (f"  bonus {_probability(step.bonus_p)}", "dim"))
        branches[last].add(label)
    return branches[0]


def _styles(recording: Recording) -> dict[str, str]:
    """Every source of the recording with its colour."""
    sources = dict.fromkeys(node.source for step in recording.steps for node in step.nodes[1:])
    others = [source for source in sources if source not in STYLES]
    return {s: STYLES.get(s) or OTHERS[others.index(s) % len(OTHERS)] for s in sources}


def _legend(styles: dict[str, str]) -> Text:
    legend = Text("drafted by ") if styles else Text()
    for name, style in (*styles.items(), ("accepted", ACCEPTED), ("bonus: the target's own token", BONUS)):
        legend.append(name, style=style)
        legend.append(", ")
    legend.append("p: the target's probability of a token after the ones before it; q: a draft model's")
    return legend


def _probability(p: float | None) -> str:
    if p is None:
        return "p ?"
    return "p <.001" if p < 0.001 else f"p {p:.3f}"


def _opinions(node: Node) -> str:
    """Of the draft models."""
    return "".join(f" {name} q {q:.3f}" for name, q in node.q.items())


def _harmless(text: str) -> str:
    return text.replace("\x1b", "\u241b")  # a model shall not steer the terminal
