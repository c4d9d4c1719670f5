"""Host slots that a load finds damaged leave the tier, and the next store brings them back."""

from __future__ import annotations

import numpy as np
import pytest

from kvstow import (
    BlockLedger,
    BlockRemoved,
    ConfigError,
    FullAttention,
    Job,
    OffloadScheduler,
    OutOfBlocks,
    SlidingWindow,
    StateError,
)

BLOCK = 4
ALL = 2**40
GROUP = FullAttention(BLOCK)


def prompt(first: int, num_blocks: int) -> list[bytes]:
    return [(1000 * first + at).to_bytes(8, "big") for at in range(num_blocks)]


def store(tier: OffloadScheduler, id: str, block_ids: list[int], num_known: int = 0) -> Job | None:
    """Report blocks that are new in a request's table, all computed."""
    num_tokens = (num_known + len(block_ids)) * BLOCK
    return tier.store([id], [num_tokens], block_ids, [0, len(block_ids)])


def filled(num_slots: int = 8, num_blocks: int = 3, **options: object) -> OffloadScheduler:
    """Return a tier that holds a prompt. The request that stored it, "writer", still runs."""
    tier = OffloadScheduler(num_slots, [GROUP], **options)  # type: ignore[arg-type]
    tier.add("writer", prompt(1, num_blocks))
    job = store(tier, "writer", list(range(1, num_blocks + 1)))
    assert job is not None
    for rank in range(int(str(options.get("world_size", 1)))):
        tier.complete(job.job_id, rank=rank)
    tier.take_events()
    return tier


def loading(tier: OffloadScheduler, id: str, num_blocks: int = 3) -> Job:
    """Start a load of all blocks of the prompt, and return its job."""
    tier.add(id, prompt(1, num_blocks))
    assert tier.lookup(id, 0, ALL) == num_blocks * BLOCK
    first = 20 + 10 * tier.stats()["jobs_in_flight"]
    return tier.load(id, num_blocks * BLOCK, [list(range(first, first + num_blocks))])


def found(tier: OffloadScheduler, num_local: int = 0) -> int:
    """Return how many blocks a new request finds after its local hit."""
    tier.add("probe", prompt(1, 3))
    num_tokens = tier.lookup("probe", num_local * BLOCK, ALL)
    tier.finish("probe")
    assert num_tokens is not None
    return num_tokens // BLOCK


def stored_again(tier: OffloadScheduler, request_id: str) -> list[int]:
    """Return the device blocks that the next report of a request stores, once they are stored."""
    job = store(tier, request_id, [], num_known=3)
    assert job is not None
    tier.complete(job.job_id)
    tier.check()
    return list(map(int, job.block_ids))


def test_failed_load_drops_the_damaged_slot() -> None:
    tier = filled()
    job = loading(tier, "reader")
    end = tier.complete(job.job_id, ok=[True, False, True])
    assert end is not None and not end.ok
    tier.check()
    assert (found(tier), tier.num_resident) == (1, 2)
    stats = tier.stats()
    assert (stats["failed_loads"], stats["damaged_blocks"]) == (1, 1)


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_later_requests_pay_no_second_failed_load(mode: str) -> None:
    """The request that recomputes the block stores it again, and only that block."""
    tier = OffloadScheduler(8, [GROUP], mode=mode)  # type: ignore[arg-type]
    keys = prompt(1, 3)
    tier.add("writer", keys)
    job = store(tier, "writer", [1, 2, 3])
    job = tier.store_candidates([3, 2, 1], keys[::-1]) if mode == "lazy" else job
    assert job is not None
    tier.complete(job.job_id)
    tier.finish("writer")
    tier.complete(loading(tier, "reader").job_id, ok=[True, False, True])
    again = store(tier, "reader", [10, 11, 12])
    again = tier.store_candidates([12, 11, 10], keys[::-1]) if mode == "lazy" else again
    assert again is not None
    assert again.block_ids.tolist() == [11]
    tier.complete(again.job_id)
    tier.check()
    assert found(tier) == 3
    assert tier.stats()["failed_loads"] == 1


