"""A CUDA device on a machine without one: its tensors say `cuda:0`, and the CPU computes what is in them.

What is simulated is what torch's rules for a device ask of the host: operations on tensors of two devices are errors,
but for those that CUDA takes; memory of the device is read by a copy; pinned memory must not be written while a copy of
it is outstanding; a capture takes no copies that wait, and a replay repeats the operations of the device, with nothing
else. Copies between the device and the host are counted. Kernels are those of the CPU, and streams are not simulated:
every operation is done when it is called.

It belongs to the process and not to a thread. torch finds the device by its dispatch key, for which a torch that was
built for CPUs has no kernels.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers.generation.utils  # noqa: F401  # which needs torch's own classes when it is imported
from static_parts import FakeCuda, Graph
from torch import Tensor
from torch.utils._pytree import tree_leaves

from leapahead.models.transformers import products
from leapahead.models.transformers.static.gate import HOST_READS

CPU, DEVICE = torch.device("cpu"), torch.device("cuda", 0)
# Of torch's table of device guards, by `c10::DeviceType`.
GUARDS, CUDA_GUARD, PYTHON_GUARD = "_ZN3c104impl26device_guard_impl_registryE", 1, 20
available = torch.version.cuda is None and torch.version.hip is None and hasattr(torch._C._acc, "DeviceGuard")
OURS = Path(__file__).resolve().parents[1] / "src" / "leapahead"

INDEXING = {"index", "index_put_", "index_put", "_index_put_impl_", "_unsafe_index"}  # take indices of the host
# Beside pointwise operations, those that take a number from a tensor of the host that has no dimensions.
TAKE_NUMBERS = {"fill", "fill_", "masked_fill", "masked_fill_", "where", "index_fill", "index_fill_"}


class Transfer(NamedTuple):
    """A copy between the device and the host.

    Attributes:
        name: of the operation.
        place: in the package, as file:line; "" where no line of it called.
    """

    name: str
    place: str


class DeviceTensor(Tensor):
    """A tensor of the simulated device.

    Attributes:
        inner: the same on the CPU.
    """

    inner: Tensor  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: Tensor) -> DeviceTensor:
        make: Any = Tensor._make_wrapper_subclass
        place = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "device": DEVICE}
        with torch.inference_mode(inner.is_inference()):  # a view of a tensor of that mode is one
            made: DeviceTensor = make(cls, inner.size(), dtype=inner.dtype, **place)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _current().dispatch(func, *args, **(kwargs or {}))

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """With this, `Module.to` leaves shared parameters shared."""
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> DeviceTensor:
        return DeviceTensor(inner["inner"])

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = copied = self.detach().clone().requires_grad_(self.requires_grad)
            copied.__dict__.update({name: value for name, value in vars(self).items() if name != "inner"})
        found: Tensor = memo[id(self)]
        return found

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"device {self.inner!r}"

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
        return self.detach().cpu().numpy()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()


class Recorder:
    """The operations of a capture: a replay repeats them in the same memory.

    Attributes:
        thread: whose operations they are.
    """

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._operations: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.thread = 0

    def __enter__(self) -> None:
        self.thread, self._device.recorder = threading.get_ident(), self

    def __exit__(self, *_: object) -> None:
        self._device.recorder = None

    def add(self, func: Any, args: Any, kwargs: Any, found: Any) -> None:
        """Of what is in the device's tensors; a view stays one."""
        made = [each for each in tree_leaves(found) if isinstance(each, Tensor)]
        read = {_memory(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        if func is _counts or func._schema.is_mutable or not all(_memory(each) in read for each in made):
            self._operations.append((func, args, kwargs, made))

    @torch.inference_mode()
    def repeat(self) -> None:
        for func, args, kwargs, made in self._operations:
            found = func(*args, **kwargs)
            for old, new in zip(made, [found] if isinstance(found, Tensor) else tree_leaves(found), strict=True):
                if old is not new:
                    old.copy_(new)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """The arguments of an operation, each changed: as `tree_map`, which takes longer than most operations of tests."""
    if isinstance(value, (list, tuple)):
        return type(value)([mapped(change, each) for each in value])
    if isinstance(value, dict):
        return {name: mapped(change, each) for name, each in value.items()}
    return change(value)


class Event:
    """As `torch.cuda.Event`: to wait for one, or for the device, ends the copies that were begun."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """There is nothing to set up."""

    def record(self, *_: Any) -> None:
        """Everything is done already."""

    def synchronize(self) -> None:
        _current().wait()


class SimulatedDevice(FakeCuda):
    """See the module.

    Attributes:
        to_host, to_device: the copies so far.
        recorder: of the capture that is made; None for none.
    """

    def __init__(self) -> None:
        super().__init__(total=2**34)
        self.to_host: list[Transfer] = []
        self.to_device: list[Transfer] = []
        self._pinned: dict[int, Tensor] = {}
        self._begun: list[tuple[Tensor, Tensor]] = []  # copies from pinned memory: what is read, and its content
        self.recorder: Recorder | None = None

    # ------------------------------------------------------------------------------------------------ torch.cuda

    def CUDAGraph(self) -> Graph:
        graph = super().CUDAGraph()
        graph.tape = Recorder(self)  # type: ignore[assignment]
        return graph

    def current_stream(self, device: Any = None) -> Any:
        return super().current_stream()

    def synchronize(self, device: Any = None) -> None:
        super().synchronize()
        self.wait()

    # -------------------------------------------------------------------------------------------------- transfers

    def wait(self) -> None:
        """Ends the copies from pinned memory that were begun."""
        for source, content in self._begun:
            assert torch.equal(source, content), "pinned memory was written while a copy of it was outstanding"
        self._begun.clear()

    def forget(self) -> None:
        """Forgets the copies that were begun."""
        self._begun.clear()

    def pinned(self, tensor: Tensor) -> Tensor:
        """Notes a tensor of the host to be in pinned memory."""
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def _read(self, name: str) -> None:
        self._refuse_in_capture()
        self.wait()
        self.to_host.append(Transfer(name, _place()))

    def _wrote(self, name: str, source: Tensor, non_blocking: bool) -> None:
        if not source.numel():
            return
        is_pinned = source.untyped_storage().data_ptr() in self._pinned
        if is_pinned and non_blocking:
            self._begun.append((source, source.clone()))
        else:
            self._refuse_in_capture()
        self.to_device.append(Transfer(name, _place()))

    @property
    def _is_captured(self) -> bool:
        """Whether a capture is made in this thread."""
        return self.recorder is not None and self.recorder.thread == threading.get_ident()

    def _refuse_in_capture(self) -> None:
        if self._is_captured:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    # ------------------------------------------------------------------------------------------------- operations

    def dispatch(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs an operation on what is in tensors of the device."""
        name = func.overloadpacket.__name__
        if name != "scaled_dot_product_attention" and _is_composite(func):
            return func.decompose(*args, **kwargs)  # as it is outside of inference mode
        goal = kwargs.get("device")
        if goal is not None:
            goal = torch.device(goal)
            kwargs["device"] = CPU if goal.type == "cuda" else goal
        ours, theirs = dict[int, DeviceTensor](), list[Tensor]()

        def inner(value: Any) -> Any:
            if isinstance(value, DeviceTensor):
                ours[id(value.inner)] = value
                return value.inner
            if isinstance(value, Tensor):
                theirs.append(value)
            return value

        given, named = mapped(inner, args), mapped(inner, kwargs)
        self._count(name, args, kwargs, goal, theirs)
        if ours and theirs and name != "copy_":
            self._check(func, name, args, theirs)
        func = _counts if name == "histc" else func
        found = func(*given, **named)
        if not (ours if goal is None else goal.type == "cuda") or (name == "copy_" and id(given[0]) not in ours):
            return found
        if self._is_captured:
            assert self.recorder is not None
            self.recorder.add(func, given, named, found)
        return mapped(lambda each: _outer(each, ours), found)

    def _count(self, name: str, args: Any, kwargs: Any, goal: torch.device | None, theirs: list[Tensor]) -> None:
        """Notes a copy between the device and the host, if it is one."""
        if name == "copy_":
            if isinstance(args[0], DeviceTensor) and theirs:
                self._wrote(name, args[1], non_blocking=len(args) > 2 and args[2])
            elif theirs:
                self._read(name)
        elif name == "_to_copy":
            if theirs and goal is not None and goal.type == "cuda":
                self._wrote(name, args[0], kwargs.get("non_blocking", False))
            elif not theirs and goal is not None and goal.type == "cpu":
                self._read(name)
        elif name in HOST_READS or (name in INDEXING and any(map(_is_mask, args[1]))):
            self._read(name)

    def _check(self, func: Any, name: str, args: Any, theirs: list[Tensor]) -> None:
        """Raises where CUDA takes no tensors of the host."""
        if name in INDEXING and isinstance(args[0], DeviceTensor):
            indices = [each for each in args[1] if each is not None and not isinstance(each, DeviceTensor)]
            for each in indices:
                self._wrote(name, each, non_blocking=False)
            values = [each for each in args[2:] if isinstance(each, Tensor) and not isinstance(each, DeviceTensor)]
            if all(each.dim() == 0 for each in values):
                return
        takes_numbers = torch.Tag.pointwise in func.tags or name in TAKE_NUMBERS
        is_written = any(
            argument.alias_info is not None and argument.alias_info.is_write and any(value is each for each in theirs)
            for argument, value in zip(func._schema.arguments, args, strict=False)
        )
        if is_written or not takes_numbers or any(each.dim() for each in theirs):
            both = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
            raise RuntimeError(f"{both} ({name})")


_running: list[SimulatedDevice] = []


def _current() -> SimulatedDevice:
    return _running[-1]


@cache
def _is_composite(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _outer(value: Any, known: dict[int, DeviceTensor]) -> Any:
    """A tensor as one of the device; what was written in place stays the same object."""
    if not isinstance(value, Tensor):
        return value
    found = known.get(id(value))
    if found is None:
        return DeviceTensor(value)
    assert (found.shape, found.stride()) == (value.shape, value.stride()), "what reshapes in place is missing"
    return found


def _is_mask(index: Tensor | None) -> bool:
    """Whether the device must find the places that an index names."""
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _counts(numbers: Tensor, *args: Any) -> Tensor:
    """`histc`, which the CPU has for floating-point numbers only."""
    return torch.histc(numbers.double(), *args).to(numbers.dtype)


def _place() -> str:
    """The innermost line of the package that is being run."""
    frame: Any = sys._getframe()
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(OURS):
            return f"{path.relative_to(OURS)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _attention(*args: Any, **kwargs: Any) -> Any:
    """The kernels of the device's attention are chosen in C++, among those that torch has for it; there are none."""
    func = torch.ops.aten.scaled_dot_product_attention.default
    if torch.is_grad_enabled() and any(each.requires_grad for each in tree_leaves(args) if isinstance(each, Tensor)):
        return torch.ops.aten._scaled_dot_product_attention_math.default(*args, **kwargs)[0]
    with torch._C._AutoDispatchBelowAutograd():
        return func(*args, **kwargs)


@contextmanager
def _guard() -> Iterator[None]:
    """torch asks a guard for the current device; one that is written in Python is offered for other devices only."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    table = (ctypes.c_void_p * (PYTHON_GUARD + 1)).in_dll(library, GUARDS)

    class Guard(torch._C._acc.DeviceGuard):
        def type_(self) -> Any:
            return torch._C._autograd.DeviceType.CUDA

    guard, before = Guard(), table[PYTHON_GUARD]
    torch._C._acc.register_python_privateuseone_device_guard(guard)
    table[CUDA_GUARD], table[PYTHON_GUARD] = table[PYTHON_GUARD], before
    _guards.append(guard)
    try:
        yield
    finally:
        table[CUDA_GUARD] = None


_guards: list[Any] = []  # torch refers to them for good


@contextmanager
def simulated_device() -> Iterator[SimulatedDevice]:
    """There is a CUDA device within the block."""
    device = SimulatedDevice()
    library: Any = torch.library
    everything, aten = library.Library("_", "IMPL"), library.Library("aten", "IMPL")
    zeros = torch.zeros

    def zeros_anywhere(*size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        made = zeros(*size, **options)
        return device.pinned(made) if pin_memory else made

    with pytest.MonkeyPatch.context() as patch, _guard():
        everything.fallback(device.dispatch, "CUDA")
        # For these torch has kernels of any device, which would be found before: in `torch.tensor`, which leaves out
        # Python's dispatch, and in those that would make an empty tensor first and then give it its size.
        operations: Any = torch.ops.aten
        some = [operations.copy_.default, operations._local_scalar_dense.default, operations.linspace.default]
        some += [operations.eye.default, operations.eye.m]
        some += [operations.arange.default, operations.arange.start, operations.arange.start_step]
        for each in some:
            aten.impl(each.name().removeprefix("aten::"), partial(device.dispatch, each), "CUDA")
        aten.impl("scaled_dot_product_attention", _attention, "AutogradCUDA")
        patch.setattr(torch, "zeros", zeros_anywhere)
        patch.setattr(Tensor, "pin_memory", lambda tensor: device.pinned(tensor.clone()))
        names = "CUDAGraph current_stream set_stream stream device synchronize empty_cache mem_get_info graph Stream"
        for name in [*names.split(), "graph_pool_handle"]:
            patch.setattr(torch.cuda, name, getattr(device, name))
        constants = {
            "_lazy_init": None,
            "is_available": True,
            "is_initialized": True,
            "device_count": 1,
            "current_device": 0,
            "memory_reserved": 0,
            "memory_allocated": 0,
            "get_device_name": "simulated",
            "get_device_capability": (9, 0),
            "is_bf16_supported": True,
        }
        for name, value in constants.items():
            patch.setattr(torch.cuda, name, lambda *_, value=value, **__: value)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(products._settings, "_library", lambda name="cublas": name)
        _running.append(device)
        try:
            yield device
        finally:
            _running.pop()
            aten._destroy()
            everything._destroy()
