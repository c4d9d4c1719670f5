"""The sums that a GPU's kernels keep of host slots, beside the jobs of a tier below the host.

With `verify`, the kernels sum up each block at its store, and compare at its load. A tier reads and
fills the same slots. How a wrong block could be served, and what prevents it:

- The host damages a block before its demote, so that the tier would vouch for the damage: such a
  block is left out. If it is damaged meanwhile, it is dropped again.

A promoted slot gets a new sum. With that of the block before it, each load of it would fail.
`tiers.sums` does all this for other movers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstow._core import KvstowError, TierJob
from kvstow.engine.ranks import Ranks
from kvstow.tiers import TierBlocks
from kvstow.tiers.tier import Tier
from kvstow.transfer import BlockLayout, HostArena
from kvstow.transfer.arena import slots_of_runs
from kvstow.transfer.mover import Index
from kvstow.transfer.verified import have_device_sums, record_device_sums


@dataclass(frozen=True, slots=True)
class _Begun:
    """A job.

    Attributes:
        is_demote: whether it reads the host slots.
        blocks: the blocks that a tier moves.
        host_slots: shape [n], the host slot of each.
        is_moved: which blocks of the job these are.
    """

    is_demote: bool
    blocks: TierBlocks
    host_slots: Index
    is_moved: npt.NDArray[np.bool_]


class KernelSums:
    """Knows the jobs under way, if a mover keeps such sums."""

    def __init__(self) -> None:
        """Begin without jobs."""
        self._jobs: dict[int, _Begun] = {}

    def sound_part(
        self, job: TierJob, blocks: TierBlocks, ranks: Ranks
    ) -> tuple[TierBlocks, Index]:
        """Return what to move, and its host slots: not what is to be demoted and is damaged."""
        slots: Index = np.asarray(job.host_slots, np.int64)
        if not any(arena.has_device_sums for arena in ranks.arenas):
            return blocks, slots
        is_demote, is_moved = job.direction == "demote", np.ones(len(blocks), np.bool_)
        if is_demote:
            for arena, layouts in zip(ranks.arenas, ranks.layouts, strict=True):
                is_moved &= _are_sound(arena, layouts, blocks, slots)
        at = np.flatnonzero(is_moved)
        part, slots = blocks.some(at), slots[at]
        self._jobs[job.job_id] = _Begun(is_demote, part, slots, is_moved)
        return part, slots

    def outcome(
        self, job_id: int, ok: list[bool], tier: Tier, layouts: Sequence[BlockLayout]
    ) -> list[bool]:
        """Return which blocks of a job count on a rank, those that were left out included."""
        if (job := self._jobs.get(job_id)) is None:
            return ok
        arena, are_ok = tier.arena, np.array(ok, np.bool_)
        if arena.has_device_sums and job.is_demote:
            # A demote that was late may have written blocks that count as failed. They last.
            damaged = np.flatnonzero(~_are_sound(arena, layouts, job.blocks, job.host_slots))
            if len(damaged):
                are_ok[damaged] = False
                with suppress(KvstowError):
                    tier.delete(job.blocks.some(damaged))
        elif arena.has_device_sums:
            at = np.flatnonzero(are_ok)
            slots, sizes = _runs(arena, layouts, job.blocks.some(at), job.host_slots[at])
            record_device_sums(arena, slots, sizes)
        every = np.zeros(len(job.is_moved), np.bool_)
        every[job.is_moved] = are_ok
        outcome: list[bool] = every.tolist()
        return outcome

    def keep(self, running: set[int]) -> None:
        """Forget the other jobs, which have ended on all ranks."""
        self._jobs = {job_id: job for job_id, job in self._jobs.items() if job_id in running}


def _are_sound(
    arena: HostArena, layouts: Sequence[BlockLayout], blocks: TierBlocks, host_slots: Index
) -> npt.NDArray[np.bool_]:
    """Return which host slots hold what was stored in them, as far as their sums are known."""
    if not arena.has_device_sums:
        return np.ones(len(blocks), np.bool_)
    sound = have_device_sums(arena, *_runs(arena, layouts, blocks, host_slots))
    per_block = sound.reshape(len(blocks), arena.slots_per_run)
    return np.asarray(per_block.all(axis=1), np.bool_)


def _runs(
    arena: HostArena, layouts: Sequence[BlockLayout], blocks: TierBlocks, host_slots: Index
) -> tuple[Index, list[int]]:
    """Return the slots of the arena that blocks have, and the bytes that are used of each."""
    per_run = arena.slots_per_run
    slots = slots_of_runs(host_slots, per_run)
    sizes = np.array([layout.slot_bytes for layout in layouts])[np.asarray(blocks.groups, np.int64)]
    return slots, np.repeat(sizes, per_run).tolist()
