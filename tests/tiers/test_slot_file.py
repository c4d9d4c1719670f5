"""Opening of a slot file: what it keeps, what it refuses, and what it does to the disk."""

from __future__ import annotations

import errno
import gc
import io
import os
import socket
import stat
import threading
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.forks import in_child
from tests.interrupts import is_interrupted, is_interrupted_behind
from tests.tiers.setup import (
    LONG_S,
    MODEL,
    NUM_SLOTS,
    SLOT_BYTES,
    Here,
    blocks_of,
    get,
    is_open_interrupted,
    key_of,
    leaks_of,
    new_arena,
    open_file,
    put,
)

from kvstow import ConfigError, StateError
from kvstow.tiers import (
    Fingerprint,
    SlotFile,
    SlotFileMismatch,
    SlotTier,
    TierTicket,
    slot_store,
)
from kvstow.tiers.files import Buffers, Files
from kvstow.tiers.slot_index import HEADER_BYTES, VERSION
from kvstow.tiers.ticket import tickets_made
from kvstow.transfer import HostArena, TransferTimeout

KEYS = [key_of(number) for number in range(NUM_SLOTS)]
OTHER = Fingerprint({"model": "b", "rank": 0, "world_size": 1})


def on_disk(path: Path) -> dict[str, bytes]:
    return {it.name: it.read_bytes() for it in path.iterdir()}


def fill(path: Path, arena: HostArena) -> None:
    with open_file(path, arena) as tier:
        assert all(put(tier, KEYS, range(NUM_SLOTS)))


# -- warm ----------------------------------------------------------------------------------------


def test_reopened_file_is_warm(tmp_path: Path, arena: HostArena) -> None:
    with open_file(tmp_path, arena) as tier:
        assert len(tier.records()) == 0
        for sequence, at in ((3, 0), (1, 2), (2, 1)):
            tier.put(blocks_of([KEYS[at]], [at], sequence), [at]).wait(LONG_S)
        assert all(put(tier, KEYS[5:8], [5, 6, 7]))
    with open_file(tmp_path, arena) as tier:
        records = tier.records()
        hashes, parents = records.keys(0, len(records))
        assert records.sequences.tolist() == [1, 1, 1, 1, 2, 3]
        assert records.slots.tolist() == [2, 5, 6, 7, 1, 0], "oldest first"
        assert hashes == [KEYS[at][0] for at in (2, 5, 6, 7, 1, 0)]
        assert parents == [None, None, KEYS[5][0], KEYS[6][0], None, None]
        assert records.groups.tolist() == [0] * 6
        assert all(get(tier, KEYS[5:8], [5, 6, 7]))
        assert tier.records().slots.tolist() == records.slots.tolist(), "gets change nothing"
        assert all(put(tier, KEYS[8:9], [5], sequence=4))
        assert tier.records().slots.tolist() == [2, 6, 7, 1, 0, 5]


def test_deleted_block_stays_deleted_after_a_restart(tmp_path: Path, arena: HostArena) -> None:
    fill(tmp_path, arena)
    with open_file(tmp_path, arena) as tier:
        tier.delete(blocks_of(KEYS[:3], range(3))).wait(LONG_S)
    with open_file(tmp_path, arena) as tier:
        assert tier.records().slots.tolist() == list(range(3, NUM_SLOTS))


def test_short_hashes_come_back_as_they_were(tmp_path: Path, arena: HostArena) -> None:
    keys = [(b"\0ab\0", 1), (b"\0ac\0", 1)]
    with open_file(tmp_path, arena) as tier:
        assert all(put(tier, keys, [4, 5]))
    with open_file(tmp_path, arena) as tier:
        assert tier.records().keys(0, 2) == ([b"\0ab\0", b"\0ac\0"], [None, b"\0ab\0"])
        assert all(get(tier, keys, [4, 5]))


