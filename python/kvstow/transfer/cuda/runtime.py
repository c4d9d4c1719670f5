"""A CUDA device through cupy, which is imported only here and only when a device is asked for."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np

from kvstow._core import ConfigError, StateError, TransferError
from kvstow.transfer.cuda.interface import (
    Copies,
    CudaError,
    DeviceEvent,
    MappedMemory,
    Pack,
    Runtime,
    Stream,
)
from kvstow.transfer.cuda.kernels import SOURCE

__all__ = ["CudaEvent", "CudaRuntime", "cuda_runtime", "import_cupy"]

# Enough threads in flight to fill the link several times over, few enough that compute hardly
# notices: what gather and scatter cost others grows with the multiprocessors that they take.
_GRID = 16
_BLOCK = 512
# The most urgent; CUDA takes the nearest that the device has. Kernels of a low priority would wait
# for whole prefills, and the copies behind them too. (Copies themselves know no priority.)
_PRIORITY = -100
_SUCCESS, _NOT_READY = 0, 600
# What CUDA answers while another thread captures a graph: that it must not be asked now.
_CAPTURE = range(900, 909)
# After these every later call of the process fails too, and it must be restarted. CUDA's reference
# says so ("leaves the process in an inconsistent state") of Contained, IllegalAddress,
# LaunchTimeout, Assert, HardwareStackError, IllegalInstruction, MisalignedAddress,
# InvalidAddressSpace, InvalidPc, LaunchFailure, TensorMemoryLeak, MpsClientTerminated and
# ExternalDevice.
_POISONING = frozenset({226, 700, 702, 710, *range(714, 720), 721, 810, 911})
# InitializationError (of a forked child), CudartUnloading, DeviceUninitialized, ECCUncorrectable,
# NvlinkUncorrectable, ContextIsDestroyed and Unknown: there is no context to go on with.
_GONE = frozenset({3, 4, 201, 214, 220, 709, 999})
# Any other error is a call that was refused, for its arguments or for what the device lacks (701:
# too many resources for a launch, 209: no binary for it): the context is as it was. If a new kind
# of error does poison it, each later call says so itself.
_FATAL = _POISONING | _GONE


class CudaEvent:
    """All that was queued on a stream when it was recorded: what a transfer waits for.

    As an `Event` it serves any mover; `CudaMover` lets the device wait, and no thread.
    """

    def __init__(self, runtime: Runtime, handle: DeviceEvent) -> None:
        """Wrap an event that was recorded; `record` makes one."""
        self._runtime = runtime
        self.handle = handle

    @classmethod
    def record(cls, stream: object, *, device: int | None = None) -> CudaEvent:
        """Take down what is queued on a stream of torch or cupy, or on a raw one, by now.

        Args:
            stream: the stream that computes.
            device: of a raw stream (an int), its device.

        Raises:
            ConfigError: no stream, or cupy or its device is missing.
            StateError: the stream is being captured into a graph, which would capture the wait.
        """
        address, number = _stream_address(stream, device)
        runtime = cuda_runtime(number)
        return cls(runtime, runtime.record_external(address))

    def wait(self) -> None:
        """Block until it has happened."""
        self._runtime.synchronize(self.handle)

    def add_done_callback(self, callback: Callable[[], None], /) -> None:
        """Call `callback` once it has happened; a thread waits for that."""

        def wait_and_tell() -> None:
            with suppress(TransferError):  # `wait` tells the caller why
                self.wait()
            callback()

        threading.Thread(target=wait_and_tell, name="kvstow-event", daemon=True).start()


@runtime_checkable
class _TorchStream(Protocol):
    @property
    def cuda_stream(self) -> int: ...
    @property
    def device_index(self) -> int: ...


@runtime_checkable
class _CupyStream(Protocol):
    @property
    def ptr(self) -> int: ...
    @property
    def device_id(self) -> int: ...


def _stream_address(stream: object, device: int | None) -> tuple[int, int]:
    """The address of a stream, and its device."""
    if isinstance(stream, _TorchStream):
        return stream.cuda_stream, stream.device_index
    if isinstance(stream, _CupyStream):
        # -1: one of cupy's constants, which stand for the current device's.
        number = device if stream.device_id < 0 else stream.device_id
        return stream.ptr, _current_device() if number is None else number
    if isinstance(stream, int) and device is not None:
        return stream, device
    raise ConfigError(
        f"stream is {stream!r}; pass a stream of torch.cuda or cupy.cuda, or the address of one "
        "and its device"
    )


class CudaRuntime:
    """A CUDA device, through cupy; see `Runtime`.

    Attributes:
        device: its number.
        identity: which device this is, and with which driver.
        pci_bus_id: where it is plugged in, as /sys/bus/pci/devices names it.
        lost: what the context was lost to; None while it works.
    """

    def __init__(self, device: int) -> None:
        """Take the device, and compile the kernels for it.

        Raises:
            ConfigError: cupy is missing or made for another CUDA, or there is no such device.
        """
        self._cupy = import_cupy()
        count = self._cupy.cuda.runtime.getDeviceCount()
        if not 0 <= device < count:
            raise ConfigError(
                f"there is no CUDA device {device}: this process sees {count}, from 0; check "
                "CUDA_VISIBLE_DEVICES"
            )
        self.device = device
        self.lost: CudaError | None = None
        self._api: Final[Any] = self._cupy.cuda.runtime
        self._errors: tuple[Any, ...] = (
            self._cupy.cuda.runtime.CUDARuntimeError,
            self._cupy.cuda.driver.CUDADriverError,
        )
        with self._calls("asking for the device's properties"):
            properties = self._api.getDeviceProperties(device)
            name, uuid = bytes(properties["name"]).decode(), bytes(properties["uuid"]).hex()
            self.pci_bus_id = str(self._api.deviceGetPCIBusId(device)).lower()
        # Where it is plugged in, too: cupy gives the UUID only up to its first zero byte.
        driver = self._api.driverGetVersion()
        self.identity = f"{name}, {uuid}, {self.pci_bus_id}, CUDA {driver}"
        self._gather, self._scatter = self._kernels()

    def _kernels(self) -> tuple[Any, Any]:
        """Compile them now, and not in a step."""
        try:
            with self._calls("loading the kernels"):
                module = self._cupy.RawModule(code=SOURCE, options=("-std=c++17",))
                kernels = module.get_function("gather"), module.get_function("scatter")
                for kernel in kernels:
                    kernel.compile()
                    # CUDA would load it at its first launch, and may wait for all else that runs:
                    # to ask for this makes it do so now.
                    _ = kernel.num_regs
                return kernels
        except CudaError:
            raise
        except Exception as error:  # of many kinds: no compiler, one too old for the device, ...
            built_for = self._api.runtimeGetVersion() // 1000
            raise ConfigError(
                f"cupy cannot compile the kernels ({error}); it needs NVRTC of CUDA {built_for}: "
                f"pip install 'cupy-cuda{built_for}x[ctk]', or install the CUDA toolkit"
            ) from error

    def stream(self) -> Stream:
        """Make one of a high priority, for the sake of its kernels."""
        with self._calls("making a stream"):
            return self._cupy.cuda.Stream(non_blocking=True, priority=_PRIORITY)

    def event(self) -> DeviceEvent:
        """Make one without timing, which would make it slower."""
        with self._calls("making an event"):
            return self._cupy.cuda.Event(disable_timing=True)

    def record(self, event: DeviceEvent, stream: Stream) -> None:
        """See `Runtime.record`."""
        with self._calls("recording an event"):
            event.record(stream)

    def record_external(self, stream: int) -> DeviceEvent:
        """Record a new event on a stream that is someone else's."""
        with self._calls("recording an event"):
            if self._api.streamIsCapturing(stream):
                raise StateError(
                    "the stream is being captured into a CUDA graph; record the event before the "
                    "capture begins or after it ends"
                )
            event = self._cupy.cuda.Event(disable_timing=True)
            self._api.eventRecord(event.ptr, stream)
            return event

    def wait(self, stream: Stream, event: DeviceEvent) -> None:
        """See `Runtime.wait`."""
        with self._calls("waiting for an event"):
            stream.wait_event(event)

    def is_done(self, event: DeviceEvent) -> bool:
        """See `Runtime.is_done`."""
        with self._calls("asking for an event"):
            # Not `event.done`, for which an event of a lost device is one that never comes: cupy
            # raises nothing here, whatever the status.
            status = int(self._api.eventQuery(event.ptr))
            if status not in (_SUCCESS, _NOT_READY, *_CAPTURE):
                raise self._api.CUDARuntimeError(status)
            return status == _SUCCESS

    def synchronize(self, event: DeviceEvent) -> None:
        """See `Runtime.synchronize`."""
        with self._calls("waiting for an event"):
            event.synchronize()

    def allocate(self, num_bytes: int) -> int:
        """Take it from the device, past cupy's pool, whose memory could be reused unordered."""
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
            # Of pageable memory it returns once that was read, which may be before the bytes
            # arrive; and streams that do not wait for the legacy one would not wait for them.
            self._api.streamSynchronize(0)

    def zero(self, address: int, num_bytes: int, stream: Stream) -> None:
        """See `Runtime.zero`."""
        with self._calls("zeroing device memory"):
            self._api.memsetAsync(address, 0, num_bytes, stream.ptr)

    def copy(self, copies: Copies, stream: Stream) -> None:
        """See `Runtime.copy`."""
        api, address, row_bytes = self._api, stream.ptr, copies.row_bytes
        to_pitch, origin_pitch = copies.to_pitch_bytes, copies.origin_pitch_bytes
        kind = api.memcpyDeviceToHost if copies.to_host else api.memcpyHostToDevice
        is_tight = to_pitch == origin_pitch == row_bytes
        with self._calls("queueing a copy"):
            for to, origin, num_rows in copies.runs:
                if is_tight or num_rows == 1:
                    api.memcpyAsync(to, origin, num_rows * row_bytes, kind, address)
                else:
                    api.memcpy2DAsync(
                        to, to_pitch, origin, origin_pitch, row_bytes, num_rows, kind, address
                    )

    def gather(self, pack: Pack, stream: Stream) -> None:
        """See `Runtime.gather`."""
        self._launch(self._gather, pack, stream)

    def scatter(self, pack: Pack, stream: Stream) -> None:
        """See `Runtime.scatter`."""
        self._launch(self._scatter, pack, stream)

    def _launch(self, kernel: Any, pack: Pack, stream: Stream) -> None:
        # With their types: cupy passes a Python int as 64 bits whatever the kernel takes.
        arguments = (
            np.uint64(pack.chunks),
            np.uint32(pack.num_chunks),
            np.uint64(pack.block_ids),
            np.uint32(pack.num_blocks),
            np.uint64(pack.staging),
            np.uint64(pack.staging_stride_bytes),
            np.uint64(pack.checksums),
        )
        with self._calls("launching a kernel"), stream:
            kernel((_GRID,), (_BLOCK,), arguments)

    def register(self, address: int, num_bytes: int) -> None:
        """Pin it for every device, and map it."""
        portable, mapped = 1, 2  # cupy has no names for them
        with self._calls(f"pinning {num_bytes} bytes"):
            self._api.hostRegister(address, num_bytes, portable | mapped)

    def unregister(self, address: int) -> None:
        """See `Runtime.unregister`."""
        if self.lost is None:
            with self._calls("unpinning memory"):
                self._api.hostUnregister(address)

    @contextmanager
    def _calls(self, doing: str) -> Iterator[None]:
        """Make the device current in this thread, and CUDA's errors ours."""
        if self.lost is not None:
            raise self.lost
        try:
            with self._cupy.cuda.Device(self.device):
                yield
        except self._errors as error:
            is_fatal = error.status in _FATAL
            advice = "; the device is lost to this process, restart it" if is_fatal else ""
            failure = CudaError(f"{doing} failed: {error}{advice}", is_fatal=is_fatal)
            if is_fatal:
                self.lost = failure
            raise failure from error


