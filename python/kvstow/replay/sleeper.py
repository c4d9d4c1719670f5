"""Sleep and wake in the middle of a replay.

A cycle:

    step     requests run, and copies are in flight
    asleep   virtual time advances until the copies have landed; the device memory is overwritten
    awake    all blocks have other ids, and the replay checks every computed block
    step     requests that loaded meanwhile run
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from kvstow._core import ConfigError, OutOfBlocks, TransferError
from kvstow.engine import Landed, Transfer
from kvstow.replay.content import GARBAGE
from kvstow.replay.state import ReplayState

_Result = TypeVar("_Result")


class Ended(NamedTuple):
    """A transfer that was in flight when the replay fell asleep, and how it ended."""

    transfer: Transfer
    ok: bool
    late: bool


def sleep_and_wake(replay: ReplayState) -> list[Ended]:
    """Put a replay to sleep, overwrite its device memory, and wake it under other block ids.

    Returns:
        The transfers that were in flight, in the order in which they landed.
    """
    kv, after = replay.kv, replay.device.computed
    in_flight, last_s = replay.links.land_all()
    replay.now_s = max(replay.now_s, last_s)
    _tried(replay, lambda: kv.sleep(after=after()))
    for group in replay.memory:
        for region in group.regions:
            region[:] = GARBAGE
    num_blocks = kv.ledger.pool.num_blocks
    order = np.random.default_rng(replay.figures.sleeps).permutation(num_blocks - 1) + 1
    layouts = replay.layouts
    awake = _tried(replay, lambda: kv.wake(layouts, after=after(), block_ids=order))
    replay.figures.sleeps += 1
    replay.figures.moved_blocks += int(np.count_nonzero(awake.old_ids != awake.new_ids))
    landed = kv.poll()
    for seat in [*replay.batch.running, *replay.loading.values()]:
        replay.batch.replace_blocks(seat, kv.tables(replay.batch.request(seat).name))
    return _ends(in_flight, landed)


def _ends(in_flight: Sequence[Transfer], landed: Landed) -> list[Ended]:
    """Return how each transfer ended."""
    # A request waits for its last load only; its earlier loads were late.
    loads = [transfer for transfer in in_flight if transfer.direction == "load"]
    last = {load.request_id: load for load in sorted(loads, key=lambda load: load.job.job_id)}
    ends: list[Ended] = []
    for transfer in in_flight:
        ok, late = transfer.wait(), False
        if (name := transfer.request_id) is not None:
            is_last = last[name] is transfer
            ok = is_last and name in landed.loaded
            late = not ok and not (is_last and name in landed.failed)
        ends.append(Ended(transfer, ok, late))
    return ends


def _tried(replay: ReplayState, call: Callable[[], _Result]) -> _Result:
    """Return the result of `call`. With faults, repeat it until none of its copies fails."""
    while True:
        try:
            return call()
        except OutOfBlocks as error:
            raise ConfigError(f"--sleep-at: {error}") from error
        except TransferError:
            if replay.config.faults is None:
                raise