def test_running_request_stores_its_damaged_block_again() -> None:
    """The request already stored the block. The next report of the request stores it again."""
    tier = filled()
    tier.complete(loading(tier, "reader").job_id, ok=[False, True, True])
    assert stored_again(tier, "writer") == [1]
    assert found(tier) == 3


def test_local_block_that_the_tier_has_lost_is_stored_by_its_next_reader() -> None:
    """A load that reports a request's blocks knows that the tier has those that it loads."""
    tier = filled()
    tier.finish("writer")
    tier.complete(loading(tier, "reader").job_id, ok=[False, True, True])
    tier.add("local", prompt(1, 3))
    assert tier.lookup("local", BLOCK, ALL) == 2 * BLOCK
    load = tier.load("local", 2 * BLOCK, [[51, 52]], local_ids=[[50]])
    tier.complete(load.job_id)
    assert stored_again(tier, "local") == [50]
    assert found(tier) == 3


def test_load_refuses_blocks_that_went_with_a_failed_store() -> None:
    """A store of the damaged block adopts the blocks after it. If it fails, they go with it."""
    tier = filled()
    tier.complete(loading(tier, "reader").job_id, ok=[False, True, True])
    tier.add("holder", prompt(1, 3))
    assert tier.lookup("holder", BLOCK, ALL) == 2 * BLOCK
    job = store(tier, "writer", [], num_known=3)
    assert job is not None
    tier.complete(job.job_id, ok=False)
    tier.check()
    with pytest.raises(StateError, match="not on the host"):
        tier.load("holder", 2 * BLOCK, [[40, 41]])


@pytest.mark.parametrize("how", ["complete", "expire", "end_all", "reset"])
def test_failures_that_name_no_block_drop_nothing(how: str) -> None:
    tier = filled()
    tier.add("reader", prompt(1, 3))
    tier.lookup("reader", 0, ALL)
    job = tier.load("reader", 3 * BLOCK, [[20, 21, 22]], deadline=1.0)
    num_resident = 0 if how == "reset" else 3
    if how == "reset":
        tier.reset()
    elif how == "expire":
        assert tier.expire(2.0) == [job.job_id]
    elif how == "end_all":
        tier.end_all()
    tier.complete(job.job_id, ok=False)
    tier.check()
    assert (found(tier), tier.num_resident) == (num_resident, num_resident)
    assert tier.stats()["damaged_blocks"] == 0


def test_slot_that_is_damaged_on_one_rank_is_dropped_at_once() -> None:
    tier = filled(world_size=3)
    job = loading(tier, "reader")
    assert tier.complete(job.job_id, rank=0) is None
    assert tier.complete(job.job_id, rank=2, ok=[True, True, False]) is None
    assert tier.num_resident == 2
    tier.check()
    end = tier.complete(job.job_id, rank=1)
    assert end is not None and not end.ok
    assert tier.stats()["damaged_blocks"] == 1
    tier.check()


def test_damaged_slot_is_reused_only_after_its_last_pin() -> None:
    """A second load and a lookup pin the slot, so no store gets its memory before they end."""
    tier = filled(num_slots=3)
    first = loading(tier, "first")
    tier.add("holder", prompt(1, 3))
    second_slots = first.host_slots.tolist()
    assert tier.lookup("holder", 0, ALL) is None, (
        "pending while another request loads the same blocks"
    )
    tier.complete(first.job_id, ok=True)
    assert tier.lookup("holder", 0, ALL) == 3 * BLOCK
    second = loading(tier, "second")
    assert second.host_slots.tolist() == second_slots
    tier.complete(second.job_id, ok=[False, True, True])
    tier.check()
    tier.add("other", prompt(2, 3))
    assert store(tier, "other", [30, 31, 32]) is None, "all slots are pinned by the lookup"
    with pytest.raises(StateError, match="proved damaged"):
        tier.load("holder", 3 * BLOCK, [[40, 41, 42]])
    tier.release("holder")
    job = store(tier, "other", [], num_known=3)
    assert job is not None and len(job) == 3
    tier.check()


