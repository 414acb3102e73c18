"""Programs of others, run to their end: what they write, their peak memory, and a sentence where they fail."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from time import perf_counter, sleep

from leapahead.core.errors import BadParameter, LeapaheadError

PATIENCE = 1800.0  # seconds


def ran(command: list[str], folder: Path) -> tuple[bytes, str, float | None]:
    """What a program wrote on stdout and on stderr, and its peak memory in MiB.

    Args:
        command: the program and its arguments.
        folder: takes its output; empty but for what is the caller's.

    Raises:
        LeapaheadError: it failed, or did not end.
    """
    peak, began = None, perf_counter()
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=_variables())
        try:
            while process.poll() is None:
                peak = _peak(process.pid) or peak
                if perf_counter() - began > PATIENCE:
                    raise LeapaheadError(f"{command[0]} has not ended after {PATIENCE:.0f} s; give it shorter texts")
                sleep(0.02)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    said = (folder / "err").read_bytes().decode("utf-8", "replace")
    if process.returncode:
        raise LeapaheadError(f"{command[0]} {_ended(process.returncode)}: {last_line(said)}")
    return (folder / "out").read_bytes(), said, peak


def _peak(process: int) -> float | None:
    """MiB. A child's own rusage has the peak of the parent that it was forked from."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return None
    return next((round(int(line.split()[1]) / 1024, 1) for line in lines if line.startswith("VmHWM:")), None)


def _variables() -> dict[str, str]:
    """Without the variables that llama.cpp takes for options."""
    return {key: value for key, value in os.environ.items() if not key.startswith("LLAMA_")}


def _ended(code: int) -> str:
    if code > 0:
        return f"ended with code {code}"
    name = signal.Signals(-code).name
    hint = " (an instruction that this processor lacks, often AMX: build it with -U__AMX_INT8__)"
    return f"was ended by {name}{hint if name == 'SIGILL' else ''}"


def last_line(said: str) -> str:
    return next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "it does not say why")


def asked(path: str, option: str) -> str:
    """What llama.cpp's program says about itself, on stdout and stderr.

    Raises:
        BadParameter: it does not run.
    """
    try:
        done = subprocess.run(
            [path, option], capture_output=True, check=False, stdin=subprocess.DEVNULL, env=_variables(), timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = error.strerror if isinstance(error, OSError) else "it does not end"
        raise BadParameter(f"{path} cannot be run ({reason}); give the path of llama.cpp's program") from None
    said = (done.stdout + b"\n" + done.stderr).decode("utf-8", "replace")
    if done.returncode:
        reason = f"{_ended(done.returncode)}: {last_line(said)}"
        raise BadParameter(f"{path} {option} {reason}; give the path of llama.cpp's program")
    return said
