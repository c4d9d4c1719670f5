"""The ranks of an engine: device memory, host memory and movers of each.

Every rank holds its own shard of each block, and all ranks share the ids and slots. So a job is one
copy for each rank and group, and it has ended when all of them have.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvstow._core import ConfigError, Job, KvstowError, StateSpace, TransferError
from kvstow.closing import call_all
from kvstow.engine.arguments import Group
from kvstow.memory import check_memory, free_memory
from kvstow.transfer import BlockLayout, Event, HostArena, Mover, ProvingMover, Ticket, arena_for
from kvstow.transfer.arena import slot_stride_bytes
from kvstow.transfer.mover import Direction
from kvstow.transfer.ticket import HostTicket

RankLayouts: TypeAlias = Sequence[BlockLayout] | Sequence[Sequence[BlockLayout]]
MakeMover: TypeAlias = Callable[[BlockLayout, HostArena], Mover]


def build_arenas(
    layouts: Sequence[Sequence[BlockLayout]], num_slots: int, slots_per_run: int
) -> list[HostArena]:
    """Return host memory for each rank, with slots as large as its largest blocks.

    Raises:
        ConfigError: all ranks together need more memory than this machine has.
    """
    slot_bytes = [max(layout.slot_bytes for layout in own) for own in layouts]
    stride_bytes = sum(slot_stride_bytes(size, slots_per_run) for size in slot_bytes)
    check_memory(
        num_slots // slots_per_run,
        stride_bytes * slots_per_run,  # on all ranks, because this process has all of them
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
        layouts: one layout per group, for each rank.
        arenas: one arena per rank.
        movers: one mover per group, rank by rank.
    """

    def __init__(
        self,
        layouts: Sequence[Sequence[BlockLayout]],
        arenas: Sequence[HostArena],
        mover: MakeMover,
    ) -> None:
        """Make the movers. If one cannot be made, close those before it."""
        with ExitStack() as built:
            self.movers: list[Mover] = []
            for own, arena in zip(layouts, arenas, strict=True):
                for layout in own:
                    made = mover(layout, arena)
                    if not isinstance(made, Mover):
                        raise ConfigError(
                            f"mover made {made!r}, expected a Mover: pass a function of a layout "
                            "and an arena that returns one, such as mover_for"
                        )
                    built.enter_context(made)
                    self.movers.append(made if arena.unproven is None else ProvingMover(made))
            built.pop_all()
        self.layouts, self.arenas = layouts, list(arenas)
        self._num_groups = len(layouts[0])
        # Bytes of a block on all ranks, per group.
        groups = zip(*layouts, strict=True)
        self._block_bytes = [sum(layout.slot_bytes for layout in ranks) for ranks in groups]

    def num_bytes(self, job: Job) -> int:
        """Return the bytes that a job copies, on all ranks."""
        # numpy takes three times as long for so few numbers.
        parts = zip(self._block_bytes, pairwise(job.offsets.tolist()), strict=True)
        return sum(block_bytes * (end - begin) for block_bytes, (begin, end) in parts)

    def copy(
        self,
        direction: Direction,
        job: Job,
        block_ids: npt.NDArray[np.int32],
        after: Event,
    ) -> list[list[Ticket]]:
        """Begin the copies of a job between its slots and the device blocks `block_ids`.

        If a mover refuses its copy, that copy has failed, and the others go on.

        Returns:
            Per rank, one ticket for each group that has copies.
        """
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
        """End every copy and stop the movers. The arenas stay open."""
        call_all([mover.close for mover in self.movers])

    def let_go(self) -> None:
        """Drop the closed movers, and every reference to device memory."""
        self.movers.clear()
        self.layouts = []

    def _by_rank(self) -> Iterator[list[Mover]]:
        for first in range(0, len(self.movers), self._num_groups):
            yield self.movers[first : first + self._num_groups]


