"""`KVStowDisk` below vLLM's own CPU tier, with vLLM's manager, on a CPU.

What moves chunks between the GPU and the CPU tier needs a GPU, and is vLLM's own.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import numpy as np
import numpy.typing as npt
import pytest
import tests.vllm.runner  # noqa: F401 - before anything imports vLLM
from tests.tiers.damage import all_proven, flip
from tests.vllm.halves import FULL, cache_config, engine_config
from vllm.config.multimodal import MultiModalConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import (
    OffloadingEventGroupSpec,
    OffloadingEventsTracker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingKVEventsConfig,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    get_offload_block_hash,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

from kvstow import ConfigError, TransferError
from kvstow.tiers import SlotFile
from kvstow.tiers.files import Buffers, Files
from kvstow.tiers.slot_store import SlotStore
from kvstow.transfer.borrowed import BorrowedArena
from kvstow.vllm import identity, secondary_identity, secondary_tier
from kvstow.vllm.secondary_tier import KVStowDisk

CHUNK = 8192
NUM_CHUNKS = 4
NUM_SLOTS = 8
LONG_S = 20.0
HOUR_S = 3600.0
REPOSITORY = "someone/something"
# Whether vLLM says where in a request each chunk is.
SAYS_ORDER = hasattr(ReqContext, "set_offload_key_position")
says_order = pytest.mark.skipif(
    not SAYS_ORDER, reason="this vLLM does not say where a chunk is in its request"
)
KEYS = [make_offload_key(bytes([number]) * 32, number % 2) for number in range(40)]


def content(key: OffloadKey, epoch: int = 0) -> npt.NDArray[np.uint8]:
    return np.random.default_rng([key[0], epoch]).integers(0, 256, CHUNK, np.uint8)


class Spec:
    """What a tier reads of vLLM's `OffloadingSpec`."""

    def __init__(self, model: str) -> None:
        parallel = OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True)
        self.config = OffloadingConfig(
            groups=(OffloadingGroupConfig(16, ("a",), 0), OffloadingGroupConfig(16, ("b",), 1)),
            worker_kv_bytes_per_block=CHUNK,
            enable_kv_cache_events=True,
            extra_config={},
            engine_id="engine",
            model=OffloadingModelConfig(model, "float32"),
            cache=OffloadingCacheConfig(16, 1),
            parallel=parallel,
        )
        self.kv_events_config = OffloadingKVEventsConfig(True, False)
        self.blocks_per_chunk = 1


class Model(SimpleNamespace):
    """What a tier reads of vLLM's `ModelConfig`."""

    def compute_hash(self) -> str:
        return str(self.hf_config.rope)


def configuration(name: str) -> SimpleNamespace:
    """Return what a tier reads of vLLM's `VllmConfig`."""
    model = Model(
        model=name,
        revision=None,
        dtype="float32",
        hf_config=SimpleNamespace(rope=1),
        multimodal_config=None,
    )
    return SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(
            cache_dtype="auto", prefix_caching_hash_algo="sha256", enable_prefix_caching=True
        ),
        parallel_config=SimpleNamespace(),
        load_config=SimpleNamespace(
            load_format="auto", model_loader_extra_config={}, download_dir=None
        ),
        speculative_config=None,
    )


