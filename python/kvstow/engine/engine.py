r"""Ledger, host tier and movers in one: what the author of an inference engine builds on.

The caller batches, computes and says so; this accounts and moves. A request, and what moves it:

    added ---- admit: RUNS -----------------------> running -- finish -->
      ^  \---- admit: LOADS ---> loading -- poll ---/  |
      \-- poll: failed, late ------/                   |
      \-- preempt -------------------------------------/

Blocks under a copy are pinned from the moment it is planned until it has really ended, whatever
has become of its request meanwhile. What `sleep` and `wake` do is in `kvstow.engine.sleep`.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from math import isfinite
from numbers import Real
from os import PathLike
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstow._core import (
    BlockLedger,
    ConfigError,
    Job,
    JobEnd,
    KvstowError,
    OffloadScheduler,
    OutOfBlocks,
    StateError,
    StepAllocation,
    UnknownRequest,
)
from kvstow.arguments import checked_int
from kvstow.closing import Closing, call_all
from kvstow.engine.arguments import (
    Group,
    check_callables,
    check_sizes,
    checked_counts,
    checked_groups,
    checked_limit_s,
    checked_names,
)
from kvstow.engine.ranks import (
    MakeMover,
    RankLayouts,
    Ranks,
    Transfer,
    build_arenas,
    checked_layouts,
)
from kvstow.engine.recovery import Change, mend, settle
from kvstow.engine.snapshot_file import HOST, To
from kvstow.observability.events import BlockEvent, EventFile, TransferEvent
from kvstow.transfer import Event, mover_for
from kvstow.transfer.layout import MAX_BLOCKS
from kvstow.transfer.mover import check_event

if TYPE_CHECKING:
    from kvstow.engine.sleep import Asleep, Awake, BlockIds

__all__ = ["Admission", "AdmissionState", "Engine", "Landed", "Policy", "Transfer"]

Policy: TypeAlias = Literal["lru", "hit-density"]
Ids: TypeAlias = npt.NDArray[np.int32]
Ints: TypeAlias = Sequence[int] | npt.NDArray[np.integer]


# What the ledger counts at most.
_MAX_TOKENS = 1 << 40


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
        failed: requests whose load has failed or is late, each reported once. They hold nothing:
            admit them again, and they recompute.
        num_stored_blocks: that the host has now.
        num_failed_stores: jobs that have failed or are late, each reported once.
    """

    loaded: list[str]
    failed: list[str]
    num_stored_blocks: int
    num_failed_stores: int


