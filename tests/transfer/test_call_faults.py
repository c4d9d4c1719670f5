"""Each call to the outside fails once. Then every object works or is closed, and nothing leaks.

A test runs its scenario once to count its calls to the system, to events and to the device. Then it
runs the scenario again for each call, and that call raises. All other calls are real.

The file is long because it has one scenario for each object that makes such calls.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.sampled import IS_FULL

from kvstow import BlockPool, ConfigError, KvstowError, SnapshotError, StateError, TransferError
from kvstow.engine.snapshot_file import Image, Model, SnapshotFile, write_snapshot
from kvstow.observability.events import EventFile
from kvstow.transfer import (
    READY,
    BlockLayout,
    HostArena,
    HostEvent,
    HostMover,
    Mover,
    ProvingMover,
    Ticket,
    VerifiedMover,
)
from kvstow.transfer.host import mover as host_mover
from kvstow.transfer.mover import Event

LONG_S = 60.0
NUM_BLOCKS, NUM_SLOTS, BLOCK_BYTES = 9, 8, 2048

Bytes = npt.NDArray[np.uint8]


class Interrupted(BaseException):
    """An interrupt like Ctrl-C, which is not an `Exception`."""


ERRORS: list[BaseException] = [OSError(5, "Input/output error"), MemoryError(), Interrupted()]
NAMES = ["OSError", "MemoryError", "Interrupted"]


class Faults:
    """Counts calls, and raises instead of one of them.

    Attributes:
        num_calls: calls so far.
        failed: name of the call that raised.
    """

    def __init__(self, at: int = 0, error: BaseException | None = None) -> None:
        self.num_calls = 0
        self.failed = ""
        self._at, self._error = at, error
        self._lock = threading.Lock()

    def call(self, name: str) -> None:
        """Count a call, or raise instead of it."""
        with self._lock:
            self.num_calls += 1
            is_it = self.num_calls == self._at
        if is_it:
            assert self._error is not None
            self.failed = name
            raise self._error

    def stop(self) -> None:
        """Let all later calls succeed."""
        self._at = 0

    def wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if name == "close":  # frees the descriptor even if it fails
                real(*args)
                return self.call(name)
            self.call(name)
            return real(*args, **kwargs)

        return wrapped


_SYSTEM = [
    *("open", "close", "fstat", "set_blocking", "write", "ftruncate", "fsync", "pwrite", "pread"),
    *("posix_fadvise", "replace", "unlink", "scandir", "sched_setaffinity"),
]


@contextlib.contextmanager
def injected(faults: Faults) -> Iterator[None]:
    """Route kvstow's calls to the system through `faults`."""

    class Map(mmap.mmap):
        def __new__(cls, *args: Any, **kwargs: Any) -> Map:
            faults.call("mmap")
            return super().__new__(cls, *args, **kwargs)

        def madvise(self, *args: Any) -> None:
            faults.call("madvise")
            super().madvise(*args)

    with pytest.MonkeyPatch.context() as patch:
        for name in _SYSTEM:
            patch.setattr(os, name, faults.wrap(name, getattr(os, name)))
        patch.setattr(mmap, "mmap", Map)
        patch.setattr(threading.Thread, "start", faults.wrap("thread", threading.Thread.start))
        yield


def resources() -> tuple[int, int, list[str]]:
    """Return the numbers of descriptors and of arena mappings, and the threads of kvstow."""
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "kvstow-prefault":
            thread.join(LONG_S)  # has done its work, and may still be ending
    threads = [t.name for t in threading.enumerate() if t.name.startswith("kvstow-")]
    with open("/proc/self/maps") as maps:
        spans = [line.split() for line in maps if "[heap]" not in line]
    sizes = [
        int(span[0].split("-")[1], 16) - int(span[0].split("-")[0], 16)
        for span in spans
        if span[1] == "rw-p"
    ]
    return len(os.listdir("/proc/self/fd")), sizes.count(ARENA_BYTES), threads


# No other mapping of the process has this size.
ARENA_BYTES = 8192 * 1237


