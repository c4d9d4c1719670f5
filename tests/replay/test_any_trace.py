"""Whatever the trace and however tight the pools, a replay ends with nothing wrong or held."""

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.replay.scenario import BLOCK, assert_ended_well, prepared, traces

from kvstow.replay import ReplayEngine, Trace
from kvstow.transfer import Event, HostEvent, HostMover, Ticket
from kvstow.transfer.mover import Ints


@settings(max_examples=150)
@given(
    of=traces(),
    spare_blocks=st.sampled_from([0, 1, 3, 20]),
    host_blocks=st.sampled_from([1, 2, 5, 20, 500]),
    max_step_tokens=st.sampled_from([1, 7, BLOCK, 100, 8192]),
    max_requests=st.sampled_from([1, 2, 4, 256]),
    bandwidth=st.sampled_from([100.0, 1e4, 1e6, float("inf")]),
)
def test_any_trace_replays_to_its_end(
    of: Trace,
    spare_blocks: int,
    host_blocks: int,
    max_step_tokens: int,
    max_requests: int,
    bandwidth: float,
) -> None:
    needed = max(-(-request.total_tokens // BLOCK) for request in of.requests)
    with prepared(
        of,
        device_blocks=needed + 1 + spare_blocks,
        host_blocks=host_blocks,
        max_step_tokens=max_step_tokens,
        max_requests=max_requests,
        bandwidth_bytes_per_s=bandwidth,
    ) as engine:
        engine.run()

        assert_ended_well(engine)
        lost = engine.accounting.scheduler.stats()
        num_resident = engine.accounting.scheduler.num_resident
        assert lost["stored_blocks"] - lost["evicted_blocks"] == num_resident


# -- the machine does not matter ---------------------------------------------------------------


class LateMover(HostMover):
    """Holds every transfer back until somebody waits for it, or for a later one."""

    def __init__(self, engine: ReplayEngine) -> None:
        super().__init__(engine.mover.layout, engine.arena)
        engine.mover.close()
        self._held: list[HostEvent] = []

    def _hold(self) -> HostEvent:
        self._held.append(HostEvent())
        return self._held[-1]

    def release(self) -> None:
        held, self._held = self._held, []
        for event in held:
            event.set()

    def load(self, host_slots: Ints, block_ids: Ints, *, after: Event) -> Ticket:
        return _LateTicket(super().load(host_slots, block_ids, after=self._hold()), self.release)

    def store(self, block_ids: Ints, host_slots: Ints, *, after: Event) -> Ticket:
        return _LateTicket(super().store(block_ids, host_slots, after=self._hold()), self.release)


class _LateTicket(Ticket):
    def __init__(self, inner: Ticket, release: Callable[[], None]) -> None:
        self._inner, self._release = inner, release

    def poll(self) -> bool:
        return self._inner.poll()

    @property
    def error(self) -> None:
        return None

    def wait(self, timeout_s: float | None = None) -> None:
        self._release()
        self._inner.wait(timeout_s)


@given(of=traces(), bandwidth=st.sampled_from([1e3, 1e5]))
@settings(max_examples=30)
def test_copies_that_come_late_change_nothing(of: Trace, bandwidth: float) -> None:
    """Nothing is used before its landing in virtual time, however fast or slow the copy was."""
    needed = max(-(-request.total_tokens // BLOCK) for request in of.requests)
    outcomes = []
    for late in (False, True):
        with prepared(
            of, device_blocks=needed + 2, host_blocks=20, bandwidth_bytes_per_s=bandwidth
        ) as engine:
            if late:
                engine.mover = LateMover(engine)
            engine.run()
            assert_ended_well(engine)
            figures = engine.figures
            outcomes.append(
                [
                    getattr(figures, name)
                    for name in type(figures).__dataclass_fields__
                    if name not in {"seconds", "accounting_us"}
                ]
            )
    assert outcomes[0] == outcomes[1]
