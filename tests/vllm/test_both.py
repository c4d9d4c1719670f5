"""A disk before a shared store, both halves without an engine: what each serves, and what none may.

The store is a real server, and the disks are real files. Each guard against wrong bytes has its
negative control: a test that removes the guard, and then finds wrong bytes or a foreign block.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiers.damage import all_proven
from tests.tiers.resp.server import Server as Store
from tests.vllm.halves_below import Server, folder_on_disk
from tests.vllm.sharing import LONG_S, NUM_BLOCKS, NUM_HIT, AnySum, keys, serve

from kvstow import ConfigError
from kvstow.tiers import TierTicket
from kvstow.tiers import both as both_tiers
from kvstow.tiers.namespace import HEADER_BYTES
from kvstow.tiers.slot_store import SlotStore
from kvstow.transfer.cuda.kernels import checksum
from kvstow.vllm.below import both_worker, shared
from kvstow.vllm.below import disk as disk_tier
from kvstow.vllm.below.both import BothTier
from kvstow.vllm.below.both_worker import BothWorker
from kvstow.vllm.messages import LowerOrders
from kvstow.vllm.options import Options

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

Started = Callable[..., Server]
SLOT = 4096 + 128


@pytest.fixture
def disk() -> Iterator[Path]:
    with folder_on_disk() as folder:
        yield folder


@pytest.fixture
def started(disk: Path, store: Store) -> Iterator[Started]:
    """Starts a server with a disk of this name. The last one on the same disk ends before."""
    servers: dict[str, Server] = {}

    def start(name: str = "a", *, num_ranks: int = 1, num_slots: int = 100, **more: Any) -> Server:
        if name in servers:
            servers.pop(name).close()
        (disk / name).mkdir(exist_ok=True)
        given: dict[str, Any] = {
            "shared": store.url,
            "shared_ask_timeout_s": LONG_S,
            "shared_timeout_s": LONG_S,
            "disk_path": str(disk / name),
            "disk_bytes_to_use": num_ranks * (4096 + num_slots * SLOT),
        }
        servers[name] = Server(disk / name, num_ranks=num_ranks, **(given | more))
        return servers[name]

    yield start
    for server in servers.values():
        server.close()


def half(server: Server) -> BothTier:
    below = server.half.tier.below
    assert isinstance(below, BothTier)
    return below


def worker(server: Server, rank: int = 0) -> BothWorker:
    below = server.ranks[rank].worker.below
    assert isinstance(below, BothWorker)
    return below


def stats(server: Server, *names: str) -> list[int]:
    found = server.stats()
    return [found[name] for name in names]


def num_read(server: Server) -> list[int]:
    """Return how many blocks came from the disk, and from the store."""
    return stats(server, "promoted_blocks", "shared_promoted_blocks")


def empty_disk(disk: Path, name: str) -> None:
    for path in (disk / name).iterdir():
        path.unlink()


# -- what each serves ------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", ["off", "checksum"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_block_that_the_disk_lacks_comes_from_the_store_and_stays_on_the_disk(
    started: Started, store: Store, num_ranks: int, verify: str
) -> None:
    settings: dict[str, Any] = {"num_ranks": num_ranks, "verify": verify}
    a, b = started("a", **settings), started("b", **settings)
    assert serve(a, "p") == 0
    assert stats(a, "demoted_blocks", "shared_demoted_blocks") == [NUM_BLOCKS] * 2
    assert len(keys(store)) == num_ranks * NUM_BLOCKS
    assert serve(b, "p") == NUM_HIT
    assert num_read(b) == [0, NUM_BLOCKS]
    b.push_off_the_host()
    store.command("FLUSHALL")
    assert serve(b, "p") == NUM_HIT, "its disk has kept it"
    assert num_read(b) == [NUM_BLOCKS, NUM_BLOCKS]
    b = started("b", **settings)
    assert serve(b, "p") == NUM_HIT, "its disk is warm"
    assert num_read(b) == [NUM_BLOCKS, 0]
    assert stats(b, "shared_asked_blocks", "shared_demoted_blocks") == [0, 0]


def test_an_emptied_disk_fills_from_the_store(started: Started, disk: Path) -> None:
    server = started()
    assert serve(server, "p") == 0
    server.push_off_the_host()
    assert serve(server, "p") == NUM_HIT
    assert num_read(server) == [NUM_BLOCKS, 0]
    server.close()
    empty_disk(disk, "a")
    server = started()
    assert serve(server, "p") == NUM_HIT
    assert num_read(server) == [0, NUM_BLOCKS]
    server = started()
    assert serve(server, "p") == NUM_HIT
    assert num_read(server) == [NUM_BLOCKS, 0]
    assert stats(server, "shared_asked_blocks") == [0]


def test_one_hit_comes_from_both(started: Started, store: Store) -> None:
    assert serve(started("a"), "p", num_tokens=64) == 0
    store.command("FLUSHALL")
    assert serve(started("b"), "p") == 0
    a = started("a")
    assert serve(a, "p") == NUM_HIT
    assert num_read(a) == [NUM_BLOCKS - 2, 2]


def test_without_both_the_server_computes(started: Started, store: Store) -> None:
    """The negative control of the tests above."""
    started().close()
    assert serve(started(), "p") == 0
    started("b")
    store.command("FLUSHALL")
    assert serve(started("b"), "p") == 0


def test_a_late_server_reads_what_the_first_computed(started: Started) -> None:
    assert serve(started("a"), "p") == 0
    late = started("late", num_ranks=1)
    assert serve(late, "p") == NUM_HIT
    assert num_read(late) == [0, NUM_BLOCKS]


def test_the_figures_of_both_are_apart(started: Started) -> None:
    assert serve(started("a"), "p") == 0
    b = started("b")
    assert serve(b, "p") == NUM_HIT
    b.push_off_the_host()
    serve(b, "p")
    found = b.stats()
    num_new = 3 * NUM_BLOCKS  # those that pushed
    assert found["demoted_blocks"] == num_new + NUM_BLOCKS, "what the disk has kept, too"
    assert found["shared_demoted_blocks"] == num_new
    assert found["shared_asked_blocks"] == num_new + NUM_BLOCKS
    assert found["shared_found_blocks"] == NUM_BLOCKS
    assert found["disk_hit_tokens"] == 2 * NUM_HIT, "from either"
    assert (found["disk_mode"], found["shared_mode"]) == (2, 2)
    moved = {name: 0 for name in ("demoted", "promoted", "shared_demoted", "shared_promoted")}
    for each in iter(b.ranks[0].worker.stats, None):
        for name in moved:
            moved[name] += each.data.get(f"{name}_bytes", 0)
    assert moved == {name: found[f"{name}_blocks"] * 4096 for name in moved}


def test_the_events_name_what_is_on_this_disk(started: Started) -> None:
    assert serve(started("a"), "p") == 0
    b = started("b")
    b.half.tier.events = True
    assert serve(b, "p") == NUM_HIT
    assert {event.medium for event in b.half.take_events()} == {"CPU"}, "a claim is no event"


# -- foreign ---------------------------------------------------------------------------------------


def claim_slots_of_others(started: Started) -> None:
    """Let claims take the slots of blocks that the file still has."""
    assert serve(started("a"), "p") == 0
    b = started("b", num_slots=NUM_BLOCKS)
    assert serve(b, "q") == 0
    assert stats(b, "disk_resident_blocks") == [NUM_BLOCKS]
    assert serve(b, "p") == NUM_HIT
    assert num_read(b) == [0, NUM_BLOCKS]


def test_a_claimed_slot_with_another_block_is_read_from_the_store(started: Started) -> None:
    claim_slots_of_others(started)


def test_a_claimed_slot_with_another_block_would_be_seen(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: the file does not compare keys."""
    monkeypatch.setattr(
        "kvstow.tiers.slot_store.match", lambda frames, expected: frames["digest"] != 0
    )
    with pytest.raises(AssertionError, match="wrong bytes"):
        claim_slots_of_others(started)


