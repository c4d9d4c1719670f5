"""What the tests of tiers share: an arena, blocks with known bytes, and the tiers under test."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
from tests.interrupts import is_interrupted
from tests.tiers.memory import MemoryTier
from tests.tiers.memory_store import MemoryStore

from kvstow.tiers import (
    BothTier,
    Fingerprint,
    SlotFile,
    SlotTier,
    Tier,
    TierBlocks,
    TierStats,
    TierTicket,
)
from kvstow.tiers.files import Files
from kvstow.transfer import HostArena

Bytes: TypeAlias = npt.NDArray[np.uint8]
Key: TypeAlias = tuple[bytes, int]

LONG_S: Final = 20.0
NUM_SLOTS: Final = 32
SLOT_BYTES: Final = 4096
MODEL: Final = Fingerprint({"model": "a", "rank": 0, "world_size": 1})


class Here(Files):
    """The system's file calls, without its waits for the disk, and on any file system."""

    def sync(self, file: int) -> None:
        """Assume that the power stays on."""

    def file_system(self, folder: str) -> str:
        return "ext4"


@contextmanager
def random_arena(num_slots: int, slot_bytes: int) -> Iterator[HostArena]:
    """Open host memory with other bytes in each slot."""
    with HostArena(num_slots, slot_bytes) as arena:
        shape = (num_slots, slot_bytes)
        arena.slots[:] = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
        yield arena


def digest_of(number: int) -> bytes:
    """Return a hash as engines make it: any bytes, and no text."""
    return hashlib.sha256(number.to_bytes(4, "little")).digest()


def key_of(number: int, group: int = 0) -> Key:
    return digest_of(number), group


def bytes_of(key: Key, epoch: int = 0, num_bytes: int = SLOT_BYTES) -> Bytes:
    """Return the bytes of a block under the weights of an epoch."""
    seed = int.from_bytes(key[0][:8], "little") + 1000 * key[1] + epoch
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)


def blocks_of(keys: Sequence[Key], slots: Sequence[int], sequence: int = 1) -> TierBlocks:
    parents = [None, *(digest for digest, _ in keys[:-1])]
    groups = np.array([group for _, group in keys], np.uint32)
    digests = [digest for digest, _ in keys]
    return TierBlocks(digests, groups, parents[: len(keys)], np.array(slots, np.int64), sequence)


def blocks(*numbers: int, group: int = 0) -> TierBlocks:
    """Return blocks of a shared store, which has no slots."""
    return TierBlocks([digest_of(number) for number in numbers], [group] * len(numbers))


def new_arena(num_slots: int = 2 * NUM_SLOTS, slots_per_run: int = 1) -> HostArena:
    return HostArena(num_slots, SLOT_BYTES // slots_per_run, slots_per_run=slots_per_run)


def slot_file(path: Path, **options: object) -> SlotFile:
    defaults: dict[str, object] = {"max_bytes": SlotFile.bytes_for(NUM_SLOTS, SLOT_BYTES)}
    return SlotFile(path / "slots", **(defaults | options))  # type: ignore[arg-type]


def open_file(
    path: Path,
    arena: HostArena,
    *,
    model: Fingerprint = MODEL,
    files: Files | None = None,
    **options: object,
) -> SlotTier:
    return slot_file(path, **options).open(arena, model, files=files or Here())


def is_open_interrupted(
    path: Path,
    arena: HostArena,
    line: int,
    sources: str,
    *,
    skipped: tuple[str, ...] = ("with ", "try:"),
) -> bool:
    """Open a file and close it, but interrupt the opening at a line; see `is_interrupted`."""
    opened: list[SlotTier] = []
    is_cut_short = is_interrupted(
        lambda: opened.append(open_file(path, arena)), line, sources, skipped=skipped
    )
    for tier in opened:
        tier.close()
    return is_cut_short


Open: TypeAlias = Callable[[Path, HostArena], Tier]
KINDS: Final[dict[str, Open]] = {
    "memory": lambda _, arena: MemoryTier(arena, NUM_SLOTS),
    "slot_file": open_file,
    "both": lambda path, arena: BothTier(open_file(path, arena), MemoryStore(arena, keeps=False)),
}


def rows_of(tier: Tier) -> Bytes:
    """Return the host slots of a tier, one a row."""
    return tier.arena.memory.reshape(tier.num_host_slots, tier.slot_bytes)


def wait_until(holds: Callable[[], object], what: str) -> None:
    """Wait until `holds` is true. A failure says `what` is wrong."""
    until_s = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < until_s, what
        time.sleep(0.001)


def wait_until_busy(tier: Tier) -> None:
    """Wait until a thread of a slot file has begun a call."""
    wait_until(lambda: tier.stats().in_flight_bytes, "no thread begins")


def answered(ticket: TierTicket) -> TierTicket:
    """Return a ticket that has an answer."""
    ticket.wait(LONG_S)
    return ticket


def stats_after(tier: Tier, *tickets: TierTicket) -> TierStats:
    """Return what the tier counted once these jobs have ended, late ones too."""
    wait_until(lambda: all(ticket.has_ended for ticket in tickets), "a job does not end")
    wait_until(lambda: not tier.stats().in_flight_bytes, "a call does not end")
    return tier.stats()


def leaks_of(tier: SlotTier) -> list[str]:
    """Close a slot file whose calls have all returned, and return what it still has in use."""
    tier.close()
    store = tier._store
    in_use = {
        "a descriptor": max(store._calls._data, store._calls._index) >= 0,
        "a job": bool(store._jobs),
        "a slot": store._slots_in_use._uses.any(),
        "a host slot": store._host_in_use._uses.any(),
    }
    return [name for name, leaks in in_use.items() if leaks]


def put(
    tier: Tier, keys: Sequence[Key], slots: Sequence[int], epoch: int = 0, sequence: int = 1
) -> list[bool]:
    """Write blocks from host slots 0 and up, and return the answer."""
    rows = rows_of(tier)
    for at, key in enumerate(keys):
        rows[at] = bytes_of(key, epoch, tier.slot_bytes)
    ticket = answered(tier.put(blocks_of(keys, slots, sequence), range(len(keys))))
    return [bool(one) for one in ticket.ok]


def get(tier: Tier, keys: Sequence[Key], slots: Sequence[int], epoch: int = 0) -> list[bool]:
    """Read blocks into the last host slots, compare their bytes, and return the answer."""
    rows = rows_of(tier)
    host = range(tier.num_host_slots - len(keys), tier.num_host_slots)
    rows[host.start :] = 0
    ticket = answered(tier.get(blocks_of(keys, slots), host))
    ok = [bool(one) for one in ticket.ok]
    for is_ok, key, row in zip(ok, keys, rows[host.start :], strict=True):
        if is_ok:
            np.testing.assert_array_equal(row, bytes_of(key, epoch, tier.slot_bytes))
    return ok
