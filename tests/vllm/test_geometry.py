"""`kvstow.geometry` lays models out as vLLM does: groups, sizes of states, and blocks."""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tests.vllm.runner  # noqa: F401 - before anything imports Triton
import torch
from tests.vllm.halves import engine_config
from tests.vllm.versions import planning
from transformers import (
    CONFIG_MAPPING,
    DeepseekV3Config,
    GptOssConfig,
    JambaConfig,
    Qwen3NextConfig,
)
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.mamba_utils import (
    MambaStateDtypeCalculator,
    MambaStateShapeCalculator,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.models.config import NemotronHForCausalLMConfig
from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase
from vllm.utils.torch_utils import resolve_kv_cache_dtype_string
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvstow.geometry import PRESETS, find_model, lay_out
from kvstow.geometry.config import parse_config
from kvstow.geometry.layout import _group_sizes, _state_bytes
from kvstow.geometry.model_types import DEFAULTS, FULL_BELOW, LATENT_TYPES, WINDOW_PERIODS

HYBRIDS = ["gemma-3-27b", "gpt-oss-20b", "gpt-oss-120b", "granite-4.0-h-small"]
BLOCK = 528  # room for Granite's state


@pytest.mark.parametrize("name", HYBRIDS)
def test_groups_are_those_of_vllm(name: str) -> None:
    model = find_model(name)
    size = {"block_size": BLOCK, "num_kv_heads": model.num_kv_heads, "dtype": torch.bfloat16}
    size["head_size"] = model.head_values // 2
    full = FullAttentionSpec(**size)
    specs: dict[str, KVCacheSpec] = {
        "full": full,
        "window": SlidingWindowSpec(**size, sliding_window=model.window or 1),
        "state": MambaSpec(
            block_size=BLOCK,
            shapes=((1,),),
            dtypes=(torch.bfloat16,),
            page_size_padded=full.page_size_bytes,
            mamba_cache_mode="align",
        ),
    }
    layers = {f"layers.{number}": specs[kind] for number, kind in enumerate(model.layers)}

    groups = planning._get_kv_cache_groups_uniform_page_size(layers)

    own = lay_out(model, BLOCK)
    assert [len(group.layer_names) for group in groups] == [one.num_layers for one in own.groups]
    assert [
        sum(layers[name].page_size_bytes for name in group.layer_names) for group in groups
    ] == [one.block_bytes for one in own.groups]


@pytest.mark.skipif(
    not hasattr(planning, "kv_cache_groups_tp_replicas"), reason="vLLM 0.30 reports no equal KV"
)
@pytest.mark.parametrize("name", ["qwen3-235b", "deepseek-v3"])
@pytest.mark.parametrize("ranks", [1, 4, 8])
def test_ranks_that_share_a_copy_are_those_that_vllm_reports(name: str, ranks: int) -> None:
    """At 8 ranks, two of them repeat each KV head of qwen3-235b."""
    model = find_model(name)
    size = {"block_size": 16, "num_kv_heads": max(1, model.num_kv_heads // ranks)}
    of_a_latent = {"head_size": model.head_values, "max_tp_shards": 1}
    of_heads = {"head_size": model.head_values // 2}
    spec: KVCacheSpec = (
        MLAAttentionSpec(**size, **of_a_latent, dtype=torch.bfloat16)
        if model.is_latent
        else FullAttentionSpec(**size, **of_heads, dtype=torch.bfloat16)
    )
    replicas = planning.kv_cache_groups_tp_replicas([KVCacheGroupSpec(["layer"], spec)], ranks)
    assert lay_out(model, 16, num_ranks=ranks).num_copies == replicas


@pytest.mark.parametrize(("windows", "full"), [(12, 13), (12, 17), (12, 18), (13, 30)])
def test_nearly_equal_numbers_of_layers_are_two_groups(windows: int, full: int) -> None:
    """vLLM pads the scarcer kind as long as the other has less than 1.5 times its layers."""
    size = {"block_size": 16, "num_kv_heads": 1, "head_size": 1, "dtype": torch.bfloat16}
    kinds = ["window"] * windows + ["full"] * full
    specs: dict[str, KVCacheSpec] = {
        "full": FullAttentionSpec(**size),
        "window": SlidingWindowSpec(**size, sliding_window=128),
    }
    layers = {f"layers.{number}": specs[kind] for number, kind in enumerate(kinds)}
    sizes = [
        len(group.layer_names) for group in planning._get_kv_cache_groups_uniform_page_size(layers)
    ]
    assert [size for kind in _group_sizes([windows, full]) for size in kind] == sizes


BAMBA: dict[str, Any] = {"attn_layer_indices": [9, 18, 27]}
WINDOWS: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 4096}


@pytest.mark.parametrize(
    ("model_type", "changed"),
    [
        *((model_type, {}) for model_type in [*WINDOW_PERIODS, "llama4_text"]),
        ("bamba", BAMBA),
        *((model_type, WINDOWS) for model_type in FULL_BELOW),
        *((model_type, WINDOWS | {"max_window_layers": 0}) for model_type in FULL_BELOW),
    ],
)
def test_layers_without_types_are_those_that_transformers_adds(
    model_type: str, changed: dict[str, Any]
) -> None:
    config = CONFIG_MAPPING[model_type](**changed).get_text_config()
    fields = config.to_dict() | {"layer_types": None, "layers_block_type": None}
    fields |= {"sliding_window_pattern": None, "model_type": model_type}
    fields |= {"max_window_layers": changed.get("max_window_layers")}
    names = getattr(config, "layer_types", None) or config.layers_block_type
    assert (
        parse_config("m", fields).layers
        == parse_config("m", fields | {"layer_types": names}).layers
    )


@pytest.mark.parametrize("model_type", DEFAULTS)
@pytest.mark.parametrize("is_empty", [False, True])
def test_fields_that_a_config_leaves_out_are_those_of_transformers(
    model_type: str, is_empty: bool
) -> None:
    """As Gemma 3, whose 12B config has no size of a head and whose 4B config no number of heads."""
    hidden = CONFIG_MAPPING[model_type]().hidden_size
    given = {} if is_empty else {"hidden_size": 2 * hidden, "num_hidden_layers": 12}
    fields = given | {"model_type": model_type, "dtype": "bfloat16"}
    config = CONFIG_MAPPING[model_type](**given, dtype="bfloat16")
    assert parse_config("m", fields) == parse_config("m", config.to_dict())


def convertor(fields: dict[str, Any]) -> Any:
    config: Any = SimpleNamespace(**fields)
    return ModelArchConfigConvertorBase(config, config)


@pytest.mark.parametrize("model_type", LATENT_TYPES)
def test_models_with_a_latent_are_those_of_vllm(model_type: str) -> None:
    fields = dict(PRESETS["deepseek-v3"]) | {"model_type": model_type}
    assert convertor(fields).is_deepseek_mla()
    assert parse_config("m", fields).head_values == convertor(fields).get_head_size()


def test_minicpm3_has_the_heads_of_vllm() -> None:
    """Its config has the fields of a latent. vLLM keeps K and V of 40 heads."""
    config = CONFIG_MAPPING["minicpm3"]()
    assert not convertor(config.to_dict()).is_deepseek_mla()
    model = parse_config("m", config.to_dict() | {"dtype": "bfloat16"})
    assert not model.is_latent
    assert model.num_kv_heads == config.num_attention_heads == 40
    assert model.head_values == 2 * (config.qk_nope_head_dim + config.qk_rope_head_dim) == 2 * 96


def test_chatglm_has_the_kv_heads_of_vllm() -> None:
    fields = {
        "model_type": "chatglm",
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "hidden_size": 4096,
        "multi_query_attention": True,
        "multi_query_group_num": 2,
    }
    assert parse_config("m", fields).num_kv_heads == convertor(fields).get_total_num_kv_heads() == 2
    alone = parse_config("m", fields | {"multi_query_attention": False})
    assert alone.num_kv_heads == 32


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_jamba_has_the_layers_of_transformers_and_the_states_of_vllm(ranks: int) -> None:
    config = JambaConfig()
    model = parse_config("jamba", config.to_dict() | {"dtype": "bfloat16"})
    kinds = {"attention": "full", "full_attention": "full"}
    assert list(model.layers) == [kinds.get(name, "state") for name in config.layers_block_type]
    assert model.state is not None
    channels = config.mamba_expand * config.hidden_size
    shapes = MambaStateShapeCalculator.mamba1_state_shape(
        ranks, channels, config.mamba_d_state, config.mamba_d_conv
    )
    expected = sum(2 * torch.Size(shape).numel() for shape in shapes)
    assert _state_bytes(model, model.state, ranks) == expected


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_state_of_mamba_has_the_size_of_vllm(ranks: int) -> None:
    model = find_model("granite-4.0-h-small")
    shapes = MambaStateShapeCalculator.mamba2_state_shape(ranks, 128 * 64, 1, 128, 64, 128, 4)
    assert model.state is not None
    expected = sum(2 * torch.Size(shape).numel() for shape in shapes)
    assert _state_bytes(model, model.state, ranks) == expected


@pytest.mark.parametrize(("dtype", "num_tokens"), [("bfloat16", 544), ("float32", 1056)])
def test_block_of_a_gated_delta_net_has_the_tokens_of_vllm(dtype: str, num_tokens: int) -> None:
    """vLLM rounds up to 16 tokens: 544, and 1,056 with recurrent states of 32 bits."""
    fields = Qwen3NextConfig().to_dict() | {"dtype": "bfloat16", "mamba_ssm_dtype": dtype}
    model = parse_config("qwen3-next", fields)
    shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(1, 16, 32, 128, 128, 4)
    assert model.state is not None
    conv, recurrent = (torch.Size(shape).numel() for shape in shapes)
    value_bytes = {"bfloat16": 2, "float32": 4}[dtype]
    assert _state_bytes(model, model.state, 1) == 2 * conv + value_bytes * recurrent
    assert lay_out(model, 16).block_tokens == num_tokens


def test_state_of_alice_ai_has_the_size_of_vllm() -> None:
    """Its layers keep the state of Kimi's delta attention, and its fields are those of Qwen3-Next.

    vLLM has the model since 0.33.
    """
    fields = Qwen3NextConfig().to_dict() | {"dtype": "bfloat16", "linear_num_value_heads": 16}
    fields |= {"kda_allow_negative_eigenvalues": False}
    model = parse_config("alice", fields)
    shapes = MambaStateShapeCalculator.kda_state_shape(1, 16, 128, conv_kernel_size=4)
    dtypes = MambaStateDtypeCalculator.kda_state_dtype(torch.bfloat16, "auto")
    assert model.state is not None
    assert _state_bytes(model, model.state, 1) == sum(
        dtype.itemsize * torch.Size(shape).numel()
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )


@pytest.mark.parametrize(
    ("named", "num_tokens"), [(None, 1040), ("float32", 1040), ("bfloat16", 528)]
)
def test_state_of_nemotron_h_has_the_dtype_of_vllm(named: str | None, num_tokens: int) -> None:
    """vLLM takes float32 unless the config names a dtype. The sizes are those of the 8B model."""
    fields: dict[str, Any] = {
        "model_type": "nemotron_h",
        "dtype": "bfloat16",
        "num_hidden_layers": 52,
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
    }
    if named is not None:
        fields["mamba_ssm_cache_dtype"] = named
    cache = SimpleNamespace(mamba_ssm_cache_dtype="auto")
    of_vllm: Any = NemotronHForCausalLMConfig
    of_vllm.update_mamba_ssm_cache_dtype(cache_config=cache, hf_config=SimpleNamespace(**fields))
    conv_dtype, state_dtype = MambaStateDtypeCalculator.mamba2_state_dtype(
        torch.bfloat16, "auto", cast("Any", cache.mamba_ssm_cache_dtype)
    )
    conv, state = MambaStateShapeCalculator.mamba2_state_shape(1, 128 * 64, 8, 128, 64, 128, 4)
    model = parse_config("nemotron-h", fields)
    assert model.state is not None
    expected = conv_dtype.itemsize * torch.Size(conv).numel()
    expected += state_dtype.itemsize * torch.Size(state).numel()
    assert _state_bytes(model, model.state, 1) == expected
    assert lay_out(model, 16).block_tokens == num_tokens


EIGHT_BITS = {"type": "float", "num_bits": 8, "dynamic": False}
FOUR_BITS = {"type": "float", "num_bits": 4}
BY_MODELOPT = {"producer": {"name": "modelopt"}}


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": EIGHT_BITS},
        {"quant_method": "modelopt", "kv_cache_scheme": EIGHT_BITS | {"dynamic": True}},
        {"quant_method": "modelopt_fp4", "kv_cache_scheme": FOUR_BITS},
        {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"},
        {"quant_method": "modelopt", "kv_cache_quant_algo": "INT8"},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        BY_MODELOPT | {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}},
        BY_MODELOPT | {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "NVFP4"}},
        BY_MODELOPT | {"quantization": {"kv_cache_quant_algo": "FP8"}},
        {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}},
        {"quant_method": "fp8", "kv_cache_scheme": EIGHT_BITS},
    ],
)
def test_declared_dtype_of_the_cache_is_that_of_vllm(quantization: dict[str, Any]) -> None:
    config: Any = SimpleNamespace(quantization_config=deepcopy(quantization))
    ModelArchConfigConvertorBase(config, config).get_quantization_config()
    expected = resolve_kv_cache_dtype_string("auto", cast("Any", SimpleNamespace(hf_config=config)))
    fields = dict(PRESETS["llama-3.1-8b"]) | {"quantization_config": quantization}
    assert parse_config("m", fields).kv_dtype == (None if expected == "auto" else expected)


