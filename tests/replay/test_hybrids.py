"""Models of several groups: what the replay stores, loads and checks of each."""

import re
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from tests.replay.scenario import (
    FIRST,
    MIXED,
    SLIDING,
    STATEFUL,
    Checked,
    assert_ended_well,
    comes_back,
    prepared,
    pushed_out,
    request,
    trace,
)
from tests.replay.test_any_trace import LateMover
from tests.replay.test_failing_copies import fail

from kvstow import BlockLedger, ConfigError, Job
from kvstow.engine import Transfer
from kvstow.replay import ReplayEngine, ReplayState
from kvstow.replay.batch import Request
from kvstow.replay.model import ReplayModel, build_model
from kvstow.replay.verify import Verifier

Slots = npt.NDArray[np.int32]

NARROW, FULL, WINDOW, STATE = range(4)  # the groups of MIXED
# Blocks that a loaded prefix of 4 blocks needs in each: windows of 5 and 40 tokens, and a state.
NUM_NEEDED = [1, 4, 3, 1]


def came_back(model: ReplayModel, observer: Checked) -> ReplayEngine:
    """Replay a prefix that the device evicts and a later request loads."""
    of = pushed_out(8, comes_back(3, at_s=200))
    device_blocks = 8 * len(model.groups) + 1
    with prepared(of, model=model, device_blocks=device_blocks, observer=observer) as engine:
        engine.run()
        return engine


def test_a_load_copies_only_blocks_that_a_group_reads() -> None:
    counts: list[list[int]] = []

    class Loads(Checked):
        def landed(self, replay: ReplayState, transfer: Transfer) -> None:
            if transfer.direction == "load":
                counts.append(np.diff(transfer.job.offsets).tolist())
                sizes = [geometry.block_bytes for geometry in MIXED.geometries]
                assert transfer.num_bytes == np.dot(counts[-1], sizes)

    engine = came_back(MIXED, Loads())

    assert_ended_well(engine)
    assert counts == [NUM_NEEDED]
    figures = engine.figures
    assert (figures.device_hits, figures.host_hits) == (0, 4), "hits are blocks of the trace"
    assert figures.loaded_blocks == sum(NUM_NEEDED)
    assert figures.stored_blocks == 4 * (4 + 7 + 1)
    all_bytes = sum(geometry.block_bytes for geometry in MIXED.geometries)
    assert figures.bytes_stored == all_bytes * (4 + 7 + 1)


def test_published_and_evicted_blocks_count_in_all_groups() -> None:
    with prepared(trace(request(1, FIRST)), model=MIXED, device_blocks=100) as engine:
        engine.run()

        assert_ended_well(engine)
        assert engine.figures.published == 4 * 4
        assert engine.kv.ledger.pool.num_cached == 4 * 4


@pytest.mark.parametrize("model", [SLIDING, STATEFUL, MIXED], ids=lambda model: model.name)
def test_the_batch_has_the_block_tables_of_the_ledger(model: ReplayModel) -> None:
    num_left = 0

    class Compared(Checked):
        def stepped(self, replay: ReplayState) -> None:
            super().stepped(replay)
            nonlocal num_left
            for seat in replay.batch.running:
                tables = np.stack(replay.kv.tables(replay.batch.request(seat).name))
                ours = replay.batch.tables[:, seat, : replay.batch.num_blocks[seat]]
                assert np.array_equal(tables, np.where(tables != 0, ours, 0))
                num_left += int(np.count_nonzero(tables == 0))

    of = trace(request(1, FIRST, output=80), request(2, [*FIRST[:2], 8], output=90))
    needed = sum(group.most_blocks(10_000, 16) for group in model.groups if group.reach_tokens)
    with prepared(
        of, model=model, device_blocks=needed + 14, max_step_tokens=16, observer=Compared()
    ) as engine:
        engine.run()
        assert_ended_well(engine)
        assert engine.figures.preemptions
    assert num_left, "no block ever left a window"


@pytest.mark.parametrize("model", [SLIDING, STATEFUL, MIXED], ids=lambda model: model.name)
def test_the_device_blocks_that_the_error_names_suffice_with_drafts(model: ReplayModel) -> None:
    of = trace(request(1, range(1, 20), output=40))

    def run(device_blocks: int) -> None:
        with prepared(
            of, model=model, device_blocks=device_blocks, max_step_tokens=16, lookahead_tokens=40
        ) as engine:
            engine.run()
            assert_ended_well(engine)

    with pytest.raises(ConfigError) as refused:
        run(2)
    [least] = re.findall(r"--device-blocks (\d+) or more", str(refused.value))
    run(int(least))


def test_a_load_that_fails_in_one_group_is_recomputed() -> None:
    of = pushed_out(8, comes_back(3, at_s=200))
    with prepared(of, model=MIXED, device_blocks=33) as engine:
        fail(engine, STATE, loads=1)
        engine.run()

        assert_ended_well(engine)
        assert (engine.figures.failed_loads, engine.figures.loaded_blocks) == (1, 0)
        assert engine.figures.recomputed_blocks == 4 + 7 + 5


