"""The table of sizes, the recommendation, and sizes that are refused."""

from __future__ import annotations

import json
import math
import random
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.plan.world import BLOCK, FULL, geometry, workload

from kvstow import ConfigError, FullAttention, SlidingWindow, StateSpace
from kvstow.geometry.layout import Attention, KvGroup, lay_out_evenly
from kvstow.plan import Plan, PlanOptions, PlanTrace, Server, Workload, build_plan, tiers
from kvstow.plan.advice import DISK_PATH, flag, marks, sentence
from kvstow.plan.report import about, row_figures, sketch
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
    assert (small.store_bytes, small.read_bytes) == (8 * 4096, 72 * 4096)
    figures = row_figures(made, large)
    num_tokens = 20 * (4 * 16 + 1)
    assert figures["hit_ratio"] == figures["host_hit_ratio"] == 72 * 16 / num_tokens
    assert figures["saved_tokens_per_hour"] == 72 * 16
    assert figures["saved_prefill_seconds_per_hour"] == 72 * 16 / 100
    assert figures["load_bytes_per_s"] == 72 * 4096 / 3600


def test_null_block_of_the_device_keeps_nothing() -> None:
    # Both prompts together have 8 blocks.
    small, large = plan(device=8, host=(1,)), plan(device=9, host=(1,))
    assert small.rows[0].device_hits == small.choices[0].curves.at(7) < 72
    assert large.rows[0].device_hits == 72


def test_recommended_size_is_the_smallest_that_reaches_the_knee() -> None:
    made = plan(host=(4, 8, 16, 32))
    chosen = made.choices[0].tiers
    assert chosen is made.rows[1]
    text = sentence(made, made.choices[0])
    assert "88.6% of the prompt tokens" in text
    assert "100% of what unlimited memory hits, and twice the size adds nothing." in text
    assert "the largest size you gave" not in text


def test_sentence_says_100_percent_only_if_no_hit_is_missing() -> None:
    far = [[2], [3], [4], [5], [6], [7], [2]]
    work = workload([[1]] * 600 + far)
    for size, reached in ((2, "over 99%"), (8, "100%")):
        made = build_plan(geometry(), work, PlanOptions(host_gib=(size * BLOCK_GIB,)))
        assert f"which is {reached} of what unlimited" in sentence(made, made.choices[0])


def test_largest_size_is_recommended_if_none_reaches_the_knee() -> None:
    prompts = [[number] for number in range(8)] * 3 + [[1], [2]] * 5
    options = PlanOptions(host_gib=(BLOCK_GIB, 3 * BLOCK_GIB))
    made = build_plan(geometry(), workload(prompts), options)
    choice = made.choices[0]
    assert choice.curves.knee == 8
    assert choice.tiers is made.rows[1]
    text = sentence(made, choice)
    assert ", the largest size you gave (the knee is at 0.0313 MiB): it saves " in text


def test_no_tier_is_recommended_where_it_hits_next_to_nothing() -> None:
    made = plan(device=100)
    choice = made.choices[0]
    assert choice.tiers is None
    assert flag(made, choice) is None
    assert sentence(made, choice).startswith("Set no host tier beside 0.3906 MiB on each device: ")


def test_knee_of_few_hits_is_compared_with_the_largest_size() -> None:
    # Few prompts come back at once, and some after all sizes of a far larger cache.
    first = [[number] for number in range(1, 3001)]
    again = [[number] for number in range(2985, 2960, -1)]
    late = [[number] for number in range(2900, 1, -20)]
    made = build_plan(geometry(), workload([*first, *again, *late]), PlanOptions((5 * BLOCK_GIB,)))
    choice = made.choices[0]
    assert choice.tiers is None
    assert made.hit_ratio(made.rows[-1].saved_by_host) > 0.04
    assert sentence(made, choice).endswith(
        "saves less than 1 % of the prompt tokens. For comparison, 12 MiB saves 5.0%."
    )


