"""Compiles the forwards of the shapes in use, in the background, and gives them back when they are ready.

    used `LEAST_USES` times     the operations of the forward are traced, as it runs            in the caller's thread
    traced                      Inductor compiles them, one shape at a time                     in a thread of its own
    compiled                    compared with the forward, once, and used in its place          in the caller's thread

The background has no part in the model: it is given a list of operations, so that nothing waits for it, and no code of
the model runs in two threads. Tensors that forwards write are arguments of the compiled function, the weights are not.
Captures are the store's business (`graphs`), so Inductor's own are switched off.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from threading import Thread
from time import monotonic
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from leapahead.core.errors import first_line
from leapahead.models.transformers.static.graphs import capturing
from leapahead.models.transformers.static.parts import compile_in_parts

aten = torch.ops.aten
Traced = Callable[..., None]  # called with the tensors that it reads and writes
Compile = Callable[[Any, Sequence[Tensor]], Traced]
Tell = Callable[[str], None]

LEAST_USES = 32  # of a shape, before it is compiled
MOST = 32  # shapes that are compiled for one target
EXIT_SECONDS = 10.0  # that the end of the interpreter waits for what is compiled

_threads: WeakSet[Thread] = WeakSet()  # that compile, or have compiled


def inductor(traced: Any, tensors: Sequence[Tensor]) -> Traced:
    """Compiles a graph of operations, equal layers once."""
    return compile_in_parts(traced, tensors, _inductor)


def _inductor(traced: Any, tensors: Sequence[Tensor]) -> Traced:
    from torch import _inductor
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # Without an environment of shapes, Inductor does not look for the code that an earlier process has compiled.
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with tracing(TracingContext(mode)):
        compiled: Traced = _inductor.compile(traced, list(tensors), options={"triton.cudagraphs": False})
    return compiled


def prepare() -> None:
    """Has Inductor trace what it traces once, a module. Meanwhile all modules are called otherwise, in every thread."""
    from torch._inductor.loop_body import InterpreterShim

    InterpreterShim._dummy_gm()  # which keeps what it has traced


@cache
def spare_captures() -> None:
    """Has Inductor wait for the whole device, as it does for every kernel that it loads up to torch 2.12, only while no
    forward is captured: the compilation and the capture would both fail."""
    from torch._dynamo.device_interface import CudaInterface

    wait = CudaInterface.synchronize

    def between_captures(device: Any = None) -> None:
        with capturing:
            wait(device)

    CudaInterface.synchronize = staticmethod(between_captures)


def write_out(traced: Any) -> None:
    """Writes products of one row with a matrix as sums over the products of their elements.

    Inductor makes one kernel of the sums of several matrices with the same row, where the library has one for each, and
    makes no passes over parts of a sum. The sums are in float32 at least, as the library's are.

    Args:
        traced: a graph of operations, which is changed.
    """
    graph = traced.graph
    for node in [*graph.find_nodes(op="call_function", target=aten.mm.default), *_biased(graph)]:
        *bias, row, matrix = node.args
        if row.meta["val"].shape[0] != 1 or not node.meta["val"].is_floating_point():
            continue
        sums = torch.promote_types(node.meta["val"].dtype, torch.float32)
        with graph.inserting_before(node):
            # As memory of its own: otherwise what computes the row would be repeated for every element of the sum.
            row = graph.call_function(aten.as_strided.default, (row, *_laid_out(row)))
            wide = [graph.call_function(aten._to_copy.default, (each,), {"dtype": sums}) for each in (row, matrix)]
            column = graph.call_function(aten.unsqueeze.default, (wide[0], 2))
            products = graph.call_function(aten.mul.Tensor, (column, wide[1]))
            found = graph.call_function(aten.sum.dim_IntList, (products, [1]))
            for each in bias:
                found = graph.call_function(aten.add.Tensor, (found, each))
            found = graph.call_function(aten._to_copy.default, (found,), {"dtype": node.meta["val"].dtype})
        node.replace_all_uses_with(found)
        graph.erase_node(node)
    traced.recompile()


def _biased(graph: Any) -> list[Any]:
    """The products to which a bias is added, without factors."""
    return [node for node in graph.find_nodes(op="call_function", target=aten.addmm.default) if not node.kwargs]


def _laid_out(node: Any) -> tuple[list[int], list[int]]:
    """The shape and the strides of a node's tensor."""
    return list(node.meta["val"].shape), list(node.meta["val"].stride())


def on_stderr(line: str) -> None:
    """The progress line of a terminal; nothing elsewhere."""
    if sys.stderr.isatty():
        print(f"leapahead: {line}", file=sys.stderr)


@atexit.register
def _end() -> None:
    """Ends the threads that compile. The end of the interpreter would stop them within torch, which aborts it."""
    until = monotonic() + EXIT_SECONDS
    for thread in list(_threads):
        while thread.is_alive() and monotonic() < until:  # what the thread calls may catch everything
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
            thread.join(0.1)


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
        self._done: dict[Hashable, Traced] = {}
        self._kept: dict[Hashable, Traced] = {}
        self._thread: Thread | None = None
        self._closed = False
        self.problem = ""

    def get(self, key: Hashable) -> Traced | None:
        """The compiled forward, once it was accepted."""
        return self._kept.get(key)

    def wants(self, key: Hashable) -> bool:
        """Counts one use; whether this forward should be traced now.

        One is compiled at a time: torch traces in one thread only, and compiling traces too.
        """
        if self.problem or self._closed or key in self._ordered or len(self._ordered) == MOST:
            return False
        self._uses[key] += 1
        return self._uses[key] >= self._least_uses and not self.is_busy

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
        if any(each.is_cuda for each in tensors):
            write_out(traced)
        if self._compile is inductor:
            prepare()
            spare_captures()
        self._tell(f"compiling the forward of {what}, the {len(self._ordered)}. in use")
        self._thread = Thread(
            target=self._work, args=(key, what, traced, list(tensors)), name="leapahead compiler", daemon=True
        )
        _threads.add(self._thread)
        self._thread.start()

    def ready(self, key: Hashable) -> Traced | None:
        """A forward that was compiled and not accepted yet."""
        return self._done.pop(key, None)

    def accept(self, key: Hashable, compiled: Traced) -> None:
        """From now on `get` gives it."""
        self._kept[key] = compiled

    def give_up(self, problem: str) -> None:
        """Compiles nothing more. What was accepted stays."""
        if not self.problem:
            self.problem = problem
            self._tell(f"forwards are no longer compiled: {problem}")

    def wait(self, seconds: float) -> None:
        """Waits for what is compiled at the moment."""
        if self._thread is not None:
            self._thread.join(seconds)

    def close(self) -> None:
        """Compiles nothing more behind what it compiles at the moment."""
        self._closed = True

    @property
    def is_busy(self) -> bool:
        """Whether a forward is being compiled."""
        return self._thread is not None and self._thread.is_alive()

    def _work(self, key: Hashable, what: str, traced: Any, tensors: Sequence[Tensor]) -> None:
        began = monotonic()
        try:
            with torch.no_grad():
                compiled = self._compile(traced, tensors)
        except Exception as error:  # a compiler that is missing, an operation that it does not know
            self.give_up(f"{what}: {first_line(error)}")
            return
        self._done[key] = compiled
        self._tell(f"compiled the forward of {what} in {monotonic() - began:.0f} s")
