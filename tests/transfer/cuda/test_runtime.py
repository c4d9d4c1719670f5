"""`CudaRuntime` on a simulated cupy. tests/gpu/ tests it on a device."""

import cuda.bindings.runtime as cuda_api
import numpy as np
import pytest
from tests.transfer.cuda.fake_cupy import (
    CAPTURE_ELSEWHERE,
    ILLEGAL_ADDRESS,
    NOT_READY,
    FakeCupy,
    remove_cupy,
)
from tests.transfer.cuda.simulated_gpu import SimulatedGpu

from kvstow import ConfigError, TransferError
from kvstow.transfer import BlockLayout, CudaError, CudaLink, CudaMover, HostArena
from kvstow.transfer.cuda.runtime import CudaRuntime, import_cupy


def test_missing_cupy_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    remove_cupy(monkeypatch)
    with pytest.raises(ConfigError, match=r"pip install 'kvstow\[cuda13\]'"):
        import_cupy()


@pytest.mark.parametrize(
    ("machine", "says"),
    [
        (FakeCupy(driver=0), "this machine has no CUDA driver"),
        (FakeCupy(driver=12080), r"pip uninstall cupy-cuda13x, pip install 'kvstow\[cuda12\]'"),
        (FakeCupy(num_devices=0), "cupy reaches no GPU .*nvidia-smi"),
    ],
)
def test_error_names_why_cupy_reaches_no_gpu(
    monkeypatch: pytest.MonkeyPatch, machine: FakeCupy, says: str
) -> None:
    machine.install(monkeypatch)
    with pytest.raises(ConfigError, match=says):
        import_cupy()


def test_newer_driver_runs_an_older_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = FakeCupy(driver=13000, built_for=12090).install(monkeypatch)
    assert import_cupy() is cupy


@pytest.mark.parametrize("device", [1, -1])
def test_missing_device_is_a_config_error(monkeypatch: pytest.MonkeyPatch, device: int) -> None:
    FakeCupy().install(monkeypatch)
    with pytest.raises(ConfigError, match=f"device is {device}, but this process sees 1"):
        CudaRuntime(device)


def test_missing_compiler_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCupy(compile_error=RuntimeError("failed to load libnvrtc.so")).install(monkeypatch)
    with pytest.raises(ConfigError, match=r"libnvrtc.*pip install 'cupy-cuda13x\[ctk\]'"):
        CudaRuntime(0)


def test_query_of_an_event_raises_on_a_lost_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = FakeCupy().install(monkeypatch)
    runtime = CudaRuntime(0)
    event = runtime.event()
    assert runtime.is_done(event)
    cupy.event_status = NOT_READY
    assert not runtime.is_done(event)
    cupy.event_status = CAPTURE_ELSEWHERE  # ask again later
    assert not runtime.is_done(event)
    assert runtime.lost is None
    cupy.event_status = ILLEGAL_ADDRESS
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
def test_refused_call_does_not_lose_the_device(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    cupy = FakeCupy().install(monkeypatch)
    runtime = CudaRuntime(0)
    cupy.capture_status = status_of(name)
    with pytest.raises(CudaError) as raised:
        runtime.record_external(0)
    assert not raised.value.is_fatal
    assert "restart" not in str(raised.value)
    cupy.capture_status = 0
    runtime.record_external(0)


@pytest.mark.parametrize("name", [*POISONING, *GONE])
def test_error_that_poisons_the_context_loses_the_device(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    cupy = FakeCupy().install(monkeypatch)
    runtime = CudaRuntime(0)
    cupy.capture_status = status_of(name)
    with pytest.raises(CudaError, match="restart it") as raised:
        runtime.record_external(0)
    assert raised.value.is_fatal
    cupy.capture_status = 0
    with pytest.raises(CudaError, match="restart it"):
        runtime.record_external(0)


def test_devices_with_a_common_uuid_prefix_have_different_identities(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    FakeCupy(num_devices=2).install(monkeypatch)
    assert CudaRuntime(0).identity != CudaRuntime(1).identity


@pytest.mark.parametrize("before", [0, 1])
def test_thread_keeps_the_context_that_it_had(monkeypatch: pytest.MonkeyPatch, before: int) -> None:
    """A thread without a context must not get one of device 0, which may be nobody's."""
    cupy = FakeCupy(num_devices=2).install(monkeypatch)
    driver = cupy.cuda.driver
    driver.ctxSetCurrent(before)
    runtime = CudaRuntime(1)
    assert driver.ctxGetCurrent() == before
    with pytest.raises(ZeroDivisionError), runtime.current():
        assert driver.ctxGetCurrent() == 2
        raise ZeroDivisionError
    assert driver.ctxGetCurrent() == before
    runtime.upload(4096, b"abc")
    assert driver.ctxGetCurrent() == before
    with runtime.current(), runtime.current():
        assert driver.ctxGetCurrent() == 2
    assert driver.ctxGetCurrent() == before


def test_upload_waits_for_its_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = FakeCupy().install(monkeypatch)
    CudaRuntime(0).upload(4096, b"abc")
    assert cupy.calls == ["memcpy", "synchronize 0"]


class _Failing:
    """An event that has happened, and whose `wait` raises an unusual error."""

    def wait(self) -> None:
        raise ValueError("lost it")

    def add_done_callback(self, callback: object, /) -> None:
        assert callable(callback)
        callback()


@pytest.fixture
def runtime() -> SimulatedGpu:
    return SimulatedGpu(lambda able: able[0])


@pytest.fixture
def mover(runtime: SimulatedGpu) -> CudaMover:
    memory = np.zeros((1, 4, 64), dtype=np.uint8)
    regions = BlockLayout.from_arrays(list(memory)).regions
    layout = BlockLayout(4, regions, owners=(memory,), device=0)
    link = CudaLink(runtime, staging_bytes=4096)
    return CudaMover(layout, HostArena(4, 64), link=link, path="packed")


def test_any_error_of_an_event_fails_its_job(mover: CudaMover) -> None:
    ticket = mover.store([1], [0], after=_Failing())
    with pytest.raises(TransferError, match="lost it"):
        ticket.wait(5)


def test_job_without_cuda_events_fails(mover: CudaMover, runtime: SimulatedGpu) -> None:
    error = CudaError("no more events", is_fatal=True)

    def refuse() -> object:
        raise error

    runtime.event = refuse  # type: ignore[assignment,method-assign]
    ticket = mover.store([1], [0], after=_Now())
    assert ticket.poll()
    assert ticket.error is error


class _Now(_Failing):
    def wait(self) -> None:
        pass
