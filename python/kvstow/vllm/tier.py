"""The host tier beside vLLM's scheduler, and what all parts of the scheduler half share.

```
absent ---- every rank has reported its capacity ---> on ---- an error in this half ---> off
```

`offload` is None unless the tier is on, so each part asks for it in each call.

Each rank reports how many blocks its host memory holds (`StepReports.capacities`). The tier has the
least of these numbers, so each slot exists on every rank (`HostTier.add_capacities`).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from kvstow import OffloadScheduler, StateError
from kvstow.observability.events import BlockEvent, TransferEvent
from kvstow.vllm.below.both import BothTier
from kvstow.vllm.below.disk import DiskTier
from kvstow.vllm.below.lower_tier import LowerTier
from kvstow.vllm.below.shared import SharedTier
from kvstow.vllm.lazy_queue import LazyQueue
from kvstow.vllm.model import Model
from kvstow.vllm.options import Options

# Per group, the block table of each request.
Tables: TypeAlias = Sequence[Mapping[str, list[KVCacheBlock]]]

logger = logging.getLogger("vllm." + __name__)


@dataclass
class HostTier:
    """The tier's accounting (`offload`), the lazy queue, and vLLM's accounting (`manager`).

    Attributes:
        model: the model, as vLLM has laid it out.
        options: the user's options.
        world_size: workers that report each job and their capacity.
        horizon_blocks: in lazy mode, how many free blocks are stored ahead of their eviction.
        gathered_tokens: in a full-attention model, stores wait until this many tokens are
            computed, or the blocks of an eighth of what stores may hold. 0: they never wait.
        events: whether to keep block and transfer events.
        unhashed_modalities: nothing is kept of requests with these media.
        clock: seconds, monotonic.
        offload: None until every rank has reported its capacity, and once the tier is off.
        lazy: None in eager mode, and once the tier is off.
        off_until: None unless an error has turned the tier off. Then the time up to which the last
            copies keep vLLM stepping.
        manager: vLLM's accounting, from `bind` on.
        pool: its device blocks, from `bind` on.
        tables: per group, vLLM's block table of each request, from `bind` on.
        below: the tier below; None without `disk_path` and `shared`, and once the tier is off.
        counts: statistics of the connector beside those of `offload`.
    """

    model: Model
    options: Options
    world_size: int
    horizon_blocks: int
    gathered_tokens: int = 0
    events: bool = False
    unhashed_modalities: frozenset[str] = frozenset()
    clock: Callable[[], float] = time.monotonic
    offload: OffloadScheduler | None = None
    lazy: LazyQueue | None = None
    off_until: float | None = None
    below: LowerTier | None = field(init=False)
    manager: KVCacheManager = field(init=False)
    pool: BlockPool = field(init=False)
    tables: Tables = field(init=False)
    counts: Counter[str] = field(default_factory=Counter)
    _min_free_blocks: int = 0
    _capacities: dict[int, int] = field(default_factory=dict)
    _wait_until: float | None = None
    _has_warned: bool = False
    # What a tier that was turned off has still to report.
    _last_events: Sequence[BlockEvent] = ()
    _last_transfer_events: Sequence[TransferEvent] = ()

    def __post_init__(self) -> None:
        options, parts = self.options, (self.options, self.world_size, self.clock)
        self.below = None
        if options.disk_path is not None:
            is_shared = options.shared is not None
            self.below = BothTier(*parts) if is_shared else DiskTier(*parts)
        elif options.shared is not None:
            self.below = SharedTier(*parts)

    def bind(self, manager: KVCacheManager) -> None:
        """Take vLLM's accounting, whose blocks jobs hold, and how it cuts the hits of drafts."""
        self.manager, self.pool = manager, manager.block_pool
        managers = self.model.own(manager.coordinator.single_type_managers)
        self.tables = [group.req_to_blocks for group in managers]
        self.model = self.model.bound(manager)
        self._min_free_blocks = self.model.num_blocks // 8
        # What waits must not be more than stores may hold, because requests end and do not wait.
        blocks_per_token = sum(1 / group.block_size for group in self.model.groups)
        most_tokens = int(self.max_stored_blocks / blocks_per_token) // 8
        self.gathered_tokens = min(self.gathered_tokens, most_tokens)
        self.lazy = None
        if self.options.lazy_offload:
            batch_blocks = int(self.gathered_tokens * blocks_per_token)
            self.lazy = LazyQueue(manager.block_pool, self.horizon_blocks, batch_blocks)

    def has_room(self) -> bool:
        """Whether so many device blocks are free that vLLM is far from preempting a request."""
        num_free: int = self.pool.free_block_queue.num_free_blocks
        return num_free >= self._min_free_blocks

    @property
    def is_off(self) -> bool:
        """Whether an error has turned the tier off."""
        return self.off_until is not None

    def add_capacities(self, reported: Mapping[int, int]) -> bool:
        """Take the host blocks that ranks report, and create the tier once all are known.

        A rank may report twice, because steps overlap.

        Returns:
            Whether the tier is new: it knows none of the tracked requests.

        Raises:
            StateError: a rank reports another number than before.
        """
        if self.is_off:
            return False
        for rank, num_blocks in reported.items():
            known = self._capacities.setdefault(rank, num_blocks)
            if num_blocks != known:
                raise StateError(
                    f"rank {rank} reports {num_blocks} host blocks, expected {known} as before, so "
                    "its worker has lost the content of the host tier: restart the server"
                )
        if self.offload is not None or len(self._capacities) < self.world_size:
            return False
        self.create(min(self._capacities.values()))
        return True

    def is_awaited(self) -> bool:
        """Whether the tier is still to come, so that a request should wait for it.

        vLLM's executors pass on the capacities of all ranks with the first step. For an executor
        that does not, a timeout ends the wait, and requests go on without the host tier.
        """
        if self.offload is not None or self.is_off:
            return False
        now = self.clock()
        if self._wait_until is None:
            self._wait_until = now + self.options.load_timeout_s
        if now < self._wait_until:
            return True
        if not self._has_warned:
            self._has_warned = True
            logger.error(
                "kvstow: ranks %s have not reported their host memory within load_timeout_s (%g "
                "s). Requests go on without the host tier until they do. Check that these workers "
                "run, and that the executor passes on KVConnectorOutput.kv_connector_worker_meta",
                sorted(set(range(self.world_size)) - set(self._capacities)),
                self.options.load_timeout_s,
            )
        return False

    def create(self, num_host_blocks: int) -> None:
        """Create the accounting of the tier, as large as every rank has memory for.

        It numbers its jobs from the start, so no job of an earlier tier may be in flight.
        """
        below = self.below
        self.offload = OffloadScheduler(
            num_host_blocks,
            self.model.groups,
            mode="lazy" if self.options.lazy_offload else "eager",
            policy=self.options.eviction_policy,  # type: ignore[arg-type] # parsed
            world_size=self.world_size,
            num_device_blocks=self.model.num_blocks,
            events=self.events,
            store_threshold=self.options.store_threshold,
            num_disk_blocks=0 if below is None else below.num_blocks(num_host_blocks),
            disk_admit=self.options.lower.admit,
            max_disk_blocks_in_flight=1 if below is None else below.max_in_flight(num_host_blocks),
            min_promote_tokens=self.options.min_promote_tokens,
        )
        if below is not None:
            below.begin(self.offload)

    @property
    def max_stored_blocks(self) -> int:
        """The most device blocks that stores may hold at a time."""
        given = self.options.max_store_blocks_in_flight
        return max(1, self.model.num_blocks * 3 // 4) if given is None else given

    def turn_off(self) -> None:
        """Give the tier up for good. Its last events report that its blocks are gone."""
        self.off_until = self.deadline()
        try:
            with suppress(Exception):  # the accounting may be what is broken
                self._empty()
        finally:
            below, self.offload, self.lazy, self.below = self.below, None, None, None
            if below is not None:
                below.close()

    def _empty(self) -> None:
        """End all jobs and drop all blocks, and keep the events of that."""
        if self.offload is not None and self.events:
            self.offload.end_all()
            self.offload.reset()
            self._last_transfer_events = self.take_transfer_events()
            self._last_events = self.take_events()

    def deadline(self) -> float:
        """Return the time by which a job that begins now must have ended."""
        return self.clock() + self.options.load_timeout_s

    def stats(self) -> dict[str, int]:
        """Return the tier's counters and gauges; empty unless the tier is on."""
        if self.offload is None:
            return {}
        stats = {**self.counts, **self.offload.stats()}
        if self.below is not None:
            stats |= self.below.stats()
            if self.below.slow_loads is not None:
                stats["skipped_load_tokens"] = self.below.slow_loads.num_skipped_tokens
        return stats

    def take_events(self) -> Sequence[BlockEvent]:
        """Return the events of the tier's blocks since the last call."""
        if self.offload is None:
            last, self._last_events = self._last_events, ()
            return last
        events: list[BlockEvent] = self.offload.take_events()
        if self.below is not None:
            events += self.below.take_events()
        return events

    def take_transfer_events(self) -> Sequence[TransferEvent]:
        """Return the events of jobs since the last call."""
        if self.offload is None:
            last, self._last_transfer_events = self._last_transfer_events, ()
            return last
        return self.offload.take_transfer_events()

    def end_all(self) -> None:
        """End all jobs, because workers report no more."""
        if self.offload is not None:
            self.offload.end_all()
        if self.below is not None:
            self.below.close()
