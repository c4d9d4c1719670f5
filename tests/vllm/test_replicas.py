"""Ranks with equal KV share one copy of it on the host: bytes, failures, and what is left.

Each rank is a process. The ranks fill their blocks with different bytes, so that a test sees whose
bytes a load brings. Each guard has a negative control beside it: a rank that breaks the rule.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.vllm.halves import BLOCK_SIZE, FULL, PAGE_BYTES, cache_config, engine_config
from tests.vllm.ranks import Ranks, Server, expected, server
from tests.vllm.versions import planning
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec

from kvstow import ConfigError
from kvstow.vllm import KVStowConnector
from kvstow.vllm.options import Options
from kvstow.vllm.replicas import Replicas

# vLLM's own, and those of what it imports.
pytestmark = pytest.mark.filterwarnings("ignore")

SLOT_BYTES = 4096


def loaded(running: Server, name: str) -> list[list[bytes]]:
    """Load a request on all ranks, and return each rank's bytes of it."""
    ids = running.load(name)
    assert ids, "nothing to load"
    running.settle()
    return running.ranks.call("read", ids, among=running.alive)


# -- bytes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num", [2, 3])
def test_every_rank_loads_what_the_writer_has_stored(num: int) -> None:
    with server(num) as running:
        running.begin()
        ids = running.compute("a")
        running.settle()
        running.forget()
        assert loaded(running, "b") == [expected(ids, 0)] * num
        (inodes,) = {tuple(set(found)) for found in running.ranks.call("mapped")}
        assert len(inodes) == 1, "one memory on all ranks"
        stored = [stats.get("stored_bytes", 0) for stats in running.ranks.call("stats")]
        assert stored == [len(ids) * PAGE_BYTES] + [0] * (num - 1)


def test_a_rank_that_stores_too_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: with copies of their own, each rank loads its own bytes."""
    with server() as running:
        running.ranks.one(1, "forbid", "open")
        running.begin()
        ids = running.compute("a")
        running.settle()
        running.forget()
        assert loaded(running, "b") == [expected(ids, 0), expected(ids, 1)]


@pytest.mark.parametrize("lazy", [False, True])
def test_many_requests_through_a_small_tier(lazy: bool) -> None:
    """Slots are used again and again, and each load brings the bytes of its own blocks."""
    with server(num_host_blocks=16, lazy_offload=lazy) as running:
        running.begin()
        for number in range(12):
            name = f"r{number}"
            ids = running.compute(name, cache_salt=name)
            running.settle()
            running.forget()
            again = running.request(f"{name}-again", 100, cache_salt=name)
            found = running.admit(again)
            assert found == 96
            blocks = running.manager.get_blocks(f"{name}-again").blocks[0][:6]
            running.settle()
            read = running.ranks.call("read", [block.block_id for block in blocks])
            assert read == [expected(ids, 0)] * 2
            running.finish(again)
            running.forget()


# -- the writer is late, or fails ------------------------------------------------------------------


def test_slots_are_not_found_before_the_writers_bytes_are_complete() -> None:
    with server() as running:
        running.begin()
        running.ranks.one(0, "hold")
        ids = running.compute("a")
        for _ in range(5):
            running.run()
        (transfer,) = running.half.transfers.in_flight.values()
        assert transfer.ranks == {1}, "the other rank has reported the store"
        assert transfer.held, "the writer still reads the blocks"
        assert running.half.lookup(running.request("b", 100), 0) == 0
        running.ranks.one(0, "release")
        running.settle()
        running.forget()
        assert loaded(running, "c") == [expected(ids, 0)] * 2


def test_a_writer_that_reports_before_its_copy_would_serve_other_bytes() -> None:
    """The negative control: what the test above guards against is visible in the bytes."""
    with server() as running:
        running.begin()
        running.ranks.one(0, "hold", hasty=True)
        ids = running.compute("a")
        running.settle()
        running.ranks.call("clear")
        assert running.manager.reset_prefix_cache()
        assert loaded(running, "b") != [expected(ids, 0)] * 2
        running.ranks.one(0, "release")


def test_blocks_are_released_when_the_writer_has_read_them() -> None:
    """The other rank needs no blocks, and must not keep them until the writer's copy ends."""
    with server() as running:
        running.begin()
        running.ranks.one(0, "hold")
        running.compute("a")
        (job_id,) = running.half.transfers.in_flight
        transfer = running.half.transfers.in_flight[job_id]
        assert transfer.num_released == 1 and transfer.held
        running.half.transfers.released([job_id])  # as the writer reports it on a device
        assert not transfer.held
        running.ranks.one(0, "release")
        running.settle()


