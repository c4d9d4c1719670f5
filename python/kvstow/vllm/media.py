"""The media whose requests may compute other KV under one hash, by the model and its settings.

`tracked.has_ambiguous_hashes` finds requests that do so by what they bring, whatever the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from vllm import version as vllm_version

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

# They cut an image into tiles only if a prompt has few of them (one, or two for DeepSeek-VL2). vLLM
# 0.33 has that in an image's hash.
_TILED_BY_COUNT: Final = ("DeepseekVLV2ForCausalLM", "H2OVLChatModel", "UnlimitedOCRForCausalLM")
# Tokens that each image of a prompt may take beside those of its pixels, at most.
_TOKENS_BESIDE: Final = 32


def unhashed_modalities(config: VllmConfig) -> frozenset[str]:
    """Return the modalities of which vLLM's hashes leave out what KV depends on.

    - Images, if a model cuts them by their number: the first block of an image may be that of a
      tile or of the whole.
    - Images, if a model (Nemotron Nano VL) makes them smaller where a prompt has so many that they
      would not fit in `max_model_len` together.
    - Videos, if vLLM prunes them (`--video-pruning-rate`) and places have several dimensions. It
      knows the places of what follows a video once a step has read the video. No step reads it
      after a hit, so vLLM then computes what follows for other places.
    """
    model = config.model_config
    media = model.multimodal_config
    if media is None:
        return frozenset()
    before_fix = vllm_version.__version_tuple__[:2] < (0, 33)
    found = {
        "image": (before_fix and model.architecture in _TILED_BY_COUNT)
        or _may_shrink_images(model, media.get_limit_per_prompt("image")),
        "video": media.is_multimodal_pruning_enabled() and model.uses_mrope,
    }
    return frozenset(name for name, is_unhashed in found.items() if is_unhashed)


def _may_shrink_images(model: ModelConfig, most_images: int) -> bool:
    """Whether a model may give an image fewer tokens because of the others in its prompt."""
    own = getattr(getattr(model.hf_config, "vision_config", None), "args", None)
    if not isinstance(own, dict) or not {"min_num_patches", "max_num_patches"} <= own.keys():
        return False
    tokens_per_patch = model.hf_config.downsample_ratio**2
    most_tokens = own["max_num_patches"] * tokens_per_patch + _TOKENS_BESIDE
    return most_images > 1 and most_images * most_tokens > model.max_model_len
