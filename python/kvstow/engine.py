r"""Ledger, host tier and movers in one: what the author of an inference engine builds on.

The caller batches, computes and says so; this accounts and moves. A request, and what moves it:

    added ---- admit: RUNS -----------------------> running -- finish -->
      ^  \---- admit: LOADS ---> loading -- poll ---/  |
      \-- poll: failed, late ------/                   |
      \-- preempt -------------------------------------/

Blocks under a copy are pinned from the moment it is planned until it has really ended, whatever
has become of its request meanwhile.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from math import isfinite
from types import TracebackType
from typing import Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstow._core import (
    AllBlocksCleared,
    BlockLedger,
    BlockRemoved,
    BlockStored,
    ChunkedLocal,
    ConfigError,
    FullAttention,
    Job,
    JobEnd,
    KvstowError,
    OffloadScheduler,
    SlidingWindow,
    StateError,
    StateSpace,
    StepAllocation,
    TransferError,
    UnknownRequest,
)
from kvstow.transfer import BlockLayout, Event, HostArena, HostMover, Mover, Ticket

__all__ = ["Admission", "AdmissionState", "Engine", "Landed", "Policy", "Transfer"]

Group: TypeAlias = FullAttention | SlidingWindow | ChunkedLocal | StateSpace
Policy: TypeAlias = Literal["lru", "hit-density"]
BlockEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
Ids: TypeAlias = npt.NDArray[np.int32]
Ints: TypeAlias = Sequence[int] | npt.NDArray[np.integer]


class AdmissionState(Enum):
    """What has become of a request that asked for admission."""

    RUNS = "runs"
    """It has slots for `num_new_tokens`: compute them in this step."""
    LOADS = "loads"
    """What the host has is on its way: `poll` says when it runs, or that it failed."""
    PENDING = "pending"
    """What it needs is being loaded for another request: ask again when that has landed."""
    NO_ROOM = "no room"
    """The device pool cannot give the blocks now. Nothing has changed, but that the host keeps what
    the request found there until another one is refused."""


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """The copies of one job, on their way.

    Attributes:
        job: which blocks and slots.
        direction: whether it brings blocks to the host or back.
        num_bytes: of all its copies.
        tickets: one for each group that has copies.
        request_id: of a load, who asked for it; None of a store.
        num_tokens: of a load, where the prefix ends that is there once it has landed.
    """

    job: Job
    direction: Literal["store", "load"]
    num_bytes: int
    tickets: list[Ticket] = field(default_factory=list)
    request_id: str | None = None
    num_tokens: int = 0

    def poll(self) -> bool:
        """Whether all copies have ended, well or not. Never blocks."""
        return all(ticket.poll() for ticket in self.tickets)

    def wait(self) -> bool:
        """Block until all copies have ended; whether all went well."""
        return all([_went_well(ticket) for ticket in self.tickets])


@dataclass(frozen=True, slots=True)
class Admission:
    """The answer to `Engine.admit`.

    Attributes:
        state: what has become of the request.
        num_hit_tokens: found on the device.
        num_external_tokens: found on the host, right after those.
        num_new_tokens: to compute in this step, right after the hit; 0 unless the request runs.
        block_tables: per group; empty unless it was admitted.
        transfer: of a request that loads.
    """

    state: AdmissionState
    num_hit_tokens: int = 0
    num_external_tokens: int = 0
    num_new_tokens: int = 0
    block_tables: tuple[Ids, ...] = ()
    transfer: Transfer | None = None


@dataclass(frozen=True, slots=True)
class Landed:
    """What `Engine.poll` found.

    Attributes:
        loaded: requests whose load has landed: they run, and go into the next `step`.
        failed: requests whose load has failed or is late, each told once. They hold nothing and are
            to be admitted anew, which then recomputes.
        num_stored_blocks: that the host has now.
        num_failed_stores: jobs.
    """

    loaded: list[str]
    failed: list[str]
    num_stored_blocks: int
    num_failed_stores: int


class Engine:
    """Block tables, prefix cache and host tier of one engine, and the copies between them.

    The loop of its user: `poll`, `step` the running requests, `admit` waiting ones, compute, tell
    `computed`, `finish` those that are done. For one thread. Use it as a context manager, or call
    `close`.

    Every method that raises has changed nothing.

    Attributes:
        ledger: the device's accounting, to look at.
        scheduler: the host tier's, to look at.
        arena: the host memory.
        movers: one per group.
    """

    def __init__(  # noqa: PLR0913 - each a choice of the caller's, most of them rarely made
        self,
        num_device_blocks: int,
        num_host_blocks: int,
        groups: Sequence[Group],
        layouts: Sequence[BlockLayout],
        *,
        mode: Literal["eager", "lazy"] = "eager",
        policy: Policy = "lru",
        horizon_blocks: int | None = None,
        load_timeout_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        max_in_flight_tokens: int | None = None,
        events: bool = False,
        mover: Callable[[BlockLayout, HostArena], Mover] = HostMover,
    ) -> None:
        """Build ledger, host tier, host memory and movers.

        Args:
            num_device_blocks: of the pool that all groups share, the null block included.
            num_host_blocks: slots of the host tier; a block of any group takes one.
            groups: how the layers attend, in the order of the block tables.
            layouts: one per group: where the bytes of its blocks lie.
            mode: "eager" stores blocks as soon as they are computed, "lazy" when the device is
                about to evict them.
            horizon_blocks: lazy, how many of the next blocks to be evicted are stored: what one
                step may take, its tokens and the loads that may be admitted.
            policy: which slots the host tier gives up first: "lru", or "hit-density", which
                learns from what comes back.
            load_timeout_s: a load that takes longer fails its request, which then recomputes; its
                blocks stay out of reach until the copy has really ended. None: never.
            clock: seconds, of which `load_timeout_s` are counted.
            max_in_flight_tokens: as `BlockLedger` takes it.
            events: keep block events for `take_events`.
            mover: makes the mover of a group.

        Raises:
            ConfigError: sizes that cannot be right, or that contradict each other.
        """
        if len(layouts) != len(groups):
            raise ConfigError(f"{len(groups)} groups but {len(layouts)} layouts; pass one for each")
        for index, layout in enumerate(layouts):
            if layout.num_blocks < num_device_blocks:
                raise ConfigError(
                    f"layouts[{index}] has memory for {layout.num_blocks} blocks, the pool has "
                    f"{num_device_blocks}; each group needs memory for every block of the pool"
                )
        if load_timeout_s is not None and not 0 < load_timeout_s < float("inf"):
            raise ConfigError(
                f"load_timeout_s is {load_timeout_s}; pass seconds above 0, or None to wait for "
                "every load"
            )
        if (mode == "lazy") != (horizon_blocks is not None):
            raise ConfigError(
                f"mode is {mode!r} and horizon_blocks {horizon_blocks}; a lazy engine needs a "
                "horizon, an eager one has none"
            )
        if horizon_blocks is not None and horizon_blocks < 1:
            raise ConfigError(f"horizon_blocks is {horizon_blocks}; it must be 1 or more")
        self.ledger = BlockLedger(
            num_device_blocks, groups, max_in_flight_tokens=max_in_flight_tokens, events=events
        )
        self.scheduler = OffloadScheduler(
            num_host_blocks,
            groups,
            mode=mode,
            policy=policy,
            num_device_blocks=num_device_blocks,
            events=events,
        )
        with ExitStack() as built:
            slot_bytes = max(layout.slot_bytes for layout in layouts)
            self.arena = built.enter_context(HostArena(num_host_blocks, slot_bytes))
            self.movers = [built.enter_context(mover(layout, self.arena)) for layout in layouts]
            built.pop_all()
        self._block_bytes = np.array([layout.slot_bytes for layout in layouts])
        self._horizon_blocks = horizon_blocks
        self._load_timeout_s = load_timeout_s
        self._clock = clock
        self._requests: dict[str, _Request] = {}
        self._running: set[str] = set()
        self._transfers: dict[int, Transfer] = {}
        self._refused_id = ""

    # -- requests ------------------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        *,
        tokens: Ints | None = None,
        extra_keys: Sequence[Sequence[object] | None] | None = None,
    ) -> None:
        """Make a request known, with the hashes of its blocks known so far.

        `tokens` and `extra_keys` are for events; see `BlockLedger.add`. Raises `StateError` for a
        request that is already known.
        """
        self._check_open()
        ints = None if tokens is None else list(map(int, tokens))
        keys = None if extra_keys is None else list(extra_keys)
        self._register(request_id, _Request(list(hashes), ints, keys, self._no_blocks()))

    def extend(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        *,
        tokens: Ints | None = None,
        extra_keys: Sequence[Sequence[object] | None] | None = None,
    ) -> None:
        """Append hashes as generated tokens fill blocks, before such a block is `computed`."""
        request = self._request(request_id)
        self.ledger.extend(request_id, hashes, tokens=tokens, extra_keys=extra_keys)  # type: ignore[arg-type]
        self.scheduler.extend(request_id, hashes)
        request.hashes.extend(hashes)
        if request.tokens is not None and tokens is not None:
            request.tokens.extend(map(int, tokens))
        if request.extra_keys is not None and extra_keys is not None:
            request.extra_keys.extend(extra_keys)

    def admit(  # noqa: PLR0913 - what `BlockLedger.allocate` can be asked
        self,
        request_id: str,
        num_tokens: int,
        max_new_tokens: int,
        *,
        after: Event,
        num_lookahead_tokens: int = 0,
        reserve: int = 0,
        must_fit_tokens: int | None = None,
    ) -> Admission:
        """Let an added request run with what the device holds, or load what the host holds first.

        The prefix found leaves one of its tokens to compute. A request whose load has failed does
        not ask the host this time.

        Args:
            num_tokens: all that are known of it: the prompt, and what it generated.
            max_new_tokens: to compute in this step, at most.
            after: the compute that may still read blocks of the pool: a load waits for it.
            num_lookahead_tokens: slots only.
            reserve: refuse unless this many blocks stay free.
            must_fit_tokens: refuse unless slots for that many tokens would fit as well.

        Raises:
            UnknownRequest: it was not added.
            StateError: it was admitted already, or this engine is closed.
            ConfigError: a number that is not positive, or `after` is no `Event`.
        """
        self._check_open()
        _check_event(after)
        request = self._request(request_id)
        if request.state != "added":
            raise StateError(f"request {request_id!r} is {request.state}; admit it once")
        if num_tokens < 1 or max_new_tokens < 1:
            raise ConfigError(
                f"num_tokens is {num_tokens} and max_new_tokens {max_new_tokens}; a request has 1 "
                "or more, and without room in the step it waits"
            )
        hit = self.ledger.lookup(request_id, num_tokens - 1)
        num_hit, num_external = hit.num_tokens, 0
        if not request.recompute:
            found = self.scheduler.lookup(request_id, num_hit, num_tokens - 1)
            if found is None:
                return Admission(AdmissionState.PENDING, num_hit)
            num_external = found
        num_new = 0 if num_external else min(num_tokens - num_hit, max_new_tokens)
        try:
            deadline = self._deadline() if num_external else None
            taken = self.ledger.allocate(
                request_id,
                num_new,
                hit=hit,
                num_external_tokens=num_external,
                num_lookahead_tokens=num_lookahead_tokens,
                delay_caching=num_external > 0,
                reserve=reserve,
                must_fit_tokens=must_fit_tokens,
            )
        except BaseException:
            self.scheduler.release(request_id)
            raise
        if taken is None:
            self._keep_host_hit(request_id)
            return Admission(AdmissionState.NO_ROOM, num_hit, num_external)
        if not num_external:
            self._run(request_id, request)
            tables = self.tables(request_id)
            return Admission(AdmissionState.RUNS, num_hit, 0, num_new, tables)
        job = self.scheduler.load(request_id, num_external, taken, deadline=deadline)
        request.state, request.load_id = "loading", job.job_id
        tables = self.tables(request_id)
        transfer = self._start("load", job, after, request_id, num_hit + num_external)
        return Admission(AdmissionState.LOADS, num_hit, num_external, 0, tables, transfer)

    def step(
        self,
        request_ids: Sequence[str],
        num_new_tokens: Ints,
        *,
        num_lookahead_tokens: int = 0,
        num_in_flight_tokens: int = 0,
    ) -> StepAllocation:
        """Grant slots to running requests, in order, until one does not fit.

        Raises:
            UnknownRequest: one was not added.
            StateError: one does not run: `admit` it, or wait until its load has landed.
        """
        self._check_running(request_ids)
        return self.ledger.allocate_step(
            request_ids,
            num_new_tokens,
            num_lookahead_tokens=num_lookahead_tokens,
            num_in_flight_tokens=num_in_flight_tokens,
        )

    def computed(
        self, request_ids: Sequence[str], num_computed_tokens: Ints, *, after: Event
    ) -> Transfer | None:
        """Store what a step has made due: call it after each, with its requests.

        Only requests in which a block became full are looked at further.

        Args:
            request_ids: running ones, none twice.
            num_computed_tokens: per request, tokens whose KV is there once `after` has happened.
            after: the compute that fills the blocks. No copy begins before it.

        Returns:
            What was begun; `poll` says how it went. None if nothing is to be stored.

        Raises:
            UnknownRequest: one was not added.
            StateError: one does not run, or this engine is closed.
            ConfigError: lists of unequal length, a request named twice or with more tokens than it
                was granted, or `after` is no `Event`.
        """
        self._check_open()
        _check_event(after)
        self._check_running(request_ids)
        if len(num_computed_tokens) != len(request_ids):
            raise ConfigError(
                f"{len(request_ids)} request_ids but {len(num_computed_tokens)} num_computed_tokens"
            )
        counts, requests = map(int, num_computed_tokens), self._requests
        due = [
            (name, requests[name], count)
            for name, count in zip(request_ids, counts, strict=True)
            if count >= requests[name].due_tokens
        ]
        job = self._planned(due) if due else None
        if self._horizon_blocks is not None:
            job = self.scheduler.store_evictable(self.ledger.pool, self._horizon_blocks)
        return None if job is None else self._start("store", job, after)

    def rewind(self, request_id: str, num_tokens: int) -> None:
        """Take granted tokens back to this many (rejected drafts); see `BlockLedger.rewind`."""
        self._check_running([request_id])
        self.ledger.rewind(request_id, num_tokens)

    def tables(self, request_id: str) -> tuple[Ids, ...]:
        """A request's block table per group; 0 where the group needs no block any more."""
        groups = range(self.ledger.num_groups)
        return tuple([self.ledger.block_table(request_id, group) for group in groups])

    def preempt(self, request_id: str) -> None:
        """Take a request's blocks away; it stays added, with all its hashes, to be admitted anew.

        Legal at any moment, with copies of it in flight too.
        """
        request = self._request(request_id)
        if request.state != "added":
            self._restart(request_id, request)

    def finish(self, request_id: str) -> None:
        """Forget a request that is done or aborted, at any moment; its copies go on."""
        self._request(request_id)
        del self._requests[request_id]
        self._running.discard(request_id)
        self.scheduler.finish(request_id)
        self.ledger.free(request_id)

    # -- copies --------------------------------------------------------------------------------

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """What is in flight, oldest first; late loads too, until they have really ended."""
        return tuple(self._transfers.values())

    def poll(self) -> Landed:
        """End the copies that are done, then fail the loads that are late. Never blocks."""
        loaded: list[str] = []
        failed: list[str] = []
        num_stored = num_failed_stores = 0
        for transfer in self.transfers:
            if not transfer.poll():
                continue
            request_id = self._waiting_for(transfer)
            ok = self.end(transfer).ok
            if transfer.direction == "store":
                num_stored += len(transfer.job) if ok else 0
                num_failed_stores += not ok
            elif request_id is not None:
                (loaded if ok else failed).append(request_id)
        return Landed(loaded, failed + self.expire(), num_stored, num_failed_stores)

    def end(self, transfer: Transfer) -> JobEnd:
        """Wait for one transfer and account for its end, as `poll` does for all that are done.

        The request that waits for a load runs if the result is `ok`; if not, it is to be admitted
        anew. Where the result is `late`, `expire` has already told of it.

        Raises:
            StateError: it has ended already.
        """
        job_id = transfer.job.job_id
        if self._transfers.get(job_id) is not transfer:
            raise StateError(f"job {job_id} is not in flight here; a transfer ends once")
        end = self.scheduler.complete(job_id, ok=transfer.wait())
        assert end is not None, f"job {job_id} has one rank, which has reported"
        request_id = self._waiting_for(transfer)
        del self._transfers[job_id]
        self.ledger.pool.unpin(end.block_ids)
        if request_id is not None:
            request = self._requests[request_id]
            if end.ok:
                self.ledger.cache(request_id, transfer.num_tokens)
                self._run(request_id, request)
            else:
                self._restart(request_id, request, recompute=True)
        return end

    def expire(self) -> list[str]:
        """Fail the requests whose loads are late by now, and name them, each once."""
        if self._load_timeout_s is None:
            return []
        late = [self._transfers[job_id] for job_id in self.scheduler.expire(self._clock())]
        failed = [name for name in map(self._waiting_for, late) if name is not None]
        for request_id in failed:
            self._restart(request_id, self._requests[request_id], recompute=True)
        return failed

    # -- the whole -----------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget every prefix, on the device and on the host, at any moment.

        Requests keep their blocks. Copies in flight go on without effect: who waits for one
        recomputes. What running requests compute from now on is cached again: where that must not
        be, `preempt` or `finish` them first.
        """
        self._check_open()
        self.scheduler.reset()
        if not self.ledger.pool.reset():
            self.ledger.pool.evict(np.arange(1, self.ledger.pool.num_blocks))

    def take_events(self) -> list[BlockEvent]:
        """The block events of both pools since the last call; always empty without `events`."""
        return [*self.ledger.pool.take_events(), *self.scheduler.take_events()]

    def stats(self) -> dict[str, int]:
        """Those of `OffloadScheduler.stats`, and gauges of the device pool and the requests."""
        pool = self.ledger.pool
        return self.scheduler.stats() | {
            "requests": len(self._requests),
            "device_blocks_free": pool.num_free,
            "device_blocks_cached": pool.num_cached,
        }

    def check(self) -> None:
        """Verify every invariant. Raises `StateError` if one is broken."""
        self.ledger.check()
        self.scheduler.check()
        in_flight, stats = len(self._transfers), self.scheduler.stats()
        num_jobs = stats["jobs_in_flight"] + stats["quarantined_jobs"]
        if in_flight != num_jobs:
            raise StateError(f"{in_flight} transfers for {num_jobs} jobs in flight")
        if len(self._requests) != self.ledger.num_requests:
            raise StateError(
                f"{len(self._requests)} requests, {self.ledger.num_requests} in the ledger"
            )
        for request_id, request in self._requests.items():
            if (request.state == "loading") != (request.load_id in self._transfers) or (
                (request.state == "running") != (request_id in self._running)
            ):
                raise StateError(f"{request_id!r} is {request.state}, its load {request.load_id}")

    def close(self) -> None:
        """End every copy, stop the movers and give the host memory back; again does nothing.

        Requests can still be finished and looked at; those that were loading never will run.
        """
        for mover in self.movers:
            mover.close()
        for end in self.scheduler.end_all():
            self.ledger.pool.unpin(end.block_ids)
        for request in self._requests.values():
            if request.state == "loading":
                request.state, request.load_id = "stranded", 0
        self._transfers.clear()
        self.arena.close()

    def __enter__(self) -> Self:
        """Return the engine itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    # -- within --------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.arena.closed:
            raise StateError("this Engine is closed; build a new one")

    def _no_blocks(self) -> list[int]:
        return [0] * self.ledger.num_groups

    def _request(self, request_id: str) -> "_Request":
        try:
            return self._requests[request_id]
        except KeyError:
            raise UnknownRequest(
                f"request {request_id!r} is not known: never added, or finished"
            ) from None

    def _check_running(self, request_ids: Sequence[str]) -> None:
        if self._running.issuperset(request_ids):
            return
        for request_id in request_ids:
            if (state := self._request(request_id).state) != "running":
                raise StateError(f"request {request_id!r} is {state} and does not run")

    def _check_granted(self, due: "list[tuple[str, _Request, int]]") -> None:
        if len({name for name, _, _ in due}) < len(due):
            raise ConfigError("request_ids names a request twice; name each once")
        for name, _, count in due:
            if count > (num_granted := self.ledger.num_granted_tokens(name)):
                raise ConfigError(
                    f"request {name!r} cannot have computed {count} tokens: it was granted "
                    f"{num_granted}"
                )

    def _planned(self, due: "list[tuple[str, _Request, int]]") -> Job | None:
        """Tell the scheduler what these requests have computed, and what their tables have new."""
        self._check_granted(due)
        # The ledger's own tables: a block that has left a window since it was taken is null.
        appended = [
            self.ledger.block_table(name, group)[num_told:]
            for name, request, _ in due
            for group, num_told in enumerate(request.num_told)
        ]
        job = self.scheduler.store(
            [name for name, _, _ in due],
            [count for _, _, count in due],
            np.concatenate(appended),
            np.cumsum([0, *map(len, appended)], dtype=np.int32),
        )
        size, lengths = self.ledger.hash_block_size, iter(map(len, appended))
        for _, request, count in due:
            request.num_told = [told + next(lengths) for told in request.num_told]
            request.due_tokens = (count // size + 1) * size
        return job

    def _register(self, request_id: str, request: "_Request") -> None:
        tokens, extra_keys = request.tokens, request.extra_keys
        self.ledger.add(request_id, request.hashes, tokens=tokens, extra_keys=extra_keys)  # type: ignore[arg-type]
        try:
            self.scheduler.add(request_id, request.hashes)
        except KvstowError:
            self.ledger.free(request_id)
            raise
        self._requests[request_id] = request

    def _run(self, request_id: str, request: "_Request") -> None:
        request.state, request.load_id = "running", 0
        self._running.add(request_id)

    def _restart(self, request_id: str, request: "_Request", *, recompute: bool = False) -> None:
        """Free what it holds and add it anew; a load that it waited for is nobody's now."""
        self.finish(request_id)
        hashes, tokens, keys = request.hashes, request.tokens, request.extra_keys
        anew = _Request(hashes, tokens, keys, self._no_blocks(), recompute=recompute)
        self._register(request_id, anew)

    def _keep_host_hit(self, request_id: str) -> None:
        """Let the host hold what one refused request has found, the head of a queue, no more."""
        if self._refused_id != request_id and self._refused_id in self._requests:
            self.scheduler.release(self._refused_id)
        self._refused_id = request_id

    def _deadline(self) -> float | None:
        if self._load_timeout_s is None:
            return None
        if not isfinite(now_s := self._clock()):
            raise ConfigError(f"the clock says {now_s}; it must tell finite seconds")
        return now_s + self._load_timeout_s

    def _waiting_for(self, transfer: Transfer) -> str | None:
        """The request that a load is to make run, unless it was finished, preempted or failed."""
        request = self._requests.get(transfer.request_id or "")
        waits = request is not None and request.load_id == transfer.job.job_id
        return transfer.request_id if waits else None

    def _start(
        self,
        direction: Literal["store", "load"],
        job: Job,
        after: Event,
        request_id: str | None = None,
        num_tokens: int = 0,
    ) -> Transfer:
        """Pin the blocks of a planned job and submit its copies; one that is refused has failed."""
        self.ledger.pool.pin(job.block_ids)
        num_bytes = int(np.diff(job.offsets) @ self._block_bytes)
        transfer = Transfer(job, direction, num_bytes, [], request_id, num_tokens)
        self._transfers[job.job_id] = transfer
        for mover, (begin, end) in zip(self.movers, pairwise(job.offsets.tolist()), strict=True):
            if begin == end:
                continue
            ids, slots = job.block_ids[begin:end], job.host_slots[begin:end]
            try:
                if direction == "store":
                    ticket = mover.store(ids, slots, after=after)
                else:
                    ticket = mover.load(slots, ids, after=after)
            except KvstowError as error:
                ticket = _Refused(error)
            transfer.tickets.append(ticket)
        return transfer


@dataclass(slots=True)
class _Request:
    """What the engine remembers of a request.

    Attributes:
        hashes: all that were told, for when it is added anew; tokens and extra keys likewise.
        num_told: per group, the blocks of its table that the scheduler knows.
        due_tokens: computed tokens at which its next block is full.
        load_id: the job it waits for; 0 for none.
        recompute: its load has failed: the next admission does not ask the host.
    """

    hashes: list[bytes]
    tokens: list[int] | None
    extra_keys: list[Sequence[object] | None] | None
    num_told: list[int]
    due_tokens: int = 1
    state: Literal["added", "loading", "running", "stranded"] = "added"
    load_id: int = 0
    recompute: bool = False


class _Refused(Ticket):
    """The ticket of a copy that its mover has not taken on."""

    def __init__(self, error: KvstowError) -> None:
        self._error = TransferError(f"the mover refused the transfer: {error}")
        self._error.__cause__ = error

    def poll(self) -> bool:
        return True

    @property
    def error(self) -> TransferError:
        return self._error

    def wait(self, timeout_s: float | None = None) -> None:
        raise self._error


def _went_well(ticket: Ticket) -> bool:
    try:
        ticket.wait()
    except TransferError:
        return False
    return True


def _check_event(after: Event) -> None:
    # What isinstance(after, Event) asks of a protocol, which takes 10 us.
    if not (hasattr(after, "wait") and hasattr(after, "add_done_callback")):
        raise ConfigError(
            f"after must be an Event (wait, add_done_callback), got {after!r}; pass READY where "
            "there is nothing to wait for"
        )
