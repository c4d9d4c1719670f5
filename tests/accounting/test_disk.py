"""The disk tier of `OffloadScheduler`, through the binding."""

from __future__ import annotations

import numpy as np
import pytest

from kvstow import (
    BlockStored,
    ConfigError,
    FullAttention,
    OffloadScheduler,
    SlidingWindow,
    StateError,
    TierJob,
    TransferCompleted,
    UnknownRequest,
)

BLOCK_SIZE = 16
FULL = FullAttention(BLOCK_SIZE)
NAMES = [bytes([name] * 8) for name in range(1, 5)]


def scheduler(**options: object) -> OffloadScheduler:
    """Return a scheduler with four host slots and an open disk of eight."""
    built = OffloadScheduler(4, [FULL], num_disk_blocks=8, events=True, **options)  # type: ignore[arg-type]
    built.set_disk("on")
    return built


def store(tier: OffloadScheduler, request_id: str, names: list[bytes], first: int = 1) -> None:
    tier.add(request_id, names)
    blocks = list(range(first, first + len(names)))
    job = tier.store([request_id], [len(names) * BLOCK_SIZE], blocks, [0, len(blocks)])
    if job is not None:
        tier.complete(job.job_id)


def demoted(tier: OffloadScheduler) -> TierJob:
    job = tier.demote()
    assert job is not None
    tier.complete(job.job_id)
    return job


def test_a_job_names_both_ends_and_each_block() -> None:
    tier = scheduler()
    store(tier, "a", NAMES[:3])
    job = tier.demote(max_blocks=2)
    assert job is not None
    assert (job.direction, len(job)) == ("demote", 2)
    assert repr(job) == f'TierJob(job_id={job.job_id}, direction="demote", 2 blocks)'
    assert job.hashes == NAMES[:2]
    assert job.parents == [None, NAMES[0]]
    for column in (job.host_slots, job.disk_slots, job.groups):
        assert column.dtype == np.int32
        assert column.shape == (2,)
    assert set(job.host_slots.tolist()) <= set(range(4))
    assert set(job.disk_slots.tolist()) <= set(range(8))
    rest = tier.demote()
    assert rest is not None
    assert rest.hashes == NAMES[2:3]
    assert not set(rest.disk_slots.tolist()) & set(job.disk_slots.tolist())


def test_a_block_that_left_the_host_comes_back_from_the_disk() -> None:
    tier = scheduler()
    store(tier, "a", NAMES[:2])
    demoted(tier)
    tier.finish("a")
    store(tier, "b", [bytes([name] * 8) for name in range(10, 14)], 10)
    tier.finish("b")
    tier.add("c", NAMES[:2])
    assert tier.lookup("c", 0, 100) is None
    job = tier.promote()
    assert job is not None
    assert (job.direction, job.hashes) == ("promote", NAMES[:2])
    assert tier.lookup("c", 0, 100) is None
    end = tier.complete(job.job_id)
    assert end is not None
    assert (end.ok, end.late, end.block_ids.tolist()) == (True, False, [])
    assert tier.lookup("c", 0, 100) == 2 * BLOCK_SIZE
    load = tier.load("c", 2 * BLOCK_SIZE, [[20, 21]])
    tier.complete(load.job_id)
    stats = tier.disk_stats()
    assert stats["demoted_blocks"] == 2
    assert stats["promoted_blocks"] == 2
    assert stats["disk_hit_tokens"] == 2 * BLOCK_SIZE
    tier.check()


@pytest.mark.parametrize("late", [False, True])
def test_a_block_whose_promote_failed_is_stored_again(late: bool) -> None:
    """Another request has stored the blocks after it, and has passed it as one that comes."""
    tier = scheduler()
    tier.adopt_disk([0], NAMES[:1], [0])
    tier.add("waits", NAMES[:1])
    assert tier.lookup("waits", 0, 100) is None
    job = tier.promote(deadline=1.0)
    assert job is not None
    store(tier, "a", NAMES[:3])
    if late:
        assert tier.expire(2.0) == [job.job_id]
    tier.complete(job.job_id, ok=False)
    assert tier.lookup("waits", 0, 100) == 0
    tier.extend("a", NAMES[3:])
    again = tier.store(["a"], [4 * BLOCK_SIZE], [4], [0, 1])
    assert again is not None
    assert again.block_ids.tolist() == [1, 4]
    tier.complete(again.job_id)
    tier.add("b", NAMES)
    assert tier.lookup("b", 0, 100) == 4 * BLOCK_SIZE
    tier.check()


def test_a_lookup_that_may_not_wait_goes_on_with_the_host() -> None:
    tier = scheduler()
    assert tier.adopt_disk([0, 1], NAMES[:2], [0, 0], [None, NAMES[0]]) == 2
    tier.add("a", NAMES[:2])
    assert tier.lookup("a", 0, 100) is None
    assert tier.lookup("a", 0, 100, promote=False) == 0
    assert tier.promote() is None


