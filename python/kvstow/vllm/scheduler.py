"""The scheduler half: turns what vLLM schedules into stores and loads, and keeps its blocks alive.

```
schedule()             lookup ............ get_num_new_matched_tokens
                       allocated ......... update_state_after_alloc       plans loads
                       end of the step ... build_connector_meta           hands jobs to the workers
update_from_output()   finished .......... request_finished_all_groups    plans its last stores
                       workers' reports .. update_connector_output        ends jobs, plans stores
```

Stores are planned right after a step was processed: its KV is written, and nothing that fell out
of a window has been given away yet. A block that a job names is held by a reference in vLLM's own
pool until every worker has reported the job, whatever becomes of the request.

A block is stored under a key only if it holds the KV of the key's tokens. vLLM keys blocks when it
grants them, and it may change a request's tokens afterwards. What it does, and what guards here:

- A streaming session drops its last sampled token and the token's hash. Only hashes of computed
  tokens are reported (`_store`), and a full-attention block is stored only where vLLM's own block
  has the same key (`_num_cached_tokens`). vLLM before 0.32 keeps the hash: sessions are not stored.
- Hashes that were reported differ from the request's: they are reported anew (`_report_hashes`).
- Drafts are rejected, sessions go back, loads of other connectors fail: `num_computed_tokens`
  shrinks. It is read when the step's outcome is known, less the tokens of steps under way.
- Asynchronous scheduling counts tokens that are not sampled yet. They are computed tokens of steps
  under way, have no hash, and are not counted either (`build`).
- A request is aborted, finished or preempted while its steps are under way: those are not counted,
  and its blocks stay without a store.
- A request is preempted in the step that granted it blocks: they lose their keys
  (`_evict_unwritten`).
- vLLM takes a block and caches it again, perhaps under an equal key: lazy mode offers a block only
  if it was computed since (`LazyQueue`).
- A reset empties vLLM's pool, the tier, or both, with requests running: what they computed before
  is not stored (`is_stale`). A preempted request starts over (`lookup`).
- Structured output, adapters and prompt embeddings change no token that was reported. They are part
  of the hashes or of the sampling. Weights that change under one adapter's name need a reset.
- Request ids are used again only after `finished`.

An error inside this half ends the tier, not the server. `_or_without_tier` catches it at each call
that vLLM makes: what the tier says may be wrong from then on, so nothing is looked up or stored any
more. Requests that wait for a load compute. Blocks that jobs hold come free as workers report.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Concatenate, Literal, ParamSpec, TypeVar

from vllm.v1.request import RequestStatus

from kvstow import Job, JobEnd, KvstowError, OffloadScheduler, SlidingWindow
from kvstow.vllm.capacity import Capacities
from kvstow.vllm.lazy_queue import LazyQueue
from kvstow.vllm.messages import Copies, StepJobs, StepReports
from kvstow.vllm.model import Model
from kvstow.vllm.options import Options
from kvstow.vllm.weights import WeightsVersion

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvstow.observability.events import BlockEvent, TransferEvent
    from kvstow.vllm.events import HostEvents

logger = logging.getLogger("vllm." + __name__)


_Args = ParamSpec("_Args")
_Answer = TypeVar("_Answer")

# To be let in: with the blocks of a load that has landed, if there was no room for the rest.
_WAITING = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


@dataclass(slots=True)
class _Tracked:
    """What is kept of a request between its first lookup and its end."""

    request: Request
    # Hashes that the tier knows.
    num_hashes: int
    # Per group, blocks of its table that kvstow has been told.
    num_told: list[int]
    # Tokens that must be computed before there is anything new to tell.
    due: int
    last_hash: bytes = b""
    num_local_tokens: int = 0
    # Tokens that it had when its first step was scheduled, from hits and loads.
    num_given_tokens: int = 0
    is_admitted: bool = False
    # Admitted since the last step was built: a preemption that it names is an older one.
    is_fresh: bool = False
    # Its load is under way or has failed: what its table says is computed is not.
    is_loading: bool = False
    # Its blocks are not for the tier: they were computed before a reset, or their hashes are not
    # to be trusted.
    is_stale: bool = False
    # A load of it has failed, or vLLM would never begin it: it computes what it needs.
    recompute: bool = False
    # Its last lookup has found something.
    was_offered: bool = False
    # vLLM knows how its load went.
    is_load_told: bool = False
    # Computed tokens up to which its blocks were seen to before a sleep.
    num_settled: int = 0
    # Per group, the blocks that the steps under way make full, from `first` on: taken down when
    # they were allocated, because a window gives blocks away as soon as it has moved past them.
    filling: list[list[KVCacheBlock]] = field(default_factory=list)
    first: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Transfer:
    """A job that has not ended.

    A load's blocks are its request's, and vLLM takes no request's blocks away before it is told
    how the load went. Only one that was told of too early, a late one, is held here as well.
    """

    direction: Literal["store", "load"]
    blocks: list[KVCacheBlock]
    # Those of them that a reference in vLLM's pool keeps.
    held: list[KVCacheBlock] = field(default_factory=list)
    # The ranks that have reported it.
    ranks: set[int] = field(default_factory=set)
    # Of a store: how many ranks read its blocks no more.
    num_released: int = 0
    # A load's.
    request_id: str = ""
    is_late: bool = False


def _or_without_tier(
    method: Callable[Concatenate[SchedulerHalf, _Args], _Answer],
) -> Callable[Concatenate[SchedulerHalf, _Args], _Answer]:
    """Turn the tier off if the method raises, and call it once more, without a tier.

    The methods may be called again after any call that they make has raised. What raises without a
    tier is vLLM's own, and goes on to vLLM. So does an interrupt.
    """

    @functools.wraps(method)
    def guarded(half: SchedulerHalf, /, *args: _Args.args, **kwargs: _Args.kwargs) -> _Answer:
        try:
            return method(half, *args, **kwargs)
        except BaseException as error:
            if half.is_off:
                raise
            half.turn_off()
            if not isinstance(error, Exception):
                raise
        return method(half, *args, **kwargs)

    return guarded


class SchedulerHalf:
    """Everything that runs beside vLLM's scheduler."""

    def __init__(  # noqa: PLR0913 - what vLLM's configuration says, once
        self,
        model: Model,
        options: Options,
        *,
        world_size: int,
        tokens_per_hash: int,
        horizon_blocks: int,
        drops_last_block: bool = False,
        stores_sessions: bool = True,
        events: bool = False,
        host_events: HostEvents | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Wait for the pool (`bind`), and for the ranks' capacities: workers report them.

        Args:
            model: as vLLM has laid it out.
            options: the user's.
            world_size: workers that report each job.
            tokens_per_hash: of `Request.block_hashes`.
            horizon_blocks: lazy, how much of the free queue is stored ahead of its eviction.
            drops_last_block: a draft model reads one block less of a hit (EAGLE).
            stores_sessions: the hashes of a session (a resumable request) are those of the tokens
                that vLLM keeps of it.
            events: keep block and transfer events.
            host_events: is told what the blocks hold that may be stored.
            clock: seconds.
        """
        self._model = model
        self._options = options
        self._world_size = world_size
        self._stride = model.tokens_per_hash // tokens_per_hash
        self._tokens_per_own_hash = tokens_per_hash
        self._horizon_blocks = horizon_blocks
        self._drops_last_block = drops_last_block
        self._stores_sessions = stores_sessions
        self._events = events
        self._host_events = host_events
        self._clock = clock
        self._group_suffixes = [g.to_bytes(4, "big") for g in range(len(model.groups))]
        self._tokens_per_hash = model.tokens_per_hash
        self._is_window = [type(group).__name__ != "FullAttention" for group in model.groups]
        self._tracked: dict[str, _Tracked] = {}
        self._due: dict[str, _Tracked] = {}
        self._transfers: dict[int, _Transfer] = {}
        self._num_storing = 0
        self._loads: list[Copies] = []
        self._stores: list[Copies] = []
        self._failed: list[str] = []
        self._lazy: LazyQueue | None = None
        self._manager: KVCacheManager | None = None
        self._weights = WeightsVersion(options.weights_version_path)
        self._capacities = Capacities(world_size, timeout_s=options.load_timeout_s, clock=clock)
        # None until every rank has reported its capacity, and when the tier is off.
        self.offload: OffloadScheduler | None = None
        # Once the tier is off: how long its last copies keep vLLM from its rest.
        self._off_until: float | None = None

    # -- set-up ---------------------------------------------------------------------------------

    def bind(self, manager: KVCacheManager) -> None:
        """Take vLLM's own accounting, whose blocks jobs hold."""
        self._manager = manager
        if self._options.lazy_offload:
            self._lazy = LazyQueue(manager.block_pool, self._horizon_blocks)

    def agree(self, num_host_blocks: int) -> None:
        """Make the host tier, as large as every rank has memory for.

        Job ids start anew in each tier, so no job may be in flight: it would end another one.
        """
        assert not self._transfers, "a job of the tier before is in flight"
        self.offload = OffloadScheduler(
            num_host_blocks,
            self._model.groups,
            mode="lazy" if self._options.lazy_offload else "eager",
            policy=self._options.eviction_policy,  # type: ignore[arg-type] # parsed
            world_size=self._world_size,
            num_device_blocks=self._model.num_blocks,
            events=self._events,
        )
        for request_id in self._tracked:
            self.offload.add(request_id, [])

    def _learn(self, capacities: Mapping[int, int]) -> None:
        """Take ranks' capacities; make the host tier once all are known."""
        if self.is_off:
            return
        self._capacities.add(capacities)
        agreed = self._capacities.agreed
        if self.offload is None and agreed is not None:
            self.agree(agreed)

    @property
    def is_off(self) -> bool:
        """Whether the tier was given up because of an error."""
        return self._off_until is not None

    def turn_off(self) -> None:
        """Serve without the tier from now on, because an error that is being handled broke it.

        Each load that is under way fails. Jobs that were handed out, or will be with the next step,
        end when all ranks have reported them (`processed`).
        """
        logger.exception(
            "kvstow: the host tier is off because of an error; requests are served without it "
            "until the server is restarted"
        )
        self._off_until = self._deadline()
        self.offload = self._lazy = None
        for transfer in self._transfers.values():
            if transfer.direction == "load" and not transfer.is_late:
                self._give_up(transfer)

    # -- admission ------------------------------------------------------------------------------

    @_or_without_tier
    def lookup(self, request: Request, num_local_tokens: int) -> int | None:
        """Tokens after the local hit that the host can serve; None: ask again later."""
        tracked = self._tracked.get(request.request_id)
        if tracked is not None and tracked.is_admitted:
            # Preempted, or its load has failed: it starts over.
            has_failed = tracked.is_loading
            self._forget(request.request_id)
            tracked = self._track(request, recompute=has_failed)
        elif tracked is None:
            tracked = self._track(request)
        elif tracked.was_offered and self._is_idle():
            # vLLM has not let it in, though nobody is in its way. What is free is reserved for
            # requests that vLLM believes to be loading because their loads were taken back, and
            # it may be one of them. Only loads heed that reserve, so it computes.
            tracked.recompute = True
        tracked.num_local_tokens = num_local_tokens
        offload = self.offload
        if offload is None:
            # The first step brings the ranks' reports, and vLLM steps again while a request waits.
            may_wait = not (self.is_off or request.skip_reading_prefix_cache)
            return None if may_wait and self._capacities.is_awaited() else 0
        self._report_hashes(request.request_id, tracked, request.num_tokens)
        if (
            tracked.recompute
            or request.skip_reading_prefix_cache
            or num_local_tokens % self._model.tokens_per_hit
        ):
            offload.release(request.request_id)
            return 0
        # One token at least is left to compute.
        found = offload.lookup(request.request_id, num_local_tokens, request.num_tokens - 1)
        if found and self._drops_last_block:
            end = num_local_tokens + found - self._model.tokens_per_hit
            found = offload.lookup(request.request_id, num_local_tokens, end)
        tracked.was_offered = bool(found)
        return found

    def _is_idle(self) -> bool:
        """Whether no request runs, and none waits for a load that is under way."""
        loading = (one for one in self._transfers.values() if one.direction == "load")
        return all(one.is_late for one in loading) and not any(
            one.request.status == RequestStatus.RUNNING for one in self._tracked.values()
        )

    @_or_without_tier
    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """vLLM has given the request blocks; the external ones are to be loaded."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        if self.is_off and num_external_tokens:
            # The tier offered them before it was turned off, and vLLM waits for them.
            tracked.is_admitted = tracked.is_fresh = tracked.is_loading = True
            self._failed.append(request.request_id)
            return
        if tracked.is_admitted:
            tracked.is_loading = False  # its load has landed, and it runs now
            return
        tracked.is_admitted = tracked.is_fresh = True
        if self._lazy is not None:
            for table, group in zip(blocks.blocks, self._model.groups, strict=True):
                self._lazy.used(table[: tracked.num_local_tokens // group.block_size])
        if self.offload is None:
            return  # without a tier nothing was offered
        if num_external_tokens == 0:
            self.offload.release(request.request_id)
            return
        start = tracked.num_local_tokens
        end = start + num_external_tokens
        target_ids: list[list[int]] = []
        own_blocks: list[KVCacheBlock] = []
        for g, (group, table) in enumerate(zip(self._model.groups, blocks.blocks, strict=True)):
            own = table[start // group.block_size : end // group.block_size]
            if self._is_window[g]:
                own = [block for block in own if not block.is_null]
            target_ids.append([block.block_id for block in own])
            own_blocks += own
        tracked.is_loading = True
        try:
            job = self.offload.load(
                request.request_id, num_external_tokens, target_ids, deadline=self._deadline()
            )
        except KvstowError:
            # vLLM has accepted what was not offered. It waits for this load: fail it, or the
            # request would wait for ever.
            logger.exception("kvstow: the load of request %s was refused", request.request_id)
            self.offload.release(request.request_id)
            self._failed.append(request.request_id)
            return
        self._loads.append(Copies.of(job))
        self._transfers[job.job_id] = _Transfer("load", own_blocks, request_id=request.request_id)

    # -- steps ----------------------------------------------------------------------------------

    @_or_without_tier
    def build(self, scheduled: SchedulerOutput) -> StepJobs:
        """What the workers begin in this step."""
        for request_id in scheduled.preempted_req_ids or ():
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.is_admitted and not tracked.is_fresh:
                self._evict_unwritten(request_id, tracked)
                self._forget(request_id)
        tracked_of = self._tracked.get
        for request_id, num_tokens in scheduled.num_scheduled_tokens.items():
            tracked = tracked_of(request_id)
            if tracked is not None:
                if tracked.is_fresh:
                    tracked.num_given_tokens = tracked.request.num_computed_tokens
                num_computed = tracked.request.num_computed_tokens + num_tokens
                if num_computed >= tracked.due:
                    # vLLM hashes no drafts and no tokens that are still to be sampled.
                    num_computed = min(num_computed, tracked.request.num_tokens)
                    self._take_down(request_id, tracked, num_computed)
                tracked.is_fresh = False
        if self._transfers and self.offload is not None:
            self._expire()
        asks_capacity = self.offload is None and not self.is_off
        jobs = StepJobs(self._loads, self._stores, self._failed, asks_capacity=asks_capacity)
        self._loads, self._stores, self._failed = [], [], []
        return jobs

    @_or_without_tier
    def processed(self, output: KVConnectorOutput) -> None:
        """A step was processed: end the jobs that every worker has reported, plan new stores."""
        reports = output.kv_connector_worker_meta
        if isinstance(reports, StepReports):
            self._learn(reports.capacities)
            for job_id, rank, _ in reports.reports:
                if job_id in self._transfers:
                    self._transfers[job_id].ranks.add(rank)
        if self.is_off:
            self._end_reported()
        if isinstance(reports, StepReports) and self.offload is not None:
            ends = [
                end
                for job_id, rank, ok in reports.reports
                if (end := self.offload.complete(job_id, ok=ok, rank=rank)) is not None
            ]
            self._released(reports.released)
            self._end(ends, output)
        for request_id in output.finished_recving or ():
            if request_id in self._tracked:
                self._tracked[request_id].is_load_told = True
        if self.offload is None:
            return
        if self._due:
            self._store(list(self._due))
        if self._lazy is not None:
            self._store_blocks(self._lazy.evictable())

    @_or_without_tier
    def finished(self, request: Request) -> None:
        """A request is over, and its blocks are still its own: store what is due of them."""
        if request.request_id not in self._tracked:
            return
        if self.offload is not None and request.request_id in self._due:
            self._store([request.request_id])
        self._forget(request.request_id)

    @_or_without_tier
    def reset(self) -> None:
        """Empty the tier, unless it is to outlive resets and the weights are what they were.

        Jobs in flight end without effect; their requests are recomputed.
        """
        # vLLM has tried to reset its own pool just before. If blocks were held there it still
        # serves what other weights have computed, which then comes here again: until it has
        # succeeded, the weights are other ones.
        is_pool_reset = self._pool.free_block_queue.num_free_blocks == self._model.num_blocks - 1
        if self._options.preserve_on_sleep and not self._weights.changed(remember=is_pool_reset):
            return
        if self.offload is not None:
            self.offload.reset()
        for tracked in self._tracked.values():
            tracked.is_stale = tracked.is_stale or tracked.is_admitted

    @_or_without_tier
    def may_rest(self) -> bool:
        """Whether vLLM need not go on stepping for stores to land and failures to be told.

        vLLM asks when it has nothing to run: all requests are over, or it is paused, perhaps to
        sleep, and keeps them. Their blocks are about to go, so what must be done before is begun.
        """
        if self.offload is None and not self.is_off:
            return not self._capacities.is_awaited()  # an empty step brings the reports
        tracked = list(self._tracked.values())
        may_go = all([self._settle(one) for one in tracked])
        if self._off_until is not None:
            is_copying = bool(self._transfers) and self._clock() < self._off_until
        else:
            is_copying = self._num_storing > 0
        return may_go and not is_copying and not self._failed

    def _settle(self, tracked: _Tracked) -> bool:
        """See to the blocks of a request that is paused; whether they may go."""
        request = tracked.request
        if not tracked.is_admitted:
            return True
        if request.num_in_flight_tokens:
            return False  # the steps that compute them are under way, and vLLM waits for them
        is_waiting_for_load = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        if is_waiting_for_load and not tracked.is_load_told:
            return False
        num_computed = request.num_computed_tokens
        assert self._manager is not None
        if (
            self.offload is not None
            and self._options.preserve_on_sleep
            and self._options.lazy_offload
            and not tracked.is_stale
            and num_computed > tracked.num_settled
        ):
            # Once: where the host is short, one request's blocks would drive out the other's.
            tracked.num_settled = num_computed
            tables = self._manager.get_blocks(request.request_id).blocks
            full = [
                block
                for group, table in zip(self._model.groups, tables, strict=True)
                for block in table[: num_computed // group.block_size]
                if block.block_hash is not None
            ]
            self._store_blocks(full)
        if is_waiting_for_load or request.status in _WAITING:
            # Its load is over, and it has not run since: vLLM takes blocks back of what runs only,
            # and would not sleep. They are freed here, and the load is made anew when it goes on.
            self._manager.free(request)
            request.num_computed_tokens = 0
            self._forget(request.request_id)
        return True

    @property
    def holds_freed_blocks(self) -> bool:
        """Whether a job that will end gives blocks back that nobody else holds."""
        return any(
            block.ref_cnt == 1
            for transfer in self._transfers.values()
            if not transfer.is_late
            for block in transfer.held
        )

    # -- what the connector passes on -----------------------------------------------------------

    @_or_without_tier
    def stats(self) -> dict[str, int]:
        """The tier's counters and gauges; none without a tier."""
        return {} if self.offload is None else self.offload.stats()

    @_or_without_tier
    def take_events(self) -> Sequence[BlockEvent]:
        """What has happened to the tier's blocks since the last call."""
        return [] if self.offload is None else self.offload.take_events()

    @_or_without_tier
    def take_transfer_events(self) -> Sequence[TransferEvent]:
        """What has happened to jobs since the last call."""
        return [] if self.offload is None else self.offload.take_transfer_events()

    @_or_without_tier
    def close(self) -> None:
        """End all jobs: workers report no more."""
        if self.offload is not None:
            self.offload.end_all()

    # -- what is kept of requests ---------------------------------------------------------------

    def _track(self, request: Request, *, recompute: bool = False) -> _Tracked:
        num_groups = len(self._model.groups)
        tracked = _Tracked(request, 0, [0] * num_groups, self._tokens_per_hash, recompute=recompute)
        if request.resumable and not self._stores_sessions:
            tracked.is_stale = tracked.recompute = True
        if self.offload is not None:
            self.offload.add(request.request_id, [])
        self._tracked[request.request_id] = tracked
        return tracked

    def _forget(self, request_id: str) -> None:
        del self._tracked[request_id]
        self._due.pop(request_id, None)
        if self.offload is not None:
            self.offload.finish(request_id)

    def _report_hashes(self, request_id: str, tracked: _Tracked, num_tokens: int) -> None:
        """Report the hashes of the request's first `num_tokens` tokens to the tier."""
        assert self.offload is not None
        stride = self._stride
        hashes: Sequence[bytes] = tracked.request.block_hashes
        known = tracked.num_hashes * stride
        if known and (len(hashes) < known or hashes[known - 1] != tracked.last_hash):
            # A hash covers all tokens before it, so the last one answers for the others.
            self.offload.truncate(request_id, 0)
            tracked.num_hashes = 0
        first, end = (tracked.num_hashes + 1) * stride - 1, num_tokens // self._tokens_per_hash
        if end <= tracked.num_hashes:
            return
        end = min(end * stride, len(hashes))
        # A whole prompt's hashes are not copied.
        is_all = first == 0 and stride == 1 and end == len(hashes)
        new = hashes if is_all else hashes[first:end:stride]
        self.offload.extend(request_id, new)
        tracked.num_hashes += len(new)
        if new:
            tracked.last_hash = new[-1]

    def _take_down(self, request_id: str, tracked: _Tracked, num_computed: int) -> None:
        """Remember the blocks that are full once `num_computed` tokens are computed."""
        if num_computed < tracked.due or tracked.is_stale or not tracked.is_admitted:
            return
        assert self._manager is not None
        tables = self._manager.get_blocks(request_id).blocks
        tracked.first = list(tracked.num_told)
        tracked.filling = [
            table[told : num_computed // group.block_size]
            for table, told, group in zip(tables, tracked.num_told, self._model.groups, strict=True)
        ]
        self._due[request_id] = tracked

    def _evict_unwritten(self, request_id: str, tracked: _Tracked) -> None:
        """Take the keys of blocks that this step granted to a request which it then preempted.

        With priorities vLLM may preempt a request after it has granted it blocks in the same step.
        The step does not compute them, and vLLM frees them with their keys: a later request would
        hit KV that nobody wrote, and its blocks would be stored.
        """
        request = tracked.request
        is_due = request_id in self._due
        for g, group in enumerate(self._model.groups):
            # What earlier steps fill is written: they have been submitted.
            index = tracked.first[g] + len(tracked.filling[g]) if is_due else tracked.num_told[g]
            for at in range(index, request.num_tokens // group.block_size):
                own_hash, has_key = self._own_hash(request, at, g), False
                # Other blocks may have the same key: vLLM does not say which one it was.
                while found := self._pool.get_cached_block(own_hash, [g]):
                    self._pool.evict_blocks({found[0].block_id})
                    has_key = True
                if not has_key and not self._is_window[g]:
                    break  # vLLM keys the blocks of a table in their order

    # -- stores ---------------------------------------------------------------------------------

    def _store(self, request_ids: Iterable[str]) -> None:
        """Tell the tier what was computed of these requests; eager, that plans its stores."""
        assert self.offload is not None
        named: list[str] = []
        computed: list[int] = []
        ids: list[int] = []
        told_blocks: list[KVCacheBlock] = []
        offsets = [0]
        for request_id in request_ids:
            tracked = self._due[request_id]
            request = tracked.request
            if tracked.is_stale:
                del self._due[request_id]
                continue
            num_computed = self._num_cached_tokens(
                tracked, request.num_computed_tokens - request.num_in_flight_tokens
            )
            if num_computed < tracked.due:
                continue  # its step is under way, or its drafts were rejected
            self._report_hashes(request_id, tracked, num_computed)
            for g, group in enumerate(self._model.groups):
                told = tracked.num_told[g]
                own = self._filled(tracked, g, num_computed // group.block_size)
                if self._is_window[g]:
                    own_ids = self._cached_ids(own, tracked, told, g)
                else:
                    own_ids = [block.block_id for block in own]
                ids += own_ids
                told_blocks += own
                if self._lazy is not None:
                    # Also blocks that were stored before: the host may have evicted them.
                    self._lazy.computed(b for b, at in zip(own, own_ids, strict=True) if at)
                if self._host_events is not None:
                    stored = [
                        (told + at, self._own_hash(request, told + at, g))
                        for at, block_id in enumerate(own_ids)
                        if block_id
                    ]
                    self._host_events.computed(request, g, group.block_size, stored)
                tracked.num_told[g] = told + len(own)
                offsets.append(len(ids))
            named.append(request_id)
            computed.append(num_computed)
            unit = self._tokens_per_hash
            tracked.due = (num_computed // unit + 1) * unit
            del self._due[request_id]
        if named:
            job = self.offload.store(named, computed, ids, offsets, deadline=self._deadline())
            self._begin_store(job, ids, told_blocks)

    def _filled(self, tracked: _Tracked, g: int, num_full: int) -> list[KVCacheBlock]:
        """The blocks of a group's first `num_full` that the tier was not told of."""
        told, first = tracked.num_told[g], tracked.first[g]
        own = tracked.filling[g]
        if told == first and len(own) <= num_full - told:
            return own
        return own[told - first : num_full - first]

    def _num_cached_tokens(self, tracked: _Tracked, num_computed: int) -> int:
        """How many of the computed tokens vLLM has in blocks that hold these very tokens' hashes.

        A hash covers all tokens before it, so of a full-attention table the last block answers for
        those before it. vLLM hashes a block in the step that fills it, or one later if drafts did.
        """
        request = tracked.request
        num_computed = min(num_computed, len(request.block_hashes) * self._tokens_per_own_hash)
        for g, group in enumerate(self._model.groups):
            if self._is_window[g] or num_computed < tracked.due:
                continue
            own = self._filled(tracked, g, num_computed // group.block_size)
            end = tracked.num_told[g] + len(own)
            for block in reversed(own):
                if block.block_hash == self._own_key(request, end - 1, g):
                    break
                end -= 1
            num_computed = min(num_computed, (end + 1) * group.block_size - 1)
        return num_computed

    def _cached_ids(
        self, blocks: Sequence[KVCacheBlock], tracked: _Tracked, first: int, group: int
    ) -> list[int]:
        """Ids of a window's blocks; 0 where vLLM no longer has the block, or does not keep it.

        vLLM gives hashes only to blocks at which a hit can end; and one that was given away may
        by now be someone else's, which its hash tells. A hit on the device needs no block below its
        window, so those that vLLM retains there have no hash. A load must bring them: whether such
        a block is still the request's, its table tells. The request must have computed it, because
        another connector's load may leave such blocks as they were.
        """
        request, spec = tracked.request, self._model.groups[group]
        ids = [
            block.block_id if block.block_hash == self._own_key(request, first + at, group) else 0
            for at, block in enumerate(blocks)
        ]
        if isinstance(spec, SlidingWindow) and spec.extra_retained_tokens:
            assert self._manager is not None
            table = self._manager.get_blocks(request.request_id).blocks[group]
            start = max(0, -(-tracked.num_given_tokens // spec.block_size) - first)
            for at, own in enumerate(table[first + start : first + len(blocks)], start):
                if own is blocks[at] and not own.is_null:
                    ids[at] = own.block_id
        return ids

    def _own_key(self, request: Request, index: int, group: int) -> bytes:
        """The key that vLLM gives a request's block: its hash and its group."""
        return self._own_hash(request, index, group) + self._group_suffixes[group]

    def _own_hash(self, request: Request, index: int, group: int) -> bytes:
        """The hash of a request's block: the last of those that the block covers."""
        per_block = self._model.groups[group].block_size // self._tokens_per_hash
        own: bytes = request.block_hashes[(index + 1) * per_block * self._stride - 1]
        return own

    def _store_blocks(self, cached: Iterable[KVCacheBlock]) -> None:
        """Plan the stores of those of these blocks that the host does not have."""
        assert self.offload is not None
        by_group: dict[bytes, list[KVCacheBlock]] = {}
        for block in cached:
            by_group.setdefault(block.block_hash[-4:], []).append(block)
        for suffix, blocks in by_group.items():
            job = self.offload.store_candidates(
                [block.block_id for block in blocks],
                [block.block_hash[:-4] for block in blocks],
                group=int.from_bytes(suffix, "big"),
                deadline=self._deadline(),
            )
            self._begin_store(job)

    # -- jobs -----------------------------------------------------------------------------------

    @property
    def _pool(self) -> BlockPool:
        assert self._manager is not None
        return self._manager.block_pool

    def _begin_store(
        self, job: Job | None, told_ids: Sequence[int] = (), told: list[KVCacheBlock] | None = None
    ) -> None:
        if job is not None:
            # The job's own: it may store less than it was told of, or what it was told of before.
            ids = job.block_ids.tolist()
            held = told
            if held is None or ids != told_ids:
                held = list(map(self._pool.blocks.__getitem__, ids))
            copies, transfer = Copies.of(job), _Transfer("store", held)
            self._hold(transfer)
            self._transfers[job.job_id] = transfer
            self._stores.append(copies)
            self._num_storing += 1
            if self._lazy is not None:
                self._lazy.hold(held)

    def _end(self, ends: Sequence[JobEnd], output: KVConnectorOutput) -> None:
        """Let go of what jobs held, and report the loads that have landed.

        A job stays in `_transfers` until nothing is left to do that may raise.
        """
        for end in ends:
            transfer = self._transfers[end.job_id]
            self._release(transfer)
            if transfer.direction == "load":
                if end.ok:
                    loaded = output.finished_recving or set()
                    output.finished_recving = loaded | {transfer.request_id}
                elif not transfer.is_late:
                    self._failed.append(transfer.request_id)
            else:
                self._num_storing -= not transfer.is_late
                if self._lazy is not None and not end.ok:
                    self._lazy.offer_again(transfer.blocks)
            del self._transfers[end.job_id]

    def _end_reported(self) -> None:
        """Without a tier: end the jobs that all ranks have reported, however they went."""
        for job_id, transfer in list(self._transfers.items()):
            if len(transfer.ranks) == self._world_size:
                self._release(transfer)
                del self._transfers[job_id]

    def _released(self, job_ids: Iterable[int]) -> None:
        """Ranks read the blocks of these stores no more, though their bytes may be on the way."""
        for job_id in job_ids:
            transfer = self._transfers.get(job_id)
            if transfer is not None:
                transfer.num_released += 1
                if transfer.num_released == self._world_size:
                    self._release(transfer)

    def _release(self, transfer: _Transfer) -> None:
        """Let go of the blocks that a job holds, if it still does."""
        if self._lazy is not None and transfer.direction == "store":
            transfer.held = self._lazy.put_back(transfer.held)
        self._let_go(transfer.held)
        transfer.held = []

    def _hold(self, transfer: _Transfer) -> None:
        """As `BlockPool.touch`, but that a copy is no access, which vLLM would count for each."""
        num_held = 0
        try:
            for num_held, block in enumerate(transfer.blocks):  # noqa: B007 - used if one fails
                num_refs = block.ref_cnt
                if not num_refs:
                    self._pool.free_block_queue.remove(block)
                block.ref_cnt = num_refs + 1
        except BaseException:
            self._let_go(transfer.blocks[:num_held])
            raise
        transfer.held = transfer.blocks

    def _let_go(self, blocks: Sequence[KVCacheBlock]) -> None:
        """As `BlockPool.free_blocks`, which is slow for blocks that someone else holds: most."""
        # As vLLM frees a request: the tail is to be evicted before the head.
        unused = [block for block in reversed(blocks) if block.ref_cnt == 1]
        if unused:
            self._pool.free_blocks(unused)  # first: if it raises, nothing has changed
        for block in blocks:
            if block.ref_cnt:
                block.ref_cnt -= 1

    def _expire(self) -> None:
        """Fail what is past its deadline; its blocks stay held until the copies have ended."""
        assert self.offload is not None
        for job_id in self.offload.expire(self._clock()):
            transfer = self._transfers[job_id]
            logger.warning(
                "kvstow: %s job %d is late by its deadline of %g s; its %d blocks stay out of use "
                "until the copy has ended",
                transfer.direction,
                job_id,
                self._options.load_timeout_s,
                len(transfer.blocks),
            )
            if transfer.direction == "store":
                transfer.is_late = True
                self._num_storing -= 1
            else:
                self._give_up(transfer)

    def _give_up(self, transfer: _Transfer) -> None:
        """Fail a load's request; its blocks stay held until the copy has ended."""
        self._hold(transfer)  # before its request is told, and vLLM takes the blocks back
        transfer.is_late = True
        self._failed.append(transfer.request_id)

    def _deadline(self) -> float:
        return self._clock() + self._options.load_timeout_s
