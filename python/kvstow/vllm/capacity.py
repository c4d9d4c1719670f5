"""The number of host blocks of each rank, which its worker reports with the first steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from kvstow import StateError

logger = logging.getLogger("vllm." + __name__)


class Capacities:
    """Collects the capacities of all ranks. The host tier is created when all are known."""

    def __init__(self, world_size: int, *, timeout_s: float, clock: Callable[[], float]) -> None:
        """Wait for `world_size` ranks, at most `timeout_s` seconds after the first question."""
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._clock = clock
        self._of_rank: dict[int, int] = {}
        self._wait_until: float | None = None
        self._has_warned = False

    def add(self, reported: Mapping[int, int]) -> None:
        """Take a step's reports. A rank may report twice, because steps overlap.

        Raises:
            StateError: a rank reports another number than before.
        """
        for rank, num_blocks in reported.items():
            known = self._of_rank.setdefault(rank, num_blocks)
            if num_blocks != known:
                raise StateError(
                    f"rank {rank} reports {num_blocks} host blocks, expected {known} as before, so "
                    "its worker has lost the content of the host tier: restart the server"
                )

    @property
    def agreed(self) -> int | None:
        """The smallest capacity of all ranks, in blocks; None until every rank has reported."""
        if len(self._of_rank) < self._world_size:
            return None
        return min(self._of_rank.values())

    def is_awaited(self) -> bool:
        """Whether to wait for more reports: some are missing, and the timeout is not over.

        vLLM's executors pass on the reports of all ranks with the first step. For an executor that
        does not, the timeout ends the wait, and requests go on without the host tier.
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
                "kvstow: ranks %s have not reported their host memory within load_timeout_s (%g "
                "s). Requests go on without the host tier until they do. Check that these workers "
                "run, and that the executor passes on KVConnectorOutput.kv_connector_worker_meta",
                missing,
                self._timeout_s,
            )
        return False
