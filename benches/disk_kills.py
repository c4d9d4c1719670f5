"""Rows of `disk_faults` with other processes or threads: kills, ranks that differ, a slow disk.

With `has_checks` the caller and the ranks do their part, too. A caller waits until a late job has
let go of its host slots, and a slot counts only if all ranks have the same write.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, Literal

import numpy as np
from benches.faulty_disk import KEYS, LATE_S, NUM, Bad, Disk, Seen
from tests.tiers.setup import blocks_of, bytes_of, key_of, leaks_of, new_arena

from kvstow.tiers.files import Buffers
from kvstow.tiers.warm import agreed

What = Literal["demote", "promote"]
OTHERS: Final = [key_of(100 + number) for number in range(NUM)]
_START_S: Final = 120.0


# -- a process that is killed ----------------------------------------------------------------------


class _Stopping(Bad):
    """File calls of which one never ends: the process is killed in it."""

    what: What | None = None

    def __init__(self, reports: Connection) -> None:
        self._reports = reports

    def read(self, file: int, buffers: Buffers, offset: int) -> int:
        if self.what == "promote":
            self._stop()
        return super().read(file, buffers, offset)

    def write(self, file: int, buffers: Buffers, offset: int) -> int:
        moved = super().write(file, buffers, offset)
        if self.what == "demote":
            self._stop()  # the data is written, and its frames are not
        return moved

    def _stop(self) -> None:
        self._reports.send("in the call")
        time.sleep(_START_S)


def _child(folder: str, what: What, reports: Connection) -> None:
    """Demote other blocks to all slots, or promote all, until the parent kills this process."""
    with new_arena() as arena:
        disk = Disk(Path(folder), arena, files=(files := _Stopping(reports)))
        for row, key in enumerate(OTHERS):
            arena.slots[row] = bytes_of(key)
        files.what = what
        if what == "demote":
            disk.tier.put(blocks_of(OTHERS, range(NUM), 2), range(NUM)).wait(_START_S)
        else:
            disk.get()


def _killed(disk: Disk, what: What) -> None:
    """Kill a process in the middle of a call, and open its file."""
    disk.tier.close()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_child, args=(str(disk.folder), what, theirs))
    child.start()
    try:
        if not ours.poll(_START_S):
            sys.exit("the process that is to be killed does not get to its call")
    finally:
        os.kill(child.pid or 0, signal.SIGKILL)
        child.join()
    disk.tier = disk.open()


def kill_in_demote(disk: Disk) -> None:
    _killed(disk, "demote")


def kill_in_promote(disk: Disk) -> None:
    _killed(disk, "promote")


def lose_frames(disk: Disk) -> None:
    """The data of other blocks reaches the disk, and their frames do not."""
    disk.files.loses_frames = True
    for row, key in enumerate(OTHERS):
        disk.arena.slots[row] = bytes_of(key)
    disk.tier.put(blocks_of(OTHERS, range(NUM), 2), range(NUM)).wait(20)
    disk.files.loses_frames = False
    disk.reopen()


# -- two ranks, and a disk that is slow ------------------------------------------------------------


def one_rank_killed(*, has_checks: bool) -> Seen:
    """Rank 1 is killed before it replaces four blocks. What do both have after the restart?"""
    half = NUM // 2
    wanted = OTHERS[:half] + KEYS[half:]
    seen = Seen()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as made, new_arena() as arena:
        ranks = []
        for number in range(2):
            folder = Path(made) / f"rank{number}"
            folder.mkdir()
            ranks.append(Disk(folder, arena))
            ranks[-1].put()
        for row, key in enumerate(OTHERS[:half]):
            arena.slots[row] = bytes_of(key)
        ranks[0].tier.put(blocks_of(OTHERS[:half], range(half), 2), range(half)).wait(20)
        for rank in ranks:
            rank.reopen()
        parts = [rank.tier.records() for rank in ranks]
        common = agreed(parts, ranks[0].tier.num_slots) if has_checks else parts[0]
        slots = [slot for slot in range(NUM) if slot in common.slots]
        hits = np.ones(len(slots), np.bool_)
        wrong = np.zeros(len(slots), np.bool_)
        for rank in ranks:
            host = np.arange(NUM, NUM + len(slots))
            ticket = rank.tier.get(blocks_of([wanted[at] for at in slots], slots), host)
            ticket.wait(20)
            hits &= ticket.ok
            wrong |= [
                (arena.slots[at] != bytes_of(wanted[slot])).any()
                for at, slot in zip(host, slots, strict=True)
            ]
        seen.hits, seen.wrong = int(hits.sum()), int((hits & wrong).sum())
        begin_s = time.perf_counter()
        for rank in ranks:
            seen.leaks += len(leaks_of(rank.tier))
            rank.tier = rank.open()
            rank.put()
        if all(rank.get() == (NUM, 0) for rank in ranks):
            seen.recover_ms = 1000 * (time.perf_counter() - begin_s)
        for rank in ranks:
            rank.tier.close()
    return seen


def slow_disk(*, has_checks: bool) -> Seen:
    """Reads come too late, and the host slots get other blocks meanwhile."""
    seen = Seen()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as made, new_arena() as arena:
        disk = Disk(Path(made), arena)
        disk.put()
        disk.files.slow_s = 2 * LATE_S
        host = np.arange(NUM, 2 * NUM)
        deadline = disk.files.now() + LATE_S
        ticket = disk.tier.get(blocks_of(KEYS, range(NUM)), host, deadline=deadline)
        ticket.wait(20)
        seen.hits = int(ticket.ok.sum())
        if has_checks:
            ticket.wait_until_ended(20)
        for row, key in zip(host, OTHERS, strict=True):
            arena.slots[row] = bytes_of(key)
        ticket.wait_until_ended(20)
        seen.wrong = sum(
            bool((arena.slots[row] != bytes_of(key)).any())
            for row, key in zip(host, OTHERS, strict=True)
        )
        disk.files.slow_s = 0.0
        begin_s = time.perf_counter()
        disk.put()
        if disk.get() == (NUM, 0):
            seen.recover_ms = 1000 * (time.perf_counter() - begin_s)
        seen.leaks = len(leaks_of(disk.tier))
    return seen


SCENES: Final[dict[str, Callable[..., Seen]]] = {
    "one rank of two killed": one_rank_killed,
    "slow disk": slow_disk,
}
