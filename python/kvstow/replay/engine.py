r"""A continuous-batching engine in virtual time, over the real `kvstow.Engine`.

One iteration:

    land      copies whose virtual time has come: stores become visible, loaded requests run
    arrive    requests of the trace join the waiting queue
    schedule  running requests, first come first, in one ledger call; out of blocks, the last goes
    admit     waiting requests, if all the running ones fitted: device hit, host hit, then the rest
    compute   write the bytes of the granted tokens; virtual time goes on
    store     blocks that became full; requests that are done leave

A request, and what makes it move:

    coming -> waiting ---- admitted, nothing to load --------> running -> finished
                 ^   \---- admitted, the host has some -> loading -^ |
                 \-------- preempted, or its load failed ----/-------/

The clock of the machine is read only to say what the accounting cost.
"""

import time
from itertools import cycle

import numpy as np
import numpy.typing as npt

from kvstow.engine import Admission, AdmissionState, Transfer
from kvstow.replay.batch import Request, Seats
from kvstow.replay.config import ReplayConfig
from kvstow.replay.faults import LOAD_TIMEOUT_S
from kvstow.replay.model import ReplayModel
from kvstow.replay.observer import Observer
from kvstow.replay.sleeper import sleep_and_wake
from kvstow.replay.state import ReplayState
from kvstow.replay.trace import Trace

__all__ = ["ReplayEngine"]

Tokens = npt.NDArray[np.int64]


