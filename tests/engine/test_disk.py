"""The disk tier of an engine: what falls off the host comes back, also in another process's life.

The jobs of the tier take place on real files.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engine.disk_world import (
    NUM_HOST,
    OTHER,
    PAGE,
    fall_off,
    forget_device,
    mode,
    options,
    serve,
    settle,
    slot_file,
    world,
)
from tests.engine.world import BLOCK, DOCUMENT, PENDING, RUNS, World
from tests.interrupts import is_interrupted
from tests.tiers.setup import LONG_S, Here

from kvstow import (
    AllBlocksCleared,
    BlockStored,
    ConfigError,
    Engine,
    FullAttention,
    OffloadScheduler,
    StateError,
    TransferError,
    hash_tokens,
)
from kvstow.engine.counts import DiskCounts
from kvstow.observability import BlockEvent
from kvstow.tiers import SlotFile, SlotFileMismatch, SlotTier
from kvstow.tiers.files import Buffers
from kvstow.tiers.runner import TierRunner
from kvstow.tiers.slot_index import SlotRecords
from kvstow.transfer import READY, BlockLayout, mover_for

WHO: dict[str, Any] = {"identity": "m", "weights_version": "1"}


class Calls(Here):
    """File calls that the test can let fail or wait."""

    def __init__(self) -> None:
        self.error = 0
        self.syncs_wait = False
        self.reads_wait = False

    def read(self, file: int, buffers: Buffers, offset: int) -> int:
        end_s = time.monotonic() + LONG_S
        while self.reads_wait and time.monotonic() < end_s:
            time.sleep(0.001)
        return super().read(file, buffers, offset)

    def write(self, file: int, buffers: Buffers, offset: int) -> int:
        if self.error:
            raise OSError(self.error, "injected")
        return super().write(file, buffers, offset)

    def sync(self, file: int) -> None:
        end_s = time.monotonic() + LONG_S
        while self.syncs_wait and time.monotonic() < end_s:
            time.sleep(0.001)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    made = Calls()
    monkeypatch.setattr("kvstow.tiers.slot_file.Files", lambda: made)
    yield made
    made.syncs_wait = made.reads_wait = False


def test_blocks_that_fell_off_the_host_come_back_from_the_disk(tmp_path: Path) -> None:
    with world(tmp_path / "disk") as it:
        fall_off(it)
        assert it.admit("reader", DOCUMENT).state is PENDING
        assert serve(it, "reader", DOCUMENT) == len(DOCUMENT) - BLOCK
        stats = it.engine.stats()
        assert stats["promoted_blocks"] == stats["disk_hit_tokens"] // BLOCK == 3
        assert stats["promoted_bytes"] == 3 * PAGE
        assert stats["demoted_bytes"] == stats["demoted_blocks"] * PAGE


def test_new_engine_finds_on_the_disk_what_another_one_left(tmp_path: Path) -> None:
    with world(tmp_path / "disk", disk_options=options(max_blocks_in_flight=1)) as it:
        assert serve(it, "writer", DOCUMENT) == 0
    with world(tmp_path / "disk") as it:
        assert it.engine.stats()["disk_resident_blocks"] == 4
        assert serve(it, "reader", DOCUMENT) == len(DOCUMENT) - BLOCK
        num_written = it.engine.stats()["demoted_blocks"]
        assert num_written == 0, "a block that is there is not written again"
        disk = it.engine._copies.disk
        assert disk is not None
        before = disk._slot_tiers[0].records().sequences.max()
        assert serve(it, "newer", OTHER[:16]) == 0
        assert np.count_nonzero(disk._slot_tiers[0].records().sequences > before) == 4


@pytest.mark.parametrize("is_slow", [False, True])
def test_close_writes_blocks_that_are_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    slowly = options(max_write_bytes_per_s=1, max_blocks_in_flight=1)
    file = slot_file(tmp_path / "disk")
    it = World(17, NUM_HOST, mover=mover_for, disk=file, disk_options=slowly)
    with it.engine:
        assert serve(it, "writer", DOCUMENT) == 0
        assert it.engine.stats()["demoted_blocks"] <= 1, "the rate holds most back"
        if is_slow:  # a write takes longer than the engine waits at a time
            monkeypatch.setattr(TierRunner, "wait", lambda *_: None)
    with world(tmp_path / "disk") as it:
        assert it.engine.stats()["disk_resident_blocks"] == 4


def test_close_writes_what_was_stored_since_the_last_poll(tmp_path: Path) -> None:
    it = World(17, NUM_HOST, mover=mover_for, disk=slot_file(tmp_path / "disk"),
               disk_options=options())  # fmt: skip
    with it.engine:
        assert it.admit("writer", DOCUMENT).state is RUNS
        it.compute("writer", DOCUMENT)
        for transfer in it.engine.transfers:
            transfer.wait()
    with world(tmp_path / "disk") as it:
        assert it.engine.stats()["disk_resident_blocks"] == 4


def test_file_of_another_model_is_refused(tmp_path: Path) -> None:
    with world(tmp_path / "disk") as it:
        assert serve(it, "writer", DOCUMENT) == 0
    for other in ({"identity": "n"}, {"weights_version": "2"}):
        with (
            pytest.raises(SlotFileMismatch),
            world(tmp_path / "disk", disk_options=options(**other)),
        ):
            pass
    file = slot_file(tmp_path / "disk", on_mismatch="reset")
    with world(tmp_path / "disk", disk=file, disk_options=options(identity="n")) as it:
        assert it.engine.stats()["disk_resident_blocks"] == 0


def test_request_waits_for_the_disk_no_longer_than_it_may(tmp_path: Path, calls: Calls) -> None:
    with world(tmp_path / "disk", disk_options=options(promote_timeout_s=2.0)) as it:
        fall_off(it)
        calls.reads_wait = True
        for it.now_s in (0.0, 1.0, 1.9):
            assert it.admit("reader", DOCUMENT).state is PENDING
            it.engine.poll()
        it.now_s = 2.0
        assert it.admit("reader", DOCUMENT).state is RUNS
        it.compute("reader", DOCUMENT)
        it.engine.finish("reader")
        calls.reads_wait = False


def test_late_read_holds_its_slots_until_it_has_ended(tmp_path: Path, calls: Calls) -> None:
    with world(tmp_path / "disk", disk_options=options(timeout_s=LONG_S)) as it:
        fall_off(it)
        calls.reads_wait = True
        assert it.admit("reader", DOCUMENT).state is PENDING
        it.engine.poll()
        it.now_s = LONG_S + 1.0
        it.engine.poll()
        stats = it.engine.stats()
        assert (stats["quarantined_jobs"], stats["promoting_blocks"]) == (1, 3)
        assert it.admit("reader", DOCUMENT).state is RUNS
        it.compute("reader", DOCUMENT)
        it.engine.finish("reader")
        it.engine.check()
        calls.reads_wait = False
        settle(it)
        assert it.engine.stats()["promoted_blocks"] == 0


def test_reset_empties_the_disk_for_good(tmp_path: Path, calls: Calls) -> None:
    with world(tmp_path / "disk") as it:
        fall_off(it)
        calls.syncs_wait = True
        it.engine.reset()
        it.engine.poll()
        assert mode(it) == "off", "the new generation is not durable"
        assert serve(it, "reader", DOCUMENT, settles=False) == 0
        calls.syncs_wait = False
        while mode(it) != "on":
            it.engine.poll()
        assert serve(it, "other", OTHER) == 0
    with world(tmp_path / "disk") as it:
        assert it.engine.stats()["disk_resident_blocks"] == 0, "the weights may have changed"


def test_disk_is_warm_under_the_name_of_its_new_weights(tmp_path: Path) -> None:
    with world(tmp_path / "disk") as it:
        fall_off(it)
        it.engine.reset(weights_version="2")
        settle(it)
        assert serve(it, "reader", DOCUMENT) == 0, "a block of version 1 was served"
        with pytest.raises(ConfigError, match="the disk tier keeps blocks of 'm' and '2'"):
            it.engine.sleep(after=READY, **WHO)
    with world(tmp_path / "disk", disk_options=options(weights_version="2")) as it:
        assert serve(it, "warm", DOCUMENT) == len(DOCUMENT) - BLOCK
    with pytest.raises(SlotFileMismatch), world(tmp_path / "disk"):
        pass


class Interrupted:
    """A scheduler whose reset is interrupted when it has taken place."""

    def __init__(self, real: OffloadScheduler) -> None:
        self.real = real

    def __getattr__(self, name: str) -> object:
        return getattr(self.real, name)

    def reset(self) -> None:
        self.real.reset()
        raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["after the scheduler", "at the renewal"])
def test_reset_that_is_interrupted_leaves_the_disk_off_until_it_is_durable(
    tmp_path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    with world(tmp_path / "disk") as it:
        fall_off(it)

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            if where == "at the renewal":
                patch.setattr("kvstow.tiers.slot_file.SlotTier.renew", interrupted)
            else:
                proxy: Any = Interrupted(it.engine.scheduler)
                patch.setattr(it.engine._state, "scheduler", proxy)
                patch.setattr(it.engine._copies.disk, "_counts", DiskCounts(proxy))
            with pytest.raises(KeyboardInterrupt):
                it.engine.reset()
        calls.syncs_wait = True
        it.engine.poll()
        assert mode(it) == "off"
        calls.syncs_wait = False
        while mode(it) != "on":
            it.engine.poll()
        assert serve(it, "reader", DOCUMENT) == 0


def life_after_an_interrupted_reset(path: Path, line: int, *, again: bool) -> bool:
    """Interrupt the reset for new weights at a line of it. Return whether it was cut short.

    With `again`, the caller repeats it. If not, it goes on.
    """
    with world(path) as it:
        serve(it, "writer", DOCUMENT)
        is_cut_short = is_interrupted(lambda: it.engine.reset(weights_version="2"), line)
        if again:
            with suppress(ConfigError):  # it was whole
                it.engine.reset(weights_version="2")
            found = it.admit("reader", [*DOCUMENT, 91])
            num_found = found.num_hit_tokens + found.num_external_tokens
            assert (found.state, num_found) == (RUNS, 0), f"line {line}: a block of version 1"
            it.engine.finish("reader")
        is_empty = it.engine.scheduler.num_resident == 0
        settle(it)
        assert serve(it, "new weights", OTHER) == 0
    with world(path, disk=slot_file(path, on_mismatch="reset")) as it:
        num_warm = serve(it, "old weights", OTHER)
        assert num_warm == 0 or not is_empty, f"line {line}: a block of version 2"
    return is_cut_short


@pytest.mark.parametrize("again", [True, False])
def test_reset_that_is_interrupted_mixes_no_weights(tmp_path: Path, again: bool) -> None:
    line = 1
    while life_after_an_interrupted_reset(tmp_path / str(line), line, again=again):
        line += 2
    assert line > 10, "the reset was interrupted at some of its lines only"


@pytest.mark.parametrize("preserve", [True, False])
def test_disk_is_on_again_after_a_sleep_that_came_before_the_reset_was_durable(
    tmp_path: Path, calls: Calls, caplog: pytest.LogCaptureFixture, preserve: bool
) -> None:
    with world(tmp_path / "disk") as it:
        fall_off(it)
        calls.syncs_wait = True
        it.engine.reset()
        it.engine.sleep(after=READY, preserve=preserve)
        it.engine.wake([BlockLayout.from_arrays([it.kv])], after=READY)
        it.engine.poll()
        assert mode(it) == "off", "the new generation is not durable"
        calls.syncs_wait = False
        settle(it)
        assert mode(it) == "on"
        assert not caplog.messages, "the disk has no fault"
        fall_off(it)  # loads nothing of before the reset
        assert serve(it, "last", DOCUMENT) == len(DOCUMENT) - BLOCK


def test_reset_that_could_not_be_written_counts_after_a_wake(tmp_path: Path, calls: Calls) -> None:
    two = WHO | {"weights_version": "2"}
    disk = slot_file(tmp_path / "disk", on_mismatch="reset")
    with world(tmp_path / "disk", disk=disk) as it:
        fall_off(it)
        calls.error = 5
        it.engine.reset(weights_version="2")
        settle(it)
        assert mode(it) == "off"
        calls.error = 0
        it.engine.sleep(after=READY, preserve=False, to=tmp_path / "snapshot", **two)
        it.engine.wake([BlockLayout.from_arrays([it.kv])], after=READY, **two)
        settle(it)
        assert mode(it) == "on"
        assert serve(it, "reader", DOCUMENT) == 0


def test_reset_without_the_disk_counts_when_the_disk_is_back(tmp_path: Path) -> None:
    """The weights have changed in place, and another process has the old ones."""
    with world(tmp_path / "disk") as it:
        fall_off(it)
        it.engine.sleep(after=READY, preserve=False, to=tmp_path / "snapshot", **WHO)
        with world(tmp_path / "disk"):
            it.engine.wake([BlockLayout.from_arrays([it.kv])], after=READY, **WHO)
            assert mode(it) == "off", "another engine has the file"
            it.engine.reset()
        it.engine.sleep(after=READY)
        it.engine.wake([BlockLayout.from_arrays([it.kv])], after=READY)
        settle(it)
        assert mode(it) == "on"
        fall_off(it)  # loads nothing from before the reset
        assert it.engine.stats()["disk_resident_blocks"] > 0
    with world(tmp_path / "disk") as it:
        assert it.engine.stats()["disk_resident_blocks"] == 0


def test_disk_that_cannot_be_written_is_read_on_with_one_warning(
    tmp_path: Path, calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    with world(tmp_path / "disk") as it:
        fall_off(it)
        calls.error = 5
        with caplog.at_level(logging.WARNING, "kvstow"):
            for number in range(3):
                new = list(range(1000 * number + 1000, 1000 * number + 1016))
                assert serve(it, f"new {number}", new) == 0
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "read_only" in caplog.text
        forget_device(it)
        assert serve(it, "reader", DOCUMENT) == len(DOCUMENT) - BLOCK


def test_counters_of_the_disk_go_on_while_an_engine_wakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world(tmp_path / "disk") as it:
        fall_off(it)
        counts, records = [it.engine.stats()["demoted_blocks"]], SlotTier.records

        def interrupted(tier: SlotTier) -> SlotRecords:
            counts.append(it.engine.stats()["demoted_blocks"])
            if len(counts) == 2:
                raise KeyboardInterrupt
            return records(tier)

        it.engine.sleep(after=READY)
        monkeypatch.setattr(SlotTier, "records", interrupted)
        with pytest.raises(KeyboardInterrupt):
            it.engine.wake([BlockLayout.from_arrays([it.kv])], after=READY)
        it.engine.poll()
        counts.append(it.engine.stats()["demoted_blocks"])
        assert len(set(counts)) == 1
        assert len(counts) == 4
        assert counts[0] > 0


def disk_events(it: World) -> list[BlockEvent]:
    return [event for event in it.engine.take_events() if event.medium == "STORAGE"]


@pytest.mark.parametrize("preserve", [True, False])
def test_disk_stays_warm_while_the_engine_sleeps(tmp_path: Path, preserve: bool) -> None:
    for place in ("host", tmp_path / "snapshot"):
        to: dict[str, Any] = {} if place == "host" else {"to": place}
        with world(tmp_path / f"disk of {str(place)[-8:]}", events=True) as it:
            fall_off(it)
            it.engine.take_events()
            it.engine.sleep(after=READY, preserve=preserve, **to, **WHO)
            it.engine.wake([BlockLayout.from_arrays([it.kv])], after=READY, **WHO)
            assert mode(it) == "on"
            first, *others = disk_events(it)
            assert isinstance(first, AllBlocksCleared)
            num_known = sum(len(one.block_hashes) for one in others if isinstance(one, BlockStored))
            assert num_known == it.engine.stats()["disk_resident_blocks"] > 0
            assert serve(it, "reader", DOCUMENT) == len(DOCUMENT) - BLOCK


def test_engine_wakes_without_a_disk_that_cannot_be_opened(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with world(tmp_path / "disk", events=True) as it:
        fall_off(it)
        it.engine.take_events()
        it.engine.sleep(after=READY, to=tmp_path / "snapshot", **WHO)
        stolen = slot_file(tmp_path / "disk", on_mismatch="reset")
        with world(tmp_path / "disk", disk=stolen, disk_options=options(identity="n")):
            pass
        with caplog.at_level(logging.WARNING, "kvstow"):
            it.engine.wake([BlockLayout.from_arrays([it.kv])], after=READY, **WHO)
            assert serve(it, "reader", DOCUMENT) == 0
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "identity 'n' is not 'm'" in caplog.text
        assert mode(it) == "off"
        assert [type(event) for event in disk_events(it)] == [AllBlocksCleared]
        it.engine.reset()
        settle(it)
        assert mode(it) == "off"


def test_snapshot_and_disk_must_be_of_one_model(tmp_path: Path) -> None:
    with world(tmp_path / "disk") as it:
        assert serve(it, "writer", DOCUMENT) == 0
        with pytest.raises(ConfigError, match="weights_version '2', but the disk tier"):
            it.engine.sleep(after=READY, identity="m", weights_version="2")
        with pytest.raises(StateError, match="has requests, or blocks"):
            it.engine.restart("none", after=READY, identity="m", weights_version="2")
    with world(tmp_path / "other disk") as it, pytest.raises(ConfigError, match="identity is 'n'"):
        it.engine.restart("none", after=READY, identity="n", weights_version="1")


def test_engine_does_not_sleep_while_the_disk_still_reads(tmp_path: Path, calls: Calls) -> None:
    with world(tmp_path / "disk") as it:
        fall_off(it)
        calls.reads_wait = True
        assert it.admit("reader", DOCUMENT).state is PENDING
        it.engine.poll()
        with pytest.raises(TransferError, match="1 jobs of the disk tier have not ended"):
            it.engine.sleep(after=READY, timeout_s=0.01)
        calls.reads_wait = False
        assert serve(it, "reader", DOCUMENT) == len(DOCUMENT) - BLOCK


def test_ranks_must_all_hold_a_block(tmp_path: Path) -> None:
    kv = [np.zeros((17, BLOCK), np.int64) for _ in range(2)]
    layouts = [[BlockLayout.from_arrays([one])] for one in kv]
    files = [slot_file(tmp_path / f"rank {rank}") for rank in range(2)]

    def engine(disk: list[SlotFile]) -> Engine:
        return Engine(
            17, 8, [FullAttention(BLOCK)], layouts,
            world_size=2, disk=disk, disk_options=options(),
        )  # fmt: skip

    with engine(files) as it:
        it.add("writer", hash_tokens(DOCUMENT, BLOCK))
        it.admit("writer", len(DOCUMENT), 100, after=READY)
        transfer = it.computed(["writer"], [len(DOCUMENT)], after=READY)
        assert transfer is not None
        it.end(transfer)
        it.settle_disk()
    with engine(files) as it:
        assert it.stats()["disk_resident_blocks"] == 4
    (tmp_path / "rank 1").unlink()
    (tmp_path / "rank 1.index").unlink()
    with engine(files) as it:
        assert it.stats()["disk_resident_blocks"] == 0
    with pytest.raises(ConfigError, match="one SlotFile for each rank"):
        engine(files[:1])


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"disk_options": None}, "needs both"),
        ({"disk": None}, "needs both"),
        ({"disk": "slots"}, "the name of a file; pass SlotFile"),
        ({"disk": Path("slots")}, "the name of a file; pass SlotFile"),
        ({"disk_options": {"identity": "m"}}, "disk_options is .*; pass DiskOptions"),
    ],
)
def test_disk_without_what_it_needs_is_refused(
    tmp_path: Path, given: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why), world(tmp_path / "disk", **given):
        pass


@pytest.mark.parametrize(
    "given",
    [
        {"identity": ""},
        {"weights_version": 1},
        {"min_promote_tokens": -1},
        {"max_blocks_in_flight": 0},
        {"promote_timeout_s": 0},
        {"timeout_s": -1.0},
        {"max_write_bytes_per_s": "much"},
        {"flush_s": -1},
        {"flush_s": "3s"},
        {"admit": "return"},
        {"policy": "LRU"},
    ],
)
def test_bad_option_is_named(given: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))):
        options(**given)


def test_metrics_have_the_disk(tmp_path: Path) -> None:
    metrics = pytest.importorskip("kvstow.observability.metrics")
    with world(tmp_path / "disk") as it:
        fall_off(it)
        assert serve(it, "reader", DOCUMENT) == len(DOCUMENT) - BLOCK
        found = {
            (sample.name, *sample.labels.values()): sample.value
            for family in metrics.MetricsCollector(it.engine.stats).collect()
            for sample in family.samples
        }
        assert found["kvstow_disk_blocks_total", "promote"] == 3
        assert found["kvstow_disk_bytes_total", "promote"] == 3 * PAGE
        assert found["kvstow_disk_mode",] == 2
