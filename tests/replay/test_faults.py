"""A replay finds wrong bytes, and reports the block and the tier."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from tests.replay.scenario import BLOCK, Checked, comes_back, prepared, pushed_out, request, trace

from kvstow.engine import Transfer
from kvstow.replay import ReplayEngine, ReplayState
from kvstow.replay.batch import Request
from kvstow.replay.config import Verify
from kvstow.replay.verify import MAX_REPORTS, Verifier
from kvstow.transfer import Event, HostMover, Ticket
from kvstow.transfer.mover import Ints

Slots = npt.NDArray[np.int32]


class AfterFirstStore(Checked):
    """Runs a fault once, when the first store has landed."""

    def __init__(self, fault: Callable[[ReplayState, Slots], None]) -> None:
        self._fault = fault
        self._done = False

    def landed(self, replay: ReplayState, transfer: Transfer) -> None:
        if transfer.direction == "store" and not self._done:
            self._done = True
            self._fault(replay, transfer.job.host_slots)


def replayed_with(fault: Callable[[ReplayState, Slots], None]) -> Verifier:
    """Spoil the stored blocks of the first request, evict it, and let the third load them."""
    of = pushed_out(8, comes_back(3, at_s=200))
    with prepared(of, device_blocks=9, observer=AfterFirstStore(fault)) as engine:
        engine.run()

        assert engine.figures.finished_requests == 3, "a corrupt block does not end the replay"
        assert engine.figures.host_hits == 4
        return engine.verifier


def flip_one_byte(replay: ReplayState, slots: Slots) -> None:
    replay.arena.slots[slots[2], 77] ^= 0x01


def test_nothing_is_reported_without_a_fault() -> None:
    verifier = replayed_with(lambda engine, slots: None)

    assert (verifier.num_corrupt, verifier.reports) == (0, [])


def test_one_flipped_byte_names_block_request_and_tier() -> None:
    verifier = replayed_with(flip_one_byte)

    assert verifier.num_corrupt == 1, "one corrupt copy counts once, though its table is checked"
    [found] = verifier.reports
    assert (found.request, found.position, found.trace_id, found.tier) == ("3", 2, 3, "host")
    assert str(found).startswith(
        "request 3: block 2 (id 3) of group 0 (full attention) is corrupt in the host tier: "
    )
    assert f"host slot {found.host_slot}" in str(found)


def test_two_swapped_slots_are_both_reported() -> None:
    def swap(replay: ReplayState, slots: Slots) -> None:
        replay.arena.slots[slots[[0, 3]]] = replay.arena.slots[slots[[3, 0]]]

    verifier = replayed_with(swap)

    assert verifier.num_corrupt == 2
    assert [(found.position, found.tier) for found in verifier.reports] == [
        (0, "host"),
        (3, "host"),
    ]


def test_a_block_torn_between_two_is_reported() -> None:
    def tear(replay: ReplayState, slots: Slots) -> None:
        replay.arena.slots[slots[1], 64:] = replay.arena.slots[slots[2], 64:]

    assert [found.position for found in replayed_with(tear).reports] == [1]


def test_two_exchanged_layers_of_a_block_are_reported() -> None:
    def shift(replay: ReplayState, slots: Slots) -> None:
        slot = replay.arena.slots[slots[1]]
        slot[:] = np.roll(slot, replay.memory[0].geometry.region_bytes)

    assert [found.position for found in replayed_with(shift).reports] == [1]


def test_a_spoilt_device_block_is_found_when_its_request_ends() -> None:
    class Spoil(Checked):
        def stepped(self, replay: ReplayState) -> None:
            if replay.figures.steps == 1:
                replay.memory[0].regions[3][
                    replay.batch.tables[0, replay.batch.running[0]][1], 5
                ] ^= 0x80

    of = pushed_out(8, comes_back(3, at_s=200))
    with prepared(of, device_blocks=9, observer=Spoil()) as engine:
        engine.run()

        first = engine.verifier.reports[0]
        assert (first.request, first.position, first.tier) == ("1", 1, "device")
        assert first.host_slot is None


def test_a_partial_block_is_checked() -> None:
    class Spoil(Checked):
        def stepped(self, replay: ReplayState) -> None:
            if replay.figures.steps == 1:
                replay.memory[0].regions[0][
                    replay.batch.tables[0, replay.batch.running[0]][4], :
                ] = 0

    of = trace(request(1, [1, 2, 3, 4, 5], tail=7, output=2))
    with prepared(of, device_blocks=9, observer=Spoil()) as engine:
        engine.run()

        [found] = engine.verifier.reports
        assert (found.position, found.trace_id) == (4, None)


def use(engine: ReplayEngine, kind: type[HostMover]) -> None:
    """Replace the movers by movers of this kind."""
    for mover in engine.kv.movers:
        mover.close()
    engine.kv.movers[:] = [kind(mover.layout, mover.arena) for mover in engine.kv.movers]


class HalfLoads(HostMover):
    """A mover that reports loads as done without a copy."""

    def load(self, host_slots: Ints, block_ids: Ints, *, after: Event) -> Ticket:
        return super().load(host_slots[:-1], block_ids[:-1], after=after)


def test_a_skipped_load_is_reported_in_the_device_tier() -> None:
    of = pushed_out(8, comes_back(3, at_s=200))
    with prepared(of, device_blocks=9) as engine:
        use(engine, HalfLoads)
        engine.run()

        [found] = engine.verifier.reports
        assert found.tier == "device"
        assert found.host_slot is not None


class WrongOrder(HostMover):
    """A mover that loads each block into the place of another one."""

    def load(self, host_slots: Ints, block_ids: Ints, *, after: Event) -> Ticket:
        return super().load(host_slots, block_ids[::-1], after=after)


def test_blocks_loaded_into_wrong_places_are_reported() -> None:
    of = pushed_out(8, comes_back(3, at_s=200))
    with prepared(of, device_blocks=9) as engine:
        use(engine, WrongOrder)
        engine.run()

        assert engine.verifier.num_corrupt == 4
        assert {found.tier for found in engine.verifier.reports} == {"device"}


@pytest.mark.parametrize(("verify", "num_checked"), [("all", 64), ("sample", 4), ("off", 0)])
def test_verify_chooses_the_blocks_to_check(verify: Verify, num_checked: int) -> None:
    """The device memory holds only garbage. The sample goes by the high bits of the digest."""
    with prepared(trace(request(1, range(64))), device_blocks=66) as engine:
        verifier = Verifier(engine.model, engine.memory, engine.kv.arenas, verify)
        keys = np.array([high << 60 | low for high in range(16) for low in range(4)], np.uint64)
        asker = Request.arrived(engine.trace.requests[0], BLOCK)
        verifier.check_table(asker, 0, np.arange(1, 65), keys, 64 * BLOCK)

    assert (verifier.num_verified, verifier.num_corrupt) == (num_checked, num_checked)


def test_the_reports_are_limited_but_not_the_count() -> None:
    many = range(1, 31)

    def wipe(replay: ReplayState, slots: Slots) -> None:
        replay.arena.slots[slots] = 0

    of = trace(request(1, many), request(2, range(51, 82), at_s=1), request(3, [*many, 99], at_s=2))
    with prepared(of, device_blocks=33, observer=AfterFirstStore(wipe)) as engine:
        engine.run()

        assert engine.verifier.num_corrupt == engine.figures.host_hits > 2 * MAX_REPORTS
        assert [found.position for found in engine.verifier.reports] == list(range(MAX_REPORTS))
