"""What copies the blocks of an engine: per rank its device memory, its host memory and its movers.

Every rank holds its own shard of each block, under the ids and slots that all of them share: one
job is as many copies as there are ranks and groups, and it has ended when all of them have.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstow._core import ConfigError, Job, KvstowError, TransferError
from kvstow.closing import call_all
from kvstow.memory import check_memory, free_memory
from kvstow.transfer import BlockLayout, Event, HostArena, Mover, ProvingMover, Ticket, arena_for
from kvstow.transfer.arena import slot_stride_bytes
from kvstow.transfer.ticket import outcome

__all__ = [
    "MakeMover",
    "RankLayouts",
    "Ranks",
    "Transfer",
    "build_arenas",
    "checked_layouts",
]

RankLayouts: TypeAlias = Sequence[BlockLayout] | Sequence[Sequence[BlockLayout]]
MakeMover: TypeAlias = Callable[[BlockLayout, HostArena], Mover]


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """The copies of one job, on their way.

    Attributes:
        job: which blocks and slots.
        direction: whether it brings blocks to the host or back.
        num_bytes: of all its copies, on all ranks.
        begin_s: on the engine's clock, when it was submitted.
        request_id: of a load, who asked for it; None of a store.
        num_tokens: of a load, where the prefix ends that is there once it has landed.
        rank_tickets: per rank, one for each group that has copies.
    """

    job: Job
    direction: Literal["store", "load"]
    num_bytes: int
    begin_s: float
    request_id: str | None = None
    num_tokens: int = 0
    rank_tickets: list[list[Ticket]] = field(default_factory=list)

    @property
    def tickets(self) -> list[Ticket]:
        """All ranks', in their order."""
        return [ticket for tickets in self.rank_tickets for ticket in tickets]

    def poll(self) -> bool:
        """Whether all copies have ended, well or not. Never blocks."""
        return all(ticket.poll() for tickets in self.rank_tickets for ticket in tickets)

    def source_released(self) -> bool:
        """Whether no copy reads its source any more, on any rank. Never blocks."""
        return all(ticket.source_released() for ticket in self.tickets)

    def outcomes(self) -> list[bool | list[bool]]:
        """Block until all copies have ended; per rank, how its own went, as `complete` takes it."""
        return [outcome(tickets, self.job.host_slots) for tickets in self.rank_tickets]

    def wait(self) -> bool:
        """Block until all copies have ended; whether all went well."""
        return all(one is True for one in self.outcomes())


def build_arenas(
    layouts: Sequence[Sequence[BlockLayout]], num_slots: int, slots_per_run: int
) -> list[HostArena]:
    """Host memory for each rank, of slots as large as its largest blocks.

    Raises:
        ConfigError: all ranks together need more memory than this machine has.
    """
    slot_bytes = [max(layout.slot_bytes for layout in own) for own in layouts]
    stride_bytes = sum(slot_stride_bytes(one, slots_per_run) for one in slot_bytes)
    check_memory(
        num_slots // slots_per_run,
        stride_bytes * slots_per_run,  # on all ranks: they are in this process
        lower="num_host_blocks",
        free=free_memory(),
    )
    with ExitStack() as built:
        arenas = []
        for own in layouts:
            arena = arena_for(own, num_slots, slots_per_run=slots_per_run)
            arenas.append(built.enter_context(arena))
        built.pop_all()
    return arenas


