import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.replay.scenario import BLOCK, FULL_GROUP, NARROW_GROUP, STATE_GROUP, WINDOW_GROUP

from kvstow import BlockLedger, ConfigError, FullAttention, SlidingWindow, StateSpace
from kvstow.geometry import PRESETS
from kvstow.replay.model import MODELS, ModelGroup, build_model


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("full", {"full attention": 1}),
        ("gemma-3", {"full attention": 1, "sliding window of 1024": 5}),
        ("gpt-oss", {"full attention": 1, "sliding window of 128": 1}),
        ("jamba", {"full attention": 1, "recurrent state": 1}),
    ],
)
def test_the_groups_of_the_models(name: str, groups: dict[str, int]) -> None:
    model = build_model(name, 512)

    assert name in MODELS
    assert model.block_size == 512
    assert Counter(map(str, model.groups)) == groups
    assert {group.attention.block_size for group in model.groups} == {512}


def test_layers_are_divided_as_in_the_real_models() -> None:
    shares = {}
    for name in ("gemma-3", "gpt-oss", "jamba"):
        model = build_model(name, 512)
        num_full = sum(
            group.geometry.num_layers
            for group in model.groups
            if isinstance(group.attention, FullAttention)
        )
        shares[name] = num_full / model.num_layers
    assert shares == {"gemma-3": 1 / 6, "gpt-oss": 1 / 2, "jamba": 1 / 8}


def test_only_the_full_model_takes_layers_and_bytes() -> None:
    model = build_model("full", 16, num_layers=3, bytes_per_token=12)
    assert (model.num_layers, model.bytes_per_token, model.slot_bytes) == (3, 12, 16 * 12)
    default = build_model("full", 512)
    assert (default.num_layers, default.bytes_per_token, default.slot_bytes) == (2, 8, 4096)
    for chosen in ({"num_layers": 2}, {"bytes_per_token": 8}):
        with pytest.raises(ConfigError, match=r"are fixed for the model 'jamba': leave them out"):
            build_model("jamba", 512, **chosen)


def test_a_config_brings_its_groups(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(dict(PRESETS["gemma-3-27b"])))
    for name in ("gemma-3-27b", str(path)):
        kinds = [group.attention for group in build_model(name, 512).groups]
        assert kinds == [SlidingWindow(512, 1024)] * 6 + [FullAttention(512)]


def test_a_model_with_full_attention_alone_takes_layers_and_bytes() -> None:
    model = build_model("qwen3-8b", 16, num_layers=3, bytes_per_token=12)
    assert [group.attention for group in model.groups] == [FullAttention(16)]
    assert (model.num_layers, model.bytes_per_token) == (3, 12)
    with pytest.raises(ConfigError, match="are fixed for the model 'gpt-oss-20b'"):
        build_model("gpt-oss-20b", 16, num_layers=3)


def test_a_model_of_windows_alone_is_none_with_full_attention(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(dict(PRESETS["llama-3.1-8b"]) | {"sliding_window": 4096}))
    groups = build_model(str(path), 512).groups
    assert [group.attention for group in groups] == [SlidingWindow(512, 4096)]
    with pytest.raises(ConfigError, match="are fixed for the model"):
        build_model(str(path), 512, num_layers=3)


def test_a_model_that_no_replay_imitates_is_refused(tmp_path: Path) -> None:
    way_out = "without token ids, keep one of 2 ids: the last of each block"
    with pytest.raises(ConfigError, match=rf"blocks of 1024 .* stands for 512: .*{way_out}"):
        build_model("granite-4.0-h-small", 512)
    with pytest.raises(ConfigError, match=r"blocks of 528 .* stands for 16: .*keep one of 33 ids"):
        build_model("granite-4.0-h-small", 16)
    states = build_model("granite-4.0-h-small", 1024)
    assert any(group.attention == StateSpace(1024) for group in states.groups)
    path = tmp_path / "config.json"
    chunked = {
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "hidden_size": 1024,
        "attention_chunk_size": 8192,
        "layer_types": ["chunked_attention", "full_attention"] * 2,
        "torch_dtype": "bfloat16",
    }
    path.write_text(json.dumps(chunked))
    with pytest.raises(ConfigError, match=r"has local chunks of 8,192 tokens.* check its size on"):
        build_model(str(path), 512)


def test_a_page_has_room_for_every_group() -> None:
    """Jamba has 14 regions of state, 1 byte a token, and 2 of attention, 2 bytes a token."""
    model = build_model("jamba", 512)

    assert model.slot_bytes == 14 * 512
    assert model.page_bytes == 14 * 2 * 512


@pytest.mark.parametrize("group", [FULL_GROUP, WINDOW_GROUP, NARROW_GROUP, STATE_GROUP], ids=str)
@given(chunks=st.lists(st.integers(1, 5 * BLOCK), min_size=1, max_size=12))
def test_read_and_held_blocks_are_those_of_the_ledger(group: ModelGroup, chunks: list[int]) -> None:
    """The ledger's table has a block in each place that is read, and within the upper bound."""
    ledger = BlockLedger(1000, [group.attention])
    ledger.add("a", [])
    num_granted = 0
    for chunk in chunks:
        assert ledger.allocate("a", chunk)
        table = ledger.block_table("a")
        first = group.first_read(num_granted)
        assert not table[:first].any()
        assert table[first:].all()
        num_granted += chunk
        assert len(table[first:]) <= group.most_blocks(num_granted, max(chunks))


def test_the_bound_of_held_blocks_is_at_most_two_blocks_too_high() -> None:
    assert FULL_GROUP.most_blocks(100 * BLOCK, 1) == 100
    assert STATE_GROUP.most_blocks(100 * BLOCK, 1) == 2
    assert WINDOW_GROUP.most_blocks(100 * BLOCK, 2 * BLOCK) == 5 + 1  # 39 + 32 tokens
    assert WINDOW_GROUP.most_blocks(2 * BLOCK, 8192) == 2
