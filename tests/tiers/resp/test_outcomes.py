"""What errors, refusals and slow answers of one server mean for connections and for later calls."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.tiers.resp.simulated import Simulated, Words, bulk, refuses
from tests.tiers.resp.small import BLOCKS, NUM_BLOCKS, NUM_SLOTS, ended, get, key_of, opened, put
from tests.tiers.setup import LONG_S

from kvstow._core import row_digests
from kvstow.tiers import breaker, queued
from kvstow.tiers.namespace import Namespace
from kvstow.tiers.resp import Credentials, commands
from kvstow.tiers.resp import tier as resp_tier
from kvstow.tiers.resp.login import log_in_within
from kvstow.transfer import HostArena


@pytest.fixture
def server() -> Iterator[Simulated]:
    with Simulated() as server:
        yield server


def test_a_connection_that_comes_after_the_deadline_serves_the_next_call(
    small_arena: HostArena, server: Simulated, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise no call is ever answered: connecting takes longer than each of them may."""

    def slowly(words: Words, _: socket.socket) -> None:
        if words[0] == b"QUESTION":
            time.sleep(0.1)

    server.override = slowly
    with opened(small_arena, server.url) as tier:
        assert ended(tier.contains(BLOCKS, deadline=time.monotonic() + 0.05)).is_late
        assert ended(tier.contains(BLOCKS)).error is None
        assert server.num_connections == 1
    assert not caplog.records


def test_a_login_whose_answer_drips_in_is_given_up(
    small_arena: HostArena, server: Simulated
) -> None:
    """Otherwise the job never ends, and its host slots stay reserved."""

    def drip(_: Words, connection: socket.socket) -> None:
        while True:
            connection.sendall(b"+")
            time.sleep(0.01)

    server.override = drip
    with opened(small_arena, server.url, timeout_s=0.05) as tier:
        ticket = tier.get(BLOCKS, range(NUM_BLOCKS, NUM_SLOTS))
        ended(ticket)
        assert "Timeout" in str(ticket.error)


