"""The device, and the peak of its link."""

import platform
import re
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import kvstow
from kvstow import ConfigError
from kvstow.transfer.cuda.interface import Copies
from kvstow.transfer.cuda.pinning import nearest_cpus
from kvstow.transfer.cuda.runtime import CudaRuntime, cuda_runtime, import_cupy

PEAK_BYTES = 256 << 20


def no_device() -> str | None:
    """Return why this machine cannot measure; None if it can."""
    try:
        import_cupy()
        import torch  # noqa: PLC0415 - missing where there is nothing to measure
    except (ConfigError, ImportError) as error:
        return str(error)
    return None if torch.cuda.is_available() else f"torch {torch.__version__} reaches no GPU"


class Device:
    """GPU 0.

    Attributes:
        runtime: the runtime that the movers use.
        name: name of the model.
        slug: the name for a file.
    """

    def __init__(self) -> None:
        self.runtime: CudaRuntime = cuda_runtime(0)
        self.cupy = import_cupy()
        properties = self.cupy.cuda.runtime.getDeviceProperties(0)
        self.name = bytes(properties["name"]).decode()
        self.slug = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")

    def described(self) -> dict[str, Any]:
        """Return the part of a result that describes the machine."""
        import torch  # noqa: PLC0415

        api = self.cupy.cuda.runtime
        return {
            "device": self.name,
            "pci": self.runtime.pci_bus_id,
            "near_cpus": len(nearest_cpus(self.runtime.pci_bus_id)),
            "driver": _driver(),
            "driver_cuda": api.driverGetVersion(),
            "cupy_cuda": api.runtimeGetVersion(),
            "versions": {
                "kvstow": kvstow.__version__,
                "cupy": self.cupy.__version__,
                "torch": torch.__version__,
                "torch_cuda": torch.version.cuda,
                "numpy": np.__version__,
                "python": platform.python_version(),
                "kernel": platform.release(),
            },
        }

    def peak(self, num_turns: int) -> dict[str, float]:
        """Return GB/s of a long copy of pinned memory: each way alone, and both ways at once."""
        runtime = self.runtime
        host = [runtime.allocate_mapped(PEAK_BYTES) for _ in range(2)]
        device = [runtime.allocate(PEAK_BYTES) for _ in range(2)]
        streams = [runtime.stream() for _ in range(2)]
        events = [runtime.event() for _ in range(2)]

        def copy(i: int) -> None:
            ends = host[i].host.ctypes.data, device[i]
            to, origin = ends if i == 0 else reversed(ends)
            size = PEAK_BYTES
            runtime.copy(Copies([(to, origin, 1)], size, size, size, to_host=i == 0), streams[i])
            runtime.record(events[i], streams[i])

        def run(which: tuple[int, ...]) -> None:
            for i in which:
                copy(i)
            for i in which:
                runtime.synchronize(events[i])

        found = {}
        for name, which in {"store": (0,), "load": (1,), "both": (0, 1)}.items():
            num_bytes = len(which) * PEAK_BYTES
            found[f"{name}_gb_per_s"] = num_bytes / 1e9 / seconds(partial(run, which), num_turns)
        for memory in host:
            runtime.free_mapped(memory)
        for address in device:
            runtime.free(address)
        return found


def _driver() -> str | None:
    """Return the version of the driver's kernel module, which CUDA does not report."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)*\b", text)
    return found[0] if found else None


def seconds(work: Callable[[], object], num_turns: int) -> float:
    """Return the median time of some turns, after one that does not count."""
    work()
    found = []
    for _ in range(num_turns):
        begin_s = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin_s)
    return statistics.median(found)
