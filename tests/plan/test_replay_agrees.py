"""A plan says what a replay of the same sizes hits.

A replay of requests that do not overlap hits exactly what the plan says. (With hit-density, if a
copy ends during the next step, because the policy learns in the order in which copies end.) Where
requests overlap, only the order in which they look up and rank their blocks differs. Requests that
overlap hold no more blocks than the device has. So between two uses of a block the replay sees at
most that many blocks more or fewer than the plan, and its hits lie between those of tiers that are
smaller or larger by the device. Requests that arrive together and begin alike can both miss,
because neither has computed the beginning: each can lose the blocks that it shares with a request
that runs.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import pytest

from kvstow.engine import Policy
from kvstow.geometry import PRESETS, Geometry, KvGroup, find_model, lay_out
from kvstow.plan import (
    PlanOptions,
    PlanTrace,
    Server,
    Workload,
    build_plan,
    build_workload,
)
from kvstow.plan.curves import exact_curves
from kvstow.plan.simulate import Mode, Served
from kvstow.plan.traces import PlanRequest
from kvstow.replay import (
    BUNDLED_TRACE,
    ReplayConfig,
    ReplayEngine,
    Trace,
    TraceRequest,
    read_trace,
)
from kvstow.replay.figures import Figures
from kvstow.replay.model import build_model

BLOCK = 512
SMALL_BLOCK = 16
MOST_OUTPUT = 40  # tokens; a replay without overlap takes a step for each
SHARE_OF_ANSWERS = 0.3  # of the turns; the others generate one token, which is no block


def output_tokens(one: TraceRequest) -> int:
    """Return the length of an answer: one token, unless it can fill the prompt's last block."""
    most = min(MOST_OUTPUT, one.output_tokens)
    return most if one.prompt_tokens % BLOCK + most >= BLOCK else 1


@cache
def apart() -> tuple[Workload, Trace]:
    """The first requests, each of which ends before the next arrives."""
    trace = read_trace(BUNDLED_TRACE, limit=200)
    own = [
        replace(one, arrival_s=10_000.0 * at, output_tokens=output_tokens(one))
        for at, one in enumerate(trace.requests)
    ]
    planned = PlanTrace((trace.path,), BLOCK, False, [PlanRequest(one, 0) for one in own])
    return build_workload(planned, BLOCK), replace(trace, requests=own)


