"""vLLM's real engine with a disk below the host: what fell off both comes back, checked.

A restart here is another engine in this process. `test_server_disk` restarts a server's processes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiers.damage import all_proven
from tests.vllm import models
from tests.vllm.engine import (
    BLOCK_SIZE,
    DAMAGE,
    REST_S,
    TOLERANCE,
    Answer,
    Engine,
    difference,
    prompts,
)
from tests.vllm.full import kinds
from tests.vllm.halves_below import folder_on_disk

from kvstow.tiers.slot_store import SlotStore

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own, and those of what it imports

# Each test starts several engines, so CI has time for two kinds.
IN_CI = [("llama", "sync"), ("gemma", "async")]
PROMPTS = prompts(8, 300)
NUM_HIT = (300 - 1) // BLOCK_SIZE * BLOCK_SIZE
# Blocks of the device, and of a host with room for two or three of the eight prompts.
MODELS: dict[str, tuple[dict[str, object], int, int]] = {
    "llama": (models.LLAMA, 40, 24),
    "gemma": (models.GEMMA, 100, 50),
    "granite": (models.GRANITE, 80, 24),
    "qwen-next": (models.QWEN_NEXT, 80, 24),
}


@pytest.fixture
def disk() -> Iterator[Path]:
    with folder_on_disk() as folder:
        yield folder


kind = kinds(MODELS, IN_CI)


@pytest.fixture(scope="module")
def reference(
    kind: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Answer]]:
    """The folder of a model, and its answers without a connector."""
    config, num_blocks, _ = MODELS[kind[0]]
    folder = models.make_model(config, tmp_path_factory.mktemp(kind[0]))
    engine = Engine(folder, num_blocks=num_blocks, scheduling=kind[1])
    answers = engine.generate(PROMPTS)
    engine.close()
    return folder, answers


def start(folder: Path, kind: tuple[str, str], disk: Path, **more: Any) -> Engine:
    _, num_blocks, num_host_blocks = MODELS[kind[0]]
    options = {
        "num_cpu_blocks": num_host_blocks,
        "disk_path": str(disk),
        "disk_bytes_to_use": "64MiB",
        "min_promote_tokens": 0,
        "promote_timeout_s": 60,
        **more,
    }
    return Engine(folder, num_blocks=num_blocks, scheduling=kind[1], options=options)


def one_by_one(engine: Engine, asked: list[list[int]]) -> list[Answer]:
    """Answer prompts one after the other, so that each falls off the device and the host."""
    answers = []
    for tokens in asked:
        answers += engine.generate([tokens])
        engine.settle()
    return answers


def wait_until_on(engine: Engine) -> None:
    """Serve until the disk's new generation is durable."""
    end_s = time.monotonic() + REST_S
    assert engine.half.offload is not None
    while engine.half.offload.disk_mode != "on":
        assert time.monotonic() < end_s, "the disk stays off"
        one_by_one(engine, PROMPTS[:1])


def flip_all_slots(disk: Path) -> None:
    """Change a byte in each page of the slot file."""
    with open(disk / "rank0-of-1", "r+b") as file:
        content = np.frombuffer(file.read(), np.uint8).copy()
        content[3::64] ^= 0x7F
        file.seek(0)
        file.write(content.tobytes())


def test_blocks_come_back_from_the_disk_also_after_a_restart(
    kind: tuple[str, str],
    reference: tuple[Path, list[Answer]],
    disk: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, expected = reference
    engine = start(folder, kind, disk)
    assert difference(one_by_one(engine, PROMPTS), expected) < TOLERANCE
    again = one_by_one(engine, PROMPTS)
    stats = engine.half.stats()
    print(stats, [each.num_cached for each in again])
    assert stats["promoted_blocks"] > 0 and stats["disk_hit_tokens"] > 0
    assert difference(again, expected) < TOLERANCE
    together = engine.generate(PROMPTS)
    assert difference(together, expected) < TOLERANCE
    engine.settle()
    engine.check_idle()
    engine.close()

    engine = start(folder, kind, disk)
    first, *rest = PROMPTS
    found = engine.generate([first])
    assert found[0].num_cached == again[0].num_cached, "the first request hits the disk"
    found += engine.generate(rest)
    print(engine.half.stats(), [each.num_cached for each in found])
    assert difference(found, expected) < TOLERANCE
    engine.settle()
    engine.check_idle()
    engine.close()

    # Damage is a miss; with the comparison off, it changes the answers.
    flip_all_slots(disk)
    engine = start(folder, kind, disk)
    found = one_by_one(engine, PROMPTS)
    assert not any(each.num_cached for each in found)
    assert engine.half.stats()["failed_promotes"] > 0
    assert difference(found, expected) < TOLERANCE
    engine.settle()
    engine.close()
    flip_all_slots(disk)
    monkeypatch.setattr(SlotStore, "_are_proven", all_proven)
    engine = start(folder, kind, disk)
    found = one_by_one(engine, PROMPTS)
    assert any(each.num_cached for each in found)
    assert difference(found, expected) > DAMAGE
    engine.close()


def test_an_orderly_end_saves_what_only_the_host_has(
    kind: tuple[str, str], reference: tuple[Path, list[Answer]], disk: Path
) -> None:
    folder, expected = reference
    engine = start(folder, kind, disk, disk_admit="returned")
    one_by_one(engine, PROMPTS[:2])
    assert engine.half.stats()["demoted_blocks"] == 0
    engine.close()
    engine = start(folder, kind, disk)
    for at in (1, 0):
        found = engine.generate(PROMPTS[at : at + 1])
        assert found[0].num_cached > 0
        assert difference(found, expected[at : at + 1]) < TOLERANCE
    assert engine.half.stats()["failed_promotes"] == 0
    engine.settle()
    engine.check_idle()
    engine.close()


def test_sleep_keeps_the_disk_and_a_reset_empties_it(
    kind: tuple[str, str], reference: tuple[Path, list[Answer]], disk: Path, tmp_path: Path
) -> None:
    folder, expected = reference
    version = tmp_path / "version"
    version.write_text("one")
    sleeps = {"preserve_on_sleep": True, "weights_version_path": str(version)}
    engine = start(folder, kind, disk, **sleeps)
    one_by_one(engine, PROMPTS)
    engine.sleep()
    engine.wake()
    found = engine.generate(PROMPTS[:1])
    assert found[0].num_cached > 0 and engine.half.stats()["disk_hit_tokens"] > 0
    assert difference(found, expected[:1]) < TOLERANCE
    engine.settle()
    version.write_text("two")
    engine.sleep()
    engine.wake()
    assert engine.half.stats()["disk_resident_blocks"] == 0
    found = one_by_one(engine, PROMPTS)
    assert not any(each.num_cached for each in found)
    assert difference(found, expected) < TOLERANCE
    wait_until_on(engine)
    one_by_one(engine, PROMPTS)
    assert one_by_one(engine, PROMPTS[:1])[0].num_cached > 0, "the disk is on again"
    engine.close()
    # The generation of a reset is never warm.
    version.write_text("one")
    engine = start(folder, kind, disk, **sleeps)
    assert engine.generate(PROMPTS[:1])[0].num_cached == 0
    engine.close()
