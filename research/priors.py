"""`python -m research priors`: measures the acceptance estimates and the mixer with which the planner starts.

Greedy and sampled texts of a model are decoded with a fixed number of nodes; every candidate along the committed path
counts, drafted or not. For every key with enough trials, coarse or fine, the share of accepted candidates is written,
and the parameters that the mixer has learned. The prompts are not those of the benchmarks; their order is mixed. Every
second prompt is decoded with a drafter cache, and every fourth one without the token table, so that the priors serve
all these cases.

The texts are decoded once more with the bundled draft model alone: how often a candidate of a given draft probability
is accepted carries over to other draft models. How often a draft model's first choice is accepted does not, so it has
no prior.

And once more with predictions, which are simulated edits: the text itself with spans of it replaced, inserted and
removed; one in `WRONG` is another text. The other sources draft too, with what was learned of them before.

With `--head` only the estimates of trained heads are measured, beside the other sources as the file has them, on
prompts that are not of GSM8K's training set, on which the heads may have been trained.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress

from leapahead import native
from leapahead.bench import tasks
from leapahead.cli.command import Command
from leapahead.core.errors import BadParameter
from leapahead.core.sampling import SamplingParams
from leapahead.core.stop import StopParams
from leapahead.drafters import token_table
from leapahead.drafters.auto import DEFAULT, Auto
from leapahead.drafters.cache import DrafterCache
from leapahead.drafters.draft_models import BUNDLED
from leapahead.drafters.token_table import TokenTable
from leapahead.engine.request import Request
from leapahead.engine.scheduler import Engine
from leapahead.models import loading
from leapahead.planner.acceptance import PRIORS, AcceptanceTable
from leapahead.planner.compiled import CompiledTable

NODES, LENGTH = 16, 96
DRAFTED, DEPTH = 24, 3  # nodes and draft forwards per step
TEMPERATURES = (0.0, 0.7, 1.0)
LEAST_TRIALS = 40  # of a key
EDITS = (0.01, 0.03, 0.1)  # spans that are changed, for each token of a text
SPAN = 6  # tokens of a span, at most
PLAUSIBLE = 8  # a new token is one of so many that are likely after the one before
WRONG = 12
TRAIN = "gsm8k_train.jsonl"
TABLE: type[AcceptanceTable] = CompiledTable if native.available else AcceptanceTable
# The texts of this module have no grammar. In 96 texts of JSON of the bundled model and of its GGUF file, 2,481 forced
# tokens were drafted and accepted, and along the committed paths the target chose no other token than the forced one.
FORCED = [["grammar"], 0.99]


@click.command(cls=Command)
@click.option("-m", "--model", default=None, help="A model; by default the bundled one.")
@click.option(
    "--data",
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help=f"Folder of prompt sets, with mt_bench.jsonl and {TRAIN}.",
)
@click.option("--prompts", default=40, show_default=True, help="Prompts of MT-Bench, and half as many of GSM8K.")
@click.option("--head", "heads", multiple=True, help="A trained head. May be repeated.")
@click.option("--out", default=PRIORS, type=click.Path(dir_okay=False, path_type=Path), help="JSON file to write.")
def main(model: str | None, data: Path, prompts: int, heads: tuple[str, ...], out: Path) -> None:
    """Measure the acceptance estimates with which the planner starts, and write them."""
    loaded = loading.load(model, dtype="float32")
    if heads:
        write(out, *with_heads(loaded, read_texts(loaded, data, prompts, train=False), heads))
        return
    texts = read_texts(loaded, data, prompts)
    found, drafts = measured(loaded, texts)
    others = {tuple(row["key"]): row["p"] for row in found.rows() if row["trials"] >= LEAST_TRIALS}
    predictions = predicted(loaded, texts, TABLE(others, found.mixer.rows()))
    kept = [*found.rows(), *of_source(drafts, "draft"), *of_source(predictions, "prediction")]
    estimates = [FORCED] + [[row["key"], row["p"]] for row in kept if row["trials"] >= LEAST_TRIALS]
    mixer = list(found.mixer.rows())
    mixer += [row for row in drafts.mixer.rows() if row[2] == "draft"]
    mixer += [row for row in predictions.mixer.rows() if row[1] > 1]  # the places where the prediction has candidates
    write(out, estimates, mixer)


def write(out: Path, estimates: list[Any], mixer: list[Any]) -> None:
    """Writes the priors: [key, estimate] each, and the mixer's rows."""
    lines = [",\n".join(json.dumps(row) for row in rows) for rows in (estimates, mixer)]
    out.write_text(f'{{"estimates": [\n{lines[0]}\n],\n"mixer": [\n{lines[1]}\n]}}\n', encoding="utf-8")
    click.echo(f"{out}: {len(estimates)} keys, {len(mixer)} rows of the mixer")


