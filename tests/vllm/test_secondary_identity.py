"""Which chunks of `KVStowDisk` outlive a restart or a reset: never those of another model."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import tests.vllm.runner  # noqa: F401 - before anything imports vLLM
from tests.tiers.setup import LONG_S
from tests.vllm import secondary
from tests.vllm.halves import FULL, WINDOW, cache_config, engine_config
from tests.vllm.secondary import KEYS, Make, Model, World, content, fill_primary
from vllm.config.multimodal import MultiModalConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform

from kvstow import ConfigError
from kvstow.vllm import identity, secondary_identity
from kvstow.vllm.secondary_tier import KVStowDisk

HOUR_S = 3600.0
REPOSITORY = "someone/something"


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

    class OneOfTwo(secondary.Spec):
        def __init__(self, model: str) -> None:
            super().__init__(model)
            parallel = dataclasses.replace(self.config.parallel, data_parallel_size=2)
            self.config = dataclasses.replace(self.config, parallel=parallel)

    monkeypatch.setattr(secondary, "Spec", OneOfTwo)
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


def connector_options(tmp_path: Path, **extra: Any) -> dict[str, Any]:
    """Return the configuration of vLLM's connector with the tier."""
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
        **extra,
    }
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": options,
    }


def test_vllms_connector_refuses_a_file_of_other_settings(folder: Path, tmp_path: Path) -> None:
    """The tier finds vLLM's configuration in the connector that makes it."""
    config = engine_config(folder, {}, kv_transfer_config=connector_options(tmp_path))

    def start() -> None:
        connector = OffloadingConnector(config, KVConnectorRole.SCHEDULER, cache_config(FULL))
        connector.shutdown()

    start()
    start()
    config.model_config.hf_config.rms_norm_eps *= 2
    with pytest.raises(ConfigError, match="model"):
        start()


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
@pytest.mark.parametrize("groups", [(FULL, WINDOW), (FULL, FULL)], ids=["window", "full"])
def test_chunks_of_several_blocks_of_a_window_are_warned_of(
    folder: Path, tmp_path: Path, log: list[str], groups: tuple[Any, ...], blocks_per_chunk: int
) -> None:
    transfer = connector_options(tmp_path, blocks_per_chunk=blocks_per_chunk)
    config = engine_config(folder, {}, kv_transfer_config=transfer)
    OffloadingConnector(config, KVConnectorRole.SCHEDULER, cache_config(*groups)).shutdown()
    is_wrong = blocks_per_chunk > 1 and WINDOW in groups
    assert any("a chunk has 2 blocks" in line for line in log) == is_wrong


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


def _adapters(config: Any) -> None:
    config.lora_config = object()


def _draft_of_a_hub(config: Any) -> None:
    draft = Model(**vars(config.model_config) | {"model": "someone/draft"})
    config.speculative_config = SimpleNamespace(draft_model_config=draft)


@pytest.mark.parametrize(
    "change", [_unchanged, _tensorizer, _trainer, _other_parts, _adapters, _draft_of_a_hub]
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


def test_server_after_one_that_did_not_know_its_weights_starts(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the first start of all downloads the weights: the next one knows them."""
    began = time.time() + 2 * identity._FRESH_S
    monkeypatch.setattr(identity, "process_began", lambda: began - HOUR_S)
    first = make()
    first.store(KEYS[:1])
    assert first.has(KEYS[0])
    first.close()
    monkeypatch.setattr(identity, "process_began", lambda: began)
    second = make()
    assert not second.has(KEYS[0])
    second.store(KEYS[1:2])
    second.close()
    assert make().has(KEYS[1])


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


def test_reset_drops_every_chunk_durably(make: Make) -> None:
    world = make()
    world.store(KEYS[:4])
    world.change_weights()
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
    world.change_weights()
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


def test_load_after_a_reset_waits_until_workers_have_written_what_they_had_left(
    make: Make, version: Path
) -> None:
    """vLLM gives the chunks of its CPU tier away at once. The workers hear of it a step later."""
    world = make(weights_version_path=str(version))
    world.store(KEYS[:4])
    running = world.manager.prepare_store(KEYS[8:9], world.request("running", KEYS[8:9]))
    assert running is not None
    world.manager.reset_cache()
    request = world.request("next", KEYS[:4])
    for key in KEYS[:4]:
        world.manager.lookup(key, request)
    world.end_step()
    for job in world.disk._jobs:
        assert job.ticket is not None
        job.ticket.wait(LONG_S)
    is_early = world.has(KEYS[0])
    rows = np.asarray(world.view).view(np.uint8)
    rows[running.store_spec.chunk_ids[0]] = content(KEYS[8])
    del rows
    world.flush()
    for key in KEYS[:4]:
        found = world.load(key)
        assert found is not None
        np.testing.assert_array_equal(found, content(key))
    assert not is_early, "with asynchronous scheduling, the workers are a step behind"


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


def test_server_after_one_whose_weights_changed_in_place_starts(make: Make, version: Path) -> None:
    world = make(weights_version_path=str(version))
    world.store(KEYS[:4])
    version.write_text("8")
    world.change_weights()
    world.store(KEYS[:4])
    world.close()
    world = make(weights_version_path=str(version))
    assert not world.has(KEYS[0])
    world.store(KEYS[:4])
    world.close()
    assert make(weights_version_path=str(version)).has(KEYS[0])


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
