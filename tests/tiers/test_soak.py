"""Ten times its capacity goes through a slot file that has all the space of its file system.

`KVSTOW_TIER_SOAK_MIB` sets the size of the file system. It is mounted where this process may mount;
elsewhere the test watches the sizes of the files.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.tiers.setup import MODEL, SLOT_BYTES, blocks_of, bytes_of, key_of, new_arena

from kvstow.tiers import SlotFile
from kvstow.tiers.files import Files

MIB = int(os.environ.get("KVSTOW_TIER_SOAK_MIB", "12"))
NUM_HOST = 64
NUM_ROUNDS = 10
# A write splits the reserved extent that it fills. The list of extents may then take more blocks of
# 4 KiB, for which ext4 keeps space back.
MAX_SECTORS_OF_EXTENTS = 32


class Disk(Files):
    """The system's own calls, on any kind of file system."""

    def file_system(self, folder: str) -> str:
        return "ext4"


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """An empty file system of `MIB` MiB."""
    image, point = tmp_path / "image", tmp_path / "mounted"
    point.mkdir()
    if os.geteuid() or not shutil.which("mkfs.ext4"):
        pytest.skip("only root may mount")
    with image.open("wb") as file:
        file.truncate(MIB << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
    done = subprocess.run(["mount", "-o", "loop", str(image), str(point)], check=False)
    if done.returncode:
        pytest.skip("this system mounts no file")
    yield point
    subprocess.run(["umount", str(point)], check=True)


def used(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the size of each file, and its space on the disk."""
    stats = {path.name: path.stat() for path in folder.iterdir()}
    return {name: (it.st_size, it.st_blocks) for name, it in stats.items()}


def soak(folder: Path, max_bytes: int) -> int:
    """Write ten times `max_bytes`; return the slots. Sizes and space never change meanwhile."""
    with (
        new_arena(NUM_HOST) as arena,
        SlotFile(folder / "slots", max_bytes).open(arena, MODEL, files=Disk()) as tier,
    ):
        before = used(folder)
        number = 0
        while number < NUM_ROUNDS * tier.num_slots:
            keys = [key_of(number + at) for at in range(NUM_HOST)]
            for row, key in enumerate(keys):
                arena.slots[row] = bytes_of(key)
            slots = [(number + at) % tier.num_slots for at in range(NUM_HOST)]
            ticket = tier.put(blocks_of(keys, slots, number), range(NUM_HOST))
            ticket.wait()
            assert ticket.ok.all(), (number, ticket.error)
            for name, (size, sectors) in used(folder).items():
                assert size == before[name][0]
                assert 0 <= sectors - before[name][1] <= MAX_SECTORS_OF_EXTENTS
            number += NUM_HOST
        assert tier.mode == "on"
        return tier.num_slots


def test_full_file_system_never_lacks_space(mounted: Path) -> None:
    def free() -> int:
        return Files().space(str(mounted))[1]

    # Metadata takes some of what is free, so take away slots until the files fit.
    max_bytes, num_slots = free(), 0
    while not num_slots:
        try:
            num_slots = soak(mounted, max_bytes)
        except Exception as error:
            assert "No space left" in str(error) or "bytes free" in str(error), error
            assert set(used(mounted)) == {"lost+found"}, "a refused opening leaves nothing"
            max_bytes -= 16 * SLOT_BYTES
    assert free() < 64 * SLOT_BYTES, "the file has nearly all space"
    assert num_slots > NUM_HOST
    assert set(used(mounted)) == {"lost+found", "slots", "slots.index"}


def test_files_keep_their_sizes(tmp_path: Path) -> None:
    max_bytes = SlotFile.bytes_for(2 * NUM_HOST, SLOT_BYTES)
    assert soak(tmp_path, max_bytes) == 2 * NUM_HOST
    assert sum(size for size, _ in used(tmp_path).values()) <= max_bytes


def test_file_that_grows_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without space that is reserved before, the files grow with the writes."""
    monkeypatch.setattr(Disk, "allocate", lambda self, file, size: self.truncate(file, size))
    with pytest.raises(AssertionError):
        soak(tmp_path, SlotFile.bytes_for(2 * NUM_HOST, SLOT_BYTES))
