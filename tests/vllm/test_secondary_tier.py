"""`KVStowDisk` below vLLM's own CPU tier: which chunks it keeps, and what becomes of its jobs."""

from __future__ import annotations

import errno
import inspect
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tests.vllm.runner  # noqa: F401 - before anything imports vLLM
from tests.tiers.damage import all_proven, flip
from tests.tiers.setup import LONG_S
from tests.vllm.secondary import (
    CHUNK,
    KEYS,
    NUM_SLOTS,
    Make,
    content,
    fill_primary,
    says_order,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import (
    OffloadingEventGroupSpec,
    OffloadingEventsTracker,
)
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingKVEventsConfig,
    ReqContext,
    get_offload_block_hash,
)

from kvstow import ConfigError, TransferError
from kvstow.tiers import SlotFile
from kvstow.tiers.files import Buffers, Files
from kvstow.tiers.slot_store import SlotStore
from kvstow.transfer.borrowed import BorrowedArena
from kvstow.vllm import secondary_tier
from kvstow.vllm.secondary_file import DISK_KEYS
from kvstow.vllm.secondary_job import Job
from kvstow.vllm.secondary_tier import KVStowDisk


def test_chunk_that_fell_off_the_cpu_tier_comes_back(make: Make) -> None:
    world = make()
    world.store(KEYS[:4])
    fill_primary(world)
    for key in KEYS[:4]:
        assert world.primary.lookup(key, ReqContext("ask")) == LookupResult.MISS
        found = world.load(key)
        assert found is not None
        np.testing.assert_array_equal(found, content(key))


def test_doctor_knows_the_keys_of_the_tier() -> None:
    taken = inspect.signature(KVStowDisk).parameters.values()
    assert tuple(key.name for key in taken if key.kind is key.KEYWORD_ONLY) == DISK_KEYS


def test_unknown_keys_of_the_configuration_are_ignored(make: Make, log: list[str]) -> None:
    make(new_in_vllm=1)
    assert any("ignores new_in_vllm" in line for line in log)


@pytest.mark.parametrize("missing", ["path", "max_bytes"])
def test_missing_key_is_named(make: Make, missing: str) -> None:
    with pytest.raises(ConfigError, match=f"KVStowDisk has no {missing}"):
        make(**{missing: None})


@pytest.mark.parametrize("name", ["path", "weights_version_path"])
@pytest.mark.parametrize("wrong", [5, "slots\0", "\ud800", "~/slots", "$HOME/slots"])
def test_what_is_no_path_is_refused(make: Make, name: str, wrong: object) -> None:
    with pytest.raises(ConfigError, match=f"KVStowDisk has {name} .*; pass the name of a file"):
        make(**{name: wrong})


def test_disk_never_grows(make: Make, tmp_path: Path) -> None:
    world = make()
    sizes = {path: path.stat().st_size for path in (tmp_path / "slots", tmp_path / "slots.index")}
    for first in range(0, 32, 4):
        world.store(KEYS[first : first + 4])
    assert {path: path.stat().st_size for path in sizes} == sizes
    assert [key for key in KEYS if world.has(key)] == KEYS[24:32], "the oldest went"


def test_touched_chunks_stay(make: Make) -> None:
    world = make()
    world.store(KEYS[:4])
    world.store(KEYS[4:8])
    world.manager.touch(KEYS[:4], ReqContext("touch"))
    world.store(KEYS[8:12])
    assert [key for key in KEYS if world.has(key)] == KEYS[:4] + KEYS[8:12]


@says_order
def test_chunks_that_are_used_stay(make: Make) -> None:
    world = make()
    world.store(KEYS[:4])
    for first in range(8, 24, 4):
        world.store(KEYS[first : first + 4])
        for key in KEYS[:4]:
            assert world.load(key) is not None


@says_order
@pytest.mark.parametrize("restarts", [False, True], ids=["runs on", "restarts"])
def test_the_end_of_a_prompt_goes_first(make: Make, restarts: bool) -> None:
    """Without its beginning, nothing finds it."""
    world = make()
    request = world.request("one prompt", KEYS[:8])
    world.compute(KEYS[:4], request)
    world.wait()
    world.compute(KEYS[4:8], request)
    world.manager.on_request_finished(request)  # before the disk has written
    world.wait()
    if restarts:
        world.close()
        world = make()
    world.store(KEYS[8:11])
    assert [key for key in KEYS if world.has(key)] == KEYS[:5] + KEYS[8:11]


@says_order
def test_the_end_of_a_job_goes_first_while_its_request_runs(make: Make) -> None:
    world = make()
    world.compute(KEYS[:4], world.request("runs", KEYS[:4]))
    world.wait()
    world.store(KEYS[8:12])
    world.store(KEYS[12:15])
    assert [key for key in KEYS if world.has(key)] == KEYS[:1] + KEYS[8:15]


@says_order
def test_chunks_of_a_request_that_found_them_on_the_cpu_stay(make: Make) -> None:
    world = make()
    world.store(KEYS[:4])
    world.store(KEYS[8:12])
    world.manager.on_request_finished(world.request("asks again", KEYS[:4]))
    world.store(KEYS[12:16])
    assert [key for key in KEYS if world.has(key)] == KEYS[:4] + KEYS[12:16]


