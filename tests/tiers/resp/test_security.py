"""`RespTier` with TLS, passwords, access lists and Sentinel: what works, and what messages say."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.tiers.resp.server import Server, free_port, num_connections, sentinel
from tests.tiers.resp.small import patient
from tests.tiers.resp.tls import Authority, TlsServer, encrypt
from tests.tiers.setup import LONG_S, answered, blocks, random_arena

from kvstow import ConfigError, TransferError
from kvstow.tiers.breaker import Breaker
from kvstow.tiers.resp import Credentials, RespTier, Security
from kvstow.tiers.resp.address import Node
from kvstow.tiers.resp.wire import Wire
from kvstow.tiers.shared_keys import count_blocks
from kvstow.transfer import HostArena

NUM_SLOTS, SLOT_BYTES = 40, 9000
NAMESPACE = bytes(range(16))
BLOCKS = blocks(*range(20))


@pytest.fixture
def arena() -> Iterator[HostArena]:
    with random_arena(NUM_SLOTS, SLOT_BYTES) as arena:
        yield arena


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


def round_trip(tier: RespTier) -> None:
    """Put blocks, and read them back into other slots."""
    ticket = answered(tier.put(BLOCKS, range(20)))
    assert ticket.ok.all(), ticket.error
    ticket = answered(tier.get(BLOCKS, range(20, 40)))
    assert ticket.ok.all(), ticket.error
    assert (tier.arena.slots[20:] == tier.arena.slots[:20]).all()
    assert answered(tier.contains(BLOCKS)).ok.all()


def test_blocks_come_back_through_tls(
    tmp_path: Path, arena: HostArena, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Server(tmp_path) as plain, TlsServer(plain.port, authority.issue("127.0.0.1")) as server:
        url, security = f"rediss://127.0.0.1:{server.port}", Security(ca_file=authority.ca_file)
        with patient(arena, url, NAMESPACE, security=security, num_threads=1) as tier:
            wires: list[Wire] = []
            connect = tier.nodes.connect

            def connect_and_count(node: Node, limit_s: float) -> Wire:
                wires.append(connect(node, limit_s))
                return wires[-1]

            monkeypatch.setattr(tier.nodes, "connect", connect_and_count)
            for _ in range(3):
                round_trip(tier)
            # A thread keeps its connection, although TLS itself has sent bytes after the handshake.
            assert len(wires) == len(tier._threads)


@pytest.mark.parametrize(
    ("host", "has_ca", "message"),
    [
        ("127.0.0.1", False, "its certificate does not verify (unable to get local issuer"),
        ("other.example", True, "its certificate does not verify (IP address mismatch"),
    ],
)
def test_a_certificate_that_does_not_verify_is_refused(
    tmp_path: Path, arena: HostArena, authority: Authority, host: str, has_ca: bool, message: str
) -> None:
    with Server(tmp_path) as plain, TlsServer(plain.port, authority.issue(host)) as server:
        security = Security(ca_file=authority.ca_file if has_ca else None)
        url = f"rediss://127.0.0.1:{server.port}"
        with patient(arena, url, NAMESPACE, security=security) as tier:
            ticket = answered(tier.put(BLOCKS, range(20)))
            assert not ticket.ok.any()
            assert f"127.0.0.1:{server.port}: {message}" in str(ticket.error)
            assert "name the file of the authority that signed it" in str(ticket.error)
        assert plain.command("DBSIZE") == b":0\r\n"


def test_a_key_that_has_a_password_now_asks_no_terminal(
    tmp_path: Path, arena: HostArena, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread would wait there for ever, and the job would keep its host slots."""
    load = ssl.SSLContext.load_cert_chain
    passwords: list[str | None] = []

    def load_and_note(
        context: ssl.SSLContext, certfile: str, keyfile: str, password: str | None = None
    ) -> None:
        passwords.append(password)
        load(context, certfile, keyfile, password or "")

    with Server(tmp_path) as plain, TlsServer(plain.port, authority.issue("127.0.0.1")) as server:
        url, files = f"rediss://127.0.0.1:{server.port}", authority.issue("a-client")
        security = Security(authority.ca_file, *files)
        with patient(arena, url, NAMESPACE, security=security) as tier:
            encrypt(files[1])
            monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", load_and_note)
            assert answered(tier.put(BLOCKS, range(20))).error is not None
    assert passwords and None not in passwords