def test_other_weights_and_private_servers_share_neither(started: Started) -> None:
    assert serve(started("a"), "p") == 0
    assert serve(started("b", weights="v2"), "p") == 0
    assert serve(started("a", weights="v2"), "q") == 0, "the file of v1 is emptied"
    for _ in range(2):
        private = started("c", is_warm=False)
        assert serve(private, "p") == 0
        private.push_off_the_host()
        assert serve(private, "p") == NUM_HIT
        assert num_read(private) == [NUM_BLOCKS, 0]
        assert worker(private)._last == [], "and it leaves nothing to the next server"


# -- stale -----------------------------------------------------------------------------------------


def reset(server: Server) -> None:
    """Change the weights in place, and reset. Then the server goes on."""
    server.weights = "changed in place"
    server.half.reset()
    server.settle()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_no_block_from_before_a_reset_is_served(started: Started, num_ranks: int) -> None:
    a = started("a", num_ranks=num_ranks)
    for name in "pq":
        assert serve(a, name) == 0
    a.weights = "changed in place"
    assert a.half.reset() is False
    for name in "pq":
        assert serve(a, name) == 0
    serve(a, "r")
    a.push_off_the_host()
    assert serve(a, "r") == NUM_HIT, "what it computed since the reset"
    assert serve(started("b", num_ranks=num_ranks), "p") == NUM_HIT, "b has the old weights"
    again = started("a", num_ranks=num_ranks)
    again.settle()
    assert stats(again, "disk_resident_blocks") == [0], "never warm after a restart"
    assert serve(again, "p") == NUM_HIT, "the old weights' block, from the store"
    assert num_read(again) == [0, NUM_BLOCKS]


