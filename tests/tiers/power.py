"""A loss of power: each sector that was written since the last sync may be old, each name gone.

Each change of the weights of a model begins a new epoch of it. A block must have the bytes that its
key has under the epoch of the process that reads it. So a reset that a loss of power undoes shows
as a wrong block.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
from tests.tiers.mixture import NUM_KEYS
from tests.tiers.setup import (
    LONG_S,
    MODEL,
    NUM_SLOTS,
    SLOT_BYTES,
    Bytes,
    Here,
    Key,
    blocks_of,
    bytes_of,
    key_of,
    new_arena,
)

from kvstow import ConfigError
from kvstow.tiers import Fingerprint, SlotFile, SlotTier, TierTicket
from kvstow.tiers.files import Buffers

SECTOR_BYTES: Final = 512
OTHER_MODEL: Final = Fingerprint({"model": "b", "rank": 0, "world_size": 1})
Image = dict[str, bytes]


class _File:
    """What a disk has of one file, and what only the memory of the machine has.

    Attributes:
        durable: the bytes at the last sync.
        writes: (offset, bytes) since then, oldest first; None for the bytes of a new size.
    """

    def __init__(self, durable: bytes) -> None:
        self.durable = durable
        self.writes: list[tuple[int, bytes | None]] = []

    def now(self) -> bytes:
        found = bytearray(self.durable)
        for offset, data in self.writes:
            _apply(found, offset, data)
        return bytes(found)

    def after(self, chance: random.Random) -> bytes:
        """Return the bytes after a loss of power."""
        keep = chance.choice([0.0, 0.5, 0.95, 1.0])
        found = bytearray(self.durable)
        for offset, data in self.writes:
            if data is None:  # a journal keeps the order of sizes; losing one loses no sync
                _apply(found, offset, None)
            elif chance.random() < keep:
                _apply(found, offset, data)
            elif chance.random() < 0.5:
                for at in range(0, len(data), SECTOR_BYTES):
                    if chance.random() < 0.5:
                        _apply(found, offset + at, data[at : at + SECTOR_BYTES])
        return bytes(found)


def _apply(found: bytearray, offset: int, data: bytes | None) -> None:
    if data is None:
        del found[offset:]
        found.extend(bytes(offset - len(found)))
        return
    found.extend(bytes(max(0, offset + len(data) - len(found))))
    found[offset : offset + len(data)] = data


class Volatile(Here):
    """File calls of a machine whose power fails once, at call number `cut_at` that writes.

    Attributes:
        image: the files after the loss of power; None before it.
        epoch: the weights, which the test sets.
        is_renewed: whether a reset was confirmed, which the test sets.
        at_cut: both, at the loss of power.
    """

    def __init__(self, folder: Path, chance: random.Random, cut_at: int) -> None:
        self.image: Image | None = None
        self.epoch, self.is_renewed = 0, False
        self.at_cut = (0, False)
        self._chance = chance
        self._left = cut_at
        self._lock = threading.RLock()
        self._names: dict[int, str] = {}
        self._contents = {str(it): _File(it.read_bytes()) for it in folder.iterdir()}
        self._durable_names = set(self._contents)

    def open(self, path: str, flags: int) -> int:
        with self._lock:
            file = super().open(path, flags)
            self._names[file] = path
            if not os.path.isdir(path):
                self._contents.setdefault(path, _File(b""))
            return file

    def write(self, file: int, buffers: Buffers, offset: int) -> int:
        with self._lock:
            data = b"".join(buffer.tobytes() for buffer in buffers)
            self._contents[self._names[file]].writes.append((offset, data))
            self._count()
            return super().write(file, buffers, offset)

    def allocate(self, file: int, num_bytes: int) -> None:
        with self._lock:
            found = self._contents[self._names[file]]
            if len(found.now()) < num_bytes:
                found.writes.append((num_bytes, None))
            self._count()
            super().allocate(file, num_bytes)

    def truncate(self, file: int, num_bytes: int) -> None:
        with self._lock:
            self._contents[self._names[file]].writes.append((num_bytes, None))
            self._count()
            super().truncate(file, num_bytes)

    def remove(self, path: str) -> None:
        with self._lock:
            super().remove(path)
            del self._contents[path]

    def sync(self, file: int) -> None:
        with self._lock:
            self._count()
            name = self._names[file]
            if os.path.isdir(name):
                self._durable_names = set(self._contents)
            else:
                self._contents[name] = _File(self._contents[name].now())

    def cut(self) -> None:
        """Lose the power now, if it is not lost yet."""
        with self._lock:
            if self.image is None:
                self.at_cut = (self.epoch, self.is_renewed)
                self.image = {
                    name: found.after(self._chance)
                    for name, found in self._contents.items()
                    if name in self._durable_names or self._chance.random() < 0.5
                }

    def _count(self) -> None:
        self._left -= 1
        if self._left <= 0:
            self.cut()


class PowerLoss:
    """One seed's processes, each of which ends by a loss of power.

    Attributes:
        num_right: blocks that came back with the bytes of their key under the present weights.
        num_wrong: blocks that came back with others.
        num_renewed: losses of power after a confirmed reset.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        self.num_right = self.num_wrong = self.num_renewed = 0
        self._chance = random.Random(seed)
        self._folder = folder
        self._arena = new_arena()
        self._model, self._epoch = MODEL, 0
        self._other, self._other_epoch = OTHER_MODEL, 1000

    def run(self, num_processes: int) -> None:
        for _ in range(num_processes):
            self._process()
        self._arena.close()

    def _process(self) -> None:
        if self._chance.random() < 0.15:
            self._model, self._other = self._other, self._model
            self._epoch, self._other_epoch = self._other_epoch, self._epoch
        cut_at = self._chance.choice([self._chance.randrange(1, 12), self._chance.randrange(1, 80)])
        self._files = files = Volatile(self._folder, self._chance, cut_at)
        files.epoch = self._epoch
        tier = self._open()
        if tier is not None:
            self._held: dict[int, Key] = {}
            self._check_records(tier)
            steps: list[Callable[[SlotTier], None]] = [
                *[self._put] * 12, *[self._get] * 4, *[self._delete] * 2, self._renew,
            ]  # fmt: skip
            for _ in range(25):
                if files.image is not None:
                    break
                self._chance.choice(steps)(tier)
            files.cut()
            tier.close()
        files.cut()
        assert files.image is not None
        for name in self._folder.iterdir():
            name.unlink()
        for path, content in files.image.items():
            Path(path).write_bytes(content)
        self._epoch, was_renewed = files.at_cut
        # It is unknown whether the weights of a renewed generation come back.
        self._epoch += was_renewed
        self.num_renewed += was_renewed

    def _open(self) -> SlotTier | None:
        num_slots = self._chance.choice([NUM_SLOTS, NUM_SLOTS, NUM_SLOTS // 2])
        file = SlotFile(
            self._folder / "slots",
            SlotFile.bytes_for(num_slots, SLOT_BYTES),
            on_mismatch="reset",
            num_threads=2,
        )
        try:
            return file.open(self._arena, self._model, files=self._files)
        except ConfigError as error:
            # The names of the files are lost, or the first bytes. A user removes what is left.
            assert "not a slot file" in str(error), error
            for path in self._folder.iterdir():
                self._files.remove(str(path))
            self._files.cut()
            return None

    # -- steps -----------------------------------------------------------------------------------

    def _check_records(self, tier: SlotTier) -> None:
        """Read all that is warm."""
        records = tier.records()
        hashes, _ = records.keys(0, len(records))
        keys = list(zip(hashes, records.groups.tolist(), strict=True))
        self._read(tier, keys, records.slots.tolist())

    def _put(self, tier: SlotTier) -> None:
        slots = self._some(tier)
        keys = [key_of(self._chance.randrange(NUM_KEYS)) for _ in slots]
        for row, key in enumerate(keys):
            self._arena.slots[row] = bytes_of(key, self._files.epoch)
        done = _waited(tier.put(blocks_of(keys, slots), range(len(slots)))).ok
        for slot, key, is_ok in zip(slots, keys, done, strict=True):
            self._held.pop(slot, None)
            if is_ok:
                self._held[slot] = key

    def _get(self, tier: SlotTier) -> None:
        slots = [slot for slot in self._some(tier) if slot in self._held]
        self._read(tier, [self._held[slot] for slot in slots], slots)

    def _delete(self, tier: SlotTier) -> None:
        slots = [slot for slot in self._some(tier) if slot in self._held]
        _waited(tier.delete(blocks_of([self._held.pop(slot) for slot in slots], slots)))

    def _renew(self, tier: SlotTier) -> None:
        ticket = _waited(tier.renew())
        assert ticket.ok.all()
        with self._files._lock:
            self._held.clear()
            self._files.epoch += 1
            self._files.is_renewed = True

    def _read(self, tier: SlotTier, keys: list[Key], slots: list[int]) -> None:
        ok = _waited(tier.get(blocks_of(keys, slots), range(len(slots)))).ok
        for row in np.flatnonzero(ok).tolist():
            expected: Bytes = bytes_of(keys[row], self._files.epoch)
            if np.array_equal(self._arena.slots[row], expected):
                self.num_right += 1
                self._held[slots[row]] = keys[row]
            else:
                self.num_wrong += 1

    def _some(self, tier: SlotTier) -> list[int]:
        num = min(tier.num_slots, self._chance.choice([1, 3, 8]))
        begin = self._chance.randrange(tier.num_slots - num + 1)
        return list(range(begin, begin + num))


def _waited(ticket: TierTicket) -> TierTicket:
    ticket.wait(LONG_S)
    return ticket
