"""Clusters and Sentinels that hang, fail, or name other servers than before."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from tests.tiers.resp.simulated import Simulated, Words, array, bulk, refuses, sentinel_of, slots_of
from tests.tiers.resp.small import BLOCKS, ended, get, key_of, opened, put
from tests.tiers.setup import LONG_S

from kvstow.tiers.resp import nodes
from kvstow.tiers.resp.address import Node
from kvstow.transfer import HostArena

ALL_SLOTS = range(16384)
_NO_HOST = b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$64\r\n" + b"a" * 64 + b"\r\n:1\r\n"
_NO_NAME = b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$3\r\na\nb\r\n:1\r\n"
_NO_PORT = b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$1\r\na\r\n:65536\r\n"
_TOO_MANY_RANGES = b"*16385\r\n" + 16385 * b"*3\r\n:0\r\n:0\r\n*2\r\n$1\r\na\r\n:1\r\n"
_TOO_MANY = b"*1\r\n*3\r\n:0\r\n:16384\r\n*2\r\n$1\r\na\r\n:1\r\n"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def _asks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a cluster or Sentinel be asked again without a pause."""
    monkeypatch.setattr(nodes, "_ASK_AGAIN_S", 0.0)


@pytest.fixture
def _asks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a cluster or Sentinel be asked again only after this test."""
    monkeypatch.setattr(nodes, "_ASK_AGAIN_S", 1000.0)


def hung(stack: ExitStack) -> Simulated:
    """Return a server that takes connections and says nothing."""
    release = threading.Event()

    def wait(*_: object) -> None:
        release.wait(LONG_S)

    server = stack.enter_context(Simulated(wait))
    stack.callback(release.set)
    return server


def sentinel_url(*ports: int) -> str:
    return ",".join(f"redis+sentinel://127.0.0.1:{port}/kv" for port in ports)


def cluster_of(stack: ExitStack, *owned: range) -> list[Simulated]:
    """Return the servers of a cluster, each with a range of slots."""
    servers = [stack.enter_context(Simulated()) for _ in owned]
    answer = slots_of(*zip(owned, servers, strict=True))
    for server in servers:
        server.override = lambda words, _: answer if words[0] == b"CLUSTER" else None
    return servers


def refuse(server: Simulated, names: list[bytes], line: bytes) -> None:
    """Refuse some commands from now on, and answer the others as before."""
    before, refused = server.override, refuses(names, line)
    server.override = lambda words, by: refused(words, by) or before(words, by)


# -- Sentinel ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("_asks_at_once")
def test_a_sentinel_that_hangs_has_its_share_of_the_time_once(
    small_arena: HostArena, stack: ExitStack
) -> None:
    master, first = stack.enter_context(Simulated()), hung(stack)
    sentinel = stack.enter_context(sentinel_of(lambda: master))
    with opened(small_arena, sentinel_url(first.port, sentinel.port), timeout_s=1.0) as tier:
        for num_asked in (1, 2):
            tier.nodes.doubt()
            assert put(tier).ok.all(), "half of the time was left for the other one"
            assert sentinel.asked[b"SENTINEL"] == num_asked
            assert first.num_connections == 1, "the one that answered is asked first"


def test_a_master_that_is_named_after_the_deadline_serves_the_next_call(
    small_arena: HostArena, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    master = stack.enter_context(Simulated())
    sentinel = stack.enter_context(sentinel_of(lambda: master))
    answer = sentinel.override

    def slowly(words: Words, connection: socket.socket) -> bytes | None:
        time.sleep(0.1)
        return answer(words, connection)

    sentinel.override = slowly
    with opened(small_arena, sentinel_url(sentinel.port)) as tier:
        assert ended(tier.contains(BLOCKS, deadline=time.monotonic() + 0.05)).is_late
        assert ended(tier.contains(BLOCKS)).error is None
        assert sentinel.asked[b"SENTINEL"] == 1
    assert not caplog.records


def test_sentinels_that_all_hang_are_left_alone(
    small_arena: HostArena, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    url = sentinel_url(hung(stack).port, hung(stack).port)
    with opened(small_arena, url, timeout_s=0.3) as tier:
        for _ in range(3):
            assert "no Sentinel has named the master 'kv' (TimeoutError)" in str(put(tier).error)
        assert "left alone" in str(put(tier).error)
    assert len(caplog.records) == 1


def test_close_does_not_wait_for_each_of_several_sentinels(
    small_arena: HostArena, stack: ExitStack
) -> None:
    sentinels = [hung(stack) for _ in range(8)]
    tier = opened(small_arena, sentinel_url(*(one.port for one in sentinels)), timeout_s=0.5)
    ticket = tier.get(BLOCKS, range(16, 32))
    tier.close()
    ended(ticket)
    assert sum(one.num_connections for one in sentinels) < 5, "0.25 s for each, within 0.5 s"


@pytest.mark.usefixtures("_asks_at_once")
@pytest.mark.parametrize("code", [b"READONLY", b"MASTERDOWN"])
def test_a_master_that_refuses_leads_to_the_next_one(
    small_arena: HostArena, stack: ExitStack, code: bytes
) -> None:
    first, second = (stack.enter_context(Simulated()) for _ in range(2))
    present = first
    sentinel = stack.enter_context(sentinel_of(lambda: present))
    with opened(small_arena, sentinel_url(sentinel.port)) as tier:
        assert put(tier).ok.all()
        refuse(first, [b"SET"], code)
        present = second
        assert not put(tier).ok.any()
        assert put(tier).ok.all()
        assert len(second.values) == 16


@pytest.mark.usefixtures("_asks_at_once")
def test_a_master_that_closes_its_connections_leads_to_the_next_one(
    small_arena: HostArena, stack: ExitStack
) -> None:
    """A master that becomes a replica does so. Its blocks may be old ones."""
    first, second = (stack.enter_context(Simulated()) for _ in range(2))
    present = first
    sentinel = stack.enter_context(sentinel_of(lambda: present))
    with opened(small_arena, sentinel_url(sentinel.port)) as tier:
        assert put(tier).ok.all()
        assert get(tier).ok.all()
        second.values |= first.values
        present = second
        first.hang_up()
        time.sleep(0.02)  # the end arrives
        assert get(tier).ok.all()
        assert second.asked[b"GET"] == 16


@pytest.mark.usefixtures("_asks_at_once")
def test_nothing_is_kept_of_masters_that_are_gone(small_arena: HostArena, stack: ExitStack) -> None:
    masters = [stack.enter_context(Simulated()) for _ in range(3)]
    named = list(masters)
    sentinel = stack.enter_context(sentinel_of(lambda: named[0]))
    with opened(small_arena, sentinel_url(sentinel.port)) as tier:
        for _ in masters:
            tier.nodes.doubt()
            assert put(tier).ok.all()
            assert get(tier).ok.all()
            named.pop(0)
        until_s = time.monotonic() + LONG_S
        while any(master.open for master in masters[:2]):
            assert time.monotonic() < until_s, "a connection stays open"
            time.sleep(0.01)
        last = Node("127.0.0.1", masters[2].port)
        assert {node for node, _ in tier.health._breakers} == {None, last}
        assert tier.health._known == {last}


@pytest.mark.usefixtures("_asks_at_once")
def test_the_master_stays_if_no_sentinel_answers(small_arena: HostArena, stack: ExitStack) -> None:
    master = stack.enter_context(Simulated())
    sentinel = stack.enter_context(sentinel_of(lambda: master))
    with opened(small_arena, sentinel_url(sentinel.port)) as tier:
        assert put(tier).ok.all()
        sentinel.close()
        for _ in range(5):
            tier.nodes.doubt()
            assert put(tier).ok.all()


@pytest.mark.usefixtures("_asks_at_once")
def test_a_sentinel_that_answers_again_is_believed(
    small_arena: HostArena, stack: ExitStack
) -> None:
    first, second = (stack.enter_context(Simulated()) for _ in range(2))
    present = first
    sentinel = stack.enter_context(sentinel_of(lambda: present))
    with opened(small_arena, sentinel_url(sentinel.port)) as tier:
        assert put(tier).ok.all()
        answer, present = sentinel.override, second
        sentinel.override = lambda *_: b"-LOADING\r\n"
        tier.nodes.doubt()
        assert put(tier).ok.all()
        sentinel.override = answer
        assert put(tier).ok.all()
        assert len(second.values) == 16


@pytest.mark.parametrize("flag", [b"s_down", b"o_down", b"slave"])
def test_a_master_that_is_down_is_not_used(
    small_arena: HostArena, stack: ExitStack, flag: bytes
) -> None:
    down, up = (stack.enter_context(Simulated()) for _ in range(2))
    flags = b"slave" if flag == b"slave" else b"master," + flag
    sentinels = sentinel_of(lambda: down, flags), sentinel_of(lambda: up)
    url = sentinel_url(*(stack.enter_context(sentinel).port for sentinel in sentinels))
    with opened(small_arena, url) as tier:
        assert put(tier).ok.all()
    assert (len(down.values), len(up.values)) == (0, 16)


# -- a cluster ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("_asks_once")
def test_a_cluster_that_is_down_is_left_alone(
    small_arena: HostArena, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    [server] = cluster_of(stack, ALL_SLOTS)
    with opened(small_arena, f"redis+cluster://127.0.0.1:{server.port}") as tier:
        refuse(server, [b"EXISTS"], b"CLUSTERDOWN The cluster is down")
        for _ in range(3):
            assert "refused: CLUSTERDOWN" in str(ended(tier.contains(BLOCKS)).error)
        assert "left alone" in str(ended(tier.contains(BLOCKS)).error)
        assert server.asked[b"CLUSTER"] == 1, "it is asked again after some time"
    assert len(caplog.records) == 1


def test_a_slot_that_moves_costs_no_connection(small_arena: HostArena, stack: ExitStack) -> None:
    [server] = cluster_of(stack, ALL_SLOTS)
    answer = server.override

    def ask_for_one(words: Words, connection: socket.socket) -> bytes | None:
        if words[0] == b"GET" and words[1] == key_of(5):
            return b"-ASK 7 127.0.0.1:1\r\n"
        return answer(words, connection)

    server.override = ask_for_one
    with opened(small_arena, f"redis+cluster://127.0.0.1:{server.port}") as tier:
        assert put(tier).ok.all()
        for _ in range(5):
            assert get(tier).ok.tolist() == [number != 5 for number in range(16)]
        assert server.num_connections == 3, "one for the slots, and one for each thread"


@pytest.mark.usefixtures("_asks_at_once")
def test_a_slot_that_has_moved_is_found(small_arena: HostArena, stack: ExitStack) -> None:
    old, new = (stack.enter_context(Simulated()) for _ in range(2))
    owner = old

    def slots(words: Words, _: socket.socket) -> bytes | None:
        return slots_of((ALL_SLOTS, owner)) if words[0] == b"CLUSTER" else None

    old.override = new.override = slots
    with opened(small_arena, f"redis+cluster://127.0.0.1:{old.port}") as tier:
        assert put(tier).ok.all()
        refuse(old, [b"SET"], b"MOVED 7 127.0.0.1:%d" % new.port)
        owner = new
        assert not put(tier).ok.any()
        assert put(tier).ok.all()
        assert len(new.values) == 16


@pytest.mark.usefixtures("_asks_at_once")
def test_a_server_of_the_url_that_learns_of_no_move_is_not_asked_alone(
    small_arena: HostArena, stack: ExitStack
) -> None:
    """The others may not reach it, or it has not heard of the move yet."""
    named, old, new = (stack.enter_context(Simulated()) for _ in range(3))
    owners = {named.port: old, old.port: new, new.port: new}

    def slots(words: Words, connection: socket.socket) -> bytes | None:
        owner = owners[connection.getsockname()[1]]
        return slots_of((ALL_SLOTS, owner)) if words[0] == b"CLUSTER" else None

    named.override = old.override = new.override = slots
    refuse(old, [b"SET"], b"MOVED 7 127.0.0.1:%d" % new.port)
    with opened(small_arena, f"redis+cluster://127.0.0.1:{named.port}") as tier:
        assert not put(tier).ok.any()
        assert put(tier).ok.all()
        assert len(new.values) == 16


@pytest.mark.usefixtures("_asks_at_once")
@pytest.mark.parametrize("is_alone", [False, True])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_server_that_is_cut_off_from_its_cluster_is_asked_last(
    small_arena: HostArena, stack: ExitStack, host: str, *, is_alone: bool
) -> None:
    """It still names itself, although the others have given its slots to its replica."""
    cut_off, other = cluster_of(stack, range(8192), range(8192, 16384))
    new = stack.enter_context(Simulated())
    answer = slots_of((range(8192), new), (range(8192, 16384), other))
    url = f"redis+cluster://{host}:{cut_off.port}"
    with opened(small_arena, url if is_alone else f"{url},127.0.0.1:{other.port}") as tier:
        assert put(tier).ok.all()
        refuse(cut_off, [b"SET"], b"CLUSTERDOWN The cluster is down")
        other.override = lambda words, _: answer if words[0] == b"CLUSTER" else None
        assert not put(tier).ok.all()
        assert put(tier).ok.all()
        assert tier.nodes._sources[0].port == (cut_off if is_alone else other).port


@pytest.mark.usefixtures("_asks_at_once")
def test_the_other_servers_are_asked_if_those_of_the_url_are_gone(
    small_arena: HostArena, stack: ExitStack
) -> None:
    named, other = cluster_of(stack, range(8192), range(8192, 16384))
    with opened(small_arena, f"redis+cluster://127.0.0.1:{named.port}") as tier:
        assert put(tier).ok.all()
        answer = slots_of((ALL_SLOTS, other))
        other.override = lambda words, _: answer if words[0] == b"CLUSTER" else None
        named.close()
        put(tier)
        assert put(tier).ok.all()
        assert tier.nodes._sources[0].port == named.port, "it is asked first once it is back"


@pytest.mark.parametrize(
    ("host", "facts"),
    [
        (bulk(b"?"), array(bulk(b"hostname"), bulk(b"x"), bulk(b"ip"), bulk(b"127.0.0.1"))),
        (bulk(b"?"), array()),
        (b"$-1\r\n", array(bulk(b"ip"), bulk(b"192.0.2.1"))),
        (bulk(b""), array()),
        (bulk(b""), None),
    ],
    ids=["named by its address", "not named at all", "NULL", "empty", "empty, of Redis 3"],
)
def test_a_server_of_a_cluster_without_a_hostname_is_found(
    small_arena: HostArena, stack: ExitStack, host: bytes, facts: bytes | None
) -> None:
    """Its host is "?" if the cluster prefers hostnames, and NULL if it prefers none."""
    server = stack.enter_context(Simulated())
    more = () if facts is None else (bulk(b"id"), facts)
    named = array(host, b":%d\r\n" % server.port, *more)
    answer = array(array(b":0\r\n", b":16383\r\n", named))
    server.override = lambda words, _: answer if words[0] == b"CLUSTER" else None
    with opened(small_arena, f"redis+cluster://127.0.0.1:{server.port}") as tier:
        assert put(tier).ok.all()


def test_keys_of_slots_that_no_server_has_fail_alone(
    small_arena: HostArena, stack: ExitStack
) -> None:
    [server] = cluster_of(stack, range(8192))
    with opened(small_arena, f"redis+cluster://127.0.0.1:{server.port}") as tier:
        kept = put(tier)
        num_kept = int(kept.ok.sum())
        assert 0 < num_kept < 16
        assert len(server.values) == num_kept
        assert f"has the slots of {16 - num_kept} blocks" in str(kept.error)
        assert (get(tier).ok == kept.ok).all()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"*0\r\n", "the cluster has given no slot to a server"),
        (b"$-1\r\n", "expected a list of servers, got None"),
        (b"*1\r\n*2\r\n:0\r\n:5\r\n", "expected a list of servers"),
        (_TOO_MANY, "expected a list of servers"),
        (_NO_HOST, "its name cannot be looked up"),
        (_NO_NAME, "expected a list of servers"),
        (_NO_PORT, "expected a list of servers"),
        (_TOO_MANY_RANGES, "expected a list of servers"),
        (b"*9999999\r\n", "an answer has 9999999 parts"),
        (b"*99\r\n" + 9 * bulk(bytes(1 << 20)), "an answer has more than 8388608 bytes"),
        (b"*1\r\n" * 9 + b":1\r\n", "expected an answer"),
        (b"-NOPERM no permissions\r\n", "the access list refused a command"),
    ],
)
def test_a_wrong_list_of_servers_is_an_error(
    small_arena: HostArena, stack: ExitStack, answer: bytes, message: str
) -> None:
    server = stack.enter_context(Simulated())
    server.override = lambda words, _: answer if words[0] == b"CLUSTER" else None
    with opened(small_arena, f"redis+cluster://127.0.0.1:{server.port}", timeout_s=LONG_S) as tier:
        ticket = put(tier)
        assert not ticket.ok.any()
        assert message in str(ticket.error)