class World:
    """vLLM's CPU tier of four chunks, and a slot file below it."""

    def __init__(
        self,
        folder: Path,
        name: str | None = None,
        change: Callable[[Any], object] = lambda _: None,
        **options: Any,
    ) -> None:
        """`change` changes vLLM's configuration before the tier reads it."""
        model = folder / "model"
        model.mkdir(exist_ok=True)
        if not any(model.iterdir()):
            (model / "weights").write_text("first")
        self.region = SharedOffloadRegion(f"kvstow{uuid.uuid4().hex}", NUM_CHUNKS, 0, CHUNK, CHUNK)
        self.primary = CPUPrimaryTierOffloadingManager(NUM_CHUNKS, self.region)
        self.view = self.primary.get_kv_memoryview()
        config = {
            "type": "KVStowDisk",
            "module_path": "kvstow.vllm.secondary_tier",
            "path": str(folder / "slots"),
            "max_bytes": SlotFile.bytes_for(NUM_SLOTS, CHUNK),
        }
        # The tier finds it where the connector has it.
        vllm_config = configuration(name or str(model))
        change(vllm_config)
        try:
            disk = SecondaryTierFactory.create_secondary_tier(
                config | options, self.view, Spec(name or str(model))
            )
        except BaseException:
            self.primary.shutdown()
            raise
        assert isinstance(disk, KVStowDisk)
        self.disk = disk
        self.manager = TieringOffloadingManager(self.primary, [self.disk])
        self.epoch = 0

    def request(self, name: str, keys: Sequence[OffloadKey] = ()) -> ReqContext:
        """Begin a request whose chunks have these keys."""
        request = ReqContext(name)
        if SAYS_ORDER:
            for at, key in enumerate(keys):
                request.set_offload_key_position(key, at + 1)
        self.manager.on_new_request(request)
        return request

    def reset(self) -> None:
        """Reset as vLLM does, whose workers have nothing left to write."""
        self.manager.reset_cache()
        if (flushed := getattr(self.manager, "on_reset_flushed", None)) is not None:  # vLLM 0.33
            flushed()

    def end_step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def wait(self) -> None:
        """Wait for the disk, and let vLLM learn what has ended."""
        for job in self.disk._jobs:
            if job.ticket is not None:
                job.ticket.wait(LONG_S)
        self.end_step()  # ends the step that has asked already
        self.end_step()

    def store(self, keys: list[OffloadKey]) -> None:
        """Store chunks as the GPU would, and let them go on to the disk."""
        request = self.request(f"store {keys[0]!r}", keys)
        self.compute(keys, request)
        self.manager.on_request_finished(request)
        self.wait()

    def compute(self, keys: list[OffloadKey], request: ReqContext) -> None:
        """Store chunks of a request that goes on."""
        output = self.manager.prepare_store(keys, request)
        assert output is not None
        rows = np.asarray(self.view).view(np.uint8)
        for key, chunk in zip(output.keys_to_store, output.store_spec.chunk_ids, strict=True):
            rows[chunk] = content(key, self.epoch)
        if output.keys_to_store:
            # vLLM has them in a set, whose order may be any.
            self.manager.complete_store(output.keys_to_store[::-1], request)

    def load(self, key: OffloadKey) -> npt.NDArray[np.uint8] | None:
        """Return what the GPU would load; None for a miss."""
        request = self.request(f"load {key!r}", [key])
        try:
            for _ in range(3):
                if self.manager.lookup(key, request) == LookupResult.HIT:
                    spec = self.manager.prepare_load([key], request)
                    rows = np.asarray(self.view).view(np.uint8)
                    found: npt.NDArray[np.uint8] = rows[spec.chunk_ids[0]].copy()
                    del rows
                    self.manager.complete_load([key], request)
                    return found
                self.end_step()
                self.wait()
            return None
        finally:
            self.manager.on_request_finished(request)

    def has(self, key: OffloadKey) -> bool:
        return self.disk.lookup(key, ReqContext("ask")) is LookupResult.HIT

    def close(self) -> None:
        self.manager.shutdown()


Make = Callable[..., World]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    worlds: list[World] = []

    def made(**options: Any) -> World:
        worlds.append(World(tmp_path, **options))
        return worlds[-1]

    yield made
    for world in worlds:
        if not world.disk.tier._store._is_closed:
            world.close()


def fill_primary(world: World) -> None:
    """Push every chunk out of the CPU tier."""
    world.store(KEYS[30:34])


def test_chunk_that_fell_off_the_cpu_tier_comes_back(make: Make) -> None:
    world = make()
    world.store(KEYS[:4])
    fill_primary(world)
    for key in KEYS[:4]:
        assert world.primary.lookup(key, ReqContext("ask")) == LookupResult.MISS
        found = world.load(key)
        assert found is not None
        np.testing.assert_array_equal(found, content(key))


def test_unknown_keys_of_the_configuration_are_ignored(make: Make, log: list[str]) -> None:
    make(new_in_vllm=1)
    assert any("ignores new_in_vllm" in line for line in log)


@pytest.mark.parametrize("missing", ["path", "max_bytes"])
def test_missing_key_is_named(make: Make, missing: str) -> None:
    with pytest.raises(ConfigError, match=f"KVStowDisk has no {missing}"):
        make(**{missing: None})


@pytest.mark.parametrize("name", ["path", "weights_version_path"])
@pytest.mark.parametrize("wrong", [5, "slots\0", "\ud800", "~/slots", "$HOME/slots"])
def test_what_is_no_path_is_refused(make: Make, name: str, wrong: object) -> None:
    with pytest.raises(ConfigError, match=f"KVStowDisk has {name} .*; pass the name of a file"):
        make(**{name: wrong})


