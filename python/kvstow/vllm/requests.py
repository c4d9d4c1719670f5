"""The requests that the scheduler half tracks, and how far the tier knows the blocks of each.

```
               lookup                 allocated without a load
  not tracked --------> waiting ---------------------------------> running
                         |   ^ |                                      ^
             lookup:     |   | | allocated with a load                | allocated again
             ask again   +---+ +-------------------------> loading ---+ when the load landed
                                                              |
           waiting, and starts over with `recompute` <--------+ lookup after the load failed

  from any state: preempted, or vLLM sleeps before a loaded request has run
               ------> waiting, and starts over
                  finished or aborted
               ------> not tracked
```

Each step makes some blocks of a running request full:

```
  build       the step is scheduled    the request is due, and `filling` holds those of windows
  processed   their KV is computed     the tier knows them (`num_reported`); due if steps under
                                       way fill more
```

`Requests.look` finds the due requests. It looks only at those that steps may have made due: those
that had more than one token in a step, those that a step was the first of, and those that are due
once they have computed one token in each step since the last look (`look_after`). If vLLM computed
more tokens than it scheduled, blocks would be stored late, and still under their own keys.

**Gathering.** A full-attention table keeps its blocks until the request is over or preempted. So
the stores of several steps are planned together (`Stores.store_step`), and nothing is lost:
`Stores.store_gathered` plans them before vLLM preempts (`has_pending_block_frees` comes right
before each preemption), rests or runs short of blocks, and `Steps.finished` before it frees the
blocks. A window drops blocks, and a state is overwritten, so such models are stored in each step.
How a late look could store a wrong block, and what prevents it:

- It counts tokens that are not computed: it reads `num_computed_tokens` less those of steps under
  way, as an early look does, and stores only where vLLM's block has the hash of these tokens.
- It counts tokens that another connector loads within the first step of a request: it stores
  nothing until the outcome of that step is known (`distrust`).
- The request has lost its blocks since, and a load fills new ones: a request that starts over is
  looked at only after a step has scheduled it (`fresh`).

A request that is not tracked any more may still have jobs in flight. They go on without it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from kvstow.vllm.hints import HintReader
from kvstow.vllm.tier import HostTier
from kvstow.vllm.tracked import TrackedRequest, has_ambiguous_hashes, only_reads_canvas


def in_both(first: Collection[str], second: Collection[str]) -> list[str]:
    """Return the ids in both, in the order of the smaller one, so that the larger is not walked.

    Thousands of requests may be loading, while a step schedules few.
    """
    few, many = (first, second) if len(first) <= len(second) else (second, first)
    return [name for name in few if name in many]


@dataclass
class Requests:
    """The tracked requests, by id, and those of them that have something to report.

    Attributes:
        tier: the host tier.
        stores_sessions: as `SchedulerHalf` has it.
        tracked: all tracked requests.
        due: those whose blocks a scheduled step makes full.
        fresh: the ids of those admitted that no step has scheduled since. If a step says that vLLM
            has preempted one, it means an earlier preemption.
        num_steps: steps built.
        num_gathered: tokens of the steps since the last look.
        has_room: whether vLLM was far from preempting when the last step was built.
        hints: reads what each request asks for.
    """

    tier: HostTier
    stores_sessions: bool
    tracked: dict[str, TrackedRequest] = field(default_factory=dict)
    due: dict[str, TrackedRequest] = field(default_factory=dict)
    fresh: dict[str, None] = field(default_factory=dict)
    num_steps: int = 0
    num_gathered: int = 0
    has_room: bool = False
    # Requests that had blocks of another connector's load when their first step was built. They
    # leave when that step has ended well, and the distrusted ones when they are over.
    _unproven: dict[str, TrackedRequest] = field(default_factory=dict)
    # The ids of requests that had more than one token in a step, or their first, since the last
    # look; and by step, those that come due then.
    _scheduled: dict[str, None] = field(default_factory=dict)
    _looks: dict[int, list[str]] = field(default_factory=dict)
    _num_looked: int = 0
    hints: HintReader = field(init=False)

    def __post_init__(self) -> None:
        self.hints = HintReader(self.tier.counts)

    def track(self, request: Request) -> TrackedRequest:
        """Begin to track a request."""
        tracked = self.tracked[request.request_id] = self._waiting(request)
        self._add(tracked)
        return tracked

    def add_tracked(self) -> None:
        """Add the tracked requests to the tier, which is new."""
        for tracked in self.tracked.values():
            self._add(tracked)

    def _add(self, tracked: TrackedRequest) -> None:
        offload, request_id = self.tier.offload, tracked.request.request_id
        if offload is None:
            return
        offload.add(request_id, [])
        if tracked.has_low_priority:
            offload.lower_priority(request_id)

    def start_over(self, request_id: str, *, recompute: bool = False) -> TrackedRequest:
        """Let a request wait again that has lost its blocks; `recompute` if its load has failed."""
        before = self.tracked[request_id]
        tracked = self._waiting(before.request)
        tracked.recompute = tracked.recompute or recompute
        if self.tier.offload is not None:
            self.tier.offload.restart(request_id)
            tracked.num_hashes, tracked.last_hash = before.num_hashes, before.last_hash
        self.tracked[request_id] = tracked
        self._drop(request_id)
        return tracked

    def _drop(self, request_id: str) -> None:
        self.due.pop(request_id, None)
        self.fresh.pop(request_id, None)
        self._scheduled.pop(request_id, None)

    def _waiting(self, request: Request) -> TrackedRequest:
        model = self.tier.model
        none_reported = [0] * len(model.groups)
        tracked = TrackedRequest(request, model, none_reported, model.tokens_per_hash)
        hints = self.hints.read(request.kv_transfer_params)
        if not hints.store:
            tracked.max_stored_tokens = 0
        elif self.tier.options.offload_prompt_only or only_reads_canvas(request):
            tracked.max_stored_tokens = request.num_prompt_tokens
        if hints.max_load_tokens is not None:
            tracked.max_load_tokens = hints.max_load_tokens
        is_session = request.resumable and not self.stores_sessions
        if is_session or self._has_ambiguous_hashes(request):
            tracked.is_stale = tracked.recompute = True
        tracked.has_low_priority = hints.priority == "low"
        return tracked

    def _has_ambiguous_hashes(self, request: Request) -> bool:
        tier = self.tier
        return has_ambiguous_hashes(
            request, tier.model.tokens_per_vllm_hash, tier.unhashed_modalities
        )

    def admit(self, tracked: TrackedRequest) -> None:
        """Note that vLLM has given a request blocks."""
        tracked.is_admitted = True
        self.fresh[tracked.request.request_id] = None

    def distrust(self, block_ids: Collection[int]) -> None:
        """Store nothing of the requests with blocks that another connector did not load.

        vLLM lets the first of these requests compute the blocks again. It keeps their hashes, and
        counts them as computed for the others. So no other request may find them before they are.
        vLLM reports blocks for models of one group only.
        """
        bad = set(block_ids)
        # The unproven ones come first, in the order of their first steps, because a request may
        # share only what an earlier one has computed from a block not loaded.
        for request_id, tracked in (self._unproven | self.tracked).items():
            table = [block.block_id for block in self.tier.tables[0].get(request_id, ())]
            first = next((at for at, block in enumerate(table) if block in bad), len(table))
            if first < len(table):
                num_tokens = first * tracked.model.groups[0].block_size
                # A request that waits for a load has hits, but no first step yet.
                if num_tokens < max(tracked.num_given_tokens, tracked.num_local_tokens):
                    self._distrust_from(tracked, num_tokens)
                    bad.update(table[first:])
                    bad.discard(0)
                tracked.is_stale = True
                self.tier.pool.evict_blocks(set(table[first:]) - {0})

    def _distrust_from(self, tracked: TrackedRequest, num_tokens: int) -> None:
        """Let the blocks of a request lose their keys from this token on, also later ones.

        It may read a block that it shares before the other request has computed it again.
        """
        tracked.num_own_tokens = min(tracked.num_own_tokens, num_tokens)
        tracked.is_stale = tracked.is_distrusted = True
        self._unproven[tracked.request.request_id] = tracked
        self.evict_unproven(tracked)

    def evict_unproven(self, tracked: TrackedRequest) -> None:
        """Drop the keys of the blocks of a request that ends while another connector loads them.

        vLLM frees these blocks with their keys. Of a request that is over it ignores the report
        that they were not loaded. So later requests would hit them, and the tier would store them.
        """
        if tracked.num_own_tokens < tracked.num_given_tokens and not tracked.is_proven:
            self._drop_keys(self._foreign_blocks(tracked))

    def evict_guessed(self, tracked: TrackedRequest) -> None:
        """Drop the keys of a request's blocks behind its prompt if no step computes their KV."""
        request, groups = tracked.request, tracked.model.groups
        if not only_reads_canvas(request):
            return
        for group, tables in zip(groups, self.tier.tables, strict=True):
            first = request.num_prompt_tokens // group.block_size
            self._drop_keys(tables.get(request.request_id, ())[first:])

    def _drop_keys(self, blocks: Sequence[KVCacheBlock]) -> None:
        keyed = {block.block_id for block in blocks if block.block_hash is not None}
        self.tier.pool.evict_blocks(keyed)

    def _find_unproven(self, tracked: TrackedRequest, unproven: dict[int, TrackedRequest]) -> None:
        """Count no hit on blocks that another connector still loads as a request's own.

        vLLM keys these blocks when it grants them, so a second request may hit them before the
        outcome of the load is known. If it is aborted, or fails with the load, vLLM keeps the keys
        of what it computed from them.

        Args:
            tracked: a request whose first step is being built.
            unproven: the requests with unproven blocks, by block. Gets those of this request.
        """
        request_id, block_size = tracked.request.request_id, tracked.model.groups[0].block_size
        if unproven:
            num_hit = tracked.num_own_tokens // block_size
            for at, block in enumerate(self.tier.tables[0].get(request_id, ())[:num_hit]):
                other = unproven.get(block.block_id)
                if other is not None:
                    tracked.num_own_tokens = min(tracked.num_own_tokens, at * block_size)
                    if other.is_distrusted:
                        self._distrust_from(tracked, tracked.num_own_tokens)
                        break
        if tracked.num_own_tokens < tracked.num_given_tokens:
            self._unproven[request_id] = tracked
        self._add_unproven(tracked, unproven)

    def _add_unproven(self, tracked: TrackedRequest, unproven: dict[int, TrackedRequest]) -> None:
        """Add a request's unproven blocks; a block stays that of a distrusted request."""
        if tracked.num_own_tokens >= tracked.num_given_tokens:
            return
        for block in self._foreign_blocks(tracked):
            if not block.is_null and (tracked.is_distrusted or block.block_id not in unproven):
                unproven[block.block_id] = tracked

    def _drop_proven(self) -> None:
        """Forget those whose first step has ended well, and drop the new keys of the distrusted."""
        for request_id, tracked in list(self._unproven.items()):
            if self.tracked.get(request_id) is not tracked or tracked.is_proven:
                del self._unproven[request_id]
            elif tracked.is_distrusted:
                self.evict_unproven(tracked)

    def _foreign_blocks(self, tracked: TrackedRequest) -> Sequence[KVCacheBlock]:
        """Return a request's blocks from the first on that another connector loads."""
        first = tracked.num_own_tokens // tracked.model.groups[0].block_size
        return self.tier.tables[0].get(tracked.request.request_id, ())[first:]

    def forget(self, request_id: str) -> None:
        """End the tracking of a request, in the tier too."""
        del self.tracked[request_id]
        self._drop(request_id)
        if self.tier.offload is not None:
            self.tier.offload.finish(request_id)

    def scheduled(self, scheduled: SchedulerOutput) -> None:
        """Record what a step schedules, and the blocks of windows that it makes full."""
        num_scheduled = scheduled.num_scheduled_tokens
        self.num_steps += 1
        for tracked, num_tokens in self.chunks(scheduled):
            request = tracked.request
            self._scheduled[request.request_id] = None
            end = request.num_computed_tokens + num_tokens
            # `num_tokens` takes a call, and only a session may have fewer than its prompt.
            if end > request.num_prompt_tokens or request.resumable:
                end = min(end, request.num_tokens)
            tracked.scheduled_tokens = end
        if self._unproven:
            self._drop_proven()
        if self.fresh:
            unproven: dict[int, TrackedRequest] = {}
            for tracked in self._unproven.values():
                self._add_unproven(tracked, unproven)
            for request_id in in_both(self.fresh, num_scheduled):
                tracked = self.tracked[request_id]
                tracked.num_given_tokens = tracked.given_tokens()
                self._find_unproven(tracked, unproven)
                self._scheduled[request_id] = None
                del self.fresh[request_id]
        tier = self.tier
        if tier.model.is_full_attention:
            self.num_gathered += scheduled.total_num_scheduled_tokens
            self.has_room = tier.offload is not None and tier.has_room()
            if self.has_room:
                return
        self.look(num_scheduled)

    def chunks(self, scheduled: SchedulerOutput) -> list[tuple[TrackedRequest, int]]:
        """Return the requests that a step computes more than one token of, and these numbers."""
        num_scheduled, known = scheduled.num_scheduled_tokens, self.tracked
        if scheduled.total_num_scheduled_tokens == len(num_scheduled):
            return []
        chunks = []  # a comprehension takes longer, most of all for one prompt
        for request_id, num_tokens in num_scheduled.items():
            if num_tokens != 1 and request_id in known:
                chunks.append((known[request_id], num_tokens))
        return chunks

    def look(self, num_scheduled: Mapping[str, int] = MappingProxyType({})) -> None:
        """Find the requests that have become due since the last look.

        Args:
            num_scheduled: tokens of the step that is being built, which vLLM has not counted yet.
        """
        names = [*self.due, *self._scheduled]
        self._scheduled.clear()
        for step in range(self._num_looked + 1, self.num_steps + 1):
            names += self._looks.pop(step, ())
        self._num_looked, self.num_gathered = self.num_steps, 0
        for request_id in names:
            tracked = self.tracked.get(request_id)
            if tracked is None:
                continue
            if request_id in num_scheduled or tracked.model.is_full_attention:
                self.look_at(tracked, num_scheduled.get(request_id, 0))
            elif tracked.next_look == self.num_steps:
                self.look_after(1, tracked)

    def reported(self, tracked: TrackedRequest, num_computed: int) -> None:
        """Note that the tier knows the blocks of these tokens."""
        unit = tracked.model.tokens_per_hash
        tracked.due_tokens = (num_computed // unit + 1) * unit
        num_left = tracked.due_tokens - tracked.request.num_computed_tokens
        self.look_after(num_left, tracked)
        if tracked.model.is_full_attention or tracked.scheduled_tokens < tracked.due_tokens:
            del self.due[tracked.request.request_id]
        # Else a step under way fills more. It may be the last one, and then the table has dropped
        # what `filling` still holds.

    def look_after(self, num_steps: int, tracked: TrackedRequest) -> None:
        """Look at a request again after this many steps; in the next one if that is 0 or less."""
        step = self.num_steps + (num_steps if num_steps > 0 else 1)
        if tracked.next_look != step:
            tracked.next_look = step
            self._looks.setdefault(step, []).append(tracked.request.request_id)

    def look_at(self, tracked: TrackedRequest, num_tokens: int = 0) -> None:
        """Let a request be due if blocks of it are full once a step has computed `num_tokens`."""
        request = tracked.request
        if tracked.is_stale or not tracked.is_admitted or request.request_id in self.fresh:
            return
        num_computed = request.num_computed_tokens + num_tokens
        if num_computed >= tracked.due_tokens:
            # vLLM hashes no drafts and no tokens that are still to be sampled.
            num_computed = min(num_computed, request.num_tokens)
        if num_computed < tracked.due_tokens:
            self.look_after(tracked.due_tokens - num_computed, tracked)
            return
        if request.resumable and request.mm_features:  # a chunk may have brought more of them
            tracked.is_stale = self._has_ambiguous_hashes(request)
            if tracked.is_stale:
                return
        self.due[request.request_id] = tracked
        tracked.scheduled_tokens = num_computed
        if not tracked.model.is_full_attention:
            self._record_windows(tracked)

    def _record_windows(self, tracked: TrackedRequest) -> None:
        reported = tracked.filling_from = tracked.num_reported.copy()
        model, request_id = tracked.model, tracked.request.request_id
        groups = zip(model.is_window, self.tier.tables, reported, model.groups, strict=True)
        tracked.filling = [
            tables[request_id][start : tracked.scheduled_tokens // group.block_size]
            if is_window
            else []
            for is_window, tables, start, group in groups
        ]
