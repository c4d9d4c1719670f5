"""The worker half of a disk before a shared store: one rank's slot file and connections.

Each demote goes to both. A promote reads the file, and asks the store for what the file lacks. The
file may keep what the store brought, and the last blocks before the end go to the file alone.

How a wrong block could be served, and what prevents it:

- A block from before a reset: the salt and the number of the generation come in one order.
  `BothTier.renew` takes both, and stops what would still be kept in the file.
- A store that goes on before the file has forgotten: a rank confirms a new generation when it is
  durable, or when the file has failed. A file that has failed is neither read nor written again.
- A rank keeps a block that the others did not keep: such a slot does not count after a restart,
  because the numbers of their last writes differ (`tiers.warm`).
- What either tier could do wrong alone: `disk_worker`, `shared_worker`, `tiers.both`.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Final

from kvstow.tiers import BothTier, SlotTier, TierTicket
from kvstow.tiers.budget import Budget
from kvstow.tiers.runner import TierRunner
from kvstow.tiers.shared import of_shared
from kvstow.transfer import HostArena
from kvstow.vllm.below.disk_worker import DiskWorker, Place
from kvstow.vllm.below.lower_worker import Counted
from kvstow.vllm.below.shared_worker import Membership, StorePart, opened
from kvstow.vllm.messages import LowerJob, LowerOrders, LowerReport
from kvstow.vllm.options import Options


class BothWorker(DiskWorker):
    """The slot file of one rank, its connections to the store, and the jobs on both.

    Attributes:
        tier: the file before the store.
    """

    tier: BothTier

    def __init__(  # noqa: PLR0913 - each keyword by its name
        self,
        place: Place,
        member: Membership,
        options: Options,
        arena: HostArena,
        *,
        rank: int,
        slot_bytes: Sequence[int],
        max_write_bytes_per_s: int | None,
    ) -> None:
        """Open the file and the store.

        Args:
            place: the file.
            member: whose blocks this rank puts into the store.
            options: the user's options.
            arena: the host memory.
            rank: this worker's number in its engine.
            slot_bytes: per group, the bytes of a host slot that a block of the group fills.
            max_write_bytes_per_s: the most bytes per second into this file; None for no bound.

        Raises:
            ConfigError: as `DiskWorker` and `SharedWorker`.
            StateError: another process has the file open.
        """
        self._store_part: Final = StorePart(member, arena, rank=rank, slot_bytes=slot_bytes)
        self._budget: Final = Budget(max_write_bytes_per_s)
        self._store: Final = opened(options.store, arena, member.fingerprint)
        self._of_store: Final = Counted(self._store)
        try:
            super().__init__(
                place,
                options,
                arena,
                rank=rank,
                slot_bytes=slot_bytes,
                # The store has half of it.
                timeout_s=min(2 * options.shared_timeout_s, options.load_timeout_s),
            )
        except BaseException:
            self._store.close()
            raise

    def _over(self, file: SlotTier) -> BothTier:
        return BothTier(file, self._store, may_keep=self._may_keep)

    def _may_keep(self, num_blocks: int) -> int:
        """Return how many blocks from the store the file may keep: demotes come first."""
        slot_bytes = self.tier.slot_bytes
        self._budget.num_blocks(slot_bytes, monotonic())  # which adds what it has earned
        return self._budget.take(num_blocks, slot_bytes)

    def take(self, orders: LowerOrders) -> None:
        """Begin a step's jobs, and what else the scheduler half asks for."""
        orders = self._store_part.prepared(orders, self._store)
        for job in orders.jobs:
            if job.direction == "demote":
                self._budget.spend(len(job.blocks) * self.tier.slot_bytes)
        super().take(orders)

    def _renew(self, orders: LowerOrders) -> TierTicket:
        return self.tier.renew(self._store_part.namespace(orders.salt))

    def _has_renewed(self) -> bool:
        """Whether nothing from before the last new generation can be read."""
        has_ended = self._renewal is not None and self._renewal.poll()
        return super()._has_renewed() or (has_ended and self.file.mode == "off")

    def _checked(self, job: LowerJob, ok: list[bool]) -> list[bool]:
        return self._store_part.of_whole_job(job, super()._checked(job, ok))

    def report(self, *, is_asked: bool) -> LowerReport | None:
        """Return what has happened since the last report; see `LowerWorker.report`."""
        report = super().report(is_asked=is_asked)
        if report is not None:
            report.halves = self.file.stats(), self._store.stats()
        return report

    def _new_report(self) -> LowerReport:
        return self._store_part.add_to(super()._new_report())

    def counted(self) -> dict[str, int]:
        """Return what has been counted since the last call, by the keys of the metrics."""
        return super().counted() | of_shared(self._of_store.news())

    def _flush(self) -> None:
        """Write what only the host has into the file. A slow store would take the time for it."""
        of_both, self._runner = self._runner, TierRunner(self.file)
        try:
            super()._flush()
        finally:
            self._runner = of_both
