"""A forked child cannot use the device of its parent, and must not try."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from tests.forks import LONG_S, in_child
from tests.transfer.cuda.simulated.test_mover import bench
from tests.transfer.cuda.simulation import library

from kvstow import TransferError
from kvstow.transfer import READY, CudaError, HostEvent
from kvstow.transfer.cuda.interface import DeviceEvent

# Python warns of a fork in a process with threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def test_child_of_a_cuda_mover_makes_no_call_to_the_device() -> None:
    with bench(verify=True) as setup:
        flying = setup.mover.store([1], [0], after=setup.after())
        waiting = setup.mover.load([0], [2], after=HostEvent())

        def check() -> None:
            library.calls()
            for ticket in (flying, waiting):
                assert ticket.poll()
                with pytest.raises(TransferError, match="this one was forked from"):
                    ticket.wait(LONG_S)
            with pytest.raises(CudaError, match="this one was forked from"):
                setup.mover.store([1], [0], after=READY)
            setup.mover.close()
            setup.arena.close()
            assert library.calls() == {}

        in_child(check)
        setup.land(flying)
        assert np.array_equal(setup.arena.slots[0], setup.block(1))


def test_child_closes_its_mover_although_another_thread_of_the_parent_was_polling() -> None:
    with bench() as setup:
        ticket = setup.mover.store([1], [0], after=setup.after())
        is_asking, go_on = threading.Event(), threading.Event()
        is_done = setup.runtime.is_done

        def ask_slowly(event: DeviceEvent) -> bool:
            is_asking.set()
            assert go_on.wait(2 * LONG_S)
            return is_done(event)

        vars(setup.runtime)["is_done"] = ask_slowly
        polling = threading.Thread(target=ticket.poll)
        polling.start()
        try:
            assert is_asking.wait(LONG_S)
            in_child(setup.mover.close)
        finally:
            go_on.set()
            polling.join()
        setup.land(ticket)
        assert np.array_equal(setup.arena.slots[0], setup.block(1))
