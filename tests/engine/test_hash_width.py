"""Hashes of another width than those of the host or the disk are refused, and nothing changes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engine.disk_world import options, slot_file
from tests.interrupts import is_interrupted

from kvstow import AdmissionState, ConfigError, Engine, FullAttention, hash_tokens
from kvstow.transfer import READY, BlockLayout

LOADS = AdmissionState.LOADS
TOKENS = list(range(20))
BLOCK = 4
HASHES = hash_tokens(TOKENS, BLOCK)
NARROW = hash_tokens(TOKENS, BLOCK, algorithm="xxhash_cbor")
WHO: dict[str, Any] = {"identity": "m", "weights_version": "1"}


def engine_of(**options: Any) -> Engine:
    layout = BlockLayout.from_arrays([np.zeros((17, 4), np.int64)])
    return Engine(17, 32, [FullAttention(BLOCK)], [layout], **options)


def compute(engine: Engine, name: str, hashes: Sequence[bytes] = HASHES) -> None:
    """Compute a request, and wait until its blocks are on the host."""
    engine.add(name, hashes)
    engine.admit(name, len(TOKENS), len(TOKENS), after=READY)
    engine.computed([name], [len(TOKENS)], after=READY)
    for transfer in engine.transfers:
        engine.end(transfer)


@contextmanager
def warm_host(folder: Path) -> Iterator[Engine]:
    with engine_of() as engine:
        compute(engine, "before")
        engine.sleep(after=READY, to=folder / "image", **WHO)
    with engine_of() as engine:
        engine.restart(folder / "image", after=READY, **WHO)
        yield engine


@contextmanager
def warm_disk(folder: Path) -> Iterator[Engine]:
    below: dict[str, Any] = {"disk": slot_file(folder / "slots"), "disk_options": options()}
    with engine_of(**below) as engine:
        compute(engine, "before")
        engine.settle_disk()
    with engine_of(**below) as engine:
        yield engine


@contextmanager
def empty_host(folder: Path) -> Iterator[Engine]:
    """An engine from a file without blocks, whose scheduler knows the width."""
    with engine_of() as engine:
        compute(engine, "before")
        engine.finish("before")
        engine.reset()
        engine.sleep(after=READY, to=folder / "image", **WHO)
    with engine_of() as engine:
        engine.restart(folder / "image", after=READY, **WHO)
        yield engine


@pytest.mark.parametrize("warm", [warm_host, warm_disk, empty_host])
def test_refused_add_leaves_an_engine_that_takes_the_right_hashes(
    warm: Callable[[Path], Any], tmp_path: Path
) -> None:
    with warm(tmp_path) as engine:
        for _ in range(2):
            with pytest.raises(ConfigError, match="16 bytes: this object's hashes have 32"):
                engine.add("a", NARROW)
            assert engine.ledger.num_requests == 0
            assert not engine._state.change.is_torn
        engine.add("a", HASHES)
        with pytest.raises(ConfigError, match="16 bytes"):
            engine.add("b", NARROW)
        engine.check()


def test_a_restart_leaves_out_a_disk_of_another_width(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    below: dict[str, Any] = {"disk": slot_file(tmp_path / "slots"), "disk_options": options()}
    with engine_of(**below) as engine:
        compute(engine, "before", NARROW)
        engine.settle_disk()
    with engine_of() as engine:
        compute(engine, "before")
        engine.finish("before")
        engine.sleep(after=READY, to=tmp_path / "image", **WHO)
    with engine_of(**below) as engine:
        assert engine.stats()["disk_resident_blocks"] == len(NARROW)
        engine.restart(tmp_path / "image", after=READY, **WHO)
        assert "the disk tier begins empty, and the engine goes on: a block hash" in caplog.text
        engine.settle_disk()  # it writes nothing before it has dropped the others
        assert engine.stats()["disk_resident_blocks"] == 0
        engine.add("again", HASHES)
        assert engine.admit("again", len(TOKENS), len(TOKENS), after=READY).state is LOADS
        new = hash_tokens(range(100, 100 + 2 * BLOCK), BLOCK)
        compute(engine, "new", new)
        engine.settle_disk()
        engine.check()
    with engine_of(**below) as engine:
        assert engine.stats()["disk_resident_blocks"] == len(new) < len(NARROW)
        engine.add("last", HASHES)


def test_refused_extend_changes_nothing(tmp_path: Path) -> None:
    with warm_host(tmp_path) as engine:
        engine.add("short", [])
        engine.admit("short", 3, 3, after=READY)
        engine.step(["short"], [2])
        with pytest.raises(ConfigError, match="16 bytes: this object's hashes have 32"):
            engine.extend("short", NARROW[:1])
        assert not engine._state.change.is_torn
        assert engine.ledger.num_hashes("short") == 0
        engine.add("long", HASHES)
        assert engine.admit("long", 20, 20, after=READY).state is LOADS
        engine.extend("short", HASHES[:1])
        assert engine.ledger.num_hashes("short") == 1
        assert "short" in engine._state.running
        engine.check()


def test_first_hashes_that_are_refused_for_another_reason_choose_no_width() -> None:
    wrongs: Sequence[dict[str, Any]] = [{"tokens": [1]}, {"extra_keys": [None]}]
    with engine_of(events=True) as engine:
        engine.add("short", [], tokens=[])
        for wrong in wrongs:
            with pytest.raises(ConfigError):
                engine.add("a", NARROW, **wrong)
            with pytest.raises(ConfigError):
                engine.extend("short", NARROW, **wrong)
        engine.add("a", HASHES, tokens=TOKENS)
        engine.extend("short", HASHES, tokens=TOKENS)
        engine.check()


@pytest.mark.parametrize("call", ["add", "extend"])
def test_first_hashes_survive_an_interrupt(call: str) -> None:
    line = 0
    is_cut_short = True
    while is_cut_short:
        line += 1
        with engine_of() as engine:
            engine.add("short", [])
            name = "short" if call == "extend" else "a"

            def change(engine: Engine = engine, name: str = name) -> None:
                getattr(engine, call)(name, HASHES)

            is_cut_short = is_interrupted(change, line)
            engine.check()
            if call == "extend" or "a" in engine.ledger.request_ids():
                engine.finish(name)
            engine.add(name, HASHES)
            engine.check()
    assert line > 10


def test_first_hashes_keep_their_tokens_and_keys() -> None:
    keys = [("adapter",)] * len(HASHES)
    for given in {}, {"tokens": TOKENS}, {"tokens": TOKENS, "extra_keys": keys}:
        with engine_of(events=True) as engine:
            for name in "ab":
                engine.add(name, HASHES, **given)
            assert engine.ledger.known("a") == engine.ledger.known("b")