@pytest.mark.parametrize("are_trusted", [True, False])
def test_only_the_authorities_of_ca_file_are_trusted(
    tmp_path: Path, arena: HostArena, monkeypatch: pytest.MonkeyPatch, *, are_trusted: bool
) -> None:
    """Otherwise each authority of the system may vouch for a store in a private network."""
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    of_system, own = map(Authority, folders)
    monkeypatch.setenv("SSL_CERT_FILE", of_system.ca_file)
    with Server(tmp_path) as plain, TlsServer(plain.port, of_system.issue("127.0.0.1")) as server:
        url = f"rediss://127.0.0.1:{server.port}"
        security = Security() if are_trusted else Security(own.ca_file)
        with patient(arena, url, NAMESPACE, security=security) as tier:
            error = answered(tier.put(BLOCKS, range(20))).error
            assert error is None if are_trusted else "does not verify" in str(error)
        if not are_trusted:
            with pytest.raises(TransferError, match="its certificate does not verify"):
                count_blocks(url, security=security)


@pytest.mark.parametrize("name", ["ca_file", "certificate_file", "key_file"])
@pytest.mark.parametrize("content", ["", "other", None])
def test_a_file_for_tls_that_its_renewal_broke_is_named(
    tmp_path: Path, arena: HostArena, authority: Authority, name: str, content: str | None
) -> None:
    files = {"ca_file": tmp_path / "ca.pem", "certificate_file": tmp_path / "a.pem"}
    files["key_file"] = tmp_path / "a.key"
    for file, whole in zip(files.values(), (authority.ca_file, *authority.issue("a")), strict=True):
        file.write_bytes(Path(whole).read_bytes())
    security = Security(**{key: str(file) for key, file in files.items()})
    with Server(tmp_path) as plain, TlsServer(plain.port, authority.issue("127.0.0.1")) as server:
        url = f"rediss://127.0.0.1:{server.port}"
        with patient(arena, url, NAMESPACE, security=security) as tier:
            if content is None:
                files[name].unlink()
            elif content:
                source = files["key_file" if name == "ca_file" else "ca_file"]
                files[name].write_bytes(source.read_bytes())
            else:
                files[name].write_text("")
            error = str(answered(tier.put(BLOCKS, range(20))).error)
            assert f"{name} '{files[name]}'" in error
            assert "name PEM files, with this side's certificate and its own key" in error


def test_a_server_without_tls_is_named_as_one(tmp_path: Path, arena: HostArena) -> None:
    with Server(tmp_path) as plain:
        url = f"rediss://127.0.0.1:{plain.port}"
        with RespTier(arena, url, NAMESPACE, timeout_s=0.5) as tier:
            ticket = answered(tier.put(BLOCKS, range(20)))
            assert not ticket.ok.any()
            assert "does not answer the TLS handshake: for a server without" in str(ticket.error)


def test_an_access_list_of_four_commands_is_enough(
    tmp_path: Path, arena: HostArena, caplog: pytest.LogCaptureFixture
) -> None:
    users = tmp_path / "users.acl"
    users.write_text(
        "user default off\n"
        "user kvstow on >open-sesame ~kvstow:* +get +set +exists +del\n"
        "user reader on >open-sesame ~kvstow:* +get +exists\n"
    )
    with Server(tmp_path, "--aclfile", str(users)) as server:
        right = Credentials("kvstow", "open-sesame")
        with patient(arena, server.url, NAMESPACE, credentials=right) as tier:
            round_trip(tier)
            assert answered(tier.delete(BLOCKS)).ok.all()
        assert not caplog.records
        for credentials, message in (
            (Credentials("reader", "open-sesame"), "refused: the access list refused a command: a"),
            (Credentials("kvstow", "closed-sesame"), "the server refused the login: check KVSTOW_"),
            (Credentials("nobody", "open-sesame"), "the server refused the login: check KVSTOW_"),
            (Credentials(), "the server asks for a password: set KVSTOW_SHARED_USERNAME and KVST"),
        ):
            with patient(arena, server.url, NAMESPACE, credentials=credentials) as tier:
                for _ in range(4):
                    ticket = answered(tier.put(BLOCKS, range(20)))
                    assert not ticket.ok.any()
                    if "left alone" not in str(ticket.error):
                        assert message in str(ticket.error)
                assert "sesame" not in caplog.text
        assert len(caplog.records) == 4, "one warning for each tier"


