"""Requests whose hashes do not show all that their KV depends on: nothing of them is kept."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.vllm.halves import FULL, WINDOW, Scheduler, cache_config, engine_config
from vllm.config import ModelConfig, MultiModalConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import Request

from kvstow.vllm import KVStowConnector
from kvstow.vllm.messages import Copies

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

NUM_TOKENS = 100


def feature(modality: str, name: str, offset: int, length: int) -> MultiModalFeatureSpec:
    place = PlaceholderRange(offset, length)
    return MultiModalFeatureSpec(None, modality, identifier=name, mm_position=place, mm_hash=name)


def video(scheduler: Scheduler, name: str, *, sound: str, sound_at: int) -> Request:
    """Return a request with a video and its sound."""
    parts = [feature("video", "film", 4, 70), feature("audio", sound, sound_at, 78 - sound_at)]
    return scheduler.request(name, NUM_TOKENS, mm_features=parts)


def frames(scheduler: Scheduler, name: str) -> Request:
    """Return a request with sound for two tokens from each token on, as Voxtral streams it."""
    parts = [feature("audio", f"{at}", at, 2) for at in range(4, 78)]
    return scheduler.request(name, NUM_TOKENS, mm_features=parts)


def mixed(scheduler: Scheduler, name: str, *, is_token: bool, row: float = 0.0) -> Request:
    """Return a prompt of tokens and embeddings. Of the numbers, vLLM has 0 for those of tokens."""
    if "prompt_is_token_ids" not in inspect.signature(Request).parameters:
        pytest.skip("this version of vLLM does not mix them")
    given = [True] * 60 + [False] * (NUM_TOKENS - 60)
    embeds = torch.tensor([0.0 if one else 1.0 for one in given])[:, None].expand(-1, 8).clone()
    given[7], embeds[7] = is_token, row
    request = scheduler.request(name, NUM_TOKENS)
    tokens = [1 + token for token in request.prompt_token_ids or ()]
    tokens[7] = 0
    return Request(
        name,
        tokens,
        request.sampling_params,
        None,
        prompt_embeds=embeds,
        prompt_is_token_ids=given,
        block_hasher=request._block_hasher,
    )


Make = Callable[[Scheduler, str], Request]
PAIRS: dict[str, tuple[Make, Make]] = {
    "another sound": (
        lambda s, name: video(s, name, sound="one", sound_at=4),
        lambda s, name: video(s, name, sound="two", sound_at=4),
    ),
    "token 0 or zeros": (
        lambda s, name: mixed(s, name, is_token=True),
        lambda s, name: mixed(s, name, is_token=False),
    ),
}


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("specs", [(FULL,), (FULL, WINDOW)], ids=["full", "hybrid"])
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("pair", PAIRS)
def test_nothing_is_stored_or_loaded(pair: str, is_first: bool, specs: Any, lazy: bool) -> None:
    scheduler = Scheduler(*specs, lazy_offload=lazy)
    first, second = PAIRS[pair] if is_first else PAIRS[pair][::-1]
    a, b = first(scheduler, "a"), second(scheduler, "b")
    assert a.block_hashes[3] == b.block_hashes[3], "vLLM's hashes cannot tell them apart"
    scheduler.serve(a)
    assert scheduler.manager.reset_prefix_cache()
    assert scheduler.half.offload is not None and scheduler.half.offload.num_resident == 0
    assert scheduler.serve(b) == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda s, name: video(s, name, sound="one", sound_at=74),
        frames,
        lambda s, name: mixed(s, name, is_token=False, row=1.0),
    ],
    ids=["side by side", "frames", "no zeros"],
)
def test_others_are_stored_and_loaded(make: Make) -> None:
    scheduler = Scheduler(FULL)
    assert scheduler.serve(make(scheduler, "a")) == 0
    assert scheduler.manager.reset_prefix_cache()
    assert scheduler.serve(make(scheduler, "b")) == 96


def test_hashes_show_each_frame() -> None:
    """Inputs may share a place as long as vLLM comes to the last of them within a block."""
    scheduler = Scheduler(FULL)
    first = frames(scheduler, "a")
    for at, each in enumerate(first.mm_features):
        parts = list(first.mm_features)
        parts[at] = feature("audio", "other", each.mm_position.offset, 2)
        other = scheduler.request("b", NUM_TOKENS, mm_features=parts)
        same = zip(first.block_hashes, other.block_hashes, strict=True)
        num_equal = sum(one == another for one, another in same)
        assert num_equal == each.mm_position.offset // scheduler.tokens_per_hash


def with_media(*modalities: str) -> Make:
    parts = [feature(each, each, 20 * at, 10) for at, each in enumerate(modalities)]
    return lambda scheduler, name: scheduler.request(name, NUM_TOKENS, mm_features=parts)


@pytest.mark.parametrize("modalities", [("video",), ("image", "video"), ("image",), ()])
def test_nothing_is_kept_of_media_that_hashes_do_not_show(modalities: tuple[str, ...]) -> None:
    scheduler, make = Scheduler(FULL), with_media(*modalities)
    scheduler.half.tier.unhashed_modalities = frozenset(("video",))
    scheduler.serve(make(scheduler, "a"))
    assert scheduler.manager.reset_prefix_cache()
    assert scheduler.serve(make(scheduler, "b")) == (0 if "video" in modalities else 96)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"video_pruning_rate": 0.5}, {"video"}),
        ({"video_pruning_rate": 0.5, "uses_mrope": False}, set()),
        ({"video_pruning_rate": 0.0}, set()),
        ({"architecture": "DeepseekVLV2ForCausalLM", "version": (0, 32, 1)}, {"image"}),
        ({"architecture": "H2OVLChatModel", "version": (0, 30, 0)}, {"image"}),
        ({"architecture": "UnlimitedOCRForCausalLM", "version": (0, 32, 0)}, {"image"}),
        ({"architecture": "DeepseekVLV2ForCausalLM", "version": (0, 33, 0)}, set()),
        ({"architecture": "DeepseekOCRForCausalLM", "version": (0, 32, 0)}, set()),
        ({"max_num_patches": 160}, {"image"}),
        ({"max_num_patches": 160, "limit": 3}, {"image"}),
        ({"max_num_patches": 160, "limit": 2}, set()),
        ({"max_num_patches": 4000, "limit": 1}, set()),
    ],
)
def test_the_connector_knows_them_and_says_so(
    settings: dict[str, Any],
    expected: set[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    log: list[str],
) -> None:
    config = engine_config(folder, {"num_cpu_blocks": 8})
    own = {"uses_mrope": True, "architecture": "Qwen2_5_VLForConditionalGeneration"} | settings
    version = own.pop("version", None)
    if version is not None:
        monkeypatch.setattr("kvstow.vllm.media.vllm_version.__version_tuple__", version)
    if num_patches := own.pop("max_num_patches", 0):
        args = {"min_num_patches": 16, "max_num_patches": num_patches}
        vision = SimpleNamespace(args=args, hidden_size=8)
        monkeypatch.setattr(config.model_config.hf_config, "vision_config", vision, raising=False)
        monkeypatch.setattr(config.model_config.hf_config, "downsample_ratio", 1, raising=False)
        config.model_config.max_model_len = 400
    media = MultiModalConfig(
        video_pruning_rate=own.pop("video_pruning_rate", None),
        limit_per_prompt={"image": own.pop("limit", 999)},
    )
    config.model_config.multimodal_config = media
    for name, value in own.items():
        monkeypatch.setattr(ModelConfig, name, value)
    connector = KVStowConnector(config, KVConnectorRole.SCHEDULER, cache_config(FULL))
    assert connector._scheduler.tier.unhashed_modalities == expected
    line = f"requests with media of the kind {' and '.join(sorted(expected))},"
    assert any(line in each for each in log) == bool(expected)


@pytest.mark.parametrize("num_tokens", [1, 40])
@pytest.mark.parametrize("is_ambiguous", [True, False])
def test_a_chunk_of_a_session_may_bring_them(num_tokens: int, is_ambiguous: bool) -> None:
    scheduler = Scheduler(FULL)
    session = scheduler.request("a", NUM_TOKENS, resumable=True)
    session.mm_features.append(feature("video", "film", 4, 120))
    assert scheduler.admit(session) == 0
    scheduler.step(session)
    scheduler.step()
    (store,) = scheduler.jobs.stores
    assert len(store.block_ids) == 6
    stores: list[Copies] = []
    for at in range(40 // num_tokens):
        place = 100 + at if is_ambiguous else 124 + at
        session.mm_features.append(feature("audio", f"{at}", place, 1))
        session.append_output_token_ids([7] * num_tokens)
        scheduler.manager.allocate_slots(session, num_tokens)
        scheduler.step(session)
        stores += scheduler.jobs.stores
    scheduler.finish(session)
    scheduler.step()
    stores += scheduler.jobs.stores
    assert bool(stores) != is_ambiguous
