"""The probes of cupy and of each GPU: what it is, what its link carries, what can be pinned."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any, get_args

from kvstow._core import ConfigError
from kvstow.doctor.findings import Finding, survived
from kvstow.transfer.arena import HostArena
from kvstow.transfer.cuda.interface import CudaError, Runtime
from kvstow.transfer.cuda.link_speed import link_speed
from kvstow.transfer.cuda.pinning import memory_node, nearest_cpus, pin
from kvstow.transfer.cuda.runtime import cuda_runtime, import_cupy
from kvstow.transfer.mover import Direction

__all__ = ["cupy_findings", "link_findings"]

FRAGMENTS_KIB = (4, 8, 16, 32, 64, 128, 256)
_PINNED_BYTES = 64 << 20


def cupy_findings(driver_cuda: int | None, num_devices: int, *, anew: bool) -> Iterator[Finding]:
    """Whether cupy is there and for which CUDA; then all that can be asked of each GPU."""
    major = 13 if driver_cuda is None else driver_cuda // 1000
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        if error.name not in {"cupy", None}:
            raise
        yield Finding(
            "cupy",
            "broken" if num_devices else "missing",
            "not installed" + (": the GPU cannot be used" if num_devices else ""),
            f"pip install 'kvstow[cuda{min(major, 13)}]'",
        )
        return
    api = cupy.cuda.runtime
    built_for = int(api.runtimeGetVersion())
    figures = {"version": cupy.__version__, "cuda": built_for, "driver_cuda": driver_cuda}
    says = f"{cupy.__version__}, for CUDA {built_for // 1000}"
    try:
        import_cupy()
    except ConfigError as error:
        if num_devices:
            yield Finding("cupy", "broken", f"{says}: {error}", figures=figures)
        else:
            yield Finding("cupy", "ok", f"{says}; there is no GPU for it", figures=figures)
        return
    yield Finding("cupy", "ok", says, figures=figures)
    for device in range(int(api.getDeviceCount())):
        yield from survived(f"GPU {device}", lambda device=device: _gpu(cupy, device, anew=anew))  # type: ignore[misc]


def _gpu(cupy: Any, device: int, *, anew: bool) -> Iterator[Finding]:
    name = bytes(cupy.cuda.runtime.getDeviceProperties(device)["name"]).decode()
    with cupy.cuda.Device(device):
        free, total = cupy.cuda.runtime.memGetInfo()
    says = f"{name}, {total / 2**30:.1f} GiB, of which {free / 2**30:.1f} free"
    figures = {"name": name, "total_bytes": int(total), "free_bytes": int(free)}
    try:
        runtime = cuda_runtime(device)
    except (ConfigError, CudaError) as error:
        yield Finding(f"GPU {device}", "broken", f"{says}: {error}", figures=figures)
        return
    yield Finding(f"GPU {device}", "ok", f"{says}, at {runtime.pci_bus_id}", figures=figures)
    yield from link_findings(runtime, anew=anew)


def link_findings(runtime: Runtime, *, anew: bool) -> Iterator[Finding]:
    """What lies between a GPU and host memory."""
    gpu = f"GPU {runtime.device}"
    probes = {
        f"{gpu} memory node": _memory_node,
        f"{gpu} pinning": _pinning,
        f"{gpu} link": lambda name, runtime: _link(name, runtime, anew=anew),
    }
    for name, probe in probes.items():
        yield from survived(name, lambda name=name, probe=probe: probe(name, runtime))  # type: ignore[misc]


def _memory_node(name: str, runtime: Runtime) -> Iterator[Finding]:
    node, cpus = memory_node(runtime.pci_bus_id), nearest_cpus(runtime.pci_bus_id)
    figures = {"node": node, "num_near_cpus": len(cpus)}
    says = f"{node}" if node is not None else "nothing tells which"
    yield Finding(name, "ok", f"{says}; {len(cpus)} near CPUs of this process", figures=figures)


def _pinning(name: str, runtime: Runtime) -> Iterator[Finding]:
    with HostArena(_PINNED_BYTES >> 20, 1 << 20) as arena:
        try:
            arena.on_close(pin(arena, runtime))
        except CudaError as error:
            yield Finding(
                name,
                "broken",
                f"{_PINNED_BYTES >> 20} MiB could not be pinned: {error}",
                "ulimit -l unlimited; of a container: docker run --ulimit memlock=-1",
                {"is_pinned": False},
            )
            return
    says = f"{_PINNED_BYTES >> 20} MiB were pinned"
    yield Finding(name, "ok", says, figures={"is_pinned": True})


def _link(name: str, runtime: Runtime, *, anew: bool) -> Iterator[Finding]:
    speed = link_speed(runtime, anew=anew)
    yield Finding(
        name,
        "ok",
        f"store {speed.store_bytes_per_s / 1e9:.1f} GB/s, load "
        f"{speed.load_bytes_per_s / 1e9:.1f} GB/s, {speed.copy_seconds * 1e6:.1f} us per copy "
        f"call, gather {speed.gather_bytes_per_s / 1e9:.0f} GB/s",
        figures={
            "store_bytes_per_s": speed.store_bytes_per_s,
            "load_bytes_per_s": speed.load_bytes_per_s,
            "copy_seconds": speed.copy_seconds,
            "gather_bytes_per_s": speed.gather_bytes_per_s,
        },
    )
    for direction in get_args(Direction):
        path = {kib: speed.path(direction, kib << 10) for kib in FRAGMENTS_KIB}
        from_bytes = speed.direct_from_bytes(direction)
        by_size = ", ".join(f"{kib} KiB {way}" for kib, way in path.items())
        yield Finding(
            f"{name}, {direction}s",
            "ok",
            f"fragments of {by_size}; direct from {from_bytes / 1024:.0f} KiB on",
            figures={
                "direct_from_bytes": from_bytes,
                "path": {str(kib << 10): way for kib, way in path.items()},
            },
        )
