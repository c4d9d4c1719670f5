"""A slot file before a shared store: what each half does, and what no failure may do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.tiers.memory_store import MemoryStore
from tests.tiers.setup import (
    LONG_S,
    Here,
    blocks_of,
    bytes_of,
    get,
    key_of,
    new_arena,
    open_file,
    put,
)

from kvstow import ConfigError, StateError, TransferError
from kvstow.tiers import BothTier, TierTicket
from kvstow.tiers.both import BothTicket
from kvstow.tiers.files import Buffers
from kvstow.tiers.ticket import tickets_made
from kvstow.transfer import TransferTimeout

KEYS = [key_of(number) for number in range(4)]
FOUR = range(4)


class Slow(Here):
    """File calls that wait while the test says so."""

    def __init__(self) -> None:
        self.waits = False

    def wait(self) -> None:
        end_s = time.monotonic() + LONG_S
        while self.waits and time.monotonic() < end_s:
            time.sleep(0.001)

    def read(self, file: int, buffers: Buffers, offset: int) -> int:
        self.wait()
        return super().read(file, buffers, offset)

    def write(self, file: int, buffers: Buffers, offset: int) -> int:
        self.wait()
        return super().write(file, buffers, offset)


@pytest.fixture
def files() -> Slow:
    return Slow()


@pytest.fixture
def both(tmp_path: Path, files: Slow) -> Iterator[BothTier]:
    with new_arena() as arena:
        tier = BothTier(open_file(tmp_path, arena, files=files), MemoryStore(arena))
        try:
            yield tier
        finally:
            files.waits = False
            tier.close()


@pytest.fixture
def store(both: BothTier) -> MemoryStore:
    assert isinstance(both.shared, MemoryStore)
    return both.shared


def put_into_the_store(both: BothTier, num: int = 4) -> None:
    """Put blocks there that another server has computed."""
    for at, key in enumerate(KEYS[:num]):
        both._rows[at] = bytes_of(key)
    ticket = both.shared.put(blocks_of(KEYS[:num], FOUR[:num]), FOUR[:num])
    ticket.wait(LONG_S)
    assert ticket.ok.all()


def begin_get(both: BothTier, deadline: float | None = None) -> TierTicket:
    both._rows[40:44] = 0
    return both.get(blocks_of(KEYS, FOUR), range(40, 44), deadline=deadline)


def answer(ticket: TierTicket) -> list[bool]:
    ticket.wait(LONG_S)
    ok: list[bool] = ticket.ok.tolist()
    return ok


def test_block_of_the_store_is_kept_in_the_slot_of_its_claim(
    both: BothTier, store: MemoryStore
) -> None:
    put_into_the_store(both)
    assert all(get(both, KEYS, FOUR))
    assert all(get(both.disk, KEYS, FOUR))
    assert (both.stats().put_blocks, store.num_gets) == (4, 4)
    assert all(get(both, KEYS, FOUR))
    assert store.num_gets == 4, "the file has them now"


def test_only_blocks_that_arrived_are_kept(both: BothTier) -> None:
    """Never computed: a host slot whose get failed holds anything."""
    put_into_the_store(both, 2)
    assert get(both, KEYS, FOUR) == [True, True, False, False]
    assert both.disk.records().slots.tolist() == [0, 1]


def test_claimed_slot_with_another_block_is_a_claim(both: BothTier, store: MemoryStore) -> None:
    others = [key_of(number) for number in range(10, 14)]
    assert all(put(both.disk, others, FOUR))
    put_into_the_store(both)
    assert all(get(both, KEYS, FOUR))
    assert store.num_gets == 4
    assert get(both.disk, others, FOUR) == [False] * 4


def test_damaged_block_of_the_file_is_asked_of_the_file_alone(
    both: BothTier, store: MemoryStore, tmp_path: Path
) -> None:
    """Torn: a second half would write the host slot after the first."""
    assert all(put(both, KEYS, FOUR))
    with (tmp_path / "slots").open("r+b") as file:
        file.seek(2 * both.slot_bytes + 5)
        file.write(b"damage")
    assert get(both, KEYS, FOUR) == [True, True, False, True]
    assert store.num_gets == 0
    assert all(get(both, KEYS, FOUR)), "the next get asks the store"
    assert store.num_gets == 1


def test_get_from_before_a_renewal_keeps_nothing_in_the_file(
    both: BothTier, store: MemoryStore
) -> None:
    """Stale: the file would vouch for the block under the new generation."""
    put_into_the_store(both)
    store.waits = True
    ticket = begin_get(both)
    renewed = both.renew(bytes([7] * 16))
    renewed.wait(LONG_S)
    assert renewed.ok.all()
    store.waits = False
    store.go_on()
    answer(ticket)
    assert len(both.disk.records()) == 0
    assert get(both, KEYS, FOUR) == [False] * 4, "a block of before the renewal is served"


def test_get_holds_its_host_slots_until_the_file_has_its_blocks(
    both: BothTier, files: Slow
) -> None:
    """Never computed: another block would come into the host slot while the file reads it."""
    put_into_the_store(both)
    files.waits = True
    ticket = begin_get(both)
    assert not ticket.poll()
    assert not ticket.has_ended
    files.waits = False
    assert answer(ticket) == [True] * 4
    assert all(get(both.disk, KEYS, FOUR))


def test_get_ends_if_the_tier_is_closed_before_the_file_keeps_its_blocks(
    both: BothTier, store: MemoryStore
) -> None:
    """A closed file has no threads, so a put into it would never end."""
    put_into_the_store(both)
    store.waits = True
    ticket = begin_get(both)
    both.close()
    assert answer(ticket) == [True] * 4
    assert ticket.has_ended


def test_file_keeps_nothing_of_a_closed_arena(both: BothTier, store: MemoryStore) -> None:
    put_into_the_store(both)
    store.waits = True
    ticket = begin_get(both)
    both.arena.close()
    store.waits = False
    store.go_on()
    assert answer(ticket) == [True] * 4
    assert both.disk.stats().put_blocks == 0


def test_get_ends_though_the_file_cannot_keep_its_blocks(both: BothTier) -> None:
    """Else the scheduler would reserve its host slots for ever."""

    def fail(num_blocks: int) -> int:
        raise RuntimeError

    put_into_the_store(both)
    both._may_keep = fail
    ticket = begin_get(both)
    with pytest.raises(RuntimeError):
        ticket.wait(LONG_S)
    assert answer(ticket) == [True] * 4
    assert ticket.has_ended


def test_late_store_fails_its_own_blocks_only(both: BothTier, store: MemoryStore) -> None:
    assert all(put(both.disk, KEYS[:2], FOUR[:2]))
    put_into_the_store(both)
    store.waits = True
    deadline = time.monotonic() + 2 * LONG_S
    ticket = begin_get(both, deadline)
    assert isinstance(ticket, BothTicket)
    _, half = ticket.made
    store_deadline = half.deadline
    assert store_deadline is not None and store_deadline < deadline - LONG_S / 2
    half._clock = lambda: (store_deadline + deadline) / 2
    store.waits = False
    store.go_on()
    assert answer(ticket) == [True, True, False, False]
    assert not ticket.is_late


def test_job_that_ended_in_time_is_not_late_when_its_caller_looks_late(both: BothTier) -> None:
    assert all(put(both, KEYS, FOUR))
    ticket = begin_get(both, time.monotonic() + LONG_S)
    assert isinstance(ticket, BothTicket)
    for half in ticket.made:
        half.wait_until_ended(LONG_S)
    ticket._clock = lambda: time.monotonic() + 2 * LONG_S
    assert answer(ticket) == [True] * 4


def test_late_disk_is_left_alone_until_it_has_ended(both: BothTier, files: Slow) -> None:
    assert all(put(both, KEYS, FOUR))
    files.waits = True
    ticket = begin_get(both, time.monotonic() + 0.05)
    with pytest.raises(TransferTimeout):
        ticket.wait_until_ended(0.2)
    assert ticket.poll()
    assert ticket.is_late
    assert all(get(both, KEYS, FOUR)), "the store serves them"
    other = key_of(9)
    assert put(both, [other], [9]) == [False], "only the store has it"
    assert get(both, [other], [9]) == [True]
    files.waits = False
    ticket.wait_until_ended(LONG_S)
    assert put(both, [other], [9]) == [True]


def test_file_that_cannot_be_written_leaves_the_store_on(
    both: BothTier, store: MemoryStore
) -> None:
    assert all(put(both, KEYS[:1], FOUR[:1]))
    both.disk._store._read_only = TransferError("injected")
    assert put(both, KEYS[1:2], [1]) == [False]
    assert get(both, KEYS[:2], FOUR[:2]) == [True, True]
    assert (both.mode, both.disk.mode, store.num_gets) == ("on", "read_only", 1)


def test_get_keeps_no_more_than_it_may(tmp_path: Path) -> None:
    asked: list[int] = []
    allowed = [0, 3, 1]

    def may_keep(num_blocks: int) -> int:
        asked.append(num_blocks)
        return allowed[len(asked) - 1]

    with new_arena() as arena:
        disk = open_file(tmp_path, arena)
        with BothTier(disk, MemoryStore(arena), may_keep=may_keep) as both:
            put_into_the_store(both)
            for num_kept in (0, 3, 4, 4):
                assert all(get(both, KEYS, FOUR))
                assert disk.records().slots.tolist() == [*range(num_kept)]
            assert asked == [4, 4, 1], "what the file has is not asked for"
            both.disk.delete(blocks_of(KEYS, FOUR)).wait(LONG_S)
            deadline = time.monotonic() + 0.02
            ticket = begin_get(both, deadline)
            time.sleep(max(0.0, deadline - time.monotonic()))
            answer(ticket)
            assert asked == [4, 4, 1], "the file keeps nothing of a job that is looked at late"


def test_interrupted_job_ends_with_its_halves(
    both: BothTier, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_into_the_store(both)
    store.waits = True

    real = store._get

    def get_then_interrupt(*args: object) -> None:
        real(*args)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "_get", get_then_interrupt)
    made: list[TierTicket] = []
    with pytest.raises(KeyboardInterrupt), tickets_made(made):
        begin_get(both)
    assert not all(ticket.has_ended for ticket in made), "the store still writes"
    store.waits = False
    store.go_on()
    assert all(ticket.has_ended for ticket in made)


def test_tiers_of_two_arenas_are_refused(tmp_path: Path) -> None:
    with (
        new_arena() as one,
        new_arena() as two,
        open_file(tmp_path, one) as disk,
        pytest.raises(ConfigError, match="different arenas: open both over one"),
    ):
        BothTier(disk, MemoryStore(two))


def test_deleted_block_is_in_neither_half(both: BothTier) -> None:
    assert all(put(both, KEYS, FOUR))
    ticket = both.delete(blocks_of(KEYS[:2], FOUR[:2]))
    assert answer(ticket) == [True, True]
    assert get(both, KEYS, FOUR) == [False, False, True, True]
    np.testing.assert_array_equal(get(both.shared, KEYS, FOUR), [False, False, True, True])


def test_block_that_the_file_may_keep_is_not_deleted(both: BothTier) -> None:
    assert all(put(both, KEYS, FOUR))
    both.disk._store._off = TransferError("injected")
    assert get(both, KEYS, FOUR) == [True] * 4, "the store has them too"
    assert answer(both.delete(blocks_of(KEYS, FOUR))) == [False] * 4


def test_file_is_closed_even_if_the_store_does_not_close(
    both: BothTier, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise TransferError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(store, "close", fail)
        with pytest.raises(TransferError, match="injected"):
            both.close()
    with pytest.raises(StateError, match="closed"):
        both.disk.records()
