"""Bytes per token, blocks and groups of published models, and the errors of bad configs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstow import ConfigError, FullAttention, SlidingWindow, StateSpace
from kvstow.geometry import PRESETS, find_model, lay_out, read_config
from kvstow.geometry.config import parse_config

# layers x KV heads x head size x 2 (K and V) x 2 bytes; of DeepSeek-V3, layers x latent x 2 bytes.
BYTES_PER_TOKEN = {
    "llama-3.1-8b": 32 * 8 * 128 * 4,
    "llama-3.1-70b": 80 * 8 * 128 * 4,
    "qwen3-8b": 36 * 8 * 128 * 4,
    "qwen3-32b": 64 * 8 * 128 * 4,
    "qwen3-235b": 94 * 4 * 128 * 4,
    "gpt-oss-20b": 24 * 8 * 64 * 4,
    "gpt-oss-120b": 36 * 8 * 64 * 4,
    "gemma-3-27b": 62 * 16 * 128 * 4,
    "deepseek-v3": 61 * (512 + 64) * 2,
    "granite-4.0-h-small": 4 * 8 * 128 * 4,
}

DENSE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "torch_dtype": "bfloat16",
}


def test_bytes_per_token_of_every_preset() -> None:
    found = {name: lay_out(find_model(name), 16).token_bytes for name in PRESETS}
    assert found == BYTES_PER_TOKEN


@pytest.mark.parametrize(
    ("dtype", "num_bytes"), [("float16", 2), ("float32", 4), ("fp8", 1), ("fp8_e4m3", 1)]
)
def test_dtype_sets_the_bytes_of_a_value(dtype: str, num_bytes: int) -> None:
    geometry = lay_out(find_model("llama-3.1-8b"), 16, dtype=dtype)
    assert geometry.token_bytes == 32 * 8 * 128 * 2 * num_bytes
    assert dtype in geometry.derivation[0]


def test_float32_weights_have_a_cache_of_16_bits() -> None:
    model = parse_config("m", DENSE | {"torch_dtype": "float32"})
    assert lay_out(model, 16).dtype == "float16"


@pytest.mark.parametrize("is_beside", [False, True])
@pytest.mark.parametrize("inner", [{}, {"quantization_config": None, "torch_dtype": None}])
def test_quantised_model_declares_its_cache(
    tmp_path: Path, is_beside: bool, inner: dict[str, None]
) -> None:
    """In `config.json`, outside of the language model, or in the file of older ModelOpts."""
    declared = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    quantization = {"producer": {"name": "modelopt"}, "quantization": declared}
    fields: dict[str, object] = {"text_config": DENSE | inner, "torch_dtype": "bfloat16"}
    if is_beside:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(quantization))
    else:
        fields["quantization_config"] = quantization
    (tmp_path / "config.json").write_text(json.dumps(fields))
    model = find_model(str(tmp_path))
    auto, given = lay_out(model, 16), lay_out(model, 16, dtype="bfloat16")
    assert auto.dtype == "fp8_e4m3"
    assert 2 * auto.token_bytes == given.token_bytes


def test_cache_of_4_bits_is_refused_unless_a_dtype_is_given() -> None:
    quantization = {"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}
    model = parse_config("m", DENSE | {"quantization_config": quantization})
    with pytest.raises(ConfigError, match=r"^m: declares a KV cache of nvfp4; .* it as --dtype$"):
        lay_out(model, 16)
    assert lay_out(model, 16, dtype="fp8").dtype == "fp8"


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "LlamaModel", "RobertaForCausalLM", None])
def test_architecture_of_a_decoder_is_no_encoder(name: str | None) -> None:
    model = parse_config("m", DENSE | {"architectures": name and [name]})
    assert model == parse_config("m", DENSE)


def test_head_size_follows_from_the_hidden_size() -> None:
    assert lay_out(parse_config("m", DENSE), 16).token_bytes == 4 * 2 * (512 // 8) * 2 * 2


def test_ranks_divide_heads_and_each_keeps_its_copy_of_a_repeated_head() -> None:
    model = find_model("qwen3-235b")
    at = {ranks: lay_out(model, 16, num_ranks=ranks) for ranks in (1, 2, 4, 8)}
    assert [one.token_bytes for one in at.values()] == [192_512, 96_256, 48_128, 48_128]
    assert {one.num_copies for one in at.values()} == {1}
    host_bytes = [one.host_block_bytes for one in at.values()]
    assert host_bytes == [16 * 192_512] * 3 + [2 * 16 * 192_512]


def test_every_rank_holds_a_latent_and_the_host_holds_it_once() -> None:
    geometry = lay_out(find_model("deepseek-v3"), 64, num_ranks=8)
    assert geometry.token_bytes == 70_272
    assert geometry.device_block_bytes == 64 * 70_272
    # A slot is a multiple of 4 KiB.
    assert geometry.host_block_bytes == -(-64 * 70_272 // 4096) * 4096


def test_windows_and_full_attention_are_groups_of_their_own() -> None:
    gpt_oss = lay_out(find_model("gpt-oss-20b"), 16)
    assert gpt_oss.attentions == [SlidingWindow(16, 128), FullAttention(16)]
    gemma = lay_out(find_model("gemma-3-27b"), 16)
    assert [group.num_layers for group in gemma.groups] == [9, 9, 9, 9, 8, 8, 10]
    assert gemma.attentions == [SlidingWindow(16, 1024)] * 6 + [FullAttention(16)]
    # All groups have blocks of the largest group's size.
    assert gemma.host_block_bytes == 10 * 16 * 16 * 128 * 2 * 2
    assert not gemma.is_one_full_group


def test_state_raises_the_block_size_until_it_fits() -> None:
    geometry = lay_out(find_model("granite-4.0-h-small"), 16)
    conv_bytes = (128 * 64 + 2 * 128) * 3 * 2
    state_bytes = 128 * 64 * 128 * 2
    page_bytes = 8 * 128 * 2 * 2  # of a token in an attention layer
    assert 512 * page_bytes < conv_bytes + state_bytes < 528 * page_bytes
    assert geometry.block_tokens == 528
    assert geometry.attentions == [StateSpace(528)] * 9 + [FullAttention(528)]
    assert lay_out(find_model("granite-4.0-h-small"), 512).block_tokens == 1024


def test_layers_of_a_pattern_and_of_an_interval() -> None:
    state = {
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "ssm_state_size": 16,
        "n_groups": 1,
        "conv_kernel": 4,
    }
    nemotron = parse_config("m", DENSE | state | {"hybrid_override_pattern": "M-M*"})
    assert nemotron.layers == ("state", "state", "full")
    listed = {
        "num_hidden_layers": None,
        "layers_block_type": ["mamba", "mlp", "mamba", "attention"],
    }
    assert parse_config("m", DENSE | state | listed) == nemotron
    linear = {
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_value_heads": 8,
        "linear_num_key_heads": 4,
        "linear_conv_kernel_dim": 4,
    }
    qwen = parse_config("m", DENSE | linear | {"full_attention_interval": 4})
    assert qwen.layers == ("state", "state", "state", "full")


def test_config_of_jamba_names_few_attention_layers() -> None:
    """Jamba-1.5-mini: 4 of 32 layers. Mamba-1 has a state of 16 values for each channel."""
    fields = DENSE | {
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "mamba_d_conv": 4,
        "mamba_d_state": 16,
        "mamba_expand": 2,
    }
    model = parse_config("m", fields)
    assert [at for at, kind in enumerate(model.layers) if kind == "full"] == [4, 12, 20, 28]
    geometry = lay_out(model, 16)
    assert geometry.token_bytes == 4 * 8 * 128 * 2 * 2
    assert "28 layers x 311,296 bytes per state" in geometry.derivation[1]
    assert geometry.block_tokens == 80  # 76 tokens of 4,096 bytes, up to a multiple of 16


def test_config_of_bamba_lists_its_attention_layers() -> None:
    state = {
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
    }
    model = parse_config("m", DENSE | state | {"attn_layer_indices": [1]})
    assert model.layers == ("state", "full", "state", "state")


@pytest.mark.parametrize(
    ("model_type", "windows"),
    [("gemma2", 2), ("cohere2_moe", 3), ("gemma3_text", 3), ("mistral", 4), (None, 4)],
)
def test_type_of_a_model_says_which_layers_have_the_window(
    model_type: str | None, windows: int
) -> None:
    fields = DENSE | {"sliding_window": 64, "model_type": model_type}
    num_layers = 3 if model_type == "gemma3_text" else 4
    model = parse_config("m", fields | {"num_hidden_layers": num_layers})
    assert model.num_layers["window"] == windows


@pytest.mark.parametrize("model_type", ["cohere2", "cohere2_moe"])
def test_window_of_cohere_has_the_token_itself_besides(model_type: str) -> None:
    """vLLM, too, gives these layers a window of `sliding_window + 1`."""
    fields = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2}
    assert parse_config("m", DENSE | fields | {"model_type": model_type}).window == 65
    assert parse_config("m", DENSE | fields).window == 64


def test_layers_of_llama_4_without_rotary_positions_have_full_attention() -> None:
    fields = DENSE | {"attention_chunk_size": 64}
    assert parse_config("m", fields).layers == ("chunk", "chunk", "chunk", "full")
    named = parse_config("m", fields | {"no_rope_layers": [0, 1, 1, 0]})
    assert named.layers == ("full", "chunk", "chunk", "full")


@pytest.mark.parametrize(
    ("fields", "num_heads"),
    [
        ({"multi_query": True, "num_kv_heads": 8, "new_decoder_architecture": False}, 1),
        ({"multi_query": True, "num_kv_heads": 2, "new_decoder_architecture": True}, 2),
        ({}, 8),
    ],
)
def test_falcon_names_its_kv_heads_otherwise(fields: dict[str, Any], num_heads: int) -> None:
    model = parse_config("m", DENSE | {"num_key_value_heads": None} | fields)
    assert model.num_kv_heads == num_heads


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attn_type_list", [0, 0, 0, 1]),
        ("block_configs", [{}]),
        ("cross_attention_layers", [3]),
        ("hybrid_layer_ids", [2]),
        ("layer_group_size", 5),
        ("linear_attn_config", {"full_attn_layers": [4]}),
        ("loop_num", 2),
        ("n_recurrent_loops", 4),
        ("mamba_d_ssm", 512),
        ("num_kv_shared_layers", 2),
        ("per_layer_config", {"3": {"head_dim": 512}}),
    ],
)
def test_config_whose_layers_cannot_be_counted_is_refused(field: str, value: object) -> None:
    message = f"^m: has '{field}', so its layers keep KV that kvstow cannot count: pass another"
    with pytest.raises(ConfigError, match=message):
        parse_config("m", DENSE | {field: value})
    assert len(parse_config("m", DENSE | {field: None}).layers) == 4


@pytest.mark.parametrize("field", ["layer_group_size", "loop_num", "n_recurrent_loops"])
def test_group_of_one_layer_has_full_attention(field: str) -> None:
    assert parse_config("m", DENSE | {field: 1}).layers == ("full",) * 4


@pytest.mark.parametrize("model_type", ["sarvam_mla", "longcat_flash"])
def test_latent_of_another_type_is_refused(model_type: str) -> None:
    """LongCat-Flash has two latents in each of its `num_layers`."""
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "model_type": model_type}
    with pytest.raises(ConfigError, match=r"^m: has 'kv_lora_rank' .*; kvstow .*-per-token$"):
        parse_config("m", DENSE | latent)


def test_minimax_with_full_attention_in_each_layer_is_counted() -> None:
    """As MiniMax-M2, whose list has 1 for each layer."""
    assert parse_config("m", DENSE | {"attn_type_list": [1] * 4}).layers == ("full",) * 4
    with pytest.raises(ConfigError, match="attn_type_list is 1; it must be a list"):
        parse_config("m", DENSE | {"attn_type_list": 1})


def test_dense_config_may_name_the_state_that_no_layer_has() -> None:
    """As those of Granite 4.0 Micro, which lists its layers."""
    fields = DENSE | {"layer_types": ["attention"] * 4, "mamba_n_heads": 128}
    assert parse_config("m", fields).layers == ("full",) * 4


def test_window_counts_only_if_it_is_used() -> None:
    config = DENSE | {"sliding_window": 4096}
    assert set(parse_config("m", config).layers) == {"window"}
    assert set(parse_config("m", config | {"use_sliding_window": False}).layers) == {"full"}
    assert set(parse_config("m", config | {"sliding_window": 0}).layers) == {"full"}


def test_windows_that_are_named_by_layer_must_be_equal() -> None:
    config = DENSE | {"sliding_window": 4096, "sliding_windows": [128, None, 128, None]}
    config["layer_types"] = ["sliding_attention", "full_attention"] * 2
    assert parse_config("m", config).window == 128
    with pytest.raises(ConfigError, match="m: has 'sliding_windows', so its layers keep KV"):
        parse_config("m", config | {"sliding_windows": [128, None, 256, None]})


def test_config_of_a_multimodal_model_is_that_of_its_text(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    inner = {key: value for key, value in DENSE.items() if key != "torch_dtype"}
    path.write_text(json.dumps({"text_config": inner, "dtype": "bfloat16"}))
    for name in (path, tmp_path):
        assert lay_out(find_model(str(name)), 16).token_bytes == 4 * 2 * 64 * 2 * 2


@pytest.mark.parametrize("field", ["llm_config", "language_config", "thinker_config"])
def test_language_model_is_found_wherever_it_is(field: str) -> None:
    """As in InternVL, DeepSeek-VL2, and Qwen's Omni, whose thinker has a text model of its own."""
    inner: dict[str, object] = {"text_config": DENSE} if field == "thinker_config" else DENSE
    model = parse_config("m", {"model_type": "m", field: inner, "torch_dtype": "float16"})
    assert model == replace(parse_config("m", DENSE), dtype="float16")