def test_each_rank_reports_each_block() -> None:
    tier = scheduler(world_size=2)
    tier.adopt_disk(np.array([3, 5]), NAMES[:2], np.array([0, 0]), [None, NAMES[0]])
    tier.add("a", NAMES[:2])
    assert tier.lookup("a", 0, 100) is None
    job = tier.promote()
    assert job is not None
    assert job.disk_slots.tolist() == [3, 5]
    with pytest.raises(ConfigError, match="1 outcomes for the 2 blocks"):
        tier.complete(job.job_id, ok=[True])
    assert tier.complete(job.job_id, ok=[True, False]) is None
    with pytest.raises(StateError, match="rank 0 has reported job"):
        tier.complete(job.job_id)
    end = tier.complete(job.job_id, rank=1)
    assert end is not None
    assert not end.ok
    assert tier.lookup("a", 0, 100) == BLOCK_SIZE
    assert tier.disk_stats()["disk_damaged_blocks"] == 1


def test_a_late_job_is_returned_once_and_ends_late() -> None:
    tier = scheduler()
    store(tier, "a", NAMES[:1])
    job = tier.demote(deadline=1.0)
    assert job is not None
    assert tier.expire(2.0) == [job.job_id]
    assert tier.expire(2.0) == []
    assert tier.disk_stats()["demoting_blocks"] == 1
    end = tier.complete(job.job_id)
    assert end is not None
    assert (end.ok, end.late) == (False, True)
    assert tier.disk_stats()["disk_resident_blocks"] == 0
    with pytest.raises(ConfigError, match="deadline is NaN"):
        tier.demote(deadline=float("nan"))


def test_a_reset_closes_the_disk() -> None:
    tier = scheduler()
    tier.adopt_disk([0], NAMES[:1], [0])
    modes = [tier.disk_mode]
    tier.reset()
    assert [*modes, tier.disk_mode] == ["on", "off"]
    assert tier.disk_stats()["disk_resident_blocks"] == 0


def test_events_name_the_disk_and_the_direction() -> None:
    tier = scheduler()
    store(tier, "a", NAMES[:2])
    demoted(tier)
    (stored,) = tier.take_disk_events()
    assert isinstance(stored, BlockStored)
    assert (stored.medium, stored.block_hashes) == ("STORAGE", NAMES[:2])
    directions = [
        event.direction
        for event in tier.take_transfer_events()
        if isinstance(event, TransferCompleted)
    ]
    assert directions == ["store", "demote"]