@pytest.mark.parametrize("answer", [b"$abc\r\n", b"$99999999999999999999\r\n", b"*1\r\n" * 9999])
def test_a_login_that_another_server_answers_is_an_error(
    small_arena: HostArena,
    server: Simulated,
    answer: bytes,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server.override = lambda *_: answer
    with opened(small_arena, server.url, timeout_s=0.5) as tier:
        assert get(tier).error is not None
    assert "please report this" not in caplog.text, "kvstow does not expect this error"


@pytest.mark.parametrize(
    ("answer", "shown"), [(b">2\r\n", "got '>2'"), (b"a prompt \0\r\n", "got bytes that are no")]
)
def test_the_error_of_a_wrong_answer_shows_no_bytes_of_a_block(
    small_arena: HostArena, server: Simulated, answer: bytes, shown: str
) -> None:
    """After a value that is longer than the server said, they are where an answer should be."""
    server.override = lambda words, _: answer if words[0] == b"GET" else None
    with opened(small_arena, server.url) as tier:
        error = str(get(tier).error)
    assert shown in error
    assert "prompt" not in error


def test_a_proxy_that_knows_only_the_commands_for_blocks_serves(
    small_arena: HostArena, server: Simulated
) -> None:
    """Such as twemproxy, which closes the connection at each other command."""
    known = (b"QUESTION", b"AUTH", b"GET", b"SET", b"EXISTS", b"DEL")
    server.override = lambda words, _: None if words[0] in known else b""
    with opened(small_arena, server.url, credentials=Credentials(password="open-sesame")) as tier:
        assert "closed the connection" in str(put(tier).error), "it does not say its policy"
        assert put(tier).ok.all()
        assert get(tier).ok.all()
    unknown = server.asked.keys() - set(known)
    assert unknown == {b"INFO"}


@pytest.mark.parametrize("answer", [b"-NOPERM", b"-LOADING", b"-MOVED 7 a:1", b"-ERR", b"+OK"])
def test_each_answer_to_the_question_of_a_login_will_do(
    small_arena: HostArena, server: Simulated, answer: bytes
) -> None:
    server.override = lambda words, _: answer + b"\r\n" if words[0] == b"QUESTION" else None
    with opened(small_arena, server.url) as tier:
        assert put(tier).ok.all()
        assert server.num_connections == 1


def test_hiredis_gives_up_such_a_login_too() -> None:
    """It reads by another call of the socket than redis-py itself."""
    drips = SimpleNamespace(recv_into=len, settimeout=lambda _: None)

    def on_connect() -> None:
        for _ in range(1_000_000):
            connection._sock.recv_into(b"+")

    connection = SimpleNamespace(
        _sock=drips, on_connect=on_connect, disconnect=list, credential_provider=None
    )
    with pytest.raises(TimeoutError):
        log_in_within(0.001, None, ())(connection)
    assert connection._sock is drips


def test_a_login_with_an_endless_answer_takes_no_memory() -> None:
    endless = SimpleNamespace(recv=bytes, settimeout=lambda _: None)

    def on_connect() -> None:
        for num_received in range(100):
            connection._sock.recv(4096)
            assert num_received < 16

    connection = SimpleNamespace(_sock=endless, on_connect=on_connect, credential_provider=None)
    with pytest.raises(ValueError, match="more than 64 KiB"):
        log_in_within(LONG_S, None, ())(connection)


def test_the_text_of_a_server_cannot_forge_a_line_of_the_log(
    small_arena: HostArena, server: Simulated, caplog: pytest.LogCaptureFixture
) -> None:
    policy = bulk(b"maxmemory:1\r\nmaxmemory_policy:volatile-\nCRITICAL a\x1b[2J\r\n")
    refusal = b"-ERR\nCRITICAL b\x1b[2J" + b"x" * 3000 + b"\r\n"
    server.override = lambda words, _: {b"INFO": policy, b"SET": refusal}.get(words[0])
    with opened(small_arena, server.url) as tier:
        messages = [str(put(tier).error) for _ in range(3)]
    messages += [record.getMessage() for record in caplog.records]
    assert len(messages) == 5, "two are warnings"
    for message in messages:
        assert r"\nCRITICAL" in message
        assert message.isprintable()
        assert len(message) < 600


def test_a_bound_of_memory_that_is_no_number_is_no_bound(
    small_arena: HostArena, server: Simulated, caplog: pytest.LogCaptureFixture
) -> None:
    text = b"maxmemory:" + b"9" * 5000 + b"\r\nmaxmemory_policy:noeviction\r\n"
    server.override = lambda words, _: bulk(text) if words[0] == b"INFO" else None
    with opened(small_arena, server.url) as tier:
        assert put(tier).ok.all()
    assert not caplog.records


@pytest.mark.parametrize("code", [b"NOREPLICAS", b"MISCONF", b"READONLY", b"NOPERM"])
def test_a_server_that_refuses_puts_serves_reads(
    small_arena: HostArena, server: Simulated, caplog: pytest.LogCaptureFixture, code: bytes
) -> None:
    with opened(small_arena, server.url) as tier:
        assert put(tier).ok.all()
        server.override = refuses([b"SET"], code + b" no writes now")
        for _ in range(3):
            assert not put(tier).ok.any()
            assert get(tier).ok.all()
        assert "left alone" in str(put(tier).error)
        assert get(tier).ok.all()
    (record,) = caplog.records
    assert "takes no puts (" in record.getMessage()


def test_a_server_that_answers_questions_and_sends_no_block_is_left_alone(
    small_arena: HostArena, server: Simulated, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise each request waits for blocks that never come: a network drops large packets."""
    with opened(small_arena, server.url) as tier:
        assert put(tier).ok.all()
        server.override = lambda words, _: b"" if words[0] == b"GET" else None
        for _ in range(3):
            assert ended(tier.contains(BLOCKS)).ok.all()
            assert "closed" in str(get(tier).error)
        assert ended(tier.contains(BLOCKS)).ok.all()
        assert "left alone" in str(get(tier).error)
        assert put(tier).ok.all()
    (record,) = caplog.records
    assert "fails (the server closed the connection)" in record.getMessage()


def test_the_log_says_when_a_server_takes_puts_again(
    small_arena: HostArena,
    server: Simulated,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(breaker, "FIRST_PAUSE_S", 0.01)
    server.override = refuses([b"SET"], b"READONLY a replica")
    with opened(small_arena, server.url) as tier:
        for _ in range(3):
            assert not put(tier).ok.any()
        server.override = refuses([], b"")
        time.sleep(0.02)
        assert put(tier).ok.all()
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "takes puts again" in caplog.records[1].getMessage()


def test_a_server_that_flaps_does_not_fill_the_log(
    small_arena: HostArena,
    server: Simulated,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(breaker, "FIRST_PAUSE_S", 0.0)
    with opened(small_arena, server.url) as tier:
        for num_times in (7, 1):
            for _ in range(num_times):
                server.override = refuses([b"SET"], b"READONLY a replica")
                for _ in range(3):
                    assert not put(tier).ok.any()
                server.override = refuses([], b"")
                assert put(tier).ok.all()
            monkeypatch.setattr(breaker, "LOG_EVERY_S", 0.0)
    texts = [record.getMessage() for record in caplog.records]
    assert ["takes no puts (READONLY a replica)" in text for text in texts] == [True, *3 * [False]]
    assert ["takes puts again" in text for text in texts] == [False, True, False, True]
    assert "(READONLY a replica; 7 times since the last such warning)" in texts[2]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (b"OOM", "OOM"),
        (b"WRONGTYPE", "WRONGTYPE"),
        (b"ASK", "ASK"),
        (b"TRYAGAIN", "TRYAGAIN"),
        (b"MOVED", "it belongs to a cluster, and has only a part of the keys: begin the URL with"),
    ],
)
def test_a_server_that_refuses_single_keys_is_not_left_alone(
    small_arena: HostArena,
    server: Simulated,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    code: bytes,
    reason: str,
) -> None:
    """Such a refusal also ends the pause of a server that failed before."""
    monkeypatch.setattr(breaker, "FIRST_PAUSE_S", 0.01)
    with opened(small_arena, server.url) as tier:
        server.override = lambda words, _: b"" if words[0] == b"SET" else None
        for _ in range(3):
            assert not put(tier).ok.any()
        assert "takes no puts" in caplog.text
        server.override = refuses([b"SET"], code + b" 1 here:1")
        num_before = server.num_connections
        time.sleep(0.02)
        for _ in range(5):
            ticket = put(tier)
            assert f"refused: {reason}" in str(ticket.error)
        assert caplog.text.count(f"lacks blocks ({reason}") == (code == b"MOVED")
        assert server.num_connections == num_before + 1, "the connection is still good"


@pytest.mark.parametrize("code", [b"NOAUTH", b"READONLY", b"MASTERDOWN", b"LOADING"])
def test_another_refusal_renews_the_connection(
    small_arena: HostArena, server: Simulated, code: bytes
) -> None:
    """The name of the server may lead to another one now, or the login counts no more."""
    with opened(small_arena, server.url) as tier:
        assert put(tier).ok.all()
        [old] = server.open

        def refused_on_old(words: Words, connection: socket.socket) -> bytes | None:
            return b"-%s\r\n" % code if connection is old and words[0] == b"SET" else None

        server.override = refused_on_old
        assert not put(tier).ok.any()
        assert put(tier).ok.all()
        assert server.num_connections == 2


@pytest.mark.parametrize("are_compared", [True, False])
def test_blocks_that_were_proven_before_a_cut_count(
    small_arena: HostArena,
    server: Simulated,
    monkeypatch: pytest.MonkeyPatch,
    *,
    are_compared: bool,
) -> None:
    with opened(small_arena, server.url) as tier:
        assert put(tier).ok.all()
        value = server.values[key_of(3)]
        server.values[key_of(3)] = value[:-1] + bytes([value[-1] ^ 1])
        if not are_compared:  # the control: a wrong block counts, too
            monkeypatch.setattr(Namespace, "checksum", lambda *_: 0)
            monkeypatch.setattr(
                "kvstow.tiers.resp.commands.row_digests",
                lambda _, ids: np.zeros(len(ids), np.uint64),
            )
        before = server.asked[b"GET"]
        server.override = lambda *_: b"" if server.asked[b"GET"] == before + 11 else None
        ticket = get(tier)
        assert "closed the connection" in str(ticket.error)
        expected = [number < 10 and (number != 3 or not are_compared) for number in range(16)]
        assert ticket.ok.tolist() == expected
        are_equal = (small_arena.slots[16:26] == small_arena.slots[:10]).all(axis=1)
        assert are_equal[ticket.ok[:10]].all() == are_compared
        assert tier.stats().mismatched_blocks == are_compared


def test_a_block_that_a_cut_ends_in_the_middle_is_a_miss(
    small_arena: HostArena, server: Simulated
) -> None:
    """Torn: the host slot has the first part of the block, and the rest of another one."""

    def cut(words: Words, connection: socket.socket) -> bytes | None:
        if words != [b"GET", key_of(3)]:
            return None
        connection.sendall(bulk(server.values[key_of(3)])[:-100])
        return b""

    with opened(small_arena, server.url) as tier:
        assert put(tier).ok.all()
        server.override = cut
        assert get(tier).ok.tolist() == [number < 3 for number in range(16)]


def test_a_block_whose_checksum_cannot_be_taken_is_a_miss(
    small_arena: HostArena, server: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [None] * 3

    def fails_fourth(rows: Any, ids: Any) -> Any:
        if not left:
            raise MemoryError
        left.pop()
        return row_digests(rows, ids)

    with opened(small_arena, server.url) as tier:
        assert put(tier).ok.all()
        monkeypatch.setattr("kvstow.tiers.resp.commands.row_digests", fails_fourth)
        assert get(tier).ok.tolist() == [number < 3 for number in range(16)]


def test_a_cut_while_wrong_blocks_are_deleted_loses_no_other_block(
    small_arena: HostArena, server: Simulated
) -> None:
    with opened(small_arena, server.url) as tier:
        assert put(tier).ok.all()
        server.values[key_of(3)] = b"short"
        server.override = lambda words, _: b"" if words[0] == b"DEL" else None
        assert get(tier).ok.tolist() == [number != 3 for number in range(16)]
        assert tier.stats().mismatched_blocks == 1


def test_blocks_that_were_kept_before_a_cut_count(
    small_arena: HostArena, server: Simulated
) -> None:
    with opened(small_arena, server.url) as tier:
        server.override = lambda *_: b"" if server.asked[b"SET"] == 6 else None
        ticket = put(tier)
        assert ticket.ok.tolist() == [number < 5 for number in range(16)]
        assert len(server.values) == 5


# -- several servers ---------------------------------------------------------------------------


@pytest.fixture
def pair(server: Simulated) -> Iterator[tuple[Simulated, Simulated]]:
    with Simulated() as other:
        yield server, other


def url_of(pair: tuple[Simulated, Simulated]) -> str:
    return ",".join(server.url for server in pair)


@pytest.mark.parametrize("command", [b"EXISTS", b"GET", b"SET"])
def test_servers_are_asked_at_once(
    small_arena: HostArena, pair: tuple[Simulated, Simulated], command: bytes
) -> None:
    """Each answers only once the other has been asked too."""
    both = threading.Barrier(2, timeout=LONG_S / 2)
    with opened(small_arena, url_of(pair)) as tier:
        assert put(tier).ok.all()
        for server in pair:
            assert server.values, "each server has a part of the keys"
            before = server.asked[command]

            def meet(
                words: Words, _: socket.socket, server: Simulated = server, before: int = before
            ) -> None:
                if words[0] == command and server.asked[command] == before + 1:
                    both.wait()

            server.override = meet
        calls = {b"EXISTS": lambda: ended(tier.contains(BLOCKS)), b"GET": lambda: get(tier)}
        ticket = calls.get(command, lambda: put(tier))()
        assert ticket.ok.all(), ticket.error
    assert (small_arena.slots[16:] == small_arena.slots[:16]).all() == (command == b"GET")


def test_blocks_that_have_arrived_in_time_count(
    small_arena: HostArena, server: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a job that is too long for the network brings nothing, however often it begins."""
    monkeypatch.setattr(queued, "_OF_DEADLINE", 0.01)  # the machine gets time to end the job
    release = threading.Event()
    with opened(small_arena, server.url) as tier:
        assert put(tier).ok.all()

        def hang(words: Words, _: socket.socket) -> None:
            if words[1:] == [key_of(5)]:
                release.wait(LONG_S)

        server.override = hang
        deadline = time.monotonic() + LONG_S
        ticket = ended(tier.get(BLOCKS, range(NUM_BLOCKS, NUM_SLOTS), deadline=deadline))
        release.set()
    assert not ticket.is_late
    assert np.flatnonzero(ticket.ok).tolist() == list(range(5))
    assert (small_arena.slots[16:21] == small_arena.slots[:5]).all()


def test_a_server_that_hangs_costs_the_other_neither_blocks_nor_a_connection(
    small_arena: HostArena,
    pair: tuple[Simulated, Simulated],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(queued, "_OF_DEADLINE", 0.01)  # the machine gets time to end the job
    with opened(small_arena, url_of(pair)) as tier:
        assert put(tier).ok.all()
        assert ended(tier.contains(BLOCKS)).ok.all()
        # The one that is asked first.
        hung, other = sorted(pair, key=lambda server: key_of(0) not in server.values)
        num_others, num_before = len(other.values), other.num_connections
        release, num_tried = threading.Event(), [0]

        def wait(*_: object) -> None:
            release.wait(LONG_S)

        def note(*_: object) -> None:
            num_tried[0] = hung.num_connections

        hung.override, other.override = wait, note
        for num_asked in range(2, 5):
            num_tried_before = hung.num_connections
            ticket = ended(tier.contains(BLOCKS, deadline=time.monotonic() + LONG_S))
            assert ticket.ok.sum() == num_others
            assert str(hung.port) in str(ticket.error)
            assert other.asked[b"EXISTS"] == num_asked * num_others
            assert num_tried[0] == num_tried_before, "it answers before the other is tried again"
        ticket = ended(tier.contains(BLOCKS, deadline=time.monotonic() + LONG_S))
        assert "left alone" in str(ticket.error)
        assert ticket.ok.sum() == num_others
        assert other.num_connections == num_before
        release.set()


def test_an_unexpected_error_leaves_no_answer_for_the_next_call(
    small_arena: HostArena,
    pair: tuple[Simulated, Simulated],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One server has been asked already, and answers while nobody reads."""
    with opened(small_arena, url_of(pair)) as tier:
        assert put(tier).ok.all()
        real, num_calls = commands.get, 0

        def fails_second(*given: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            if num_calls == 2:
                raise RuntimeError("a defect")
            return real(*given)

        monkeypatch.setattr(resp_tier, "get", fails_second)
        ticket = get(tier)
        assert "the shared tier failed" in str(ticket.error)
        assert not ticket.ok.any()
        ticket = ended(tier.get(BLOCKS, range(31, 15, -1)))
        assert ticket.ok.all()
        assert (small_arena.slots[31:15:-1] == small_arena.slots[:16]).all()
    assert "please report this" in caplog.text


def test_an_answer_that_comes_too_late_is_not_that_of_the_next_call(
    small_arena: HostArena, server: Simulated, caplog: pytest.LogCaptureFixture
) -> None:
    """The time was too short to say anything of the server, so only the connection goes."""

    def slowly(words: Words, _: socket.socket) -> None:
        if words[0] == b"GET":
            time.sleep(0.05)

    with opened(small_arena, server.url) as tier:
        assert put(tier).ok.all()
        assert get(tier).ok.all()
        server.override = slowly
        for _ in range(3):
            limit_s = time.monotonic() + breaker.FAIR_S
            late = ended(tier.get(BLOCKS, range(NUM_BLOCKS, NUM_SLOTS), deadline=limit_s))
            assert not late.ok.any()
            assert ended(tier.contains(BLOCKS)).ok.all()
    assert not caplog.records


@pytest.mark.parametrize("said", [b"+QUEUED\r\n", b":7\r\n"])
def test_an_answer_of_another_kind_is_no_success(
    small_arena: HostArena, server: Simulated, said: bytes
) -> None:
    server.override = lambda words, _: None if words[0] in (b"INFO", b"QUESTION", b"GET") else said
    with opened(small_arena, server.url) as tier:
        for ticket in (put(tier), ended(tier.contains(BLOCKS)), ended(tier.delete(BLOCKS))):
            assert not ticket.ok.any()


def test_a_block_that_the_server_has_not_is_deleted(
    small_arena: HostArena, server: Simulated
) -> None:
    with opened(small_arena, server.url) as tier:
        assert ended(tier.delete(BLOCKS)).ok.all()


def test_a_server_that_hangs_has_the_time_of_a_call_and_not_that_of_the_job(
    small_arena: HostArena, server: Simulated
) -> None:
    """Otherwise each job with a far deadline holds up those behind it until then."""
    may_go_on = threading.Event()

    def hang(words: Words, _: socket.socket) -> None:
        if words[0] == b"EXISTS":
            assert may_go_on.wait(2 * LONG_S)

    server.override = hang
    with opened(small_arena, server.url, timeout_s=0.25) as tier:
        ticket = ended(tier.contains(BLOCKS, deadline=time.monotonic() + 4 * LONG_S))
        assert not ticket.ok.any() and "in time" in str(ticket.error)
    may_go_on.set()
