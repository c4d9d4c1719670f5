"""The replay with the CUDA mover, on a simulated GPU that runs its work in odd orders."""

import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from tests.transfer.cuda.simulated_gpu import FakeStream, SimulatedGpu

from kvstow import ConfigError
from kvstow.cli import main
from kvstow.replay import BUNDLED_TRACE
from kvstow.replay.config import ReplayConfig
from kvstow.replay.device import Array, HostDevice
from kvstow.replay.engine import ReplayEngine
from kvstow.replay.stopwatch import Stopwatch, UntimedCudaMover
from kvstow.replay.trace import read_trace
from kvstow.transfer import BlockLayout, CudaEvent, Event, HostArena, Mover
from kvstow.transfer.cuda.link_speed import LinkSpeed

NUM_REQUESTS = 200  # enough for prefixes to come back from the host


class SimulatedDevice(HostDevice):
    """Memory of this machine that counts as a GPU's."""

    def __init__(self, runtime: SimulatedGpu) -> None:
        self.runtime = runtime
        self.compute: FakeStream = runtime.stream()

    def layout(self, regions: Sequence[Array]) -> BlockLayout:
        layout = BlockLayout.from_arrays(regions)
        return BlockLayout(layout.num_blocks, layout.regions, layout.owners, device=0)

    def computed(self) -> Event:
        return CudaEvent(self.runtime, self.runtime.record_external(self.compute))

    def mover(self, layout: BlockLayout, arena: HostArena, watch: Stopwatch) -> Mover:
        return UntimedCudaMover(layout, arena, watch)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    order = random.Random(1)

    def play(able: list[int | None]) -> int | None:
        # The host runs often, so that copies pile up before the device runs them.
        streams = [name for name in able if name is not None]
        return None if len(able) > len(streams) and order.random() < 0.3 else order.choice(streams)

    runtime = SimulatedGpu(play)
    device = SimulatedDevice(runtime)
    speed = LinkSpeed(50e9, 50e9, 2e-6, 400e9, 5e-7)  # fragments are packed below 100 KB
    monkeypatch.setattr("kvstow.transfer.cuda.mover.link_speed", lambda _: speed)
    monkeypatch.setattr("kvstow.transfer.cuda.runtime._runtimes", {0: runtime})
    monkeypatch.setattr("kvstow.replay.state.device_for", lambda _: device)
    return device


@pytest.mark.parametrize(("model", "device_blocks"), [("full", 300), ("gpt-oss", 600)])
def test_no_block_is_corrupt(device: SimulatedDevice, model: str, device_blocks: int) -> None:
    trace = read_trace(BUNDLED_TRACE, limit=NUM_REQUESTS)
    config = ReplayConfig(device_blocks=device_blocks, host_blocks=6000, mover="cuda", model=model)
    engine = ReplayEngine(trace, config)
    engine.run()
    assert engine.figures.finished_requests == NUM_REQUESTS
    assert engine.verifier.num_verified > 1000
    assert engine.verifier.num_corrupt == 0
    assert engine.kv.stats()["loaded_bytes"] > 0
    assert any(isinstance(memory, int) for memory in device.runtime.allocated.values()), "pinned"
    engine.close()
    assert not device.runtime.allocated


def test_blocks_come_back_after_sleep(device: SimulatedDevice) -> None:
    config = ReplayConfig(
        device_blocks=300, host_blocks=6000, mover="cuda", sleep_at=(40, 200, 400)
    )
    engine = ReplayEngine(read_trace(BUNDLED_TRACE, limit=60), config)
    engine.run()
    assert engine.figures.finished_requests == 60
    assert engine.figures.sleeps == 3
    assert engine.verifier.num_corrupt == 0
    engine.close()
    assert not device.runtime.allocated


def test_blocks_are_corrupt_if_jobs_end_before_their_events(device: SimulatedDevice) -> None:
    device.runtime.blind = True
    # A slow device, which runs nothing while the host goes on.
    device.runtime._choose = lambda able: None if None in able else able[0]
    engine = ReplayEngine(
        read_trace(BUNDLED_TRACE, limit=NUM_REQUESTS),
        ReplayConfig(device_blocks=300, host_blocks=6000, mover="cuda"),
    )
    engine.run()
    assert engine.verifier.num_corrupt > 0
    device.runtime.run_all()
    engine.close()


def test_the_cuda_mover_without_a_gpu_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    assert main(["replay", "--mover", "cuda", "--limit", "5"]) == 2
    assert "pip install 'kvstow[cuda13]'" in capsys.readouterr().err
    assert main(["replay", "--mover", "auto", "--limit", "5"]) == 0


def test_faults_with_the_cuda_mover_are_refused() -> None:
    with pytest.raises(ConfigError, match="leave out --mover cuda"):
        ReplayConfig(device_blocks=300, host_blocks=6000, mover="cuda", faults=1)


def test_the_memory_uses_the_device_for_each_read_and_write() -> None:
    """Arrays of another library need indices and values converted, and results fetched."""
    calls = []

    class Counting(HostDevice):
        def put(self, array: npt.NDArray[np.generic]) -> Array:
            calls.append("put")
            return super().put(array)

        def get(self, array: Array) -> npt.NDArray[np.generic]:
            calls.append("get")
            return super().get(array)

    from kvstow.replay.content import Geometry, device_memory  # noqa: PLC0415

    [memory] = device_memory(4, [Geometry(4, 1, 16)], device=Counting())
    keys = np.arange(1, 3, dtype=np.uint64)
    memory.write_range(np.array([1, 2]), keys, 0, 8)
    assert not memory.wrong_blocks(np.array([1, 2]), keys).any()
    assert not memory.wrong_part(2, keys[1], 3)
    assert calls.count("put") == 3
    assert calls.count("get") == 2
