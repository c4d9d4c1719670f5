"""The end of a server with a disk: workers write what only the host has, and nothing else.

Each guard against wrong bytes has its negative control: a test that removes the guard, and then
finds wrong bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import pytest
from tests.tiers.setup import LONG_S
from tests.vllm.halves_below import Server, fill, folder_on_disk

from kvstow.tiers.slot_store import SlotStore
from kvstow.tiers.sums import ArenaSums
from kvstow.vllm.below import disk as disk_tier
from kvstow.vllm.below import disk_worker
from kvstow.vllm.below.disk_worker import DiskWorker

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

NUM_HIT = 96
# Stores are not demoted, so their blocks are on the host only. The end may take long.
RETURNED: dict[str, Any] = {"disk_admit": "returned", "disk_flush_s": LONG_S}


@pytest.fixture
def disk() -> Iterator[Path]:
    with folder_on_disk() as folder:
        yield folder


@pytest.fixture
def started(disk: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers on one disk, and ends the one before in an orderly way."""
    servers: list[Server] = []

    def start(**settings: Any) -> Server:
        for server in servers:
            server.close()
        servers.append(Server(disk, **(RETURNED | settings)))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


Started = Callable[..., Server]


def worker_of(server: Server) -> DiskWorker:
    worker = server.ranks[0].worker.below
    assert isinstance(worker, DiskWorker)
    return worker


