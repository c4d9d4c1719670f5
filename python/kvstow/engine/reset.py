"""A reset: the engine forgets every prefix, and its weights may get another name."""

import numpy as np

from kvstow._core import StateError
from kvstow.engine.disk import Disk
from kvstow.engine.state import State


def reset(state: State, disk: Disk | None, weights_version: str | None) -> None:
    """Forget every prefix on the device, on the host and below, as `Engine.reset` describes."""
    num_holding = sum(request.state != "added" for request in state.requests.values())
    if weights_version is not None and num_holding:
        raise StateError(
            f"{num_holding} requests hold blocks of the weights before {weights_version!r}: "
            "preempt or finish them first"
        )
    if disk is not None:
        disk.check_is_new(weights_version)
    # The device comes first. If an interrupt cuts this short, a tier below the host has not had
    # the new name yet, so that the caller may try again.
    state.weights_version = ""  # no file may have a name before all blocks are gone
    state.make_stale()
    if not state.pool.reset():
        state.pool.evict(np.arange(1, state.pool.num_blocks))
    if disk is None:
        state.scheduler.reset()
    else:
        disk.reset(state, weights_version)
    state.weights_version = weights_version
