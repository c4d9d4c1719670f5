"""Both halves with a tier below the host, in one process, over memory whose bytes tests can check.

The content of a device block follows from its rank, its key and the version of the weights. So a
load of a foreign, stale or torn block is seen.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tests.vllm.engine import IDLE_S, REST_S
from tests.vllm.halves import (
    BLOCK_SIZE,
    FULL,
    NUM_BLOCKS,
    PAGE_BYTES,
    Scheduler,
    Step,
    cache_config,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvstow.tiers import Fingerprint
from kvstow.vllm.below.disk import DiskTier
from kvstow.vllm.messages import StepReports
from kvstow.vllm.model import Model
from kvstow.vllm.options import Options
from kvstow.vllm.worker import WorkerHalf

Bytes = npt.NDArray[np.uint8]


@dataclass
class Whose:
    """Stands for `Identity`, without vLLM's configuration."""

    path: str
    weights: str
    rank: int
    is_warm: bool = True

    @property
    def why_private(self) -> str:
        return "" if self.is_warm else "the test says so"

    def fingerprint(self, model: Model, kv_caches: Any) -> Fingerprint:
        return Fingerprint({"weights": self.weights, "rank": self.rank})


@dataclass
class Rank:
    """A worker half and its device memory."""

    worker: WorkerHalf
    device: torch.Tensor

    @property
    def blocks(self) -> Bytes:
        rows: Bytes = self.device.view(NUM_BLOCKS, -1).numpy()
        return rows


