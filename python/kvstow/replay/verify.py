"""Whether blocks hold the bytes that their keys ask for, and where a wrong one went wrong."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
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

__all__ = ["Corruption", "Verifier"]

MAX_REPORTS = 10
_SAMPLE_SHIFT = np.uint64(60)  # 4 bits of a digest: 1 in 16
_CHUNK_BLOCKS = 256  # compared at a time, so that it stays in a cache


@dataclass(frozen=True, slots=True)
class Corruption:
    """A block with wrong bytes.

    Attributes:
        request: the line of the trace.
        group: which of the model's groups it is a block of.
        attention: how the layers of that group attend.
        position: of the block in the request.
        trace_id: the id the trace gives the block; None for one that was generated.
        device_block: the block id that holds the wrong bytes.
        rank: the first whose shard is wrong.
        host_slot: the slot it was loaded from; None if it was not just loaded.
        tier: "host" if the slot's bytes are wrong too, else "device".
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

    def as_dict(self) -> dict[str, object]:
        """The same for JSON."""
        return asdict(self)


class _Wrong(NamedTuple):
    """A block that does not hold what its key asks for; the slot it was just loaded from."""

    group: int
    position: int
    block: int
    key: np.uint64
    rank: int
    slot: int | None = None


class Verifier:
    """Compares what blocks hold with what they must, and keeps the first few findings.

    A block is verified with all ranks' shards of it, and is wrong if one of them is.
    One corrupt copy counts once: a block found wrong when it was loaded is not counted again when
    the requests that use it end.

    Attributes:
        num_verified: blocks compared.
        num_corrupt: blocks found wrong.
        reports: the first `MAX_REPORTS` of them.
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
        # By group, its memory on every rank.
        self._memory = [memory[group::num_groups] for group in range(num_groups)]
        self._arenas = arenas
        self._verify = verify
        # device block -> the group and key it should serve
        self._known_wrong: dict[int, tuple[int, int]] = {}

    def check_loaded(self, request: Request, keys: Keys, job: Job) -> None:
        """Check the blocks that a load just filled: in each group the last ones of these keys."""
        for group, (begin, end) in enumerate(pairwise(job.offsets.tolist())):
            blocks, slots = job.block_ids[begin:end], job.host_slots[begin:end]
            first = len(keys) - len(blocks)
            for index, rank in self._wrong(group, blocks, keys[first:]).items():
                at, block, slot = first + index, int(blocks[index]), int(slots[index])
                self._report(request, _Wrong(group, at, block, keys[at], rank, slot))

    def check_table(
        self, request: Request, group: int, table: Ids, keys: Keys, num_tokens: int
    ) -> None:
        """Check every block of a request's first tokens, of a partial tail what was computed.

        The null block is passed over where nobody reads the block any more; in a place where the
        next token reads, it is as wrong as any other.
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
        """Which of these blocks are wrong, and on which rank first."""
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
