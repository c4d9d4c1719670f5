"""Nothing that a job touches lacks an order, and without any one wait something does.

The simulated GPU compares each access with the events that order it, not with the order that ran.
So one run stands for all orders of the device's work, as long as the host polls at the same points.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from typing import Literal

import cupy
import numpy as np
import pytest
from tests.transfer.cuda.simulation import library

from kvstow.transfer import BlockLayout, CudaEvent, CudaLink, CudaMover, Region, Ticket
from kvstow.transfer.cuda.pace import Pace
from kvstow.transfer.cuda.pinning import pinned_arena
from kvstow.transfer.cuda.runtime import cuda_runtime

NUM_BLOCKS, NUM_SLOTS, NUM_LAYERS = 12, 16, 2
# Blocks with a little padding in their slot, and with much. A place holds two of them.
FRAGMENT_BYTES, STAGING_BYTES = (2032, 1008), (8192, 4096)
NUM_SEEDS = 6
DEVICE_TO_HOST = 2
MOST_VERSION = 255
MOST_READS = 200

Path = Literal["packed", "direct"]
# The device's streams by their roles: compute, the places of stores, the places of loads.
Pair = tuple[int, int]


class Corrupt(Exception):
    pass


class World:
    """A device whose compute writes and reads blocks, and a mover of these blocks."""

    def __init__(
        self,
        seed: int,
        path: Path,
        *,
        dropped: Pair | None = None,
        verify: bool = False,
        is_paced: bool = False,
        is_slow: bool = False,
    ) -> None:
        library.by_hand(is_slow)
        self.random = random.Random(seed)
        self.gpu = cuda_runtime(0)
        size = FRAGMENT_BYTES[seed % 2]
        self.layers = [self.gpu.allocate(NUM_BLOCKS * size) for _ in range(NUM_LAYERS)]
        for layer in self.layers:
            self.gpu.upload(layer, bytes(NUM_BLOCKS * size))
        self.regions = tuple(Region(layer, size, size) for layer in self.layers)
        layout = BlockLayout(NUM_BLOCKS, self.regions, device=0)
        self.arena = pinned_arena(NUM_SLOTS, layout.slot_bytes, self.gpu)
        self.slots = self.arena.slots[:, : layout.slot_bytes]
        self.compute = self.gpu.stream()
        link = CudaLink(self.gpu, staging_bytes=STAGING_BYTES[seed % 2], num_places=2)
        # A store then fills a place, and goes on only at later polls.
        link.stores._pace = Pace(4, 1, itertools.count().__next__) if is_paced else None
        self.mover = CudaMover(layout, self.arena, link=link, path=path, verify=verify)
        places = [place for lane in (link.stores, link.loads) for place in lane._places]
        streams = [self.compute, *(place.stream for place in places)]
        self.roles = {library.number_of(stream.ptr): i for i, stream in enumerate(streams)}
        if dropped is not None:
            numbers = list(self.roles)
            library.drop((numbers[dropped[0]], numbers[dropped[1]]))
        self.version = 0
        self.device = dict.fromkeys(range(NUM_BLOCKS), 0)  # versions after all queued work
        self.seen = self.gpu.allocate_mapped(MOST_READS * size)
        self.expected: list[int] = []  # version of each fragment that compute has read

    def close(self) -> None:
        library.drop(None)
        self.mover.close()
        library.library().cudaDeviceSynchronize()
        self.arena.close()
        self.gpu.free_mapped(self.seen)
        for layer in self.layers:
            self.gpu.free(layer)

    # -- the device's own work --------------------------------------------------------------------

    def compute_into(self, ids: list[int]) -> list[int]:
        """Queue a step that writes a new version into every byte of each block."""
        versions = []
        for block in ids:
            self.version = self.version % MOST_VERSION + 1
            self.device[block] = self.version
            versions.append(self.version)
            for region in self.regions:
                address = region.base_address + block * region.block_bytes
                stream = self.compute.ptr
                self.gpu._api.memsetAsync(address, self.version, region.block_bytes, stream)
        return versions

    def read(self, ids: list[int]) -> None:
        """Queue a step that reads blocks and expects their version at this point."""
        for block, region in itertools.product(ids, self.regions):
            size = region.block_bytes
            to = self.seen.host.ctypes.data + len(self.expected) * size
            origin = region.base_address + block * size
            self.gpu._api.memcpyAsync(to, origin, size, DEVICE_TO_HOST, self.compute.ptr)
            self.expected.append(self.device[block])

    def expect_reads(self) -> None:
        self.gpu._api.streamSynchronize(self.compute.ptr)
        rows = self.seen.host.reshape(MOST_READS, -1)[: len(self.expected)]
        _expect(rows, self.expected, "a read of compute")

    # -- transfers --------------------------------------------------------------------------------

    def store(self, ids: list[int], slots: list[int]) -> Ticket:
        return self.mover.store(ids, slots, after=CudaEvent.record(self.compute))

    def load(self, slots: list[int], ids: list[int]) -> Ticket:
        return self.mover.load(slots, ids, after=CudaEvent.record(self.compute))

    def expect_slots(self, slots: list[int], versions: list[int]) -> None:
        _expect(self.slots[slots], versions, "a slot")


def _expect(found: np.ndarray, versions: Iterable[int], where: str) -> None:
    for row, version in zip(found, versions, strict=True):
        if not (row == version).all():
            raise Corrupt(f"{where} holds {set(row.tolist())}, not {version}")


def wait(*conditions: Callable[[], bool]) -> None:
    """Poll repeatedly, as an engine does in each step. A slow device does a little meanwhile."""
    while not all(condition() for condition in conditions):
        library.step()


def round_trips(world: World) -> None:
    """Store blocks that compute rewrites on release, and load into blocks that a step just read.

    Several jobs are in flight, and each takes several places of the staging memory.
    """
    ids = list(range(1, NUM_BLOCKS))
    for turn in range(2):
        world.random.shuffle(ids)
        mine, others = ids[:6], ids[6:]
        slots = world.random.sample(range(NUM_SLOTS), 6)
        versions = world.compute_into(mine)
        store = world.store(mine, slots)
        wait(store.source_released)
        world.compute_into(mine)
        late = world.compute_into(others[:3])
        late_slots = [slot for slot in range(NUM_SLOTS) if slot not in slots][:3]
        second = world.store(others[:3], late_slots)
        wait(store.poll)
        assert store.error is None
        world.expect_slots(slots, versions)
        # The loads write blocks that a step still reads, and read the slots of both stores.
        wait(second.poll)
        world.expect_slots(late_slots, late)
        world.read([*mine, *others[:3]])
        load = world.load(slots[:5], mine[:5])
        other = world.load(late_slots, others[2::-1])  # other blocks than they came from
        loaded = zip([*mine[:5], *others[2::-1]], [*versions[:5], *late], strict=True)
        world.device.update(loaded)
        wait(load.poll)
        world.read(mine[:5])
        wait(other.poll)
        assert load.error is None
        assert other.error is None
        # The slots are free again, so their next owner may write.
        world.slots[slots + late_slots] = turn
        world.read([*mine[:5], *others[:3]])
    world.expect_reads()


def overwrites(world: World) -> None:
    """Submit a second job that writes to targets of the first, while the first is in flight."""
    ids = list(range(1, NUM_BLOCKS))
    for turn in range(3):
        world.random.shuffle(ids)
        mine, others = ids[:5], ids[5:8]
        slots = world.random.sample(range(NUM_SLOTS), 5)
        expected = dict(zip(slots, world.compute_into(mine), strict=True))
        again = world.random.sample(slots, 3)
        first = world.store(mine, slots)
        expected.update(zip(again, world.compute_into(others), strict=True))
        second = world.store(others, again)
        wait(first.poll, second.poll)
        world.expect_slots(list(expected), list(expected.values()))
        world.read(mine)
        again = world.random.sample(mine, 3)
        tickets = [world.load(slots, mine), world.load(slots[:3], again)]
        pairs = [*zip(slots, mine, strict=True), *zip(slots[:3], again, strict=True)]
        world.device.update({block: expected[slot] for slot, block in pairs})
        wait(*(ticket.poll for ticket in tickets))
        world.read(mine)
        world.slots[slots] = turn
    world.expect_reads()


def partly_overwrites(world: World) -> None:
    """Submit a job with a target of each of two jobs in flight, and one that nothing writes to."""

    def targets(things: list[int], num: int) -> tuple[list[int], list[int], list[int]]:
        both = world.random.sample([things[0], things[num], things[6]], 3)
        return things[:num], things[num : 2 * num], both

    ids = list(range(1, NUM_BLOCKS))
    # A job of one block takes one place, and a job of three takes both.
    for turn, num in enumerate((1, 3, 1)):
        world.random.shuffle(ids)
        slots = targets(world.random.sample(range(NUM_SLOTS), 7), num)
        expected: dict[int, int] = {}
        tickets = []
        for mine, into in zip((ids[:num], ids[3 : 3 + num], ids[6:9]), slots, strict=True):
            expected.update(zip(into, world.compute_into(mine), strict=True))
            tickets.append(world.store(mine, into))
        wait(*(ticket.poll for ticket in tickets))
        world.expect_slots(list(expected), list(expected.values()))
        world.read(ids)
        tickets.clear()
        for origins, into in zip(slots, targets(ids, num), strict=True):
            pairs = zip(origins, into, strict=True)
            world.device.update({block: expected[slot] for slot, block in pairs})
            tickets.append(world.load(origins, into))
        wait(*(ticket.poll for ticket in tickets))
        world.read(ids)
        world.slots[list(expected)] = turn
    world.expect_reads()


Scenario = Callable[[World], None]


def fails(seed: int, path: Path, scenario: Scenario, **options: object) -> str | None:
    """Return what is wrong with a run; None if nothing is."""
    world = World(seed, path, **options)  # type: ignore[arg-type]
    wrong = None
    try:
        scenario(world)
    except Corrupt as error:
        wrong = str(error)
    finally:
        world.close()
    found = library.violations()
    return found[0] if found else wrong


@pytest.mark.parametrize("scenario", [round_trips, overwrites, partly_overwrites])
@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("packed", {}),
        ("packed", {"verify": True}),
        ("packed", {"is_paced": True}),
        ("direct", {}),
        ("direct", {"is_paced": True}),
    ],
)
def test_every_access_has_an_order(
    path: Path, options: dict[str, bool], scenario: Scenario
) -> None:
    for seed in range(NUM_SEEDS):
        wrong = fails(seed, path, scenario, **options)
        assert wrong is None, f"seed {seed}: {wrong}"


# Stream 0 computes. Streams 1 and 2 have the places of stores, 3 and 4 those of loads.
ON_COMPUTE = {(1, 0), (2, 0), (3, 0), (4, 0)}
# A job waits for another only where both write to a target. A direct job has one stream.
WAITS: dict[tuple[Path, Scenario], set[Pair]] = {
    ("packed", round_trips): ON_COMPUTE,
    ("direct", round_trips): ON_COMPUTE,
    ("packed", overwrites): ON_COMPUTE | {(1, 2), (2, 1), (3, 4), (4, 3)},
    ("direct", overwrites): ON_COMPUTE | {(2, 1), (4, 3)},
}


@pytest.mark.parametrize(("path", "scenario"), WAITS)
def test_lanes_queue_only_the_waits_that_the_design_names(path: Path, scenario: Scenario) -> None:
    world = World(0, path, is_slow=True)
    library.waits()
    try:
        scenario(world)
        found = library.waits()
    finally:
        world.close()
    roles = {(world.roles[stream], world.roles[awaited]) for stream, awaited in found}
    assert roles == WAITS[path, scenario]


@pytest.mark.parametrize(
    ("path", "scenario", "dropped"),
    [
        (path, scenario, pair)
        for (path, scenario), pairs in WAITS.items()
        for pair in sorted(pairs)
        # A load that waits for another one waits for compute too.
        if scenario is round_trips or 0 not in pair
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_without_any_one_wait_an_access_lacks_its_order(
    path: Path, scenario: Scenario, dropped: Pair
) -> None:
    # A host that sees an event reached needs no wait, so the device is slow.
    options = {"dropped": dropped, "is_slow": True}
    assert any(fails(seed, path, scenario, **options) for seed in range(NUM_SEEDS))


@pytest.mark.parametrize("path", ["packed", "direct"])
def test_without_event_queries_bytes_are_wrong(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstow.transfer.cuda.runtime.CudaRuntime.is_done", lambda *_: True)
    assert any(fails(seed, path, round_trips, is_slow=True) for seed in range(NUM_SEEDS))


def test_next_stream_takes_a_number_only_once_the_host_knows_its_work_to_be_done() -> None:
    """Otherwise the simulation would take work of two streams for that of one, in its order."""
    library.by_hand()
    gpu, stream = cuda_runtime(0), cupy.cuda.Stream(non_blocking=True)
    memory, number = gpu.allocate(64), library.number_of(stream.ptr)
    gpu._api.memsetAsync(memory, 1, 64, stream.ptr)
    del stream  # its work still runs
    while library.step():
        pass
    second = gpu.stream()
    assert library.number_of(second.ptr) != number
    gpu._api.memsetAsync(memory, 2, 64, second.ptr)
    library.library().cudaDeviceSynchronize()
    assert "memset on stream" in library.violations()[0]
    third = gpu.stream()
    assert library.number_of(third.ptr) == number
    gpu._api.memsetAsync(memory, 3, 64, third.ptr)
    gpu.free(memory)
    assert not library.violations()