def test_recommended_size_is_compared_with_one_that_saves_twice_as_much() -> None:
    # Some prompts come back at once. Others, if any, come back after all others.
    soon = [[number] for chat in range(40) for number in [chat, chat, chat]]
    late = [[number, *range(1000 * number, 1000 * number + 9)] for number in range(200, 300)]
    sizes = PlanOptions(host_gib=(2 * BLOCK_GIB, 2000 * BLOCK_GIB))
    for prompts, is_compared in (([*soon, *late, *late], True), (soon, False)):
        made = build_plan(geometry(), workload(prompts), sizes)
        choice = replace(made.choices[0], judged=made.rows[0])
        assert choice.is_worth_it
        text = f" For comparison, 7.812 MiB saves {made.hit_ratio(made.rows[1].num_hits):.1%}."
        assert sentence(made, choice).endswith(text) == is_compared


def test_sizes_go_from_an_eighth_of_the_knee_to_where_more_hits_nothing_more() -> None:
    made = plan()
    assert [round(row.host_gib / BLOCK_GIB) for row in made.rows] == [1, 2, 4, 8]
    assert made.rows[-1].host_hits == made.choices[0].curves.infinite


def test_sizes_reach_where_more_hits_nothing_more_far_above_the_knee() -> None:
    # All prompts share two blocks. Each begins with them, and comes again after all others.
    prompts = [[1, 2, 10 * number] for number in range(1, 3000)] * 2
    made = build_plan(geometry(), workload(prompts), PlanOptions())
    sizes = [round(row.host_gib / BLOCK_GIB) for row in made.rows]
    assert (made.choices[0].curves.knee, made.choices[0].curves.enough) == (2, 3001)
    assert sizes == [1, 2, 4, 8, 16, 32, 64, 128, 3072]
    assert made.rows[-1].host_hits == made.choices[0].curves.infinite > made.rows[-2].host_hits


def options_of(made: Plan) -> Options:
    """Return the options of the connector that the printed flag sets."""
    line = flag(made, made.choices[0])
    assert line is not None
    name, text = shlex.split(line)
    given = json.loads(text)
    assert name == "--kv-transfer-config"
    assert given["kv_load_failure_policy"] == "recompute"
    return Options.parse(given["kv_connector_extra_config"])


@pytest.mark.parametrize("host", [8, 2**19, 2**19 + 1, 2**40])  # below and above 1 GiB
def test_flag_is_one_that_the_connector_takes(host: int) -> None:
    assert options_of(plan(host=(host,))) == Options(cpu_bytes_to_use=host * 4096)


def test_flag_sets_all_that_was_planned() -> None:
    sizes = PlanOptions(
        (401 * BLOCK_GIB,), (1600 * BLOCK_GIB,), policies=("hit-density",), mode="lazy"
    )
    made = build_plan(geometry(), questions(), sizes)
    assert options_of(made) == Options(
        cpu_bytes_to_use=1600 * 4096, eviction_policy="hit-density", lazy_offload=True
    )


def test_flag_sets_a_disk_and_the_sentence_names_the_folder_to_replace() -> None:
    made = plan(device=5, host=(2,), disk=16)
    assert options_of(made) == Options(
        cpu_bytes_to_use=2 * 4096, disk_path=DISK_PATH, disk_bytes_to_use=16 * 4096
    )
    text = sentence(made, made.choices[0])
    assert text.endswith(f"Replace {DISK_PATH} in the flag with a folder on a local disk.")


def test_disk_that_adds_next_to_nothing_is_not_recommended() -> None:
    made = plan(device=5, host=(8,), disk=16)
    assert options_of(made) == Options(cpu_bytes_to_use=8 * 4096)
    assert made.choices[0].disk_gib is None
    text = sentence(made, made.choices[0])
    assert text.endswith(" A disk of 0.0625 MiB adds 0.0 points, so the flag leaves it out.")


