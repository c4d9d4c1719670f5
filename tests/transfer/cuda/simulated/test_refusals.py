"""A refused call that does not lose the device ends no ticket while its copies run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.transfer.cuda.simulated.test_mover import Bench, bench, run_all
from tests.transfer.cuda.simulation import library

from kvstow.transfer import CudaError, HostEvent, Mover, TransferTimeout
from kvstow.transfer.cuda import lane
from kvstow.transfer.cuda.interface import DeviceEvent

OUT_OF_MEMORY, INVALID_HANDLE = 2, 400
LONG_S = 20.0


def refuse(setup: Bench, name: str, times: int = 1 << 30) -> Callable[[], None]:
    """Refuse the next calls of the device; return a function that lets them succeed again."""
    call, left = getattr(setup.runtime, name), times

    def refused(*arguments: Any) -> Any:
        nonlocal left
        if left > 0:
            left -= 1
            raise CudaError(f"{name} is refused", is_fatal=False)
        return call(*arguments)

    def allow() -> None:
        nonlocal left
        left = 0

    vars(setup.runtime)[name] = refused
    return allow


def close_in_time(mover: Mover) -> None:
    """Close the mover on another thread, so that a close that hangs fails the test."""
    closing = threading.Thread(target=mover.close, daemon=True)
    closing.start()
    closing.join(LONG_S)
    assert not closing.is_alive(), "close hangs"


def is_mapped(address: int) -> bool:
    spans = [
        line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()
    ]
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in spans)


def test_job_without_events_fails_alone() -> None:
    with bench() as setup:
        setup.arena.slots[3] = 77
        load = setup.mover.load([3], [5], after=setup.after())
        after = setup.after()
        library.fail("cudaEventCreateWithFlags", OUT_OF_MEMORY)
        store = setup.mover.store([1], [0], after=after)
        assert store.poll()
        assert "cudaError 2:" in str(store.error)
        assert not load.poll(), "the copy has not run yet"
        setup.land(load)
        assert (setup.block(5) == 77).all()
        assert setup.runtime.lost is None
        assert not setup.arena.slots[0].any()
        setup.land(setup.mover.store([1], [0], after=setup.after()))
        assert np.array_equal(setup.arena.slots[0], setup.block(1))


def test_job_without_events_takes_those_of_a_job_in_flight() -> None:
    with bench() as setup:
        first = setup.mover.store([1], [0], after=setup.after())
        after = setup.after()
        allow = refuse(setup, "event")
        second = setup.mover.store([2], [1], after=after)
        assert not second.poll()
        setup.land(first)
        setup.land(second)
        assert np.array_equal(setup.arena.slots[1], setup.block(2))
        allow()


def test_job_behind_one_without_events_is_carried_out() -> None:
    with bench() as setup:
        filled = HostEvent()
        first = setup.mover.store([1], [0], after=filled)
        second = setup.mover.store([2], [0], after=setup.after())
        library.fail("cudaEventCreateWithFlags", OUT_OF_MEMORY)
        filled.set()
        assert first.poll()
        assert "cudaError 2:" in str(first.error)
        setup.land(second)
        assert np.array_equal(setup.arena.slots[0], setup.block(2))


@pytest.mark.parametrize("name", ["record", "is_done", "current"])
def test_load_does_not_end_while_the_device_refuses(name: str) -> None:
    with bench() as setup:
        setup.arena.slots[3] = 77
        after = setup.after()
        allow = refuse(setup, name)
        load = setup.mover.load([3], [5], after=after)
        assert not load.poll()
        run_all()
        with pytest.raises(TransferTimeout) as late:
            load.wait(0.001)
        assert f"{name} is refused" in str(late.value.__cause__)
        allow()
        setup.land(load)
        assert (setup.block(5) == 77).all()
        assert setup.runtime.lost is None
        setup.land(setup.mover.load([3], [6], after=setup.after()))


@pytest.mark.parametrize("name", ["synchronize", "record", "is_done", "current"])
def test_close_waits_for_copies_although_calls_are_refused(name: str) -> None:
    with bench() as setup:
        setup.arena.slots[3] = 77
        after = setup.after()
        refuse(setup, name, 7)
        load = setup.mover.load([3], [5], after=after)
        setup.mover.close()
        assert load.poll()
        assert load.error is None
        assert (setup.block(5) == 77).all()
        assert setup.runtime.lost is None
        setup.memory[:, 5] = 11  # of its next owner
        run_all()
        assert (setup.block(5) == 11).all()


@pytest.mark.parametrize("name", ["record", "is_done", "current"])
def test_close_takes_a_device_as_lost_that_refuses_each_question(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane, "_PATIENCE_S", 0.05)
    with bench() as setup:
        address, after = setup.arena.base_address, setup.after()
        refuse(setup, name)
        store = setup.mover.store([1], [0], after=after)
        never = setup.mover.store([2], [1], after=HostEvent())
        allocated = library.allocated_bytes()
        close_in_time(setup.mover)
        for ticket in (store, never):
            with pytest.raises(CudaError, match=f"{name} is refused.*restart it"):
                ticket.wait(0)
        setup.arena.close()
        # The device may still copy, so nothing that it touches is freed.
        assert library.allocated_bytes() == allocated
        assert is_mapped(address)
        run_all()


def test_close_waits_for_long_copies_although_a_question_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lane, "_PATIENCE_S", 0.05)
    with bench() as setup:
        setup.arena.slots[3] = 77
        load = setup.mover.load([3], [5], after=setup.after())
        synchronize = setup.runtime.synchronize

        def wait_long(event: DeviceEvent) -> None:
            time.sleep(0.1)
            refuse(setup, "is_done", 1)
            synchronize(event)

        vars(setup.runtime)["synchronize"] = wait_long
        close_in_time(setup.mover)
        assert load.poll()
        assert load.error is None
        assert (setup.block(5) == 77).all()


def test_invalid_event_loses_the_device() -> None:
    with bench() as setup:
        load = setup.mover.load([3], [5], after=setup.after())
        library.fail("cudaEventQuery", INVALID_HANDLE)
        assert load.poll()
        assert isinstance(load.error, CudaError)
        assert load.error.is_fatal
        close_in_time(setup.mover)


def test_refused_store_ends_after_its_queued_work_although_events_are_refused() -> None:
    with bench() as setup:
        after = setup.after()
        allow = refuse(setup, "record")
        store = setup.mover.store([1], [0], after=after)  # the gather is queued, the copy is not
        assert not store.poll()
        allow()
        assert not store.poll(), "the gather has not run yet"
        with pytest.raises(CudaError, match="record is refused"):
            setup.land(store)
        assert not library.step()
        setup.land(setup.mover.store([1], [0], after=setup.after()))
