"""Compiles the forwards of the shapes in use, in the background, and gives them back when they are ready.

    used `LEAST_USES` times     the operations of the forward are traced, as it runs            in the caller's thread
    traced                      Inductor compiles them, one shape after the other               in a thread of its own
    compiled                    compared with the forward, once, and used in its place          in the caller's thread

The background has no part in the model: it is given a list of operations, so that nothing waits for it, and no code of
the model runs in two threads. Tensors that forwards write are arguments of the compiled function, the weights are not.
Captures are the store's business (`graphs`), so Inductor's own are switched off.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from queue import SimpleQueue
from threading import Thread
from time import monotonic
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from leapahead.core.errors import first_line

Traced = Callable[..., None]  # called with the tensors that it reads and writes
Compile = Callable[[Any, Sequence[Tensor]], Traced]
Tell = Callable[[str], None]

LEAST_USES = 32  # of a shape, before it is compiled
MOST = 32  # shapes that are compiled for one target


def inductor(traced: Any, tensors: Sequence[Tensor]) -> Traced:
    """Compiles a graph of operations."""
    from torch import _inductor

    compiled: Traced = _inductor.compile(traced, list(tensors), options={"triton.cudagraphs": False})
    return compiled


def on_stderr(line: str) -> None:
    """The progress line of a terminal; nothing elsewhere."""
    if sys.stderr.isatty():
        print(f"leapahead: {line}", file=sys.stderr)


class Order(NamedTuple):
    """What is to be compiled."""

    key: Hashable
    what: str
    traced: Any
    tensors: Sequence[Tensor]


class Compiler:
    """The compiled forwards of one target by key.

    Args:
        compile: compiles one; it is called in the background.
        tell: is told what is compiled, and what was.
        least_uses: see the module.

    Attributes:
        problem: why nothing is compiled any more; "" where it is.
    """

    def __init__(self, compile: Compile = inductor, tell: Tell = on_stderr, least_uses: int = LEAST_USES) -> None:
        self._compile, self._tell, self._least_uses = compile, tell, least_uses
        self._uses: Counter[Hashable] = Counter()
        self._ordered: set[Hashable] = set()
        self._orders: SimpleQueue[Order | None] = SimpleQueue()
        self._done: SimpleQueue[tuple[Hashable, Traced]] = SimpleQueue()
        self._ready: dict[Hashable, Traced] = {}
        self._kept: dict[Hashable, Traced] = {}
        self._thread: Thread | None = None
        self.problem = ""

    def get(self, key: Hashable) -> Traced | None:
        """The compiled forward, once it was accepted."""
        return self._kept.get(key)

    def wants(self, key: Hashable) -> bool:
        """Counts one use; whether this forward should be traced now."""
        if self.problem or key in self._ordered or len(self._ordered) == MOST:
            return False
        self._uses[key] += 1
        return self._uses[key] >= self._least_uses

    def order(self, key: Hashable, what: str, forward: Callable[[], None], tensors: Sequence[Tensor]) -> None:
        """Traces a forward, which runs it, and has it compiled.

        Args:
            what: for the progress line.
            tensors: all that it writes, and what else may be another tensor in a later call.
        """
        self._ordered.add(key)
        try:
            traced = make_fx(lambda *_: forward())(*tensors)
        except Exception as error:
            self.give_up(f"{what} cannot be traced: {first_line(error)}")
            return
        self._orders.put(Order(key, what, traced, list(tensors)))
        if self._thread is None:
            self._thread = Thread(target=self._work, name="leapahead compiler", daemon=True)
            self._thread.start()

    def ready(self, key: Hashable) -> Traced | None:
        """A forward that was compiled and not accepted yet."""
        while not self._done.empty():
            done, compiled = self._done.get()
            self._ready[done] = compiled
        return self._ready.pop(key, None)

    def accept(self, key: Hashable, compiled: Traced) -> None:
        """From now on `get` gives it."""
        self._kept[key] = compiled

    def give_up(self, problem: str) -> None:
        """Compiles nothing more. What was accepted stays."""
        if not self.problem:
            self.problem = problem
            self._tell(f"forwards are no longer compiled: {problem}")

    def close(self) -> None:
        """Ends the thread, behind what it compiles at the moment."""
        self._orders.put(None)

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            if self.problem:
                continue
            waiting = self._orders.qsize()
            self._tell(f"compiling the forward of {order.what}" + (f", {waiting} more waiting" if waiting else ""))
            began = monotonic()
            try:
                with torch.no_grad():
                    compiled = self._compile(order.traced, order.tensors)
            except Exception as error:  # a compiler that is missing, an operation that it does not know
                self.give_up(f"{order.what}: {first_line(error)}")
                continue
            self._tell(f"compiled the forward of {order.what} in {monotonic() - began:.0f} s")
            self._done.put((order.key, compiled))
