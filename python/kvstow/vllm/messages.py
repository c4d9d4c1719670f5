"""The messages between the two halves of the connector, one each way per engine step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvstow import Job, TierJob
from kvstow.tiers import SlotRecords, TierBlocks, TierStats
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
class LowerJob:
    """One demote or promote: `host_slots[i]` to or from the place of block i in the lower tier."""

    job_id: int
    direction: Literal["demote", "promote"]
    host_slots: npt.NDArray[np.int32]
    blocks: TierBlocks

    @classmethod
    def of(cls, job: TierJob, sequence: int) -> LowerJob:
        """Return what a worker needs of a job; `sequence` is the number of the write."""
        blocks = TierBlocks(job.hashes, job.groups, job.parents, job.disk_slots, sequence)
        return cls(job.job_id, job.direction, job.host_slots, blocks)


@dataclass
class LowerOrders:
    """Scheduler to workers: what the tier below the host is to do in this step.

    Attributes:
        jobs: the demotes and promotes to begin.
        records_from: of a disk: the first slot whose record is wanted; -1 for none.
        renewal: of a disk: number of the generation that each rank is to have drawn; 0 for none.
        salt: of a shared store: what the names of these jobs' blocks depend on.
        last: of a disk: the demotes to carry out when the server ends, the most important first.
            None: those of an earlier step stand.
    """

    jobs: list[LowerJob] = field(default_factory=list)
    records_from: int = -1
    renewal: int = 0
    salt: bytes = b""
    last: list[LowerJob] | None = None


@dataclass
class LowerReport:
    """A worker to the scheduler: the state of its part of the tier below the host.

    Attributes:
        slot_bytes: bytes of a slot.
        mode: what the tier still does.
        num_slots: of a disk: slots of the file.
        is_warm: of a disk: whether the next server may find its blocks.
        fingerprint: of a shared store: digest of what the bytes of this rank's blocks depend on.
        is_private: of a shared store: other servers may have other bytes under this fingerprint.
        ends: demotes and promotes that have ended, as (job id, success of each block).
        records: of a disk: a slot, and the records of an earlier server from this slot on.
        renewal: of a disk: number of the generation that is durable; 0 for no news.
        halves: of a disk before a shared store: what each of the two has done so far.
    """

    slot_bytes: int
    mode: Mode
    num_slots: int = 0
    is_warm: bool = False
    fingerprint: bytes = b""
    is_private: bool = False
    ends: list[tuple[int, list[bool]]] = field(default_factory=list)
    records: tuple[int, SlotRecords] | None = None
    renewal: int = 0
    halves: tuple[TierStats, TierStats] | None = None


@dataclass
class StepJobs(KVConnectorMetadata):
    """Scheduler to workers: the jobs to begin in this step, and the failed loads to report.

    Attributes:
        loads: jobs that copy to the device.
        stores: jobs that copy to the host.
        failed_request_ids: requests whose loads have failed.
        asks_capacity: whether each rank is to report its number of host blocks.
        below: what the tier below the host is to do; None for nothing.
    """

    loads: Sequence[Copies] = ()
    stores: Sequence[Copies] = ()
    failed_request_ids: Sequence[str] = ()
    asks_capacity: bool = False
    below: LowerOrders | None = None


NO_JOBS: Final = StepJobs()
"""The message of a step in which the workers begin nothing. It never changes."""


@dataclass
class StepReports(KVConnectorWorkerMetadata):
    """Workers to scheduler: the progress of the jobs.

    Attributes:
        reports: jobs that have ended, as (job id, rank, success). Success is one bool per block of
            the job if a check found damaged host slots.
        released: stores that no longer need their blocks, once per rank: it has read them and its
            copy has not ended, or another rank stores them for it.
        capacities: the number of host blocks by rank, if the step's jobs ask for it.
        below: the state of each rank's part of the tier below the host, if there is news of it.
    """

    reports: list[tuple[int, int, bool | list[bool]]] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    capacities: dict[int, int] = field(default_factory=dict)
    below: dict[int, LowerReport] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReports:
        """Return the reports of both."""
        assert isinstance(other, StepReports)
        return StepReports(
            self.reports + other.reports,
            self.released + other.released,
            self.capacities | other.capacities,
            self.below | other.below,
        )
