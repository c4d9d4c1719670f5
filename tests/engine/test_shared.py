"""Engines that share a store: what one computed, another loads, and nothing else.

The store is a real server. `serve` compares every token that a request loads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from tests.engine.disk_world import (
    NUM_HOST,
    PAGE,
    below,
    forget_device,
    mode,
    serve,
    settle,
    slot_file,
)
from tests.engine.disk_world import options as disk_options
from tests.engine.world import BLOCK, DOCUMENT, PENDING, RUNS, World
from tests.forks import in_child
from tests.tiers.resp.server import Server, free_port
from tests.tiers.setup import LONG_S

from kvstow import ConfigError, SharedOptions, StateError, TransferError
from kvstow.engine.request import Request
from kvstow.engine.shared import Shared
from kvstow.tiers import SharedStore
from kvstow.tiers.namespace import HEADER_BYTES, KEY_PREFIX
from kvstow.transfer import READY, BlockLayout

NUM_WHOLE = (len(DOCUMENT) - 1) // BLOCK * BLOCK
"""Tokens of the document that a hit may have."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path, "--maxmemory", "100mb") as server:
        yield server


def options(**changes: object) -> SharedOptions:
    given = {"identity": "m", "weights_version": "1", "ask_timeout_s": LONG_S, "timeout_s": LONG_S}
    return SharedOptions(**(given | changes))  # type: ignore[arg-type]


def store_at(url: str, **changes: Any) -> SharedStore:
    return SharedStore(url, **{"timeout_s": LONG_S} | changes)


def world(url: str, num_host: int = NUM_HOST, **changes: object) -> AbstractContextManager[World]:
    return below(num_host, 17, **({"shared": store_at(url), "shared_options": options()} | changes))


def stat(it: World, name: str) -> float:
    return it.engine.stats()[name]


def keys(server: Server) -> list[bytes]:
    """Return the keys of all blocks, sorted."""
    words = server.command("KEYS", "kvstow:*").split(b"\r\n")
    return sorted(word for word in words if word.startswith(KEY_PREFIX))


def value(server: Server, key: bytes) -> bytes:
    size, _, rest = server.command("GET", key)[1:].partition(b"\r\n")
    return rest[: int(size)]


def test_an_engine_loads_what_another_computed(server: Server) -> None:
    with world(server.url) as a, world(server.url) as b:
        assert serve(a, "writer", DOCUMENT) == 0
        assert stat(a, "shared_demoted_blocks") == len(DOCUMENT) // BLOCK
        assert serve(b, "reader", DOCUMENT) == NUM_WHOLE
        assert stat(b, "shared_found_blocks") == NUM_WHOLE // BLOCK
        assert stat(b, "shared_promoted_blocks") == NUM_WHOLE // BLOCK
        assert stat(b, "shared_mismatched_blocks") == 0
        # What B found is on its host now.
        forget_device(b)
        assert serve(b, "again", DOCUMENT) == NUM_WHOLE
        assert stat(b, "shared_promoted_blocks") == NUM_WHOLE // BLOCK
    with world(server.url) as late:
        assert serve(late, "third", DOCUMENT) == NUM_WHOLE


@pytest.mark.parametrize("has_disk", [False, True], ids=["store", "disk and store"])
def test_all_blocks_are_put_through_a_short_queue(
    server: Server, tmp_path: Path, has_disk: bool
) -> None:
    more: dict[str, Any] = {"disk": slot_file(tmp_path / "disk")} if has_disk else {}
    store = store_at(server.url, max_queued_bytes=2 * PAGE)
    with world(server.url, shared=store, **more) as it:
        assert serve(it, "writer", DOCUMENT) == 0
    assert len(keys(server)) == len(DOCUMENT) // BLOCK > 2


def test_without_a_store_the_second_engine_computes(server: Server) -> None:
    """The negative control of the test above."""
    with world(server.url) as a:
        assert serve(a, "writer", DOCUMENT) == 0
        server.command("FLUSHALL")
        with world(server.url) as b:
            assert serve(b, "reader", DOCUMENT) == 0
            assert stat(b, "shared_asked_blocks") == NUM_WHOLE // BLOCK
            assert stat(b, "shared_claimed_blocks") == 0