@contextmanager
def folder_on_disk() -> Iterator[Path]:
    """Yield a folder that is not in memory, which the disk tier refuses."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


class Server:
    """The scheduler half, and a worker half per rank."""

    def __init__(
        self,
        folder: Path,
        *specs: Any,
        num_ranks: int = 1,
        num_host_blocks: int = 12,
        num_disk_slots: int = 100,
        weights: str = "v1",
        is_warm: bool = True,
        **more: Any,
    ) -> None:
        specs = specs or (FULL,)
        disk = {
            "disk_path": str(folder),
            "disk_bytes_to_use": num_ranks * (4096 + num_disk_slots * (4096 + 128)),
        }
        options: dict[str, Any] = {
            "num_cpu_blocks": num_host_blocks,
            "min_promote_tokens": 0,
            **({} if "shared" in more else disk),
            **more,
        }
        self.weights = weights
        self.scheduler = Scheduler(
            *specs, world_size=num_ranks, num_host_blocks=None, retention=None, **options
        )
        self.half = self.scheduler.half
        config = cache_config(*specs)
        self.ranks = []
        for rank in range(num_ranks):
            worker = WorkerHalf(
                Model.of(config),
                Options(**options),
                rank=rank,
                world_size=num_ranks,
                num_local_ranks=num_ranks,
                identity=Whose(str(folder / f"rank{rank}"), weights, rank, is_warm),  # type: ignore[arg-type]
            )
            device = torch.zeros(NUM_BLOCKS * PAGE_BYTES * len(specs), dtype=torch.uint8)
            views = device.view(len(specs), -1)
            self.ranks.append(Rank(worker, device))
            storage = [torch.empty(0, dtype=torch.uint8) for _ in specs]
            for at in range(len(specs)):
                storage[at].set_(device.untyped_storage(), 0, (views.shape[1],))
            worker.register({str(at): storage[at] for at in range(len(specs))})
        self.reports: list[StepReports] = []

    @property
    def disk(self) -> DiskTier:
        assert isinstance(self.half.tier.below, DiskTier)
        return self.half.tier.below

    # -- steps ----------------------------------------------------------------------------------

    def step(self, *requests: Request) -> set[str]:
        """Compute the rest of these requests; return the requests whose loads have landed."""
        scheduled = {r.request_id: r.num_tokens - r.num_computed_tokens for r in requests}
        jobs = self.half.build(Step(scheduled))
        news = []
        for at, rank in enumerate(self.ranks):
            rank.worker.bind(copy.deepcopy(jobs))
            rank.worker.begin("load")
            for request in requests:
                self.compute(at, request)
            rank.worker.begin("store")
            news.append(rank.worker.reports() or StepReports())
        for request in requests:
            request.num_computed_tokens = request.num_tokens
        output = KVConnectorOutput(kv_connector_worker_meta=reduce(StepReports.aggregate, news))
        self.half.processed(output)
        if self.half.offload is not None:
            self.half.offload.check()
        return output.finished_recving or set()

    def settle(self) -> None:
        """Step until nothing is under way."""
        end_s = time.monotonic() + REST_S
        while not self.half.may_rest():
            self.step()
            assert time.monotonic() < end_s, "the connector does not come to rest"

    # -- bytes ----------------------------------------------------------------------------------

    def content(self, rank: int, block_hash: bytes) -> Bytes:
        """Return what a rank's block of a key has under the present weights."""
        seed = [rank, *self.weights.encode(), *block_hash]
        content: Bytes = np.random.default_rng(seed).integers(0, 256, PAGE_BYTES, dtype=np.uint8)
        return content

    def compute(self, rank: int, request: Request) -> None:
        (table,) = self.scheduler.manager.get_blocks(request.request_id).blocks
        first = request.num_computed_tokens // BLOCK_SIZE
        for index in range(first, request.num_tokens // BLOCK_SIZE):
            block_hash = request.block_hashes[index]
            self.ranks[rank].blocks[table[index].block_id] = self.content(rank, block_hash)

    def wrong_blocks(self, request: Request) -> list[tuple[int, int]]:
        """Return the blocks of a request that do not have their content, as (rank, index)."""
        (table,) = self.scheduler.manager.get_blocks(request.request_id).blocks
        return [
            (rank, index)
            for rank, each in enumerate(self.ranks)
            for index in range(request.num_computed_tokens // BLOCK_SIZE)
            if not np.array_equal(
                each.blocks[table[index].block_id],
                self.content(rank, request.block_hashes[index]),
            )
        ]

    # -- requests -------------------------------------------------------------------------------

    def begin(self, name: str, num_tokens: int = 100, **settings: Any) -> Request:
        return self.scheduler.request(name, num_tokens, num_shared=0, **settings)

    def serve(self, request: Request, *, settles: bool = True) -> int:
        """Look up, load, check, compute, store and finish; return the tokens that were loaded."""
        end_s = time.monotonic() + REST_S
        while True:
            hit, num_local, found = self.scheduler.look_up(request)
            if found is not None:
                break
            assert time.monotonic() < end_s, "the request waits forever"
            self.step()
            time.sleep(IDLE_S)
        self.scheduler.allocate(request, hit, num_local, found)
        if found:
            while request.request_id not in self.step():
                pass
            self.scheduler.resume(request)
        wrong = self.wrong_blocks(request)
        assert not wrong, f"wrong bytes in (rank, block) {wrong}"
        self.step(request)
        self.half.finished(request)
        self.scheduler.manager.free(request)
        if settles:
            self.settle()
        else:
            while any(each.direction == "store" for each in self.half.transfers.in_flight.values()):
                self.step()
            self.step()
        return found

    def forget(self) -> None:
        """Empty the device."""
        for rank in self.ranks:
            rank.device.fill_(255)
        assert self.scheduler.manager.reset_prefix_cache()

    def push_off_the_host(self) -> None:
        """Store other prompts, so that the host evicts what it had."""
        fill(self, *(f"other-{chr(200 + at)}" for at in range(3)))

    def stats(self) -> dict[str, int]:
        return self.half.stats()

    def close(self) -> None:
        self.half.close()
        for rank in self.ranks:
            rank.worker.close()


def fill(server: Server, *names: str) -> None:
    """Serve prompts with these names, and empty the device after each."""
    for name in names:
        server.serve(server.begin(name))
        server.forget()