def test_disk_never_grows(make: Make, tmp_path: Path) -> None:
    world = make()
    sizes = {path: path.stat().st_size for path in (tmp_path / "slots", tmp_path / "slots.index")}
    for first in range(0, 32, 4):
        world.store(KEYS[first : first + 4])
    assert {path: path.stat().st_size for path in sizes} == sizes
    assert [key for key in KEYS if world.has(key)] == KEYS[24:32], "the oldest went"


def test_touched_chunks_stay(make: Make) -> None:
    world = make()
    world.store(KEYS[:4])
    world.store(KEYS[4:8])
    world.manager.touch(KEYS[:4], ReqContext("touch"))
    world.store(KEYS[8:12])
    assert [key for key in KEYS if world.has(key)] == KEYS[:4] + KEYS[8:12]


@says_order
def test_chunks_that_are_used_stay(make: Make) -> None:
    world = make()
    world.store(KEYS[:4])
    for first in range(8, 24, 4):
        world.store(KEYS[first : first + 4])
        for key in KEYS[:4]:
            assert world.load(key) is not None


@says_order
@pytest.mark.parametrize("restarts", [False, True], ids=["runs on", "restarts"])
def test_the_end_of_a_prompt_goes_first(make: Make, restarts: bool) -> None:
    """Without its beginning, nothing finds it."""
    world = make()
    request = world.request("one prompt", KEYS[:8])
    world.compute(KEYS[:4], request)
    world.wait()
    world.compute(KEYS[4:8], request)
    world.manager.on_request_finished(request)  # before the disk has written
    world.wait()
    if restarts:
        world.close()
        world = make()
    world.store(KEYS[8:11])
    assert [key for key in KEYS if world.has(key)] == KEYS[:5] + KEYS[8:11]


@says_order
def test_the_end_of_a_job_goes_first_while_its_request_runs(make: Make) -> None:
    world = make()
    world.compute(KEYS[:4], world.request("runs", KEYS[:4]))
    world.wait()
    world.store(KEYS[8:12])
    world.store(KEYS[12:15])
    assert [key for key in KEYS if world.has(key)] == KEYS[:1] + KEYS[8:15]


@says_order
def test_chunks_of_a_request_that_found_them_on_the_cpu_stay(make: Make) -> None:
    world = make()
    world.store(KEYS[:4])
    world.store(KEYS[8:12])
    world.manager.on_request_finished(world.request("asks again", KEYS[:4]))
    world.store(KEYS[12:16])
    assert [key for key in KEYS if world.has(key)] == KEYS[:4] + KEYS[12:16]


@says_order
def test_the_beginning_is_kept_if_not_all_chunks_fit(make: Make) -> None:
    world = make(max_bytes=SlotFile.bytes_for(6, CHUNK))
    world.store(KEYS[20:24])
    request = world.request("longer than the disk", KEYS[:12])
    for first in range(0, 12, 4):
        world.compute(KEYS[first : first + 4], request)
        world.wait()
    assert [key for key in KEYS if world.has(key)] == KEYS[:6]


@says_order
@pytest.mark.parametrize("restarts", [False, True], ids=["runs on", "restarts"])
def test_new_chunks_around_others_of_their_prompt_displace_those_behind(
    make: Make, restarts: bool
) -> None:
    """As after a damaged first chunk, which is written again with the end of the prompt."""
    keys = KEYS[:12:2]  # of one group
    world = make(max_bytes=SlotFile.bytes_for(6 if restarts else 3, CHUNK))
    world.compute(keys[1:4], world.request("before", keys[:4]))
    world.wait()
    request = world.request("again", keys)
    world.compute([keys[0], keys[4]], request)
    world.wait()
    if restarts:
        world.close()
        world = make(max_bytes=SlotFile.bytes_for(6, CHUNK))
        world.store(KEYS[20:22])
        assert [key for key in KEYS if world.has(key)] == keys[:4] + KEYS[20:22]
    else:
        assert [key for key in KEYS if world.has(key)] == keys[:3]


