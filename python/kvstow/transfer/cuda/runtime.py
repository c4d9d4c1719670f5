"""A CUDA device through cupy, which only this file imports, when a device is first used."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, Final, get_args

import numpy as np

from kvstow._core import ConfigError, StateError, TransferError
from kvstow.transfer.cuda.interface import (
    Copies,
    CudaError,
    DeviceEvent,
    Kernel,
    MappedMemory,
    Pack,
    Runtime,
    Stream,
)
from kvstow.transfer.cuda.kernels import SOURCE

# Enough threads in flight to fill the link several times over. A larger grid would slow compute
# more, because the cost grows with the multiprocessors that the kernels occupy.
GRID = 16
_BLOCK = 512
# The most urgent: CUDA takes the nearest priority that the device has. Kernels of a low priority
# would wait for whole prefills, and the copies behind them too. (Copies have no priority.)
_PRIORITY = -100
_SUCCESS, _INVALID_HANDLE, _NOT_READY = 0, 400, 600
_HOST_TO_DEVICE, _DEVICE_TO_HOST = 1, 2
# What CUDA answers while another thread captures a graph and forbids the question.
_CAPTURE = range(900, 909)
# After these errors every later call of the process fails too, and it must restart. Of them CUDA's
# reference says "leaves the process in an inconsistent state": Contained, IllegalAddress,
# LaunchTimeout, Assert, HardwareStackError, IllegalInstruction, MisalignedAddress,
# InvalidAddressSpace, InvalidPc, LaunchFailure, TensorMemoryLeak, MpsClientTerminated and
# ExternalDevice.
_POISONING = frozenset({226, 700, 702, 710, *range(714, 720), 721, 810, 911})
# After these errors there is no context: InitializationError (of a forked child), CudartUnloading,
# DeviceUninitialized, ECCUncorrectable, NvlinkUncorrectable, ContextIsDestroyed and Unknown.
_GONE = frozenset({3, 4, 201, 214, 220, 709, 999})
# With any other error CUDA refuses one call, for its arguments or for what the device lacks (701:
# too many resources for a launch, 209: no binary for it). The context works on. If a new kind of
# error does poison it, each later call reports that itself.
_FATAL = _POISONING | _GONE


class CudaEvent:
    """An event that happens when a stream has done the work that was queued on it.

    Any mover accepts it as an `Event`. `CudaMover` lets the device wait for it, not a thread.
    """

    def __init__(self, runtime: Runtime, handle: DeviceEvent) -> None:
        """Wrap a recorded event; `record` makes one."""
        self._runtime = runtime
        self.handle = handle

    @classmethod
    def record(cls, stream: object, *, device: int | None = None) -> CudaEvent:
        """Return the event of all work that is queued on a stream now.

        Args:
            stream: the stream that computes: of torch, of cupy, or its address as an int.
            device: number of the device, for a stream that is an int.

        Raises:
            ConfigError: this is not a stream, or cupy or the device is missing.
            StateError: the stream is being captured into a graph, which would capture the event.
        """
        address, number = _stream_address(stream, device)
        runtime = cuda_runtime(number)
        return cls(runtime, runtime.record_external(address))

    def wait(self) -> None:
        """Block until the event has happened."""
        self._runtime.synchronize(self.handle)

    def add_done_callback(self, callback: Callable[[], None], /) -> None:
        """Call `callback` once the event has happened, from a thread that waits for it."""

        def wait_and_notify() -> None:
            with suppress(TransferError):  # a later call of `wait` raises it
                self.wait()
            callback()

        threading.Thread(target=wait_and_notify, name="kvstow-event", daemon=True).start()


def _stream_address(stream: object, device: int | None) -> tuple[int, int]:
    """Return the address of a stream and the number of its device."""
    # Not isinstance of a protocol, which takes 10 us, and an engine records an event in each step.
    if hasattr(stream, "cuda_stream") and hasattr(stream, "device_index"):  # of torch
        return stream.cuda_stream, stream.device_index
    if hasattr(stream, "ptr") and hasattr(stream, "device_id"):  # of cupy
        # -1: a constant of cupy, which stands for a stream of the current device.
        number = device if stream.device_id < 0 else stream.device_id
        return stream.ptr, import_cupy().cuda.runtime.getDevice() if number is None else number
    if isinstance(stream, int) and device is not None:
        return stream, device
    raise ConfigError(
        f"stream is {stream!r}, expected a stream of torch.cuda or cupy.cuda: pass one, or the "
        "address of a stream and device="
    )


class CudaRuntime:
    """A CUDA device, through cupy; see `Runtime`.

    Attributes:
        device: number of the device.
        identity: name of this very device with this driver.
        pci_bus_id: its name in /sys/bus/pci/devices.
        lost: the error that lost the context; None while it works.
        grid: thread blocks of a kernel.
    """

    def __init__(self, device: int) -> None:
        """Open the device, and compile the kernels for it.

        Raises:
            ConfigError: cupy is missing or built for another CUDA, or there is no such device.
        """
        self._cupy = import_cupy()
        count = self._cupy.cuda.runtime.getDeviceCount()
        if not 0 <= device < count:
            raise ConfigError(
                f"device is {device}, but this process sees {count} CUDA devices, from 0; check "
                "CUDA_VISIBLE_DEVICES"
            )
        self.device = device
        self.grid = GRID
        self.lost: CudaError | None = None
        self._api: Final[Any] = self._cupy.cuda.runtime
        self._errors: tuple[Any, ...] = (
            self._cupy.cuda.runtime.CUDARuntimeError,
            self._cupy.cuda.driver.CUDADriverError,
        )
        # In a thread of its own, because CUDA would keep the device as the default of this one. To
        # restore another default would initialise that device, even if nothing uses it.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(self._open).result()

    def _open(self) -> None:
        """Make the context of the device current in this thread, and load the kernels into it."""
        api = self._api
        with self._reported("asking for the device's properties"):
            api.setDevice(self.device)
            api.free(0)  # makes the context, which the first use would make otherwise
            self._context = self._cupy.cuda.driver.ctxGetCurrent()
            properties = api.getDeviceProperties(self.device)
            name, uuid = bytes(properties["name"]).decode(), bytes(properties["uuid"]).hex()
            self.pci_bus_id = str(api.deviceGetPCIBusId(self.device)).lower()
        # The bus id too, because cupy returns the UUID only up to its first zero byte.
        self.identity = f"{name}, {uuid}, {self.pci_bus_id}, CUDA {api.driverGetVersion()}"
        self._kernels = self._compile()

    def _compile(self) -> dict[Kernel, Any]:
        """Compile and load the kernels now, so that no step has to."""
        try:
            with self._reported("loading the kernels"):
                module = self._cupy.RawModule(code=SOURCE, options=("-std=c++17",))
                kernels = {}
                for name in get_args(Kernel):
                    kernel = module.get_function(name)
                    kernel.compile()
                    # CUDA loads a kernel at its first launch, and may then wait for all other work.
                    # This question makes it load the kernel now.
                    _ = kernel.num_regs
                    # Its launch takes a stream. That of `kernel` would look up the current one.
                    kernels[name] = kernel.kernel
                return kernels
        except CudaError:
            raise
        except (
            Exception
        ) as error:  # many kinds: no compiler, a compiler too old for the device, ...
            built_for = self._api.runtimeGetVersion() // 1000
            raise ConfigError(
                f"cupy cannot compile the kernels ({error}); install NVRTC of CUDA {built_for}: "
                f"pip install 'cupy-cuda{built_for}x[ctk]', or the CUDA toolkit"
            ) from error

    def current(self) -> _Current:
        """See `Runtime.current`."""
        return _Current(self, self._cupy.cuda.driver, self._context)

    def stream(self) -> Stream:
        """Return a new stream of high priority, which its kernels need."""
        with self._calls("making a stream"):
            return self._cupy.cuda.Stream(non_blocking=True, priority=_PRIORITY)

    def event(self) -> DeviceEvent:
        """Return a new event without timing, which would make it slower."""
        with self._calls("making an event"):
            return self._cupy.cuda.Event(disable_timing=True)

    # A job makes many of the next calls. So each calls cupy's own function, and does more only
    # after an error.

    def record(self, event: DeviceEvent, stream: Stream) -> None:
        """See `Runtime.record`."""
        try:
            self._api.eventRecord(event.ptr, stream.ptr)
        except self._errors as error:
            raise self._failure("recording an event", error) from error

    def wait(self, stream: Stream, event: DeviceEvent) -> None:
        """See `Runtime.wait`."""
        try:
            self._api.streamWaitEvent(stream.ptr, event.ptr)
        except self._errors as error:
            raise self._failure("waiting for an event", error) from error

    def is_done(self, event: DeviceEvent) -> bool:
        """See `Runtime.is_done`."""
        # Not `event.done`, which is False for ever once the device is lost. cupy raises no error
        # for any status that eventQuery returns.
        status: int = self._api.eventQuery(event.ptr)
        if status == _SUCCESS:
            return True
        if status == _NOT_READY or status in _CAPTURE:
            return False
        error = self._api.CUDARuntimeError(status)
        # An event that this class has made becomes invalid only if its context goes, for example
        # because another library resets the device.
        is_gone = status == _INVALID_HANDLE
        raise self._failure("asking for an event", error, is_gone=is_gone) from error

    def zero(self, address: int, num_bytes: int, stream: Stream) -> None:
        """See `Runtime.zero`."""
        try:
            self._api.memsetAsync(address, 0, num_bytes, stream.ptr)
        except self._errors as error:
            raise self._failure("zeroing device memory", error) from error

    def copy(self, copies: Copies, stream: Stream) -> None:
        """See `Runtime.copy`."""
        runs, to_pitch, origin_pitch, row_bytes, to_host = copies
        address = stream.ptr
        kind = _DEVICE_TO_HOST if to_host else _HOST_TO_DEVICE
        copy, copy_rows = self._api.memcpyAsync, self._api.memcpy2DAsync
        is_tight = to_pitch == origin_pitch == row_bytes
        try:
            for to, origin, num_rows in runs:
                if is_tight or num_rows == 1:
                    copy(to, origin, num_rows * row_bytes, kind, address)
                else:
                    copy_rows(
                        to, to_pitch, origin, origin_pitch, row_bytes, num_rows, kind, address
                    )
        except self._errors as error:
            raise self._failure("queueing a copy", error) from error

    def launch(self, kernel: Kernel, pack: Pack, stream: Stream) -> None:
        """See `Runtime.launch`."""
        try:
            # cupy passes a Python int as 64 bits, which is what the kernels take.
            self._kernels[kernel]((self.grid,), (_BLOCK,), pack, 0, stream)
        except self._errors as error:
            raise self._failure("launching a kernel", error) from error

    def record_external(self, stream: int) -> DeviceEvent:
        """Record a new event on a stream of the engine, given by its address."""
        with self._calls("recording an event"):
            if self._api.streamIsCapturing(stream):
                raise StateError(
                    "the stream is being captured into a CUDA graph; record the event before or "
                    "after the capture"
                )
            event = self._cupy.cuda.Event(disable_timing=True)
            self._api.eventRecord(event.ptr, stream)
            return event

    def synchronize(self, event: DeviceEvent) -> None:
        """See `Runtime.synchronize`."""
        with self._calls("waiting for an event"):
            event.synchronize()

    def allocate(self, num_bytes: int) -> int:
        """Allocate without cupy's pool, which could reuse the memory out of order."""
        with self._calls(f"allocating {num_bytes} bytes of device memory"):
            return int(self._api.malloc(num_bytes))

    def free(self, address: int) -> None:
        """See `Runtime.free`."""
        if self.lost is None:
            with self._calls("freeing device memory"):
                self._api.free(address)

    def allocate_mapped(self, num_bytes: int) -> MappedMemory:
        """See `Runtime.allocate_mapped`."""
        with self._calls(f"allocating {num_bytes} bytes of pinned memory"):
            flags = self._api.hostAllocMapped | self._api.hostAllocPortable
            address = int(self._api.hostAlloc(num_bytes, flags))
            device_address = int(self._api.pointerGetAttributes(address).devicePointer)
        buffer = (ctypes.c_uint8 * num_bytes).from_address(address)
        return MappedMemory(np.frombuffer(memoryview(buffer), dtype=np.uint8), device_address)

    def free_mapped(self, memory: MappedMemory) -> None:
        """See `Runtime.free_mapped`."""
        if self.lost is None:
            with self._calls("freeing pinned memory"):
                self._api.freeHost(memory.host.ctypes.data)

    def upload(self, address: int, data: bytes) -> None:
        """See `Runtime.upload`."""
        source = np.frombuffer(data, dtype=np.uint8)
        with self._calls("writing device memory"):
            kind = self._api.memcpyHostToDevice
            self._api.memcpy(address, source.ctypes.data, len(data), kind)
            # A copy from pageable memory may return before the bytes arrive. Streams that do not
            # wait for the legacy stream would not wait for them.
            self._api.streamSynchronize(0)

    def register(self, address: int, num_bytes: int) -> None:
        """Pin host memory for every device, and map it."""
        portable, mapped = 1, 2  # cupy has no names for these flags
        with self._calls(f"pinning {num_bytes} bytes"):
            self._api.hostRegister(address, num_bytes, portable | mapped)

    def unregister(self, address: int) -> None:
        """See `Runtime.unregister`."""
        if self.lost is None:
            with self._calls("unpinning memory"):
                self._api.hostUnregister(address)

    @contextmanager
    def _calls(self, doing: str) -> Iterator[None]:
        """Make the device current in this thread, and turn CUDA's errors into `CudaError`."""
        if self.lost is not None:
            raise self.lost
        with self._reported(doing), self.current():
            yield

    @contextmanager
    def _reported(self, doing: str) -> Iterator[None]:
        """Turn CUDA's errors into `CudaError`."""
        try:
            yield
        except self._errors as error:
            raise self._failure(doing, error) from error

    def _failure(self, doing: str, error: Any, *, is_gone: bool = False) -> CudaError:
        """Return cupy's error as a `CudaError`, and remember the loss of the device."""
        is_fatal = is_gone or error.status in _FATAL
        advice = "; this process has lost the device, restart it" if is_fatal else ""
        failure = CudaError(f"{doing} failed: {error}{advice}", is_fatal=is_fatal)
        if is_fatal:
            self.lost = failure
        return failure


