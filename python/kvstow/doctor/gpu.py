"""The checks of cupy and of each GPU: its memory, the speed of its link, and pinning."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any, get_args

from kvstow._core import ConfigError
from kvstow.doctor.findings import Finding, run_check
from kvstow.transfer.arena import HostArena
from kvstow.transfer.cuda.interface import CudaError, Runtime
from kvstow.transfer.cuda.link_speed import link_speed
from kvstow.transfer.cuda.pinning import memory_node, nearest_cpus, pin
from kvstow.transfer.cuda.runtime import cuda_runtime, import_cupy
from kvstow.transfer.mover import Direction

_FRAGMENTS_KIB = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_PINNED_BYTES = 64 << 20
RAISE_LIMIT = "raise the limit: ulimit -l unlimited (container: docker run --ulimit memlock=-1)"


def cupy_findings(driver_cuda: int | None, num_devices: int, *, anew: bool) -> Iterator[Finding]:
    """Check cupy and its version of CUDA, and then each GPU."""
    major = 13 if driver_cuda is None else driver_cuda // 1000
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        if error.name not in {"cupy", None}:
            raise
        yield Finding(
            "cupy",
            "broken" if num_devices else "missing",
            "cupy is not installed, so kvstow cannot use the GPU."
            if num_devices
            else "cupy is not installed. kvstow needs it only for a GPU.",
            f"pip install 'kvstow[cuda{min(major, 13)}]'",
        )
        return
    except OSError as error:
        says = f"cupy does not load ({error}), because it needs a folder for compiled kernels."
        advice = "set CUPY_CACHE_DIR to a folder that this user may create or write"
        yield Finding("cupy", "broken" if num_devices else "missing", says, advice)
        return
    api = cupy.cuda.runtime
    built_for = int(api.runtimeGetVersion())
    figures = {"version": cupy.__version__, "cuda": built_for, "driver_cuda": driver_cuda}
    says = f"Version {cupy.__version__}, built for CUDA {built_for // 1000}."
    try:
        import_cupy()
    except ConfigError as error:
        if num_devices:
            yield Finding("cupy", "broken", f"{says} It does not work: {error}.", figures=figures)
        else:
            yield Finding("cupy", "ok", f"{says} There is no GPU to use it.", figures=figures)
        return
    yield Finding("cupy", "ok", says, figures=figures)
    for device in range(int(api.getDeviceCount())):
        yield from run_check(f"GPU {device}", lambda device=device: _gpu(cupy, device, anew=anew))  # type: ignore[misc]


def _gpu(cupy: Any, device: int, *, anew: bool) -> Iterator[Finding]:
    # This call makes no context. `cupy.cuda.Device` makes two: the device's, and device 0's.
    properties = cupy.cuda.runtime.getDeviceProperties(device)
    name, total = bytes(properties["name"]).decode(), int(properties["totalGlobalMem"])
    says = f"{name} with {total / 2**30:.1f} GiB"
    figures: dict[str, object] = {"name": name, "total_bytes": total}
    try:
        runtime = cuda_runtime(device)
        with runtime.current():
            free, _ = cupy.cuda.runtime.memGetInfo()
    except (ConfigError, CudaError) as error:
        yield Finding(
            f"GPU {device}", "broken", f"{says}. It does not work: {error}.", figures=figures
        )
        return
    figures["free_bytes"] = int(free)
    says += f", of which {free / 2**30:.1f} GiB are free, at PCI address {runtime.pci_bus_id}."
    yield Finding(f"GPU {device}", "ok", says, figures=figures)
    yield from link_findings(runtime, anew=anew)


def link_findings(runtime: Runtime, *, anew: bool) -> Iterator[Finding]:
    """Check the memory node of a GPU, pinning, and the speed of its link."""
    gpu = f"GPU {runtime.device}"
    checks = {
        f"{gpu} memory node": _memory_node,
        f"{gpu} pinning": _pinning,
        f"{gpu} link": lambda name, runtime: _link(name, runtime, anew=anew),
    }
    for name, check in checks.items():
        yield from run_check(name, lambda name=name, check=check: check(name, runtime))  # type: ignore[misc]


def _memory_node(name: str, runtime: Runtime) -> Iterator[Finding]:
    node, cpus = memory_node(runtime.pci_bus_id), nearest_cpus(runtime.pci_bus_id)
    figures = {"node": node, "num_near_cpus": len(cpus)}
    says = (
        f"The system does not report the GPU's memory node, so all {len(cpus)} CPUs count as near."
        if node is None
        else f"The GPU is on memory node {node}, near {len(cpus)} CPUs of this process."
    )
    yield Finding(name, "ok", says, figures=figures)


def _pinning(name: str, runtime: Runtime) -> Iterator[Finding]:
    with HostArena(_PINNED_BYTES >> 20, 1 << 20) as arena:
        try:
            arena.on_close(pin(arena, runtime))
        except CudaError as error:
            yield Finding(
                name,
                "broken",
                f"CUDA did not pin {_PINNED_BYTES >> 20} MiB of host memory ({error}), so copies "
                "would be slow and block the engine.",
                RAISE_LIMIT,
                {"is_pinned": False},
            )
            return
    says = f"CUDA pinned {_PINNED_BYTES >> 20} MiB of host memory."
    yield Finding(name, "ok", says, figures={"is_pinned": True})


def _link(name: str, runtime: Runtime, *, anew: bool) -> Iterator[Finding]:
    speed = link_speed(runtime, anew=anew)
    yield Finding(
        name,
        "ok",
        f"Stores reach {speed.store_bytes_per_s / 1e9:.1f} GB/s, loads "
        f"{speed.load_bytes_per_s / 1e9:.1f} GB/s, and the gather kernel "
        f"{speed.gather_bytes_per_s / 1e9:.0f} GB/s. Besides "
        f"its bytes a copy takes {speed.copy_seconds * 1e6:.1f} us, and of the host "
        f"{speed.submit_seconds * 1e6:.1f} us.",
        figures={
            "store_bytes_per_s": speed.store_bytes_per_s,
            "load_bytes_per_s": speed.load_bytes_per_s,
            "copy_seconds": speed.copy_seconds,
            "gather_bytes_per_s": speed.gather_bytes_per_s,
            "submit_seconds": speed.submit_seconds,
        },
    )
    for direction in get_args(Direction):
        path = {str(kib << 10): speed.path(direction, kib << 10) for kib in _FRAGMENTS_KIB}
        from_bytes = speed.direct_from_bytes(direction)
        yield Finding(
            f"{name}, {direction}s",
            "ok",
            f"kvstow copies fragments of {from_bytes / 1024:.0f} KiB and more directly, and packs "
            "smaller ones.",
            figures={"direct_from_bytes": from_bytes, "path": path},
        )
