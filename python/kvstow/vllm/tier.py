"""The host tier beside vLLM's scheduler, and what all parts of the scheduler half share.

```
absent ---- every rank has reported its capacity ---> on ---- an error in this half ---> off
```

`offload` is None unless the tier is on, so each part asks for it in each call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvstow import OffloadScheduler
from kvstow.vllm.capacity import Capacities
from kvstow.vllm.lazy_queue import LazyQueue
from kvstow.vllm.model import Model
from kvstow.vllm.options import Options

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    from kvstow.observability.events import BlockEvent, TransferEvent


class HostTier:
    """The tier's accounting (`offload`), the lazy queue, and vLLM's accounting (`manager`).

    Attributes:
        offload: None until every rank has reported its capacity, and once the tier is off.
        lazy: None in eager mode, and once the tier is off.
        off_until: None unless an error has turned the tier off. Then the time up to which the last
            copies keep vLLM stepping.
        manager: vLLM's accounting, from `bind` on.
    """

    manager: KVCacheManager

    def __init__(  # noqa: PLR0913 - as SchedulerHalf has them
        self,
        model: Model,
        options: Options,
        *,
        world_size: int,
        horizon_blocks: int,
        events: bool,
        clock: Callable[[], float],
    ) -> None:
        """Wait for vLLM's accounting (`bind`) and for the ranks' capacities (`add_capacities`)."""
        self.model = model
        self.options = options
        self.clock = clock
        self.world_size = world_size
        self.offload: OffloadScheduler | None = None
        self.lazy: LazyQueue | None = None
        self.off_until: float | None = None
        self._horizon_blocks = horizon_blocks
        self._events = events
        self._capacities = Capacities(world_size, timeout_s=options.load_timeout_s, clock=clock)

    def bind(self, manager: KVCacheManager) -> None:
        """Take vLLM's accounting, whose blocks jobs hold."""
        self.manager = manager
        is_lazy = self.options.lazy_offload
        self.lazy = LazyQueue(manager.block_pool, self._horizon_blocks) if is_lazy else None

    @property
    def pool(self) -> BlockPool:
        """vLLM's pool of device blocks."""
        return self.manager.block_pool

    @property
    def is_off(self) -> bool:
        """Whether an error has turned the tier off."""
        return self.off_until is not None

    def add_capacities(self, reported: Mapping[int, int]) -> int | None:
        """Take the capacities that ranks report.

        Returns:
            The number of host blocks to create the tier with, once; None at any other time.
        """
        if self.is_off:
            return None
        self._capacities.add(reported)
        return self._capacities.agreed if self.offload is None else None

    def is_awaited(self) -> bool:
        """Whether the tier is still to come, so that a request should wait for it."""
        return self.offload is None and not self.is_off and self._capacities.is_awaited()

    def create(self, num_host_blocks: int) -> OffloadScheduler:
        """Create the accounting of the tier."""
        self.offload = OffloadScheduler(
            num_host_blocks,
            self.model.groups,
            mode="lazy" if self.options.lazy_offload else "eager",
            policy=self.options.eviction_policy,  # type: ignore[arg-type] # parsed
            world_size=self.world_size,
            num_device_blocks=self.model.num_blocks,
            events=self._events,
        )
        return self.offload

    def turn_off(self) -> None:
        """Give the tier up for good."""
        self.off_until = self.deadline()
        self.offload = self.lazy = None

    def deadline(self) -> float:
        """Return the time by which a job that begins now must have ended."""
        return self.clock() + self.options.load_timeout_s

    def stats(self) -> dict[str, int]:
        """Return the tier's counters and gauges; empty unless the tier is on."""
        return {} if self.offload is None else self.offload.stats()

    def take_events(self) -> Sequence[BlockEvent]:
        """Return the events of the tier's blocks since the last call."""
        return [] if self.offload is None else self.offload.take_events()

    def take_transfer_events(self) -> Sequence[TransferEvent]:
        """Return the events of jobs since the last call."""
        return [] if self.offload is None else self.offload.take_transfer_events()

    def end_all(self) -> None:
        """End all jobs, because workers report no more."""
        if self.offload is not None:
            self.offload.end_all()
