"""Tiny models for vLLM's CPU engine whose output depends on their KV cache.

The weights are seeded, and large enough to matter. With vLLM's own dummy weights (about 1e-3) no
logit would change if whole blocks were lost, so a test of the cache could not fail.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import tests.vllm.runner  # noqa: F401 - before anything imports Triton
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE, HIDDEN_SIZE = 1024, 128

_COMMON = {
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# One group of full attention.
LLAMA = {
    **_COMMON,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}

# One group of windows of 100 tokens, which ends within a block.
MISTRAL: dict[str, object] = LLAMA | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": 100,
}

# Three groups of chunked local attention and one of full attention.
LLAMA4: dict[str, object] = {
    **_COMMON,
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "intermediate_size_mlp": 256,
    "num_hidden_layers": 4,
    "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
    "attention_chunk_size": 128,
    "no_rope_layers": [1, 1, 1, 0],
    "attn_temperature_tuning": False,
    "use_qk_norm": True,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 0,
    "moe_layers": [],  # no layer of experts
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "pad_token_id": 0,
}

# Three groups: two windows of 128 tokens and one of full attention.
GEMMA = {
    **_COMMON,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 3,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "sliding_window": 128,
    "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
    "query_pre_attn_scalar": 64,
    "hidden_activation": "gelu_pytorch_tanh",
}

# The last three of six layers read the KV of earlier ones.
GEMMA_3N: dict[str, object] = {
    **_COMMON,
    "architectures": ["Gemma3nForCausalLM"],
    "model_type": "gemma3n_text",
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "sliding_window": 128,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 32,
    "laurel_rank": 16,
    "altup_num_inputs": 2,
    "altup_active_idx": 0,
    "altup_correct_scale": True,
    "altup_coef_clip": 120.0,
    "activation_sparsity_pattern": [0.0] * 6,
    "final_logit_softcapping": 30.0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "pad_token_id": 0,
}


# One group of MLA layers: one latent for all heads. vLLM's CPU kernel has these sizes of it only.
DEEPSEEK: dict[str, object] = {
    **_COMMON,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "q_lora_rank": None,
    "v_head_dim": 64,
    "first_k_dense_replace": 2,  # no layer of experts
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}

_HYBRID: dict[str, object] = {
    **_COMMON,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
_MAMBA2: dict[str, object] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 32,
}

# Three groups of two layers: two of Mamba 2 states and one of full attention.
GRANITE = {
    **_HYBRID,
    **_MAMBA2,
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "shared_intermediate_size": 512,
    "layer_types": ["mamba", "mamba", "attention"] * 2,
    "position_embedding_type": "nope",
    "attention_multiplier": 0.125,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
}

# Three groups of two layers: two of gated delta nets and one of full attention.
QWEN_NEXT = {
    **_HYBRID,
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mlp_only_layers": list(range(5)),  # vLLM needs a layer of experts
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}

# Each layer has a Mamba 2 state and full attention.
FALCON_H1 = {
    **_HYBRID,
    **_MAMBA2,
    "architectures": ["FalconH1ForCausalLM"],
    "model_type": "falcon_h1",
    "num_hidden_layers": 3,
    "rope_theta": 10000.0,
    "mamba_d_ssm": 512,
}

NEMOTRON_H = {
    **_HYBRID,
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "MM-*MM-*",
    "num_hidden_layers": 8,
    "layer_norm_epsilon": 1e-5,
    "ssm_state_size": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "n_groups": 1,
    "conv_kernel": 4,
    "expand": 2,
    "chunk_size": 32,
    "n_routed_experts": 1,
    "mamba_ssm_cache_dtype": "float32",
}

# Mamba 1 states and full attention.
JAMBA = {
    **_HYBRID,
    "architectures": ["JambaForCausalLM"],
    "model_type": "jamba",
    "attn_layer_period": 3,
    "attn_layer_offset": 2,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "num_experts": 1,
    "num_experts_per_tok": 1,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_dt_rank": 16,
}

# Short convolutions and full attention.
LFM2 = {
    **_HYBRID,
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "layer_types": ["conv", "conv", "full_attention"] * 2,
    "block_auto_adjust_ff_dim": False,
    "norm_eps": 1e-5,
    "conv_L_cache": 3,
    "conv_bias": False,
    "rope_theta": 1000000.0,
    "conv_dim": 256,
    "conv_dim_out": 256,
    "block_dim": 256,
    "conv_use_xavier_init": True,
}

# One group of states, and no attention.
MAMBA2 = {
    **_HYBRID,
    "architectures": ["Mamba2ForCausalLM"],
    "model_type": "mamba2",
    "num_hidden_layers": 4,
    "num_heads": 8,
    "head_dim": 64,
    "n_groups": 1,
    "state_size": 8,
    "conv_kernel": 4,
    "expand": 2,
    "chunk_size": 32,
    "layer_norm_epsilon": 1e-5,
}

# The models with recurrent states.
HYBRIDS: dict[str, dict[str, object]] = {
    "granite": GRANITE,
    "qwen-next": QWEN_NEXT,
    "falcon-h1": FALCON_H1,
    "nemotron-h": NEMOTRON_H,
    "jamba": JAMBA,
    "lfm2": LFM2,
    "mamba2": MAMBA2,
}

_Draw = Callable[[torch.Tensor, torch.Generator], object]
# How to draw the weights of recurrent layers. A state must remember tokens over several blocks, or
# a test that loses it sees nothing. The state decays by `exp(-dt * exp(A_log))` with each token.
_RECURRENT: dict[str, _Draw] = {
    r"A_log$": lambda w, g: w.uniform_(math.log(0.02), math.log(0.5), generator=g),
    r"(dt_bias|dt_proj\.bias)$": lambda w, g: w.uniform_(-2.0, -0.5, generator=g),
    r"conv(1d)?\.bias$": lambda w, g: w.zero_(),
    r"conv(1d|\.conv)\.weight$": lambda w, g: w.normal_(0, 0.4, generator=g),
    r"\.D$": lambda w, g: w.fill_(1.0),
}


def make_model(config: dict[str, object], folder: Path, seed: int = 0) -> Path:
    """Write configuration, weights and a tokenizer in which the word `t5` is token 5."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    loaded = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(loaded).to(torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            draws = [draw for part, draw in _RECURRENT.items() if re.search(part, name)]
            if draws:
                draws[0](weight, generator)
            elif weight.ndim > 1:
                # Weights that embed and also give the output must be small next to the layers.
                is_tied = "embed" in name and loaded.tie_word_embeddings
                weight.normal_(0, 0.04 if is_tied else 0.15, generator=generator)
    model.save_pretrained(folder)
    # transformers writes newer names of layer kinds, which vLLM may not know.
    (folder / "config.json").write_text(json.dumps(config))
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB_SIZE)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="t0", bos_token="t1", eos_token="t2", pad_token="t0"
    ).save_pretrained(folder)
    return folder
