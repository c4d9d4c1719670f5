"""The requests that the scheduler half tracks, and how far the tier knows the blocks of each.

```
               lookup                 allocated without a load
  not tracked --------> waiting ---------------------------------> running
                         |   ^ |                                      ^
             lookup:     |   | | allocated with a load                | allocated again
             ask again   +---+ +-------------------------> loading ---+ when the load landed
                                                              |
        waiting, but tracked anew with `recompute` <----------+ lookup after the load failed

  from any state: finished or aborted, preempted, or vLLM sleeps before a loaded request has run
               ------> not tracked
```

Each step makes some blocks of a running request full:

```
  build       the step is scheduled    `filling` holds these blocks: the request is due
  processed   their KV is computed     the tier knows them (`num_reported`): it is not due
```

A request that is not tracked any more may still have jobs in flight. They go on without it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from kvstow import OffloadScheduler, SlidingWindow
from kvstow.vllm.hints import HintReader
from kvstow.vllm.model import Model
from kvstow.vllm.tier import HostTier


@dataclass(slots=True)
class TrackedRequest:
    """A request between its first lookup and its end.

    Attributes:
        num_reported: per group, the blocks of its table that the tier knows.
        due_tokens: the number of computed tokens that completes the next block hash.
        num_hashes: hashes that the tier knows.
        last_hash: the last of these.
        num_local_tokens: tokens that its last lookup found on the device.
        num_given_tokens: tokens from hits and loads when its first step was scheduled.
        num_settled_tokens: computed tokens whose blocks were stored because vLLM paused.
        is_admitted: vLLM gave it blocks.
        is_fresh: admitted since the last step was built, so that a preemption that the step names
            is an older one.
        is_loading: its load is under way or has failed, so its table overstates what is computed.
        is_load_reported: vLLM knows how its load ended.
        is_stale: its blocks are not stored, because a reset came after their computation or because
            their hashes cannot be trusted.
        recompute: nothing is loaded for it, because a load of it has failed or cannot begin.
        max_stored_tokens: blocks that end behind these tokens are not stored. It never changes.
        max_load_tokens: the most tokens to load.
        was_offered_idle: its last lookup found tokens on the host, and no request was in its way.
        filling: per group, the blocks that the steps under way make full. They are recorded when
            vLLM allocates them, because a window drops blocks as soon as it has moved past them.
        filling_from: per group, the index of the first of them in the table.
    """

    request: Request
    model: Model
    num_reported: list[int]
    due_tokens: int
    recompute: bool = False
    max_stored_tokens: int = sys.maxsize
    max_load_tokens: int = sys.maxsize
    num_hashes: int = 0
    last_hash: bytes = b""
    num_local_tokens: int = 0
    num_given_tokens: int = 0
    num_settled_tokens: int = 0
    is_admitted: bool = False
    is_fresh: bool = False
    is_loading: bool = False
    is_load_reported: bool = False
    is_stale: bool = False
    was_offered_idle: bool = False
    filling: list[list[KVCacheBlock]] = field(default_factory=list)
    filling_from: list[int] = field(default_factory=list)

    def report_hashes(self, offload: OffloadScheduler, num_tokens: int) -> None:
        """Report the hashes of the first `num_tokens` tokens to the tier."""
        num_known = self.num_hashes
        stride = self.model.tokens_per_hash // self.model.tokens_per_vllm_hash
        hashes: Sequence[bytes] = self.request.block_hashes
        known = num_known * stride
        if known and (len(hashes) < known or hashes[known - 1] != self.last_hash):
            # vLLM changed the tokens. A hash covers all tokens before it, so comparing the last
            # hash is enough.
            offload.truncate(self.request.request_id, 0)
            self.num_hashes = num_known = 0
        end = num_tokens // self.model.tokens_per_hash
        if end <= num_known:
            return
        first, end = (num_known + 1) * stride - 1, min(end * stride, len(hashes))
        # The hashes of a whole prompt are not copied.
        is_all = first == 0 and stride == 1 and end == len(hashes)
        new = hashes if is_all else hashes[first:end:stride]
        offload.extend(self.request.request_id, new)
        self.num_hashes += len(new)
        if new:
            self.last_hash = new[-1]

    def filled(self, g: int, num_full: int) -> list[KVCacheBlock]:
        """Return those of the first `num_full` blocks of a group that the tier does not know."""
        reported, first = self.num_reported[g], self.filling_from[g]
        blocks = self.filling[g]
        if reported == first and len(blocks) <= num_full - reported:
            return blocks
        return blocks[reported - first : num_full - first]

    def num_wanted(self, g: int) -> int:
        """Return how many of a group's next blocks are to be stored."""
        num_wanted = self.max_stored_tokens // self.model.groups[g].block_size
        return max(0, num_wanted - self.num_reported[g])

    def num_cached_tokens(self) -> int:
        """Return how many computed tokens lie in blocks that have the hashes of these tokens.

        Tokens of steps under way do not count. In a full-attention table the last block with its
        own key proves the blocks before it, because a hash covers all tokens before it. vLLM hashes
        a block in the step that fills it, or one step later if drafts filled it.
        """
        request, model = self.request, self.model
        num_computed: int = min(
            request.num_computed_tokens - request.num_in_flight_tokens,
            len(request.block_hashes) * model.tokens_per_vllm_hash,
        )
        for g, group in enumerate(model.groups):
            if model.is_window[g] or num_computed < self.due_tokens:
                continue
            blocks = self.filled(g, num_computed // group.block_size)
            end = self.num_reported[g] + len(blocks)
            for block in reversed(blocks):
                if block.block_hash == model.block_key(request, end - 1, g):
                    break
                end -= 1
            num_computed = min(num_computed, (end + 1) * group.block_size - 1)
        return num_computed

    def window_ids(
        self, g: int, blocks: Sequence[KVCacheBlock], manager: KVCacheManager
    ) -> list[int]:
        """Return the ids of filled blocks of a window or state; 0 for those not to be stored.

        vLLM gives hashes only to blocks at which a hit can end. Another request may have taken a
        block since: its hash shows it. A hit on the device needs no block below its window, so the
        blocks that vLLM retains there have no hash, and yet a load must bring them. Such a block is
        stored if it is still in the request's table, and if the request computed it, because a load
        of another connector may leave it unwritten.
        """
        request, spec, first = self.request, self.model.groups[g], self.num_reported[g]
        ids = [
            block.block_id if block.block_hash == self.model.block_key(request, index, g) else 0
            for index, block in enumerate(blocks, first)
        ]
        if isinstance(spec, SlidingWindow) and spec.extra_retained_tokens:
            table = manager.get_blocks(request.request_id).blocks[g]
            start = max(0, -(-self.num_given_tokens // spec.block_size) - first)
            for at, retained in enumerate(table[first + start : first + len(blocks)], start):
                if retained is blocks[at] and not retained.is_null:
                    ids[at] = retained.block_id
        return ids


@dataclass
class Requests:
    """The tracked requests, by id, and those of them that have something to report.

    Attributes:
        tier: the host tier.
        stores_sessions: as `SchedulerHalf` has it.
        tracked: all tracked requests.
        due: those whose blocks a scheduled step makes full.
        hints: reads what each request asks for.
    """

    tier: HostTier
    stores_sessions: bool
    tracked: dict[str, TrackedRequest] = field(default_factory=dict)
    due: dict[str, TrackedRequest] = field(default_factory=dict)
    hints: HintReader = field(init=False)

    def __post_init__(self) -> None:
        self.hints = HintReader(self.tier.counts)

    def track(self, request: Request, *, recompute: bool = False) -> TrackedRequest:
        """Begin to track a request; `recompute` if its load has failed."""
        model = self.tier.model
        none_reported = [0] * len(model.groups)
        tracked = TrackedRequest(request, model, none_reported, model.tokens_per_hash, recompute)
        hints = self.hints.read(request.kv_transfer_params)
        if not hints.store:
            tracked.max_stored_tokens = 0
        elif self.tier.options.offload_prompt_only:
            tracked.max_stored_tokens = request.num_prompt_tokens
        if hints.max_load_tokens is not None:
            tracked.max_load_tokens = hints.max_load_tokens
        if request.resumable and not self.stores_sessions:
            tracked.is_stale = tracked.recompute = True
        if self.tier.offload is not None:
            self.tier.offload.add(request.request_id, [])
            if hints.priority == "low":
                self.tier.offload.lower_priority(request.request_id)
        self.tracked[request.request_id] = tracked
        return tracked

    def forget(self, request_id: str) -> None:
        """End the tracking of a request, in the tier too."""
        del self.tracked[request_id]
        self.due.pop(request_id, None)
        if self.tier.offload is not None:
            self.tier.offload.finish(request_id)

    def capture(self, request_id: str, tracked: TrackedRequest, num_computed: int) -> None:
        """Record the blocks that are full once `num_computed` tokens are computed."""
        if num_computed < tracked.due_tokens or tracked.is_stale or not tracked.is_admitted:
            return
        tables = self.tier.manager.get_blocks(request_id).blocks
        tracked.filling_from = list(tracked.num_reported)
        tracked.filling = [
            table[start : num_computed // group.block_size]
            for table, start, group in zip(
                tables, tracked.num_reported, tracked.model.groups, strict=True
            )
        ]
        self.due[request_id] = tracked
