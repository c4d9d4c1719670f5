"""Engines with a disk and a shared store: each serves what the other lacks, and no wrong block.

The store is a real server, and the disk a real file. `serve` compares every token that a request
loads.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.engine.disk_world import (
    NUM_HOST,
    PAGE,
    below,
    fall_off,
    forget_device,
    serve,
    settle,
    slot_file,
)
from tests.engine.disk_world import options as disk_options
from tests.engine.test_disk import Calls
from tests.engine.test_shared import NUM_WHOLE, keys, options, stat, store_at
from tests.engine.world import BLOCK, DOCUMENT, PENDING, World
from tests.tiers.resp.server import Server, num_connections
from tests.tiers.setup import LONG_S

from kvstow import ConfigError, hash_tokens
from kvstow.tiers import SharedStore
from kvstow.transfer import READY, BlockLayout, mover_for

NUM_BLOCKS = NUM_WHOLE // BLOCK
WHO: dict[str, Any] = {"identity": "m", "weights_version": "1"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path, "--maxmemory", "100mb") as server:
        yield server


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    made = Calls()
    monkeypatch.setattr("kvstow.tiers.slot_file.Files", lambda: made)
    yield made
    made.syncs_wait = made.reads_wait = False


def world(
    path: Path, url: str, num_host: int = NUM_HOST, **changes: object
) -> AbstractContextManager[World]:
    given: dict[str, object] = {
        "disk": slot_file(path),
        "shared": store_at(url),
        "shared_options": options(),
    }
    return below(num_host, 17, **(given | changes))


def test_a_block_that_the_disk_lacks_comes_from_the_store_and_stays_on_the_disk(
    server: Server, tmp_path: Path
) -> None:
    with world(tmp_path / "a", server.url) as a, world(tmp_path / "b", server.url) as b:
        assert serve(a, "writer", DOCUMENT) == 0
        assert serve(b, "reader", DOCUMENT) == NUM_WHOLE
        assert stat(b, "shared_got_blocks") == NUM_BLOCKS
        server.kill()
        # Its host forgets the blocks, and only its disk can have them.
        fall_off_the_host(b)
        assert serve(b, "again", DOCUMENT) == NUM_WHOLE
        assert stat(b, "shared_got_blocks") == NUM_BLOCKS
    with world(tmp_path / "b", server.url) as late:
        assert serve(late, "warm", DOCUMENT) == NUM_WHOLE


def fall_off_the_host(it: World) -> None:
    for number in range(3):
        serve(it, f"other {number}", [3000 + 100 * number + at for at in range(32)])
    forget_device(it)


def test_a_block_that_the_store_lost_comes_from_the_disk(server: Server, tmp_path: Path) -> None:
    with world(tmp_path / "a", server.url) as a:
        fall_off(a)
        server.command("FLUSHALL")
        assert serve(a, "reader", DOCUMENT) == NUM_WHOLE
        assert stat(a, "shared_got_blocks") == 0


def test_one_hit_comes_from_both(server: Server, tmp_path: Path) -> None:
    with world(tmp_path / "b", server.url) as b:
        assert serve(b, "first", DOCUMENT[: 2 * BLOCK]) == 0
    server.command("FLUSHALL")
    with world(tmp_path / "a", server.url) as a:
        assert serve(a, "writer", DOCUMENT) == 0
    with world(tmp_path / "b", server.url) as b:
        assert serve(b, "reader", DOCUMENT) == NUM_WHOLE
        assert (stat(b, "promoted_blocks"), stat(b, "shared_got_blocks")) == (NUM_BLOCKS, 1)
    num_keys = len(keys(server))
    with world(tmp_path / "a", server.url) as a:
        server.command("FLUSHALL")
        assert serve(a, "reader", DOCUMENT) == NUM_WHOLE
    assert (num_keys, keys(server)) == (len(DOCUMENT) // BLOCK, []), (
        "what the disk has is put again"
    )


def test_a_claimed_slot_may_hold_another_block_in_the_file(server: Server, tmp_path: Path) -> None:
    """Foreign: the index has given the slots away, and the file has not been written yet."""
    small = slot_file(tmp_path / "b", 4)
    with world(tmp_path / "a", server.url) as a:
        assert serve(a, "writer", DOCUMENT) == 0
    with world(tmp_path / "b", server.url, disk=small) as b:
        assert serve(b, "own", [7000 + at for at in range(16)]) == 0
        assert stat(b, "disk_resident_blocks") == 4
        assert serve(b, "reader", DOCUMENT) == NUM_WHOLE, "claims evict what the disk had"
        assert stat(b, "shared_got_blocks") == NUM_BLOCKS


def test_a_slot_whose_frame_is_not_compared_serves_another_block(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control of the test above."""
    monkeypatch.setattr(
        "kvstow.tiers.slot_store.match", lambda frames, expected: frames["digest"] != 0
    )
    with pytest.raises(AssertionError, match="reads another block"):
        test_a_claimed_slot_may_hold_another_block_in_the_file(server, tmp_path)