@says_order
def test_restarted_server_keeps_the_beginning_of_the_last_prompt(make: Make) -> None:
    """Its end was written last, and its beginning before other prompts."""
    world = make()
    world.store(KEYS[:2])
    world.store(KEYS[8:12])
    request = world.request("goes on", [*KEYS[:2], *KEYS[20:22]])
    world.compute(KEYS[20:22], request)
    world.wait()
    world.close()
    again = make()
    again.store(KEYS[12:16])
    kept = [*KEYS[:2], *KEYS[12:16], *KEYS[20:22]]
    assert [key for key in KEYS if again.has(key)] == kept


def test_chunk_that_is_there_is_not_written_again(make: Make) -> None:
    world = make()
    world.store(KEYS[:4])
    fill_primary(world)
    before = world.disk.tier.stats().put_blocks
    world.store(KEYS[:4])
    assert world.disk.tier.stats().put_blocks == before


def test_restarted_server_hits(make: Make) -> None:
    world = make()
    world.store(KEYS[:4])
    world.close()
    again = make()
    for key in KEYS[:4]:
        found = again.load(key)
        assert found is not None
        np.testing.assert_array_equal(found, content(key))
    again.store(KEYS[4:8])
    assert all(again.has(key) for key in KEYS[:8])


def test_other_weights_at_the_same_path_are_refused(make: Make, tmp_path: Path) -> None:
    world = make()
    world.store(KEYS[:4])
    world.close()
    (tmp_path / "model" / "weights").write_text("second")
    with pytest.raises(ConfigError, match="weights"):
        make()
    again = make(on_mismatch="reset")
    assert not any(again.has(key) for key in KEYS)


def test_another_number_of_engines_shapes_no_chunk(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make()
    world.store(KEYS[:4])
    world.close()

    class OneOfTwo(Spec):
        def __init__(self, model: str) -> None:
            super().__init__(model)
            parallel = dataclasses.replace(self.config.parallel, data_parallel_size=2)
            self.config = dataclasses.replace(self.config, parallel=parallel)

    monkeypatch.setitem(globals(), "Spec", OneOfTwo)
    again = make()
    assert all(again.has(key) for key in KEYS[:4])


def _other_rope(config: Any) -> None:
    config.model_config.hf_config.rope = 5


def _other_dtypes(config: Any) -> None:
    """Layers have other dtypes, and all of them together as many bytes."""
    config.cache_config.kv_cache_dtype_skip_layers = ["0"]


def _other_interleaving(config: Any) -> None:
    config.parallel_config.cp_kv_cache_interleave_size = 16


def _other_state(config: Any) -> None:
    config.cache_config.mamba_cache_dtype = "float16"


def _other_hashes(config: Any) -> None:
    config.cache_config.prefix_caching_hash_algo = "sha256_cbor"


def _drafts(config: Any) -> None:
    config.speculative_config = SimpleNamespace(num_speculative_tokens=2)


@pytest.mark.parametrize(
    "change",
    [_other_rope, _other_dtypes, _other_interleaving, _other_state, _other_hashes, _drafts],
    ids=["rope", "dtypes", "interleaving", "state", "hashes", "rows of a state for drafts"],
)
def test_other_settings_of_the_model_are_refused(
    make: Make, tmp_path: Path, change: Callable[[Any], object]
) -> None:
    """A version of the weights does not name them."""
    (tmp_path / "version").write_text("one")
    options = {"weights_version_path": str(tmp_path / "version")}
    world = make(**options)
    world.store(KEYS[:4])
    world.close()
    with pytest.raises(ConfigError, match=r"model|kv_dtype|context_parallel|states|hash '"):
        make(change=change, **options)
    again = make(change=change, on_mismatch="reset", **options)
    assert not any(again.has(key) for key in KEYS)


def test_file_of_another_kind_of_device_is_refused(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, vLLM may choose kernels that order the numbers of a block otherwise."""
    world = make()
    world.store(KEYS[:4])
    world.close()
    monkeypatch.setattr(type(current_platform), "get_device_name", lambda *_: "another")
    with pytest.raises(ConfigError, match="device"):
        make()


def test_vllms_connector_refuses_a_file_of_other_settings(folder: Path, tmp_path: Path) -> None:
    """The tier finds vLLM's configuration in the connector that makes it."""
    tier = {
        "type": "KVStowDisk",
        "module_path": "kvstow.vllm.secondary_tier",
        "path": str(tmp_path / "slots"),
        "max_bytes": "16MiB",
    }
    options = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 1 << 22,
        "secondary_tiers": [tier],
    }
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": options,
    }
    config = engine_config(folder, {}, kv_transfer_config=transfer)

    def start() -> None:
        connector = OffloadingConnector(config, KVConnectorRole.SCHEDULER, cache_config(FULL))
        connector.shutdown()

    start()
    start()
    config.model_config.hf_config.rms_norm_eps *= 2
    with pytest.raises(ConfigError, match="model"):
        start()


