"""`leapahead search-layers`: finds the layers that a model can leave out when it drafts for itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from leapahead.bench import tasks
from leapahead.cli import screen
from leapahead.cli.command import Command, option
from leapahead.cli.options import EXACT, TRANSFORMERS_MODEL, all_of, data_option, model_arguments
from leapahead.core.errors import Refused
from leapahead.models import loading

if TYPE_CHECKING:
    from leapahead.drafters.saved_skips import Found


@click.command(
    name="search-layers",
    cls=Command,
    examples=(
        "leapahead search-layers -m Qwen/Qwen3-0.6B",
        "leapahead search-layers -m models/my-llama --data prompts --trials 300 --json",
        "leapahead generate -m models/my-llama -d draft_model --draft self:skip 'def add(a, b):'",
    ),
)
@all_of(TRANSFORMERS_MODEL, (EXACT,))
@data_option("Prompts: a file of your own, or a folder, see `leapahead bench`.")
@option("--limit", type=click.IntRange(min=1), default=4, metavar="K", help="Number of prompts of each task.")
@option("--trials", type=click.IntRange(min=1), default=100, metavar="N", help="Number of sets of layers to try.")
@option(
    "-n",
    "--max-new-tokens",
    type=click.IntRange(min=1),
    default=64,
    metavar="N",
    help="Greatest length of each text in tokens.",
)
@option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, help="Seed of the search.")
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def search_layers(
    data: Path | None, limit: int, trials: int, max_new_tokens: int, seed: int, as_json: bool, **values: Any
) -> None:
    """Search the layers that a Transformers model can leave out when it drafts for itself, and store the result.

    The method is that of Draft & Verify (2309.08168): Bayesian optimisation of the expected speed. The drafters
    draft_model and auto use the stored result with `--draft self:skip`.
    """
    sets = tasks.read(data, limit=limit)
    model = model_arguments(values)
    with screen.loading(model["model"]):
        loaded = loading.load(**model)
    from leapahead import layer_search
    from leapahead.drafters import saved_skips
    from leapahead.models.transformers.model import TransformersTarget

    target = loaded.target
    if not isinstance(target, TransformersTarget):
        raise Refused(
            f"{target.info.name} cannot leave out layers, because its engine always runs all of them; use a smaller "
            "quantisation of the model as its draft model instead"
        )
    texts = tasks.fitting(sets, loaded, max_new_tokens)
    best = None

    def report(number: int, so_far: Found) -> None:
        nonlocal best
        best = so_far
        bar(f"best so far: {best.speedup:.2f} times", number, trials)

    try:
        with screen.progress("searching layers") as bar:
            best = layer_search.search(target, texts, trials, seed, report, max_new_tokens)
    except KeyboardInterrupt:
        if best is not None and best.skip:  # that nothing pays is only known when all was tried
            _show(best, target.info.name, len(texts), saved_skips.save(target, best), as_json)
        raise
    _show(best, target.info.name, len(texts), saved_skips.save(target, best), as_json)


def _show(found: Found, name: str, texts: int, stored: bool, as_json: bool) -> None:
    if as_json:
        figures = {"skip": str(found.skip), "agreement": found.agreement, "cost": found.cost, "speedup": found.speedup}
        click.echo(json.dumps({**figures, "length": found.length, "trials": found.trials, "kept": stored}))
        return
    if found.skip:
        click.echo(
            f"{name} without {found.skip}: {found.agreement:.0%} of the tokens of {texts} texts agree, and "
            f"a token takes {found.cost:.2f} times as long as with all layers; with drafts of {found.length} tokens "
            f"the expected speed is {found.speedup:.2f} times that of plain decoding, if a forward over a draft takes "
            "as long as one over a token"
        )
    else:
        click.echo(f"{name}: leaving out layers does not pay, whichever ({found.trials} trials)")
    if not stored:
        click.echo("not stored: the folder of LEAPAHEAD_CACHE is not writable; set it to another one")
    elif found.skip:
        click.echo("stored; --draft self:skip uses it")
