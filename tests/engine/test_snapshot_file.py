"""Snapshot files: a reader gets a whole file or refuses it, even if its writer was killed."""

import errno
import fcntl
import gc
import json
import mmap
import os
import random
import signal
import stat
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engine.sleep_world import WHO, World, prompt, put_to_sleep
from tests.interrupts import is_interrupted

from kvstow import SnapshotError
from kvstow.engine.snapshot_file import SnapshotFile
from kvstow.transfer import READY

NUM_KILLS, NUM_KILLS_PER_PARENT = 100, 50
PAGE = 4096


def refusal(path: Path) -> str | None:
    """Return the error of a restart from a file, or None if it succeeds and all bytes are right."""
    it = World()
    try:
        it.engine.restart(path, after=READY, requests=True, **WHO)
    except SnapshotError as error:
        assert it.engine._state.is_new
        assert it.engine.ledger.num_requests == 0
        it.run("a", prompt(1, 9))
        it.check()
        return str(error)
    finally:
        it.engine.close()
    return None


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "image"
    put_to_sleep(path)
    assert refusal(path) is None
    return path


def test_only_its_owner_may_read_the_file(image: Path) -> None:
    assert stat.S_IMODE(image.stat().st_mode) == 0o600


def test_file_that_was_cut_off_anywhere_is_refused(image: Path) -> None:
    whole = image.read_bytes()
    assert len(whole) > 60 * PAGE
    for size in [*range(0, len(whole), PAGE), 19, 20, 21, len(whole) - 1]:
        image.write_bytes(whole[:size])
        assert refusal(image) is not None, f"{size} bytes"
    image.write_bytes(whole + b"\0")
    assert "bytes, " in str(refusal(image))


def test_change_of_any_byte_of_the_header_is_refused(image: Path) -> None:
    whole = image.read_bytes()
    [num_bytes] = np.frombuffer(whole, "<u4", count=1, offset=12).tolist()
    assert json.loads(whole[20 : 20 + num_bytes])["identity"] == WHO["identity"]
    for at in range(20 + num_bytes):
        with image.open("r+b") as file:
            for byte in whole[at] ^ 1, whole[at] ^ 0x80:
                file.seek(at)
                file.write(bytes([byte]))
                file.flush()
                with pytest.raises(SnapshotError):
                    SnapshotFile(image)
            file.seek(at)
            file.write(whole[at : at + 1])
    assert refusal(image) is None


def test_change_of_any_byte_of_the_accounting_is_refused(image: Path) -> None:
    with SnapshotFile(image) as file:
        parts = [file.image.ledger, file.image.scheduler, file.image.engine]
    whole = image.read_bytes()
    for part in parts:
        begin = whole.index(part)
        for at in random.Random(4).sample(range(begin, begin + len(part)), 40):
            damaged = bytearray(whole)
            damaged[at] ^= 0x10
            image.write_bytes(damaged)
            with pytest.raises(SnapshotError, match="does not match its checksum"):
                SnapshotFile(image)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "not a kvstow snapshot"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "not a kvstow snapshot"),
        (b"KVSTOW\r\n" + (2).to_bytes(4, "little") + bytes(8), "version 2, this kvstow reads"),
        (b"KVSTOW\r\n\1\0\0\0\xff\xff\xff\xff" + bytes(8), "header does not match its checksum"),
    ],
)
def test_error_for_a_foreign_file_says_what_it_is(content: bytes, why: str, tmp_path: Path) -> None:
    path = tmp_path / "image"
    assert "cannot be read: No such file" in str(refusal(path))
    path.write_bytes(content)
    assert why in str(refusal(path))
    assert "cannot be read: Is a directory" in str(refusal(tmp_path))


