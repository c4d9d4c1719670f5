"""The replay with the CUDA mover, without a GPU. tests/transfer/cuda/simulated has the rest."""

import sys

import numpy as np
import numpy.typing as npt
import pytest

from kvstow import ConfigError
from kvstow.cli import main
from kvstow.replay.config import ReplayConfig
from kvstow.replay.content import Geometry, device_memory
from kvstow.replay.device import Array, HostDevice


def test_the_cuda_mover_without_a_gpu_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
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

    [memory] = device_memory(4, [Geometry(4, 1, 16)], device=Counting())
    keys = np.arange(1, 3, dtype=np.uint64)
    memory.write_range(np.array([1, 2]), keys, 0, 8)
    assert not memory.wrong_blocks(np.array([1, 2]), keys).any()
    assert not memory.wrong_part(2, keys[1], 3)
    assert calls.count("put") == 3
    assert calls.count("get") == 2