@pytest.mark.parametrize("num_slots", [NUM_SLOTS // 2, 2 * NUM_SLOTS])
def test_another_size_keeps_what_fits(tmp_path: Path, arena: HostArena, num_slots: int) -> None:
    fill(tmp_path, arena)
    num_bytes = SlotFile.bytes_for(num_slots, SLOT_BYTES)
    kept = min(num_slots, NUM_SLOTS)
    for _ in range(2):
        with open_file(tmp_path, arena, max_bytes=num_bytes) as tier:
            assert tier.num_slots == num_slots
            assert tier.records().slots.tolist() == list(range(kept))
            assert all(get(tier, KEYS[:kept], range(kept)))
            assert sum(it.stat().st_size for it in tmp_path.iterdir()) == num_bytes
            used = sum(it.stat().st_blocks * 512 for it in tmp_path.iterdir())
            assert used >= num_bytes, "the space is reserved"


def test_size_never_exceeds_max_bytes(tmp_path: Path, arena: HostArena) -> None:
    for extra in (0, 1, SLOT_BYTES + 127, SLOT_BYTES + 128):
        max_bytes = SlotFile.bytes_for(1, SLOT_BYTES) + extra
        with open_file(tmp_path, arena, max_bytes=max_bytes) as tier:
            assert tier.num_slots == 1 + extra // (SLOT_BYTES + 128)
            assert sum(it.stat().st_size for it in tmp_path.iterdir()) <= max_bytes


def test_space_is_reserved_once_unless_a_copy_has_lost_it(tmp_path: Path, arena: HostArena) -> None:
    reserved: list[int] = []

    class Counted(Here):
        def allocate(self, file: int, num_bytes: int) -> None:
            super().allocate(file, num_bytes)
            reserved.append(num_bytes)

    fill(tmp_path, arena)
    with open_file(tmp_path, arena, files=Counted()) as tier:
        assert all(get(tier, KEYS, range(NUM_SLOTS)))
    assert reserved == []
    data = tmp_path / "slots"
    data.write_bytes(b"")
    os.truncate(data, NUM_SLOTS * SLOT_BYTES)
    open_file(tmp_path, arena, files=Counted()).close()
    assert reserved == [NUM_SLOTS * SLOT_BYTES]
    assert data.stat().st_blocks * 512 >= NUM_SLOTS * SLOT_BYTES


def test_another_slot_size_never_exceeds_max_bytes(tmp_path: Path, arena: HostArena) -> None:
    wide_bytes, sizes = 16 * SLOT_BYTES, list[int]()
    max_bytes = SlotFile.bytes_for(16, wide_bytes)

    class Measured(Here):
        def allocate(self, file: int, num_bytes: int) -> None:
            super().allocate(file, num_bytes)
            sizes.append(sum(it.stat().st_size for it in tmp_path.iterdir()))

    options: dict[str, Any] = {"max_bytes": max_bytes, "on_mismatch": "reset", "files": Measured()}
    with HostArena(2, wide_bytes) as wide:
        for other in (arena, wide, arena):
            open_file(tmp_path, other, **options).close()
    assert len(sizes) >= 4
    assert max(sizes) <= max_bytes


def test_data_that_was_cut_off_loses_only_its_slots(tmp_path: Path, arena: HostArena) -> None:
    fill(tmp_path, arena)
    os.truncate(tmp_path / "slots", 10 * SLOT_BYTES + 7)
    with open_file(tmp_path, arena) as tier:
        assert tier.records().slots.tolist() == list(range(10))
        assert tier.num_dropped_records == NUM_SLOTS - 10
        assert all(get(tier, KEYS[:10], range(10)))
        assert all(put(tier, KEYS[10:], range(10, NUM_SLOTS)))


def test_index_that_was_cut_off_loses_only_its_slots(tmp_path: Path, arena: HostArena) -> None:
    fill(tmp_path, arena)
    os.truncate(tmp_path / "slots.index", 4096 + 10 * 128 + 64)
    with open_file(tmp_path, arena) as tier:
        assert tier.records().slots.tolist() == list(range(10))
        assert all(get(tier, KEYS[:10], range(10)))


def test_removed_data_file_leaves_an_empty_tier(tmp_path: Path, arena: HostArena) -> None:
    fill(tmp_path, arena)
    (tmp_path / "slots").unlink()
    with open_file(tmp_path, arena) as tier:
        assert len(tier.records()) == 0
        assert not any(get(tier, KEYS, range(NUM_SLOTS)))


# -- generations ---------------------------------------------------------------------------------


def test_renewed_tier_serves_no_earlier_block(tmp_path: Path, arena: HostArena) -> None:
    with open_file(tmp_path, arena) as tier:
        assert all(put(tier, KEYS[:4], range(4)))
        renewed = tier.renew()
        renewed.wait(LONG_S)
        assert renewed.ok.tolist() == [True]
        assert not any(get(tier, KEYS[:4], range(4)))
        assert all(put(tier, KEYS[:4], range(4), epoch=1))
        assert all(get(tier, KEYS[:4], range(4), epoch=1))


def test_generation_that_a_reset_drew_is_never_warm(tmp_path: Path, arena: HostArena) -> None:
    with open_file(tmp_path, arena) as tier:
        assert all(put(tier, KEYS[:4], range(4)))
        tier.renew().wait(LONG_S)
        assert all(put(tier, KEYS[4:8], range(4, 8), epoch=1))
    with open_file(tmp_path, arena) as tier:
        assert len(tier.records()) == 0
        assert not any(get(tier, KEYS[:8], range(8)))
        assert all(put(tier, KEYS[:2], range(2)))
    with open_file(tmp_path, arena) as tier:
        assert len(tier.records()) == 2, "the generation of an opening is warm again"


def test_renewal_with_a_fingerprint_is_warm_under_it(tmp_path: Path, arena: HostArena) -> None:
    with open_file(tmp_path, arena) as tier:
        assert all(put(tier, KEYS[:4], range(4)))
        tier.renew(OTHER).wait(LONG_S)
        assert all(put(tier, KEYS[4:6], [4, 5], epoch=1))
    with pytest.raises(SlotFileMismatch):
        open_file(tmp_path, arena)
    with open_file(tmp_path, arena, model=OTHER) as tier:
        assert tier.records().slots.tolist() == [4, 5]
        assert all(get(tier, KEYS[4:6], [4, 5], epoch=1))


class FailingSync(Here):
    error: Exception | None = None

    def sync(self, file: int) -> None:
        if self.error is not None:
            raise self.error


def test_renewal_that_is_written_in_part_turns_the_tier_off(
    tmp_path: Path, arena: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Here()
    with open_file(tmp_path, arena, files=files) as tier:
        monkeypatch.setattr(files, "write", lambda *_: HEADER_BYTES - 512)
        renewed = tier.renew()
        renewed.wait(LONG_S)
        assert (renewed.ok.tolist(), tier.mode) == ([False], "off")


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), MemoryError()])
def test_renewal_that_cannot_be_synced_turns_the_tier_off(
    tmp_path: Path, arena: HostArena, error: Exception
) -> None:
    files = FailingSync()
    with open_file(tmp_path, arena, files=files) as tier:
        assert all(put(tier, KEYS[:4], range(4)))
        files.error = error
        renewed = tier.renew()
        renewed.wait(LONG_S)
        assert renewed.ok.tolist() == [False]
        assert ("cannot write" in str(renewed.error)) == isinstance(error, OSError)
        assert tier.mode == "off"
        assert "new generation cannot be written" in str(tier.error)
        assert not any(get(tier, KEYS[:4], range(4)))


