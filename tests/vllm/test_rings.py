"""Models that compress several tokens into one key, as DeepSeek V4 does.

The keys that are not compressed yet lie in windows of their own, or in a ring for each request,
which no hit needs. vLLM computes the windows of DeepSeek V4.1 again after each hit. These layers
have kernels for GPUs only. So vLLM's own classes lay the models out here, and its own schedulers
run with a simulated model.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.vllm.halves import (
    BLOCK_SIZE,
    FULL,
    PAGE_BYTES,
    WINDOW,
    Scheduler,
    cache_config,
    engine_config,
)
from tests.vllm.simulated import Simulated, WrongKV, tokens
from tests.vllm.test_simulated import Life
from tests.vllm.versions import planning
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.request import Request

from kvstow import ConfigError, FullAttention, SlidingWindow
from kvstow.vllm.connector import KVStowConnector, _horizon_blocks
from kvstow.vllm.model import Model
from kvstow.vllm.tracked import TrackedRequest

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

RING = CircularBufferSpec(
    block_size=8,
    num_kv_heads=1,
    head_size=8,
    dtype=torch.float32,
    page_size_padded=PAGE_BYTES,
)
MLA_WINDOW = SlidingWindowMLASpec(
    block_size=BLOCK_SIZE,
    num_kv_heads=1,
    head_size=16,
    dtype=torch.float32,
    sliding_window=32,
    model_version="deepseek_v4",
)


needs_replay = pytest.mark.skipif(
    not hasattr(MLA_WINDOW, "bounded_replay"), reason="vLLM before 0.31 computes no window again"
)


def live(engine: Simulated, seed: int) -> None:
    """Run random requests, and check what they read from the host."""
    life = Life(engine, seed)
    life.go(400)
    assert life.num_host_tokens > 500, "too few hits to prove anything"
    engine.close()


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("num_in_flight", [1, 2], ids=["sync", "async"])
def test_requests_read_their_own_kv_beside_rings(
    folder: Path, num_in_flight: int, lazy: bool
) -> None:
    """A ring before the other groups, so vLLM numbers these otherwise than kvstow."""
    engine = Simulated(
        folder,
        {"num_cpu_blocks": 400, "lazy_offload": lazy},
        specs=(RING, FULL, RING, MLA_WINDOW),
        num_blocks=75,
        num_in_flight=num_in_flight,
        settings={"scheduling_policy": "priority"},
    )
    assert engine.half.tier.model.group_ids == (1, 3)
    live(engine, num_in_flight)


def test_a_copy_into_the_wrong_group_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the test above."""
    engine = Simulated(
        folder, {"num_cpu_blocks": 400}, specs=(RING, FULL, MLA_WINDOW), num_blocks=90
    )
    monkeypatch.setattr(Model, "own", lambda _, of_each: of_each[-1:0:-1])
    with pytest.raises(WrongKV):
        Life(engine, 0).go(400)


@needs_replay
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("num_in_flight", [1, 2], ids=["sync", "async"])
def test_requests_read_their_own_kv_if_windows_are_computed_again(
    folder: Path, num_in_flight: int, lazy: bool
) -> None:
    """DeepSeek V4.1: vLLM caches no prefix of its windows."""
    engine = Simulated(
        folder,
        {"num_cpu_blocks": 400, "lazy_offload": lazy},
        specs=(replace(MLA_WINDOW, bounded_replay=True), RING, FULL),
        num_blocks=37,
        num_in_flight=num_in_flight,
    )
    model = engine.half.tier.model
    assert model.group_ids == (2,) and model.replayed_tokens == 32
    live(engine, num_in_flight)


@pytest.mark.parametrize(("start", "given"), [(96, 128), (0, 100)])
def test_tokens_of_a_hit_count_as_given_although_vllm_computes_them_again(
    start: int, given: int
) -> None:
    """Another connector may have loaded them, and vLLM writes only the window of them."""
    model = replace(Model.of(cache_config(FULL)), replayed_tokens=32)
    request = cast(Request, SimpleNamespace(num_computed_tokens=100, replay_start=start))
    assert TrackedRequest(request, model, [0], BLOCK_SIZE).given_tokens() == given