def test_children_of_a_damaged_slot_stay_and_can_be_evicted() -> None:
    tier = filled(num_slots=3)
    tier.finish("writer")
    tier.complete(loading(tier, "reader").job_id, ok=[False, True, True])
    tier.finish("reader")
    assert (found(tier), found(tier, num_local=1)) == (0, 2)
    # Another prompt can evict them.
    tier.add("other", prompt(2, 3))
    job = store(tier, "other", [30, 31, 32])
    assert job is not None and len(job) == 3
    tier.complete(job.job_id)
    tier.check()
    assert (found(tier), found(tier, num_local=1)) == (0, 0)


def test_store_in_flight_survives_the_damage_of_its_parent() -> None:
    """The parent proves damaged while the store is in flight."""
    tier = filled(num_blocks=2)
    tier.extend("writer", prompt(1, 3)[2:])
    below = store(tier, "writer", [3], num_known=2)
    assert below is not None
    tier.complete(loading(tier, "reader", 2).job_id, ok=[True, False])
    tier.check()
    tier.complete(below.job_id)
    tier.check()
    again = store(tier, "writer", [], num_known=3)
    assert again is not None
    assert again.block_ids.tolist() == [2]
    tier.complete(again.job_id)
    tier.check()
    assert found(tier) == 3


def test_dropped_slot_is_reported_as_removed() -> None:
    tier = filled(events=True)
    tier.complete(loading(tier, "reader").job_id, ok=[True, True, False])
    (event,) = (event for event in tier.take_events() if isinstance(event, BlockRemoved))
    assert list(event.block_hashes) == prompt(1, 3)[2:]


@pytest.mark.parametrize("is_last_sound", [True, False])
def test_damaged_block_damages_its_whole_slot_once(is_last_sound: bool) -> None:
    tier = OffloadScheduler(4, [GROUP], blocks_per_slot=3)
    tier.add("writer", prompt(1, 6))
    job = store(tier, "writer", [1, 2, 3, 4, 5, 6])
    assert job is not None
    tier.complete(job.job_id)
    tier.add("reader", prompt(1, 6))
    assert tier.lookup("reader", BLOCK, ALL) == 5 * BLOCK
    load = tier.load("reader", 5 * BLOCK, [[21, 22, 23, 24, 25]])
    # The load reads two blocks of the first slot. The second block of the second slot is damaged,
    # and the last one may be.
    tier.complete(load.job_id, ok=[True, True, True, False, is_last_sound])
    tier.check()
    tier.add("probe", prompt(1, 6))
    assert tier.lookup("probe", 0, ALL) == 3 * BLOCK
    assert tier.stats()["damaged_blocks"] == 3


def test_damaged_slot_of_a_window_is_dropped_alone() -> None:
    tier = OffloadScheduler(12, [GROUP, SlidingWindow(BLOCK, 2 * BLOCK)])
    tier.add("writer", prompt(1, 4))
    job = tier.store(["writer"], [4 * BLOCK], [1, 2, 3, 4, 5, 6, 7, 8], [0, 4, 8])
    assert job is not None
    tier.complete(job.job_id)
    tier.finish("writer")
    tier.add("reader", prompt(1, 4))
    assert tier.lookup("reader", 0, ALL) == 4 * BLOCK
    load = tier.load("reader", 4 * BLOCK, [[21, 22, 23, 24], [27, 28]])
    tier.complete(load.job_id, ok=[True] * 5 + [False])
    tier.check()
    tier.add("again", prompt(1, 4))
    assert tier.lookup("again", 0, ALL) == 3 * BLOCK
    job = tier.store(["again"], [4 * BLOCK], [31, 32, 33, 34, 0, 0, 37, 38], [0, 4, 8])
    assert job is not None
    assert job.block_ids.tolist() == [38]


def test_one_failed_block_fails_the_whole_store() -> None:
    tier = filled(num_blocks=2)
    tier.add("other", prompt(2, 2))
    job = store(tier, "other", [5, 6])
    assert job is not None
    end = tier.complete(job.job_id, ok=np.array([True, False]))
    assert end is not None and not end.ok
    assert (tier.num_resident, tier.stats()["failed_stores"]) == (2, 1)
    tier.check()


