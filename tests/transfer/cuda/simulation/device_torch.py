"""torch on the simulated GPU: the part of `torch.cuda` and of device tensors that the tests use.

A device tensor is a torch tensor of the CPU whose memory belongs to a simulated GPU. Each operation
on it is queued on the current stream, with the memory that it reads and writes. Its result has the
shape that torch computes for zeros.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from tests.transfer.cuda.simulation.library import library

CYCLES_PER_US = 1980
PRODUCT_CYCLES = 100_000
EVENT_WITHOUT_TIMING = 2
Callback = ctypes.CFUNCTYPE(None, ctypes.c_uint64)


class Range(ctypes.Structure):
    _fields_ = (
        ("begin", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("is_write", ctypes.c_bool),
    )


def cuda(name: str, *arguments: Any) -> None:
    """Call a function of CUDA."""
    if status := getattr(library(), name)(*arguments):
        raise RuntimeError(f"CUDA error: {name} returned {status}")


# -- streams ---------------------------------------------------------------------------------------


class Stream:
    def __init__(self, address: int | None = None) -> None:
        made = ctypes.c_void_p(address)
        if address is None:
            non_blocking = 1
            cuda("cudaStreamCreateWithPriority", ctypes.byref(made), non_blocking, 0)
        self.cuda_stream = made.value or 0
        self.device_index = 0

    @property
    def handle(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.cuda_stream)

    def synchronize(self) -> None:
        cuda("cudaStreamSynchronize", self.handle)


class Event:
    def __init__(self) -> None:
        made = ctypes.c_void_p()
        cuda("cudaEventCreateWithFlags", ctypes.byref(made), EVENT_WITHOUT_TIMING)
        self.cuda_event = made.value

    def record(self, stream: Stream) -> None:
        cuda("cudaEventRecord", ctypes.c_void_p(self.cuda_event), stream.handle)


class CUDAGraph:
    def __init__(self) -> None:
        self.captured_on = Stream()

    def replay(self) -> None:
        library().simulation_replay(self.captured_on.handle, current_stream().handle)


_of_thread = threading.local()


def current_stream(device: object = None) -> Stream:
    if not hasattr(_of_thread, "stream"):
        _of_thread.stream = Stream(0)
    found: Stream = _of_thread.stream
    return found


@contextmanager
def stream(new: Stream) -> Iterator[None]:
    before = current_stream()
    _of_thread.stream = new
    try:
        yield
    finally:
        _of_thread.stream = before


@contextmanager
def graph(captured: CUDAGraph) -> Iterator[None]:
    with stream(captured.captured_on):
        library().simulation_capture(captured.captured_on.handle, 1)
        yield
        library().simulation_capture(captured.captured_on.handle, 0)


def sleep(cycles: int) -> None:
    """Keep the current stream busy."""
    microseconds = ctypes.c_uint64(cycles // CYCLES_PER_US)
    library().simulation_pause(current_stream().handle, microseconds)


def synchronize(device: object = None) -> None:
    cuda("cudaDeviceSynchronize")


# -- queued operations -----------------------------------------------------------------------------

# Most for ever, because a graph may repeat its operations.
_operations: dict[int, Callable[[], object]] = {}
_numbers = itertools.count()


def _run(number: int) -> None:
    _operations[number]()


_callback = Callback(_run)


def queue(operation: Callable[[], object], reads: list[Any], writes: list[Any]) -> int:
    """Queue an operation on the current stream, and return its number."""
    number = next(_numbers)
    _operations[number] = operation
    ranges = [*_ranges(reads, is_write=False), *_ranges(writes, is_write=True)]
    library().simulation_queue(
        current_stream().handle,
        _callback,
        ctypes.c_uint64(number),
        (Range * len(ranges))(*ranges),
        ctypes.c_size_t(len(ranges)),
    )
    return number


def _ranges(tensors: list[Any], *, is_write: bool) -> Iterator[Range]:
    """Yield the memory of tensors, in pieces without gaps."""
    for tensor in tensors:
        if tensor.is_contiguous() or tensor.dim() == 1:
            begin = tensor.data_ptr()
            num = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            yield Range(begin, begin + num * tensor.element_size(), is_write)
        else:
            yield from _ranges(list(tensor), is_write=is_write)


# -- tensors ---------------------------------------------------------------------------------------


def new(shape: Any, dtype: torch.dtype) -> DeviceTensor:
    """Return a tensor in memory of device 0, which is never freed."""
    size = torch.empty(shape, dtype=dtype, device="meta")
    num_bytes = max(1, size.numel() * size.element_size())
    address = ctypes.c_void_p()
    cuda("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(num_bytes))
    memory = (ctypes.c_uint8 * num_bytes).from_address(address.value or 0)
    flat = torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))
    return DeviceTensor(flat[: size.numel() * size.element_size()].view(dtype).view(shape))


def upload(values: torch.Tensor) -> DeviceTensor:
    made = new(values.shape, values.dtype)
    queue(lambda: made.at.copy_(values), [], [made.at])
    return made


def _at(value: Any) -> Any:
    """Return the memory of device tensors, also of those within a tuple."""
    if isinstance(value, tuple):
        return tuple(_at(part) for part in value)
    return value.at if isinstance(value, DeviceTensor) else value


def _memories(value: Any) -> list[Any]:
    if isinstance(value, tuple):
        return [memory for part in value for memory in _memories(part)]
    return [value.at] if isinstance(value, DeviceTensor) else []


def _zeros(value: Any) -> Any:
    """Return zeros in place of device tensors, which are not computed yet."""
    if isinstance(value, tuple):
        return tuple(_zeros(part) for part in value)
    # Not tensors of the device "meta", whose operations are slow, and import torch's compiler.
    return value.at.new_zeros(()).expand(value.shape) if isinstance(value, DeviceTensor) else value


def compute(operation: Callable[..., Any], *inputs: Any) -> DeviceTensor:
    """Queue an operation, and return its result."""
    like = operation(*_zeros(inputs))
    result = new(like.shape, like.dtype)
    memories = _at(inputs)
    queue(lambda: result.at.copy_(operation(*memories)), _memories(inputs), [result.at])
    return result


class DeviceTensor:
    """A tensor on device 0.

    Attributes:
        at: its memory, as a tensor of the CPU.
    """

    device = torch.device("cuda:0")
    is_cuda = True

    def __init__(self, at: torch.Tensor) -> None:
        self.at = at
        self.shape, self.dtype, self.ndim = at.shape, at.dtype, at.dim()
        self.data_ptr, self.stride = at.data_ptr, at.stride
        self.element_size, self.numel = at.element_size, at.numel
        self.is_contiguous, self.dim = at.is_contiguous, at.dim

    def __len__(self) -> int:
        return len(self.at)

    def __iter__(self) -> Iterator[DeviceTensor]:
        return (DeviceTensor(part) for part in self.at)

    def view(self, *shape: Any) -> DeviceTensor:
        return DeviceTensor(self.at.view(*shape))

    def transpose(self, first: int, second: int) -> DeviceTensor:
        return DeviceTensor(self.at.transpose(first, second))

    def __getitem__(self, key: Any) -> DeviceTensor:
        if _memories(key):
            return compute(lambda at, index: at[index], self, key)
        return DeviceTensor(self.at[key])

    def __setitem__(self, key: Any, value: Any) -> None:
        index, values = _at(key), _at(value)

        def write() -> None:
            self.at[index] = values

        written = self.at if _memories(key) else self.at[key]
        queue(write, _memories((key, value)), [written])

    def fill_(self, value: int) -> DeviceTensor:
        queue(lambda: self.at.fill_(value), [], [self.at])
        return self

    def copy_(self, other: DeviceTensor) -> DeviceTensor:
        queue(lambda: self.at.copy_(other.at), [other.at], [self.at])
        return self

    def __iadd__(self, value: int) -> DeviceTensor:
        queue(lambda: self.at.add_(value), [self.at], [self.at])
        return self

    def __matmul__(self, other: DeviceTensor) -> DeviceTensor:
        """Keep the current stream busy. No test reads a product, which would take too long."""
        sleep(PRODUCT_CYCLES)
        return self

    def all(self) -> DeviceTensor:
        return compute(torch.all, self)

    def __bool__(self) -> bool:
        return bool(self.cpu())

    def cpu(self) -> torch.Tensor:
        found = torch.empty(self.shape, dtype=self.dtype)
        number = queue(lambda: found.copy_(self.at), [self.at], [])
        current_stream().synchronize()
        del _operations[number]  # no graph has it, and `found` may be large
        return found


for _name in ("add", "floordiv", "mod", "eq"):

    def _operator(self: DeviceTensor, other: Any, name: str = f"__{_name}__") -> DeviceTensor:
        return compute(lambda one, two: getattr(one, name)(two), self, other)

    setattr(DeviceTensor, f"__{_name}__", _operator)


# -- torch -----------------------------------------------------------------------------------------


def _on_device(make: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Let a function that makes tensors make device tensors too."""

    def made(*arguments: Any, device: Any = None, **options: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return make(*arguments, device=device, **options)
        return upload(make(*arguments, **options))

    return made


def install() -> None:
    """Let this process's torch use the simulated GPU."""
    for name in ("arange", "ones", "randint", "randn", "tensor", "zeros"):
        setattr(torch, name, _on_device(getattr(torch, name)))
    torch.empty_like = lambda like: new(like.shape, like.dtype)
    torch.Tensor.cuda = upload
    for name, value in {
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": CUDAGraph,
        "_sleep": sleep,
        "current_stream": current_stream,
        "graph": graph,
        "is_available": lambda: True,
        "stream": stream,
        "synchronize": synchronize,
    }.items():
        setattr(torch.cuda, name, value)
