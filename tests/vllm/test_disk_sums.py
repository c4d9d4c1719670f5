"""Promotes and demotes beside movers that compare with the sums of GPU kernels."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.vllm.halves_below import folder_on_disk

from kvstow.tiers import Fingerprint, TierBlocks
from kvstow.tiers.files import Buffers, Files
from kvstow.transfer import HostArena
from kvstow.transfer.cuda.kernels import checksum
from kvstow.transfer.verified import have_device_sums, record_device_sums
from kvstow.vllm.below.disk_worker import DiskWorker, Place
from kvstow.vllm.messages import LowerJob, LowerOrders
from kvstow.vllm.options import Options

NUM_BYTES = 4096


@pytest.fixture
def disk() -> Iterator[Path]:
    with folder_on_disk() as folder:
        yield folder


def run(worker: DiskWorker, direction: str, host_slot: int, job_id: int) -> bool:
    blocks = TierBlocks([b"k" * 16], np.zeros(1, np.int32), None, np.array([3], np.int32), job_id)
    slots = np.array([host_slot], np.int32)
    worker.take(LowerOrders([LowerJob(job_id, direction, slots, blocks)]))  # type: ignore[arg-type]
    worker._runner.wait()
    report = worker.report(is_asked=False)
    assert report is not None
    [(ended, [ok])] = report.ends
    assert ended == job_id
    return ok


def test_promoted_slots_get_sums_and_damaged_ones_are_not_vouched_for(disk: Path) -> None:
    with HostArena(4, NUM_BYTES) as arena:
        sums, is_known = arena.device_sums
        arena.slots[:] = np.arange(4)[:, None] + 1
        sums[0], is_known[0] = checksum(arena.slots[0:1])[0], 1
        place = Place(str(disk / "rank0"), 1 << 20, Fingerprint({"model": "m"}), True)
        worker = DiskWorker(place, Options(), arena, rank=0, slot_bytes=[NUM_BYTES])
        assert run(worker, "demote", 0, 1)
        sums[2], is_known[2] = 7, 1  # of the block that was there before
        assert run(worker, "promote", 2, 2)
        assert arena.slots[2, 0] == 1
        assert sums[2] == sums[0], "a verified load of the promoted block must not fail"
        arena.slots[0, 5] ^= 1
        assert not run(worker, "demote", 0, 3)
        assert not run(worker, "promote", 1, 4), "the damaged block is not on the disk"
        worker.close()


@pytest.mark.parametrize("is_damaged", [True, False])
def test_late_demote_leaves_no_damaged_block_for_the_next_server(
    disk: Path, monkeypatch: pytest.MonkeyPatch, is_damaged: bool
) -> None:
    """A late demote may have written its blocks. They count as failed, and last."""
    write = Files.write

    def slow_write(files: Files, file: int, buffers: Buffers, offset: int) -> int:
        if sum(map(len, buffers)) == NUM_BYTES:  # data, and no frame
            time.sleep(0.6)
        return write(files, file, buffers, offset)

    monkeypatch.setattr(Files, "write", slow_write)
    place = Place(str(disk / "rank0"), 1 << 20, Fingerprint({"model": "m"}), True)
    with HostArena(4, NUM_BYTES) as arena:
        sums, is_known = arena.device_sums
        arena.slots[:] = np.arange(4)[:, None] + 1
        sums[0], is_known[0] = checksum(arena.slots[0:1])[0], 1
        arena.slots[0, 5] ^= is_damaged
        worker = DiskWorker(place, Options(), arena, rank=0, slot_bytes=[NUM_BYTES], timeout_s=0.5)
        assert not run(worker, "demote", 0, 1), "it is late"
        worker.close()
        worker = DiskWorker(place, Options(), arena, rank=0, slot_bytes=[NUM_BYTES])
        assert run(worker, "promote", 2, 2) != is_damaged
        worker.close()


def test_flush_of_a_plan_whose_slots_are_all_used_writes_nothing(disk: Path) -> None:
    with HostArena(4, NUM_BYTES) as arena:
        assert arena.device_sums is not None
        place = Place(str(disk / "rank0"), 1 << 20, Fingerprint({"model": "m"}), True)
        worker = DiskWorker(place, Options(), arena, rank=0, slot_bytes=[NUM_BYTES])
        slot = np.zeros(1, np.int32)
        blocks = TierBlocks([b"k" * 16], slot, [None], slot, 1)
        worker.take(LowerOrders(last=[LowerJob(1, "demote", slot, blocks)]))
        worker.used(slot)
        worker.close()
        assert worker.file.stats().put_blocks == 0


def test_slots_without_a_sum_count_as_sound() -> None:
    with HostArena(2, NUM_BYTES) as arena:
        slots = np.array([0, 1])
        assert have_device_sums(arena, slots, [NUM_BYTES] * 2).all()
        record_device_sums(arena, slots, [NUM_BYTES] * 2)
        arena.slots[1, 9] = 1
        assert have_device_sums(arena, slots, [NUM_BYTES] * 2).tolist() == [True, False]
