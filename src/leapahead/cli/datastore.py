"""`leapahead datastore`: turns a corpus into a file that the drafter `datastore` searches, and shows such a file."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

import click
from rich import box
from rich.table import Table
from rich.text import Text

from leapahead.cli import screen
from leapahead.cli.command import Group, option
from leapahead.cli.options import MODEL_NAME, TRUST_REMOTE_CODE, all_of
from leapahead.cli.typed import HomePath
from leapahead.core.errors import BadParameter, counted, needing
from leapahead.core.text import Tokenizer
from leapahead.drafters.sources.corpus import FIELDS, Corpus, build
from leapahead.drafters.sources.datastore import Store
from leapahead.models import loading
from leapahead.models.openvino.options import is_openvino

MAX_NAMED = 10  # skipped files that are named


@click.group(cls=Group)
def datastore() -> None:
    """Build and show datastores: corpora in which the drafter "datastore" looks up continuations."""


@datastore.command(
    name="build",
    examples=(
        "leapahead datastore build src/ docs/ -m Qwen/Qwen3-0.6B -o code.datastore",
        "leapahead datastore build answers.jsonl --field answer -o answers.datastore",
        'leapahead generate "def main():" -m Qwen/Qwen3-0.6B -d datastore -o file=code.datastore',
    ),
)
@click.argument("corpus", nargs=-1, required=True, type=HomePath(path_type=Path))
@all_of((MODEL_NAME, TRUST_REMOTE_CODE))
@option("-o", "--out", metavar="FILE", required=True, type=HomePath(path_type=Path), help="The file to write.")
@option(
    "--field",
    metavar="NAME",
    show_default=f"the first of {', '.join(FIELDS)} that a record has",
    help="Field of the records that holds the text.",
)
@option("--force", is_flag=True, help="Replace FILE if it exists.")
def build_datastore(
    corpus: tuple[Path, ...], model: str | None, trust_remote_code: bool, out: Path, field: str | None, force: bool
) -> None:
    """Build a datastore of CORPUS: text files, folders of them, and files of JSON lines (.jsonl, .ndjson).

    It can be used with every model that has the same tokenizer. Each file, and each record of JSON lines, is a
    document; no match spans two documents. In folders, hidden files are ignored, and files that are not text, or whose
    records cannot be read, are skipped and listed.
    """
    reading = Corpus(corpus, field)
    screen.quiet_transformers()
    with screen.progress("loading the tokenizer") as bar:
        tokenizer = _tokenizer(model, trust_remote_code)
        name = loading.BUNDLED if model is None else Path(model).name
        header = build(reading, out, tokenizer, model=name, force=force, progress=bar)
    counts = f"{counted(header.tokens, 'token')}, {counted(header.documents, 'document')}"
    click.echo(f"{out}: {out.stat().st_size / 1e6:.1f} MB, {counts}")
    if reading.skipped:
        screen.say(f"skipped {counted(len(reading.skipped), 'file')}:")
        for reason in list(reading.skipped.values())[:MAX_NAMED]:
            screen.say(f"  {reason}")
        if (more := len(reading.skipped) - MAX_NAMED) > 0:
            screen.say(f"  and {more} more")


@datastore.command(examples=("leapahead datastore show code.datastore",))
@click.argument("file", type=HomePath(path_type=Path))
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show(file: Path, as_json: bool) -> None:
    """Show the size of FILE and the tokenizer that it was built with."""
    store = Store(file)
    header = store.header
    if as_json:
        click.echo(json.dumps({**asdict(header), "bytes": store.size}))
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    for what, value in (
        ("tokens", f"{header.tokens:,} ({header.dtype})"),
        ("documents", f"{header.documents:,}"),
        ("bytes", f"{store.size:,}"),
        ("tokenizer", f"{header.fingerprint}, of {header.model}"),
        ("vocabulary", f"{header.vocab_size:,}"),
    ):
        table.add_row(what, Text(value))
    screen.Console().print(table)


def _tokenizer(model: str | None, trust_remote_code: bool) -> Tokenizer:
    """The tokenizer of a model, whose weights are not read."""
    if is_openvino(model):
        with needing("OpenVINO", "openvino", "openvino", "openvino_genai"):
            from leapahead.models.openvino import folder
        path = Path(str(model)).expanduser()
        found = folder.tokenizer(path, partial(loading.load_tokenizer, trust_remote_code=trust_remote_code))
        if found is None:
            raise BadParameter(f"the folder {model!r} has no tokenizer; export the model again")
        return found
    return loading.load_tokenizer(loading.BUNDLED if model is None else model, trust_remote_code)
