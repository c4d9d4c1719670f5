"""The command `kvstow snapshot info`."""

import json
import re
from pathlib import Path

import pytest
from tests.engine.sleep_world import BLOCK, World, prompt, put_to_sleep
from tests.engine.test_snapshot_file import PAGE, forge

from kvstow import hash_tokens
from kvstow.cli import main

# -- kvstow snapshot info ----------------------------------------------------------------------


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "image"
    put_to_sleep(path)
    return path


def test_info_shows_the_contents_of_a_file(image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["snapshot", "info", str(image), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    blocks = {*hash_tokens(prompt(1, 18), BLOCK), *hash_tokens(prompt(2, 17), BLOCK)}
    blocks |= {*hash_tokens(prompt(3, 13), BLOCK)}
    assert facts["cached_blocks"] == len(blocks)
    assert (facts["requests"], facts["tokens"]) == (3, 18 + 13)
    assert (facts["used_slots"], facts["slot_bytes"]) == (len(blocks) + 2, 8 * BLOCK)
    assert (facts["identity"], facts["weights_version"], facts["version"]) == ("a model", "7", 1)
    assert facts["file_bytes"] == image.stat().st_size
    assert facts["bytes_on_disk"] < facts["file_bytes"], "empty slots are holes"
    assert (facts["sound"], facts["problem"]) == (True, None)
    assert main(["snapshot", "info", str(image)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^ +file +\S", shown, re.MULTILINE), "a title would be as narrow as the rows"
    assert "a model" in shown


def test_info_does_not_let_a_file_steer_the_terminal(
    image: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forge(image, lambda header: header.update(identity="a\n\x1b[2J"))
    assert main(["snapshot", "info", str(image)]) == 0
    assert r"a\n\x1b[2J" in capsys.readouterr().out


def test_info_finds_damage(image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = image.read_bytes()
    at = whole.find(World.value(prompt(2, 17), 0, 0)[12:16].tobytes())
    damaged = bytearray(whole)
    damaged[at] ^= 1
    image.write_bytes(damaged)
    assert main(["snapshot", "info", str(image), "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert "1 slots are damaged" in facts["problem"]
    image.write_bytes(whole[:-PAGE])
    assert main(["snapshot", "info", str(image)]) == 1
    assert "were written" in capsys.readouterr().err
    assert main(["snapshot", "info", str(image), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["sound"] is False
    assert main(["snapshot", "info", str(image) + ".not"]) == 2
