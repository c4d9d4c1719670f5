"""`RespTier` on a real server: what it returns, and what it refuses to return."""

from __future__ import annotations

import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.tiers.resp.proxy import Proxy
from tests.tiers.resp.server import Server
from tests.tiers.resp.small import patient
from tests.tiers.setup import LONG_S, answered, blocks, digest_of

from kvstow import ConfigError, StateError, TransferError
from kvstow.tiers import TierTicket, namespace
from kvstow.tiers.namespace import HEADER_BYTES, Namespace
from kvstow.tiers.queued import Job
from kvstow.tiers.resp import Credentials, RespTier
from kvstow.tiers.resp.tier import _Connections
from kvstow.tiers.resp.wire import Wire, WireError
from kvstow.tiers.shared_keys import count_blocks
from kvstow.transfer import HostArena

NUM_SLOTS, SLOT_BYTES = 64, 5000
NAMESPACE = bytes(range(16))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def arena(server: Server) -> Iterator[HostArena]:
    server.command("FLUSHALL")
    with HostArena(NUM_SLOTS, SLOT_BYTES) as arena:
        yield arena


@pytest.fixture
def tier(server: Server, arena: HostArena) -> Iterator[RespTier]:
    with patient(arena, server.url, NAMESPACE) as tier:
        yield tier


def fill(arena: HostArena, numbers: range, seed: int = 0) -> np.ndarray:
    """Give each slot random bytes, and return them."""
    rows = np.random.default_rng(seed).integers(0, 256, (len(numbers), SLOT_BYTES), dtype=np.uint8)
    arena.slots[numbers.start : numbers.stop] = rows
    return rows


def answer(ticket: TierTicket) -> list[bool]:
    ok: list[bool] = answered(ticket).ok.tolist()
    return ok


def test_blocks_come_back(tier: RespTier, arena: HostArena) -> None:
    rows = fill(arena, range(40))
    assert answer(tier.put(blocks(*range(40)), range(40))) == [True] * 40
    arena.slots[:] = 0
    order = [*range(39, -1, -1)]
    assert answer(tier.get(blocks(*order), range(40))) == [True] * 40
    assert (arena.slots[:40] == rows[::-1]).all()
    stats = tier.stats()
    assert (stats.put_blocks, stats.got_blocks, stats.mismatched_blocks) == (40, 40, 0)
    assert stats.put_bytes == 40 * tier.slot_bytes


def test_what_is_not_there_is_a_miss(tier: RespTier, arena: HostArena) -> None:
    fill(arena, range(3))
    assert answer(tier.put(blocks(1, 3), [0, 1])) == [True, True]
    wanted = blocks(0, 1, 2, 3)
    assert answer(tier.contains(wanted)) == [False, True, False, True]
    assert answer(tier.get(wanted, range(4))) == [False, True, False, True]
    assert answer(tier.get(blocks(1, group=1), [0])) == [False]
    assert answer(tier.delete(blocks(1))) == [True]
    assert answer(tier.contains(wanted)) == [False, False, False, True]


def test_groups_share_hashes(tier: RespTier, arena: HostArena) -> None:
    rows = fill(arena, range(2))
    for group in range(2):
        assert answer(tier.put(blocks(1, group=group), [group])) == [True]
    assert answer(tier.get(blocks(1), [2])) == [True]
    assert answer(tier.get(blocks(1, group=1), [3])) == [True]
    assert (arena.slots[2:4] == rows).all()


def test_the_block_of_another_group_is_a_miss(
    tier: RespTier, arena: HostArena, server: Server
) -> None:
    fill(arena, range(1))
    answer(tier.put(blocks(1, group=1), [0]))
    server.command("SET", key_of(1), value_of(server, key_of(1, group=1)))
    assert answer(tier.get(blocks(1), [2])) == [False]


def test_contains_answers_for_many_keys(tier: RespTier, arena: HostArena) -> None:
    fill(arena, range(2))
    answer(tier.put(blocks(7, 19_999), [0, 1]))
    ticket = tier.contains(blocks(*range(20_000)))
    ticket.wait(LONG_S)
    assert np.flatnonzero(ticket.ok).tolist() == [7, 19_999]


def key_of(number: int, namespace: bytes = NAMESPACE, group: int = 0) -> bytes:
    return Namespace(namespace).keys([group], [digest_of(number)])[0]


def value_of(server: Server, key: bytes) -> bytes:
    """Return what the server holds under a key."""
    answer = server.command("GET", key)
    size, _, rest = answer[1:].partition(b"\r\n")
    return rest[: int(size)]