def with_heads(loaded: loading.Loaded, texts: list[list[int]], heads: tuple[str, ...]) -> tuple[list[Any], list[Any]]:
    """The present priors, with those of heads measured anew: estimates and rows of the mixer."""
    estimates, mixer = (json.loads(PRIORS.read_text(encoding="utf-8"))[name] for name in ("estimates", "mixer"))
    for head in heads:
        start = {tuple(key): p for key, p in estimates}
        table = TABLE(start, [(mode, place, source, found) for mode, place, source, found in mixer])
        engine = Engine(loaded.target, tokenizer=loaded.tokenizer, max_batch=1, acceptance=table)
        drafter = engine.drafter(Auto, nodes=NODES, head=head)
        assert isinstance(drafter, Auto)
        assert drafter.draft_forwards is not None
        (kind,) = (model.source_name for model in drafter.draft_forwards.models)
        stop = StopParams(max_new_tokens=LENGTH, eos_token_ids=loaded.eos_token_ids)
        with Progress(console=Console(stderr=True)) as bar:
            for index, tokens in enumerate(bar.track(texts, description=kind)):
                for temperature in TEMPERATURES:
                    sampling = SamplingParams(temperature=temperature, seed=index)
                    engine.run([engine.submit(Request(tokens, drafter, sampling, stop))])
        kept = [[row["key"], row["p"]] for row in of_source(table, kind) if row["trials"] >= LEAST_TRIALS]
        estimates = [row for row in estimates if row[0][0] != kind] + kept
        mixer = [row for row in mixer if row[2] != kind] + [row for row in table.mixer.rows() if row[2] == kind]
    return estimates, mixer


def read_texts(loaded: loading.Loaded, data: Path, prompts: int, train: bool = True) -> list[list[int]]:
    """Token ids of the bundled prompts, of some of MT-Bench and of GSM8K's training set, in a mixed order."""
    lines = (data / TRAIN).read_text(encoding="utf-8").splitlines()
    chosen = lines[:: max(1, 2 * len(lines) // max(1, prompts))]
    questions = tasks.Task("gsm8k_train", [json.loads(line)["question"] for line in chosen])
    named = [*tasks.read(None), *tasks.read(data, [f"mt_bench={prompts}"]), *([questions] if train else [])]
    texts = [tokens for task in named for tokens in tasks.encoded(task, loaded, LENGTH)]
    Random(0).shuffle(texts)
    return texts


def measured(loaded: loading.Loaded, texts: list[list[int]]) -> tuple[AcceptanceTable, AcceptanceTable]:
    """What was learned of the candidates of `auto`, and of the draft model's, from nothing."""
    found, drafts = TABLE(), TABLE()
    alone, drafted = (
        Engine(loaded.target, tokenizer=loaded.tokenizer, max_batch=1, acceptance=table) for table in (found, drafts)
    )
    whole = alone.drafter(Auto, nodes=NODES)
    no_table = alone.drafter(Auto, nodes=NODES, sources=",".join(name for name in DEFAULT if name != "table"))
    draft_model = drafted.drafter("draft_model", draft=BUNDLED, nodes=DRAFTED, depth=DEPTH)
    caches = {temperature: DrafterCache() for temperature in TEMPERATURES}
    stop = StopParams(max_new_tokens=LENGTH, eos_token_ids=loaded.eos_token_ids)
    with Progress(console=Console(stderr=True)) as bar:
        for index, tokens in enumerate(bar.track(texts, description="priors")):
            for temperature in TEMPERATURES:
                cache = caches[temperature] if index % 2 else None
                sampling = SamplingParams(temperature=temperature, seed=index)
                for engine, drafter in ((alone, no_table if index % 4 == 3 else whole), (drafted, draft_model)):
                    kept = cache if engine is alone else None
                    engine.run([engine.submit(Request(tokens, drafter, sampling, stop, drafter_cache=kept))])
    return found, drafts


def of_source(table: AcceptanceTable, name: str) -> list[dict[str, Any]]:
    """The estimates of one source."""
    return [row for row in table.rows() if row["key"][0] == name]


def predicted(loaded: loading.Loaded, texts: list[list[int]], found: AcceptanceTable) -> AcceptanceTable:
    """Lets a table learn of predictions that are simulated edits of the texts. Returns the table."""
    rng, others = Random(0), list[list[int]]()
    engine = Engine(loaded.target, tokenizer=loaded.tokenizer, max_batch=1, acceptance=found)
    plain, drafter = engine.drafter("plain"), engine.drafter(Auto, nodes=NODES)
    table = token_table.stored(loaded.target)
    if table is None:
        raise BadParameter("the model has no token table; `leapahead tune --table` makes one")
    stop = StopParams(max_new_tokens=LENGTH, eos_token_ids=loaded.eos_token_ids)
    with Progress(console=Console(stderr=True)) as bar:
        for index, tokens in enumerate(bar.track(texts, description="predictions")):
            for temperature in TEMPERATURES:
                sampling = SamplingParams(temperature=temperature, seed=index)
                handle = engine.submit(Request(tokens, plain, sampling, stop))
                engine.run([handle])
                is_wrong = others and rng.randrange(WRONG) == 0
                own = rng.choice(others) if is_wrong else edited(handle.tokens, rng, table)
                others.append(handle.tokens)
                if own:
                    engine.run([engine.submit(Request(tokens, drafter, sampling, stop, prediction=own))])
    return found


def edited(tokens: list[int], rng: Random, table: TokenTable) -> list[int]:
    """A text with spans replaced, inserted and removed. New tokens are plausible, as in an earlier version of it."""
    rate, found, at = rng.choice(EDITS), list[int](), 0
    while at < len(tokens):
        if rng.random() < rate:
            kind, length = rng.choice(("replaced", "inserted", "removed")), rng.randint(1, SPAN)
            at += length if kind != "inserted" else 0
            for _ in range(length if kind != "removed" else 0):
                found.append(int(table.tokens[found[-1] if found else tokens[0], rng.randrange(PLAUSIBLE)]))
        if at < len(tokens):
            found.append(tokens[at])
        at += 1
    return found
