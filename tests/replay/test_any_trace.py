"""Any trace, with pools of any size, replays to its end without a corrupt or leaked block."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.replay.scenario import (
    BLOCK,
    FULL,
    MIXED,
    SMALL_MODELS,
    assert_ended_well,
    least_device_blocks,
    prepared,
    traces,
)

from kvstow.replay import Trace
from kvstow.replay.model import ReplayModel
from kvstow.transfer import Event, HostEvent, HostMover, Mover, Ticket
from kvstow.transfer.mover import Ints


@settings(max_examples=100)
@given(
    of=traces(),
    model=st.sampled_from(SMALL_MODELS),
    spare_blocks=st.sampled_from([0, 1, 3, 20]),
    host_blocks=st.sampled_from([1, 2, 5, 20, 500]),
    max_step_tokens=st.sampled_from([1, 7, BLOCK, 100, 8192]),
    max_requests=st.sampled_from([1, 2, 4, 256]),
    bandwidth=st.sampled_from([100.0, 1e4, 1e6, float("inf")]),
)
def test_any_trace_replays_to_its_end(
    of: Trace,
    model: ReplayModel,
    spare_blocks: int,
    host_blocks: int,
    max_step_tokens: int,
    max_requests: int,
    bandwidth: float,
) -> None:
    needed = least_device_blocks(of, model, max_step_tokens=max_step_tokens)
    with prepared(
        of,
        model=model,
        device_blocks=needed + spare_blocks,
        host_blocks=host_blocks,
        max_step_tokens=max_step_tokens,
        max_requests=max_requests,
        bandwidth_bytes_per_s=bandwidth,
    ) as engine:
        engine.run()

        assert_ended_well(engine)
        lost = engine.kv.scheduler.stats()
        num_resident = engine.kv.scheduler.num_resident
        assert lost["stored_blocks"] - lost["evicted_blocks"] == num_resident


# -- the speed of the machine ------------------------------------------------------------------


class LateMover(HostMover):
    """Delays each transfer until the replay waits for it or for a later one."""

    def __init__(self, mover: Mover) -> None:
        super().__init__(mover.layout, mover.arena)
        mover.close()
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


@pytest.mark.parametrize("model", [FULL, MIXED], ids=lambda model: model.name)
@given(of=traces(), bandwidth=st.sampled_from([1e3, 1e5]))
@settings(max_examples=20)
def test_late_copies_do_not_change_the_figures(
    model: ReplayModel, of: Trace, bandwidth: float
) -> None:
    """A block is used only after its landing in virtual time, whatever the speed of the copy."""
    needed = least_device_blocks(of, model)
    outcomes = []
    for late in (False, True):
        with prepared(
            of,
            model=model,
            device_blocks=needed + 1,
            host_blocks=20,
            bandwidth_bytes_per_s=bandwidth,
        ) as engine:
            if late:
                engine.kv.movers[:] = map(LateMover, engine.kv.movers)
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