@needs_replay
def test_a_preemption_amid_the_tokens_of_a_hit_keeps_the_hit(folder: Path) -> None:
    """vLLM computes them again for its windows, so the request has fewer tokens than its hit."""
    engine = Simulated(
        folder,
        {"num_cpu_blocks": 60, "lazy_offload": True},
        specs=(replace(MLA_WINDOW, bounded_replay=True), FULL),
        num_blocks=50,
        settings={"scheduling_policy": "priority", "max_num_batched_tokens": 20},
    )
    engine.add("first", tokens(129, 1), max_tokens=1)
    engine.settle()
    engine.add("urgent", tokens(250, 2), max_tokens=60, priority=0)
    while "urgent" not in engine.answers:
        engine.step()
    pool = engine.scheduler.kv_cache_manager.block_pool
    pool.get_new_blocks(pool.get_num_free_blocks() - 16)
    engine.add("patient", tokens(140, 1), priority=1)
    patient = engine.requests["patient"]
    while not patient.num_computed_tokens:
        engine.step()
    assert (patient.replay_start, patient.num_computed_tokens) == (96, 96 + 19)
    pool.get_new_blocks(pool.get_num_free_blocks())
    while not patient.num_preemptions:
        engine.step()
    assert all(pool.get_cached_block(each, [1]) for each in patient.block_hashes[:8])
    engine.close()


def test_the_horizon_counts_groups_that_are_left_out(folder: Path) -> None:
    """They take their blocks from the queue in which blocks wait for their store."""
    config = engine_config(folder, {"num_cpu_blocks": 4}, max_num_seqs=8, max_model_len=1024)
    config.scheduler_config.max_num_batched_tokens = 1024
    of_tokens = (1024 + 1024) // BLOCK_SIZE + 8
    assert _horizon_blocks(Model.of(cache_config(FULL, RING)), config) == of_tokens + 8
    if hasattr(MLA_WINDOW, "bounded_replay"):
        window = replace(MLA_WINDOW, bounded_replay=True)
        assert _horizon_blocks(Model.of(cache_config(window, FULL)), config) == 2 * of_tokens


def deepseek_v4(num_layers: int) -> dict[str, Any]:
    """Return what the layers of DeepSeek V4 tell vLLM: windows, compressed keys, and those to come.

    `models/deepseek_v4` of vLLM has the sizes.
    """

    def window(block_size: int, tokens: int, size: int, dtype: torch.dtype, **more: Any) -> Any:
        return SlidingWindowMLASpec(
            block_size=block_size,
            num_kv_heads=1,
            head_size=size,
            dtype=dtype,
            sliding_window=tokens,
            alignment=576,
            **more,
        )

    def compressed(size: int, ratio: int, **more: Any) -> Any:
        return MLAAttentionSpec(
            block_size=256,
            num_kv_heads=1,
            head_size=size,
            dtype=torch.uint8,
            tokens_per_state=ratio,
            alignment=576,
            **more,
        )

    packed = {
        "model_version": "deepseek_v4",
        "cache_dtype_str": "fp8_ds_mla",
        "state_content_bytes": 584,
    }
    layers = {}
    for at in range(num_layers):
        layers[f"{at}.swa"] = window(64, 128, 512, torch.uint8, **packed)
        if at < 2:
            continue
        if at % 2:
            layers[f"{at}.attn"] = compressed(512, 128, **packed)
            layers[f"{at}.keys"] = window(8, 128, 1024, torch.float32)
        else:
            layers[f"{at}.attn"] = compressed(512, 4, **packed)
            layers[f"{at}.keys"] = window(4, 8, 2048, torch.float32)
            layers[f"{at}.indexer"] = compressed(132, 4)
            layers[f"{at}.indexer.keys"] = window(4, 8, 512, torch.float32)
    return layers


