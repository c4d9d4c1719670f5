"""A random mixture of jobs, faults and damage, after which no block may have wrong bytes.

The model knows one thing: the bytes that a block of a key has under the present weights. A tier may
lose any block. A block that it returns must have these bytes.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tests.tiers.faults import Faulty
from tests.tiers.setup import (
    MODEL,
    NUM_SLOTS,
    SLOT_BYTES,
    Key,
    blocks_of,
    bytes_of,
    key_of,
    leaks_of,
    new_arena,
    slot_file,
    stats_after,
)

from kvstow import ConfigError
from kvstow.tiers import SlotTier, TierTicket
from kvstow.transfer import TransferTimeout

NUM_HOST = 2 * NUM_SLOTS
NUM_KEYS = 48


@dataclass(slots=True)
class Outcome:
    """What a mixture has seen.

    Attributes:
        num_right: blocks that came back with their bytes.
        num_wrong: blocks that came back with others.
        faults: how often each fault was injected.
    """

    num_right: int = 0
    num_wrong: int = 0
    faults: dict[str, int] = field(default_factory=dict)

    def count(self, fault: str) -> None:
        self.faults[fault] = self.faults.get(fault, 0) + 1


@dataclass(slots=True)
class _Job:
    ticket: TierTicket
    keys: list[Key]
    slots: list[int]
    host: list[int]
    epoch: int


class Mixture:
    """One seed's run on a slot file."""

    def __init__(self, seed: int, folder: Path, *, rate: float = 0.03) -> None:
        self.random = random.Random(seed)
        self.folder = folder
        self.files = Faulty(seed, rate)
        self.arena = new_arena(NUM_HOST)
        self.outcome = Outcome()
        self.epoch = 0
        self.held: dict[int, Key] = {}  # as the accounting believes
        self.jobs: list[_Job] = []  # gets and puts that may still use their slots
        self.given_up: list[_Job] = []
        self._start()

    def run(self, num_steps: int) -> Outcome:
        steps: list[Callable[[], None]] = [
            *[self.put] * 8, *[self.get] * 8, *[self.damage] * 2, self.delete, self.renew,
            self.reopen, self.crash, self.jump,
        ]  # fmt: skip
        for _ in range(num_steps):
            self.random.choice(steps)()
            self.settle(max_left=self.random.randrange(6))
        self.files.rate = 0.0
        self.reopen()
        for _ in range(4):
            self.get()
        self.settle()
        self._end()
        self.arena.close()
        for fault, number in self.files.faults.items():
            self.outcome.faults[fault] = self.outcome.faults.get(fault, 0) + number
        return self.outcome

    # -- steps -----------------------------------------------------------------------------------

    def put(self) -> None:
        slots, host = self._some(), self._some_host()
        num = min(len(slots), len(host))
        slots, host = slots[:num], host[:num]
        keys = [self._key() for _ in slots]
        for key, row in zip(keys, host, strict=True):
            self.arena.slots[row] = bytes_of(key, self.epoch)
        ticket = self.tier.put(blocks_of(keys, slots), host, deadline=self._deadline())
        for slot in slots:
            self.held.pop(slot, None)
        self.jobs.append(_Job(ticket, keys, slots, host, -1))

    def get(self) -> None:
        slots, host = self._some(), self._some_host()
        num = min(len(slots), len(host))
        slots, host = slots[:num], host[:num]
        # Mostly what the accounting believes, and sometimes anything.
        keys = [
            self.held[slot] if slot in self.held and self.random.random() < 0.9 else self._key()
            for slot in slots
        ]
        ticket = self.tier.get(blocks_of(keys, slots), host, deadline=self._deadline())
        self.jobs.append(_Job(ticket, keys, slots, host, self.epoch))

    def delete(self) -> None:
        slots = self._some()
        keys = [self.held.pop(slot, self._key()) for slot in slots]
        self.jobs.append(_Job(self.tier.delete(blocks_of(keys, slots)), keys, slots, [], -1))

    def renew(self) -> None:
        """Change the weights in place. The accounting fences all jobs first, and then waits."""
        self.settle()
        ticket = self.tier.renew()
        self.epoch += 1
        self.held.clear()
        self._wait(ticket)
        if not ticket.has_ended:
            self.given_up.append(_Job(ticket, [], [], [], -1))

    def reopen(self) -> None:
        """End the process in order, and start again."""
        self.settle()
        self._end()
        self._start()

    def crash(self) -> None:
        """Kill the process at some moment: go on with a copy of the files as they are now."""
        for name in ("slots.index", "slots"):
            shutil.copy(self.folder / name, self.folder / f"{name}.copy")
        self.outcome.count("crash")
        self.settle()
        self._end()
        for name in ("slots.index", "slots"):
            os.replace(self.folder / f"{name}.copy", self.folder / name)
        self._start()

    def damage(self) -> None:
        """Change a file behind the tier's back."""
        kinds = ["flip data", "flip index", "flip header", "cut data", "cut index", "move"]
        kind = self.random.choice(kinds)
        name = "slots.index" if "index" in kind or "header" in kind else "slots"
        with (self.folder / name).open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            if kind.startswith("cut"):
                file.truncate(self.random.randint(min(size, 4096), size))
            elif kind == "move":  # data and frame of one slot go to another
                self._move(file.fileno())
            elif size > 4096:
                low, high = (0, 4096) if "header" in kind else (4096, size)
                at = self.random.randrange(0 if name == "slots" else low, high)
                file.seek(at)
                found = file.read(1)[0]
                file.seek(at)
                file.write(bytes([found ^ 1 << self.random.randrange(8)]))
        self.outcome.count(kind)

    def jump(self) -> None:
        self.files.jump(self.random.choice([-3600.0, 3600.0]))
        self.outcome.count("clock")

    # -- parts -----------------------------------------------------------------------------------

    def settle(self, max_left: int = 0) -> None:
        """Check the answers of the oldest jobs, until so many are left."""
        while len(self.jobs) > max_left:
            job = self.jobs.pop(self.random.randrange(len(self.jobs)))
            self._wait(job.ticket)
            if not job.ticket.has_ended:
                self.given_up.append(job)
            if not job.ticket.poll():
                for slot in job.slots:
                    self.held.pop(slot, None)
                continue
            ok = job.ticket.ok
            for is_ok, key, slot, host in zip(ok, job.keys, job.slots, job.host, strict=False):
                if not is_ok:
                    self.held.pop(slot, None)
                elif job.epoch < 0:
                    self.held[slot] = key
                elif np.array_equal(self.arena.slots[host], bytes_of(key, job.epoch)):
                    self.outcome.num_right += 1
                else:
                    self.outcome.num_wrong += 1

    def _wait(self, ticket: TierTicket) -> None:
        """Wait for an answer, but not for one that hangs."""
        while not ticket.poll() and not self.tier.stats().quarantined_bytes:
            with suppress(TransferTimeout):
                ticket.wait(0.02)

    def _end(self) -> None:
        """Close the tier, and check that nothing leaks."""
        self.files.release()
        self.tier.close()
        stats_after(self.tier, *(job.ticket for job in self.given_up))
        assert not leaks_of(self.tier)
        self.given_up.clear()

    def _start(self) -> None:
        """Open the file in a new process, which has the weights of the fingerprint."""
        self.epoch = 0
        self.tier = self._open()
        self.files.hang_again()  # an opening waits for its calls
        records = self.tier.records()
        hashes, _ = records.keys(0, len(records))
        keys = zip(hashes, records.groups.tolist(), strict=True)
        self.held = dict(zip(records.slots.tolist(), keys, strict=True))

    def _open(self) -> SlotTier:
        file = slot_file(
            self.folder,
            on_mismatch="reset",
            stuck_after_s=0.05,
            num_threads=self.random.choice([1, 2]),
            max_in_flight_bytes=self.random.choice([2, 4, 16]) * SLOT_BYTES,
            max_quarantined_bytes=self.random.choice([2, 64]) * SLOT_BYTES,
        )
        for _ in range(50):
            try:
                return file.open(self.arena, MODEL, files=self.files)
            except ConfigError as error:
                if "not a slot file" in str(error):  # the header's first bytes are damaged
                    for name in ("slots", "slots.index"):
                        (self.folder / name).unlink(missing_ok=True)
        raise AssertionError("it never opens")

    def _move(self, data: int) -> None:
        first, second = self.random.sample(range(NUM_SLOTS), 2)
        block = os.pread(data, SLOT_BYTES, first * SLOT_BYTES)
        os.pwrite(data, block, second * SLOT_BYTES)
        with (self.folder / "slots.index").open("r+b") as index:
            frame = os.pread(index.fileno(), 128, 4096 + 128 * first)
            os.pwrite(index.fileno(), frame, 4096 + 128 * second)

    def _key(self) -> Key:
        return key_of(self.random.randrange(NUM_KEYS), self.random.randrange(2))

    def _some(self) -> list[int]:
        """Return slots that no job uses, as runs or apart."""
        used = {slot for job in self.jobs for slot in job.slots}
        free = [slot for slot in range(NUM_SLOTS) if slot not in used]
        num = min(len(free), self.random.choice([1, 2, 5, 12]))
        if self.random.random() < 0.5 and free:
            begin = self.random.randrange(len(free))
            return free[begin : begin + num]
        return self._sample(free, num)

    def _sample(self, places: list[int], num: int) -> list[int]:
        return self.random.sample(places, min(num, len(places)))

    def _some_host(self) -> list[int]:
        """Return host slots that no job uses; those of late jobs stay reserved."""
        self.given_up = [job for job in self.given_up if not job.ticket.has_ended]
        used = {slot for job in self.jobs + self.given_up for slot in job.host}
        return self._sample([at for at in range(NUM_HOST) if at not in used], 12)

    def _deadline(self) -> float | None:
        if self.random.random() < 0.8:
            return None
        return self.files.now() + self.random.choice([-1.0, 0.0005, 0.01, 60.0])
