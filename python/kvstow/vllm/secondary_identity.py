"""Whose KV the chunks of `KVStowDisk` are, and whether a later server can know that it is its own.

As `identity` does for kvstow's own tiers. A server that cannot know begins with an empty file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm import platforms
from vllm import version as vllm_version
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, SlidingWindowSpec

from kvstow.tiers import Fingerprint
from kvstow.vllm.digest import digest_of, weights_named
from kvstow.vllm.identity import content_of, folders_of, why_private
from kvstow.vllm.shaping import shaping, takes_media

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.base import OffloadingSpec

logger = logging.getLogger("vllm." + __name__)


def chunks_fingerprint(
    spec: OffloadingSpec, path: str, version_path: str | None
) -> tuple[Fingerprint, str]:
    """Return whose KV the chunks are, and why no later server can know that; empty if one can.

    Args:
        spec: what vLLM gives a tier.
        path: the slot file.
        version_path: the file that names the weights; None if only their own files show them.
    """
    own, config = spec.config, _whole_configuration()
    shape = [
        own.groups,
        own.worker_kv_bytes_per_block,
        own.cache,
        [
            (field.name, getattr(own.parallel, field.name))
            for field in dataclasses.fields(own.parallel)
            if field.name != "rank" and not field.name.startswith("data_parallel")
        ],
        own.replicated_layout,
        own.canonical_layout,
        own.kv_cache_layout,
    ]
    fields: dict[str, str | int] = {
        "connector": "OffloadingConnector",
        "vllm": vllm_version.__version__,
        "device": _device(),
        "shape": digest_of(shape),
        "hash_seed": os.environ.get("PYTHONHASHSEED", ""),
    }
    if version_path is not None:
        fields["weights_version"] = hashlib.sha256(weights_named(version_path)).hexdigest()[:32]
    why = "vLLM's configuration is not found"
    if config is not None:
        fields |= shaping(config)
        fields["hash"] = config.cache_config.prefix_caching_hash_algo
        for which, folder in folders_of(config).items():
            if folder is not None:
                fields[which] = content_of(folder, Path(f"{path}.weights.json"))
        why = (
            _why_unnamed(config)
            or why_private(config, version_path, is_version_enough=True)
            or _why_adapters_are_unknown(config, version_path)
        )
    return Fingerprint(fields), why


def warn_of_windows(spec: OffloadingSpec, tier: str) -> None:
    """Warn if a chunk has several blocks and the model has windows: vLLM may store it wrongly.

    Args:
        spec: what vLLM gives a tier.
        tier: vLLM's name of the tier.
    """
    cache: KVCacheConfig | None = _of_connector("kv_cache_config")
    if cache is None or spec.blocks_per_chunk == 1:
        return
    windows = (SlidingWindowSpec, ChunkedLocalAttentionSpec)
    if any(isinstance(group.kv_cache_spec, windows) for group in cache.kv_cache_groups):
        logger.warning(
            "kvstow: vLLM may load wrong KV from the CPU tier and from the secondary tier %s, "
            "because the model has windows and a chunk has %d blocks; remove blocks_per_chunk and "
            "block_size from kv_connector_extra_config",
            tier,
            spec.blocks_per_chunk,
        )


def _why_unnamed(config: VllmConfig) -> str:
    """Return why block hashes name no image, so that a later server has the same for another one.

    vLLM counts images from 0 at each start then, and has the number in the hash.
    """
    model = config.model_config
    if config.cache_config.enable_prefix_caching or not takes_media(model):
        return ""
    if getattr(model.multimodal_config, "mm_processor_cache_gb", None) != 0:
        return ""
    return (
        "vLLM's hashes have no content of images: start it with --enable-prefix-caching, or with "
        "mm_processor_cache_gb above 0"
    )


def _why_adapters_are_unknown(config: VllmConfig, version_path: str | None) -> str:
    """Return why a chunk of an adapter may have KV of other weights; empty if it cannot.

    A tier sees hashes only, so it cannot hold back what requests with adapters ask for.
    """
    if version_path is not None or getattr(config, "lora_config", None) is None:
        return ""
    return (
        "adapters (--enable-lora) may have other weights under the same name at the next start: "
        "name the weights of all in a weights_version_path"
    )


def _device() -> str:
    """Return the kind of the device, on which the choice of vLLM's kernels depends."""
    with suppress(NotImplementedError):  # a platform of a plugin need not say it
        return str(platforms.current_platform.get_device_name())
    return ""


def _whole_configuration() -> VllmConfig | None:
    """Return vLLM's configuration, which the connector that makes this tier has; None if not.

    A tier gets the name of the model, sizes and ranks. That says nothing of rotary embeddings,
    quantization, backends or processors.
    """
    config: VllmConfig | None = _of_connector("vllm_config")
    return config


def _of_connector(name: str) -> Any:
    """Return what the connector that makes this tier got under this name; None if nothing."""
    frame = inspect.currentframe()
    while frame is not None:
        found = frame.f_locals.get(name)
        if found is not None:
            return found
        frame = frame.f_back
    return None
