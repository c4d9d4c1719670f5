"""The measured speed of a link, and its cache."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from tests.transfer.cuda.simulation import library

from kvstow.transfer.cuda import link_speed as module
from kvstow.transfer.cuda.interface import Copies, DeviceEvent, Stream
from kvstow.transfer.cuda.link_speed import LinkSpeed, link_speed
from kvstow.transfer.cuda.runtime import CudaRuntime
from kvstow.transfer.mover import Direction

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


@pytest.mark.parametrize("direction", ["store", "load"])
def test_fragments_are_copied_directly_where_that_reaches_092_of_the_peak(
    direction: Direction,
) -> None:
    bound = SPEED.direct_from_bytes(direction)
    peak = SPEED.store_bytes_per_s if direction == "store" else SPEED.load_bytes_per_s
    assert bound / (SPEED.copy_seconds + bound / peak) == pytest.approx(0.92 * peak)
    assert [SPEED.path(direction, bound - by) for by in (1, 0)] == ["packed", "direct"]


def test_direct_copies_keep_the_host_busy_for_a_quarter_of_the_transfer() -> None:
    slow_host = replace(SPEED, submit_seconds=20e-6)
    assert slow_host.direct_from_bytes("store") == 4_000_000


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
    "content",
    [
        "",
        "{}",
        "[]",
        "3",
        "[" * 100_000,
        '{"store_bytes_per_s": 1}',
        '{"store_bytes_per_s": 1' + 400 * "0" + "}",
        "full of zeros",
        "negative",
    ],
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
    for name in "XDG_CACHE_HOME", "HOME":
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 5)  # without an entry in /etc/passwd
    assert link_speed(runtime) == SPEED


class Clock:
    """The time of a device whose copies take 3 us, and 1 ns a byte to the host or 2 ns from it.

    Each takes 1 us of the host too. The first turn of each measurement is disturbed for a second.
    """

    now_s, device_s = 0.0, 0.0
    before: Copies | None = None

    def __init__(self, runtime: CudaRuntime, patch: pytest.MonkeyPatch) -> None:
        copy, synchronize = runtime.copy, runtime.synchronize

        def copied(copies: Copies, stream: Stream) -> None:
            copy(copies, stream)
            self.now_s += 1e-6 * len(copies.runs) + (copies is not self.before)
            self.before = copies
            byte_s = 1e-9 if copies.to_host else 2e-9
            rows = sum(num_rows for _, _, num_rows in copies.runs)
            self.device_s += 3e-6 * len(copies.runs) + byte_s * rows * copies.row_bytes

        def synchronized(event: DeviceEvent) -> None:
            synchronize(event)
            self.now_s, self.device_s = self.now_s + self.device_s + 1e-9, 0.0

        patch.setattr(runtime, "copy", copied)
        patch.setattr(runtime, "synchronize", synchronized)

    def __call__(self) -> float:
        return self.now_s


def test_measurement_tells_a_copys_own_time_from_its_bytes(
    runtime: CudaRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LONG_BYTES", 4 << 20)
    before = library.allocated_bytes()
    speed = measure(runtime, Clock(runtime, monkeypatch))
    assert speed.store_bytes_per_s == pytest.approx(1e9, rel=0.01)
    assert speed.load_bytes_per_s == pytest.approx(0.5e9, rel=0.01)
    assert speed.copy_seconds == pytest.approx(4e-6, rel=0.01)
    assert speed.submit_seconds == pytest.approx(1e-6)
    assert library.allocated_bytes() == before, "and it frees its memory"


def test_measurement_survives_parts_that_take_no_longer_than_the_whole(
    runtime: CudaRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LONG_BYTES", 1 << 20)
    ticks = iter(range(10**6))
    speed = measure(runtime, lambda: next(ticks) / 1000)
    # On this clock each turn takes two milliseconds, of which the host takes one.
    assert speed.gather_bytes_per_s == pytest.approx(2**20 * 500)
    assert 0 < speed.copy_seconds < 1e-8
