"""The shared tier of both halves without an engine: what one server computed, another loads.

The store is a real server. Each guard against wrong bytes has its negative control: a test that
removes the guard, and then finds wrong bytes. `test_shared_foreign` has the blocks of others.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from tests.tiers.resp.server import Server as Store
from tests.tiers.resp.server import free_port
from tests.tiers.setup import wait_until
from tests.vllm.sharing import (
    LONG_S,
    NUM_BLOCKS,
    NUM_HIT,
    Started,
    held,
    keys,
    refuse,
    release,
    serve,
    stat,
)

from kvstow import ConfigError
from kvstow.tiers.claims import Lack
from kvstow.tiers.namespace import KEY_PREFIX, NAMESPACE_BYTES
from kvstow.tiers.resp.nodes import Nodes
from kvstow.transfer.cuda.kernels import checksum
from kvstow.vllm.below import shared
from kvstow.vllm.below.shared import SharedTier
from kvstow.vllm.below.shared_worker import SharedWorker
from kvstow.vllm.options import Options

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

# -- sharing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", ["off", "checksum"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_server_loads_what_another_computed(
    started: Started, store: Store, num_ranks: int, verify: str
) -> None:
    a = started(num_ranks=num_ranks, verify=verify)
    b = started(num_ranks=num_ranks, verify=verify)
    assert serve(a, "p") == 0
    assert stat(a, "demoted_blocks") == NUM_BLOCKS
    assert len(keys(store)) == num_ranks * NUM_BLOCKS
    assert serve(b, "p") == NUM_HIT
    assert stat(b, "found_blocks") == stat(b, "promoted_blocks") == NUM_BLOCKS
    assert stat(b, "hit_tokens") == NUM_HIT
    assert stat(b, "demoted_blocks") == 0, "what the store has is not put again"
    assert serve(b, "p") == NUM_HIT, "the host has it"
    assert stat(b, "promoted_blocks") == NUM_BLOCKS
    late = started(num_ranks=num_ranks, verify=verify)
    assert serve(late, "p") == NUM_HIT, "a server that joins later is warm"


def test_without_the_blocks_in_the_store_the_second_server_computes(
    started: Started, store: Store
) -> None:
    """The negative control of the test above."""
    assert serve(started(), "p") == 0
    store.command("FLUSHALL")
    b = started()
    assert serve(b, "p") == 0
    assert (stat(b, "asked_blocks"), stat(b, "found_blocks")) == (NUM_BLOCKS, 0)


def test_a_block_that_fell_off_the_host_comes_back_without_a_question(started: Started) -> None:
    server = started()
    serve(server, "p")
    server.push_off_the_host()
    asked = stat(server, "asked_blocks")
    assert serve(server, "p") == NUM_HIT
    assert stat(server, "asked_blocks") == asked, "the index knows that the store has it"


def test_a_server_connects_before_its_first_request(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection may take longer than a request waits for the store."""
    connected, connect = threading.Event(), Nodes.connect

    def noted(self: Nodes, node: Any, limit_s: float) -> Any:
        wire = connect(self, node, limit_s)
        connected.set()
        return wire

    monkeypatch.setattr(Nodes, "connect", noted)
    started()
    assert connected.wait(LONG_S)


def test_the_log_says_at_the_start_that_no_store_answers(
    started: Started, caplog: pytest.LogCaptureFixture
) -> None:
    """A URL or a password that is wrong would else show only once requests have come."""
    assert serve(started(), "p") == 0
    said = "the shared tier does not answer at the start ("
    assert said not in caplog.text
    port = free_port()
    started(shared=f"redis://127.0.0.1:{port}")
    wait_until(lambda: said in caplog.text, "nothing is said")
    assert f"127.0.0.1:{port}" in caplog.text