def test_a_failed_job_lands_after_all_of_its_copies_have_ended() -> None:
    num_failed = 0

    class Landed(Checked):
        def landed(self, replay: ReplayState, transfer: Transfer) -> None:
            nonlocal num_failed
            assert all(ticket.poll() for ticket in transfer.tickets)
            num_failed += any(ticket.error for ticket in transfer.tickets)

    of = pushed_out(8, comes_back(3, at_s=200))
    with prepared(of, model=MIXED, device_blocks=33, observer=Landed()) as engine:
        engine.kv.movers[:] = map(LateMover, engine.kv.movers)
        fail(engine, NARROW, stores=1)
        engine.run()
    assert num_failed == 1


class _Spy:
    """The scheduler, with a check of the block ids that stores report to it."""

    def __init__(self, engine: ReplayEngine) -> None:
        self._kv = engine.kv
        self._scheduler = engine.kv.scheduler
        self.num_null = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._scheduler, name)

    def store_step(
        self, ledger: BlockLedger, names: list[str], computed: list[int], *, deadline: float | None
    ) -> Job | None:
        held = np.concatenate([table for name in names for table in self._kv.tables(name)])
        self.num_null += int(np.count_nonzero(held == 0))
        job = self._scheduler.store_step(ledger, names, computed, deadline=deadline)
        if job is not None:
            assert np.isin(job.block_ids, held).all(), "stores a block that no table holds"
        return job


def test_a_store_reports_no_block_that_has_left_its_window() -> None:
    """A hit may leave the window before the first block after it is full and stored."""
    of = trace(request(1, FIRST), request(2, [*FIRST, 8, 9], at_s=1, output=30))
    with prepared(of, model=MIXED, device_blocks=100, max_step_tokens=6) as engine:
        spy = _Spy(engine)
        engine.kv._state.scheduler = spy  # type: ignore[assignment]
        engine.run()

        assert_ended_well(engine)
    assert spy.num_null


def test_a_request_must_fit_in_all_groups_together() -> None:
    of = trace(request(1, range(20), output=0))
    model = SLIDING  # 20 blocks, and 5 of a window of 40 tokens with chunks of 16
    with (
        pytest.raises(ConfigError, match=r"needs 25 blocks for its 320 tokens, and 24 of 25 "),
        prepared(of, model=model, device_blocks=25, max_step_tokens=16),
    ):
        pass
    with prepared(of, model=model, device_blocks=26, max_step_tokens=16) as engine:
        engine.run()
        assert_ended_well(engine)


def test_a_model_with_another_block_size_than_the_trace_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match="'jamba' has blocks of 512 tokens, the trace of 16"),
        prepared(trace(request(1, FIRST)), model=build_model("jamba", 512), device_blocks=99),
    ):
        pass


# -- faults ------------------------------------------------------------------------------------

Fault = Callable[[ReplayState, list[Slots]], None]