def flip(value: bytes, at: int) -> bytes:
    return value[:at] + bytes([value[at] ^ 4]) + value[at + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda own, _: flip(own, HEADER_BYTES + 100), id="data"),
        pytest.param(lambda own, _: flip(own, -1 % len(own)), id="last-byte"),
        pytest.param(lambda own, _: flip(own, 3), id="magic"),
        pytest.param(lambda own, _: flip(own, 6), id="schema"),
        pytest.param(lambda own, _: flip(own, 10), id="namespace"),
        pytest.param(lambda own, _: flip(own, 25), id="group"),
        pytest.param(lambda own, _: flip(own, 28), id="bytes-of-the-hash"),
        pytest.param(lambda own, _: flip(own, 40), id="hash"),
        pytest.param(lambda own, _: flip(own, 61), id="length"),
        pytest.param(lambda own, _: flip(own, HEADER_BYTES - 6), id="checksum"),
        pytest.param(lambda _, other: other, id="another-block"),
        pytest.param(lambda own, _: own[:-1], id="cut-short"),
        pytest.param(lambda own, _: own + b"x", id="too-long"),
        pytest.param(lambda own, _: b"", id="empty"),
        pytest.param(lambda own, other: own[: len(own) // 2] + other[len(own) // 2 :], id="torn"),
    ],
)
def test_a_damaged_block_is_a_miss_and_leaves_the_store(
    tier: RespTier, arena: HostArena, server: Server, damage: Callable[[bytes, bytes], bytes]
) -> None:
    rows = fill(arena, range(2))
    assert answer(tier.put(blocks(1, 2), [0, 1])) == [True, True]
    own, other = value_of(server, key_of(1)), value_of(server, key_of(2))
    server.command("SET", key_of(1), own)
    assert answer(tier.get(blocks(1), [5])) == [True], "the damage must come from `damage`"
    server.command("SET", key_of(1), damage(own, other))
    assert answer(tier.get(blocks(1, 2), [5, 6])) == [False, True]
    assert (arena.slots[6] == rows[1]).all()
    assert tier.stats().mismatched_blocks == 1
    assert answer(tier.contains(blocks(1))) == [False]
    assert answer(tier.put(blocks(1), [0])) == [True]
    assert answer(tier.get(blocks(1), [5])) == [True]
    assert (arena.slots[5] == rows[0]).all()


