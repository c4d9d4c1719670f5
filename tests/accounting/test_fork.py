"""A fork beside threads that use core objects: the child can use them."""

import threading
from collections.abc import Callable

import pytest
from tests.forks import in_child

from kvstow import BlockLedger, BlockPool, FullAttention

NUM_FORKS = 20


def ledger() -> tuple[BlockLedger, Callable[[], int]]:
    shared = BlockLedger(100_000, [FullAttention(16)])
    return shared, lambda: shared.pool.num_free


def pool() -> tuple[BlockPool, Callable[[], int]]:
    shared = BlockPool(100_000)
    return shared, lambda: shared.num_free


@pytest.mark.parametrize("num_readers", [0, 2])
@pytest.mark.parametrize("make", [ledger, pool])
def test_child_does_not_wait_for_a_thread_that_it_lacks(
    num_readers: int, make: Callable[[], tuple[BlockLedger | BlockPool, Callable[[], int]]]
) -> None:
    """A check holds its object without the interpreter lock, and readers wait for it."""
    shared, read = make()
    is_over = threading.Event()

    def again(call: Callable[[], object]) -> None:
        while not is_over.is_set():
            call()

    calls = [shared.check, *[read] * num_readers]
    threads = [threading.Thread(target=again, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    try:
        for _ in range(NUM_FORKS):
            in_child(shared.check)
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
