"""Curves, the knee, and simulations that agree with both."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pytest
from tests.plan.world import FULL, SLIDING, STATEFUL, geometry, random_workload, workload

from kvstow import ConfigError, clairvoyant_hits
from kvstow.geometry.layout import Attention
from kvstow.plan import Curves, Plan, PlanOptions, Server, build_plan, knee
from kvstow.plan.curves import (
    NUM_REFINED,
    NUM_SIMULATED,
    exact_curves,
    sampled,
    simulated_curves,
    with_density,
)
from kvstow.plan.simulate import Mode, host_hits
from kvstow.plan.tiers import GIB, round_up

SEEDS = range(8)


def nothing() -> None:
    """Take the place of a progress bar."""


def gib(num_blocks: int) -> float:
    return num_blocks * geometry().host_block_bytes / GIB


@pytest.mark.parametrize("seed", SEEDS)
def test_curve_is_what_an_lru_tier_hits(seed: int) -> None:
    work = random_workload(seed)
    curves = exact_curves(work, nothing)
    for capacity in (1, 3, 10, 30, 60, 200):
        assert host_hits(work, capacity, "lru") == curves.at(capacity)
        assert Server(geometry(), work).serve(capacity).served.host_hits == curves.at(capacity)


@pytest.mark.parametrize("tail", [0, 1])
def test_last_block_of_a_repeated_prompt_is_a_hit_if_a_token_follows_it(tail: int) -> None:
    """vLLM computes one token at least, so a prompt of whole blocks computes its last block."""
    work = workload([[1, 2, 3], [1, 2, 3], [1, 2, 3, 4]], tail=tail)
    curves = exact_curves(work, nothing)
    assert curves.infinite == (2 + 3, 3 + 3)[tail]
    assert curves.clairvoyant[-1] == curves.infinite
    for capacity in range(1, 6):
        served = Server(geometry(), work).serve(capacity).served
        assert curves.at(capacity) == host_hits(work, capacity, "lru") == served.host_hits
        if capacity >= 4:  # a smaller tier does not store all of a request
            assert (work.num_filled - curves.resident_at(capacity)) * 4096 == served.stored_bytes


@pytest.mark.parametrize("seed", SEEDS)
def test_device_and_host_hit_what_the_formula_says(seed: int) -> None:
    work = random_workload(seed)
    curves = exact_curves(work, nothing)
    for device, host in ((16, 20), (16, 60), (40, 20), (40, 120), (120, 40)):
        served = Server(geometry(), work, device).serve(host).served
        assert served.device_hits == curves.at(device)
        assert served.host_hits == curves.at(max(device, host)) - curves.at(device)


@pytest.mark.parametrize("seed", SEEDS)
def test_partial_last_block_takes_one_block_of_the_device(seed: int) -> None:
    work = random_workload(seed, tail=1)
    curves = exact_curves(work, nothing)
    for device in (17, 30, 60):
        served = Server(geometry(), work, device).serve(200).served
        assert curves.at(device - 1) <= served.device_hits <= curves.at(device)
        assert served.num_hits == curves.at(200)


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_of_a_plan_are_what_simulations_serve(seed: int) -> None:
    work = random_workload(seed)
    options = PlanOptions((gib(31), gib(17)), (gib(20), gib(80)), (gib(40), gib(200)))
    plan = build_plan(geometry(), work, options)
    assert len(plan.rows) == 8
    assert_served(plan)


@pytest.mark.parametrize("seed", SEEDS)
def test_last_block_of_a_repeated_prompt_is_stored_unless_the_host_has_it(seed: int) -> None:
    """No lookup asks for the block, because it has the last token. So no disk brings it."""
    once = random_workload(seed)
    work = workload(once.prompts * 2, tail=0, generated=once.num_generated * 2)
    options = PlanOptions((gib(17),), (gib(20), gib(80)), (gib(90), gib(200)))
    assert_served(build_plan(geometry(), work, options))


def assert_served(plan: Plan) -> None:
    """Compare each row with simulations of the plan's workload."""
    work = plan.workload
    for row in plan.rows:
        device, host, disk = (
            round(size / gib(1)) for size in (row.device_gib, row.host_gib, row.disk_gib) if size
        )
        top = Server(geometry(), work, device - 1).serve(host).served
        both = Server(geometry(), work, device - 1).serve(host, disk).served
        assert (row.device_hits, row.host_hits) == (top.device_hits, top.host_hits)
        assert row.disk_hits == both.host_hits - top.host_hits
        assert row.load_bytes == both.loaded_bytes
        # What the disk brings to a host smaller than the device can evict blocks of its prompt.
        more = 0.01 * row.store_bytes if host < device - 1 else 0
        assert row.store_bytes <= both.stored_bytes <= row.store_bytes + more
        assert (row.read_bytes, row.write_bytes) == (both.read_bytes, both.written_bytes)


