"""An engine over numpy arrays, a clock, and movers that the test drives."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from tests.movers import ManualMover

from kvstow import (
    Admission,
    AdmissionState,
    Engine,
    FullAttention,
    Landed,
    UnknownRequest,
    hash_tokens,
)
from kvstow.transfer import (
    READY,
    BlockLayout,
    Event,
)

BLOCK = 4
RUNS, LOADS = AdmissionState.RUNS, AdmissionState.LOADS
PENDING, NO_ROOM = AdmissionState.PENDING, AdmissionState.NO_ROOM
NOTHING = Landed([], [], 0, 0)

DOCUMENT = list(range(16))  # 4 blocks


class World:
    """An engine, its device memory, and a clock."""

    def __init__(self, num_device_blocks: int, num_host_blocks: int, **options: object) -> None:
        self.kv = np.zeros((num_device_blocks, BLOCK), np.int64)
        self.now_s = 0.0
        self.engine = Engine(
            num_device_blocks,
            num_host_blocks,
            [FullAttention(BLOCK)],
            [BlockLayout.from_arrays([self.kv])],
            clock=lambda: self.now_s,
            **options,  # type: ignore[arg-type]
        )

    @property
    def mover(self) -> ManualMover:
        mover = self.engine.movers[0]
        assert isinstance(mover, ManualMover)
        return mover

    def admit(self, name: str, tokens: list[int], after: Event = READY) -> Admission:
        """Admit all tokens of a request. Add it first if it is not known."""
        try:
            self.engine.tables(name)
        except UnknownRequest:
            self.engine.add(name, hash_tokens(tokens, BLOCK))
        return self.engine.admit(name, len(tokens), 1000, after=after)

    def compute(self, name: str, tokens: list[int], after: Event = READY) -> None:
        """Write all tokens of a request, and report them as computed."""
        at = np.arange(len(tokens))
        self.kv[self.engine.tables(name)[0][at // BLOCK], at % BLOCK] = tokens
        self.engine.computed([name], [len(tokens)], after=after)

    def cached(self, name: str, num_tokens: int) -> list[int]:
        """Return what the request's blocks hold."""
        at = np.arange(num_tokens)
        found: list[int] = self.kv[self.engine.tables(name)[0][at // BLOCK], at % BLOCK].tolist()
        return found

    def put_on_the_host(self, tokens: list[int]) -> None:
        """Compute and store a prompt, and evict it from the device."""
        assert self.admit("writer", tokens).state is RUNS
        self.compute("writer", tokens)
        self.engine.finish("writer")
        for ticket in self.mover.stores:
            if not ticket.poll():
                ticket.land()
        assert self.engine.poll().num_stored_blocks == len(tokens) // BLOCK
        assert self.engine.ledger.pool.reset()
        self.kv[:] = -1


@contextmanager
def world(
    num_device_blocks: int = 17, num_host_blocks: int = 64, **options: object
) -> Iterator[World]:
    options = {"mover": ManualMover} | options
    it = World(num_device_blocks, num_host_blocks, **options)
    try:
        yield it
        it.engine.check()
    finally:
        it.engine.close()
    for name in list(it.engine._state.requests):
        it.engine.finish(name)
    assert it.engine.ledger.pool.num_free == num_device_blocks - 1, "a pin was left behind"


def polled(engine: Engine) -> Landed:
    """Poll until something has landed, because copies of real movers take a moment."""
    while (landed := engine.poll()) == NOTHING:
        time.sleep(0.001)
    return landed


def state(engine: Engine) -> list[object]:
    pool, stats = engine.ledger.pool, engine.stats()
    everything = np.arange(pool.num_blocks)
    return [pool.free_order().tolist(), pool.ref_counts(everything).tolist(), pool.num_free, stats]
