"""`python -m research COMMAND`: measurements, figures and models of the project itself.

A command's module is imported when the command runs, since most of them need torch.
"""

from __future__ import annotations

from importlib import import_module

import click

from leapahead.cli import Commands
from leapahead.core.errors import needing

COMMANDS = {
    "figures": "research.figures:main",
    "priors": "research.priors:main",
    "overhead": "research.overhead:main",
    "standin": "research.standin:main",
    "llama-bench": "research.llama_bench:main",
    "cost": "research.commands:cost",
    "compression": "research.commands:compression",
    "jacobi": "research.commands:jacobi",
    "pool": "research.commands:pool",
    "match": "research.commands:match",
    "expected": "research.commands:expected",
    "growth": "research.commands:growth",
    "calibration": "research.commands_drafts:calibration",
    "sequoia": "research.commands_drafts:sequoia",
}


class Research(Commands):
    """Imports a command when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].partition(":")
        with needing(f"research {cmd_name}", "transformers", "torch", "transformers", "safetensors"):
            command: click.Command = getattr(import_module(module), attribute)
        return command


@click.group(cls=Research, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Measurements, figures and models of the leapahead project. Run it in a checkout."""
