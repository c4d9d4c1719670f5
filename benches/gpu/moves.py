"""The speed of `CudaMover` with jobs of 512 blocks: each way alone, and both ways at once.

Jobs of the other parts may be smaller.
"""

import itertools
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
from benches.gpu.device import Device, seconds
from benches.gpu.parts import Log, Row

from kvstow.closing import Closing
from kvstow.transfer import BlockLayout, CudaEvent, CudaMover, Ticket, pinned_arena

JOB_BLOCKS, JOB_BYTES = 512, 256 << 20
NUM_BLOCKS = 2 * JOB_BLOCKS + 1


class Cache(Closing):
    """A layer-major cache of random bytes, a pinned arena, and a mover that packs.

    Stores read the first half of the blocks after the null block, and loads write the other half.
    Stores fill the lower half of the slots, and loads read the upper half.
    """

    def __init__(self, device: Device, fragment_bytes: int) -> None:
        import torch  # noqa: PLC0415

        self.torch, self.device, self.fragment_bytes = torch, device, fragment_bytes
        self.num_layers = -(-JOB_BYTES // (JOB_BLOCKS * fragment_bytes))
        self.block_bytes = self.num_layers * fragment_bytes
        self.memory = torch.randint(
            -(2**62),
            2**62,
            (self.num_layers, NUM_BLOCKS, fragment_bytes // 8),
            dtype=torch.int64,
            device="cuda:0",
        )
        self.layout = BlockLayout.from_tensors(list(self.memory))
        self.layer_regions = [layer.data_ptr() for layer in self.memory]
        self._built = ExitStack()
        # Twice the slots that both jobs need, so that the slots can be scattered.
        self.arena = self._built.enter_context(
            pinned_arena(4 * JOB_BLOCKS, self.layout.slot_bytes, device.runtime)
        )
        self.mover = self._built.enter_context(CudaMover(self.layout, self.arena, path="packed"))
        self.idle, self.compute = torch.cuda.Stream(), torch.cuda.Stream()
        self.chances = map(np.random.default_rng, itertools.count())

    def close(self) -> None:
        self._built.close()

    def ids(self, direction: str, *, shuffled: bool) -> list[int]:
        """Return the blocks of a job in its order."""
        first = 1 if direction == "store" else 1 + JOB_BLOCKS
        ids = list(range(first, first + JOB_BLOCKS))
        if shuffled:
            random.Random(5).shuffle(ids)
        return ids

    def slots(self, direction: str, *, scattered: bool) -> list[int]:
        """Return the slots of a job: one run, or slots of which no two are neighbours."""
        first = 0 if direction == "store" else 2 * JOB_BLOCKS
        step = 2 if scattered else 1
        return list(range(first, first + step * JOB_BLOCKS, step))

    @contextmanager
    def through(self, mover: CudaMover) -> Iterator[None]:
        """Let the jobs of this cache use another mover."""
        kept, self.mover = self.mover, mover
        try:
            yield
        finally:
            self.mover = kept


class Job:
    """A store or a load that is repeated, with the time of its submission.

    It waits for an event of an idle stream, or with `is_beside` of the stream that computes, as a
    job of an engine does.
    """

    def __init__(
        self,
        cache: Cache,
        direction: str,
        *,
        shuffled: bool,
        scattered: bool,
        num_blocks: int = JOB_BLOCKS,
        is_beside: bool = False,
    ) -> None:
        self.cache, self.direction = cache, direction
        ids, slots = (
            cache.ids(direction, shuffled=shuffled),
            cache.slots(direction, scattered=scattered),
        )
        self.ids = np.array(ids[:num_blocks], dtype=np.int32)
        self.slots = np.array(slots[:num_blocks], dtype=np.int32)
        self._stream = cache.compute if is_beside else cache.idle
        self.cpu_s: list[float] = []

    def submit(self) -> Ticket:
        """Submit the job."""
        begin_s = time.thread_time()
        after, mover = CudaEvent.record(self._stream), self.cache.mover
        if self.direction == "store":
            ticket = mover.store(self.ids, self.slots, after=after)
        else:
            ticket = mover.load(self.slots, self.ids, after=after)
        self.cpu_s.append(time.thread_time() - begin_s)
        return ticket

    def is_right(self) -> bool:
        """Carry out the job once with other bytes, and compare."""
        cache, torch = self.cache, self.cache.torch
        ids = torch.from_numpy(self.ids.astype(np.int64)).cuda()
        slots = cache.arena.slots
        if self.direction == "store":
            slots[self.slots] = 0xDB
        else:
            # Other bytes each time, or a load that does nothing would be right the second time.
            words = next(cache.chances).integers(0, 2**63, (JOB_BLOCKS, cache.block_bytes // 8))
            slots[self.slots] = words.view(np.uint8)
        torch.cuda.synchronize()
        run([self])
        found = cache.memory[:, ids].permute(1, 0, 2).contiguous().cpu().numpy()
        return bool(np.array_equal(found.view(np.uint8).reshape(JOB_BLOCKS, -1), slots[self.slots]))


def run(jobs: list[Job]) -> None:
    """Submit jobs and poll until they end. A wait would sleep past the end."""
    tickets = [job.submit() for job in jobs]
    for ticket in tickets:
        while not ticket.poll():
            pass
        if ticket.error is not None:
            raise ticket.error


def measure(cache: Cache, num_turns: int, log: Log) -> list[Row]:
    """Add a row for each direction and kind of ids and slots, and return the rows."""
    rows = []
    for shuffled, scattered in ((False, False), (True, False), (True, True)):
        by_direction = {
            direction: Job(cache, direction, shuffled=shuffled, scattered=scattered)
            for direction in ("store", "load")
        }
        for direction in ("store", "load", "both"):
            jobs = list(by_direction.values()) if direction == "both" else [by_direction[direction]]
            is_right = all(job.is_right() for job in jobs)
            for job in jobs:
                job.cpu_s.clear()
            wall_s = seconds(lambda jobs=jobs: run(jobs), num_turns)  # type: ignore[misc]
            num_bytes = len(jobs) * JOB_BLOCKS * cache.block_bytes
            rows.append(
                {
                    "part": "moves",
                    "fragment_kib": cache.fragment_bytes >> 10,
                    "layers": cache.num_layers,
                    "direction": direction,
                    "ids": "shuffled" if shuffled else "sequential",
                    "slots": "scattered" if scattered else "runs",
                    "gb_per_s": num_bytes / 1e9 / wall_s,
                    "submit_cpu_ms": 1e3 * statistics.median(s for job in jobs for s in job.cpu_s),
                    "verified": is_right,
                }
            )
            log.add(rows[-1])
    return rows
