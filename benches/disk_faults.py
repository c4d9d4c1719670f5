"""What does a request see when a disk fails: on a slot file, and on vLLM's `fs` tier?

    .venv/bin/python -m benches.disk_faults [--no-vllm]

Each row writes eight blocks, injects one fault, and asks for all eight again.

- hit, miss: blocks that came back, and blocks that the request computes again.
- wrong: hits with other bytes than were written.
- leaks: slots, host slots, jobs and descriptors that a closed slot file still has in use.
- recover: milliseconds until every block is stored and read again, opening included.
- checks off: wrong blocks of the same row on a slot file that proves nothing. It shows that the
  fault was injected.

vLLM's side are the functions that its tier calls for a job of eight blocks. After an error, vLLM
keeps the blocks before the failing one.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
from benches.disk_kills import SCENES, kill_in_demote, kill_in_promote, lose_frames
from benches.faulty_disk import KEYS, LATE_S, NUM, OTHER, Bad, Disk, Seen
from tests.tiers.damage import all_proven, flip
from tests.tiers.setup import (
    SLOT_BYTES,
    blocks_of,
    bytes_of,
    key_of,
    leaks_of,
    new_arena,
)

from kvstow import KvstowError
from kvstow.tiers.files import Files
from kvstow.tiers.frame import FRAME, FRAME_BYTES, Frames, place_of
from kvstow.tiers.slot_index import HEADER_BYTES
from kvstow.tiers.slot_store import SlotStore

# -- faults of the slot file: each changes it after the first put ---------------------------------


def flip_data(disk: Disk) -> None:
    flip(disk.path(), 2 * SLOT_BYTES + 5)


def damage_index(disk: Disk) -> None:
    """One record names another block, and its request believes the record."""
    with disk.path("slots.index").open("r+b") as index:
        index.seek(HEADER_BYTES + 2 * FRAME_BYTES + place_of("hash").start)
        index.write(KEYS[3][0])
    disk.keys[2] = KEYS[3]
    disk.reopen()


def flip_header(disk: Disk) -> None:
    flip(disk.path("slots.index"), 100)
    disk.reopen()


def cut(disk: Disk) -> None:
    os.truncate(disk.path(), 4 * SLOT_BYTES)
    disk.reopen()


def swap_blocks(disk: Disk) -> None:
    """Another block's data and frame lie in the slot."""
    with disk.path().open("r+b") as data, disk.path("slots.index").open("r+b") as index:
        os.pwrite(data.fileno(), os.pread(data.fileno(), SLOT_BYTES, 0), 3 * SLOT_BYTES)
        frame = os.pread(index.fileno(), FRAME_BYTES, HEADER_BYTES)
        os.pwrite(index.fileno(), frame, HEADER_BYTES + 3 * FRAME_BYTES)
    disk.reopen()


def read_other_block(disk: Disk) -> None:
    """The accounting asks a slot for a block that another has replaced."""
    disk.arena.slots[0] = bytes_of(key_of(99))
    disk.tier.put(blocks_of([key_of(99)], [3]), [0]).wait(20)


def other_model(disk: Disk) -> None:
    disk.model = OTHER
    disk.epoch = 7
    disk.reopen()


def new_weights(disk: Disk) -> None:
    disk.tier.renew().wait(20)
    disk.epoch = 1


def lose_write(disk: Disk) -> None:
    disk.epoch, disk.files.loses_data = 1, True
    disk.put()


def tear_write(disk: Disk) -> None:
    disk.epoch, disk.files.tears_data = 1, True
    disk.put()


def fail_reads(disk: Disk) -> None:
    disk.files.read_error = errno.EIO


def fail_writes(disk: Disk) -> None:
    disk.epoch, disk.files.write_error = 1, errno.ENOSPC
    disk.put()


def hang(disk: Disk) -> None:
    disk.files.gate, disk.deadline_s = threading.Event(), LATE_S


def jump(disk: Disk) -> None:
    disk.files.shift_s, disk.deadline_s = -3600.0, 20.0


def open_twice(disk: Disk) -> None:
    disk.open()


def fill_disk(disk: Disk) -> None:
    disk.tier.close()
    with mock.patch.object(Bad, "space", lambda _self, _folder: (1 << 40, 0)):
        disk.folder = disk.folder / "new"
        disk.folder.mkdir()
        disk.open()


Fault = Callable[[Disk], None]
FAULTS: Final[dict[str, Fault]] = {
    "bit flip in the data": flip_data,
    "damage in the index": damage_index,
    "bit flip in the header": flip_header,
    "file cut short": cut,
    "block of another key on the disk": swap_blocks,
    "slot that holds another block now": read_other_block,
    "another model": other_model,
    "weights changed in place": new_weights,
    "lost write": lose_write,
    "torn write": tear_write,
    "lost index write": lose_frames,
    "killed in a demote": kill_in_demote,
    "killed in a promote": kill_in_promote,
    "reads fail (EIO)": fail_reads,
    "writes fail (ENOSPC)": fail_writes,
    "read that never returns": hang,
    "clock jumps by an hour": jump,
    "two tiers on one file": open_twice,
    "disk full at the start": fill_disk,
}
# What proves nothing with the checks off, because it can only stop the service.
NO_DAMAGE: Final = {
    "bit flip in the header", "killed in a promote", "reads fail (EIO)",
    "writes fail (ENOSPC)", "read that never returns",
    "clock jumps by an hour", "two tiers on one file", "disk full at the start",
}  # fmt: skip


