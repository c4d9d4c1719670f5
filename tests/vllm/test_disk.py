"""The disk tier of both halves without an engine: bytes, restarts, resets, ranks and bad input.

Each guard against wrong bytes has its negative control: a test that removes the guard, and then
finds wrong bytes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiers.damage import all_proven
from tests.vllm.halves_below import Server, Whose, fill, folder_on_disk
from vllm.lora.request import LoRARequest

from kvstow import ConfigError, StateError
from kvstow.tiers.slot_store import SlotStore
from kvstow.tiers.sums import ArenaSums
from kvstow.vllm.below import disk as disk_tier
from kvstow.vllm.below import disk_worker
from kvstow.vllm.below.disk import DiskTier
from kvstow.vllm.options import Options

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

NUM_HIT = 96


@pytest.fixture
def disk() -> Iterator[Path]:
    with folder_on_disk() as folder:
        yield folder


@pytest.fixture
def started(disk: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers on one disk, one after the other, and closes them."""
    servers: list[Server] = []

    def start(**settings: Any) -> Server:
        for server in servers:
            server.close()
        servers.append(Server(disk, **settings))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


Started = Callable[..., Server]


def disk_mode(server: Server) -> str | None:
    assert server.half.offload is not None
    server.half.offload.check()
    return server.half.offload.disk_mode


# -- up and down -----------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", ["off", "checksum"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_block_that_fell_off_the_host_comes_back(
    started: Started, num_ranks: int, verify: str
) -> None:
    server = started(num_ranks=num_ranks, verify=verify)
    fill(server, "a")
    server.push_off_the_host()
    assert server.serve(server.begin("a")) == NUM_HIT
    stats = server.stats()
    assert stats["promoted_blocks"] == 6 and stats["disk_hit_tokens"] == NUM_HIT
    assert stats["failed_loads"] == stats["failed_promotes"] == 0


def test_a_short_run_is_not_promoted(started: Started) -> None:
    server = started(min_promote_tokens=NUM_HIT + 1)
    fill(server, "a")
    server.push_off_the_host()
    assert server.serve(server.begin("a")) == 0


def test_a_request_with_an_adapter_takes_nothing_from_the_disk(started: Started) -> None:
    """The hashes have the adapter's name and path, and its content may change between servers."""
    adapter = LoRARequest("adapter", 1, "someone/adapter")
    server = started()
    server.serve(server.begin("a", lora_request=adapter))
    server.forget()
    assert server.serve(server.begin("a", lora_request=adapter)) == NUM_HIT, "the host has it"
    server.forget()
    server.push_off_the_host()
    assert server.serve(server.begin("a", lora_request=adapter)) == 0


def test_the_write_rate_is_bounded_and_an_idle_server_rests(started: Started) -> None:
    server = started(disk_max_write_bytes_per_s=4 * 4096, disk_flush_s=5)
    server.scheduler.now = 100.0
    request = server.begin("a")
    server.step()  # the capacities
    scheduled = server.half.lookup(request, 0)
    while scheduled is None:
        server.step()
        scheduled = server.half.lookup(request, 0)
    clock, disk = server.scheduler, server.half.tier.below
    assert disk is not None
    original = server.half.may_rest
    seen = []

    def may_rest() -> bool:
        # Only while no job is at work: a slow disk takes none of the seconds that this clock has.
        clock.now += 0.01 * (not disk._in_flight)
        seen.append(server.stats()["demoted_blocks"])
        return original()

    server.half.may_rest = may_rest
    server.serve(request)
    assert server.stats()["demoted_blocks"] == 6
    assert len(seen) > 50, "the last two blocks wait for half a second"
    fill(server, "b", "c", "d", "e", "f", "g", "h")
    spent = clock.now - 100.0
    assert server.stats()["demoted_blocks"] * 4096 <= (1 + spent) * 4 * 4096


# -- restarts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_restarted_server_hits_with_its_first_request(started: Started, num_ranks: int) -> None:
    server = started(num_ranks=num_ranks)
    fill(server, "a", "b", "c")
    server = started(num_ranks=num_ranks)
    assert server.serve(server.begin("a")) == NUM_HIT
    server.forget()
    assert server.serve(server.begin("c")) == NUM_HIT


