"""What of vLLM's configuration shapes the bytes of a block, beside files, ranks and allocation.

And whether weights or code may come from more than the files of the model.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from transformers import __version__ as transformers_version
from vllm.utils.flashinfer import has_flashinfer

from kvstow.vllm.digest import content_named, digest_of
from kvstow.vllm.variables import variables

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# The loaders of vLLM that read all weights from the files of the model.
_FROM_FILES: Final = frozenset(
    (
        "auto",
        "fastsafetensors",
        "hf",
        "instanttensor",
        "mistral",
        "npcache",
        "pt",
        "safetensors",
        "sharded_state",
    )
)
# Extra settings of a loader that change no weights.
_HOW_TO_READ: Final = ("enable_multithread_load", "num_threads", "enable_weights_track")
# The plugins that vLLM loads into the processes of an engine.
_PLUGIN_GROUPS: Final = ("vllm.general_plugins", "vllm.platform_plugins")
# Settings of vLLM's cache that say of which types a recurrent state is, and what it buffers.
_OF_STATES: Final = (
    "mamba_cache_dtype",
    "mamba_ssm_cache_dtype",
    "mamba_cache_mode",
    "use_replayssm",
    "replayssm_buffer_len",
)
# Settings of a model that its hash has, and that shape no block. `_generation` adds those of the
# generation that do.
_OF_NO_BLOCK: Final = (
    "enable_cumem_allocator",
    "enable_nccl_comm_suspend",
    "enable_sleep_mode",
    "generation_config",
    "max_logprobs",
    "override_generation_config",
    "renderer_num_workers",
    "sleep_mode_backend",
    "sleep_mode_offload_cudagraph",
    "sleep_preserve_parameter_names",
)
# Settings of the generation that only choose among tokens. Llama 4 scales its queries by another
# one (`attn_temperature_tuning`).
_OF_SAMPLING: Final = frozenset(
    (
        "frequency_penalty",
        "max_new_tokens",
        "min_p",
        "presence_penalty",
        "repetition_penalty",
        "temperature",
        "top_k",
        "top_p",
    )
)
# Settings of images and videos that change no number: caches, memory, and ways between processes.
_OF_NO_NUMBERS: Final = (
    "mm_ipc_gpu_memory_gb",
    "mm_processor_cache_gb",
    "mm_processor_cache_type",
    "mm_shm_cache_max_object_size_mb",
    "mm_tensor_ipc",
    "skip_mm_profiling",
)
# The packages that decode, resize and encode media. A block's hash has the bytes that a client has
# sent, or the frames of a video.
_MEDIA_PACKAGES: Final = (
    "av",
    "decord",
    "kaldi-native-fbank",
    "librosa",
    "mistral_common",
    "opencv-python",
    "opencv-python-headless",
    "pillow",
    "pynvvideocodec",
    "scipy",
    "soundfile",
    "soxr",
    "timm",
    "torchaudio",
    "torchcodec",
    "torchvision",
)
# The models whose images or audio a class of Mistral's prepares, by the settings of the tokenizer.
_PREPARED_BY_TOKENIZER: Final = frozenset(
    (
        "PixtralForConditionalGeneration",
        "VoxtralForConditionalGeneration",
        "VoxtralRealtimeGeneration",
    )
)
# Settings of vLLM's ranks that say which of them has which experts, and how these get their tokens.
_OF_EXPERTS: Final = ("enable_expert_parallel", "enable_eplb", "all2all_backend")
# Where Transformers looks for the code that reads images, audio and video.
_PROCESSORS: Final = (
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
)
# The tokens are in a block's hash, whatever code makes them.
_OF_TOKENS: Final = "AutoTokenizer"
# Between the name of a repository and that of a class.
_OTHER_REPOSITORY: Final = "--"


def shaping(config: VllmConfig) -> dict[str, str | int]:
    """Return what of vLLM's configuration shapes blocks, as fields of a fingerprint.

    Raises:
        ConfigError: a file that it names cannot be read.
    """
    parallel, loads = config.parallel_config, loads_of(config).values()
    return {
        "transformers": transformers_version,
        "plugins": ", ".join(sorted(_plugins())),
        # A class of the user's may build another model, or load other weights.
        "worker": ", ".join(
            str(each)
            for name in ("worker_cls", "worker_extension_cls")
            if (each := getattr(parallel, name, None))
        ),
        "model": digest_of(
            [
                (
                    _settings(own),
                    _generation(own),
                    _quantization(own),
                    _media(own),
                )
                for own in models_of(config).values()
            ]
        ),
        "loader": digest_of([(load.load_format, _what_to_read(load)) for load in loads]),
        "dtype": str(config.model_config.dtype),
        "kv_dtype": _kv_dtype(config.cache_config),
        "draft_kv_dtype": str(getattr(config.speculative_config, "kv_cache_dtype", None)),
        "states": digest_of(_states(config)),
        "variables": variables(),
        "backends": digest_of(_backends(config)),
        "experts": digest_of(_experts(config)),
        "attention": digest_of(getattr(config, "attention_config", None)),
        "context_parallel": digest_of(
            [
                getattr(parallel, "decode_context_parallel_size", 1),
                getattr(parallel, "prefill_context_parallel_size", 1),
                # Which tokens of a block are on which rank.
                getattr(parallel, "cp_kv_cache_interleave_size", 1),
            ]
        ),
    }


def _settings(model: Any) -> str:
    """Return vLLM's hash of what may shape blocks of a model, its configuration included."""
    own = _without(model, _OF_NO_BLOCK)
    if getattr(own, "original_max_model_len", None) == -1 and not takes_media(model):
        # vLLM shortens it to what fits in memory, which differs with each start, but has built the
        # model for the longest. A processor of images may make them smaller to fit (Nemotron Nano).
        own.max_model_len = -1
    return str(own.compute_hash())


