"""In which order chunks leave `KVStowDisk`: those that were used longest ago go first.

vLLM finds no chunk without those before it in its prompt. So the end of a prompt goes before its
beginning. The frame of a chunk names the chunk before it, so a restarted server knows the order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeAlias

from vllm.v1.kv_offload.base import ReqContext, get_offload_group_idx, make_offload_key

from kvstow.tiers import SlotRecords

# vLLM's name for a chunk: the hash of its last block, and the group.
Key: TypeAlias = bytes


def ends_of(request: ReqContext) -> dict[Key, int]:
    """Return where each chunk of a request ends in it, if this vLLM says that."""
    return getattr(request, "_offload_key_positions", {})


def chunks_before(keys: Sequence[Key], ends: dict[Key, int]) -> list[Key | None]:
    """Return for each chunk of a request the one before it in its group; None if none is known.

    Args:
        keys: the chunks, by their ends.
        ends: where each chunk of the request ends.
    """
    lowest: dict[int, int] = {}
    for key in keys:
        lowest.setdefault(get_offload_group_idx(key), ends.get(key, 0))
    before: dict[Key, Key] = {}
    later: dict[int, Key] = {}
    # vLLM notes the chunks of a group in their order, and new ones are among the last.
    for key in reversed(ends):
        group, end = get_offload_group_idx(key), ends[key]
        if group not in lowest or (group in later and ends[later[group]] <= end):
            continue
        if group in later:
            before[later[group]] = key
        later[group] = key
        if end < lowest[group]:
            del lowest[group]
            if not lowest:
                break
    return [before.get(key) for key in keys]


def adopted(records: SlotRecords) -> OrderedDict[Key, int]:
    """Return the slot of each chunk that a file held, in the order in which chunks go.

    A chunk was used when it was written, or when one that follows it was.
    """
    hashes, parents = records.keys(0, len(records))
    slots: dict[Key, int] = {}
    writes: dict[Key, tuple[int, Key | None]] = {}
    groups, sequences = records.groups.tolist(), records.sequences.tolist()
    columns = zip(hashes, parents, groups, sequences, records.slots.tolist(), strict=True)
    for digest, parent, group, sequence, slot in columns:  # the oldest write first
        key = make_offload_key(digest, group)
        writes.pop(key, None)  # so that the newest write of a key counts, in its place
        writes[key] = sequence, None if parent is None else make_offload_key(parent, group)
        slots[key] = slot
    # By chunk, the last use, and a number that is smaller for later chunks of a prompt.
    places: dict[Key, tuple[int, int]] = {}
    for key in reversed(writes):
        chain: list[Key] = []
        last_use, before = writes[key][0], key
        while before in writes and before not in places:
            places[before] = last_use, 0
            chain.append(before)
            before = writes[before][1] or b""
        _, depth = places.get(before, (0, 0))
        for each in reversed(chain):
            depth -= 1
            places[each] = last_use, depth
    in_order = sorted(reversed(writes), key=places.__getitem__)
    return OrderedDict((key, slots[key]) for key in in_order)