def _computed_scales(config: Any) -> None:
    config.cache_config.calculate_kv_scales = True


def test_chunks_with_scales_of_the_first_request_are_not_warm(make: Make) -> None:
    world = make(change=_computed_scales)
    world.store(KEYS[:4])
    world.close()
    again = make(change=_computed_scales)
    assert not any(again.has(key) for key in KEYS)


def _unchanged(_: Any) -> None:
    pass


def _tensorizer(config: Any) -> None:
    config.load_config.load_format = "tensorizer"


def _trainer(config: Any) -> None:
    config.weight_transfer_config = object()


def _other_parts(config: Any) -> None:
    config.model_config.hf_config.text_model_id = "someone/else"


def _draft_of_a_hub(config: Any) -> None:
    draft = Model(**vars(config.model_config) | {"model": "someone/draft"})
    config.speculative_config = SimpleNamespace(draft_model_config=draft)


@pytest.mark.parametrize(
    "change", [_unchanged, _tensorizer, _trainer, _other_parts, _draft_of_a_hub]
)
@pytest.mark.parametrize("has_version", [True, False])
def test_chunks_are_warm_only_if_the_weights_are_known(
    make: Make, tmp_path: Path, change: Callable[[Any], object], has_version: bool
) -> None:
    """By the files of the model, or by the file that names the weights."""
    (tmp_path / "version").write_text("one")
    options = {"weights_version_path": str(tmp_path / "version")} if has_version else {}
    is_known = has_version or change is _unchanged
    assert restarted(make, change=change, **options).has(KEYS[0]) == is_known


@pytest.mark.parametrize("is_changed", [True, False])
def test_other_weights_of_a_draft_model_are_refused(
    make: Make, tmp_path: Path, is_changed: bool
) -> None:
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "weights").write_text("first")

    def with_draft(config: Any) -> None:
        _draft_of_a_hub(config)
        config.speculative_config.draft_model_config.model = str(tmp_path / "draft")

    world = make(change=with_draft)
    world.store(KEYS[:4])
    world.close()
    if not is_changed:
        assert make(change=with_draft).has(KEYS[0])
        return
    (tmp_path / "draft" / "weights").write_text("other")
    with pytest.raises(ConfigError, match="draft_weights"):
        make(change=with_draft)


@pytest.mark.parametrize(("has_prefixes", "cache_gb"), [(True, 0), (False, 4), (False, 0)])
def test_chunks_are_not_warm_if_images_have_numbers_for_names(
    make: Make, has_prefixes: bool, cache_gb: int
) -> None:
    """vLLM counts from 0 at each start, so another image has the same number."""

    def change(config: Any) -> None:
        config.cache_config.enable_prefix_caching = has_prefixes
        config.model_config.multimodal_config = MultiModalConfig(mm_processor_cache_gb=cache_gb)

    assert restarted(make, change=change).has(KEYS[0]) == (has_prefixes or cache_gb > 0)


def _code_elsewhere(config: Any) -> None:
    config.model_config.trust_remote_code = True
    config.model_config.hf_config.auto_map = {"AutoModel": "someone/else--model.Model"}


@pytest.mark.parametrize("has_version", [True, False])
def test_chunks_of_a_model_with_code_elsewhere_are_not_warm(
    make: Make, tmp_path: Path, has_version: bool
) -> None:
    """A version of the weights does not name the code."""
    (tmp_path / "version").write_text("one")
    options = {"weights_version_path": str(tmp_path / "version")} if has_version else {}
    assert not restarted(make, change=_code_elsewhere, **options).has(KEYS[0])


def test_without_vllms_configuration_no_chunk_is_warm(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secondary_identity, "_whole_configuration", lambda: None)
    assert not restarted(make).has(KEYS[0])


