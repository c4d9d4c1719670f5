"""A fork beside threads that use core objects: the child can use them."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from tests.forks import in_child

from kvstow import BlockLedger, BlockPool, FullAttention, OffloadScheduler

NUM_FORKS = 20

# The hooks come before those of kvstow, so the fork takes their lock last.
FORKS_UNDER_A_LOCK = """
import os, threading, time
lock, is_held = threading.Lock(), threading.Event()
hooks = {"after_in_parent": lock.release, "after_in_child": lock.release}
os.register_at_fork(before=lock.acquire, **hooks)
from kvstow import BlockPool
pool = BlockPool(100)

def check():
    with lock:
        is_held.set()
        time.sleep(0.5)  # the fork waits for the lock now
        pool.check()

threading.Thread(target=check, daemon=True).start()
is_held.wait()
os.fork()
os._exit(0)
"""

FORKS_AT_THE_END = """
import builtins, os, threading, time
from kvstow import BlockPool
pool = BlockPool(1_000_000)

def check():
    while True:
        pool.check()

class Last:
    def __del__(self, fork=os.fork, end=os._exit, write=os.write):
        if fork() == 0:
            end(0)
        write(1, b"forked")

builtins.last = Last()
threading.Thread(target=check, daemon=True).start()
time.sleep(0.5)
"""


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
    with threads_again(shared.check, *[read] * num_readers):
        for _ in range(NUM_FORKS):
            in_child(shared.check)


def test_child_does_not_wait_for_a_ledger_whose_thread_waited_for_its_scheduler() -> None:
    ledger, tier = (
        BlockLedger(64, [FullAttention(4)]),
        OffloadScheduler(200_000, [FullAttention(4)]),
    )
    hashes = [at.to_bytes(8, "big") for at in range(200_000)]
    tier.add("a", hashes)
    job = tier.store(["a"], [800_000], range(1, 200_001), [0, 200_000])
    assert job is not None
    tier.complete(job.job_id)

    def check() -> None:
        assert ledger.pool.num_free == 63
        tier.stats()

    with threads_again(tier.check, lambda: tier.store_step(ledger, [], [])):
        for _ in range(NUM_FORKS):
            in_child(check)


def test_fork_may_need_a_lock_of_a_thread_that_waits_for_it() -> None:
    subprocess.run([sys.executable, "-c", FORKS_UNDER_A_LOCK], check=True, timeout=60)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python refuses to fork at its end")
def test_fork_does_not_wait_for_threads_that_ended_with_python() -> None:
    command = [sys.executable, "-c", FORKS_AT_THE_END]
    assert subprocess.run(command, check=True, timeout=60, capture_output=True).stdout == b"forked"


@contextmanager
def threads_again(*calls: Callable[[], object]) -> Iterator[None]:
    """Let a thread make each call, again and again."""
    is_over = threading.Event()

    def again(call: Callable[[], object]) -> None:
        while not is_over.is_set():
            call()

    threads = [threading.Thread(target=again, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
