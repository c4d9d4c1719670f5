"""Hit blocks of a workload against capacity, and the knee of such a curve.

    curve          with full attention only          with several groups
    hits           LRU, exact at every capacity      simulated, at some capacities
    clairvoyant    the most that any policy hits     -
    hit density    simulated, at some capacities     -

The hits of hit density include those of the device. The other exact curves are of one cache alone.
The last point of `hits` belongs to a cache that never evicts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstow._core import HitCurve, clairvoyant_hits
from kvstow.plan.simulate import Server
from kvstow.plan.workload import Workload

Ints = npt.NDArray[np.int64]

NUM_SIMULATED: Final = 12
NUM_REFINED: Final = 12
"""Further simulations of hit-density, where a straight line says least."""
LEAST_BEND: Final = 0.1
_NUM_DRAWN: Final = 64
_SMALLEST_SHARE: Final = 1 / 512  # of the largest capacity, where the drawn curves begin


def _none() -> Ints:
    return np.array([], dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Curves:
    """Hit blocks against capacity in blocks of the host tier.

    Attributes:
        capacities: where `hits` was computed, ascending, up to where more memory hits nothing more.
        hits: hits of the host tier, and of the device if the curve was simulated with one.
        is_exact: whether `hits` comes from one pass, and not from simulations.
        resident: blocks that the tier already has when a request fills them, at `capacities`. These
            are the hits, and the last blocks of repeated prompts that end with them.
        bound_at: capacities of `clairvoyant`.
        clairvoyant: the most hits that any policy has in one cache alone.
        density_at: capacities of `density`.
        density: hits of the device and of a host tier with the policy hit-density.
    """

    capacities: Ints
    hits: Ints
    is_exact: bool = False
    resident: Ints = field(default_factory=_none)
    bound_at: Ints = field(default_factory=_none)
    clairvoyant: Ints = field(default_factory=_none)
    density_at: Ints = field(default_factory=_none)
    density: Ints = field(default_factory=_none)

    @property
    def infinite(self) -> int:
        """Hits of a tier that never evicts."""
        return int(self.hits[-1])

    def at(self, capacity: int) -> int:
        """Return the hits at a capacity; exact if the curve is."""
        return int(np.interp(capacity, self.capacities, self.hits))

    def resident_at(self, capacity: int) -> int:
        """Return the blocks that a tier of this capacity need not store, if the curve is exact."""
        return int(np.interp(capacity, self.capacities, self.resident))

    def beside(self, num_device: int) -> Curves:
        """Return the curve of a host tier beside a device of this many blocks.

        A smaller host tier adds nothing to what the device hits.
        """
        if not self.is_exact:
            return self
        first = min(num_device, len(self.capacities) - 1)
        return Curves(self.capacities[first:], self.hits[first:], is_exact=True)

    @property
    def knee(self) -> int:
        """The capacity at the curve's knee."""
        return int(self.capacities[knee(self.capacities, self.hits)])

    @property
    def enough(self) -> int:
        """The least of the capacities at which the tier hits as much as with any more memory."""
        return int(self.capacities[np.argmax(self.hits >= self.hits[-1])])


def exact_curves(workload: Workload, tick: Callable[[], None]) -> Curves:
    """Return the curves for a model with full attention only; call `tick` after each part.

    They leave `density` out, because it depends on the device.
    """
    filled = HitCurve()
    filled.add_all(*workload.all_keys)
    capacities = np.arange(filled.largest_capacity + 1)
    curve = _lru_curve(workload)
    hits = curve.hits(capacities)
    tick()
    drawn = sampled(filled.largest_capacity, _NUM_DRAWN)
    # Its prompts look up all their blocks, so a prompt of whole blocks may hit one too many.
    bound = np.minimum(clairvoyant_hits(*workload.prompt_keys, drawn), hits[-1])
    tick()
    return Curves(
        capacities,
        hits,
        is_exact=True,
        resident=filled.hits(capacities),
        bound_at=drawn,
        clairvoyant=bound,
    )


