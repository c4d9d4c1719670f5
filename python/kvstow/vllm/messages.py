"""The messages between the two halves of the connector, one each way per engine step."""

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
    """One job: copies `block_ids[i]` to or from `host_slots[i]`. Group g begins at `offsets[g]`."""

    job_id: int
    block_ids: npt.NDArray[np.int32]
    host_slots: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int32]

    @classmethod
    def of(cls, job: Job) -> Copies:
        """Return what a worker needs of a job."""
        return cls(job.job_id, job.block_ids, job.host_slots, job.offsets)


@dataclass
class StepJobs(KVConnectorMetadata):
    """Scheduler to workers: the jobs to begin in this step, and the failed loads to report.

    Attributes:
        loads: jobs that copy to the device.
        stores: jobs that copy to the host.
        failed_request_ids: requests whose loads have failed.
        asks_capacity: whether each rank is to report its number of host blocks.
    """

    loads: list[Copies] = field(default_factory=list)
    stores: list[Copies] = field(default_factory=list)
    failed_request_ids: list[str] = field(default_factory=list)
    asks_capacity: bool = False


@dataclass
class StepReports(KVConnectorWorkerMetadata):
    """Workers to scheduler: the progress of the jobs.

    Attributes:
        reports: jobs that have ended, as (job id, rank, success). Success is one bool per block of
            the job if a check found damaged host slots.
        released: stores that no longer need their blocks, once per rank: it has read them and its
            copy has not ended, or another rank stores them for it.
        capacities: the number of host blocks by rank, if the step's jobs ask for it.
    """

    reports: list[tuple[int, int, bool | list[bool]]] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    capacities: dict[int, int] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReports:
        """Return the reports of both."""
        assert isinstance(other, StepReports)
        return StepReports(
            self.reports + other.reports,
            self.released + other.released,
            self.capacities | other.capacities,
        )
