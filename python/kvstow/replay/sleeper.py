"""Sleep and wake in the middle of a replay: the device memory is somebody else's meanwhile.

```
 step     the batch as it is, copies in flight
 asleep   virtual time goes on until they have landed; the device memory is overwritten
 awake    all blocks under other ids; every block that a request has computed is compared
 step     who has loaded meanwhile runs
```
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from kvstow._core import ConfigError, OutOfBlocks, TransferError
from kvstow.engine import Landed, Transfer
from kvstow.replay.content import GARBAGE
from kvstow.replay.state import ReplayState

__all__ = ["Ended", "sleep_and_wake"]

_Result = TypeVar("_Result")


class Ended(NamedTuple):
    """A transfer that was in flight when the replay fell asleep, and how it ended."""

    transfer: Transfer
    ok: bool
    late: bool


def sleep_and_wake(replay: ReplayState) -> list[Ended]:
    """Let a replay sleep, overwrite its device memory, and wake it with its blocks elsewhere.

    Returns:
        What was in flight, in the order in which it landed.
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
    replay.figures.moved += int(np.count_nonzero(awake.old_ids != awake.new_ids))
    landed = kv.poll()
    for seat in [*replay.batch.running, *replay.loading.values()]:
        replay.batch.replace_blocks(seat, kv.tables(replay.batch.request(seat).name))
    return _ends(in_flight, landed)


def _ends(in_flight: Sequence[Transfer], landed: Landed) -> list[Ended]:
    """Of each transfer whether it went well, and whether it was late."""
    # A request waits for one load; those before it were late.
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
    """What `call` returns; where copies are made to fail, as soon as none of its own does."""
    while True:
        try:
            return call()
        except OutOfBlocks as error:
            raise ConfigError(f"sleep-at: {error}") from error
        except TransferError:
            if replay.config.faults is None:
                raise