@pytest.mark.parametrize(
    ("disks", "chosen"),
    [
        ((16, 1000), 16),
        ((2, 16, 1000), 16),  # the smallest one adds nothing
        ((2, 3), None),
    ],
)
def test_smallest_disk_that_hits_as_much_as_the_largest_is_recommended(
    disks: tuple[int, ...], chosen: int | None
) -> None:
    sizes = PlanOptions(
        (5 * BLOCK_GIB,), (2 * BLOCK_GIB,), tuple(size * BLOCK_GIB for size in disks)
    )
    (choice,) = build_plan(geometry(), workload(TURNS), sizes).choices
    assert choice.disk_gib == (chosen and chosen * BLOCK_GIB)


# -- what a host tier saves beside a device ----------------------------------------------------


def questions(num_blocks: int = 30) -> Workload:
    """Return questions about 40 documents, of which some are popular."""
    chances, number = random.Random(1), iter(range(1, 10**6))
    documents = [[next(number) for _ in range(num_blocks)] for _ in range(40)]
    asked = [min(39, int(chances.expovariate(1 / 8))) for _ in range(400)]
    return workload([[*documents[at], next(number)] for at in asked])


def planned(attentions: Sequence[Attention], *host: int) -> Plan:
    sizes = PlanOptions((401 * BLOCK_GIB,), tuple(number * BLOCK_GIB for number in host))
    return build_plan(geometry(attentions), questions(), sizes)


WINDOWS: Sequence[Attention] = (*[SlidingWindow(16, 40)] * 5, FullAttention(16))
WIDE: Sequence[Attention] = (*[SlidingWindow(16, 640)] * 5, FullAttention(16))
STATES: Sequence[Attention] = (StateSpace(16), StateSpace(16), FullAttention(16))


@pytest.mark.parametrize("attentions", [WINDOWS, STATES])
def test_hits_that_a_host_tier_brings_the_device_are_saved_too(
    attentions: Sequence[Attention],
) -> None:
    made = planned(attentions, 1600, 3200)
    alone = Server(made.geometry, made.workload, 400).serve(0).served
    assert alone.host_hits == alone.stored_bytes == 0
    for row in made.rows:
        assert row.device_hits > 1.1 * alone.device_hits
        assert row.alone_hits == alone.device_hits
        assert row.saved_blocks == row.device_hits + row.host_hits - alone.device_hits
    small, large = made.rows
    figures = row_figures(made, small)
    assert figures["saved_tokens_per_hour"] == small.saved_blocks * 16
    assert figures["device_alone_hit_ratio"] == made.hit_ratio(alone.device_hits)
    choice = replace(made.choices[0], judged=small, doubled_hits=large.num_hits - small.num_hits)
    text = sentence(made, choice)
    assert f"it saves {made.hit_ratio(small.saved_blocks):.1%} of the prompt tokens" in text


def test_hits_move_from_the_device_to_the_host_if_a_load_leaves_the_beginning_out() -> None:
    """The last prompt shares what the third computes without a host tier, and else loads."""
    system, chat, other = range(1, 7), range(11, 17), range(101, 134)
    work = workload([[*system, *chat], [*other], [*system, *chat, 17], [*system, 21]])
    made = build_plan(
        geometry([SlidingWindow(16, 40)]),
        work,
        PlanOptions((35 * BLOCK_GIB,), (100 * BLOCK_GIB,)),
    )
    [row] = made.rows
    assert (row.device_hits, row.host_hits, row.alone_hits) == (0, 18, 6)
    assert row.saved_blocks == 12


def test_twice_the_size_adds_hits_of_the_device_too() -> None:
    made = planned(WINDOWS, 1600)
    [twice] = planned(WINDOWS, 3200).rows
    [row] = made.rows
    choice = made.choices[0]
    assert choice.doubled_hits == twice.num_hits - row.num_hits
    points = 100 * made.hit_ratio(choice.doubled_hits)
    assert f"and twice the size adds {points:.1f} points." in sentence(made, choice)
    assert twice.num_hits - row.num_hits > 1.2 * (twice.host_hits - row.host_hits)


