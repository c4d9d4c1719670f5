"""Whether blocks hold the bytes that their keys ask for, and where a wrong one went wrong."""

from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvstow._core import Job
from kvstow.replay.batch import Request
from kvstow.replay.config import Verify
from kvstow.replay.content import DeviceMemory, Ids, Keys
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
        position: of the block in the request.
        trace_id: the id the trace gives the block; None for one that was generated.
        device_block: the block id that holds the wrong bytes.
        host_slot: the slot it was loaded from; None if it was not just loaded.
        tier: "host" if the slot's bytes are wrong too, else "device".
    """

    request: str
    position: int
    trace_id: int | None
    device_block: int
    host_slot: int | None
    tier: Literal["device", "host"]

    def __str__(self) -> str:
        trace_id = "generated" if self.trace_id is None else f"id {self.trace_id}"
        slot = "" if self.host_slot is None else f", loaded from host slot {self.host_slot}"
        return (
            f"request {self.request}: block {self.position} ({trace_id}) is corrupt in the "
            f"{self.tier} tier: device block {self.device_block}{slot}"
        )

    def as_dict(self) -> dict[str, object]:
        """The same for JSON."""
        return asdict(self)


class Verifier:
    """Compares what blocks hold with what they must, and keeps the first few findings.

    One corrupt copy counts once: a block found wrong when it was loaded is not counted again when
    the requests that use it end.

    Attributes:
        num_verified: blocks compared.
        num_corrupt: blocks found wrong.
        reports: the first `MAX_REPORTS` of them.
    """

    def __init__(self, memory: DeviceMemory, arena: HostArena, verify: Verify) -> None:
        self.num_verified = 0
        self.num_corrupt = 0
        self.reports: list[Corruption] = []
        self._memory = memory
        self._arena = arena
        self._verify = verify
        self._known_wrong: dict[int, int] = {}  # device block -> the key it should serve

    def check_loaded(self, request: Request, first: int, keys: Keys, job: Job) -> None:
        """Check the blocks that a load just filled: from position `first`, with these keys."""
        for index in self._wrong(job.block_ids, keys):
            slot = int(job.host_slots[index])
            block = int(job.block_ids[index])
            self._report(request, first + index, block, keys[index], slot)

    def check_table(self, request: Request, table: Ids, keys: Keys, num_tokens: int) -> None:
        """Check every block of a request's table, of a partial tail what was computed."""
        num_full = num_tokens // self._memory.geometry.block_size
        for index in self._wrong(table[:num_full], keys[:num_full]):
            self._report(request, index, int(table[index]), keys[index], None)
        num_tail = num_tokens % self._memory.geometry.block_size
        if num_tail and len(self._chosen(keys[num_full : num_full + 1])):
            self.num_verified += 1
            block = int(table[num_full])
            if self._memory.wrong_part(block, keys[num_full], num_tail):
                self._report(request, num_full, block, keys[num_full], None)

    def _chosen(self, keys: Keys) -> npt.NDArray[np.intp]:
        if self._verify == "all":
            return np.arange(len(keys))
        if self._verify == "sample":
            return np.flatnonzero(keys >> _SAMPLE_SHIFT == 0)
        return np.empty(0, dtype=np.intp)

    def _wrong(self, blocks: Ids, keys: Keys) -> list[int]:
        chosen = self._chosen(keys)
        self.num_verified += len(chosen)
        wrong: list[int] = []
        for begin in range(0, len(chosen), _CHUNK_BLOCKS):
            part = chosen[begin : begin + _CHUNK_BLOCKS]
            wrong += part[self._memory.wrong_blocks(blocks[part], keys[part])].tolist()
        return wrong

    def _wrong_slot(self, slot: int, key: np.uint64) -> bool:
        expected = self._memory.content.block_bytes(key).reshape(-1)
        return not np.array_equal(self._arena.slots[slot, : expected.size], expected)

    def _report(
        self,
        request: Request,
        position: int,
        block: int,
        key: np.uint64,
        slot: int | None,
    ) -> None:
        if slot is None and self._known_wrong.get(block) == int(key):
            return
        self._known_wrong[block] = int(key)
        self.num_corrupt += 1
        if len(self.reports) < MAX_REPORTS:
            ids = request.trace.trace_ids
            num_prompt = request.trace.prompt_tokens // self._memory.geometry.block_size
            trace_id = ids[position] if position < num_prompt else None
            in_slot = slot is not None and self._wrong_slot(slot, key)
            tier: Literal["device", "host"] = "host" if in_slot else "device"
            self.reports.append(Corruption(request.name, position, trace_id, block, slot, tier))
