"""Objects in states where many calls fail, and a check that a refused call changes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import ClassVar, Protocol, TypeAlias, TypeVar

import pytest
from tests.accounting.model import flat

from kvstow import (
    BlockLedger,
    BlockPool,
    FullAttention,
    InvalidBlock,
    Job,
    KvstowError,
    LedgerPool,
    OffloadScheduler,
    UnknownRequest,
)

Seen: TypeAlias = list[object]

NUM_BLOCKS = 12
NUM_HOST_BLOCKS = 6
BLOCK_SIZE = 4
GROUP = FullAttention(BLOCK_SIZE)
WIDTH = 8
DIGEST = b"x" * WIDTH


def names(which: int, num_blocks: int) -> list[bytes]:
    return [(100 * which + at).to_bytes(WIDTH, "big") for at in range(num_blocks)]


def num_pins(pool: BlockPool | LedgerPool, id: int) -> int:
    """Return the number of pins of a block. It removes all pins and puts them back."""
    for num in range(9):
        try:
            pool.unpin([id])
        except InvalidBlock:
            pool.pin([id] * num)
            return num
    raise AssertionError(f"block {id} has more pins than any test sets")


def look_at(pool: BlockPool | LedgerPool) -> Seen:
    return [
        pool.num_free,
        pool.num_cached,
        pool.free_order().tolist(),
        pool.ref_counts(range(pool.num_blocks)).tolist(),
        [num_pins(pool, id) for id in range(1, pool.num_blocks)],
        flat(pool.take_events()),
    ]


def outcome(call: Callable[[], object]) -> object:
    try:
        return call()
    except KvstowError as error:
        return str(error)


class World(Protocol):
    """An object in a state where many calls fail.

    `look` returns all observable state, `check` verifies the invariants, and `go_on` runs a fixed
    sequence of calls and returns what it has seen.
    """

    def look(self) -> Seen: ...
    def check(self) -> None: ...
    def go_on(self) -> Seen: ...


class PoolWorld:
    def __init__(self) -> None:
        self.pool = pool = BlockPool(NUM_BLOCKS, events=True)
        pool.allocate(7)
        pool.cache([1, 2, 3], names(1, 3))
        pool.cache([4], names(1, 1))
        pool.free([2, 5])
        pool.touch([1])
        pool.pin([2, 3, 8, 8])
        pool.take_events()

    def look(self) -> Seen:
        found = [
            self.pool.lookup([name], group=group).tolist()
            for group in range(2)
            for name in names(1, 4)
        ]
        return [found, *look_at(self.pool)]

    def check(self) -> None:
        self.pool.check()

    def go_on(self) -> Seen:
        pool = self.pool
        pool.free([6, 4, 3])
        seen = [self.look(), pool.allocate(pool.num_free).tolist()]
        pool.unpin([2, 3, 8, 8])
        pool.free([1, 1])
        return [*seen, self.look(), pool.allocate(pool.num_free).tolist(), self.look()]


class LedgerWorld:
    def __init__(self) -> None:
        self.ledger = ledger = BlockLedger(NUM_BLOCKS, [GROUP], events=True)
        tokens = list(range(5 * BLOCK_SIZE))
        ledger.add("running", names(1, 3), tokens=tokens[: 3 * BLOCK_SIZE])
        ledger.allocate("running", 2 * BLOCK_SIZE + 2, num_lookahead_tokens=BLOCK_SIZE)
        for id in ("waiting", "other"):
            ledger.add(id, names(1, 3))
        ledger.add("loading", names(2, 2))
        ledger.allocate("loading", 0, num_external_tokens=BLOCK_SIZE, delay_caching=True)
        # "again" has the hit of a freed request, "stale" lost a hit block, and "new" hits nothing.
        ledger.add("again", names(1, 1))
        self.hits = {"again": ledger.lookup("again", 2**40)}
        ledger.free("again")
        ledger.add("again", names(1, 1))
        ledger.add("new", names(4, 1))
        ledger.add("stale", names(3, 2))
        ledger.allocate("stale", 2 * BLOCK_SIZE)
        ledger.free("stale")
        ledger.add("stale", names(3, 2))
        self.hits |= {id: ledger.lookup(id, 2**40) for id in ("waiting", "other", "stale", "new")}
        ledger.pool.evict(self.hits["stale"].blocks[0][1:])
        ledger.pool.pin([1])
        ledger.pool.take_events()

    ids: ClassVar = ["running", "waiting", "other", "loading", "again", "stale", "new"]

    def look(self) -> Seen:
        ledger, known = self.ledger, [id for id in self.ids if self.knows(id)]
        tables = [ledger.block_table(id).tolist() for id in known]
        granted = [ledger.num_granted_tokens(id) for id in known]
        found = [ledger.lookup(id, 2**40).num_tokens for id in known]
        return [ledger.num_requests, known, tables, granted, found, *look_at(ledger.pool)]

    def knows(self, id: str) -> bool:
        try:
            self.ledger.num_granted_tokens(id)
        except UnknownRequest:
            return False
        return True

    def check(self) -> None:
        self.ledger.check()

    def go_on(self) -> Seen:
        ledger = self.ledger
        delayed = outcome(lambda: ledger.allocate("loading", 1))
        allocated = [ledger.allocate("waiting", 1, hit=self.hits["waiting"])]
        ledger.rewind("running", 2 * BLOCK_SIZE)
        ledger.extend("running", names(1, 4)[3:], tokens=range(BLOCK_SIZE))
        allocated += [ledger.allocate("running", 2 * BLOCK_SIZE), ledger.allocate("again", 1)]
        ledger.cache("loading", BLOCK_SIZE)
        seen = [delayed, [ids and ids[0].tolist() for ids in allocated], self.look()]
        step = ledger.allocate_step(["running", "loading", "waiting"], [1, BLOCK_SIZE, 40])
        seen += [[step.num_granted, step.ids.tolist(), step.offsets.tolist()], self.look()]
        for id in self.ids:
            ledger.free(id)
        ledger.pool.unpin([1])
        return [*seen, self.look(), ledger.pool.reset(), self.look()]


class TierWorld:
    def __init__(self) -> None:
        self.tier = tier = OffloadScheduler(NUM_HOST_BLOCKS, [GROUP], events=True)
        for which in (1, 2):
            tier.add(f"probe {which}", names(which, 4))
        tier.add("before", names(1, 3))
        tier.complete(self.store("before", 3, [1, 2, 3]).job_id)
        tier.finish("before")
        for id, which in (("loading", 1), ("holding", 1), ("fresh", 1), ("storing", 2)):
            tier.add(id, names(which, 4))
        self.storing = self.store("storing", 2, [4, 5])
        # "loading" loads the first block only, and "holding" finds blocks that no job loads.
        tier.lookup("loading", 0, BLOCK_SIZE)
        self.loading = tier.load("loading", BLOCK_SIZE, [[6]])
        tier.lookup("holding", BLOCK_SIZE, 2**40)
        tier.take_events()

    def store(self, id: str, num_blocks: int, block_ids: list[int]) -> Job:
        job = self.tier.store([id], [num_blocks * BLOCK_SIZE], block_ids, [0, len(block_ids)])
        assert job is not None
        return job

    def look(self) -> Seen:
        tier, found = self.tier, []
        for which in (1, 2):
            for num_local in range(4):
                found.append(tier.lookup(f"probe {which}", num_local * BLOCK_SIZE, 2**40))
            tier.release(f"probe {which}")
        # These lookups count too: those of blocks in a load are pending.
        stats = tier.stats() | {"pending_lookups": 0}
        return [tier.num_resident, stats, found, flat(tier.take_events())]

    def check(self) -> None:
        self.tier.check()

    def go_on(self) -> Seen:
        tier = self.tier
        tier.complete(self.loading.job_id)
        job = outcome(lambda: tier.load("holding", 2 * BLOCK_SIZE, [[7, 8]]))
        if not isinstance(job, Job):
            return [job]
        seen = [job.job_id, job.host_slots.tolist(), self.look()]
        tier.complete(job.job_id, ok=False)
        tier.complete(self.storing.job_id)
        more = self.store("storing", 4, [9, 10])
        tier.add("new", names(3, 5))
        new = self.store("new", 5, [1, 2, 3, 4, 5])
        seen += [more.host_slots.tolist(), new.host_slots.tolist(), self.look()]
        for job in (more, new):
            tier.complete(job.job_id)
        for id in ("loading", "holding", "fresh", "storing", "new"):
            tier.finish(id)
        return [*seen, self.look()]


W = TypeVar("W", bound=World)


def refused(
    make: Callable[[], W], call: Callable[[W], object], error: type[Exception], says: str
) -> None:
    """Verify that a call raises exactly this error with this text, and changes nothing.

    Only one of two equal objects gets the call. Afterwards both must look equal and go on equally.
    So the comparison includes state that no call returns, such as the order of eviction.
    """
    world, twin = make(), make()
    before = world.look()
    with pytest.raises(error) as caught:
        call(world)
    assert type(caught.value) is error
    assert re.search(says, str(caught.value)), f"{caught.value} does not say {says}"
    world.check()
    assert world.look() == before == twin.look()
    assert world.go_on() == twin.go_on()
    world.check()
