"""Movers survive an interrupt, for example Ctrl-C, while they start and while they close."""

import gc
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.interrupts import is_interrupted

import kvstow.transfer
from kvstow.threads import _Work, map_on_threads
from kvstow.transfer import BlockLayout, HostArena, HostMover, Mover, ProvingMover
from kvstow.transfer import VerifiedMover as Verified

BLOCK_BYTES = 1 << 20  # not brief, so a worker copies it
LONG_S = 60.0
SOURCES = str(Path(kvstow.transfer.__file__).parent)


class Held:
    """An event that has happened, but whose `wait` blocks until the gate opens."""

    def __init__(self) -> None:
        self.gate, self.begun = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.begun.set()
        assert self.gate.wait(LONG_S)

    def add_done_callback(self, callback: Callable[[], None], /) -> None:
        callback()


def host(layout: BlockLayout, arena: HostArena) -> Mover:
    return HostMover(layout, arena)


def verified(layout: BlockLayout, arena: HostArena) -> Mover:
    return Verified(HostMover(layout, arena))


def proving(layout: BlockLayout, arena: HostArena) -> Mover:
    return ProvingMover(HostMover(layout, arena))


def memory() -> tuple[BlockLayout, HostArena]:
    device = np.zeros((4, BLOCK_BYTES), np.uint8)
    device[1] = 7
    return BlockLayout.from_arrays([device]), HostArena(4, BLOCK_BYTES)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("build", [host, verified, proving])
def test_close_after_an_interrupted_close_waits_for_the_copy(
    build: Callable[[BlockLayout, HostArena], Mover],
) -> None:
    layout, arena = memory()
    mover, held = build(layout, arena), Held()
    ticket = mover.store([1], [0], after=held)
    assert held.begun.wait(LONG_S)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            mover.close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not ticket.poll()
    threading.Timer(0.2, held.gate.set).start()
    mover.close()
    assert ticket.poll(), "close returned while the copy was still to be made"
    # A wrapping mover may have closed its wrapped mover already. Then the copy has failed.
    assert ticket.error is not None or (arena.slots[0] == 7).all()


@pytest.mark.parametrize("build", [host, verified, proving])
def test_mover_whose_close_is_interrupted_anywhere_ends_its_threads_when_it_goes(
    build: Callable[[BlockLayout, HostArena], Mover],
) -> None:
    layout, arena = memory()
    num_threads, line, is_cut_short = threading.active_count(), 0, True
    while is_cut_short:
        line += 1
        mover = build(layout, arena)
        is_cut_short = is_interrupted(mover.close, line, SOURCES, skipped=("with ",))
        del mover
        gc.collect()
        assert threading.active_count() == num_threads, f"line {line}"
    assert line > 5, "some lines were interrupted"


@pytest.mark.parametrize("build", [host, verified, proving])
def test_mover_whose_start_is_interrupted_leaves_no_thread(
    build: Callable[[BlockLayout, HostArena], Mover], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, arena = memory()
    num_threads, start = threading.active_count(), threading.Thread.start

    started: list[threading.Thread] = []
    last = 0

    def start_and_interrupt(thread: threading.Thread) -> None:
        start(thread)
        started.append(thread)
        if len(started) == last:
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start_and_interrupt)
    for last in range(1, 5):  # noqa: B007 - read above
        started.clear()
        try:
            build(layout, arena).close()
        except KeyboardInterrupt:
            pass
        else:
            break
        for thread in started:
            thread.join(LONG_S)
        assert threading.active_count() <= num_threads
    assert last > 1, "no thread was started"


def test_interrupted_map_begins_no_more_items_and_ends_those_under_way() -> None:
    begun, ended = [], []

    def call(item: int) -> None:
        begun.append(item)
        threading.Event().wait(0.3)
        ended.append(item)

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            map_on_threads(call, range(1000), 2, "kvstow-test")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert sorted(begun) == sorted(ended)
    assert len(begun) < 10


def test_map_interrupted_outside_its_wait_ends_the_items_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, ended, real, num_looks = threading.Event(), threading.Event(), _Work.is_over, 0

    def call(_: int) -> None:
        begun.set()
        threading.Event().wait(0.3)
        ended.set()

    def look(work: _Work[int, None]) -> bool:
        nonlocal num_looks
        num_looks += 1
        if num_looks == 2:
            begun.wait(LONG_S)
            raise KeyboardInterrupt
        return real(work)

    monkeypatch.setattr(_Work, "is_over", look)
    with pytest.raises(KeyboardInterrupt):
        map_on_threads(call, [0], 1, "kvstow-test")
    assert ended.is_set()


def test_map_raises_the_error_of_an_item_and_keeps_the_order_of_results() -> None:
    def invert(item: int) -> float:
        return 1 / item

    assert map_on_threads(invert, [4, 2, 1], 2, "kvstow-test") == [0.25, 0.5, 1]
    assert map_on_threads(invert, [], 2, "kvstow-test") == []
    with pytest.raises(ZeroDivisionError):
        map_on_threads(invert, [1, 0, 2], 2, "kvstow-test")
