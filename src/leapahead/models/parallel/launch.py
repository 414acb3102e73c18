"""Starts the processes of a target on several devices, or joins those that torchrun started.

devices="cuda:0,cuda:1"     this process computes on the first device, and starts one process for each other
devices="torchrun"          torchrun started one process for each device; the first decodes, the others follow it

Each has the whole model and computes branches of every tree, or, for tensor parallelism, a part of its weights.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from time import monotonic, sleep
from typing import Any
from weakref import finalize

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from leapahead.core.errors import BadParameter, LeapaheadError
from leapahead.models.base import Target
from leapahead.models.parallel import tensor
from leapahead.models.parallel.device import torch_threads
from leapahead.models.parallel.link import TIMEOUT, Disconnected, Link
from leapahead.models.parallel.target import ParallelTarget
from leapahead.models.parallel.worker import FAILED, Reply, follow
from leapahead.models.transformers.devices import checked_device

TORCHRUN = "torchrun"
TENSOR_PARALLEL = "tensor_parallel"  # among the options of another process: the number of processes
HOST = "127.0.0.1"
JOIN = 120.0  # seconds within which a new process must have imported its packages
Several = ParallelTarget | tensor.TensorParallelTarget
Load = Callable[..., tuple[Target, Any]]  # loads the model on a device: the target and its tokenizer


def checked(devices: str | Sequence[str]) -> list[str]:
    """The names of the devices, or ["torchrun"].

    Raises:
        BadParameter: fewer than two.
    """
    names = devices.split(",") if isinstance(devices, str) else devices
    if not isinstance(names, Sequence) or not all(isinstance(name, str) and name.strip() for name in names):
        raise BadParameter(f"devices={devices!r} is not possible: name devices as 'cuda:0,cuda:1', or 'torchrun'")
    names = [name.strip() for name in names]
    if names != [TORCHRUN] and len(names) < 2:
        raise BadParameter(
            f"devices={devices!r} names {len(names)} of at least two devices; for one, use device={names[0]!r}"
            if names
            else "devices names none of at least two devices; leave it out"
        )
    return names


def launched(
    devices: str | Sequence[str], load: Load, options: dict[str, Any], tensor_parallel: bool = False
) -> tuple[Several, Any]:
    """The model on several devices, and its tokenizer. Called by torchrun's other processes, it does not return.

    Args:
        devices: their names, or "torchrun".
        load: loads the model in this process, on a device; takes `tensor_parallel` of `pretrained.load` too.
        tensor_parallel: whether the weights are divided over the devices; otherwise the branches of trees are.
        options: of `pretrained.load`, by which other processes load it; they must be of JSON's types.

    Raises:
        SystemExit: in the other processes that torchrun started, when the first one has ended.
        LeapaheadError: a process does not start, or cannot load the model.
    """
    names = checked(devices)
    if names == [TORCHRUN]:
        return _joined(load, tensor_parallel)
    if tensor_parallel and len({name.partition(":")[0] for name in names}) > 1:
        raise BadParameter(f"devices={devices!r} are of several types, and tensor_parallel needs one type of device")
    if tensor_parallel and (twice := next((name for name in names if name != "cpu" and names.count(name) > 1), "")):
        raise BadParameter(f"devices={devices!r} names {twice} twice, and tensor_parallel needs one for each part")
    for name in names if tensor_parallel else ():
        checked_device(name)  # before any process waits for one that cannot come
    size = len(names)
    options = {**options, TENSOR_PARALLEL: size} if tensor_parallel else options
    store = _store(size)
    share = max(1, torch.get_num_threads() // size) if set(names) == {"cpu"} else None
    processes = [_process(rank, names, store.port, options, share) for rank in range(1, size)]
    try:
        link = linked(store, 0, size, processes, is_local=True)
        with torch_threads(share):
            found, tokenizer = _leading(load, store, names[0], link, partial(_end, processes), share, tensor_parallel)
        finalize(link, _end, processes, 0.0)  # where it is not closed, at the end of the interpreter for example
        return found, tokenizer
    except BaseException:
        _end(processes, 0.0)
        raise


def _leading(
    load: Load,
    store: Store,
    device: str,
    link: Link,
    end: Callable[[float], None],
    share: int | None,
    tensor_parallel: bool,
    is_local: bool = True,
) -> tuple[Several, Any]:
    """What the process that decodes loads, while the others do the same."""
    if not tensor_parallel:
        target, tokenizer = load(device)
        return ParallelTarget(target, link, end, share), tokenizer

    def end_all(patience: float) -> None:
        end(patience)
        ended()

    with tensor.connected(store, link.rank, link.size, device, is_local):
        target, tokenizer = load(device, tensor_parallel=link.size)
        found = tensor.TensorParallelTarget(target, link, end_all, share)
    # Last, since this is not to end the connections of another model; also where it is not closed, but dropped.
    ended = finalize(link, tensor.end)
    ended.atexit = False
    return found, tokenizer


def _store(size: int) -> TCPStore:
    """Where the processes of this machine find each other. By itself torch listens on all interfaces."""
    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    return TCPStore(HOST, port, size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _process(
    rank: int, names: Sequence[str], port: int, options: dict[str, Any], share: int | None
) -> subprocess.Popen[bytes]:
    """Another process of this machine. It has no part in the terminal, so that Ctrl-C reaches the first one alone."""
    given = {"rank": rank, "size": len(names), "port": port, "device": names[rank], "options": options}
    code = "from leapahead.models.parallel.process import main; main()"
    environment = {**os.environ, "OMP_NUM_THREADS": str(share or torch.get_num_threads())}
    return subprocess.Popen(
        [sys.executable, "-P", "-c", code, json.dumps(given)],  # -P: not with modules of the working directory
        env=environment if names[rank] == "cpu" else None,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def linked(
    store: Store,
    rank: int,
    size: int,
    processes: Sequence[subprocess.Popen[bytes]] = (),
    is_local: bool = False,
) -> Link:
    """Waits for the other processes and connects with them.

    Args:
        store: where they find each other.
        rank: of this process.
        size: the number of processes.
        processes: those that this one has started.
        is_local: whether all are on this machine; then nothing listens to the network.

    Raises:
        LeapaheadError: one of them has ended, or does not come.
    """
    store.set(f"leapahead/{rank}", "here")
    until = monotonic() + JOIN
    while not store.check([f"leapahead/{other}" for other in range(size)]):
        ended = next((each for each in processes if each.poll() is not None), None)
        if ended is not None or monotonic() > until:
            why = f"has ended with exit code {ended.returncode}" if ended is not None else f"has not come in {JOIN:g} s"
            raise LeapaheadError(f"a process for devices does not start: it {why}; try the model with one device")
        sleep(0.02)
    gloo: Any = ProcessGroupGloo  # whose options are not among torch's annotations
    options = gloo._Options()
    options._timeout = timedelta(seconds=TIMEOUT)
    options._devices = [gloo.create_device(hostname=HOST) if is_local else gloo.create_default_device()]
    return Link(gloo(PrefixStore("leapahead", store), rank, size, options), rank, size)


def _joined(load: Load, tensor_parallel: bool) -> tuple[Several, Any]:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    command = "torchrun --nproc-per-node 2 -m leapahead ..."
    if not all(name in os.environ for name in names):
        raise BadParameter(f"devices='torchrun' needs processes that torchrun started, as by `{command}`")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size < 2:
        raise BadParameter(f"devices='torchrun' needs at least two processes, and torchrun started {size}: `{command}`")
    store, _, _ = next(rendezvous("env://"))
    link = linked(store, rank, size)
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    if rank == 0:
        return _leading(load, store, device, link, lambda patience: None, None, tensor_parallel, is_local=False)
    follow_first(load, device, link, store if tensor_parallel else None)
    raise SystemExit(0)


def follow_first(load: Load, device: str, link: Link, together: Store | None = None, is_local: bool = False) -> None:
    """What another process than the first one does, to its end.

    Args:
        load, device, link, is_local: see `launched` and `linked`.
        together: for tensor parallelism, where the processes find each other.
    """
    try:
        if together is None:
            target, _ = load(device)
        else:
            with tensor.connected(together, link.rank, link.size, device, is_local):
                target, _ = load(device, tensor_parallel=link.size)
    except Exception as error:  # the first process shows it
        with suppress(Disconnected):
            link.send(0, Reply(FAILED, str(error)))
        return
    follow(target, link, together is not None)


def _end(processes: Sequence[subprocess.Popen[bytes]], patience: float) -> None:
    """Waits for processes that were told to stop; ends those that do not in so many seconds."""
    until = monotonic() + patience
    for process in processes:
        try:
            process.wait(max(0.0, until - monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
