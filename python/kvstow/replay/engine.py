r"""The loop of a continuous-batching engine in virtual time, over the real `kvstow.Engine`.

An iteration:

    land      end the transfers that have landed: stores become visible, loaded requests run
    arrive    put arrived requests into the waiting queue
    schedule  grant tokens to running requests, oldest first; out of blocks, preempt the newest
    admit     admit waiting requests, if all running requests got their tokens
    compute   write the bytes of the granted tokens, and advance virtual time
    store     store the blocks that became full, and finish the requests that are done

The life of a request:

    coming -> waiting ---- admitted, nothing to load ---------> running -> finished
                 ^   \---- admitted, blocks on the host -> loading -^ |
                 \-------- preempted, or its load failed ----/--------/

The replay reads the machine's clock only to measure the time that the accounting takes.
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

Tokens = npt.NDArray[np.int64]


# How often an admission may wait for the tier below the host.
_WAITS = {None: 0, "disk": 1, "shared": 2, "disk and shared": 2}


class ReplayEngine(ReplayState):
    """Replays one trace. Call `run` once, then `close`.

    Args:
        trace: the requests.
        config: the options.
        observer: its methods are called for what happens.
        model: replaces the model that `config` names. Its block size must be the trace's.

    Raises:
        ConfigError: a size is invalid, or a request can never fit into the device pool.
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
        self._below = config.below
        # Nobody reads the bytes of an unverified replay, unless it leaves them for another one.
        self._writes = config.verify != "off" or config.below is not None
        self._sleep_at = sorted(config.sleep_at)

    def run(self) -> None:
        """Replay until all requests are finished and all jobs have landed.

        An interrupt leaves the figures so far in `figures`.
        """
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
        self._settle_disk()
        self.kv.flush_events()
        self._arrive()
        seats, tokens, all_fitted = self._schedule()
        admitted: list[tuple[int, int]] = []
        if all_fitted:
            admitted = self._admit(self.config.max_step_tokens - int(tokens.sum()))
        if admitted:
            seats = np.append(seats, [seat for seat, _ in admitted])
            tokens = np.append(tokens, [chunk for _, chunk in admitted])
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
        """Advance virtual time to the next landing, deadline or arrival, as nothing can run."""
        moment_s = self.links.next_moment_s(self.now_s)
        if self.coming:
            moment_s = min(moment_s, self.coming[0].arrival_s)
        assert moment_s < float("inf"), f"nothing can run, land or arrive at {self.now_s} s"
        self.now_s = max(self.now_s, moment_s)

    # -- land ----------------------------------------------------------------------------------

    def _settle_disk(self) -> None:
        """Let the tier below the host do what is due, which takes no virtual time."""
        if self._below is not None:
            self.kv.settle_disk()

    def _num_disk_tokens(self) -> int:
        """Return the tokens that loads have taken from the tier below the host."""
        return 0 if self._below is None else self.kv.scheduler.disk_stats()["disk_hit_tokens"]

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
        """Count a transfer that ended, and let its request run or wait again."""
        if transfer.direction == "store":
            self.figures.stored_blocks += len(transfer.job) if ok else 0
            self.figures.bytes_stored += transfer.num_bytes if ok else 0
            self.figures.failed_stores += not ok
        elif ok:
            self._loaded(transfer)
        elif not late:
            assert transfer.request_id is not None, "a load is for a request"
            self._load_failed(transfer.request_id)
        self._num_landed_loads += transfer.direction == "load"
        self.observer.landed(self, transfer)

    def _loaded(self, transfer: Transfer) -> None:
        """Let a request run whose load succeeded."""
        assert transfer.request_id is not None, "a load is for a request"
        batch, seat = self.batch, self.loading.pop(transfer.request_id)
        request, num_tokens = batch.request(seat), transfer.num_tokens
        num_blocks = num_tokens // self._block_size
        num_device = int(batch.num_hit[seat]) // self._block_size
        self._check_reads(seat, num_tokens)
        self.figures.loaded_blocks += len(transfer.job)
        self.figures.bytes_loaded += transfer.num_bytes
        self.figures.published += len(transfer.job)
        num_disk = int(batch.num_disk[seat]) // self._block_size
        self._count_hits(request, num_device, num_blocks - num_device, num_disk)
        batch.running.append(seat)

    def _load_failed(self, name: str) -> None:
        """Put a request whose load failed at the head of the queue, to recompute its prompt."""
        self.figures.failed_loads += 1
        self.waiting.appendleft(self.batch.leave(self.loading.pop(name)))

    def _expire(self) -> None:
        """Fail the requests whose loads missed their deadline.

        Each counts as a landed load, so that requests which waited for its blocks look up again.
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

        If blocks run out, preempt the newest running request until the refused one fits. This may
        be the refused request itself, but never a request served in this step, because those are
        older. The oldest request is never preempted: it keeps its blocks and waits for the jobs
        that hold the others. So the replay always advances.

        Returns:
            The seats served, the number of tokens for each, and whether no request was refused.
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
        """Extend requests by the digests of generated blocks whose tokens are all known."""
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
        """Admit waiting requests in their order, until one does not fit.

        A request whose blocks another request is loading keeps its place and is passed over.

        Returns:
            (seat, number of tokens) of the requests that compute in this step; others load.
        """
        admitted: list[tuple[int, int]] = []
        passed_over: list[Request] = []
        while self.waiting and budget > 0 and self.batch.has_seat:
            request = self.waiting.popleft()
            num_disk = self._num_disk_tokens()
            admission = self._ask(request, budget)
            if admission is None:
                passed_over.append(request)
                continue
            if admission.state is AdmissionState.NO_ROOM:
                self.waiting.appendleft(request)
                break
            seat = self._sit(request, admission)
            self.batch.num_disk[seat] = self._num_disk_tokens() - num_disk
            if chunk := admission.num_new_tokens:
                admitted.append((seat, chunk))
                budget -= chunk
        self.waiting.extendleft(reversed(passed_over))
        return admitted

    def _ask(self, request: Request, budget: int) -> Admission | None:
        """Return the admission, or None while another request is loading the same blocks."""
        if request.pending_since == self._num_landed_loads:
            return None
        admission = self._ask_once(request, budget)
        # It may wait for a promote, and before that for what a shared store says.
        for _ in range(_WAITS[self._below]):
            if admission.state is AdmissionState.PENDING:
                self._settle_disk()
                admission = self._ask_once(request, budget)
        if admission.state is AdmissionState.PENDING:
            request.pending_since = self._num_landed_loads
            return None
        num_hit, num_external = admission.num_hit_tokens, admission.num_external_tokens
        self.observer.looked_up(self, request, num_hit, num_external)
        return admission

    def _ask_once(self, request: Request, budget: int) -> Admission:
        with self.watch:
            return self.kv.admit(
                request.name, request.known_tokens, budget, after=self.device.computed()
            )

    def _sit(self, request: Request, admission: Admission) -> int:
        """Give an admitted request a seat. It runs at once, or when its load has landed."""
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
        """Check the blocks that the next token reads in groups which free blocks as they go.

        The blocks of the other groups stay until the request ends, and are checked then.
        """
        request, keys = self.batch.request(seat), self.batch.keys[seat]
        for group, table in enumerate(self.batch.tables[:, seat]):
            if self.model.groups[group].reach_tokens is not None:
                self.verifier.check_table(request, group, table, keys, num_tokens)

    def _count_hits(
        self, request: Request, num_device: int, num_host: int, num_disk: int = 0
    ) -> None:
        if request.admitted:
            self.figures.resumed_hits += num_device + num_host
            return
        request.admitted = True
        self.figures.device_hits += num_device
        self.figures.host_hits += num_host
        self.figures.disk_hits += num_disk
        self.figures.recomputed_blocks += len(request.trace.trace_ids) - num_device - num_host

    def _published(self, seats: Seats, start: Tokens, stop: Tokens) -> None:
        """Count the full blocks among the tokens computed in this step."""
        num_full = int((stop // self._block_size - start // self._block_size).sum())
        self.figures.published += num_full * len(self.model.groups)
        self.observer.published(self, seats, stop)

    # -- compute -------------------------------------------------------------------------------

    def _compute(self, seats: Seats, tokens: Tokens) -> Seats:
        """Write the bytes of the granted tokens, and advance virtual time.

        Returns:
            The seats that have a new full block to store, or that are done.
        """
        batch, config, size = self.batch, self.config, self._block_size
        start, known = batch.computed[seats], batch.known[seats]
        stop = start + tokens
        if self._writes:
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
        """Write these tokens: single tokens of all requests at once, longer chunks one by one."""
        batch, size = self.batch, self._block_size
        single = stop - start == 1
        writers, (block, offset) = seats[single], np.divmod(start[single], size)
        longer = np.flatnonzero(~single).tolist()
        chunks = [(int(seats[i]), int(start[i]), int(stop[i])) for i in longer]
        for memory, tables in zip(self.memory, cycle(batch.tables), strict=False):
            memory.write_tokens(tables[writers, block], batch.keys[writers, block], offset)
            for seat, begin, end in chunks:
                memory.write_range(tables[seat], batch.keys[seat], begin, end)

    # -- store ---------------------------------------------------------------------------------

    def _store(self, seats: Seats) -> None:
        """Store the new full blocks of these seats in one job."""
        if not len(seats):
            return
        names, computed = self.batch.names(seats.tolist()), self.batch.computed[seats].tolist()
        with self.watch:
            transfer = self.kv.computed(names, computed, after=self.device.computed())
        if transfer is not None:
            self.links.submit(transfer, self.now_s)

    def _finish(self, seats: Seats) -> None:
        """Check and finish the requests that have computed all their tokens."""
        batch = self.batch
        for seat in seats[batch.computed[seats] == batch.total[seats]].tolist():
            self.check_blocks(seat, int(batch.total[seat]))
            request = batch.leave(seat)
            with self.watch:
                self.kv.finish(request.name)
            batch.running.remove(seat)
            self.figures.finished_requests += 1
            self.observer.finished(self, request)
