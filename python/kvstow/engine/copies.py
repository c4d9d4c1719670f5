"""The copies in flight: their pins, their deadlines and what their end does to a request.

The device blocks of a copy are pinned from its plan until it has ended, whatever becomes of its
request. A store unpins them earlier, once it has read them.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Final

import numpy as np

from kvstow._core import Job, JobEnd, StateError, TransferError
from kvstow.arguments import read_clock
from kvstow.engine.disk import Disk
from kvstow.engine.state import State
from kvstow.engine.transfer import Transfer
from kvstow.observability.histogram import DURATION_BOUNDS_S, SIZE_BOUNDS_BYTES, Histogram
from kvstow.transfer import Event, TransferTimeout
from kvstow.transfer.mover import Direction
from kvstow.transfer.ticket import Deadline

_BYTES: Final[dict[Direction, str]] = {"store": "stored_bytes", "load": "loaded_bytes"}
_SECONDS: Final[dict[Direction, str]] = {"store": "store_seconds", "load": "load_seconds"}


class Copies:
    """Begins copies, and accounts for their end in the state of the engine.

    Attributes:
        in_flight: transfers by job id, oldest first. Late ones stay until they have ended.
        disk: runs the jobs of the tier below the host. None without one.
    """

    def __init__(
        self,
        state: State,
        clock: Callable[[], float],
        load_timeout_s: float | None,
        store_timeout_s: float | None,
        disk: Disk | None,
    ) -> None:
        self.in_flight: dict[int, Transfer] = {}
        self.disk = disk
        self._sums: dict[str, float] = dict.fromkeys([*_BYTES.values(), *_SECONDS.values()], 0)
        self._histograms = {
            key: Histogram(key, bounds)
            for keys, bounds in ((_BYTES, SIZE_BOUNDS_BYTES), (_SECONDS, DURATION_BOUNDS_S))
            for key in keys.values()
        }
        self._state, self._clock = state, clock
        self._timeouts_s: dict[Direction, float | None] = {
            "store": store_timeout_s,
            "load": load_timeout_s,
        }
        # Job ids of stores in flight: those whose blocks are unpinned already, and the late ones.
        self._unpinned: set[int] = set()
        self._late: set[int] = set()

    def now_s(self) -> float:
        """Return the time on the engine's clock."""
        return read_clock(self._clock)

    def deadline_s(self, direction: Direction, begin_s: float) -> float | None:
        """Return when a transfer that begins at `begin_s` is late. None for never."""
        timeout_s = self._timeouts_s[direction]
        return None if timeout_s is None else begin_s + timeout_s

    def begin(  # noqa: PLR0913 - what a transfer is, and its event
        self,
        direction: Direction,
        job: Job,
        begin_s: float,
        after: Event,
        *,
        request_id: str | None = None,
        num_tokens: int = 0,
    ) -> Transfer:
        """Pin the blocks of a planned job, and submit its copies; see `Transfer`."""
        ranks = self._state.ranks
        num_bytes = ranks.num_bytes(job)
        transfer = Transfer(job, direction, num_bytes, begin_s, request_id, num_tokens)
        self._state.pool.pin(job.block_ids)
        self.in_flight[job.job_id] = transfer
        transfer.rank_tickets.extend(ranks.copy(direction, job, job.block_ids, after))
        return transfer

    def end_ended(self) -> None:
        """End the copies that are done, then fail those that are late. Never blocks."""
        for transfer in tuple(self.in_flight.values()):
            if transfer.poll():
                self.end(transfer, report=True)
            else:
                self._release_source(transfer)
        self.fail_late()

    def end(self, transfer: Transfer, *, report: bool) -> JobEnd:
        """Wait for a transfer and account for its end. With `report`, `poll` reports it.

        Raises:
            StateError: the transfer has ended already.
        """
        state, job_id = self._state, transfer.job.job_id
        if self.in_flight.get(job_id) is not transfer:
            raise StateError(
                f"job {job_id} is not in flight here; a transfer ends once, with end or with a "
                "poll that finds it done"
            )
        outcomes, end_s = transfer.outcomes(), self.now_s()
        with state.change:
            ends = [
                state.scheduler.complete(job_id, ok=ok, rank=rank)
                for rank, ok in enumerate(outcomes)
            ]
            state.change.commit()
            end = ends[-1]
            assert end is not None, f"all ranks have reported job {job_id}"
            if end.ok:
                self._count(_BYTES[transfer.direction], transfer.num_bytes)
                # A counter never falls, also if the clock has stepped back.
                self._count(_SECONDS[transfer.direction], max(0.0, end_s - transfer.begin_s))
            request_id = self._waiting_for(transfer)
            if report and transfer.direction == "store" and not end.late:
                state.report_store(len(transfer.job) if end.ok else 0, int(not end.ok))
            if report and request_id is not None:
                (state.unreported.loaded if end.ok else state.unreported.failed).append(request_id)
            del self.in_flight[job_id]
            self._late.discard(job_id)
            self._unpin(end)
            if request_id is not None:
                if end.ok:
                    state.ledger.cache(request_id, transfer.num_tokens)
                    state.run(request_id)
                else:
                    state.restart(request_id, recompute=True)
        return end

    def fail_late(self) -> None:
        """Fail the copies that are late by now. The next `poll` reports them."""
        state = self._state
        timeouts_s = [*self._timeouts_s.values(), self.disk and self.disk.options.timeout_s]
        if all(timeout_s is None for timeout_s in timeouts_s):
            return
        now_s = self.now_s()
        with state.change:
            state.change.commit()
            late = state.scheduler.expire(now_s)
            # A job that is none of these is one below the host. No request fails with it.
            for transfer in [self.in_flight[it] for it in late if it in self.in_flight]:
                if transfer.direction == "store":
                    self._late.add(transfer.job.job_id)
                    state.report_store(0, 1)
                elif (request_id := self._waiting_for(transfer)) is not None:
                    state.unreported.failed.append(request_id)
                    state.restart(request_id, recompute=True)

    def drain(self, timeout_s: float | None) -> None:
        """Wait for the copies in flight, for `timeout_s` at most, and end those that are done."""
        deadline = Deadline(timeout_s)
        for transfer in self.in_flight.values():
            for ticket in transfer.tickets:
                with suppress(TransferError, TransferTimeout):
                    ticket.wait(deadline.left_s)
        self.end_ended()
        if self.disk is not None:
            self.disk.drain(self._state, deadline.left_s)

    def forget_all(self, *, report: bool) -> None:
        """Forget every copy, once no mover copies any more. With `report`, its store has failed.

        All pins are of copies, so every block is unpinned.
        """
        pool = self._state.pool
        ids = np.arange(pool.num_blocks, dtype=np.int32)
        pool.unpin(np.repeat(ids, pool.pin_counts(ids)))
        self._unpinned.clear()
        stores = {id for id, copy in self.in_flight.items() if copy.direction == "store"}
        if report:
            self._state.report_store(0, len(stores - self._late))
        self.in_flight.clear()
        self._late.clear()

    def stats(self) -> dict[str, float]:
        """Return the bytes and seconds of the transfers that went well, and their histograms."""
        stats = self._sums.copy()
        for histogram in self._histograms.values():
            stats |= histogram.stats()
        return stats if self.disk is None else stats | self.disk.stats(self._state.scheduler)

    def _count(self, key: str, value: float) -> None:
        self._sums[key] += value
        self._histograms[key].observe(value)

    def check(self) -> None:
        """Verify that jobs, transfers and loading requests agree. Raises `StateError` if not."""
        stats = self._state.scheduler.stats()
        num_jobs = stats["jobs_in_flight"] + stats["quarantined_jobs"]
        num_own = len(self.in_flight) + (0 if self.disk is None else len(self.disk.running))
        if num_own != num_jobs:
            raise StateError(f"{num_own} transfers for {num_jobs} jobs in flight")
        for name, request in self._state.requests.items():
            if (request.state == "loading") != (request.load_id in self.in_flight):
                raise StateError(f"{name!r} is {request.state}, its load {request.load_id}")

    def _waiting_for(self, transfer: Transfer) -> str | None:
        """Return the request that waits for a load.

        None if the request was finished or preempted, or if its load is late.
        """
        request = self._state.requests.get(transfer.request_id or "")
        waits = request is not None and request.load_id == transfer.job.job_id
        return transfer.request_id if waits else None

    def _release_source(self, transfer: Transfer) -> None:
        """Unpin the blocks of a store that has read them, while its bytes are still on the way."""
        state, job_id = self._state, transfer.job.job_id
        if (
            transfer.direction == "store"
            and job_id not in self._unpinned
            and transfer.source_released()
        ):
            with state.change:
                state.change.commit()
                self._unpinned.add(job_id)
                state.pool.unpin(transfer.job.block_ids)

    def _unpin(self, end: JobEnd) -> None:
        if end.job_id in self._unpinned:
            self._unpinned.discard(end.job_id)
        else:
            self._state.pool.unpin(end.block_ids)
