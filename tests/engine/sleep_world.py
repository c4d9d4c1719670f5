"""An engine that sleeps and wakes, and what its requests have computed."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstow import (
    AdmissionState,
    Engine,
    FullAttention,
    SlidingWindow,
    TransferError,
    hash_tokens,
)
from kvstow.engine import Awake
from kvstow.transfer import (
    READY,
    BlockLayout,
    Event,
    HostMover,
    Ticket,
)
from kvstow.transfer.mover import Ints

BLOCK = 4
GARBAGE = -1
WHO: dict[str, Any] = {"identity": "a model", "weights_version": "7"}
RUNS, LOADS = AdmissionState.RUNS, AdmissionState.LOADS
Memory = list[list[npt.NDArray[np.int64]]]


def prompt(name: int, num_tokens: int) -> list[int]:
    """Return a prompt. All prompts begin with the same two blocks."""
    return [*range(8), *range(100 * name, 100 * name + num_tokens)][:num_tokens]


class World:
    """An engine, the memory it computes in, and what its requests have computed."""

    def __init__(
        self, num_blocks: int = 24, num_host: int = 64, *, ranks: int = 1, windows: int = 0,
        **options: Any,
    ) -> None:  # fmt: skip
        windowed = [SlidingWindow(BLOCK, 6)] * windows
        self.groups: list[FullAttention | SlidingWindow] = [FullAttention(BLOCK), *windowed]
        self.ranks = ranks
        self.texts: dict[str, list[int]] = {}
        self.memory = self.new_memory(num_blocks)
        self.engine = Engine(
            num_blocks, num_host, self.groups, self.layouts, world_size=ranks,
            **({"clock": lambda: 0.0} | options),
        )  # fmt: skip

    def new_memory(self, num_blocks: int, per_block: int = BLOCK) -> Memory:
        shape = (num_blocks, per_block)
        return [[np.full(shape, GARBAGE) for _ in self.groups] for _ in range(self.ranks)]

    @property
    def layouts(self) -> Any:
        ranks = [[BlockLayout.from_arrays([group]) for group in own] for own in self.memory]
        return ranks if self.ranks > 1 else ranks[0]

    def run(self, name: str, text: list[int], *, drafts: int = 0) -> None:
        """Admit a request, compute all its tokens, and report them."""
        self.texts[name] = list(text)
        self.engine.add(name, hash_tokens(text, BLOCK))
        admitted = self.engine.admit(
            name, len(text), 1000, after=READY, num_lookahead_tokens=drafts
        )
        assert admitted.state is RUNS
        self.write(name, admitted.num_hit_tokens)

    def go_on(self, name: str, num_tokens: int) -> None:
        """Generate this many tokens."""
        text = self.texts[name]
        known = len(text)
        text += [7 * known + at for at in range(num_tokens)]
        assert self.engine.step([name], [num_tokens]).num_granted == 1
        self.engine.extend(name, hash_tokens(text, BLOCK)[known // BLOCK :])
        self.write(name, known)

    def write(self, name: str, begin: int) -> None:
        text, tables = self.texts[name], self.engine.tables(name)
        at = np.arange(begin, len(text))
        for rank, own in enumerate(self.memory):
            for group, (memory, table) in enumerate(zip(own, tables, strict=True)):
                memory[table[at // BLOCK], at % BLOCK] = self.value(text, rank, group)[begin:]
                memory[0] = GARBAGE
        self.engine.computed([name], [len(text)], after=READY)

    @staticmethod
    def value(text: list[int], rank: int, group: int) -> npt.NDArray[np.int64]:
        return np.array(text) + 10_000 * (rank + 1) + 1_000_000 * group

    def check(self, *names: str) -> None:
        """Compare every token that a request still reads with what it has computed."""
        self.engine.check()
        for name in names or self.texts:
            text, tables = self.texts[name], self.engine.tables(name)
            for rank, own in enumerate(self.memory):
                for group, (memory, table) in enumerate(zip(own, tables, strict=True)):
                    at = np.arange(len(text))
                    blocks = table[at // BLOCK]
                    kept = blocks > 0
                    held = memory[blocks, at % BLOCK][kept]
                    assert held.tolist() == self.value(text, rank, group)[kept].tolist(), name
                    assert kept[max(0, len(text) - 5) :].all()

    def sleep(self, **options: Any) -> None:
        self.engine.sleep(**({"after": READY} | options))
        for group in (group for own in self.memory for group in own):
            group[:] = GARBAGE  # another process uses the memory now

    def wake(self, num_blocks: int | None = None, **options: Any) -> Awake:
        size = num_blocks or len(self.memory[0][0])
        self.memory = self.new_memory(size)
        given: dict[str, Any] = {"after": READY, "num_device_blocks": size} | options
        return self.engine.wake(self.layouts, **given)

    def settle(self) -> None:
        while self.engine.transfers:
            self.engine.poll()
            time.sleep(0.001)


@contextmanager
def world(*sizes: int, **options: Any) -> Iterator[World]:
    it = World(*sizes, **options)
    try:
        yield it
    finally:
        it.engine.close()


def state(engine: Engine) -> object:
    """Return what a refused call must not change."""
    tables = {name: [t.tolist() for t in engine.tables(name)] for name in engine._state.requests}
    pool = engine.ledger.pool
    order = pool.free_order().tolist()
    return tables, order, pool.num_cached, engine.scheduler.snapshot(), engine._state.running.copy()


SHAPES: list[dict[str, Any]] = [
    {},
    {"ranks": 2},
    {"windows": 2, "num_blocks": 70},
    {"windows": 1, "ranks": 3, "num_blocks": 50},
    {"mode": "lazy", "horizon_blocks": 6},
    {"policy": "hit-density"},
    {"blocks_per_slot": 3, "num_host": 30},
]


def put_to_sleep(path: Path, **shape: Any) -> None:
    """Write a file of an engine with two running requests and a cached prompt."""
    with world(**shape) as it:
        it.run("a", prompt(1, 18))
        it.run("gone", prompt(2, 17))
        it.settle()
        it.engine.finish("gone")
        it.run("b", prompt(3, 13))
        it.engine.add("waits", hash_tokens(prompt(2, 17), BLOCK))
        it.sleep(to=path, **WHO)
        assert all(arena.closed for arena in it.engine.arenas)


class FailingMover(HostMover):
    """Fails stores or loads, as `fails` names them."""

    fails: str = ""

    @property
    def is_closed(self) -> bool:
        return not self._stop.alive

    def store(self, block_ids: Ints, host_slots: Ints, *, after: Event) -> Ticket:
        if FailingMover.fails == "store":
            raise TransferError("no store today")
        return super().store(block_ids, host_slots, after=after)

    def load(self, host_slots: Ints, block_ids: Ints, *, after: Event) -> Ticket:
        if FailingMover.fails == "load":
            raise TransferError("no load today")
        return super().load(host_slots, block_ids, after=after)
