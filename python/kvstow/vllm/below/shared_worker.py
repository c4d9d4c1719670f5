"""The worker half of the shared tier: one rank's connections to the store.

How a wrong block could be served, and what prevents it:

- A block of another model, rank or layout: its name and its frame have the fingerprint
  (`identity`).
- A block of other weights, or of hashes with another start: each step's orders have the salt of the
  names. The tier keeps for each job the name that it began with, so a late put ends under the old
  one.
- Memory of this host that has changed since the block was stored, with `verify` on a GPU: such a
  block is not put, because another server may read it before it is dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvstow import KvstowError
from kvstow.tiers import Fingerprint, SharedStore, SharedTier
from kvstow.tiers.namespace import salted
from kvstow.tiers.shared import of_shared
from kvstow.transfer import HostArena
from kvstow.transfer.verified import have_device_sums
from kvstow.vllm.below.lower_worker import LowerWorker, some_of
from kvstow.vllm.messages import LowerJob, LowerOrders, LowerReport
from kvstow.vllm.options import Options, of_shared_options

logger = logging.getLogger("vllm." + __name__)


@dataclass(frozen=True)
class Membership:
    """Whose blocks a rank puts into the store.

    Attributes:
        fingerprint: of this rank's blocks.
        why_private: why no other server may read them; empty if servers of one model may.
    """

    fingerprint: Fingerprint
    why_private: str = ""


class StorePart:
    """What a rank does for the blocks that it puts into a store: their names, and what is put.

    Attributes:
        salt: of the names that the tier of the store uses now.
    """

    def __init__(
        self, member: Membership, arena: HostArena, *, rank: int, slot_bytes: Sequence[int]
    ) -> None:
        """Begin without a salt; see `SharedWorker`."""
        self.salt = b""
        self._member, self._arena, self._slot_bytes = member, arena, slot_bytes
        # By demote: which blocks the host has not damaged, if it has damaged some.
        self._sounds: dict[int, npt.NDArray[np.bool_]] = {}
        if member.why_private:
            logger.warning(
                "kvstow: rank %d shares no block with other servers, because %s",
                rank,
                member.why_private,
            )

    def namespace(self, salt: bytes) -> bytes:
        """Return what the names of this rank's blocks begin with."""
        return salted(self._member.fingerprint.digest, salt)

    def prepared(self, orders: LowerOrders, tier: SharedTier) -> LowerOrders:
        """Let the tier use the names of a step's orders, and leave out what is not to be put."""
        if orders.salt != self.salt:
            self.salt = orders.salt
            tier.rename(self.namespace(orders.salt))
        return replace(orders, jobs=[self._sound(job) for job in orders.jobs])

    def _sound(self, job: LowerJob) -> LowerJob:
        """Leave out of a demote what the sums of kernels show to be damaged."""
        if job.direction == "promote" or not self._arena.has_device_sums:
            return job
        own = np.array(self._slot_bytes)[job.blocks.groups]
        at = np.flatnonzero(own > 0)
        slots = job.host_slots[at].astype(np.int64)
        is_sound = np.ones(len(job.host_slots), np.bool_)
        is_sound[at] = have_device_sums(self._arena, slots, own[at].tolist())
        if is_sound.all():
            return job
        self._sounds[job.job_id] = is_sound
        left = np.flatnonzero(is_sound)
        return replace(job, host_slots=job.host_slots[left], blocks=some_of(job.blocks, left))

    def of_whole_job(self, job: LowerJob, ok: list[bool]) -> list[bool]:
        """Return which blocks of a job count, those that were left out included."""
        is_sound = self._sounds.pop(job.job_id, None)
        if is_sound is None:
            return ok
        is_sound[is_sound] = ok
        every: list[bool] = is_sound.tolist()
        return every

    def add_to(self, report: LowerReport) -> LowerReport:
        """Return a report that also says whose blocks they are."""
        return replace(
            report,
            fingerprint=self._member.fingerprint.digest,
            is_private=bool(self._member.why_private),
        )


class SharedWorker(LowerWorker):
    """The connections of one rank to the store, and the jobs on it.

    Attributes:
        tier: the tier. It connects when the first job comes.
    """

    tier: SharedTier

    def __init__(
        self,
        member: Membership,
        options: Options,
        arena: HostArena,
        *,
        rank: int,
        slot_bytes: Sequence[int],
    ) -> None:
        """Open the tier.

        Args:
            member: whose blocks.
            options: the user's options.
            arena: the host memory.
            rank: this worker's number in its engine.
            slot_bytes: per group, the bytes of a host slot that a block of the group fills.

        Raises:
            ConfigError: an option does not fit, or a library is missing.
        """
        tier = opened(options.store, arena, member.fingerprint)
        self._store_part = StorePart(member, arena, rank=rank, slot_bytes=slot_bytes)
        timeout_s = min(options.shared_timeout_s, options.load_timeout_s)
        super().__init__(tier, "shared", rank=rank, slot_bytes=slot_bytes, timeout_s=timeout_s)

    def take(self, orders: LowerOrders) -> None:
        """Begin a step's jobs, under the names that the scheduler half has chosen."""
        super().take(self._store_part.prepared(orders, self.tier))

    def _checked(self, job: LowerJob, ok: list[bool]) -> list[bool]:
        return self._store_part.of_whole_job(job, super()._checked(job, ok))

    def counted(self) -> dict[str, int]:
        """Return what has been counted since the last call, by the keys of the metrics."""
        return of_shared(super().counted())

    def _new_report(self) -> LowerReport:
        return self._store_part.add_to(super()._new_report())


def opened(store: SharedStore, arena: HostArena, fingerprint: Fingerprint) -> SharedTier:
    """Open the store, with errors that name the connector's options.

    Raises:
        ConfigError: an option does not fit, or a library is missing.
    """
    try:
        return store.open(arena, fingerprint)
    except KvstowError as error:
        raise type(error)(of_shared_options(error)) from error
