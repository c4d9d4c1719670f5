"""What the two halves of the connector send each other, once per engine step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvstow import Job


@dataclass(frozen=True)
class Copies:
    """One job: `block_ids[i]` to or from `host_slots[i]`; group g from `offsets[g]` on."""

    job_id: int
    block_ids: npt.NDArray[np.int32]
    host_slots: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int32]

    @classmethod
    def of(cls, job: Job) -> Copies:
        """What a worker needs to know of a job."""
        return cls(job.job_id, job.block_ids, job.host_slots, job.offsets)


@dataclass
class StepJobs(KVConnectorMetadata):
    """Scheduler to workers: what to begin in this step, and which requests to report as failed.

    Attributes:
        loads: jobs that copy to the device.
        stores: jobs that copy to the host.
        failed_request_ids: requests whose loads have failed.
        asks_capacity: the scheduler half does not know yet how many host blocks each rank has.
    """

    loads: list[Copies] = field(default_factory=list)
    stores: list[Copies] = field(default_factory=list)
    failed_request_ids: list[str] = field(default_factory=list)
    asks_capacity: bool = False


@dataclass
class StepReports(KVConnectorWorkerMetadata):
    """Workers to scheduler: how far jobs have come.

    Attributes:
        reports: jobs that have ended, as (job id, rank, whether it went well); the last is one bool
            for each block of the job if a check found host slots damaged.
        released: stores that read their blocks no more though they have not ended, by each rank.
        capacities: by rank, how many host blocks it has; only where the step's jobs ask for it.
    """

    reports: list[tuple[int, int, bool | list[bool]]] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    capacities: dict[int, int] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReports:
        """The reports of both."""
        assert isinstance(other, StepReports)
        return StepReports(
            self.reports + other.reports,
            self.released + other.released,
            self.capacities | other.capacities,
        )