def each_fault(
    scenario: Callable[[Faults], None],
    errors: list[BaseException] = ERRORS,
    every: int = 1,
) -> set[str]:
    """Run a scenario for each of its calls and each error, and return the names of the calls.

    In CI each call fails with one error in `every`, and the next call with another one.
    """
    every = 1 if IS_FULL else every
    counting = Faults()
    scenario(counting)
    assert counting.num_calls > 2
    failed = set[str]()
    gc.freeze()  # so that each collection looks at new objects only
    before = resources()
    for at in range(1, counting.num_calls + 1):
        for error in errors[at % every :: every]:
            faults = Faults(at, error)
            scenario(faults)
            # Otherwise the error's traceback keeps them alive.
            error.__traceback__ = error.__context__ = error.__cause__ = None
            assert resources() == before, f"{error!r} at call {at}, {faults.failed}"
            failed.add(faults.failed)
    return failed - {""}


# -- host memory ---------------------------------------------------------------------------------


def test_arena_is_built_whole_or_not_at_all() -> None:
    def scenario(faults: Faults) -> None:
        closed: list[int] = []
        with injected(faults):
            try:
                arena = HostArena(
                    1237, 8192, num_prefault_threads=2, prefault_cpus=os.sched_getaffinity(0)
                )
            except (OSError, MemoryError, Interrupted, KvstowError):
                assert faults.failed
                return
            arena.on_close(lambda: faults.call("on_close"))
            arena.on_close(lambda: closed.append(1))
            arena.slots[:] = 7
            with contextlib.suppress(OSError, MemoryError, Interrupted):
                arena.close()
            assert closed == [1]
            assert arena.closed

    failed = each_fault(scenario)
    assert {"mmap", "madvise", "thread", "on_close", "sched_setaffinity"} <= failed


# -- movers of the host --------------------------------------------------------------------------


class FaultyEvent(HostEvent):
    """An event that may refuse a callback, or fail in `wait`."""

    def __init__(self, faults: Faults, *, is_set: bool) -> None:
        super().__init__()
        self._faults = faults
        if is_set:
            self.set()

    def wait(self) -> None:
        self._faults.call("wait")
        super().wait()

    def add_done_callback(self, callback: Callable[[], None], /) -> None:
        self._faults.call("before add_done_callback")
        super().add_done_callback(callback)
        self._faults.call("after add_done_callback")


def wrapped(kind: str, layout: BlockLayout, arena: HostArena) -> Mover:
    with contextlib.ExitStack() as built:
        mover: Mover = built.enter_context(HostMover(layout, arena))
        if kind == "verified":
            mover = VerifiedMover(mover)
        if kind == "proving":
            mover = ProvingMover(mover)
        built.pop_all()
    return mover


@pytest.mark.parametrize("is_brief", [True, False])
@pytest.mark.parametrize("kind", ["host", "verified", "proving"])
def test_host_movers_work_or_refuse_after_any_failed_call(
    monkeypatch: pytest.MonkeyPatch, kind: str, is_brief: bool
) -> None:
    if not is_brief:
        monkeypatch.setattr(host_mover, "_BRIEF_BYTES", 0)
    rng = np.random.default_rng(5)
    content = rng.integers(1, 256, (NUM_BLOCKS, BLOCK_BYTES), np.uint8)

    def scenario(faults: Faults) -> None:
        device = content.copy()
        with HostArena(NUM_SLOTS, BLOCK_BYTES) as arena, injected(faults):
            arena.slots[:] = content[:NUM_SLOTS]
            arena.checksums[:] = arena.compute_checksums(np.arange(NUM_SLOTS))
            arena.unproven = np.ones(NUM_SLOTS, bool)
            try:
                mover = wrapped(kind, BlockLayout.from_arrays([device]), arena)
            except (OSError, MemoryError, Interrupted, KvstowError):
                assert faults.failed == "thread"
                return
            arena.compute_checksums = faults.wrap("compute_checksums", arena.compute_checksums)  # type: ignore[method-assign]
            jobs: list[tuple[str, int, int, Ticket]] = []
            late = FaultyEvent(faults, is_set=False)

            def submit(direction: str, block: int, slot: int, after: Event) -> None:
                with contextlib.suppress(OSError, MemoryError, Interrupted):
                    if direction == "store":
                        ticket = mover.store([block], [slot], after=after)
                    else:
                        ticket = mover.load([slot], [block], after=after)
                    jobs.append((direction, block, slot, ticket))

            submit("store", 1, 7, FaultyEvent(faults, is_set=True))
            submit("store", 2, 6, late)
            submit("load", 5, 4, FaultyEvent(faults, is_set=True))
            submit("load", 6, 3, late)
            submit("load", 6, 2, FaultyEvent(faults, is_set=True))  # waits for the earlier job
            submit("load", 7, 1, FaultyEvent(faults, is_set=True))
            late.set()
            for direction, block, slot, ticket in jobs:
                with contextlib.suppress(TransferError):
                    ticket.wait(LONG_S)
                    if (direction, block, slot) != ("load", 6, 3):
                        want = content[block] if direction == "store" else content[slot]
                        got = arena.slots[slot] if direction == "store" else device[block]
                        assert np.array_equal(got, want), f"{direction} lies"
            assert len(jobs) >= 5, "one call fails one job"
            faults.stop()
            mover.store([3], [0], after=READY).wait(LONG_S)
            mover.load([0], [8], after=READY).wait(LONG_S)
            assert np.array_equal(device[8], device[3])
            mover.close()
            with pytest.raises(StateError):
                mover.store([1], [0], after=READY)

    failed = each_fault(scenario, ERRORS)
    assert {"thread", "wait", "before add_done_callback", "after add_done_callback"} <= failed
    assert ("compute_checksums" in failed) == (kind != "host")