class Ranks:
    """The movers of all ranks, between their layouts and their arenas.

    Attributes:
        layouts: one per group, for each rank.
        arenas: one per rank.
        movers: one per group, rank by rank.
    """

    def __init__(
        self,
        layouts: Sequence[Sequence[BlockLayout]],
        arenas: Sequence[HostArena],
        mover: MakeMover,
    ) -> None:
        """Make the movers; where that fails, none is left behind."""
        with ExitStack() as built:
            self.movers: list[Mover] = []
            for own, arena in zip(layouts, arenas, strict=True):
                for layout in own:
                    made = built.enter_context(mover(layout, arena))
                    self.movers.append(made if arena.unproven is None else ProvingMover(made))
            built.pop_all()
        self.layouts, self.arenas = layouts, list(arenas)
        self._num_groups = len(layouts[0])
        # Of a block of each group, on all ranks.
        groups = zip(*layouts, strict=True)
        self._block_bytes = [sum(layout.slot_bytes for layout in ranks) for ranks in groups]

    def num_bytes(self, job: Job) -> int:
        """That a job copies, on all ranks."""
        # Not in numpy, which takes three times as long for a handful of numbers.
        parts = zip(self._block_bytes, pairwise(job.offsets.tolist()), strict=True)
        return sum(block_bytes * (end - begin) for block_bytes, (begin, end) in parts)

    def submit(self, transfer: Transfer, after: Event) -> None:
        """Begin the copies of a job; one that is refused has failed, and those beside it go on."""
        transfer.rank_tickets.extend(
            self.copy(transfer.direction, transfer.job, transfer.job.block_ids, after)
        )

    def copy(
        self,
        direction: Literal["store", "load"],
        job: Job,
        block_ids: npt.NDArray[np.int32],
        after: Event,
    ) -> list[list[Ticket]]:
        """Begin the copies of a job whose blocks have these ids; tickets as in a `Transfer`."""
        parts = [
            (group, block_ids[begin:end], job.host_slots[begin:end])
            for group, (begin, end) in enumerate(pairwise(job.offsets.tolist()))
            if begin < end
        ]
        return [
            [_submit(movers[group], direction, ids, slots, after) for group, ids, slots in parts]
            for movers in self._by_rank()
        ]

    def close(self) -> None:
        """End every copy and stop the movers; the arenas stay."""
        call_all([mover.close for mover in self.movers])

    def let_go(self) -> None:
        """Close, and hold on to no device memory any more."""
        self.close()
        self.movers.clear()
        self.layouts = []

    def _by_rank(self) -> Iterator[list[Mover]]:
        for first in range(0, len(self.movers), self._num_groups):
            yield self.movers[first : first + self._num_groups]


def checked_layouts(
    layouts: RankLayouts, world_size: int, num_groups: int, num_blocks: int
) -> list[list[BlockLayout]]:
    """Per rank its layouts, one per group, each with memory for every block of the pool."""
    ranks = [layouts] if world_size == 1 else list(layouts)
    if len(ranks) != world_size:
        raise ConfigError(
            f"world_size is {world_size} but layouts has {len(ranks)} entries; with several ranks "
            "pass one list of layouts for each"
        )
    checked: list[list[BlockLayout]] = []
    for rank, own in enumerate(ranks):
        where = "layouts" if world_size == 1 else f"layouts[{rank}]"
        if not isinstance(own, Sequence) or not all(isinstance(one, BlockLayout) for one in own):
            raise ConfigError(
                f"world_size is {world_size} and {where} no list of BlockLayout; pass one layout "
                "for each group, and with several ranks such a list for each of them"
            )
        if len(own) != num_groups:
            raise ConfigError(f"{num_groups} groups but {len(own)} {where}; pass one for each")
        for group, layout in enumerate(own):
            if layout.num_blocks < num_blocks:
                raise ConfigError(
                    f"{where}[{group}] has memory for {layout.num_blocks} blocks, the pool has "
                    f"{num_blocks}; each group needs memory for every block of the pool"
                )
        checked.append(list(own))
    return checked


class _Refused(Ticket):
    """The ticket of a copy that its mover has not taken on."""

    def __init__(self, error: KvstowError) -> None:
        self._error = TransferError(f"the mover refused the transfer: {error}")
        self._error.__cause__ = error

    def poll(self) -> bool:
        return True

    @property
    def error(self) -> TransferError:
        return self._error

    def wait(self, timeout_s: float | None = None) -> None:
        raise self._error


def _submit(
    mover: Mover,
    direction: Literal["store", "load"],
    block_ids: npt.NDArray[np.int32],
    host_slots: npt.NDArray[np.int32],
    after: Event,
) -> Ticket:
    try:
        if direction == "store":
            return mover.store(block_ids, host_slots, after=after)
        return mover.load(host_slots, block_ids, after=after)
    except KvstowError as error:
        return _Refused(error)
