"""A call of the device that fails leaves the mover whole: it works on, or refuses."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from tests.transfer.cuda.simulated.test_mover import device_memory, on_device
from tests.transfer.cuda.simulation import library
from tests.transfer.test_call_faults import (
    BLOCK_BYTES,
    NUM_BLOCKS,
    NUM_SLOTS,
    Bytes,
    Faults,
    FaultyEvent,
    Interrupted,
    each_fault,
)

from kvstow import StateError
from kvstow.transfer import READY, CudaError, CudaLink, CudaMover, Event, Ticket
from kvstow.transfer.cuda import pinning
from kvstow.transfer.cuda.pinning import pinned_arena
from kvstow.transfer.cuda.runtime import CudaRuntime

CALLS = (
    *("stream", "event", "record", "wait", "is_done", "synchronize", "allocate"),
    *("allocate_mapped", "upload", "zero", "copy", "register"),
)


class FaultyDevice(CudaRuntime):
    """A device each of whose calls may fail before it does anything."""

    def __init__(self, faults: Faults) -> None:
        super().__init__(0)
        for name in CALLS:
            vars(self)[name] = self._faulty(faults, name, getattr(self, name))
        launch, free, free_mapped = self.launch, self.free, self.free_mapped
        unregister = self.unregister

        def faulty_launch(kernel: Any, *arguments: Any) -> None:
            self._faulty(faults, kernel, launch)(kernel, *arguments)

        vars(self)["launch"] = faulty_launch
        for name, call in (
            ("free", free),
            ("free_mapped", free_mapped),
            ("unregister", unregister),
        ):
            counted = name.removesuffix("_mapped")
            vars(self)[name] = self._faulty(faults, counted, call, is_freeing=True)

    def _faulty(
        self, faults: Faults, name: str, call: Callable[..., Any], *, is_freeing: bool = False
    ) -> Callable[..., Any]:
        def faulty(*arguments: Any) -> Any:
            if self.lost is not None:
                if is_freeing:
                    return call(*arguments)
                raise self.lost
            try:
                faults.call(name)
            except CudaError as error:
                if error.is_fatal:
                    self.lost = error
                raise
            return call(*arguments)

        return faulty


def cuda_scenario(content: Bytes, faults: Faults) -> None:  # noqa: PLR0915 - one scenario
    """Store and load through a CUDA mover, and compare the bytes of each job that went well."""
    library.by_hand()
    plain = CudaRuntime(0)
    device = device_memory(plain, content.size).reshape(content.shape)
    device[:] = content
    runtime = FaultyDevice(faults)
    with pinned_arena(NUM_SLOTS, BLOCK_BYTES, plain) as arena:
        pinned = library.allocated_bytes()
        arena.slots[:] = content[:NUM_SLOTS]
        try:
            link = CudaLink(runtime, staging_bytes=4096, num_places=2)
        except (CudaError, MemoryError, Interrupted):
            assert library.allocated_bytes() == pinned or runtime.lost
            return
        try:
            mover = CudaMover(on_device([device]), arena, link=link, verify=True)
        except (CudaError, MemoryError, Interrupted):
            assert link.closed
            assert library.allocated_bytes() == pinned or runtime.lost or faults.failed == "free"
            return
        jobs: list[tuple[str, int, int, Ticket]] = []

        def submit(direction: str, block: int, slot: int, after: Event) -> bool:
            try:
                if direction == "store":
                    ticket = mover.store([block], [slot], after=after)
                else:
                    ticket = mover.load([slot], [block], after=after)
                jobs.append((direction, block, slot, ticket))
            except (MemoryError, CudaError, Interrupted):
                return False  # it touches its slot no more, so other jobs may
            return True

        def land(ticket: Ticket) -> None:
            for _ in range(1000):
                with contextlib.suppress(MemoryError, Interrupted):
                    if ticket.poll():
                        return
                    library.step()
            raise AssertionError("the ticket never ends")

        late = FaultyEvent(faults, is_set=False)
        submit("store", 1, 7, FaultyEvent(faults, is_set=True))
        is_stored = submit("store", 2, 6, late)
        with contextlib.suppress(MemoryError, Interrupted, CudaError):
            late.set()
        for job in jobs:
            land(job[-1])
        submit("load", 5, 7, READY)
        if is_stored:
            submit("load", 6, 6, READY)
        submit("store", 3, 0, READY)
        land(jobs[-1][-1])
        submit("load", 8, 0, READY)
        land(jobs[-1][-1])
        if not faults.failed:
            assert np.array_equal(device[8], device[3])
        for direction, block, slot, ticket in jobs:
            land(ticket)
            if ticket.error is None:
                want = content[block] if direction == "store" else arena.slots[slot]
                got = arena.slots[slot] if direction == "store" else device[block]
                assert np.array_equal(got, want), f"{direction} lies, {faults.failed}"
        for _ in range(2):
            with contextlib.suppress(MemoryError, Interrupted, CudaError):
                mover.close()
        with pytest.raises((StateError, CudaError)):
            mover.store([1], [0], after=READY)
        if runtime.lost is None:
            is_freed = library.allocated_bytes() == pinned
            assert is_freed or faults.failed == "free", faults.failed
        library.by_hand(False)
        library.library().cudaDeviceSynchronize()  # before the arena goes


def test_cuda_mover_works_or_refuses_after_any_failed_call() -> None:
    errors: list[BaseException] = [
        CudaError("refused", is_fatal=False),
        CudaError("lost", is_fatal=True),
        MemoryError(),
        Interrupted(),
    ]
    rng = np.random.default_rng(5)
    content = rng.integers(1, 256, (NUM_BLOCKS, BLOCK_BYTES), np.uint8)

    failed = each_fault(partial(cuda_scenario, content), errors, every=2)
    expected = {"stream", "event", "allocate", "upload", "wait", "record", "copy", "gather"}
    assert expected | {"scatter", "zero", "is_done", "free"} <= failed


def test_pinned_memory_is_unpinned_unless_unpinning_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning, "MAX_CHUNK_BYTES", 1 << 20)
    errors: list[BaseException] = [
        CudaError("refused", is_fatal=False),
        CudaError("lost", is_fatal=True),
        Interrupted(),
    ]

    def scenario(faults: Faults) -> None:
        before = library.allocated_bytes()
        runtime = FaultyDevice(faults)
        try:
            with warnings.catch_warnings(action="ignore"):
                arena = pinning.pinned_arena(1237, 8192, runtime)
        except (CudaError, Interrupted):
            assert faults.failed == "register"
        else:
            assert not arena.closed
            with contextlib.suppress(CudaError, Interrupted):
                arena.close()
            assert arena.closed
        if runtime.lost is None:
            is_pinned = library.allocated_bytes() > before
            assert is_pinned == (faults.failed == "unregister")
        library.library().simulation_repair()  # unpins all memory

    assert each_fault(scenario, errors) == {"register", "unregister"}