def test_interrupted_close_can_be_called_again() -> None:
    device = np.zeros((NUM_BLOCKS, BLOCK_BYTES), np.uint8)
    for kind in ("host", "verified", "proving"):
        for at in range(1, 5):
            before, faults = resources(), Faults(at, Interrupted())
            with HostArena(NUM_SLOTS, BLOCK_BYTES) as arena:
                mover = wrapped(kind, BlockLayout.from_arrays([device]), arena)
                tickets = [mover.load([1], [1], after=HostEvent()) for _ in range(2)]
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(
                        threading.Thread, "join", faults.wrap("join", threading.Thread.join)
                    )
                    with contextlib.suppress(Interrupted):
                        mover.close()
                with pytest.raises(StateError, match="closed"):
                    mover.store([1], [0], after=READY)
                mover.close()
                assert all(ticket.poll() for ticket in tickets)
            assert resources() == before


# -- files ---------------------------------------------------------------------------------------


def test_events_file_is_written_or_given_up(tmp_path: Path) -> None:
    pool = BlockPool(4, events=True)
    pool.cache(pool.allocate(1), [b"ab"])
    events = pool.take_events()
    path = tmp_path / "events"

    def scenario(faults: Faults) -> None:
        path.unlink(missing_ok=True)
        with injected(faults):
            try:
                file = EventFile(path)
            except (ConfigError, MemoryError, Interrupted):
                return
            for _ in range(3):
                with contextlib.suppress(MemoryError, Interrupted):
                    file.write(events)
            with contextlib.suppress(MemoryError, Interrupted):
                file.close()
            file.close()
        text = path.read_text()
        assert text == "" or text.endswith("}\n"), "whole lines"

    assert {"open", "fstat", "write", "close", "set_blocking"} <= each_fault(scenario)


def test_snapshot_is_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "image"
    sections = {"ledger": b"l" * 5000, "scheduler": b"s" * 70, "engine": b"{}"}
    used = np.array([0, 2, 3, 1000])
    arena = HostArena(1237, 8192)
    arena.slots[used] = np.arange(1, 5, dtype=np.uint8)[:, None]

    def image(version: str) -> Image:
        return Image(
            Model("m", version), **sections, num_requests=0, num_tokens=0, num_blocks=len(used)
        )

    def scenario(faults: Faults) -> None:
        path.unlink(missing_ok=True)
        write_snapshot(path, image("old"), [arena], used)
        with injected(faults):
            failed = False
            try:
                write_snapshot(path, image("new"), [arena], used)
            except (SnapshotError, MemoryError, Interrupted):
                failed = True
        assert failed or not faults.failed or faults.failed in {"unlink", "close", "scandir"}
        with SnapshotFile(path) as file:
            assert file.image.model.weights_version in ({"old", "new"} if failed else {"new"})
            assert file.damaged_slots() == []
        if faults.failed != "unlink":
            assert os.listdir(tmp_path) == ["image"]

    failed_calls = each_fault(scenario)
    assert {"pwrite", "fsync", "replace", "ftruncate", "posix_fadvise", "thread"} <= failed_calls

    def reading(faults: Faults) -> None:
        with injected(faults):
            try:
                with SnapshotFile(path) as file:
                    for mapped in file.map_arenas():
                        with mapped:
                            assert (mapped.slots[1000] == 4).all()
            except (KvstowError, OSError, MemoryError, Interrupted):
                assert faults.failed

    assert {"open", "fstat", "pread", "mmap", "madvise"} <= each_fault(reading)
    arena.close()
