"""What keeps the blocks of two servers apart: each thing that shapes their bytes, and no other."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.vllm.halves import FULL, NUM_BLOCKS, PAGE_BYTES, WINDOW, cache_config
from transformers import PretrainedConfig
from vllm import envs
from vllm import version as vllm_version
from vllm.config import (
    CacheConfig,
    KernelConfig,
    ModelConfig,
    MultiModalConfig,
    ParallelConfig,
    SpeculativeConfig,
    VllmConfig,
)

from kvstow import ConfigError
from kvstow.vllm import identity as identity_module
from kvstow.vllm import shaping as shaping_module
from kvstow.vllm import variables as variables_module
from kvstow.vllm.identity import Identity
from kvstow.vllm.model import Model
from kvstow.vllm.options import Options
from kvstow.vllm.variables import variables

Change = Callable[["World"], object]


class _Json(SimpleNamespace):
    def to_json_string(self) -> str:
        return repr(sorted(vars(self).items()))


class _Model(SimpleNamespace):
    def compute_hash(self) -> str:
        return repr([self.hf_config.to_json_string(), getattr(self, "max_model_len", None)])


class World:
    """A server's configuration and memory, which a test changes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.specs: tuple[Any, ...] = (FULL, WINDOW)
        self.num_blocks = NUM_BLOCKS
        self.options: dict[str, Any] = {"shared": "redis://kv.example"}
        self.backend = "Flash"
        self.blocks_per_block = 1  # those of the kernel
        folder.mkdir(exist_ok=True)
        (folder / "weights").write_text("weights")
        model = _Model(
            model=str(folder),
            revision=None,
            dtype=torch.float32,
            hf_config=_Json(layers=2),
            multimodal_config=None,
        )
        self.config = SimpleNamespace(
            model_config=model,
            cache_config=SimpleNamespace(
                cache_dtype="auto", prefix_caching_hash_algo="sha256", hash_block_size=None
            ),
            parallel_config=SimpleNamespace(
                world_size=2,
                rank=0,
                tensor_parallel_size=2,
                pipeline_parallel_size=1,
                data_parallel_index=0,
            ),
            load_config=SimpleNamespace(
                load_format="auto", model_loader_extra_config={}, download_dir=None
            ),
            speculative_config=None,
            attention_config=None,
            kernel_config=SimpleNamespace(
                moe_backend="auto",
                linear_backend="auto",
                linear_backend_per_quant=None,
                enable_jit_warmup=True,
            ),
            compilation_config=SimpleNamespace(static_forward_context={}),
        )

    def digest(self) -> bytes:
        cache = cache_config(*self.specs, num_blocks=self.num_blocks)
        layer = SimpleNamespace(
            get_attn_backend=lambda: SimpleNamespace(full_cls_name=lambda: self.backend)
        )
        self.config.compilation_config.static_forward_context = {"0": layer}
        per_block = self.blocks_per_block
        size = self.num_blocks * per_block, PAGE_BYTES // per_block
        caches = {str(at): torch.zeros(size, dtype=torch.uint8) for at in range(len(self.specs))}
        own = Identity(cast(VllmConfig, self.config), Options.parse(self.options))
        return own.fingerprint(Model.of(cache), caches).digest


