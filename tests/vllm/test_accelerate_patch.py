"""`accelerate` replaces only functions of vLLM that it knows, once, and can put them back."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.forks import in_child
from tests.vllm.drift import Function, parse
from tests.vllm.test_drift import root
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils import hashing as vllm_hashing
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine import core as engine_core
from vllm.v1.request import Request

import kvstow
from kvstow.vllm import accelerate
from kvstow.vllm.accelerate import allocation, hashing, lookup
from kvstow.vllm.accelerate.patch import Patch, digest

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

PATCHES = (hashing.PATCH, allocation.PATCH, lookup.PATCH)
ALL = [patch.what for patch in PATCHES]


def functions() -> list[Any]:
    return [
        engine_core.get_request_block_hasher,
        kv_cache_utils.get_request_block_hasher,
        KVCacheManager.allocate_slots,
        KVCacheManager.cache_blocks,
        vars(FullAttentionManager)["find_longest_cache_hit"],
    ]


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    yield
    accelerate.disable()


# -- the gate --------------------------------------------------------------------------------------


def source_in(file: Path, name: str) -> str:
    """Return the source of a function as `inspect` would, without importing it."""
    node: Any = parse(file)
    for part in name.split("."):
        found = [
            each
            for each in node.body
            if isinstance(each, ast.ClassDef | Function) and each.name == part
        ]
        if not found:
            return ""
        node = found[-1]
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return "".join(file.read_text().splitlines(keepends=True)[first - 1 : node.end_lineno])


@pytest.mark.parametrize("patch", PATCHES, ids=ALL)
def test_the_source_of_this_vllm_is_known(patch: Patch) -> None:
    files = {module: root() / (module.replace(".", "/") + ".py") for module in patch.reads}
    found = digest(source_in(files[module], name) for module, name in patch.paths())
    assert found in patch.known, f"compare {patch.what} with this vLLM, then list {found}"


def test_functions_are_replaced_once_and_put_back() -> None:
    before = functions()
    assert accelerate.enable() == ALL
    faster = functions()
    assert not any(now is then for now, then in zip(faster, before, strict=True))
    assert accelerate.enable() == ALL
    assert all(now is then for now, then in zip(functions(), faster, strict=True))
    accelerate.disable()
    assert all(now is then for now, then in zip(functions(), before, strict=True))
    accelerate.disable()


def test_a_function_that_another_plugin_replaced_stays(
    monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    original = KVCacheManager.allocate_slots

    def theirs(self: Any, *args: Any, **named: Any) -> Any:
        return original(self, *args, **named)

    theirs.__wrapped__ = original  # type: ignore[attr-defined] # as functools.wraps does
    monkeypatch.setattr(KVCacheManager, "allocate_slots", theirs)
    assert accelerate.enable() == [hashing.PATCH.what, lookup.PATCH.what]
    assert KVCacheManager.allocate_slots is theirs
    assert "accelerate leaves allocation of slots to vLLM: its source is of no version" in "".join(
        log
    )


@pytest.mark.parametrize("patch", PATCHES, ids=ALL)
def test_unknown_source_is_not_replaced(
    patch: Patch, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    monkeypatch.setattr(patch, "known", {})
    assert accelerate.enable() == [what for what in ALL if what != patch.what]
    assert f"accelerate leaves {patch.what} to vLLM" in "".join(log)


def test_a_hasher_that_another_plugin_gave_the_engine_stays(
    monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    """It may hash more than tokens for some requests, which no sample shows."""
    original = engine_core.get_request_block_hasher

    def theirs(*args: Any) -> Any:
        return original(*args)

    monkeypatch.setattr(engine_core, "get_request_block_hasher", theirs)
    assert accelerate.enable() == [what for what in ALL if what != hashing.PATCH.what]
    assert engine_core.get_request_block_hasher is theirs
    assert "accelerate leaves prefix hashing to vLLM: its source is of no version" in "".join(log)


def test_a_patch_without_one_of_its_places_replaces_none(
    monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    """As in a version whose engine takes the function from elsewhere."""
    theirs = kv_cache_utils.get_request_block_hasher
    monkeypatch.delattr(engine_core, "get_request_block_hasher")
    assert accelerate.enable() == [what for what in ALL if what != hashing.PATCH.what]
    assert kv_cache_utils.get_request_block_hasher is theirs
    assert "accelerate leaves prefix hashing to vLLM: its source cannot be read" in "".join(log)


def test_a_vllm_without_a_name_stays_as_it_is(log: list[str]) -> None:
    before = functions()
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.startswith("kvstow.vllm.accelerate.")]:
            patch.delitem(sys.modules, name)
        for part in ("hashing", "allocation", "lookup"):
            patch.delattr(accelerate, part)
        patch.delattr("vllm.v1.core.block_pool.BlockHashToBlockMap")
        assert accelerate.enable() == []
    assert "accelerate changes nothing, because this vLLM differs" in "".join(log)
    assert all(now is then for now, then in zip(functions(), before, strict=True))


def test_nothing_is_imported_without_the_option() -> None:
    """In a child, which has imported vLLM already, and imports the connector anew."""

    def check() -> None:
        for name in [name for name in sys.modules if name.startswith("kvstow.vllm")]:
            del sys.modules[name]
        importlib.import_module("kvstow.vllm.connector")
        assert not [name for name in sys.modules if name.startswith("kvstow.vllm.accelerate")]

    in_child(check)


# -- hashing ---------------------------------------------------------------------------------------


def make(name: str, hasher: Any, tokens: list[int], **more: Any) -> Request:
    params = SamplingParams(max_tokens=100)
    return Request(name, list(tokens), params, None, block_hasher=hasher, **more)


@pytest.fixture(params=["sha256", "sha256_cbor", "xxhash_cbor"])
def hashers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's hasher, kvstow's, and the calls of `hash_tokens`."""
    function = getattr(vllm_hashing, request.param)
    kv_cache_utils.init_none_hash(function)
    theirs = kv_cache_utils.get_request_block_hasher(16, function)
    accelerate.enable()
    ours = engine_core.get_request_block_hasher(16, function)
    calls: list[Any] = []
    original = kvstow.hash_tokens

    def counting(*args: Any, **named: Any) -> Any:
        calls.append(args)
        return original(*args, **named)

    monkeypatch.setattr(hashing, "hash_tokens", counting)
    return SimpleNamespace(theirs=theirs, ours=ours, calls=calls, function=function)


