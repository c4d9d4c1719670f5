"""A block whose load failed is recomputed, and a block whose store failed is never hit."""

from tests.replay.scenario import (
    BLOCK,
    FIRST,
    Watched,
    assert_ended_well,
    comes_back,
    prepared,
    pushed_out,
    request,
)

from kvstow.replay import ReplayEngine
from kvstow.transfer import Event, HostEvent, HostMover, Mover, Ticket
from kvstow.transfer.mover import Ints


class FailingMover(HostMover):
    """The real mover, of which the first transfers wait for an event that fails."""

    def __init__(self, mover: Mover, *, loads: int = 0, stores: int = 0) -> None:
        super().__init__(mover.layout, mover.arena)
        mover.close()
        self._bad_loads, self._bad_stores = loads, stores

    def load(self, host_slots: Ints, block_ids: Ints, *, after: Event) -> Ticket:
        self._bad_loads -= 1
        return super().load(
            host_slots, block_ids, after=_failed() if self._bad_loads >= 0 else after
        )

    def store(self, block_ids: Ints, host_slots: Ints, *, after: Event) -> Ticket:
        self._bad_stores -= 1
        return super().store(
            block_ids, host_slots, after=_failed() if self._bad_stores >= 0 else after
        )


def fail(engine: ReplayEngine, group: int = 0, *, loads: int = 0, stores: int = 0) -> None:
    """Let the first copies of a group fail."""
    movers = engine.kv.movers
    movers[group] = FailingMover(movers[group], loads=loads, stores=stores)


def _failed() -> Event:
    event = HostEvent()
    event.set(RuntimeError("the link is down"))
    return event


def test_a_failed_load_is_recomputed() -> None:
    watched = Watched()
    of = pushed_out(8, comes_back(3, at_s=200))
    with prepared(of, device_blocks=9, observer=watched) as engine:
        fail(engine, loads=1)
        engine.run()

        assert_ended_well(engine)
        assert watched.found["3"] == [(0, 4 * BLOCK), (0, 0)]
        assert engine.figures.failed_loads == 1
        assert (engine.figures.host_hits, engine.figures.loaded_blocks) == (0, 0)
        assert engine.figures.recomputed_blocks == 4 + 7 + 5


def test_the_next_request_tries_a_failed_load_again() -> None:
    of = pushed_out(
        8, comes_back(3, at_s=200), request(4, range(51, 58), at_s=300), comes_back(5, at_s=400)
    )
    watched = Watched()
    with prepared(of, device_blocks=9, observer=watched) as engine:
        fail(engine, loads=1)
        engine.run()

        assert_ended_well(engine)
        assert watched.found["3"] == [(0, 4 * BLOCK), (0, 0)]
        assert watched.found["5"] == [(0, 4 * BLOCK)]
        assert (engine.figures.failed_loads, engine.figures.host_hits) == (1, 4)


def test_a_resumed_request_asks_the_host_again_after_a_failed_load() -> None:
    of = pushed_out(
        12,
        request(3, [31], output=8 * BLOCK, at_s=200),
        request(4, [*FIRST, 94], output=7 * BLOCK, at_s=200),
    )
    watched = Watched()
    with prepared(of, device_blocks=13, observer=watched) as engine:
        fail(engine, loads=1)
        engine.run()

        assert_ended_well(engine)
        assert engine.figures.preemptions == 1
        assert watched.found["4"][:2] == [(0, 4 * BLOCK), (0, 0)]
        device_tokens, host_tokens = watched.found["4"][-1]
        assert host_tokens > 0
        assert device_tokens + host_tokens >= 5 * BLOCK


def test_a_failed_store_is_no_hit() -> None:
    with prepared(pushed_out(8, comes_back(3, at_s=200)), device_blocks=9) as engine:
        fail(engine, stores=1)
        engine.run()

        assert_ended_well(engine)
        assert engine.figures.failed_stores == 1
        assert engine.figures.host_hits == 0
        assert engine.figures.stored_blocks == 7 + 5
