"""Files that an `Engine` sleeps in: wake from them, and restart another engine."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.engine.sleep_world import (
    BLOCK,
    LOADS,
    RUNS,
    SHAPES,
    WHO,
    World,
    prompt,
    put_to_sleep,
    world,
)

import kvstow
from kvstow import (
    SnapshotError,
    StateError,
    TransferError,
    hash_tokens,
)
from kvstow.engine import HOST
from kvstow.engine.snapshot_file import SnapshotFile
from kvstow.observability.metrics import METRICS
from kvstow.transfer import (
    READY,
    BlockLayout,
    HostArena,
    HostMover,
    VerifiedMover,
    mover_for,
)

# -- files -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [{}, {"ranks": 2, "windows": 1, "num_blocks": 50}, SHAPES[-1]], ids=str
)
def test_another_engine_goes_on_with_the_requests_of_a_file(
    shape: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "image"
    put_to_sleep(path, **shape)
    before = path.read_bytes()
    for _ in range(2):
        with world(**shape) as it:
            it.engine.restart(path, after=READY, requests=True, **WHO)
            it.texts = {"a": prompt(1, 18), "b": prompt(3, 13)}
            it.check()
            it.go_on("a", 9)
            found = it.engine.admit("waits", 17, 100, after=READY)
            whole = 16 if shape.get("blocks_per_slot", 1) == 1 else 12
            assert found.num_hit_tokens + found.num_external_tokens == whole
            it.settle()
            it.texts["waits"] = prompt(2, whole)
            it.check()
    assert path.read_bytes() == before, "copy-on-write"


def test_restart_without_requests_warms_the_host_only(tmp_path: Path) -> None:
    path = tmp_path / "image"
    put_to_sleep(path)
    with world() as it:
        [arena], [mover] = it.engine.arenas, it.engine.movers
        awake = it.engine.restart(path, after=READY, **WHO)
        assert arena.closed
        with pytest.raises(StateError, match="HostMover is closed"):
            mover.store([1], [1], after=READY)
        assert (len(awake.old_ids), it.engine.ledger.num_requests) == (0, 0)
        it.engine.check()
        assert it.engine.ledger.pool.num_free == 23
        it.engine.add("new", hash_tokens(prompt(2, 17), BLOCK))
        assert it.engine.admit("new", 17, 100, after=READY).num_external_tokens == 16
        it.settle()
        it.texts = {"new": prompt(2, 16)}
        it.check()
        it.engine.finish("new")
        scheduler = it.engine.scheduler
        assert scheduler.num_resident == len(scheduler.used_slots())


@pytest.mark.parametrize("requests", [False, True])
def test_a_restarted_engine_counts_only_what_it_does(requests: bool, tmp_path: Path) -> None:
    """Another process has exported what the engine that slept counted."""
    counters = [
        key for metric in METRICS if metric.kind == "counter" for key in metric.keys.values()
    ]
    put_to_sleep(tmp_path / "image")
    with world() as it:
        it.engine.restart(tmp_path / "image", after=READY, requests=requests, **WHO)
        stats = it.engine.stats()
        assert [key for key in counters if stats.get(key)] == []
        assert stats["resident_blocks"] == it.engine.scheduler.num_resident > 0
        it.engine.add("new", hash_tokens(prompt(2, 17), BLOCK))
        num_tokens = it.engine.admit("new", 17, 100, after=READY).num_external_tokens
        assert num_tokens == (8 if requests else 16)
        it.settle()
        sleep, wake = partial(it.sleep, to=tmp_path / "own", **WHO), partial(it.wake, **WHO)
        for change in lambda: None, sleep, wake:
            change()
            stats = it.engine.stats()
            assert stats["query_tokens"] == stats["hit_tokens"] == num_tokens
            assert (stats["loaded_blocks"], stats["stored_blocks"]) == (num_tokens // BLOCK, 0)


def test_restart_reads_no_slot_before_its_load(tmp_path: Path) -> None:
    """A damaged slot fails the loads that read it, and no others."""
    path = tmp_path / "image"
    put_to_sleep(path)
    found = hash_tokens(prompt(2, 17), BLOCK)
    with world() as it:
        it.engine.restart(path, after=READY, **WHO)
        it.engine.add("new", found)
        it.engine.admit("new", 17, 100, after=READY)
        [transfer] = it.engine.transfers
        slot = int(transfer.job.host_slots[3])
        it.settle()
    at = path.read_bytes().find(World.value(prompt(2, 17), 0, 0)[12:16].tobytes())
    assert at > 0
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\xff")
    with world() as it:
        it.engine.restart(path, after=READY, **WHO)
        again = tmp_path / "again"
        it.sleep(to=again, **WHO)
        with SnapshotFile(again) as file:
            assert file.damaged_slots() == [(0, slot)], (
                "the file keeps the checksum that the slot does not match"
            )
        it.wake(**WHO)
        it.engine.add("other", found[:3])
        assert it.engine.admit("other", 13, 100, after=READY).state is LOADS
        it.settle()
        assert "other" in it.engine._state.running
        it.engine.add("new", found)
        assert it.engine.admit("new", 17, 100, after=READY).state is LOADS
        [transfer] = it.engine.transfers
        assert not transfer.wait()
        assert re.search(f"host slot {slot} does not hold", str(transfer.tickets[0].error))
        assert it.engine.poll().failed == ["new"]


def test_restart_from_a_damaged_image_restores_no_request(tmp_path: Path) -> None:
    path = tmp_path / "image"
    put_to_sleep(path)
    whole = path.read_bytes()
    at = whole.find(World.value(prompt(1, 18), 0, 0)[16:18].tobytes())
    damaged = bytearray(whole)
    damaged[at] ^= 1
    path.write_bytes(damaged)
    with world() as it:
        arenas = it.engine.arenas
        with pytest.raises(TransferError, match=r"the file is damaged.*requests=False"):
            it.engine.restart(path, after=READY, requests=True, **WHO)
        assert (it.engine.arenas, it.engine.ledger.num_requests) == (arenas, 0)
        it.engine.restart(path, after=READY, **WHO)
        assert it.engine.scheduler.num_resident > 0


def test_restart_needs_a_new_engine_with_equal_options(tmp_path: Path) -> None:
    path = tmp_path / "image"
    put_to_sleep(path)
    with world() as it:
        it.run("a", prompt(1, 9))
        with pytest.raises(StateError, match="restart one that was just built"):
            it.engine.restart(path, after=READY, **WHO)
    with world(mode="lazy", horizon_blocks=1) as it:
        it.run("a", prompt(1, 9))
        it.engine.finish("a")  # only the device caches its blocks
        assert not len(it.engine.scheduler.used_slots())
        with pytest.raises(StateError, match="restart one that was just built"):
            it.engine.restart(path, after=READY, **WHO)
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"num_host": 63}, "number of host blocks is 64, not 63"),
        ({"policy": "hit-density"}, 'policy is "lru", not "hit-density"'),
        ({"windows": 1, "num_blocks": 50}, "give layouts of the model"),
        ({"ranks": 2}, "give layouts of the model"),
        ({"mode": "lazy", "horizon_blocks": 4}, 'mode is "eager", not "lazy"'),
    ]
    for shape, why in refusals:
        with world(**shape) as it:
            with pytest.raises(SnapshotError, match=re.escape(why)):
                it.engine.restart(path, after=READY, requests=True, **WHO)
            it.run("a", prompt(1, 9))
            it.check()
    with world() as it, pytest.raises(SnapshotError, match="weights version '7', not of '8'"):
        it.engine.restart(path, after=READY, identity="a model", weights_version="8")


def test_wake_refuses_the_file_of_another_engine(tmp_path: Path) -> None:
    path, mine = tmp_path / "image", tmp_path / "mine"
    with world() as first, world() as second:
        first.run("alice", prompt(1, 18))
        second.run("bob", prompt(3, 13))
        first.sleep(to=path, **WHO)
        mine.write_bytes(path.read_bytes())
        second.sleep(to=path, **WHO)
        written = path.read_bytes()
        with pytest.raises(SnapshotError, match=r"was written by another sleep.*Put back the file"):
            first.wake(**WHO)
        assert str(path) not in Path("/proc/self/maps").read_text()
        assert path.read_bytes() == written
        with pytest.raises(StateError, match="sleeps: wake it first"):
            first.engine.poll()
        second.wake(**WHO)
        second.check()
        mine.rename(path)
        first.wake(**WHO)
        first.check()


def test_wake_refuses_the_file_of_an_earlier_sleep(tmp_path: Path) -> None:
    path, early = tmp_path / "image", tmp_path / "early"
    with world() as it:
        it.run("a", prompt(1, 18))
        it.sleep(to=early, **WHO)
        it.wake(**WHO)
        it.go_on("a", 5)
        it.sleep(to=path, **WHO)
        early.rename(path)
        with pytest.raises(SnapshotError, match="of this engine or of another"):
            it.wake(**WHO)


def test_wake_from_host_and_from_file_into_a_pool_of_another_size(tmp_path: Path) -> None:
    assert {"Awake", "Engine", "HOST"} <= set(dir(kvstow))
    with world() as it:
        it.run("a", prompt(1, 18))
        for place in HOST, tmp_path / "image":
            it.engine.sleep(after=READY, to=place, timeout_s=5.0, preserve=True, **WHO)
            it.wake(**WHO)
            it.check()
            it.sleep(to=place, **WHO)
            it.memory = it.new_memory(24)
            awake = it.engine.wake(
                it.layouts, after=READY, num_device_blocks=24, block_ids="packed", **WHO
            )
            assert awake.new_ids.tolist() == [1, 2, 3, 4, 5]
            it.check()


# -- movers that check what they load ----------------------------------------------------------


@pytest.mark.parametrize("to", ["host", "file"])
@pytest.mark.parametrize("shape", [{}, {"windows": 1, "num_blocks": 50, "ranks": 2}], ids=str)
def test_checksums_outlive_the_movers(shape: dict[str, Any], to: str, tmp_path: Path) -> None:
    def verified(layout: BlockLayout, arena: HostArena) -> VerifiedMover:
        return VerifiedMover(HostMover(layout, arena))

    with world(mover=verified, **shape) as it:
        it.run("a", prompt(1, 18))
        it.run("gone", prompt(2, 17))
        it.settle()
        it.engine.finish("gone")
        del it.texts["gone"]
        slot = int(it.engine.scheduler.used_slots()[-1])
        it.sleep(to=HOST if to == "host" else tmp_path / "image", **WHO)
        it.wake(**WHO)
        it.check()
        it.engine.add("again", hash_tokens(prompt(2, 17), BLOCK))
        assert it.engine.admit("again", 17, 100, after=READY).state is LOADS
        it.settle()
        assert "again" in it.engine._state.running
        # A slot that is damaged in memory is still damaged in the file.
        it.engine.arenas[0].slots[slot, 3] ^= 1
        it.sleep(to=tmp_path / "image", **WHO)
        with SnapshotFile(tmp_path / "image") as file:
            assert file.damaged_slots() == [(0, slot)]


def test_wake_says_that_damaged_blocks_of_a_request_do_not_come_back(tmp_path: Path) -> None:
    for to in HOST, tmp_path / "image":
        with world(mover=partial(mover_for, verify=True)) as it:
            it.run("a", prompt(1, 18))
            it.settle()
            it.engine.arenas[0].slots[int(it.engine.scheduler.used_slots()[0]), 3] ^= 1
            it.sleep(to=to, **WHO)
            for _ in range(2):
                with pytest.raises(TransferError, match=r"another try fails too.*recompute"):
                    it.wake(**WHO)


def test_tokens_and_extra_keys_survive_sleep(tmp_path: Path) -> None:
    text, keys = prompt(1, 16), [None, ("image", 3, b"\0", (1, None)), None, None]
    hashes = hash_tokens(text, BLOCK, extra_keys=keys)
    with world(events=True) as it:
        it.engine.add("a", hashes[:2], tokens=text[:8], extra_keys=keys[:2])
        it.engine.admit("a", 16, 8, after=READY)
        it.engine.computed(["a"], [8], after=READY)
        for place in HOST, tmp_path / "image":
            before = it.engine.ledger.known("a")
            it.sleep(to=place, **WHO)
            it.wake(**WHO)
            assert it.engine.ledger.known("a") == before == (hashes[:2], text[:8], keys[:2])
        it.engine.take_events()
        it.engine.step(["a"], [8])
        it.engine.extend("a", hashes[2:], tokens=text[8:], extra_keys=keys[2:])
        it.engine.computed(["a"], [16], after=READY)
        [event] = [one for one in it.engine.take_events() if one.medium == "GPU"]
        assert event.token_ids == text[8:]  # type: ignore[union-attr]
        assert event.parent_block_hash == hashes[1]  # type: ignore[union-attr]
        it.engine.preempt("a")
        it.engine.reset()
        it.engine.take_events()
        assert it.engine.admit("a", 16, 100, after=READY).state is RUNS
        it.engine.computed(["a"], [16], after=READY)
        [event] = [one for one in it.engine.take_events() if one.medium == "GPU"]
        assert event.extra_keys == keys  # type: ignore[union-attr]
        it.engine.check()