def test_adopted_blocks_are_events_and_count_once() -> None:
    tier = scheduler()
    assert tier.adopt_disk([0, 1], NAMES[:2], [0, 0], [None, NAMES[0]]) == 2
    assert tier.adopt_disk([1, 2], NAMES[1:3], [0, 0]) == 1
    events = tier.take_disk_events()
    hashes = [event.block_hashes for event in events if isinstance(event, BlockStored)]
    assert sorted(name for names in hashes for name in names) == NAMES[:3]


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (([8], NAMES[:1], [0], None), "slot 8 is not on the disk: slots count from 0 to 7"),
        (([0], NAMES[:1], [2], None), "group 2 is unknown: groups count from 0 to 1"),
        (([0], NAMES[:1], [1], NAMES[:1]), "record 0 has a parent in group 1"),
        (([0, 1], NAMES[:1], [0], None), "2 slots, 1 hashes, 1 groups and 0 parents"),
        (([0], NAMES[:1], [0], [7]), "a parent is of type <class 'int'>: pass bytes or None"),
        (([-1], NAMES[:1], [0], None), "slots has -1: each must be 0 to"),
        (([0], [b"wide" * 8], [0], None), "a block hash has 32 bytes"),
    ],
)
def test_records_that_cannot_be_are_refused(
    records: tuple[list[int], list[bytes], list[int], list[bytes] | None], message: str
) -> None:
    window = SlidingWindow(BLOCK_SIZE, window=32)
    tier = OffloadScheduler(4, [FULL, window], num_disk_blocks=8)
    tier.add("a", NAMES)
    with pytest.raises(ConfigError, match=message):
        tier.adopt_disk(*records)
    assert tier.disk_stats()["disk_resident_blocks"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"disk_admit": "some"}, 'disk_admit is "some": it must be "all" or "returned"'),
        ({"disk_policy": "fifo"}, 'policy "fifo"'),
        ({"max_disk_blocks_in_flight": 0}, "max_disk_blocks_in_flight is 0"),
        ({"num_disk_blocks": 2**31}, "num_disk_blocks is 2147483648: it must be 1 to"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OffloadScheduler(4, [FULL], **{"num_disk_blocks": 8, **options})  # type: ignore[arg-type]


def test_a_scheduler_without_a_disk_has_nothing_to_copy() -> None:
    tier = OffloadScheduler(4, [FULL])
    assert (tier.disk_mode, tier.num_disk_blocks) == (None, 0)
    assert tier.demote() is tier.promote() is None
    assert set(tier.disk_stats().values()) == {0}
    with pytest.raises(StateError, match="build it with num_disk_blocks"):
        tier.set_disk("on")
    with pytest.raises(StateError, match="build it with num_disk_blocks"):
        tier.adopt_disk([], [], [])
    with pytest.raises(ConfigError, match='the disk mode is "open"'):
        tier.set_disk("open")  # type: ignore[arg-type]


def test_unsaved_blocks_come_with_places_on_the_disk() -> None:
    tier = scheduler(disk_admit="returned")
    tier.adopt_disk([0, 1], NAMES[:2], [0, 0], [None, NAMES[0]])
    store(tier, "a", NAMES[:3])
    host, disk, hashes, groups, parents = tier.unsaved()
    assert (hashes, groups.tolist(), parents) == (NAMES[2:3], [0], NAMES[1:2])
    for column in (host, disk, groups):
        assert column.dtype == np.int32
    assert disk.tolist() == [2], "an empty slot"
    assert 0 <= host[0] < 4
    assert tier.unsaved(max_blocks=0)[2] == []
    assert tier.disk_stats()["disk_resident_blocks"] == 2, "nothing has changed"
    tier.check()
    tier.set_disk("off")
    assert tier.unsaved()[2] == OffloadScheduler(4, [FULL]).unsaved()[2] == []


def test_blocks_of_a_shared_store_are_claimed_and_promoted() -> None:
    tier = scheduler()
    tier.add("a", NAMES[:3])
    hashes, groups, parents = tier.unclaimed("a", 0, 100)
    assert (hashes, groups.tolist(), parents) == (NAMES[:3], [0] * 3, [None, *NAMES[:2]])
    assert tier.unclaimed("a", 0, 100, max_blocks=1)[0] == NAMES[:1]
    assert tier.claim(hashes[:2], groups[:2], parents[:2]) == 2
    assert tier.claim(hashes[:2], groups[:2]) == 0
    assert tier.unclaimed("a", 0, 100)[0] == NAMES[2:3]
    assert tier.lookup("a", 0, 100) is None
    job = tier.promote()
    assert job is not None
    assert job.hashes == NAMES[:2]
    tier.complete(job.job_id)
    assert tier.lookup("a", 0, 100) == 2 * BLOCK_SIZE
    assert tier.disk_stats()["claimed_blocks"] == 2


def test_the_hits_of_host_and_disk() -> None:
    tier = scheduler()
    store(tier, "a", NAMES[:1])
    tier.add("b", NAMES[:3])
    assert tier.tier_hits("b", 0, 100) == (BLOCK_SIZE, BLOCK_SIZE)
    assert tier.claim(NAMES[1:3], [0, 0], NAMES[:2]) == 2
    assert tier.tier_hits("b", 0, 100) == (BLOCK_SIZE, 3 * BLOCK_SIZE)
    without = OffloadScheduler(4, [FULL])
    without.add("b", NAMES[:3])
    assert without.tier_hits("b", BLOCK_SIZE, 100) == (BLOCK_SIZE, BLOCK_SIZE)
    with pytest.raises(UnknownRequest):
        tier.tier_hits("c", 0, 100)
    with pytest.raises(ConfigError, match="multiple of the block size"):
        tier.tier_hits("b", 1, 100)


def test_claims_that_cannot_be_are_refused() -> None:
    tier = scheduler()
    for arguments, message in (
        ((NAMES[:2], [0], None), "2 hashes, 1 groups and 0 parents"),
        ((NAMES[:1], [5], None), "group 5 is unknown"),
        ((NAMES[:1], [0], [7]), "a parent is of type <class 'int'>: pass bytes or None"),
        ((NAMES[:1], [0], [b"narrow"]), "a block hash has 6 bytes: this object's hashes have 8"),
    ):
        with pytest.raises(ConfigError, match=message):
            tier.claim(*arguments)
        if len(arguments[0]) == 1:
            with pytest.raises(ConfigError, match=message):
                tier.adopt_disk([0], *arguments)
    assert tier.disk_stats()["disk_resident_blocks"] == 0
    with pytest.raises(StateError, match="cannot claim blocks: this scheduler has no disk tier"):
        OffloadScheduler(4, [FULL]).claim(NAMES[:1], [0])
    with pytest.raises(UnknownRequest):
        tier.unclaimed("b", 0, 100)
