"""`kvstow bench`: what it measures is right, and what it prints."""

from __future__ import annotations

import gc
import importlib.util
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.tiers.memory import MemoryTier
from tests.tiers.resp.server import Server
from tests.tiers.resp.tls import Authority, TlsServer

from kvstow import cli
from kvstow.bench import accounting, copy
from kvstow.bench.accounting import KvstowSide, measure_accounting
from kvstow.bench.tier import JOBS, NUM_SLOTS, measure_tier
from kvstow.tiers import TierTicket
from kvstow.tiers.files import Buffers, Files
from kvstow.tiers.tier import Checked
from kvstow.transfer import HostArena
from kvstow.transfer.mover import Direction


@pytest.fixture(autouse=True)
def still_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what `frozen_heap` froze: the bench collects several times, and would look at it all."""
    monkeypatch.setattr(gc, "unfreeze", lambda: None)


SMALL = ["copy", "--device", "host", "--size", "1MiB", "--turns", "1"]


def test_accounting_without_a_rival() -> None:
    rows = measure_accounting(8, 1, {})
    assert [row.num_blocks for row in rows] == [8, 8, 8, None]
    assert all(row.kvstow_us > 0 and row.vllm_us is None for row in rows)


class Forgetful(KvstowSide):
    """A side that finds one block less."""

    def look_up(self, request: int) -> list[int]:
        return super().look_up(request)[:-1]


class Stuck(KvstowSide):
    """A side that grants no slot for a new token."""

    def step(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize("side", [Forgetful, Stuck])
def test_sides_that_take_different_blocks_are_not_compared(side: type[KvstowSide]) -> None:
    measure_accounting(8, 1, {"vllm": KvstowSide})
    with pytest.raises(RuntimeError, match="took different blocks"):
        measure_accounting(8, 1, {"vllm": side})


def test_prompts_evict_each_other_and_find_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup that found nothing would be fast, and mean nothing."""
    found: list[int] = []

    class Watched(KvstowSide):
        def look_up(self, request: int) -> list[int]:
            blocks = super().look_up(request)
            found.append(len(blocks))
            return blocks

    monkeypatch.setattr(accounting, "KvstowSide", Watched)
    measure_accounting(8, 2, {})
    assert found == [8] * 6


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_both_sides_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "accounting", "--blocks", "32", "--turns", "1", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["turns"] == 1 and len(made["rows"]) == 4
    assert all(row["vllm_us"] > 0 for row in made["rows"])