@pytest.fixture
def worlds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[World, World]:
    """Two servers on two machines, whose models lie under one path."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return World(tmp_path / "model"), World(tmp_path / "model")


def of(path: str, value: object) -> Change:
    """Return what sets a part of the configuration."""

    def change(world: World) -> None:
        *parts, last = path.split(".")
        target: Any = world
        for part in parts:
            target = getattr(target, part)
        setattr(target, last, value)

    return change


OTHERS: dict[str, Change] = {
    "rank": of("config.parallel_config.rank", 1),
    "number of ranks": of("config.parallel_config.world_size", 4),
    "tensor parallelism": of("config.parallel_config.tensor_parallel_size", 1),
    "pipeline parallelism": of("config.parallel_config.pipeline_parallel_size", 2),
    "tokens in a row on a context-parallel rank": of(
        "config.parallel_config.cp_kv_cache_interleave_size", 16
    ),
    "dtype": of("config.model_config.dtype", torch.bfloat16),
    "dtype of the KV": of("config.cache_config.cache_dtype", "fp8"),
    "layers whose KV keeps the dtype": of("config.cache_config.kv_cache_dtype_skip_layers", ["0"]),
    "class of the workers": of("config.parallel_config.worker_cls", "acme.Worker"),
    "class that extends them": of("config.parallel_config.worker_extension_cls", "acme.Trainer"),
    "hash algorithm": of("config.cache_config.prefix_caching_hash_algo", "xxhash"),
    "tokens of a hash": of("config.cache_config.hash_block_size", 8),
    "configuration of the model": of("config.model_config.hf_config", _Json(layers=3)),
    "weights": lambda world: (world.folder / "weights").write_text("WEIGHTS"),
    "a file more": lambda world: (world.folder / "more").write_text("x"),
    "loader": of("config.load_config.load_format", "safetensors"),
    "groups": of("specs", (FULL, FULL)),
    "kernels": of("backend", "FlashInfer"),
    "blocks of the kernel": of("blocks_per_block", 2),
    "dtype of states": of("config.cache_config.mamba_cache_dtype", "float16"),
    "dtype of a part of states": of("config.cache_config.mamba_ssm_cache_dtype", "float32"),
    "buffer of states": of("config.cache_config.replayssm_buffer_len", 8),
    "rows of states for drafts": of(
        "config.speculative_config", SimpleNamespace(num_speculative_tokens=2)
    ),
    "kernels of experts": of("config.kernel_config.moe_backend", "marlin"),
    "kernels of linear layers": of("config.kernel_config.linear_backend", "emulation"),
    "kernels of whole layers": of("config.kernel_config.monokernel", True),
    "kernels of one quantization": of(
        "config.kernel_config.linear_backend_per_quant", {"nvfp4_w4a16": "humming"}
    ),
    "kernels of states": of("config.mamba_config", SimpleNamespace(backend="flashinfer")),
    "kernels of gated delta nets": of(
        "config.additional_config", {"gdn_prefill_backend": "flashinfer"}
    ),
    "settings of a platform": of(
        "config.additional_config", SimpleNamespace(compute_hash=lambda: "another hash")
    ),
    "experts on ranks of their own": of("config.parallel_config.enable_expert_parallel", True),
    "experts that are balanced": of("config.parallel_config.enable_eplb", True),
    "experts whose tokens are exchanged": of(
        "config.parallel_config.all2all_backend", "deepep_low_latency"
    ),
    "experts of several engines": of("config.parallel_config.data_parallel_size", 2),
    "experts with adapters": of("config.lora_config", SimpleNamespace()),
    "kernels of the drafts' experts": of(
        "config.speculative_config", SimpleNamespace(moe_backend="marlin")
    ),
    # vLLM stores all kinds of 8 bits as uint8.
    "dtype of the drafts' KV": of(
        "config.speculative_config", SimpleNamespace(kv_cache_dtype="fp8_e5m2")
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_servers_that_differ_do_not_share(worlds: tuple[World, World], name: str) -> None:
    first, second = worlds
    before = first.digest()
    assert second.digest() == before
    OTHERS[name](second)
    assert second.digest() != before


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PYTHONHASHSEED", "17"),
        ("VLLM_KV_CACHE_LAYOUT", "HND"),
        ("VLLM_SSM_CONV_STATE_LAYOUT", "DS"),
        ("VLLM_MARLIN_INPUT_DTYPE", "int8"),
        ("VLLM_CPU_INT4_W4A8", "0"),
        ("VLLM_USE_DEEP_GEMM_E8M0", "0"),
        ("VLLM_USE_DEEP_GEMM", "1"),  # the default, but vLLM prefers these kernels then
        ("VLLM_FLOAT32_MATMUL_PRECISION", "medium"),
        ("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random"),
        ("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "1"),
        ("VLLM_MARLIN_USE_ATOMIC_ADD", "no number, and no kernel here asks"),
    ],
)
def test_servers_with_other_variables_do_not_share(
    worlds: tuple[World, World], monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    before = worlds[0].digest()
    monkeypatch.setenv(variable, value)
    assert worlds[1].digest() != before


def test_servers_with_and_without_flashinfer_do_not_share(
    worlds: tuple[World, World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernels of experts round activations to 8 bits, and others of vLLM's keep 16."""
    monkeypatch.setattr(shaping_module, "has_flashinfer", lambda: False)
    before = worlds[0].digest()
    monkeypatch.setattr(shaping_module, "has_flashinfer", lambda: True)
    assert worlds[1].digest() != before


