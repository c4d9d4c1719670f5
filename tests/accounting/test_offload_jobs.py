"""Jobs of `OffloadScheduler`: failures, deadlines, ranks, resets and events."""

from __future__ import annotations

import numpy as np
import pytest
from tests.accounting.offload_rig import ALL, BLOCK_SIZE, GROUP, Rig, hashes, some

from kvstow import (
    CacheStoreCommitted,
    ConfigError,
    InvalidBlock,
    OffloadScheduler,
    StateError,
    TransferCompleted,
    TransferInitiated,
)


def test_request_may_finish_while_its_store_is_in_flight() -> None:
    rig = Rig(8)
    rig.add("a", "abc")
    job = some(rig.compute("a", 3))
    rig.scheduler.finish("a")
    assert rig.stat("dropped_blocks") == 0
    assert rig.end(job).ok
    assert rig.found("abc") == 3


def test_request_may_finish_while_its_load_is_in_flight() -> None:
    rig = Rig(num_host_blocks=3)
    rig.keep("abc")
    rig.add("a", "abc")
    rig.scheduler.lookup("a", 0, ALL)
    load = rig.load("a", 3)
    rig.scheduler.finish("a")
    # The copy still reads the slots.
    rig.add("other", "xyz")
    assert rig.compute("other", 3) is None
    assert rig.end(load).ok
    assert len(some(rig.compute("other", 3))) == 3


def test_failed_store_empties_its_slots() -> None:
    rig = Rig(num_host_blocks=3)
    rig.add("a", "abc")
    job = some(rig.compute("a", 2))
    end = rig.end(job, ok=False)
    assert repr(end) == f"JobEnd(job_id={job.job_id}, failed)"
    assert not end.ok
    assert rig.found("abc") == 0
    assert {name: num for name, num in rig.scheduler.stats().items() if num} == {
        "failed_stores": 1,
        "capacity_tokens": 3 * BLOCK_SIZE,
    }
    # The next step that confirms more of this request stores it from the start.
    rig.end(some(rig.compute("a", 3)))
    assert rig.found("abc") == 3


def test_failed_store_drops_the_slots_below_it() -> None:
    rig = Rig(num_host_blocks=4)
    rig.add("a", "abcd")
    root, rest = some(rig.compute("a", 1)), some(rig.compute("a", 3))
    rig.end(root, ok=False)
    rig.end(rest)
    assert (rig.found("abcd"), rig.scheduler.num_resident) == (0, 0)
    rig.end(some(rig.compute("a", 4)))
    assert rig.found("abcd") == 4


def test_failed_load_keeps_the_host_copy_and_no_pin() -> None:
    rig = Rig(num_host_blocks=2)
    rig.keep("ab")
    rig.add("a", "ab")
    rig.scheduler.lookup("a", 0, ALL)
    assert not rig.end(rig.load("a", 2), ok=False).ok
    assert (rig.stat("failed_loads"), rig.stat("loaded_blocks")) == (1, 0)
    assert rig.found("ab") == 2
    rig.keep("yz", id="other")
    assert (rig.found("ab"), rig.found("yz")) == (0, 2)


def test_store_in_flight_at_a_reset_has_no_effect() -> None:
    rig = Rig(num_host_blocks=4)
    rig.add("a", "ab")
    late = some(rig.compute("a", 2))
    rig.scheduler.reset()
    rig.scheduler.check()
    # The copy still writes its slots, so no other store gets them.
    rig.add("b", "ax")
    rig.add("c", "yz")
    store = some(rig.compute("b", 2))
    assert not set(store.host_slots) & set(late.host_slots)
    assert rig.compute("c", 2) is None
    rig.end(store)
    assert not rig.end(late).ok
    assert (rig.found("ab"), rig.found("ax")) == (1, 2)
    assert len(some(rig.compute("c", 2))) == 2


def test_load_in_flight_at_a_reset_fails() -> None:
    rig = Rig(num_host_blocks=2)
    rig.keep("ab")
    rig.add("a", "ab")
    rig.scheduler.lookup("a", 0, ALL)
    load = rig.load("a", 2)
    rig.scheduler.reset()
    assert rig.found("ab") == 0
    # The copy still reads its slots.
    rig.add("other", "yz")
    assert rig.compute("other", 2) is None
    assert not rig.end(load).ok
    assert (rig.stat("failed_loads"), rig.stat("loaded_blocks")) == (1, 0)
    assert len(some(rig.compute("other", 2))) == 2


def test_reset_releases_what_lookups_hold() -> None:
    rig = Rig(2)
    rig.keep("ab")
    rig.add("a", "ab")
    assert rig.scheduler.lookup("a", 0, ALL) == 2 * BLOCK_SIZE
    rig.scheduler.reset()
    with pytest.raises(StateError, match="lookup"):
        rig.scheduler.load("a", BLOCK_SIZE, [[1]])
    assert rig.scheduler.num_resident == 0
    # The live request's blocks are due again.
    assert len(some(rig.compute("a", 2))) == 2