def test_the_least_gain_counts_hits_of_the_device_too(monkeypatch: pytest.MonkeyPatch) -> None:
    [row] = planned(WINDOWS, 3200).rows
    between = (row.host_hits + row.saved_blocks) / 2
    monkeypatch.setattr(tiers, "LEAST_GAIN", between * 16 / questions().num_prompt_tokens)
    assert planned(WINDOWS, 3200).choices[0].tiers is not None


@pytest.mark.parametrize("attentions", [FULL, WIDE])
def test_host_tier_brings_the_device_no_hits_if_a_load_takes_as_many_blocks(
    attentions: Sequence[Attention],
) -> None:
    """With windows, a load takes fewer device blocks than the computation of the same tokens."""
    small, large = planned(attentions, 1600, 3200).rows
    assert small.host_hits > 0
    assert small.device_hits == large.device_hits == small.alone_hits
    assert large.saved_blocks == large.host_hits


def test_device_alone_keeps_states_where_prompts_part() -> None:
    work = workload([[1, 2, 3], [1, 2, 4], [1, 2, 5]])
    served = Server(geometry(STATES), work, 100).serve(0).served
    assert served.device_hits == 2, "the second prompt leaves a state, and the third finds it"


def test_disk_of_a_hybrid_adds_hits_of_the_device_too() -> None:
    sizes = PlanOptions((401 * BLOCK_GIB,), (800 * BLOCK_GIB,), (3200 * BLOCK_GIB,))
    [row] = build_plan(geometry(WINDOWS), questions(), sizes).rows
    both = Server(geometry(WINDOWS), questions(), 400).serve(800, 3200).served
    assert both.device_hits > 1.1 * row.device_hits
    assert row.num_hits == both.num_hits


def test_tier_without_a_device_is_compared_with_no_hits() -> None:
    made = plan(host=(8,))
    assert (made.rows[0].alone_hits, made.rows[0].saved_blocks) == (0, 72)


def test_text_says_how_many_slots_a_block_of_several_groups_takes() -> None:
    trace = PlanTrace(("trace",), BLOCK, False, [])
    made = planned(WINDOWS, 1600)
    assert about(made, trace)[-2] == (
        "a block of 16 tokens takes up to 6 slots of the host tier, one for each group: "
        "6 x 0.003906 MiB = 0.02344 MiB"
    )
    whole = "a block of 16 tokens takes 0.003906 MiB of the host tier"
    assert about(plan(), trace)[-2] == whole
    ranks = replace(geometry(), groups=(KvGroup(FullAttention(16), 1, 2048),), num_ranks=2)
    padded = about(replace(plan(), geometry=ranks), trace)[-2]
    assert padded == (
        "a block of 16 tokens takes 0.007812 MiB of the host tier, padded from 4,096 to 8,192 bytes"
    )


def test_text_says_at_which_speed_prefill_is_saved() -> None:
    trace = PlanTrace(("trace",), BLOCK, False, [])
    assert about(plan(), trace)[-1] == (
        "saved prefill is that of a server that computes 100 prompt tokens a second: "
        "--prefill-tokens-per-s"
    )
    slow = replace(plan(), options=replace(plan().options, prefill_tokens_per_s=0.1))
    assert about(slow, trace)[-1] == (
        "saved prefill is that of a server that computes 0.1 prompt tokens a second: "
        f"--prefill-tokens-per-s. The trace has {1300 / 3600 / 0.1:.1f} times as many, which is "
        "the traffic of several servers"
    )


def test_sketch_shows_the_knee() -> None:
    made = plan(host=(2, 16))
    assert "^ knee, 0.0313 MiB\n" in sketch(made, made.choices[0])