def refuse_long_commands(listener: socket.socket) -> None:
    """Serve as Redis from 6.2.6 on does before a login: it closes in the middle of a block."""
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection:
                while said := connection.recv(512):
                    if b"$3\r\nSET\r\n" in said:
                        connection.sendall(b"-ERR Protocol error: unauthenticated bulk length\r\n")
                        break
                    answer = b"$0\r\n\r\n" if b"INFO\r\n$6\r\nmemory" in said else b"+OK\r\n"
                    connection.sendall(answer * said.count(b"*"))


@pytest.mark.parametrize("slot_bytes", [32 << 10, 8 << 20])
def test_a_forgotten_login_is_named_if_the_server_closes_in_the_middle_of_a_block(
    slot_bytes: int,
) -> None:
    with HostArena(1, slot_bytes) as large, socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=refuse_long_commands, args=[listener], daemon=True).start()
        url = f"redis://127.0.0.1:{listener.getsockname()[1]}"
        with patient(large, url, NAMESPACE) as tier:
            ticket = answered(tier.put(blocks(0), [0]))
            assert not ticket.ok.any()
            assert "the server asks for a password: set KVSTOW_SHARED_USER" in str(ticket.error)
        listener.shutdown(socket.SHUT_RDWR)


def refuse_other_machines(listener: socket.socket) -> None:
    """Serve as Redis in protected mode: it refuses before the first command, and closes."""
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"-DENIED Redis is running in protected mode because\r\n")