class SpoilFirstStore(Checked):
    """Spoils the slots of the first request's blocks, given by group."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._done = False

    def landed(self, replay: ReplayState, transfer: Transfer) -> None:
        if not self._done:
            assert transfer.direction == "store"
            self._done = True
            self._fault(replay, np.split(transfer.job.host_slots, transfer.job.offsets[1:-1]))


def found_after(fault: Fault) -> list[tuple[int, int, str]]:
    """Return group, position and tier of the loaded blocks that a replay finds corrupt."""
    engine = came_back(MIXED, SpoilFirstStore(fault))
    assert engine.figures.host_hits == 4
    assert engine.verifier.num_corrupt == len(engine.verifier.reports)
    return [(found.group, found.position, found.tier) for found in engine.verifier.reports]


def test_no_block_is_corrupt_without_a_fault() -> None:
    assert found_after(lambda engine, slots: None) == []


@pytest.mark.parametrize("group", [NARROW, FULL, WINDOW, STATE])
def test_a_flipped_byte_names_its_group(group: int) -> None:
    def flip(replay: ReplayState, slots: list[Slots]) -> None:
        last_byte = MIXED.groups[group].geometry.block_bytes - 1
        replay.arena.slots[slots[group][3], last_byte] ^= 1

    assert found_after(flip) == [(group, 3, "host")]


def test_a_report_names_the_attention_of_the_group() -> None:
    def flip(replay: ReplayState, slots: list[Slots]) -> None:
        replay.arena.slots[slots[WINDOW][2], 0] ^= 1

    engine = came_back(MIXED, SpoilFirstStore(flip))

    [found] = engine.verifier.reports
    assert str(found).startswith(
        "request 3: block 2 (id 3) of group 2 (sliding window of 40) is corrupt in the host tier: "
    )
    assert found.attention == "sliding window of 40"


def test_two_swapped_slots_of_a_window_are_both_found() -> None:
    def swap(replay: ReplayState, slots: list[Slots]) -> None:
        pair = slots[WINDOW][[1, 3]]
        replay.arena.slots[pair] = replay.arena.slots[pair[::-1]]

    assert found_after(swap) == [(WINDOW, 1, "host"), (WINDOW, 3, "host")]


def test_a_block_of_another_group_for_the_same_tokens_is_corrupt() -> None:
    """The digests are equal, and FULL and NARROW have blocks of one size."""

    def exchange(replay: ReplayState, slots: list[Slots]) -> None:
        pair = np.array([slots[NARROW][3], slots[FULL][3]])
        replay.arena.slots[pair] = replay.arena.slots[pair[::-1]]

    assert found_after(exchange) == [(NARROW, 3, "host"), (FULL, 3, "host")]


def test_blocks_that_no_token_reads_are_not_loaded() -> None:
    def spoil(replay: ReplayState, slots: list[Slots]) -> None:
        unread = [slots[group][: 4 - num] for group, num in enumerate(NUM_NEEDED)]
        replay.arena.slots[np.concatenate(unread)] = 0

    assert found_after(spoil) == []


@pytest.mark.parametrize("writer", [NARROW, WINDOW, STATE])
def test_a_block_that_another_group_writes_is_found(writer: int) -> None:
    class Overwrite(Checked):
        def stepped(self, replay: ReplayState) -> None:
            if replay.figures.steps == 1:
                block = replay.batch.tables[FULL, replay.batch.running[0], 1:2]
                replay.memory[writer].write_tokens(block, np.zeros(1, np.uint64), np.zeros(1, int))

    of = trace(request(1, FIRST))
    with prepared(of, model=MIXED, device_blocks=33, observer=Overwrite()) as engine:
        engine.run()

        [found] = engine.verifier.reports
        assert (found.group, found.position, found.tier) == (FULL, 1, "device")


@pytest.mark.parametrize("num_on_the_device", [4, 2])
def test_a_wrong_hit_is_found_even_if_it_leaves_the_window(
    num_on_the_device: int,
) -> None:
    """The request runs at once, or loads the rest of the prefix first."""

    class Spoil(Checked):
        tables = np.zeros((4, 4), dtype=np.int32)

        def stepped(self, replay: ReplayState) -> None:
            if replay.figures.steps == 1:
                self.tables = replay.batch.tables[:, replay.batch.running[0], :4].copy()
            if (replay.figures.finished_requests, len(replay.batch.running)) == (1, 0):
                replay.kv.ledger.pool.evict(self.tables[FULL, num_on_the_device:])
                replay.memory[WINDOW].regions[0][self.tables[WINDOW, 1], 0] ^= 1

    of = trace(
        request(1, FIRST, output=60),  # the block leaves its window before it ends
        request(2, [*FIRST, *range(40, 50)], at_s=1),
    )
    with prepared(of, model=MIXED, device_blocks=200, observer=Spoil()) as engine:
        engine.run()

        figures = engine.figures
        assert (figures.device_hits, figures.host_hits) == (
            num_on_the_device,
            4 - num_on_the_device,
        )
        [found] = engine.verifier.reports
        assert (found.request, found.group, found.position) == ("2", WINDOW, 1)
        assert (found.tier, found.host_slot) == ("device", None)


@pytest.mark.parametrize("group", [NARROW, FULL, WINDOW, STATE])
def test_a_null_block_is_wrong_only_where_a_token_reads_it(group: int) -> None:
    """After 6 blocks and 7 tokens, a token reads 1, 7, 3 and 1 blocks, the partial one included."""
    num_tokens, num_full = 6 * 16 + 7, 6
    num_unread = num_full + 1 - [1, 7, 3, 1][group]
    keys = np.arange(1, 8, dtype=np.uint64)
    of = trace(request(1, range(1, 7), tail=0, output=20))
    with prepared(of, model=MIXED, device_blocks=100) as engine:
        whole = np.arange(11, 18, dtype=np.int32)
        engine.memory[group].write_range(whole, keys, 0, num_tokens)
        asker = Request.arrived(of.requests[0], 16)
        found = []
        for position in range(num_full):
            table = whole.copy()
            table[position] = 0
            verifier = Verifier(engine.model, engine.memory, engine.kv.arenas, "all")
            verifier.check_table(asker, group, table, keys, num_tokens)
            found += [report.position for report in verifier.reports]
        assert found == list(range(num_unread, num_full))


def test_a_wrong_block_counts_once_for_each_group_that_expects_it() -> None:
    of = trace(request(1, FIRST))
    table, keys = np.array([5], dtype=np.int32), np.array([7], dtype=np.uint64)
    with prepared(of, model=MIXED, device_blocks=100) as engine:
        asker = Request.arrived(of.requests[0], 16)
        for group in (FULL, FULL, NARROW, NARROW):
            engine.verifier.check_table(asker, group, table, keys, 16)

        assert [found.group for found in engine.verifier.reports] == [FULL, NARROW]
