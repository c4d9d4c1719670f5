from dataclasses import replace
from pathlib import Path

import pytest
from tests.transfer.cuda.simulated_gpu import SimulatedGpu

from kvstow.transfer.cuda import link_speed as module
from kvstow.transfer.cuda.link_speed import LinkSpeed, link_speed, measure

SPEED = LinkSpeed(50e9, 40e9, 2e-6, 400e9, 5e-7)


@pytest.fixture
def runtime() -> SimulatedGpu:
    return SimulatedGpu(lambda able: able[0])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kvstow"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the devices that are measured."""
    calls: list[str] = []

    def measure(runtime: SimulatedGpu) -> LinkSpeed:
        calls.append(runtime.identity)
        return SPEED

    monkeypatch.setattr(module, "measure", measure)
    return calls


def test_large_fragments_are_copied_directly_and_small_ones_packed() -> None:
    assert SPEED.direct_from_bytes("store") == 100_000
    assert SPEED.direct_from_bytes("load") == 80_000
    assert [SPEED.path("store", size) for size in (99_999, 100_000)] == ["packed", "direct"]
    assert [SPEED.path("load", size) for size in (79_999, 80_000)] == ["packed", "direct"]


def test_direct_copies_keep_the_host_busy_for_a_quarter_of_the_transfer() -> None:
    slow_host = replace(SPEED, submit_seconds=SPEED.copy_seconds)
    assert slow_host.direct_from_bytes("store") == 400_000


def test_each_device_and_driver_is_measured_once(
    runtime: SimulatedGpu, folder: Path, measured: list[str]
) -> None:
    assert link_speed(runtime) == link_speed(runtime) == SPEED
    runtime.identity = "another/driver ü"
    assert link_speed(runtime) == link_speed(runtime) == SPEED
    assert measured == ["any order", "another/driver ü"]
    assert len(list(folder.iterdir())) == 2, "and nothing is left over"
    assert link_speed(runtime, anew=True) == SPEED
    assert len(measured) == 3


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", "3", '{"store_bytes_per_s": 1}', "full of zeros", "negative"]
)
def test_unusable_cache_file_is_written_again(
    runtime: SimulatedGpu, folder: Path, measured: list[str], content: str
) -> None:
    link_speed(runtime)
    [file] = folder.iterdir()
    whole = file.read_text()
    value = {"full of zeros": "0.0", "negative": "-1.0"}.get(content)
    file.write_text(content if value is None else whole.replace("2e-06", value))
    assert link_speed(runtime) == SPEED
    assert len(measured) == 2
    assert file.read_text() == whole


def test_without_a_cache_folder_each_call_measures(
    runtime: SimulatedGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: list[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    assert link_speed(runtime) == link_speed(runtime) == SPEED
    assert len(measured) == 2


def test_measurement_frees_its_memory(runtime: SimulatedGpu) -> None:
    ticks = iter(range(10**6))
    speed = measure(runtime, lambda: next(ticks) / 1000)
    # On this clock each turn takes two milliseconds, of which the host takes one.
    assert speed.store_bytes_per_s == pytest.approx(64 * 2**20 * 500)
    assert speed.load_bytes_per_s == pytest.approx(64 * 2**20 * 500)
    assert speed.copy_seconds == pytest.approx(2e-6)
    assert speed.submit_seconds == pytest.approx(1e-6)
    assert runtime.allocated == {}
