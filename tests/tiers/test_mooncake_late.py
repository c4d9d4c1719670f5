"""Bytes that Mooncake moves after its call has failed reach no slot that holds something else.

The first tests use a store of this file. The last ones use a real one, whose owner stands still for
longer than the store waits. They take two minutes, so they need KVSTOW_MOONCAKE_LATE=full.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiers.mooncake_master import Master, missing
from tests.tiers.mooncake_owner import Owner
from tests.tiers.setup import blocks, wait_until

from kvstow import TransferError
from kvstow.tiers import TierTicket
from kvstow.tiers.mooncake import MooncakeTier
from kvstow.tiers.mooncake_link import Link, Links
from kvstow.transfer import HostArena, TransferTimeout

SLOT_BYTES = 4096
NAMESPACE = bytes(range(16))
LONG_S = 30.0
SHORT_S = 0.1


class Doubtful:
    """A store whose calls fail, and whose transfers go on until its close.

    Attributes:
        made: all stores, oldest first.
        may_return: a call returns only when this is set.
        code: what each block of a call gets.
        close_code: what `close` answers.
        buffers: the buffers of its calls.
        num_tries: how often Mooncake would try to set it up, as the environment says.
    """

    made: list[Doubtful]
    may_return: threading.Event
    code = -800
    close_code = 0

    def __init__(self) -> None:
        """Begin open."""
        self.buffers: list[tuple[int, int]] = []
        self.is_closed = False
        self.made.append(self)

    def setup(self, *_: Any) -> int:
        """Accept everything."""
        self.num_tries = os.environ.get("MC_STORE_CLIENT_SETUP_RETRIES")
        return 0

    def register_buffer(self, *_: Any) -> int:
        """Accept everything."""
        return 0

    def get_size(self, _: str) -> int:
        """Know no size."""
        return -704

    def batch_remove(self, keys: list[str], _: bool) -> Any:
        """Have removed everything."""
        return [0] * len(keys)

    def _move(self, keys: list[str], pointers: list[list[int]], sizes: list[list[int]]) -> Any:
        for value in zip(pointers, sizes, strict=True):
            self.buffers += zip(*value, strict=True)
        assert self.may_return.wait(LONG_S)
        return [self.code] * len(keys)

    batch_get_into_multi_buffers = batch_put_from_multi_buffers = _move

    def close(self) -> int:
        """End all transfers."""
        self.is_closed = not self.close_code
        return self.close_code

    def go_on(self) -> None:
        """Let the bytes of all gets arrive."""
        if not self.is_closed:
            for address, size in self.buffers:
                ctypes.memset(address, 0xEE, size)


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[Doubtful]:
    made: list[Doubtful] = []
    monkeypatch.setattr(Doubtful, "made", made, raising=False)
    monkeypatch.setattr(Doubtful, "may_return", threading.Event(), raising=False)
    Doubtful.may_return.set()
    monkeypatch.setattr("kvstow.tiers.mooncake._store_class", lambda: Doubtful)
    monkeypatch.setattr("kvstow.tiers.mooncake.check_answers", lambda _: None)
    monkeypatch.delenv("MC_STORE_CLIENT_SETUP_RETRIES", raising=False)
    return made


@pytest.fixture
def arena() -> Iterator[HostArena]:
    with HostArena(8, SLOT_BYTES) as arena:
        yield arena


@pytest.fixture(params=["copied", "in place"])
def tier(
    request: pytest.FixtureRequest,
    stores: list[Doubtful],
    arena: HostArena,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[MooncakeTier]:
    if request.param == "in place":
        monkeypatch.setattr("kvstow.tiers.mooncake.MAX_COPIED_BYTES", 0)
    url = "mooncake://127.0.0.1"
    with MooncakeTier(arena, url, NAMESPACE, num_threads=1, timeout_s=LONG_S) as tier:
        yield tier


def ended(ticket: TierTicket) -> bool:
    try:
        ticket.wait_until_ended(SHORT_S)
    except TransferTimeout:
        return False
    return True


def test_job_of_a_failed_get_ends_when_its_bytes_can_arrive_no_more(
    tier: MooncakeTier, arena: HostArena, stores: list[Doubtful]
) -> None:
    ticket = tier.get(blocks(1, 2), [0, 1])
    ticket.wait_until_ended(LONG_S)
    assert not ticket.ok.any()
    arena.slots[:] = 7
    stores[0].go_on()
    assert (arena.slots == 7).all()


def test_without_the_close_its_bytes_arrive_in_the_slots(
    stores: list[Doubtful], arena: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control."""
    end = Link.end
    monkeypatch.setattr(Link, "end", lambda link, **_: end(link, in_doubt=False))
    monkeypatch.setattr("kvstow.tiers.mooncake.MAX_COPIED_BYTES", 0)
    with MooncakeTier(arena, "mooncake://127.0.0.1", NAMESPACE) as tier:
        tier.get(blocks(1, 2), [0, 1]).wait_until_ended(LONG_S)
        arena.slots[:] = 7
        stores[0].go_on()
        assert (arena.slots[:2] == 0xEE).all()


