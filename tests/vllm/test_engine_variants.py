"""The connector on engines with other settings, one engine for each test.

All tests but the last run only in `make test-vllm-full`. The test with drafts is the last, because
modules that drafts load keep vLLM from starting another engine in the process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.vllm import models
from tests.vllm.engine import (
    BLOCK_SIZE,
    DAMAGE,
    TOLERANCE,
    Answer,
    Engine,
    difference,
    prompts,
)
from tests.vllm.full import full
from tests.vllm.setting import CONNECTOR
from vllm.config import SpeculativeConfig
from vllm.lora.request import LoRARequest

from kvstow.vllm import KVStowConnector

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own, and those of what it imports

full = full("starts one more engine")

PROMPTS = prompts(6, 300)
# The tokens repeat, so that n-gram drafts find a match.
REPEATING = [tokens[:150] + tokens[:150] for tokens in PROMPTS]
NUM_HIT = (300 - 1) // BLOCK_SIZE * BLOCK_SIZE


@contextmanager
def running(folder: Path, **settings: Any) -> Iterator[Engine]:
    defaults: dict[str, Any] = {"num_blocks": 40, "options": {"num_cpu_blocks": 400}}
    engine = Engine(folder, **(defaults | settings))
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[Answer]]:
    """The answers without a connector and with default settings."""
    with running(folder, options=None) as engine:
        return {"plain": engine.generate(PROMPTS), "repeating": engine.generate(REPEATING)}


def rounds_agree(
    engine: Engine, asked: list[list[int]], expected: list[Answer], **settings: Any
) -> None:
    """Check a first round, and a second round that comes from the host."""
    for hits in ([0] * len(asked), [NUM_HIT] * len(asked)):
        answers = engine.generate(asked, **settings)
        assert [answer.num_cached for answer in answers] == hits
        assert difference(answers, expected) < TOLERANCE
        engine.settle()


def sleep_changes_nothing(
    engine: Engine, asked: list[list[int]], expected: list[Answer], **settings: Any
) -> None:
    """Check the answers across two sleeps: during the prompts, and during generation."""
    engine.half.tier.options = replace(engine.half.tier.options, preserve_on_sleep=True)
    engine.begin(asked, **settings)
    for num_steps in (2, 8):
        engine.step(num_steps)
        engine.sleep()
        engine.wake()
    assert difference(engine.finish(), expected) < TOLERANCE
    engine.settle()


@full
def test_another_connector_changes_nothing(
    folder: Path, expected: dict[str, list[Answer]], tmp_path: Path
) -> None:
    """Both connectors are registered by name, and the other has nothing to load."""
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    own = CONNECTOR | {"kv_connector_extra_config": {"num_cpu_blocks": 400}}
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [own, other]},
    }
    with running(folder, options=None, kv_transfer_config=transfer) as engine:
        rounds_agree(engine, PROMPTS, expected["plain"])


@full
def test_two_ranks_serve_hits(
    folder: Path, expected: dict[str, list[Answer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks are tensor-parallel: two pipeline stages fail here without a connector, too."""
    # By default vLLM wants a memory node for each rank.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    with running(folder, tensor_parallel_size=2) as engine:
        assert isinstance(engine.connector, KVStowConnector)
        rounds_agree(engine, PROMPTS, expected["plain"])
        engine.check_idle()