def test_deepseek_v4_is_served_as_vllm_lays_it_out(folder: Path) -> None:
    layers = deepseek_v4(6)
    config = engine_config(folder, {"num_cpu_blocks": 4}, block_size=256)
    config.cache_config.kv_cache_layout = "BLHNC"
    groups = planning.get_kv_cache_groups(config, layers)
    laid_out = planning.get_kv_cache_config_from_groups(config, groups, 256 << 20)
    model = Model.of(laid_out)
    assert set(model.groups) == {
        FullAttention(256),
        SlidingWindow(64, 128),
        SlidingWindow(4, 8),
        SlidingWindow(8, 128),
    }
    assert model.tokens_per_hit == 256 and model.tokens_per_hash == 4
    placed = [layer for group in model.layers for layer in group]
    assert {layer.name: layer.block_bytes for layer in placed} == {
        name: spec.page_size_bytes for name, spec in layers.items()
    }
    for group in model.layers:  # the layers of a block do not overlap, and fit into it
        ends = [0, *(layer.offset + layer.block_bytes for layer in group)]
        starts = [*(layer.offset for layer in group), group[0].block_stride]
        assert all(end <= start for end, start in zip(ends, starts, strict=True))


# Those of DeepSeek V4 with blocks of a fourth of the tokens, and pages of one size.
FOURTHS = (
    replace(MLA_WINDOW, block_size=16, head_size=16, sliding_window=32),
    replace(FULL, block_size=64, head_size=2, head_size_v=2),
    replace(MLA_WINDOW, block_size=4, head_size=64, sliding_window=8, model_version=None),
    replace(MLA_WINDOW, block_size=8, head_size=32, sliding_window=32, model_version=None),
)


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("num_in_flight", [1, 2], ids=["sync", "async"])
def test_requests_of_deepseek_v4_read_their_own_kv(
    folder: Path, num_in_flight: int, lazy: bool
) -> None:
    engine = Simulated(
        folder,
        {"num_cpu_blocks": 900, "lazy_offload": lazy},
        specs=FOURTHS,
        num_blocks=160,
        num_in_flight=num_in_flight,
    )
    live(engine, num_in_flight)


@pytest.mark.parametrize("retention", [0, 64, None])
def test_the_host_hits_as_much_of_deepseek_v4_as_the_device(retention: int | None) -> None:
    hits = []
    for num_tokens in (63, 64, 65, 130, 300):
        scheduler = Scheduler(*FOURTHS, num_blocks=400, num_host_blocks=400, retention=retention)
        assert scheduler.serve(scheduler.request("a", num_tokens)) == 0
        again = scheduler.request("b", num_tokens + 40, num_shared=num_tokens)
        on_device = scheduler.manager.get_computed_blocks(again)[1]
        assert scheduler.manager.reset_prefix_cache()
        hits.append(scheduler.serve(again))
        assert hits[-1] == on_device, num_tokens
    assert hits[-1] == 256


def test_rings_are_left_out() -> None:
    rings = UniformTypeKVCacheSpecs(block_size=8, kv_cache_specs={"0": RING})
    for ring in (RING, rings):
        model = Model.of(cache_config(ring, FULL, WINDOW))
        assert model == replace(Model.of(cache_config(FULL, FULL, WINDOW)), **_behind_one(model))
        assert model.group_ids == (1, 2) and model.own("abc") == ["b", "c"]
        assert model.other_block_sizes == (0,)
        assert [layer.name for layers in model.layers for layer in layers] == ["1", "2"]
    odd = replace(RING, block_size=BLOCK_SIZE * 2)
    with pytest.raises(ConfigError, match=r"blocks of \[32\] tokens, .* 16 tokens"):
        Model.of(cache_config(FULL, odd))


def _behind_one(model: Model) -> dict[str, Any]:
    names = ("groups", "layers", "group_ids", "other_block_sizes")
    return {name: getattr(model, name) for name in names}


@pytest.mark.parametrize("is_newer_runner", [True, False])
@pytest.mark.parametrize("layers", [[], [1]])
def test_a_model_with_ngrams_needs_the_newer_runner(
    folder: Path, monkeypatch: pytest.MonkeyPatch, layers: list[int], *, is_newer_runner: bool
) -> None:
    """A load does not write the generated tokens that the older one keeps for n-grams."""
    config = engine_config(folder, {"num_cpu_blocks": 8})
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", is_newer_runner)
    config.model_config.hf_text_config.engram_layer_ids = layers
    is_refused = bool(layers) and not is_newer_runner
    message = "start vLLM with VLLM_USE_V2_MODEL_RUNNER=1"
    with pytest.raises(ConfigError, match=message) if is_refused else nullcontext():
        KVStowConnector(config, KVConnectorRole.SCHEDULER, cache_config(FULL))
