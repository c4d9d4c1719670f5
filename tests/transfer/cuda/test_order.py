"""No order of the device's work corrupts a byte, and without any one wait some order does."""

import itertools
import random
from collections.abc import Callable
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest
from tests.transfer.cuda.simulated_gpu import Choose, SimulatedGpu

from kvstow.transfer import BlockLayout, HostArena, Ticket
from kvstow.transfer.cuda.link import CudaLink
from kvstow.transfer.cuda.mover import CudaMover
from kvstow.transfer.cuda.pace import Pace
from kvstow.transfer.cuda.runtime import CudaEvent

NUM_BLOCKS, NUM_SLOTS, NUM_LAYERS = 12, 16, 2
# Blocks with a little padding in their slot, and with much. A place holds two of them.
FRAGMENT_BYTES, STAGING_BYTES = (2032, 1008), (8192, 4096)
BLOCK_BYTES = 4096  # of the slots with a little padding
NUM_SEEDS = 300
MOST_IDLE_POLLS = 5

Path = Literal["packed", "direct"]


class RandomOrder:
    """Picks evenly, or by priorities that change now and then and so starve a stream for long."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._is_even = self._random.random() < 0.3
        self._change = self._random.choice([0.0, 0.02, 0.2])
        self._priorities: dict[int | None, float] = {}

    def __call__(self, able: list[int | None]) -> int | None:
        if self._is_even:
            return self._random.choice(able)
        if self._random.random() < self._change:
            self._priorities.clear()
        for name in able:
            self._priorities.setdefault(name, self._random.random())
        return max(able, key=lambda name: self._priorities[name])


class EveryOrder:
    """Tries all orders, one after the other."""

    def __init__(self) -> None:
        self._path: list[list[int]] = []  # [choice, number of choices]
        self._at = 0

    def __call__(self, able: list[int | None]) -> int | None:
        if None in able:
            return None  # the host goes on, because queued work can still run later
        if self._at == len(self._path):
            self._path.append([0, len(able)])
        self._at += 1
        return able[self._path[self._at - 1][0]]

    def next(self) -> bool:
        self._at = 0
        while self._path and self._path[-1][0] + 1 == self._path[-1][1]:
            self._path.pop()
        if self._path:
            self._path[-1][0] += 1
        return bool(self._path)


class Corrupt(Exception):
    pass


class World:
    """A device whose compute writes and reads blocks, and a mover of these blocks."""

    def __init__(
        self,
        seed: int,
        path: Path,
        *,
        order: Choose | None = None,
        dropped: tuple[int, int] | None = None,
        verify: bool = False,
        staging_bytes: int | None = None,
        is_paced: bool = False,
    ) -> None:
        self.random = random.Random(seed)
        self.runtime = SimulatedGpu(order or RandomOrder(seed), dropped=dropped)
        self.compute = self.runtime.stream()
        size = FRAGMENT_BYTES[seed % 2]
        memory = np.zeros((NUM_LAYERS, NUM_BLOCKS, size + 16), dtype=np.uint8)
        # All words of a block hold the version that compute wrote last.
        self.words = memory[:, :, :size].view(np.uint64)
        cpu = BlockLayout.from_arrays(list(memory[:, :, :size]))
        layout = BlockLayout(NUM_BLOCKS, cpu.regions, cpu.owners, device=0)
        self.arena = HostArena(NUM_SLOTS, layout.slot_bytes)
        self.slots = self.arena.slots.view(np.uint64)
        staging_bytes = staging_bytes or STAGING_BYTES[seed % 2]
        link = CudaLink(self.runtime, staging_bytes=staging_bytes, num_places=2)
        # A store then fills a place, and goes on only at later polls.
        link.stores._pace = Pace(4, 1, itertools.count().__next__) if is_paced else None
        self.mover = CudaMover(layout, self.arena, link=link, path=path, verify=verify)
        self.version = 0
        self.device: dict[int, int] = {}  # the version of each block after all queued work
        self.host: dict[int, int] = {}

    # -- the device's own work --------------------------------------------------------------------

    def compute_into(self, ids: list[int]) -> list[int]:
        versions = []
        for block in ids:
            self.version += 1
            self.device[block] = self.version
            versions.append(self.version)

            def write(layer: int, block: int = block, version: int = self.version) -> None:
                self.words[layer, block] = version

            self.runtime.queue(self.compute, partial(write, 0), partial(write, 1))
        return versions

    def read(self, ids: list[int]) -> None:
        """Queue a step that reads blocks and expects their version at this point."""
        for block in ids:

            def look(block: int = block, version: int = self.device[block]) -> None:
                _expect(self.words[:, block], version, f"block {block}")

            self.runtime.queue(self.compute, look)

    def after(self) -> CudaEvent:
        event = self.runtime.event()
        self.runtime.record(event, self.compute)
        return CudaEvent(self.runtime, event)

    # -- transfers --------------------------------------------------------------------------------

    def store(self, ids: list[int], slots: list[int]) -> Ticket:
        return self.mover.store(ids, slots, after=self.after())

    def load(self, slots: list[int], ids: list[int]) -> Ticket:
        return self.mover.load(slots, ids, after=self.after())

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Poll repeatedly, as an engine does in each step."""
        num_idle = 0
        while not is_over():
            # An idle device gets more of a paced store at a later poll.
            num_idle = 0 if self.runtime.step() else num_idle + 1
            assert num_idle < MOST_IDLE_POLLS, "the device is idle, but the mover still waits"

    def expect_slots(self, slots: list[int], versions: list[int]) -> None:
        for slot, version in zip(slots, versions, strict=True):
            _expect(self.slots[slot], version, f"slot {slot}")


