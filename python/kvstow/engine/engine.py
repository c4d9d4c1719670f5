r"""`Engine`: ledger, host tier and movers in one object, for the author of an inference engine.

The caller batches, computes and reports what it has computed. The engine does the accounting and
moves the blocks. The life of a request:

    added ---- admit: RUNS -----------------------> running -- finish -->
      ^  \---- admit: LOADS ---> loading -- poll ---/  |
      \-- poll: failed or late --/                     |
      \-- preempt -------------------------------------/

What the engine knows is in `state`, its copies are in `copies`, and `recovery` repairs both after
an exception. This file has what users call: it checks arguments, and passes on.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Literal

from kvstow._core import (
    BlockLedger,
    ConfigError,
    Hashes,
    JobEnd,
    OffloadScheduler,
    StateError,
    StepAllocation,
    UnknownRequest,
)
from kvstow.arguments import checked_int
from kvstow.closing import Closing, call_all
from kvstow.engine.admission import Wish, admit, check_step_fits
from kvstow.engine.answers import Admission, Awake, Ids, Landed
from kvstow.engine.arguments import (
    Group,
    Policy,
    check_callables,
    check_flag,
    check_max_in_flight_tokens,
    check_mover,
    check_names,
    check_path,
    checked_counts,
    checked_groups,
    checked_limit_s,
    checked_names,
    checked_num_device_blocks,
    checked_num_host_blocks,
    checked_size,
    checked_world_size,
    refuse_repeated,
)
from kvstow.engine.below import checked_below
from kvstow.engine.blueprint import Blueprint
from kvstow.engine.copies import Copies
from kvstow.engine.disk_options import DiskOptions
from kvstow.engine.event_log import EventLog
from kvstow.engine.publication import check_chained, check_extension, publish, store_freed
from kvstow.engine.ranks import (
    MakeMover,
    RankLayouts,
    build_arenas,
    checked_layouts,
    refuse_blocks_of_tokens,
)
from kvstow.engine.recovery import recover, settle
from kvstow.engine.reset import reset
from kvstow.engine.shared import SharedOptions
from kvstow.engine.sleep import BlockIds, NewDevice, awaken, fall_asleep, restart
from kvstow.engine.snapshot_file import HOST, Model, To
from kvstow.engine.state import Ints, State
from kvstow.engine.transfer import Transfer
from kvstow.observability.events import BlockEvent, TransferEvent
from kvstow.tiers import SlotFile
from kvstow.tiers.shared import SharedStore
from kvstow.transfer import Event, HostArena, Mover, mover_for
from kvstow.transfer.fork import FORKED
from kvstow.transfer.mover import check_event


class Engine(Closing):
    """Block tables, prefix cache and host tier of one engine, and the copies between them.

    The loop of its user: `poll`, `step` the running requests, `admit` waiting ones, compute, report
    it with `computed`, `finish` the requests that are done. Call it from one thread. Use it as a
    context manager, or call `close`.

    A method that raises a `KvstowError` has changed nothing. Another exception may come in the
    middle of a method, for example Ctrl-C, or an error that `after` raises. Then the next call ends
    all copies as failed and goes on. `poll` reports them. A running request may be in `failed`
    then.

    Args:
        num_device_blocks: blocks of the pool that all groups share, the null block included.
        num_host_blocks: slots of the host tier. A slot holds a block of any group, or
            `blocks_per_slot` consecutive blocks of a prompt.
        groups: how the layers attend, in the order of the block tables.
        layouts: where the bytes of the blocks lie, one layout per group, in the order of `groups`.
            With several ranks, one such list for each. Ranks hold different shards of a block,
            under one id.
        mode: "eager" stores blocks as soon as they are computed. "lazy" stores them when the device
            is about to evict them.
        horizon_blocks: for a lazy engine, how many of the next blocks to be evicted it stores. It
            must cover one step: its tokens, and the loads that it may admit. Choose "eager" if the
            device has less than several times as many blocks.
        policy: which slots the host tier evicts first: "lru", or "hit-density", which learns from
            the blocks that come back.
        load_timeout_s: seconds after which a load is late. Its request fails and recomputes. Its
            blocks stay pinned until the copy has ended. None: a load is never late.
        store_timeout_s: seconds after which a store is late and has failed. Its blocks stay pinned
            until the copy has read them. Another store may bring them to the host. None: no limit.
        clock: returns finite, monotonic seconds, for timeouts and times of transfers and events.
        max_in_flight_tokens: the most tokens that one request has in unfinished steps: the token
            budget of a step, or its part that one request may take, times the number of steps that
            overlap. With it, `must_fit_tokens` counts for a window or a chunk only what a request
            holds at once. Steps are not compared with it. If it is too small, a later `step` may
            find no room for an admitted request.
        world_size: number of ranks, each with its own device and host memory. A transfer copies on
            all of them. It fails, or is late, if it does so on one.
        blocks_per_slot: with more than 1, copies have longer runs of host memory, and a tail that
            does not fill a slot is not stored. It needs an eager engine and full attention only.
        events: keep events for `take_events` and `take_transfer_events`, the last 1,048,576 of each
            kind.
        disk: where the disk tier lies: a slot file, with several ranks one for each. It keeps what
            the host stores, also when the process ends. None for no disk tier.
        disk_options: how the engine uses the disk tier. A disk tier needs them, unless there is a
            shared tier too.
        shared: a store that engines of one model share. Each finds what any of them has stored.
            None for no shared tier. With a disk tier, the store is asked for what the disk lacks.
        shared_options: how the engine uses the shared tier, and a disk tier beside it. A shared
            tier needs them.
        events_path: file to which all events are appended, in the form that
            `kvstow.observability.events` describes.
        mover: makes the mover of a group. The engine calls it for each group, rank by rank. By
            default it takes the mover that suits the device. With
            `functools.partial(mover_for, verify=True)` a load fails if host memory changed.

    Raises:
        ConfigError: sizes that are wrong or contradict each other, or a file that cannot be opened.
        SlotFileMismatch: a file of the disk tier holds blocks of something else.
        StateError: a file of the disk tier is open already, here or in another process.
    """

    def __init__(  # noqa: PLR0913 - the caller chooses each, most of them rarely
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
        disk: SlotFile | Sequence[SlotFile] | None = None,
        disk_options: DiskOptions | None = None,
        shared: SharedStore | None = None,
        shared_options: SharedOptions | None = None,
        events: bool = False,
        events_path: str | os.PathLike[str] | None = None,
        mover: MakeMover = mover_for,
    ) -> None:
        groups = checked_groups(groups)
        # As ints, because a product of narrow numpy integers may overflow.
        num_device_blocks = checked_num_device_blocks(num_device_blocks)
        num_host_blocks = checked_num_host_blocks(num_host_blocks)
        world_size = checked_world_size(world_size)
        blocks_per_slot = checked_size("blocks_per_slot", blocks_per_slot)
        check_max_in_flight_tokens(max_in_flight_tokens)
        rank_layouts = checked_layouts(layouts, world_size, len(groups), num_device_blocks)
        refuse_blocks_of_tokens(rank_layouts, groups, num_device_blocks)
        load_timeout_s = checked_limit_s("load_timeout_s", load_timeout_s)
        store_timeout_s = checked_limit_s("store_timeout_s", store_timeout_s)
        check_names(mode=mode, policy=policy)
        check_callables(clock=clock)
        check_mover(mover)
        check_flag("events", events, "name a file of events with events_path")
        open_below = checked_below(disk, disk_options, shared, shared_options, world_size)
        blueprint = Blueprint.of(
            groups,
            num_host_blocks,
            mode=mode,
            policy=policy,
            horizon_blocks=horizon_blocks,
            max_in_flight_tokens=max_in_flight_tokens,
            world_size=world_size,
            blocks_per_slot=blocks_per_slot,
            events=events or events_path is not None,
            mover=mover,
        )
        ledger = blueprint.ledger(num_device_blocks)
        scheduler = blueprint.scheduler(num_device_blocks=num_device_blocks)
        with ExitStack() as built:
            self._events = built.enter_context(EventLog(events_path, clock, keeps=events))
            arenas = build_arenas(rank_layouts, num_host_blocks * blocks_per_slot, blocks_per_slot)
            list(map(built.enter_context, arenas))
            opened = open_below(blueprint, rank_layouts, arenas)
            if opened is not None:
                blueprint = built.enter_context(opened).below(blueprint)
                scheduler = blueprint.scheduler(num_device_blocks=num_device_blocks)
            ranks = blueprint.ranks(rank_layouts, arenas)
            built.pop_all()
        self._state = State(blueprint, ledger, scheduler, ranks)
        self._copies = Copies(self._state, clock, load_timeout_s, store_timeout_s, opened)
        self._attach_disk()

    @property
    def ledger(self) -> BlockLedger:
        """The accounting of the device, for inspection."""
        return self._state.ledger

    @property
    def scheduler(self) -> OffloadScheduler:
        """The accounting of the host tier, for inspection."""
        return self._state.scheduler

    @property
    def arenas(self) -> list[HostArena]:
        """The host memory, one arena per rank."""
        return self._state.ranks.arenas

    @property
    def movers(self) -> list[Mover]:
        """The movers, one per group, rank by rank."""
        return self._state.ranks.movers

    # -- requests ------------------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        *,
        tokens: Ints | None = None,
        extra_keys: Sequence[Sequence[object] | None] | None = None,
    ) -> None:
        """Add a request, with the hashes of its full blocks so far.

        Each hash covers `ledger.hash_block_size` tokens, the greatest common divisor of the groups'
        block sizes: `hash_tokens(tokens, engine.ledger.hash_block_size)`. It is chained with the
        hash before it, so no two are equal.

        `tokens` and `extra_keys` are for events, as in `BlockLedger.add`. Raises `StateError` for a
        request that is already known.
        """
        self._check_open()
        if not isinstance(request_id, str):
            raise ConfigError(f"request_id is {request_id!r}, expected a str: pass its name")
        if request_id in self._state.requests:
            raise StateError(
                f"request {request_id!r} was added before: finish it, or give this one another name"
            )
        hashes = Hashes(hashes)  # which ledger and scheduler share
        check_chained(request_id, [], hashes)
        with self._state.change:
            self._state.add(request_id, hashes, tokens, extra_keys)

    def extend(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        *,
        tokens: Ints | None = None,
        extra_keys: Sequence[Sequence[object] | None] | None = None,
    ) -> None:
        """Append hashes as generated tokens fill blocks, before `computed` reports such a block.

        They continue the request's last hash: pass it to `hash_tokens` as `parent`, or None if the
        request has none yet. So no two hashes of a request are equal. `tokens` and `extra_keys` are
        those of the new blocks alone, for events. A request that was added with tokens needs them.

        Raises `ConfigError` if a running request would have hashes of more tokens than it can know:
        those granted and the one sampled behind them, or `num_tokens` of its admission.

        If an exception other than a `KvstowError` cuts this short, the request does not have the
        hashes. The next `poll` then reports a running request as failed.
        """
        self._check_open()
        hashes = Hashes(hashes)  # which ledger and scheduler share
        state = self._known(request_id)
        check_extension(state, request_id, len(hashes))
        check_chained(request_id, state.ledger.hashes(request_id), hashes)
        with state.change:
            state.extend(request_id, hashes, tokens, extra_keys)

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

        At least one token is left to compute. So a prefix that is found completely hits without
        its last block, because a hit ends at a block boundary. A request whose load failed does
        not ask the host this time.

        Args:
            request_id: an added request.
            num_tokens: all tokens known of it: the prompt, and what it generated.
            max_new_tokens: the most tokens to compute in this step.
            after: the compute that may still read or write blocks of the pool, of the last step
                that has begun. A load waits for it.
            num_lookahead_tokens: tokens that get slots only. A request that loads first gets these
                slots from `step`.
            reserve: refuse unless this many blocks stay free.
            must_fit_tokens: refuse unless slots for that many tokens would fit as well. It counts
                all tokens of a window or a chunk too, unless the engine has `max_in_flight_tokens`.

        Raises:
            UnknownRequest: the request was not added.
            StateError: the request was admitted already, or this engine is closed.
            RequestTooLarge: the request can never run, because the pool is too small. Refuse it.
            OutOfBlocks: not even an empty pool could hold this. The request could run with less:
                the message names the argument to change.
            ConfigError: a number that is not positive, fewer tokens than were hashed, or `after` is
                no `Event`.
        """
        self._check_open()
        check_event(after)
        wish = Wish.of(
            request_id,
            num_tokens,
            max_new_tokens,
            num_lookahead_tokens=num_lookahead_tokens,
            reserve=reserve,
            must_fit_tokens=must_fit_tokens,
        )
        state = self._known(request_id)
        if (found := state.requests[request_id].state) != "added":
            is_running = found == "running"
            fix = "call step for more of its tokens" if is_running else "wait for poll to report it"
            raise StateError(f"request {request_id!r} is {found}; admit a request once, and {fix}")
        wish.check(state)
        state.requests[request_id].num_known = wish.num_tokens
        return admit(state, self._copies, wish, after)

    def step(
        self,
        request_ids: Sequence[str],
        num_new_tokens: Ints,
        *,
        num_lookahead_tokens: int = 0,
        num_in_flight_tokens: int = 0,
    ) -> StepAllocation:
        """Grant slots to running requests, in order, until one does not fit.

        Args:
            request_ids: running requests, each named once, the first to be served first.
            num_new_tokens: shape [n], the tokens that each computes next, drafts to verify
                included. Leave out a request that computes none in this step.
            num_lookahead_tokens: tokens beyond those that get slots only, for each request.
            num_in_flight_tokens: granted tokens of each whose step is not finished. Where they
                differ, the most of any of these requests.

        Returns:
            How many requests, from the first, have their slots (`num_granted`), and their new
            blocks. The others keep their blocks, except those that their group no longer reads.
            Each call grants further tokens. So after a preemption ask again for the others alone,
            `request_ids[num_granted:]`: a window would leave blocks that its tokens still read.

        Raises:
            OutOfBlocks: the first request would not get its slots in an empty pool either, but
                fewer. Ask again with fewer tokens, drafts and lookahead included. It keeps its
                blocks, except those that their group no longer reads.
            UnknownRequest: a request was not added.
            StateError: a request does not run: `admit` it, or wait until its load has landed. Or
                this engine is closed.
            ConfigError: lists of unequal length, a request named twice, or one with 0 new tokens.
        """
        self._check_open()
        num_lookahead_tokens = checked_size("num_lookahead_tokens", num_lookahead_tokens)
        num_in_flight_tokens = checked_size("num_in_flight_tokens", num_in_flight_tokens)
        self._check_running(request_ids)
        step = self._state.ledger.allocate_step(
            request_ids,
            num_new_tokens,
            num_lookahead_tokens=num_lookahead_tokens,
            num_in_flight_tokens=num_in_flight_tokens,
        )
        if not step.num_granted and len(request_ids):
            num_slots = int(num_new_tokens[0]) + num_lookahead_tokens
            check_step_fits(self._state, request_ids[0], num_slots, num_in_flight_tokens)
        return step

    def computed(
        self, request_ids: Sequence[str], num_computed_tokens: Ints, *, after: Event
    ) -> Transfer | None:
        """Publish and store what a step has computed. Call it after each step, with its requests.

        No lookup finds the blocks of a step before this call. So requests of one step do not share
        what it computes, and a request that leaves before the call leaves no key behind. The
        engine looks further only at requests in which a block became full.

        Args:
            request_ids: running requests, each named once.
            num_computed_tokens: per request, all of its tokens whose KV exists once `after` has
                happened, those of hits and of earlier steps included.
            after: the compute that fills the blocks. No copy begins before it. The events of later
                calls happen later. If it fails, its store fails, but lookups still find blocks
                that were never computed. Then `preempt` or `finish` every request, and `reset`,
                before you admit another.

        Returns:
            The store that began, if any. `poll` reports its end.

        Raises:
            UnknownRequest: a request was not added.
            StateError: a request does not run, or this engine is closed.
            ConfigError: lists of unequal length, a number that is no integer, a request named
                twice, with more tokens than it was granted or with fewer than fill the blocks
                reported before, or `after` is no `Event`.
        """
        self._check_open()
        check_event(after)
        num_requests = len(checked_names(request_ids))
        counts = checked_counts("num_computed_tokens", num_computed_tokens, num_requests)
        self._check_running(request_ids)
        computed = zip(request_ids, counts, strict=True)
        return publish(self._state, self._copies, computed, after)

    def rewind(self, request_id: str, num_tokens: int) -> None:
        """Take granted tokens back to this many, because drafts were rejected.

        Drafts are granted if the step's `num_new_tokens` counts them. Blocks stay the request's.
        Call this before the next `step`, which frees the blocks that a window has left, and before
        `extend`, which takes no hash of a token that may be rejected.

        Raises:
            ConfigError: more tokens than were granted.
            StateError: fewer tokens than are published or than have hashes, blocks that are already
                freed and would be read again, or the request does not run.
        """
        fix = "pass the tokens that stay"
        num_tokens = checked_int("num_tokens", num_tokens, 0, 2**63 - 1, fix)
        self._check_running([request_id])
        self._state.rewind(request_id, num_tokens)

    def tables(self, request_id: str) -> tuple[Ids, ...]:
        """Return a request's block table per group. 0 stands where the group needs no block."""
        try:
            return self._state.tables(request_id)
        except (TypeError, UnknownRequest):
            self._state.request(request_id)  # whose error names it as the other calls do
            raise

    def preempt(self, request_id: str) -> None:
        """Free a request's blocks. It stays added with all its hashes: admit it again.

        You may call it at any moment while the engine is awake, with copies of the request in
        flight too. Blocks of such a copy stay taken until `poll` reports its end. If you admit it
        again while a step from before is under way, do not report that step of it as `computed`:
        its blocks are others now.
        """
        state = self._known(request_id)
        with state.change:
            state.change.commit()
            state.withdraw(request_id)
            if state.requests[request_id].state != "added":
                state.restart(request_id)

    def finish(self, request_id: str) -> None:
        """Forget a request that is done or aborted, at any moment. Its copies go on.

        Raises:
            UnknownRequest: the request was not added.
            StateError: the engine sleeps. Finish the request after `wake`.
        """
        state = self._known(request_id)
        with state.change:
            state.change.commit()
            state.withdraw(request_id)
            state.finish(request_id)

    # -- copies --------------------------------------------------------------------------------

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """The copies in flight, oldest first. Late ones stay here until they have ended."""
        return tuple(self._copies.in_flight.values())

    def poll(self) -> Landed:
        """End the copies that are done, then fail those that are late. Never blocks.

        It also begins the reads and writes below the host that are due. A lazy engine begins the
        store of blocks that requests have given up. If an earlier call raised, this one reports
        what that call had found. After a sleep it reports what has ended meanwhile.

        Raises:
            StateError: this engine sleeps or is closed.
        """
        self._check_open()
        self._copies.end_ended()
        store_freed(self._state, self._copies)
        if self._copies.disk is not None:
            self._copies.disk.poll(self._state, self._copies.now_s())
        self.flush_events()
        return self._state.take_unreported()

    def settle_disk(self) -> None:
        """Begin the reads and writes below the host that are due, and wait until all have ended.

        `poll` does the same without waiting. A stored block may be written once `poll` or `end` has
        seen the end of its store, so call `poll` first. Without a tier below the host this does
        nothing.

        Raises:
            TransferError: a read or a write does not end.
        """
        self._check_open()
        if self._copies.disk is not None:
            self._copies.disk.settle(self._state, self._copies.now_s())

    def end(self, transfer: Transfer) -> JobEnd:
        """Wait for one transfer and account for its end, as `poll` does for all that are done.

        If the result is `ok`, the request that waits for this load runs. If it is not, admit the
        request again. If it is `late`, `expire` or `poll` has reported it already. No request waits
        for a load if it was preempted or finished since, whatever the result is.

        Raises:
            ConfigError: `transfer` is None, as `computed` returns it where nothing is to be stored.
            StateError: the transfer has ended already.
        """
        self._check_awake()
        given: object = transfer
        if not isinstance(given, Transfer):
            raise ConfigError(
                f"transfer is {transfer!r}, expected a Transfer: computed returns None where "
                "nothing is to be stored, so call end only if there is one"
            )
        return self._copies.end(transfer, report=False)

    def expire(self) -> list[str]:
        """Fail the requests whose loads are late by now, and return their ids, each once.

        The next `poll` reports the stores that are late.
        """
        self._check_awake()
        failed = self._state.unreported.failed
        num_before = len(failed)
        self._copies.fail_late()
        expired = self._state.unreported.failed[num_before:]
        del self._state.unreported.failed[num_before:]
        return expired

    # -- the whole -----------------------------------------------------------------------------

    def reset(self, *, weights_version: str | None = None) -> None:
        """Forget every prefix, on the device, on the host and below it, at any moment.

        Requests keep their blocks and go on. But nothing that they compute from now on is cached,
        because it follows from KV of before: `preempt` them to change that. Copies in flight go on
        without effect, and a request that waits for one recomputes.

        The disk tier is off until `poll` finds that no loss of power can bring back its blocks.
        Without `weights_version`, the weights may have changed. Then what it keeps is not warm
        after a restart, and a shared tier shares nothing with other servers. An engine with such a
        tier does not sleep in a file before another reset names the weights.

        If an exception interrupts this call, call it again. Until then `sleep` of an engine without
        a tier below the host refuses a `weights_version`.

        Args:
            weights_version: name of the weights from now on. Call this when they are in place. The
                disk is warm under this name after a restart, and engines share blocks again that
                have the same name. `sleep` and `restart` take files of this name only. Each version
                needs another name.

        Raises:
            ConfigError: a name that is no str, or that the engine has had. Only an engine with a
                tier below the host checks the latter.
            StateError: a request holds blocks of the weights before, or this engine sleeps or is
                closed.
        """
        self._check_open()
        if weights_version is not None:
            check_names(weights_version=weights_version)
        reset(self._state, self._copies.disk, weights_version)

    def take_events(self) -> list[BlockEvent]:
        """Return the block events of both pools since the last call. Empty without `events`."""
        self.flush_events()
        return self._events.take_block_events()

    def take_transfer_events(self) -> list[TransferEvent]:
        """Return the events of jobs since the last call. Empty without `events`.

        Every `TransferInitiated` is followed by one `TransferCompleted`.
        """
        self.flush_events()
        return self._events.take_transfer_events()

    def flush_events(self) -> None:
        """Write what has happened to the events file, as `poll` and `close` do."""
        self._events.flush(self._state)

    def stats(self) -> dict[str, float]:
        """Return those of `OffloadScheduler.stats`, and what only the whole engine knows.

        You may call it from any thread. Counters count what this engine did. A `wake` goes on with
        them, and a `restart` takes over none of the engine that slept.

        - Counters: device_query_tokens (tokens that admitted requests looked for, in whole blocks),
          device_hit_tokens (those that they found), device_evicted_blocks, and lost_events (events
          that the events file lacks).
        - Counters of transfers that went well, on all ranks: stored_bytes, loaded_bytes,
          store_seconds and load_seconds. The seconds last until `poll` or `end` sees the end.
        - Buckets of histograms: "store_seconds le 0.5" is the number of stores that took up to
          0.5 s. There is one for each bound, and for each of the four counters above.
        - Gauges: requests, device_blocks_free, device_blocks_cached.
        - Capacities: device_capacity_blocks (without the null block), device_capacity_tokens, and
          capacity_blocks (host slots).

        With a disk tier, also those of `OffloadScheduler.disk_stats`, and:

        - disk_capacity_blocks.
        - demoted_bytes and promoted_bytes, of all ranks.
        - disk_mismatched_blocks, which are not what they should be.
        - disk_quarantined_bytes, in calls that do not return.
        - disk_mode: 2 reads and writes, 1 only reads, 0 does nothing.

        With a shared tier, the same under names that begin with `shared_`, without `disk_`, and:

        - shared_asked_blocks and shared_found_blocks, of questions to the store.
        - shared_questions: those that were not asked because the store had failed, too.
        - shared_late_questions: requests that went on without an answer.
        - shared_failed_questions: not answered, or not asked because the store had failed.

        With both, those of a disk tier, which then count the blocks of both, and:

        - the five that count questions.
        - shared_mode.
        - shared_put_blocks, shared_got_blocks and shared_mismatched_blocks, of the store on all
          ranks.
        """
        return {
            **self._state.stats(),
            "lost_events": self._events.num_lost,
            **self._copies.stats(),
        }

    def sleep(  # noqa: PLR0913 - the caller chooses each, most of them rarely
        self,
        *,
        after: Event,
        preserve: bool = True,
        to: To = HOST,
        identity: str = "",
        weights_version: str = "",
        timeout_s: float | None = None,
    ) -> None:
        """Let this engine sleep. When this returns, you may release its device memory.

        Call it between steps: all granted tokens must be computed once `after` has happened. Take
        rejected drafts back with `rewind` before. Copies in flight end first, and the next `poll`
        reports them. The engine drops lookahead slots, and prefixes that only the device held.

        Args:
            after: the compute that fills the blocks. No copy begins before it.
            preserve: keep the blocks of every request that runs on the host, its partial tail
                included. If False, requests are added ones again, and recompute what the host does
                not have.
            to: `HOST`, or the path of a file. A complete file replaces one that has this name, and
                the host memory is released.
            identity: the model whose KV this is, and all that shapes it. `wake` must pass the same
                one. A file needs it, because the file may outlive this process.
            weights_version: version of the model's weights, under the same rules.
            timeout_s: seconds that copies in flight may take to end. Later ones have failed, and
                their movers are stopped. None: as long as they need.

        Raises:
            OutOfBlocks: the host cannot hold the blocks.
            TransferError: the blocks could not be copied to the host.
            SnapshotError: the file cannot be written.
            StateError: the engine sleeps already, or is closed. Or `to` is a file, and a tier below
                the host does not know the weights, since a `reset` without a name.
            ConfigError: `after` is no `Event`, `to` is no path, a file comes without identity and
                weights version, or the tier below the host has others, or the last `reset`, `wake`
                or `restart` has named other weights.

        If it raises, the engine is awake as before. But copies in flight have ended, and the host
        may have evicted blocks to make room.
        """
        self._check_open()
        timeout_s = checked_limit_s("timeout_s", timeout_s)
        check_flag("preserve", preserve, "with False, requests recompute what the host lacks")
        check_event(after)
        fall_asleep(
            self._state,
            self._copies,
            Model(identity, weights_version),
            to,
            after=after,
            preserve=preserve,
            timeout_s=timeout_s,
        )
        asleep, disk = self._state.asleep, self._copies.disk
        if disk is not None and asleep is not None and asleep.is_in_file:
            disk.close()  # it keeps the host memory mapped
        self.flush_events()

    def wake(  # noqa: PLR0913 - likewise
        self,
        layouts: RankLayouts,
        *,
        after: Event,
        num_device_blocks: int | None = None,
        block_ids: BlockIds = "same",
        identity: str = "",
        weights_version: str = "",
    ) -> Awake:
        """Wake this engine over new device memory. When this returns, its blocks hold their bytes.

        Args:
            layouts: as in the constructor, of blocks of the same sizes as before.
            after: whatever may still touch the new memory. No copy begins before it.
            num_device_blocks: blocks of the new pool, the null block included. None: as many as
                before.
            block_ids: "same" ids; "packed" ids, the lowest ones, for a smaller pool; or ids to
                take, in the order in which the tables name the blocks.
            identity: the identity that `sleep` got.
            weights_version: the version that `sleep` got. If the weights have changed since, wake
                with the old version, `preempt` the requests, and `reset` with the new version.

        Returns:
            Where the blocks are. `tables` returns the new ids too.

        Raises:
            StateError: the engine does not sleep, or is closed.
            SnapshotError: another identity or weights version, other block sizes, or a file that is
                missing, damaged or another engine's.
            OutOfBlocks: the pool is too small for the blocks.
            InvalidBlock: `block_ids` has an id outside the pool, the null block, or an id twice.
            TransferError: the blocks could not be copied.
            ConfigError: layouts that are too few or too small, ids that the pool does not have, or
                `after` is no `Event`.

        If it raises, the engine sleeps on. You can wake it again.
        """
        state = self._state
        recover(state, self._copies)
        if state.asleep is None:
            self._check_open()
        check_event(after)
        num_blocks = state.pool.num_blocks
        if num_device_blocks is not None:
            num_blocks = checked_num_device_blocks(num_device_blocks)
        blueprint = state.blueprint
        ranks = checked_layouts(layouts, blueprint.world_size, len(blueprint.groups), num_blocks)
        self.flush_events()
        device = NewDevice(ranks, num_blocks, block_ids, after)
        awake = awaken(state, Model(identity, weights_version), device)
        self._attach_disk()
        return awake

    def restart(  # noqa: PLR0913 - likewise
        self,
        path: str | os.PathLike[str],
        *,
        after: Event,
        identity: str,
        weights_version: str,
        requests: bool = False,
        block_ids: BlockIds = "same",
    ) -> Awake:
        """Fill this new engine from a file that another engine slept in, also of another process.

        The engine maps the file as its host memory, copy-on-write, and reads nothing before it
        needs it. So host hits are served at once. The first load of a slot compares it with its
        checksum. A damaged slot fails that load, and its request recomputes. The file does not
        change, so you can use it again. Nothing may overwrite it in place.

        This engine must be new. Its groups, block sizes, ranks, number of host blocks, blocks per
        slot, mode and policy must be those of the engine that slept.

        Args:
            path: the file.
            after: whatever may still touch the device memory.
            identity: the identity that `sleep` got.
            weights_version: the version that `sleep` got.
            requests: bring the requests back too, as `wake` does. If False, the engine knows no
                requests, and only the host is warm.
            block_ids: as `wake` takes them.

        Returns:
            Where the blocks of the requests are.

        Raises:
            StateError: the engine is not new, or is closed. Or a tier below the host does not know
                the weights, since a `reset` without a name.
            SnapshotError, OutOfBlocks, InvalidBlock, TransferError, ConfigError: as `wake`.

        If it raises, the engine is new as before.
        """
        self._check_open()
        check_flag("requests", requests, "with True, the requests of the file come back too")
        check_path("path", path)
        check_event(after)
        self.flush_events()
        state, model = self._state, Model(identity, weights_version)
        device = NewDevice(state.ranks.layouts, state.pool.num_blocks, block_ids, after)
        awake = restart(state, self._copies, path, model, device, requests=requests)
        self._attach_disk()
        return awake

    def check(self) -> None:
        """Verify every invariant. Raises `StateError` if one is broken."""
        recover(self._state, self._copies)
        self._state.check()
        self._copies.check()

    def close(self) -> None:
        """End every copy, stop the movers and release the host memory. A second call does nothing.

        A tier below the host first writes blocks that are due, for `flush_s` seconds at most. If
        one part cannot be closed, it closes the others and then raises the first error. If Ctrl-C
        cuts this short, call it again. You can still finish requests and inspect them. Requests
        that were loading never run. A file in which the engine sleeps stays.

        Do not call this in a signal handler. It waits for threads, and the method into which the
        signal cuts may hold what they wait for. Raise an exception there, such as `SystemExit`.
        """
        call_all([self._flush_disk, self._close])

    def _close(self) -> None:
        state, disk = self._state, self._copies.disk
        with state.change:
            state.change.commit()
            if state.asleep is not None:  # no call can wake its requests any more
                ledger = state.blueprint.ledger(state.pool.num_blocks)
                ended = State(state.blueprint, ledger, state.scheduler, state.ranks)
                ended.change = state.change  # until all is closed, nothing can use it
                state.put_in(ended)
            call_all(
                [
                    state.ranks.close,
                    *([] if disk is None else [disk.close]),
                    partial(settle, state, self._copies, closing=True),
                    *[arena.close for arena in state.ranks.arenas],
                    self.flush_events,
                    self._events.close,
                ]
            )

    # -- the disk tier -------------------------------------------------------------------------

    def _attach_disk(self) -> None:
        if self._copies.disk is not None:
            self._copies.disk.attach_if_new(self._state)

    def _flush_disk(self) -> None:
        """Write what is due to the disk, unless an operation was cut short."""
        state, disk = self._state, self._copies.disk
        may_flush = state.asleep is None and not state.is_closed and not state.change.is_torn
        if disk is not None and may_flush:
            self._copies.end_ended()
            disk.flush(state)

    # -- checks --------------------------------------------------------------------------------

    def _check_awake(self) -> None:
        recover(self._state, self._copies)
        if self._state.asleep is not None:
            raise StateError("this Engine sleeps: wake it first, with Engine.wake")

    def _check_open(self) -> None:
        self._check_awake()
        if self._state.is_closed:
            is_forked = any(arena.is_forked for arena in self.arenas)
            raise StateError(f"this Engine {FORKED if is_forked else 'is closed'}; build a new one")

    def _known(self, request_id: str) -> State:
        """Return the state, unless it does not know the request."""
        self._check_awake()
        self._state.request(request_id)
        return self._state

    def _check_running(self, request_ids: Sequence[str]) -> None:
        recover(self._state, self._copies)
        names = checked_names(request_ids)
        try:
            is_fine = len(self._state.running.intersection(names)) == len(names)
        except TypeError:  # of an id that is no str, which is unknown
            is_fine = False
        if is_fine:
            return
        for request_id in names:
            state = self._known(request_id).requests[request_id].state
            if state != "running":
                way = "admit it" if state == "added" else "wait until poll says that it is loaded"
                raise StateError(f"request {request_id!r} is {state} and does not run: {way}")
        refuse_repeated(names)
