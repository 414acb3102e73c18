"""The command line, `leapahead COMMAND`: a file for each command, all of which are made of calls of the library."""

from __future__ import annotations

import click

from leapahead import __version__, native
from leapahead.cli.bench import bench
from leapahead.cli.cache import cache
from leapahead.cli.chat import chat
from leapahead.cli.check import check
from leapahead.cli.command import Program
from leapahead.cli.convert_head import convert_head
from leapahead.cli.datastore import datastore
from leapahead.cli.drafters import drafters
from leapahead.cli.explain import explain
from leapahead.cli.export import export_gguf
from leapahead.cli.export_openvino import export_openvino
from leapahead.cli.generate import demo, generate
from leapahead.cli.layer_search import search_layers
from leapahead.cli.run_batch import run_batch
from leapahead.cli.serve import serve
from leapahead.cli.train_cllm import train_cllm
from leapahead.cli.train_draft import train_draft
from leapahead.cli.train_head import train_head
from leapahead.cli.train_probes import train_probes
from leapahead.cli.tune import tune


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(
    __version__ if native.available else f"{__version__}, without its compiled module: drafting is slower",
    prog_name="leapahead",
)
def main() -> None:
    """Decode language models with several tokens per forward pass, and exactly the text of one token at a time."""


for command in (
    *(generate, chat, serve, run_batch, demo, check, bench, tune, explain, drafters, cache, datastore),
    *(export_gguf, export_openvino, search_layers, convert_head, train_head, train_probes, train_draft, train_cllm),
):
    main.add_command(command)