# A sample of those by which vLLM or a library rounds otherwise, or orders the numbers of a block.
ROUNDING = (
    "AITER_BF16_FP8_MOE_BOUND",
    "DNNL_DEFAULT_FPMATH_MODE",
    "FLA_TRIL_PRECISION",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "VLLM_BATCH_INVARIANT",
    "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER",
    "VLLM_CPU_INT4_W4A8",
    "VLLM_DISABLED_KERNELS",
    "VLLM_FLOAT32_MATMUL_PRECISION",
    "VLLM_HUMMING_USE_F16_ACCUM",
    "VLLM_KV_CACHE_LAYOUT",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_MARLIN_USE_ATOMIC_ADD",
    "VLLM_MEDIA_CONNECTOR",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
    "VLLM_MOE_USE_DEEP_GEMM",
    "VLLM_ROCM_FP8_MFMA_PAGE_ATTN",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION",
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT",
    "VLLM_ROCM_USE_AITER_MOE",
    "VLLM_SSM_CONV_STATE_LAYOUT",
    "VLLM_USE_DEEP_GEMM_E8M0",
    "VLLM_VIDEO_LOADER_BACKEND",
    "VLLM_XPU_INC_WNA16_BACKEND",
    "XHS_VIDEO_JPEG_QUALITY",
)