class ReplayEngine(ReplayState):
    """Replays one trace. `run` it once, then `close` it.

    Args:
        model: instead of the one that `config` names; its block size is the trace's.

    Raises:
        ConfigError: sizes that cannot be right, or a request that the device pool can never hold.
    """

    def __init__(
        self,
        trace: Trace,
        config: ReplayConfig,
        *,
        observer: Observer | None = None,
        model: ReplayModel | None = None,
    ) -> None:
        super().__init__(trace, config, model)
        self.observer = observer or Observer()
        self._block_size = trace.block_size
        self._num_landed_loads = 0
        self._sleep_at = sorted(config.sleep_at)

    def close(self) -> None:
        """Stop the movers and give the host memory back."""
        self.kv.close()

    def run(self) -> None:
        """Replay to the end, all jobs landed. Interrupted, it leaves what it has in `figures`."""
        begin_s = time.perf_counter()
        try:
            while self._unfinished:
                self._sleep_if_due()
                self._iterate()
            self._sleep_if_due()
        finally:
            self.figures.seconds = time.perf_counter() - begin_s
            self.figures.virtual_seconds = self.now_s - self.trace.requests[0].arrival_s

    @property
    def _unfinished(self) -> bool:
        return bool(self.coming or self.waiting or self.batch.running or len(self.links))

    def _sleep_if_due(self) -> None:
        while self._sleep_at and self._sleep_at[0] <= self.figures.steps:
            self._sleep_at.pop(0)
            for transfer, ok, late in sleep_and_wake(self):
                self._landed(transfer, ok=ok, late=late)
            for seat in self.batch.running:
                self.check_blocks(seat, int(self.batch.computed[seat]))

    def _iterate(self) -> None:
        while transfer := self.links.due(self.now_s):
            self._land(transfer)
        self._expire()
        self.kv.flush_events()
        self._arrive()
        seats, tokens, all_fitted = self._schedule()
        admitted: list[tuple[int, int]] = []
        if all_fitted:
            admitted = self._admit(self.config.max_step_tokens - int(tokens.sum()))
            seats = np.append(seats, [seat for seat, _ in admitted]).astype(np.int64)
            tokens = np.append(tokens, [chunk for _, chunk in admitted]).astype(np.int64)
        if not len(seats):
            if self._unfinished:
                self._skip_ahead()
            return
        for seat, _ in admitted:
            self._check_reads(seat, int(self.batch.computed[seat]))
        start = self.batch.computed[seats]
        due = self._compute(seats, tokens)
        self._store(due)
        self._published(seats, start, self.batch.computed[seats])
        self._finish(seats)
        self.figures.accounting_us.append(self.watch.take_us())
        self.observer.stepped(self)

    def _skip_ahead(self) -> None:
        """Nothing can run now: go on to the next landing, deadline or arrival."""
        moment_s = self.links.next_moment_s(self.now_s)
        if self.coming:
            moment_s = min(moment_s, self.coming[0].arrival_s)
        assert moment_s < float("inf"), f"nothing can run, land or arrive at {self.now_s} s"
        self.now_s = max(self.now_s, moment_s)

    # -- land ----------------------------------------------------------------------------------

    def _land(self, transfer: Transfer) -> None:
        transfer.wait()
        with self.watch:
            end = self.kv.end(transfer)
        if end.ok and transfer.request_id is not None:
            seat = self.loading[transfer.request_id]
            keys = self.batch.keys[seat, : transfer.num_tokens // self._block_size]
            self.verifier.check_loaded(self.batch.request(seat), keys, transfer.job)
        self._landed(transfer, ok=end.ok, late=end.late)

    def _landed(self, transfer: Transfer, *, ok: bool, late: bool) -> None:
        """A transfer has ended, and ledger and scheduler know."""
        if transfer.direction == "store":
            self.figures.stored += len(transfer.job) if ok else 0
            self.figures.stored_bytes += transfer.num_bytes if ok else 0
            self.figures.failed_stores += not ok
        elif ok:
            self._loaded(transfer)
        elif not late:
            assert transfer.request_id is not None, "a load is for a request"
            self._load_failed(transfer.request_id)
        self._num_landed_loads += transfer.direction == "load"
        self.observer.landed(self, transfer)

    def _loaded(self, transfer: Transfer) -> None:
        """The blocks are there: let the request run."""
        assert transfer.request_id is not None, "a load is for a request"
        batch, seat = self.batch, self.loading.pop(transfer.request_id)
        request, num_tokens = batch.request(seat), transfer.num_tokens
        num_blocks = num_tokens // self._block_size
        num_device = int(batch.num_hit[seat]) // self._block_size
        self._check_reads(seat, num_tokens)
        self.figures.loaded += len(transfer.job)
        self.figures.loaded_bytes += transfer.num_bytes
        self.figures.published += len(transfer.job)
        self._count_hits(request, num_device, num_blocks - num_device)
        batch.running.append(seat)

    def _load_failed(self, name: str) -> None:
        """The request starts again, and the next time it does not ask the host."""
        self.figures.failed_loads += 1
        self.waiting.appendleft(self.batch.leave(self.loading.pop(name)))

    def _expire(self) -> None:
        """Loads past their deadline have failed; what becomes of their copies is nobody's matter.

        Others that waited for their blocks may look again.
        """
        with self.watch:
            late = self.kv.expire()
        for name in late:
            self.figures.late_loads += 1
            self._num_landed_loads += 1
            self._load_failed(name)

    # -- arrive --------------------------------------------------------------------------------

    def _arrive(self) -> None:
        while self.coming and self.coming[0].arrival_s <= self.now_s:
            request = Request.arrived(self.coming.popleft(), self._block_size)
            with self.watch:
                self.kv.add(request.name, request.known_digests(self._block_size))
            self.waiting.append(request)

    # -- schedule ------------------------------------------------------------------------------

    def _schedule(self) -> tuple[Seats, Tokens, bool]:
        """Grant slots to running requests.

        Out of blocks, the last running request is preempted until the refused one fits: it may be
        that one itself, but never one that was served in this step, as those come before it. The
        first one is never preempted: with nobody behind it, it keeps its blocks and waits for the
        jobs that hold the others. So some request always gets further.

        Returns:
            The seats served, how many tokens each, and whether nobody was refused.
        """
        batch = self.batch
        seats = np.array(batch.running, dtype=np.int64)
        self._extend(seats)
        wanted = batch.known[seats] - batch.computed[seats]
        left = self.config.max_step_tokens - (np.cumsum(wanted) - wanted)
        tokens = np.minimum(wanted, np.maximum(left, 0))
        num_reached = int(np.count_nonzero(tokens))
        names = batch.names(batch.running[:num_reached])
        num_served, all_fitted = 0, True
        while num_served < num_reached:
            part = slice(num_served, num_reached)
            with self.watch:
                step = self.kv.step(
                    names[part],
                    tokens[part],
                    num_lookahead_tokens=self.config.lookahead_tokens,
                )
            batch.append_blocks(seats[part], step)
            num_served += step.num_granted
            if num_served < num_reached:
                all_fitted = False
                if len(batch.running) == 1:
                    break
                self._preempt(batch.running.pop())
                num_reached = min(num_reached, len(batch.running))
        seats, tokens = seats[:num_served], tokens[:num_served]
        return seats, tokens, all_fitted

    def _extend(self, seats: Seats) -> None:
        """Tell the digests of generated blocks whose last token is known, before it is computed."""
        batch = self.batch
        num_known = batch.known[seats] // self._block_size
        for seat in seats[num_known > batch.num_hashed[seats]].tolist():
            begin, end = batch.num_hashed[seat], batch.known[seat] // self._block_size
            request = batch.request(seat)
            with self.watch:
                self.kv.extend(request.name, request.digests[begin:end])
            batch.num_hashed[seat] = end

    def _preempt(self, seat: int) -> None:
        self.figures.preemptions += 1
        request = self.batch.leave(seat)
        with self.watch:
            self.kv.preempt(request.name)
        self.waiting.appendleft(request)

    # -- admit ---------------------------------------------------------------------------------

    def _admit(self, budget: int) -> list[tuple[int, int]]:
        """Admit waiting requests, head first, until one does not fit.

        A request whose blocks are just being loaded for another keeps its place and is passed over.

        Returns:
            (seat, tokens) of those that compute in this step; others are loading.
        """
        admitted: list[tuple[int, int]] = []
        passed_over: list[Request] = []
        while self.waiting and budget > 0 and self.batch.has_seat:
            request = self.waiting.popleft()
            admission = self._ask(request, budget)
            if admission is None:
                passed_over.append(request)
                continue
            if admission.state is AdmissionState.NO_ROOM:
                self.waiting.appendleft(request)
                break
            seat = self._sit(request, admission)
            if chunk := admission.num_new_tokens:
                admitted.append((seat, chunk))
                budget -= chunk
        self.waiting.extendleft(reversed(passed_over))
        return admitted

    def _ask(self, request: Request, budget: int) -> Admission | None:
        """Ask for an admission; None: ask again later, its blocks are being loaded for another."""
        if request.pending_since == self._num_landed_loads:
            return None
        with self.watch:
            admission = self.kv.admit(
                request.name, request.known_tokens, budget, after=self.device.computed()
            )
        if admission.state is AdmissionState.PENDING:
            request.pending_since = self._num_landed_loads
            return None
        num_hit, num_external = admission.num_hit_tokens, admission.num_external_tokens
        self.observer.looked_up(self, request, num_hit, num_external)
        return admission

    def _sit(self, request: Request, admission: Admission) -> int:
        """Let an admitted request run with what the device holds, or when its load has landed."""
        # The ledger's tables: of the hit, they have only what the request will read.
        num_hit, num_found = admission.num_hit_tokens, admission.num_external_tokens
        seat = self.batch.sit(
            request, self._block_size, admission.block_tables, num_hit + num_found
        )
        if admission.transfer is not None:
            self.loading[request.name] = seat
            self.batch.num_hit[seat] = num_hit
            deadline_s = None if self.config.faults is None else self.now_s + LOAD_TIMEOUT_S
            self.links.submit(admission.transfer, self.now_s, deadline_s=deadline_s)
            return seat
        self._count_hits(request, num_hit // self._block_size, 0)
        self.batch.running.append(seat)
        return seat

    def _check_reads(self, seat: int, num_tokens: int) -> None:
        """Check what a request reads of the tokens it found, where it soon reads it no more.

        The other groups' blocks are all there when the request ends, and are checked then.
        """
        request, keys = self.batch.request(seat), self.batch.keys[seat]
        for group, table in enumerate(self.batch.tables[:, seat]):
            if self.model.groups[group].reach_tokens is not None:
                self.verifier.check_table(request, group, table, keys, num_tokens)

    def _count_hits(self, request: Request, num_device: int, num_host: int) -> None:
        if request.admitted:
            self.figures.resumed_hits += num_device + num_host
            return
        request.admitted = True
        self.figures.device_hits += num_device
        self.figures.host_hits += num_host
        self.figures.recomputed += len(request.trace.trace_ids) - num_device - num_host

    def _published(self, seats: Seats, start: Tokens, stop: Tokens) -> None:
        """The ledger published the full blocks among these."""
        num_full = int((stop // self._block_size - start // self._block_size).sum())
        self.figures.published += num_full * len(self.model.groups)
        self.observer.published(self, seats, stop)

    # -- compute -------------------------------------------------------------------------------

    def _compute(self, seats: Seats, tokens: Tokens) -> Seats:
        """Write what was granted and let time go on; who has a block to store, or is done."""
        batch, config, size = self.batch, self.config, self._block_size
        start, known = batch.computed[seats], batch.known[seats]
        stop = start + tokens
        self._write(seats, start, stop)
        batch.computed[seats] = stop
        batch.known[seats] = np.maximum(known, stop + 1)
        num_decodes = int(np.count_nonzero((known - start == 1) & (start >= batch.prompt[seats])))
        num_prefill = int(tokens.sum()) - num_decodes
        self.figures.steps += 1
        self.figures.decode_tokens += num_decodes
        self.figures.prefill_tokens += num_prefill
        step_ms = (
            config.step_ms
            + config.prefill_token_ms * num_prefill
            + config.decode_request_ms * num_decodes
        )
        self.now_s += step_ms / 1000
        due: Seats = seats[(stop // size > start // size) | (stop == batch.total[seats])]
        return due

    def _write(self, seats: Seats, start: Tokens, stop: Tokens) -> None:
        """The bytes of these tokens: single ones of all requests at once, chunks one by one."""
        batch, size = self.batch, self._block_size
        single = stop - start == 1
        one, (block, offset) = seats[single], np.divmod(start[single], size)
        chunks = list(zip(*(part[~single].tolist() for part in (seats, start, stop)), strict=True))
        for memory, tables in zip(self.memory, cycle(batch.tables), strict=False):
            memory.write_tokens(tables[one, block], batch.keys[one, block], offset)
            for seat, begin, end in chunks:
                memory.write_range(tables[seat], batch.keys[seat], begin, end)

    # -- store ---------------------------------------------------------------------------------

    def _store(self, seats: Seats) -> None:
        """Store what these seats have newly computed, all in one job."""
        if not len(seats):
            return
        names, computed = self.batch.names(seats.tolist()), self.batch.computed[seats].tolist()
        with self.watch:
            transfer = self.kv.computed(names, computed, after=self.device.computed())
        if transfer is not None:
            self.links.submit(transfer, self.now_s)

    def _finish(self, seats: Seats) -> None:
        """Requests that have computed everything are checked, and leave."""
        batch = self.batch
        for seat in seats[batch.computed[seats] == batch.total[seats]].tolist():
            self.check_blocks(seat, int(batch.total[seat]))
            request = batch.leave(seat)
            with self.watch:
                self.kv.finish(request.name)
            batch.running.remove(seat)
            self.figures.finished += 1
            self.observer.finished(self, request)