@pytest.mark.parametrize("form", ["redis://{}", "redis+cluster://{}", "redis+sentinel://{}/kv"])
@pytest.mark.parametrize("login", [Credentials(), Credentials("default", "open-sesame")])
def test_a_server_in_protected_mode_is_named_as_one(
    arena: HostArena, form: str, login: Credentials
) -> None:
    """Else the refusal passes for the answer to the question of a login."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=refuse_other_machines, args=[listener], daemon=True).start()
        url = form.format(f"127.0.0.1:{listener.getsockname()[1]}")
        with patient(arena, url, NAMESPACE, credentials=login) as tier:
            assert "the server is in protected mode" in str(
                answered(tier.put(blocks(0), [0])).error
            )
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("path", [3, b"file", "a\0b", "\ud800"])
def test_path_that_can_name_no_file_is_refused(arena: HostArena, path: Any) -> None:
    with pytest.raises(ConfigError, match=r"password_file is .*; pass the name of a file"):
        Credentials.find(path)
    for name in ("ca_file", "certificate_file", "key_file"):
        security = Security(**{name: path})
        with pytest.raises(ConfigError, match=f"{name} is .*; pass the name of a file"):
            RespTier(arena, "rediss://host", NAMESPACE, security=security)


def test_each_connection_reads_the_password_file_again(tmp_path: Path, arena: HostArena) -> None:
    password = tmp_path / "password"
    password.write_text("open-sesame\n")
    users = tmp_path / "users.acl"
    users.write_text(
        "user default on nopass ~* +@all\n"
        "user kvstow on >open-sesame ~kvstow:* +get +set +exists +del\n"
    )
    with Server(tmp_path, "--aclfile", str(users)) as server:
        credentials = Credentials("kvstow", "open-sesame", str(password))
        assert "sesame" not in repr(credentials)
        with patient(arena, server.url, NAMESPACE, credentials=credentials) as tier:
            round_trip(tier)
            server.command("ACL", "SETUSER", "kvstow", "resetpass", ">open-barley")
            server.command("CLIENT", "KILL", "TYPE", "normal")
            for is_there in (True, False):  # the old password, and then no file
                time.sleep(1.5)  # the tier leaves a server alone after a failure
                assert not answered(tier.put(BLOCKS, range(20))).ok.any()
                if is_there:
                    password.unlink()
            password.write_text("open-barley\n")
            until_s = time.monotonic() + LONG_S
            while not answered(tier.put(BLOCKS, range(20))).ok.all():
                assert time.monotonic() < until_s, "the new password is not used"
                time.sleep(0.1)


@pytest.mark.parametrize(
    ("options", "ttl_s", "message"),
    [
        (("--maxmemory", "50mb", "--maxmemory-policy", "noeviction"), 60, "noeviction: once it is"),
        (("--maxmemory", "50mb", "--maxmemory-policy", "volatile-lru"), None, "lru: once it is"),
        (("--maxmemory", "50mb", "--maxmemory-policy", "volatile-lru"), 60, ""),
        ((), None, "maxmemory 0, so it grows"),
        (("--maxmemory", "50mb"), None, ""),
    ],
)
def test_a_server_without_a_memory_policy_is_warned_of_once(
    tmp_path: Path,
    arena: HostArena,
    caplog: pytest.LogCaptureFixture,
    options: tuple[str, ...],
    ttl_s: int | None,
    message: str,
) -> None:
    caplog.set_level(logging.WARNING)
    with (
        Server(tmp_path, *options) as server,
        patient(arena, server.url, NAMESPACE, ttl_s=ttl_s) as tier,
    ):
        for _ in range(3):
            round_trip(tier)
    assert len(caplog.records) == bool(message)
    assert message in caplog.text


def test_a_server_that_comes_after_the_start_is_used(
    tmp_path: Path, arena: HostArena, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    with patient(arena, f"redis://127.0.0.1:{port}", NAMESPACE) as tier:
        for _ in range(6):
            assert not answered(tier.put(BLOCKS, range(20))).ok.any()
        assert len(caplog.records) == 1
        assert f"the shared tier at 127.0.0.1:{port} takes no puts" in caplog.text
        with Server(tmp_path, "--maxmemory", "50mb", port=port):
            until_s = time.monotonic() + LONG_S
            while not answered(tier.put(BLOCKS, range(20))).ok.all():
                assert time.monotonic() < until_s, "it is not tried again"
                time.sleep(0.05)
            round_trip(tier)
        assert "takes puts again" in caplog.text


def test_sentinel_names_the_server_also_after_a_failover(tmp_path: Path, arena: HostArena) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    with Server(folders[0]) as first:
        replica = ("--replicaof", "127.0.0.1", str(first.port))
        with Server(folders[1], *replica) as second, sentinel(tmp_path, first) as port:
            url, until_s = f"redis+sentinel://127.0.0.1:{port}/kv", time.monotonic() + 3 * LONG_S
            with patient(arena, url, NAMESPACE) as tier:
                while not answered(tier.put(BLOCKS, range(20))).ok.all():
                    assert time.monotonic() < until_s, "Sentinel does not answer"
                    time.sleep(0.05)
                while second.command("DBSIZE") != b":20\r\n":
                    assert time.monotonic() < until_s, "the replica does not follow"
                    time.sleep(0.05)
                first.kill()
                while not answered(tier.put(BLOCKS, range(20))).ok.all():
                    assert time.monotonic() < until_s, "the failover is not noticed"
                    time.sleep(0.1)
                round_trip(tier)
                assert second.command("ROLE").startswith(b"*3\r\n$6\r\nmaster")
                assert num_connections(second.port) > 0
                assert num_connections(port) == 0


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("redis+cluster://127.0.0.1:{free}", (), "Connection refused"),
        ("redis+cluster://127.0.0.1:{port}", (), "it belongs to no cluster: take +cluster out of"),
        (
            "redis+cluster://127.0.0.1:{port}",
            ("--requirepass", "open-sesame"),
            "the server asks for a password: set KVSTOW_SHARED_USERNAME and KVSTOW_SHARED_PASSWORD",
        ),
        (
            "redis+sentinel://127.0.0.1:{free}/kv",
            (),
            "no Sentinel has named the master 'kv' (ConnectionError): name the hosts and ports of",
        ),
        ("redis+sentinel://127.0.0.1:{port}/kv", (), "it is no Sentinel: name the hosts and ports"),
        (
            "redis+sentinel://127.0.0.1:{port}/kv",
            ("--requirepass", "open-sesame"),
            "Sentinel refused the login: set KVSTOW_SHARED_PASSWORD, or name a password file",
        ),
    ],
)
def test_a_cluster_or_sentinel_that_does_not_serve_is_left_alone(
    tmp_path: Path,
    arena: HostArena,
    caplog: pytest.LogCaptureFixture,
    url: str,
    options: tuple[str, ...],
    message: str,
) -> None:
    with Server(tmp_path, *options) as server:
        url = url.format(port=server.port, free=free_port())
        with patient(arena, url, NAMESPACE) as tier:
            ticket = answered(tier.put(BLOCKS, range(20)))
            assert message in str(ticket.error)
            assert "redis.client" not in str(ticket.error), "the text of redis-py's connection"
            for _ in range(3):
                ticket = answered(tier.put(BLOCKS, range(20)))
            assert "left alone" in str(ticket.error)
        with pytest.raises(TransferError) as refused:
            count_blocks(url)
        assert message in str(refused.value)
        assert num_connections(server.port) == 0
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and message in record.getMessage()


@pytest.mark.parametrize("in_file", [False, True])
def test_sentinel_that_asks_gets_the_password_of_the_servers(
    tmp_path: Path, arena: HostArena, in_file: bool
) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    file = tmp_path / "password"
    file.write_text("open-sesame\n")
    right = Credentials("default", "open-sesame", str(file) if in_file else None)
    lines = ("requirepass open-sesame", "sentinel auth-pass kv open-sesame")
    with (
        Server(folders[0], "--requirepass", "open-sesame") as server,
        sentinel(folders[1], server, *lines) as port,
    ):
        url, until_s = f"redis+sentinel://127.0.0.1:{port}/kv", time.monotonic() + 3 * LONG_S
        with patient(arena, url, NAMESPACE, credentials=right) as tier:
            while not (done := answered(tier.put(BLOCKS, range(20)))).ok.all():
                assert time.monotonic() < until_s, done.error
                time.sleep(0.05)
            round_trip(tier)
        wrong = replace(right, password="no-sesame", password_file=None)
        with patient(arena, url, NAMESPACE, credentials=wrong) as tier:
            refused = str(answered(tier.put(BLOCKS, range(20))).error)
            assert "Sentinel refused the login: set KVSTOW_SHARED_PASSWORD" in refused
            assert "no-sesame" not in refused


def test_sentinel_that_knows_no_such_service_is_named(
    tmp_path: Path, arena: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Breaker, "may_try", lambda _: True)  # it may need some time to begin
    with Server(tmp_path) as server, sentinel(tmp_path, server) as port:
        url, until_s = f"redis+sentinel://127.0.0.1:{port}/other", time.monotonic() + LONG_S
        with patient(arena, url, NAMESPACE) as tier:
            text = ""
            while "Sentinel knows no master 'other' that is up: take the name" not in text:
                assert time.monotonic() < until_s, text
                text = str(answered(tier.put(BLOCKS, range(20))).error)


@pytest.mark.parametrize("name", ["ca_file", "certificate_file", "key_file"])
@pytest.mark.parametrize("url", ["redis://host", "redis+cluster://host", "unix:///socket"])
def test_files_for_tls_are_refused_without_tls(arena: HostArena, url: str, name: str) -> None:
    security = Security(**{name: "file.pem"})
    with pytest.raises(ConfigError, match=f"{name} is 'file.pem', and .* begin the URL with redis"):
        RespTier(arena, url, NAMESPACE, security=security)
    with pytest.raises(ConfigError, match=f"{name} is 'file.pem', and .* begin the URL with redis"):
        count_blocks(url, security=security)