_runtimes: dict[int, CudaRuntime] = {}
_runtimes_lock = threading.Lock()
# Those of the parent process: a child cannot go on with its context.
os.register_at_fork(after_in_child=_runtimes.clear)


def cuda_runtime(device: int) -> CudaRuntime:
    """The device's one runtime in this process; see `CudaRuntime` for the errors."""
    with _runtimes_lock:
        if device not in _runtimes:
            _runtimes[device] = CudaRuntime(device)
        return _runtimes[device]


def import_cupy() -> Any:
    """The module, where it can reach a GPU.

    Raises:
        ConfigError: it is not installed, is made for a CUDA that the driver does not know, or there
            is no GPU.
    """
    try:
        import cupy  # noqa: PLC0415 - of an extra, and slow to import
    except ImportError as error:
        raise ConfigError(
            f"moving blocks of a GPU needs cupy ({error}): pip install 'kvstow[cuda13]', or "
            "'kvstow[cuda12]' with a driver of CUDA 12"
        ) from error
    api = cupy.cuda.runtime
    driver, built_for = api.driverGetVersion() // 1000, api.runtimeGetVersion() // 1000
    if driver == 0:
        raise ConfigError(
            "there is no CUDA driver on this machine, so no GPU can be reached; without one, move "
            "blocks with HostMover (--mover host)"
        )
    if driver < built_for:
        raise ConfigError(
            f"the cupy that is installed is made for CUDA {built_for}, and the driver is of CUDA "
            f"{driver}: pip uninstall cupy-cuda{built_for}x, pip install 'kvstow[cuda{driver}]'"
        )
    try:
        count = api.getDeviceCount()
    except api.CUDARuntimeError as error:
        raise ConfigError(
            f"no GPU can be reached ({error}); check nvidia-smi and CUDA_VISIBLE_DEVICES"
        ) from error
    if count == 0:
        raise ConfigError("this process sees no GPU; check CUDA_VISIBLE_DEVICES")
    return cupy


def _current_device() -> int:
    return int(import_cupy().cuda.runtime.getDevice())