def takes_media(model: Any) -> bool:
    """Whether requests of a model may bring images, audio or video."""
    media = model.multimodal_config
    return media is not None and not getattr(media, "language_model_only", False)


def _generation(model: Any) -> dict[str, Any]:
    """Return what may shape blocks of the settings for the generation, without the model's own."""
    given = getattr(model, "override_generation_config", None) or {}
    is_own = getattr(model, "generation_config", "auto") in ("auto", "vllm")
    if not is_own or getattr(model, "hf_config_path", None) is not None:
        given = {**model.try_get_generation_config(), **given}
    return {name: given[name] for name in sorted(given) if name not in _OF_SAMPLING}


def _without(settings: Any, names: Iterable[str]) -> Any:
    """Return a copy of settings in which those with these names are all equal."""
    own = copy.copy(settings)
    for name in names:
        setattr(own, name, None)
    return own


def _quantization(model: Any) -> bytes | None:
    """Return the file that `--hf-overrides` names for the quantization of the weights.

    Raises:
        ConfigError: the file cannot be read.
    """
    path = getattr(model.hf_config, "quantization_config_file", None)
    return None if path is None else content_named("quantization_config_file", path)


def _kv_dtype(cache: Any) -> str:
    """Return the dtype of keys and values, and which layers keep that of the model."""
    skipped = getattr(cache, "kv_cache_dtype_skip_layers", None)
    dtype = str(cache.cache_dtype)
    return f"{dtype}, not in {digest_of(sorted(map(str, skipped)))}" if skipped else dtype


def _states(config: VllmConfig) -> list[Any]:
    """Return what shapes recurrent states. vLLM shows them as bytes, in pages of any length."""
    settings = [getattr(config.cache_config, name, None) for name in _OF_STATES]
    drafts = getattr(config.speculative_config, "num_speculative_tokens", 0)
    has_states = getattr(config.model_config, "has_inner_state", True)
    # Its kernels, which may round at random.
    kernels = getattr(config, "mamba_config", None)
    # A state has rows for the drafts. A block of keys and values depends on drafts only if they
    # decide which of its layers are written.
    return [*settings, kernels, drafts if has_states else 0, *_draft_modules(config)]


