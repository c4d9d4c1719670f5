"""Replays with a disk tier: real files, every block verified, and hits counted per tier."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.replay.scenario import FULL, MIXED, Checked, assert_ended_well, request, trace
from tests.tiers.damage import all_proven
from tests.tiers.setup import Here

from kvstow import ConfigError
from kvstow.cli import main
from kvstow.replay import ReplayConfig, ReplayEngine, Trace, figures_json
from kvstow.replay.model import ReplayModel
from kvstow.tiers.files import Buffers
from kvstow.tiers.slot_store import SlotStore

DOCUMENTS = [list(range(100 * number, 100 * number + 4)) for number in range(8)]
EACH_TWICE = trace(
    *(
        request(line, ids, output=17, at_s=float(line))
        for line, ids in enumerate([*DOCUMENTS, *DOCUMENTS], 1)
    )
)


@pytest.fixture(autouse=True)
def any_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstow.tiers.slot_file.Files", Here)


def replayed(
    path: Path | None, of: Trace = EACH_TWICE, model: ReplayModel = FULL, **options: Any
) -> dict[str, Any]:
    """Replay with a device and a host of a few blocks, and return the figures."""
    given = {"device_blocks": 24, "host_blocks": 10, "disk_blocks": 400} | options
    if path is None:
        del given["disk_blocks"]
    config = ReplayConfig(
        bandwidth_bytes_per_s=float("inf"),
        disk=None if path is None else str(path),
        max_requests=1,
        **given,
    )
    engine = ReplayEngine(of, config, observer=Checked(), model=model)
    try:
        engine.run()
        assert_ended_well(engine)
        return figures_json(engine)
    finally:
        engine.close()


def test_disk_returns_what_device_and_host_have_lost(tmp_path: Path) -> None:
    without, found = replayed(None), replayed(tmp_path / "disk")
    assert "disk" not in without["hit_blocks"]
    hits = found["hit_blocks"]
    assert hits["disk"] > 0
    assert sum(hits.values()) > sum(without["hit_blocks"].values())
    assert found["bytes_promoted"] == 4096 * found["promoted_blocks"]
    assert found["bytes_demoted"] == 4096 * found["demoted_blocks"]
    assert found["promoted_blocks"] == hits["disk"]
    on_device_and_host = hits["device"] + hits["host"]
    assert on_device_and_host + hits["disk"] + found["recomputed_blocks"] == found["asked_blocks"]


@pytest.mark.parametrize("verify", ["all", "off"])
def test_second_replay_finds_what_the_first_one_left(tmp_path: Path, verify: str) -> None:
    first = replayed(tmp_path / "disk", verify=verify)
    second = replayed(tmp_path / "disk")
    assert second["hit_blocks"]["disk"] > first["hit_blocks"]["disk"]
    assert second["demoted_blocks"] == 0, "what is there is not written again"


def test_returned_blocks_alone_are_written(tmp_path: Path) -> None:
    of = trace(
        *(
            request(line, ids, output=17, at_s=float(line))
            for line, ids in enumerate([*DOCUMENTS] * 3, 1)
        )
    )
    every = replayed(tmp_path / "all", of)
    returned = replayed(tmp_path / "returned", of, disk_admit="returned")
    assert 0 < returned["hit_blocks"]["disk"] < every["hit_blocks"]["disk"]
    assert 0 < returned["demoted_blocks"] <= every["demoted_blocks"]


@pytest.mark.parametrize(
    "options",
    [
        {"model": MIXED, "device_blocks": 80, "host_blocks": 40},
        {"world_size": 2},
        {"blocks_per_slot": 2},
        {"mode": "lazy"},
        {"policy": "hit-density"},
        {"faults": 3},
        {"sleep_at": (20, 60)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_no_block_is_corrupt_in_any_mode(tmp_path: Path, options: dict[str, Any]) -> None:
    found = replayed(tmp_path / "disk", **options)
    assert found["corrupt_blocks"] == 0
    assert found["hit_blocks"]["disk"] > 0


def test_replay_detects_a_disk_that_returns_another_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Here.read

    def read_another(self: Here, file: int, buffers: Buffers, offset: int) -> int:
        return read(self, file, buffers, max(0, offset - 4096))

    replayed(tmp_path / "disk")
    monkeypatch.setattr(SlotStore, "_are_proven", all_proven)
    config = ReplayConfig(
        device_blocks=24, host_blocks=10, disk=str(tmp_path / "disk"), disk_blocks=400,
        max_requests=1,
    )  # fmt: skip
    engine = ReplayEngine(EACH_TWICE, config, model=FULL)
    monkeypatch.setattr(Here, "read", read_another)
    try:
        engine.run()
        assert engine.verifier.num_corrupt > 0
    finally:
        engine.close()


def test_table_and_json_have_the_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["replay", "--limit", "40", "--device-blocks", "400", "--host-blocks", "100"]
    arguments += ["--disk", str(tmp_path / "disk"), "--disk-blocks", "2000"]
    assert main(arguments) == 0
    assert "hit on the disk" in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["options"]["disk_blocks"] == 2000
    assert found["hit_blocks"]["disk"] > 0


def test_table_and_json_say_whether_the_disk_began_warm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["replay", "--limit", "40", "--device-blocks", "400", "--host-blocks", "100"]
    arguments += ["--disk", str(tmp_path / "disk"), "--disk-blocks", "2000"]
    written = tmp_path / "found.json"
    for begins_warm in False, True:
        assert main([*arguments, "--json-file", str(written)]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        found = json.loads(written.read_text())
        assert (found["disk_warm_blocks"] > 0) is begins_warm
        assert ("warm on the disk" in shown) is begins_warm
        assert (f"warm on the disk {found['disk_warm_blocks']:,} slots" in shown) is begins_warm


def test_a_disk_of_another_model_says_what_to_remove(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["replay", "--limit", "4", "--disk", str(tmp_path / "disk"), "--disk-blocks", "20"]
    assert main(arguments) == 0
    capsys.readouterr()
    assert main([*arguments, "--model", "jamba"]) == 2
    error = capsys.readouterr().err
    assert error.endswith("); pass another path, or remove the file and its index\n")
    assert "on_mismatch" not in error


def test_a_disk_in_use_is_bad_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "disk")
    with ReplayEngine(EACH_TWICE, ReplayConfig(disk=path, disk_blocks=20)):
        assert main(["replay", "--limit", "4", "--disk", path, "--disk-blocks", "20"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kvstow: {path} is in use in this process; close the other one")
    assert error.count("\n") == 1


@pytest.mark.parametrize("given", [{"disk": "x"}, {"disk_blocks": 5}])
def test_disk_needs_both_its_options(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="a disk tier needs both"):
        ReplayConfig(**given)