def test_a_reset_empties_both(server: Server, tmp_path: Path) -> None:
    with world(tmp_path / "a", server.url) as a:
        fall_off(a)
        a.engine.reset()
        settle(a)
        forget_device(a)
        assert serve(a, "new weights", DOCUMENT) == 0
        # It shares with itself again.
        fall_off_the_host(a)
        assert serve(a, "reader", DOCUMENT) == NUM_WHOLE
    with world(tmp_path / "a", server.url) as a:
        assert stat(a, "disk_resident_blocks") == 0
        assert serve(a, "old weights", DOCUMENT) == NUM_WHOLE, "the store has those of version 1"


def test_a_reset_fences_a_question_under_way(server: Server, tmp_path: Path) -> None:
    with world(tmp_path / "a", server.url) as a:
        assert serve(a, "writer", DOCUMENT) == 0
    with world(tmp_path / "b", server.url) as b:
        serve(b, "connects", list(range(500, 504)))
        server.pause()
        assert b.admit("reader", DOCUMENT).state is PENDING
        time.sleep(0.05)  # the question is on its way to the server
        b.engine.reset()
        server.resume()
        settle(b)
        assert serve(b, "reader", DOCUMENT) == 0
        assert stat(b, "claimed_blocks") == 0, "an answer from before the reset counts"


def test_named_weights_are_shared_and_warm(server: Server, tmp_path: Path) -> None:
    two = options(weights_version="2")
    with world(tmp_path / "a", server.url) as a:
        assert serve(a, "old", DOCUMENT) == 0
        a.engine.reset(weights_version="2")
        settle(a)
        forget_device(a)
        assert serve(a, "new", DOCUMENT) == 0, "a block of version 1 was served"
    with world(tmp_path / "b", server.url, shared_options=two) as b:
        assert serve(b, "shares", DOCUMENT) == NUM_WHOLE
    server.command("FLUSHALL")
    with world(tmp_path / "a", server.url, shared_options=two) as a:
        assert serve(a, "warm", DOCUMENT) == NUM_WHOLE


def test_a_store_that_fails_leaves_the_disk_on(server: Server, tmp_path: Path) -> None:
    short = options(ask_timeout_s=0.05, timeout_s=1.0)
    store = SharedStore(server.url, timeout_s=0.3)
    with world(tmp_path / "a", server.url, shared=store, shared_options=short) as a:
        serve(a, "connects", list(range(500, 504)))
        server.kill()
        fall_off(a)
        assert serve(a, "reader", DOCUMENT) == NUM_WHOLE
        assert (stat(a, "disk_mode"), stat(a, "shared_got_blocks")) == (2, 0)
        assert stat(a, "failed_promotes") == 0


