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
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from kvstow._core import ConfigError, OutOfBlocks, TransferError
from kvstow.engine import Landed, Transfer
from kvstow.engine.sleep import sleep, wake
from kvstow.replay.content import GARBAGE

if TYPE_CHECKING:
    from kvstow.replay.engine import ReplayEngine

__all__ = ["Sleeper"]

_Result = TypeVar("_Result")


class Sleeper:
    """Lets a replay sleep when its time has come: after so many steps, as often as named."""

    def __init__(self, at_steps: Sequence[int]) -> None:
        self._at_steps = sorted(at_steps)

    def sleep_if_due(self, replay: ReplayEngine) -> None:
        """Sleep as often as the steps so far ask for."""
        while self._at_steps and self._at_steps[0] <= replay.figures.steps:
            self._at_steps.pop(0)
            self._sleep(replay)

    def _sleep(self, replay: ReplayEngine) -> None:
        kv = replay.kv
        in_flight, last_s = replay.links.land_all()
        replay.now_s = max(replay.now_s, last_s)
        _tried(replay, lambda: sleep(kv, after=replay.device.computed()))
        for group in replay.memory:
            for region in group.regions:
                region[:] = GARBAGE
        num_blocks = kv.ledger.pool.num_blocks
        order = np.random.default_rng(replay.figures.sleeps).permutation(num_blocks - 1) + 1
        layouts = replay.layouts
        awake = _tried(
            replay, lambda: wake(kv, layouts, after=replay.device.computed(), block_ids=order)
        )
        replay.figures.sleeps += 1
        replay.figures.moved += int(np.count_nonzero(awake.old_ids != awake.new_ids))
        landed = kv.poll()
        for seat in [*replay.batch.running, *replay.loading_seats()]:
            replay.batch.replace_blocks(seat, kv.tables(replay.batch.request(seat).name))
        for transfer, ok, late in _ends(in_flight, landed):
            replay.landed(transfer, ok=ok, late=late)
        _compare(replay)


def _ends(in_flight: Sequence[Transfer], landed: Landed) -> list[tuple[Transfer, bool, bool]]:
    """Of each transfer whether it went well, and whether it was late."""
    # A request waits for one load; those before it were late.
    loads = [transfer for transfer in in_flight if transfer.direction == "load"]
    last = {load.request_id: load for load in sorted(loads, key=lambda load: load.job.job_id)}
    ends = []
    for transfer in in_flight:
        ok, late = transfer.wait(), False
        if (name := transfer.request_id) is not None:
            is_last = last[name] is transfer
            ok = is_last and name in landed.loaded
            late = not ok and not (is_last and name in landed.failed)
        ends.append((transfer, ok, late))
    return ends


def _compare(replay: ReplayEngine) -> None:
    """Compare all that running requests have computed, partial tails included."""
    batch = replay.batch
    for seat in batch.running:
        request, num_tokens = batch.request(seat), int(batch.computed[seat])
        for group, table in enumerate(replay.kv.tables(request.name)):
            replay.verifier.check_table(request, group, table, batch.keys[seat], num_tokens)


def _tried(replay: ReplayEngine, call: Callable[[], _Result]) -> _Result:
    """What `call` returns; where copies are made to fail, as soon as none of its own does."""
    while True:
        try:
            return call()
        except OutOfBlocks as error:
            raise ConfigError(f"sleep-at: {error}") from error
        except TransferError:
            if replay.config.faults is None:
                raise
