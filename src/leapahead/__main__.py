"""The `leapahead` command, and `python -m leapahead`."""

from leapahead import interrupts


def main() -> None:
    """Runs the command. Until it begins, Ctrl-C ends the process with the status that it ends with later on."""
    interrupts.ends_process()
    from leapahead.cli import main as command  # here, since this takes a while

    command(prog_name="leapahead")


if __name__ == "__main__":
    main()