def test_each_variable_that_may_shape_blocks_keeps_servers_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also one that only a later vLLM has. No value is in the text, because it may be a secret."""
    monkeypatch.setitem(envs.environment_variables, "VLLM_OF_A_LATER_VERSION", str)
    # vLLM itself sets some.
    for name in (*envs.environment_variables, *variables_module._UNLISTED):
        monkeypatch.delenv(name, raising=False)
    assert variables() == ""
    seen = {""}
    for name in (*ROUNDING, "VLLM_OF_A_LATER_VERSION"):
        for value in ("a secret", "another"):
            with monkeypatch.context() as changed:
                changed.setenv(name, value)
                seen.add(found := variables())
                assert found.startswith(f"{name} ")
                assert value not in found
    assert len(seen) == 1 + 2 * (len(ROUNDING) + 1)


def test_many_variables_fit_in_a_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in envs.environment_variables:
        monkeypatch.setenv(name, "1")
    text = variables()
    assert len(text) < 600
    monkeypatch.setenv("XHS_VIDEO_JPEG_QUALITY", "1")  # the last name
    assert variables() != text


def test_variables_that_shape_no_block_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = variables()
    for name in variables_module._NOT_COUNTED:
        monkeypatch.setenv(name, "1")
    assert variables() == before
    known = {
        "CUDA_VISIBLE_DEVICES",
        "VLLM_API_KEY",
        "VLLM_CPU_KVCACHE_SPACE",
        "VLLM_DP_RANK",
        "VLLM_LOGGING_LEVEL",
        "VLLM_PORT",
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS",
    }
    assert known <= variables_module._NOT_COUNTED


# Variables that shape no block, of versions before or after the one that most tests run on.
OF_SOME_VERSIONS = {
    "FORCE_COLOR",
    "VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT",
    "VLLM_CHAT_TEMPLATE_FUEL",
    "VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT",
    "VLLM_ENGINE_ITERATION_TIMEOUT_S",
    "VLLM_HTTP_MAX_REQUEST_BODY_SIZE",
    "VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES",
    "VLLM_MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB",
    "VLLM_MOONCAKE_CONNECTOR_TIMEOUT",
    "VLLM_P2P_HANDSHAKE_TIMEOUT_S",
    "VLLM_P2P_IDLE_TIMEOUT_S",
    "VLLM_P2P_MAX_PEERS",
    "VLLM_REQUEST_BODY_LOG_LEVEL",
    "VLLM_SKIP_VERSION_SUFFIX",
    "VLLM_TRITON_JIT_WARMUP_NUM_THREADS",
    "VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE",
    "VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM",
    "VLLM_USE_RAY_V2_EXECUTOR_BACKEND",
    "VLLM_USE_RAY_WRAPPED_PP_COMM",
}


# Settings of a model that 0.30 or 0.31 lacks.
OF_LATER_VERSIONS = {"sleep_mode_offload_cudagraph", "sleep_preserve_parameter_names"}


def test_vllm_has_all_settings_that_a_fingerprint_reads() -> None:
    """A new name would leave a setting out."""

    def settings(cls: Any) -> set[str]:
        return {field.name for field in fields(cls)}

    assert {*shaping_module._OF_STATES, "kv_cache_dtype_skip_layers"} <= settings(CacheConfig)
    of_workers = {"data_parallel_size", "worker_cls", "worker_extension_cls"}
    assert {*shaping_module._OF_EXPERTS, *of_workers} <= settings(ParallelConfig)
    assert {"mamba_config", "additional_config", "lora_config"} <= settings(VllmConfig)
    assert isinstance(ModelConfig.is_moe, property)
    of_drafts = {"kv_cache_dtype", "moe_backend", "num_speculative_tokens", "draft_model_config"}
    assert of_drafts <= settings(SpeculativeConfig)
    assert isinstance(VllmConfig.use_v2_model_runner, property)
    of_images = {*shaping_module._OF_NO_NUMBERS, "mm_encoder_fp8_scale_path"}
    assert of_images <= settings(MultiModalConfig)
    assert {*shaping_module._OF_NO_BLOCK} - settings(ModelConfig) <= OF_LATER_VERSIONS
    gone = variables_module._NOT_COUNTED - {*envs.environment_variables}
    assert gone <= OF_SOME_VERSIONS
    assert not variables_module._UNLISTED & envs.environment_variables.keys()
    version = ".".join(map(str, vllm_version.__version_tuple__[:2]))
    assert ("monokernel" in settings(KernelConfig)) == (version not in {"0.30", "0.31", "0.32"})
    page = (Path(__file__).parents[2] / "docs/reference/same-blocks.md").read_text()
    assert set(re.findall(r"`([A-Z]\w+)`", page)) >= variables_module._UNLISTED


def test_named_kernels_of_vllm_are_in_a_fingerprint() -> None:
    config: Any = SimpleNamespace(kernel_config=KernelConfig(), speculative_config=None)
    named = dict(each for each in shaping_module._backends(config) if each is not None)
    assert {"moe_backend", "linear_backend", "linear_backend_per_quant"} <= set(named)
    assert all("warmup" not in name and "autotune" not in name for name in named)


def _scales(world: World, path: str, _: pytest.MonkeyPatch) -> None:
    world.config.model_config.multimodal_config = SimpleNamespace(mm_encoder_fp8_scale_path=path)


def _quantization(world: World, path: str, _: pytest.MonkeyPatch) -> None:
    world.config.model_config.hf_config.quantization_config_file = path


def _variable(_: World, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HUMMING_ONLINE_QUANT_CONFIG", path)


@pytest.mark.parametrize("name", [_scales, _quantization, _variable])
def test_servers_with_other_files_that_settings_name_do_not_share(
    worlds: tuple[World, World],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: Callable[[World, str, pytest.MonkeyPatch], None],
) -> None:
    """As the scales of an 8-bit encoder, and how the weights are quantized."""
    file = tmp_path / "file.json"
    file.write_text("1")
    for world in worlds:
        name(world, str(file), monkeypatch)
    before = worlds[0].digest()
    assert worlds[1].digest() == before
    file.write_text("2")
    assert worlds[1].digest() != before
    file.unlink()
    if name is _variable:  # vLLM takes the value for the setting itself then
        assert worlds[1].digest() != before
        return
    with pytest.raises(ConfigError, match=r" is '.*file.json', which cannot be read"):
        worlds[1].digest()


def test_file_with_the_name_of_a_switch_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell makes one from `2>1`, with the server's log."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "1")
    before = variables()
    assert before
    Path("1").write_text("log")
    assert variables() == before


def test_drafts_shape_no_block_of_a_model_without_states(worlds: tuple[World, World]) -> None:
    for world in worlds:
        world.config.model_config.has_inner_state = False
    before = worlds[0].digest()
    OTHERS["rows of states for drafts"](worlds[1])
    assert worlds[1].digest() == before


@pytest.mark.parametrize("num_modules", [1, 3])
@pytest.mark.parametrize("change", ["drafts", "runner"])
def test_what_decides_which_modules_of_mtp_have_kv_counts(
    worlds: tuple[World, World], num_modules: int, change: str
) -> None:
    """A server of one draft writes no KV of the other modules, but stores their layers."""
    for world, num_drafts in zip(worlds, (1, 3), strict=True):
        model = world.config.model_config
        model.has_inner_state = False
        draft = _Model(**vars(model))
        draft.hf_config = _Json(num_nextn_predict_layers=num_modules)
        world.config.use_v2_model_runner = change == "drafts" or num_drafts == 3
        world.config.speculative_config = SimpleNamespace(
            num_speculative_tokens=num_drafts if change == "drafts" else 3,
            draft_model_config=draft,
            draft_load_config=None,
        )
    assert (worlds[0].digest() == worlds[1].digest()) is (num_modules == 1)


@pytest.mark.parametrize("name", [name for name in OTHERS if name.startswith("experts ")])
def test_what_chooses_kernels_of_experts_shapes_no_other_model(
    worlds: tuple[World, World], name: str
) -> None:
    for world in worlds:
        world.config.model_config.is_moe = False
    before = worlds[0].digest()
    OTHERS[name](worlds[1])
    assert worlds[1].digest() == before


@pytest.mark.parametrize("blocks_per_block", [1, 2])
def test_servers_of_other_sizes_share(worlds: tuple[World, World], blocks_per_block: int) -> None:
    for world in worlds:
        world.blocks_per_block = blocks_per_block
    worlds[1].num_blocks += 1
    assert worlds[0].digest() == worlds[1].digest()


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (identity_module, "__version__"),
        (vllm_version, "__version__"),
        (shaping_module, "transformers_version"),
    ],
    ids=["kvstow", "vllm", "transformers"],
)
def test_servers_of_other_versions_do_not_share(
    worlds: tuple[World, World], monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    """Another kvstow may order the layers of a slot in another way; Transformers reads images."""
    before = worlds[0].digest()
    monkeypatch.setattr(owner, name, "0.0.1")
    assert worlds[1].digest() != before


@pytest.mark.parametrize("group", ["vllm.general_plugins", "vllm.platform_plugins"])
@pytest.mark.parametrize("allowed", [None, "acme,other", "other"])
def test_servers_with_other_plugins_of_vllm_do_not_share(
    worlds: tuple[World, World], monkeypatch: pytest.MonkeyPatch, group: str, allowed: str | None
) -> None:
    """A plugin may bring the code of the model. One that vLLM leaves out does not count."""
    if allowed is not None:
        monkeypatch.setenv("VLLM_PLUGINS", allowed)

    def install(version: str) -> None:
        plugin = SimpleNamespace(name="acme", dist=SimpleNamespace(name="acme", version=version))
        monkeypatch.setattr(
            shaping_module, "entry_points", lambda group: [plugin] if group == of_plugin else []
        )

    of_plugin = group
    install("1.0")
    before = worlds[0].digest()
    install("1.1")
    assert (worlds[1].digest() == before) == (allowed == "other")


def test_drafts_with_a_loader_of_their_own_are_not_shared(worlds: tuple[World, World]) -> None:
    for world in worlds:
        world.config.speculative_config = SimpleNamespace(
            draft_model_config=copy.copy(world.config.model_config), draft_load_config=None
        )
    before = worlds[0].digest()
    assert worlds[1].digest() == before
    worlds[1].config.speculative_config.draft_load_config = SimpleNamespace(
        load_format="safetensors", model_loader_extra_config={}, download_dir=None
    )
    assert worlds[1].digest() != before


def test_servers_with_other_names_of_weights_do_not_share(
    worlds: tuple[World, World], tmp_path: Path
) -> None:
    (tmp_path / "version").write_text("one")
    for world in worlds:
        path = str(tmp_path / "version")
        world.options |= {"preserve_on_sleep": True, "weights_version_path": path}
    before = worlds[0].digest()
    assert worlds[1].digest() == before
    (tmp_path / "version").write_text("two")
    assert worlds[1].digest() != before


SAME: dict[str, Change] = {
    "number of blocks": of("num_blocks", NUM_BLOCKS // 2),
    "data-parallel engine": of("config.parallel_config.data_parallel_index", 1),
    "warm-up of kernels": of("config.kernel_config.enable_jit_warmup", False),
    "threads that load weights": of(
        "config.load_config.model_loader_extra_config", {"enable_multithread_load": True}
    ),
    "drafts from n-grams": lambda world: setattr(
        world.config,
        "speculative_config",
        SimpleNamespace(draft_model_config=world.config.model_config, draft_load_config=None),
    ),
    "options of kvstow": lambda world: world.options.update(num_cpu_blocks=7),
}


@pytest.mark.parametrize("name", SAME)
def test_servers_that_compute_the_same_bytes_share(worlds: tuple[World, World], name: str) -> None:
    SAME[name](worlds[1])
    assert worlds[1].digest() == worlds[0].digest()


OF_MODELS = [field.name for field in fields(cast(Any, ModelConfig))]


def _configured(**settings: Any) -> Any:
    """Return vLLM's own configuration of a model, without what it would ask its code for."""
    model = object.__new__(ModelConfig)
    given = {"hf_config": PretrainedConfig(), "multimodal_config": None}
    vars(model).update(dict.fromkeys(OF_MODELS) | given | settings)
    return model


