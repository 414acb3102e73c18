"""Threads of OpenMP: a thread that has computed leaves none behind, which would slow down all others."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path
from threading import Event, Thread, current_thread
from threading import enumerate as enumerate_threads
from time import monotonic, sleep

import pytest

from leapahead.core import openmp
from leapahead.core.stop import StopParams
from leapahead.engine.request import Request
from leapahead.engine.scheduler import Engine
from leapahead.models import loading
from leapahead.models.toy import ToyTarget

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


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.skipif(sys.platform != "linux", reason="finds the libraries in /proc")
def test_a_forked_child_waits_for_no_thread_of_its_parent() -> None:
    torch = pytest.importorskip("torch")
    numbers, threads = torch.rand(1 << 20), torch.get_num_threads()
    openmp.find()
    torch.set_num_threads(2)
    try:
        numbers.exp()
        if not (child := os.fork()):
            numbers.exp()
            os._exit(0)
    finally:
        torch.set_num_threads(threads)
    until, ended = monotonic() + 10, (0, 0)
    while ended == (0, 0) and monotonic() < until:
        sleep(0.01)
        ended = os.waitpid(child, os.WNOHANG)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended == (child, 0)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts the threads in /proc")
def test_a_thread_leaves_no_pool_behind() -> None:
    # On a busy machine there would be a further pool, for waiting threads to sleep; here they sleep anyway.
    environment = {**os.environ, "OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True, timeout=300)
    for line in done.stdout.splitlines():
        loaded, most, after = map(int, line.split())
        assert after == loaded < most


def test_releasing_is_harmless_where_nothing_was_computed() -> None:
    openmp.find()
    openmp.release()
    openmp.release()


class Pool:
    """Stands for `Sleeping`, and counts."""

    kept = 0

    def __init__(self, libraries: object) -> None:
        Pool.kept += 1

    def end(self) -> None:
        Pool.kept -= 1


def test_threads_sleep_while_others_want_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "Sleeping", Pool)
    crowding, kept = openmp.Crowding(), []
    for now, share in ((100.0, 0.18), (101.0, 0.7), (102.0, 0.2), (103.0, 0.01), (104.0, 0.01)):
        crowding.decide(share, now)
        kept.append(Pool.kept)
    assert kept == [0, 1, 1, 0, 0]


def test_spinning_is_tried_again_in_intervals_that_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a program that never ends, and with a share in between, as of a server and its clients."""
    monkeypatch.setattr(openmp, "Sleeping", Pool)
    crowding, tried = openmp.Crowding(), []
    for half in range(400):
        before = Pool.kept
        crowding.decide(0.1 if before else 0.7, 100.0 + half / 2)
        if Pool.kept < before:
            tried.append(half / 2)
    crowding.decide(0.0, 300.0)
    assert Pool.kept == 0
    assert [after - first for first, after in itertools.pairwise(tried)] == [9.0, 17.0, 33.0, 65.0, 65.0]