def test_complete_takes_any_integer_as_job_id() -> None:
    scheduler = OffloadScheduler(2, [GROUP])
    scheduler.add("a", hashes("a"))
    job = some(scheduler.store(["a"], [BLOCK_SIZE], [1], [0, 1]))
    assert some(scheduler.complete(np.int64(job.job_id))).ok  # type: ignore[arg-type]


def test_job_ends_when_every_rank_has_reported_and_fails_if_one_failed() -> None:
    scheduler = OffloadScheduler(8, [GROUP], world_size=3)
    for id, ok in (("well", True), ("badly", False)):
        scheduler.add(id, hashes(id[0]))
        job = some(scheduler.store([id], [BLOCK_SIZE], [1], [0, 1]))
        assert scheduler.complete(job.job_id, rank=2) is None
        assert scheduler.complete(job.job_id, rank=0, ok=ok) is None
        with pytest.raises(StateError, match="rank 0 has reported"):
            scheduler.complete(job.job_id, rank=0)
        with pytest.raises(ConfigError, match="rank 3 of 3"):
            scheduler.complete(job.job_id, rank=3)
        assert scheduler.num_resident == (0 if ok else 1)
        end = some(scheduler.complete(job.job_id, rank=1))
        assert (end.ok, end.late, end.block_ids.tolist()) == (ok, False, [1])
    assert scheduler.num_resident == 1
    assert scheduler.stats()["failed_stores"] == 1


def test_late_load_fails_once_and_keeps_its_blocks_until_it_ends() -> None:
    rig = Rig(4)
    rig.keep("ab")
    scheduler = rig.scheduler
    scheduler.add("late", hashes("abc"))
    assert scheduler.lookup("late", 0, ALL) == 2 * BLOCK_SIZE
    job = scheduler.load("late", 2 * BLOCK_SIZE, [[7, 8]], deadline=10.0)
    assert scheduler.expire(10.0) == []
    assert scheduler.expire(10.5) == [job.job_id]
    assert scheduler.expire(99.0) == [], "reported once"
    stats = scheduler.stats()
    assert (stats["jobs_in_flight"], stats["quarantined_jobs"]) == (0, 1)
    assert (stats["late_jobs"], stats["quarantined_blocks"]) == (1, 2)
    # No lookup waits for the job. The slots that it reads stay, so others have no room.
    scheduler.add("other", hashes("ab"))
    assert scheduler.lookup("other", 0, ALL) == 2 * BLOCK_SIZE
    scheduler.release("other")
    scheduler.add("big", hashes("wxyz"))
    store = some(scheduler.store(["big"], [4 * BLOCK_SIZE], [1, 2, 3, 4], [0, 4]))
    assert len(store) == 2
    end = some(scheduler.complete(job.job_id))
    assert (end.ok, end.late, end.block_ids.tolist()) == (False, True, [7, 8])
    assert scheduler.stats()["quarantined_jobs"] == 0
    scheduler.check()


def test_late_store_never_becomes_visible_and_its_keys_are_stored_again() -> None:
    scheduler = OffloadScheduler(4, [GROUP])
    scheduler.add("first", hashes("ab"))
    late = some(scheduler.store(["first"], [2 * BLOCK_SIZE], [1, 2], [0, 2], deadline=1.0))
    assert scheduler.expire(2.0) == [late.job_id]
    scheduler.add("second", hashes("ab"))
    again = some(scheduler.store(["second"], [2 * BLOCK_SIZE], [3, 4], [0, 2]))
    assert set(again.host_slots.tolist()).isdisjoint(late.host_slots.tolist())
    assert some(scheduler.complete(again.job_id)).ok
    assert not some(scheduler.complete(late.job_id)).ok
    assert (scheduler.num_resident, scheduler.stats()["stored_blocks"]) == (2, 2)
    scheduler.check()


def test_end_all_ends_every_job_and_ignores_later_reports() -> None:
    rig = Rig(4)
    rig.keep("ab")
    scheduler = rig.scheduler
    scheduler.add("a", hashes("abc"))
    scheduler.lookup("a", 0, ALL)
    load = scheduler.load("a", 2 * BLOCK_SIZE, [[7, 8]], deadline=1.0)
    scheduler.add("b", hashes("x"))
    store = some(scheduler.store(["b"], [BLOCK_SIZE], [9], [0, 1]))
    scheduler.expire(2.0)
    ends = [(end.job_id, end.ok, end.late, end.block_ids.tolist()) for end in scheduler.end_all()]
    assert ends == [(load.job_id, False, True, [7, 8]), (store.job_id, False, False, [9])]
    assert scheduler.end_all() == []
    assert scheduler.complete(store.job_id) is None
    assert scheduler.complete(load.job_id, ok=False) is None
    with pytest.raises(StateError):
        scheduler.complete(store.job_id + 1)
    assert scheduler.num_resident == 2
    scheduler.check()


