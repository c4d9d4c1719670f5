"""The worker half: runs the jobs that the scheduler half planned, and reports how they ended.

```
bind        a step's jobs, before its forward pass
begin       loads before the pass, stores after it: each group's blocks to the group's mover
reports     which jobs have ended or released their blocks, since the last call
```
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstow import ConfigError, StateError
from kvstow.memory import check_memory, free_memory
from kvstow.sizes import format_bytes
from kvstow.transfer import (
    READY,
    BlockLayout,
    CudaEvent,
    Event,
    HostArena,
    Mover,
    Ticket,
    arena_for,
    mover_for,
    outcome,
)
from kvstow.transfer.arena import shared_bytes
from kvstow.transfer.mover import Direction
from kvstow.transfer.shared import SharedMemory
from kvstow.vllm.below.both_worker import BothWorker
from kvstow.vllm.below.disk_worker import DiskWorker, Place, check_disk
from kvstow.vllm.below.lower_worker import LowerWorker
from kvstow.vllm.below.shared_worker import Membership, SharedWorker
from kvstow.vllm.identity import Identity
from kvstow.vllm.messages import Copies, StepJobs, StepReports
from kvstow.vllm.model import Model
from kvstow.vllm.options import WHERE, Options
from kvstow.vllm.replicas import Replicas
from kvstow.vllm.stats import ConnectorStats

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("vllm." + __name__)

_CONSEQUENCES: dict[Direction, str] = {
    "load": (
        "its request recomputes the blocks, or fails if kv_load_failure_policy is not recompute"
    ),
    "store": "the host tier does not get its blocks",
}


@dataclass
class _Running:
    """A job under way: one ticket for each group that it touches."""

    direction: Direction
    copies: Copies
    tickets: list[Ticket] = field(default_factory=list)
    num_bytes: int = 0
    begun: float = field(default_factory=time.monotonic)
    error: BaseException | None = None
    # Of a store: every mover has read its blocks.
    is_released: bool = False


class WorkerHalf:
    """Everything that runs beside one of vLLM's workers.

    Attributes:
        arena: this rank's part of the host tier, which ranks with equal KV share; None before
            `register` and after `close`.
        movers: one for each group that has layers on this rank. Groups that lie in the same bytes
            share a mover. Empty while vLLM sleeps.
        below: this rank's part of the tier below the host. None without one, and if another rank
            has it.
    """

    def __init__(  # noqa: PLR0913 - the rank's place among the others
        self,
        model: Model,
        options: Options,
        *,
        rank: int,
        world_size: int,
        num_local_ranks: int,
        replicas: Replicas | None = None,
        identity: Identity | None = None,
    ) -> None:
        """Wait for the KV caches (`register`).

        Args:
            model: the groups, and the bytes of their blocks.
            options: the user's options.
            rank: this worker's number in its engine.
            world_size: workers of the engine.
            num_local_ranks: workers on this machine, those of other engines included.
            replicas: the ranks with which this one may share its part of the host tier.
            identity: whose KV this rank has; None without a tier below the host.
        """
        self._model = model
        self._options = options
        self._rank = rank
        self._world_size = world_size
        self._share(replicas)
        # Read now: when this rank registers, others may have pinned their parts already, and these
        # would count twice.
        self._num_local_ranks, self._free_bytes = num_local_ranks, free_memory()
        self._identity = identity
        self.below: LowerWorker | None = None
        self.arena: HostArena | None = None
        self.movers: list[Mover] = []
        self._open: list[Mover] = []
        self._layouts: tuple[BlockLayout, ...] = ()
        self._before_step: Event | None = None
        # The step's jobs that have not begun, and what else the step asks for.
        self._left: dict[Direction, list[Copies]] = {"load": [], "store": []}
        self._failed_request_ids: set[str] = set()
        self._asks_capacity = False
        self._running: dict[int, _Running] = {}
        self._reports = StepReports()
        self._stats = ConnectorStats()

    def _share(self, replicas: Replicas | None) -> None:
        """Count the ranks that share one arena, and the blocks in it."""
        self._replicas = replicas
        self._num_sharing = 1 if replicas is None else replicas.num
        self._num_host_blocks = self._options.num_host_blocks(
            self._model.slot_stride_bytes, self._world_size, self._num_sharing
        )

    @property
    def _is_writer(self) -> bool:
        """Whether this rank stores blocks; if not, another rank stores them for it."""
        return self._replicas is None or self._replicas.is_writer

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take the device memory that vLLM has allocated, and map the host memory.

        Raises:
            ConfigError: kvstow does not support the layout or cannot reach the memory, or the
                machine has less host memory free than the tier needs.
        """
        devices = {tensor.device.type for tensor in kv_caches.values()}
        if devices not in ({"cpu"}, {"cuda"}, set()):
            raise ConfigError(
                f"the KV cache is on {', '.join(sorted(devices))}, and kvstow moves blocks of CUDA "
                "devices and of vLLM's CPU engine only: start vLLM without the connector"
            )
        layouts = self._model.layouts(kv_caches)
        self._stop()
        if self.arena is None and layouts:
            # Kept when vLLM registers again, because the scheduler half relies on its content.
            self.arena = self._map(layouts)
            if self._identity is not None and self._is_writer:
                self.below = self._open_below(self._identity, kv_caches, layouts)
        self._layouts = layouts
        self.restore()
        logger.info(
            "kvstow: rank %d keeps up to %d blocks of %d bytes in host memory (%s%s), %s",
            self._rank,
            self._num_host_blocks,
            self._model.slot_bytes,
            format_bytes(self._num_host_blocks * self._model.slot_stride_bytes),
            f", one copy for {self._num_sharing} ranks" if self._num_sharing > 1 else "",
            "stored lazily" if self._options.lazy_offload else "stored eagerly",
        )

    def _open_below(
        self,
        identity: Identity,
        kv_caches: Mapping[str, torch.Tensor],
        layouts: tuple[BlockLayout, ...],
    ) -> LowerWorker:
        """Open this rank's part of the tier below, for all ranks that share the arena."""
        assert self.arena is not None, "a rank with layouts has an arena"
        own = dict(zip(self._model.local_groups, layouts, strict=True))
        sizes = [own[g].slot_bytes if g in own else 0 for g in range(len(self._model.groups))]
        num_bytes = self._part_of(self._options.disk_bytes_to_use or 0)
        if self._options.disk_path is not None:
            # Now, because the fingerprint reads all weights.
            check_disk(identity.path, num_bytes, self._options, self.arena)
        fingerprint = identity.fingerprint(self._model, kv_caches)
        options, rank, why = self._options, self._rank, identity.why_private
        member = Membership(fingerprint, why)
        if options.disk_path is None:
            return SharedWorker(member, options, self.arena, rank=rank, slot_bytes=sizes)
        place = Place(identity.path, num_bytes, fingerprint, is_warm=not why)
        if options.shared is None:
            return DiskWorker(place, options, self.arena, rank=rank, slot_bytes=sizes)
        rate = options.disk_max_write_bytes_per_s
        return BothWorker(
            place,
            member,
            options,
            self.arena,
            rank=rank,
            slot_bytes=sizes,
            max_write_bytes_per_s=None if rate is None else self._part_of(rate),
        )

    def _part_of(self, num_bytes: int) -> int:
        """Return this rank's part of what all ranks have. Ranks that share an arena have one."""
        return num_bytes // self._world_size * self._num_sharing

    def _map(self, layouts: tuple[BlockLayout, ...]) -> HostArena:
        """Map the host memory, with the ranks that have equal KV if they can share it."""

        def arena_in(shared: SharedMemory | None) -> HostArena:
            if shared is None or shared.is_creator:
                check_memory(
                    self._num_host_blocks,
                    self._model.slot_stride_bytes,
                    lower=f"cpu_bytes_to_use or num_cpu_blocks in {WHERE}",
                    free=self._free_bytes,
                    num_ranks=self._num_local_ranks // self._num_sharing,
                )
            return arena_for(layouts, self._num_host_blocks, progress=_log_pinned, shared=shared)

        if self._replicas is not None:
            slot_bytes = max(layout.slot_bytes for layout in layouts)
            num_bytes = shared_bytes(self._num_host_blocks, slot_bytes)
            if (arena := self._replicas.map(num_bytes, arena_in)) is not None:
                return arena
            self._share(None)
        return arena_in(None)

    def unregister(self) -> None:
        """Let go of the device memory before vLLM sleeps and frees it; copies in flight end first.

        The host memory keeps its content.
        """
        self._stop()

    def restore(self) -> None:
        """Take hold of the device memory again: vLLM has woken, and it is where it was."""
        if self.movers:
            return
        self._stop()  # closes what an earlier call that failed has left open
        is_verified = self._options.verify == "checksum"
        shared: dict[object, Mover] = {}
        for layout in self._layouts:
            if layout.regions not in shared:
                assert self.arena is not None, "a rank with layouts has an arena"
                mover = mover_for(layout, self.arena, verify=is_verified)
                self._open.append(mover)
                shared[layout.regions] = mover
        self.movers = [shared[layout.regions] for layout in self._layouts]

    def bind(self, jobs: StepJobs) -> None:
        """Take a step's jobs.

        Stores of the last step that vLLM has not begun begin now: with drafts, the older runner
        asks for them after the drafts, and only the last stage of a pipeline makes drafts. Their
        blocks were computed before that step, and are held until the stores end.

        This takes everything out of the message, so that vLLM may bind it twice.
        """
        self.begin("store")
        self._drop_step()
        self._left["load"] += jobs.loads
        self._left["store"] += jobs.stores
        self._failed_request_ids.update(jobs.failed_request_ids)
        self._asks_capacity = jobs.asks_capacity
        self._before_step = None
        if self.below is not None:
            if jobs.below is not None:
                self.below.take(jobs.below)
            for copies in jobs.stores:
                self.below.used(copies.host_slots)
        jobs.loads, jobs.stores, jobs.failed_request_ids, jobs.below = (), (), (), None

    def _drop_step(self) -> None:
        """Fail the jobs of the last step that an error has kept from beginning."""
        for direction, left in self._left.items():
            for copies in left:
                error = StateError("an error ended the step before this job began")
                self._running[copies.job_id] = _Running(direction, copies, error=error)
            left.clear()

    def begin(self, direction: Direction) -> None:
        """Begin this step's loads or stores.

        Both wait for the compute that was submitted before the step. A load overwrites blocks that
        it may still read, and a store reads blocks that it fills. A job whose copies cannot begin
        has failed; it ends when those of its copies that did begin are over.
        """
        jobs = self._left[direction]
        if direction == "load" and (jobs or self._left["store"]):
            self._before_step = self._computed()
        while jobs:  # jobs that have begun leave the list, because vLLM may ask twice
            copies = jobs.pop(0)
            running = self._running[copies.job_id] = _Running(direction, copies)
            try:
                self._submit(running)
            except BaseException as error:
                running.error = error
                if not isinstance(error, Exception):
                    raise

    def _submit(self, running: _Running) -> None:
        """Give each group's part of a job to the group's mover."""
        if len(self.movers) < len(self._model.local_groups):
            raise StateError("vLLM sleeps and has freed the device memory, so nothing is copied")
        if running.direction == "store" and not self._is_writer:
            # The slots can be found only when the writer, too, has reported: see `Replicas`.
            running.is_released = True
            self._reports.released.append(running.copies.job_id)
            return
        copies, after = running.copies, self._before_step or self._computed()
        offsets = copies.offsets.tolist()
        local = zip(self._model.local_groups, self.movers, self._layouts, strict=True)
        for group, mover, layout in local:
            start, end = offsets[group], offsets[group + 1]
            if start == end:
                continue
            ids, slots = copies.block_ids[start:end], copies.host_slots[start:end]
            running.num_bytes += (end - start) * layout.slot_bytes
            if running.direction == "load":
                running.tickets.append(mover.load(slots, ids, after=after))
            else:
                running.tickets.append(mover.store(ids, slots, after=after))

    def _computed(self) -> Event:
        """Return the event of all compute submitted so far, which is that of earlier steps."""
        device = self._layouts[0].device if self._layouts else None
        if device is None:
            return READY  # compute on the CPU is over when it returns
        import torch  # noqa: PLC0415 - vLLM has it

        return CudaEvent.record(torch.cuda.current_stream(device))

    def failed_request_ids(self) -> set[str]:
        """Return the requests whose loads the scheduler half has given up, each once."""
        failed, self._failed_request_ids = self._failed_request_ids, set()
        return failed

    def reports(self) -> StepReports | None:
        """Return how far jobs have come since the last call, and the capacity if it is asked."""
        self._poll()
        reports = self._reports
        is_asked = self._asks_capacity
        if self.below is not None and (news := self.below.report(is_asked=is_asked)) is not None:
            reports.below[self._rank] = news
        if is_asked:
            reports.capacities[self._rank] = self._num_host_blocks
        elif not (reports.reports or reports.released or reports.below):
            return None
        self._reports = StepReports()
        return reports

    def stats(self) -> ConnectorStats | None:
        """Return what was copied since the last call."""
        # vLLM calls this before `reports`, so count what `reports` is about to return.
        self._poll()
        if self.below is not None:
            self._stats.data.update(self.below.counted())
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, ConnectorStats()
        return stats

    def _stop(self) -> None:
        """End every job, and report as failed those that did not complete.

        Every mover is closed, even if closing one of them raises. Those that raise stay for another
        call.
        """
        self.movers = []
        self._drop_step()
        errors = []
        for mover in list(self._open):
            try:
                mover.close()
                self._open.remove(mover)
            except BaseException as error:
                errors.append(error)
        if errors:
            raise errors[0]
        self._poll()

    def close(self) -> None:
        """Stop the movers and give the host memory back. If it raises, call it again."""
        self._layouts = ()
        try:
            self._stop()
            if self.below is not None:
                self.below.close()
                self.below = None
        finally:
            if self.arena is not None:
                self.arena.close()
                self.arena = None

    def _poll(self) -> None:
        """Report the jobs that have ended, and the stores that have read their blocks."""
        for job_id, running in list(self._running.items()):
            if all(ticket.poll() for ticket in running.tickets):
                self._report(job_id, running)
                del self._running[job_id]
            elif running.direction == "store" and not running.is_released:
                running.is_released = all(ticket.source_released() for ticket in running.tickets)
                if running.is_released:
                    self._reports.released.append(job_id)

    def _report(self, job_id: int, running: _Running) -> None:
        errors = (ticket.error for ticket in running.tickets)
        error = running.error or next((error for error in errors if error is not None), None)
        ok: bool | list[bool] = error is None
        if error is None:
            self._count(running)
        else:
            if running.error is None:
                ok = outcome(running.tickets, running.copies.host_slots)
            logger.warning(
                "kvstow: %s job %d failed on rank %d (%s), so %s",
                running.direction,
                job_id,
                self._rank,
                error,
                _CONSEQUENCES[running.direction],
            )
        self._reports.reports.append((job_id, self._rank, ok))

    def _count(self, running: _Running) -> None:
        """Count a job that succeeded, unless another rank has copied for this one."""
        num_copying = self._world_size
        if running.direction == "store":
            if not self._is_writer:
                return
            num_copying //= self._num_sharing
        seconds = time.monotonic() - running.begun
        self._stats.moved(running.direction, running.num_bytes, seconds, num_copying)


def _log_pinned(num_bytes: int, of_bytes: int) -> None:
    logger.info("kvstow: pinned %s of %s", format_bytes(num_bytes), format_bytes(of_bytes))