def test_without_a_further_thread_they_spin_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(libraries: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(openmp, "Sleeping", refused)
    crowding = openmp.Crowding()
    crowding.decide(0.9, 100.0)
    assert crowding.sleeping is None


@pytest.mark.parametrize("set_by_user", [False, True])
def test_the_share_is_that_of_the_thread_that_waits_longest(monkeypatch: pytest.MonkeyPatch, set_by_user: bool) -> None:
    times = iter([{"1": 10**9, "2": 0}, {"1": 15 * 10**8, "2": 10**8, "3": 6 * 10**8}])  # the third is new
    clock, shares = [1000.0], list[float]()
    monkeypatch.setattr(openmp, "monotonic", lambda: clock[0])
    monkeypatch.setattr(openmp, "_waited", lambda: next(times))
    monkeypatch.setattr(openmp, "_known", {"libgomp": object()})
    monkeypatch.setattr(openmp, "_set_by_user", set_by_user)
    crowding = openmp.Crowding()
    monkeypatch.setattr(crowding, "decide", lambda share, now: shares.append(share))
    for now in (1000.0, 1000.2, 1000.4, 1001.0, 1001.1):
        clock[0] = now
        crowding.look()
    assert shares == ([] if set_by_user else [pytest.approx(0.6)])  # the first look begins


def test_every_step_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is not driven by `run` or `next`, as those of `leapahead tune`."""
    looks = list[None]()
    monkeypatch.setattr(openmp.crowding, "look", lambda: looks.append(None))
    engine = Engine(ToyTarget())
    handle = engine.submit(Request([1, 2], engine.drafter("plain"), stop=StopParams(max_new_tokens=3)))
    steps = 0
    while not handle.done:
        engine.step()
        steps += 1
    assert len(looks) == steps
    engine.run([engine.submit(Request([1, 2], engine.drafter("plain"), stop=StopParams(max_new_tokens=3)))])
    assert len(looks) == 2 * steps


def test_work_without_steps_looks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = list[str]()
    monkeypatch.setattr(openmp, "WINDOW", 0.001)
    monkeypatch.setattr(openmp, "find", lambda: None)
    monkeypatch.setattr(openmp.crowding, "look", lambda: looks.append(current_thread().name))
    with openmp.watched():
        until = monotonic() + 10
        while not looks and monotonic() < until:
            sleep(0.001)
    assert set(looks) == ({"leapahead-openmp-watch"} if sys.platform == "linux" else set())
    assert not any(thread.name in looks for thread in enumerate_threads())
    with pytest.raises(ZeroDivisionError), openmp.watched():
        _ = 1 / 0
    assert "leapahead-openmp-watch" not in [thread.name for thread in enumerate_threads()]


def test_watching_without_a_further_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Thread, "start", refused)
    with openmp.watched():
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="processes of other systems do not tell how long they wait")
def test_the_loading_of_a_model_is_watched(monkeypatch: pytest.MonkeyPatch, tiny_folder: Path) -> None:
    """It tests the model, and without this each forward takes many times as long beside a busy program."""
    watched = Event()
    monkeypatch.setattr(openmp, "WINDOW", 0.0)
    monkeypatch.setattr(openmp.crowding, "look", watched.set)
    loading.load(str(tiny_folder))
    assert watched.is_set()


def test_nothing_is_concluded_from_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two requests no thread waits, also beside a busy program."""
    waited, clock, shares = {"1": 0}, [1000.0], list[float]()
    monkeypatch.setattr(openmp, "monotonic", lambda: clock[0])
    monkeypatch.setattr(openmp, "_waited", lambda: dict(waited))
    monkeypatch.setattr(openmp, "_known", {"libgomp": object()})
    crowding = openmp.Crowding()
    monkeypatch.setattr(crowding, "decide", lambda share, now: shares.append(share))
    for now, seconds in ((1000.0, 0.0), (1000.5, 0.3), (1060.0, 0.4), (1060.5, 0.7), (1064.5, 3.9)):
        clock[0], waited["1"] = now, int(seconds * 1e9)
        crowding.look()
    assert shares == [pytest.approx(0.6), pytest.approx(0.6), pytest.approx(0.8)]


def test_what_the_system_says_of_waiting_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("7", "100 2500 3"), ("8", "0 0 0"), ("9", "")):  # the last one is about to end
        (tmp_path / name).mkdir()
        (tmp_path / name / "schedstat").write_text(text)
    (tmp_path / "10").mkdir()
    monkeypatch.setattr(openmp, "TASKS", tmp_path)
    assert openmp._waited() == {"7": 2500, "8": 0}
    monkeypatch.setattr(openmp, "TASKS", tmp_path / "none")
    assert openmp._waited() == {}


CROWDED = """
import multiprocessing, os, sys, time
from leapahead import LLM
from leapahead.core import openmp

def spin():
    while True:
        pass

if __name__ == "__main__":
    processors = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, processors)
    llm = LLM(drafter="plain")
    texts = [llm.generate("def f(", max_new_tokens=8, seed=1).tokens]
    others = [multiprocessing.get_context("spawn").Process(target=spin, daemon=True) for _ in range(3)]
    for other in others:
        other.start()
    until = time.monotonic() + 60
    while openmp.crowding.sleeping is None and time.monotonic() < until:
        texts.append(llm.generate("def f(", max_new_tokens=8, seed=1).tokens)
    crowded = openmp.crowding.sleeping is not None
    texts.append(llm.generate("def f(", max_new_tokens=8, seed=1).tokens)
    for other in others:
        other.terminate()
    until = time.monotonic() + 60
    while openmp.crowding.sleeping is not None and time.monotonic() < until:
        texts.append(llm.generate("def f(", max_new_tokens=8, seed=1).tokens)
    free = openmp.crowding.sleeping is None
    print(crowded, free, all(text == texts[0] for text in texts))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells how long threads wait")
def test_beside_busy_programs_threads_sleep_and_the_text_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "crowded.py").write_text(CROWDED, encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        environment.pop(name, None)
    command = [sys.executable, str(tmp_path / "crowded.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True, timeout=400)
    assert done.stdout.split() == ["True", "True", "True"]


POOL = """
import os
from time import monotonic, sleep
from leapahead import LLM
from leapahead.core import openmp

llm = LLM(drafter="plain")
text = llm.generate("def f(", max_new_tokens=8).tokens
before = len(os.listdir("/proc/self/task"))
pool = openmp.Sleeping(list(openmp._known.values()))
until = monotonic() + 10
while len(os.listdir("/proc/self/task")) - before <= len(os.sched_getaffinity(0)) and monotonic() < until:
    sleep(0.01)
while_kept = len(os.listdir("/proc/self/task"))
same = llm.generate("def f(", max_new_tokens=8).tokens == text
pool.end()
until = monotonic() + 10
while len(os.listdir("/proc/self/task")) > before and monotonic() < until:
    sleep(0.01)
print(while_kept - before > len(os.sched_getaffinity(0)), same, len(os.listdir("/proc/self/task")) <= before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts the threads in /proc")
def test_the_further_pool_has_more_threads_than_there_are_processors() -> None:
    done = subprocess.run([sys.executable, "-c", POOL], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.split() == ["True", "True", "True"]
