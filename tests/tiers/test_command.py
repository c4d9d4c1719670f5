"""The command `kvstow tier`."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiers.damage import flip
from tests.tiers.setup import (
    LONG_S,
    NUM_SLOTS,
    SLOT_BYTES,
    Here,
    get,
    key_of,
    open_file,
    put,
)

from kvstow.cli import main
from kvstow.tiers.inspection import Verified, inspected
from kvstow.tiers.slot_index import HEADER_BYTES, read_header
from kvstow.transfer import HostArena

KEYS = [key_of(number) for number in range(6)]
SLOTS = [0, 1, 2, 3, 9, 20]


@pytest.fixture
def path(tmp_path: Path, arena: HostArena) -> Path:
    with open_file(tmp_path, arena) as tier:
        assert all(put(tier, KEYS, SLOTS))
    return tmp_path / "slots"


def facts_of(
    command: str, path: Path, capsys: pytest.CaptureFixture[str], status: int = 0
) -> dict[str, object]:
    assert main(["tier", command, str(path), "--json"]) == status
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    assert found["sound"] is (status == 0)
    return found


def test_info_shows_what_a_file_holds(
    path: Path, arena: HostArena, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = facts_of("info", path, capsys)
    assert facts["fingerprint"] == {"model": "a", "rank": 0, "world_size": 1}
    assert (facts["slots"], facts["slot_bytes"]) == (NUM_SLOTS, SLOT_BYTES)
    assert (facts["blocks"], facts["warm_blocks"], facts["dropped_records"]) == (6, 6, 0)
    index = path.with_name("slots.index")
    assert facts["file_bytes"] == path.stat().st_size + index.stat().st_size
    with open_file(path.parent, arena):
        assert facts_of("info", path, capsys)["blocks"] == 6, "it may be in use"
    assert main(["tier", "info", str(path)]) == 0
    assert "warm blocks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("value", "status", "shown"),
    [("a\n\x1b[2J", 0, r"a\n\x1b[2J"), (float("inf"), 1, "makes no sense")],
)
def test_info_shows_a_forged_header_without_harm(
    path: Path, capsys: pytest.CaptureFixture[str], value: Any, status: int, shown: str
) -> None:
    index = path.with_name("slots.index")
    page = np.fromfile(index, np.uint8, HEADER_BYTES)
    header = replace(read_header(str(index), page), fingerprint={"model": value})
    with index.open("r+b") as file:
        file.write(header.encode().tobytes())
    assert main(["tier", "info", str(path)]) == status
    assert shown in "".join(capsys.readouterr())


def test_info_shows_a_path_that_steers_a_terminal_without_harm(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (path, path.with_name("slots.index")):
        file.rename(file.with_name(file.name.replace("slots", "a\x9b2J")))
    assert main(["tier", "info", str(path.with_name("a\x9b2J"))]) == 0
    assert r"a\x9b2J" in capsys.readouterr().out


def test_a_folder_is_refused_with_the_file_in_it(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tier", "info", str(path.parent)]) == 2
    assert f"is a folder: pass the path of a slot file, such as {path}" in capsys.readouterr().err


def test_blocks_of_a_renewed_generation_are_not_warm(
    path: Path, arena: HostArena, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_file(path.parent, arena) as tier:
        tier.renew().wait(LONG_S)
        assert all(put(tier, KEYS[:2], [0, 1]))
    facts = facts_of("info", path, capsys)
    assert (facts["blocks"], facts["warm_blocks"], facts["dropped_records"]) == (2, 0, 4)


def test_verify_counts_the_damaged_blocks(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = facts_of("verify", path, capsys)
    assert (facts["sound_blocks"], facts["bad_blocks"]) == (6, 0)
    flip(path, 9 * SLOT_BYTES + 17)
    flip(path, 2 * SLOT_BYTES)
    flip(path, 11 * SLOT_BYTES)  # holds no block
    facts = facts_of("verify", path, capsys, 1)
    assert (facts["sound_blocks"], facts["bad_blocks"]) == (4, 2)
    assert "slots 2, 9" in str(facts["problem"])
    assert main(["tier", "verify", str(path)]) == 1
    problem = capsys.readouterr().err
    assert f"damaged blocks of {path}: 2, in slots 2, 9. They are misses." in problem
    assert problem.endswith("After kill -9 a few are normal; otherwise check the disk\n")


def test_verify_reads_batch_by_batch(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstow.tiers.inspection._BATCH_BYTES", 4 * SLOT_BYTES)
    assert facts_of("verify", path, capsys)["sound_blocks"] == 6
    flip(path, 20 * SLOT_BYTES)
    assert "slots 20" in str(facts_of("verify", path, capsys, 1)["problem"])


def test_verify_reads_through_the_page_cache_where_direct_reads_fail(path: Path) -> None:
    """As on a file system that takes the flag, and then refuses each read."""

    class Indirect(Here):
        is_direct = False

        def set_direct(self, file: int, is_direct: bool) -> None:
            self.is_direct = is_direct

        def read(self, file: int, buffers: list[np.ndarray], offset: int) -> int:
            if self.is_direct:
                raise OSError(errno.EINVAL, "Invalid argument")
            return super().read(file, buffers, offset)

    with inspected(str(path), to_lock=True, files=Indirect()) as found:
        assert found.verify() == Verified(6, [])


def test_verify_without_checksums_finds_no_damage(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the checksum is what finds the damage."""
    flip(path, 9 * SLOT_BYTES + 17)
    with inspected(str(path), to_lock=True, files=Here()) as found:
        sums = found.frames["checksum"].copy()
    monkeypatch.setattr("kvstow.tiers.inspection.row_digests", lambda _, host: sums[host])
    assert facts_of("verify", path, capsys)["bad_blocks"] == 0


