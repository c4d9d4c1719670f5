"""Ranks that hold equal KV: worker halves in processes of their own, beside a scheduler half.

```
this process      Ranks.call ----------- name, arguments -----------> Rank, in its own process
(scheduler half)             <---------- result or error -----------
                             <-- object that Replicas.exchange gives to all, and all of them -->
```
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from tests.vllm.halves import FULL, NUM_BLOCKS, PAGE_BYTES, Scheduler, Step, cache_config
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvstow import TransferError
from kvstow.transfer import HostEvent
from kvstow.transfer.shared import SharedMemory
from kvstow.transfer.ticket import HostTicket
from kvstow.vllm.messages import StepJobs, StepReports
from kvstow.vllm.model import Model
from kvstow.vllm.options import Options
from kvstow.vllm.replicas import Replicas
from kvstow.vllm.worker import WorkerHalf

LONG_S = 60


class Held:
    """A mover whose stores wait for an event; `hasty`, they are reported before it."""

    def __init__(self, mover: Any, event: HostEvent, *, hasty: bool) -> None:
        self.mover, self.event, self.hasty = mover, event, hasty
        self.tickets: list[Any] = []

    def store(self, ids: Any, slots: Any, *, after: Any) -> Any:
        ticket = self.mover.store(ids, slots, after=self.event)
        self.tickets.append(ticket)
        if self.hasty:
            ticket = HostTicket()
            ticket.end(None)
        return ticket

    def __getattr__(self, name: str) -> Any:
        return getattr(self.mover, name)


class Failing(Held):
    """A mover whose stores fail without a copy; `hasty`, they are reported as done."""

    def store(self, ids: Any, slots: Any, *, after: Any) -> Any:
        ticket = HostTicket()
        ticket.end(None if self.hasty else TransferError("injected"))
        return ticket


class Rank:
    """A worker half with the device memory of its rank. `Ranks.call` calls its methods."""

    def __init__(self, index: int, num: int, options: Options, link: Connection) -> None:
        def exchange(own: Any) -> list[Any]:
            link.send(("exchange", own))
            shared: list[Any] = link.recv()
            return shared

        self.worker = WorkerHalf(
            Model.of(cache_config(FULL)),
            options,
            rank=index,
            world_size=num,
            num_local_ranks=num,
            replicas=Replicas(num, index, exchange),
        )
        self.device = torch.zeros(NUM_BLOCKS * PAGE_BYTES, dtype=torch.uint8)
        self.event = HostEvent()

    def register(self) -> int:
        self.worker.register({"0": self.device})
        return self.worker._num_host_blocks

    def forbid(self, what: str) -> None:
        """Let the system refuse to create or to open the memory, or to map so much."""

        def refused(*args: Any) -> Any:
            raise PermissionError(1, f"injected: {what}")

        if what == "map":
            self.worker._free_bytes = 1
        else:
            setattr(SharedMemory, what, refused)

    def fill(self, blocks: Sequence[int], value: int) -> None:
        rows = self.device.view(NUM_BLOCKS, PAGE_BYTES)
        pattern = torch.arange(PAGE_BYTES, dtype=torch.int64)
        for block in blocks:
            rows[block] = ((pattern * 7 + block * 13 + value) % 251).to(torch.uint8)

    def clear(self) -> None:
        self.device.fill_(255)

    def read(self, blocks: Sequence[int]) -> list[bytes]:
        rows = self.device.view(NUM_BLOCKS, PAGE_BYTES)
        return [rows[block].numpy().tobytes() for block in blocks]

    def step(self, jobs: StepJobs) -> StepReports | None:
        self.worker.bind(jobs)
        self.worker.begin("load")
        self.worker.begin("store")
        return self.worker.reports()

    def hold(self, *, hasty: bool = False) -> None:
        self.worker.movers = [Held(self.worker.movers[0], self.event, hasty=hasty)]  # type: ignore[list-item]

    def fail(self, *, hasty: bool = False) -> None:
        self.worker.movers = [Failing(self.worker.movers[0], self.event, hasty=hasty)]  # type: ignore[list-item]

    def hold_loads(self) -> None:
        mover = self.worker.movers[0]
        load = mover.load
        mover.load = lambda slots, ids, after: load(slots, ids, after=self.event)  # type: ignore[method-assign, misc]

    def release(self) -> None:
        """Let held copies go on, and wait until they are over."""
        self.event.set()
        tickets = [ticket for job in self.worker._running.values() for ticket in job.tickets]
        for mover in self.worker.movers:
            tickets += mover.tickets if isinstance(mover, Held) else []
        for ticket in tickets:
            ticket.wait(LONG_S)

    def damage(self, slot: int) -> None:
        assert self.worker.arena is not None
        self.worker.arena.slots[slot, 5] ^= 1

    def host(self, slots: Sequence[int]) -> list[bytes]:
        assert self.worker.arena is not None
        return [self.worker.arena.slots[slot].tobytes() for slot in slots]

    def stats(self) -> dict[str, Any]:
        stats = self.worker.stats()
        return {} if stats is None else stats.data

    def sleep(self) -> None:
        self.worker.unregister()

    def wake(self) -> None:
        self.worker.restore()

    def mapped(self) -> list[int]:
        """Return the inodes of the shared memory that this process maps."""
        with open("/proc/self/maps") as maps:
            return [int(line.split()[4]) for line in maps if "kvstow-host-tier" in line]

    def close(self) -> None:
        self.worker.close()


def _serve(index: int, num: int, options: Options, link: Connection) -> None:
    torch.set_num_threads(1)
    rank = Rank(index, num, options, link)
    while True:
        name, args, settings = link.recv()
        try:
            result = getattr(rank, name)(*args, **settings)
        except Exception as error:
            result = error
        link.send(("result", result))


class Ranks:
    """The processes."""

    def __init__(self, num: int, **options: Any) -> None:
        # Not forks of this process: torch hangs in them once it has computed here.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self.links, self.processes = [], []
        for index in range(num):
            link, other = context.Pipe()
            process = context.Process(
                target=_serve, args=(index, num, Options(**options), other), daemon=True
            )
            process.start()
            other.close()
            self.links.append(link)
            self.processes.append(process)

    def one(self, index: int, name: str, *args: Any, **settings: Any) -> Any:
        return self.call(name, *args, among=[index], **settings)[0]

    def call(
        self, name: str, *args: Any, among: Sequence[int] | None = None, **settings: Any
    ) -> list[Any]:
        """Call a method on ranks at once, and return their results in order."""
        links = [self.links[index] for index in among or range(len(self.links))]
        for link in links:
            link.send((name, args, settings))
        while True:
            for link in links:
                assert link.poll(LONG_S), f"{name} hangs"
            answers = [link.recv() for link in links]
            kinds = {kind for kind, _ in answers}
            assert len(kinds) == 1, f"not every rank exchanges: {answers}"
            results = [value for _, value in answers]
            if kinds == {"result"}:
                for error in results:
                    if isinstance(error, Exception):
                        raise error
                return results
            for link in links:
                link.send(results)

    def kill(self, index: int) -> None:
        self.processes[index].kill()
        self.processes[index].join(LONG_S)

    def close(self) -> None:
        for index in range(len(self.processes)):
            self.kill(index)


class Server(Scheduler):
    """A scheduler half whose jobs the ranks carry out."""

    def __init__(self, num: int, *, num_host_blocks: int = 32, **options: Any) -> None:
        self.ranks = Ranks(num, **({"num_cpu_blocks": num_host_blocks} | options))
        super().__init__(FULL, world_size=num, num_host_blocks=None, **options)
        self.alive = list(range(num))

    def begin(self) -> None:
        self.ranks.call("register")
        self.run()
        assert self.half.offload is not None

    def run(self, *requests: Request) -> set[str]:
        """Run a step on all ranks that live."""
        scheduled = {r.request_id: r.num_tokens - r.num_computed_tokens for r in requests}
        self.jobs = self.half.build(Step(scheduled))
        for request in requests:
            request.num_computed_tokens = request.num_tokens
        meta = StepReports()
        for reports in self.ranks.call("step", self.jobs, among=self.alive):
            meta = meta if reports is None else meta.aggregate(reports)
        output = KVConnectorOutput(kv_connector_worker_meta=meta)
        self.half.processed(output)
        return output.finished_recving or set()

    def settle(self, num_steps: int = 200) -> None:
        for _ in range(num_steps):
            if not self.half.transfers.in_flight:
                return
            self.run()
        raise AssertionError("jobs do not end")

    def compute(self, name: str, num_tokens: int = 100, **settings: Any) -> list[int]:
        """Compute and finish a request without a hit, and return its full blocks."""
        request = self.request(name, num_tokens, **settings)
        assert self.admit(request) == 0
        ids = [block.block_id for block in self.manager.get_blocks(name).blocks[0]]
        ids = ids[: num_tokens // FULL.block_size]
        for index in self.alive:
            # Each rank computes other bytes, so that the test sees whose bytes come back.
            self.ranks.one(index, "fill", ids, index * 50)
        self.run(request)
        self.finish(request)
        self.run()
        return ids

    def forget(self) -> None:
        """Drop everything from the device."""
        assert self.manager.reset_prefix_cache()
        self.ranks.call("clear", among=self.alive)

    def load(self, name: str, num_tokens: int = 100) -> list[int]:
        """Admit a request, plan its load, and return its blocks; none without a hit."""
        request = self.request(name, num_tokens)
        found = self.admit(request)
        blocks = self.manager.get_blocks(name).blocks[0]
        return [block.block_id for block in blocks[: found // FULL.block_size]]


def expected(blocks: Sequence[int], index: int) -> list[bytes]:
    """Return what rank `index` computes in these blocks."""
    pattern = np.arange(PAGE_BYTES, dtype=np.int64)
    return [((pattern * 7 + b * 13 + index * 50) % 251).astype(np.uint8).tobytes() for b in blocks]


@contextmanager
def server(num: int = 2, **options: Any) -> Iterator[Server]:
    made = Server(num, **options)
    try:
        yield made
    finally:
        made.ranks.close()
