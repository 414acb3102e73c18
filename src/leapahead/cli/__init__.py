"""The command line: `leapahead COMMAND`. Each command is a few calls of the library; none does what it cannot."""

from __future__ import annotations

import io
import sys
import warnings
from typing import Any

import click

from leapahead import __version__
from leapahead.cli.bench import bench
from leapahead.cli.cache import memory
from leapahead.cli.check import check
from leapahead.cli.datastore import datastore
from leapahead.cli.drafters import drafters
from leapahead.cli.explain import explain
from leapahead.cli.export import export_gguf
from leapahead.cli.generate import chat, demo, generate
from leapahead.cli.layer_search import skip
from leapahead.cli.screen import Failure
from leapahead.cli.tune import tune
from leapahead.core.errors import LeapaheadError


class Commands(click.Group):
    """Turns every error made on purpose into one line and exit code 2."""

    def invoke(self, ctx: click.Context) -> Any:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows ?
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the backends; ours are errors
            try:
                return super().invoke(ctx)
            except LeapaheadError as error:
                raise Failure.of(error) from None

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in the order below


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="leapahead")
def main() -> None:
    """Any causal language model, several tokens per forward pass, exactly the text of one at a time."""


for command in (generate, chat, check, bench, drafters, explain, demo, tune, datastore, memory, export_gguf, skip):
    main.add_command(command)
