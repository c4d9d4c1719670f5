"""An adapter that changes under its name takes no block of its old weights from the host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from tests.vllm.halves_below import Server, folder_on_disk
from tests.vllm.versions import HASHES_ADAPTER_PATH
from vllm.lora.request import LoRARequest

from kvstow.vllm import adapters
from kvstow.vllm.adapters import Adapters

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

NUM_HIT = 96
REMOTE = "someone/adapter"


@pytest.fixture
def server() -> Iterator[Server]:
    with folder_on_disk() as folder:
        server = Server(folder)
        yield server
        server.close()


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """The folder of an adapter on this machine."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"first")
    return folder


def adapter(path: Path | str, number: int = 1, **more: Any) -> LoRARequest:
    return LoRARequest("adapter", number, str(path), **more)


def hit(server: Server, adapter: LoRARequest | None, *, skips: bool = False) -> int:
    """Serve the same prompt once more, with nothing of it on the device.

    If `skips`, the request reads no cache, as one with `prompt_logprobs`.
    """
    request = server.begin("a", lora_request=adapter)
    request.skip_reading_prefix_cache = skips
    found = server.serve(request)
    server.forget()
    return found


def replace(folder: Path, content: bytes = b"other") -> None:
    """Replace the weights by others of the same size and time, as `rsync --times` may."""
    weights, new = folder / "adapter_model.safetensors", folder / "new"
    new.write_bytes(content)
    times = weights.stat()
    os.utime(new, ns=(times.st_atime_ns, times.st_mtime_ns))
    os.replace(new, weights)


def test_an_unchanged_adapter_comes_back(server: Server, local: Path) -> None:
    assert hit(server, adapter(local)) == 0
    assert hit(server, adapter(local)) == NUM_HIT
    # Loaded again, with another number: its files say that it is the same.
    assert hit(server, adapter(local, number=2)) == NUM_HIT
    assert hit(server, adapter(local, number=3, load_inplace=True)) == NUM_HIT
    assert hit(server, adapter(local, number=3, load_inplace=True)) == NUM_HIT


@pytest.mark.parametrize("asks_other", [False, True])
def test_an_adapter_that_comes_back_in_place_of_another_takes_nothing(
    server: Server, local: Path, tmp_path: Path, *, asks_other: bool
) -> None:
    """Requests of its path that ran on meanwhile computed with the weights of the other."""
    assert hit(server, adapter(local, load_inplace=asks_other)) == 0
    other = tmp_path / "second"
    other.mkdir()
    if asks_other:
        assert hit(server, adapter(other, load_inplace=True)) == 0
        assert hit(server, adapter(local)) == 0, "it waited meanwhile"
        num_hit = NUM_HIT if HASHES_ADAPTER_PATH else 0
        assert hit(server, adapter(other, load_inplace=True)) == num_hit
    for _ in range(2):
        assert hit(server, adapter(local, load_inplace=True)) == 0
    server.half.reset()
    assert hit(server, adapter(local, load_inplace=True)) == 0
    assert hit(server, adapter(local, load_inplace=True)) == NUM_HIT


@pytest.mark.skipif(not HASHES_ADAPTER_PATH, reason="the path of an adapter is in no hash")
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("is_over", [False, True])
def test_an_adapter_that_comes_while_requests_of_another_live_takes_nothing(
    server: Server, local: Path, tmp_path: Path, *, is_over: bool, in_place: bool
) -> None:
    """vLLM may load the other one again for those, and computes the new requests with it."""
    other = tmp_path / "second"
    other.mkdir()
    server.settle()
    earlier = server.begin("b", lora_request=adapter(other, load_inplace=in_place))
    assert server.half.lookup(earlier, 0) == 0
    if is_over:
        server.half.finished(earlier)
    assert hit(server, adapter(local, load_inplace=True)) == 0
    if not is_over:
        server.half.finished(earlier)
    num_hit = NUM_HIT if is_over else 0
    assert hit(server, adapter(local, load_inplace=True)) == num_hit


@pytest.mark.skipif(not HASHES_ADAPTER_PATH, reason="the path of an adapter is in no hash")
def test_an_adapter_takes_nothing_once_a_request_of_the_path_before_it_joins(
    server: Server, local: Path, tmp_path: Path
) -> None:
    """vLLM loads the first path again if the adapter has fallen out of its memory."""
    first = tmp_path / "first"
    first.mkdir()
    new = adapter(local, load_inplace=True)
    assert hit(server, new) == 0
    assert hit(server, new) == NUM_HIT
    running, waiting = server.begin("b", lora_request=new), adapter(first)
    assert server.half.lookup(running, 0) == 0
    assert server.half.lookup(server.begin("c", lora_request=waiting), 0) == 0
    assert hit(server, new) == 0