class SlowHeader(Here):
    """The first header waits until `may_go_on`."""

    def __init__(self) -> None:
        self.is_writing, self.may_go_on = threading.Event(), threading.Event()
        self.may_go_on.set()

    def write(self, file: int, buffers: Buffers, offset: int) -> int:
        if offset == 0 and len(buffers[0]) == HEADER_BYTES and not self.is_writing.is_set():
            self.is_writing.set()
            assert self.may_go_on.wait(LONG_S)
        return super().write(file, buffers, offset)


def test_the_last_of_two_renewals_counts(tmp_path: Path, arena: HostArena) -> None:
    files = SlowHeader()
    with open_file(tmp_path, arena, files=files) as tier:
        files.is_writing.clear()
        files.may_go_on.clear()
        first = tier.renew(OTHER)
        assert files.is_writing.wait(LONG_S)
        second = tier.renew(MODEL)
        with pytest.raises(TransferTimeout):
            second.wait_until_ended(0.1)
        assert put(tier, KEYS[:1], [0]) == [True], "a renewal has no slot in use"
        files.may_go_on.set()
        first.wait(LONG_S)
        second.wait(LONG_S)
        assert all(put(tier, KEYS[:2], range(2)))
    with open_file(tmp_path, arena) as tier:
        assert len(tier.records()) == 2