def test_text_without_a_type_has_that_of_the_whole() -> None:
    inner = DENSE | {"num_hidden_layers": 6, "sliding_window": 64}
    model = parse_config("m", {"model_type": "gemma3", "text_config": inner})
    assert model.layers == ("window",) * 5 + ("full",)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_hidden_layers": None}, r"no 'num_hidden_layers': pass the config.json of a decoder"),
        ({"num_hidden_layers": 0}, r"num_hidden_layers is 0; it must be 1 to 2147483647"),
        ({"num_hidden_layers": "4"}, r"num_hidden_layers is '4'; it must be"),
        ({"num_attention_heads": None}, "no 'num_attention_heads'"),
        ({"hidden_size": None}, "no 'hidden_size'"),
        ({"torch_dtype": None}, r"no 'dtype' and no 'torch_dtype': pass --dtype"),
        ({"torch_dtype": "int4"}, r"dtype is 'int4'; it must be one of bfloat16, .*: pass --dtype"),
        ({"kv_lora_rank": 512}, "no 'qk_rope_head_dim'"),
        ({"sparse_attention_config": {"a": 1}}, "has 'sparse_attention_config', so its"),
        ({"index_topk": 2048}, r"has 'index_topk', so its attention keeps an index .*: pass a"),
        (
            {"layer_types": ["full_attention"]},
            r"names the types of 1 layers, and num_hidden_layers is 4",
        ),
        ({"layer_types": ["conv"] * 4}, r"a layer is of type 'conv', and kvstow knows"),
        ({"state_size": 16}, r"no layer has attention.*: pass a model with attention"),
        ({"model_type": "mamba2"}, r"no layer has attention.*: pass a model with attention"),
        ({"is_encoder_decoder": True}, "has an encoder.*: pass the config.json of a decoder"),
        ({"architectures": ["BertForMaskedLM"]}, "has an encoder.*: pass the config.json of a d"),
        ({"architectures": ["XLMRobertaModel"]}, "has an encoder.*: pass the config.json of a d"),
        ({"layer_types": ["mamba"] * 4}, r"no layer has attention.*: pass a model with attention"),
        ({"layer_types": ["sliding_attention"] * 4}, "no 'sliding_window'"),
        ({"layer_types": ["chunked_attention"] * 4}, "no 'attention_chunk_size'"),
        (
            {"layer_types": ["mamba", "attention"] * 2},
            "no 'mamba_num_heads'",
        ),
        ({"attn_layer_indices": 3}, "attn_layer_indices is 3; it must be a list"),
    ],
)
def test_config_without_a_field_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^(m: )?{message}"):
        lay_out(parse_config("m", DENSE | changed), 16)