class Engine(Closing):
    """Block tables, prefix cache and host tier of one engine, and the copies between them.

    The loop of its user: `poll`, `step` the running requests, `admit` waiting ones, compute, tell
    `computed`, `finish` those that are done. For one thread. Use it as a context manager, or call
    `close`.

    A method that raises a `KvstowError` has changed nothing. Another exception may come in the
    middle of one: Ctrl-C, for example, or an `after` that raises. Then the next call ends all
    copies as failed and goes on; `poll` reports them. A running request may be in `failed` then.

    Attributes:
        ledger: the device's accounting, to look at.
        scheduler: the host tier's, to look at.
        arenas: the host memory, one per rank.
        movers: one per group, rank by rank.
    """

    def __init__(  # noqa: PLR0913 - each a choice of the caller's, most of them rarely made
        self,
        num_device_blocks: int,
        num_host_blocks: int,
        groups: Sequence[Group],
        layouts: RankLayouts,
        *,
        mode: Literal["eager", "lazy"] = "eager",
        policy: Policy = "lru",
        horizon_blocks: int | None = None,
        load_timeout_s: float | None = None,
        store_timeout_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        max_in_flight_tokens: int | None = None,
        world_size: int = 1,
        blocks_per_slot: int = 1,
        events: bool = False,
        events_path: str | PathLike[str] | None = None,
        mover: MakeMover = mover_for,
    ) -> None:
        """Build ledger, host tier, host memory and movers.

        Args:
            num_device_blocks: of the pool that all groups share, the null block included.
            num_host_blocks: slots of the host tier; a block of any group takes one, or
                `blocks_per_slot` consecutive blocks of a prompt do.
            groups: how the layers attend, in the order of the block tables.
            layouts: one per group: where the bytes of its blocks lie. With several ranks one such
                list for each: they hold different shards of a block, under the same id.
            mode: "eager" stores blocks as soon as they are computed, "lazy" when the device is
                about to evict them.
            horizon_blocks: lazy, how many of the next blocks to be evicted are stored: what one
                step may take, its tokens and the loads that may be admitted.
            policy: which slots the host tier gives up first: "lru", or "hit-density", which
                learns from what comes back.
            load_timeout_s: a load that takes longer fails its request, which then recomputes; its
                blocks stay out of reach until the copy has really ended. None: never.
            store_timeout_s: a store that takes longer has failed; its blocks are pinned until the
                copy has really ended, and another store may bring them to the host. None: never.
            clock: finite seconds, for the two timeouts and the times of transfers and events.
            max_in_flight_tokens: as `BlockLedger` takes it.
            world_size: ranks, each with device and host memory of its own; a transfer is one of
                all of them, and fails or is late if it is so on one.
            blocks_per_slot: more than 1 makes for longer runs of host memory, and stores no tail
                that does not fill a slot; for an eager engine whose groups are all full attention.
            events: keep events for `take_events` and `take_transfer_events`.
            events_path: the file to append all events to, as `kvstow.observability.events` says.
            mover: makes the mover of a group; called for each group, rank by rank. The one that
                suits the device, unless given.

        Raises:
            ConfigError: sizes that cannot be right, or that contradict each other, or a file that
                cannot be opened.
        """
        groups = checked_groups(groups)
        check_sizes(
            num_device_blocks=num_device_blocks,
            num_host_blocks=num_host_blocks,
            world_size=world_size,
            blocks_per_slot=blocks_per_slot,
        )
        rank_layouts = checked_layouts(layouts, world_size, len(groups), num_device_blocks)
        load_timeout_s = checked_limit_s("load_timeout_s", load_timeout_s)
        store_timeout_s = checked_limit_s("store_timeout_s", store_timeout_s)
        check_callables(clock=clock, mover=mover)
        if (mode == "lazy") != (horizon_blocks is not None):
            raise ConfigError(
                f"mode is {mode!r} and horizon_blocks {horizon_blocks}; a lazy engine needs a "
                "horizon, an eager one has none"
            )
        if horizon_blocks is not None:
            horizon_blocks = checked_int(
                "horizon_blocks", horizon_blocks, 1, MAX_BLOCKS, "pass the blocks of a step"
            )
        has_events = events or events_path is not None
        # As it is built now, it is built again when it wakes: over another pool, maybe.
        self._new_ledger = partial(
            BlockLedger,
            groups=groups,
            publish="computed",
            max_in_flight_tokens=max_in_flight_tokens,
            events=has_events,
        )
        self._new_scheduler = partial(
            OffloadScheduler,
            num_host_blocks,
            groups,
            mode=mode,
            policy=policy,
            blocks_per_slot=blocks_per_slot,
            world_size=world_size,
            events=has_events,
        )
        self.ledger = self._new_ledger(num_device_blocks)
        self.scheduler = self._new_scheduler(num_device_blocks=num_device_blocks)
        self._new_ranks = partial(Ranks, mover=mover)
        with ExitStack() as built:
            self._event_file: EventFile | None = None
            if events_path is not None:
                self._event_file = built.enter_context(EventFile(events_path, clock=clock))
            num_places = num_host_blocks * blocks_per_slot
            arenas = build_arenas(rank_layouts, num_places, blocks_per_slot)
            for arena in arenas:
                built.enter_context(arena)
            self._ranks = self._new_ranks(rank_layouts, arenas)
            built.pop_all()
        self.arenas, self.movers = self._ranks.arenas, self._ranks.movers
        self._keeps_events = events
        self._block_events: list[BlockEvent] = []
        self._transfer_events: list[TransferEvent] = []
        self._groups, self._world_size = groups, world_size
        self._block_sizes = [group.block_size for group in groups]
        self._counts = _Counts(self._capacity_tokens(self.ledger))
        # A pair, because another thread reads both at once.
        self._evicted_before = self.ledger, 0
        self._blocks_per_slot = blocks_per_slot
        self._horizon_blocks = horizon_blocks
        self._load_timeout_s = load_timeout_s
        self._store_timeout_s = store_timeout_s
        self._clock = clock
        self._requests: dict[str, _Request] = {}
        self._running: set[str] = set()
        self._transfers: dict[int, Transfer] = {}
        # Stores under way whose blocks are unpinned already, and those that are late.
        self._released: set[int] = set()
        self._late: set[int] = set()
        self._change = Change()
        self._unwritten: list[BlockEvent | TransferEvent] = []
        self._refused_id = ""
        self._asleep: Asleep | None = None
        self._untold = Landed([], [], 0, 0)

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
        if not isinstance(request_id, str):
            raise ConfigError(f"request_id is {request_id!r}, expected a str: pass its name")
        ints, keys = _as_lists(tokens, extra_keys)
        with self._change:
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
        new, (ints, keys) = list(hashes), _as_lists(tokens, extra_keys)
        with self._change:
            self.ledger.extend(request_id, new, tokens=ints, extra_keys=keys)  # type: ignore[arg-type]
            self._change.commit()
            self.scheduler.extend(request_id, new)
            # The hashes first: they tell whether an extension that was cut short has happened.
            request.hashes.extend(new)
            if request.tokens is not None and ints is not None:
                request.tokens.extend(ints)
            if request.extra_keys is not None and keys is not None:
                request.extra_keys.extend(keys)

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
            OutOfBlocks: not even an empty pool could hold what is asked for. Where it is the whole
                request, or `must_fit_tokens`, refuse the request: it can never run.
            ConfigError: a number that is not positive, or `after` is no `Event`.
        """
        self._check_open()
        check_event(after)
        request = self._request(request_id)
        if request.state != "added":
            raise StateError(f"request {request_id!r} is {request.state}; admit it once")
        check_sizes(
            num_lookahead_tokens=num_lookahead_tokens,
            reserve=reserve,
            must_fit_tokens=must_fit_tokens or 0,
        )
        self._check_can_fit(request_id, num_tokens, max_new_tokens, must_fit_tokens)
        begin_s = self._now_s()
        hit = self.ledger.lookup(request_id, num_tokens - 1)
        num_hit, num_external = hit.num_tokens, 0
        with self._change:
            if not request.recompute:
                found = self.scheduler.lookup(request_id, num_hit, num_tokens - 1)
                if found is None:
                    return Admission(AdmissionState.PENDING, num_hit)
                num_external = found
            num_new = 0 if num_external else min(num_tokens - num_hit, max_new_tokens)
            try:
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
                if taken is None:
                    num_slots = num_hit + num_external + num_new + num_lookahead_tokens
                    self._check_has_room(request_id, num_slots, num_hit + num_external, reserve)
            except KvstowError:
                self.scheduler.release(request_id)
                raise
            if taken is None:
                self._keep_host_hit(request_id)
                return Admission(AdmissionState.NO_ROOM, num_hit, num_external)
            self._change.commit()
            self._count_query(request, num_tokens, num_hit)
            if not num_external:
                self._run(request_id, request)
                tables = self.tables(request_id)
                return Admission(AdmissionState.RUNS, num_hit, 0, num_new, tables)
            deadline = _deadline_s(begin_s, self._load_timeout_s)
            job = self.scheduler.load(request_id, num_external, taken, deadline=deadline)
            request.state, request.load_id = "loading", job.job_id
            tables = self.tables(request_id)
            num_bytes, num_loaded = self._ranks.num_bytes(job), num_hit + num_external
            transfer = Transfer(job, "load", num_bytes, begin_s, request_id, num_loaded)
            self._start(transfer, after)
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
        """Publish and store what a step has made due: call it after each, with its requests.

        Until then nobody finds the blocks of the step. So requests of one step do not share what it
        computes, and one that leaves before its step is computed leaves nothing behind.
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
        check_event(after)
        self._check_running(request_ids)
        requests = self._requests
        counts = checked_counts("num_computed_tokens", num_computed_tokens, len(request_ids))
        due = [
            (name, requests[name], count)
            for name, count in zip(request_ids, counts, strict=True)
            if count >= requests[name].due_tokens
        ]
        if not due and self._horizon_blocks is None:
            return None
        self._check_granted(due)
        begin_s = self._now_s()
        deadline = _deadline_s(begin_s, self._store_timeout_s)
        with self._change:
            job = self._planned(due, deadline) if due else None
            self._change.commit()
            # Before this nobody finds the blocks: a request may leave before its step is computed.
            self.ledger.cache_step([name for name, _, _ in due], [count for _, _, count in due])
            if self._horizon_blocks is not None:
                job = self.scheduler.store_evictable(
                    self.ledger.pool, self._horizon_blocks, deadline=deadline
                )
            if job is None:
                return None
            transfer = Transfer(job, "store", self._ranks.num_bytes(job), begin_s)
            self._start(transfer, after)
        return transfer

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
            with self._change:
                self._change.commit()
                self._restart(request_id, request)

    def finish(self, request_id: str) -> None:
        """Forget a request that is done or aborted, at any moment; its copies go on."""
        self._request(request_id)
        with self._change:
            self._change.commit()
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
        """End the copies that are done, then fail those that are late. Never blocks.

        What a call that raised had found, the next one reports. So does the first one after a sleep
        for what ended then.
        """
        self._check_awake()
        self._end_ended()
        self.flush_events()
        untold, requests = self._untold, self._requests
        nothing = Landed([], [], 0, 0)
        if untold.loaded or untold.failed:
            # Where a call raised, the caller may have finished or preempted one of them since.
            states = {name: one.state for name, one in requests.items()}
            untold.loaded[:] = [name for name in untold.loaded if states.get(name) == "running"]
            untold.failed[:] = [name for name in untold.failed if states.get(name) == "added"]
        self._untold = nothing
        return untold

    def end(self, transfer: Transfer) -> JobEnd:
        """Wait for one transfer and account for its end, as `poll` does for all that are done.

        The request that waits for a load runs if the result is `ok`; if not, it is to be admitted
        anew. Where the result is `late`, `expire` or `poll` has reported it already.

        Raises:
            StateError: it has ended already.
        """
        self._check_awake()
        job_id = transfer.job.job_id
        if self._transfers.get(job_id) is not transfer:
            raise StateError(f"job {job_id} is not in flight here; a transfer ends once")
        return self._end(transfer, report=False)

    def expire(self) -> list[str]:
        """Fail the requests whose loads are late by now, and name them, each once.

        The next `poll` reports the stores that are late.
        """
        self._check_awake()
        num_reported = len(self._untold.failed)
        self._fail_late()
        failed = self._untold.failed[num_reported:]
        del self._untold.failed[num_reported:]
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
        self.flush_events()
        taken, self._block_events = self._block_events, []
        return taken

    def take_transfer_events(self) -> list[TransferEvent]:
        """What has happened to jobs since the last call; always empty without `events`.

        Every `TransferInitiated` is followed by one `TransferCompleted`.
        """
        self.flush_events()
        taken, self._transfer_events = self._transfer_events, []
        return taken

    def flush_events(self) -> None:
        """Write what has happened to the events file, as `poll` and `close` do."""
        if self._event_file is None and not self._keeps_events:
            return
        # First where an error of the clock cannot lose it.
        self._unwritten += self.ledger.pool.take_events()
        self._unwritten += self.scheduler.take_events()
        self._unwritten += self.scheduler.take_transfer_events()
        if self._event_file is not None:
            self._event_file.write(self._unwritten)
        taken, self._unwritten = self._unwritten, []
        if self._keeps_events:
            self._block_events += [one for one in taken if isinstance(one, BlockEvent)]
            self._transfer_events += [one for one in taken if isinstance(one, TransferEvent)]

    def stats(self) -> dict[str, float]:
        """Those of `OffloadScheduler.stats`, and what only the whole engine knows.

        Counters: device_query_tokens (in whole blocks, that admitted requests looked for) and
        device_hit_tokens (found), device_evicted_blocks; of transfers that went well, all ranks,
        stored_bytes, loaded_bytes, and store_seconds and load_seconds from their submission until
        `poll` or `end` saw their end; lost_events (that the events file lacks). Gauges: requests,
        device_blocks_free, device_blocks_cached. Capacities: device_capacity_blocks (without the
        null block), device_capacity_tokens, and capacity_blocks (host slots).

        May be called from any thread.
        """
        (ledger, evicted_before), counts = self._evicted_before, self._counts
        pool, file = ledger.pool, self._event_file
        return self.scheduler.stats() | {
            "requests": ledger.num_requests,
            "device_blocks_free": pool.num_free,
            "device_blocks_cached": pool.num_cached,
            "device_evicted_blocks": evicted_before + pool.num_evicted,
            "device_capacity_blocks": pool.num_blocks - 1,
            "device_capacity_tokens": counts.capacity_tokens,
            "capacity_blocks": self.scheduler.num_host_blocks,
            "device_query_tokens": counts.query_tokens,
            "device_hit_tokens": counts.hit_tokens,
            "stored_bytes": counts.num_bytes["store"],
            "loaded_bytes": counts.num_bytes["load"],
            "store_seconds": counts.seconds["store"],
            "load_seconds": counts.seconds["load"],
            "lost_events": 0 if file is None else file.num_lost,
        }

    def sleep(  # noqa: PLR0913 - each a choice of the caller's, most of them rarely made
        self,
        *,
        after: Event,
        preserve: bool = True,
        to: To = HOST,
        identity: str = "",
        weights_version: str = "",
        timeout_s: float | None = None,
    ) -> None:
        """Let this engine sleep. When this returns, its device memory may go.

        See `kvstow.engine.sleep.sleep` for the arguments and errors.
        """
        from kvstow.engine.sleep import sleep  # noqa: PLC0415 - it imports this module

        sleep(
            self,
            after=after,
            preserve=preserve,
            to=to,
            identity=identity,
            weights_version=weights_version,
            timeout_s=timeout_s,
        )

    def wake(  # noqa: PLR0913 - likewise
        self,
        layouts: RankLayouts,
        *,
        after: Event,
        num_device_blocks: int | None = None,
        block_ids: "BlockIds" = "same",
        identity: str = "",
        weights_version: str = "",
    ) -> "Awake":
        """Wake this engine over new device memory. When this returns, its blocks hold their bytes.

        See `kvstow.engine.sleep.wake` for the arguments and errors.
        """
        from kvstow.engine.sleep import wake  # noqa: PLC0415 - it imports this module

        return wake(
            self,
            layouts,
            after=after,
            num_device_blocks=num_device_blocks,
            block_ids=block_ids,
            identity=identity,
            weights_version=weights_version,
        )

    def check(self) -> None:
        """Verify every invariant. Raises `StateError` if one is broken."""
        self._recover()
        self.ledger.check()
        self.scheduler.check()
        in_flight, stats = len(self._transfers), self.scheduler.stats()
        num_jobs = stats["jobs_in_flight"] + stats["quarantined_jobs"]
        if in_flight != num_jobs:
            raise StateError(f"{in_flight} transfers for {num_jobs} jobs in flight")
        if self._asleep is None and len(self._requests) != self.ledger.num_requests:
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

        Where one part cannot be closed, the others are all the same; then it raises the first
        error. Requests can still be finished and looked at; those that were loading never will run.
        A file in which the engine sleeps stays.
        """
        if self._asleep is not None:  # nobody can wake the requests that it accounts for
            self._requests.clear()
            self._replace_ledger(self._new_ledger(self.ledger.pool.num_blocks))
            self._asleep = None
        with self._change:
            self._change.commit()
            call_all(
                [
                    self._ranks.close,
                    partial(settle, self, closing=True),
                    *[arena.close for arena in self.arenas],
                    self.flush_events,
                    *([] if self._event_file is None else [self._event_file.close]),
                ]
            )

    # -- within --------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Put in order what an exception in the middle of the last operation has left."""
        if not self._change.is_torn:
            return
        if self._asleep is not None:
            self._forget_device()
        elif self._is_closed:
            settle(self, closing=True)
        else:
            mend(self)
        self._change.is_torn = False

    def _check_awake(self) -> None:
        self._recover()
        if self._asleep is not None:
            raise StateError("this Engine sleeps: wake it first, with Engine.wake")

    @property
    def _is_closed(self) -> bool:
        return any(arena.closed for arena in self.arenas)

    def _check_open(self) -> None:
        self._check_awake()
        if self._is_closed:
            raise StateError("this Engine is closed; build a new one")

    def _no_blocks(self) -> list[int]:
        return [0] * self.ledger.num_groups

    def _request(self, request_id: str) -> "_Request":
        self._check_awake()
        try:
            return self._requests[request_id]
        except (KeyError, TypeError):
            raise UnknownRequest(
                f"request {request_id!r} is not known: never added, or finished"
            ) from None

    def _check_running(self, request_ids: Sequence[str]) -> None:
        self._recover()
        if self._running.issuperset(checked_names(request_ids)):
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

    def _check_can_fit(
        self, request_id: str, num_tokens: int, max_new_tokens: int, must_fit_tokens: int | None
    ) -> None:
        """Refuse numbers that are wrong, and a request that not even an empty pool could hold."""
        way_out = "a request has 1 or more, and without room in the step it waits"
        checked_int("num_tokens", num_tokens, 1, _MAX_TOKENS, way_out)
        checked_int("max_new_tokens", max_new_tokens, 1, _MAX_TOKENS, way_out)
        num_usable = self.ledger.pool.num_blocks - 1
        needed = {num_tokens: self.ledger.min_blocks(num_tokens, num_tokens - 1)}
        if must_fit_tokens is not None:
            needed[must_fit_tokens] = self.ledger.blocks_to_fit(must_fit_tokens)
        for count, num_needed in needed.items():
            if num_needed > num_usable:
                raise OutOfBlocks(
                    f"request {request_id!r} needs {num_needed} blocks for {count} tokens, the "
                    f"pool has {num_usable}: it can never run; refuse it, or build the engine with "
                    f"num_device_blocks={num_needed + 1} or more"
                )

    def _check_has_room(
        self, request_id: str, num_slots: int, num_computed: int, reserve: int
    ) -> None:
        """Refuse an admission that would not fit into an empty pool either."""
        num_usable = self.ledger.pool.num_blocks - 1
        num_needed = self.ledger.min_blocks(num_slots, num_computed) + reserve
        if num_needed > num_usable:
            raise OutOfBlocks(
                f"request {request_id!r} needs {num_needed} blocks now, {reserve} of them in "
                f"reserve, and the pool has {num_usable}: pass less max_new_tokens, "
                "num_lookahead_tokens or reserve"
            )

    def _planned(
        self, due: "list[tuple[str, _Request, int]]", deadline: float | None = None
    ) -> Job | None:
        """Tell the scheduler what these requests have computed, and what their tables have new."""
        # Full blocks only, as the ledger's tables have them now. A block that has left a window is
        # null there, and may be another request's when its last token is computed.
        appended = [
            self.ledger.block_table(name, group)[num_told : max(num_told, count // size)]
            for name, request, count in due
            for group, (num_told, size) in enumerate(
                zip(request.num_told, self._block_sizes, strict=True)
            )
        ]
        job = self.scheduler.store(
            [name for name, _, _ in due],
            [count for _, _, count in due],
            np.concatenate(appended),
            np.cumsum([0, *map(len, appended)], dtype=np.int32),
            deadline=deadline,
        )
        size = self.ledger.hash_block_size
        lengths = iter(map(len, appended))
        for _, request, count in due:
            request.num_told = [told + next(lengths) for told in request.num_told]
            request.num_computed, request.due_tokens = count, (count // size + 1) * size
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
        """Free what it holds and add it anew. Its load goes on, but nobody waits for it."""
        # First what the engine knows: cut short after that, the request is an added one.
        self._requests[request_id] = anew = request.anew(self._no_blocks(), recompute=recompute)
        self._running.discard(request_id)
        self.scheduler.finish(request_id)
        self.ledger.free(request_id)
        self._register(request_id, anew)

    def _keep_host_hit(self, request_id: str) -> None:
        """Let the host hold what one refused request has found, the head of a queue, no more."""
        if self._refused_id != request_id and self._refused_id in self._requests:
            self.scheduler.release(self._refused_id)
        self._refused_id = request_id

    def _now_s(self) -> float:
        now_s = self._clock()
        if not (isinstance(now_s, Real) and isfinite(now_s)):
            raise ConfigError(f"the clock says {now_s!r}, expected finite seconds: pass another")
        return now_s

    def _capacity_tokens(self, ledger: BlockLedger) -> int:
        """Of prompts, on the device, where every group keeps all of its blocks."""
        size, num_usable = ledger.hit_block_size, ledger.pool.num_blocks - 1
        return num_usable // sum(size // group.block_size for group in self._groups) * size

    def _count_query(self, request: "_Request", num_tokens: int, num_hit: int) -> None:
        """Count what an admitted request looked for on the device, and found."""
        size = self.ledger.hit_block_size
        num_known = len(request.hashes) * self.ledger.hash_block_size
        self._counts.query_tokens += min(num_tokens - 1, num_known) // size * size
        self._counts.hit_tokens += num_hit

    def _waiting_for(self, transfer: Transfer) -> str | None:
        """The request that a load is to make run, unless it was finished, preempted or failed."""
        request = self._requests.get(transfer.request_id or "")
        waits = request is not None and request.load_id == transfer.job.job_id
        return transfer.request_id if waits else None

    def _end_ended(self) -> None:
        """End the copies that are done, then fail those that are late; `poll` reports them."""
        for transfer in self.transfers:
            if transfer.poll():
                self._end(transfer, report=True)
            else:
                self._release_source(transfer)
        self._fail_late()

    def _end(self, transfer: Transfer, *, report: bool) -> JobEnd:
        """Wait for a transfer and account for its end; with `report`, poll reports it."""
        job_id, is_store = transfer.job.job_id, transfer.direction == "store"
        outcomes, end_s = transfer.outcomes(), self._now_s()
        with self._change:
            reports = [
                self.scheduler.complete(job_id, ok=ok, rank=rank)
                for rank, ok in enumerate(outcomes)
            ]
            self._change.commit()
            end = reports[-1]
            assert end is not None, f"all ranks have reported job {job_id}"
            if end.ok:
                self._counts.ended(transfer, end_s)
            request_id = self._waiting_for(transfer)
            if report and is_store and not end.late:
                self._report_store(len(transfer.job) if end.ok else 0, int(not end.ok))
            if report and request_id is not None:
                (self._untold.loaded if end.ok else self._untold.failed).append(request_id)
            del self._transfers[job_id]
            self._late.discard(job_id)
            self._unpin(end)
            if request_id is not None:
                request = self._requests[request_id]
                if end.ok:
                    self.ledger.cache(request_id, transfer.num_tokens)
                    self._run(request_id, request)
                else:
                    self._restart(request_id, request, recompute=True)
        return end

    def _fail_late(self) -> None:
        """Fail the copies that are late by now; poll reports them."""
        if self._load_timeout_s is None and self._store_timeout_s is None:
            return
        now_s = self._now_s()
        with self._change:
            self._change.commit()
            for transfer in [self._transfers[job_id] for job_id in self.scheduler.expire(now_s)]:
                if transfer.direction == "store":
                    self._late.add(transfer.job.job_id)
                    self._report_store(0, 1)
                elif (name := self._waiting_for(transfer)) is not None:
                    self._untold.failed.append(name)
                    self._restart(name, self._requests[name], recompute=True)

    def _report_store(self, num_blocks: int, num_failed: int) -> None:
        untold = self._untold
        self._untold = replace(
            untold,
            num_stored_blocks=untold.num_stored_blocks + num_blocks,
            num_failed_stores=untold.num_failed_stores + num_failed,
        )

    def _release_source(self, transfer: Transfer) -> None:
        """Unpin the blocks of a store that has read them, though its bytes are still on the way."""
        job_id = transfer.job.job_id
        if (
            transfer.direction == "store"
            and job_id not in self._released
            and transfer.source_released()
        ):
            with self._change:
                self._change.commit()
                self._released.add(job_id)
                self.ledger.pool.unpin(transfer.job.block_ids)

    def _unpin(self, end: JobEnd) -> None:
        if end.job_id in self._released:
            self._released.discard(end.job_id)
        else:
            self.ledger.pool.unpin(end.block_ids)

    def _start(self, transfer: Transfer, after: Event) -> None:
        """Pin the blocks of a planned job and submit its copies."""
        self.ledger.pool.pin(transfer.job.block_ids)
        self._transfers[transfer.job.job_id] = transfer
        self._ranks.submit(transfer, after)

    # -- for kvstow.engine.sleep -------------------------------------------------------------------

    def _is_new(self) -> bool:
        """Whether it has served nobody yet."""
        is_used = self._requests or self._transfers or self.ledger.pool.num_cached
        return not (is_used or len(self.scheduler.used_slots()))

    def _renew_movers(self) -> None:
        """Make movers that know nothing of the copies before them."""
        self._ranks = self._new_ranks(self._ranks.layouts, self.arenas)
        self.movers = self._ranks.movers

    def _fall_asleep(self, asleep: "Asleep") -> None:
        """Forget everything but the accounting, to look at."""
        self._change.commit()
        self._ranks.close()
        self._asleep = asleep
        self._forget_device()

    def _forget_device(self) -> None:
        """Drop what an engine that sleeps must not hold; again does nothing."""
        assert self._asleep is not None, "only a sleeping engine forgets its device"
        self.ledger.pool.evict(self._asleep.lost)
        self.flush_events()
        self._ranks.let_go()
        self._requests.clear()
        self._running.clear()
        self._refused_id, self._untold = "", Landed([], [], 0, 0)
        if self._asleep.is_in_file:
            call_all([arena.close for arena in self.arenas])

    def _awaken(
        self,
        ledger: BlockLedger,
        scheduler: OffloadScheduler,
        ranks: Ranks,
        requests: "dict[str, _Request]",
        untold: Landed,
    ) -> None:
        """Go on with these."""
        self.flush_events()
        running = {name for name, one in requests.items() if one.state == "running"}
        num_evicted = self._num_evicted()
        capacity_tokens = self._capacity_tokens(ledger)
        # In one call: an interrupt finds the engine as it was, or awake.
        vars(self).update(
            ledger=ledger,
            scheduler=scheduler,
            arenas=ranks.arenas,
            movers=ranks.movers,
            _ranks=ranks,
            _requests=requests,
            _running=running,
            _untold=untold,
            _evicted_before=(ledger, num_evicted),
            _asleep=None,
        )
        self._counts.capacity_tokens = capacity_tokens
        if self._horizon_blocks is not None:
            # Else what is evicted before its request's next step would not be stored.
            for name in running:
                self._planned([(name, requests[name], requests[name].num_computed)])

    def _replace_ledger(self, ledger: BlockLedger) -> None:
        """Take another ledger, and still count what the one before has evicted."""
        num_evicted = self._num_evicted()
        vars(self).update(ledger=ledger, _evicted_before=(ledger, num_evicted))

    def _num_evicted(self) -> int:
        ledger, evicted_before = self._evicted_before
        return evicted_before + ledger.pool.num_evicted


@dataclass(slots=True)
class _Counts:
    """What neither ledger nor scheduler counts: the tokens of lookups, bytes, and time."""

    capacity_tokens: int
    query_tokens: int = 0
    hit_tokens: int = 0
    num_bytes: dict[str, int] = field(default_factory=lambda: {"store": 0, "load": 0})
    seconds: dict[str, float] = field(default_factory=lambda: {"store": 0.0, "load": 0.0})

    def ended(self, transfer: Transfer, end_s: float) -> None:
        """Count a transfer that went well."""
        self.num_bytes[transfer.direction] += transfer.num_bytes
        self.seconds[transfer.direction] += end_s - transfer.begin_s


@dataclass(slots=True)
class _Request:
    """What the engine remembers of a request.

    Attributes:
        hashes: all that were told, for when it is added anew; tokens and extra keys likewise.
        num_told: per group, the blocks of its table that the scheduler was told of: full ones.
        num_computed: tokens, as far as a block became full with them.
        due_tokens: computed tokens at which its next block is full.
        load_id: the job it waits for; 0 for none.
        recompute: its load has failed: the next admission does not ask the host.
    """

    hashes: list[bytes]
    tokens: list[int] | None
    extra_keys: list[Sequence[object] | None] | None
    num_told: list[int]
    num_computed: int = 0
    due_tokens: int = 1
    state: Literal["added", "loading", "running", "stranded"] = "added"
    load_id: int = 0
    recompute: bool = False

    def anew(self, no_blocks: list[int], *, recompute: bool) -> "_Request":
        """The same request, before it was admitted."""
        return _Request(self.hashes, self.tokens, self.extra_keys, no_blocks, recompute=recompute)


def _as_lists(
    tokens: Ints | None, extra_keys: Sequence[Sequence[object] | None] | None
) -> tuple[list[int] | None, list[Sequence[object] | None] | None]:
    """Lists of their own, which the caller does not change later."""
    try:
        ints = None if tokens is None else [int(token) for token in tokens]
    except (OverflowError, TypeError, ValueError) as error:
        raise ConfigError(f"tokens is {tokens!r}, expected integers ({error})") from error
    return ints, None if extra_keys is None else list(extra_keys)


def _deadline_s(begin_s: float, timeout_s: float | None) -> float | None:
    return None if timeout_s is None else begin_s + timeout_s