def test_a_disk_that_fails_leaves_the_store_on(
    server: Server, tmp_path: Path, calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    with world(tmp_path / "a", server.url) as a, world(tmp_path / "b", server.url) as b:
        serve(b, "first", list(range(500, 504)))
        calls.error = 5
        assert serve(a, "writer", DOCUMENT) == 0
        for number in range(2):
            assert serve(b, f"reader {number}", DOCUMENT) == NUM_WHOLE
            forget_device(b)
        fall_off_the_host(b)
        assert serve(b, "again", DOCUMENT) == NUM_WHOLE
        assert stat(b, "shared_got_blocks") == 2 * NUM_BLOCKS
        assert (stat(b, "disk_mode"), stat(b, "shared_mode")) == (1, 2)
    assert [record.levelname for record in caplog.records].count("WARNING") == 2
    assert "the disk tier is read_only" in caplog.text


def test_a_disk_that_hangs_leaves_the_store_on(
    server: Server, tmp_path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = options(promote_timeout_s=None)
    new = [9000 + at for at in DOCUMENT]
    with world(tmp_path / "b", server.url, shared_options=patient) as b:
        fall_off(b)
        with world(tmp_path / "a", server.url) as a:
            assert serve(a, "writer", new) == 0
        calls.reads_wait = True
        with monkeypatch.context() as patch:
            patch.setattr(b.engine._copies.disk, "options", replace(patient, timeout_s=0.3))
            assert b.admit("stuck", DOCUMENT).state is PENDING
            b.engine.poll()
        time.sleep(0.4)
        b.now_s += 1.0
        b.engine.poll()
        assert serve(b, "stuck", DOCUMENT, settles=False) == 0
        # The hanging read holds host slots. So the reader needs those that copies hold now.
        end_s = time.monotonic() + LONG_S
        while stat(b, "storing_blocks") or stat(b, "demoting_blocks"):
            b.engine.poll()
            assert time.monotonic() < end_s, "the copies do not end"
            time.sleep(0.001)
        assert serve(b, "reader", new, settles=False) == NUM_WHOLE
        assert stat(b, "shared_got_blocks") == NUM_BLOCKS
        calls.reads_wait = False


def test_events_name_what_is_on_this_disk(server: Server, tmp_path: Path) -> None:
    names, own = hash_tokens(DOCUMENT, BLOCK), [7000 + at for at in range(16)]

    def on_disk(it: World) -> list[tuple[str, list[bytes]]]:
        events = [event for event in it.engine.take_events() if event.medium == "STORAGE"]
        return [(type(event).__name__, event.block_hashes) for event in events]  # type: ignore[union-attr]

    with world(tmp_path / "a", server.url, events=True) as a:
        assert serve(a, "writer", DOCUMENT) == 0
        assert on_disk(a) == [("BlockStored", list(names))]
    with world(tmp_path / "b", server.url, disk=slot_file(tmp_path / "b", 4), events=True) as b:
        assert serve(b, "reader", DOCUMENT) == NUM_WHOLE
        last = names[NUM_BLOCKS]
        assert on_disk(b) == [("BlockStored", [last])], "claims are not of this disk"
        # Its own blocks take the places of the claims, which go without an event.
        assert serve(b, "own", own) == 0
        found = on_disk(b)
        assert ("BlockStored", list(hash_tokens(own, BLOCK))) in found
        removed = [name for kind, hashes in found if kind == "BlockRemoved" for name in hashes]
        assert removed == [last]


def test_writes_of_what_the_store_brought_keep_the_rate(server: Server, tmp_path: Path) -> None:
    with world(tmp_path / "a", server.url) as a:
        assert serve(a, "writer", DOCUMENT) == 0
    slow = options(max_write_bytes_per_s=1)
    with world(tmp_path / "b", server.url, shared_options=slow) as b:
        assert serve(b, "reader", DOCUMENT) == NUM_WHOLE
        assert stat(b, "demoted_bytes") <= PAGE


def test_both_stay_warm_while_the_engine_sleeps(server: Server, tmp_path: Path) -> None:
    with world(tmp_path / "a", server.url) as a, world(tmp_path / "b", server.url) as b:
        fall_off(b)
        b.engine.sleep(after=READY, preserve=False, to=tmp_path / "snapshot", **WHO)
        b.engine.wake([BlockLayout.from_arrays([b.kv])], after=READY, **WHO)
        assert serve(b, "from the disk", DOCUMENT) == NUM_WHOLE
        new = [9000 + at for at in DOCUMENT]
        assert serve(a, "writer", new) == 0
        assert serve(b, "from the store", new) == NUM_WHOLE
        assert stat(b, "shared_got_blocks") == NUM_BLOCKS


def test_options_that_do_not_fit_are_refused(server: Server, tmp_path: Path) -> None:
    for given, message in (
        ({"disk_options": disk_options()}, "shared_options count for the disk too"),
        ({"shared_options": options(index_blocks=9)}, "index_blocks is 9, but with a disk tier"),
        ({"shared_options": None}, "a shared tier needs both"),
        ({"disk": None, "disk_options": disk_options()}, "leave out disk_options"),
        ({"disk": [slot_file(tmp_path / "a")] * 2}, "pass one SlotFile for each rank"),
    ):
        with pytest.raises(ConfigError, match=message), world(tmp_path / "a", server.url, **given):
            pass


def test_an_engine_that_its_user_drops_lets_go_of_all_that_it_has(
    server: Server, tmp_path: Path
) -> None:
    given = {"disk": slot_file(tmp_path / "disk"), "shared": store_at(server.url)}
    before = threading.active_count()
    it = World(17, NUM_HOST, mover=mover_for, shared_options=options(), **given)
    serve(it, "writer", DOCUMENT)
    arena = weakref.ref(it.engine.arenas[0])
    assert num_connections(server.port) > 0
    del it
    end_s = time.monotonic() + LONG_S
    while arena() is not None or num_connections(server.port) or threading.active_count() > before:
        gc.collect()
        assert time.monotonic() < end_s, "threads of the shared tier keep the engine"
        time.sleep(0.001)
    with world(tmp_path / "disk", server.url) as it:  # nobody has the lock any more
        assert serve(it, "reader", DOCUMENT) == NUM_WHOLE
