"""An arena that several processes map: one memory, one table of checksums, and nothing left."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from tests.forks import LONG_S, in_child
from tests.transfer.test_fork import _flags as mapping_flags

from kvstow import ConfigError, StateError, TransferError
from kvstow.transfer import (
    READY,
    BlockLayout,
    HostArena,
    HostMover,
    VerifiedMover,
)
from kvstow.transfer.arena import shared_bytes
from kvstow.transfer.shared import SharedHandle, SharedMemory

# Python warns of a fork in a process with threads, which these tests need.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

NUM_SLOTS, SLOT_BYTES = 8, 5000


def created(num_slots: int = NUM_SLOTS) -> SharedMemory:
    return SharedMemory.create(shared_bytes(num_slots, SLOT_BYTES))


def arena_in(memory: SharedMemory, num_prefault_threads: int = 0) -> HostArena:
    return HostArena(
        NUM_SLOTS, SLOT_BYTES, shared=memory, num_prefault_threads=num_prefault_threads
    )


def test_arenas_of_one_memory_have_the_same_bytes_and_checksums() -> None:
    with (
        created() as memory,
        arena_in(memory) as own,
        SharedMemory.open(memory.handle) as found,
        arena_in(found) as other,
    ):
        assert other.base_address != own.base_address
        assert (other.num_bytes, other.slot_stride_bytes) == (NUM_SLOTS * 8192, 8192)
        assert (other.checksums == -1).all(), "unknown, as in memory of one process"
        own.slots[3] = 7
        own.checksums[3] = 11
        own.device_sums[0][3], own.device_sums[1][3] = 2**64 - 1, 1
        assert (other.slots[3] == 7).all() and not other.slots[[2, 4]].any()
        assert other.checksums[3] == 11
        assert [int(sums[3]) for sums in other.device_sums] == [2**64 - 1, 1]
        other.slots[7, -1] = 9
        assert own.slots[7, -1] == 9
        assert not own.memory[7 * 8192 + SLOT_BYTES :].any(), "the sums lie behind the slots"


def test_the_memory_outlives_its_descriptors_and_its_creators_arena() -> None:
    memory = created()
    own = arena_in(memory)
    own.slots[1] = 5
    with SharedMemory.open(memory.handle) as found:
        other = arena_in(found)
    memory.close()
    memory.close()
    own.close()
    assert (other.slots[1] == 5).all()
    other.close()


def test_only_the_creator_touches_pages() -> None:
    """A late prefault would write zeros into blocks that the writer has stored."""
    with created() as memory, arena_in(memory, num_prefault_threads=2) as own:
        own.slots[:] = 3
        own.checksums[:] = 4
        with (
            SharedMemory.open(memory.handle) as found,
            arena_in(found, num_prefault_threads=2) as other,
        ):
            assert (other.slots == 3).all() and (other.checksums == 4).all()


def test_another_file_than_the_creators_is_refused() -> None:
    """A process id or a descriptor may mean another file by the time it is opened."""
    with created() as memory, created() as foreign:
        handle = replace(memory.handle, descriptor=foreign.descriptor)
        with pytest.raises(StateError, match=r"is file .*, expected the host memory of another"):
            SharedMemory.open(handle)


def test_memory_that_cannot_be_reached_names_the_way_out() -> None:
    with pytest.raises(StateError, match=r"cannot be opened .*one user in one container"):
        SharedMemory.open(SharedHandle(os.getpid(), 1 << 20, (0, 0)))


def test_memory_without_room_for_the_sums_is_refused() -> None:
    with SharedMemory.create(NUM_SLOTS * 8192) as memory, pytest.raises(ConfigError, match="lower"):
        arena_in(memory)


def test_a_system_that_refuses_the_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StateError, match="ask for less"):
        SharedMemory.create(1 << 63)

    for code, way_out in (
        (errno.EPERM, "allow memfd_create in the container's seccomp profile"),
        (errno.EMFILE, r"raise the limit of open files \(ulimit -n,"),
    ):
        error = OSError(code, os.strerror(code))
        monkeypatch.setattr(os, "memfd_create", Mock(side_effect=error))
        with pytest.raises(StateError, match=way_out):
            created()


def test_a_closed_arena_holds_no_memory() -> None:
    with created() as memory:
        arena = arena_in(memory)
        mapped = arena._map
        arena.close()
        assert mapped.closed, "no view is left"
        with pytest.raises(StateError, match="closed"):
            _ = arena.slots


def test_a_forked_child_does_not_have_the_memory() -> None:
    with created() as memory, arena_in(memory) as arena:
        arena.slots[:] = 3

        def check() -> None:
            with pytest.raises(StateError, match="forked"):
                _ = arena.slots
            arena.close()

        in_child(check)
        assert (arena.slots == 3).all()
        assert {"dd", "dc", "sh"} <= mapping_flags(arena.base_address), "DONTDUMP, DONTCOPY, SHARED"


def test_a_load_compares_the_checksum_that_another_arenas_store_recorded() -> None:
    device = np.zeros((4, SLOT_BYTES), np.uint8)
    device += np.arange(4, dtype=np.uint8)[:, None]
    layout = BlockLayout.from_arrays([device])
    with (
        created() as memory,
        arena_in(memory) as own,
        arena_in(memory) as other,
        VerifiedMover(HostMover(layout, own)) as storing,
        VerifiedMover(HostMover(layout, other)) as loading,
    ):
        with pytest.raises(TransferError, match="never stored"):
            loading.load([5], [1], after=READY).wait(LONG_S)
        storing.store([2], [5], after=READY).wait(LONG_S)
        loading.load([5], [1], after=READY).wait(LONG_S)
        assert (device[1] == 2).all()
        other.slots[5, 17] ^= 1
        for mover in (loading, storing):
            with pytest.raises(TransferError, match="slot 5 does not hold"):
                mover.load([5], [3], after=READY).wait(LONG_S)


CREATE = f"""
import sys, time
from kvstow.transfer import HostArena
from kvstow.transfer.arena import shared_bytes
from kvstow.transfer.shared import SharedMemory
memory = SharedMemory.create(shared_bytes({NUM_SLOTS}, {SLOT_BYTES}))
arena = HostArena({NUM_SLOTS}, {SLOT_BYTES}, shared=memory)
arena.slots[:] = 6
handle = memory.handle
print(handle.pid, handle.descriptor, *handle.identity, flush=True)
time.sleep({LONG_S})
"""


def inode_of(descriptor: Path) -> int | None:
    try:
        return descriptor.stat().st_ino
    except OSError:  # closed since it was listed
        return None


def mapping_processes(inode: int) -> list[str]:
    """Return the processes that map the memory or have it open."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            is_mapped = f" {inode} " in (process / "maps").read_text()
            if is_mapped or inode in map(inode_of, (process / "fd").iterdir()):
                found.append(process.name)
    return found


def test_a_killed_creator_leaves_the_others_their_memory_and_no_file() -> None:
    named = set(Path("/dev/shm").glob("*kvstow*"))  # of other programs
    with subprocess.Popen([sys.executable, "-c", CREATE], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        pid, descriptor, device, inode = map(int, run.stdout.readline().split())
        handle = SharedHandle(pid, descriptor, (device, inode))
        assert set(Path("/dev/shm").glob("*kvstow*")) <= named, "the memory has no name"
        with SharedMemory.open(handle) as memory, arena_in(memory) as arena:
            assert set(mapping_processes(inode)) == {str(pid), str(os.getpid())}
            run.send_signal(signal.SIGKILL)
            run.wait(LONG_S)
            assert (arena.slots == 6).all()
            assert mapping_processes(inode) == [str(os.getpid())]
    assert mapping_processes(inode) == [], "the memory went with its last mapping"
    with pytest.raises(StateError, match="cannot be opened"):
        SharedMemory.open(handle)
