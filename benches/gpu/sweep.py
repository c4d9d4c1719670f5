"""Which grid, place size and number of places should be the defaults, and from which size direct?

First the sweep times the mover over all combinations of grid, place size, number of places, size of
a fragment, size of a job, and direction. A setting is as good as its worst case: its speed there,
divided by the best speed that any setting reaches there. Of the settings within a few percent of
the best one, the gentlest is picked: the smallest grid, then the least staging memory.

Then it times three ways to move fragments, one job each: the packed path, direct copies, and one
`cudaMemcpy2DAsync` per block, which needs layers at a constant distance. It shows from which size
of a fragment direct copies pay, with the host's time for each.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

from benches.gpu.device import Device, seconds
from benches.gpu.moves import JOB_BLOCKS, Cache, Job, run
from benches.gpu.parts import Log, Row

from kvstow.transfer import CudaLink, CudaMover
from kvstow.transfer.cuda.link import NUM_PLACES, STAGING_BYTES
from kvstow.transfer.cuda.link_speed import Path, link_speed
from kvstow.transfer.cuda.runtime import GRID

JOBS = (1, 8, 64, JOB_BLOCKS)
WAYS = ("store", "load")
NUM_TURNS = 5
# A setting this near to the best counts as good.
GOOD = 0.97
PRESENT = (GRID, STAGING_BYTES >> 20, NUM_PLACES)


@dataclass(frozen=True)
class Range:
    """The values that a sweep tries.

    Attributes:
        fragments_kib: sizes of a fragment.
        grids: thread blocks of a kernel.
        places_mib: sizes of a place.
        nums_of_places: places of a direction.
        direct_kib: sizes of a fragment for the paths.
    """

    fragments_kib: Sequence[int]
    grids: Sequence[int]
    places_mib: Sequence[int]
    nums_of_places: Sequence[int]
    direct_kib: Sequence[int]


WHOLE = Range((4, 16, 64), (4, 8, 16, 32), (2, 4, 8, 16, 32), (2, 3, 4), (16, 64, 128, 256, 512))
QUICK = Range((16,), (8, 16), (4, 8), (3,), (64, 256))


def measure(device: Device, log: Log, tried: Range) -> Row:
    """Add a row for each configuration, and return what they show."""
    rows: list[Row] = []
    for kib in tried.fragments_kib:
        with Cache(device, kib << 10) as cache:
            for setting in product(tried.grids, tried.places_mib, tried.nums_of_places):
                rows.append(_row(cache, *setting))
                log.add(rows[-1])
    paths: list[Row] = []
    for kib in tried.direct_kib:
        with Cache(device, kib << 10) as cache:
            for row in _paths(cache):
                paths.append(row)
                log.add(row)
    return {
        "settings": table(rows),
        "picked": picked(table(rows)),
        "paths": paths,
        "link_speed": {
            way: link_speed(device.runtime).direct_from_bytes(way) for way in ("store", "load")
        },
    }


def _row(cache: Cache, grid: int, place_mib: int, num_places: int) -> Row:
    """Return GB/s of jobs of every size, each way."""
    runtime = cache.device.runtime
    found: Row = {
        "kib": cache.fragment_bytes >> 10,
        "grid": grid,
        "place_mib": place_mib,
        "places": num_places,
    }
    link = CudaLink(runtime, staging_bytes=place_mib << 20, num_places=num_places)
    runtime.grid = grid
    try:
        with (
            CudaMover(cache.layout, cache.arena, link=link, path="packed") as mover,
            cache.through(mover),
        ):
            for num, way in product(JOBS, WAYS):
                found[f"{way} {num}"] = _gb_per_s(cache, way, num)
    finally:
        runtime.grid = GRID
    return found


def _gb_per_s(cache: Cache, way: str, num: int) -> float:
    job = Job(cache, way, shuffled=True, scattered=False, num_blocks=num)
    return num * cache.block_bytes / 1e9 / seconds(partial(run, [job]), NUM_TURNS)


def _paths(cache: Cache) -> Iterator[Row]:
    """Yield GB/s and the host's time of a job on each path, each way."""
    for way in WAYS:
        paths: Iterable[Path] = ("packed", "direct")
        for path in paths:
            link = CudaLink(cache.device.runtime)
            with (
                CudaMover(cache.layout, cache.arena, link=link, path=path) as mover,
                cache.through(mover),
            ):
                job = Job(cache, way, shuffled=True, scattered=False)
                wall_s = seconds(partial(run, [job]), NUM_TURNS)
                yield _path_row(cache, way, path, wall_s, statistics.median(job.cpu_s))
        host_s: list[float] = []
        wall_s = seconds(_copy_of_rows(cache, way, host_s), NUM_TURNS)
        yield _path_row(cache, way, "memcpy2DAsync", wall_s, statistics.median(host_s))


