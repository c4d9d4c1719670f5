"""The replay with the CUDA mover, whose blocks lie in the memory of the simulated GPU."""

from __future__ import annotations

import pytest
from tests.sampled import IS_FULL
from tests.transfer.cuda.simulation import library
from tests.transfer.cuda.simulation.replay import DEVICE, SimulatedDevice

from kvstow.replay import BUNDLED_TRACE
from kvstow.replay.config import ReplayConfig
from kvstow.replay.engine import ReplayEngine
from kvstow.replay.trace import read_trace


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    device = SimulatedDevice()
    monkeypatch.setattr("kvstow.replay.state.device_for", lambda _: device)
    return device


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    # Enough requests for prefixes to come back from the host.
    ("model", "device_blocks", "num_requests"),
    [("full", 300, 200), ("gpt-oss", 600, 200 if IS_FULL else 100)],
)
def test_no_block_is_corrupt(model: str, device_blocks: int, num_requests: int) -> None:
    trace = read_trace(BUNDLED_TRACE, limit=num_requests)
    config = ReplayConfig(device_blocks=device_blocks, host_blocks=6000, mover="cuda", model=model)
    engine = ReplayEngine(trace, config)
    engine.run()
    assert engine.figures.finished_requests == num_requests
    assert engine.verifier.num_verified > 1000
    assert engine.verifier.num_corrupt == 0
    assert engine.kv.stats()["loaded_bytes"] > 0
    engine.close()
    assert library.has_context(DEVICE)
    assert not library.has_context(1 - DEVICE)


@pytest.mark.usefixtures("device")
def test_blocks_come_back_after_sleep() -> None:
    config = ReplayConfig(
        device_blocks=300, host_blocks=6000, mover="cuda", sleep_at=(40, 200, 400)
    )
    engine = ReplayEngine(read_trace(BUNDLED_TRACE, limit=60), config)
    engine.run()
    assert engine.figures.finished_requests == 60
    assert engine.figures.sleeps == 3
    assert engine.verifier.num_corrupt == 0
    engine.close()


@pytest.mark.usefixtures("device")
def test_blocks_are_corrupt_if_jobs_end_before_their_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstow.transfer.cuda.runtime.CudaRuntime.is_done", lambda *_: True)
    library.by_hand()  # a slow device, which runs nothing while the host goes on
    engine = ReplayEngine(
        read_trace(BUNDLED_TRACE, limit=60),
        ReplayConfig(device_blocks=600, host_blocks=6000, mover="cuda", model="gpt-oss"),
    )
    engine.run()
    assert engine.verifier.num_corrupt > 0
    library.library().cudaDeviceSynchronize()
    engine.close()
    library.violations()
