"""Check that blocks hold the bytes of their keys, and report in which tier a byte went wrong."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstow._core import Job
from kvstow.replay.batch import Request
from kvstow.replay.config import Verify
from kvstow.replay.content import GroupMemory, Ids, Keys
from kvstow.replay.model import ReplayModel
from kvstow.transfer import HostArena

MAX_REPORTS = 10
_SAMPLE_SHIFT = np.uint64(60)  # leaves 4 bits of a digest: 1 in 16
_CHUNK_BLOCKS = 256  # blocks compared at a time, few enough for the CPU's cache


@dataclass(frozen=True, slots=True)
class Corruption:
    """A block with wrong bytes.

    Attributes:
        request: the line of the request in the trace.
        group: the index of the group.
        attention: the kind of attention of the group.
        position: the index of the block in the request.
        trace_id: the id of the block in the trace; None for a generated block.
        device_block: the id of the device block with wrong bytes.
        rank: the first rank whose shard is wrong.
        host_slot: the slot from which the block was just loaded, or None.
        tier: "host" if the slot's bytes are wrong too, otherwise "device".
    """

    request: str
    group: int
    attention: str
    position: int
    trace_id: int | None
    device_block: int
    rank: int
    host_slot: int | None
    tier: Literal["device", "host"]

    def __str__(self) -> str:
        trace_id = "generated" if self.trace_id is None else f"id {self.trace_id}"
        slot = "" if self.host_slot is None else f", loaded from host slot {self.host_slot}"
        return (
            f"request {self.request}: block {self.position} ({trace_id}) of group {self.group} "
            f"({self.attention}) is corrupt in the {self.tier} tier: device block "
            f"{self.device_block} of rank {self.rank}{slot}"
        )


class _Wrong(NamedTuple):
    """A block whose bytes differ from those of its key, and the slot it was just loaded from."""

    group: int
    position: int
    block: int
    key: np.uint64
    rank: int
    slot: int | None = None


class Verifier:
    """Compares the bytes of blocks with the expected ones, and keeps the first wrong blocks.

    A block counts once for all ranks, and is wrong if the shard of any rank is. A corrupt copy
    counts once: a block that was wrong when it was loaded does not count again when a request that
    uses it ends.

    Attributes:
        num_verified: number of blocks compared.
        num_corrupt: number of blocks with wrong bytes.
        reports: the first `MAX_REPORTS` wrong blocks.
    """

    def __init__(
        self,
        model: ReplayModel,
        memory: Sequence[GroupMemory],
        arenas: Sequence[HostArena],
        verify: Verify,
    ) -> None:
        num_groups = len(model.groups)
        self.num_verified = 0
        self.num_corrupt = 0
        self.reports: list[Corruption] = []
        self._model = model
        # By group, the memories of all ranks.
        self._memory = [memory[group::num_groups] for group in range(num_groups)]
        self._arenas = arenas
        self._verify = verify
        # By device block, the group and key that it was wrong for.
        self._known_wrong: dict[int, tuple[int, int]] = {}

    def check_loaded(self, request: Request, keys: Keys, job: Job) -> None:
        """Check the blocks that a load filled: in each group, the blocks of the last keys."""
        for group, (begin, end) in enumerate(pairwise(job.offsets.tolist())):
            blocks, slots = job.block_ids[begin:end], job.host_slots[begin:end]
            first = len(keys) - len(blocks)
            for index, rank in self._wrong(group, blocks, keys[first:]).items():
                at, block, slot = first + index, int(blocks[index]), int(slots[index])
                self._report(request, _Wrong(group, at, block, keys[at], rank, slot))

    def check_table(
        self, request: Request, group: int, table: Ids, keys: Keys, num_tokens: int
    ) -> None:
        """Check every block of a request's first tokens, and the computed part of a partial block.

        A null block is skipped where no later token reads it, and wrong where the next token does.
        """
        num_full, num_tail = divmod(num_tokens, self._model.block_size)
        is_there = table[:num_full] != 0
        is_there[self._model.groups[group].first_read(num_tokens) :] = True
        [positions] = np.nonzero(is_there)
        for index, rank in self._wrong(group, table[positions], keys[positions]).items():
            at = int(positions[index])
            self._report(request, _Wrong(group, at, int(table[at]), keys[at], rank))
        if num_tail and len(self._chosen(keys[num_full : num_full + 1])):
            self.num_verified += 1
            block, key = int(table[num_full]), keys[num_full]
            for rank, memory in enumerate(self._memory[group]):
                if memory.wrong_part(block, key, num_tail):
                    self._report(request, _Wrong(group, num_full, block, key, rank))
                    break

    def _chosen(self, keys: Keys) -> npt.NDArray[np.intp]:
        if self._verify == "all":
            return np.arange(len(keys))
        if self._verify == "sample":
            return np.flatnonzero(keys >> _SAMPLE_SHIFT == 0)
        return np.empty(0, dtype=np.intp)

    def _wrong(self, group: int, blocks: Ids, keys: Keys) -> dict[int, int]:
        """Return the indices of the wrong blocks, with the first wrong rank of each."""
        chosen = self._chosen(keys)
        self.num_verified += len(chosen)
        wrong: dict[int, int] = {}
        for begin in range(0, len(chosen), _CHUNK_BLOCKS):
            part = chosen[begin : begin + _CHUNK_BLOCKS]
            for rank, memory in enumerate(self._memory[group]):
                for index in part[memory.wrong_blocks(blocks[part], keys[part])].tolist():
                    wrong.setdefault(index, rank)
        return wrong

    def _wrong_slot(self, group: int, rank: int, slot: int, key: np.uint64) -> bool:
        expected = self._memory[group][rank].content.block_bytes(key).reshape(-1)
        return not np.array_equal(self._arenas[rank].slots[slot, : expected.size], expected)

    def _report(self, request: Request, wrong: _Wrong) -> None:
        group, position, block, key, rank, slot = wrong
        asked = (group, int(key))
        if slot is None and self._known_wrong.get(block) == asked:
            return
        self._known_wrong[block] = asked
        self.num_corrupt += 1
        if len(self.reports) < MAX_REPORTS:
            ids = request.trace.trace_ids
            num_prompt = request.trace.prompt_tokens // self._model.block_size
            trace_id = ids[position] if position < num_prompt else None
            in_slot = slot is not None and self._wrong_slot(group, rank, slot, key)
            tier: Literal["device", "host"] = "host" if in_slot else "device"
            name = str(self._model.groups[group])
            self.reports.append(
                Corruption(request.name, group, name, position, trace_id, block, rank, slot, tier)
            )
