"""A plan says what a replay of the same sizes hits.

A replay of requests that do not overlap hits exactly what the plan says. Where they overlap, only
the order in which requests look up and rank their blocks differs. Requests that overlap hold no
more blocks than the device has. So between two uses of a block the replay sees at most that many
blocks more or fewer than the plan, and its hits lie between those of tiers that are smaller or
larger by the device. Requests that arrive together and begin alike can both miss, because neither
has computed the beginning: each can lose the blocks that it shares with a request that runs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from kvstow.geometry import Geometry, KvGroup
from kvstow.plan import Server, Workload, build_workload, read_traces
from kvstow.plan.curves import exact_curves
from kvstow.replay import BUNDLED_TRACE, ReplayConfig, ReplayEngine, Trace, read_trace
from kvstow.replay.figures import Figures
from kvstow.replay.model import build_model

NUM_REQUESTS = 150
BLOCK = 512


@cache
def workload() -> Workload:
    return build_workload(read_traces([BUNDLED_TRACE], limit=NUM_REQUESTS), BLOCK)


@cache
def requests(*, overlap: bool) -> Trace:
    trace = read_trace(BUNDLED_TRACE, limit=NUM_REQUESTS)
    if overlap:
        return trace
    own = [replace(one, arrival_s=10_000.0 * at) for at, one in enumerate(trace.requests)]
    return replace(trace, requests=own)


def replayed(trace: Trace, model: str, device: int, host: int) -> Figures:
    config = ReplayConfig(device_blocks=device + 1, host_blocks=host, verify="off", model=model)
    with ReplayEngine(trace, config) as engine:
        engine.run()
        return engine.figures


@pytest.mark.parametrize(
    ("model", "device", "host"),
    [
        ("full", 250, 1000),
        ("full", 300, 4000),
        ("full", 1000, 300),
        ("gpt-oss", 500, 800),
        ("gpt-oss", 700, 9000),
        ("gemma-3", 900, 20_000),
    ],
)
def test_replay_without_overlap_hits_and_moves_exactly_what_is_simulated(
    model: str, device: int, host: int
) -> None:
    # One byte per block makes numbers of bytes numbers of blocks.
    groups = tuple(KvGroup(one.attention, 1, 1) for one in build_model(model, BLOCK).groups)
    geometry = Geometry(model, "", groups, BLOCK, 1, 1, 1, ())

    figures = replayed(requests(overlap=False), model, device, host)
    served = Server(geometry, workload(), device).serve(host).served

    assert figures.preemptions == 0
    assert (served.device_hits, served.host_hits) == (figures.device_hits, figures.host_hits)
    assert (served.stored_bytes, served.loaded_bytes) == (
        figures.stored_blocks,
        figures.loaded_blocks,
    )
    if geometry.is_one_full_group:
        curves = exact_curves(workload(), lambda: None)
        assert figures.device_hits == curves.at(device)
        assert figures.device_hits + figures.host_hits == curves.at(max(device, host))


@pytest.mark.parametrize(("device", "host"), [(400, 1500), (400, 4000)])
def test_replay_with_overlap_is_within_the_device_of_the_plan(device: int, host: int) -> None:
    figures = replayed(requests(overlap=True), "full", device, host)
    curves = exact_curves(workload(), lambda: None)

    hits = figures.device_hits + figures.host_hits
    planned = curves.at(host)
    print(f"plan {planned}, replay {hits}, of {requests(overlap=True).num_blocks} blocks")
    assert figures.preemptions > 0
    assert hits <= curves.at(host + device)
    assert hits >= curves.at(host - device) - shared_at_once()


def shared_at_once() -> int:
    """Count the blocks that a request shares with one that arrived in the same moment."""
    trace, count = requests(overlap=True), 0
    for at, request in enumerate(trace.requests):
        together = [other for other in trace.requests[:at] if other.arrival_s == request.arrival_s]
        known = {trace_id for other in together for trace_id in other.trace_ids}
        count += len(known & set(request.trace_ids))
    return count
