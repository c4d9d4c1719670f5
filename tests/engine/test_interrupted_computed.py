"""`Engine.computed` is interrupted: no store begins before the compute, and no block is lost.

Blocks of a lazy engine that have their keys may be stored. If the engine knew an earlier compute
only, it would copy them before they are written.
"""

from functools import partial

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


def test_report_that_is_repeated_after_an_interrupt_stores_every_block() -> None:
    line, is_cut_short = 0, True
    while is_cut_short:
        line += 1
        with world() as it:
            it.admit("request", DOCUMENT)
            report = partial(it.engine.computed, ["request"], [len(DOCUMENT)], after=READY)
            is_cut_short = is_interrupted(report, line)
            it.compute("request", DOCUMENT)
            for ticket in it.mover.stores:
                ticket.land()
            it.engine.poll()
            it.engine.finish("request")
            assert it.engine.ledger.pool.reset()
            assert it.admit("again", DOCUMENT).num_external_tokens == 12, f"line {line}"
    assert line > 20, "some lines were interrupted"