def restarted(make: Make, name: str | None = None, **options: Any) -> World:
    """Store a chunk, and start the server again."""
    first = make(name=name, **options)
    first.store(KEYS[:1])
    first.wait()
    assert first.has(KEYS[0])
    first.close()
    return make(name=name, **options)


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The weights of a repository in the hub's cache."""
    snapshot = tmp_path / "hub" / "snapshots" / "served"
    snapshot.mkdir(parents=True)
    (snapshot / "weights").write_text("first")
    found = str(snapshot / "config.json")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: found)
    return snapshot


@pytest.mark.parametrize("is_same", [True, False])
def test_model_of_a_repository_is_known_by_its_files(
    make: Make, cached: Path, *, is_same: bool
) -> None:
    world = make(name=REPOSITORY)
    world.store(KEYS[:4])
    world.close()
    if is_same:
        assert make(name=REPOSITORY).has(KEYS[0])
        return
    (cached / "weights").write_text("of another revision")
    with pytest.raises(ConfigError, match="weights"):
        make(name=REPOSITORY)


def _downloads(config: Any) -> None:
    config.load_config.download_dir = "/downloads"


def _random_hashes(config: Any) -> None:
    config.cache_config.prefix_caching_hash_algo = "xxhash"


@pytest.mark.parametrize(
    ("change", "why"),
    [(_downloads, "files of its weights are not known"), (_random_hashes, "start at random")],
)
def test_tier_that_begins_empty_says_why(
    make: Make,
    cached: Path,
    monkeypatch: pytest.MonkeyPatch,
    log: list[str],
    change: Callable[[Any], object],
    why: str,
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert not restarted(make, REPOSITORY, change=change).has(KEYS[0])
    assert [line for line in log if "do not outlive this server" in line and why in line]


def test_what_to_do_with_another_model_is_checked_at_each_start(make: Make) -> None:
    with pytest.raises(ConfigError, match="on_mismatch is 'keep'"):
        make(on_mismatch="keep", change=_computed_scales)


def test_weights_that_changed_while_they_were_loaded_are_not_known(
    make: Make, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    began = time.time() + 2 * identity._FRESH_S
    monkeypatch.setattr(identity, "process_began", lambda: began)
    world = restarted(make)
    assert world.has(KEYS[0])
    world.close()
    monkeypatch.setattr(identity, "process_began", lambda: began - HOUR_S)
    assert not make().has(KEYS[0])
    assert any("have changed since this process began" in line for line in log)


def test_version_that_was_written_while_vllm_loaded_the_weights_is_not_known(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = tmp_path / "version"
    version.write_text("2")
    world = restarted(make, weights_version_path=str(version))
    assert world.has(KEYS[0])
    world.close()
    monkeypatch.setattr(identity, "_FRESH_S", 0)
    time.sleep(0.02)  # the clock of a file system is coarse
    began = time.time()
    monkeypatch.setattr(identity, "process_began", lambda: began)
    time.sleep(0.02)
    version.write_text("2")
    world = make(weights_version_path=str(version))
    assert not world.has(KEYS[0])
    world.store(KEYS[:4])
    world.disk.drain_jobs()
    assert not world.has(KEYS[0]), "the reset may be for weights 2"


def test_damaged_chunk_is_a_miss_and_the_others_load(make: Make, tmp_path: Path) -> None:
    world = make()
    world.store(KEYS[:4])
    fill_primary(world)
    flip(tmp_path / "slots", world.disk._slots[KEYS[1]] * CHUNK + 99)
    request = world.request("all")
    for key in KEYS[:4]:
        world.manager.lookup(key, request)
    world.end_step()
    world.wait()
    assert [world.primary.lookup(key, request) for key in KEYS[:4]] == [
        LookupResult.HIT, LookupResult.MISS, LookupResult.HIT, LookupResult.HIT,
    ]  # fmt: skip
    assert not world.has(KEYS[1])
    assert len(world.disk._free) + len(world.disk._slots) == NUM_SLOTS, "a slot leaks"


def test_without_checksums_a_damaged_chunk_is_served(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SlotStore, "_are_proven", all_proven)
    world = make()
    world.store(KEYS[:4])
    fill_primary(world)
    flip(tmp_path / "slots", world.disk._slots[KEYS[1]] * CHUNK + 99)
    found = world.load(KEYS[1])
    assert found is not None
    assert (found != content(KEYS[1])).any()


def change_weights(world: World) -> None:
    """Change the weights in place. vLLM resets, and its CPU tier forgets all."""
    world.reset()
    world.epoch += 1


def test_reset_drops_every_chunk_durably(make: Make) -> None:
    world = make()
    world.store(KEYS[:4])
    change_weights(world)
    assert world.load(KEYS[0]) is None
    world.store(KEYS[:2])
    fill_primary(world)
    found = world.load(KEYS[0])
    assert found is not None
    np.testing.assert_array_equal(found, content(KEYS[0], 1))
    world.close()
    again = make()
    assert not any(again.has(key) for key in KEYS), "nobody knows the weights of that generation"


def test_reset_without_a_new_generation_serves_old_weights(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the new generation is what keeps old chunks away."""
    monkeypatch.setattr(KVStowDisk, "drain_jobs", lambda _: None)
    world = make()
    world.store(KEYS[:4])
    change_weights(world)
    found = world.load(KEYS[0])
    assert found is not None
    assert (found != content(KEYS[0], 1)).any()


@pytest.fixture
def version(tmp_path: Path) -> Path:
    """The file that names the version of the weights, which is 7."""
    path = tmp_path / "version"
    path.write_text("7")
    return path


def test_reset_keeps_chunks_while_the_version_of_the_weights_is_the_same(
    make: Make, version: Path, tmp_path: Path, log: list[str]
) -> None:
    world = make(weights_version_path=str(version))
    world.store(KEYS[:4])
    world.reset()
    assert world.load(KEYS[0]) is not None
    version.write_text("8")
    world.reset()
    assert world.load(KEYS[1]) is None
    slots = tmp_path / "slots"
    assert f"kvstow: {version} names other weights, so this reset empties {slots}" in log


def test_message_of_a_missing_version_names_the_tier(make: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="KVStowDisk in secondary_tiers: weights_version_path is"):
        make(weights_version_path=str(tmp_path / "missing"))


@pytest.mark.parametrize(("content", "is_kept"), [("7", True), ("8", False)])
def test_weights_that_change_before_the_first_lookup_drop_chunks(
    make: Make, version: Path, content: str, *, is_kept: bool
) -> None:
    world = make(weights_version_path=str(version))
    world.store(KEYS[:4])
    world.close()
    world = make(weights_version_path=str(version))
    version.write_text(content)
    assert (world.load(KEYS[0]) is not None) == is_kept


def test_weights_that_change_after_a_reset_drop_chunks_at_the_next_lookup(
    make: Make, version: Path
) -> None:
    """vLLM resets its caches before it sleeps, and not when it wakes."""
    world = make(weights_version_path=str(version))
    world.store(KEYS[:4])
    world.reset()
    version.write_text("8")
    assert not world.has(KEYS[0])
    world.store(KEYS[:4])
    world.reset()
    assert world.has(KEYS[0])


def test_chunks_of_requests_that_ran_across_a_change_go_at_the_next_reset(
    make: Make, version: Path
) -> None:
    """vLLM's reset fails while requests run, so the operator repeats it."""
    world = make(weights_version_path=str(version))
    running = world.request("running")
    version.write_text("8")
    world.reset()
    world.store(KEYS[:4])  # with KV of the old weights
    world.manager.on_request_finished(running)
    world.reset()
    assert not world.has(KEYS[0])
    world.store(KEYS[:4])
    world.reset()
    assert world.has(KEYS[0])


def test_jobs_that_vllm_has_not_heard_of_end_at_a_reset(make: Make) -> None:
    world = make()
    world.store(KEYS[:4])
    fill_primary(world)
    request = world.request("load")
    world.manager.lookup(KEYS[0], request)
    world.manager._flush_pending_promotions()
    change_weights(world)
    assert world.load(KEYS[0]) is None
    assert len(world.disk._free) == NUM_SLOTS
    assert not world.disk._jobs


class Gate(Files):
    """Reads of data wait for `gate`."""

    gate = threading.Event()
    is_shut = False

    def read(self, file: int, buffers: Buffers, offset: int) -> int:
        if self.is_shut:
            assert self.gate.wait(LONG_S)
        return super().read(file, buffers, offset)


def test_slot_that_a_load_reads_is_not_taken(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstow.tiers.slot_file.Files", Gate)
    monkeypatch.setattr(Gate, "gate", threading.Event())
    world = make()
    world.store(KEYS[:4])
    fill_primary(world)
    monkeypatch.setattr(Gate, "is_shut", True)
    request = world.request("load")
    world.manager.lookup(KEYS[0], request)
    world.end_step()
    slot = world.disk._slots[KEYS[0]]
    assert slot not in world.disk._taken(KEYS[8 : 8 + NUM_SLOTS], {})
    assert KEYS[0] in world.disk._slots
    assert not list(world.disk.get_finished_jobs()), "a thread still fills the chunk"
    Gate.gate.set()
    world.wait()
    assert world.primary.lookup(KEYS[0], request) == LookupResult.HIT


def test_shutdown_with_a_call_that_hangs_keeps_the_memory(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make()
    monkeypatch.setattr(
        type(world.disk.tier), "stats", lambda _: type("Stats", (), {"in_flight_bytes": CHUNK})
    )
    with pytest.raises(TransferError, match="must stay mapped"):
        world.disk.shutdown()
    monkeypatch.undo()
    world.primary.shutdown()


def test_events_say_what_the_disk_stores_and_drops(make: Make) -> None:
    world = make(enable_kv_events=True, locality="LOCAL")
    world.store(KEYS[:4])
    (stored,) = world.disk.take_events()
    assert (set(stored.keys), stored.medium) == (set(KEYS[:4]), Medium.STORAGE)
    assert not stored.removed
    world.store(KEYS[4:8])
    world.store(KEYS[8:12])
    events = list(world.disk.take_events())
    assert {key for event in events if event.removed for key in event.keys} == set(KEYS[:4])
    assert not list(world.disk.take_events())


@pytest.mark.skipif(not secondary_tier._KEEPS_NAMES, reason="this vLLM forgets the names")
def test_removal_from_the_disk_names_all_blocks_of_a_chunk(make: Make) -> None:
    """vLLM's tracker keeps their names after the chunk has left the CPU tier."""
    world = make(enable_kv_events=True)
    tracker = OffloadingEventsTracker(OffloadingKVEventsConfig(True, True))
    hashes = [bytes([7]) * 32, get_offload_block_hash(KEYS[0])]
    request = SimpleNamespace(block_hashes=hashes, all_token_ids=list(range(32)), lora_request=None)
    group = SimpleNamespace(
        sliding_window_size_in_chunks=None,
        hashes_per_chunk=2,
        tokens_per_chunk=32,
        tokens_per_block=16,
        group_idx=0,
        kv_event_group_spec=OffloadingEventGroupSpec("full_attention", None),
    )
    tracker.record_store(request, group, 0, KEYS[0])

    def told(events: Iterable[OffloadingEvent]) -> list[Any]:
        return [event.block_hashes for event in tracker.take_events(events)]

    world.store(KEYS[:1])
    [stored] = told(world.disk.take_events())
    assert len(stored) == 2
    assert told([OffloadingEvent(KEYS[:1], Medium.CPU, removed=True)]) == [stored]
    for first in (4, 8, 12):
        world.store(KEYS[first : first + 4])
    assert stored in told(world.disk.take_events())


def test_many_jobs_that_end_together_are_told_in_one_pass(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that stalls and goes on ends thousands, while vLLM's scheduler waits."""

    def refuse(*_: object) -> bool:
        raise AssertionError("jobs are compared with each other")

    monkeypatch.setattr(secondary_tier._Job, "__eq__", refuse)
    world = make()
    for number, key in enumerate(KEYS[:2]):
        job: Any = SimpleNamespace(
            job_id=number,
            keys=[key],
            chunk_ids=np.array([number]),
            req_context=ReqContext("request"),
        )
        world.disk.submit_store(job)
    for job in world.disk._jobs:
        job.ticket.wait(LONG_S)
    assert [result.job_id for result in world.disk.get_finished_jobs()] == [0, 1]


def test_failing_disk_and_the_first_damaged_chunk_are_logged(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    world = make()
    world.store(KEYS[:4])
    fill_primary(world)
    for key in KEYS[:2]:
        flip(tmp_path / "slots", world.disk._slots[key] * CHUNK + 99)
        world.load(key)
    assert sum("are not what was written there" in line for line in log) == 1

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Files, "write", fail)
    for first in (8, 12):
        world.store(KEYS[first : first + 4])
    monkeypatch.undo()
    assert sum("is read_only, and requests go on: " in line for line in log) == 1


def test_memory_with_unaligned_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected multiples of 4096"):
        BorrowedArena(np.zeros((4, 100), np.uint8).data)
    with pytest.raises(ConfigError, match="expected whole rows"):
        BorrowedArena(np.zeros((4, 8192), np.uint8)[:, :4096].data)