def _draft_modules(config: VllmConfig) -> list[Any]:
    """Return what decides which modules of MTP have KV, if the model has several of them.

    A block has the layers of all modules. vLLM's newer runner computes as many modules as there are
    drafts, and the older one computes only the first.
    """
    speculative = config.speculative_config
    own = getattr(getattr(speculative, "draft_model_config", None), "hf_config", None)
    if (getattr(own, "num_nextn_predict_layers", None) or 1) == 1:
        return []
    return [speculative.num_speculative_tokens, getattr(config, "use_v2_model_runner", False)]


def _backends(config: VllmConfig) -> list[Any]:
    """Return the kernels that the user names, some of which round weights or activations.

    vLLM prefers those of FlashInfer if the package and what compiles it are there, for experts too.
    """
    kernels = vars(config.kernel_config).items() if hasattr(config, "kernel_config") else ()
    # `--monokernel` of 0.33 rounds the activations of experts to 8 bits, whatever their backend.
    named = sorted(
        (name, value) for name, value in kernels if "backend" in name or name == "monokernel"
    )
    # `--gdn-prefill-backend` is here, and what a plugin of a platform reads.
    more: Any = getattr(config, "additional_config", None)
    others = more.compute_hash() if hasattr(more, "compute_hash") else more
    drafts = getattr(config.speculative_config, "moe_backend", None)
    return [*named, ("flashinfer", has_flashinfer()), drafts, others or None]


def _experts(config: VllmConfig) -> list[Any]:
    """Return what decides, beside their names, how many bits the kernels of experts round to.

    vLLM chooses among the kernels that can do what these settings ask for. Some of them keep 16
    bits of an activation, others 8.
    """
    if not any(getattr(model, "is_moe", True) for model in models_of(config).values()):
        return []
    parallel = config.parallel_config
    has_several_engines = getattr(parallel, "data_parallel_size", 1) > 1
    has_adapters = getattr(config, "lora_config", None) is not None
    settings = [getattr(parallel, name, None) for name in _OF_EXPERTS]
    return [*settings, has_several_engines, has_adapters]


def _media(model: Any) -> list[Any]:
    """Return what decides which numbers a model gets for an image, audio or video.

    Raises:
        ConfigError: the file with the scales of the encoder cannot be read.
    """
    settings = model.multimodal_config
    if settings is None:
        return []
    name = "mm_encoder_fp8_scale_path"
    scales = getattr(settings, name, None)
    content = None if scales is None else content_named(name, scales)
    return [_without(settings, _OF_NO_NUMBERS), content, _media_packages(model), _frontend(model)]


def _media_packages(model: Any) -> list[tuple[str, str]]:
    """Return the packages here that decode images, audio and video, with their versions."""
    found = []
    for name in _MEDIA_PACKAGES if takes_media(model) else ():
        with suppress(PackageNotFoundError):
            found.append((name, version(name)))
    return found


def _frontend(model: Any) -> str:
    """Return which program of vLLM's in Rust prepares media; empty if Python does.

    It has code of its own for that. Both call an image by the name that a client gives it.
    """
    if not takes_media(model) or os.environ.get("VLLM_USE_RUST_FRONTEND", "0") == "0":
        return ""
    name = "VLLM_RUST_FRONTEND_PATH"
    path = os.environ.get(name, "auto")
    return hashlib.sha256(content_named(name, path)).hexdigest() if os.path.isfile(path) else path


def _plugins() -> set[str]:
    """Return the packages whose code vLLM loads beside its own, with their versions.

    A plugin may bring the code of a model, or of a device.
    """
    allowed = os.environ.get("VLLM_PLUGINS")
    points = (point for group in _PLUGIN_GROUPS for point in entry_points(group=group))
    return {
        f"{point.dist.name} {point.dist.version}"
        for point in points
        if point.dist is not None and (allowed is None or point.name in allowed.split(","))
    }


def models_of(config: VllmConfig) -> dict[str, Any]:
    """Return the served model, and the draft model if there is one."""
    models = {"weights": config.model_config}
    draft = getattr(config.speculative_config, "draft_model_config", None)
    # Drafts that no model makes, as those from n-grams, have the served one here.
    has_own = draft is not None and draft is not config.model_config
    return models | {"draft_weights": draft} if has_own else models


