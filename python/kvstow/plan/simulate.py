"""Serve a workload with the real accounting of a device, a host and a disk, one request at a time.

A simulation needs no clock. Requests do not overlap, none is preempted, and a copy ends during the
next step. Reads and writes of the disk take no time. It serves what no single curve can: several
groups, hit density, and lazy stores.

An answer is computed token by token, so each of its blocks is a store of its own. Hit density
evicts for each by what it has learned until then. One store for all of them would evict others.

In a model with recurrent states, vLLM keeps a state at two places of a prompt: after its last full
block that leaves a token to compute, and where it parts from prompts before it. It knows that place
if the device or the host has what they share. So a step of a prompt ends at each of these places.
Other states are neither found on the device nor stored. vLLM writes only the state at the end of a
step. While the step runs, it also holds the state before it:

    full attention   |block|block|block|block|block|
    a state group    |null |state|null |null |state|      of a step of three blocks

The ledger gives each block a state. So the simulation takes the blocks of a step one by one, drops
the key of a state that is not kept, and takes its block again for a later state. If such a model
also has windows, they give blocks back during the step, a little earlier than in vLLM.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvstow._core import (
    AllBlocksCleared,
    BlockLedger,
    BlockRemoved,
    BlockStored,
    ConfigError,
    FullAttention,
    Hashes,
    OffloadScheduler,
    PrefixHit,
    StateSpace,
    TierJob,
)
from kvstow.engine import Policy
from kvstow.geometry import Geometry
from kvstow.geometry.layout import Attention
from kvstow.plan.workload import Workload

Ids = npt.NDArray[np.int32]
Mode = Literal["eager", "lazy"]
STEP_TOKENS = 8192
"""The most tokens of a request that a step computes."""
_HELD_STATES = 2
"""The most states that a request holds in a group: the one that a step reads, and its own."""
_NAME = "request"


@dataclass(slots=True)
class Served:
    """What a simulation has counted, in blocks of the trace, and in bytes on one rank.

    Attributes:
        device_hits: blocks found on the device.
        host_hits: blocks loaded from the host tier, also those that the disk brought there.
        loaded_bytes: bytes of the loads, in all groups.
        stored_bytes: bytes of the stores, in all groups.
        read_bytes: bytes read from the disk, in all groups.
        written_bytes: bytes written to the disk, in all groups.
    """

    device_hits: int = 0
    host_hits: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0

    @property
    def num_hits(self) -> int:
        """Blocks found on the device or the host."""
        return self.device_hits + self.host_hits


def host_hits(workload: Workload, num_host_blocks: int, policy: Policy) -> int:
    """Return the hits of a host tier alone, for a model with full attention only."""
    # The tier counts blocks, so their number of tokens does not matter.
    tier = OffloadScheduler(num_host_blocks, [FullAttention(1)], policy=policy)
    blocks = np.arange(1, 1 + max(map(len, workload.digests)), dtype=np.int32)
    num_hits = 0
    for digests, num_lookups in zip(workload.digests, workload.num_lookups, strict=True):
        num_blocks = len(digests)
        tier.add(_NAME, digests)
        if found := tier.lookup(_NAME, 0, num_lookups):
            num_hits += found
            tier.complete(tier.load(_NAME, found, [blocks[:found]]).job_id)
        job = tier.store([_NAME], [num_blocks], blocks[:num_blocks], [0, num_blocks])
        if job is not None:
            tier.complete(job.job_id)
        tier.finish(_NAME)
    return num_hits


@dataclass(frozen=True)
class Server:
    """A server without host and disk tiers, and the requests that it serves.

    Attributes:
        geometry: the model.
        workload: the requests.
        num_device_blocks: usable blocks of the device. None: the device keeps no block after its
            request, so all hits are the host's.
        policy: of the host tier, and of the disk below it.
        mode: when the host tier stores.
    """

    geometry: Geometry
    workload: Workload
    num_device_blocks: int | None = None
    policy: Policy = "lru"
    mode: Mode = "eager"

    @property
    def num_needed(self) -> int:
        """Usable blocks of a device that has room for the longest request."""
        groups, longest = self.geometry.attentions, max(self.workload.total_tokens)
        num_blocks = -(-longest // self.workload.block_tokens)
        others = [group for group in groups if not isinstance(group, StateSpace)]
        num_states = (len(groups) - len(others)) * min(num_blocks, _HELD_STATES)
        if not others:
            return num_states
        ledger = BlockLedger(2, others, max_in_flight_tokens=STEP_TOKENS)
        return num_states + ledger.blocks_to_fit(longest)

    @property
    def misfit(self) -> str | None:
        """Why the device has no room for the longest request, and what to pass; None if it has."""
        num_device, num_needed = self.num_device_blocks, self.num_needed
        if num_device is None or num_device >= num_needed:
            return None
        gib = (num_needed + 1) * self.geometry.device_block_bytes / 2**30
        last_digit = 10.0 ** (math.floor(math.log10(gib)) - 3)
        gib = math.ceil(gib / last_digit) * last_digit  # of four; a size below has no room
        return (
            f"the KV cache on the device holds {num_device} blocks, and the request of "
            f"{max(self.workload.total_tokens)} tokens needs {num_needed}: pass --device-blocks "
            f"{num_needed + 1} or --device-gib {gib:.4g} or more"
        )

    def serve(self, num_host_blocks: int, num_disk_blocks: int = 0) -> Simulation:
        """Serve all requests with host and disk tiers of so many slots; 0 for none.

        Raises:
            ConfigError: a request does not fit into the device.
        """
        simulation = Simulation(self, num_host_blocks, num_disk_blocks)
        simulation.run()
        return simulation


class Simulation:
    """A server with a device pool, a host tier and a disk.

    Attributes:
        served: what was counted so far.
    """

    def __init__(self, server: Server, num_host_blocks: int, num_disk_blocks: int = 0) -> None:
        geometry, workload = server.geometry, server.workload
        groups = geometry.attentions
        longest = max(workload.total_tokens)
        keeps_device = server.num_device_blocks is not None
        num_device = server.num_device_blocks if keeps_device else server.num_needed
        assert num_device is not None, "it is a number in both cases"
        if misfit := server.misfit:
            raise ConfigError(misfit)
        self.served = Served()
        self._workload = workload
        self._size = workload.block_tokens
        self._keeps_device = keeps_device
        self._states = [isinstance(group, StateSpace) for group in groups]
        self._ledger = BlockLedger(
            num_device + 1, groups, max_in_flight_tokens=STEP_TOKENS, events=any(self._states)
        )
        self._shared = _SharedBlocks(self._ledger, groups)
        self._num_steps = 0
        # The step that planned it, and its job.
        self._stores: deque[tuple[int, int]] = deque()
        self._has_tier = num_host_blocks > 0
        # Without a tier, this one stays empty.
        self._tier = OffloadScheduler(
            max(1, num_host_blocks),
            groups,
            mode=server.mode,
            policy=server.policy,
            num_disk_blocks=num_disk_blocks,
            disk_policy=server.policy,
        )
        self._has_disk = num_disk_blocks > 0
        if self._has_disk:
            self._tier.set_disk("on")
        # What the next step may take: its tokens' blocks, and those of the longest load.
        step_blocks = -(-STEP_TOKENS // self._size) + -(-longest // self._size)
        is_lazy = server.mode == "lazy"
        self._horizon = min(num_device, step_blocks * len(groups)) if is_lazy else 0
        self._block_bytes = [group.block_bytes for group in geometry.groups]

    @property
    def num_resident(self) -> int:
        """Slots of the host tier that are in use."""
        return self._tier.num_resident

    def run(self) -> None:
        """Serve all requests."""
        work = self._workload
        for digests, prompt, total in zip(
            work.digests, work.prompt_tokens, work.total_tokens, strict=True
        ):
            self._serve(digests, prompt, total)

    def check(self) -> None:
        """Verify every invariant of the device and of the tier."""
        self._ledger.check()
        self._tier.check()

    def _serve(self, digests: Sequence[bytes], prompt_tokens: int, total_tokens: int) -> None:
        ledger, tier = self._ledger, self._tier
        digests = Hashes(digests, ledger.hash_block_size)
        ledger.add(_NAME, digests)
        tier.add(_NAME, digests)
        hit = ledger.lookup(_NAME, prompt_tokens - 1)
        num_local = hit.num_tokens
        num_found = self._find(num_local, prompt_tokens - 1)
        self.served.device_hits += num_local // self._size
        self.served.host_hits += num_found // self._size
        num_granted = num_local + num_found
        kept: set[int] = set()
        if any(self._states):
            num_asked = (prompt_tokens - 1) // self._size
            on_device = self._shared.prefix(digests[:num_asked])
            num_shared = max(on_device, tier.full_attention_hit(_NAME) // self._size)
            kept = {num_granted // self._size - 1, num_asked - 1, num_shared - 1}
        if num_found:
            taken = ledger.allocate(_NAME, 0, hit=hit, num_external_tokens=num_found)
            assert taken is not None, "the longest request fits"
            job = tier.load(_NAME, num_found, taken)
            self.served.loaded_bytes += self._bytes(job.offsets)
            tier.complete(job.job_id)
        first = None if num_found else hit
        reported = [0] * len(self._states)
        while num_granted < total_tokens:
            if num_granted < prompt_tokens:
                num_new = self._num_step(num_granted, prompt_tokens, kept)
                self._num_steps += 1
            else:  # a step for each token, up to the next that fills a block
                num_new = min(self._size - num_granted % self._size, total_tokens - num_granted)
                self._num_steps += num_new
            self._land(self._num_steps - 2)
            self._take(num_granted, num_new, first, kept)
            first = None
            num_granted += num_new
            self._store(num_granted, reported, kept)
        ledger.free(_NAME)
        tier.finish(_NAME)
        self._land(self._num_steps)
        if not self._keeps_device:
            ledger.pool.reset()

    def _num_step(self, num_granted: int, prompt_tokens: int, kept: set[int]) -> int:
        """Return the tokens of the prompt that the next step computes.

        A step of a model with states ends at the next state that is kept, and else at a block's
        end if it can.
        """
        end = min(num_granted + STEP_TOKENS, prompt_tokens)
        if not any(self._states):
            return end - num_granted
        aligned = end // self._size * self._size
        if num_granted < aligned and end < prompt_tokens:
            end = aligned
        stops = ((at + 1) * self._size for at in kept)
        return min([end, *(stop for stop in stops if stop > num_granted)]) - num_granted

    def _take(self, num_granted: int, num_new: int, hit: PrefixHit | None, kept: set[int]) -> None:
        """Take the device blocks of a step: at once, or one by one if the model has states."""
        end = num_granted + num_new
        while num_granted < end:
            at = num_granted // self._size
            stop = min(end, (at + 1) * self._size) if any(self._states) else end
            taken = self._ledger.allocate(_NAME, stop - num_granted, hit=hit)
            assert taken is not None, "the longest request fits"
            if self._horizon:
                self._tier.invalidate(np.concatenate(taken))
            if any(self._states) and stop % self._size == 0 and at not in kept:
                self._drop_states(at, taken)
            hit, num_granted = None, stop

    def _drop_states(self, at: int, taken: Sequence[Ids]) -> None:
        """Drop the keys of the states in a block of the request, which it has just filled."""
        for group, is_state in enumerate(self._states):
            if is_state:
                blocks = taken[group]
                if not len(blocks):  # an earlier step began the block
                    blocks = self._ledger.block_table(_NAME, group)[at : at + 1]
                self._ledger.pool.evict(blocks)

    def _find(self, num_local: int, max_tokens: int) -> int:
        """Return the tokens after the local hit that the host has, once the disk has brought its.

        A host that is too small for all of them takes those that fit.
        """
        while (num_found := self._tier.lookup(_NAME, num_local, max_tokens)) is None:
            job = self._tier.promote()
            assert job is not None, "a lookup waits for it"
            self.served.read_bytes += self._tier_bytes(job)
            self._tier.complete(job.job_id)
        return num_found

    def _store(self, num_computed: int, reported: list[int], kept: set[int]) -> None:
        """Report what the tokens so far have filled, and begin the store that this plans."""
        ledger, tier, num_full = self._ledger, self._tier, num_computed // self._size
        parts: list[Ids] = []
        offsets = [0]
        for group, is_state in enumerate(self._states):
            begin = min(reported[group], num_full)
            part = ledger.block_table(_NAME, group)[begin:num_full]
            if is_state:
                is_kept = [begin + at in kept for at in range(len(part))]
                part = np.where(is_kept, part, 0).astype(np.int32)
            reported[group] = num_full
            parts.append(part)
            offsets.append(offsets[-1] + len(part))
        if not self._has_tier:
            return
        job = tier.store([_NAME], [num_computed], np.concatenate(parts), offsets)
        if job is None and self._horizon:
            job = tier.store_evictable(ledger.pool, self._horizon)
        if job is not None:
            self.served.stored_bytes += self._bytes(job.offsets)
            self._stores.append((self._num_steps, job.job_id))

    def _land(self, step: int) -> None:
        """End the stores that were planned up to this step."""
        while self._stores and self._stores[0][0] <= step:
            self._tier.complete(self._stores.popleft()[1])
            if self._has_disk:
                self._demote()

    def _demote(self) -> None:
        """Write to the disk what a store has brought to the host."""
        while (job := self._tier.demote()) is not None:
            self.served.written_bytes += self._tier_bytes(job)
            self._tier.complete(job.job_id)

    def _tier_bytes(self, job: TierJob) -> int:
        """Return the bytes of a job between host and disk."""
        return sum(self._block_bytes[group] for group in job.groups.tolist())

    def _bytes(self, offsets: Ids) -> int:
        """Return the bytes of a job, whose blocks come group by group."""
        ends = offsets.tolist()
        parts = zip(ends, ends[1:], self._block_bytes, strict=False)
        return sum((end - begin) * size for begin, end, size in parts)


class _SharedBlocks:
    """The full-attention blocks on a device, which show where a prompt parts from earlier ones."""

    def __init__(self, ledger: BlockLedger, groups: Sequence[Attention]) -> None:
        self._pool = ledger.pool
        self._group = next(
            (at for at, group in enumerate(groups) if isinstance(group, FullAttention)), None
        )
        self._digests: set[bytes] = set()

    def prefix(self, digests: Sequence[bytes]) -> int:
        """Return the number of a prompt's first blocks that the device has."""
        for event in self._pool.take_events():
            if isinstance(event, BlockStored) and event.group == self._group:
                self._digests.update(event.block_hashes)
            elif isinstance(event, BlockRemoved) and event.group == self._group:
                self._digests.difference_update(event.block_hashes)
            elif isinstance(event, AllBlocksCleared):
                self._digests.clear()
        missing = (at for at, digest in enumerate(digests) if digest not in self._digests)
        return next(missing, len(digests))