def test_requests_have_the_hashes_of_vllm(hashers: Any) -> None:
    tokens = [7 * at % 150_000 for at in range(100)]
    theirs, ours = (make("r", each, tokens) for each in (hashers.theirs, hashers.ours))
    for token in range(40):
        theirs.append_output_token_ids(token)
        ours.append_output_token_ids(token)
        assert ours.block_hashes == theirs.block_hashes
    assert len(ours.block_hashes) == 140 // 16
    assert len(hashers.calls) == 1 + 140 // 16 - 100 // 16, "once per prompt, and per full block"


@pytest.mark.parametrize(
    "more",
    [{"cache_salt": "s"}, {"lora_request": LoRARequest("a", 1, "/a")}],
    ids=["a salt", "an adapter"],
)
def test_requests_with_extra_keys_stay_with_vllm(hashers: Any, more: Any) -> None:
    theirs, ours = (
        make("r", each, list(range(100)), **more) for each in (hashers.theirs, hashers.ours)
    )
    assert ours.block_hashes == theirs.block_hashes
    assert not hashers.calls
    assert ours.block_hashes != make("r", hashers.ours, list(range(100))).block_hashes


def test_tokens_that_kvstow_refuses_are_hashed_by_vllm(hashers: Any) -> None:
    tokens = [*range(50), -1]
    tokens += range(50)
    theirs, ours = (make("r", each, tokens) for each in (hashers.theirs, hashers.ours))
    assert ours.block_hashes == theirs.block_hashes and len(ours.block_hashes) == 101 // 16
    assert hashers.calls


def test_hashers_with_lookahead_or_another_function_are_vllms(hashers: Any) -> None:
    made: list[Any] = []

    def factory(*args: Any) -> Any:
        made.append(args)
        return hashers.theirs

    faster = hashing._faster_factory(factory)
    assert faster(16, hashers.function, 2) is hashers.theirs
    assert faster(16, vllm_hashing.xxhash) is hashers.theirs
    assert made == [(16, hashers.function, 2), (16, vllm_hashing.xxhash)]
    assert faster(16, hashers.function) is not hashers.theirs


def test_a_hasher_that_differs_from_vllms_is_not_used(hashers: Any, log: list[str]) -> None:
    def other(request: Any) -> list[bytes]:
        return [bytes(32) for _ in hashers.theirs(request)]

    assert hashing._faster_factory(lambda *_: other)(16, hashers.function) is other
    assert "the hashes differ" in "".join(log)