def forge(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Replace the header, with a valid checksum."""
    whole = path.read_bytes()
    [num_bytes] = struct.unpack_from("<I", whole, 12)
    fields = json.loads(whole[20 : 20 + num_bytes])
    changed = change(fields)
    header = json.dumps(fields if changed is None else changed).encode()
    assert 20 + len(header) <= PAGE, "the parts after the header stay where they are"
    crc = zlib.crc32(header, zlib.crc32(struct.pack("<II", 1, len(header))))
    prefix = struct.pack("<8sIII", whole[:8], 1, len(header), crc)
    path.write_bytes((prefix + header).ljust(PAGE, b"\0") + whole[PAGE:])


def arena_with(**fields: object) -> Callable[[dict[str, Any]], object]:
    return lambda header: header["arenas"][0].update(fields)


def part_with(name: str, at: int, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda header: header["sections"][name].__setitem__(at, value)


@pytest.mark.parametrize(
    "change",
    [
        lambda _: [],
        lambda header: header.update(sections=[]),
        lambda header: header.update(arenas=[]),
        lambda header: header.update(arenas=[None]),
        lambda header: header.update(arenas=header["arenas"] * 2),
        lambda header: header.update(num_tokens=float("inf")),
        lambda header: header.update(num_bytes=str(header["num_bytes"])),
        lambda header: header["sections"].pop("ledger"),
        lambda header: header["sections"].update(ledger=header["sections"]["scheduler"]),
        part_with("ledger", 0, -PAGE),
        part_with("ledger", 0, 1.0),
        part_with("ledger", 1, -1),
        part_with("ledger", 1, 1 << 70),
        part_with("slots-0", 2, 7),
        arena_with(offset=-PAGE),
        arena_with(offset=1 << 80),
        arena_with(offset=8),
        arena_with(num_slots=0),
        arena_with(num_slots=-1),
        arena_with(num_slots=4),
        arena_with(num_slots=True),
        arena_with(num_slots=1 << 80),
        arena_with(num_slots="64"),
        arena_with(slot_bytes=0),
        arena_with(slot_bytes=float("inf")),
        arena_with(slot_bytes=1 << 40),
        arena_with(slots_per_run=0),
        arena_with(slots_per_run=2),
        arena_with(slots_per_run=7),
        arena_with(num_slots=32),
        arena_with(slot_bytes=64),
    ],
)
def test_header_with_wrong_values_is_refused(
    image: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    forge(image, lambda _: None)
    assert refusal(image) is None
    forge(image, change)
    assert refusal(image) is not None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"preserved"', b'"preserve_"'),
        (b'[["a", ', b'[[["a"],'.ljust(7)),
        (b'"requests": [[', b'"requests": 0,"'),
        (b'[["a", true', b'[["z", true'),
        (b'"landed": [[]', b'"landed": {"" '),
        (b'"landed": [[], [], 1, 0]', b'"landed":[[],[],1e999,0]'),
    ],
)
def test_requests_with_wrong_values_are_refused(image: Path, old: bytes, new: bytes) -> None:
    with SnapshotFile(image) as file:
        record, whole = file.image.engine, image.read_bytes()
    assert old in record
    other = record.replace(old, new)[: len(record)]
    image.write_bytes(whole.replace(record, other))
    forge(image, part_with("engine", 1, len(other)))
    forge(image, part_with("engine", 2, f"{zlib.crc32(other):08x}"))
    assert refusal(image) is not None


def test_slots_named_twice_or_outside_the_file_are_refused(image: Path) -> None:
    with SnapshotFile(image) as file:
        [arena] = file._arenas
    used, crcs = arena.used.astype("<u4"), arena.crcs.astype("<u4").tobytes()
    for wrong in ([*used[:1], *used[:-1]], [*used[:-2], 64, used[-1]], [*used[:-1], 64]):
        whole = image.read_bytes()
        before = json.loads(whole[20:PAGE].rstrip(b"\0"))["sections"]["slots-0"]
        parts = np.array(wrong, "<u4").tobytes() + crcs
        begin = PAGE + before[0]
        image.write_bytes(whole[:begin] + parts + whole[begin + len(parts) :])
        forge(image, part_with("slots-0", 2, f"{zlib.crc32(parts):08x}"))
        assert "names a slot twice, or a slot that does not exist" in str(refusal(image))


def test_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "cannot be read" in str(refusal(tmp_path / "pipe"))


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_file_that_is_interrupted_anywhere_does_not_stay_open(image: Path) -> None:
    def read() -> None:
        with SnapshotFile(image) as file:
            assert file.version

    num_descriptors = len(os.listdir("/proc/self/fd"))
    line, is_cut_short = 0, True
    while is_cut_short:
        line += 1
        is_cut_short = is_interrupted(read, line, skipped=("with ",))
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == num_descriptors, f"line {line}"
    assert line > 50, "some lines were interrupted"


def test_other_weights_are_refused(image: Path) -> None:
    for who in {"identity": "b", "weights_version": "7"}, WHO | {"weights_version": "8"}:
        it = World()
        with pytest.raises(SnapshotError, match="the snapshot is of"):
            it.engine.restart(image, after=READY, requests=True, **who)
        it.engine.close()


def one_of_two(which: int) -> World:
    """Return one of two engines whose files differ. Each file has some hundred pages."""
    it = World(num_blocks=200, num_host=400)
    it.run(f"request {which}", list(range(1000 * which, 1000 * which + 700 + which)))
    return it


def test_killed_writer_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    moments, path = random.Random(seed), tmp_path / "image"
    write_s = seconds_to_write(path)
    found, num_torn = {0: 0, 1: 0}, 0
    for _ in range(NUM_KILLS // NUM_KILLS_PER_PARENT):
        num_torn += kill_writers(path, moments, found, write_s)
    assert sum(found.values()) == NUM_KILLS
    assert min(found.values()) > 0, found
    assert num_torn > NUM_KILLS // 10, "few were killed while they wrote"
    put_to_sleep(path)
    assert os.listdir(tmp_path) == ["image"]


def seconds_to_write(path: Path) -> float:
    """Return how long the writers below take for a file. It leaves one such file."""
    it = one_of_two(0)
    begin_s = time.perf_counter()
    it.sleep(to=path, **WHO)
    it.engine.close()
    return time.perf_counter() - begin_s


def kill_writers(path: Path, moments: random.Random, found: dict[int, int], write_s: float) -> int:
    """Fork and kill writers. Return how many left a temporary file behind."""
    code, num_torn = FORKING_WRITER, 0
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, cwd=Path(__file__).parents[2],
    ) as parent:  # fmt: skip
        assert parent.stdin is not None
        assert parent.stdout is not None
        for turn in range(NUM_KILLS_PER_PARENT):
            parent.stdin.write("go\n")
            parent.stdin.flush()
            writer = int(parent.stdout.readline())
            time.sleep(moments.uniform(0.0, 4 * write_s))
            # On a busy machine all would be killed too early, so some get time to write both files.
            while turn % 10 == 0 and which_of_two(path) == 0:
                time.sleep(0.001)
            os.kill(writer, signal.SIGKILL)
            assert parent.stdout.readline() == "dead\n"
            num_torn += any(name.endswith(".kvstow-tmp") for name in os.listdir(path.parent))
            found[which_of_two(path)] += 1
        parent.stdin.close()
        assert parent.wait(10) == 0
    return num_torn


# Only a process without threads forks safely. Engines have threads, so the child builds them.
FORKING_WRITER = """
import os, sys
import numpy
from tests.engine.test_snapshot_file import one_of_two
from tests.engine.sleep_world import WHO

def write_until_killed():
    worlds = [one_of_two(which) for which in (0, 1)]
    os.write(1, b"%d\\n" % os.getpid())
    while True:
        for it in worlds:
            it.sleep(to=sys.argv[1], **WHO)
            it.wake(**WHO)

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        write_until_killed()
    os.waitpid(child, 0)
    os.write(1, b"dead\\n")
"""


def which_of_two(path: Path) -> int:
    """Return which engine wrote the file, and check every slot of it."""
    it = World(num_blocks=200, num_host=400)
    try:
        it.engine.restart(path, after=READY, requests=True, **WHO)
        [name] = it.engine._state.requests
        which = int(name[-1])
        it.texts[name] = list(range(1000 * which, 1000 * which + 700 + which))
        it.check()
    finally:
        it.engine.close()
    return which


def test_writer_keeps_its_temporary_file_while_another_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two writers of one name, the last gets it. Neither removes the other's file."""
    path, replace = tmp_path / "image", os.replace

    def replace_after_another(one: str, other: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        put_to_sleep(path)
        assert Path(one).exists()
        replace(one, other)

    monkeypatch.setattr(os, "replace", replace_after_another)
    put_to_sleep(path)
    assert refusal(path) is None
    assert os.listdir(tmp_path) == ["image"]


def test_writer_makes_another_file_if_its_first_was_removed_as_left_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lock = tmp_path / "image", fcntl.flock

    def lock_too_late(file: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        put_to_sleep(path)  # it finds a file that its writer has not locked yet
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", lock_too_late)
    put_to_sleep(path)
    assert refusal(path) is None
    assert os.listdir(tmp_path) == ["image"]


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EFBIG, "raise the limit of file sizes"),
        (errno.EACCES, "give this process the right to write there"),
        (errno.EIO, "check the disk"),
    ],
)
def test_disk_that_refuses_leaves_the_old_file(
    image: Path, monkeypatch: pytest.MonkeyPatch, number: int, fix: str
) -> None:
    def full(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    before = image.read_bytes()
    it = World()
    it.run("a", prompt(1, 9))
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(SnapshotError, match=f"written: {os.strerror(number)}.*{fix}"):
        it.engine.sleep(after=READY, to=image, **WHO)
    it.check()
    it.engine.close()
    assert image.read_bytes() == before
    assert os.listdir(image.parent) == ["image"]


@pytest.mark.parametrize("status", [errno.EIO, errno.EINVAL, errno.ENOTSUP])
def test_new_file_has_the_name_if_its_folder_cannot_be_synced(
    image: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    def fsync(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(status, os.strerror(status))
        real_fsync(file)

    real_fsync = os.fsync
    it = World()
    it.run("new", prompt(1, 9))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        if status == errno.EIO:
            # The old file is gone, so the message must not say that it is unchanged.
            with pytest.raises(SnapshotError, match="is written, but its folder cannot be synced"):
                it.engine.sleep(after=READY, to=image, **WHO)
        else:
            it.engine.sleep(after=READY, to=image, **WHO)
    it.engine.close()
    assert b'"new"' in image.read_bytes()
    assert refusal(image) is None


def test_file_can_be_mapped_with_larger_pages(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class LargePages(mmap.mmap):
        """Behaves as on a machine with pages of 64 KiB."""

        def __new__(cls, *args: Any, offset: int = 0, **kwargs: Any) -> "LargePages":
            if offset % (64 << 10):
                raise ValueError(errno.EINVAL, "offset is no multiple of the page size")
            return super().__new__(cls, *args, offset=offset, **kwargs)  # type: ignore[misc]

    monkeypatch.setattr(mmap, "mmap", LargePages)
    monkeypatch.setattr(mmap, "ALLOCATIONGRANULARITY", 64 << 10)
    with SnapshotFile(image) as file:
        assert any(arena.offset % (64 << 10) for arena in file._arenas), (
            "an offset is not aligned to a large page"
        )
        assert file.damaged_slots() == []
        for arena in file.map_arenas():
            assert arena.memory.shape == (arena.num_bytes,)
            assert arena.base_address == arena.memory.ctypes.data
            assert arena.base_address % PAGE == 0
            arena.close()
    assert refusal(image) is None
