"""Logins of `RespTier`: the access list of the documentation, and what messages say."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.docs.pages import ROOT
from tests.docs.pages import blocks as blocks_of
from tests.tiers.resp.server import Server, sentinel
from tests.tiers.resp.simulated import Simulated, refuses
from tests.tiers.resp.small import BLOCKS as SMALL_BLOCKS
from tests.tiers.resp.small import ended, get, opened, patient, put
from tests.tiers.resp.tls import Authority, TlsServer
from tests.tiers.setup import LONG_S, answered, blocks, random_arena

from kvstow import ConfigError, TransferError
from kvstow.tiers import SharedStore
from kvstow.tiers.breaker import Breaker
from kvstow.tiers.resp import Credentials, RespTier, Security
from kvstow.tiers.shared_keys import count_blocks
from kvstow.transfer import HostArena

NUM_SLOTS, SLOT_BYTES = 8, 4096
NAMESPACE = bytes(range(16))
BLOCKS = blocks(*range(NUM_SLOTS))
LOGIN = Credentials("kvstow", "PASSWORD")
PAGE = ROOT / "docs" / "how-to" / "shared.md"
CLUSTER = ("--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf")


@pytest.fixture
def arena() -> Iterator[HostArena]:
    with random_arena(NUM_SLOTS, SLOT_BYTES) as arena:
        yield arena


def documented_user() -> list[str]:
    """Return the words of the line `user kvstow` in the documentation."""
    lines = [line for block in blocks_of(PAGE) for line in block.text.splitlines()]
    (line,) = (line for line in lines if line.startswith("user kvstow "))
    return line.split()[1:]


def ready_url(server: Server, form: str) -> str:
    """Return a URL of a server once it serves."""
    if "cluster" in form:
        server.command("CLUSTER", "ADDSLOTS", *map(str, range(16384)))
        while b"cluster_state:ok" not in server.command("CLUSTER", "INFO"):
            time.sleep(0.01)
    return form.format(port=server.port)


@pytest.mark.parametrize(
    ("form", "more", "options"),
    [
        ("redis://127.0.0.1:{port}", "", ()),
        ("redis://127.0.0.1:{port}/1", "+select", ()),
        ("redis+cluster://127.0.0.1:{port}", "+cluster|slots", CLUSTER),
    ],
)
def test_the_access_list_of_the_documentation_is_enough(
    tmp_path: Path, arena: HostArena, form: str, more: str, options: tuple[str, ...]
) -> None:
    with Server(tmp_path, *options) as server:
        url = ready_url(server, form)
        server.command("ACL", "SETUSER", *documented_user())
        if more:
            with patient(arena, url, NAMESPACE, credentials=LOGIN) as tier:
                refused = str(answered(tier.put(BLOCKS, range(NUM_SLOTS))).error)
                assert "the access list refused a command: allow the user" in refused
                assert more in refused
            with pytest.raises(TransferError, match="refused to list or delete keys: log in as"):
                count_blocks(url, credentials=LOGIN)
            assert f"add `{more}`" in " ".join(PAGE.read_text().split())
        server.command("ACL", "SETUSER", "kvstow", *more.split())
        with patient(arena, url, NAMESPACE, credentials=LOGIN) as tier:
            assert answered(tier.put(BLOCKS, range(NUM_SLOTS))).ok.all()
            assert answered(tier.contains(BLOCKS)).ok.all()
            assert answered(tier.get(BLOCKS, range(NUM_SLOTS))).ok.all()
            assert answered(tier.delete(BLOCKS)).ok.all()


def test_the_access_list_of_the_documentation_is_enough_behind_sentinel(
    tmp_path: Path, arena: HostArena
) -> None:
    with Server(tmp_path) as server, sentinel(tmp_path, server) as port:
        server.command("ACL", "SETUSER", *documented_user())
        url, until_s = f"redis+sentinel://127.0.0.1:{port}/kv", time.monotonic() + LONG_S
        with patient(arena, url, NAMESPACE, credentials=LOGIN) as tier:
            while not (done := answered(tier.put(BLOCKS, range(NUM_SLOTS)))).ok.all():
                assert time.monotonic() < until_s, done.error
                time.sleep(0.05)
            assert answered(tier.get(BLOCKS, range(NUM_SLOTS))).ok.all()


@pytest.mark.parametrize("name", ["KVSTOW_SHARED_USERNAME", "KVSTOW_SHARED_PASSWORD"])
def test_a_login_that_is_not_utf_8_is_refused_without_its_text(
    arena: HostArena, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, os.fsdecode("open-sésame".encode("latin-1")))
    url, given = "redis://127.0.0.1:1", b"open-s\xe9same"
    for call in (
        SharedStore(url).check,
        lambda: RespTier(arena, url, NAMESPACE),
        lambda: count_blocks(url),
        lambda: Credentials(password=given),  # type: ignore[arg-type]
    ):
        with pytest.raises(
            ConfigError, match=r"\(KVSTOW_SHARED_\w+\) is not text in UTF-8"
        ) as refused:
            call()
        assert "same" not in repr(refused.value)


SAID = b"x" * 280 + b"open-s\xc3\xa9same, or rather open-s\xc3\xa9same"


@pytest.mark.parametrize("command", [b"SET", b"GET", b"EXISTS", b"CLUSTER"])
@pytest.mark.parametrize("form", [b"-", b"+", b"-ERR "])
def test_no_text_of_a_server_shows_the_password(
    small_arena: HostArena, caplog: pytest.LogCaptureFixture, command: bytes, form: bytes
) -> None:
    said = form + (SAID if form == b"-ERR " else SAID[280:]) + b"\r\n"
    with Simulated(lambda words, _: said if words[0] == command else None) as server:
        url = server.url.replace("redis", "redis+cluster") if command == b"CLUSTER" else server.url
        login = Credentials(password="open-sésame")
        with opened(small_arena, url, credentials=login) as tier:
            for _ in range(4):
                errors = [
                    put(tier).error,
                    get(tier).error,
                    ended(tier.contains(SMALL_BLOCKS)).error,
                ]
                for error in filter(None, errors):
                    assert "open" not in f"{error!r} {error.__cause__!r}"
    assert "open" not in caplog.text


@pytest.mark.parametrize("call", [b"SCAN", b"INFO"])
def test_no_text_of_a_server_shows_the_password_while_keys_are_counted(call: bytes) -> None:
    said = b"-ERR open-sesame\r\n"
    with Simulated(lambda words, _: said if words[0] == call else None) as server:
        with pytest.raises(TransferError) as refused:
            count_blocks(server.url, credentials=Credentials(password="open-sesame"))
        assert "sesame" not in f"{refused.value!r} {refused.value.__cause__!r}"


def test_a_password_that_is_part_of_a_refusal_changes_not_its_meaning(
    small_arena: HostArena,
) -> None:
    login = Credentials(password="O")
    with (
        Simulated(refuses([b"SET"], b"OOM no room")) as server,
        opened(small_arena, server.url, credentials=login) as tier,
    ):
        for _ in range(5):
            assert "refused: ******M no room" in str(put(tier).error)


def test_a_password_file_that_is_empty_at_the_start_is_read_again(
    tmp_path: Path, arena: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Breaker, "may_try", lambda _: True)
    file = tmp_path / "password"
    file.write_text("")
    with Server(tmp_path, "--requirepass", "open-sesame") as server:
        login = Credentials.find(file)
        with patient(arena, server.url, NAMESPACE, credentials=login) as tier:
            assert "asks for a password" in str(answered(tier.contains(BLOCKS)).error)
            file.write_text("open-sesame\n")
            assert answered(tier.put(BLOCKS, range(NUM_SLOTS))).ok.all()


@pytest.mark.parametrize("form", ["{}://127.0.0.1:{}", "{}+sentinel://127.0.0.1:{}/kv"])
@pytest.mark.parametrize(
    ("scheme", "has_ca", "message"),
    [
        (
            "redis",
            False,
            "it ended the connection before the first command: see whether it wants T",
        ),
        (
            "rediss",
            True,
            "it ended the connection before the first command: see whether it wants T",
        ),
        ("rediss", False, "its certificate does not verify"),
    ],
)
def test_a_server_with_tls_that_ends_the_login_is_named_as_one(
    tmp_path: Path, arena: HostArena, form: str, scheme: str, has_ca: bool, message: str
) -> None:
    """It also wants a certificate of this side, as Redis does unless it is told otherwise."""
    authority = Authority(tmp_path)
    files = authority.issue("127.0.0.1")
    with Server(tmp_path) as plain, TlsServer(plain.port, files, authority.ca_file) as server:
        url, security = form.format(scheme, server.port), Security(authority.ca_file)
        with patient(arena, url, NAMESPACE, security=security if has_ca else None) as tier:
            assert message in str(answered(tier.put(BLOCKS, range(NUM_SLOTS))).error)
