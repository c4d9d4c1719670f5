"""What the scheduler half does before vLLM rests or sleeps, and when vLLM resets its caches.

vLLM sleeps in three calls: it pauses its requests, asks `may_rest` until the answer is yes, and
resets its caches. The device memory goes after that. So `may_rest` begins what must be done before.

A reset empties the tier, unless `preserve_on_sleep` is set and `WeightsVersion` finds no change.
It empties the tier below, too. A disk closes until a new generation is durable, and the names of
the blocks in a shared store change.
The workers keep the host memory mapped either way.
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass, field

from vllm.v1.request import RequestStatus

from kvstow.vllm.adapters import Adapters
from kvstow.vllm.requests import Requests
from kvstow.vllm.stores import Stores
from kvstow.vllm.tier import HostTier
from kvstow.vllm.tracked import TrackedRequest
from kvstow.vllm.transfers import Transfers
from kvstow.vllm.weights import WeightsVersion

logger = logging.getLogger("vllm." + __name__)

# vLLM is to let them run: those with blocks of a load that has landed lacked room for the rest.
_WAITING = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


@dataclass
class Sleep:
    """Answers whether vLLM may rest, and resets the tier.

    Attributes:
        must_compare: no lookup has come since the last reset or the start, and resets may keep the
            tier.
    """

    tier: HostTier
    requests: Requests
    transfers: Transfers
    stores: Stores
    adapters: Adapters
    weights: WeightsVersion
    must_compare: bool = field(init=False)
    # vLLM's map of the blocks on the device, which it makes anew when it resets its pool. To keep
    # the old map would keep its memory, and the next lookup would wait until it is freed.
    _device_keys: weakref.ref[object] | None = None
    # The last reset emptied the tier and not vLLM's pool, whose blocks the tier may have since.
    _is_pool_older: bool = False

    def __post_init__(self) -> None:
        self.must_compare = self.tier.options.preserve_on_sleep

    def reset(self) -> bool:
        """Empty the tier, unless `preserve_on_sleep` keeps it and the weights are unchanged.

        Jobs in flight end without effect; their requests are recomputed. Returns whether the tier
        keeps its content.
        """
        is_kept = self._keep_or_empty()
        self.must_compare = self.tier.options.preserve_on_sleep
        if is_kept:
            logger.info("kvstow: this reset keeps the host tier")
        return is_kept

    def compare_weights(self) -> None:
        """Empty the tier if the weights have changed since the last reset.

        vLLM resets its caches before it sleeps and not when it wakes, and the weights may be
        replaced in between. So the first lookup after a reset compares them once more. It does so
        after a reset that emptied the tier, too: if the operator puts the old weights back, what is
        stored from now on is theirs. The first lookup of all compares them as well, because a tier
        below the host may have blocks by then, and vLLM had no caches to reset.

        Unless it is asked for more, vLLM resets its pool alone, and reports that to no connector.
        The weights may be others then, too. If the last reset emptied the tier and could not reset
        the pool, it was not over until now: requests have hit old blocks of the pool meanwhile.
        """
        device_keys = self.tier.pool.cached_block_hash_to_block
        if self._device_keys is None or self._device_keys() is not device_keys:
            self._device_keys = weakref.ref(device_keys)
            self.must_compare = self.tier.options.preserve_on_sleep or self._is_pool_older
        if self.must_compare:
            self.must_compare = False
            self._keep_or_empty()

    def _keep_or_empty(self) -> bool:
        """Empty the tier unless it is to be kept; return whether it is kept."""
        # vLLM has tried to reset its own pool just before. If requests held blocks there, the pool
        # still serves what the old weights computed, and the tier may store it. So the version that
        # was read counts as new until vLLM's reset succeeds. All blocks are free then, as they are
        # between requests, and none has a key.
        pool = self.tier.pool
        are_free = pool.free_block_queue.num_free_blocks == self.tier.model.num_blocks - 1
        is_pool_reset = are_free and not len(pool.cached_block_hash_to_block)
        is_kept = self.tier.options.preserve_on_sleep
        if is_kept and not self.weights.changed(remember=is_pool_reset):
            return True
        self._is_pool_older = not is_pool_reset
        if self.tier.offload is not None:
            self.tier.offload.reset()
        if self.tier.below is not None:
            self.tier.below.reset()
        self.adapters.forget()
        for tracked in self.requests.tracked.values():
            tracked.is_stale = tracked.is_stale or tracked.is_admitted
        options = self.tier.options
        logger.info(
            "kvstow: this reset empties the host tier%s%s",
            "" if options.disk_path is None else " and the disk tier",
            "" if options.shared is None else ", and ends the sharing until the server restarts",
        )
        return False

    def may_rest(self) -> bool:
        """Whether vLLM need not go on stepping for stores to land and failures to be reported.

        vLLM asks when it has nothing to run: all requests are over, or it is paused, perhaps to
        sleep, and keeps them.
        """
        if self.tier.offload is None and not self.tier.is_off:
            return not self.tier.is_awaited()  # an empty step brings the ranks' capacities
        self.stores.store_gathered()
        tracked = list(self.requests.tracked.values())
        if any(each.request.num_in_flight_tokens for each in tracked):
            return False  # vLLM waits for these steps, and others may have hit their blocks
        may_go = all([self._settle(each) for each in tracked])
        below = self.tier.below
        has_work = below is not None and below.has_work
        return may_go and not (self.transfers.is_work_left or has_work)

    def _settle(self, tracked: TrackedRequest) -> bool:
        """Store or free the blocks of a paused request; return whether its blocks may go."""
        request = tracked.request
        if not tracked.is_admitted:
            return True
        is_waiting_for_load = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        if is_waiting_for_load and not tracked.is_load_reported:
            return False
        options = self.tier.options
        if options.preserve_on_sleep and options.lazy_offload and not tracked.is_stale:
            self._store_computed(tracked)
        if is_waiting_for_load or request.status in _WAITING:
            # Its load is over, and it has not run since. vLLM takes blocks back only from requests
            # that run, and would not sleep. So free the blocks here; the request loads again later.
            self.tier.manager.free(request)
            request.num_computed_tokens = 0
            self.requests.start_over(request.request_id)
        return True

    def _store_computed(self, tracked: TrackedRequest) -> None:
        """Store the computed blocks of a paused request, once.

        With a full host a second time would evict the blocks of the other paused requests.
        """
        num_computed = tracked.request.num_computed_tokens
        if self.tier.offload is None or num_computed <= tracked.num_settled_tokens:
            return
        tracked.num_settled_tokens = num_computed
        request_id = tracked.request.request_id
        written = [
            block
            for group, tables in zip(tracked.model.groups, self.tier.tables, strict=True)
            for block in tables.get(request_id, [])[: num_computed // group.block_size]
            if block.block_hash is not None
        ]
        self.stores.store_cached(written)
