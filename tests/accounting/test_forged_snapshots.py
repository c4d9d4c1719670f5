"""Snapshots of a scheduler with a right checksum and impossible content.

Each is refused, or gives a scheduler that is sound and stays so. What was written is decoded, one
value of it is replaced, and the rest is sealed again as a writer would have.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.accounting.forging import opened, sealed

from kvstow import (
    BlockLedger,
    FullAttention,
    KvstowError,
    OffloadScheduler,
    SlidingWindow,
    SnapshotError,
)

BLOCK = 4
FULL, WINDOW = FullAttention(BLOCK), SlidingWindow(BLOCK, 2 * BLOCK)
SHAPE, TIER, IMAGE, REQUESTS, NUM_JOBS, COUNTERS = range(6)
WIDTH, RESIDENTS, AWAITED, EMPTY, POLICY, NUM_EVICTED = range(6)
OWN, SHARED, COPIES = range(3)

Record = list[Any]


def prompt(first: int, num_blocks: int) -> list[bytes]:
    return [(1000 * first + at).to_bytes(8, "big") for at in range(num_blocks)]


def store(tier: OffloadScheduler, id: str, num_blocks: int) -> None:
    """Stores a prompt of a request that has computed all of it, in every group."""
    num_groups = 1 + id.startswith("window")
    blocks = list(range(1, 1 + num_blocks * num_groups))
    offsets = [num_blocks * at for at in range(num_groups + 1)]
    job = tier.store([id], [num_blocks * BLOCK], blocks, offsets)
    if job is not None:
        tier.complete(job.job_id)


def ledger_of(groups: list[Any], id: str) -> BlockLedger:
    """Some of its blocks the tier has; others, and a part of one, it has not."""
    ledger = BlockLedger(64, groups)
    for name, hashes in ((id, prompt(1, 3)), ("unknown", prompt(7, 2))):
        ledger.add(name, hashes)
        ledger.allocate(name, 3 * BLOCK - 1)
    return ledger


def plain(policy: str, *, window: bool = False) -> OffloadScheduler:
    """Three prompts, some evicted; one request goes on; a sleep image is held."""
    groups = [FULL, WINDOW] if window else [FULL]
    name = "window" if window else "full"
    tier = OffloadScheduler(14, groups, policy=policy)  # type: ignore[arg-type]
    for which in (3, 2, 1):
        tier.add(f"{name} {which}", prompt(which, 4))
        store(tier, f"{name} {which}", 4)
        if which != 1:
            tier.finish(f"{name} {which}")
    tier.lookup(f"{name} 1", 0, 2**40)
    tier.release(f"{name} 1")
    tier.hold_image(ledger_of(groups, f"{name} 1"))
    return tier


def waiting() -> OffloadScheduler:
    """Slots wait for a parent that proved damaged."""
    tier = OffloadScheduler(8, [FULL])
    tier.add("full", prompt(1, 4))
    store(tier, "full", 4)
    tier.add("reader", prompt(1, 4))
    tier.lookup("reader", 0, 2**40)
    load = tier.load("reader", 4 * BLOCK, [[11, 12, 13, 14]])
    tier.complete(load.job_id, ok=[True, False, True, True])
    return tier


def after_reset() -> OffloadScheduler:
    """The image shares slots that hold no key any more."""
    tier = plain("lru")
    tier.reset()
    return tier


def empty_like(tier: OffloadScheduler, made: str) -> OffloadScheduler:
    groups: list[Any] = [FULL, WINDOW] if made.startswith("window") else [FULL]
    policy = "hit-density" if "density" in made else "lru"
    return OffloadScheduler(tier.num_host_blocks, groups, policy=policy)  # type: ignore[arg-type]


MADE: dict[str, Callable[[], OffloadScheduler]] = {
    "lru": lambda: plain("lru"),
    "density": lambda: plain("hit-density"),
    "window": lambda: plain("lru", window=True),
    "window density": lambda: plain("hit-density", window=True),
    "waiting": waiting,
    "after reset": after_reset,
}


def go_on(tier: OffloadScheduler, num_groups: int) -> None:
    """Whatever it may be asked for is done or refused, and leaves it sound."""
    tier.check()
    new = "window new" if num_groups > 1 else "full new"

    def load() -> None:
        found = tier.lookup(new, 0, 2**40)
        if found:
            num_blocks = found // BLOCK
            targets = [list(range(1, 1 + num_blocks))]
            targets += [[40, 41][:num_blocks]] * (num_groups - 1)
            tier.complete(
                tier.load(new, found, targets).job_id, ok=[False] * sum(map(len, targets))
            )

    calls: list[Callable[[], object]] = [
        lambda: tier.image,
        tier.used_slots,
        tier.stats,
        tier.snapshot,
        lambda: tier.add(new, prompt(1, 5)),
        load,
        lambda: store(tier, new, 5),
        lambda: tier.truncate(new, 2),
        lambda: tier.extend(new, prompt(9, 12)),
        lambda: store(tier, new, 14),
        tier.release_image,
        lambda: tier.extend(new, prompt(5, 12)),
        lambda: store(tier, new, 26),
        *(lambda name=name: tier.finish(name) for name in (new, "full", "full 1", "window 1")),
        tier.end_all,
        tier.reset,
        lambda: tier.complete(1),
    ]
    for call in calls:
        try:
            call()
        except KvstowError as error:
            assert "broken" not in str(error)
        tier.check()
    assert tier.used_slots().tolist() == [], "nothing is lost"


def places(value: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Where values are that can be replaced, and lists."""
    yield path
    if isinstance(value, list):
        for at, item in enumerate(value):
            yield from places(item, (*path, at))