def with_density(curves: Curves, server: Server, tick: Callable[[], None]) -> Curves:
    """Return exact curves with that of hit-density on this server; call `tick` after each size.

    A device that is too small for the longest request cannot be simulated, so it gets no such
    curve.
    """
    if server.misfit:
        return curves
    measured = replace(server, policy="hit-density", mode="eager")

    def hits_at(capacity: int) -> int:
        hits = measured.serve(capacity).served.num_hits
        tick()
        return hits

    first = sampled(int(curves.capacities[-1]), NUM_SIMULATED)[1:].tolist()
    found = _refined({capacity: hits_at(capacity) for capacity in first}, hits_at)
    capacities = np.array(sorted(found), dtype=np.int64)
    density = np.array([found[capacity] for capacity in capacities.tolist()], dtype=np.int64)
    return replace(curves, density_at=capacities, density=density)


def _refined(found: dict[int, int], hits_at: Callable[[int], int]) -> dict[int, int]:
    """Return hits at capacities with `NUM_REFINED` more points between them.

    A curve that rises passes somewhere through the rectangle between two neighbours, and a picture
    draws the diagonal. So each new point halves the rectangle with the largest area.
    """
    found = dict(found)

    def area(gap: tuple[int, int]) -> int:
        left, right = gap
        return abs(found[right] - found[left]) * (right - left) if right - left > 1 else 0

    for _ in range(NUM_REFINED):
        gap = max(pairwise(sorted(found)), key=area, default=(0, 0))
        if gap == (0, 0) or not area(gap):
            break
        middle = sum(gap) // 2
        found[middle] = hits_at(middle)
    return found


def _lru_curve(workload: Workload) -> HitCurve:
    """Return the curve of the prompts' lookups, with the blocks of outputs in between."""
    curve = HitCurve()
    keys, offsets = workload.all_keys
    for begin, end, number in zip(offsets, offsets[1:], workload.num_lookups, strict=False):
        curve.lookup(keys[begin : begin + number])
        curve.insert(keys[begin:end])
    return curve


def simulated_curves(server: Server, tick: Callable[[], None]) -> Curves:
    """Return the curve of a host tier of this server; call `tick` after each simulation."""
    infinite = server.serve(largest_tier(server))
    tick()
    hits: list[int] = []
    capacities = sampled(infinite.num_resident, NUM_SIMULATED)[1:]
    for capacity in capacities[:-1]:
        hits.append(server.serve(int(capacity)).served.num_hits)
        tick()
    return Curves(capacities, np.array([*hits, infinite.served.num_hits], dtype=np.int64))


def largest_tier(server: Server) -> int:
    """Return the slots with which a tier never evicts: a slot per distinct block and group."""
    num_unique = len(np.unique(server.workload.all_keys[0]))
    return num_unique * len(server.geometry.groups)


def sampled(largest: int, number: int) -> Ints:
    """Return capacities from 0 to `largest`: half evenly spaced, half by equal ratios."""
    largest = max(largest, 1)
    even = np.linspace(0, largest, number - number // 2)
    ratio = np.geomspace(max(1, largest * _SMALLEST_SHARE), largest, number // 2 + 1)
    points: Ints = np.unique(np.concatenate([even, ratio]).round().astype(np.int64))
    return points


def knee(capacities: Ints, hits: Ints) -> int:
    """Return the position of a curve's knee.

    It is the point that is farthest above the straight line from the first point to the last, both
    axes scaled to 1. This is the discrete form of Kneedle (Satopaa, Albrecht, Irwin and Raghavan,
    "Finding a 'Kneedle' in a Haystack", 2011), without its smoothing. A curve that stays within
    `LEAST_BEND` of the line, or below it, has no knee: all memory pays about equally, or only the
    last does. Then it is the first point with all hits.
    """
    rise, run = hits[-1] - hits[0], capacities[-1] - capacities[0]
    if rise <= 0 or run <= 0:
        return 0
    bend = (hits - hits[0]) / rise - (capacities - capacities[0]) / run
    farthest = int(np.argmax(bend))
    return farthest if bend[farthest] >= LEAST_BEND else int(np.argmax(hits >= hits[-1]))