def test_adapters_that_take_one_number_from_each_other_take_nothing(
    server: Server, local: Path, tmp_path: Path
) -> None:
    """As with `remove_lora` and `add_lora`. The first may have run on with the second's weights."""
    other = tmp_path / "second"
    other.mkdir()
    for path in local, other, local, other:
        assert hit(server, adapter(path)) == 0


@pytest.mark.parametrize("skips", [False, True])
def test_an_adapter_whose_files_changed_takes_nothing_until_a_reset(
    server: Server, local: Path, log: list[str], *, skips: bool
) -> None:
    """Also if the first request loads nothing, and only its blocks are stored."""
    hit(server, adapter(local), skips=skips)
    replace(local)
    assert hit(server, adapter(local)) == hit(server, adapter(local)) == 0
    assert len([line for line in log if "may have changed since its first request" in line]) == 1
    assert hit(server, None) == 0 and hit(server, None) == NUM_HIT, "requests without an adapter"
    server.half.reset()
    assert hit(server, adapter(local)) == 0
    assert hit(server, adapter(local)) == NUM_HIT


def test_old_blocks_would_be_served(
    server: Server, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: the hash of a block does not show the change."""
    monkeypatch.setattr(Adapters, "has_changed", lambda *_: False)
    hit(server, adapter(local))
    replace(local)
    assert hit(server, adapter(local)) == NUM_HIT


def test_an_adapter_in_the_users_home_is_on_this_machine(
    server: Server, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(local.parent))
    at_home = adapter(f"~/{local.name}")
    assert hit(server, at_home) == 0
    assert hit(server, at_home) == NUM_HIT
    replace(local)
    assert hit(server, at_home) == 0


def test_a_link_to_nothing_beside_the_files_of_an_adapter_hides_no_change(
    server: Server, local: Path
) -> None:
    """As a trainer leaves it that removes old checkpoints. vLLM loads the adapter all the same."""
    (local / "last").symlink_to(local / "removed")
    assert hit(server, adapter(local)) == 0
    assert hit(server, adapter(local)) == NUM_HIT
    replace(local)
    assert hit(server, adapter(local)) == 0


def test_an_adapter_of_another_revision_of_its_repository_takes_nothing(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM takes the newest revision whenever it loads the adapter, under the same number too."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert hit(server, adapter(REMOTE)) == 0, "vLLM has not loaded the adapter yet"
    for revision, expected in ("first", NUM_HIT), ("other", 0), ("first", 0):
        cache = tmp_path / "models--someone--adapter"
        (cache / "snapshots" / revision).mkdir(parents=True, exist_ok=True)
        (cache / "snapshots" / revision / "adapter_config.json").touch()
        (cache / "refs").mkdir(exist_ok=True)
        (cache / "refs" / "main").write_text(revision)
        assert hit(server, adapter(REMOTE)) == hit(server, adapter(REMOTE)) == expected


def test_a_remote_adapter_that_was_loaded_again_takes_nothing(server: Server) -> None:
    hit(server, adapter(REMOTE))
    assert hit(server, adapter(REMOTE)) == NUM_HIT
    assert hit(server, adapter(REMOTE, number=2)) == 0
    assert hit(server, adapter(REMOTE)) == 0, "who knows which weights the host has now"


@pytest.mark.parametrize("where", ["another hub", "another machine"])
def test_an_adapter_of_which_this_machine_sees_no_change_takes_nothing(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """It may fall out of vLLM's memory for adapters and be loaded again, under the same number."""
    if where == "another hub":
        monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")
    path = REMOTE if where == "another hub" else tmp_path / "elsewhere"
    assert hit(server, adapter(path)) == hit(server, adapter(path)) == 0


def test_a_remote_adapter_that_was_loaded_in_place_takes_nothing(server: Server) -> None:
    """It may be loaded in place once more, and its requests do not show how often."""
    in_place = adapter(REMOTE, load_inplace=True)
    assert hit(server, in_place) == hit(server, in_place) == 0


@pytest.mark.skipif(not HASHES_ADAPTER_PATH, reason="the path of an adapter is in no hash")
def test_an_adapter_of_another_path_is_another_one(
    server: Server, local: Path, tmp_path: Path
) -> None:
    hit(server, adapter(local))
    other = tmp_path / "second"
    other.mkdir()
    assert hit(server, adapter(other, number=2)) == 0
    assert hit(server, adapter(other, number=2)) == NUM_HIT
    assert hit(server, adapter(local)) == NUM_HIT


def test_another_path_counts_where_hashes_have_the_name_alone(
    server: Server, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in vLLM 0.30."""
    monkeypatch.setattr(
        adapters, "_gen_lora_extra_hash_keys", lambda request: [request.lora_request.lora_name]
    )
    other = tmp_path / "second"
    other.mkdir()
    changes = Adapters()
    for path, has_changed in (local, False), (local, False), (other, True), (local, True):
        request = server.begin("a", lora_request=adapter(path))
        assert changes.has_changed(request, ()) == has_changed
        server.forget()
