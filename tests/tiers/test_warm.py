"""What the slot files of several ranks agree on when they are opened warm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.tiers.setup import NUM_SLOTS, Key, key_of, new_arena, open_file, put

from kvstow import FullAttention, OffloadScheduler
from kvstow.tiers import SlotRecords
from kvstow.tiers.warm import adopt, agreed, disagreed

Write = tuple[Sequence[Key], Sequence[int], int]
KEYS = [key_of(number) for number in range(6)]


def records_after(path: Path, *writes: Write) -> SlotRecords:
    """Return what a slot file holds after these writes."""
    path.mkdir()
    with new_arena() as arena:
        with open_file(path, arena) as tier:
            for keys, slots, sequence in writes:
                assert all(put(tier, keys, slots, sequence=sequence))
        with open_file(path, arena) as tier:
            return tier.records()


def test_ranks_that_hold_the_same_writes_agree_on_all(tmp_path: Path) -> None:
    writes: list[Write] = [(KEYS[:2], [7, 3], 1), (KEYS[2:4], [5, 1], 2)]
    ranks = [records_after(tmp_path / name, *writes) for name in "abc"]
    common = agreed(ranks, NUM_SLOTS)
    assert common.slots.tolist() == ranks[0].slots.tolist()
    assert [len(disagreed(own, common)) for own in ranks] == [0, 0, 0]


@pytest.mark.parametrize(
    ("other", "left"),
    [
        ([(KEYS[:3], [0, 1, 2], 1)], [0, 1, 2]),
        ([(KEYS[:2], [0, 1], 1)], [0, 1]),
        ([(KEYS[:3], [0, 1, 9], 1)], [0, 1]),
        ([([KEYS[0], KEYS[5], KEYS[2]], [0, 1, 2], 1)], [0, 2]),
        ([([KEYS[0], (KEYS[1][0], 1), KEYS[2]], [0, 1, 2], 1)], [0, 2]),
        ([(KEYS[:2], [0, 1], 1), (KEYS[2:3], [2], 4)], [0, 1]),
        ([], []),
    ],
    ids=["same", "lost", "other slot", "other block", "other group", "other write", "empty"],
)
def test_slot_counts_only_if_all_ranks_hold_the_same_write(
    tmp_path: Path, other: list[Write], left: list[int]
) -> None:
    first = records_after(tmp_path / "first", (KEYS[:3], [0, 1, 2], 1))
    second = records_after(tmp_path / "second", *other)
    for ranks in ([first, second], [second, first], [first, first, second]):
        common = agreed(ranks, NUM_SLOTS)
        assert sorted(common.slots.tolist()) == left
        for own in ranks:
            dropped = disagreed(own, common)
            assert dropped.slots is not None
            assert sorted([*dropped.slots, *left]) == sorted(own.slots.tolist())


def test_nothing_of_a_part_in_which_a_rank_holds_no_slot_counts(tmp_path: Path) -> None:
    first, second = (
        records_after(tmp_path / name, (KEYS[:2], slots, 1))
        for name, slots in (("first", [0, 1]), ("second", [8, 9]))
    )
    empty = second.some(second.slots < 8)
    assert not len(empty)
    for ranks in ([first, empty], [empty, first], [empty, empty]):
        assert not len(agreed(ranks, NUM_SLOTS))


def test_slots_that_a_smaller_file_lacks_do_not_count(tmp_path: Path) -> None:
    records = records_after(tmp_path / "file", (KEYS[:4], [0, 1, 8, 9], 1))
    assert agreed([records], 9).slots.tolist() == [0, 1, 8]


def test_scheduler_takes_all_records_once(tmp_path: Path) -> None:
    records = records_after(tmp_path / "file", (KEYS[:3], [4, 1, 2], 1), (KEYS[3:], [0, 3, 5], 2))
    scheduler = OffloadScheduler(4, [FullAttention(16)], num_disk_blocks=8)
    assert adopt(scheduler, records) == 6
    assert adopt(scheduler, records) == 0
    scheduler.check()
    assert scheduler.disk_stats()["disk_resident_blocks"] == 6