def test_a_request_asks_once(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = started(), started()
    assert serve(a, "o") == 0
    asked, ask = [], Lack.ask

    def counted(asker: Any, offload: Any, request_id: str, *args: Any) -> Any:
        asked.append(request_id)
        return ask(asker, offload, request_id, *args)

    monkeypatch.setattr(Lack, "ask", counted)
    for name in "pqr":
        assert serve(a, name) == 0
        assert serve(b, name) == NUM_HIT
    assert asked == ["p", "p", "q", "q", "r", "r"], "one question of each server"
    assert stat(b, "asked_blocks") == 3 * NUM_BLOCKS


def test_a_session_that_goes_on_asks_again(started: Started) -> None:
    serve(started(), "a", num_tokens=200)
    server = started(num_host_blocks=24)
    session = server.begin("a")
    for num_found in (96, 192):
        end_s = time.monotonic() + LONG_S
        while (found := server.half.lookup(session, 0)) is None:
            server.step()
            assert time.monotonic() < end_s, "the request waits forever"
        assert found == num_found
        session.append_output_token_ids(session.prompt_token_ids[:100])
        server.half.requests.start_over("a")  # as after a preemption


def test_a_short_run_is_not_asked_for(started: Started) -> None:
    serve(started(), "p")
    server = started(min_promote_tokens=NUM_HIT + 1)
    assert serve(server, "p") == 0
    assert stat(server, "asked_blocks") == 0


def test_the_index_forgets_and_the_store_keeps(started: Started) -> None:
    serve(started(), "p")
    assert serve(started(shared_index_blocks=2), "p") == NUM_HIT // 3
    assert serve(started(), "p") == NUM_HIT


def test_a_full_host_takes_what_fits(started: Started) -> None:
    serve(started(), "p")
    server = started(num_host_blocks=4)
    assert serve(server, "p") > 0


# -- resets ----------------------------------------------------------------------------------------


def test_no_block_from_before_a_reset_is_served(started: Started) -> None:
    a, b = started(num_ranks=2), started(num_ranks=2)
    assert serve(a, "p") == 0
    a.weights = "changed in place"
    assert a.half.reset() is False
    assert serve(a, "p") == 0
    a.push_off_the_host()
    assert serve(a, "p") == NUM_HIT, "what it computed since the reset"
    assert serve(b, "p") == NUM_HIT, "the old weights' block, which b still serves"
    late = started(num_ranks=2)
    assert serve(late, "p") == NUM_HIT


def test_the_log_says_that_a_reset_ends_the_sharing(started: Started, log: list[str]) -> None:
    server = started()
    server.half.reset()
    assert log[-1].endswith("empties the host tier, and ends the sharing until the server restarts")


def test_a_reset_that_keeps_the_names_would_be_seen(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control."""
    a = started()
    assert serve(a, "p") == 0
    monkeypatch.setattr(shared, "_random", lambda: a.half.tier.below.questions.salt)  # type: ignore[union-attr]
    a.weights = "changed in place"
    a.half.reset()
    with pytest.raises(AssertionError, match="wrong bytes"):
        serve(a, "p")


def test_a_reset_before_the_first_step_counts(started: Started) -> None:
    """A trainer may send its weights to a server that has computed nothing yet."""
    assert serve(started(), "p") == 0
    server = started()
    server.weights = "changed before the first step"
    server.half.reset()
    assert serve(server, "p") == 0
    assert stat(server, "found_blocks") == 0


@pytest.mark.parametrize("moment", ["asked", "answered"])
def test_a_question_from_before_a_reset_claims_nothing(
    started: Started, store: Store, moment: str
) -> None:
    assert serve(started(), "p") == 0
    server = started()
    request = server.begin("p")
    server.step()
    if moment == "asked":
        store.pause()
    assert server.half.lookup(request, 0) is None
    time.sleep(0.1)  # the question is on its way, or answered
    server.weights = "changed in place"
    server.half.reset()
    store.resume()
    assert server.serve(request) == 0
    assert stat(server, "claimed_blocks") == 0


def test_an_answer_that_outlives_a_reset_would_be_seen(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: neither the names change, nor are questions fenced."""
    assert serve(started(), "p") == 0
    server = started()
    request = server.begin("p")
    server.step()
    assert server.half.lookup(request, 0) is None
    time.sleep(0.1)
    tier = server.half.tier.below
    assert isinstance(tier, SharedTier) and server.half.offload is not None
    monkeypatch.setattr(tier, "reset", lambda: server.half.offload.set_disk("on"))
    server.weights = "changed in place"
    server.half.reset()
    with pytest.raises(AssertionError, match="wrong bytes"):
        server.serve(request)


def test_a_put_that_is_under_way_at_a_reset_is_not_read_after_it(
    started: Started, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = started()
    below = server.half.tier.below
    assert isinstance(below, SharedTier)
    store.pause()
    with monkeypatch.context() as silent:
        silent.setattr(below.questions._asker, "_wait_s", 0.05)
        server.serve(server.begin("p"), settles=False)
    server.forget()
    server.weights = "changed in place"
    server.half.reset()
    server.step()
    store.resume()
    server.settle()
    server.push_off_the_host()
    assert serve(server, "p") == 0


def test_a_get_that_is_under_way_at_a_reset_is_not_found_after_it(started: Started) -> None:
    assert serve(started(), "p") == 0
    server = started()
    jobs = held(server, "promote")
    request = server.begin("p")
    until_s = time.monotonic() + LONG_S
    while not jobs:
        assert time.monotonic() < until_s
        assert server.half.lookup(request, 0) is None if server.half.offload else True
        server.step()
    server.weights = "changed in place"
    server.half.reset()
    release(server, jobs)
    server.settle()
    assert server.serve(request) == 0


# -- host memory that changes ----------------------------------------------------------------------


def test_damaged_host_memory_is_not_put(started: Started, store: Store) -> None:
    server = started(verify="checksum")
    jobs = held(server, "demote")
    server.serve(server.begin("p"), settles=False)
    server.forget()
    arena = server.ranks[0].worker.arena
    assert arena is not None and jobs
    arena.slots[:, 7] ^= 1
    release(server, jobs)
    server.settle()
    assert keys(store) == []
    assert serve(started(verify="checksum"), "p") == 0


def test_block_that_fails_its_kernel_sum_is_never_in_the_store(
    started: Started, store: Store
) -> None:
    """Another server may read a block before a check that comes after the put drops it."""
    server = started()
    arena = server.ranks[0].worker.arena
    assert arena is not None
    sums, is_known = arena.device_sums
    puts = []
    worker = server.ranks[0].worker.below
    assert isinstance(worker, SharedWorker)
    put = worker.tier.put

    def counted(blocks: Any, slots: Any, **more: Any) -> Any:
        puts.extend(slots.tolist())
        return put(blocks, slots, **more)

    worker.tier.put = counted  # type: ignore[assignment, method-assign]
    jobs = held(server, "demote")
    take = worker.take

    def damaged(orders: Any) -> None:
        for job in orders.jobs:
            if job.direction == "demote":
                for slot in job.host_slots:
                    sums[slot], is_known[slot] = checksum(arena.slots[slot : slot + 1])[0], 1
                arena.slots[job.host_slots[0], 5] ^= 1
        take(orders)

    worker.take = damaged  # type: ignore[method-assign]
    release(server, jobs)
    server.serve(server.begin("p"))
    server.forget()
    assert len(puts) == len(keys(store)) < NUM_BLOCKS
    assert stat(server, "failed_demotes") >= 1


# -- faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["stopped", "killed", "never there"])
def test_a_store_that_fails_costs_the_deadline_and_nothing_else(
    started: Started, store: Store, fault: str
) -> None:
    url = f"redis://127.0.0.1:{free_port()}" if fault == "never there" else store.url
    server = started(shared=url, shared_ask_timeout_s=0.05, shared_timeout_s=0.3)
    serve(server, "z")
    {"stopped": store.pause, "killed": store.kill}.get(fault, lambda: None)()
    for name in "pqrst":
        assert serve(server, name) == 0
    if fault == "never there":
        return
    store.resume() if fault == "stopped" else store.start()
    until_s = time.monotonic() + LONG_S
    for name in map(chr, range(2000, 9000)):
        assert time.monotonic() < until_s, "the store is not used again"
        serve(server, name)
        other = started()
        if serve(other, name) == NUM_HIT:
            break
        other.close()
        time.sleep(0.1)


def test_a_request_goes_on_when_the_store_does_not_answer(started: Started, store: Store) -> None:
    serve(started(), "p")
    server = started(shared_ask_timeout_s=0.05)
    serve(server, "z")
    store.pause()
    request = server.begin("p")
    begin_s = time.monotonic()
    num_asked = 0
    num_late = stat(server, "late_questions")
    while server.half.lookup(request, 0) is None:
        num_asked += 1
        server.step()
    assert time.monotonic() - begin_s >= 0.05 and num_asked > 1
    assert stat(server, "late_questions") == num_late + 1
    store.resume()


def test_a_request_goes_on_when_a_read_hangs(started: Started) -> None:
    """`promote_timeout_s` bounds the question and the read together, on the caller's clock."""
    serve(started(), "p")
    server = started(promote_timeout_s=2)
    server.scheduler.now = 10.0
    serve(server, "z")
    jobs = held(server, "promote")
    request = server.begin("p")
    until_s = time.monotonic() + LONG_S
    while not jobs:
        assert time.monotonic() < until_s
        assert server.half.lookup(request, 0) is None
        server.step()
    server.scheduler.now = 11.9
    assert server.half.lookup(request, 0) is None
    server.scheduler.now = 12.1
    assert server.half.lookup(request, 0) == 0
    assert server.serve(request, settles=False) == 0
    release(server, jobs)
    server.settle()


def test_an_error_in_the_half_closes_the_connection(started: Started, log: list[str]) -> None:
    server = started()
    server.scheduler.let_go_off()
    serve(server, "p")
    below = server.half.tier.below
    assert isinstance(below, SharedTier)
    below._is_asking = refuse  # type: ignore[method-assign]
    assert server.half.lookup(server.begin("q"), 0) == 0
    assert server.half.tier.is_off
    assert below.questions._asker._is_closed


def test_the_events_name_no_block_of_the_store(started: Started) -> None:
    serve(started(), "p")
    server = started()
    server.half.tier.events = True
    assert serve(server, "p") == NUM_HIT
    assert {event.medium for event in server.half.take_events()} == {"CPU"}


def test_the_log_has_the_digits_by_which_the_store_knows_the_blocks(
    started: Started, store: Store, log: list[str]
) -> None:
    serve(started(), "p")
    [digits] = {key[len(KEY_PREFIX) :][: 2 * NAMESPACE_BYTES].decode() for key in keys(store)}
    assert any("shares blocks under the fingerprint" in line and digits in line for line in log)


def test_a_private_server_says_why(started: Started, log: list[str]) -> None:
    started(is_warm=False)
    assert any("shares no block with other servers, because the test" in line for line in log)


def test_a_server_with_one_private_rank_shares_nothing(started: Started) -> None:
    server = started(num_ranks=2)
    worker = server.ranks[1].worker.below
    assert worker is not None
    worker._report.is_private = True
    assert serve(server, "p") == 0
    assert serve(started(num_ranks=2), "p") == 0


# -- bad input -------------------------------------------------------------------------------------

SECRET = "s3cr3t"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"shared": 3}, "shared is no URL"),
        ({"shared": "kv.example:6379"}, "shared is no URL"),
        ({"shared": "http://kv.example"}, r"shared: shared names http, expected .*redis"),
        ({"shared": f"redis://u:{SECRET}@kv.example"}, "shared: the URL of .*contains credentials"),
        ({"shared": f"redis://:{SECRET}/x@kv.example"}, "shared: .*URL"),
        ({"shared": f"mooncake://u:{SECRET}@kv.example"}, "shared: .*contains credentials"),
        ({"shared": f"{SECRET}://kv.example/{SECRET}"}, "shared names"),
        ({"shared": "redis://h", "shared_password_file": "/none"}, "password file /none cannot be"),
        ({"shared": "rediss://h", "shared_ca_file": "/none"}, "config.shared_ca_file is '/none'"),
        ({"shared_ttl_s": 5}, "shared_ttl_s is 5, and it has an effect only with shared: add"),
        (
            {"observe": True, "shared": "redis://h"},
            "has observe and shared, .*: remove observe",
        ),
        (
            {"observe": True, "disk_path": "/d", "disk_bytes_to_use": "1GiB"},
            "has observe and disk_path, and .* keeps no tier: remove observe, or remove disk_path",
        ),
        ({"promote_timeout_s": 5}, "only with disk_path or shared: add"),
        ({"shared": "redis://h", "disk_admit": "all"}, "disk_admit .* only with disk_path: add"),
        (
            {"shared": "redis://h", "preserve_on_sleep": True},
            "shared and preserve_on_sleep without",
        ),
        ({"shared": "redis://h", "shared_ask_timeout_s": 0}, "shared_ask_timeout_s is 0"),
        ({"shared": "redis://h", "shared_ttl_s": 0}, "shared_ttl_s is 0"),
        (
            {"shared": "redis://h", "shared_timeout_s": 1e10},
            "config.shared_timeout_s is 1.*outside 0 to 8",
        ),
        ({"shared": "redis://h", "shared_protocol": "udp"}, "shared_protocol is 'udp'"),
        ({"shraed": "redis://h"}, "no option 'shraed': did you mean 'shared'"),
    ],
)
def test_a_wrong_option_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        Options.parse(given)
    if not message.startswith("shared names"):
        assert SECRET not in str(refused.value)


def test_all_blocks_are_put_through_a_short_queue(started: Started, store: Store) -> None:
    lower = started().ranks[0].worker.below
    assert lower is not None
    serve(started(shared_queue_bytes=2 * lower.tier.slot_bytes), "p")
    assert len(keys(store)) == NUM_BLOCKS > 2


def test_a_queue_smaller_than_a_block_is_refused(started: Started) -> None:
    with pytest.raises(ConfigError, match=r"extra_config.shared_queue_bytes is 100"):
        started(shared_queue_bytes=100)


def test_hash_start_is_that_of_vllm() -> None:
    from vllm.utils.hashing import sha256  # noqa: PLC0415
    from vllm.v1.core.kv_cache_utils import init_none_hash  # noqa: PLC0415

    init_none_hash(sha256)
    first = shared.hash_start()
    init_none_hash(sha256)
    assert len(first) >= 16 and shared.hash_start() == first
    assert np.frombuffer(first, np.uint8).any()
