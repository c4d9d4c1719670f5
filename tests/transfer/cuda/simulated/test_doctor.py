"""The checks of cupy and of each GPU in `kvstow doctor`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.transfer.cuda.simulated.test_runtime import break_compiler
from tests.transfer.cuda.simulation import library

from kvstow.doctor import Finding
from kvstow.doctor.gpu import cupy_findings
from kvstow.transfer.cuda import link_speed

OUT_OF_MEMORY = 2


def found(driver: int = 13000, num_devices: int = 2, *, anew: bool = False) -> dict[str, Finding]:
    findings = cupy_findings(driver, num_devices, anew=anew)
    return {finding.name: finding for finding in findings}


def test_cupy_for_a_newer_cuda_is_broken() -> None:
    library.machine(driver=12080, runtime=13020)
    cupy = found(12080)["cupy"]
    assert cupy.status == "broken"
    assert "pip install 'kvstow[cuda12]'" in cupy.says
    assert cupy.figures["cuda"] == 13020


def test_cupy_without_a_gpu_is_ok() -> None:
    library.machine(driver=0)
    assert found(0, 0)["cupy"].status == "ok"


def test_gpu_without_a_compiler_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    break_compiler(monkeypatch)
    device = found()["GPU 0"]
    assert device.status == "broken"
    assert "cupy-cuda13x[ctk]" in device.says
    assert device.figures["total_bytes"] == 8 << 30


def test_gpu_findings_hold_its_memory_link_and_paths() -> None:
    before = library.allocated_bytes()
    findings = found()
    for gpu in ("GPU 0", "GPU 1"):
        assert "Simulated GPU with 8.0 GiB, of which 8.0 GiB are free" in findings[gpu].says
    assert findings["GPU 0 memory node"].figures["node"] is None
    assert findings["GPU 0 pinning"].figures == {"is_pinned": True}
    link = findings["GPU 0 link"].figures
    names = ("copy_seconds", "submit_seconds", "store_bytes_per_s", "load_bytes_per_s")
    copy_s, submit_s, store, load = (float(str(link[name])) for name in names)
    for direction, speed in (("store", store), ("load", load)):
        figures = findings[f"GPU 0 link, {direction}s"].figures
        bound = int(max(copy_s * 0.92 / (1 - 0.92), 4 * submit_s) * speed)
        assert figures["direct_from_bytes"] == bound
        assert figures["path"] == {
            str(kib << 10): "direct" if kib << 10 >= bound else "packed"
            for kib in (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
        }
    assert library.allocated_bytes() == before, "memory was not freed"


def test_link_is_measured_again_only_with_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def speed(*, anew: bool = False) -> object:
        return found(anew=anew)["GPU 0 link"].figures["store_bytes_per_s"]

    first, measure = speed(), link_speed.measure
    monkeypatch.setattr(
        link_speed, "measure", lambda gpu: replace(measure(gpu), store_bytes_per_s=1e10)
    )
    assert speed() == first
    assert speed(anew=True) == 1e10


def test_failed_pinning_is_broken() -> None:
    library.fail("cudaHostRegister", OUT_OF_MEMORY)
    findings = found()
    assert findings["GPU 0 pinning"].status == "broken"
    assert "memlock" in findings["GPU 0 pinning"].advice
    assert findings["GPU 0 link"].status == "ok"
