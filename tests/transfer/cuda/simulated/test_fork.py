"""A forked child cannot use the device of its parent, and must not try."""

from __future__ import annotations

import numpy as np
import pytest
from tests.forks import LONG_S, in_child
from tests.transfer.cuda.simulated.test_mover import bench
from tests.transfer.cuda.simulation import library

from kvstow import TransferError
from kvstow.transfer import READY, CudaError, HostEvent

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
