"""Threads of OpenMP: a thread that has computed leaves none behind, which would slow down all others."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from leapahead.core import openmp

SCRIPT = '''
import os
from threading import Thread
from time import monotonic, sleep
from leapahead import LLM

def threads():
    return len(os.listdir("/proc/self/task"))

llm, most = LLM(drafter="plain", dtype="float32"), []
loaded = threads()
def settled():
    """Threads that have been told to end may need a moment."""
    until = monotonic() + 10
    while threads() > loaded and monotonic() < until:
        sleep(0.01)
    return threads()

def generate():
    llm.generate([5, 6, 7], max_new_tokens=4, criteria=[lambda tokens: most.append(threads()) is not None])
generate()
print(loaded, max(most), settled())
most.clear()
other = Thread(target=generate)
other.start()
other.join()
print(loaded, max(most) - 1, settled())  # without the thread itself
'''


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts the threads in /proc")
def test_a_thread_leaves_no_pool_behind() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "3"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True, timeout=300)
    for line in done.stdout.splitlines():
        loaded, most, after = map(int, line.split())
        assert after == loaded < most


def test_releasing_is_harmless_where_nothing_was_computed() -> None:
    openmp.find()
    openmp.release()
    openmp.release()
