"""A refused call that does not lose the device ends no ticket while its copies run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.transfer.cuda.simulated.test_mover import Bench, bench, run_all
from tests.transfer.cuda.simulation import library

from kvstow.transfer import CudaError, HostEvent, TransferTimeout

OUT_OF_MEMORY = 2


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
