"""`CudaRuntime`: what it says of a machine, its errors, and the context of a thread."""

from __future__ import annotations

import sys
import threading

import cuda.bindings.runtime as cuda_api
import cupy
import pytest
from tests.transfer.cuda.simulation import library

from kvstow import ConfigError
from kvstow.transfer import CudaError, CudaEvent
from kvstow.transfer.cuda.runtime import CudaRuntime, cuda_runtime, import_cupy

INVALID_HANDLE, NOT_READY, ILLEGAL_ADDRESS, CAPTURE_ELSEWHERE = 400, 600, 700, 906


def test_missing_cupy_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvstow\[cuda13\]'"):
        import_cupy()


@pytest.mark.parametrize(
    ("machine", "says"),
    [
        ({"driver": 0}, "this machine has no CUDA driver"),
        ({"driver": 12080}, r"pip uninstall cupy-cuda13x, pip install 'kvstow\[cuda12\]'"),
        ({"num_devices": 0}, "cupy reaches no GPU .*nvidia-smi"),
    ],
)
def test_error_names_why_cupy_reaches_no_gpu(machine: dict[str, int], says: str) -> None:
    library.machine(**machine)
    with pytest.raises(ConfigError, match=says):
        import_cupy()


def test_newer_driver_runs_an_older_cupy() -> None:
    library.machine(driver=13000, runtime=12090)
    assert import_cupy() is cupy


@pytest.mark.parametrize("device", [2, -1])
def test_missing_device_is_a_config_error(device: int) -> None:
    with pytest.raises(ConfigError, match=f"device is {device}, but this process sees 2"):
        CudaRuntime(device)


def break_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let cupy find no compiler."""

    def no_compiler(*_: object, **__: object) -> None:
        raise RuntimeError("failed to load libnvrtc.so")

    cupy.clear_memo()
    monkeypatch.setattr(cupy.cuda.compiler, "_compile_with_cache_cuda", no_compiler)


def test_missing_compiler_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    break_compiler(monkeypatch)
    with pytest.raises(ConfigError, match=r"libnvrtc.*pip install 'cupy-cuda13x\[ctk\]'"):
        CudaRuntime(0)


@pytest.mark.parametrize("lost", [ILLEGAL_ADDRESS, INVALID_HANDLE])
def test_query_of_an_event_raises_on_a_lost_device(lost: int) -> None:
    runtime = CudaRuntime(0)
    event = runtime.event()
    assert runtime.is_done(event)
    for status in (NOT_READY, CAPTURE_ELSEWHERE):  # ask again later
        library.fail("cudaEventQuery", status)
        assert not runtime.is_done(event)
    assert runtime.lost is None
    library.fail("cudaEventQuery", lost)
    with pytest.raises(CudaError, match="restart it") as raised:
        runtime.is_done(event)
    assert raised.value.is_fatal
    assert runtime.lost is raised.value


# The poisoning errors of CUDA's reference by name, apart from the numbers in the code.
POISONING = [
    "Contained",
    "IllegalAddress",
    "LaunchTimeout",
    "Assert",
    "HardwareStackError",
    "IllegalInstruction",
    "MisalignedAddress",
    "InvalidAddressSpace",
    "InvalidPc",
    "LaunchFailure",
    "TensorMemoryLeak",
    "MpsClientTerminated",
    "ExternalDevice",
]
GONE = [
    "InitializationError",
    "CudartUnloading",
    "DeviceUninitialized",
    "ECCUncorrectable",
    "NvlinkUncorrectable",
    "ContextIsDestroyed",
    "Unknown",
]
REFUSED = sorted(
    error.name.removeprefix("cudaError")
    for error in cuda_api.cudaError_t
    if error.name not in {"cudaSuccess", "cudaErrorNotReady"}
    and error.name.removeprefix("cudaError") not in {*POISONING, *GONE}
)


def status_of(name: str) -> int:
    return int(getattr(cuda_api.cudaError_t, f"cudaError{name}").value)


def test_poisoning_errors_are_those_of_the_cuda_reference() -> None:
    poisoning_names = {
        error.name.removeprefix("cudaError")
        for error in cuda_api.cudaError_t
        if "inconsistent state" in (error.__doc__ or "")
    }
    assert poisoning_names <= set(POISONING), "a newer CUDA has more"


@pytest.mark.parametrize("name", REFUSED)
def test_refused_call_does_not_lose_the_device(name: str) -> None:
    runtime = CudaRuntime(0)
    library.fail("cudaStreamIsCapturing", status_of(name))
    with pytest.raises(CudaError) as raised:
        runtime.record_external(0)
    assert not raised.value.is_fatal
    assert "restart" not in str(raised.value)
    runtime.record_external(0)


@pytest.mark.parametrize("name", [*POISONING, *GONE])
def test_error_that_poisons_the_context_loses_the_device(name: str) -> None:
    runtime = CudaRuntime(0)
    library.fail("cudaStreamIsCapturing", status_of(name))
    for _ in range(2):
        with pytest.raises(CudaError, match="restart it") as raised:
            runtime.record_external(0)
        assert raised.value.is_fatal


def test_devices_with_a_common_uuid_prefix_have_different_identities() -> None:
    assert CudaRuntime(0).identity != CudaRuntime(1).identity


@pytest.mark.parametrize("before", [0, 1])
def test_thread_keeps_the_context_that_it_had(before: int) -> None:
    """A thread without a context must not get one of device 0, which may be nobody's."""
    driver = cupy.cuda.driver
    driver.ctxSetCurrent(before)
    runtime = CudaRuntime(1)
    assert driver.ctxGetCurrent() == before
    with pytest.raises(ZeroDivisionError), runtime.current():
        assert driver.ctxGetCurrent() == 2
        raise ZeroDivisionError
    assert driver.ctxGetCurrent() == before
    with runtime.current(), runtime.current():
        assert driver.ctxGetCurrent() == 2
    assert driver.ctxGetCurrent() == before
    assert not library.has_context(0)


def test_event_that_fails_calls_back_too() -> None:
    event = CudaEvent.record(cuda_runtime(0).stream())
    library.fail("cudaEventSynchronize", INVALID_HANDLE)
    called = threading.Event()
    event.add_done_callback(called.set)
    assert called.wait(20), "whoever waits for the event hangs"


@pytest.mark.parametrize("device", [0, 1])
def test_event_of_the_null_stream_is_of_the_current_device(device: int) -> None:
    with cupy.cuda.Device(device):
        event = CudaEvent.record(cupy.cuda.Stream.null)
    assert event._runtime is cuda_runtime(device)
