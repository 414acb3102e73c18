"""The `leapahead` command, and `python -m leapahead`."""

from leapahead import interrupts


def main() -> None:
    """Runs the command. Until it begins, Ctrl-C ends the process with the status that it ends with later on."""
    interrupts.ends_process()
    from leapahead.cli import main as command  # here, since this takes a while

    command(prog_name="leapahead")


if __name__ == "__main__":
    try:
        main()
    finally:
        # After `python -m`, CPython ends itself by SIGINT if a KeyboardInterrupt has ever left exec("..."), which
        # dataclasses use, even if it was handled. The next exec("...") makes it forget that.
        exec("")
