"""An engine that two threads call at once, against its rule."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.engine.world import BLOCK, DOCUMENT, LOADS, RUNS, World, world

from kvstow import Engine, StateError, hash_tokens
from kvstow.transfer import READY, HostMover

CALLS: list[Callable[[Engine], object]] = [
    lambda engine: engine.poll(),
    lambda engine: engine.add("new", []),
    lambda engine: engine.finish("one"),
    lambda engine: engine.preempt("one"),
    lambda engine: engine.admit("waits", 1, 1, after=READY),
    lambda engine: engine.step(["one"], [1]),
    lambda engine: engine.close(),
]


class Meanwhile:
    """An event that calls something in another thread while the engine submits a copy."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call
        self.error: BaseException | None = None

    def wait(self) -> None:
        pass

    def add_done_callback(self, callback: Callable[[], None], /) -> None:
        with ThreadPoolExecutor(1) as other:
            self.error = other.submit(self.call).exception()
        callback()


@pytest.mark.parametrize("call", CALLS)
def test_a_call_during_one_of_another_thread_is_refused(call: Callable[[Engine], object]) -> None:
    with world(33, mover=HostMover) as it:
        it.engine.add("waits", [])
        meanwhile = Meanwhile(lambda: call(it.engine))
        assert it.admit("one", DOCUMENT).state is RUNS
        it.compute("one", DOCUMENT, after=meanwhile)
        assert isinstance(meanwhile.error, StateError)
        assert "another thread is inside a method of this Engine" in str(meanwhile.error)
        expect_sound(it)


def test_stats_may_be_read_during_a_call_of_another_thread() -> None:
    with world(33, mover=HostMover) as it:
        meanwhile = Meanwhile(it.engine.stats)
        it.admit("one", DOCUMENT)
        it.compute("one", DOCUMENT, after=meanwhile)
        assert meanwhile.error is None


def test_another_thread_goes_on_after_a_call_that_raised() -> None:
    class Broken(Meanwhile):
        def add_done_callback(self, _: Callable[[], None], /) -> None:
            raise RuntimeError("no such event")

    with world(33, mover=HostMover) as it:
        it.admit("one", DOCUMENT)
        with pytest.raises(RuntimeError, match="no such event"):
            it.compute("one", DOCUMENT, after=Broken(lambda: None))
        with ThreadPoolExecutor(1) as other:
            assert other.submit(it.engine.poll).result().num_failed_stores <= 1
        it.engine.check()


def expect_sound(it: World) -> None:
    """Expect that the call which was under way has stored its blocks."""
    while it.engine.transfers:
        it.engine.end(it.engine.transfers[0])
    it.engine.check()
    it.engine.finish("one")
    it.engine.ledger.pool.evict(list(range(1, 33)))
    it.kv[:] = 0
    it.engine.add("again", hash_tokens(DOCUMENT, BLOCK))
    found = it.engine.admit("again", len(DOCUMENT), 1000, after=READY)
    assert found.state is LOADS
    assert found.transfer is not None
    it.engine.end(found.transfer)
    assert it.cached("again", found.num_external_tokens) == DOCUMENT[: found.num_external_tokens]
