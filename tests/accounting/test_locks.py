"""Other threads run while a scheduler works on all of its slots, and no two threads deadlock."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest

from kvstow import BlockLedger, BlockPool, FullAttention, KvstowError, OffloadScheduler

BLOCK = 4
GROUP = FullAttention(BLOCK)
NUM_SLOTS = 200_000


def prompt(first: int, num_blocks: int) -> list[bytes]:
    return [(first << 32 | at).to_bytes(8, "big") for at in range(num_blocks)]


def full_tier() -> OffloadScheduler:
    tier = OffloadScheduler(NUM_SLOTS, [GROUP])
    tier.add("a", prompt(1, NUM_SLOTS))
    job = tier.store(["a"], [NUM_SLOTS * BLOCK], range(1, NUM_SLOTS + 1), [0, NUM_SLOTS])
    assert job is not None
    tier.complete(job.job_id)
    return tier


@pytest.fixture
def _no_forced_switch() -> Iterator[None]:
    """Let a thread keep the interpreter lock until it waits or releases the lock."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    yield
    sys.setswitchinterval(before)


def goes_on_meanwhile(call: Callable[[], object]) -> bool:
    """Return whether this thread runs Python while another is in `call`."""
    begun, state = threading.Event(), ["waits"]

    def work() -> None:
        begun.set()
        state[0] = "calls"
        call()
        state[0] = "is back"

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    seen = state[0]
    thread.join()
    return seen == "calls"


@pytest.mark.usefixtures("_no_forced_switch")
@pytest.mark.parametrize("name", ["snapshot", "restore", "check", "used_slots", "reset"])
def test_interpreter_goes_on_while_a_large_tier_is_walked(name: str) -> None:
    tier = full_tier()
    snapshot = tier.snapshot() if name == "restore" else b""

    def one_call() -> Callable[[], object]:
        if name == "restore":
            fresh = OffloadScheduler(NUM_SLOTS, [GROUP])
            return lambda: fresh.restore(snapshot)
        method: Callable[[], object] = getattr(tier, name)
        return method

    # A machine that is busy may wake this thread too late; a call that keeps the interpreter
    # never lets it in.
    assert any(goes_on_meanwhile(one_call()) for _ in range(50))


@pytest.mark.usefixtures("_no_forced_switch")
def test_thread_that_waits_for_a_scheduler_lets_others_go_on() -> None:
    """This thread runs while one thread walks the tier and another waits for it."""
    tier = full_tier()

    def lets_others_go_on() -> bool:
        begun = threading.Event()

        def walk() -> None:
            begun.set()
            tier.snapshot()

        walker = threading.Thread(target=walk)
        walker.start()
        begun.wait()
        # Nothing but the wait for `walker` makes this call give up the interpreter.
        seen = goes_on_meanwhile(tier.stats)
        walker.join()
        return seen

    assert any(lets_others_go_on() for _ in range(50))


def lets_in(call: Callable[[], object]) -> bool:
    """Return whether a thread that waits for the interpreter lock gets it between calls."""
    wakes, runs = SimpleQueue[None](), threading.Event()

    def wait() -> None:
        wakes.get()
        runs.set()

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.01)  # it waits
    wakes.put(None)
    end_s = time.monotonic() + 0.1
    while not runs.is_set() and time.monotonic() < end_s:
        call()
    seen = runs.is_set()
    thread.join()
    return seen


@pytest.mark.usefixtures("_no_forced_switch")
@pytest.mark.parametrize("name", ["store_evictable", "store_step", "lookup", "stats"])
def test_short_calls_keep_the_interpreter_lock(name: str) -> None:
    """A lock that is given up and taken again at once starts anew the wait of other threads."""
    ledger, tier = BlockLedger(64, [GROUP]), OffloadScheduler(64, [GROUP], mode="lazy")
    ledger.add("a", prompt(1, 8))
    ledger.allocate("a", 8 * BLOCK)
    tier.add("a", prompt(1, 8))
    own, pool = BlockPool(64), ledger.pool

    def store_evictable() -> None:
        tier.store_evictable(pool, 64)
        tier.store_evictable(own, 64)

    calls: dict[str, Callable[[], object]] = {
        "store_evictable": store_evictable,
        "store_step": lambda: tier.store_step(ledger, ["a"], [8 * BLOCK]),
        "lookup": lambda: tier.lookup("a", 0, 8 * BLOCK),
        "stats": tier.stats,
    }
    assert not lets_in(calls[name])


@pytest.mark.usefixtures("_no_forced_switch")
def test_thread_gets_a_lock_that_is_given_up() -> None:
    """Without this, the test above would pass whatever the calls do."""
    assert lets_in(lambda: time.sleep(1e-6))


def test_threads_that_share_pool_ledger_and_scheduler_never_wait_for_one_another() -> None:
    ledger = BlockLedger(64, [GROUP])
    pool = BlockPool(64)
    tier = OffloadScheduler(5_000, [GROUP], mode="lazy")
    ledger.add("a", prompt(1, 20))
    ledger.allocate("a", 20 * BLOCK)
    tier.add("a", prompt(1, 20))

    def image() -> None:
        tier.hold_image(ledger)
        tier.release_image()

    calls: list[Callable[[], object]] = [
        tier.snapshot,
        tier.check,
        tier.stats,
        image,
        lambda: tier.store_evictable(ledger.pool, 64),
        lambda: tier.store_evictable(pool, 64),
        lambda: ledger.lookup("a", 20 * BLOCK),
        ledger.check,
        ledger.pool.free_order,
        lambda: tier.lookup("a", 0, 20 * BLOCK),
    ]

    def work(call: Callable[[], object]) -> None:
        for _ in range(300):
            try:
                call()
            except KvstowError as error:
                assert "broken" not in str(error)

    # Daemons: threads that wait for one another would keep the interpreter from its end.
    threads = [threading.Thread(target=work, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    tier.check()


@pytest.fixture
def _collects_often() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(1)
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("_collects_often")
@pytest.mark.parametrize("name", ["stats", "disk_stats"])
def test_garbage_may_use_the_scheduler_that_makes_its_answer(name: str) -> None:
    """Before Python 3.12, each new object may run the collector, and so the code of garbage."""
    tier = OffloadScheduler(64, [GROUP])

    class Garbage:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            tier.num_resident  # noqa: B018 - a wait for ever without the mend

    def work() -> None:
        read = getattr(tier, name)
        kept = []  # a dictionary that goes is used again, and makes no new one
        for _ in range(1_000):
            Garbage()
            kept.append(read())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