def make_adapter(folder: Path, seed: int) -> Path:
    """Write an adapter that changes the queries of every layer enough to change answers."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    size, rank = HIDDEN, 8
    weights = {}
    for layer in range(LLAMA["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(rank, size, generator=generator) * 0.1
        weights[f"{name}.lora_B.weight"] = torch.randn(size, rank, generator=generator) * 0.1
    save_file(weights, str(folder / "adapter_model.safetensors"))
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["q_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@full
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512",
    reason="vLLM stores 8 bits only on CPUs with AVX-512",
)
@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_an_8_bit_cache_comes_back_from_the_host(
    folder: Path, expected: dict[str, list[Answer]], dtype: str
) -> None:
    with running(folder, options=None, kv_cache_dtype=dtype) as engine:
        alone = engine.generate(PROMPTS)
    assert difference(alone, expected["plain"]) > TOLERANCE, "the engine stores 8 bits"
    with running(folder, kv_cache_dtype=dtype) as engine:
        rounds_agree(engine, PROMPTS, alone)
        assert engine.worker.arena is not None
        engine.worker.arena.slots.view("uint8")[:, ::3] ^= 0x40  # the negative control
        damaged = engine.generate(PROMPTS)
        assert [one.num_cached for one in damaged] == [NUM_HIT] * len(PROMPTS)
        assert difference(damaged, alone) > DAMAGE


@full
def test_two_lora_names_share_no_block(folder: Path, tmp_path: Path) -> None:
    adapters = [
        LoRARequest(name, at, str(make_adapter(tmp_path / name, at)))
        for at, name in enumerate(("one", "two"), 1)
    ]
    lora = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    with running(folder, options=None, **lora) as engine:
        expected = [engine.generate(PROMPTS, lora_request=adapter) for adapter in adapters]
    assert difference(*expected) > 0.01
    with running(folder, **lora) as engine:
        for adapter, answers in zip(adapters, expected, strict=True):
            rounds_agree(engine, PROMPTS, answers, lora_request=adapter)
        for adapter, answers in zip(adapters, expected, strict=True):
            sleep_changes_nothing(engine, PROMPTS, answers, lora_request=adapter)
        engine.check_idle()


def make_drafter(folder: Path) -> Path:
    """Write a draft model (EAGLE) of one layer for the tiny Llama."""
    folder.mkdir()
    config: dict[str, Any] = models.LLAMA | {"num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    weights = draft_layer("layers.0.") | {"fc.weight": drawn(HIDDEN, 2 * HIDDEN)}
    del weights["layers.0.input_layernorm.weight"]
    save_file(weights, folder / "model.safetensors")
    return folder


HIDDEN = models.HIDDEN_SIZE
LLAMA: dict[str, Any] = models.LLAMA


def drawn(*shape: int) -> torch.Tensor:
    """Return weights of this shape, the same at each call."""
    return torch.empty(shape).normal_(0, 0.15, generator=torch.Generator().manual_seed(sum(shape)))


def draft_layer(prefix: str) -> dict[str, torch.Tensor]:
    """Return the weights of one layer like those of the tiny Llama."""
    inner, head = LLAMA["intermediate_size"], LLAMA["head_dim"]
    num_q, num_kv = LLAMA["num_attention_heads"] * head, LLAMA["num_key_value_heads"] * head
    weights = {
        "self_attn.q_proj": drawn(num_q, HIDDEN),
        "self_attn.k_proj": drawn(num_kv, HIDDEN),
        "self_attn.v_proj": drawn(num_kv, HIDDEN + 1)[:, 1:].contiguous(),
        "self_attn.o_proj": drawn(HIDDEN, num_q),
        "mlp.gate_proj": drawn(inner, HIDDEN),
        "mlp.up_proj": drawn(inner, HIDDEN + 1)[:, 1:].contiguous(),
        "mlp.down_proj": drawn(HIDDEN, inner),
        "input_layernorm": torch.ones(HIDDEN),
        "post_attention_layernorm": torch.ones(HIDDEN),
    }
    return {f"{prefix}{name}.weight": weight for name, weight in weights.items()}


def make_mtp_model(folder: Path, window: int | None) -> Path:
    """Write a model with one module for multi-token prediction, all of its layers with a window."""
    config = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    models.make_model(config, folder)
    module = "model.mtp_layers.0."
    weights = load_file(folder / "model.safetensors") | draft_layer(module)
    weights[f"{module}input_proj.weight"] = drawn(HIDDEN, 2 * HIDDEN)
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        weights[f"{module}{name}.weight"] = torch.ones(HIDDEN)
    for name in "qkv":
        num_rows = len(weights[f"{module}self_attn.{name}_proj.weight"])
        weights[f"{module}self_attn.{name}_proj.bias"] = torch.zeros(num_rows)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    if window is not None:
        num_layers = config["num_hidden_layers"]
        config |= {
            "use_sliding_window": True,
            "sliding_window": window,
            "max_window_layers": num_layers,
            "layer_types": ["sliding_attention"] * num_layers,
        }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def answered_one_by_one(engine: Engine) -> tuple[list[Answer], list[list[int]]]:
    """Return the answers to `PROMPTS`, and all drafts in their order."""
    drafts: list[list[int]] = []
    schedule = engine.core.scheduler.schedule

    def recording(*args: Any) -> Any:
        scheduled = schedule(*args)
        drafts.extend(map(list, scheduled.scheduled_spec_decode_tokens.values()))
        return scheduled

    engine.core.scheduler.schedule = recording
    answers = [answer for tokens in PROMPTS for answer in engine.generate([tokens])]
    engine.core.scheduler.schedule = schedule
    return answers, drafts


@full
@pytest.mark.parametrize("kind", ["eagle", "mtp", "mtp-with-windows"])
def test_a_draft_model_drafts_from_the_host_as_from_the_device(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    """The target model verifies all drafts, so only the drafts show the draft model's layer."""
    speculation: dict[str, object]
    if kind == "eagle":
        drafter = make_drafter(tmp_path / "drafter")
        speculation = {"method": "eagle", "model": str(drafter), "num_speculative_tokens": 3}
    else:
        folder = make_mtp_model(tmp_path / "model", 128 if "windows" in kind else None)
        speculation = {"method": "mtp", "num_speculative_tokens": 1}
    alone = dict(speculation)
    if hasattr(SpeculativeConfig, "disable_lookahead_block_hashes"):
        # vLLM 0.33 has such hashes without a connector only. Then a hit keeps its last block.
        alone["disable_lookahead_block_hashes"] = True
    with running(folder, options=None, num_blocks=400, speculative_config=alone) as engine:
        first, _ = answered_one_by_one(engine)
        second, drafts = answered_one_by_one(engine)
    assert {answer.num_cached for answer in first} == {0}
    # 288 tokens are whole blocks, and a draft model drops the last.
    assert {answer.num_cached for answer in second} == {NUM_HIT - BLOCK_SIZE}
    with running(folder, speculative_config=speculation) as engine:
        assert difference(answered_one_by_one(engine)[0], first) < TOLERANCE
        for is_damaged in (False, True, False):
            engine.settle()
            assert engine.llm.reset_prefix_cache()
            assert engine.worker.arena is not None
            slots, (layers,) = engine.worker.arena.slots, engine.half.tier.model.layers
            at = [layer.name for layer in layers].index(
                f"model.layers.{LLAMA['num_hidden_layers']}.self_attn.attn"
            )
            start = sum(layer.block_bytes for layer in layers[:at])
            own = slice(start, start + layers[at].block_bytes)
            kept = slots[:, own].copy()
            if is_damaged:
                slots[:, own] = 0
            answers, found = answered_one_by_one(engine)
            slots[:, own] = kept
            assert [a.num_cached for a in answers] == [a.num_cached for a in second]
            assert difference(answers, second) < TOLERANCE
            assert len(found) > len(PROMPTS) and (found == drafts) != is_damaged
        engine.settle()
        engine.check_idle()


def test_rejected_drafts_are_not_stored(
    folder: Path, expected: dict[str, list[Answer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers of later rounds would differ if rejected drafts were stored."""
    # One matching token of the prompt is enough for a draft, so vLLM rejects most drafts.
    speculation = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 1,
    }
    with running(folder, speculative_config=speculation) as engine:
        num_drafted = 0
        build = engine.half.build

        def counting(scheduled: Any) -> Any:
            nonlocal num_drafted
            num_drafted += sum(map(len, scheduled.scheduled_spec_decode_tokens.values()))
            return build(scheduled)

        monkeypatch.setattr(engine.half, "build", counting)
        rounds_agree(engine, REPEATING, expected["repeating"])
        assert num_drafted > 0
        sleep_changes_nothing(engine, REPEATING, expected["repeating"])
        engine.check_idle()