def test_cache_that_compressed_tensors_declares_is_that_of_vllm(folder: Path) -> None:
    """vLLM reads its scheme in the layers, of K and V only."""
    scheme = EIGHT_BITS | {"strategy": "tensor", "symmetric": True}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {},
        "ignore": [],
        "kv_cache_scheme": scheme,
    }
    config = engine_config(folder, {"num_cpu_blocks": 4})
    config.quant_config = CompressedTensorsConfig.from_config(quantization)
    caches = {"cache_config": config.cache_config, "quant_config": config.quant_config}
    try:
        with set_current_vllm_config(config):
            dtype = Attention(2, 64, 1.0, **caches).kv_cache_dtype
    except ValueError as error:  # vLLM 0.33 refuses it on processors without AVX-512
        found = re.search(r"--kv-cache-dtype (\w+) is not supported by the CPU", str(error))
        assert found
        dtype = found[1]
    fields = {"quantization_config": quantization}
    model = parse_config("m", dict(PRESETS["llama-3.1-8b"]) | fields)
    assert dtype == model.kv_dtype == "fp8"
    assert parse_config("m", dict(PRESETS["deepseek-v3"]) | fields).kv_dtype is None


def test_presets_are_the_published_configs() -> None:
    """Of those models whose values are the defaults of transformers."""
    for name, config in {"deepseek-v3": DeepseekV3Config, "gpt-oss-120b": GptOssConfig}.items():
        published = config().to_dict()
        fields = {key: value for key, value in PRESETS[name].items() if key != "torch_dtype"}
        assert {key: published[key] for key in fields} == fields
