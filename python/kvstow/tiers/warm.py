"""What the slot files of all ranks agree on when they are opened warm.

A block is whole only if every rank holds its part. If one rank lost the write of a slot, then its
file may hold an earlier block there, or none. So a slot counts only if all ranks hold the same key,
by the same write.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstow._core import OffloadScheduler
from kvstow.tiers.slot_index import SlotRecords
from kvstow.tiers.ticket import Bools
from kvstow.tiers.tier import TierBlocks
from kvstow.transfer.mover import Index

RECORDS_PER_PART = 16384


def agreed(ranks: Sequence[SlotRecords], num_slots: int) -> SlotRecords:
    """Return the records that all ranks have: same slot, key and write. The oldest comes first.

    Args:
        ranks: the records of each rank.
        num_slots: slots that all files have.
    """
    first = ranks[0]
    at = np.flatnonzero(first.slots < num_slots)
    for other in ranks[1:]:
        at = at[_are_in(first, at, other)]
    return first.some(at)


def disagreed(own: SlotRecords, common: SlotRecords) -> TierBlocks:
    """Return the blocks of a rank that are not among the common ones, for `Tier.delete`."""
    at = np.flatnonzero(~np.isin(own.slots, common.slots))
    rest = own.some(at)
    hashes, _ = rest.keys(0, len(rest))
    return TierBlocks(hashes, rest.groups, None, rest.slots)


def adopt(scheduler: OffloadScheduler, records: SlotRecords) -> int:
    """Hand records to a scheduler, and return how many it took."""
    num_adopted = 0
    for begin in range(0, len(records), RECORDS_PER_PART):
        end = begin + RECORDS_PER_PART
        hashes, parents = records.keys(begin, end)
        num_adopted += scheduler.adopt_disk(
            records.slots[begin:end], hashes, records.groups[begin:end], parents
        )
    return num_adopted


def _are_in(first: SlotRecords, at: Index, other: SlotRecords) -> Bools:
    """Return which of the records `at` another rank has too."""
    if not len(other) or first.hashes.shape[1] != other.hashes.shape[1]:
        return np.zeros(len(at), np.bool_)
    order = np.argsort(other.slots, kind="stable")
    places = np.searchsorted(other.slots[order], first.slots[at])
    there = order[np.minimum(places, len(order) - 1)]
    same: Bools = other.slots[there] == first.slots[at]
    same &= other.sequences[there] == first.sequences[at]
    same &= other.groups[there] == first.groups[at]
    same &= (other.hashes[there] == first.hashes[at]).all(axis=1)
    return same
