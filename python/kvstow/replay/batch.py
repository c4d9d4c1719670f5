"""The requests in the engine: what changes every step in arrays by seat, the rest in objects."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstow._core import ConfigError, StepAllocation
from kvstow.replay.config import ReplayConfig
from kvstow.replay.keys import block_digests, digest_words
from kvstow.replay.model import ReplayModel
from kvstow.replay.trace import Trace, TraceRequest

__all__ = ["Batch", "Request", "Seats", "longest_table"]

Ids = npt.NDArray[np.int32]
Seats = npt.NDArray[np.int64]


@dataclass(slots=True)
class Request:
    """A request of the trace on its way through the engine.

    Attributes:
        name: its line in the trace: what the ledger, the scheduler and the reports call it.
        known_tokens: prompt and what was generated: what it computes first when it (re)starts.
        digests: of all blocks it will ever have.
        admitted: whether it was ever admitted; hits count once, at the first admission.
        pending_since: how many loads had landed when its lookup came out pending; -1 otherwise.
    """

    trace: TraceRequest
    name: str
    known_tokens: int
    digests: list[bytes]
    admitted: bool = False
    pending_since: int = -1

    @classmethod
    def arrived(cls, trace: TraceRequest, block_size: int) -> "Request":
        """A request that has computed nothing yet."""
        digests = block_digests(trace, block_size)
        return cls(trace, str(trace.line), trace.prompt_tokens, digests)

    def known_digests(self, block_size: int) -> list[bytes]:
        """Of the blocks whose tokens are all known."""
        return self.digests[: self.known_tokens // block_size]


class Batch:
    """The seats: requests that run or load, and their block tables.

    Attributes:
        running: seats in first-come order; a seat that waits for its load is not among them.
        requests: by seat; None where nobody sits.
        computed: tokens whose KV exists, by seat.
        known: tokens of the prompt, and generated: computed + 1 while it decodes.
        prompt: tokens of the prompt.
        total: tokens at which the request is finished.
        num_hit: of a request that loads, the tokens it found on the device.
        num_hashed: blocks whose digests ledger and scheduler have.
        num_blocks: blocks in the tables; all groups have as many.
        tables: device block ids, `[groups, seats, blocks]`. Those that have left a window, in which
            nothing is written any more, are the ledger's to know: here they stay.
        keys: the words that the blocks' contents derive from, `[seats, blocks]`.
    """

    def __init__(self, num_groups: int, num_seats: int, max_blocks: int) -> None:
        self.running: list[int] = []
        self.requests: list[Request | None] = [None] * num_seats
        self.computed = np.zeros(num_seats, dtype=np.int64)
        self.known = np.zeros(num_seats, dtype=np.int64)
        self.prompt = np.zeros(num_seats, dtype=np.int64)
        self.total = np.zeros(num_seats, dtype=np.int64)
        self.num_hit = np.zeros(num_seats, dtype=np.int64)
        self.num_hashed = np.zeros(num_seats, dtype=np.int64)
        self.num_blocks = np.zeros(num_seats, dtype=np.int64)
        self.tables = np.zeros((num_groups, num_seats, max_blocks), dtype=np.int32)
        self.keys = np.zeros((num_seats, max_blocks), dtype=np.uint64)
        self._names = [""] * num_seats
        self._free = list(range(num_seats - 1, -1, -1))

    @property
    def has_seat(self) -> bool:
        """Whether another request can be admitted."""
        return bool(self._free)

    def sit(
        self, request: Request, block_size: int, block_tables: Sequence[Ids], num_computed: int
    ) -> int:
        """Give an admitted request a seat, with its first blocks and what they hold or will."""
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
        """Empty a seat; the request remembers how far its tokens are known."""
        request = self.request(seat)
        request.known_tokens = int(self.known[seat])
        self.requests[seat] = None
        self._free.append(seat)
        return request

    def request(self, seat: int) -> Request:
        """Who sits here."""
        request = self.requests[seat]
        assert request is not None, f"nobody has seat {seat}"
        return request

    def names(self, seats: list[int]) -> list[str]:
        """The names of those who sit here."""
        return [self._names[seat] for seat in seats]

    def append_blocks(self, seats: Seats, step: StepAllocation) -> None:
        """Add the blocks that these seats were granted to the ends of their tables."""
        num_groups = len(self.tables)
        ids, offsets = step.ids, step.offsets[::num_groups]  # where each request begins
        for index in np.flatnonzero(offsets[1:] > offsets[:-1]).tolist():
            taken = ids[offsets[index] : offsets[index + 1]].reshape(num_groups, -1)
            seat, begin = seats[index], self.num_blocks[seats[index]]
            end = begin + taken.shape[1]
            self.tables[:, seat, begin:end] = taken
            self.num_blocks[seat] = end

    def replace_blocks(self, seat: int, block_tables: Sequence[Ids]) -> None:
        """Follow a table whose blocks have got other ids."""
        tables = np.stack(block_tables)
        self.num_blocks[seat] = tables.shape[1]
        self.tables[:, seat] = 0
        self.tables[:, seat, : tables.shape[1]] = tables


def longest_table(trace: Trace, model: ReplayModel, config: ReplayConfig) -> int:
    """Blocks of the longest block table; `ConfigError` for tables that the pool can never hold."""
    num_usable = config.device_blocks - 1
    for request in trace.requests:
        num_slots = request.total_tokens + config.lookahead_tokens
        num_needed = sum(
            group.most_blocks(num_slots, config.max_step_tokens) for group in model.groups
        )
        if num_needed > num_usable:
            raise ConfigError(
                f"{trace.path}:{request.line}: the request needs {num_needed} blocks for its "
                f"{request.total_tokens} tokens; of {config.device_blocks} device blocks "
                f"{num_usable} are usable. Take --device-blocks {num_needed + 1} or more"
            )
    longest = max(request.total_tokens for request in trace.requests)
    return -(-(longest + config.lookahead_tokens) // trace.block_size)