def test_job_of_a_failed_get_waits_for_other_calls_of_its_store(
    tier: MooncakeTier, arena: HostArena, stores: list[Doubtful], monkeypatch: pytest.MonkeyPatch
) -> None:
    arena.slots[:] = 7
    monkeypatch.setattr(Doubtful, "may_return", threading.Event())
    put = tier.put(blocks(3), [3])
    wait_until(lambda: stores and stores[0].buffers, "no call begins")
    held = Doubtful.may_return
    monkeypatch.setattr(Doubtful, "may_return", threading.Event())
    Doubtful.may_return.set()
    get = tier.get(blocks(1), [0])
    assert not ended(get)
    assert not stores[0].is_closed
    held.set()
    for ticket in (get, put):
        ticket.wait_until_ended(LONG_S)
    assert stores[0].is_closed


def test_next_call_uses_another_store_and_other_memory(
    tier: MooncakeTier, stores: list[Doubtful]
) -> None:
    for _ in range(2):
        tier.get(blocks(1), [0]).wait_until_ended(LONG_S)
    first, second = stores
    arena_slot = tier.base_address
    used = [{address for address, _ in store.buffers} - {arena_slot} for store in stores]
    assert used[0]
    assert not used[0] & used[1]
    assert first.is_closed
    assert second.is_closed


@pytest.mark.parametrize("code", [-900, -901, -703, -704, -707, -600, -200])
def test_what_no_transfer_outlasts_closes_nothing(
    tier: MooncakeTier, stores: list[Doubtful], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(Doubtful, "code", code)
    for move in (tier.get, tier.put):
        move(blocks(1), [0]).wait_until_ended(LONG_S)
    assert [store.is_closed for store in stores] == [False]


@pytest.mark.parametrize(("code", "num_asked"), [(-900, 0), (-901, 0), (-800, 1)])
def test_a_master_that_is_down_is_not_asked_for_the_size_of_each_block(
    tier: MooncakeTier, monkeypatch: pytest.MonkeyPatch, code: int, num_asked: int
) -> None:
    """Each question takes seconds, and up to a minute if the master hangs."""
    asked: list[str] = []

    def get_size(_: Doubtful, key: str) -> int:
        asked.append(key)
        return -900

    monkeypatch.setattr(Doubtful, "code", code)
    monkeypatch.setattr(Doubtful, "get_size", get_size)
    tier.get(blocks(1, 2, 3), [0, 1, 2]).wait_until_ended(LONG_S)
    assert len(asked) == num_asked


def test_memory_that_the_store_may_fill_outlives_a_doubt(
    arena: HostArena, stores: list[Doubtful]
) -> None:
    url = "mooncake://127.0.0.1"
    with MooncakeTier(arena, url, NAMESPACE, segment_bytes=4096) as tier:
        tier.get(blocks(1), [0]).wait_until_ended(LONG_S)
        giver, *others = stores
        assert not giver.buffers
        assert [store.is_closed for store in stores] == [False] + [True] * len(others)
    assert giver.is_closed


def test_job_never_ends_if_the_store_does_not_close(
    arena: HostArena, stores: list[Doubtful], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Doubtful, "close_code", -1)
    tier = MooncakeTier(arena, "mooncake://127.0.0.1", NAMESPACE, num_threads=1, timeout_s=SHORT_S)
    ticket = tier.get(blocks(1), [0], deadline=time.monotonic() + SHORT_S)
    ticket.wait(LONG_S)
    assert not ticket.ok.any()
    assert not ended(ticket)
    tier.close()
    assert not ended(ticket)
    assert not stores[0].is_closed


def test_store_that_refuses_the_host_memory_is_closed(
    tier: MooncakeTier, stores: list[Doubtful]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Doubtful, "register_buffer", lambda *_: -600)
        refused = tier.get(blocks(1), [1])
        refused.wait_until_ended(LONG_S)
    assert "does not take" in str(refused.error)
    assert [store.is_closed for store in stores] == [True]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Doubtful, "code", -704)
        again = tier.get(blocks(1), [1])
        again.wait_until_ended(LONG_S)
    assert again.error is None
    assert [store.is_closed for store in stores] == [True, False]