@pytest.mark.parametrize("damage", ["another block", "a flipped bit", "another model's", "gone"])
def test_a_block_that_is_not_the_right_one_is_a_miss(server: Server, damage: str) -> None:
    with world(server.url) as a:
        assert serve(a, "writer", DOCUMENT) == 0
    own = keys(server)
    assert len(own) == len(DOCUMENT) // BLOCK
    with world(server.url, shared_options=options(identity="another")) as stranger:
        assert serve(stranger, "writer", DOCUMENT) == 0
    other = [key for key in keys(server) if key not in own]
    digest_at = len(KEY_PREFIX) + 32
    for at, key in enumerate(own):
        wrong = {
            "another block": value(server, own[(at + 1) % len(own)]),
            "a flipped bit": bytearray(value(server, key)),
            "another model's": next(
                value(server, one) for one in other if one[digest_at:] == key[digest_at:]
            ),
            "gone": b"",
        }[damage]
        if isinstance(wrong, bytearray):
            wrong[HEADER_BYTES + 7] ^= 16
        own_value = value(server, key)
        server.command("SET", key, bytes(wrong))
        if at == len(own) - 1:
            # One block is the right one, so that the damage above must be what makes the misses.
            server.command("SET", own[0], own_value)
    with world(server.url) as b:
        assert serve(b, "reader", DOCUMENT) == 0
        assert stat(b, "shared_found_blocks") == NUM_WHOLE // BLOCK
        assert stat(b, "shared_promoted_blocks") == 0
        assert stat(b, "shared_failed_promotes") > 0
        # It has put them again.
        settle(b)
        with world(server.url) as c:
            assert serve(c, "reader", DOCUMENT) == NUM_WHOLE