@pytest.mark.parametrize("seed", SEEDS)
def test_clairvoyant_bound_is_above_every_policy(seed: int) -> None:
    work = random_workload(seed, num_requests=200)
    curves = exact_curves(work, nothing)
    for capacity, bound in zip(curves.bound_at, curves.clairvoyant, strict=True):
        assert bound >= curves.at(int(capacity))
    curves = with_density(curves, Server(geometry(), work), nothing)
    assert (curves.density <= clairvoyant_hits(*work.prompt_keys, curves.density_at)).all()
    assert curves.clairvoyant[-1] == curves.infinite


@pytest.mark.parametrize("device", [None, 40])
def test_more_points_bring_the_line_of_hit_density_closer_to_it(device: int | None) -> None:
    work = random_workload(3, num_requests=400)
    server = Server(geometry(), work, device, policy="hit-density")
    exact = exact_curves(work, nothing)
    curves = with_density(exact, server, nothing)
    largest = int(exact.capacities[-1])
    first = sampled(largest, NUM_SIMULATED)[1:]
    assert {*first} <= {*curves.density_at}
    assert len(curves.density_at) == len(first) + NUM_REFINED
    between = np.arange(int(first[0]), largest, max(1, largest // 60))
    hits = np.array([server.serve(int(capacity)).served.num_hits for capacity in between])
    at_first = curves.density[np.isin(curves.density_at, first)]
    assert at_first.tolist() == [server.serve(int(size)).served.num_hits for size in first]
    few = np.abs(np.interp(between, first, at_first) - hits)
    drawn = np.abs(np.interp(between, curves.density_at, curves.density) - hits)
    assert drawn.mean() < 0.7 * few.mean()
    assert drawn.max() < 0.7 * few.max()


@pytest.mark.parametrize("prompts", [[[1]], [[1, 2], [1, 2]], [[1, 2, 3]] * 3, [[1], [2]]])
def test_small_curve_of_hit_density_ends(prompts: list[list[int]]) -> None:
    curves = with_density(
        exact_curves(work := workload(prompts), nothing), Server(geometry(), work), nothing
    )
    assert len(curves.density_at) == len(curves.density) >= 1


@pytest.mark.parametrize("groups", [SLIDING, STATEFUL])
def test_several_groups_are_simulated_up_to_what_they_can_hold(groups: Sequence[Attention]) -> None:
    work = random_workload(1)
    server = Server(geometry(groups), work)
    curves = simulated_curves(server, nothing)
    assert not curves.is_exact
    for capacity, hits in zip(curves.capacities, curves.hits, strict=True):
        assert server.serve(int(capacity)).served.num_hits == hits
    most = server.serve(int(curves.capacities[-1]))
    assert most.num_resident == curves.capacities[-1]
    assert server.serve(10_000).served == most.served


def test_window_needs_only_its_last_blocks() -> None:
    """A window of 40 tokens reads 3 blocks before the token, and full attention reads all 6."""
    simulation = Server(geometry(SLIDING), workload([range(6), range(6)])).serve(100)
    assert simulation.served.host_hits == 6
    assert simulation.served.loaded_bytes == (3 + 6) * 4096


def test_state_is_kept_at_the_end_of_a_prompt_and_where_prompts_part() -> None:
    prompts = [
        [1, 2, 3, 4],
        [1, 2, 3, 4, 5],  # goes on after the first one's last state
        [1, 2, 6, 7],  # parts after 2 blocks, where no state is
        [1, 2, 8],  # where the third one left a state
        [1, 9],  # parts after 1 block
        [1, 10],
    ]
    hits: list[int] = []
    for number in range(1, len(prompts) + 1):
        served = Server(geometry(STATEFUL), workload(prompts[:number])).serve(100).served
        hits.append(served.host_hits - sum(hits))
    assert hits == [0, 4, 0, 2, 0, 1]


def test_state_before_the_last_token_is_the_last_that_is_kept() -> None:
    """A prompt of whole blocks must leave a token to compute, so its last block is no hit."""
    work = workload([[1, 2, 3], [1, 2, 3]], tail=0)
    assert Server(geometry(STATEFUL), work).serve(100).served.host_hits == 2


def test_lazy_tier_stores_only_what_the_device_is_about_to_evict() -> None:
    work = random_workload(2, num_requests=200)
    eager = Server(geometry(), work, 400).serve(400).served
    lazy = Server(geometry(), work, 400, mode="lazy").serve(400).served
    assert lazy.num_hits == eager.num_hits
    assert 0 < lazy.stored_bytes < eager.stored_bytes


@pytest.mark.parametrize("groups", [FULL, SLIDING, STATEFUL])
@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_simulation_keeps_every_invariant(groups: Sequence[Attention], mode: Mode) -> None:
    simulation = Server(geometry(groups), random_workload(3), 60, mode=mode).serve(20)
    simulation.check()


def test_request_that_does_not_fit_into_the_device_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^the KV cache on the device holds 2 blocks, and"):
        Server(geometry(SLIDING), workload([[1, 2, 3, 4]]), 2).serve(10)


@pytest.mark.parametrize("num_blocks", range(1, 60))
def test_device_of_the_size_that_the_error_names_has_room(num_blocks: int) -> None:
    needed = workload([list(range(num_blocks))])
    with pytest.raises(ConfigError, match="--device-gib") as error:
        Server(geometry(), needed, 1).serve(10)
    [gib] = re.findall(r"--device-gib (\S+) or more", str(error.value))
    usable = int(float(gib) * 2**30 // geometry().device_block_bytes) - 1
    assert Server(geometry(), needed, usable).misfit is None


# -- the knee ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hits", "expected"),
    [
        ([0, 10, 10, 10, 10], 1),
        ([0, 4, 7, 9, 10], 2),
        ([0, 0, 0, 9, 10], 3),
        ([0, 1, 2, 3, 4], 4),  # a straight line has no knee
        ([0, 1, 1, 1, 20], 4),  # nor has one that rises only at its end
        ([5, 5, 5], 0),
        ([7], 0),
    ],
)
def test_knee_is_farthest_above_the_chord(hits: list[int], expected: int) -> None:
    assert knee(np.arange(len(hits)), np.array(hits)) == expected


def test_curve_beside_a_device_begins_at_its_size() -> None:
    curves = Curves(np.arange(6), np.array([0, 3, 5, 6, 6, 7]), is_exact=True)
    beside = curves.beside(3)
    assert beside.capacities.tolist() == [3, 4, 5]
    assert beside.hits.tolist() == [6, 6, 7]
    assert curves.beside(99).hits.tolist() == [7]
    assert (curves.enough, beside.enough) == (5, 5)


@pytest.mark.parametrize("largest", [0, 1, 2, 12, 10**6])
def test_sampled_capacities_rise_from_0_to_the_largest(largest: int) -> None:
    points = sampled(largest, 12)
    assert points[0] == 0
    assert points[-1] == max(1, largest)
    assert (np.diff(points) > 0).all()
    assert len(points) <= 13


@pytest.mark.parametrize(
    ("given", "rounded"), [(1, 1), (1.1, 1.5), (1.6, 2), (2.5, 3), (900, 1024), (0.3, 0.375)]
)
def test_size_is_rounded_up_to_what_people_buy(given: float, rounded: float) -> None:
    assert round_up(given) == rounded
