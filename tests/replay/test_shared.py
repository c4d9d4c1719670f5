"""Replays that share a store: the second finds what the first computed, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.tiers.resp.server import Server

from kvstow.cli import main

SMALL = ["--limit", "25", "--device-blocks", "350", "--host-blocks", "600"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path, "--maxmemory", "500mb") as server:
        yield server


def figures(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["replay", *SMALL, "--json", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["corrupt_blocks"] == 0
    assert found["finished_requests"] == 25
    return found


@pytest.mark.parametrize("options", [(), ("--model", "gemma-3"), ("--world-size", "2")])
def test_a_second_replay_finds_what_the_first_computed(
    server: Server, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    alone = figures(capsys, *options)
    shared = ("--shared", server.url, *options)
    first, second = figures(capsys, *shared), figures(capsys, *shared)
    assert first["demoted_blocks"] > 0
    assert second["hit_blocks"]["shared"] > first["hit_blocks"]["shared"]
    assert second["recomputed_blocks"] < first["recomputed_blocks"]
    assert first["recomputed_blocks"] <= alone["recomputed_blocks"]
    assert second["verified_blocks"] > 0
    assert second["failed_shared_blocks"] == 0
    assert second["shared_found_blocks"] >= second["promoted_blocks"] > 0


def test_the_table_has_the_hits_of_the_store(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", *SMALL, "--shared", server.url]) == 0
    shown = capsys.readouterr().out
    for name in ("hit in the store", "found in the store", "slots demoted", "slots promoted"):
        assert name in shown


def test_a_replay_takes_a_disk_and_a_store(
    server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shared = ["--shared", server.url]
    first = figures(capsys, *shared)
    both = ["--disk", str(tmp_path / "slots"), "--disk-blocks", "2000", *shared]
    second, third = figures(capsys, *both), figures(capsys, *both)
    assert second["recomputed_blocks"] < first["recomputed_blocks"]
    assert second["shared_got_blocks"] > 0
    assert third["hit_blocks"]["disk_and_shared"] > 0
    assert third["shared_got_blocks"] < second["shared_got_blocks"], "the disk has them now"
    assert main(["replay", *SMALL, *both]) == 0
    shown = capsys.readouterr().out
    for name in ("hit on disk or store", "found in the store", "evicted, disk"):
        assert name in shown