HOSTILE: list[Any] = [
    0, 1, 2, 3, 5, 8, 13, 14, 15, 255, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1,
    2**63, 2**64 - 1, -1, True, None, [], [0], b"", b"\xff" * 32, "", "full new", 1e308,
    float("nan"), float("inf"),
]  # fmt: skip


def mutated(record: Record, rng: random.Random) -> tuple[Record, str]:
    """One value replaced, dropped, repeated or exchanged for its neighbour."""
    record = copy.deepcopy(record)
    # A field by its part first: there are many residents, and one number of jobs.
    part = rng.choice([*range(1, 6), TIER, IMAGE, IMAGE])
    path = rng.choice([path for path in places(record[part], (part,)) if path])
    holder = record
    for at in path[:-1]:
        holder = holder[at]
    at, kind = path[-1], rng.choice(["hostile", "hostile", "near", "drop", "repeat", "other"])
    value = holder[at]
    if kind == "near" and isinstance(value, int):
        holder[at] = value + rng.choice([-1, 1])
    elif kind == "drop" and len(path) > 2:
        del holder[at]
    elif kind == "repeat" and len(path) > 2:
        holder.insert(at, copy.deepcopy(value))
    elif kind == "other" and len(holder) > 1:
        holder[at] = copy.deepcopy(rng.choice(holder))
    else:
        holder[at] = rng.choice(HOSTILE)
    return record, f"{kind} at {path}: {value!r} became {holder[at : at + 1]!r}"


@pytest.mark.parametrize("made", MADE)
def test_what_was_written_is_read_and_goes_on(made: str) -> None:
    tier = MADE[made]()
    restored = empty_like(tier, made)
    restored.restore(sealed(tier.snapshot(), opened(tier.snapshot())))
    assert restored.snapshot() == tier.snapshot()
    go_on(restored, 1 + made.startswith("window"))


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("seed", range(4))
def test_forged_snapshots_are_refused_or_sound(made: str, seed: int) -> None:
    tier = MADE[made]()
    snapshot = tier.snapshot()
    record = opened(snapshot)
    rng = random.Random(f"{made} {seed}")
    num_refused = 0
    for turn in range(400):
        forged, what = mutated(record, rng)
        restored = empty_like(tier, made)
        try:
            restored.restore(sealed(snapshot, forged))
        except SnapshotError:
            num_refused += 1
            restored.restore(snapshot)
            continue
        except BaseException as error:
            raise AssertionError(f"seed {seed}, turn {turn}, {what}") from error
        try:
            go_on(restored, 1 + made.startswith("window"))
        except BaseException as error:
            raise AssertionError(f"seed {seed}, turn {turn}, {what}") from error
    assert num_refused > 200


def one_own_slot_twice(record: Record) -> None:
    own = record[IMAGE][OWN]
    own[:] = own[:1] * len(own)


def two_blocks_at_one_place(record: Record) -> None:
    own = record[IMAGE][OWN]
    host_slots = record[IMAGE][COPIES][1]
    first, second = (host_slots.index(slot - 1) for slot in own[:2])
    host_slots[second] = host_slots[first]


def device_ids_above_int32(record: Record) -> None:
    block_ids = record[IMAGE][COPIES][0]
    block_ids[:] = [2**32 - 1 - at for at in range(len(block_ids))]


def shared_slot_not_pinned_as_often(record: Record) -> None:
    record[IMAGE][SHARED].append(record[IMAGE][SHARED][0])


def job_numbers_that_wrap(record: Record) -> None:
    record[NUM_JOBS] = 2**64 - 1


def counters_that_wrap(record: Record) -> None:
    record[COUNTERS][0] = 2**64 - 1


def evictions_that_wrap(record: Record) -> None:
    record[TIER][NUM_EVICTED] = 2**64 - 1


def queries_that_wrap(record: Record) -> None:
    record[REQUESTS][0][1][2] = 2**64 - 1


def group_that_does_not_exist(record: Record) -> None:
    record[TIER][RESIDENTS][-1][1][1] = 60_000


def hash_of_another_width(record: Record) -> None:
    record[TIER][RESIDENTS][-1][1][0] = b"\xff" * 32


@pytest.mark.parametrize(
    "forge",
    [
        one_own_slot_twice,
        two_blocks_at_one_place,
        device_ids_above_int32,
        shared_slot_not_pinned_as_often,
        job_numbers_that_wrap,
        counters_that_wrap,
        evictions_that_wrap,
        queries_that_wrap,
        group_that_does_not_exist,
        hash_of_another_width,
    ],
)
def test_snapshot_that_cannot_be_is_refused(forge: Callable[[Record], None]) -> None:
    tier = plain("lru")
    snapshot = tier.snapshot()
    record = opened(snapshot)
    forge(record)
    restored = OffloadScheduler(14, [FULL])
    with pytest.raises(SnapshotError):
        restored.restore(sealed(snapshot, record))
    restored.restore(snapshot)


def test_slot_below_one_of_another_group_is_refused() -> None:
    tier = plain("lru", window=True)
    snapshot = tier.snapshot()
    record = opened(snapshot)
    residents = record[TIER][RESIDENTS]
    full = next(slot for slot, key, _ in residents if key[1] == 0)
    for entry in residents:
        if entry[1][1] == 1:
            entry[2] = full
    with pytest.raises(SnapshotError, match="another group"):
        OffloadScheduler(14, [FULL, WINDOW]).restore(sealed(snapshot, record))
