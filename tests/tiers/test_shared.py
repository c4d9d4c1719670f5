"""`SharedStore` opens what its URL names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstow import ConfigError
from kvstow.tiers import Fingerprint, TierBlocks
from kvstow.tiers.resp import Credentials, RespTier
from kvstow.tiers.shared import SharedStore
from kvstow.transfer import HostArena

MODEL = Fingerprint({"model": "a"})


def test_a_url_of_a_resp_server_opens_its_tier() -> None:
    with HostArena(2, 4096) as arena:
        store = SharedStore("redis://127.0.0.1:1,127.0.0.1:2", ttl_s=60, timeout_s=0.5)
        with store.open(arena, MODEL) as tier:
            assert isinstance(tier, RespTier)
            assert len(tier.address.nodes) == 2
            assert (tier.namespace.digest, tier.timeout_s) == (MODEL.digest, 0.5)
            assert tier.set_options == (b"EX", b"60")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://host", "shared names http, expected a URL that begins with redis, rediss"),
        ("host:6379", "shared names no scheme"),
        (None, "shared names no scheme"),
        ("mooncake://user:sesame@host", "contains credentials"),
        ("redis://user:sesame@host", "contains credentials"),
    ],
)
def test_a_url_that_names_no_store_is_refused(url: str, message: str) -> None:
    with HostArena(2, 4096) as arena, pytest.raises(ConfigError, match=message) as refused:
        SharedStore(url).open(arena, MODEL)
    assert "sesame" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("redis://host", {"segment_bytes": 1 << 30}, "segment_bytes is 1073741824, and it has an"),
        ("redis://host", {"protocol": "rdma"}, "effect only with the URL of Mooncake: leave it"),
        ("redis://host", {"devices": "mlx5_0"}, "devices is 'mlx5_0'"),
        ("redis://host", {"host": "10.0.0.1"}, "host is '10.0.0.1'"),
        ("mooncake://host", {"ttl_s": 60}, "effect only with the URL of a RESP server: leave it"),
        ("mooncake://host", {"ca_file": "ca.pem"}, "ca_file is 'ca.pem'"),
        ("mooncake://host", {"password_file": "secret"}, "password_file is 'secret'"),
        (
            "redis://host",
            {"ca_file": "ca.pem"},
            "ca_file is 'ca.pem', and connections to host:6379",
        ),
    ],
)
def test_an_option_without_effect_is_refused(
    url: str, options: dict[str, Any], message: str
) -> None:
    store = SharedStore(url, **options)
    with pytest.raises(ConfigError, match=message):
        store.check()
    with HostArena(2, 4096) as arena, pytest.raises(ConfigError, match=message):
        store.open(arena, MODEL)


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1", "mooncake://127.0.0.1:1"])
@pytest.mark.parametrize("wrong", [0, -1.0, 86401, 1e10, float("inf"), float("nan"), True, "5"])
def test_a_timeout_that_the_system_cannot_wait_is_refused(
    url: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstow.tiers.mooncake._store_class", lambda: object)
    store, message = SharedStore(url, timeout_s=wrong), r"timeout_s is .*, outside 0 to 86400: pass"
    with pytest.raises(ConfigError, match=message):
        store.check()
    with HostArena(2, 4096) as arena, pytest.raises(ConfigError, match=message):
        store.open(arena, MODEL)


@pytest.mark.parametrize("wrong", [0, 2**31, 1.5])
def test_a_time_to_live_that_no_server_takes_is_refused(wrong: Any) -> None:
    store, message = SharedStore("redis://127.0.0.1:1", ttl_s=wrong), "ttl_s .*; pass whole seconds"
    with pytest.raises(ConfigError, match=message):
        store.check()
    with HostArena(2, 4096) as arena, pytest.raises(ConfigError, match=message):
        store.open(arena, MODEL)


def test_the_longest_timeout_is_one_that_the_system_can_wait() -> None:
    store = SharedStore("redis://127.0.0.1:1", timeout_s=86400)
    with HostArena(2, 4096) as arena, store.open(arena, MODEL) as tier:
        ticket = tier.contains(TierBlocks([bytes(32)], [0]))
        ticket.wait_until_ended(20)
        assert "Connection refused" in str(ticket.error)


def test_the_password_comes_from_a_file_or_the_environment(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path_factory.mktemp("secret") / "password"
    with HostArena(2, 4096) as arena:
        with pytest.raises(ConfigError, match="password cannot be read"):
            SharedStore("redis://host", password_file=file).open(arena, MODEL)
        file.write_text("open-sesame\n")
        store = SharedStore("redis://host", password_file=file)
        assert "sesame" not in repr(store)
        with store.open(arena, MODEL) as tier:
            assert isinstance(tier, RespTier)
            login = tier.nodes._options["credential_provider"]
            assert login.get_credentials() == ("open-sesame",)
            file.write_text("new-sesame\n")
            assert login.get_credentials() == ("new-sesame",), "each connection reads it again"
            file.write_text("")
            assert login.get_credentials() == ("open-sesame",), "it is being replaced"
        with SharedStore("redis://host", password_file=file).open(arena, MODEL) as tier:
            assert isinstance(tier, RespTier)
            login = tier.nodes._options["credential_provider"]
            assert login.get_credentials() == (), "an empty file is no password"
            file.write_text("later-sesame\n")
            assert login.get_credentials() == ("later-sesame",)
        monkeypatch.setenv("KVSTOW_SHARED_PASSWORD", "from-outside")
        with SharedStore("redis://host").open(arena, MODEL) as tier:
            assert isinstance(tier, RespTier)
            login = tier.nodes._options["credential_provider"]
            assert login.get_credentials() == ("from-outside",)


@pytest.mark.parametrize("has_file", [False, True])
def test_an_empty_user_is_the_default_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_file: bool
) -> None:
    (tmp_path / "password").write_text("open-sesame\n")
    monkeypatch.setenv("KVSTOW_SHARED_USERNAME", "")
    monkeypatch.setenv("KVSTOW_SHARED_PASSWORD", "open-sesame")
    login = Credentials.find(tmp_path / "password" if has_file else None)
    assert login.get_credentials() == ("open-sesame",)
    monkeypatch.setenv("KVSTOW_SHARED_USERNAME", "kvstow")
    login = Credentials.find(tmp_path / "password" if has_file else None)
    assert login.get_credentials() == ("kvstow", "open-sesame")