def checked_layouts(
    layouts: RankLayouts, world_size: int, num_groups: int, num_blocks: int
) -> list[list[BlockLayout]]:
    """Return one list of layouts per rank, each layout with memory for every block of the pool."""
    given: object = layouts
    is_list = isinstance(given, Sequence)
    ranks = list(layouts) if is_list and world_size != 1 else [layouts]
    if is_list and len(ranks) != world_size:
        raise ConfigError(
            f"world_size is {world_size} but layouts has length {len(ranks)}; with several ranks "
            "pass one list of layouts for each"
        )
    checked: list[list[BlockLayout]] = []
    for rank, own in enumerate(ranks):
        where = "layouts" if world_size == 1 else f"layouts[{rank}]"
        if not isinstance(own, Sequence) or not all(
            isinstance(layout, BlockLayout) for layout in own
        ):
            raise ConfigError(
                f"world_size is {world_size} and {where} is no list of BlockLayout, but "
                f"{_kind(own)}; pass one layout for each group, [BlockLayout.from_arrays(arrays)] "
                "for one. With several ranks pass world_size and such a list for each"
            )
        if len(own) != num_groups:
            raise ConfigError(
                f"groups has length {num_groups} but {where} has length {len(own)}; pass one "
                "BlockLayout for each group, BlockLayout.from_arrays([a, b, ...]) with the arrays "
                "of all layers of the group"
            )
        for group, layout in enumerate(own):
            if layout.num_blocks < num_blocks:
                raise ConfigError(
                    f"{where}[{group}] has memory for {layout.num_blocks} blocks, the pool has "
                    f"{num_blocks}; each group needs memory for every block of the pool. If the "
                    "first dimension of its arrays counts layers, or K and V, pass list(array) to "
                    "from_arrays instead of [array], and of several such arrays [part for array in "
                    "arrays for part in array]. If it counts blocks, pass num_device_blocks="
                    f"{layout.num_blocks}"
                )
        checked.append(list(own))
    _refuse_shared_memory(checked)
    return checked


def _refuse_shared_memory(ranks: Sequence[Sequence[BlockLayout]]) -> None:
    """Refuse ranks with the same device memory: that of the others would never be copied."""
    first: dict[int, int] = {}
    for rank, layouts in enumerate(ranks):
        for region in (region for layout in layouts for region in layout.regions):
            other = first.setdefault(region.base_address, rank)
            if other != rank:
                raise ConfigError(
                    f"layouts[{rank}] and layouts[{other}] name the same memory: pass each rank's "
                    "own arrays. One rank is enough for ranks whose KV is the same"
                )


def refuse_blocks_of_tokens(
    ranks: Sequence[Sequence[BlockLayout]], groups: Sequence[Group], num_blocks: int
) -> None:
    """Refuse a layout whose blocks are tokens.

    Some engines keep their KV as [tokens, ...]. As a layout, that is memory for `block_size` times
    as many blocks as the pool has. It is enough, but copies would take one token for each block.
    """
    for layouts in ranks:
        for index, (layout, group) in enumerate(zip(layouts, groups, strict=True)):
            size = 1 if isinstance(group, StateSpace) else group.block_size
            if size > 1 and layout.num_blocks >= num_blocks * size:
                raise ConfigError(
                    f"the layout of group {index} has memory for {layout.num_blocks} blocks, and "
                    f"the pool has {num_blocks} blocks of {size} tokens: is each of its blocks a "
                    f"token? Then reshape its arrays from [tokens, ...] to [blocks, {size}, ...]. "
                    f"If not, pass the first {num_blocks} blocks of the arrays alone"
                )


def _kind(given: object) -> str:
    """Return what was passed in place of a list of layouts: its type, and those in a list."""
    if isinstance(given, list | tuple):
        return f"a {type(given).__name__} of {sorted({type(each).__name__ for each in given})}"
    return f"of type {type(given).__name__}"


def _submit(
    mover: Mover,
    direction: Direction,
    block_ids: npt.NDArray[np.int32],
    host_slots: npt.NDArray[np.int32],
    after: Event,
) -> Ticket:
    try:
        if direction == "store":
            return mover.store(block_ids, host_slots, after=after)
        return mover.load(host_slots, block_ids, after=after)
    except KvstowError as error:
        refused = TransferError(f"the mover refused the transfer: {error}")
        refused.__cause__ = error
        ticket = HostTicket()
        ticket.end(refused)
        return ticket