def loads_of(config: VllmConfig) -> dict[str, Any]:
    """Return how vLLM loads each model. A draft model may have a way of its own."""
    load = config.load_config
    own = getattr(config.speculative_config, "draft_load_config", None) or load
    return {name: load if name == "weights" else own for name in models_of(config)}


def why_weights_are_unknown(config: VllmConfig) -> str:
    """Return why weights may be in more than the model's files; empty if they are not."""
    from_elsewhere = [
        str(load.load_format)
        for load in loads_of(config).values()
        if str(load.load_format) not in _FROM_FILES or _what_to_read(load)
    ]
    loaders = " and ".join(from_elsewhere)
    reasons = {
        f"the loader {loaders} may take weights from more than the model's files": loaders,
        "its weights have a place of their own": getattr(
            config.model_config, "model_weights", None
        ),
        "a trainer may send it other weights": getattr(config, "weight_transfer_config", None),
        "a class of yours may give it other weights (--worker-extension-cls)": getattr(
            config.parallel_config, "worker_extension_cls", None
        ),
        "a part of it comes from another repository": any(
            _has_parts_elsewhere(model) for model in models_of(config).values()
        ),
        "another server may encode its images (--ec-transfer-config)": _takes_encodings(config),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _takes_encodings(config: VllmConfig) -> bool:
    """Whether the output of an encoder of media may come from another server, or from a store.

    vLLM finds it by the name of the model and the content of the media. Its weights do not count.
    """
    transfer = getattr(config, "ec_transfer_config", None)
    return transfer is not None and transfer.is_ec_consumer and takes_media(config.model_config)


def _what_to_read(load: Any) -> Any:
    """Return the extra settings of a loader, without those that change no weights."""
    extra = load.model_loader_extra_config
    if not isinstance(extra, dict):
        return extra
    return {name: value for name, value in extra.items() if name not in _HOW_TO_READ}


def _has_parts_elsewhere(model: Any) -> bool:
    """Whether a model names another repository for a part of it, as Ultravox does.

    The tokenizer is a part of those that read it, and of those whose media it prepares.
    """
    is_prepared = getattr(model, "architecture", None) in _PREPARED_BY_TOKENIZER
    if reads_tokenizer(model) or (is_prepared and takes_media(model)):
        tokenizer = (model.tokenizer, model.tokenizer_revision)
        if tokenizer != (model.model, model.revision):
            return True
    own = vars(model.hf_config)
    return any(name.endswith("_model_id") and own[name] is not None for name in own)


def reads_tokenizer(model: Any) -> bool:
    """Whether a model embeds n-grams of the texts that its tokenizer has for tokens (Engram)."""
    text = getattr(model, "hf_text_config", None) or getattr(model, "hf_config", None)
    return bool(getattr(text, "engram_layer_ids", None))


def has_code_elsewhere(config: VllmConfig, folders: Mapping[str, Path | None]) -> bool:
    """Whether code of a model may not be among its files, which are in `folders`.

    If vLLM trusts its code, a model or its image processor may name another repository for that,
    or the user another revision.
    """
    return any(_has_code_elsewhere(model, folders[it]) for it, model in models_of(config).items())


def _has_code_elsewhere(model: Any, folder: Path | None) -> bool:
    if not getattr(model, "trust_remote_code", False):
        return False
    maps = [getattr(model.hf_config, "auto_map", None)]
    if folder is not None:
        maps += [part.get("auto_map") for name in _PROCESSORS for part in _parts(folder / name)]
    known = [each for each in maps if isinstance(each, dict)]
    classes = [where for each in known for name, where in each.items() if name != _OF_TOKENS]
    is_elsewhere = _OTHER_REPOSITORY in json.dumps(classes, default=str)
    return is_elsewhere or getattr(model, "code_revision", None) is not None


def _parts(file: Path) -> list[dict[str, Any]]:
    """Return the objects in a JSON file, those within others included; none if it has none."""
    parts: list[dict[str, Any]] = []

    def keep(part: dict[str, Any]) -> dict[str, Any]:
        parts.append(part)
        return part

    with suppress(OSError, ValueError):
        json.loads(file.read_bytes(), object_hook=keep)
    return parts
