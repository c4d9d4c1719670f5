"""Whose KV the chunks of `KVStowDisk` are, and whether a later server can know that it is its own.

As `identity` does for kvstow's own tiers. A server that cannot know begins with an empty file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from vllm import version as vllm_version

from kvstow.tiers import Fingerprint
from kvstow.vllm.identity import content_of, may_have_changed, version_may_be_newer
from kvstow.vllm.shaping import (
    digest_of,
    has_code_elsewhere,
    models_of,
    shaping,
    why_weights_are_unknown,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_offload.base import OffloadingSpec


def chunks_fingerprint(
    spec: OffloadingSpec, path: str, version_path: str | None
) -> tuple[Fingerprint, bool]:
    """Return whose KV the chunks are, and whether a later server can know that it is the same.

    Args:
        spec: what vLLM gives a tier.
        path: the slot file.
        version_path: the file that names the weights; None if only their own files tell.
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
        "shape": digest_of(shape),
        "hash_seed": os.environ.get("PYTHONHASHSEED", ""),
    }
    folders = _folders(own.model.name, config)
    for which, folder in folders.items():
        if folder is not None:
            fields[which] = content_of(folder, Path(f"{path}.weights.json"))
    # Whoever names the weights.
    is_known = config is not None and not _may_be_others(config, folders)
    if version_path is not None:
        fields["weights_version"] = hashlib.sha256(Path(version_path).read_bytes()).hexdigest()[:32]
        is_known &= not version_may_be_newer(version_path)
    elif config is None or None in folders.values() or why_weights_are_unknown(config):
        is_known = False
    if config is not None:
        fields |= shaping(config)
    if not is_known:
        fields["start"] = secrets.token_hex(16)
    return Fingerprint(fields), is_known


def _folders(model: str, config: VllmConfig | None) -> dict[str, Path | None]:
    """Return the files of each model; None if they are not known.

    vLLM does not say which revision of a repository it serves, nor from which folder.
    """
    models = {} if config is None else models_of(config)
    drafts = {which: str(it.model) for which, it in models.items() if which != "weights"}
    paths = {which: Path(name) for which, name in {"weights": model, **drafts}.items()}
    return {which: path if path.exists() else None for which, path in paths.items()}


def _may_be_others(config: VllmConfig, folders: dict[str, Path | None]) -> bool:
    """Whether chunks may differ although the weights have the same name or content."""
    if getattr(config.cache_config, "calculate_kv_scales", False):
        return True  # the scales of its first request
    if has_code_elsewhere(config, folders):
        return True
    return any(may_have_changed(str(each), each) for each in folders.values() if each)


def _whole_configuration() -> VllmConfig | None:
    """Return vLLM's configuration, which the connector that makes this tier has; None if not.

    A tier gets the name of the model, sizes and ranks. That says nothing of rotary embeddings,
    quantization, backends or processors.
    """
    frame = inspect.currentframe()
    while frame is not None:
        config: VllmConfig | None = frame.f_locals.get("vllm_config")
        if config is not None:
            return config
        frame = frame.f_back
    return None