@pytest.mark.parametrize("name", sorted({*shaping_module._OF_NO_BLOCK} & {*OF_MODELS}))
def test_settings_of_vllm_that_shape_no_block_do_not_count(name: str) -> None:
    first, second = _configured(), _configured(**{name: "another"})
    assert first.compute_hash() != second.compute_hash()
    assert shaping_module._settings(first) == shaping_module._settings(second)
    assert getattr(second, name) == "another", "the configuration itself stays"


def media_of(settings: MultiModalConfig) -> list[Any]:
    return shaping_module._media(_configured(multimodal_config=settings))


def test_the_packages_that_decode_images_count_for_models_that_take_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another version may make other numbers of the bytes that a block's hash has."""
    images, none = MultiModalConfig(), MultiModalConfig(language_model_only=True)
    first = repr(media_of(images)), repr(media_of(none))
    assert version("pillow") in first[0]
    monkeypatch.setattr(
        shaping_module, "version", lambda name: version(name) + (".1" * (name == "pillow"))
    )
    assert repr(media_of(images)) != first[0] and repr(media_of(none)) == first[1]


def test_the_program_that_prepares_images_counts_for_models_that_take_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A client may name an image, and then both programs have the same hash of it."""
    images, none = MultiModalConfig(), MultiModalConfig(language_model_only=True)
    path = tmp_path / "frontend"
    settings: list[dict[str, str]] = [
        {"VLLM_USE_RUST_FRONTEND": "0"},
        {"VLLM_USE_RUST_FRONTEND": "1"},
        *({"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": str(path)} for _ in range(2)),
    ]
    found = []
    for at, given in enumerate(settings):
        path.write_text(f"program {at}")
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        found.append((repr(media_of(images)), repr(media_of(none))))
    of_images, of_none = (set(each) for each in zip(*found, strict=True))
    assert len(of_images) == 4 and len(of_none) == 1


@pytest.mark.parametrize("name", shaping_module._OF_NO_NUMBERS)
def test_settings_of_images_that_change_no_numbers_do_not_count(name: str) -> None:
    first, second, third = (MultiModalConfig() for _ in range(3))
    setattr(second, name, "another")
    third.mm_processor_kwargs = {"max_pixels": 9}
    texts = [repr(media_of(each)) for each in (first, second, third)]
    assert repr(first) != repr(second) and texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("given", "media", "is_counted"),
    [
        (-1, None, False),
        (-1, MultiModalConfig(language_model_only=True), False),
        # The image processor of Nemotron Nano shrinks images to what fits in the length.
        (-1, MultiModalConfig(), True),
        (512, None, True),
    ],
    ids=["text", "images off", "images", "given"],
)
def test_a_length_that_vllm_fits_to_its_memory_does_not_count(
    given: int, media: Any, is_counted: bool
) -> None:
    """With `--max-model-len auto` it differs with each start."""
    first, second = (
        _configured(original_max_model_len=given, max_model_len=length, multimodal_config=media)
        for length in (300, 200)
    )
    has_same = shaping_module._settings(first) == shaping_module._settings(second)
    assert has_same == (not is_counted)


def test_settings_for_the_generation_count_unless_they_only_choose_among_tokens(
    tmp_path: Path,
) -> None:
    """Llama 4 scales its queries by `attn_temperature_tuning`."""
    given = {"temperature": 0.5, "top_k": 3, "attn_temperature_tuning": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    rest = {"attn_temperature_tuning": True}
    for settings, counted in (
        ({"generation_config": "auto"}, {}),
        ({"generation_config": "vllm", "override_generation_config": {"min_p": 0.1}}, {}),
        ({"generation_config": "auto", "override_generation_config": given}, rest),
        ({"generation_config": str(tmp_path), "config_format": "auto"}, rest),
        (
            {
                "hf_config_path": str(tmp_path),
                "generation_config": "auto",
                "config_format": "auto",
                "_hf_config_revision": None,
            },
            rest,
        ),
    ):
        found = shaping_module._generation(_configured(**settings))
        found.pop("transformers_version", None)
        assert found == counted


@pytest.mark.parametrize("parts", [(1, 2), ({1}, {2})], ids=["JSON", "no JSON"])
def test_the_configuration_of_a_model_counts(parts: tuple[object, object]) -> None:
    """Also if it is no JSON, as a model's own code may make one. vLLM starts with it."""
    first, second = (_configured(hf_config=PretrainedConfig(part=part)) for part in parts)
    assert shaping_module._settings(first) != shaping_module._settings(second)


