"""What tiers of given sizes hit and carry, and the size to set.

With full attention only, LRU and eager stores, all figures follow from one curve. The device and
the host each rank the whole chain of a request, the local hit included. So either tier holds what
a cache of its size alone would hold:

    hits of device and host   curve(max(device, host))
    hits of the host          that minus curve(device)
    hits of a disk            curve(max(device, host, disk)) minus both
    blocks stored             all filled blocks minus those that the host has, and the disk's hits
    blocks written            all filled blocks minus those that the disk has

A hit on the disk brings the block to the host, so it is not stored again. Two sizes store or write
slightly other blocks than these. In a host smaller than the device, what the disk brings can evict
earlier blocks of the same prompt that the device has, and they are stored again. A disk smaller
than the host lacks the last block of a prompt of whole blocks that the host still has.

The partial last block of a running request takes a device block, which the curve leaves out.

Other plans simulate each set of sizes. The hits of a disk are then those that it adds.

With sliding windows or states, a host tier also raises the hits of the device. A computed prompt
takes a device block of a window's group for each of its blocks, and those evict others. A loaded
prompt takes only the blocks that the window still reads. So what the tiers below the device save is
all hits minus those of the device without them, and not what is found below the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Final

from kvstow._core import ConfigError
from kvstow.engine import Policy
from kvstow.geometry import Geometry
from kvstow.plan.curves import Curves, exact_curves, largest_tier, simulated_curves, with_density
from kvstow.plan.points import Point, checked_capacities, curve_points
from kvstow.plan.simulate import Mode, Served, Server
from kvstow.plan.workload import Workload

GIB: Final = 2**30
MIB_PER_GIB: Final = 1024
_MAX_GIB: Final = 2**30
_LEAST_DEVICE: Final = 2
_MAX_DEVICE_BLOCKS: Final = 2**31 - 1
_MAX_ROWS: Final = 8
_STEPS_BELOW_KNEE: Final = 3
LEAST_GAIN: Final = 0.01
"""The share of the prompt tokens that a host tier must hit to be recommended: one point."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What the user asks for.

    Attributes:
        device_gib: sizes of the KV cache on each GPU; empty for none.
        device_blocks: other sizes of it, in blocks as vLLM counts them, the null block included.
        host_gib: sizes of the host tier on all ranks; empty for sizes around the knee.
        disk_gib: sizes of the disk tier on all ranks; empty for none.
        policies: of the points; the first is that of the host tier.
        mode: when the host tier stores.
        prefill_tokens_per_s: prompt tokens that the server computes in a second.
        capacities: of the points, in blocks; empty for some. With several groups there are no
            points without capacities.
    """

    device_gib: tuple[float, ...] = ()
    host_gib: tuple[float, ...] = ()
    disk_gib: tuple[float, ...] = ()
    policies: tuple[Policy, ...] = ("lru",)
    mode: Mode = "eager"
    prefill_tokens_per_s: float = 10_000.0
    device_blocks: tuple[int, ...] = ()
    capacities: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        checked_capacities(self.capacities)
        if not 0 < self.prefill_tokens_per_s < math.inf:
            raise ConfigError(
                f"--prefill-tokens-per-s is {self.prefill_tokens_per_s:g}; it must be above 0 and "
                "finite: pass the prompt tokens that your server computes in a second"
            )
        for number in self.device_blocks:
            if not _LEAST_DEVICE <= number <= _MAX_DEVICE_BLOCKS:
                raise ConfigError(
                    f"--device-blocks is {number}; it must be from {_LEAST_DEVICE} to "
                    f"{_MAX_DEVICE_BLOCKS}, because vLLM keeps one block as the null block: pass "
                    "vLLM's number"
                )
        if self.mode == "lazy" and not (self.device_gib or self.device_blocks):
            raise ConfigError(
                "--mode is lazy, and no size of the device is given; a lazy tier stores what "
                "the device evicts: pass --device-gib or --device-blocks"
            )

    @property
    def policy(self) -> Policy:
        """The policy of the host tier."""
        return self.policies[0]


@dataclass(frozen=True, slots=True)
class Tiers:
    """What tiers of one set of sizes do with the workload.

    Attributes:
        device_gib: size of the KV cache on each GPU; None for none.
        host_gib: size of the host tier.
        disk_gib: size of the disk tier; None for none.
        device_hits: blocks of the trace found on the device, without the disk.
        host_hits: blocks found on the host, without the disk.
        disk_hits: blocks that the disk adds to these hits.
        load_bytes: bytes that each GPU loads.
        store_bytes: bytes that each GPU stores.
        read_bytes: bytes read from the disk.
        write_bytes: bytes written to the disk.
        alone_hits: blocks that a device of this size finds without the tiers below it.
    """

    device_gib: float | None
    host_gib: float
    disk_gib: float | None
    device_hits: int
    host_hits: int
    disk_hits: int
    load_bytes: int
    store_bytes: int
    read_bytes: int
    write_bytes: int
    alone_hits: int

    @property
    def num_hits(self) -> int:
        """Blocks found in any of the tiers."""
        return self.device_hits + self.host_hits + self.disk_hits

    @property
    def saved_blocks(self) -> int:
        """Blocks that the tiers below the device keep the server from computing."""
        return self.num_hits - self.alone_hits

    @property
    def saved_by_host(self) -> int:
        """Those that the host tier saves without the disk."""
        return self.saved_blocks - self.disk_hits


@dataclass(frozen=True, slots=True)
class Choice:
    """The recommended size for one device.

    Attributes:
        num_device_blocks: usable blocks of the device; 0 without a device.
        curves: the hits against the capacity of the host tier.
        judged: the smallest host tier that reaches the knee, or the largest one if none does, with
            the disk that was chosen.
        reaches_knee: whether it reaches the knee.
        is_worth_it: whether it saves enough to be recommended.
        takes_disk: whether its disk adds enough to be recommended.
        doubled_hits: blocks that a host tier of twice the size adds to its hits.
        misfit: why the device has no room for the longest request; None if it has.
    """

    num_device_blocks: int
    curves: Curves
    judged: Tiers
    reaches_knee: bool
    is_worth_it: bool
    takes_disk: bool
    doubled_hits: int
    misfit: str | None

    @property
    def device_gib(self) -> float | None:
        """Size of the KV cache on each GPU; None for none."""
        return self.judged.device_gib

    @property
    def knee(self) -> int:
        """The slots of the host tier at the knee of the curve beside the device."""
        return self.curves.beside(self.num_device_blocks).knee

    @property
    def tiers(self) -> Tiers | None:
        """The recommended size; None if no host tier is worth its memory."""
        return self.judged if self.is_worth_it else None

    @property
    def host_gib(self) -> float | None:
        """Size of the recommended host tier; None for none."""
        return self.judged.host_gib if self.is_worth_it else None

    @property
    def disk_gib(self) -> float | None:
        """Size of the recommended disk; None for none."""
        return self.judged.disk_gib if self.takes_disk else None


@dataclass(frozen=True)
class Plan:
    """The answer: what each set of sizes does, and for each device the recommended size."""

    geometry: Geometry
    workload: Workload
    options: PlanOptions
    rows: tuple[Tiers, ...]
    choices: tuple[Choice, ...]
    points: tuple[Point, ...]

    @property
    def is_lru_eager(self) -> bool:
        """Whether the table has the policy and the mode of an exact curve."""
        return (self.options.policy, self.options.mode) == ("lru", "eager")

    def gib(self, num_slots: float) -> float:
        """Return the size of this many slots of the host tier."""
        return num_slots * self.geometry.host_block_bytes / GIB

    def hit_ratio(self, num_blocks: float) -> float:
        """Return the share of the prompt tokens that these blocks hold."""
        return self.workload.hit_ratio(num_blocks)

    def rows_of(self, choice: Choice) -> list[Tiers]:
        """Return the rows that have the device of a choice."""
        return [row for row in self.rows if row.device_gib == choice.device_gib]


def build_plan(
    geometry: Geometry,
    workload: Workload,
    options: PlanOptions,
    tick: Callable[[], None] = lambda: None,
    *,
    draws: bool = True,
) -> Plan:
    """Return the plan, and call `tick` whenever a curve or a simulation is done.

    Without `draws` the plan lacks the curve of hit-density, which only pictures and the JSON have
    and which takes most of the time.

    Raises:
        ConfigError: a size below one block, or a device that is too small for a request.
    """
    sizes = _Sizes(geometry)
    for host_gib in options.host_gib:
        sizes.host_slots(host_gib, "--host-gib")
    for disk_gib in options.disk_gib:
        sizes.host_slots(disk_gib, "--disk-gib")
    of_blocks = [number * geometry.device_block_bytes / GIB for number in options.device_blocks]
    devices: list[tuple[float | None, int]] = [
        (gib, sizes.device_blocks(gib)) for gib in (*options.device_gib, *of_blocks)
    ]
    disks: list[float | None] = [*sorted(options.disk_gib)] or [None]
    exact = exact_curves(workload, tick) if geometry.is_one_full_group else None
    rows: list[Tiers] = []
    choices: list[Choice] = []
    for device_gib, num_device in devices or [(None, 0)]:
        server = Server(geometry, workload, num_device or None, options.policy, options.mode)
        if exact is None:
            curves = simulated_curves(server, tick)
        else:
            curves = with_density(exact, server, tick) if draws else exact
        counter = _Counter(server, curves, tick)
        hosts = options.host_gib or _sizes_around(curves.beside(num_device), geometry)
        own = [
            counter.tiers(device_gib, host, disk) for host, disk in product(sorted(hosts), disks)
        ]
        rows += own
        choices.append(_choose(counter, server, own))
    points: list[Point] = []
    if options.capacities or geometry.is_one_full_group:
        points = curve_points(geometry, workload, options.policies, options.capacities, tick)
    return Plan(geometry, workload, options, tuple(rows), tuple(choices), tuple(points))


def _choose(counter: _Counter, server: Server, rows: Sequence[Tiers]) -> Choice:
    """Return the smallest host tier that reaches the knee, or the largest one if none does.

    A tier that saves less than `LEAST_GAIN` of the prompt tokens is not worth its memory. Of the
    disks, the smallest is chosen whose hits are less than `LEAST_GAIN` below those of the best.
    """
    num_device, hit_ratio = server.num_device_blocks or 0, server.workload.hit_ratio
    knee = counter.curves.beside(num_device).knee
    reach = [row for row in rows if counter.num_slots(row.host_gib) >= knee]
    host_gib = (reach[0] if reach else rows[-1]).host_gib
    own = [row for row in rows if row.host_gib == host_gib]  # ascending disks
    most = max(row.num_hits for row in own)
    near = [row for row in own if hit_ratio(most - row.num_hits) < LEAST_GAIN]
    # Two disks below the limit may differ by less than it, and only the larger one reach it.
    worth = [row for row in near if hit_ratio(row.disk_hits) >= LEAST_GAIN]
    row = (worth or near)[0]
    takes_disk = hit_ratio(row.disk_hits) >= LEAST_GAIN
    is_worth_it = takes_disk or hit_ratio(row.saved_by_host) >= LEAST_GAIN
    doubled = counter.num_doubled_hits(row.host_gib) if is_worth_it else 0
    return Choice(
        num_device_blocks=num_device,
        curves=counter.curves,
        judged=row,
        reaches_knee=bool(reach),
        is_worth_it=is_worth_it,
        takes_disk=takes_disk,
        doubled_hits=doubled,
        misfit=server.misfit,
    )


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Converts GiB to blocks, and refuses sizes below one block."""

    geometry: Geometry

    def host_slots(self, gib: float, name: str = "--host-gib") -> int:
        """Return the slots of a tier on all ranks."""
        return self._blocks(gib, name, self.geometry.host_block_bytes, 1)

    def device_blocks(self, gib: float) -> int:
        """Return the usable blocks of a device pool; vLLM keeps one as the null block."""
        block_bytes = self.geometry.device_block_bytes
        return self._blocks(gib, "--device-gib", block_bytes, _LEAST_DEVICE) - 1

    def _blocks(self, gib: float, name: str, block_bytes: int, least: int) -> int:
        if math.isnan(gib):
            raise ConfigError(f"{name} is nan; it must be a size: pass a number of GiB")
        if gib > _MAX_GIB:
            raise ConfigError(f"{name} is {gib:g}; it must be at most {_MAX_GIB}: pass fewer GiB")
        num_blocks = int(max(gib, 0.0) * GIB // block_bytes)
        if num_blocks < least:
            raise ConfigError(
                f"{name} is {gib:.9g} GiB; it must hold {least} block{'s' if least > 1 else ''} of "
                f"{self.geometry.block_tokens} tokens in {block_bytes:,} bytes or more: pass "
                f"{_least_gib(least * block_bytes)} GiB or more"
            )
        return num_blocks


def _least_gib(num_bytes: int) -> str:
    """Return a size in GiB with six decimals, rounded up so that it has room for the bytes."""
    millionths = -(-num_bytes * 10**6 // GIB)
    return f"{millionths / 10**6:.6f}".rstrip("0").rstrip(".")


class _Counter:
    """Counts what tiers of given sizes hit and carry, from the curve or by simulation."""

    def __init__(self, server: Server, curves: Curves, tick: Callable[[], None]) -> None:
        self.curves = curves
        self._server = server
        self._geometry = server.geometry
        self._workload = server.workload
        self._tick = tick
        self._sizes = _Sizes(server.geometry)
        self._follows = curves.is_exact and (server.policy, server.mode) == ("lru", "eager")
        self._largest = largest_tier(server)
        self._served = cache(self._count)

    def num_slots(self, host_gib: float) -> int:
        """Return the slots of a host tier."""
        return self._sizes.host_slots(host_gib)

    def num_doubled_hits(self, host_gib: float) -> int:
        """Return the blocks that a host tier of twice the size adds to the hits, without a disk."""
        doubled = self._served(self.num_slots(min(2 * host_gib, _MAX_GIB)))
        return doubled.num_hits - self._served(self.num_slots(host_gib)).num_hits

    def tiers(self, device_gib: float | None, host_gib: float, disk_gib: float | None) -> Tiers:
        """Return what one set of sizes does."""
        num_host = self._sizes.host_slots(host_gib)
        num_disk = 0 if disk_gib is None else self._sizes.host_slots(disk_gib, "--disk-gib")
        top = self._served(num_host)
        both = self._served(num_host, num_disk) if num_disk else top
        num_shares = self._geometry.num_ranks // self._geometry.num_copies
        return Tiers(
            device_gib,
            host_gib,
            disk_gib,
            top.device_hits,
            top.host_hits,
            max(0, both.num_hits - top.num_hits),
            both.loaded_bytes,
            both.stored_bytes,
            both.read_bytes * num_shares,
            both.written_bytes * num_shares,
            self._served(0).num_hits,
        )

    def _count(self, num_host: int, num_disk: int = 0) -> Served:
        """Return what host and disk tiers of this size do, from the curve if it has the answer.

        A tier of 0 slots is none.
        """
        if not num_host and self._server.num_device_blocks is None:
            return Served()  # nothing keeps a block
        if not self._follows:
            sizes = min(num_host, self._largest), min(num_disk, self._largest)
            served = self._server.serve(*sizes).served
            self._tick()
            return served
        num_device = self._server.num_device_blocks or 0
        hits, resident, num_filled = (
            self.curves.at,
            self.curves.resident_at,
            self._workload.num_filled,
        )
        device_hits = hits(num_device)
        without_disk = hits(max(num_device, num_host))
        host_hits = hits(max(num_device, num_host, num_disk)) - device_hits
        num_read = device_hits + host_hits - without_disk
        num_stored = num_filled - resident(num_host) - num_read
        num_written = num_filled - resident(num_disk) if num_disk else 0
        blocks = (host_hits, num_stored, num_read, num_written)
        moved = (number * self._geometry.device_block_bytes for number in blocks)
        return Served(device_hits, host_hits, *moved)


def _sizes_around(curves: Curves, geometry: Geometry) -> tuple[float, ...]:
    """Return sizes from an eighth of the knee to where more memory hits nothing more.

    Each is twice the one before. Where that makes too many, the last one is further off.
    """
    block_gib = geometry.host_block_bytes / GIB
    enough_gib = max(1, curves.enough) * block_gib
    size = round_up(max(1, curves.knee) * block_gib) / 2**_STEPS_BELOW_KNEE
    found: list[float] = []
    while len(found) < _MAX_ROWS and (not found or found[-1] < enough_gib):
        if size >= block_gib:
            found.append(size)
        size *= 2
    if found[-1] < enough_gib:
        found.append(max(size, round_up(enough_gib)))
    return tuple(found)


def round_up(gib: float) -> float:
    """Return the least of 1, 1.5, 2, 3, 4, 6, 8, 12 and so on that is as large, also below 1."""
    power = 2.0 ** math.floor(math.log2(gib))
    return next(size for size in (power, 1.5 * power, 2 * power) if size >= gib)
