"""What a model's type says and its `config.json` may leave out.

A published config may leave out each field that has the default value of transformers, through
which vLLM reads it. `tests/vllm/test_geometry.py` compares this file with both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# Where a model of several models may have its language model. Qwen's Omni has it in the thinker.
LANGUAGE_MODELS: Final = ("text_config", "llm_config", "language_config", "thinker_config")
# Of these models, one of so many layers has full attention and the others a window. Their published
# configs do not say so.
WINDOW_PERIODS: Final = {
    "cohere2": 4,
    "cohere2_moe": 4,
    "gemma2": 2,
    "gemma3": 6,
    "gemma3_text": 6,
    "gpt_oss": 2,
    "olmo3": 4,
    "vaultgemma": 2,
}
# A window of these models has the token itself besides `sliding_window` others.
ONE_TOKEN_MORE: Final = ("cohere2", "cohere2_moe")
# Of these models, the layers from `max_window_layers` on have a window, by default from here.
FULL_BELOW: Final = {"qwen2": 28, "qwen2_5_vl_text": 80, "qwen2_vl_text": 80, "qwen3": 28}
# Models of which vLLM keeps one latent per layer. Of others with `kv_lora_rank` it keeps two, as of
# LongCat-Flash, an index or a state beside it, or whole heads.
LATENT_TYPES: Final = (
    "axk1",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "kimi_k2",
    "pangu_ultra_moe",
)


_GATED_DELTA_NET: Final = {
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}


def _fields(  # noqa: PLR0913, PLR0917 - a row of the table below
    layers: int,
    heads: int,
    kv_heads: int | None,
    hidden: int,
    head_dim: int | None = None,
    window: int | None = None,
    **others: object,
) -> Mapping[str, object]:
    fields = others | {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden,
        "head_dim": head_dim,
        "sliding_window": window,
    }
    return {name: value for name, value in fields.items() if value is not None}


DEFAULTS: Final[Mapping[str, Mapping[str, object]]] = {
    "cohere2": _fields(40, 64, None, 8192, None, 4096),
    "ernie4_5": _fields(18, 16, 2, 1024, 128),
    "gemma": _fields(28, 16, 16, 3072, 256),
    "gemma2": _fields(26, 8, 4, 2304, 256, 4096),
    "gemma3_text": _fields(26, 8, 4, 2304, 256, 4096),
    "glm4": _fields(40, 32, 2, 4096, 128),
    "glm4_moe": _fields(46, 96, 8, 4096),
    "gpt_oss": _fields(36, 64, 8, 2880, 64, 128),
    "llama": _fields(32, 32, None, 4096),
    "llama4_text": _fields(48, 40, 8, 5120, 128, attention_chunk_size=8192),
    "minimax_m2": _fields(62, 48, 8, 3072, 128),
    "ministral3": _fields(34, 32, 8, 4096, 128),
    "mistral": _fields(32, 32, 8, 4096, None, 4096),
    "mixtral": _fields(32, 32, 8, 4096),
    "olmo3": _fields(32, 32, None, 4096, None, 4096),
    "qwen2": _fields(32, 32, 32, 4096, use_sliding_window=False),
    "qwen2_5_vl_text": _fields(80, 64, 8, 8192, use_sliding_window=False),
    "qwen2_vl_text": _fields(80, 64, 8, 8192, use_sliding_window=False),
    "qwen3": _fields(32, 32, 32, 4096, 128, use_sliding_window=False),
    "qwen3_5_moe_text": _fields(40, 16, 2, 2048, 256, **_GATED_DELTA_NET),
    "qwen3_5_text": _fields(32, 16, 4, 4096, 256, **_GATED_DELTA_NET),
    "qwen3_moe": _fields(24, 32, 4, 2048, use_sliding_window=False),
    "qwen3_next": _fields(48, 16, 2, 2048, 256, **_GATED_DELTA_NET),
    "qwen3_vl_moe_text": _fields(24, 16, 16, 2048),
    "qwen3_vl_text": _fields(32, 32, 32, 4096, 128),
    "seed_oss": _fields(64, 80, 8, 4096, 128),
    "smollm3": _fields(36, 16, 4, 2048, use_sliding_window=False),
    "starcoder2": _fields(30, 24, 2, 3072),
    "vaultgemma": _fields(26, 8, 4, 2304, 256, 4096),
}
