"""Models that `--model` knows by name: the fields of their published `config.json` that count."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Final

from kvstow._core import ConfigError
from kvstow.geometry.config import ModelConfig, parse_config, read_config


def _dense(layers: int, heads: int, kv_heads: int, hidden: int) -> dict[str, object]:
    """Return a config with full attention and heads of 128 values."""
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden,
        "head_dim": 128,
        "torch_dtype": "bfloat16",
    }


def _gpt_oss(layers: int) -> dict[str, object]:
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "hidden_size": 2880,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "torch_dtype": "bfloat16",
    }


PRESETS: Final[Mapping[str, Mapping[str, object]]] = {
    "llama-3.1-8b": _dense(32, 32, 8, 4096),
    "llama-3.1-70b": _dense(80, 64, 8, 8192),
    "qwen3-8b": _dense(36, 32, 8, 4096),
    "qwen3-32b": _dense(64, 64, 8, 5120),
    "qwen3-235b": _dense(94, 64, 4, 4096),
    "gpt-oss-20b": _gpt_oss(24),
    "gpt-oss-120b": _gpt_oss(36),
    "gemma-3-27b": _dense(62, 32, 16, 5376) | {"sliding_window": 1024, "sliding_window_pattern": 6},
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "hidden_size": 7168,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "torch_dtype": "bfloat16",
    },
    "granite-4.0-h-small": {
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
        "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
        "mamba_n_heads": 128,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "torch_dtype": "bfloat16",
    },
}


def find_model(name: str) -> ModelConfig:
    """Return the model of a preset's name, or of the path of a `config.json`.

    Raises:
        ConfigError: neither a preset nor a file, or a file that is no `config.json` of a model
            whose KV kvstow can count.
    """
    preset = PRESETS.get(name.lower())
    if preset is not None:
        return parse_config(name.lower(), preset)
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    if path.is_file():
        return read_config(path)
    near = get_close_matches(name.lower(), PRESETS, n=1, cutoff=0.5)
    meant = f" (did you mean {near[0]}?)" if near else ""
    raise ConfigError(
        f"--model is {name!r}; it must be the path of a config.json or one of "
        f"{', '.join(PRESETS)}{meant}: download the model's config.json and pass its path"
    )