def test_one_damaged_block_ends_the_hit_there(server: Server) -> None:
    with world(server.url) as a:
        assert serve(a, "writer", DOCUMENT) == 0
    parents = keys(server)
    found = []
    for key in parents:
        kept = value(server, key)
        damaged = bytearray(kept)
        damaged[HEADER_BYTES] ^= 1
        server.command("SET", key, bytes(damaged))
        with world(server.url, shared_options=options(max_write_bytes_per_s=1)) as b:
            found.append(serve(b, "reader", DOCUMENT) // BLOCK)
        server.command("SET", key, kept)
    # Each block in its turn is where the hit ends; the last is never asked for.
    assert sorted(found) == [*range(NUM_WHOLE // BLOCK), NUM_WHOLE // BLOCK]


def test_a_reset_leaves_the_namespace(server: Server) -> None:
    with world(server.url) as a, world(server.url) as b:
        assert serve(a, "writer", DOCUMENT) == 0
        fingerprint = a.engine._copies.disk.fingerprint  # type: ignore[union-attr]
        a.engine.reset()
        settle(a)
        assert a.engine._copies.disk.fingerprint != fingerprint  # type: ignore[union-attr]
        forget_device(a)
        assert serve(a, "new weights", DOCUMENT) == 0, "a block of before the reset was served"
        num_keys = len(keys(server))
        assert num_keys == 2 * len(DOCUMENT) // BLOCK
        assert serve(b, "old weights", DOCUMENT) == NUM_WHOLE


def test_engines_that_name_their_new_weights_share_again(server: Server) -> None:
    new = {"weights_version": "2"}
    with world(server.url) as a, world(server.url) as b:
        assert serve(a, "writer", DOCUMENT) == 0
        other = list(range(300, 316))
        assert a.admit("asks", other).state is PENDING
        for it in (a, b):
            it.engine.reset(weights_version="2")
            settle(it)
            forget_device(it)
        assert serve(b, "first", DOCUMENT) == 0, "a block of version 1 was served"
        assert serve(a, "second", DOCUMENT) == NUM_WHOLE
        assert serve(b, "writer", other) == 0
        assert serve(a, "asks", other) == NUM_WHOLE, "it asks again after a reset"
        with world(server.url, shared_options=options(**new)) as late:
            assert serve(late, "third", DOCUMENT) == NUM_WHOLE
        # Without a name, an engine is alone.
        a.engine.reset()
        settle(a)
        forget_device(a)
        assert serve(a, "alone", DOCUMENT) == 0
        a.engine.reset(weights_version="3")
        settle(a)
        forget_device(a)
        assert serve(a, "version 3", DOCUMENT) == 0, "a block of version 2 was served"


def test_weights_are_named_once_and_between_requests(server: Server) -> None:
    with world(server.url) as a:
        until_s = time.monotonic() + LONG_S
        while a.admit("runs", DOCUMENT).state is not RUNS:
            assert time.monotonic() < until_s, "an admission does not come"
            a.engine.poll()
        with pytest.raises(StateError, match="1 requests hold blocks of the weights before '2'"):
            a.engine.reset(weights_version="2")
        a.compute("runs", DOCUMENT)
        a.engine.finish("runs")
        settle(a)
        for name, message in (("1", "which this engine has had"), ("", "weights_version is ''")):
            with pytest.raises(ConfigError, match=message):
                a.engine.reset(weights_version=name)
        forget_device(a)
        assert serve(a, "again", DOCUMENT) == NUM_WHOLE, "a refusal has changed something"
        a.engine.reset(weights_version="2")
        with pytest.raises(ConfigError, match="which this engine has had"):
            a.engine.reset(weights_version="2")


def test_a_reset_fences_a_question_under_way(server: Server) -> None:
    with world(server.url) as a:
        assert serve(a, "writer", DOCUMENT) == 0
    with world(server.url) as b:
        serve(b, "connects", list(range(500, 504)))
        server.pause()
        assert b.admit("reader", DOCUMENT).state.name == "PENDING"
        time.sleep(0.05)  # the question is on its way to the server
        b.engine.reset()
        server.resume()
        settle(b)
        assert serve(b, "reader", DOCUMENT) == 0
        assert stat(b, "shared_promoted_blocks") == 0
        assert stat(b, "shared_claimed_blocks") == 0, "an answer of before the reset counts"


def test_metrics_have_the_store_and_no_disk(server: Server) -> None:
    metrics = pytest.importorskip("kvstow.observability.metrics")
    with world(server.url) as a, world(server.url) as b:
        serve(a, "writer", DOCUMENT)
        assert serve(b, "reader", DOCUMENT) == NUM_WHOLE
        found = {
            (sample.name, *sample.labels.values()): sample.value
            for family in metrics.MetricsCollector(b.engine.stats).collect()
            for sample in family.samples
        }
        num_read = NUM_WHOLE // BLOCK
        assert found["kvstow_shared_blocks_total", "promote"] == num_read
        assert found["kvstow_shared_bytes_total", "promote"] == num_read * PAGE
        assert found["kvstow_shared_failed_blocks_total", "promote"] == 0
        assert not [name for name, *_ in found if name.startswith("kvstow_disk_")]


def test_each_request_asks_once(server: Server) -> None:
    with world(server.url) as a, world(server.url) as b:
        for number in range(3):
            prompt = [100 * number + token for token in DOCUMENT]
            assert serve(a, "one name", prompt) == 0
            assert serve(b, "one name", prompt) == NUM_WHOLE
        assert stat(b, "shared_asked_blocks") == 3 * NUM_WHOLE // BLOCK
        assert stat(b, "shared_questions") == 3
        disk = b.engine._copies.disk
        assert isinstance(disk, Shared)
        disk._asked |= {f"gone {at}": (Request(0), None) for at in range(20)}
        serve(b, "another name", list(range(400, 409)))
        assert set(disk._asked) <= {"another name"}, "it remembers requests that are gone"


def test_questions_that_a_failed_store_is_spared_count_as_questions_and_as_failed(
    server: Server,
) -> None:
    with world(server.url) as a:
        server.kill()
        for number in range(6):  # after a few failures the store is left alone
            serve(a, f"asks {number}", [100 * number + token for token in DOCUMENT])
        end = time.monotonic() + 10
        while stat(a, "shared_failed_questions") < 6 and time.monotonic() < end:
            time.sleep(0.01)  # a late question ends without its request
        assert stat(a, "shared_failed_questions") == stat(a, "shared_questions") == 6


def test_the_index_forgets_and_the_store_keeps(server: Server) -> None:
    with world(server.url) as a:
        assert serve(a, "writer", DOCUMENT) == 0
    with world(server.url, shared_options=options(index_blocks=2)) as b:
        assert serve(b, "reader", DOCUMENT) == 2 * BLOCK
    with world(server.url) as c:
        assert serve(c, "reader", DOCUMENT) == NUM_WHOLE


@pytest.mark.parametrize("fault", ["stopped", "killed", "never there"])
def test_a_store_that_fails_costs_the_deadlines_and_nothing_else(
    server: Server, fault: str
) -> None:
    url = f"redis://127.0.0.1:{free_port()}" if fault == "never there" else server.url
    patient = options(ask_timeout_s=0.05, promote_timeout_s=0.2, timeout_s=0.3, flush_s=0.1)
    store = SharedStore(url, timeout_s=0.3)
    with world(url, shared=store, shared_options=patient) as it:
        serve(it, "before", DOCUMENT)
        {"stopped": server.pause, "killed": server.kill}.get(fault, lambda: None)()
        for number in range(1, 5):
            forget_device(it)
            prompt = [1000 * number + token for token in DOCUMENT]
            assert serve(it, f"request {number}", prompt) == 0
        if fault == "stopped":
            server.resume()
        elif fault == "killed":
            server.start()
        else:
            return
        until_s = time.monotonic() + LONG_S
        with world(server.url) as other:
            number = 0
            while True:
                number += 1
                assert time.monotonic() < until_s, "the store is not used again"
                prompt = [5000 + 100 * number + token for token in DOCUMENT]
                serve(it, f"after {number}", prompt)
                settle(it)
                if serve(other, f"reader {number}", prompt) == NUM_WHOLE:
                    break
                time.sleep(0.1)


def test_jobs_that_do_not_end_are_those_of_the_shared_tier(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world(server.url) as it, monkeypatch.context() as patch:
        serve(it, "writer", DOCUMENT)
        patch.setattr(Shared, "running", property(lambda _: [7]))
        with pytest.raises(TransferError, match="1 jobs of the shared tier have not ended"):
            it.engine.settle_disk()


def test_events_name_no_block_of_the_store(server: Server) -> None:
    with world(server.url) as a:
        assert serve(a, "writer", DOCUMENT) == 0
    with world(server.url, events=True) as b:
        assert serve(b, "reader", DOCUMENT) == NUM_WHOLE
        assert {event.medium for event in b.engine.take_events()} == {"GPU", "CPU"}


def test_options_that_do_not_fit_are_refused(server: Server, tmp_path: Path) -> None:
    both = {"disk": slot_file(tmp_path / "slots"), "disk_options": disk_options()}
    for given, message in (
        (both, "shared_options count for the disk too if there are both tiers"),
        ({"shared": SharedStore(server.url), "shared_options": None}, "a shared tier needs both"),
        ({"shared": None}, "a shared tier needs both"),
        ({"shared": SharedStore("http://host")}, "shared names http, expected a URL"),
        ({"shared": SharedStore(server.url, password_file=b"f")}, "password_file is b'f'"),  # type: ignore[arg-type]
        ({"shared_options": "no"}, "shared_options 'no'"),
    ):
        with pytest.raises(ConfigError, match=message), world(server.url, **given):
            pass
    with pytest.raises(ConfigError, match="index_blocks is 0"):
        options(index_blocks=0)
    with pytest.raises(ConfigError, match="identity is ''"):
        options(identity="")
    for wrong in (0, -1.0, float("nan"), float("inf"), "1", None):
        with pytest.raises(ConfigError, match=f"ask_timeout_s is {wrong!r}"):
            options(ask_timeout_s=wrong)


def test_an_engine_that_slept_in_a_file_asks_again(server: Server, tmp_path: Path) -> None:
    who: dict[str, Any] = {"identity": "m", "weights_version": "1"}
    with world(server.url) as a, world(server.url) as b:
        serve(b, "opens the store", list(range(500, 516)))
        b.engine.sleep(after=READY, preserve=False, to=tmp_path / "snapshot", **who)
        b.engine.wake([BlockLayout.from_arrays([b.kv])], after=READY, **who)
        assert serve(a, "writer", DOCUMENT) == 0
        assert serve(b, "reader", DOCUMENT) == NUM_WHOLE
        assert stat(b, "shared_failed_questions") == 0


def test_an_engine_goes_on_if_a_wake_cannot_open_the_store(server: Server, tmp_path: Path) -> None:
    who: dict[str, Any] = {"identity": "m", "weights_version": "1"}
    password = tmp_path / "password"
    password.write_text("")
    with world(server.url, shared=store_at(server.url, password_file=str(password))) as it:
        serve(it, "writer", DOCUMENT)
        it.engine.sleep(after=READY, preserve=False, to=tmp_path / "snapshot", **who)
        password.unlink()
        it.engine.wake([BlockLayout.from_arrays([it.kv])], after=READY, **who)
        assert mode(it) == "off"
        it.engine.reset()
        assert serve(it, "reader", [*range(500, 516)]) == 0
        password.write_text("")
        it.engine.sleep(after=READY)
        it.engine.wake([BlockLayout.from_arrays([it.kv])], after=READY)
        assert mode(it) == "on"
        assert serve(it, "again", DOCUMENT) == 0, "a block of before the reset was served"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("part", ["asker", "tier"])
def test_a_child_that_is_forked_while_another_thread_counts_closes_its_engine(
    server: Server, part: str
) -> None:
    with world(server.url) as it:
        serve(it, "writer", DOCUMENT)
        disk = it.engine._copies.disk
        assert isinstance(disk, Shared)
        lock = disk._asker._lock if part == "asker" else getattr(disk.first, "_lock")  # noqa: B009
        is_held, may_end = threading.Event(), threading.Event()

        def hold() -> None:
            with lock:
                is_held.set()
                may_end.wait()

        def use() -> None:
            it.engine.stats()
            it.engine.close()

        holder = threading.Thread(target=hold)
        holder.start()
        try:
            assert is_held.wait(LONG_S)
            in_child(use)
        finally:
            may_end.set()
            holder.join()
