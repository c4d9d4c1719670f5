"""The table of sizes, the recommendation, and sizes that are refused."""

from __future__ import annotations

import json
import math

import pytest
from tests.plan.world import geometry, workload

from kvstow import ConfigError
from kvstow.plan import Plan, PlanOptions, build_plan
from kvstow.plan.report import flag, row_figures, sentence
from kvstow.plan.tiers import GIB
from kvstow.vllm.options import Options

# Two prompts of 4 blocks in turn: an LRU tier of 4 blocks has none of them when it comes back.
TURNS = [[1, 2, 3, 4], [5, 6, 7, 8]] * 10
BLOCK_GIB = 4096 / GIB


def plan(*, device: float = 0, host: tuple[float, ...] = (), disk: float = 0) -> Plan:
    """Plan for sizes in blocks."""
    options = PlanOptions(
        (device * BLOCK_GIB,) if device else (),
        tuple(size * BLOCK_GIB for size in host),
        (disk * BLOCK_GIB,) if disk else (),
        prefill_tokens_per_s=100,
    )
    return build_plan(geometry(), workload(TURNS), options)


def test_row_of_sizes_by_hand() -> None:
    made = plan(device=5, host=(2, 8), disk=16)
    small, large = made.rows
    # The device keeps 4 blocks, and the second prompt evicts the first.
    assert (small.device_hits, small.host_hits, small.disk_hits) == (0, 0, 72)
    assert (large.device_hits, large.host_hits, large.disk_hits) == (0, 72, 0)
    assert large.load_bytes == 72 * 4096
    assert large.store_bytes == 8 * 4096
    assert (large.read_bytes, large.write_bytes) == (0, 8 * 4096)
    assert (small.store_bytes, small.read_bytes) == (80 * 4096, 72 * 4096)
    figures = row_figures(made, large)
    num_tokens = 20 * (4 * 16 + 1)
    assert figures["hit_ratio"] == figures["host_hit_ratio"] == 72 * 16 / num_tokens
    assert figures["saved_tokens_per_hour"] == 72 * 16
    assert figures["saved_prefill_seconds_per_hour"] == 72 * 16 / 100
    assert figures["load_bytes_per_s"] == 72 * 4096 / 3600


def test_recommended_size_is_the_smallest_that_reaches_the_knee() -> None:
    made = plan(host=(4, 8, 16, 32))
    chosen = made.choices[0].tiers
    assert chosen is made.rows[1]
    text = sentence(made, made.choices[0])
    assert "88.6% of the prompt tokens" in text
    assert "100% of what unlimited memory hits, and twice the size adds 0.0 points" in text


def test_largest_size_is_recommended_if_none_reaches_the_knee() -> None:
    prompts = [[number] for number in range(8)] * 3 + [[1], [2]] * 5
    options = PlanOptions(host_gib=(BLOCK_GIB, 3 * BLOCK_GIB))
    made = build_plan(geometry(), workload(prompts), options)
    assert made.choices[0].curves.knee == 8
    assert made.choices[0].tiers is made.rows[1]


def test_no_tier_is_recommended_where_it_hits_next_to_nothing() -> None:
    made = plan(device=100)
    choice = made.choices[0]
    assert choice.tiers is None
    assert flag(choice) is None
    assert "Set no host tier" in sentence(made, choice)


def test_sizes_go_from_an_eighth_of_the_knee_to_where_more_hits_nothing_more() -> None:
    made = plan()
    assert [round(row.host_gib / BLOCK_GIB) for row in made.rows] == [1, 2, 4, 8]
    assert made.rows[-1].host_hits == made.choices[0].curves.infinite


def test_flag_is_one_that_the_connector_takes() -> None:
    for host in (8, 2**19):  # below and above 1 GiB
        line = flag(plan(host=(host,)).choices[0])
        assert line is not None
        name, _, text = line.partition(" ")
        given = json.loads(text.strip("'"))
        assert name == "--kv-transfer-config"
        assert given["kv_load_failure_policy"] == "recompute"
        options = Options.parse(given["kv_connector_extra_config"])
        assert options.cpu_bytes_to_use == host * 4096


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"device": 1}, r"device-gib is .*; it must hold 2 blocks of 16 tokens in 4,096 bytes or"),
        ({"host": (0.5,)}, r"host-gib is .*; it must hold 1 block of 16 .*: pass 4e-06 or more"),
        ({"disk": 0.5}, r"disk-gib is .*; it must hold 1 block"),
        ({"host": (-1,)}, "it must hold 1 block"),
        ({"host": (math.inf,)}, r"host-gib is inf; it must be at most 1073741824: pass fewer GiB"),
        ({"host": (math.nan,)}, r"host-gib is nan; it must be at most"),
    ],
)
def test_size_without_a_block_is_refused(sizes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(**sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("rate", [0.0, -1.0, math.inf, math.nan])
def test_rate_without_a_meaning_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match=r"prefill-tokens-per-s is .*: pass the prompt tokens"):
        PlanOptions(prefill_tokens_per_s=rate)


def test_device_in_blocks_is_the_device_of_as_many_bytes() -> None:
    options = PlanOptions(host_gib=(8 * BLOCK_GIB,), device_blocks=(5,))
    made = build_plan(geometry(), workload(TURNS), options)
    assert made.rows == plan(device=5, host=(8,)).rows


@pytest.mark.parametrize("number", [-1, 0, 1, 2**31])
def test_device_without_a_usable_block_is_refused(number: int) -> None:
    with pytest.raises(ConfigError, match=rf"device-blocks is {number}; it must be from 2 to "):
        PlanOptions(device_blocks=(number,))


def test_lazy_tier_needs_a_device() -> None:
    with pytest.raises(ConfigError, match=r"^mode is lazy, and no device-gib is given; .*: pass"):
        PlanOptions(mode="lazy")
