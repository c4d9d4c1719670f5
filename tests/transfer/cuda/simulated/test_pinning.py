"""Pinned host memory."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
from tests.transfer.cuda.simulation import library

from kvstow import ConfigError
from kvstow.transfer import BlockLayout, CudaError, HostArena, Region, arena_for
from kvstow.transfer.cuda import pinning
from kvstow.transfer.cuda.pinning import chunk_slots, nearest_cpus, pin, pinned_arena
from kvstow.transfer.cuda.runtime import CudaRuntime

OUT_OF_MEMORY, ILLEGAL_ADDRESS = 2, 700


class Pinning(CudaRuntime):
    """Device 0, and the memory that it has pinned: its address and size."""

    def __init__(self) -> None:
        super().__init__(0)
        self.pinned: dict[int, int] = {}

    def register(self, address: int, num_bytes: int) -> None:
        super().register(address, num_bytes)
        self.pinned[address] = num_bytes

    def unregister(self, address: int) -> None:
        super().unregister(address)
        del self.pinned[address]


@pytest.fixture
def runtime() -> Pinning:
    return Pinning()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning, "MAX_CHUNK_BYTES", 5 * 4096)


@pytest.mark.usefixtures("small_chunks")
def test_pinned_chunks_end_where_slots_end(runtime: Pinning) -> None:
    reported: list[tuple[int, int]] = []
    arena = pinned_arena(12, 7000, runtime, progress=lambda done, of: reported.append((done, of)))
    assert arena.slot_stride_bytes == 8192
    base = arena.base_address
    assert chunk_slots(8192, 1) == 2
    assert runtime.pinned == {base + at * 16384: 16384 for at in range(6)}
    assert reported == [(at * 16384, 6 * 16384) for at in range(1, 7)]
    arena.close()
    arena.close()
    assert runtime.pinned == {}


@pytest.mark.usefixtures("small_chunks")
def test_chunks_hold_whole_runs(runtime: Pinning) -> None:
    with HostArena(9, 2000, slots_per_run=3) as arena:
        assert arena.slot_stride_bytes % 2048 == 0
        unpin = pin(arena, runtime)
        run_bytes = 3 * arena.slot_stride_bytes
        per_chunk = 5 * 4096 // run_bytes * run_bytes
        assert sum(runtime.pinned.values()) == arena.num_bytes
        assert all((at - arena.base_address) % per_chunk == 0 for at in runtime.pinned)
        unpin()
        assert runtime.pinned == {}


@pytest.mark.parametrize(
    ("stride_bytes", "slots_per_run", "expected"),
    [(4096, 1, 64), (12288, 1, 16), (65536, 1, 4), (1280, 16, 256), (1 << 20, 1, 1)],
)
def test_chunks_hold_whole_pages_of_any_size(
    monkeypatch: pytest.MonkeyPatch, stride_bytes: int, slots_per_run: int, expected: int
) -> None:
    monkeypatch.setattr(mmap, "PAGESIZE", 65536)
    monkeypatch.setattr(pinning, "MAX_CHUNK_BYTES", 256 << 10)
    num_slots = chunk_slots(stride_bytes, slots_per_run)
    assert num_slots == expected
    assert num_slots * stride_bytes % 65536 == 0
    assert num_slots % slots_per_run == 0


@pytest.mark.usefixtures("small_chunks")
def test_refused_pinning_warns_and_returns_unpinned_memory(runtime: Pinning) -> None:
    register = runtime.register
    calls: list[int] = []

    def refuse_the_third(address: int, num_bytes: int) -> None:
        calls.append(address)
        if len(calls) == 3:
            library.fail("cudaHostRegister", OUT_OF_MEMORY)
        register(address, num_bytes)

    runtime.register = refuse_the_third  # type: ignore[method-assign]
    with pytest.warns(RuntimeWarning, match="CUDA did not pin.*ulimit -l"):
        arena = pinned_arena(12, 7000, runtime)
    assert runtime.pinned == {}, "all or none"
    arena.slots[:] = 1
    arena.close()


def test_device_lost_while_pinning_raises(runtime: Pinning) -> None:
    library.fail("cudaHostRegister", ILLEGAL_ADDRESS)
    with pytest.raises(CudaError, match="restart it"):
        pinned_arena(4, 4096, runtime)


def test_layouts_of_several_devices_are_refused() -> None:
    layouts = [BlockLayout(2, (Region(4096, 16, 16),), device=device) for device in (0, None)]
    with pytest.raises(ConfigError, match="are on several devices"):
        arena_for(layouts, 4)


def test_nearest_cpus_are_on_the_node_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = {
        "/sys/bus/pci/devices/0000:1b:00.0/numa_node": "1\n",
        "/sys/devices/system/node/node1/cpulist": "1,3-5,9\n",
        "/sys/bus/pci/devices/0000:1c:00.0/numa_node": "-1\n",
    }

    def read(path: Path, **_: object) -> str:
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 3, 4, 9})
    assert nearest_cpus("0000:1b:00.0") == {3, 4, 9}
    for unknown in ("0000:1c:00.0", "nowhere"):
        assert nearest_cpus(unknown) == {0, 3, 4, 9}
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    assert nearest_cpus("0000:1b:00.0") == {0}, "none of them is allowed"
