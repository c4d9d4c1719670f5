"""A real device refuses bad calls, and works afterwards."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.gpu.memory import World, world

from kvstow import ConfigError, TransferError
from kvstow.transfer import READY, BlockLayout, CudaError, CudaLink, Region
from kvstow.transfer.cuda.link_speed import measure
from kvstow.transfer.cuda.pinning import pin
from kvstow.transfer.cuda.runtime import CudaRuntime, cuda_runtime


def _works(w: World) -> None:
    device = w.cache.bytes()
    w.mover.store([1, 2], [0, 1], after=READY).wait(60)
    assert np.array_equal(w.arena.slots[1], w.cache.slot(device, 2))


def test_too_much_device_memory_is_refused() -> None:
    with world() as w:
        for ask in (
            lambda: w.mover._runtime.allocate(1 << 50),
            lambda: w.mover._runtime.allocate_mapped(1 << 50),
            lambda: CudaLink(cuda_runtime(0), staging_bytes=1 << 48),
        ):
            with pytest.raises(CudaError) as raised:
                ask()
            assert not raised.value.is_fatal
        assert cuda_runtime(0).lost is None
        _works(w)


def test_memory_cannot_be_pinned_twice() -> None:
    with world() as w:
        with pytest.raises(CudaError, match="pinning") as raised:
            pin(w.arena, cuda_runtime(0))
        assert not raised.value.is_fatal
        _works(w)


def test_refused_copy_fails_only_its_job() -> None:
    with world(path="direct") as w:
        pitch = 1 << 40  # larger than a copy of rows allows
        region = Region(w.cache.memory.data_ptr(), pitch, 4096)
        w.mover._regions = [region]
        w.mover._offsets = [0]
        ticket = w.mover.store([1, 2], [0, 1], after=READY)
        with pytest.raises(TransferError, match="queueing a copy"):
            ticket.wait(60)
        assert cuda_runtime(0).lost is None
    with world() as w:
        _works(w)


def test_missing_device_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="device is 99"):
        CudaRuntime(99)


def test_unsuitable_tensors_are_refused() -> None:
    import torch  # noqa: PLC0415 - missing where these tests are only collected

    kv = torch.zeros(4, 8, 64, device="cuda:0")
    with pytest.raises(ConfigError, match="contiguous"):
        BlockLayout.from_tensors([kv.transpose(1, 2)[0]])
    with pytest.raises(ConfigError, match="several devices"):
        BlockLayout.from_tensors([kv[0], torch.zeros(8, 64)])
    with pytest.raises(ConfigError, match="share bytes"):
        BlockLayout.from_tensors([kv[0], kv[0]])
    assert BlockLayout.from_tensors(list(kv)).device == 0


def test_illegal_address_loses_the_device() -> None:
    program = Path(__file__).with_name("lose_device.py")
    command = [sys.executable, str(program)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "the loss was reported" in ended.stdout


def test_measured_speeds_are_plausible() -> None:
    speed = measure(cuda_runtime(0))
    assert 1e9 < speed.store_bytes_per_s < 1e12
    assert 1e9 < speed.load_bytes_per_s < 1e12
    assert 1e-7 < speed.copy_seconds < 1e-4
    assert speed.gather_bytes_per_s > speed.store_bytes_per_s
