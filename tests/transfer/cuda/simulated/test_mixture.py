"""Random mixtures of jobs of two movers that share a link and an arena, with refused calls.

Blocks have different sizes, and fragments that are no multiple of 16 bytes. Compute rewrites a
block as soon as its store has released it. A slot has another owner as soon as its job has ended.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest
from tests.transfer.cuda.simulation import library

from kvstow.transfer import (
    BlockLayout,
    CudaEvent,
    CudaLink,
    CudaMover,
    Event,
    HostEvent,
    Region,
    Ticket,
)
from kvstow.transfer.cuda.link_speed import Path
from kvstow.transfer.cuda.pace import Pace
from kvstow.transfer.cuda.pinning import pinned_arena
from kvstow.transfer.cuda.runtime import cuda_runtime

NUM_BLOCKS, NUM_SLOTS, NUM_OPS = 10, 12, 120
# Bytes of each layer's fragment, by group.
FRAGMENTS = (2032, 1000), (100, 20, 484)
# Only movers make these calls. The refusal may meet a later job.
REFUSED_CALLS = "cuLaunchKernel", "cudaStreamWaitEvent"
INVALID_VALUE = 1


@dataclass
class Job:
    group: int
    is_store: bool
    blocks: list[int]
    slots: list[int]
    versions: list[int]
    ticket: Ticket


class Mixture:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        library.by_hand(self.random.random() < 0.7)
        self.gpu = cuda_runtime(0)
        self.compute = self.gpu.stream()
        self.layers = []
        layouts = []
        for fragments in FRAGMENTS:
            regions = []
            for size in fragments:
                stride = -(-size // 16) * 16
                address = self.gpu.allocate(NUM_BLOCKS * stride)
                self.gpu.upload(address, bytes(NUM_BLOCKS * stride))
                self.layers.append(address)
                regions.append(Region(address, stride, size))
            layouts.append(BlockLayout(NUM_BLOCKS, tuple(regions), device=0))
        self.arena = pinned_arena(NUM_SLOTS, max(layout.slot_bytes for layout in layouts), self.gpu)
        num_places = self.random.choice([1, 2, 3])
        link = CudaLink(self.gpu, staging_bytes=8192, num_places=num_places)
        if self.random.random() < 0.5:
            link.stores._pace = Pace(4, 1, itertools.count().__next__)
        self.movers = []
        for layout in layouts:
            path: Path = "packed" if self.random.random() < 0.5 else "direct"
            verify = path == "packed" and self.random.random() < 0.5
            self.movers.append(CudaMover(layout, self.arena, link=link, path=path, verify=verify))
        self.layouts = layouts
        # By group: the version of each block that nobody uses; None once it is undefined.
        self.blocks: list[dict[int, int | None]] = [
            dict.fromkeys(range(1, NUM_BLOCKS), 0) for _ in layouts
        ]
        self.free_slots = list(range(NUM_SLOTS))
        self.stored: dict[int, tuple[int, int]] = {}  # by slot: group and version
        self.jobs: list[Job] = []
        self.late: list[HostEvent] = []
        self.version = 0
        self.num_well = 0

    def write(self, group: int, block: int) -> int:
        self.version = self.version % 255 + 1
        for region in self.layouts[group].regions:
            address = region.base_address + block * region.block_stride_bytes
            stream = self.compute.ptr
            self.gpu._api.memsetAsync(address, self.version, region.block_bytes, stream)
        self.blocks[group][block] = self.version
        return self.version

    def after(self) -> Event:
        if self.random.random() < 0.2:
            # The host sets it once the compute until now is done.
            self.gpu._api.streamSynchronize(self.compute.ptr)
            self.late.append(HostEvent())
            return self.late[-1]
        return CudaEvent.record(self.compute)

    def pick(self, things: list[int]) -> list[int]:
        return self.random.sample(things, self.random.randint(1, len(things)))

    def store(self, refused: str | None = None) -> None:
        group = self.random.randrange(2)
        blocks = [id for id, version in self.blocks[group].items() if version is not None]
        if not blocks or not self.free_slots:
            return
        blocks = self.pick(blocks)[: len(self.free_slots)]
        slots = self.random.sample(self.free_slots, len(blocks))
        if self.random.random() < 0.5:
            slots.sort()
        versions = [self.write(group, id) for id in blocks]
        after = self.after()
        if refused is not None:
            library.fail(refused, INVALID_VALUE)
        ticket = self.movers[group].store(blocks, slots, after=after)
        self.begin(Job(group, True, blocks, slots, versions, ticket))

    def load(self) -> None:
        group = self.random.randrange(2)
        slots = [slot for slot, (of, _) in self.stored.items() if of == group]
        if not slots or not self.blocks[group]:
            return
        slots = self.pick(slots)[: len(self.blocks[group])]
        blocks = self.random.sample(sorted(self.blocks[group]), len(slots))
        versions = [self.stored.pop(slot)[1] for slot in slots]
        ticket = self.movers[group].load(slots, blocks, after=self.after())
        self.begin(Job(group, False, blocks, slots, versions, ticket))

    def begin(self, job: Job) -> None:
        for block in job.blocks:
            del self.blocks[job.group][block]
        self.free_slots = [slot for slot in self.free_slots if slot not in job.slots]
        self.jobs.append(job)

    def poll(self) -> None:
        for job in list(self.jobs):
            if job.is_store and job.blocks and job.ticket.source_released():
                for block in job.blocks:
                    self.write(job.group, block)  # at once
                job.blocks = []
            if job.ticket.poll():
                self.jobs.remove(job)
                self.end(job)

    def end(self, job: Job) -> None:
        layout, is_well = self.layouts[job.group], job.ticket.error is None
        self.num_well += is_well
        if job.is_store:
            for block in job.blocks:
                self.write(job.group, block)
            for slot, version in zip(job.slots, job.versions, strict=True):
                if is_well:
                    row = self.arena.slots[slot, : layout.slot_bytes]
                    assert (row == version).all(), f"a slot holds {set(row.tolist())}"
                    self.stored[slot] = job.group, version
                else:
                    self.free_slots.append(slot)
            return
        for slot, block, version in zip(job.slots, job.blocks, job.versions, strict=True):
            self.blocks[job.group][block] = version if is_well else None
            if is_well and self.random.random() < 0.5:
                self.stored[slot] = job.group, version
            else:
                self.arena.slots[slot] = 0  # by its next owner
                self.free_slots.append(slot)
            if is_well:
                self.expect_block(job.group, block, version)

    def expect_block(self, group: int, block: int, version: int) -> None:
        """Let compute read a block."""
        for region in self.layouts[group].regions:
            seen = self.gpu.allocate_mapped(region.block_bytes)
            origin = region.base_address + block * region.block_stride_bytes
            stream = self.compute.ptr
            to = seen.host.ctypes.data
            self.gpu._api.memcpyAsync(to, origin, region.block_bytes, 2, stream)
            self.gpu._api.streamSynchronize(stream)
            assert (seen.host == version).all(), f"a block holds {set(seen.host.tolist())}"
            self.gpu.free_mapped(seen)

    def run(self) -> None:
        for _ in range(NUM_OPS):
            chance = self.random.random()
            if chance < 0.2:
                self.store()
            elif chance < 0.35:
                self.load()
            elif chance < 0.4:
                self.store(refused=self.random.choice(REFUSED_CALLS))
            elif chance < 0.5 and self.late:
                self.late.pop(self.random.randrange(len(self.late))).set()
            elif chance < 0.65:
                self.poll()
            else:
                for _ in range(self.random.randrange(6)):
                    library.step()
        while self.late:
            self.late.pop().set()
        for _ in range(2000):
            if not self.jobs:
                break
            library.step()
            self.poll()
        assert not self.jobs, "a job never ends"

    def close(self) -> None:
        library.by_hand(False)
        for mover in self.movers:
            mover.close()
        library.library().cudaDeviceSynchronize()
        self.arena.close()
        for layer in self.layers:
            self.gpu.free(layer)


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_mixtures_of_two_movers_keep_every_byte(first: int) -> None:
    num_well = 0
    for seed in range(first, first + 20):
        world = Mixture(seed)
        try:
            world.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        finally:
            world.close()
        found = library.violations()
        assert not found, f"seed {seed}: {found[0]}"
        num_well += world.num_well
    assert num_well > 100