class _Current:
    """Makes the context of a device current in this thread, and then the one before it, if any.

    Unlike a call that sets the device, this never makes a context.
    """

    __slots__ = ("_before", "_context", "_driver", "_runtime")

    def __init__(self, runtime: CudaRuntime, driver: Any, context: int) -> None:
        self._runtime, self._driver, self._context = runtime, driver, context

    def __enter__(self) -> None:
        self._before = self._driver.ctxGetCurrent()
        if self._before != self._context:
            self._change(self._context)

    def __exit__(self, *_: object) -> None:
        if self._before != self._context:
            self._change(self._before)

    def _change(self, context: int) -> None:
        with self._runtime._reported("changing the thread's context"):
            self._driver.ctxSetCurrent(context)


_runtimes: dict[int, CudaRuntime] = {}
_runtimes_lock = threading.Lock()
# A forked child cannot use the CUDA context of its parent.
os.register_at_fork(after_in_child=_runtimes.clear)


def cuda_runtime(device: int) -> CudaRuntime:
    """Return this process's runtime of a device; see `CudaRuntime` for the errors."""
    with _runtimes_lock:
        if device not in _runtimes:
            _runtimes[device] = CudaRuntime(device)
        return _runtimes[device]


def import_cupy() -> Any:
    """Return the module cupy, if it can reach a GPU.

    Raises:
        ConfigError: cupy is not installed, does not load, or is built for a newer CUDA than the
            driver supports, or there is no GPU.
    """
    try:
        import cupy  # noqa: PLC0415 - from an extra, and slow to import
    except ImportError as error:
        raise ConfigError(
            f"cupy is not installed, and the GPU mover needs it ({error}): pip install "
            "'kvstow[cuda13]', or 'kvstow[cuda12]' for a driver of CUDA 12"
        ) from error
    except OSError as error:  # cupy creates its folder when it loads
        raise ConfigError(
            f"cupy does not load ({error}), and it needs a folder for compiled kernels: set "
            "CUPY_CACHE_DIR to a folder that this user may create or write"
        ) from error
    api = cupy.cuda.runtime
    driver, built_for = api.driverGetVersion() // 1000, api.runtimeGetVersion() // 1000
    if driver == 0:
        raise ConfigError(
            "this machine has no CUDA driver, so cupy reaches no GPU; install the driver, or use "
            "HostMover (--mover host)"
        )
    if driver < built_for:
        raise ConfigError(
            f"cupy is built for CUDA {built_for}, but the driver supports CUDA {driver}: pip "
            f"uninstall cupy-cuda{built_for}x, pip install 'kvstow[cuda{driver}]'"
        )
    try:
        count = api.getDeviceCount()
    except api.CUDARuntimeError as error:
        raise ConfigError(
            f"cupy reaches no GPU ({error}); check nvidia-smi and CUDA_VISIBLE_DEVICES"
        ) from error
    if count == 0:
        raise ConfigError("this process sees no GPU; check CUDA_VISIBLE_DEVICES")
    return cupy
