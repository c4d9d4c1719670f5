"""How many host blocks the ranks have, which their workers report with the first steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from kvstow import StateError

logger = logging.getLogger("vllm." + __name__)


class Capacities:
    """Collects the ranks' capacities; the host tier can be made once all are known."""

    def __init__(self, world_size: int, *, timeout_s: float, clock: Callable[[], float]) -> None:
        """Wait for `world_size` ranks, for at most `timeout_s` from the first question on."""
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._clock = clock
        self._of_rank: dict[int, int] = {}
        self._wait_until: float | None = None
        self._has_warned = False

    def add(self, reported: Mapping[int, int]) -> None:
        """Take a step's reports. A rank may repeat itself: steps overlap.

        Raises:
            StateError: a rank has another number of host blocks than it had before.
        """
        for rank, num_blocks in reported.items():
            known = self._of_rank.setdefault(rank, num_blocks)
            if num_blocks != known:
                raise StateError(
                    f"rank {rank} reports {num_blocks} host blocks, expected {known} as before: "
                    "its worker has lost the host memory that the scheduler knows of; restart the "
                    "server"
                )

    @property
    def agreed(self) -> int | None:
        """The least of all ranks' capacities, in blocks; None until every rank has reported."""
        if len(self._of_rank) < self._world_size:
            return None
        return min(self._of_rank.values())

    def is_awaited(self) -> bool:
        """Whether to wait for more reports: some are missing, and they are not overdue.

        vLLM's executors pass all ranks' reports on with the first step. One that does not must not
        keep requests waiting for ever, so they go on without a host tier after the timeout.
        """
        if self.agreed is not None:
            return False
        now = self._clock()
        if self._wait_until is None:
            self._wait_until = now + self._timeout_s
        if now < self._wait_until:
            return True
        if not self._has_warned:
            self._has_warned = True
            missing = sorted(set(range(self._world_size)) - set(self._of_rank))
            logger.error(
                "kvstow: ranks %s have not reported their host memory within %g s; requests are "
                "served without the host tier until they do. Does this executor pass on "
                "KVConnectorOutput.kv_connector_worker_meta?",
                missing,
                self._timeout_s,
            )
        return False