@says_order
def test_the_beginning_is_kept_if_not_all_chunks_fit(make: Make) -> None:
    world = make(max_bytes=SlotFile.bytes_for(6, CHUNK))
    world.store(KEYS[20:24])
    request = world.request("longer than the disk", KEYS[:12])
    for first in range(0, 12, 4):
        world.compute(KEYS[first : first + 4], request)
        world.wait()
    assert [key for key in KEYS if world.has(key)] == KEYS[:6]


@says_order
@pytest.mark.parametrize("restarts", [False, True], ids=["runs on", "restarts"])
def test_new_chunks_around_others_of_their_prompt_displace_those_behind(
    make: Make, restarts: bool
) -> None:
    """As after a damaged first chunk, which is written again with the end of the prompt."""
    keys = KEYS[:12:2]  # of one group
    world = make(max_bytes=SlotFile.bytes_for(6 if restarts else 3, CHUNK))
    world.compute(keys[1:4], world.request("before", keys[:4]))
    world.wait()
    request = world.request("again", keys)
    world.compute([keys[0], keys[4]], request)
    world.wait()
    if restarts:
        world.close()
        world = make(max_bytes=SlotFile.bytes_for(6, CHUNK))
        world.store(KEYS[20:22])
        assert [key for key in KEYS if world.has(key)] == keys[:4] + KEYS[20:22]
    else:
        assert [key for key in KEYS if world.has(key)] == keys[:3]


@says_order
def test_restarted_server_keeps_the_beginning_of_the_last_prompt(make: Make) -> None:
    """Its end was written last, and its beginning before other prompts."""
    world = make()
    world.store(KEYS[:2])
    world.store(KEYS[8:12])
    request = world.request("goes on", [*KEYS[:2], *KEYS[20:22]])
    world.compute(KEYS[20:22], request)
    world.wait()
    world.close()
    again = make()
    again.store(KEYS[12:16])
    kept = [*KEYS[:2], *KEYS[12:16], *KEYS[20:22]]
    assert [key for key in KEYS if again.has(key)] == kept


def test_chunk_that_is_there_is_not_written_again(make: Make) -> None:
    world = make()
    world.store(KEYS[:4])
    fill_primary(world)
    before = world.disk.tier.stats().put_blocks
    world.store(KEYS[:4])
    assert world.disk.tier.stats().put_blocks == before


def test_damaged_chunk_is_a_miss_and_the_others_load(make: Make, tmp_path: Path) -> None:
    world = make()
    world.store(KEYS[:4])
    fill_primary(world)
    flip(tmp_path / "slots", world.disk._slots[KEYS[1]] * CHUNK + 99)
    request = world.request("all")
    for key in KEYS[:4]:
        world.manager.lookup(key, request)
    world.end_step()
    world.wait()
    assert [world.primary.lookup(key, request) for key in KEYS[:4]] == [
        LookupResult.HIT, LookupResult.MISS, LookupResult.HIT, LookupResult.HIT,
    ]  # fmt: skip
    assert not world.has(KEYS[1])
    assert len(world.disk._free) + len(world.disk._slots) == NUM_SLOTS, "a slot leaks"


def test_without_checksums_a_damaged_chunk_is_served(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SlotStore, "_are_proven", all_proven)
    world = make()
    world.store(KEYS[:4])
    fill_primary(world)
    flip(tmp_path / "slots", world.disk._slots[KEYS[1]] * CHUNK + 99)
    found = world.load(KEYS[1])
    assert found is not None
    assert (found != content(KEYS[1])).any()


def test_jobs_that_vllm_has_not_heard_of_end_at_a_reset(make: Make) -> None:
    world = make()
    world.store(KEYS[:4])
    fill_primary(world)
    request = world.request("load")
    world.manager.lookup(KEYS[0], request)
    world.manager._flush_pending_promotions()
    world.change_weights()
    assert world.load(KEYS[0]) is None
    assert len(world.disk._free) == NUM_SLOTS
    assert not world.disk._jobs


class Gate(Files):
    """Reads of data wait for `gate`."""

    gate = threading.Event()
    is_shut = False

    def read(self, file: int, buffers: Buffers, offset: int) -> int:
        if self.is_shut:
            assert self.gate.wait(LONG_S)
        return super().read(file, buffers, offset)


