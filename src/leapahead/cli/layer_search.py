"""`leapahead lab skip`: which layers a model can do without when it drafts for itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from leapahead.bench import tasks
from leapahead.cli import screen
from leapahead.cli.options import MODEL, all_of, model_arguments
from leapahead.core.errors import Refused
from leapahead.models import loading


@click.command()
@all_of(MODEL)
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Prompts to search with, see `leapahead bench`.  [default: a small set of our own]",
)
@click.option("--limit", type=click.IntRange(min=1), default=4, show_default=True, help="K prompts of each task.")
@click.option("--trials", type=click.IntRange(min=1), default=100, show_default=True, help="Sets of layers to try.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Of each text.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the search.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def skip(
    data: Path | None, limit: int, trials: int, max_new_tokens: int, seed: int, as_json: bool, **values: Any
) -> None:
    """Search the layers that a model can leave out when it drafts for itself (Draft & Verify), and keep what was found.

    `--draft self:skip` uses it. A model of Transformers; a Bayesian optimiser looks for the greatest expected speed.
    """
    sets = tasks.read(data, limit=limit)
    model = model_arguments(values)
    with screen.loading(model["model"]):
        loaded = loading.load(**model)
    from leapahead import layer_search
    from leapahead.drafters import saved_skips
    from leapahead.models.transformers.model import TransformersTarget

    if not isinstance(loaded.target, TransformersTarget):
        raise Refused(
            f"layers of {loaded.target.name} cannot be left out, since llama.cpp runs them all; use another "
            "quantisation of the file as its draft"
        )

    texts = [tokens for task in sets for tokens in tasks.encoded(task, loaded, max_new_tokens)]
    with screen.progress("skip") as bar:
        found = layer_search.search(
            loaded.target,
            texts,
            trials,
            seed,
            lambda number, best: bar(f"{best.speedup:.2f} times", number, trials),
            max_new_tokens,
        )
    kept = saved_skips.save(loaded.target, found)
    if as_json:
        told = {"skip": str(found.skip), "agreement": found.agreement, "cost": found.cost, "speedup": found.speedup}
        click.echo(json.dumps({**told, "length": found.length, "trials": found.trials, "kept": kept}))
        return
    if not found.skip:
        click.echo(f"{loaded.target.name}: no layer can be left out so that it pays ({found.trials} trials)")
    else:
        click.echo(
            f"{loaded.target.name} without {found.skip}: {found.agreement:.0%} of {len(texts)} texts' tokens agree, a "
            f"token takes {found.cost:.2f} times the whole model's; expected {found.speedup:.2f} times plain decoding "
            f"with drafts of {found.length}, if a forward over them takes as long as one over a token"
        )
    click.echo(
        "kept; use it with --draft self:skip" if kept else "it could not be kept: LEAPAHEAD_CACHE is not writable"
    )
