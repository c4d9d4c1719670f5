"""The halves of a connector that only observes: no memory, no copies, and no answer changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvstow.transfer.mover import Direction
from kvstow.vllm.messages import StepJobs, StepReports
from kvstow.vllm.options import Options
from kvstow.vllm.weights import WeightsVersion
from kvstow.vllm.worker import WorkerHalf

if TYPE_CHECKING:
    import torch


class IdleScheduler:
    """Has the calls that the connector makes to a `SchedulerHalf`, and no host tier.

    Attributes:
        num_host_blocks: blocks of the tier that there would be; 0 until all ranks have reported.
    """

    offload = None

    def __init__(self, options: Options, world_size: int) -> None:
        self._options = options
        self._weights = WeightsVersion(options.weights_version_path)
        self._world_size = world_size
        self._capacities: dict[int, int] = {}
        self.num_host_blocks = 0

    def bind(self, manager: KVCacheManager) -> None:
        """Do nothing: no job holds a block."""

    def lookup(self, request: Request, num_local_tokens: int) -> int:
        """Return 0: there is no tier."""
        return 0

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Do nothing: there is no load."""

    def build(self, scheduled: SchedulerOutput) -> StepJobs:
        """Return no jobs, and ask for the capacity until it is known."""
        return StepJobs(asks_capacity=not self.num_host_blocks)

    def processed(self, output: KVConnectorOutput) -> None:
        """Take the capacities that ranks report."""
        reports = output.kv_connector_worker_meta
        if isinstance(reports, StepReports) and not self.num_host_blocks:
            self._capacities.update(reports.capacities)
            if len(self._capacities) == self._world_size:
                self.num_host_blocks = min(self._capacities.values())

    def finished(self, request: Request) -> None:
        """Do nothing: there is no store."""

    def may_rest(self) -> bool:
        """Return True: there is nothing to wait for."""
        return True

    def holds_freed_blocks(self) -> bool:
        """Return False: no job holds a block."""
        return False

    def reset(self) -> bool:
        """Return whether a tier would keep its content."""
        return self._options.preserve_on_sleep and not self._weights.changed(remember=True)

    def stats(self) -> dict[str, int]:
        """Return nothing: there is no tier."""
        return {}

    def take_events(self) -> tuple[()]:
        """Return nothing: no block is stored."""
        return ()

    take_transfer_events = take_events

    def close(self) -> None:
        """Do nothing: there are no jobs."""


class IdleWorker(WorkerHalf):
    """A worker half that gets no jobs. It reports the blocks of the tier that there would be."""

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Map no host memory: nothing is copied."""

    def begin(self, direction: Direction) -> None:
        """Do nothing: there are no jobs."""

    def stats(self) -> None:
        """Return nothing: nothing is copied."""
