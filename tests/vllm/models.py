"""Tiny models for vLLM's CPU engine whose output depends on their KV cache.

The weights are seeded, and large enough to matter. With vLLM's own dummy weights (about 1e-3) no
logit would change if whole blocks were lost, so a test of the cache could not fail.
"""

from __future__ import annotations

import json
from pathlib import Path

import tests.vllm.runner  # noqa: F401 - before anything imports Triton
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 1024

_COMMON = {
    "hidden_size": 256,
    "intermediate_size": 512,
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
    "num_hidden_layers": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}

# Six groups: five windows of 128 tokens and one of full attention.
GEMMA = {
    **_COMMON,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "sliding_window": 128,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "query_pre_attn_scalar": 64,
    "hidden_activation": "gelu_pytorch_tanh",
}


def make_model(config: dict[str, object], folder: Path, seed: int = 0) -> Path:
    """Write configuration, weights and a tokenizer in which the word `t5` is token 5."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    loaded = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(loaded).to(torch.float32)  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                # Weights that embed and also give the output must be small next to the layers.
                is_tied = "embed" in name and loaded.tie_word_embeddings
                weight.normal_(0, 0.04 if is_tied else 0.15, generator=generator)
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB_SIZE)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=words, unk_token="t0", bos_token="t1", eos_token="t2", pad_token="t0"
    ).save_pretrained(folder)
    return folder
