"""`Engine.computed` of a lazy engine is interrupted: no store begins before the compute.

Blocks that have their keys may be stored. If the engine knew an earlier compute only, it would copy
them before they are written.
"""

import pytest
from tests.engine.world import DOCUMENT, world
from tests.interrupts import is_interrupted

from kvstow.transfer import READY, HostEvent

EARLIER = [50, 51, 52, 53]


def stores_before_the_compute(leave: str, line: int) -> tuple[bool, bool]:
    """Return whether line `line` of `computed` was interrupted, and whether a store began."""
    with world(num_device_blocks=9, mode="lazy", horizon_blocks=8) as it:
        it.admit("earlier", EARLIER)
        it.compute("earlier", EARLIER, after=READY)
        it.admit("request", DOCUMENT)
        blocks = set(it.engine.tables("request")[0].tolist())
        compute = HostEvent()
        is_cut_short = is_interrupted(
            lambda: it.engine.computed(["request"], [len(DOCUMENT)], after=compute), line
        )
        getattr(it.engine, leave)("request")
        it.engine.poll()
        stores = zip(it.engine.transfers, it.mover.store_events, strict=True)
        events = [
            after for transfer, after in stores if blocks & set(transfer.job.block_ids.tolist())
        ]
        assert all(after is compute for after in events), f"line {line}: an earlier compute"
        compute.set()
        for ticket in it.mover.stores:
            ticket.land()
        it.engine.poll()
        return is_cut_short, bool(events)


@pytest.mark.parametrize("leave", ["finish", "preempt"])
def test_store_after_an_interrupted_report_waits_for_its_compute(leave: str) -> None:
    line = num_stores = 0
    is_cut_short = True
    while is_cut_short:
        line += 1
        is_cut_short, has_begun = stores_before_the_compute(leave, line)
        num_stores += is_cut_short and has_begun
    assert num_stores, "no interrupt came when the keys were there"
