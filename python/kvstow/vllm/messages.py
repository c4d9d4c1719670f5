"""The messages between the two halves of the connector, one each way per engine step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvstow import Job, TierJob
from kvstow.tiers import SlotRecords, TierBlocks
from kvstow.tiers.tier import Mode

RECORDS_PER_STEP: Final = 16_384
"""The slots whose records a rank reports in one step."""


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


@dataclass(frozen=True)
class DiskJob:
    """One demote or promote: `host_slots[i]` to or from the slot of block i in the slot file."""

    job_id: int
    direction: Literal["demote", "promote"]
    host_slots: npt.NDArray[np.int32]
    blocks: TierBlocks

    @classmethod
    def of(cls, job: TierJob, sequence: int) -> DiskJob:
        """Return what a worker needs of a job; `sequence` is the number of the write."""
        blocks = TierBlocks(job.hashes, job.groups, job.parents, job.disk_slots, sequence)
        return cls(job.job_id, job.direction, job.host_slots, blocks)


@dataclass
class DiskOrders:
    """Scheduler to workers: what the disk tier is to do in this step.

    Attributes:
        jobs: the demotes and promotes to begin.
        records_from: the first slot whose record is wanted; -1 for none.
        renewal: number of the generation that each rank is to have drawn; 0 for none.
    """

    jobs: list[DiskJob] = field(default_factory=list)
    records_from: int = -1
    renewal: int = 0


@dataclass
class DiskReport:
    """A worker to the scheduler: the state of its slot file.

    Attributes:
        num_slots: slots of the file.
        slot_bytes: bytes of a slot.
        mode: what the file still does.
        ends: demotes and promotes that have ended, as (job id, success of each block).
        records: a slot, and the records of an earlier server from this slot on.
        renewal: number of the generation that is durable; 0 for no news.
    """

    num_slots: int
    slot_bytes: int
    mode: Mode
    ends: list[tuple[int, list[bool]]] = field(default_factory=list)
    records: tuple[int, SlotRecords] | None = None
    renewal: int = 0


@dataclass
class StepJobs(KVConnectorMetadata):
    """Scheduler to workers: the jobs to begin in this step, and the failed loads to report.

    Attributes:
        loads: jobs that copy to the device.
        stores: jobs that copy to the host.
        failed_request_ids: requests whose loads have failed.
        asks_capacity: whether each rank is to report its number of host blocks.
        disk: what the disk tier is to do; None without one.
    """

    loads: list[Copies] = field(default_factory=list)
    stores: list[Copies] = field(default_factory=list)
    failed_request_ids: list[str] = field(default_factory=list)
    asks_capacity: bool = False
    disk: DiskOrders | None = None


@dataclass
class StepReports(KVConnectorWorkerMetadata):
    """Workers to scheduler: the progress of the jobs.

    Attributes:
        reports: jobs that have ended, as (job id, rank, success). Success is one bool per block of
            the job if a check found damaged host slots.
        released: stores that no longer need their blocks, once per rank: it has read them and its
            copy has not ended, or another rank stores them for it.
        capacities: the number of host blocks by rank, if the step's jobs ask for it.
        disk: the state of the slot files, by rank, if there is news of them.
    """

    reports: list[tuple[int, int, bool | list[bool]]] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    capacities: dict[int, int] = field(default_factory=dict)
    disk: dict[int, DiskReport] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReports:
        """Return the reports of both."""
        assert isinstance(other, StepReports)
        return StepReports(
            self.reports + other.reports,
            self.released + other.released,
            self.capacities | other.capacities,
            self.disk | other.disk,
        )