@pytest.mark.parametrize(
    ("ok", "says"),
    [
        ([True], "1 outcomes for the 3 blocks of job 2"),
        ([True] * 4, "4 outcomes for the 3 blocks"),
        ([], "0 outcomes"),
        ([True, None, True], "None is not a bool"),
        ("yes", "sequence of bools"),
        (7, "sequence of bools"),
    ],
)
def test_wrong_outcomes_are_refused_and_change_nothing(ok: object, says: str) -> None:
    tier = filled()
    job = loading(tier, "reader")
    with pytest.raises(ConfigError, match=says):
        tier.complete(job.job_id, ok=ok)  # type: ignore[arg-type]
    end = tier.complete(job.job_id, ok=[True, True, True])
    assert end is not None and end.ok
    assert tier.num_resident == 3


def sleeping() -> tuple[OffloadScheduler, BlockLedger]:
    """Return a tier and a ledger. The tier holds a sleep image of blocks that it had stored."""
    ledger = BlockLedger(16, [GROUP])
    ledger.add("sleeper", prompt(1, 3))
    ledger.allocate("sleeper", 3 * BLOCK)
    tier = filled()
    assert len(tier.hold_image(ledger)) == 0
    return tier, ledger


def test_tier_with_a_store_in_flight_holds_no_image() -> None:
    tier = OffloadScheduler(8, [GROUP])
    tier.add("writer", prompt(1, 3))
    job = store(tier, "writer", [1, 2, 3])
    assert job is not None
    with pytest.raises(StateError, match="1 jobs are in flight"):
        tier.hold_image(BlockLedger(16, [GROUP]))
    tier.complete(job.job_id)
    assert len(tier.hold_image(BlockLedger(16, [GROUP]))) == 0


def test_image_without_room_takes_no_slot_from_a_lookup() -> None:
    tier = filled(3)
    tier.finish("writer")
    tier.add("reader", prompt(1, 3))
    assert tier.lookup("reader", 0, ALL) == 3 * BLOCK
    ledger = BlockLedger(16, [GROUP])
    ledger.add("sleeper", prompt(2, 4))
    ledger.allocate("sleeper", 4 * BLOCK)
    with pytest.raises(OutOfBlocks):
        tier.hold_image(ledger)
    tier.check()
    tier.add("other", prompt(3, 3))
    assert store(tier, "other", [7, 8, 9]) is None
    assert len(tier.load("reader", 3 * BLOCK, [[10, 11, 12]])) == 3


def test_image_with_a_damaged_slot_is_refused() -> None:
    tier, _ = sleeping()
    tier.complete(loading(tier, "reader").job_id, ok=[False, True, True])
    tier.check()
    with pytest.raises(StateError, match="proved damaged"):
        tier.image  # noqa: B018
    restored = OffloadScheduler(8, [GROUP])
    restored.restore(tier.snapshot())
    with pytest.raises(StateError, match="no sleep image is held"):
        restored.image  # noqa: B018
    tier.release_image()
    tier.check()
    assert tier.used_slots().tolist() == [1, 2]


def test_image_whose_slot_proves_damaged_after_a_reset_is_refused() -> None:
    tier, _ = sleeping()
    job = loading(tier, "reader")
    tier.reset()
    tier.complete(job.job_id, ok=[False, True, True])
    tier.check()
    with pytest.raises(StateError, match="proved damaged"):
        tier.image  # noqa: B018
    tier.release_image()
    assert tier.used_slots().tolist() == []
    tier.check()


def test_reset_keeps_the_slots_of_an_image_in_use() -> None:
    """A snapshot file holds the bytes of the slots in use only."""
    tier, _ = sleeping()
    tier.reset()
    tier.check()
    assert tier.used_slots().tolist() == sorted(tier.image.host_slots.tolist()) == [0, 1, 2]
    restored = OffloadScheduler(8, [GROUP])
    restored.restore(tier.snapshot())
    restored.check()
    assert restored.used_slots().tolist() == [0, 1, 2]
    tier.release_image()
    assert tier.used_slots().tolist() == []
    tier.check()
