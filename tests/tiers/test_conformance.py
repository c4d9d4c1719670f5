"""What every tier does, on each medium."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiers.setup import (
    KINDS,
    LONG_S,
    NUM_SLOTS,
    blocks_of,
    bytes_of,
    get,
    key_of,
    new_arena,
    put,
    stats_after,
)

from kvstow import ConfigError, InvalidBlock, StateError
from kvstow.tiers import Tier, TierBlocks
from kvstow.transfer import HostArena

KEYS = [key_of(number) for number in range(NUM_SLOTS)]


@pytest.fixture(params=KINDS)
def tier(request: pytest.FixtureRequest, tmp_path: Path, arena: HostArena) -> Iterator[Tier]:
    with KINDS[request.param](tmp_path, arena) as opened:
        yield opened


def test_blocks_come_back_as_they_were_written(tier: Tier) -> None:
    assert all(put(tier, KEYS, range(NUM_SLOTS)))
    assert all(get(tier, KEYS, range(NUM_SLOTS)))
    stats = stats_after(tier)
    assert (stats.put_blocks, stats.got_blocks) == (NUM_SLOTS, NUM_SLOTS)
    assert stats.put_bytes == stats.got_bytes == NUM_SLOTS * tier.slot_bytes
    assert (stats.failed_puts, stats.failed_gets, stats.in_flight_bytes) == (0, 0, 0)


def test_blocks_may_be_read_in_any_order_and_apart(tier: Tier) -> None:
    assert all(put(tier, KEYS, range(NUM_SLOTS)))
    order = np.random.default_rng(0).permutation(NUM_SLOTS)[:17].tolist()
    assert all(get(tier, [KEYS[at] for at in order], order))


def test_host_slots_of_a_job_need_not_be_consecutive(tier: Tier) -> None:
    rows = tier.arena.slots
    host = [5, 3, 4, 9, 20]
    for at, slot in enumerate(host):
        rows[slot] = bytes_of(KEYS[at])
    blocks = blocks_of(KEYS[:5], [1, 2, 3, 9, 8])
    written = tier.put(blocks, host)
    written.wait(LONG_S)
    target = [40, 50, 42, 43, 41]
    read = tier.get(blocks, target)
    read.wait(LONG_S)
    assert written.ok.all()
    assert read.ok.all()
    for at, slot in enumerate(target):
        np.testing.assert_array_equal(rows[slot], bytes_of(KEYS[at]))


def test_empty_slot_is_a_miss(tier: Tier) -> None:
    assert get(tier, KEYS[:2], [0, 1]) == [False, False]
    assert stats_after(tier).mismatched_blocks == 2


def test_block_of_another_key_is_a_miss(tier: Tier) -> None:
    assert all(put(tier, KEYS[:4], range(4)))
    assert get(tier, [KEYS[0], KEYS[2], KEYS[1], KEYS[3]], range(4)) == [True, False, False, True]


def test_block_of_another_group_is_a_miss(tier: Tier) -> None:
    assert all(put(tier, [key_of(1, group=0)], [0]))
    assert get(tier, [key_of(1, group=1)], [0]) == [False]
    assert get(tier, [key_of(1, group=0)], [0]) == [True]


def test_overwritten_slot_holds_the_later_block(tier: Tier) -> None:
    assert all(put(tier, KEYS[:2], [0, 1]))
    assert all(put(tier, [KEYS[7]], [1]))
    assert get(tier, [KEYS[0], KEYS[1]], [0, 1]) == [True, False]
    assert get(tier, [KEYS[7]], [1]) == [True]


def test_deleted_block_is_a_miss(tier: Tier) -> None:
    assert all(put(tier, KEYS[:3], range(3)))
    deleted = tier.delete(blocks_of([KEYS[0], KEYS[9]], [0, 2]))
    deleted.wait(LONG_S)
    assert deleted.ok.all(), "the tier holds neither"
    assert get(tier, KEYS[:3], range(3)) == [False, True, True]


def test_deadline_in_the_past_fails_every_block(tier: Tier) -> None:
    assert all(put(tier, KEYS[:2], [0, 1]))
    past = time.monotonic() - 1.0
    jobs = (
        tier.put(blocks_of(KEYS[2:4], [2, 3]), [2, 3], deadline=past),
        tier.get(blocks_of(KEYS[:2], [0, 1]), [4, 5], deadline=past),
    )
    for job in jobs:
        job.wait(LONG_S)
        assert not job.ok.any()
        assert job.is_late
    stats = stats_after(tier, *jobs)
    assert (stats.failed_puts, stats.failed_gets) == (2, 2)


def test_job_without_blocks_has_ended(tier: Tier) -> None:
    nothing = TierBlocks([], [], None, [])
    for job in (tier.put(nothing, []), tier.get(nothing, []), tier.delete(nothing)):
        job.wait(LONG_S)
        assert job.has_ended
        assert job.ok.tolist() == []


def test_slots_of_several_blocks_move_whole(tmp_path: Path) -> None:
    for kind, opened in KINDS.items():
        (tmp_path / kind).mkdir()
        arena = new_arena(4 * NUM_SLOTS, slots_per_run=4)
        with arena, opened(tmp_path / kind, arena) as tier:
            assert tier.num_host_slots == NUM_SLOTS
            assert all(put(tier, KEYS[:5], range(5))), kind
            assert all(get(tier, KEYS[:5], range(5))), kind


BAD: dict[str, tuple[TierBlocks, list[int], type[Exception], str]] = {
    "fewer groups": (TierBlocks([b"a", b"b"], [0], None, [0, 1]), [0, 1], ConfigError, "1 groups"),
    "fewer parents": (
        TierBlocks([b"a", b"b"], [0, 0], [None], [0, 1]),
        [0, 1],
        ConfigError,
        "1 parents",
    ),
    "fewer host slots": (
        TierBlocks([b"a", b"b"], [0, 0], None, [0, 1]),
        [0],
        ConfigError,
        "1 host_slots",
    ),
    "no slots": (TierBlocks([b"a"], [0]), [0], ConfigError, "slots is None"),
    "slot out of range": (TierBlocks([b"a"], [0], None, [NUM_SLOTS]), [0], InvalidBlock, "outside"),
    "negative slot": (TierBlocks([b"a"], [0], None, [-1]), [0], InvalidBlock, "outside"),
    "slot twice": (
        TierBlocks([b"a", b"b"], [0, 0], None, [1, 1]),
        [0, 1],
        InvalidBlock,
        "more than once",
    ),
    "host slot twice": (
        TierBlocks([b"a", b"b"], [0, 0], None, [0, 1]),
        [2, 2],
        InvalidBlock,
        "more than once",
    ),
    "host slot out of range": (TierBlocks([b"a"], [0], None, [0]), [999], InvalidBlock, "outside"),
    "no digest": (TierBlocks([b""], [0], None, [0]), [0], ConfigError, "1 to 32 bytes"),
    "long digest": (TierBlocks([b"a" * 33], [0], None, [0]), [0], ConfigError, "1 to 32 bytes"),
    "text": (TierBlocks(["a"], [0], None, [0]), [0], ConfigError, "1 to 32 bytes"),  # type: ignore[list-item]
    "two widths": (
        TierBlocks([b"a", b"bc"], [0, 0], None, [0, 1]),
        [0, 1],
        ConfigError,
        "one width",
    ),
    "parent of another width": (
        TierBlocks([b"ab"], [0], [b"c"], [0]),
        [0],
        ConfigError,
        "one width",
    ),
    "negative sequence": (
        TierBlocks([b"a"], [0], None, [0], -1),
        [0],
        ConfigError,
        "blocks.sequence is -1",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_job_raises_and_changes_nothing(tier: Tier, name: str) -> None:
    blocks, host, error, message = BAD[name]
    assert all(put(tier, KEYS[:2], [0, 1]))
    before = stats_after(tier)
    for call in (tier.put, tier.get):
        with pytest.raises(error, match=message):
            call(blocks, host)
    assert tier.stats() == before
    assert all(get(tier, KEYS[:2], [0, 1]))


def test_bad_deadline_raises_and_changes_nothing(tier: Tier) -> None:
    assert all(put(tier, KEYS[:1], [0]))
    bad: Any = "soon"
    with pytest.raises(ConfigError, match="deadline is 'soon'"):
        tier.put(blocks_of(KEYS[1:2], [0]), [0], deadline=bad)
    assert all(get(tier, KEYS[:1], [0]))


def test_closed_tier_refuses_jobs(tier: Tier) -> None:
    tier.close()
    tier.close()
    for call in (tier.put, tier.get):
        with pytest.raises(StateError, match="closed"):
            call(blocks_of(KEYS[:1], [0]), [0])
    with pytest.raises(StateError, match="closed"):
        tier.delete(blocks_of(KEYS[:1], [0]))


def test_tier_with_a_closed_arena_refuses_jobs(tier: Tier) -> None:
    tier.arena.close()
    with pytest.raises(StateError, match="HostArena is closed"):
        tier.put(blocks_of(KEYS[:1], [0]), [0])