def test_a_store_that_fails_on_the_writer_is_not_found() -> None:
    with server() as running:
        running.begin()
        running.ranks.one(0, "fail")
        running.compute("a")
        running.settle()
        running.forget()
        assert running.half.lookup(running.request("b", 100), 0) == 0
        assert running.half.offload is not None and running.half.offload.num_resident == 0


def test_a_failed_store_that_is_reported_as_done_would_serve_other_bytes() -> None:
    """The negative control."""
    with server() as running:
        running.begin()
        running.ranks.one(0, "fail", hasty=True)
        ids = running.compute("a")
        running.settle()
        running.forget()
        assert loaded(running, "b") != [expected(ids, 0)] * 2


def test_a_slot_of_a_late_writer_goes_to_no_other_job() -> None:
    """The store misses its deadline, and the writer may still write its slots."""
    with server(num_host_blocks=7, load_timeout_s=5.0) as running:
        running.begin()
        running.ranks.one(0, "hold")
        running.compute("a")
        running.now = 6.0
        running.run()
        offload = running.half.offload
        assert offload is not None and offload.stats()["quarantined_blocks"] == 6
        assert running.manager.reset_prefix_cache() is False, "its device blocks are held"
        ids = running.compute("b")
        assert offload.stats()["quarantined_blocks"] == 6
        assert running.half.lookup(running.request("c", 100), 0) == 0
        running.ranks.one(0, "release")
        running.settle()
        assert offload.stats()["quarantined_blocks"] == 0
        running.forget()
        targets = running.load("d")
        assert len(targets) == 1, "one slot was free"
        running.settle()
        assert running.ranks.call("read", targets) == [expected(ids[:1], 0)] * 2


def test_a_sleeping_writer_fails_the_store() -> None:
    with server() as running:
        running.begin()
        running.ranks.one(0, "sleep")
        running.compute("a")
        running.settle()
        running.ranks.one(0, "wake")
        running.forget()
        assert running.half.lookup(running.request("b", 100), 0) == 0


def test_the_copy_outlives_sleep() -> None:
    with server(preserve_on_sleep=True) as running:
        running.begin()
        ids = running.compute("a")
        running.settle()
        for name in ("sleep", "wake"):
            running.ranks.call(name)
        running.forget()
        assert loaded(running, "b") == [expected(ids, 0)] * 2


# -- loads -----------------------------------------------------------------------------------------


def test_a_slot_is_not_written_while_another_rank_loads_it() -> None:
    """The writer has loaded its part. The tier is full, and the next request wants its slots."""
    with server(num_host_blocks=7) as running:
        running.begin()
        ids = running.compute("a")
        running.settle()
        running.forget()
        running.ranks.one(1, "hold_loads")
        targets = running.load("b")
        for _ in range(3):
            running.run()
        (transfer,) = running.half.transfers.in_flight.values()
        assert transfer.ranks == {0}
        store_next(running)
        running.ranks.one(1, "release")
        running.settle()
        assert running.ranks.call("read", targets) == [expected(ids, 0)] * 2


def store_next(running: Server) -> None:
    """Compute a request of other tokens, which the full tier has no room for."""
    request = running.request("next", 100, cache_salt="other")
    running.admit(request)
    blocks = [block.block_id for block in running.manager.get_blocks("next").blocks[0]][:6]
    running.ranks.one(0, "fill", blocks, 99)
    running.run(request)
    running.finish(request)
    for _ in range(3):
        running.run()


def test_a_load_reported_too_early_would_bring_other_bytes() -> None:
    """The negative control: the scheduler believes that rank 1 has loaded."""
    with server(num_host_blocks=7) as running:
        running.begin()
        ids = running.compute("a")
        running.settle()
        running.forget()
        running.ranks.one(1, "hold_loads")
        targets = running.load("b")
        for _ in range(3):
            running.run()
        (job_id,) = running.half.transfers.in_flight
        offload = running.half.offload
        assert offload is not None
        end = offload.complete(job_id, ok=True, rank=1)
        assert end is not None
        del running.half.transfers.in_flight[job_id]
        store_next(running)
        running.ranks.one(1, "release")
        own, other = running.ranks.call("read", targets)
        assert own == expected(ids, 0) != other


