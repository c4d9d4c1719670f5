"""`MooncakeTier` on a real master, over TCP: what it returns, and what it refuses to return."""

from __future__ import annotations

import ctypes
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiers.mooncake_master import Master, missing, owning
from tests.tiers.setup import LONG_S, blocks, digest_of

from kvstow import ConfigError
from kvstow._core import row_digests
from kvstow.tiers import TierTicket
from kvstow.tiers.mooncake import MooncakeTier
from kvstow.tiers.namespace import HEADER_BYTES, Namespace
from kvstow.tiers.shared_keys import delete_blocks
from kvstow.transfer import HostArena

NUM_SLOTS, SLOT_BYTES = 40, 5000
NAMESPACE = bytes(range(16))


pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    master = Master(tmp_path_factory.mktemp("master"))
    yield master
    master.kill()


@pytest.fixture(scope="module")
def arena() -> Iterator[HostArena]:
    with HostArena(NUM_SLOTS, SLOT_BYTES) as arena:
        yield arena


@pytest.fixture(scope="module", params=["copied", "in place"])
def tier(
    request: pytest.FixtureRequest, master: Master, arena: HostArena
) -> Iterator[MooncakeTier]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "in place":
            patch.setattr("kvstow.tiers.mooncake.MAX_COPIED_BYTES", 0)
        tier = owning(arena, master.url, NAMESPACE)
    with tier:
        assert tier.copies_blocks == (request.param == "copied")
        yield tier


def fill(arena: HostArena, numbers: range) -> np.ndarray:
    """Give each slot random bytes, and return them."""
    shape = (len(numbers), SLOT_BYTES)
    rows = np.random.default_rng(numbers.start).integers(0, 256, shape, dtype=np.uint8)
    arena.slots[numbers.start : numbers.stop] = rows
    return rows


def answer(ticket: TierTicket) -> list[bool]:
    ticket.wait(LONG_S)
    ok: list[bool] = ticket.ok.tolist()
    return ok


def test_blocks_come_back(tier: MooncakeTier, arena: HostArena) -> None:
    rows = fill(arena, range(40))
    assert answer(tier.put(blocks(*range(40)), range(40))) == [True] * 40
    arena.slots[:] = 0
    assert answer(tier.get(blocks(*range(39, -1, -1)), range(40))) == [True] * 40
    assert (arena.slots[:40] == rows[::-1]).all()


def test_what_is_not_there_is_a_miss(tier: MooncakeTier, arena: HostArena) -> None:
    fill(arena, range(2))
    assert answer(tier.put(blocks(101, 103), [0, 1])) == [True, True]
    wanted = blocks(100, 101, 102, 103)
    assert answer(tier.contains(wanted)) == [False, True, False, True]
    assert answer(tier.get(wanted, range(4))) == [False, True, False, True]
    assert answer(tier.get(blocks(101, group=1), [0])) == [False]
    assert answer(tier.delete(blocks(101))) == [True]
    assert answer(tier.contains(wanted)) == [False, False, False, True]


def key_of(number: int, group: int = 0, namespace: bytes = NAMESPACE) -> str:
    digest = digest_of(number)
    return Namespace(namespace).key_prefix(group).decode() + digest.hex()


def flip(value: bytes, at: int) -> bytes:
    return value[:at] + bytes([value[at] ^ 4]) + value[at + 1 :]


@pytest.mark.parametrize(
    "damage",
    ["data", "schema", "namespace", "hash", "another block", "another group", "cut", "long"],
)
def test_a_damaged_block_is_a_miss_and_leaves_the_store(
    tier: MooncakeTier, arena: HostArena, damage: str
) -> None:
    rows = fill(arena, range(2))
    store = tier.links.current().store
    for group in range(2):
        answer(tier.delete(blocks(201, 202, group=group)))
        assert answer(tier.put(blocks(201, 202, group=group), [0, 1])) == [True, True]
    own, other = store.get(key_of(201)), store.get(key_of(202))
    damaged = {
        "data": flip(own, 300),
        "schema": flip(own, 3),
        "namespace": flip(own, 10),
        "hash": flip(own, 40),
        "another block": other,
        "another group": store.get(key_of(201, group=1)),
        "cut": own[:-1],
        "long": own + b"x",
    }[damage]
    for value, expected in ((own, True), (damaged, False)):
        store.remove(key_of(201), True)
        assert store.put(key_of(201), value) == 0
        assert answer(tier.get(blocks(201, 202), [5, 6])) == [expected, True]
    assert (arena.slots[6] == rows[1]).all()
    assert answer(tier.contains(blocks(201))) == [False]
    assert answer(tier.put(blocks(201), [0])) == [True]
    assert answer(tier.get(blocks(201), [5])) == [True]
    assert (arena.slots[5] == rows[0]).all()


