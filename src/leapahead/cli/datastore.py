"""`leapahead datastore`: a corpus of one's own as a file that the drafter `datastore` searches."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from leapahead.cli import screen
from leapahead.core.errors import needing
from leapahead.core.text import Tokenizer
from leapahead.drafters.sources.corpus import FIELDS, Corpus, build
from leapahead.drafters.sources.datastore import Store
from leapahead.models import loading


@click.group()
def datastore() -> None:
    """Build and show a datastore: a corpus in which a drafter finds what may come next.

    leapahead generate PROMPT -d datastore -o file=FILE makes use of it.
    """


@datastore.command(name="build")
@click.argument("corpus", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-m", "--model", metavar="M", help="Hub name or folder of a model, or a GGUF file.  [default: the bundled one]"
)
@click.option("--trust-remote-code", is_flag=True, help="Run Python code that comes with the model.")
@click.option("-o", "--out", metavar="FILE", required=True, type=click.Path(path_type=Path), help="Write it here.")
@click.option("--field", metavar="NAME", help=f"Of .jsonl records.  [default: the first of {', '.join(FIELDS)}]")
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
def build_(
    corpus: tuple[Path, ...], model: str | None, trust_remote_code: bool, out: Path, field: str | None, force: bool
) -> None:
    """Write the datastore of CORPUS: text files, folders of them, .jsonl files.

    It serves the models that have M's tokenizer. A file, or a record of a .jsonl file, is a document, and no match
    goes beyond one. Hidden files in folders are left out, and files that are not text.
    """
    reading = Corpus(corpus, field)
    screen.quiet_transformers()
    with screen.progress("loading the tokenizer") as bar:
        tokenizer = _tokenizer(model, trust_remote_code)
        name = loading.BUNDLED if model is None else Path(model).name
        head = build(reading, out, tokenizer, model=name, force=force, progress=bar)
    click.echo(f"{out}: {out.stat().st_size / 1e6:.1f} MB, {head.tokens} tokens, {head.documents} documents")
    if reading.skipped:
        click.echo(
            f"left out, as they are not text: {len(reading.skipped)} of the files found, {reading.skipped[0]} first"
        )


@datastore.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show(file: Path, as_json: bool) -> None:
    """Show what FILE holds."""
    store = Store(file)
    if as_json:
        click.echo(json.dumps({**asdict(store.head), "bytes": store.size}))
        return
    head = store.head
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    for what, value in (
        ("tokens", f"{head.tokens:,} ({head.dtype})"),
        ("documents", f"{head.documents:,}"),
        ("bytes", f"{store.size:,}"),
        ("tokenizer", f"{head.fingerprint}, of {head.model}"),
        ("vocabulary", f"{head.vocab_size:,}"),
    ):
        table.add_row(what, Text(value))
    Console(highlight=False).print(table)


def _tokenizer(model: str | None, trust_remote_code: bool) -> Tokenizer:
    """Without the model's weights."""
    if model is None or not model.lower().endswith(".gguf"):
        return loading.load_tokenizer(loading.bundled() if model is None else model, trust_remote_code)
    with needing("a GGUF file", "llama-cpp", "llama_cpp"):
        from leapahead.models.llama_cpp import context, tokenizer
    options = context.LlamaCppOptions(n_gpu_layers=0)
    return tokenizer.GgufTokenizer(context.Model(model, options))  # which maps the weights, but reads none
