"""What `CudaRuntime` makes of cupy's answers; the device itself is in tests/gpu/."""

import numpy as np
import pytest
from tests.transfer.any_order import AnyOrder
from tests.transfer.fake_cupy import (
    CAPTURE_ELSEWHERE,
    ILLEGAL_ADDRESS,
    NOT_READY,
    FakeCupy,
    remove_cupy,
)

from kvstow import ConfigError, TransferError
from kvstow.transfer import BlockLayout, CudaError, CudaLink, CudaMover, HostArena
from kvstow.transfer.cuda_runtime import CudaRuntime, import_cupy


def test_cupy_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    remove_cupy(monkeypatch)
    with pytest.raises(ConfigError, match=r"pip install 'kvstow\[cuda13\]'"):
        import_cupy()


@pytest.mark.parametrize(
    ("machine", "says"),
    [
        (FakeCupy(driver=0), "there is no CUDA driver"),
        (FakeCupy(driver=12080), r"pip uninstall cupy-cuda13x, pip install 'kvstow\[cuda12\]'"),
        (FakeCupy(num_devices=0), "no GPU can be reached .*nvidia-smi"),
    ],
)
def test_a_machine_that_cannot_says_why(
    monkeypatch: pytest.MonkeyPatch, machine: FakeCupy, says: str
) -> None:
    machine.install(monkeypatch)
    with pytest.raises(ConfigError, match=says):
        import_cupy()


def test_a_newer_driver_runs_an_older_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = FakeCupy(driver=13000, built_for=12090).install(monkeypatch)
    assert import_cupy() is cupy


@pytest.mark.parametrize("device", [1, -1])
def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch, device: int) -> None:
    FakeCupy().install(monkeypatch)
    with pytest.raises(ConfigError, match=f"no CUDA device {device}: this process sees 1"):
        CudaRuntime(device)


def test_no_compiler_is_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCupy(compile_error=RuntimeError("failed to load libnvrtc.so")).install(monkeypatch)
    with pytest.raises(ConfigError, match=r"libnvrtc.*pip install 'cupy-cuda13x\[ctk\]'"):
        CudaRuntime(0)


def test_an_event_of_a_lost_device_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("status", [1, 2, 12, 304, 400, 712, 801, CAPTURE_ELSEWHERE])
def test_what_is_refused_does_not_lose_the_device(
    monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    cupy = FakeCupy().install(monkeypatch)
    runtime = CudaRuntime(0)
    cupy.capture_status = status
    with pytest.raises(CudaError) as raised:
        runtime.record_external(0)
    assert not raised.value.is_fatal
    cupy.capture_status = 0
    runtime.record_external(0)


def test_an_upload_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = FakeCupy().install(monkeypatch)
    CudaRuntime(0).upload(4096, b"abc")
    assert cupy.calls == ["memcpy", "synchronize 0"]


class _Failing:
    """An event that has happened, and failed in a way of its own."""

    def wait(self) -> None:
        raise ValueError("lost it")

    def add_done_callback(self, callback: object, /) -> None:
        assert callable(callback)
        callback()


@pytest.fixture
def runtime() -> AnyOrder:
    return AnyOrder(lambda able: able[0])


@pytest.fixture
def mover(runtime: AnyOrder) -> CudaMover:
    memory = np.zeros((1, 4, 64), dtype=np.uint8)
    regions = BlockLayout.from_arrays(list(memory)).regions
    layout = BlockLayout(4, regions, owners=(memory,), device=0)
    link = CudaLink(runtime, staging_bytes=4096)
    return CudaMover(layout, HostArena(4, 64), link=link, path="packed")


def test_whatever_an_event_raises_fails_the_job(mover: CudaMover) -> None:
    ticket = mover.store([1], [0], after=_Failing())
    with pytest.raises(TransferError, match="lost it"):
        ticket.wait(5)


def test_a_job_that_gets_no_events_ends(mover: CudaMover, runtime: AnyOrder) -> None:
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
