"""Hits of one cache at capacities that the user names, in blocks.

With full attention only, these are the figures that papers and simulators give: the prompts alone,
each looked up whole, and a hit is a block of the longest resident prefix. With several groups each
point is a simulation of the host tier, and outputs take room in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvstow._core import ConfigError, HitCurve, clairvoyant_hits
from kvstow.engine import Policy
from kvstow.geometry import Geometry
from kvstow.plan.curves import NUM_SIMULATED, sampled
from kvstow.plan.simulate import Server, host_hits
from kvstow.plan.workload import Workload
from kvstow.transfer.layout import MAX_BLOCKS


@dataclass(frozen=True, slots=True)
class Point:
    """What a cache of one size hits.

    Attributes:
        policy: which block it evicts first.
        num_blocks: its capacity.
        num_hits: blocks that it hits.
        bound: blocks that a cache of this size could hit at most; None if that is not known.
    """

    policy: Policy
    num_blocks: int
    num_hits: int
    bound: int | None


def checked_capacities(capacities: Sequence[int]) -> tuple[int, ...]:
    """Return capacities, or raise `ConfigError` for one that no cache can have."""
    for capacity in capacities:
        if not 1 <= capacity < MAX_BLOCKS:
            raise ConfigError(
                f"--capacity is {capacity}; it must be 1 to {MAX_BLOCKS - 1}: pass blocks"
            )
    return tuple(capacities)


def curve_points(
    geometry: Geometry,
    workload: Workload,
    policies: Sequence[Policy],
    capacities: Sequence[int],
    tick: Callable[[], None],
) -> list[Point]:
    """Return a point for each policy and capacity; without capacities, some up to the largest."""
    alone = workload.prompts_alone
    at = list(capacities) or [int(size) for size in sampled(alone.num_unique, NUM_SIMULATED)[1:]]
    if not geometry.is_one_full_group:
        points = []
        for policy in policies:
            server = Server(geometry, workload, None, policy, "eager")
            for size in at:
                points.append(Point(policy, size, server.serve(size).served.num_hits, None))
                tick()
        return points
    curve = HitCurve()
    curve.add_all(*alone.prompt_keys)
    sizes = np.array(at, dtype=np.int64)
    bounds = clairvoyant_hits(*alone.prompt_keys, sizes).tolist()
    lru = curve.hits(sizes).tolist()
    tick()
    return [
        Point(policy, size, hits if policy == "lru" else host_hits(alone, size, policy), bound)
        for policy in policies
        for size, hits, bound in zip(at, lru, bounds, strict=True)
    ]
