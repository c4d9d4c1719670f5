"""The part of cupy that `CudaRuntime` and `kvstow doctor` call, for a simulated machine."""

import sys
from contextlib import nullcontext
from threading import get_ident
from types import ModuleType, SimpleNamespace

import pytest

NO_DEVICE, NOT_READY, ILLEGAL_ADDRESS, CAPTURE_ELSEWHERE = 100, 600, 700, 906


class FakeCudaError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"CUDA error {status}")
        self.status = status


class FakeDriverError(FakeCudaError):
    pass


class FakeKernel:
    num_regs = 32
    kernel = None

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    def compile(self) -> None:
        if self._error is not None:
            raise self._error


class FakeEvent:
    def __init__(self, *, disable_timing: bool) -> None:
        assert disable_timing
        self.ptr = 7


class FakeCupy(ModuleType):
    """A machine with `num_devices` GPUs.

    Attributes:
        event_status: status that a query of an event returns; like cupy, it raises nothing.
        capture_status: status that a query of a capture raises, unless it is 0.
        calls: names of the copies and waits in their order.
        contexts: the context of each thread; a device's is its number plus 1.
    """

    def __init__(
        self,
        *,
        num_devices: int = 1,
        driver: int = 13000,
        built_for: int = 13020,
        compile_error: Exception | None = None,
    ) -> None:
        super().__init__("cupy")
        self.__version__ = "14.2.0"
        self.event_status = 0
        self.capture_status = 0
        self.calls: list[str] = []
        self.contexts: dict[int, int] = {}
        self.cuda = SimpleNamespace(
            runtime=SimpleNamespace(
                CUDARuntimeError=FakeCudaError,
                driverGetVersion=lambda: driver,
                runtimeGetVersion=lambda: built_for,
                getDeviceCount=lambda: _count(num_devices),
                getDeviceProperties=lambda device: {
                    "name": b"Fake H1",
                    # cupy returns the UUID up to its first zero byte.
                    "uuid": bytes([0x5A, 0, device]).partition(b"\0")[0],
                },
                deviceGetPCIBusId=lambda device: f"0000:{device:02X}:00.0",
                setDevice=self._set_device,
                free=lambda address: None,
                memGetInfo=lambda: (3 << 30, 4 << 30),
                eventQuery=lambda _: self.event_status,
                eventRecord=lambda *_: self.calls.append("record"),
                streamIsCapturing=lambda _: self._is_capturing(),
                streamSynchronize=lambda stream: self.calls.append(f"synchronize {stream}"),
                memcpy=lambda *_: self.calls.append("memcpy"),
                memcpyHostToDevice=1,
            ),
            driver=SimpleNamespace(
                CUDADriverError=FakeDriverError,
                ctxGetCurrent=lambda: self.contexts.get(get_ident(), 0),
                ctxSetCurrent=lambda context: self.contexts.update({get_ident(): context}),
            ),
            Device=lambda device: nullcontext(),
            Event=FakeEvent,
        )
        self._compile_error = compile_error

    def RawModule(self, *, code: str, options: tuple[str, ...]) -> SimpleNamespace:
        assert code
        assert options
        return SimpleNamespace(get_function=lambda _: FakeKernel(self._compile_error))

    def install(self, patch: pytest.MonkeyPatch) -> "FakeCupy":
        """Make this the module that `import cupy` returns."""
        patch.setitem(sys.modules, "cupy", self)
        return self

    def _set_device(self, device: int) -> None:
        self.contexts[get_ident()] = device + 1

    def _is_capturing(self) -> bool:
        if self.capture_status:
            raise FakeCudaError(self.capture_status)
        return False


def remove_cupy(patch: pytest.MonkeyPatch) -> None:
    """Make `import cupy` fail."""
    patch.setitem(sys.modules, "cupy", None)


def _count(num_devices: int) -> int:
    if num_devices == 0:
        raise FakeCudaError(NO_DEVICE)
    return num_devices
