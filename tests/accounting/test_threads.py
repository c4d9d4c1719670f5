"""Threads on one object: none keeps the interpreter, waits for long, or deadlocks."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from kvstow import BlockLedger, BlockPool, FullAttention, KvstowError, OffloadScheduler

NUM_BLOCKS = 100_000
NAMES = [at.to_bytes(8, "little") for at in range(1, 20_001)]
GROUPS = [FullAttention(1)]


def filled() -> BlockLedger:
    ledger = BlockLedger(NUM_BLOCKS, GROUPS)
    ledger.add("a", NAMES)
    ledger.allocate("a", len(NAMES))
    return ledger


def restore() -> Callable[[], object]:
    snapshot = filled().snapshot()
    return lambda: BlockLedger(NUM_BLOCKS, GROUPS).restore(snapshot)


CALLS: dict[str, Callable[[], Callable[[], object]]] = {
    "BlockLedger.snapshot": lambda: filled().snapshot,
    "BlockLedger.restore": restore,
    "BlockLedger.check": lambda: filled().check,
    "LedgerPool.reset": lambda: BlockLedger(NUM_BLOCKS, GROUPS).pool.reset,
    "BlockPool.check": lambda: BlockPool(NUM_BLOCKS).check,
    "BlockPool.reset": lambda: BlockPool(NUM_BLOCKS).reset,
}


@pytest.fixture
def nobody_is_interrupted() -> Iterator[None]:
    """Let a Python thread run until it releases the interpreter lock."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(before)


def num_ticks_during(call: Callable[[], object]) -> int:
    """Return how often another thread ran during these calls, which stop once it has."""
    ticks, num_ticks, stop = [0], 0, threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks[0] += 1
            time.sleep(0)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        for _ in range(300):
            before = ticks[0]
            call()
            num_ticks = ticks[0] - before
            if num_ticks > 0:
                break
        return num_ticks
    finally:
        stop.set()
        thread.join()


@pytest.mark.usefixtures("nobody_is_interrupted")
@pytest.mark.parametrize("name", CALLS)
def test_a_long_call_gives_the_interpreter_lock_back(name: str) -> None:
    assert num_ticks_during(CALLS[name]()) > 0


@pytest.mark.usefixtures("nobody_is_interrupted")
def test_a_short_call_does_not_give_the_interpreter_lock_back() -> None:
    pool = BlockPool(8)
    assert num_ticks_during(lambda: pool.num_free) == 0


NUM_WRITERS = 3
READS: dict[str, Callable[[BlockLedger], object]] = {
    "lookup": lambda ledger: ledger.lookup("a", 64),
    "num_free": lambda ledger: ledger.pool.num_free,
}


@pytest.mark.usefixtures("nobody_is_interrupted")
@pytest.mark.parametrize("name", READS)
def test_a_read_waits_for_few_calls_of_threads_that_call_in_a_loop(name: str) -> None:
    ledger, read = BlockLedger(5_000, GROUPS), READS[name]
    ledger.add("a", NAMES[:1_000])
    ledger.allocate("a", 1_000)
    num_calls, stop = [0] * NUM_WRITERS, threading.Event()

    def write(which: int) -> None:
        while not stop.is_set():
            ledger.check()
            num_calls[which] += 1

    writers = [threading.Thread(target=write, args=(at,)) for at in range(NUM_WRITERS)]
    for writer in writers:
        writer.start()
    waits = []
    try:
        for _ in range(300):
            before = sum(num_calls)
            read(ledger)
            waits.append(sum(num_calls) - before)
            time.sleep(0.0001)  # lets the writers in
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert sum(waits) > 0, "no read met a writer"
    # Each writer may have ended a call that it has not counted, be ahead in the line, and have
    # seen an empty line before this thread joined it. A busy machine may now and then give them the
    # interpreter lock first, which is not fair.
    assert sum(wait > 3 * NUM_WRITERS for wait in waits) <= len(waits) // 50


NUM_THREADS = 5


def num_ended(calls: list[Callable[[], object]], seconds: float) -> int:
    """Return how many threads finish all calls, each in an order of its own."""
    num_rounds, ended = 25, []

    def run(start: int) -> None:
        for at in range(num_rounds * len(calls)):
            with suppress(KvstowError):
                calls[(start + at * (1 + 3 * (start % 2))) % len(calls)]()
        ended.append(start)

    starts = [3 * at for at in range(NUM_THREADS)]
    threads = [threading.Thread(target=run, args=(start,), daemon=True) for start in starts]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0, deadline - time.monotonic()))
    return len(ended)


def test_threads_on_one_ledger_never_wait_for_each_other() -> None:
    ledger, tier = filled(), OffloadScheduler(len(NAMES), GROUPS, num_device_blocks=NUM_BLOCKS)

    def pin_and_unpin() -> None:
        ledger.pool.pin([1])
        ledger.pool.unpin([1])

    calls: list[Callable[[], object]] = [
        ledger.check,
        ledger.snapshot,
        ledger.pool.reset,
        lambda: ledger.pool.num_free,
        lambda: ledger.lookup("a", 10),
        pin_and_unpin,
        lambda: ledger.add("b", NAMES[:3]),
        lambda: ledger.allocate("b", 3),
        lambda: ledger.free("b"),
        lambda: tier.hold_image(ledger),
        tier.release_image,
        tier.check,
        tier.snapshot,
        lambda: tier.store_evictable(ledger.pool, 10),
        tier.stats,
    ]
    assert num_ended(calls, seconds=300) == NUM_THREADS, "a thread waits for ever"
    ledger.check()
    tier.check()


def test_a_thread_that_waits_for_ever_is_noticed() -> None:
    nobody_sets_it = threading.Event()
    try:
        assert num_ended([nobody_sets_it.wait], seconds=0.1) == 0
    finally:
        nobody_sets_it.set()
