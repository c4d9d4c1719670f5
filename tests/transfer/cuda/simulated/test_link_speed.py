"""The measured speed of a link, and its cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.transfer.cuda.simulation import library

from kvstow.transfer.cuda import link_speed as module
from kvstow.transfer.cuda.link_speed import LinkSpeed, link_speed
from kvstow.transfer.cuda.runtime import CudaRuntime

measure = module.measure  # before a fixture replaces it
SPEED = LinkSpeed(50e9, 40e9, 2e-6, 400e9, 5e-7)


@pytest.fixture
def runtime() -> CudaRuntime:
    return CudaRuntime(0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kvstow"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the devices that are measured."""
    calls: list[str] = []

    def measure(runtime: CudaRuntime) -> LinkSpeed:
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
    runtime: CudaRuntime, folder: Path, measured: list[str]
) -> None:
    assert link_speed(runtime) == link_speed(runtime) == SPEED
    runtime.identity = "another/driver ü"
    assert link_speed(runtime) == link_speed(runtime) == SPEED
    assert measured == [CudaRuntime(0).identity, "another/driver ü"]
    assert len(list(folder.iterdir())) == 2, "and nothing is left over"
    assert link_speed(runtime, anew=True) == SPEED
    assert len(measured) == 3


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", "3", '{"store_bytes_per_s": 1}', "full of zeros", "negative"]
)
def test_unusable_cache_file_is_written_again(
    runtime: CudaRuntime, folder: Path, measured: list[str], content: str
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
    runtime: CudaRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: list[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    assert link_speed(runtime) == link_speed(runtime) == SPEED
    assert len(measured) == 2


def test_measurement_frees_its_memory(
    runtime: CudaRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LONG_BYTES", 1 << 20)
    monkeypatch.setattr(module, "_NUM_SHORT", 100)
    before, ticks = library.allocated_bytes(), iter(range(10**6))
    speed = measure(runtime, lambda: next(ticks) / 1000)
    # On this clock each turn takes two milliseconds, of which the host takes one.
    assert speed.store_bytes_per_s == pytest.approx(2**20 * 500)
    assert speed.load_bytes_per_s == pytest.approx(2**20 * 500)
    assert speed.gather_bytes_per_s == pytest.approx(2**20 * 500)
    assert speed.copy_seconds == pytest.approx(2e-5)
    assert speed.submit_seconds == pytest.approx(1e-5)
    assert library.allocated_bytes() == before
