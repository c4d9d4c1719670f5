"""What of vLLM's configuration shapes the bytes of a block, beside files, ranks and allocation."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Any

from transformers import __version__ as transformers_version

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def shaping(config: VllmConfig) -> dict[str, str | int]:
    """Return what of vLLM's configuration shapes blocks, as fields of a fingerprint."""
    parallel, loads = config.parallel_config, loads_of(config).values()
    return {
        "transformers": transformers_version,
        "model": digest_of(
            [
                (own.compute_hash(), own.hf_config.to_json_string(), own.multimodal_config)
                for own in models_of(config).values()
            ]
        ),
        "loader": digest_of([(load.load_format, load.model_loader_extra_config) for load in loads]),
        "dtype": str(config.model_config.dtype),
        "kv_dtype": str(config.cache_config.cache_dtype),
        "attention": digest_of(
            [
                getattr(config, "attention_config", None),
                os.environ.get("VLLM_ATTENTION_BACKEND"),
                os.environ.get("VLLM_KV_CACHE_LAYOUT"),
            ]
        ),
        "context_parallel": digest_of(
            [
                getattr(parallel, "decode_context_parallel_size", 1),
                getattr(parallel, "prefill_context_parallel_size", 1),
                # Which tokens of a block are on which rank.
                getattr(parallel, "cp_kv_cache_interleave_size", 1),
            ]
        ),
    }


def models_of(config: VllmConfig) -> dict[str, Any]:
    """Return the served model, and the draft model if there is one."""
    models = {"weights": config.model_config}
    draft = getattr(config.speculative_config, "draft_model_config", None)
    return models if draft is None else models | {"draft_weights": draft}


def loads_of(config: VllmConfig) -> dict[str, Any]:
    """Return how vLLM loads each model. A draft model may have a way of its own."""
    load = config.load_config
    own = getattr(config.speculative_config, "draft_load_config", None) or load
    return {name: load if name == "weights" else own for name in models_of(config)}


def has_parts_elsewhere(model: Any) -> bool:
    """Whether a model names another one for a part of it, as Ultravox does."""
    own = vars(model.hf_config)
    return any(name.endswith("_model_id") and own[name] is not None for name in own)


def digest_of(value: object) -> str:
    """Return a digest of what a value says of itself."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:32]
