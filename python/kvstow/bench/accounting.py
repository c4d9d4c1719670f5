"""The time of block accounting: kvstow's, and vLLM's beside it if vLLM is installed.

Both sides serve the same requests in one process, in turns, and must take the same blocks:

- A prompt is admitted, finished, and looked up. The pool has room for one of two prompts, so each
  admission evicts the other prompt.
- 256 requests decode. In each step a sixteenth of them enters a new block.

Block hashes are made before. vLLM reads them in place, and kvstow gets them in `admit` and
`look_up`.
"""

from __future__ import annotations

import gc
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from kvstow._core import BlockLedger, FullAttention
from kvstow.bench.clock import Clock

BLOCK_SIZE: Final = 16
NUM_DECODING: Final = 256
_FIRST_LENGTH: Final = 512
_SPARE_BLOCKS: Final = 8
_HASH_BYTES: Final = 32


class Side(Protocol):
    """The accounting of one library. A request is known by its number."""

    def admit(self, request: int, num_tokens: int) -> None:
        """Give a new request the blocks of its tokens, and publish them."""

    def look_up(self, request: int) -> list[int]:
        """Return the ids of the blocks that a prompt finds, one token left to compute."""

    def free(self, request: int) -> None:
        """End a request."""

    def sample(self) -> None:
        """Append a token to each request, before a step."""

    def step(self) -> None:
        """Give each request a slot for one token more."""

    def table(self, request: int) -> list[int]:
        """Return a request's block ids."""


Maker: TypeAlias = Callable[[int, int, Sequence[Sequence[bytes]], Sequence[int]], Side]
"""Makes a side with so many blocks, the null block included, of so many tokens, for requests with
these block hashes and lengths in tokens."""
_Time: TypeAlias = Callable[..., object]


class KvstowSide:
    """kvstow's `BlockLedger`."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        hashes: Sequence[Sequence[bytes]],
        lengths: Sequence[int],
    ) -> None:
        self._hashes, self._lengths = hashes, lengths
        self._ledger = BlockLedger(num_blocks, [FullAttention(block_size)])
        self._names = [str(number) for number in range(len(lengths))]

    def admit(self, request: int, num_tokens: int) -> None:
        """Add a request, and allocate its tokens."""
        self._ledger.add(self._names[request], self._hashes[request])
        self._ledger.allocate(self._names[request], num_tokens)

    def look_up(self, request: int) -> list[int]:
        """Add a request, look it up, and forget it."""
        self._ledger.add(self._names[request], self._hashes[request])
        hit = self._ledger.lookup(self._names[request], self._lengths[request] - 1)
        self._ledger.free(self._names[request])
        return list(hit.blocks[0])

    def free(self, request: int) -> None:
        """Free a request's blocks."""
        self._ledger.free(self._names[request])

    def sample(self) -> None:
        """Do nothing: the ledger does not see tokens."""

    def step(self) -> None:
        """Allocate a token for each request, in one call."""
        self._ledger.allocate_step(self._names, [1] * len(self._names))

    def table(self, request: int) -> list[int]:
        """Return a request's block ids."""
        return list(self._ledger.block_table(self._names[request]))


@dataclass(frozen=True, slots=True)
class AccountingRow:
    """The median times of one piece of work.

    Attributes:
        work: what is done.
        num_blocks: blocks that it is about; None for a step.
        kvstow_us: microseconds of kvstow.
        vllm_us: microseconds of vLLM; None without vLLM.
    """

    work: str
    num_blocks: int | None
    kvstow_us: float
    vllm_us: float | None


class _Prompts:
    """Two prompts that evict each other."""

    def __init__(self, num_blocks: int) -> None:
        self.rows = {
            work: num_blocks for work in ("admit a prompt", "free a prompt", "look up a prompt")
        }
        self.lengths = [num_blocks * BLOCK_SIZE + 1] * 2
        self.num_blocks = num_blocks + _SPARE_BLOCKS

    def begin(self, side: Side) -> None:
        """Do nothing: no request lasts."""

    def turn(self, side: Side, time: _Time) -> list[int]:
        """Serve both prompts; return the blocks that they took and found."""
        seen: list[int] = []
        for request, length in enumerate(self.lengths):
            time("admit a prompt", side.admit, request, length)
            seen += side.table(request)
            time("free a prompt", side.free, request)
            found = time("look up a prompt", side.look_up, request)
            assert isinstance(found, list)
            seen += found
        return seen


class _Decode:
    """Requests that decode. A turn is as many steps as a block has tokens."""

    def __init__(self, num_turns: int) -> None:
        self._work = f"a step of {NUM_DECODING} decoding requests"
        self.rows = {self._work: None}
        # Different lengths, so that in each step a sixteenth of the requests enters a new block.
        self.lengths = [_FIRST_LENGTH + at for at in range(NUM_DECODING)]
        most = self.lengths[-1] + (num_turns + 1) * BLOCK_SIZE
        self.num_blocks = NUM_DECODING * -(-most // BLOCK_SIZE) + _SPARE_BLOCKS

    def begin(self, side: Side) -> None:
        """Admit all requests."""
        for request, length in enumerate(self.lengths):
            side.admit(request, length)

    def turn(self, side: Side, time: _Time) -> list[int]:
        """Run the steps; return all block tables."""
        for _ in range(BLOCK_SIZE):
            side.sample()
            time(self._work, side.step)
        return [block for request in range(NUM_DECODING) for block in side.table(request)]


def measure_accounting(
    num_blocks: int, num_turns: int, rivals: Mapping[str, Maker]
) -> list[AccountingRow]:
    """Return the times of kvstow and of a rival, which must take the same blocks.

    Args:
        num_blocks: blocks of a prompt.
        num_turns: turns of each side. One more, which does not count, warms up.
        rivals: "vllm", or nothing.

    Raises:
        RuntimeError: the sides took different blocks, so their times do not compare.
    """
    clock, rows = Clock(), []
    draw = random.Random(0)
    for work in (_Prompts(num_blocks), _Decode(num_turns)):
        most = -(-max(work.lengths) // BLOCK_SIZE) + num_turns + 1
        hashes = [[draw.randbytes(_HASH_BYTES) for _ in range(most)] for _ in work.lengths]
        makers = {"kvstow": KvstowSide, **rivals}
        sides = {
            name: make(work.num_blocks, BLOCK_SIZE, hashes, work.lengths)
            for name, make in makers.items()
        }
        for side in sides.values():
            work.begin(side)
        gc.collect()
        gc.freeze()
        try:
            for turn in range(num_turns + 1):
                names = list(sides)[:: -1 if turn % 2 else 1]
                own = clock if turn else Clock()
                seen = {name: _turn(work, sides[name], own, name) for name in names}
                if any(one != seen["kvstow"] for one in seen.values()):
                    raise RuntimeError("kvstow and vLLM took different blocks: please report this")
        finally:
            gc.unfreeze()
        rows += [
            AccountingRow(
                what,
                number,
                _median_us(clock, "kvstow", what),
                _median_us(clock, "vllm", what) if rivals else None,
            )
            for what, number in work.rows.items()
        ]
    return rows


def _turn(work: _Prompts | _Decode, side: Side, clock: Clock, name: str) -> list[int]:
    gc.collect()
    return work.turn(side, lambda what, *call: clock.time(f"{name} {what}", *call))


def _median_us(clock: Clock, name: str, what: str) -> float:
    return statistics.median(clock.samples[f"{name} {what}"]) * 1000
