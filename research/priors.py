"""`python -m research.priors`: what the planner believes of candidates before it has seen any.

Greedy and sampled texts of the bundled model are decoded with more nodes than would pay, so that unlikely candidates
are seen too; of every key that was tried often enough, coarse or fine, the share that was right is written down. The
prompts are not those that the benchmarks use. The bundled draft decodes them once more, by itself: how often a guess of
so much probability is right says something of other drafts too. How often its first choice is right does not, and is
left to be learned.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress

from leapahead.bench import tasks
from leapahead.core.sampling import SamplingParams
from leapahead.core.stop import StopParams
from leapahead.drafters.auto import Auto
from leapahead.drafters.base import Drafter
from leapahead.drafters.cache import DrafterCache
from leapahead.drafters.draft_models import BUNDLED
from leapahead.drafters.single import DraftModel
from leapahead.engine.loop import Generation, decode
from leapahead.models import loading
from leapahead.planner.acceptance import Calibration
from leapahead.planner.profile import PRIORS, machine_of

NODES, LENGTH = 48, 96
DRAFTED, DEPTH = 24, 3  # nodes and looks of the draft
TEMPERATURES = (0.0, 0.7, 1.0)
ENOUGH = 40  # trials of a key


@click.command()
@click.option("--data", required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--prompts", default=40, show_default=True)
@click.option("--out", default=PRIORS, type=click.Path(dir_okay=False, path_type=Path))
def main(data: Path, prompts: int, out: Path) -> None:
    """Measure and write the priors."""
    loaded = loading.load(None, tokenizer=None, dtype="float32", device="auto", trust_remote_code=False)
    target, found, drafts = loaded.target, Calibration(), Calibration()
    chosen = [*tasks.read(None), *tasks.read(data, [f"mt_bench={prompts}"])]
    texts = [tokens for task in chosen for tokens in tasks.encoded(task, loaded, LENGTH)]
    ways: list[tuple[Callable[[], Drafter], Calibration]] = [
        (lambda: Auto(nodes=NODES), found),
        (lambda: DraftModel(BUNDLED, nodes=DRAFTED, depth=DEPTH), drafts),
    ]
    memories = {temperature: DrafterCache() for temperature in TEMPERATURES}
    with Progress(console=Console(stderr=True)) as bar:
        for index, tokens in enumerate(bar.track(texts, description="priors")):
            for temperature, (drafter, calibration) in product(TEMPERATURES, ways):
                machine_of(target).calibration = calibration
                sampling = SamplingParams(temperature=temperature, seed=index)
                stop = StopParams(max_new_tokens=LENGTH, eos_token_ids=loaded.eos_token_ids)
                memory = memories[temperature] if calibration is found else None
                generation = Generation.begin(target, tokens, drafter(), sampling, stop, drafter_cache=memory)
                for _ in decode(target, [generation]):
                    pass
    kept = [*found.rows(), *(row for row in drafts.rows() if row["key"][0] == "draft")]
    rows = [[row["key"], row["p"]] for row in kept if row["trials"] >= ENOUGH]
    out.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n", encoding="utf-8")
    click.echo(f"{out}: {len(rows)} keys")


if __name__ == "__main__":
    main()