@pytest.mark.parametrize("index", [0, 1])
def test_damaged_slots_fail_the_load_of_every_rank(index: int) -> None:
    """Each rank compares what it loads with the writer's checksum."""
    with server(verify="checksum") as running:
        running.begin()
        ids = running.compute("a")
        running.settle()
        running.forget()
        assert loaded(running, "b") == [expected(ids, 0)] * 2
        running.finish(running.half.requests.tracked["b"].request)
        running.forget()
        slots = [slot for slot in range(32) if any(running.ranks.one(0, "host", [slot])[0])]
        assert len(slots) == len(ids)
        running.ranks.one(index, "damage", slots[0])
        running.load("c")
        running.settle()
        assert running.jobs.failed_request_ids or running.half.transfers.failed_request_ids
        assert running.half.offload is not None
        assert running.half.offload.stats()["damaged_blocks"] == 1


# -- ranks that die --------------------------------------------------------------------------------


def test_a_dead_rank_stops_no_bytes_of_the_others() -> None:
    """vLLM ends its engine when a rank dies. Until then no wrong block is served."""
    with server(3, load_timeout_s=5.0) as running:
        running.begin()
        ids = running.compute("a")
        running.settle()
        running.forget()
        targets = running.load("b")
        running.ranks.kill(2)
        running.alive = [0, 1]
        for _ in range(5):
            running.run()
        assert running.ranks.call("read", targets, among=[0, 1]) == [expected(ids, 0)] * 2
        assert running.half.transfers.in_flight, "the dead rank has not reported"
        running.compute("c", cache_salt="other")
        running.now = 6.0
        running.run()
        offload = running.half.offload
        assert offload is not None and offload.stats()["late_jobs"] >= 1


def named_memory() -> set[Path]:
    """Return kvstow's files in memory, also those that other programs have left."""
    return set(Path("/dev/shm").glob("*kvstow*"))


@pytest.mark.parametrize("killed", [[0], [1], [0, 1], [1, 0]])
def test_killed_ranks_leave_no_memory_and_no_file(killed: list[int]) -> None:
    before = named_memory()
    with server() as running:
        running.begin()
        running.compute("a")
        running.settle()
        (inode,) = set(running.ranks.one(1, "mapped"))
        for index in killed:
            running.ranks.kill(index)
        left = [index for index in (0, 1) if index not in killed]
        assert sorted(mapping_processes(inode)) == sorted(
            str(running.ranks.processes[index].pid) for index in left
        )
        for index in left:
            assert any(any(row) for row in running.ranks.one(index, "host", range(32)))
    assert named_memory() <= before


def test_closed_ranks_leave_no_memory() -> None:
    with server() as running:
        running.begin()
        (inode,) = set(running.ranks.one(0, "mapped"))
        assert len(mapping_processes(inode)) == 2
        running.ranks.call("close")
        assert running.ranks.call("mapped") == [[], []]