def test_mooncake_tries_once_unless_the_user_says_how_often(
    tier: MooncakeTier, stores: list[Doubtful], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, given in enumerate(["1", "7"]):
        tier.get(blocks(1), [1]).wait_until_ended(LONG_S)
        assert stores[number].num_tries == given
        monkeypatch.setenv("MC_STORE_CLIENT_SETUP_RETRIES", "7")


@pytest.mark.usefixtures("stores")
def test_call_in_doubt_ends_with_the_last_call_of_its_link() -> None:
    """A call that comes as the link is retired, or that ends well, does not keep it open."""
    link = Link(Doubtful())
    assert link.begin()
    assert link.begin()
    doubt = threading.Thread(target=lambda: link.end(in_doubt=True), daemon=True)
    doubt.start()
    until_s = time.monotonic() + LONG_S
    while not link.is_retired:
        assert time.monotonic() < until_s
        time.sleep(0.001)
    assert not link.begin()
    link.end(in_doubt=False)
    doubt.join(LONG_S)
    assert not doubt.is_alive(), "the call never ends"


@pytest.mark.usefixtures("stores")
def test_link_keeps_registered_memory_until_it_is_closed() -> None:
    """A transfer may write there after its user has let go of it."""
    link, memory = Link(Doubtful()), np.zeros(16, np.uint8)
    link.register(memory)
    kept = weakref.ref(memory)
    del memory
    gc.collect()
    assert kept() is not None
    link.close()
    gc.collect()
    assert kept() is None


def test_call_in_doubt_is_one_that_raises(stores: list[Doubtful]) -> None:
    links = Links(lambda: Link(Doubtful()))
    with links.borrowed() as link:
        pass
    assert not link.is_retired
    with pytest.raises(TransferError), links.borrowed() as again:
        assert again is link
        raise TransferError("no answer")
    assert stores[0].is_closed
    assert links.current() is not link


NUM_BLOCKS, LARGE_BYTES = 8, 2 << 20
OLD, NEW = range(NUM_BLOCKS), range(100, 100 + NUM_BLOCKS // 2)


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    master = Master(tmp_path, lease_ms=200_000)
    yield master
    master.kill()


@pytest.fixture
def owner(master: Master) -> Iterator[Owner]:
    owner = Owner(master, 256 << 20)
    yield owner
    owner.kill()


@pytest.mark.skipif(
    bool(missing()) or os.environ.get("KVSTOW_MOONCAKE_LATE") != "full",
    reason=missing() or "two minutes: set KVSTOW_MOONCAKE_LATE=full",
)
@pytest.mark.parametrize("closes", [True, False])
def test_owner_that_stands_still_changes_no_slot_later(
    master: Master, owner: Owner, monkeypatch: pytest.MonkeyPatch, closes: bool
) -> None:
    """Without the close, the negative control, slots do change.

    Even then no get serves what the late puts have sent.
    """
    if not closes:
        end = Link.end
        monkeypatch.setattr(Link, "end", lambda link, **_: end(link, in_doubt=False))
    with (
        HostArena(2 * NUM_BLOCKS, LARGE_BYTES) as arena,
        MooncakeTier(arena, master.url, NAMESPACE) as tier,
    ):
        assert not tier.copies_blocks
        slots = arena.slots
        slots[:] = np.random.default_rng(0).integers(0, 256, slots.shape, np.uint8)
        rows = slots[:NUM_BLOCKS].copy()
        put = tier.put(blocks(*OLD), OLD)
        put.wait(LONG_S)
        assert put.ok.all(), put.error
        owner.pause()
        deadline = time.monotonic() + 1
        late = [
            tier.get(blocks(*OLD), range(NUM_BLOCKS, 2 * NUM_BLOCKS), deadline=deadline),
            tier.put(blocks(*NEW), range(len(NEW)), deadline=deadline),
        ]
        for ticket in late:
            ticket.wait(LONG_S)
            assert not ticket.ok.any()
            ticket.wait_until_ended(150)
        slots[:] = 0x55
        owner.resume()
        time.sleep(3)
        assert (slots == 0x55).all() == closes
        recover(tier, rows)


def recover(tier: MooncakeTier, rows: np.ndarray) -> None:
    """Put and get until all blocks come back, and check all that do."""
    slots, until_s = tier.arena.slots, time.monotonic() + 90
    while True:
        slots[:NUM_BLOCKS] = rows
        tier.put(blocks(*OLD), OLD).wait_until_ended(90)
        slots[:] = 0
        get = tier.get(blocks(*OLD, *NEW), range(NUM_BLOCKS + len(NEW)))
        get.wait_until_ended(90)
        for at in np.flatnonzero(get.ok):
            np.testing.assert_array_equal(slots[at], rows[at % NUM_BLOCKS])
        if get.ok[:NUM_BLOCKS].all():
            break
        assert time.monotonic() < until_s, "it does not recover"
        time.sleep(0.5)