def _expect(words: npt.NDArray[np.uint64], version: int, where: str) -> None:
    if not (words == version).all():
        raise Corrupt(f"{where} holds {words.tolist()}, not {version}")


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
        world.wait(store.source_released)
        world.compute_into(mine)
        late = world.compute_into(others[:3])
        late_slots = [slot for slot in range(NUM_SLOTS) if slot not in slots][:3]
        second = world.store(others[:3], late_slots)
        world.wait(store.poll)
        assert store.error is None
        world.expect_slots(slots, versions)
        # The loads write blocks that a step still reads, and read the slots of both stores.
        world.wait(second.poll)
        world.expect_slots(late_slots, late)
        world.read([*mine, *others[:3]])
        load = world.load(slots[:5], mine[:5])
        other = world.load(late_slots, others[2::-1])  # other blocks than they came from
        loaded = zip([*mine[:5], *others[2::-1]], [*versions[:5], *late], strict=True)
        world.device.update(loaded)
        world.wait(load.poll)
        world.read(mine[:5])
        world.wait(other.poll)
        assert load.error is None
        assert other.error is None
        # The slots are free again, so their next owner may write.
        world.slots[slots + late_slots] = turn
        world.read([*mine[:5], *others[:3]])
    world.runtime.run_all()


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
        world.wait(lambda first=first, second=second: first.poll() and second.poll())  # type: ignore[misc]
        world.expect_slots(list(expected), list(expected.values()))
        world.read(mine)
        again = world.random.sample(mine, 3)
        tickets = [world.load(slots, mine), world.load(slots[:3], again)]
        pairs = [*zip(slots, mine, strict=True), *zip(slots[:3], again, strict=True)]
        world.device.update({block: expected[slot] for slot, block in pairs})
        world.wait(lambda tickets=tickets: all(ticket.poll() for ticket in tickets))  # type: ignore[misc]
        world.read(mine)
        world.slots[slots] = turn
    world.runtime.run_all()


def one_store(world: World) -> None:
    """Store in more batches than there are places, and rewrite two of the blocks on release."""
    versions = [*world.compute_into([1]), 0, *world.compute_into([3])]
    store = world.store([1, 2, 3], [4, 9, 5])
    world.wait(store.source_released)
    world.compute_into([1, 2])
    world.wait(store.poll)
    world.expect_slots([4, 9, 5], versions)
    world.runtime.run_all()


def one_load(world: World) -> None:
    """Load in more batches than there are places, into a block that a step reads."""
    world.slots[[4, 9, 5]] = [[100], [101], [102]]
    world.device[2] = 0
    world.read([2])
    load = world.load([4, 9, 5], [1, 2, 3])
    world.device.update({1: 100, 2: 101, 3: 102})
    world.wait(load.poll)
    world.read([1, 2])
    world.slots[[4, 9, 5]] = 0
    world.runtime.run_all()


Scenario = Callable[[World], None]


def corrupts(seed: int, path: Path, scenario: Scenario, **options: object) -> bool:
    world = World(seed, path, **options)  # type: ignore[arg-type]
    try:
        scenario(world)
    except Corrupt:
        return True
    return False


@pytest.mark.parametrize("scenario", [round_trips, overwrites])
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
def test_no_order_of_the_work_corrupts_a_block(
    path: Path, options: dict[str, bool], scenario: Scenario
) -> None:
    for seed in range(NUM_SEEDS):
        assert not corrupts(seed, path, scenario, **options), f"seed {seed}"


@pytest.mark.parametrize("scenario", [one_store, one_load])
@pytest.mark.parametrize("path", ["packed", "direct"])
def test_no_order_of_a_small_job_corrupts_a_block(path: Path, scenario: Scenario) -> None:
    order, num_orders = EveryOrder(), 0
    while True:
        scenario(World(0, path, order=order, staging_bytes=BLOCK_BYTES))
        num_orders += 1
        if not order.next():
            break
    assert num_orders > (100 if path == "packed" else 0)


def waits(path: Path, scenario: Scenario) -> list[tuple[int, int]]:
    world = World(0, path)
    scenario(world)
    return sorted(world.runtime.seen)


@pytest.mark.parametrize(
    ("path", "scenario", "dropped"),
    [
        (path, scenario, pair)
        for path in ("packed", "direct")
        for scenario in (round_trips, overwrites)
        for pair in waits(path, scenario)
        if scenario is round_trips or 0 not in pair
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_without_any_one_wait_some_order_corrupts(
    path: Path, scenario: Scenario, dropped: tuple[int, int]
) -> None:
    seeds = range(10 * NUM_SEEDS)
    assert any(corrupts(seed, path, scenario, dropped=dropped) for seed in seeds)


def test_lanes_queue_only_the_waits_that_the_design_names() -> None:
    # Stream 0 computes. Streams 1 and 2 have the places of stores, 3 and 4 those of loads.
    on_compute = [(1, 0), (2, 0), (3, 0), (4, 0)]
    assert waits("packed", round_trips) == waits("direct", round_trips) == on_compute
    # A job waits for another only where both write to a target. A direct job has one stream.
    either_way = [(1, 2), (2, 1), (3, 4), (4, 3)]
    assert waits("packed", overwrites) == sorted([*on_compute, *either_way])
    assert waits("direct", overwrites) == sorted([*on_compute, (2, 1), (4, 3)])


@pytest.mark.parametrize("path", ["packed", "direct"])
def test_without_event_queries_some_order_corrupts(path: Path) -> None:
    def is_blind(seed: int) -> bool:
        world = World(seed, path)
        world.runtime.blind = True
        try:
            round_trips(world)
        except (Corrupt, AssertionError):
            return True
        return False

    assert any(is_blind(seed) for seed in range(NUM_SEEDS))
