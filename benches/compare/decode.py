"""Steps of many decoding requests. In each step a sixteenth of them enters a new block."""

import gc
from collections.abc import Sequence

import kvstow

from . import vllm_side
from .measure import Clock, Row, require_same, take_turns

BLOCK_SIZE = 16
NUM_REQUESTS = 256


class Decode:
    """16 steps, one after the other, in each turn of a side."""

    def __init__(self, num_turns: int) -> None:
        self.num_turns = num_turns
        self.clock = Clock()
        # The lengths differ, so that in each step a sixteenth of the requests enters a new block.
        self.lengths = [512 + at for at in range(NUM_REQUESTS)]
        num_tokens = sum(self.lengths) + NUM_REQUESTS * (num_turns + 2) * BLOCK_SIZE
        num_blocks = num_tokens // BLOCK_SIZE + NUM_REQUESTS
        groups = [kvstow.FullAttention(block_size=BLOCK_SIZE)]
        self.manager = vllm_side.manager(num_blocks, groups)
        self.ledger = kvstow.BlockLedger(num_blocks, groups)
        self.requests = [
            vllm_side.request(f"request-{at}", length, BLOCK_SIZE)
            for at, length in enumerate(self.lengths)
        ]
        # For each step, the hashes of the blocks that were filled before it.
        self.new_hashes: list[list[tuple[str, list[bytes]]]] = []

    def run(self) -> list[Row]:
        for request, length in zip(self.requests, self.lengths, strict=True):
            self.manager.allocate_slots(request, length)
            self.ledger.add(request.request_id, request.block_hashes)
            self.ledger.allocate(request.request_id, length)
            request.num_computed_tokens = length
        gc.collect()
        gc.freeze()
        for _ in range(1 + self.num_turns):
            # vLLM first, because its requests make the hashes that kvstow gets.
            take_turns(0, self._vllm_turn, self._kvstow_turn)
        self.ledger.check()
        gc.unfreeze()
        for request in self.requests:
            table = vllm_side.block_ids(self.manager.get_blocks(request.request_id))
            name = request.request_id
            require_same(f"block tables of {name}", table, self.ledger.block_table(name))
        of, together = self.clock.samples, self.clock.together

        def row(work: str, ours: list[float], target_ratio: float | None = None) -> Row:
            vllm, kvstow_ = of["vllm"][BLOCK_SIZE:], ours[BLOCK_SIZE:]  # the first turn warms up
            return Row(work, vllm, kvstow_, num_per_turn=BLOCK_SIZE, target_ratio=target_ratio)

        return [
            row(f"a step of {NUM_REQUESTS} decoding requests", of["step"], target_ratio=80),
            row("  with the list of ids and 16 extend calls", together("ids", "extend", "step")),
        ]

    def _vllm_turn(self) -> None:
        self.new_hashes.clear()
        for _ in range(BLOCK_SIZE):
            filled = []
            for request in self.requests:
                num_hashes = len(request.block_hashes)
                request.append_output_token_ids(request.num_tokens)  # what the last step sampled
                if len(request.block_hashes) > num_hashes:
                    filled.append((request.request_id, request.block_hashes[-1:]))
            self.new_hashes.append(filled)
            self.clock.time("vllm", self._vllm_step)

    def _vllm_step(self) -> None:
        for request in self.requests:
            self.manager.allocate_slots(request, 1)
            request.num_computed_tokens += 1

    def _kvstow_turn(self) -> None:
        for filled in self.new_hashes:
            self.clock.time("extend", self._kvstow_extend, filled)
            names = self.clock.time("ids", self._kvstow_ids)
            self.clock.time("step", self._kvstow_step, names)

    def _kvstow_extend(self, filled: Sequence[tuple[str, list[bytes]]]) -> None:
        for name, hashes in filled:
            self.ledger.extend(name, hashes)

    def _kvstow_ids(self) -> list[str]:
        return [request.request_id for request in self.requests]

    def _kvstow_step(self, names: list[str]) -> None:
        self.ledger.allocate_step(names, [1] * len(names))