def test_file_that_is_cut_short_is_not_sound(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with path.open("r+b") as file:
        file.truncate(10 * SLOT_BYTES)
    facts = facts_of("verify", path, capsys, 1)
    assert (facts["blocks"], facts["dropped_records"], facts["bad_blocks"]) == (5, 1, 0)
    assert "cut short" in str(facts["problem"])


def test_reset_drops_every_block(
    path: Path, arena: HostArena, capsys: pytest.CaptureFixture[str]
) -> None:
    size = path.stat().st_size
    assert facts_of("reset", path, capsys)["dropped_blocks"] == 6
    assert facts_of("info", path, capsys)["blocks"] == 0
    assert facts_of("verify", path, capsys)["bad_blocks"] == 0
    assert path.stat().st_size == size
    with open_file(path.parent, arena) as tier:
        assert len(tier.records()) == 0
        assert not any(get(tier, KEYS, SLOTS))
        assert all(put(tier, KEYS, SLOTS))
    with open_file(path.parent, arena) as tier:
        assert len(tier.records()) == 6, "the new blocks are warm"


def test_reset_syncs_its_header(path: Path) -> None:
    class Counting(Here):
        num_syncs = 0

        def sync(self, file: int) -> None:
            self.num_syncs += 1

    files = Counting()
    with inspected(str(path), to_lock=True, to_write=True, files=files) as found:
        found.reset()
    assert files.num_syncs == 1


@pytest.mark.parametrize("command", ["verify", "reset"])
def test_file_in_use_is_refused(
    command: str, path: Path, arena: HostArena, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_file(path.parent, arena) as tier:
        assert main(["tier", command, str(path)]) == 2
        shown = capsys.readouterr().err
        assert (
            "is in use in this process; stop what uses it, because this command needs it" in shown
        )
        assert "vLLM" not in shown
        assert all(get(tier, KEYS, SLOTS))


@pytest.mark.parametrize("command", ["info", "verify", "reset"])
def test_damaged_header_is_a_problem_with_a_fix(
    command: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(path.with_name("slots.index"), HEADER_BYTES - 100)
    problem = str(facts_of(command, path, capsys, 1)["problem"])
    assert "does not have its checksum" in problem
    assert "or remove" in problem


@pytest.mark.parametrize("command", ["info", "verify", "reset"])
def test_another_kind_of_file_is_refused(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"mine")
    assert main(["tier", command, str(other)]) == 2
    refused = capsys.readouterr().err
    assert "other.index does not exist" in refused
    assert "kvstow snapshot info" in refused
    (tmp_path / "other.index").write_bytes(b"my index")
    assert main(["tier", command, str(other)]) == 2
    assert "does not begin as an index does" in capsys.readouterr().err
    assert (tmp_path / "other.index").read_bytes() == b"my index"
    assert main(["tier", command, str(tmp_path / "other.index")]) == 2
    assert f"is the index of a slot file: pass {other}\n" in capsys.readouterr().err
    assert main(["tier", command, str(tmp_path / "none")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_block_that_cannot_be_read_is_bad(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self: Here, file: int, buffers: list[np.ndarray], offset: int) -> int:
        if buffers[0].nbytes % SLOT_BYTES == 0 and offset <= 2 * SLOT_BYTES < offset + sum(
            map(len, buffers)
        ):
            raise OSError(5, "Input/output error")
        return plain(self, file, buffers, offset)

    with inspected(str(path), to_lock=True, files=Here()) as found:
        plain = Here.read
        monkeypatch.setattr(Here, "read", read)
        verified = found.verify()
    assert (verified.num_sound, verified.bad_slots) == (5, [2])
    assert verified.error is not None