def test_a_reset_that_keeps_the_names_would_be_seen(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: only the file forgets."""
    a = started("a")
    assert serve(a, "p") == 0
    monkeypatch.setattr(shared, "_random", lambda: half(a).questions.salt)
    reset(a)
    with pytest.raises(AssertionError, match="wrong bytes"):
        serve(a, "p")


def test_a_reset_that_keeps_the_generation_would_be_seen(
    started: Started, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: only the store gets new names. The next server finds the file warm."""

    def rename(self: BothWorker, orders: Any) -> TierTicket:
        self._store.rename(self._store_part.namespace(orders.salt))
        ticket = TierTicket(1)
        ticket.end(np.ones(1, np.bool_))
        return ticket

    monkeypatch.setattr(BothWorker, "_renew", rename)
    a = started("a")
    for name in "pq":
        serve(a, name)
    reset(a)
    serve(a, "r")  # in the slots of p
    store.command("FLUSHALL")
    a = started("a")
    a.weights = "changed in place"
    with pytest.raises(AssertionError, match="wrong bytes"):
        serve(a, "q")


def test_a_reset_before_the_first_step_counts(started: Started) -> None:
    """A trainer may send its weights to a server that has computed nothing yet."""
    serve(started("a"), "p")
    for name in "ab":
        server = started(name)
        server.weights = f"changed before the first step of {name}"
        server.half.reset()
        assert serve(server, "p") == 0
        assert serve(server, "q") == 0
        assert stats(server, "shared_found_blocks") == [0]
        server.push_off_the_host()
        assert serve(server, "q") == NUM_HIT


@pytest.mark.parametrize("moment", ["asked", "answered"])
def test_a_question_from_before_a_reset_claims_nothing(
    started: Started, store: Store, moment: str
) -> None:
    assert serve(started("a"), "p") == 0
    b = started("b")
    b.settle()
    request = b.begin("p")
    if moment == "asked":
        store.pause()
    assert b.half.lookup(request, 0) is None
    time.sleep(0.1)  # the question is on its way, or answered
    b.weights = "changed in place"
    b.half.reset()
    store.resume()
    assert b.serve(request) == 0
    assert stats(b, "claimed_blocks") == [0]


def test_a_put_that_is_under_way_at_a_reset_is_not_read_after_it(
    started: Started, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = started()
    serve(server, "z")
    store.pause()
    with monkeypatch.context() as silent:
        silent.setattr(half(server).questions._asker, "_wait_s", 0.05)
        server.serve(server.begin("p"), settles=False)
    server.forget()
    server.weights = "changed in place"
    server.half.reset()
    server.step()
    store.resume()
    server.settle()
    server.push_off_the_host()
    assert serve(server, "p") == 0


def get_across_a_reset(started: Started, store: Store) -> BothWorker:
    """Let the store answer a get after the reset that the worker knows of."""
    assert serve(started("a"), "p") == 0
    b = started("b", promote_timeout_s=LONG_S, num_host_blocks=4 * NUM_BLOCKS)
    request = b.begin("p")
    until_s = time.monotonic() + LONG_S
    while not half(b)._in_flight:
        assert time.monotonic() < until_s
        assert b.half.lookup(request, 0) is None
        if not b.half.offload or not b.stats().get("claimed_blocks"):
            b.step()
            continue
        store.pause()
        b.step()
    b.weights = "changed in place"
    b.half.reset()
    b.step()  # the worker begins a new generation
    store.resume()
    b.settle()
    return worker(b)


def test_a_get_from_before_a_reset_leaves_nothing_in_the_file(
    started: Started, store: Store
) -> None:
    below = get_across_a_reset(started, store)
    assert below._store.stats().got_blocks == NUM_BLOCKS, "the store has answered"
    assert len(below.file.records()) == 0


def test_a_get_from_before_a_reset_would_be_seen(
    started: Started, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: the file keeps it, as a block of the new generation."""

    def renew(self: both_tiers.BothTier, namespace: bytes, *_: Any) -> TierTicket:
        self.shared.rename(namespace)
        return self.disk.renew()

    monkeypatch.setattr(both_tiers.BothTier, "renew", renew)
    below = get_across_a_reset(started, store)
    assert len(below.file.records()) == NUM_BLOCKS


def test_nothing_moves_before_all_ranks_have_confirmed_a_reset(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = started("a", num_ranks=2)
    serve(server, "p")
    late = worker(server, 1)
    monkeypatch.setattr(late, "_has_renewed", lambda: False)
    orders: list[LowerOrders] = []
    for rank in (0, 1):
        take = worker(server, rank).take

        def noted(each: LowerOrders, take: Callable[[LowerOrders], None] = take) -> None:
            orders.append(each)
            take(each)

        monkeypatch.setattr(worker(server, rank), "take", noted)
    server.weights = "changed in place"
    server.half.reset()
    assert server.serve(server.begin("q"), settles=False) == 0
    asked = stats(server, "shared_asked_blocks")
    for _ in range(20):
        server.step()
    assert orders and all(not each.jobs and each.renewal and each.salt for each in orders)
    assert len({each.salt for each in orders}) == 1
    monkeypatch.undo()
    server.forget()
    server.settle()
    assert serve(server, "r") == 0
    assert stats(server, "demoted_blocks") == [2 * NUM_BLOCKS], "those of p and r"
    assert stats(server, "shared_asked_blocks") != asked


# -- ranks that disagree ---------------------------------------------------------------------------


def keep_on_one_rank(started: Started, store: Store, monkeypatch: pytest.MonkeyPatch) -> Server:
    """Restart a server of which only rank 0 has kept what the store brought."""
    assert serve(started("a", num_ranks=2), "p") == 0
    b = started("b", num_ranks=2, num_slots=NUM_BLOCKS)
    assert serve(b, "q") == 0
    monkeypatch.setattr(worker(b, 1)._budget, "take", lambda *_: 0)
    monkeypatch.setattr(BothWorker, "_flush", lambda self: None)  # it would write q again
    assert serve(b, "p") == NUM_HIT
    kept = [worker(b, rank).file.records() for rank in (0, 1)]
    assert not set(kept[0].sequences) & set(kept[1].sequences)
    b.close()
    store.command("FLUSHALL")
    return started("b", num_ranks=2, num_slots=NUM_BLOCKS)


def test_a_claim_counts_after_a_restart_only_if_every_rank_has_kept_it(
    started: Started, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = keep_on_one_rank(started, store, monkeypatch)
    b.settle()
    assert stats(b, "disk_resident_blocks") == [0]
    assert serve(b, "p") == 0


def test_ranks_that_disagree_would_be_seen(
    started: Started, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: a slot counts if one rank has it, and no rank compares keys."""
    b = keep_on_one_rank(started, store, monkeypatch)
    monkeypatch.setattr(disk_tier, "agreed", lambda parts, _: parts[0])
    monkeypatch.setattr("kvstow.tiers.slot_store.match", lambda found, _: found["schema"] > 0)
    with pytest.raises(AssertionError, match="wrong bytes"):
        serve(b, "p")


def test_a_block_whose_store_lost_one_ranks_part_is_a_miss(started: Started, store: Store) -> None:
    """The store is asked for the first rank's part only."""
    a = started("a", num_ranks=2)
    assert serve(a, "p") == 0
    second = half(a).questions.namespaces(half(a)._ranks)[1].hex().encode()
    for key in [key for key in keys(store) if second in key]:
        store.command("DEL", key)
    b = started("b", num_ranks=2)
    assert serve(b, "p") == 0
    assert stats(b, "shared_found_blocks", "shared_promoted_blocks") == [NUM_BLOCKS, 0]
    # The second half of the prompt was claimed and not read.
    found = [serve(started("b", num_ranks=2), "p") for _ in range(2)]
    assert found == [NUM_HIT // 2, NUM_HIT]


# -- torn, damaged, and never computed -------------------------------------------------------------


def flip_slots(disk: Path, name: str) -> None:
    """Change a bit of each slot."""
    path = disk / name / "rank0"
    content = np.frombuffer(path.read_bytes(), np.uint8).copy()
    content[5::4096] ^= 1
    path.write_bytes(content.tobytes())


def serve_from_a_damaged_disk(started: Started, disk: Path) -> list[int]:
    server = started("a")
    serve(server, "p")
    server.close()
    flip_slots(disk, "a")
    server = started("a")
    return [serve(server, "p"), *stats(server, "failed_promotes")]


def test_a_damaged_slot_is_a_miss_and_then_comes_from_the_store(
    started: Started, disk: Path
) -> None:
    found, num_failed = serve_from_a_damaged_disk(started, disk)
    assert found == 0 and num_failed > 0
    # The first half of the prompt, which was read in vain, is claimed now or was put again.
    server = started("a")
    assert serve(server, "p") > 0


def test_a_damaged_slot_would_be_seen(
    started: Started, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control."""
    monkeypatch.setattr(SlotStore, "_are_proven", all_proven)
    with pytest.raises(AssertionError, match="wrong bytes"):
        serve_from_a_damaged_disk(started, disk)


def spoil(store: Store) -> None:
    """Flip a bit of each block in the store."""
    for key in keys(store):
        store.command("SETRANGE", key, str(HEADER_BYTES + 7), b"\xa5\x5a\xa5")


def test_a_damaged_value_is_a_miss_and_is_not_kept(started: Started, store: Store) -> None:
    assert serve(started("a"), "p") == 0
    spoil(store)
    b = started("b")
    assert serve(b, "p") == 0
    assert stats(b, "shared_failed_promotes")[0] > 0
    assert serve(b, "p") == NUM_HIT, "its own blocks"
    b.push_off_the_host()
    assert serve(b, "p") > 0


def test_a_damaged_value_would_be_kept(
    started: Started, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: the disk keeps what the store did not prove."""
    assert serve(started("a"), "p") == 0
    spoil(store)
    monkeypatch.setattr("kvstow.tiers.namespace.Namespace.checksum", lambda *_: AnySum())
    b = started("b")
    with pytest.raises(AssertionError, match="wrong bytes"):
        serve(b, "p")
    monkeypatch.undo()
    b.close()
    store.command("FLUSHALL")
    with pytest.raises(AssertionError, match="wrong bytes"):
        serve(started("b"), "p")


def test_a_claim_that_was_never_put_is_a_miss(started: Started) -> None:
    server = started()
    server.settle()
    request = server.begin("p")
    assert server.half.lookup(request, 0) is None
    assert server.half.offload is not None
    assert server.half.offload.claim(request.block_hashes, [0] * NUM_BLOCKS, None) == NUM_BLOCKS
    assert server.serve(request) == 0
    assert stats(server, "promoted_blocks", "shared_promoted_blocks") == [0, 0]


def test_block_that_fails_its_kernel_sum_goes_into_neither(started: Started, store: Store) -> None:
    """Another server may read a block before a check that comes after the put drops it."""
    server = started()
    arena = server.ranks[0].worker.arena
    assert arena is not None
    sums, is_known = arena.device_sums
    below = worker(server)
    take = below.take

    def damaged(orders: Any) -> None:
        for job in orders.jobs:
            for slot in job.host_slots:
                sums[slot], is_known[slot] = checksum(arena.slots[slot : slot + 1])[0], 1
            arena.slots[job.host_slots[0], 5] ^= 1
        take(orders)

    below.take = damaged  # type: ignore[method-assign]
    server.serve(server.begin("p"))
    num_put = len(keys(store))
    assert 0 < num_put < NUM_BLOCKS
    assert below.file.stats().put_blocks == num_put


# -- faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["read_only", "off"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_disk_that_fails_leaves_the_store_on(
    started: Started, log: list[str], monkeypatch: pytest.MonkeyPatch, num_ranks: int, mode: str
) -> None:
    a, b = started("a", num_ranks=num_ranks), started("b", num_ranks=num_ranks)
    serve(b, "q")
    # The disk of one rank fails.
    failing = worker(b).file._store
    monkeypatch.setattr(SlotStore, "mode", property(lambda self: mode if self is failing else "on"))
    serve(a, "p")
    assert serve(b, "p") == NUM_HIT
    b.push_off_the_host()
    for name in "pq":
        assert serve(b, name) == NUM_HIT, "the store has both"
        b.push_off_the_host()
    assert stats(b, "disk_mode", "shared_mode") == [1 if mode == "read_only" else 0, 2]
    assert sum(f"the disk tier of rank 0 is {mode}" in line for line in log) == 1
    # A reset, too, leaves the store on.
    reset(b)
    half(b).questions._asker._keep_s = 0.0  # it would remember that the store has no such block
    assert serve(b, "p") == 0
    b.push_off_the_host()
    assert serve(b, "p") == NUM_HIT


def test_a_renewal_that_fails_leaves_the_store_on(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = started()
    serve(server, "p")
    file = worker(server).file
    half(server).questions._asker._keep_s = 0.0

    def fail(*_: Any) -> None:
        raise OSError(5, "the test lets the index fail")

    monkeypatch.setattr(file._store._calls._files, "write", fail)
    monkeypatch.setattr(file._store._calls._files, "sync", fail)
    reset(server)
    assert file.mode == "off"
    assert serve(server, "p") == 0
    server.push_off_the_host()
    assert serve(server, "p") == NUM_HIT
    assert num_read(server)[1] == NUM_BLOCKS
    assert stats(server, "disk_mode", "shared_mode") == [0, 2]
    monkeypatch.undo()
    # The file is that of the weights of the start.
    again = started()
    assert serve(again, "p") == NUM_HIT
    assert num_read(again) == [NUM_BLOCKS, 0]


@pytest.mark.parametrize("fault", ["stopped", "killed"])
def test_a_store_that_fails_leaves_the_disk_on(started: Started, store: Store, fault: str) -> None:
    def start() -> Server:
        server = started(shared_ask_timeout_s=0.05, shared_timeout_s=0.3)
        worker(server)._timeout_s = LONG_S  # for the disk
        return server

    server = start()
    serve(server, "p")
    store.pause() if fault == "stopped" else store.kill()
    server.push_off_the_host()
    assert serve(server, "p") == NUM_HIT
    assert num_read(server) == [NUM_BLOCKS, 0]
    assert serve(start(), "p") == NUM_HIT


def test_requests_do_not_wait_behind_reads_that_hang(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Late reads may take all the room for jobs, and each request would wait in vain."""
    server = started(load_timeout_s=2.0, promote_timeout_s=LONG_S)
    server.half.tier.clock = half(server).clock = time.monotonic
    for name in "pq":
        serve(server, name)
    server.push_off_the_host()
    go_on = threading.Event()
    files = worker(server).file._store._calls._files
    read = files.read

    def read_later(*given: Any) -> int:
        assert go_on.wait(3 * LONG_S)
        return read(*given)

    with monkeypatch.context() as hanging:
        hanging.setattr(files, "read", read_later)
        begin_s = time.monotonic()
        for name in "pq":
            assert server.serve(server.begin(name), settles=False) == 0
            server.forget()
        assert time.monotonic() - begin_s < 0.75 * LONG_S
        go_on.set()
        server.settle()
    until_s = time.monotonic() + LONG_S
    while half(server)._promoting:
        assert time.monotonic() < until_s
        server.step()
    server.push_off_the_host()
    assert serve(server, "p") == NUM_HIT, "the disk answers again"


# -- writes, and the end ---------------------------------------------------------------------------


def test_writes_of_what_the_store_brought_keep_the_rate(
    started: Started, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert serve(started("a"), "p") == 0
    b = started("b", disk_max_write_bytes_per_s=2 * 4096)
    with monkeypatch.context() as stopped:
        stopped.setattr(both_worker, "monotonic", lambda: 0.0)
        assert serve(b, "p") == NUM_HIT
    assert len(worker(b).file.records()) == 2, "a get brings more, and the first are kept"
    assert worker(b)._last == [], "what the store has needs no last write"
    store.command("FLUSHALL")
    b = started("b")
    assert serve(b, "p") == NUM_HIT * 2 // NUM_BLOCKS


def test_demotes_count_for_the_rate_of_what_is_kept(started: Started) -> None:
    server = started(disk_max_write_bytes_per_s=8 * 4096)
    budget = worker(server)._budget
    left = budget._left
    serve(server, "p", num_tokens=64)
    assert stats(server, "demoted_blocks") == [4]
    assert budget._left == left - 4 * 4096


@pytest.mark.parametrize("fault", ["none", "stopped"])
def test_the_last_blocks_go_to_the_disk_alone(started: Started, store: Store, fault: str) -> None:
    server = started(disk_admit="returned")
    serve(server, "p")
    assert keys(store) == []
    if fault == "stopped":
        store.pause()
    server.close()
    store.resume()
    assert keys(store) == []
    server = started()
    assert serve(server, "p") == NUM_HIT
    assert num_read(server) == [NUM_BLOCKS, 0]


def test_a_host_slot_that_a_promote_of_the_store_fills_is_left_out_of_the_last_blocks(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never computed: the plan would write the promoted block under another key."""
    serve(started("a"), "p")
    b = started("b", disk_admit="returned")
    for name in "qr":
        serve(b, name)

    def plan_nothing(_offload: Any) -> None:
        half(b)._must_plan = False

    monkeypatch.setattr(half(b), "_plan_last", plan_nothing)
    assert worker(b)._last
    assert serve(b, "p") == NUM_HIT
    b = started("b")
    for name in "qr":
        serve(b, name)  # compares every byte


# -- bad input -------------------------------------------------------------------------------------

GIVEN: dict[str, Any] = {
    "disk_path": "/d",
    "disk_bytes_to_use": "1GiB",
    "shared": "redis://kv.example",
}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"shared_admit": "all"},
            "with disk_path and shared disk_admit counts",
        ),
        ({"shared_max_write_bytes_per_s": "1GiB"}, "set disk_max_write_bytes_per_s, and remove"),
        ({"shared_flush_s": 2}, "shared_flush_s is 2.0, .* set disk_flush_s, and"),
        ({"shared_index_blocks": 9}, "shared_index_blocks is 9, .* remove shared_index_blocks"),
        ({"disk_bytes_to_use": None}, "disk_bytes_to_use is None"),
        ({"preserve_on_sleep": True}, "without weights_version_path"),
    ],
)
def test_options_that_do_not_fit_are_refused(given: dict[str, Any], message: str) -> None:
    assert Options.parse(GIVEN).lower.admit == "all"
    with pytest.raises(ConfigError, match=message):
        Options.parse(GIVEN | given)


def test_a_store_whose_queue_is_too_small_leaves_no_open_file(started: Started) -> None:
    with pytest.raises(ConfigError, match=r"extra_config.shared_queue_bytes is 100"):
        started(shared_queue_bytes=100)
    started().close()


def test_a_disk_in_use_is_refused(started: Started, disk: Path, store: Store) -> None:
    started("a")
    with pytest.raises(Exception, match="is in use"):
        Server(
            disk / "a",
            shared=store.url,
            disk_path=str(disk / "a"),
            disk_bytes_to_use=4096 + 100 * SLOT,
        )
    assert os.path.exists(disk / "a" / "rank0")