def test_reports_of_jobs_from_before_a_restore_are_ignored() -> None:
    rig = Rig(4)
    rig.keep("ab")
    restored = OffloadScheduler(4, [GROUP])
    restored.restore(rig.scheduler.snapshot())
    assert restored.complete(1) is None
    with pytest.raises(StateError):
        restored.complete(2)


def test_nan_is_refused_as_a_deadline() -> None:
    scheduler = OffloadScheduler(4, [GROUP])
    with pytest.raises(ConfigError, match="NaN"):
        scheduler.expire(float("nan"))
    with pytest.raises(ConfigError, match="NaN"):
        scheduler.store([], [], [], [0], deadline=float("nan"))


def test_ids_outside_the_device_pool_are_refused() -> None:
    scheduler = OffloadScheduler(4, [GROUP], num_device_blocks=8)
    scheduler.add("a", hashes("ab"))
    with pytest.raises(InvalidBlock, match="block 8 "):
        scheduler.store(["a"], [BLOCK_SIZE], [8], [0, 1])
    store = some(scheduler.store(["a"], [BLOCK_SIZE], [7], [0, 1]))
    scheduler.complete(store.job_id)
    scheduler.add("b", hashes("ab"))
    scheduler.lookup("b", 0, ALL)
    with pytest.raises(InvalidBlock, match="block 9 "):
        scheduler.load("b", BLOCK_SIZE, [[9]])
    assert len(scheduler.load("b", BLOCK_SIZE, [[6]])) == 1
    scheduler.check()


def test_transfer_events_report_every_job_once() -> None:
    scheduler = OffloadScheduler(4, [GROUP], events=True)
    scheduler.add("a", hashes("ab"))
    store = some(scheduler.store(["a"], [2 * BLOCK_SIZE], [1, 2], [0, 2]))
    (begun,) = scheduler.take_transfer_events()
    assert isinstance(begun, TransferInitiated)
    assert (begun.job_id, begun.direction, begun.num_blocks) == (store.job_id, "store", 2)
    scheduler.complete(store.job_id)
    committed, ended = scheduler.take_transfer_events()
    assert isinstance(committed, CacheStoreCommitted)
    assert (committed.job_id, committed.num_blocks) == (store.job_id, 2)
    assert isinstance(ended, TransferCompleted)
    assert (ended.job_id, ended.direction, ended.ok) == (store.job_id, "store", True)
    scheduler.add("b", hashes("abc"))
    scheduler.lookup("b", 0, ALL)
    load = scheduler.load("b", 2 * BLOCK_SIZE, [[3, 4]], deadline=1.0)
    assert scheduler.stats()["hit_tokens"] == 2 * BLOCK_SIZE
    scheduler.expire(2.0)
    assert len(scheduler.take_transfer_events()) == 1, "late, but not ended"
    scheduler.complete(load.job_id)
    (ended,) = scheduler.take_transfer_events()
    assert isinstance(ended, TransferCompleted)
    assert (ended.direction, ended.ok) == ("load", False)
    assert OffloadScheduler(4, [GROUP]).take_transfer_events() == []


def test_job_says_whether_it_copies_all_given_blocks() -> None:
    """A caller that holds the blocks that it gave may rely on it."""
    scheduler = OffloadScheduler(8, [GROUP])
    scheduler.add("a", hashes("abcd"))
    all_of_them = some(scheduler.store(["a"], [2 * BLOCK_SIZE], [1, 2], [0, 2]))
    assert all_of_them.has_all_ids
    fewer = some(scheduler.store(["a"], [4 * BLOCK_SIZE], [3, 4], [0, 2], max_blocks=1))
    assert fewer.block_ids.tolist() == [3] and not fewer.has_all_ids
    # As many as given, but one of them was given before.
    scheduler.extend("a", hashes("abcde")[4:])
    earlier = some(scheduler.store(["a"], [5 * BLOCK_SIZE], [5], [0, 1], max_blocks=1))
    assert earlier.block_ids.tolist() == [4] and not earlier.has_all_ids


def test_lazy_job_copies_all_given_blocks_in_reverse() -> None:
    scheduler = OffloadScheduler(8, [GROUP], mode="lazy")
    scheduler.add("a", hashes("abc"))
    assert scheduler.store(["a"], [3 * BLOCK_SIZE], [1, 2, 3], [0, 3]) is None
    job = some(scheduler.store_candidates([3, 2], hashes("abc")[:0:-1]))
    assert job.block_ids.tolist() == [2, 3] and job.has_all_ids
    fewer = some(scheduler.store_candidates([2, 1], hashes("abc")[1::-1]))
    assert fewer.block_ids.tolist() == [1] and not fewer.has_all_ids
