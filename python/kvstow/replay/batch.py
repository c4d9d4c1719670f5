"""The requests that run or load: per-step numbers in arrays by seat, the rest in objects."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstow._core import ConfigError, StepAllocation
from kvstow.replay.config import ReplayConfig
from kvstow.replay.keys import block_digests, digest_words
from kvstow.replay.model import ReplayModel
from kvstow.replay.trace import Trace, TraceRequest

Ids = npt.NDArray[np.int32]
Seats = npt.NDArray[np.int64]


@dataclass(slots=True)
class Request:
    """A request of the trace on its way through the engine.

    Attributes:
        trace: the request in the trace.
        name: its line in the trace, which is its request id.
        known_tokens: tokens of the prompt and generated so far, which an admission computes first.
        digests: the digests of all blocks that it will ever have.
        admitted: whether it was ever admitted, because hits count at the first admission only.
        pending_since: number of landed loads when its lookup came out pending; -1 otherwise.
    """

    trace: TraceRequest
    name: str
    known_tokens: int
    digests: list[bytes]
    admitted: bool = False
    pending_since: int = -1

    @classmethod
    def arrived(cls, trace: TraceRequest, block_size: int) -> "Request":
        """Return a request that has computed nothing yet."""
        digests = block_digests(trace, block_size)
        return cls(trace, str(trace.line), trace.prompt_tokens, digests)

    def known_digests(self, block_size: int) -> list[bytes]:
        """Return the digests of the blocks whose tokens are all known."""
        return self.digests[: self.known_tokens // block_size]


class Batch:
    """The seats of the requests that run or load, and their block tables.

    All arrays but `running` are indexed by seat.

    Attributes:
        running: seats of the running requests, oldest first; requests that load are not among them.
        requests: the request in each seat; None for a free seat.
        computed: number of tokens whose KV exists.
        known: number of prompt and generated tokens; `computed + 1` during decode.
        prompt: number of prompt tokens.
        total: number of tokens at which the request is finished.
        num_hit: number of tokens that a loading request found on the device.
        num_disk: number of tokens that a loading request found on the disk.
        num_hashed: number of blocks whose digests the engine under test has.
        num_blocks: number of blocks in the table of each group.
        tables: device block ids, `[groups, seats, blocks]`. Blocks that have left a window keep
            their ids here, though the ledger has the null block, because nothing writes to them.
        keys: the words from which the bytes of the blocks derive, `[seats, blocks]`.
    """

    def __init__(self, num_groups: int, num_seats: int, max_blocks: int) -> None:
        self.running: list[int] = []
        self.requests: list[Request | None] = [None] * num_seats
        self.computed = np.zeros(num_seats, dtype=np.int64)
        self.known = np.zeros(num_seats, dtype=np.int64)
        self.prompt = np.zeros(num_seats, dtype=np.int64)
        self.total = np.zeros(num_seats, dtype=np.int64)
        self.num_hit = np.zeros(num_seats, dtype=np.int64)
        self.num_disk = np.zeros(num_seats, dtype=np.int64)
        self.num_hashed = np.zeros(num_seats, dtype=np.int64)
        self.num_blocks = np.zeros(num_seats, dtype=np.int64)
        self.tables = np.zeros((num_groups, num_seats, max_blocks), dtype=np.int32)
        self.keys = np.zeros((num_seats, max_blocks), dtype=np.uint64)
        self._names = [""] * num_seats
        self._free = list(range(num_seats - 1, -1, -1))

    @property
    def has_seat(self) -> bool:
        """Whether a seat is free."""
        return bool(self._free)

    def sit(
        self, request: Request, block_size: int, block_tables: Sequence[Ids], num_computed: int
    ) -> int:
        """Put an admitted request on a free seat with its first blocks, and return the seat."""
        seat, tables = self._free.pop(), np.stack(block_tables)
        self.requests[seat] = request
        self._names[seat] = request.name
        self.computed[seat] = num_computed
        self.known[seat] = request.known_tokens
        self.prompt[seat] = request.trace.prompt_tokens
        self.total[seat] = request.trace.total_tokens
        self.num_hashed[seat] = request.known_tokens // block_size
        self.num_blocks[seat] = tables.shape[1]
        self.tables[:, seat, : tables.shape[1]] = tables
        self.keys[seat, : len(request.digests)] = digest_words(request.digests)
        return seat

    def leave(self, seat: int) -> Request:
        """Free a seat, and return its request with its number of known tokens."""
        request = self.request(seat)
        request.known_tokens = int(self.known[seat])
        self.requests[seat] = None
        self._free.append(seat)
        return request

    def request(self, seat: int) -> Request:
        """Return the request on a seat."""
        request = self.requests[seat]
        assert request is not None, f"seat {seat} is free"
        return request

    def names(self, seats: list[int]) -> list[str]:
        """Return the names of the requests on these seats."""
        return [self._names[seat] for seat in seats]

    def append_blocks(self, seats: Seats, step: StepAllocation) -> None:
        """Append the blocks that a step granted to the tables of these seats."""
        num_groups = len(self.tables)
        ids, offsets = step.ids, step.offsets[::num_groups]  # where each request begins
        for index in np.flatnonzero(offsets[1:] > offsets[:-1]).tolist():
            granted = ids[offsets[index] : offsets[index + 1]].reshape(num_groups, -1)
            seat, begin = seats[index], self.num_blocks[seats[index]]
            end = begin + granted.shape[1]
            self.tables[:, seat, begin:end] = granted
            self.num_blocks[seat] = end

    def replace_blocks(self, seat: int, block_tables: Sequence[Ids]) -> None:
        """Replace a table after its blocks have got other ids."""
        tables = np.stack(block_tables)
        self.num_blocks[seat] = tables.shape[1]
        self.tables[:, seat] = 0
        self.tables[:, seat, : tables.shape[1]] = tables


def longest_table(trace: Trace, model: ReplayModel, config: ReplayConfig) -> int:
    """Return the number of blocks in the longest block table.

    Raises:
        ConfigError: the device pool can never hold the tables of a request.
    """
    longest = max(trace.requests, key=lambda request: request.total_tokens)
    num_slots = longest.total_tokens + config.lookahead_tokens
    # A step also grants slots for drafts.
    num_of_step = config.max_step_tokens + config.lookahead_tokens
    num_needed = sum(group.most_blocks(num_slots, num_of_step) for group in model.groups)
    num_usable = config.device_blocks - 1
    if num_needed > num_usable:
        raise ConfigError(
            f"{trace.path}:{longest.line}: the request needs {num_needed} blocks for its "
            f"{longest.total_tokens} tokens, and {num_usable} of {config.device_blocks} device "
            f"blocks are usable: pass --device-blocks {num_needed + 1} or more"
        )
    return -(-num_slots // trace.block_size)