def test_slot_that_a_load_reads_is_not_taken(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstow.tiers.slot_file.Files", Gate)
    monkeypatch.setattr(Gate, "gate", threading.Event())
    world = make()
    world.store(KEYS[:4])
    fill_primary(world)
    monkeypatch.setattr(Gate, "is_shut", True)
    request = world.request("load")
    world.manager.lookup(KEYS[0], request)
    world.end_step()
    slot = world.disk._slots[KEYS[0]]
    assert slot not in world.disk._taken(KEYS[8 : 8 + NUM_SLOTS], {})
    assert KEYS[0] in world.disk._slots
    assert not list(world.disk.get_finished_jobs()), "a thread still fills the chunk"
    Gate.gate.set()
    world.wait()
    assert world.primary.lookup(KEYS[0], request) == LookupResult.HIT


def test_reset_does_not_wait_for_a_sync_that_hangs(
    make: Make, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    world, gate = make(), threading.Event()
    world.store(KEYS[:4])
    monkeypatch.setattr("kvstow.vllm.secondary_file._RENEWAL_S", 0.05)
    monkeypatch.setattr(Files, "sync", lambda *_: gate.wait(LONG_S))
    reset = threading.Thread(target=world.change_weights, daemon=True)
    reset.start()
    reset.join(LONG_S / 2)
    has_returned = not reset.is_alive()
    world.store(KEYS[4:8])
    kept = [key for key in KEYS[:8] if world.has(key)]
    gate.set()
    reset.join()
    assert has_returned
    assert kept == [], "a loss of power may still bring back the chunks of the old weights"
    assert any("has not dropped its chunks durably within 0.05 s" in line for line in log)
    assert world.disk._renewal is not None
    world.disk._renewal.wait(LONG_S)
    world.store(KEYS[8:12])
    assert all(world.has(key) for key in KEYS[8:12])


def test_shutdown_with_a_call_that_hangs_keeps_the_memory(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make()
    monkeypatch.setattr(
        type(world.disk.tier), "stats", lambda _: type("Stats", (), {"in_flight_bytes": CHUNK})
    )
    with pytest.raises(TransferError, match="must stay mapped"):
        world.disk.shutdown()
    monkeypatch.undo()
    world.primary.shutdown()


def test_events_say_what_the_disk_stores_and_drops(make: Make) -> None:
    world = make(enable_kv_events=True, locality="LOCAL")
    world.store(KEYS[:4])
    (stored,) = world.disk.take_events()
    assert (set(stored.keys), stored.medium) == (set(KEYS[:4]), Medium.STORAGE)
    assert not stored.removed
    world.store(KEYS[4:8])
    world.store(KEYS[8:12])
    events = list(world.disk.take_events())
    assert {key for event in events if event.removed for key in event.keys} == set(KEYS[:4])
    assert not list(world.disk.take_events())


@pytest.mark.skipif(not secondary_tier._KEEPS_NAMES, reason="this vLLM forgets the names")
def test_removal_from_the_disk_names_all_blocks_of_a_chunk(make: Make) -> None:
    """vLLM's tracker keeps their names after the chunk has left the CPU tier."""
    world = make(enable_kv_events=True)
    tracker = OffloadingEventsTracker(OffloadingKVEventsConfig(True, True))
    hashes = [bytes([7]) * 32, get_offload_block_hash(KEYS[0])]
    request = SimpleNamespace(block_hashes=hashes, all_token_ids=list(range(32)), lora_request=None)
    group = SimpleNamespace(
        sliding_window_size_in_chunks=None,
        hashes_per_chunk=2,
        tokens_per_chunk=32,
        tokens_per_block=16,
        group_idx=0,
        kv_event_group_spec=OffloadingEventGroupSpec("full_attention", None),
    )
    tracker.record_store(request, group, 0, KEYS[0])

    def told(events: Iterable[OffloadingEvent]) -> list[Any]:
        return [event.block_hashes for event in tracker.take_events(events)]

    world.store(KEYS[:1])
    [stored] = told(world.disk.take_events())
    assert len(stored) == 2
    assert told([OffloadingEvent(KEYS[:1], Medium.CPU, removed=True)]) == [stored]
    for first in (4, 8, 12):
        world.store(KEYS[first : first + 4])
    assert stored in told(world.disk.take_events())


def test_many_jobs_that_end_together_are_told_in_one_pass(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that stalls and goes on ends thousands, while vLLM's scheduler waits."""

    def refuse(*_: object) -> bool:
        raise AssertionError("jobs are compared with each other")

    monkeypatch.setattr(Job, "__eq__", refuse)
    world = make()
    for number, key in enumerate(KEYS[:2]):
        job: Any = SimpleNamespace(
            job_id=number,
            keys=[key],
            chunk_ids=np.array([number]),
            req_context=ReqContext("request"),
        )
        world.disk.submit_store(job)
    for job in world.disk._jobs:
        job.ticket.wait(LONG_S)
    assert [result.job_id for result in world.disk.get_finished_jobs()] == [0, 1]


def test_failing_disk_and_the_first_damaged_chunk_are_logged(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    world = make()
    world.store(KEYS[:4])
    fill_primary(world)
    for key in KEYS[:2]:
        flip(tmp_path / "slots", world.disk._slots[key] * CHUNK + 99)
        world.load(key)
    assert sum("are not what was written there" in line for line in log) == 1

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Files, "write", fail)
    for first in (8, 12):
        world.store(KEYS[first : first + 4])
    monkeypatch.undo()
    assert sum("is read_only, and requests go on: " in line for line in log) == 1


def test_memory_with_unaligned_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected multiples of 4096"):
        BorrowedArena(np.zeros((4, 100), np.uint8).data)
    with pytest.raises(ConfigError, match="expected whole rows"):
        BorrowedArena(np.zeros((4, 8192), np.uint8)[:, :4096].data)
