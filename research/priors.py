"""`python -m research priors`: measures the acceptance estimates with which the planner starts.

Greedy and sampled texts of the bundled model are decoded with more nodes than would pay, so that unlikely candidates
are tried as well. For every key with enough trials, coarse or fine, the share of accepted candidates is written. The
prompts are not those of the benchmarks. The texts are decoded once more with the bundled draft model alone: how often a
candidate of a given draft probability is accepted carries over to other draft models. How often a draft model's first
choice is accepted does not, so it has no prior.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress

from leapahead.bench import tasks
from leapahead.cli.command import Command
from leapahead.core.sampling import SamplingParams
from leapahead.core.stop import StopParams
from leapahead.drafters.auto import Auto
from leapahead.drafters.cache import DrafterCache
from leapahead.drafters.draft_models import BUNDLED
from leapahead.engine.request import Request
from leapahead.engine.scheduler import Engine
from leapahead.models import loading
from leapahead.planner.acceptance import PRIORS, AcceptanceTable

NODES, LENGTH = 48, 96
DRAFTED, DEPTH = 24, 3  # nodes and draft forwards per step
TEMPERATURES = (0.0, 0.7, 1.0)
LEAST_TRIALS = 40  # of a key


@click.command(cls=Command)
@click.option(
    "--data",
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of prompt sets, with mt_bench.jsonl.",
)
@click.option("--prompts", default=40, show_default=True, help="Number of prompts of MT-Bench.")
@click.option("--out", default=PRIORS, type=click.Path(dir_okay=False, path_type=Path), help="JSON file to write.")
def main(data: Path, prompts: int, out: Path) -> None:
    """Measure the acceptance estimates with which the planner starts, and write them."""
    loaded = loading.load(None, dtype="float32")
    # Two tables without priors, so that nothing but this measurement enters them.
    found, drafts = AcceptanceTable(), AcceptanceTable()
    alone, drafted = (Engine(loaded.target, max_batch=1, acceptance=table) for table in (found, drafts))
    ways = (
        (alone, alone.drafter(Auto, nodes=NODES)),
        (drafted, drafted.drafter("draft_model", draft=BUNDLED, nodes=DRAFTED, depth=DEPTH)),
    )
    chosen = [*tasks.read(None), *tasks.read(data, [f"mt_bench={prompts}"])]
    texts = [tokens for task in chosen for tokens in tasks.encoded(task, loaded, LENGTH)]
    caches = {temperature: DrafterCache() for temperature in TEMPERATURES}
    stop = StopParams(max_new_tokens=LENGTH, eos_token_ids=loaded.eos_token_ids)
    with Progress(console=Console(stderr=True)) as bar:
        for index, tokens in enumerate(bar.track(texts, description="priors")):
            for temperature, (engine, drafter) in product(TEMPERATURES, ways):
                cache = caches[temperature] if engine is alone else None
                sampling = SamplingParams(temperature=temperature, seed=index)
                request = Request(tokens, drafter, sampling=sampling, stop=stop, drafter_cache=cache)
                engine.run([engine.submit(request)])
    kept = [*found.rows(), *(row for row in drafts.rows() if row["key"][0] == "draft")]
    rows = [[row["key"], row["p"]] for row in kept if row["trials"] >= LEAST_TRIALS]
    out.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n", encoding="utf-8")
    click.echo(f"{out}: {len(rows)} keys")