def test_copies_are_compared_with_memcpy(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *SMALL, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["device"] == "host" and made["job_bytes"] == 1 << 20
    kinds = [(row["fragment_kib"], row["direction"]) for row in made["rows"]]
    assert kinds == [(kib, way) for kib in copy.LAYERS for way in ("store", "load")]
    assert all(row["is_right"] and row["gb_per_s"] > 0 for row in made["rows"])
    assert cli.main(["bench", *SMALL]) == 0
    assert "memcpy GB/s" in capsys.readouterr().out


def test_copies_that_need_more_than_the_free_memory_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvstow.bench.command.free_memory", lambda: 16 << 30)
    assert cli.main(["bench", "copy", "--device", "host", "--size", "1000GiB"]) == 2
    message = capsys.readouterr().err
    assert "needs 8,000.0 GiB, and 16.0 GiB of memory are free: pass --size 2048MiB" in message


@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_wrong_byte_fails_the_command(
    direction: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = copy.Pool.copy

    def wrong(self: copy.Pool, way: Direction) -> float:
        seconds = right(self, way)
        if way == direction:
            self.arena.slots[self.slots[way][0], -1] ^= 1
        return seconds

    monkeypatch.setattr(copy.Pool, "copy", wrong)
    assert cli.main(["bench", *SMALL]) == 1
    assert capsys.readouterr().out.count("WRONG") == len(copy.LAYERS)


@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_copy_that_does_nothing_fails_the_command(
    direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = copy.Pool.copy
    monkeypatch.setattr(
        copy.Pool,
        "copy",
        lambda self, way: 1.0 if way == direction else right(self, way),
    )
    assert cli.main(["bench", *SMALL]) == 1


@pytest.fixture
def tier() -> Iterator[MemoryTier]:
    with HostArena(NUM_SLOTS, 4096) as arena, MemoryTier(arena, NUM_SLOTS) as tier:
        yield tier


def test_blocks_go_to_a_tier_and_come_back(tier: MemoryTier) -> None:
    rows = measure_tier(tier, 2, has_slots=True)
    assert [(row.action, row.num_blocks) for row in rows] == [
        (action, number) for number in JOBS for action in ("put", "get")
    ]
    assert all(row.gb_per_s > 0 and not (row.num_failed or row.num_wrong) for row in rows)
    assert not tier._held, "the blocks are deleted"


@pytest.mark.parametrize("damage", ["lost", "other bytes"])
def test_what_a_tier_loses_or_damages_counts(
    damage: str, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = MemoryTier._put

    def wrong(self: MemoryTier, blocks: Checked, *more: Any) -> TierTicket:
        ticket = put(self, blocks, *more)
        slot, (digest, group, data) = next(iter(self._held.items()))
        self._held[slot] = (digest, group, data[:-1] + bytes([data[-1] ^ 1]))
        if damage == "lost":
            del self._held[slot]
        return ticket

    monkeypatch.setattr(MemoryTier, "_put", wrong)
    rows = measure_tier(tier, 2, has_slots=True)
    gets = [row for row in rows if row.action == "get"]
    assert [row.num_failed for row in gets] == ([3, 3] if damage == "lost" else [0, 0])
    assert [row.num_wrong for row in gets] == ([0, 0] if damage == "lost" else [3, 3])


def test_interrupt_leaves_no_block_of_a_put_under_way(
    tier: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, writers = MemoryTier._put, []

    def late(self: MemoryTier, blocks: Checked, *more: Any) -> TierTicket:
        ticket = TierTicket(len(blocks))
        ticket.announce()

        def write() -> None:
            put(self, blocks, *more)
            ticket.end()

        writers.append(threading.Timer(0.05, write))
        writers[0].start()
        return ticket

    def interrupted(call: Callable[..., TierTicket], *given: Any) -> None:
        call(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(MemoryTier, "_put", late)
    monkeypatch.setattr("kvstow.bench.tier._timed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure_tier(tier, 2, has_slots=True)
    writers[0].join()
    assert not tier._held


def test_disk_is_measured_and_left_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "disk", str(tmp_path), "--size", "8KiB", "--turns", "2"]
    assert cli.main([*command, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert [(row["action"], row["num_blocks"]) for row in made["rows"]] == [
        (action, number) for number in JOBS for action in ("put", "get")
    ]
    assert all(row["num_failed"] == row["num_wrong"] == 0 for row in made["rows"])
    assert made["block_bytes"] == 8192
    assert list(tmp_path.iterdir()) == []
    assert cli.main(command) == 0
    assert ("no direct I/O" in capsys.readouterr().out) == (made["not_direct"] is not None)


def test_signal_that_ends_the_command_leaves_no_slot_file(tmp_path: Path) -> None:
    """`timeout` sends its signal twice, and the second one may come while the command unwinds."""
    kill = f"os.kill(os.getpid(), {signal.SIGTERM:d})\n"
    program = (
        "import os, sys\nfrom kvstow import cli\nfrom kvstow.bench import command\n"
        f"def measure(*_, **__):\n try: {kill} finally: {kill}"
        "command.measure_tier = measure\n"
        "sys.exit(cli.main(['bench', 'disk', sys.argv[1], '--size', '8KiB']))"
    )
    child = subprocess.run([sys.executable, "-c", program, tmp_path], check=False, timeout=60)
    assert child.returncode == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_damages_blocks_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = Files.write

    def lose_blocks(files: Files, file: int, buffers: Buffers, offset: int) -> int:
        num_bytes = sum(len(buffer) for buffer in buffers)
        return num_bytes if num_bytes >= 8192 else write(files, file, buffers, offset)

    monkeypatch.setattr(Files, "write", lose_blocks)
    command = ["bench", "disk", str(tmp_path), "--size", "8KiB", "--turns", "1"]
    assert cli.main([*command, "--json"]) == 1
    made = json.loads(capsys.readouterr().out)
    assert [row["num_failed"] for row in made["rows"]] == [0, 2, 0, 64]
    assert list(tmp_path.iterdir()) == []


def test_shared_store_is_measured_and_left_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Server(tmp_path) as server:
        command = ["bench", "shared", server.url, "--size", "8KiB", "--turns", "1"]
        assert cli.main([*command, "--json"]) == 0
        made = json.loads(capsys.readouterr().out)
        assert made["block_bytes"] == 8192 and len(made["rows"]) == 4
        assert server.command("DBSIZE") == b":0\r\n"
        assert cli.main(command) == 0
        assert "put 32 blocks" in capsys.readouterr().out
        server.kill()
        assert cli.main(command) == 74
        assert "Connection refused" in capsys.readouterr().err


def test_a_store_that_refuses_the_login_is_one_line_that_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with Server(tmp_path, "--requirepass", "secret") as server:
        assert cli.main(["bench", "shared", server.url, "--size", "8KiB"]) == 74
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "set KVSTOW_SHARED_USERNAME and KVSTOW_SHARED_PASSWORD" in err
    assert not caplog.records, "what a server logs of its tier says nothing of a measurement"


def test_shared_store_takes_the_files_that_a_server_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    authority, password = Authority(tmp_path), tmp_path / "password"
    password.write_text("secret")
    issued = authority.issue("127.0.0.1")
    with Server(tmp_path, "--requirepass", "secret") as plain, TlsServer(plain.port, issued) as tls:
        url = f"rediss://127.0.0.1:{tls.port}"
        command = ["bench", "shared", url, "--size", "8KiB", "--turns", "1"]
        login, proof = ["--password-file", str(password)], ["--ca-file", authority.ca_file]
        assert cli.main([*command, *login, *proof]) == 0
        assert "put 32 blocks" in capsys.readouterr().out
        assert cli.main([*command, *proof]) == 74
        assert cli.main([*command, *login]) == 74
        assert cli.main([*command, "--password-file", str(tmp_path / "missing"), *proof]) == 2
        assert "missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["copy", "--size", "10"], "size is 10; it must be at least 1MiB"),
        (["copy", "--size", "many"], "size is 'many'"),
        (["copy", "--turns", "0"], "--turns"),
        (["disk", "missing"], "missing"),
        (["disk", ".", "--size", "1GiB"], "size is 1GiB; it must be 1 byte to 64MiB"),
        (["shared", "http://host"], "redis://"),
        (["shared", "mooncake://host/path"], "mooncake://HOST:PORT"),
        (["shared", "redis://host", "--size", "1GiB"], "size is 1GiB; it must be 1 byte to 64MiB"),
        (["accounting", "--blocks", "0"], "--blocks"),
    ],
)
def test_bad_input_ends_with_status_2(
    arguments: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", "copy", "--device", "cuda"]) == 2
    assert "reaches no GPU: run kvstow doctor, or pass --device host" in capsys.readouterr().err