def mapping_processes(inode: int) -> list[str]:
    """Return the processes that map the memory."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f" {inode} " in (process / "maps").read_text():
                found.append(process.name)
        except OSError:
            continue
    return found


# -- memory that cannot be shared ------------------------------------------------------------------


@pytest.mark.parametrize(("index", "what"), [(0, "create"), (1, "open"), (2, "open")])
def test_all_ranks_keep_copies_of_their_own_if_one_cannot_share(index: int, what: str) -> None:
    """A rank that stores nothing, and loads from memory of its own, would load zeros."""
    with server(3, cpu_bytes_to_use=30 * SLOT_BYTES, num_host_blocks=None) as running:
        running.ranks.one(index, "forbid", what)
        running.begin()
        assert running.half.offload is not None
        assert running.half.offload.num_host_blocks == 10, "a third of the memory"
        ids = running.compute("a")
        running.settle()
        running.forget()
        assert loaded(running, "b") == [expected(ids, index) for index in range(3)]


def test_ranks_that_share_hold_as_much_as_all_of_them_together() -> None:
    for options, num_blocks in (
        ({"cpu_bytes_to_use": 30 * SLOT_BYTES}, 30),
        ({"cpu_bytes_to_use_per_rank": 10 * SLOT_BYTES}, 30),
        ({"num_cpu_blocks": 10}, 10),
    ):
        with server(3, **options, num_host_blocks=None) as running:
            running.begin()
            assert running.half.offload is not None
            assert running.half.offload.num_host_blocks == num_blocks


def test_too_little_memory_is_refused_on_every_rank() -> None:
    """An error of one rank that the others wait for would hang the start."""
    ranks = Ranks(3, num_cpu_blocks=8)
    try:
        ranks.one(0, "forbid", "map")
        for index, error in enumerate(outcomes(ranks, "register")):
            assert isinstance(error, ConfigError), index
            assert "8 host blocks of 4096 bytes" in str(error)
            assert "ranks" not in str(error), "one copy needs the memory once"
        assert ranks.call("mapped") == [[], [], []]
    finally:
        ranks.close()


def outcomes(ranks: Ranks, name: str) -> list[Any]:
    """Call a method on all ranks, and return what each returned or raised."""
    for link in ranks.links:
        link.send((name, (), {}))
    while True:
        answers = [link.recv() for link in ranks.links]
        if {kind for kind, _ in answers} == {"result"}:
            return [value for _, value in answers]
        for link in ranks.links:
            link.send([value for _, value in answers])


def test_registering_again_keeps_the_shared_memory() -> None:
    with server() as running:
        running.begin()
        ids = running.compute("a")
        running.settle()
        before = running.ranks.call("mapped")
        running.ranks.call("register")
        assert running.ranks.call("mapped") == before
        running.forget()
        assert loaded(running, "b") == [expected(ids, 0)] * 2


# -- which ranks share -----------------------------------------------------------------------------

# Each rank holds the whole latent. vLLM 0.30 does not say so.
WHOLE = {"max_tp_shards": 1} if hasattr(MLAAttentionSpec, "max_tp_shards") else {}
MLA = MLAAttentionSpec(
    block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=FULL.dtype, **WHOLE
)


def replicas_of(folder: Path, num: int = 2, tp: int = 2, rank: int = 0, **changes: Any) -> Any:
    config = engine_config(folder, {"num_cpu_blocks": 4})
    parallel = config.parallel_config
    parallel.tensor_parallel_size = parallel.world_size = tp
    parallel.rank, parallel.distributed_executor_backend = rank, "mp"
    for name, value in changes.items():
        setattr(parallel, name, value)
    cache = cache_config(MLA)
    cache.kv_tp_replicas = num
    return Replicas.of(config, cache)


@pytest.mark.skipif(not WHOLE, reason="vLLM 0.30 reports no equal KV")
def test_vllm_says_which_ranks_have_equal_kv() -> None:
    groups = [KVCacheGroupSpec(["a"], MLA)]
    assert planning.kv_cache_groups_tp_replicas(groups, 8) == 8
    assert planning.kv_cache_groups_tp_replicas(groups, 8, dcp_size=2) == 1
    heads = [KVCacheGroupSpec(["a"], FULL)]
    assert planning.kv_cache_groups_tp_replicas([*groups, *heads], 8) == 1, "heads may differ"
    assert KVCacheConfig(4, [], groups).kv_tp_replicas == 1, "unless vLLM says so"


def test_ranks_in_a_row_share(folder: Path) -> None:
    found = [replicas_of(folder, num=2, tp=4, rank=rank) for rank in range(4)]
    assert [(each.num, each.index, each.is_writer) for each in found] == [
        (2, 0, True),
        (2, 1, False),
    ] * 2


@pytest.mark.parametrize(
    "changes",
    [
        {"num": 1},
        {"distributed_executor_backend": "ray"},
        {"nnodes": 2},
        {"world_size": 4, "pipeline_parallel_size": 2},
        {"world_size": 4, "prefill_context_parallel_size": 2},
        {"decode_context_parallel_size": 2},
    ],
)
def test_other_ranks_keep_copies_of_their_own(folder: Path, changes: dict[str, Any]) -> None:
    assert replicas_of(folder) is not None
    assert replicas_of(folder, **changes) is None


def test_the_connector_shares_only_where_vllm_counts_replicas(folder: Path) -> None:
    config = engine_config(folder, {"num_cpu_blocks": 4})
    parallel = config.parallel_config
    parallel.tensor_parallel_size = parallel.world_size = 2
    parallel.distributed_executor_backend = "mp"
    for num in (1, 2):
        cache = cache_config(MLA)
        cache.kv_tp_replicas = num
        worker = KVStowConnector(config, KVConnectorRole.WORKER, cache)._worker
        assert (worker._replicas is None) == (num == 1)


def test_sizes_of_ranks_that_share() -> None:
    for options, num_blocks in (
        (Options(cpu_bytes_to_use=8 * SLOT_BYTES), 8),
        (Options(cpu_bytes_to_use_per_rank=3 * SLOT_BYTES), 12),
        (Options(num_cpu_blocks=7), 7),
    ):
        assert options.num_host_blocks(SLOT_BYTES, world_size=4, num_sharing=4) == num_blocks
    assert Options(cpu_bytes_to_use=8 * SLOT_BYTES).num_host_blocks(SLOT_BYTES, 4, 2) == 4