def test_knee_is_pointed_out_where_it_says_something() -> None:
    made = plan(host=(2, 16))
    names = [name for _, name in marks(made, made.choices[0])]
    assert names == ["knee", "recommended"]
    none = plan(device=100)  # no host tier is worth its memory, so its curve has a knee of nothing
    assert marks(none, none.choices[0]) == []
    assert "^" not in sketch(none, none.choices[0])
    small = replace(none.choices[0], reaches_knee=False)  # the sizes given end before the knee
    assert [name for _, name in marks(none, small)] == ["knee"]


def test_largest_size_that_may_be_given_can_be_recommended() -> None:
    made = plan(host=(2**30 / BLOCK_GIB,))
    assert made.choices[0].tiers is made.rows[0]
    hybrid = build_plan(geometry(WINDOWS), questions(), PlanOptions(host_gib=(2**30,)))
    assert hybrid.choices[0].doubled_hits == 0


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"device": 1},
            r"--device-gib is .*; it must hold 2 blocks of 16 tokens in 4,096 bytes",
        ),
        (
            {"host": (0.5,)},
            r"--host-gib is .*; it must hold 1 block of .*: pass 0.000004 GiB or more",
        ),
        ({"disk": 0.5}, r"--disk-gib is .*; it must hold 1 block"),
        ({"host": (-1,)}, "it must hold 1 block"),
        ({"host": (-math.inf,)}, "--host-gib is -inf GiB; it must hold 1 block"),
        ({"device": -math.inf}, "--device-gib is -inf GiB; it must hold 2 blocks"),
        ({"disk": -math.inf}, "--disk-gib is -inf GiB; it must hold 1 block"),
        (
            {"host": (math.inf,)},
            r"--host-gib is inf; it must be at most 1073741824: pass fewer",
        ),
        ({"host": (math.nan,)}, r"^--host-gib is nan; it must be a size: pass a number of GiB"),
    ],
)
def test_size_without_a_block_is_refused(sizes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(**sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("block_tokens", [16, 4096, 16_384, 20_000, 10**6])
@pytest.mark.parametrize("token_bytes", [31_104, 147_456, 192_512])
@pytest.mark.parametrize("is_host", [False, True])
def test_size_that_the_error_names_is_taken(
    is_host: bool, token_bytes: int, block_tokens: int
) -> None:
    """Below it, the error names the value in as many digits as the size to pass."""
    layout = lay_out_evenly(token_bytes, block_tokens)

    def passed(gib: float) -> None:
        options = PlanOptions(host_gib=(gib,)) if is_host else PlanOptions(device_gib=(gib,))
        build_plan(layout, workload(TURNS), options)

    with pytest.raises(ConfigError) as error:
        passed(1e-9)
    least = float(re.findall(r"pass (\S+) GiB or more$", str(error.value))[0])
    passed(least)
    with pytest.raises(ConfigError, match=rf" is {least - 1e-6:.9g} GiB; .*pass {least:.9g} GiB"):
        passed(least - 1e-6)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.inf, math.nan])
def test_rate_without_a_meaning_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match=r"--prefill-tokens-per-s is .*: pass the prompt tokens"):
        PlanOptions(prefill_tokens_per_s=rate)


def test_device_in_blocks_is_the_device_of_as_many_bytes() -> None:
    options = PlanOptions(host_gib=(8 * BLOCK_GIB,), device_blocks=(5,))
    made = build_plan(geometry(), workload(TURNS), options)
    assert made.rows == plan(device=5, host=(8,)).rows


@pytest.mark.parametrize("number", [-1, 0, 1, 2**31])
def test_device_without_a_usable_block_is_refused(number: int) -> None:
    with pytest.raises(ConfigError, match=rf"--device-blocks is {number}; it must be from 2 to "):
        PlanOptions(device_blocks=(number,))


def test_lazy_tier_needs_a_device() -> None:
    with pytest.raises(ConfigError, match=r"^--mode is lazy, and no size of the device.*: pass"):
        PlanOptions(mode="lazy")
