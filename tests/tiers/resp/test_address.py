"""URLs and files that a `RespTier` refuses before it asks a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.tiers.resp.tls import Authority, encrypt

from kvstow import ConfigError
from kvstow.tiers import SharedStore
from kvstow.tiers.resp import Address, RespTier, Security
from kvstow.transfer import HostArena

NAMESPACE = bytes(range(16))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("127.0.0.1:6379", "has no scheme"),
        ("http://127.0.0.1", "http://127.0.0.1 names no RESP servers"),
        ("redis://", "names no RESP servers"),
        ("redis://user:sesame@host", "the URL of the shared tier contains credentials"),
        ("redis://user:/sesame@host", "contains credentials"),
        ("redis://user:1/sesame@host/0", "contains credentials"),
        ("redis://a,user:/sesame,1@host", "contains credentials"),
        ("redis+sentinel://user:/sesame@host/kv", "contains credentials"),
        ("unix:///run/kv.sock,redis://user:sesame@host", "contains credentials"),
        ("redis://host:0", "must be 1 to 65535"),
        ("redis://host:99999", "has no valid port"),
        ("redis://host/one", "names database 'one'"),
        ("redis+cluster://host/1", "names database '1'"),
        ("redis+sentinel://host", "names no service"),
        ("redis://a,rediss://b", "differ in more than host and port"),
        ("redis://a,a", "name a server twice"),
        ("redis://host?x=1", "has options after the path"),
        ("unix:///run/kv.sock?db=3", "the URL of /run/kv.sock has options after the path"),
        ("unix:///run/kv.sock#1", "the URL of /run/kv.sock has options after the path"),
        ("unix://host/run/kv.sock", "unix://host names no RESP servers"),
        ("redis://a..b", "names the host 'a..b', and each part"),
        (f"redis+sentinel://{'x' * 64}/kv", "must have 1 to 63 characters"),
        ("redis://b,redis://\udce9", "the host .* must have 1 to 63 characters"),
        ("redis://ho\0st", "or a null character"),
        ("unix:///run/\0", "or a null character"),
    ],
)
def test_a_wrong_url_is_refused(arena: HostArena, url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        RespTier(arena, url, NAMESPACE)
    assert "sesame" not in str(refused.value)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"ca_file": "none.pem"}, r"ca_file is 'none.pem', which cannot be read \(No such file"),
        ({"ca_file": "."}, r"which cannot be read \(Is a directory\): name a PEM file"),
        ({"ca_file": "junk.pem"}, "TLS cannot use ca_file 'junk.pem'"),
        ({"certificate_file": "junk.pem"}, "TLS cannot use certificate_file 'junk.pem'"),
        ({"certificate_file": "junk.pem", "key_file": "none.pem"}, "key_file is 'none.pem'"),
        ({"key_file": "junk.pem"}, "key_file is '.*', and certificate_file is missing"),
        ({"ca_file": b"ca.pem"}, "ca_file is b'ca.pem'; pass the name of a file"),
        ({"key_file": "\0"}, "key_file is .*; pass the name of a file"),
    ],
)
def test_files_that_tls_cannot_use_are_refused(
    tmp_path: Path,
    arena: HostArena,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "junk.pem").write_text("junk")
    with pytest.raises(ConfigError, match=message):
        SharedStore("rediss://host", **files).check()
    with pytest.raises(ConfigError, match=message):
        RespTier(arena, "rediss://host", NAMESPACE, security=Security(**files))


def test_a_key_with_a_password_is_refused_and_asks_for_none(tmp_path: Path) -> None:
    authority, address = Authority(tmp_path), Address.parse("rediss://host")
    certificate, key = authority.issue("client")
    Security(authority.ca_file, certificate, key).check(address)
    encrypt(key)
    with pytest.raises(ConfigError, match=r"TLS cannot use .*: name .* without a password"):
        Security(authority.ca_file, certificate, key).check(address)