@pytest.mark.parametrize(
    ("model", "ranks", "message"),
    [
        ("llama-3.1-8b", 0, "tensor-parallel-size is 0; it must be at least 1"),
        ("llama-3.1-8b", 3, "is 3; it must divide the 8 KV heads of llama-3.1-8b, or be a multi"),
        ("llama-3.1-8b", 64, "is 64; it must divide the 32 attention heads of llama-3.1-8b"),
        ("deepseek-v3", 7, "is 7; it must divide the 128 attention heads"),
    ],
)
def test_ranks_that_divide_no_heads_are_refused(model: str, ranks: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lay_out(find_model(model), 16, num_ranks=ranks)


def test_ranks_that_divide_no_heads_of_a_state_are_refused() -> None:
    fields = dict(PRESETS["granite-4.0-h-small"]) | {"mamba_n_heads": 12}
    with pytest.raises(ConfigError, match="is 8; it must divide the 12 state heads"):
        lay_out(parse_config("m", fields), 16, num_ranks=8)


def test_unknown_model_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"^--model is 'llama-3-8b'; .*did you mean llama-3.1-8b"):
        find_model("llama-3-8b")


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not a JSON object"), ("[]", "not a JSON object: pass a model's config.json")],
)
def test_file_that_is_no_config_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_config(path)


def test_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.json: cannot be read: No such file"):
        read_config(tmp_path / "none.json")
