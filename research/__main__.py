"""Runs `python -m research`."""

from research.cli import main

main(prog_name="python -m research")
