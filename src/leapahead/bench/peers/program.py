"""Runs programs of peers to their end: their output, their peak memory, and a clear error where they fail."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from time import perf_counter, sleep

from leapahead.core.errors import BadParameter, LeapaheadError

PATIENCE = 1800.0  # seconds


def run(command: list[str], folder: Path) -> tuple[bytes, str, float | None]:
    """A program's stdout and stderr, and its peak memory in MiB.

    Args:
        command: the program and its arguments.
        folder: where its output is written.

    Raises:
        LeapaheadError: it failed, or did not end in time.
    """
    peak, began = None, perf_counter()
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=_variables())
        try:
            while process.poll() is None:
                peak = _peak(process.pid) or peak
                if perf_counter() - began > PATIENCE:
                    raise LeapaheadError(f"{command[0]} has not ended after {PATIENCE:.0f} s; use shorter texts")
                sleep(0.02)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    log = (folder / "err").read_bytes().decode("utf-8", "replace")
    if process.returncode:
        raise LeapaheadError(f"{command[0]} {_ended(process.returncode)}: {last_line(log)}")
    return (folder / "out").read_bytes(), log, peak


def _peak(process: int) -> float | None:
    """Peak memory of a child in MiB. Resource usage of a child would include the peak of its parent.

    None where /proc does not know it: no Linux, or in a container /proc may be of the machine, where another process
    has its number.
    """
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return None
    known = dict(line.split(":", 1) for line in lines if ":" in line)
    if "VmHWM" not in known or int(known["PPid"]) != os.getpid():
        return None
    return round(int(known["VmHWM"].split()[0]) / 1024, 1)


def _variables() -> dict[str, str]:
    """The environment without the variables that llama.cpp reads as options."""
    return {key: value for key, value in os.environ.items() if not key.startswith("LLAMA_")}


def _ended(code: int) -> str:
    if code > 0:
        return f"ended with code {code}"
    name = signal.Signals(-code).name
    hint = " (an instruction that this processor lacks, often AMX; build the program with -U__AMX_INT8__)"
    return f"was ended by {name}{hint if name == 'SIGILL' else ''}"


def last_line(log: str) -> str:
    """The last line of a program's stderr that is not empty."""
    return next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "it gives no reason")


def output_of(path: str, option: str) -> str:
    """The output of a llama.cpp program for an option such as --version.

    Raises:
        BadParameter: it cannot be run.
    """
    try:
        done = subprocess.run(
            [path, option], capture_output=True, check=False, stdin=subprocess.DEVNULL, env=_variables(), timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = error.strerror if isinstance(error, OSError) else "it does not end"
        raise BadParameter(f"{path} cannot be run ({reason}); give the path of llama.cpp's program") from None
    log = (done.stdout + b"\n" + done.stderr).decode("utf-8", "replace")
    if done.returncode:
        reason = f"{_ended(done.returncode)}: {last_line(log)}"
        raise BadParameter(f"{path} {option} {reason}; give the path of llama.cpp's program")
    return log