def test_values_of_both_ways_are_equal(
    master: Master, arena: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = fill(arena, range(2))
    with owning(arena, master.url, NAMESPACE) as copying:
        monkeypatch.setattr("kvstow.tiers.mooncake.MAX_COPIED_BYTES", 0)
        with MooncakeTier(arena, master.url, NAMESPACE, timeout_s=LONG_S) as other:
            for number, (writer, reader) in enumerate(((copying, other), (other, copying)), 401):
                assert answer(writer.put(blocks(number), [0])) == [True]
                arena.slots[5] = 0
                assert answer(reader.get(blocks(number), [5])) == [True]
                assert (arena.slots[5] == rows[0]).all()


def test_each_part_of_a_job_answers_for_its_own_blocks(
    tier: MooncakeTier, arena: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never computed: a hit of one part would pass for one of another."""
    monkeypatch.setattr(tier, "blocks_per_part", 3)
    rows, store = fill(arena, range(8)), tier.links.current().store
    numbers = range(601, 609)
    answer(tier.delete(blocks(*numbers)))
    assert answer(tier.put(blocks(*numbers[:7]), range(7))) == [True] * 7
    for damaged in (601, 605):
        value = store.get(key_of(damaged))
        store.remove(key_of(damaged), True)
        assert store.put(key_of(damaged), flip(value, 300)) == 0
    expected = [False, True, True, True, False, True, True, False]
    assert answer(tier.get(blocks(*numbers), range(8, 16))) == expected
    assert (arena.slots[8:16][expected] == rows[expected]).all()
    assert answer(tier.contains(blocks(*numbers))) == expected, "other blocks have left the store"


def test_block_whose_checksum_cannot_be_taken_is_a_miss(
    tier: MooncakeTier, arena: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(arena, range(1))
    assert answer(tier.put(blocks(611), [0])) == [True]

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("kvstow.tiers.mooncake.row_digests", fail)
    assert answer(tier.get(blocks(611), [5])) == [False]
    monkeypatch.undo()
    assert answer(tier.get(blocks(611), [5])) == [True]


class _Tardy:
    """A store whose gets write again after they have returned: when a checksum was taken."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._late: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def batch_get_into_multi_buffers(
        self, keys: list[str], pointers: list[list[int]], sizes: list[list[int]]
    ) -> Any:
        self._late = [(each[0] + HEADER_BYTES, SLOT_BYTES) for each in pointers]
        return self._store.batch_get_into_multi_buffers(keys, pointers, sizes)

    def checksums(self, rows: np.ndarray, slots: list[int]) -> np.ndarray:
        found = row_digests(rows, slots)
        for address, size in self._late:
            ctypes.memset(address, 0xEE, size)
        return found


def test_bytes_that_arrive_after_their_call_are_not_served(
    master: Master, arena: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = fill(arena, range(1))
    with owning(arena, master.url, NAMESPACE) as tier:
        assert answer(tier.put(blocks(501), [0])) == [True]
        link = tier.links.current()
        tardy = _Tardy(link.store)
        monkeypatch.setattr(link, "store", tardy)
        monkeypatch.setattr("kvstow.tiers.mooncake.row_digests", tardy.checksums)
        assert answer(tier.get(blocks(501), [5])) == [True]
        assert (arena.slots[5] == rows[0]).all()
        monkeypatch.undo()


class _Delayed(_Tardy):
    """A store whose blocks arrive after its gets have returned: when a checksum is to be taken."""

    def batch_get_into_multi_buffers(
        self, keys: list[str], pointers: list[list[int]], sizes: list[list[int]]
    ) -> Any:
        codes = super().batch_get_into_multi_buffers(keys, pointers, sizes)
        self._blocks = [ctypes.string_at(address, size) for address, size in self._late]
        for address, size in self._late:
            ctypes.memset(address, 0xEE, size)
        return codes

    def checksums(self, rows: np.ndarray, slots: list[int]) -> np.ndarray:
        for (address, size), block in zip(self._late, self._blocks, strict=True):
            ctypes.memmove(address, block, size)
        return row_digests(rows, slots)


def test_block_that_arrives_after_its_copy_is_a_miss(
    master: Master, arena: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torn: the host slot has what the memory of the thread held before."""
    fill(arena, range(1))
    with owning(arena, master.url, NAMESPACE) as tier:
        assert answer(tier.put(blocks(502), [0])) == [True]
        link = tier.links.current()
        delayed = _Delayed(link.store)
        monkeypatch.setattr(link, "store", delayed)
        monkeypatch.setattr("kvstow.tiers.mooncake.row_digests", delayed.checksums)
        assert answer(tier.get(blocks(502), [5])) == [False]
        monkeypatch.undo()


def test_a_dead_master_costs_no_more_than_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstow.tiers.breaker.LAST_PAUSE_S", 1.0)
    master = Master(tmp_path)
    with HostArena(4, SLOT_BYTES) as arena:
        rows = fill(arena, range(2))
        with owning(arena, master.url, NAMESPACE) as tier:
            assert answer(tier.put(blocks(1, 2), [0, 1])) == [True, True]
            master.kill()
            for _ in range(4):
                begin_s = time.monotonic()
                ticket = tier.get(blocks(1), [2], deadline=begin_s + 0.2)
                ticket.wait(10)
                assert ticket.ok.tolist() == [False]
                ticket.wait_until_ended(LONG_S)
            ticket = tier.get(blocks(1), [2])
            ticket.wait(10)
            assert "left alone" in str(ticket.error)
            master.start()
            until_s = time.monotonic() + 60
            # The master has forgotten all blocks.
            while not all(answer(tier.put(blocks(1, 2), [0, 1]))):
                assert time.monotonic() < until_s, "it does not recover"
                time.sleep(0.2)
            assert answer(tier.get(blocks(2), [3])) == [True]
            assert (arena.slots[3] == rows[1]).all()
    master.kill()


@pytest.mark.parametrize("master", ["down", "stands still", "has no name"])
def test_a_master_that_does_not_answer_is_not_left_to_mooncake(
    arena: HostArena, monkeypatch: pytest.MonkeyPatch, master: str
) -> None:
    """Mooncake would let no other thread of the process run until it gives up, after minutes."""
    begun: list[str] = []
    monkeypatch.setattr("kvstow.tiers.mooncake_link._ANSWER_S", 0.1, raising=False)
    monkeypatch.setattr("kvstow.tiers.mooncake._store_class", lambda: lambda: begun.append("setup"))
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if master == "stands still":
            silent.listen()
        host = "a..b" if master == "has no name" else "127.0.0.1"
        url = f"mooncake://{host}:{silent.getsockname()[1]}"
        with MooncakeTier(arena, url, NAMESPACE) as tier:
            ticket = tier.get(blocks(1), [2])
            ticket.wait_until_ended(LONG_S)
    assert not begun
    assert "cannot be reached" in str(ticket.error)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"-ERR unknown\r\n"])
def test_another_server_is_not_left_to_mooncake(
    arena: HostArena, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    """Mooncake would let no other thread of the process run for 30 s."""
    begun: list[str] = []
    monkeypatch.setattr("kvstow.tiers.mooncake._store_class", lambda: lambda: begun.append("setup"))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        if connection.recv(512):
                            connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        url = f"mooncake://127.0.0.1:{listener.getsockname()[1]}"
        with MooncakeTier(arena, url, NAMESPACE) as tier:
            ticket = tier.get(blocks(1), [2])
            ticket.wait_until_ended(LONG_S)
        listener.shutdown(socket.SHUT_RDWR)
    assert not begun
    assert "is no Mooncake master: name the master's port" in str(ticket.error)


def test_a_store_without_memory_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    master = Master(tmp_path)
    with (
        HostArena(4, SLOT_BYTES) as arena,
        MooncakeTier(arena, master.url, NAMESPACE, timeout_s=LONG_S) as tier,
    ):
        for _ in range(4):
            ticket = tier.put(blocks(1, 2), [0, 1])
            assert answer(ticket) == [False, False]
            assert "has no room for a block" in str(ticket.error)
        assert answer(tier.contains(blocks(1))) == [False]
    master.kill()
    (record,) = caplog.records
    assert "no room for a block. If it never has any, no server gives it" in record.getMessage()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis://host", "redis://host is no Mooncake master"),
        ("mooncake://", "is no Mooncake master"),
        ("mooncake://host/path", "mooncake://host/path is no Mooncake master"),
        ("mooncake://host:99999", "has no valid port"),
        ("mooncake://user:sesame@host", "the URL of the shared tier contains credentials"),
        ("mooncake://user:/sesame@host", "contains credentials"),
    ],
)
def test_a_wrong_url_is_refused(arena: HostArena, url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        MooncakeTier(arena, url, NAMESPACE)
    assert "sesame" not in str(refused.value)


def test_only_the_blocks_of_one_model_are_deleted(master: Master, arena: HostArena) -> None:
    other = bytes(range(1, 17))
    with (
        owning(arena, master.url, NAMESPACE) as tier,
        owning(arena, master.url, other) as stranger,
    ):
        for one in (tier, stranger):
            assert answer(one.put(blocks(301, 302), [0, 1])) == [True, True]
        assert delete_blocks(master.url, Namespace(NAMESPACE)) >= 2
        assert answer(tier.contains(blocks(301, 302))) == [False, False]
        assert answer(stranger.contains(blocks(301, 302))) == [True, True]
