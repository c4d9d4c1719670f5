"""The ledger and the offload scheduler as an engine uses them together, every call timed."""

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstow._core import (
    BlockLedger,
    Job,
    OffloadScheduler,
    PrefixHit,
    StepAllocation,
)
from kvstow.replay.config import ReplayConfig
from kvstow.replay.model import ReplayModel

__all__ = ["Accounting"]

Ids = npt.NDArray[np.int32]
Tokens = npt.NDArray[np.int64]


class Accounting:
    """Who holds which blocks, on the device and on the host.

    Blocks of a job stay pinned in the device pool from the moment it is planned until `complete`.
    """

    def __init__(self, config: ReplayConfig, model: ReplayModel) -> None:
        groups = [group.attention for group in model.groups]
        self.ledger = BlockLedger(config.device_blocks, groups)
        self.scheduler = OffloadScheduler(
            config.host_blocks, groups, mode=config.mode, policy=config.policy
        )
        self._watch = _Stopwatch()

    def take_us(self) -> float:
        """Wall time spent in the calls since this was last asked."""
        return self._watch.take_us()

    def add(self, name: str, digests: Sequence[bytes]) -> None:
        """Make a request known to both."""
        with self._watch:
            self.ledger.add(name, digests)
            self.scheduler.add(name, digests)

    def extend(self, name: str, digests: Sequence[bytes]) -> None:
        """Tell both the digests of further blocks."""
        with self._watch:
            self.ledger.extend(name, digests)
            self.scheduler.extend(name, digests)

    def forget(self, name: str) -> None:
        """Free the blocks of a request that is done, or that is to start again."""
        with self._watch:
            self.scheduler.finish(name)
            self.ledger.free(name)

    def look_up(
        self, name: str, max_tokens: int, *, host: bool = True
    ) -> tuple[PrefixHit, int] | None:
        """The prefix on the device, and the tokens right after it that the host can serve.

        None: some of them are just being loaded for another request.
        """
        with self._watch:
            hit = self.ledger.lookup(name, max_tokens)
            if not host:
                return hit, 0
            num_external = self.scheduler.lookup(name, hit.num_tokens, max_tokens)
        return None if num_external is None else (hit, num_external)

    def admit(self, name: str, hit: PrefixHit, num_tokens: int) -> bool:
        """Take blocks for tokens after the hit; False if the pool has too few."""
        with self._watch:
            return self.ledger.allocate(name, num_tokens, hit=hit) is not None

    def admit_load(self, name: str, hit: PrefixHit, num_external_tokens: int) -> Job | None:
        """Take blocks for a load after the hit, and plan it; None if the pool has too few."""
        with self._watch:
            taken = self.ledger.allocate(
                name, 0, hit=hit, num_external_tokens=num_external_tokens, delay_caching=True
            )
            if taken is None:
                return None
            job = self.scheduler.load(name, num_external_tokens, taken)
            self.ledger.pool.pin(job.block_ids)
        return job

    def publish(self, name: str, num_tokens: int) -> None:
        """Make what a load has filled findable."""
        with self._watch:
            self.ledger.cache(name, num_tokens)

    def grant(self, names: Sequence[str], tokens: Tokens) -> StepAllocation:
        """Take blocks for a step of running requests, in order, until one does not fit."""
        with self._watch:
            return self.ledger.allocate_step(names, tokens)

    def store(self, names: Sequence[str], computed: Tokens, num_told: Sequence[int]) -> Job | None:
        """Plan the stores of what these requests have computed.

        `num_told`: per request, the blocks of its table that were there when it was last named.
        """
        with self._watch:
            # The ledger's own tables: a block that has left a window since it was taken is null.
            appended = [
                self.ledger.block_table(name, group)[told:]
                for name, told in zip(names, num_told, strict=True)
                for group in range(self.ledger.num_groups)
            ]
        offsets = np.cumsum([0, *map(len, appended)], dtype=np.int32)
        block_ids = np.concatenate(appended)
        with self._watch:
            job = self.scheduler.store(names, computed, block_ids, offsets)
            if job is not None:
                self.ledger.pool.pin(job.block_ids)
        return job

    def complete(self, job_id: int, *, ok: bool) -> bool:
        """End a job; whether its copies count."""
        with self._watch:
            end = self.scheduler.complete(job_id, ok=ok)
            assert end is not None, f"job {job_id} has one rank, which has reported"
            self.ledger.pool.unpin(end.block_ids)
        return end.ok

    def tables(self, name: str) -> Ids:
        """A request's block tables as the ledger has them, `[groups, blocks]`."""
        with self._watch:
            groups = range(self.ledger.num_groups)
            return np.stack([self.ledger.block_table(name, group) for group in groups])


class _Stopwatch:
    """Adds up the wall time of the blocks it guards."""

    def __init__(self) -> None:
        self._since_ns = 0
        self._total_ns = 0

    def __enter__(self) -> None:
        self._since_ns = time.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        self._total_ns += time.perf_counter_ns() - self._since_ns

    def take_us(self) -> float:
        total_ns, self._total_ns = self._total_ns, 0
        return total_ns / 1000