def keep_plan(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server make no other plan for its end."""

    def plan_nothing(_offload: Any) -> None:
        server.disk._must_plan = False

    monkeypatch.setattr(server.disk, "_plan_last", plan_nothing)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_the_next_server_hits_what_was_only_on_the_host(started: Started, num_ranks: int) -> None:
    server = started(num_ranks=num_ranks)
    fill(server, "a", "b")
    assert server.stats()["demoted_blocks"] == 0
    server = started(num_ranks=num_ranks)
    for name in "ab":
        assert server.serve(server.begin(name)) == NUM_HIT
        server.forget()
    assert server.stats()["failed_promotes"] == 0


def test_a_killed_server_loses_it(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DiskWorker, "_flush", lambda self: None)
    fill(started(), "a", "b")
    server = started()
    assert server.serve(server.begin("a")) == 0


def test_a_server_without_blocks_to_write_logs_that(started: Started, log: list[str]) -> None:
    started().close()
    assert any("has no block to write at its end" in line for line in log)


def test_the_most_recent_blocks_are_written_first_and_for_a_while_only(
    started: Started, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    server = started()
    fill(server, "a", "b")
    numbers = [job.blocks.sequence for job in worker_of(server)._last]
    assert numbers == [numbers[0] - at for at in range(4)], "the next server knows the order"
    now, begin = [0.0], DiskWorker._begin

    def begin_slowly(worker: DiskWorker, job: Any, deadline: float) -> None:
        begin(worker, job, deadline)
        now[0] += 0.7 * LONG_S

    monkeypatch.setattr(disk_worker, "monotonic", lambda: monotonic() + now[0])
    monkeypatch.setattr(DiskWorker, "_begin", begin_slowly)
    server.close()
    monkeypatch.undo()
    assert any("has written 6 of 12 blocks that only the host had" in line for line in log)
    server = started()
    assert server.serve(server.begin("a")) == 0
    server.forget()
    assert server.serve(server.begin("b")) == NUM_HIT


def test_the_write_rate_bounds_the_last_blocks_too(started: Started) -> None:
    server = started(disk_max_write_bytes_per_s=ceil(4 * 4096 / LONG_S))
    may_rest = server.half.may_rest

    def rest_later() -> bool:
        server.scheduler.now += 0.1
        return may_rest()

    server.half.may_rest = rest_later
    fill(server, "a", "b")
    server = started()
    server.settle()
    assert server.stats()["disk_resident_blocks"] == 4


def test_a_full_disk_gives_the_last_blocks_its_coldest_slots(started: Started) -> None:
    fill(started(num_disk_slots=12, disk_admit="all"), "c", "b")
    fill(started(num_disk_slots=12), "a")
    server = started(num_disk_slots=12)
    found = {}
    for name in "abc":
        found[name] = server.serve(server.begin(name))
        server.forget()
    assert found == {"a": NUM_HIT, "b": NUM_HIT, "c": 0}


def test_the_recency_of_the_last_blocks_outlives_the_server(started: Started) -> None:
    fill(started(), "a", "b")
    server = started(num_disk_slots=12)
    server.settle()
    fill(server, "c", "d")
    server = started(num_disk_slots=12, num_host_blocks=24)
    server.settle()
    # The disk has c and d: the blocks of the last server were older.
    assert [server.serve(server.begin(name)) for name in "ab"] == [0, 0]


# -- a plan that is out of date --------------------------------------------------------------------


def replace_on_host(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the host give the slots of the planned blocks to others."""
    fill(server, "a", "b")
    keep_plan(server, monkeypatch)
    fill(server, "c", "d")


def test_a_host_slot_that_holds_another_block_now_is_left_out(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_on_host(started(num_ranks=2), monkeypatch)
    server = started(num_ranks=2)
    for name in "ab":
        assert server.serve(server.begin(name)) == 0
        server.forget()


def test_a_host_slot_that_holds_another_block_would_be_seen(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: the worker does not watch the jobs."""
    monkeypatch.setattr(DiskWorker, "used", lambda *_: None)
    replace_on_host(started(), monkeypatch)
    server = started()
    with pytest.raises(AssertionError, match="wrong bytes"):
        server.serve(server.begin("b"))


@pytest.mark.parametrize("watches", [True, False])
def test_a_slot_that_a_promote_fills_is_left_out(
    started: Started, monkeypatch: pytest.MonkeyPatch, *, watches: bool
) -> None:
    """Without the watch, the promoted block is written under the key of the planned one."""
    fill(started(disk_admit="all"), "c", "d")
    if not watches:
        monkeypatch.setattr(DiskWorker, "used", lambda *_: None)
    server = started(num_disk_slots=100)
    fill(server, "a", "b")
    keep_plan(server, monkeypatch)
    for name in "cd":
        assert server.serve(server.begin(name)) == NUM_HIT
        server.forget()
    server = started()
    if watches:
        assert [server.serve(server.begin(name)) for name in "ab"] == [0, 0]
    else:
        with pytest.raises(AssertionError, match="wrong bytes"):
            server.serve(server.begin("b"))


def test_a_disk_slot_that_a_demote_fills_keeps_its_block(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = started()
    fill(server, "a", "b")
    keep_plan(server, monkeypatch)
    assert server.serve(server.begin("a")) == NUM_HIT  # a hit, so it is demoted now
    assert server.stats()["demoted_blocks"] == 6
    server = started()
    assert server.serve(server.begin("a")) == NUM_HIT
    assert server.stats()["failed_promotes"] == 0


def differ(started: Started, monkeypatch: pytest.MonkeyPatch) -> Server:
    """Restart two ranks that ended with different plans. Rank 0 has the first one."""
    server = started(num_ranks=2, num_host_blocks=24)
    fill(server, "a")
    worker = worker_of(server)
    take = worker.take

    def take_no_plan(orders: Any) -> None:
        orders.last = None
        take(orders)

    monkeypatch.setattr(worker, "take", take_no_plan)
    fill(server, "b")
    assert [len(job.blocks) for job in worker._last] == [6]
    return started(num_ranks=2)


def test_ranks_with_different_plans_agree_on_nothing(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = differ(started, monkeypatch)
    for name in "ab":
        assert server.serve(server.begin(name)) == 0
        server.forget()


def test_ranks_with_different_plans_would_be_seen(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: a slot counts if one rank has it."""
    monkeypatch.setattr(disk_tier, "agreed", lambda parts, _: parts[0])
    monkeypatch.setattr(
        SlotStore, "_fit", staticmethod(lambda found, expected: found["schema"] > 0)
    )
    server = differ(started, monkeypatch)
    with pytest.raises(AssertionError, match="wrong bytes"):
        server.serve(server.begin("a"))


# -- resets, and weights that no later server can know ---------------------------------------------


def test_a_reset_that_the_workers_do_not_know_of_saves_the_weights_of_the_start(
    started: Started,
) -> None:
    """The file's generation and fingerprint are those of the blocks: both are from before."""
    server = started()
    fill(server, "a")
    server.weights = "changed in place"
    server.half.reset()
    server = started()  # with the weights of the start
    assert server.serve(server.begin("a")) == NUM_HIT


def test_nothing_is_written_after_a_reset(started: Started) -> None:
    server = started(num_ranks=2)
    fill(server, "a")
    assert worker_of(server)._last
    server.weights = "changed in place"
    server.half.reset()
    server.step()
    assert not worker_of(server)._last
    fill(server, "a", "b")
    assert not worker_of(server)._last
    server = started(num_ranks=2)
    for name in "ab":
        assert server.serve(server.begin(name)) == 0
        server.forget()


def test_weights_that_are_not_known_are_not_written(started: Started) -> None:
    server = started(is_warm=False)
    fill(server, "a")
    assert not worker_of(server)._last


# -- damage ----------------------------------------------------------------------------------------


def damage_host(server: Server) -> None:
    fill(server, "a")
    arena = server.ranks[0].worker.arena
    assert arena is not None
    arena.slots[:, 7] ^= 1


def test_host_memory_that_changed_is_not_vouched_for(started: Started) -> None:
    damage_host(started(verify="checksum"))
    server = started()
    assert server.serve(server.begin("a")) == 0


def test_host_memory_that_changed_would_be_seen(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control."""
    monkeypatch.setattr(ArenaSums, "are_sound", lambda self, rows: np.ones(len(rows), bool))
    damage_host(started(verify="checksum"))
    server = started()
    with pytest.raises(AssertionError, match="wrong bytes"):
        server.serve(server.begin("a"))


def test_a_disk_that_fails_is_left_alone_at_the_end(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = started()
    fill(server, "a")
    monkeypatch.setattr(SlotStore, "mode", property(lambda self: "read_only"))
    server.close()
    monkeypatch.undo()
    server = started()
    assert server.serve(server.begin("a")) == 0