def _path_row(cache: Cache, way: str, path: str, wall_s: float, host_s: float) -> Row:
    return {
        "kib": cache.fragment_bytes >> 10,
        "way": way,
        "path": path,
        "gb_per_s": JOB_BLOCKS * cache.block_bytes / 1e9 / wall_s,
        "host_ms": 1e3 * host_s,
    }


def _copy_of_rows(cache: Cache, way: str, host_s: list[float]) -> Callable[[], None]:
    """Return work that copies each block with one call: a row is a layer's fragment."""
    runtime, api = cache.device.runtime, cache.device.cupy.cuda.runtime
    stream, event = runtime.stream(), runtime.event()
    size, height, regions = cache.fragment_bytes, cache.num_layers, cache.layer_regions
    pitch = regions[1] - regions[0] if height > 1 else size
    blocks = [regions[0] + block * size for block in cache.ids(way, shuffled=True)]
    stride = cache.arena.slot_stride_bytes
    slots = [cache.arena.base_address + slot * stride for slot in cache.slots(way, scattered=False)]
    to_host = way == "store"
    kind = api.memcpyDeviceToHost if to_host else api.memcpyHostToDevice

    def work() -> None:
        begin_s = time.perf_counter()
        for block, slot in zip(blocks, slots, strict=True):
            if to_host:
                api.memcpy2DAsync(slot, size, block, pitch, size, height, kind, stream.ptr)
            else:
                api.memcpy2DAsync(block, pitch, slot, size, size, height, kind, stream.ptr)
        host_s.append(time.perf_counter() - begin_s)
        runtime.record(event, stream)
        runtime.synchronize(event)

    return work


def table(rows: Sequence[Row]) -> list[Row]:
    """Return for each setting its worst share of the best speed in the same case."""
    cases = [f"{way} {num}" for num, way in product(JOBS, WAYS)]
    best = {
        (kib, case): max(row[case] for row in rows if row["kib"] == kib)
        for kib in {row["kib"] for row in rows}
        for case in cases
    }
    shares: dict[tuple[int, int, int], float] = {}
    for row in rows:
        setting = row["grid"], row["place_mib"], row["places"]
        worst = min(row[case] / best[row["kib"], case] for case in cases)
        shares[setting] = min(shares.get(setting, 1.0), worst)
    return [
        {"grid": grid, "place_mib": mib, "places": places, "worst_share": share}
        for (grid, mib, places), share in sorted(shares.items(), key=lambda item: -item[1])
    ]


def picked(settings: Sequence[Row]) -> Row:
    """Return the gentlest of the good settings, and whether it is the present default."""
    best = settings[0]["worst_share"]
    good = [row for row in settings if row["worst_share"] >= GOOD * best]
    pick = min(good, key=lambda row: (row["grid"], row["place_mib"] * row["places"]))
    return pick | {"is_default": (pick["grid"], pick["place_mib"], pick["places"]) == PRESENT}