def test_records_come_in_parts(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    server = started(num_ranks=2)
    fill(server, "a", "b", "c")
    for module in (disk_tier, disk_worker):
        monkeypatch.setattr(module, "RECORDS_PER_STEP", 5)
    server = started(num_ranks=2)
    server.settle()
    assert server.stats()["disk_resident_blocks"] == 18
    assert server.serve(server.begin("b")) == NUM_HIT


def test_records_count_once_every_rank_has_reported_them(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(started(num_ranks=2), "a")
    server = started(num_ranks=2)
    with monkeypatch.context() as late:
        late.setattr(server.ranks[1].worker.below, "_part", lambda first: None)
        for _ in range(3):
            server.step()
        assert (server.disk.phase, server.stats()["disk_resident_blocks"]) == ("warming", 0)
    server.settle()
    assert server.stats()["disk_resident_blocks"] == 6


def test_the_oldest_blocks_leave_first_after_restarts(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (disk_tier, disk_worker):
        monkeypatch.setattr(module, "RECORDS_PER_STEP", 5)
    fill(started(num_disk_slots=12), "a", "b", "c")  # the last one has the first slots
    for new, kept in (("d", "c"), ("e", "d")):
        server = started(num_disk_slots=12)
        server.settle()
        fill(server, new)
        assert server.serve(server.begin(kept)) == NUM_HIT
        server.forget()


def test_overlapping_steps_ask_twice_and_count_once(started: Started) -> None:
    fill(started(), "a")
    server = started()
    build = server.half.build
    earlier: list[Any] = []

    def overlapping(scheduled: Any) -> Any:
        earlier.append(build(scheduled))
        return earlier[-2] if len(earlier) > 1 else earlier[-1]

    server.half.build = overlapping
    server.settle()
    assert server.stats()["disk_resident_blocks"] == 6
    assert server.serve(server.begin("a")) == NUM_HIT


def test_a_slot_counts_only_if_every_rank_has_the_same_write(started: Started, disk: Path) -> None:
    server = started(num_ranks=2)
    fill(server, "a")
    os.remove(disk / "rank1")
    os.remove(disk / "rank1.index")
    server = started(num_ranks=2)
    assert server.serve(server.begin("a")) == 0
    assert server.stats()["disk_resident_blocks"] == 6, "stored again"


def test_ranks_that_disagree_would_be_seen(
    started: Started, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: another prompt's blocks in one rank's file."""
    monkeypatch.setattr(disk_tier, "agreed", lambda parts, _: parts[0])
    monkeypatch.setattr(
        SlotStore, "_fit", staticmethod(lambda found, expected: found["schema"] > 0)
    )
    fill(started(num_ranks=2), "a")
    kept = {name: (disk / name).read_bytes() for name in ("rank1", "rank1.index")}
    for rank in (0, 1):
        os.remove(disk / f"rank{rank}")
        os.remove(disk / f"rank{rank}.index")
    fill(started(num_ranks=2), "b")
    server = started(num_ranks=2)
    server.close()
    for name, content in kept.items():
        (disk / name).write_bytes(content)
    server = started(num_ranks=2)
    with pytest.raises(AssertionError, match="wrong bytes"):
        server.serve(server.begin("b"))


def test_a_file_of_other_weights_is_refused_or_emptied(started: Started, log: list[str]) -> None:
    server = started()
    fill(server, "a")
    server.close()
    with pytest.raises(ConfigError, match=r"something else \(weights.*; .* disk_on_mismatch: "):
        started(weights="v2", disk_on_mismatch="refuse")
    server = started(weights="v2")
    assert server.serve(server.begin("a")) == 0
    (line,) = [line for line in log if "the slot file is emptied, because" in line]
    assert line.endswith("'v1' is not 'v2')"), "nothing is left to do"


def test_a_model_that_is_not_known_is_never_warm(started: Started) -> None:
    server = started(is_warm=False)
    fill(server, "a")
    server.push_off_the_host()
    assert server.serve(server.begin("a")) == NUM_HIT
    server = started(is_warm=False)
    assert server.serve(server.begin("a")) == 0


def test_requests_wait_for_a_file_that_does_not_open_only_for_a_while(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of one rank's file may never return."""
    monkeypatch.setattr(disk_worker.DiskWorker, "_part", lambda self, first: None)
    server = started(load_timeout_s=3)
    server.step()
    assert server.disk.phase == "warming"
    assert server.half.lookup(server.begin("a"), 0) is None
    server.scheduler.now += 4
    assert server.half.lookup(server.begin("b"), 0) == 0


# -- resets ----------------------------------------------------------------------------------------


def test_no_block_from_before_a_reset_is_served(started: Started) -> None:
    server = started(num_ranks=2)
    fill(server, "a", "b")
    server.weights = "changed in place"
    assert server.half.reset() is False
    assert disk_mode(server) == "off"
    for name in "ab":
        assert server.serve(server.begin(name)) == 0
        server.forget()
    assert disk_mode(server) == "on"
    fill(server, "new")
    server.push_off_the_host()
    assert server.serve(server.begin("new")) == NUM_HIT
    server = started(num_ranks=2)
    server.settle()
    assert server.stats()["disk_resident_blocks"] == 0, "never warm after a restart"


def test_a_reset_without_a_new_generation_would_be_seen(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control."""
    monkeypatch.setattr(DiskTier, "reset", lambda self: None)
    server = started()
    fill(server, "a", "c")
    server.weights = "changed in place"
    server.half.reset()
    server.serve(server.begin("b"))  # in the slots of a
    server = started()
    server.weights = "changed in place"
    with pytest.raises(AssertionError, match="wrong bytes"):
        server.serve(server.begin("c"))


def test_records_from_before_a_reset_are_not_adopted(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(started(), "a", "b")
    monkeypatch.setattr(disk_tier, "RECORDS_PER_STEP", 5)
    monkeypatch.setattr(disk_worker, "RECORDS_PER_STEP", 5)
    for num_steps in (1, 2, 3, 12, 21):
        server = started()
        for _ in range(num_steps):
            server.step()
        server.weights = f"changed after {num_steps} steps"
        server.half.reset()
        assert server.serve(server.begin("a")) == 0
        server.settle()
        assert server.disk.phase == "on"
        server.close()
        for path in (server.ranks[0].worker._identity.path,):  # type: ignore[union-attr]
            os.remove(path)
            os.remove(f"{path}.index")
        fill(started(), "a", "b")


def test_a_reset_before_the_first_step_counts(started: Started) -> None:
    """A trainer may send its weights to a server that has computed nothing yet."""
    fill(started(num_ranks=2), "a", "b")
    server = started(num_ranks=2)
    server.weights = "changed before the first step"
    server.half.reset()
    for name in "ab":
        assert server.serve(server.begin(name)) == 0
        server.forget()
    server.settle()
    assert disk_mode(server) == "on"


def test_what_a_rank_confirms_of_an_earlier_reset_does_not_open_the_disk(started: Started) -> None:
    """Reports are on their way to vLLM for a step or two, and trainers reset again."""
    server = started()
    server.settle()
    for _ in range(2):
        server.half.reset()
    (report,) = server.disk._ranks.values()
    for renewal, phase in ((1, "renewing"), (2, "on")):
        server.disk.processed({0: replace(report, renewal=renewal)})
        assert server.disk.phase == phase


@pytest.mark.parametrize("is_written", [True, False], ids=["version", "the old version"])
@pytest.mark.parametrize("resets_pool", [True, False], ids=["pool", "nothing"])
def test_the_first_request_compares_the_weights_of_a_warm_disk(
    started: Started, tmp_path: Path, *, resets_pool: bool, is_written: bool
) -> None:
    """A trainer changes the weights before vLLM has computed anything. The control forgets it."""
    version = tmp_path / "version"
    version.write_text("1")
    options = {"preserve_on_sleep": True, "weights_version_path": str(version)}
    fill(started(**options), "a")
    server = started(**options)
    server.settle()
    if is_written:
        version.write_text("2")
        server.weights = "changed before the first request"
    if resets_pool:
        assert server.scheduler.manager.reset_prefix_cache()
    assert server.serve(server.begin("a")) == (0 if is_written else NUM_HIT)
    server.forget()
    assert server.serve(server.begin("a")) == NUM_HIT, "the tier is kept from then on"


def test_a_job_in_flight_at_a_reset_has_no_effect(started: Started) -> None:
    server = started()
    server.serve(server.begin("z"))
    server.forget()
    request = server.begin("a")
    held = hold(server, "demote")
    server.serve(request, settles=False)
    server.forget()
    assert held, "a demote is under way"
    server.weights = "changed in place"
    server.half.reset()
    server.step()
    release(server, held)
    server.settle()
    server.push_off_the_host()
    assert server.serve(server.begin("a")) == 0
    assert server.half.offload is not None
    server.half.offload.check()


def hold(server: Server, direction: str) -> list[Callable[[], None]]:
    """Hold up the jobs of one direction on rank 0, until `release` lets them go."""
    worker = server.ranks[0].worker.below
    assert worker is not None
    begin = worker._runner.begin
    held: list[Callable[[], None]] = []

    def begin_later(way: Any, *args: Any, **more: Any) -> None:
        if way == direction:
            held.append(lambda: begin(way, *args, **more))
        else:
            begin(way, *args, **more)

    worker._runner.begin = begin_later  # type: ignore[assignment, method-assign]
    return held


def release(server: Server, held: list[Callable[[], None]]) -> None:
    """Let held jobs go on, and later jobs at once."""
    worker = server.ranks[0].worker.below
    assert worker is not None
    del worker._runner.begin
    for go in held:
        go()


# -- faults ----------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    """Change a bit in each slot of a slot file."""
    with open(path, "r+b") as file:
        content = np.frombuffer(file.read(), np.uint8).copy()
        content[5::4096] ^= 1
        file.seek(0)
        file.write(content.tobytes())


def test_a_damaged_slot_is_a_miss(started: Started, disk: Path, log: list[str]) -> None:
    fill(started(), "a")
    server = started()
    server.close()
    flip(disk / "rank0")
    server = started()
    assert server.serve(server.begin("a")) == 0
    assert server.stats()["failed_promotes"] > 0
    assert not [line for line in log if "not what was written" in line], "until vLLM asks"
    (rank,) = server.ranks
    below = rank.worker.below
    assert below is not None and below.counted()["disk_mismatched_blocks"] > 0
    assert len([line for line in log if "not what was written there" in line]) == 1
    server.forget()
    server.push_off_the_host()
    assert server.serve(server.begin("a")) > 0, "it was stored again"


def test_a_damaged_slot_would_be_seen(
    started: Started, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: without the comparison the damage is served."""
    monkeypatch.setattr(SlotStore, "_are_proven", all_proven)
    fill(started(), "a")
    server = started()
    server.close()
    flip(disk / "rank0")
    server = started()
    with pytest.raises(AssertionError, match="wrong bytes"):
        server.serve(server.begin("a"))


def damage_host(server: Server) -> None:
    """Let the host memory change while demotes are held up."""
    held = hold(server, "demote")
    server.serve(server.begin("a"), settles=False)
    server.forget()
    arena = server.ranks[0].worker.arena
    assert arena is not None and held
    arena.slots[:, 7] ^= 1
    release(server, held)
    server.settle()
    # The blocks are damaged on the host as well, and other prompts push them off.
    server.push_off_the_host()


def test_host_memory_that_changes_before_a_demote_is_not_vouched_for(started: Started) -> None:
    server = started(verify="checksum")
    damage_host(server)
    server.serve(server.begin("a"))


def test_a_demote_of_damaged_memory_would_be_seen(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control."""
    monkeypatch.setattr(ArenaSums, "are_sound", lambda self, rows: np.ones(len(rows), bool))
    server = started(verify="checksum")
    damage_host(server)
    with pytest.raises(AssertionError, match="wrong bytes"):
        server.serve(server.begin("a"))


def test_a_request_stops_waiting_for_a_disk_that_does_not_answer(started: Started) -> None:
    server = started(promote_timeout_s=2, load_timeout_s=30)
    fill(server, "a", "b")
    server.push_off_the_host()
    held = hold(server, "promote")
    request = server.begin("a")
    for now in (10.0, 11.0, 11.9):
        server.scheduler.now = now
        assert server.half.lookup(request, 0) is None
        server.step()
    server.scheduler.now = 12.1
    assert server.half.lookup(request, 0) == 0
    server.serve(request, settles=False)
    server.scheduler.now = 100.0
    server.forget()
    server.settle()
    assert server.stats()["late_jobs"] == 1 and held
    assert server.stats()["promoting_blocks"] > 0, "its slots are in quarantine"
    assert server.half.lookup(server.begin("b"), 0) == 0, "it would take more slots"
    release(server, held)
    for _ in range(20_000):
        server.step()
        if not server.stats()["promoting_blocks"]:
            break
    assert server.stats()["promoting_blocks"] == 0, "a late job gives its slots back"


@pytest.mark.parametrize("mode", ["read_only", "off"])
def test_a_disk_that_fails_is_left_alone(
    started: Started, log: list[str], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = started(num_ranks=2)
    fill(server, "a")
    server.push_off_the_host()
    monkeypatch.setattr(SlotStore, "mode", property(lambda self: mode))
    server.settle()
    server.step()
    assert disk_mode(server) == mode
    demoted = server.stats()["demoted_blocks"]
    assert server.serve(server.begin("a")) == (NUM_HIT if mode == "read_only" else 0)
    fill(server, "new")
    assert server.stats()["demoted_blocks"] == demoted
    assert sum(f"the disk tier of rank 0 is {mode}" in line for line in log) == 1


# -- blocks that are stored while the disk is closed, or off ---------------------------------------


def counts(server: Server) -> tuple[int, int, int]:
    """Return the blocks that were stored and demoted so far, and those that are on the disk."""
    stats = server.stats()
    return stats["stored_blocks"], stats["demoted_blocks"], stats["disk_resident_blocks"]


def test_blocks_stored_while_the_disk_is_closed_are_on_the_host_only(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = started(num_ranks=2)
    fill(server, "a")
    assert counts(server) == (6, 6, 6)
    with monkeypatch.context() as closed:
        closed.setattr(disk_worker.DiskWorker, "_has_renewed", lambda _: False)
        server.weights = "changed in place"
        server.half.reset()
        server.serve(server.begin("b"), settles=False)
        server.forget()
        assert disk_mode(server) == "off"
        assert counts(server) == (12, 6, 0)
    server.settle()
    assert disk_mode(server) == "on"
    assert counts(server) == (12, 6, 0)
    assert server.serve(server.begin("b")) == NUM_HIT, "the host has it"
    server.forget()
    server.push_off_the_host()
    assert server.serve(server.begin("a")) == 0


def test_blocks_stored_while_the_disk_is_off_are_not_in_its_index(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = started(num_ranks=2)
    fill(server, "a")
    with monkeypatch.context() as failed:
        failed.setattr(SlotStore, "mode", property(lambda _: "off"))
        server.settle()
        server.step()
        assert disk_mode(server) == "off"
        fill(server, "b")
        assert counts(server)[:2] == (12, 6)
        server.push_off_the_host()
        assert server.serve(server.begin("b")) == 0
        server.close()
    server = started(num_ranks=2)
    server.settle()
    assert counts(server)[2] == 6
    assert server.serve(server.begin("b")) == 0
    server.forget()
    assert server.serve(server.begin("a")) == NUM_HIT


def test_an_error_of_the_disk_loses_no_job(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lost jobs would hold their blocks for good, and a request would wait for its failed load."""

    def broken(**_: bool) -> None:
        raise RuntimeError("an error of the test")

    server = started()
    server.settle()
    request = server.begin("a")
    assert server.scheduler.admit(request) == 0
    server.step(request)
    server.scheduler.finish(request)
    server.half.transfers.fail_load("b")
    monkeypatch.setattr(server.disk, "build", broken)
    server.scheduler.let_go_off()
    server.step()
    assert server.half.tier.is_off
    assert server.ranks[0].worker.failed_request_ids() == {"b"}
    server.settle()
    assert not server.half.transfers.in_flight


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"disk_bytes_to_use": "1GiB"}, "disk_bytes_to_use is .* only with disk_path"),
        ({"disk_admit": "returned"}, "disk_admit is .* only with disk_path"),
        ({"disk_path": "/disk"}, "disk_path is '/disk', and disk_bytes_to_use is missing"),
        (
            {
                "disk_path": "/disk",
                "disk_bytes_to_use": "1GiB",
                "preserve_on_sleep": True,
            },
            "without weights_version_path",
        ),
        ({"disk_admit": "some"}, "disk_admit is 'some', and it must be one of all, returned"),
        ({"disk_flush_s": -1}, "disk_flush_s is -1"),
    ],
)
def test_an_option_without_its_partner_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Options.parse(given)


@pytest.mark.parametrize("place", ["memory", "missing", "symlink", "device", "small", "large"])
def test_an_unsuitable_place_ends_the_start_before_weights_are_read(
    disk: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Whose, "fingerprint", lambda *_: pytest.fail("all weights were read"))
    folder, message = disk, ""
    options: dict[str, Any] = {}
    if place == "memory":
        folder, message = Path("/dev/shm"), "which is memory and not a disk"
    elif place == "missing":
        folder, message = disk / "none", "does not exist"
    elif place == "symlink":
        (disk / "rank0").symlink_to(disk / "elsewhere")
        message = "is a symbolic link"
    elif place == "device":
        folder, message = Path("/dev/null"), "cannot be opened|is a device"
    elif place == "small":
        options, message = {"disk_bytes_to_use": 5000}, "one slot of 4096 bytes take 8320"
    else:
        options, message = {"disk_bytes_to_use": 1 << 42}, "the file system"
    with pytest.raises(ConfigError, match=r"disk_path is .*disk_bytes_to_use") as refused:
        Server(folder, **options)
    assert re.search(message, str(refused.value)), refused.value


def test_two_servers_on_one_file_are_refused(started: Started, disk: Path) -> None:
    started()
    with pytest.raises(StateError, match=r"disk_path .* is in use"):
        Server(disk)