def test_servers_of_two_versions_share_a_store_without_a_block_of_the_other(
    tier: RespTier, arena: HostArena, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each would delete the other's block, and count it as damaged."""
    rows = fill(arena, range(2))
    assert answer(tier.put(blocks(1), [0])) == [True]
    with monkeypatch.context() as newer:
        newer.setattr(namespace, "SCHEMA", namespace.SCHEMA + 1)
        assert answer(tier.contains(blocks(1))) == [False]
        assert answer(tier.get(blocks(1), [5])) == [False]
        assert answer(tier.put(blocks(1), [1])) == [True]
        assert answer(tier.get(blocks(1), [5])) == [True]
        assert (arena.slots[5] == rows[1]).all()
    assert answer(tier.get(blocks(1), [6])) == [True]
    assert (arena.slots[6] == rows[0]).all()
    assert tier.stats().mismatched_blocks == 0


def test_large_blocks_that_are_asked_for_one_after_another_keep_their_places(
    server: Server,
) -> None:
    """A server is asked for two blocks of this size at once. There are parts of 16 and of 3."""
    server.command("FLUSHALL")
    there = [number for number in range(19) if number not in (1, 4, 15, 18)]
    with HostArena(19, 300 << 10) as arena, patient(arena, server.url, NAMESPACE) as tier:
        arena.slots[:] = np.random.default_rng(0).integers(0, 256, arena.slots.shape, np.uint8)
        rows = arena.slots.copy()
        assert all(answer(tier.put(blocks(*there), there)))
        server.command("SETRANGE", key_of(7), str(HEADER_BYTES + 5), "other bytes")
        server.command("SET", key_of(10), "short")
        arena.slots[:] = 0
        good = [number in there and number not in (7, 10) for number in range(19)]
        assert answer(tier.get(blocks(*range(19)), range(19))) == good
        assert (arena.slots[good] == rows[good]).all()


def test_two_models_do_not_meet(server: Server, arena: HostArena, tier: RespTier) -> None:
    fill(arena, range(1))
    answer(tier.put(blocks(1), [0]))
    other = bytes(16)
    with patient(arena, server.url, other) as stranger:
        assert answer(stranger.get(blocks(1), [1])) == [False]
        # Even where the block of the one lies under the key of the other.
        server.command("SET", key_of(1, other), value_of(server, key_of(1)))
        assert answer(stranger.contains(blocks(1))) == [True]
        assert answer(stranger.get(blocks(1), [1])) == [False]


def test_a_put_replaces_what_is_there(tier: RespTier, arena: HostArena, server: Server) -> None:
    rows = fill(arena, range(1))
    server.command("SET", key_of(1), b"what another program wrote")
    assert answer(tier.put(blocks(1), [0])) == [True]
    assert answer(tier.get(blocks(1), [1])) == [True]
    assert (arena.slots[1] == rows[0]).all()


def test_a_server_that_comes_late_is_used(tmp_path: Path, arena: HostArena) -> None:
    fill(arena, range(1))
    with Server(tmp_path) as server:
        server.kill()
        with patient(arena, server.url, NAMESPACE) as tier:
            ticket = tier.put(blocks(1), [0])
            assert answer(ticket) == [False]
            assert "127.0.0.1" in str(ticket.error)
            server.start()
            assert answer(tier.put(blocks(1), [0])) == [True]
            server.kill()  # the connection that the tier holds is gone
            assert answer(tier.get(blocks(1), [1])) == [False]
            server.start()
            # One of the threads still has a connection of before.
            assert answer(tier.put(blocks(1), [0])) == [True]


def test_a_restart_of_the_server_fails_no_job(tmp_path: Path, arena: HostArena) -> None:
    fill(arena, range(8))
    with Server(tmp_path) as server, patient(arena, server.url, NAMESPACE) as tier:
        for _ in range(2):
            # Enough jobs at once for all threads.
            puts = [tier.put(blocks(number), [number]) for number in range(8)]
            assert [answer(put) for put in puts] == [[True]] * 8
            gets = [tier.get(blocks(number), [number + 8]) for number in range(8)]
            assert [answer(get) for get in gets] == [[True]] * 8
            server.kill()
            server.start()


@pytest.mark.parametrize("is_looked_at", [True, False])
def test_bytes_that_nobody_asked_for_are_no_answer(
    server: Server, arena: HostArena, monkeypatch: pytest.MonkeyPatch, *, is_looked_at: bool
) -> None:
    if not is_looked_at:  # the control: the answer is believed
        monkeypatch.setattr(Wire, "is_idle", True)
    with Proxy(server.port, seed=0) as proxy:
        url = f"redis://127.0.0.1:{proxy.port}"
        with patient(arena, url, NAMESPACE, num_threads=1) as tier:
            assert answer(tier.contains(blocks(7))) == [False]
            proxy.say(b":1\r\n")
            assert answer(tier.contains(blocks(7))) == [not is_looked_at]


class Pair:
    """A connection whose other end is `server`."""

    def connect(self) -> None:
        self._sock, self.server = socket.socketpair()

    def disconnect(self) -> None:
        self._sock.close()
        self.server.close()


@pytest.fixture
def pair() -> Pair:
    return Pair()


@pytest.fixture
def wire(pair: Pair) -> Iterator[Wire]:
    wire = Wire(pair)
    wire.limit(time.monotonic() + LONG_S)
    yield wire
    wire.close()


def test_bytes_behind_an_answer_show_before_the_next_command(wire: Wire, pair: Pair) -> None:
    assert wire.is_idle
    pair.server.sendall(b"+OK\r\n:1\r\n")
    assert wire.status() == b"OK"
    assert not wire.is_idle


def test_parts_of_which_the_system_sends_a_little_arrive_whole(
    wire: Wire, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "_send_some", lambda batch: wire._socket.send(batch[0][:7]))
    wire.send([b"0123456789", b"abc", b"ABCDEFGHIJKLMNOP"])
    assert pair.server.recv(100) == b"0123456789abcABCDEFGHIJKLMNOP"


def test_value_that_is_longer_than_the_server_said_is_an_error(wire: Wire, pair: Pair) -> None:
    pair.server.sendall(b"$2\r\n123\r\n")
    assert wire.bulk_size() == 2
    wire.skip(2)
    with pytest.raises(WireError, match="longer than the server said"):
        wire.end_bulk()


def test_a_stopped_server_costs_no_more_than_the_deadline(tmp_path: Path, arena: HostArena) -> None:
    rows = fill(arena, range(2))
    with Server(tmp_path) as server, patient(arena, server.url, NAMESPACE) as tier:
        assert answer(tier.put(blocks(1, 2), [0, 1])) == [True, True]
        assert answer(tier.get(blocks(1), [1])) == [True]
        server.pause()
        for _ in range(3):
            ticket = tier.get(blocks(1), [2], deadline=time.monotonic() + 0.1)
            ticket.wait(5)
            assert ticket.ok.tolist() == [False]
            ticket.wait_until_ended(LONG_S)
        # The tier has given up, so nothing may arrive any more.
        arena.slots[2] = 7
        begin_s = time.monotonic()
        ticket = tier.get(blocks(1), [2], deadline=begin_s + 60)
        ticket.wait(30)
        assert "left alone" in str(ticket.error)
        server.resume()
        while "left alone" in str((ticket := answered(tier.get(blocks(2), [3]))).error):
            time.sleep(0.05)
        assert ticket.ok.tolist() == [True]
        # The answers that came too late are not taken for answers to this call.
        assert (arena.slots[3] == rows[1]).all()
        assert tier.stats().mismatched_blocks == 0
        assert (arena.slots[2] == 7).all()


def test_a_full_queue_of_puts_drops(tmp_path: Path, arena: HostArena) -> None:
    fill(arena, range(8))
    with Server(tmp_path) as server:
        room = 4 * arena.slot_stride_bytes
        with patient(arena, server.url, NAMESPACE, max_queued_bytes=room) as tier:
            assert answer(tier.put(blocks(0), [0])) == [True]
            server.pause()
            first = tier.put(blocks(1, 2, 3, 4), [1, 2, 3, 4])
            second = tier.put(blocks(5), [5])
            assert second.poll()
            assert second.ok.tolist() == [False]
            server.resume()
            assert answer(first) == [True] * 4
            assert answer(tier.put(blocks(5), [5])) == [True]
            assert tier.stats().failed_puts == 1


def test_blocks_expire(server: Server, arena: HostArena) -> None:
    fill(arena, range(1))
    with patient(arena, server.url, NAMESPACE, ttl_s=1000) as tier:
        assert answer(tier.put(blocks(1), [0])) == [True]
        left = int(server.command("TTL", key_of(1))[1:-2])
        assert 0 < left <= 1000


def test_several_servers_share_the_keys(tmp_path: Path, arena: HostArena) -> None:
    rows = fill(arena, range(32))
    with Server(tmp_path) as a, Server(tmp_path) as b:
        url = f"{a.url},127.0.0.1:{b.port}"
        with patient(arena, url, NAMESPACE) as tier:
            assert answer(tier.put(blocks(*range(32)), range(32))) == [True] * 32
            sizes = [int(server.command("DBSIZE")[1:-2]) for server in (a, b)]
            assert sum(sizes) == 32
            assert min(sizes) > 0
            arena.slots[:] = 0
            assert answer(tier.get(blocks(*range(32)), range(32))) == [True] * 32
            assert (arena.slots[:32] == rows).all()
            a.kill()
            ok = answer(tier.get(blocks(*range(32)), range(32)))
            assert sum(ok) == sizes[1], "the other server still answers"


def test_a_cluster_is_asked_where_keys_are(tmp_path: Path, arena: HostArena) -> None:
    rows = fill(arena, range(32))
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    options = ("--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf")
    with Server(folders[0], *options) as a, Server(folders[1], *options) as b:
        for server, slots in ((a, range(8192)), (b, range(8192, 16384))):
            server.command("CLUSTER", "ADDSLOTS", *map(str, slots))
        a.command("CLUSTER", "MEET", "127.0.0.1", str(b.port))
        until_s = time.monotonic() + 30
        while b"cluster_state:ok" not in a.command("CLUSTER", "INFO") or (
            b"cluster_state:ok" not in b.command("CLUSTER", "INFO")
        ):
            assert time.monotonic() < until_s, "the cluster does not form"
            time.sleep(0.05)
        with patient(arena, f"redis+cluster://127.0.0.1:{a.port}", NAMESPACE) as tier:
            assert answer(tier.put(blocks(*range(32)), range(32))) == [True] * 32
            sizes = [int(server.command("DBSIZE")[1:-2]) for server in (a, b)]
            assert sum(sizes) == 32
            assert min(sizes) > 0
            arena.slots[:] = 0
            assert answer(tier.get(blocks(*range(32)), range(32))) == [True] * 32
            assert (arena.slots[:32] == rows).all()


def test_a_password_is_needed_and_never_shown(
    tmp_path: Path, arena: HostArena, caplog: pytest.LogCaptureFixture
) -> None:
    fill(arena, range(1))
    with Server(tmp_path, "--requirepass", "open-sesame") as server:
        with patient(arena, server.url, NAMESPACE, credentials=Credentials()) as tier:
            for _ in range(4):
                ticket = tier.put(blocks(1), [0])
                assert answer(ticket) == [False]
        wrong = Credentials(password="closed-sesame")
        with patient(arena, server.url, NAMESPACE, credentials=wrong) as tier:
            for _ in range(4):
                ticket = tier.put(blocks(1), [0])
                assert answer(ticket) == [False]
                assert "sesame" not in str(ticket.error)
        right = Credentials(password="open-sesame")
        with patient(arena, server.url, NAMESPACE, credentials=right) as tier:
            assert answer(tier.put(blocks(1), [0])) == [True]
        assert "sesame" not in repr(right)
        assert "sesame" not in caplog.text
        assert "127.0.0.1" in caplog.text


def test_a_server_that_repeats_the_password_does_not_show_it(
    tmp_path: Path, arena: HostArena, caplog: pytest.LogCaptureFixture
) -> None:
    """So does one whose command AUTH has another name, and many a proxy."""
    credentials = Credentials("a-user", "open-sesame")
    with Server(tmp_path, "--rename-command", "AUTH", "LOGIN") as server:
        errors = []
        for given in (Credentials("a-user"), credentials):
            with patient(arena, server.url, NAMESPACE, credentials=given) as tier:
                errors += [answered(tier.put(blocks(1), [0])).error for _ in range(3)]
        assert all("unknown command" in str(error) for error in errors)
        with pytest.raises(TransferError, match="unknown command") as raised:
            count_blocks(server.url, credentials=credentials)
    for each in (*errors, raised.value):
        assert "sesame" not in "".join(traceback.format_exception(each))
    assert "sesame" not in caplog.text


def test_a_full_server_refuses_and_goes_on(tmp_path: Path, arena: HostArena) -> None:
    fill(arena, range(64))
    options = ("--maxmemory", "1mb", "--maxmemory-policy", "noeviction")
    with Server(tmp_path, *options) as server, patient(arena, server.url, NAMESPACE) as tier:
        ticket = tier.put(blocks(*range(64)), range(64))
        assert not all(answer(ticket))
        assert "OOM" in str(ticket.error)
        assert answer(tier.contains(blocks(100))) == [False]
        assert tier.contains(blocks(100)).error is None


def test_a_closed_tier_takes_nothing(server: Server, arena: HostArena) -> None:
    tier = patient(arena, server.url, NAMESPACE)
    tier.close()
    tier.close()
    with pytest.raises(StateError, match="closed"):
        tier.put(blocks(1), [0])


def test_a_new_namespace_finds_nothing_of_before(tmp_path: Path, arena: HostArena) -> None:
    rows = fill(arena, range(4))
    with Server(tmp_path) as server, patient(arena, server.url, NAMESPACE) as tier:
        assert answer(tier.put(blocks(1), [0])) == [True]
        server.pause()
        under_way = tier.put(blocks(2), [1])
        tier.rename(bytes(16))
        server.resume()
        assert answer(under_way) == [True]
        assert answer(tier.contains(blocks(1, 2))) == [False, False]
        assert answer(tier.get(blocks(1, 2), [4, 5])) == [False, False]
        assert answer(tier.put(blocks(1), [2])) == [True]
        assert answer(tier.get(blocks(1), [6])) == [True]
        assert (arena.slots[6] == rows[2]).all()
        tier.rename(NAMESPACE)
        assert answer(tier.get(blocks(1, 2), [4, 5])) == [True, True]
        assert (arena.slots[4:6] == rows[:2]).all()
        with pytest.raises(ConfigError, match="expected 16 bytes"):
            tier.rename(b"short")


def test_job_that_waits_keeps_the_namespace_in_which_it_began(
    tier: RespTier, arena: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    carry_out, may_begin = _Connections.carry_out, threading.Event()

    def held(it: _Connections, job: Job, part: range) -> None:
        assert may_begin.wait(LONG_S)
        carry_out(it, job, part)

    monkeypatch.setattr(_Connections, "carry_out", held)
    fill(arena, range(2))
    for begin in (tier.put, tier.get):
        may_begin.clear()
        tier.rename(NAMESPACE)
        ticket = begin(blocks(0, 1), range(2))
        tier.rename(bytes(16))
        may_begin.set()
        assert answer(ticket) == [True] * 2
        assert answer(tier.get(blocks(0, 1), range(2, 4))) == [False] * 2
