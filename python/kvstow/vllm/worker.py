"""The worker half: carries out what the scheduler half has planned, and reports how it went."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstow import ConfigError, StateError
from kvstow.memory import check_memory, free_memory
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
from kvstow.vllm.messages import Copies, StepJobs, StepReports
from kvstow.vllm.model import Model
from kvstow.vllm.options import WHERE, Options
from kvstow.vllm.stats import LOAD, STORE, ConnectorStats, Direction

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

logger = logging.getLogger("vllm." + __name__)


@dataclass
class _Running:
    """A job under way: one ticket for each group that it touches."""

    direction: Direction
    # The job's, in its order.
    host_slots: npt.NDArray[np.int32]
    tickets: list[Ticket]
    num_bytes: int
    begun: float = field(default_factory=time.monotonic)
    error: BaseException | None = None
    # Of a store: it reads its blocks no more.
    is_released: bool = False

    def poll(self) -> bool:
        return all(ticket.poll() for ticket in self.tickets)

    def why(self) -> BaseException | None:
        """Return why it failed, once it has ended."""
        errors = (ticket.error for ticket in self.tickets)
        return self.error or next((error for error in errors if error is not None), None)


class WorkerHalf:
    """Everything that runs beside one of vLLM's workers."""

    def __init__(
        self, model: Model, options: Options, *, rank: int, world_size: int, num_local_ranks: int
    ) -> None:
        """Wait for the KV caches (`register`).

        Args:
            model: the groups, and what their blocks take.
            options: as parsed.
            rank: of this worker in its engine.
            world_size: workers of the engine.
            num_local_ranks: workers on this machine, those of other engines included.
        """
        self._model = model
        self._options = options
        self._rank = rank
        self._world_size = world_size
        self._num_host_blocks = options.num_host_blocks(model.slot_stride_bytes, world_size)
        # Asked for now: by the time this rank registers others may have pinned their parts, which
        # would then count twice.
        self._num_local_ranks, self._free_bytes = num_local_ranks, free_memory()
        self.arena: HostArena | None = None
        # Per local group; groups that lie in the same bytes share one. None while vLLM sleeps.
        self.movers: list[Mover] = []
        self._open: list[Mover] = []
        self._layouts: tuple[BlockLayout, ...] = ()
        self._before_step: Event | None = None
        self._jobs = StepJobs()
        self._running: dict[int, _Running] = {}
        self._reports = StepReports()
        self._stats = ConnectorStats()

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take the memory that vLLM has allocated, and map the host's.

        Raises:
            ConfigError: a layout that kvstow does not know, memory it cannot reach, or more host
                memory than the machine has free.
        """
        devices = {tensor.device.type for tensor in kv_caches.values()}
        if devices not in ({"cpu"}, {"cuda"}, set()):
            raise ConfigError(
                f"the KV cache lies on {', '.join(sorted(devices))}: this version of kvstow moves "
                "blocks of CUDA devices and of the CPU engine; start vLLM without the connector"
            )
        layouts = self._model.layouts(kv_caches)
        num_bytes = self._num_host_blocks * self._model.slot_stride_bytes
        self._stop()
        if self.arena is None and layouts:
            # Kept when vLLM registers anew: the scheduler half knows what lies in it.
            check_memory(
                self._num_host_blocks,
                self._model.slot_stride_bytes,
                lower=f"cpu_bytes_to_use or num_cpu_blocks in {WHERE}",
                free=self._free_bytes,
                num_ranks=self._num_local_ranks,
            )
            self.arena = arena_for(layouts, self._num_host_blocks, progress=_log_pinned)
        self._layouts = layouts
        self.restore()
        logger.info(
            "kvstow: %d host blocks of %d bytes (%.2f GiB) on rank %d, %s",
            self._num_host_blocks,
            self._model.slot_bytes,
            num_bytes / 2**30,
            self._rank,
            "lazy" if self._options.lazy_offload else "eager",
        )

    def unregister(self) -> None:
        """Let go of the device before its memory goes: vLLM sleeps. What is in flight ends first.

        The host keeps what it holds, and what is known of it.
        """
        self._stop()

    def restore(self) -> None:
        """Take hold of the device again, whose memory is back where it was: vLLM has woken."""
        if self.movers:
            return
        self._stop()  # what an earlier, failed call has left open
        is_verified = self._options.verify == "checksum"
        shared: dict[object, Mover] = {}
        for layout in self._layouts:
            if layout.regions not in shared:
                assert self.arena is not None, "whoever has layouts has an arena"
                mover = mover_for(layout, self.arena, verify=is_verified)
                self._open.append(mover)
                shared[layout.regions] = mover
        self.movers = [shared[layout.regions] for layout in self._layouts]

    def bind(self, jobs: StepJobs) -> None:
        """Take a step's jobs."""
        self._drop_step()
        jobs.failed_request_ids += self._jobs.failed_request_ids
        self._jobs = jobs
        self._before_step = None

    def _drop_step(self) -> None:
        """Fail the jobs that the last step has left: an error has ended it before they began."""
        for direction, left in ((LOAD, self._jobs.loads), (STORE, self._jobs.stores)):
            for copies in left:
                error = StateError("an error has ended the step before this job began")
                self._running[copies.job_id] = _Running(
                    direction, copies.host_slots, [], 0, error=error
                )
            left.clear()

    def start_loads(self) -> None:
        """Begin this step's loads: what may still read their blocks was submitted before it."""
        if self._jobs.loads or self._jobs.stores:
            self._before_step = self._computed()
        self._start_all(LOAD, self._jobs.loads)

    def start_stores(self) -> None:
        """Begin this step's stores: what they read was computed in earlier steps."""
        self._start_all(STORE, self._jobs.stores)

    def _start_all(self, direction: Direction, jobs: list[Copies]) -> None:
        """Begin jobs once, should vLLM ask twice: those that have begun leave the list."""
        while jobs:
            self._start(direction, jobs.pop(0))

    def _computed(self) -> Event:
        """Return the event of all compute that was submitted by now, that of earlier steps."""
        device = self._layouts[0].device if self._layouts else None
        if device is None:
            return READY  # on the CPU it is over
        import torch  # noqa: PLC0415 - vLLM has it

        return CudaEvent.record(torch.cuda.current_stream(device))

    def failed_request_ids(self) -> set[str]:
        """Requests to report as failed, once: the scheduler half has given up on their loads."""
        failed, self._jobs.failed_request_ids = self._jobs.failed_request_ids, []
        return set(failed)

    def reports(self) -> StepReports | None:
        """How far jobs have come since the last call, and this rank's capacity if it is asked."""
        self._poll()
        reports = self._reports
        if self._jobs.asks_capacity:
            reports.capacities[self._rank] = self._num_host_blocks
        elif not (reports.reports or reports.released):
            return None
        self._reports = StepReports()
        return reports

    def stats(self) -> ConnectorStats | None:
        """What was moved since the last call."""
        # vLLM asks for this first: what `reports` will tell of is counted already.
        self._poll()
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, ConnectorStats()
        return stats

    def _stop(self) -> None:
        """End every job, and report as failed what did not come to its end.

        Every mover is closed, whatever one of them raises; those that raise stay for another call.
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

    def _poll(self) -> None:
        if not self._running:
            return
        for job_id, running in list(self._running.items()):
            if running.poll():
                self._report(job_id, running)
                del self._running[job_id]
            elif running.direction == STORE and not running.is_released:
                running.is_released = all(one.source_released() for one in running.tickets)
                if running.is_released:
                    self._reports.released.append(job_id)

    def close(self) -> None:
        """Stop the movers and give the host memory back. Call it again if it has raised."""
        self._layouts = ()
        try:
            self._stop()
        finally:
            if self.arena is not None:
                self.arena.close()
                self.arena = None

    def _start(self, direction: Direction, copies: Copies) -> None:
        """Begin a job. Whatever is raised fails it, once the copies that have begun are over."""
        running = _Running(direction, copies.host_slots, [], 0)
        self._running[copies.job_id] = running
        try:
            self._submit(running, copies)
        except Exception as error:
            running.error = error
        except BaseException as error:
            running.error = error
            raise

    def _submit(self, running: _Running, copies: Copies) -> None:
        if len(self.movers) < len(self._model.local_groups):
            raise StateError("the device's memory is gone, vLLM sleeps: it copies nothing")
        after = self._before_step or self._computed()
        offsets = copies.offsets.tolist()
        local = zip(self._model.local_groups, self.movers, self._layouts, strict=True)
        for group, mover, layout in local:
            start, end = offsets[group], offsets[group + 1]
            if start == end:
                continue
            ids, slots = copies.block_ids[start:end], copies.host_slots[start:end]
            running.num_bytes += (end - start) * layout.slot_bytes
            if running.direction == LOAD:
                running.tickets.append(mover.load(slots, ids, after=after))
            else:
                running.tickets.append(mover.store(ids, slots, after=after))

    def _report(self, job_id: int, running: _Running) -> None:
        error = running.why()
        ok: bool | list[bool] = error is None
        if error is not None:
            if running.error is None:
                ok = outcome(running.tickets, running.host_slots)
            logger.warning("kvstow: %s job %d failed: %s", running.direction, job_id, error)
        else:
            # A transfer takes as long as its ranks do on average: vLLM adds up what they report.
            seconds = (time.monotonic() - running.begun) / self._world_size
            self._stats.moved(running.direction, running.num_bytes, seconds)
        self._reports.reports.append((job_id, self._rank, ok))


def _log_pinned(num_bytes: int, of_bytes: int) -> None:
    logger.info("kvstow: %.1f of %.1f GiB are pinned", num_bytes / 2**30, of_bytes / 2**30)