def raw_frames(files: Files, index: int, num_slots: int, *_: object) -> tuple[Frames, int]:
    """Return what the index holds, sound or not."""
    frames = np.zeros(num_slots, FRAME)
    files.read(index, [frames.view(np.uint8)], HEADER_BYTES)
    return frames, 0


@contextmanager
def without_checks() -> Iterator[None]:
    """Let a slot file prove nothing: no checksum, key, generation, fingerprint, or sound frame."""

    def yes(frames: Any, _: object = None) -> Any:
        return np.asarray(frames["schema"] != 0)

    with (
        mock.patch.object(SlotStore, "_are_proven", all_proven),
        mock.patch.object(SlotStore, "_fit", staticmethod(yes)),
        mock.patch("kvstow.tiers.opening.read_frames", raw_frames),
        mock.patch("kvstow.tiers.opening._Opening._check_fit", lambda *_: None),
    ):
        yield


def on_slot_file(fault: Fault) -> Seen:
    """Return what a request sees of a slot file with this fault."""
    seen = Seen()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as made, new_arena() as arena:
        disk = Disk(Path(made), arena)
        disk.put()
        try:
            fault(disk)
            seen.hits, seen.wrong = disk.get()
        except KvstowError as error:
            seen.error = f"{type(error).__name__}, at the opening"
        begin_s = time.perf_counter()
        if disk.files.gate is not None:
            disk.files.gate.set()
        seen.leaks = len(leaks_of(disk.tier))
        disk.files, disk.mismatch, disk.deadline_s = Bad(), "reset", None
        disk.keys = list(KEYS)
        with suppress(KvstowError):
            disk.tier = disk.open()
            disk.put()
            if disk.get() == (NUM, 0):
                seen.recover_ms = 1000 * (time.perf_counter() - begin_s)
            disk.tier.close()
    return seen


# -- the same faults on the files of vLLM's tier --------------------------------------------------


def on_vllm(name: str) -> Seen | None:
    """Return what a request sees of vLLM's functions; None where the fault has no counterpart."""
    from vllm.v1.kv_offload.tiering.fs import io  # noqa: PLC0415 - slow to import

    seen, epoch = Seen(), 0
    with tempfile.TemporaryDirectory(dir="/var/tmp") as made, new_arena() as arena:
        paths = [str(Path(made) / f"{number}" / "block.bin") for number in range(NUM)]
        for row, key in enumerate(KEYS):
            arena.slots[row] = bytes_of(key)
        offsets = [at * SLOT_BYTES for at in range(NUM)]
        for path in paths:
            Path(path).parent.mkdir()
        io.batch_store_block(paths, arena.memory.data, offsets, SLOT_BYTES, True)
        if name == "bit flip in the data":
            flip(Path(paths[2]), 5)
        elif name == "file cut short":
            os.truncate(paths[4], 100)
        elif name == "block of another key on the disk":
            Path(paths[3]).write_bytes(Path(paths[0]).read_bytes())
        elif name == "weights changed in place":
            epoch = 1
        elif name == "lost write":  # the name is durable before the data
            for path in paths:
                Path(path).write_bytes(bytes(SLOT_BYTES))
        elif name == "torn write":
            for path in paths[NUM // 2 :]:
                half = Path(path).read_bytes()[: SLOT_BYTES // 2]
                Path(path).write_bytes(half + bytes(SLOT_BYTES // 2))
        elif name != "clock jumps by an hour":
            return None
        arena.memory[:] = 0
        hits = NUM
        try:
            io.batch_load_block(paths, arena.memory.data, offsets, SLOT_BYTES, True)
        except OSError as error:
            hits = getattr(error, "num_succeeded", 0)
        seen.hits = hits
        rows = arena.slots[:hits]
        seen.wrong = sum(
            bool((row != bytes_of(key, epoch)).any())
            for row, key in zip(rows, KEYS[:hits], strict=True)
        )
    return seen


def table(*, has_vllm: bool) -> tuple[list[tuple[str, ...]], bool]:
    """Return the rows, and whether kvstow returned a wrong block or leaked in any."""
    rows: list[tuple[str, ...]] = []
    is_bad = False
    runs: dict[str, Callable[..., Seen]] = {
        name: lambda fault=fault, **_: on_slot_file(fault) for name, fault in FAULTS.items()
    }
    for name, run in (runs | SCENES).items():
        seen = run(has_checks=True)
        with without_checks():
            control = run(has_checks=False) if name not in NO_DAMAGE else None
        is_bad |= bool(seen.wrong or seen.leaks or (control is not None and not control.wrong))
        theirs = on_vllm(name) if has_vllm else None
        rows.append(
            (
                name,
                seen.text(),
                str(seen.wrong),
                str(seen.leaks),
                "-" if seen.recover_ms is None else f"{seen.recover_ms:.0f} ms",
                "-" if control is None else str(control.wrong),
                "-" if theirs is None else theirs.text(),
                "-" if theirs is None else str(theirs.wrong),
            )
        )
    return rows, is_bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--no-vllm", action="store_true", help="leave vLLM's columns out")
    rows, is_bad = table(has_vllm=not parser.parse_args().no_vllm)
    head = ("fault", "kvstow", "wrong", "leaks", "recover", "checks off", "vLLM fs", "wrong")
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, tuple("-" * width for width in widths), *rows):
        print(
            "| "
            + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True))
            + " |"
        )
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
