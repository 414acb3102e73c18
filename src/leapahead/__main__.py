"""`python -m leapahead` is the `leapahead` command."""

from leapahead.cli import main

if __name__ == "__main__":
    main(prog_name="leapahead")
