"""vLLM's real engine with a disk before a shared store: each serves what the other lacks.

`test_both` compares bytes without an engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.tiers.damage import all_proven
from tests.tiers.resp.server import Server as Store
from tests.vllm import models
from tests.vllm.engine import BLOCK_SIZE, DAMAGE, TOLERANCE, Answer, Engine, difference, prompts
from tests.vllm.full import full, kinds
from tests.vllm.halves_below import folder_on_disk
from tests.vllm.sharing import AnySum, redis_of
from tests.vllm.test_engine_disk import flip_all_slots
from tests.vllm.test_engine_shared import damage_all

from kvstow.tiers.slot_store import SlotStore
from kvstow.vllm.below.both_worker import BothWorker

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own, and those of what it imports

IN_CI = [("llama", "async")]
# The blocks of the first two are in the store only, and those of the others on the disk only.
PROMPTS = prompts(4, 300)
NUM_HIT = (300 - 1) // BLOCK_SIZE * BLOCK_SIZE
PER_PROMPT = 300 // BLOCK_SIZE
# Blocks of the device, of a host with room for two or three prompts, and slots of the file.
MODELS: dict[str, tuple[dict[str, object], int, int]] = {
    "llama": (models.LLAMA, 80, 20),
    "gemma": (models.GEMMA, 100, 50),
    "granite": (models.GRANITE, 80, 24),
}


@pytest.fixture
def disk() -> Iterator[Path]:
    with folder_on_disk() as folder:
        yield folder


kind = kinds(MODELS, IN_CI)


@pytest.fixture(scope="module")
def model(kind: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.make_model(MODELS[kind[0]][0], tmp_path_factory.mktemp(kind[0]))


def start(model: Path, kind: tuple[str, str], disk: Path, store: Store, **more: Any) -> Engine:
    _, num_blocks, num_host_blocks = MODELS[kind[0]]
    disk.mkdir(exist_ok=True)
    options = {
        "num_cpu_blocks": num_host_blocks,
        "disk_path": str(disk),
        "disk_bytes_to_use": "100MiB",
        "shared": store.url,
        "min_promote_tokens": 0,
        "promote_timeout_s": 60,
        "shared_ask_timeout_s": 20,
        "shared_timeout_s": 60,
        **more,
    }
    return Engine(model, num_blocks=num_blocks, scheduling=kind[1], options=options)


def answers(engine: Engine, asked: list[list[int]]) -> tuple[list[Answer], int, int]:
    """Answer prompts in turn; return how many blocks came from the disk, and from the store."""
    names = "promoted_blocks", "shared_promoted_blocks"
    engine.settle()  # the tier learns of its ranks
    before, found = engine.half.stats(), []
    for tokens in asked:
        found += engine.generate([tokens])
        engine.settle()
    engine.check_idle()
    after = engine.half.stats()
    from_disk, from_store = (after[name] - before.get(name, 0) for name in names)
    return found, from_disk, from_store


def compute(engine: Engine, asked: list[list[int]]) -> list[Answer]:
    """Answer prompts that no tier has, and end the engine."""
    found, *num_moved = answers(engine, asked)
    assert num_moved == [0, 0] and not any(each.num_cached for each in found)
    engine.close()
    return found


def test_the_disk_gives_what_it_has_and_the_store_gives_the_rest(
    kind: tuple[str, str], model: Path, disk: Path, store: Store
) -> None:
    is_llama = kind[0] == "llama"
    of_disk = compute(start(model, kind, disk / "a", store), PROMPTS[2:])
    redis_of(store).flushall()
    of_store = compute(start(model, kind, disk / "b", store), PROMPTS[:2])
    expected = of_store + of_disk

    engine = start(model, kind, disk / "a", store)
    found, from_disk, from_store = answers(engine, PROMPTS[:2])
    assert from_disk == 0 and from_store > 0 and all(each.num_cached for each in found)
    more, from_disk, from_store = answers(engine, PROMPTS[2:])
    assert from_disk > 0 and from_store == 0 and all(each.num_cached for each in more)
    assert difference(found + more, expected) < TOLERANCE
    if is_llama:
        assert [each.num_cached for each in found + more] == [NUM_HIT] * len(PROMPTS)
        assert from_disk == 2 * PER_PROMPT
    # The disk has kept what the store gave.
    redis_of(store).flushall()
    assert engine.llm.reset_prefix_cache()
    found, from_disk, from_store = answers(engine, PROMPTS)
    assert from_disk > 0 and from_store == 0 and all(each.num_cached for each in found)
    assert difference(found, expected) < TOLERANCE
    # New weights in place, or a sleep: nothing of before is read.
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    found, *num_moved = answers(engine, PROMPTS)
    assert num_moved == [0, 0] and not any(each.num_cached for each in found)
    assert difference(found, expected) < TOLERANCE
    engine.close()


@full("starts three engines")
@pytest.mark.parametrize("damaged", ["disk", "store"])
def test_damage_in_either_is_a_miss(
    kind: tuple[str, str],
    model: Path,
    disk: Path,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    damaged: str,
) -> None:
    expected = compute(start(model, kind, disk / "a", store), PROMPTS)
    if damaged == "disk":
        redis_of(store).flushall()
        flip_all_slots(disk / "a")
        folders = [disk / "a", disk / "a"]
    else:
        damage_all(store)
        folders = [disk / "b", disk / "c"]  # the control keeps what it read

    # The negative control: nobody compares checksums.
    with monkeypatch.context() as control:
        control.setattr(SlotStore, "_are_proven", all_proven)
        control.setattr("kvstow.tiers.namespace.Namespace.checksum", lambda *_: AnySum())
        engine = start(model, kind, folders[0], store)
        found, from_disk, from_store = answers(engine, PROMPTS)
        assert (from_disk if damaged == "disk" else from_store) > 0
        assert difference(found, expected) > DAMAGE
        engine.close()

    engine = start(model, kind, folders[1], store)
    found, *num_moved = answers(engine, PROMPTS)
    assert num_moved == [0, 0] and not any(each.num_cached for each in found)
    assert difference(found, expected) < TOLERANCE
    engine.close()


@full("starts three engines")
def test_a_disk_that_failed_and_a_store_that_died_leave_the_other(
    kind: tuple[str, str], model: Path, disk: Path, store: Store
) -> None:
    expected = compute(start(model, kind, disk / "a", store), PROMPTS)
    engine = start(model, kind, disk / "b", store)
    worker = engine.worker.below
    assert isinstance(worker, BothWorker)
    with pytest.MonkeyPatch.context() as fault:
        fault.setattr(SlotStore, "mode", property(lambda _: "off"))
        found, from_disk, from_store = answers(engine, PROMPTS)
        assert from_disk == 0 and from_store > 0
        assert difference(found, expected) < TOLERANCE
        assert [engine.half.stats()[name] for name in ("disk_mode", "shared_mode")] == [0, 2]
    engine.close()
    store.kill()
    engine = start(model, kind, disk / "a", store)
    found, from_disk, from_store = answers(engine, PROMPTS)
    assert from_disk > 0 and from_store == 0
    assert difference(found, expected) < TOLERANCE
    engine.close()
