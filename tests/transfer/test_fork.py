"""A process can end with everything open, and a forked child has nothing of its parent's."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from tests.forks import LONG_S, in_child

from kvstow import StateError, TransferError
from kvstow.transfer import (
    READY,
    BlockLayout,
    HostArena,
    HostEvent,
    HostMover,
    Mover,
    ProvingMover,
    VerifiedMover,
)

# Python warns of a fork in a process with threads, which these tests need.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

NUM_BLOCKS, NUM_SLOTS, BLOCK_BYTES = 64, 64, 64 << 10
KINDS = ["host", "verified", "proving"]

Bytes = npt.NDArray[np.uint8]


class Made:
    def __init__(self, kind: str) -> None:
        self.device: Bytes = np.zeros((NUM_BLOCKS, BLOCK_BYTES), np.uint8)
        self.device += np.arange(NUM_BLOCKS, dtype=np.uint8)[:, None]
        self.arena = HostArena(NUM_SLOTS, BLOCK_BYTES)
        self.layout = BlockLayout.from_arrays([self.device])
        self.mover = self.build(kind, self.arena)

    def build(self, kind: str, arena: HostArena) -> Mover:
        mover: Mover = HostMover(self.layout, arena)
        if kind == "verified":
            return VerifiedMover(mover)
        if kind == "proving":
            arena.checksums[:] = arena.compute_checksums(np.arange(NUM_SLOTS))
            arena.unproven = np.ones(NUM_SLOTS, bool)
            return ProvingMover(mover)
        return mover


@pytest.fixture(params=KINDS)
def made(request: pytest.FixtureRequest) -> Iterator[Made]:
    setup = Made(request.param)
    yield setup
    setup.mover.close()
    setup.arena.close()


# -- a forked child ------------------------------------------------------------------------------


def test_child_is_refused_and_changes_nothing_in_the_parent(made: Made) -> None:
    made.mover.store(range(1, 33), range(32), after=READY).wait(LONG_S)
    before = made.arena.slots.copy()
    view = made.arena.slots

    def check() -> None:
        for use in (
            lambda: made.mover.store([1], [0], after=READY),
            lambda: made.mover.load([0], [1], after=READY),
            lambda: made.arena.slots,
            lambda: made.arena.base_address,
            lambda: HostMover(made.layout, made.arena),
        ):
            with pytest.raises(StateError, match="process that this one was forked from; build a"):
                use()
        assert made.arena.closed
        assert not view.any(), "the memory is the parent's"
        view[:] = 7  # a view from before the fork is the child's own memory
        made.mover.close()
        made.arena.close()

    in_child(check)
    assert np.array_equal(made.arena.slots, before)
    made.mover.load([3], [40], after=READY).wait(LONG_S)
    assert (made.device[40] == 4).all()


def test_transfers_under_way_fail_in_the_child_and_go_on_in_the_parent(made: Made) -> None:
    event = HostEvent()
    made.mover.store([1], [1], after=READY).wait(LONG_S)
    tickets = [
        made.mover.store([1], [0], after=event),
        made.mover.store([2], [0], after=READY),  # waits for the first job
        made.mover.load([1], [3], after=event),
    ]

    def check() -> None:
        for ticket in tickets:
            assert ticket.poll()
            with pytest.raises(TransferError, match="this one was forked from"):
                ticket.wait(LONG_S)
        event.set()

    in_child(check)
    assert not any(ticket.poll() for ticket in tickets)
    event.set()
    for ticket in tickets:
        ticket.wait(LONG_S)
    assert (made.arena.slots[0] == 2).all()


def test_child_can_build_its_own_mover(made: Made) -> None:
    def check() -> None:
        with HostArena(NUM_SLOTS, BLOCK_BYTES) as arena, made.build("verified", arena) as mover:
            mover.store([5], [0], after=READY).wait(LONG_S)
            assert (arena.slots[0] == 5).all()
            in_child(lambda: refused(mover))

    def refused(mover: Mover) -> None:
        with pytest.raises(StateError, match="forked"):
            mover.store([5], [0], after=READY)

    in_child(check)


def test_child_works_after_a_fork_while_threads_hold_locks(made: Made) -> None:
    """The child closes everything, although no thread of it ever releases the locks."""
    host = made.mover if isinstance(made.mover, HostMover) else made.mover._mover  # type: ignore[attr-defined]
    held = [host._stores._lock, host._loads._lock]
    locked, go = threading.Event(), threading.Event()

    def hold() -> None:
        with contextlib.ExitStack() as holding:
            for lock in held:
                holding.enter_context(lock)
            locked.set()
            go.wait(LONG_S)

    tickets = [made.mover.store(range(1, 64), range(63), after=READY) for _ in range(20)]
    holder = threading.Thread(target=hold)
    holder.start()
    assert locked.wait(LONG_S)

    def check() -> None:
        assert all(ticket.poll() for ticket in tickets)
        made.mover.close()
        made.arena.close()

    in_child(check)
    go.set()
    holder.join(LONG_S)
    for ticket in tickets:
        ticket.wait(LONG_S)
    assert (made.arena.slots[3] == 4).all()


def test_child_does_not_unpin_the_parents_memory() -> None:
    unpinned: list[int] = []
    arena = HostArena(2, 4096)
    arena.on_close(lambda: unpinned.append(os.getpid()))

    def check() -> None:
        arena.close()
        assert not unpinned

    in_child(check)
    arena.close()
    assert unpinned == [os.getpid()]


def test_child_closes_an_arena_of_a_file_and_never_unmaps_it() -> None:
    with open(os.memfd_create("slots"), "r+b") as file:
        file.truncate(2 * 4096)
        made = [HostArena(2, 4096, file=(file.fileno(), 0))]
        made[0].slots[:] = 3

        def check() -> None:
            with pytest.raises(StateError, match="forked"):
                _ = made[0].slots
            # The child's next mapping may have the address of the parent's arena.
            others = [HostArena(2, 4096) for _ in range(20)]
            for other in others:
                other.slots[:] = 5
            made.pop().close()
            gc.collect()
            for other in others:
                assert (other.slots == 5).all()

        in_child(check)
        assert (made[0].slots == 3).all()
        made[0].close()


def test_memory_stays_out_of_core_dumps_and_of_children() -> None:
    with HostArena(4, 4096) as arena:
        flags = _flags(arena.base_address)
    assert {"dd", "wf"} <= flags, "VM_DONTDUMP, VM_WIPEONFORK"
    with open(os.memfd_create("slots"), "r+b") as file:
        file.truncate(4096)
        with HostArena(1, 4096, file=(file.fileno(), 0)) as arena:
            assert {"dd", "dc"} <= _flags(arena.base_address), "VM_DONTDUMP, VM_DONTCOPY"


def _flags(address: int) -> set[str]:
    """Return the flags of the mapping at an address."""
    is_it = False
    with open("/proc/self/smaps") as maps:
        for line in maps:
            first = line.split()[0]
            if not first.endswith(":"):
                begin, end = (int(bound, 16) for bound in first.split("-"))
                is_it = begin <= address < end
            elif is_it and first == "VmFlags:":
                return set(line.split()[1:])
    pytest.skip("the system says nothing of its mappings")


# -- the end of the process ----------------------------------------------------------------------

OPEN = """
import os, sys
import numpy as np
from kvstow.transfer import *
device = np.ones((1024, 65536), np.uint8)
arena = HostArena(1024, 65536)
mover = HostMover(BlockLayout.from_arrays([device]), arena)
kind = sys.argv[1]
if kind == "verified":
    mover = VerifiedMover(mover)
if kind == "proving":
    arena.checksums[:] = arena.compute_checksums(np.arange(1024))
    arena.unproven = np.ones(1024, bool)
    mover = ProvingMover(mover)
never = HostEvent()
mover.load(range(1, 1000), range(1, 1000), after=never)
mover.store([1], [0], after=never)
for _ in range(10):
    mover.store(range(1, 512), range(511), after=READY)
    mover.load(range(512, 1000), range(2, 490), after=READY)
"""


@pytest.mark.parametrize("kind", KINDS)
def test_process_ends_while_a_job_waits_for_an_event(kind: str) -> None:
    ended = _run(OPEN, kind)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("kind", KINDS)
def test_child_exits_normally(kind: str) -> None:
    """The child runs all exit handlers, as with sys.exit and not with os._exit."""
    script = """
if os.fork() == 0:
    sys.exit(0)
_, status = os.wait()
print(status)
"""
    ended = _run(OPEN + script, kind)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "0\n", "")


def _run(script: str, kind: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script, kind],
        timeout=LONG_S,
        capture_output=True,
        text=True,
        check=False,
    )