def test_files_that_have_not_changed_are_read_once(
    worlds: tuple[World, World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity_module, "_FRESH_S", -1.0)  # as if the files were older
    read = []
    real = identity_module._content_digest

    def counted(file: Path) -> str:
        read.append(file.name)
        return real(file)

    monkeypatch.setattr(identity_module, "_content_digest", counted)
    before = worlds[0].digest()
    assert read == ["weights"] and (tmp_path / "cache/kvstow/weights.json").exists()
    assert worlds[1].digest() == before and read == ["weights"]
    (worlds[0].folder / "weights").write_text("WEIGHTS")
    assert worlds[1].digest() != before and read == ["weights"] * 2


@pytest.mark.parametrize("may_show", [True, False])
def test_files_of_an_image_are_read_each_time(
    worlds: tuple[World, World], monkeypatch: pytest.MonkeyPatch, may_show: bool
) -> None:
    """An image of a file system may give each version of a file one inode, size and time."""
    chosen = {"st_ino": 7, "st_ctime": 1.0, "st_mtime_ns": 10**9, "st_ctime_ns": 10**9 + may_show}
    real = os.stat

    def stat(path: Any, **more: Any) -> Any:
        found = real(path, **more)
        names = [name for name in dir(found) if name.startswith("st_")]
        return SimpleNamespace(**{name: getattr(found, name) for name in names} | chosen)

    monkeypatch.setattr(os, "stat", stat)
    before = worlds[0].digest()
    (worlds[0].folder / "weights").write_text("WEIGHTS")
    # The negative control: a time that a clock has given is believed.
    assert (worlds[1].digest() == before) is may_show


def test_digests_by_another_sum_are_not_believed(
    worlds: tuple[World, World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two servers of the same weights must share, whichever release one of them was before."""
    monkeypatch.setattr(identity_module, "_FRESH_S", -1.0)  # as if the files were older
    before = worlds[0].digest()
    memory = tmp_path / "cache/kvstow/weights.json"
    for has_same_sum in (True, False):
        ((name, [kind, *state, _]),) = json.loads(memory.read_text()).items()
        kind = kind if has_same_sum else "crc64"
        memory.write_text(json.dumps({name: [kind, *state, "remembered"]}))
        assert (worlds[1].digest() == before) is not has_same_sum


@pytest.mark.parametrize("content", ["", "null", "[1]", "[" * 100_000])
def test_damaged_digests_are_computed_anew(
    worlds: tuple[World, World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    monkeypatch.setattr(identity_module, "_FRESH_S", -1.0)  # as if the files were older
    before, memory = worlds[0].digest(), tmp_path / "cache/kvstow/weights.json"
    whole = memory.read_text()
    memory.write_text(content)
    assert worlds[1].digest() == before
    assert memory.read_text() == whole


@pytest.mark.parametrize("place", ["a file", "no home"])
def test_without_a_place_for_digests_the_files_are_read_each_time(
    worlds: tuple[World, World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    before = worlds[0].digest()
    if place == "a file":
        (tmp_path / "file").write_text("in the way")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", refuse_home)
    assert worlds[1].digest() == before


def refuse_home() -> Path:
    raise RuntimeError("the test has no home folder")


def test_a_file_that_cannot_be_read_ends_the_start(worlds: tuple[World, World]) -> None:
    (worlds[0].folder / "link").symlink_to("link")
    (worlds[0].folder / "weights").unlink()
    (worlds[0].folder / "weights").symlink_to("/proc/self/mem")
    with pytest.raises(ConfigError, match=r"cannot be read .* the tier below the host needs"):
        worlds[0].digest()
