"""Counting and deleting the blocks of a model, on servers and clusters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.tiers.resp.server import Server
from tests.tiers.resp.simulated import Simulated
from tests.tiers.resp.small import patient
from tests.tiers.setup import digest_of

from kvstow import ConfigError, TransferError
from kvstow.cli import main
from kvstow.tiers import TierBlocks
from kvstow.tiers.namespace import KEY_PREFIX, Namespace
from kvstow.tiers.resp import Credentials
from kvstow.tiers.shared_keys import count_blocks, delete_blocks, namespace_of
from kvstow.transfer import HostArena

OWN, OTHER = Namespace(bytes(range(16))), Namespace(bytes(range(1, 17)))


def put(url: str, namespace: Namespace, num: int) -> None:
    blocks = TierBlocks([digest_of(at) for at in range(num)], [at % 3 for at in range(num)])
    with HostArena(num, 64) as arena, patient(arena, url, namespace.digest) as tier:
        ticket = tier.put(blocks, range(num))
        ticket.wait(20)
        assert ticket.ok.all()


def test_only_the_blocks_of_one_model_are_deleted(tmp_path: Path) -> None:
    with Server(tmp_path) as a, Server(tmp_path) as b:
        url = f"{a.url},127.0.0.1:{b.port}"
        put(url, OWN, 2500)
        put(url, OTHER, 40)
        a.command("SET", "of another program", "value")
        a.command("SET", KEY_PREFIX + b"\x1b[31m" + b"of another program" * 2, "value")
        # As a server of another version names it.
        a.command("SET", OWN.prefix + b"999:0:" + digest_of(0), "value")
        assert count_blocks(url) == {OWN.digest.hex(): 2501, OTHER.digest.hex(): 40}
        assert delete_blocks(url, OWN) == 2501
        assert count_blocks(url) == {OTHER.digest.hex(): 40}
        assert a.command("GET", "of another program") == b"$5\r\nvalue\r\n"
        assert delete_blocks(url, OWN) == 0


def test_a_cluster_is_emptied_node_by_node(tmp_path: Path) -> None:
    options = ("--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf")
    with Server(tmp_path, *options) as server:
        server.command("CLUSTER", "ADDSLOTS", *map(str, range(16384)))
        while b"cluster_state:ok" not in server.command("CLUSTER", "INFO"):
            pass
        url = f"redis+cluster://127.0.0.1:{server.port}"
        put(url, OWN, 300)
        with pytest.raises(ConfigError, match="it belongs to a cluster, and has only a part"):
            delete_blocks(server.url, OWN)  # of the other servers it would delete nothing
        assert delete_blocks(url, OWN) == 300
        assert server.command("DBSIZE") == b":0\r\n"


def test_the_login_of_a_server_cannot_list_and_the_message_names_who_can(tmp_path: Path) -> None:
    users = tmp_path / "users.acl"
    users.write_text(
        "user default on nopass ~* +@all\n"
        "user kvstow on >open-sesame ~kvstow:* +get +set +exists +del\n"
    )
    with Server(tmp_path, "--aclfile", str(users)) as server:
        login = Credentials("kvstow", "open-sesame")
        with pytest.raises(TransferError, match="refused to list or delete keys: log in as"):
            count_blocks(server.url, credentials=login)


def test_what_cannot_be_deleted_names_the_reason(tmp_path: Path) -> None:
    with Server(tmp_path, "--requirepass", "open-sesame") as server:
        wrong = Credentials(password="closed-sesame")
        with pytest.raises(
            TransferError, match="the server refused the login: check KV"
        ) as refused:
            delete_blocks(server.url, OWN, credentials=wrong)
        assert "sesame" not in str(refused.value)
        server.kill()
        with pytest.raises(TransferError, match=f"127.0.0.1:{server.port}: "):
            delete_blocks(server.url, OWN)
    with pytest.raises(ConfigError, match="http://host names no RESP servers"):
        delete_blocks("http://host", OWN)


@pytest.mark.parametrize(
    "answer",
    [b"$abc\r\n", b"$99999999999999999999\r\n", b":1\r\n", b"*2\r\n$1\r\n0\r\n*1\r\n:3\r\n"],
)
def test_server_that_answers_something_else_is_named(
    capsys: pytest.CaptureFixture[str], answer: bytes
) -> None:
    with Simulated(lambda *_: answer) as server:
        assert main(["tier", "info", server.url]) == 74
    said = capsys.readouterr().err
    assert said == f"kvstow: 127.0.0.1:{server.port} does not speak RESP: check the port\n"


@pytest.mark.parametrize("given", ["", "00", "g" * 32, "A" * 32, "0" * 33])
def test_what_is_no_fingerprint_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=f"fingerprint is '{given}', expected 32 hexadecimal"):
        namespace_of(given)
    assert namespace_of(OWN.digest.hex()) == OWN


def test_the_command_lists_models_and_deletes_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Server(tmp_path) as server:
        put(server.url, OWN, 30)
        put(server.url, OTHER, 4)
        digits = OWN.digest.hex()
        assert main(["tier", "info", server.url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["blocks"][digits] == 30
        assert main(["tier", "info", server.url]) == 0
        assert digits in capsys.readouterr().out
        assert main(["tier", "reset", server.url]) == 2
        assert "--fingerprint is missing: pass the 32 digits" in capsys.readouterr().err
        assert main(["tier", "reset", server.url, "--fingerprint", "7"]) == 2
        assert "fingerprint is '7', expected 32" in capsys.readouterr().err
        assert main(["tier", "reset", server.url, "--fingerprint", digits]) == 0
        assert "30 blocks dropped" in capsys.readouterr().out
        assert count_blocks(server.url) == {OTHER.digest.hex(): 4}
    assert main(["tier", "info", server.url]) == 74
    assert f"127.0.0.1:{server.port}" in capsys.readouterr().err


def test_mooncake_lists_no_fingerprints_and_the_message_says_who_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for command, says in ("info", "lists no keys: each server logs"), ("reset", "each server logs"):
        assert main(["tier", command, "mooncake://127.0.0.1:1"]) == 2
        assert says in capsys.readouterr().err


def test_a_path_takes_no_option_of_a_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "slots"
    path.write_bytes(b"")
    assert main(["tier", "reset", str(path), "--fingerprint", "0" * 32]) == 2
    assert "--fingerprint is for a shared store" in capsys.readouterr().err
    assert main(["tier", "info", str(path), "--ca-file", "x"]) == 2
    assert "--ca-file is for a shared store" in capsys.readouterr().err
    assert main(["tier", "info", str(tmp_path / "none")]) == 2