def test_renewal_that_is_interrupted_names_no_fingerprint(
    tmp_path: Path, arena: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the next renewal writes it, and the next server of this model is refused."""

    def interrupt(*_: object, is_put: bool) -> None:
        raise KeyboardInterrupt

    with open_file(tmp_path, arena) as tier:
        with monkeypatch.context() as patch:
            patch.setattr(tier._store._lanes, "submit", interrupt)
            with pytest.raises(KeyboardInterrupt):
                tier.renew(OTHER)
        tier.renew().wait(LONG_S)
    open_file(tmp_path, arena).close()


def test_renewal_that_is_interrupted_anywhere_takes_place_or_does_not(
    tmp_path: Path, arena: HostArena
) -> None:
    """A block that this process no longer serves does not come back with the next one."""
    line, is_cut_short, now = 0, True, [True]
    while is_cut_short:
        line += 1
        with open_file(tmp_path, arena) as tier:
            assert put(tier, KEYS[:1], [0]) == [True]
            is_cut_short = is_interrupted(
                tier.renew, line, str(slot_store.__file__), skipped=("with ", "try:")
            )
            now = get(tier, KEYS[:1], [0])
        with open_file(tmp_path, arena) as tier:
            assert get(tier, KEYS[:1], [0]) == now, f"line {line}"
    assert line > 10, "some lines were interrupted"
    assert now == [False], "a renewal that is not interrupted takes place"


def test_renewal_that_is_interrupted_while_a_thread_ends_it_takes_place(
    tmp_path: Path, arena: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No ticket reports a new generation while the tier serves the old one."""
    is_ending, may_end, tickets = threading.Event(), threading.Event(), list[TierTicket]()
    with open_file(tmp_path, arena) as tier:
        assert put(tier, KEYS[:1], [0]) == [True]
        store = tier._store
        lock, end = store._lock, store._end

        class Interrupted:
            """The lock of the store. An interrupt comes as the caller lets go of it."""

            def __enter__(self) -> None:
                lock.acquire()

            def __exit__(self, *_: object) -> None:
                lock.release()
                if threading.current_thread() is threading.main_thread():
                    assert is_ending.wait(LONG_S)
                    raise KeyboardInterrupt

        def slow_end(*arguments: Any) -> None:
            is_ending.set()
            assert may_end.wait(LONG_S)
            end(*arguments)

        monkeypatch.setattr(store, "_lock", Interrupted())
        monkeypatch.setattr(store, "_end", slow_end)
        with pytest.raises(KeyboardInterrupt), tickets_made(tickets):
            tier.renew()
        monkeypatch.setattr(store, "_lock", lock)
        may_end.set()
        tickets[0].wait_until_ended(LONG_S)
        assert tickets[0].ok.tolist() == [True]
        assert get(tier, KEYS[:1], [0]) == [False], "the old generation is served"
        assert all(put(tier, KEYS[:1], [0]))
        assert all(get(tier, KEYS[:1], [0]))


class FailingWrite(Here):
    fails = False

    def write(self, file: int, buffers: Buffers, offset: int) -> int:
        if self.fails:
            raise OSError(errno.EIO, "Input/output error")
        return super().write(file, buffers, offset)


def test_delete_that_fails_can_be_tried_again(tmp_path: Path, arena: HostArena) -> None:
    blocks, files = blocks_of(KEYS[:1], [0]), FailingWrite()
    with open_file(tmp_path, arena, files=files) as tier:
        assert put(tier, KEYS[:1], [0]) == [True]
        for fails in (True, False):
            files.fails = fails
            ticket = tier.delete(blocks)
            ticket.wait(LONG_S)
            assert ticket.ok.tolist() == [not fails]
    with open_file(tmp_path, arena) as tier:
        assert get(tier, KEYS[:1], [0]) == [False], "the block is back, though it was deleted"


# -- refused -------------------------------------------------------------------------------------


def test_file_of_another_fingerprint_is_refused_or_emptied(
    tmp_path: Path, arena: HostArena
) -> None:
    fill(tmp_path, arena)
    before = on_disk(tmp_path)
    with pytest.raises(SlotFileMismatch, match=r"model 'a' is not 'b'\); pass another path"):
        open_file(tmp_path, arena, model=OTHER)
    assert on_disk(tmp_path) == before
    with open_file(tmp_path, arena, model=OTHER, on_mismatch="reset") as tier:
        assert len(tier.records()) == 0
        assert not any(get(tier, KEYS, range(NUM_SLOTS)))
    with pytest.raises(SlotFileMismatch):
        open_file(tmp_path, arena)


def test_file_of_another_fingerprint_that_keeps_no_block_is_taken(
    tmp_path: Path, arena: HostArena
) -> None:
    """As the next start wants it after weights that changed in place."""
    with open_file(tmp_path, arena) as tier:
        tier.renew().wait(LONG_S)
        assert all(put(tier, KEYS[:4], range(4)))
    with open_file(tmp_path, arena, model=OTHER) as tier:
        assert len(tier.records()) == 0
        assert not any(get(tier, KEYS[:4], range(4)))
        assert all(put(tier, KEYS[:2], range(2)))
    with pytest.raises(SlotFileMismatch):
        open_file(tmp_path, arena)
    (tmp_path / "slots").unlink()
    with open_file(tmp_path, arena) as tier:
        assert len(tier.records()) == 0


def test_file_of_another_slot_size_is_refused_or_emptied(tmp_path: Path, arena: HostArena) -> None:
    fill(tmp_path, arena)
    before = on_disk(tmp_path)
    with HostArena(8, 2 * SLOT_BYTES) as wide:
        with pytest.raises(SlotFileMismatch, match="slots of 4096 bytes, not 8192"):
            open_file(tmp_path, wide)
        assert on_disk(tmp_path) == before
        with open_file(tmp_path, wide, on_mismatch="reset") as tier:
            assert len(tier.records()) == 0
            assert all(put(tier, KEYS[:4], range(4)))
            assert all(get(tier, KEYS[:4], range(4)))
        size = sum(it.stat().st_size for it in tmp_path.iterdir())
        assert size <= SlotFile.bytes_for(NUM_SLOTS, SLOT_BYTES)


@pytest.mark.parametrize(
    ("at", "why"),
    [
        # Another version may have another checksum, so its name comes first.
        (8, f"has version {VERSION ^ 1}, this kvstow reads version {VERSION}"),
        *[(at, "does not have its checksum") for at in (12, 16, 100, 2000, 4090)],
    ],
)
def test_damaged_header_is_refused_or_emptied(
    tmp_path: Path, arena: HostArena, at: int, why: str
) -> None:
    fill(tmp_path, arena)
    index = tmp_path / "slots.index"
    data = bytearray(index.read_bytes())
    data[at] ^= 1
    index.write_bytes(data)
    with pytest.raises(SlotFileMismatch, match=why):
        open_file(tmp_path, arena)
    with open_file(tmp_path, arena, on_mismatch="reset") as tier:
        assert len(tier.records()) == 0
        assert not any(get(tier, KEYS, range(NUM_SLOTS)))


@pytest.mark.parametrize(
    "mine",
    [
        {"slots": b"my thesis"},
        {"slots.index": b"my thesis"},
        {"slots": b"my thesis", "slots.index": bytes(HEADER_BYTES)},
        {"slots.index": bytes(HEADER_BYTES) + b"my thesis"},
    ],
)
def test_file_of_the_user_is_never_touched(
    tmp_path: Path, arena: HostArena, mine: dict[str, bytes]
) -> None:
    for name, content in mine.items():
        (tmp_path / name).write_bytes(content)
    for on_mismatch in ("refuse", "reset"):
        with pytest.raises(ConfigError, match="not a slot file of kvstow"):
            open_file(tmp_path, arena, on_mismatch=on_mismatch)
    assert on_disk(tmp_path) == mine


def test_only_its_owner_may_read_the_files(tmp_path: Path, arena: HostArena) -> None:
    def check() -> None:
        open_file(tmp_path, arena).close()
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
        assert modes == {"slots": 0o600, "slots.index": 0o600}

    before = os.umask(0)
    try:
        check()
    finally:
        os.umask(before)
    for path in tmp_path.iterdir():
        path.chmod(0o666)  # as a copy from a backup may be
    check()


def test_a_file_of_another_user_is_refused(
    tmp_path: Path, arena: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That user may have made it in a folder of all users, to read what the server writes."""
    open_file(tmp_path, arena).close()
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    open_file(tmp_path, arena).close()  # the folder is this user's, too

    class SharedFolder(Here):
        def stat(self, path: str) -> os.stat_result | None:
            found = super().stat(path)
            if found is None or path != str(tmp_path):
                return found
            return os.stat_result((*found[:4], user + 2, *found[5:]))

    with pytest.raises(ConfigError, match=f"belongs to user {user}, who may read .* {user + 1}, "):
        open_file(tmp_path, arena, files=SharedFolder())


def test_a_link_to_a_volume_of_one_user_counts_as_the_volume(
    tmp_path: Path, arena: HostArena
) -> None:
    class Volume(Here):
        """All that is in the volume belongs to its user, whoever writes it."""

        def stat(self, path: str) -> os.stat_result | None:
            found = super().stat(path)
            if found is None or stat.S_ISLNK(found.st_mode):
                return found
            columns = (*found[:4], os.geteuid() + 1, *found[5:10])
            return os.stat_result(columns, {"st_blocks": found.st_blocks})

    (tmp_path / "volume").mkdir()
    link = tmp_path / "link"
    link.symlink_to("volume")
    open_file(link, arena, files=Volume()).close()
    open_file(link, arena, files=Volume()).close()
    (tmp_path / "volume").rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match="link does not exist; create it"):
        open_file(link, arena)


def test_open_file_is_refused_to_others(
    tmp_path: Path, arena: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_file(tmp_path, arena) as tier:
        with pytest.raises(StateError, match=r"is in use in this process; .* its own$"):
            open_file(tmp_path, arena)
        elsewhere = f"is in use in process {os.getpid()}; .* named VLLM::EngineCore"

        def check() -> None:
            with new_arena() as own:
                with pytest.raises(StateError, match=elsewhere):
                    open_file(tmp_path, own)
                monkeypatch.setattr(Files, "holder", lambda *_: None)
                with pytest.raises(StateError, match="is in use here or in another process; "):
                    open_file(tmp_path, own)

        in_child(check)
        assert all(put(tier, KEYS[:2], [0, 1]))
    open_file(tmp_path, arena).close()


def link(path: Path) -> None:
    (path / "real").touch()
    (path / "slots").symlink_to(path / "real")


def pipe(path: Path) -> None:
    os.mkfifo(path / "slots")


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path / "slots"))


PLACES: dict[str, tuple[Callable[[Path], object], str]] = {
    "symbolic link": (link, "is a symbolic link"),
    "folder": (lambda path: (path / "slots").mkdir(), "is a folder"),
    "folder as index": (lambda path: (path / "slots.index").mkdir(), "is a folder"),
    "pipe": (pipe, "is a pipe or a socket"),
    "socket": (unix_socket, "is a pipe or a socket"),
}


@pytest.mark.parametrize("name", PLACES)
def test_unsuitable_place_is_refused(tmp_path: Path, arena: HostArena, name: str) -> None:
    prepare, message = PLACES[name]
    prepare(tmp_path)
    before = sorted(it.name for it in tmp_path.iterdir())
    with pytest.raises(ConfigError, match=message):
        open_file(tmp_path, arena)
    assert sorted(it.name for it in tmp_path.iterdir()) == before


def test_device_and_missing_folder_are_refused(tmp_path: Path, arena: HostArena) -> None:
    size = SlotFile.bytes_for(1, SLOT_BYTES)
    with pytest.raises(ConfigError, match="/dev/null is a device"):
        SlotFile("/dev/null", size).open(arena, MODEL, files=Here())
    with pytest.raises(ConfigError, match="does not exist; create it"):
        SlotFile(tmp_path / "no" / "slots", size).open(arena, MODEL, files=Here())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("tmpfs", "is on tmpfs, which is memory"),
        ("nfs4", "is on nfs4, where a lock"),
        ("lustre", "is on lustre, where a lock"),
        ("fuse.ceph-fuse", "is on fuse.ceph-fuse, where a lock"),
    ],
)
def test_unsuitable_file_system_is_refused(
    tmp_path: Path, arena: HostArena, kind: str, message: str
) -> None:
    class Elsewhere(Here):
        def file_system(self, folder: str) -> str:
            return kind

    with pytest.raises(ConfigError, match=message):
        open_file(tmp_path, arena, files=Elsewhere())
    assert on_disk(tmp_path) == {}


def test_the_system_names_its_file_systems() -> None:
    assert Files().file_system("/proc/self") in {"proc", ""}
    assert Files().file_system("/dev") != "proc"


@pytest.mark.parametrize(
    ("escaped", "folder"),
    [
        ("/mnt/größe", "/mnt/größe"),
        (r"/mnt/a\040b\134c", "/mnt/a b\\c"),
        ("/mnt/\udcff", os.fsdecode(b"/mnt/\xff")),
    ],
)
def test_any_name_of_a_mount_is_found(
    monkeypatch: pytest.MonkeyPatch, escaped: str, folder: str
) -> None:
    mounts = f"/dev/sda / ext4 rw 0 0\nserver:/kv {escaped} nfs4 rw 0 0\n"
    monkeypatch.setattr(
        "kvstow.tiers.files.open", lambda *_, **__: io.StringIO(mounts), raising=False
    )
    assert Files().file_system(f"{folder}/kv") == "nfs4"
    assert Files().file_system("/mnt/other") == "ext4"


ERRORS = {
    errno.EACCES: "give this process the right",
    errno.EROFS: "mount the file system for writing",
    errno.ENOSPC: "free some space, or lower max_bytes",
    errno.EDQUOT: "raise the quota",
    errno.EIO: "check the disk",
}


@pytest.mark.parametrize("call", ["open", "allocate", "write", "read", "sync"])
@pytest.mark.parametrize("number", ERRORS)
def test_call_that_fails_at_the_opening_leaves_nothing_behind(
    tmp_path: Path, arena: HostArena, call: str, number: int
) -> None:
    class Failing(Here):
        def __getattribute__(self, name: str) -> Any:
            if name == call:

                def fail(*_: object) -> None:
                    raise OSError(number, os.strerror(number))

                return fail
            return super().__getattribute__(name)

    descriptors = os.listdir("/proc/self/fd")
    with pytest.raises(ConfigError, match=ERRORS[number]):
        open_file(tmp_path, arena, files=Failing())
    assert on_disk(tmp_path) == {}
    assert os.listdir("/proc/self/fd") == descriptors
    open_file(tmp_path, arena).close()


def test_growth_that_fails_keeps_the_old_file(tmp_path: Path, arena: HostArena) -> None:
    class Full(Here):
        def allocate(self, file: int, num_bytes: int) -> None:
            os.ftruncate(file, num_bytes)
            raise OSError(errno.ENOSPC, "No space left on device")

    fill(tmp_path, arena)
    before = on_disk(tmp_path)
    larger = SlotFile.bytes_for(2 * NUM_SLOTS, SLOT_BYTES)
    with pytest.raises(ConfigError, match="free some space"):
        open_file(tmp_path, arena, files=Full(), max_bytes=larger)
    assert on_disk(tmp_path) == before


def test_sizes_that_cannot_fit_are_refused(tmp_path: Path, arena: HostArena) -> None:
    class Small(Here):
        def space(self, folder: str) -> tuple[int, int]:
            return 1 << 20, 1 << 10

    for files, max_bytes, message in (
        (Here(), SlotFile.bytes_for(1, SLOT_BYTES) - 1, "the header and one slot of 4096 bytes"),
        (Here(), "9000000TB", "more than 2147483647; lower it"),
        (Small(), 2 << 20, "has 1,048,576 bytes; lower it"),
        (Small(), 1 << 19, "1,024 free; lower it"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_file(tmp_path, arena, files=files, max_bytes=max_bytes)
    assert on_disk(tmp_path) == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_bytes": "much"}, "max_bytes is 'much'"),
        ({"max_bytes": 0}, "max_bytes is 0"),
        ({"on_mismatch": "ask"}, "on_mismatch is 'ask'"),
        ({"on_mismatch": np.zeros(2)}, "on_mismatch is array"),
        ({"num_threads": 0}, "num_threads is 0"),
        ({"stuck_after_s": 0}, "stuck_after_s is 0"),
        ({"stuck_after_s": "9"}, "stuck_after_s is '9'"),
        ({"stuck_after_s": float("nan")}, "stuck_after_s is nan"),
        ({"max_in_flight_bytes": 4095}, "max_in_flight_bytes is 4095"),
    ],
)
def test_bad_option_is_a_config_error(
    tmp_path: Path, arena: HostArena, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_file(tmp_path, arena, **options)
    assert on_disk(tmp_path) == {}


@pytest.mark.parametrize(
    "options", [{"stuck_after_s": Fraction(9)}, {"num_threads": np.int8(2)}], ids=str
)
def test_option_of_another_number_type_is_taken(
    tmp_path: Path, arena: HostArena, options: dict[str, Any]
) -> None:
    num_descriptors = len(os.listdir("/proc/self/fd"))
    with open_file(tmp_path, arena, **options) as tier:
        assert put(tier, KEYS[:1], [0]) == [True]
    assert len(os.listdir("/proc/self/fd")) == num_descriptors


class BytesPath:
    def __fspath__(self) -> bytes:
        return b"slots"


@pytest.mark.parametrize("wrong", [None, b"slots", BytesPath(), "slots\0", "slots\ud800"])
def test_path_that_can_name_no_file_is_a_config_error(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"path is .*; pass the name of a file"):
        SlotFile(wrong, "1MiB")


@pytest.mark.parametrize("fields", [None, 5, ["a"], {1: "a"}, {"a": object()}])
def test_fingerprint_of_what_is_no_mapping_of_names_is_refused(fields: Any) -> None:
    with pytest.raises(ConfigError, match=r"fields is .*; pass "):
        Fingerprint(fields)


def test_difference_of_fingerprints_begins_with_what_one_can_read() -> None:
    one = Fingerprint({"attention": "a" * 32, "same": 1, "vllm": "0.32.0"})
    other = {"attention": "b" * 32, "dtype": "half", "same": 1, "vllm": "0.30.0"}
    readable, digests = one.difference(other).split(", attention ")
    assert readable == "dtype 'half' is not None, vllm '0.30.0' is not '0.32.0'"
    assert digests == f"{'b' * 32!r} is not {'a' * 32!r}"


def test_fingerprint_longer_than_the_header_is_refused() -> None:
    with pytest.raises(ConfigError, match="pass a digest of what is long"):
        Fingerprint({"model": "x" * 4000})


# -- the end -------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_new", [False, True])
def test_open_that_is_interrupted_anywhere_lets_go_of_the_file(
    tmp_path: Path, arena: HostArena, is_new: bool
) -> None:
    line, is_cut_short, sources = 0, True, str(Path(slot_store.__file__).parent)
    num_descriptors = len(os.listdir("/proc/self/fd"))
    skipped = ("with ", "try:")
    while is_cut_short:
        line += 1
        is_cut_short = is_open_interrupted(tmp_path, arena, line, sources, skipped=skipped)
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == num_descriptors, f"line {line}"
        # This is refused while the file is locked, and for data without an index.
        open_file(tmp_path, arena).close()
        if is_new:
            for it in tmp_path.iterdir():
                it.unlink()
    assert line > 100, "some lines were interrupted"


def test_open_that_is_interrupted_behind_a_call_lets_go_of_the_file(
    tmp_path: Path, arena: HostArena
) -> None:
    number, is_cut_short, sources = 0, True, str(Path(slot_store.__file__).parent)
    num_descriptors = len(os.listdir("/proc/self/fd"))
    while is_cut_short:
        number += 1
        opened: list[SlotTier] = []
        is_cut_short = is_interrupted_behind(
            lambda opened=opened: opened.append(open_file(tmp_path, arena)),  # type: ignore[misc]
            number,
            sources,
        )
        for tier in opened:
            tier.close()
        assert len(os.listdir("/proc/self/fd")) == num_descriptors, f"call {number}"
        open_file(tmp_path, arena).close()
    assert number > 50, "some calls were interrupted"


def test_interrupted_creation_of_the_data_file_leaves_no_file(
    tmp_path: Path, arena: HostArena
) -> None:
    class Interrupted(Here):
        def open(self, path: str, flags: int) -> int:
            file = super().open(path, flags)
            if path.endswith("slots"):
                os.close(file)  # nobody else learns its number
                raise KeyboardInterrupt
            return file

    with pytest.raises(KeyboardInterrupt):
        open_file(tmp_path, arena, files=Interrupted())
    assert on_disk(tmp_path) == {}


def test_opening_removes_no_file_that_another_program_has_created(
    tmp_path: Path, arena: HostArena
) -> None:
    class Beaten(Here):
        """Another program makes the data file just before this one does."""

        def open(self, path: str, flags: int) -> int:
            if path.endswith("slots"):
                (tmp_path / "slots").write_bytes(b"my thesis")
            return super().open(path, flags)

    with pytest.raises(ConfigError, match="File exists"):
        open_file(tmp_path, arena, files=Beaten())
    assert on_disk(tmp_path) == {"slots": b"my thesis"}


def test_opening_removes_no_index_that_another_process_has_locked(
    tmp_path: Path, arena: HostArena
) -> None:
    others: list[SlotTier] = []

    class Overtaken(Here):
        """Another process opens and locks the index that this one has created."""

        def lock(self, file: int) -> None:
            others.append(open_file(tmp_path, arena))
            super().lock(file)

    with pytest.raises(StateError, match="is in use in this process"):
        open_file(tmp_path, arena, files=Overtaken())
    with others[0] as other:
        assert put(other, KEYS[:1], [0]) == [True]
    with open_file(tmp_path, arena) as tier:
        assert get(tier, KEYS[:1], [0]) == [True]


def test_opening_uses_no_index_that_another_process_has_removed(
    tmp_path: Path, arena: HostArena
) -> None:
    class Late(Here):
        """The opening of another process fails, which removes the index that it has created."""

        def lock(self, file: int) -> None:
            (tmp_path / "slots.index").unlink()
            super().lock(file)

    (tmp_path / "slots.index").touch()
    with pytest.raises(StateError, match=r"slots\.index was removed or replaced .*; open it again"):
        open_file(tmp_path, arena, files=Late())
    assert on_disk(tmp_path) == {}
    open_file(tmp_path, arena).close()


def test_opening_keeps_what_another_process_wrote_before_the_lock(
    tmp_path: Path, arena: HostArena
) -> None:
    class Late(Here):
        """Another process opens, fills and closes the file that it has begun to create."""

        def lock(self, file: int) -> None:
            fill(tmp_path, arena)
            super().lock(file)

    (tmp_path / "slots.index").touch()
    with open_file(tmp_path, arena, files=Late()) as tier:
        assert all(get(tier, KEYS, range(NUM_SLOTS)))


@pytest.mark.parametrize("is_dropped", [False, True])
def test_close_that_is_interrupted_anywhere_lets_go_of_the_file_in_the_end(
    tmp_path: Path, arena: HostArena, is_dropped: bool
) -> None:
    line, is_cut_short, sources = 0, True, str(Path(slot_store.__file__).parent)
    num_descriptors = len(os.listdir("/proc/self/fd"))
    while is_cut_short:
        line += 1
        tier = open_file(tmp_path, arena)
        is_cut_short = is_interrupted(tier.close, line, sources)
        if is_dropped:
            del tier
        else:
            tier.close()
        assert len(os.listdir("/proc/self/fd")) == num_descriptors, f"line {line}"
        open_file(tmp_path, arena).close()  # which is refused while the file is locked
    assert line > 10, "some lines were interrupted"


class InterruptedOnce(Here):
    """The next close of a descriptor is interrupted when it has taken place."""

    is_next = False

    def close(self, file: int) -> None:
        super().close(file)
        if self.is_next:
            self.is_next = False
            raise KeyboardInterrupt


def test_close_after_an_interrupted_one_closes_no_file_of_another_owner(
    tmp_path: Path, arena: HostArena
) -> None:
    tier = open_file(tmp_path, arena, files=(calls := InterruptedOnce()))
    calls.is_next = True
    with pytest.raises(KeyboardInterrupt):
        tier.close()
    # These get the lowest numbers that are free, and so that of the closed file.
    others = [os.open("/dev/null", os.O_RDONLY) for _ in range(8)]
    tier.close()
    for other in others:
        os.close(other)
    with open_file(tmp_path, arena) as again:
        assert len(again.records()) == 0


def test_close_that_fails_lets_go_of_the_file(tmp_path: Path, arena: HostArena) -> None:
    class Failing(Here):
        fails = False

        def close(self, file: int) -> None:
            super().close(file)
            if self.fails:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    with open_file(tmp_path, arena, files=(calls := Failing())) as tier:
        assert put(tier, KEYS[:1], [0]) == [True]
        calls.fails = True
    assert leaks_of(tier) == []
    with open_file(tmp_path, arena) as again:
        assert get(again, KEYS[:1], [0]) == [True]


# -- forks ---------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_child_is_refused_and_does_not_keep_the_lock(
    tmp_path: Path, arena: HostArena
) -> None:
    tier = open_file(tmp_path, arena)
    assert all(put(tier, KEYS[:2], [0, 1]))

    def check() -> None:
        with pytest.raises(StateError, match="forked"):
            tier.put(blocks_of(KEYS[:1], [0]), [0])
        tier.close()

    in_child(check)
    is_up, up = os.pipe()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.write(up, b"1")
        os.read(reading, 1)
        os._exit(0)
    try:
        os.read(is_up, 1)
        tier.close()
        with open_file(tmp_path, arena) as again:
            assert all(get(again, KEYS[:2], [0, 1]))
    finally:
        os.close(writing)
        os.waitpid(child, 0)
        for end in (reading, is_up, up):
            os.close(end)


def test_host_memory_of_other_slots_is_not_touched(tmp_path: Path, arena: HostArena) -> None:
    with open_file(tmp_path, arena) as tier:
        assert all(put(tier, KEYS[:3], [4, 9, 10]))
        arena.slots[:] = 170
        tier.get(blocks_of(KEYS[:3], [4, 9, 10]), [50, 20, 21]).wait(LONG_S)
        rest = np.delete(np.arange(arena.num_slots), [20, 21, 50])
        assert (arena.slots[rest] == 170).all()


@pytest.mark.parametrize("per_piece", [1, 5, NUM_SLOTS])
def test_damaged_blocks_are_the_only_misses_of_a_job(
    tmp_path: Path, arena: HostArena, per_piece: int
) -> None:
    fill(tmp_path, arena)
    damaged, foreign = {3, 16, 17, 30}, {8, 18}
    data = bytearray((tmp_path / "slots").read_bytes())
    for slot in damaged:
        data[slot * SLOT_BYTES + 100] ^= 4
    (tmp_path / "slots").write_bytes(data)
    order = np.random.default_rng(1).permutation(NUM_SLOTS).tolist()
    keys = [key_of(1000 + at) if at in foreign else KEYS[at] for at in order]
    bounds: dict[str, Any] = {"num_threads": 1, "max_in_flight_bytes": per_piece * SLOT_BYTES}
    with open_file(tmp_path, arena, **bounds) as tier:
        assert get(tier, keys, order) == [at not in damaged | foreign for at in order]
        assert tier.stats().mismatched_blocks == len(damaged | foreign)
        left = sorted(set(range(NUM_SLOTS)) - damaged)
        assert tier.records().slots.tolist() == left, "a damaged block is known no more"


def test_records_name_no_block_from_before_a_reset(tmp_path: Path, arena: HostArena) -> None:
    with open_file(tmp_path, arena) as tier:
        assert all(put(tier, KEYS[:4], range(4)))
        tier.renew().wait(LONG_S)
        assert all(put(tier, KEYS[4:6], [2, 9]))
        assert tier.records().slots.tolist() == [2, 9]
