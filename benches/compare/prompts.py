"""Long prompts, admitted, finished and looked up in pools that are full of other prompts."""

import functools
import gc
import random
from collections.abc import Callable, Sequence

import kvstow

from . import vllm_side
from .measure import Clock, Row, require_same, take_turns

BLOCK_SIZE = 16
NUM_BLOCKS = 8_192
NUM_TOKENS = NUM_BLOCKS * BLOCK_SIZE
NUM_SPARE_BLOCKS = 8
MIN_PROMPTS_PER_TURN = 5


ONE_GROUP = (kvstow.FullAttention(block_size=BLOCK_SIZE),)
THREE_GROUPS = (
    kvstow.FullAttention(block_size=BLOCK_SIZE),
    kvstow.SlidingWindow(block_size=BLOCK_SIZE, window=1_024),
    kvstow.SlidingWindow(block_size=BLOCK_SIZE, window=4_096),
)


class Prompts:
    """All prompts, one after the other, in each turn of a side.

    A prompt is one chunk, so its windows hold as many blocks as full attention does. The pools hold
    `capacity` prompts, and there is one more. So each prompt is evicted before it comes again. If
    shuffled, the free queues are in an arbitrary order, as after hours of use. Then neighbours in a
    block table are not neighbours in memory, for either side.
    """

    def __init__(
        self, num_turns: int, *, groups: Sequence[vllm_side.Group], capacity: int, shuffled: bool
    ) -> None:
        self.num_turns = num_turns
        self.num_groups = len(groups)
        self.capacity = capacity
        self.shuffled = shuffled
        self.clock = Clock()
        num_prompts = capacity + 1
        # With few prompts, a turn repeats them. Otherwise all its calls would be cold.
        self.num_rounds = -(-MIN_PROMPTS_PER_TURN // num_prompts)
        self.num_usable_blocks = len(groups) * (capacity * NUM_BLOCKS + NUM_SPARE_BLOCKS)
        # One token more than the blocks hold: vLLM leaves the last one to compute.
        self.requests = [
            vllm_side.request(f"prompt-{at}", NUM_TOKENS + 1, BLOCK_SIZE)
            for at in range(num_prompts)
        ] * self.num_rounds
        self.manager = vllm_side.manager(self.num_usable_blocks + 1, groups)
        self.ledger = kvstow.BlockLedger(self.num_usable_blocks + 1, groups)
        self.pool = kvstow.BlockPool(self.num_usable_blocks + 1)

    def run(self) -> list[Row]:
        if self.shuffled:
            self._shuffle()
        gc.collect()
        gc.freeze()
        self._turn(0)  # fills the pools
        self.clock.samples.clear()
        for turn in range(self.num_turns):
            self._turn(turn)
        for turn in range(self.num_turns):
            take_turns(turn, self._vllm_clean, self._kvstow_clean)
            require_same(
                "free orders", vllm_side.free_order(self.manager), self.ledger.pool.free_order()
            )
        self.ledger.check()
        gc.unfreeze()
        return self._rows()

    def _shuffle(self) -> None:
        """Put all free queues into the same arbitrary order."""
        names = [str(at) for at in range(self.num_usable_blocks // self.num_groups)]
        for name in names:
            self.ledger.add(name, [])
            self.ledger.allocate(name, BLOCK_SIZE)
        random.Random(0).shuffle(names)
        for name in names:
            self.ledger.free(name)
        order = self.ledger.pool.free_order().tolist()
        pool = self.manager.block_pool
        blocks = {block.block_id: block for block in pool.get_new_blocks(self.num_usable_blocks)}
        pool.free_blocks([blocks[id] for id in order])
        self.pool.allocate(self.num_usable_blocks)
        self.pool.free(order)

    def _turn(self, turn: int) -> None:
        theirs: list[list[int]] = []
        ours: list[list[int]] = []
        take_turns(
            turn,
            functools.partial(self._vllm_turn, theirs.append),
            functools.partial(self._kvstow_turn, ours.append),
        )
        if self.num_groups == 1:
            self._pool_turn()
        for side, (vllm, kvstow_) in enumerate(zip(theirs, ours, strict=True)):
            require_same(f"block ids of step {side}", vllm, kvstow_)

    def _vllm_turn(self, record: Callable[[list[int]], None]) -> None:
        manager, time = self.manager, self.clock.time
        for request in self.requests:
            allocated = time("vllm allocate", manager.allocate_slots, request, NUM_TOKENS)
            time("vllm free", manager.free, request)
            hit, num_tokens, _ = time("vllm lookup", manager.get_computed_blocks, request)
            time("vllm admit hit", manager.allocate_slots, request, 1, num_tokens, hit)
            manager.free(request)
            record(vllm_side.block_ids(allocated))
            record(vllm_side.block_ids(hit))

    def _kvstow_turn(self, record: Callable[[list[int]], None]) -> None:
        ledger, time = self.ledger, self.clock.time
        for request in self.requests:
            name, hashes = request.request_id, request.block_hashes
            time("add", ledger.add, name, hashes)
            allocated = time("allocate", ledger.allocate, name, NUM_TOKENS)
            time("free", ledger.free, name)
            ledger.add(name, hashes)
            hit = time("lookup", ledger.lookup, name, NUM_TOKENS)
            time("admit hit", ledger.allocate, name, 1, hit=hit)
            ledger.free(name)
            record([id for ids in allocated or () for id in ids.tolist()])
            record([id for ids in hit.blocks for id in ids.tolist()])

    def _pool_turn(self) -> None:
        """Run the prompts in a bare pool, whose lookup gets the hashes from Python."""
        gc.collect()
        for request in self.requests:
            ids = self.pool.allocate(NUM_BLOCKS)
            self.pool.cache(ids, request.block_hashes)
            self.pool.free(ids[::-1])
            found = self.clock.time("pool lookup", self.pool.lookup, request.block_hashes)
            require_same("allocated and found blocks", ids, found)

    def _vllm_clean(self) -> None:
        for request in self.requests:
            self.manager.reset_prefix_cache()
            self.clock.time("vllm clean", self.manager.allocate_slots, request, NUM_TOKENS)
            self.manager.free(request)

    def _kvstow_clean(self) -> None:
        for request in self.requests:
            name, hashes = request.request_id, request.block_hashes
            self.ledger.pool.reset()
            self.clock.time("clean: add", self.ledger.add, name, hashes)
            self.clock.time("clean", self.ledger.allocate, name, NUM_TOKENS)
            self.ledger.free(name)

    def _rows(self) -> list[Row]:
        of, together = self.clock.samples, self.clock.together
        pool = f"pool of {self.num_usable_blocks:,}{' shuffled' if self.shuffled else ''}"
        groups = "" if self.num_groups == 1 else f"{self.num_groups} x "
        blocks = f"{groups}{NUM_BLOCKS:,} blocks, {pool}"
        row = functools.partial(Row, num_per_turn=len(self.requests))
        # The targets hold for a pool with the size of the prompt. The other rows show a server.
        is_plain = self.capacity == 1 and not self.shuffled
        target = {"lookup": 100, "clean": 60, "free": 40} if is_plain else {}
        rows = [
            row(
                f"lookup of {blocks}",
                of["vllm lookup"],
                of["lookup"],
                target_ratio=target.get("lookup"),
            ),
            row("  add + lookup", of["vllm lookup"], together("add", "lookup")),
            row(
                f"allocate + publish {blocks}",
                of["vllm clean"],
                of["clean"],
                target_ratio=target.get("clean"),
            ),
            row("  with add", of["vllm clean"], together("clean: add", "clean")),
            row("  evicting as many", of["vllm allocate"], of["allocate"]),
            row("  evicting, with add", of["vllm allocate"], together("add", "allocate")),
            row(
                f"free of {blocks}",
                of["vllm free"],
                of["free"],
                target_ratio=target.get("free"),
            ),
            row(f"admit a hit of {blocks}", of["vllm admit hit"], of["admit hit"]),
            row(
                "all of it: add, allocate evicting, free, lookup",
                together("vllm allocate", "vllm free", "vllm lookup"),
                together("add", "allocate", "free", "lookup"),
            ),
        ]
        if self.num_groups == 1:
            bare = row("  BlockPool.lookup(list[bytes])", of["vllm lookup"], of["pool lookup"])
            rows.insert(1, bare)
        return rows
