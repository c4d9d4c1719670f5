"""The naive pool for tests of the binding. Like `model.rs`, it has a list for the queue, and scans.

Only this model covers what Python sees: hashes as bytes, events with their parents and tokens, and
errors. It raises `Refused` and changes nothing where the real pool must raise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

from kvstow import AllBlocksCleared, BlockRemoved, BlockStored

Key: TypeAlias = tuple[bytes, int]
"""A hash and its group."""
Happening: TypeAlias = tuple[object, ...]
"""An event: a stored key with its parent and tokens, a removed key, or "cleared"."""


class Refused(Exception):
    """The real pool must raise an error here."""


class ModelPool:
    def __init__(self, num_blocks: int) -> None:
        self.refs = [0] * num_blocks
        self.pins = [0] * num_blocks
        self.queue = list(range(1, num_blocks))
        self.held: dict[int, Key] = {}  # in order of publication
        self.events: list[Happening] = []

    def copy(self) -> ModelPool:
        twin = ModelPool(len(self.refs))
        twin.refs, twin.pins, twin.queue = self.refs[:], self.pins[:], self.queue[:]
        twin.held = dict(self.held)
        return twin

    @property
    def num_free(self) -> int:
        return sum(self.pins[id] == 0 for id in self.queue)

    def check_ids(self, ids: Sequence[int]) -> None:
        if not all(0 <= id < len(self.refs) for id in ids):
            raise Refused

    def allocate(self, n: int) -> list[int]:
        if n > self.num_free:
            raise Refused
        allocated = [id for id in self.queue if self.pins[id] == 0][:n]
        self.queue = [id for id in self.queue if id not in allocated]
        self.evict(allocated)
        for id in allocated:
            self.refs[id] = 1
        return allocated

    def touch(self, ids: Sequence[int]) -> None:
        self.check_ids(ids)
        for id in filter(None, ids):
            self.refs[id] += 1
        self.queue = [id for id in self.queue if self.refs[id] == 0]

    def free(self, ids: Sequence[int]) -> None:
        self._decrement(self.refs, ids)
        # The first id is evicted first. The last occurrence of a repeated id decides its place.
        last = [id for at, id in enumerate(ids) if id not in ids[at + 1 :]]
        gone = [id for id in last if id and self.refs[id] == 0]
        cached = [id for id in gone if id in self.held]
        self.queue = [id for id in gone if id not in self.held] + self.queue + cached

    def pin(self, ids: Sequence[int]) -> None:
        self.check_ids(ids)
        for id in filter(None, ids):
            self.pins[id] += 1

    def unpin(self, ids: Sequence[int]) -> None:
        self._decrement(self.pins, ids)

    def _decrement(self, counts: list[int], ids: Sequence[int]) -> None:
        self.check_ids(ids)
        given = Counter(filter(None, ids))
        if any(num > counts[id] for id, num in given.items()):
            raise Refused
        for id, num in given.items():
            counts[id] -= num

    def cache(self, ids: Sequence[int], hashes: Sequence[bytes], group: int) -> None:
        self.check_ids(ids)
        after = dict(self.held)
        for id, key in zip(ids, ((hash, group) for hash in hashes), strict=False):
            if id == 0 or self.refs[id] == 0 or after.setdefault(id, key) != key:
                raise Refused
        if len(ids) != len(hashes):
            raise Refused
        for at, (id, hash) in enumerate(zip(ids, hashes, strict=True)):
            self.publish(id, (hash, group), hashes[at - 1] if at else None)

    def publish(self, id: int, key: Key, parent: bytes | None, *context: object) -> None:
        if id not in self.held:
            if key not in self.held.values():
                self.events.append(("stored", *key, parent, *context))
            self.held[id] = key

    def lookup(self, hashes: Sequence[bytes], group: int) -> list[int]:
        found = []
        for hash in hashes:
            holders = [id for id, key in self.held.items() if key == (hash, group)]
            if not holders:
                break
            found.append(holders[0])
        return found

    def evict(self, ids: Sequence[int]) -> None:
        self.check_ids(ids)
        for id in ids:
            key = self.held.pop(id, None)
            if key is not None and key not in self.held.values():
                self.events.append(("removed", *key))

    def reset(self) -> bool:
        if self.num_free < len(self.refs) - 1:
            return False
        self.held.clear()
        self.events.append(("cleared",))
        return True


def flat(events: Sequence[BlockStored | BlockRemoved | AllBlocksCleared]) -> list[Happening]:
    """Return the events split into events of a single key."""
    happened: list[Happening] = []
    for event in events:
        if isinstance(event, BlockStored):
            parent, tokens = event.parent_block_hash, event.token_ids or []
            for at, hash in enumerate(event.block_hashes):
                size = len(tokens) // len(event.block_hashes)
                happened.append(
                    ("stored", hash, event.group, parent, *tokens[at * size : (at + 1) * size])
                )
                parent = hash
        elif isinstance(event, BlockRemoved):
            happened += [("removed", hash, event.group) for hash in event.block_hashes]
        else:
            happened.append(("cleared",))
    return happened