@cache
def chats() -> tuple[Workload, Trace]:
    """Turns of chats in small blocks, apart; an answer fills several, and the next turn has it."""
    chances, new = random.Random(16), iter(range(10**6))
    systems = [[next(new) for _ in range(chances.randint(8, 40))] for _ in range(4)]
    turns = []
    for chat in range(60):
        ids = list(systems[min(3, int(chances.expovariate(1)))])
        for turn in range(chances.randint(1, 6)):
            ids += [next(new) for _ in range(chances.randint(1, 20))]
            answers = chances.random() < SHARE_OF_ANSWERS
            num_tokens = chances.randint(1, 3 * SMALL_BLOCK) if answers else 1
            turns.append((3 * chat + 20 * turn, len(ids) * SMALL_BLOCK, num_tokens, tuple(ids)))
            ids += [next(new) for _ in range(num_tokens // SMALL_BLOCK)]
    requests = [
        TraceRequest(number, 10_000.0 * number, input_tokens, num_tokens, ids)
        for number, (_, input_tokens, num_tokens, ids) in enumerate(sorted(turns), 1)
    ]
    planned = PlanTrace(("chats",), SMALL_BLOCK, False, [PlanRequest(one, 0) for one in requests])
    return build_workload(planned, SMALL_BLOCK), Trace("chats", SMALL_BLOCK, requests)


def replayed(
    trace: Trace,
    model: str,
    device: int,
    host: int,
    policy: Policy = "lru",
    *,
    mode: Mode = "eager",
) -> Figures:
    config = ReplayConfig(
        device_blocks=device + 1,
        host_blocks=host,
        verify="off",
        model=model,
        policy=policy,
        mode=mode,
    )
    with ReplayEngine(trace, config) as engine:
        engine.run()
        return engine.figures


def in_blocks(model: str, block: int) -> Geometry:
    """The groups of a model. One byte per block makes numbers of bytes numbers of blocks."""
    attentions = (
        lay_out(find_model(model), block).attentions
        if model in PRESETS
        else [group.attention for group in build_model(model, block).groups]
    )
    groups = tuple(KvGroup(attention, 1, 1) for attention in attentions)
    return Geometry(model, "", groups, block, 1, 1, 1, ())


def assert_equal(served: Served, figures: Figures) -> None:
    assert figures.preemptions == 0
    assert (served.device_hits, served.host_hits) == (figures.device_hits, figures.host_hits)
    assert (served.stored_bytes, served.loaded_bytes) == (
        figures.stored_blocks,
        figures.loaded_blocks,
    )


@pytest.mark.parametrize(
    ("model", "device", "host", "policy"),
    [
        ("full", 250, 1000, "lru"),
        ("full", 300, 4000, "lru"),
        ("full", 1000, 300, "lru"),
        ("full", 250, 1000, "hit-density"),
        ("full", 300, 2000, "hit-density"),
        ("gpt-oss", 500, 800, "lru"),
        ("gpt-oss", 700, 9000, "lru"),
        ("gpt-oss", 700, 2000, "hit-density"),
        ("gemma-3", 900, 20_000, "lru"),
        ("gemma-3-27b", 1100, 20_000, "lru"),
    ],
)
def test_replay_without_overlap_hits_and_moves_exactly_what_is_simulated(
    model: str, device: int, host: int, policy: Policy
) -> None:
    geometry = in_blocks(model, BLOCK)
    workload, trace = apart()
    assert sum(workload.num_generated) > 5

    figures = replayed(trace, model, device, host, policy)
    served = Server(geometry, workload, device, policy).serve(host).served

    assert_equal(served, figures)
    if geometry.is_one_full_group and policy == "lru":
        curves = exact_curves(workload, lambda: None)
        assert figures.device_hits == curves.at(device)
        assert figures.device_hits + figures.host_hits == curves.at(max(device, host))


@pytest.mark.parametrize(
    ("model", "device", "host", "policy", "mode"),
    [
        ("full", 256, 400, "hit-density", "eager"),
        ("full", 256, 800, "hit-density", "eager"),
        ("full", 256, 800, "hit-density", "lazy"),
        ("full", 256, 400, "lru", "lazy"),
        ("gpt-oss", 400, 800, "lru", "eager"),
        ("gpt-oss", 400, 800, "hit-density", "eager"),
        ("gemma-3", 1200, 2400, "lru", "eager"),
        ("gemma-3", 1200, 2400, "hit-density", "eager"),
    ],
)
def test_each_block_of_an_answer_is_a_store_of_its_own(
    model: str, device: int, host: int, policy: Policy, mode: Mode
) -> None:
    workload, trace = chats()
    figures = replayed(trace, model, device, host, policy, mode=mode)
    server = Server(in_blocks(model, SMALL_BLOCK), workload, device, policy, mode)
    assert_equal(server.serve(host).served, figures)


@pytest.mark.parametrize(
    ("model", "device", "host", "disk", "policy", "mode"),
    [
        ("full", 256, 400, 900, "lru", "eager"),
        ("full", 256, 900, 400, "lru", "eager"),
        ("full", 600, 300, 2500, "lru", "eager"),
        ("full", 256, 200, 400, "hit-density", "eager"),
        ("full", 600, 300, 1500, "lru", "lazy"),
        ("gpt-oss", 500, 800, 3000, "hit-density", "eager"),
        ("gpt-oss", 1500, 800, 3000, "lru", "eager"),
        ("gemma-3", 1200, 2400, 9000, "lru", "eager"),
    ],
)
def test_block_that_the_disk_brings_back_is_not_stored_again(
    tmp_path: Path, model: str, device: int, host: int, disk: int, policy: Policy, mode: Mode
) -> None:
    geometry = in_blocks(model, SMALL_BLOCK)
    workload, trace = chats()
    config = ReplayConfig(
        device_blocks=device + 1,
        host_blocks=host,
        disk=str(tmp_path / "slots"),
        disk_blocks=disk,
        verify="off",
        model=model,
        policy=policy,
        mode=mode,
    )
    with ReplayEngine(trace, config) as engine:
        engine.run()
        figures, stats = engine.figures, engine.kv.stats()
    served = Server(geometry, workload, device, policy, mode).serve(host, disk).served

    assert_equal(served, figures)
    moved = (served.read_bytes, served.written_bytes)
    assert moved == (stats["promoted_blocks"], stats["demoted_blocks"])
    assert (figures.disk_hits > 0) == (disk > host)
    if geometry.is_one_full_group and (policy, mode) == ("lru", "eager") and host > device:
        slot_gib = geometry.host_block_bytes / 2**30
        sizes = PlanOptions((), (host * slot_gib,), (disk * slot_gib,), device_blocks=(device + 1,))
        [row] = build_plan(geometry, workload, sizes, draws=False).rows
        # The curve leaves out the partial last block, which takes hits of the device alone.
        assert row.store_bytes == served.stored_bytes
        assert (row.read_bytes, row.write_bytes) == moved
        assert row.num_hits == served.num_hits


@pytest.mark.parametrize(("output_tokens", "num_partial"), [(1, 1), (SMALL_BLOCK, 0)])
@pytest.mark.parametrize("device", [15, 16, 17])
def test_partly_filled_block_takes_a_place_on_the_device(
    device: int, output_tokens: int, num_partial: int
) -> None:
    """The curve leaves the block out, so a replay hits what a smaller device does in the curve."""
    chances, new = random.Random(3), iter(range(1000, 10**6))
    documents = [[next(new) for _ in range(3)] for _ in range(8)]
    requests = [
        TraceRequest(
            at + 1,
            10_000.0 * at,
            4 * SMALL_BLOCK,
            output_tokens,
            (*documents[min(7, int(chances.expovariate(1 / 2)))], next(new)),
        )
        for at in range(50)
    ]
    trace = Trace("trace", SMALL_BLOCK, requests)
    planned = PlanTrace(("trace",), SMALL_BLOCK, False, [PlanRequest(one, 0) for one in requests])
    curves = exact_curves(build_workload(planned, SMALL_BLOCK), lambda: None)
    hits = [curves.at(size) for size in range(device - 1, device + 1)]
    assert hits[0] < hits[1]
    figures = replayed(trace, "full", device, 1)
    assert figures.device_hits == hits[1 - num_partial]


@pytest.mark.parametrize(("device", "host"), [(1024, 4096), (1024, 8192)])
def test_replay_with_overlap_is_within_the_device_of_the_plan(device: int, host: int) -> None:
    read = read_trace(BUNDLED_TRACE)
    own = [replace(one, output_tokens=min(100, one.output_tokens)) for one in read.requests]
    trace = replace(read, requests=own)
    figures = replayed(trace, "full", device, host)
    planned_trace = PlanTrace((trace.path,), BLOCK, False, [PlanRequest(one, 0) for one in own])
    curves = exact_curves(build_workload(planned_trace, BLOCK), lambda: None)

    hits, planned = figures.device_hits + figures.host_hits, curves.at(host)
    points = (planned - hits) / trace.num_blocks * 100
    print(f"plan {planned}, replay {hits} of {trace.num_blocks} blocks: {points:+.2f} points")
    assert figures.preemptions > 0
    assert curves.at(host - device) - new_at_once(trace) <= hits <= curves.at(host + device)


@pytest.mark.parametrize(
    ("device", "host", "more"), [(1024, 2048, 0.2), (4096, 4096, 2.9), (4096, 16384, 0.0)]
)
def test_replay_of_the_bundled_trace_differs_from_the_plan_as_documented(
    device: int, host: int, more: float
) -> None:
    """The figures of docs/reference/cli.md, in points of the prompt tokens."""
    trace = read_trace(BUNDLED_TRACE)
    planned = [PlanRequest(one, 0) for one in trace.requests]
    workload = build_workload(PlanTrace((trace.path,), BLOCK, False, planned), BLOCK)
    curves = exact_curves(workload, lambda: None)
    figures = replayed(trace, "full", device - 1, host)

    hits = figures.device_hits + figures.host_hits
    points = 100 * workload.hit_ratio(hits - curves.at(max(device - 1, host)))
    assert round(points, 1) == more


def new_at_once(trace: Trace) -> int:
    """Count the blocks that several requests of one moment bring, and none before them had."""
    count = 0
    known: set[int] = set()
    for _, group in groupby(trace.requests, key=attrgetter("arrival_s")):
        brought = [trace_id for request in group for trace_id in request.trace_ids]
        new = [trace_id for trace_id in brought if trace_id not in known]
        count += len(new) - len(set(new))
        known.update(new)
    return count
