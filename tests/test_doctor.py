import importlib
import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.transfer.cuda.fake_cupy import FakeCupy, remove_cupy
from tests.transfer.cuda.simulated_gpu import SimulatedGpu

from kvstow import cli
from kvstow.doctor import Finding, checks, diagnose, gpu
from kvstow.doctor.findings import run_check
from kvstow.transfer import CudaError
from kvstow.transfer.cuda.runtime import CudaRuntime

NO_DRIVER, ONE_GPU = checks.Driver(None), checks.Driver(13000, num_devices=1)


def machine(patch: pytest.MonkeyPatch, driver: checks.Driver) -> None:
    """Simulate a machine with this driver."""
    patch.setattr(checks.Driver, "found", lambda: driver)


def found(**options: bool) -> dict[str, Finding]:
    return {finding.name: finding for finding in diagnose(**options)}


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimulatedGpu:
    """A machine with a simulated GPU."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine(monkeypatch, ONE_GPU)
    FakeCupy().install(monkeypatch)
    simulated = SimulatedGpu(lambda able: able[0])
    monkeypatch.setattr(gpu, "cuda_runtime", lambda _: simulated)
    # torch does not see the simulated GPU, which would be another finding.
    monkeypatch.setitem(sys.modules, "torch", None)
    return simulated


def test_machine_without_a_gpu_is_ok(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine(monkeypatch, NO_DRIVER)
    remove_cupy(monkeypatch)

    assert cli.main(["doctor", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    status = {finding["name"]: finding["status"] for finding in content["findings"]}
    assert content["ok"]
    assert status["GPU"] == status["cupy"] == "missing"
    assert {"kvstow", "machine", "locked memory", "torch", "vLLM"} <= status.keys()


def test_table_prints_findings_and_fixes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine(monkeypatch, checks.Driver(12080, num_devices=1))
    remove_cupy(monkeypatch)
    monkeypatch.setenv("COLUMNS", "200")

    assert cli.main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "cupy is not installed, so kvstow cannot use the GPU." in printed
    assert "pip install 'kvstow[cuda12]'" in printed
    assert found()["cupy"].status == "broken"


def test_unknown_option_is_bad_usage() -> None:
    assert cli.main(["doctor", "--jsonn"]) == 2


@pytest.mark.parametrize(
    ("driver", "status", "says"),
    [
        (NO_DRIVER, "missing", "This machine has no CUDA driver"),
        (checks.Driver(13000, error=100), "missing", "but this process sees no GPU"),
        (checks.Driver(13000), "missing", "but this process sees no GPU"),
        (checks.Driver(13000, error=803), "broken", "does not start: CUDA error 803"),
        (ONE_GPU, "ok", "1 GPU. The driver supports CUDA 13.0."),
    ],
)
def test_driver_without_a_gpu_is_missing_and_with_an_error_broken(
    driver: checks.Driver, status: str, says: str
) -> None:
    (finding,) = driver.findings()
    assert finding.status == status
    assert says in finding.says


def test_cupy_for_a_newer_cuda_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, checks.Driver(12080, num_devices=1))
    FakeCupy(driver=12080, built_for=13020).install(monkeypatch)
    cupy = found()["cupy"]
    assert cupy.status == "broken"
    assert "pip install 'kvstow[cuda12]'" in cupy.says
    assert cupy.figures["cuda"] == 13020


def test_cupy_without_a_gpu_is_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, NO_DRIVER)
    FakeCupy(driver=0).install(monkeypatch)
    assert found()["cupy"].status == "ok"


def test_gpu_without_a_compiler_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, ONE_GPU)
    FakeCupy(compile_error=RuntimeError("no libnvrtc.so")).install(monkeypatch)
    monkeypatch.setattr(gpu, "cuda_runtime", CudaRuntime)  # not the cached runtime
    device = found()["GPU 0"]
    assert device.status == "broken"
    assert "cupy-cuda13x[ctk]" in device.says
    assert device.figures["total_bytes"] == 4 << 30


def test_gpu_findings_hold_its_memory_link_and_paths(runtime: SimulatedGpu) -> None:
    findings = found()
    assert "Fake H1 with 4.0 GiB, of which 3.0 GiB are free" in findings["GPU 0"].says
    assert findings["GPU 0 memory node"].figures["node"] is None
    assert findings["GPU 0 pinning"].figures == {"is_pinned": True}
    link = findings["GPU 0 link"].figures
    names = ("copy_seconds", "submit_seconds", "store_bytes_per_s", "load_bytes_per_s")
    copy_s, submit_s, store, load = (float(str(link[name])) for name in names)
    for direction, speed in (("store", store), ("load", load)):
        figures = findings[f"GPU 0 link, {direction}s"].figures
        bound = int(max(copy_s, 4 * submit_s) * speed)
        assert figures["direct_from_bytes"] == bound
        assert figures["path"] == {
            str(kib << 10): "direct" if kib << 10 >= bound else "packed"
            for kib in (4, 8, 16, 32, 64, 128, 256)
        }
    assert not runtime.allocated, "memory was not freed"


def test_link_is_measured_again_only_with_anew(runtime: SimulatedGpu) -> None:
    def link(**options: bool) -> object:
        return found(**options)["GPU 0 link"].figures

    first = link()
    assert link() == first
    assert link(anew=True) != first


def test_failed_pinning_is_broken(runtime: SimulatedGpu) -> None:
    runtime.fail["register"] = CudaError("out of memory", is_fatal=False)
    findings = found()
    assert findings["GPU 0 pinning"].status == "broken"
    assert "memlock" in findings["GPU 0 pinning"].advice
    assert findings["GPU 0 link"].status == "ok"


@pytest.mark.parametrize("error", [OSError("libcudart.so is gone"), SystemExit(3)])
def test_failed_check_is_a_finding_and_others_go_on(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    machine(monkeypatch, NO_DRIVER)
    real = importlib.import_module

    def break_torch(name: str) -> object:
        if name == "torch":
            raise error
        return real(name)

    monkeypatch.setattr(importlib, "import_module", break_torch)
    findings = found()
    assert findings["torch"].status == "broken"
    assert type(error).__name__ in findings["torch"].says
    assert findings["vLLM"].name == "vLLM", "the other checks go on"


def test_failed_check_keeps_its_earlier_findings() -> None:
    def check() -> Iterator[Finding]:
        yield Finding("first", "ok", "")
        raise ValueError("and no more")

    assert [finding.status for finding in run_check("second", check)] == ["ok", "broken"]


@pytest.mark.parametrize(
    ("version", "status"),
    [
        (None, "missing"),
        ("0.29.1", "broken"),
        ("0.30.0", "ok"),
        ("0.33.2+cu130", "ok"),
        ("0.34", "broken"),
        ("0.34.0rc1", "broken"),
    ],
)
def test_vllm_outside_the_supported_range_is_broken(
    monkeypatch: pytest.MonkeyPatch, version: str | None, status: str
) -> None:
    machine(monkeypatch, NO_DRIVER)
    monkeypatch.setattr(checks, "_installed", installed({"vllm": version}))
    vllm = found()["vLLM"]
    assert vllm.status == status
    assert vllm.figures["supported"] == ">=0.30,<0.34"


def test_missing_extra_has_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, NO_DRIVER)
    monkeypatch.setattr(checks, "_installed", installed({}))
    findings = found()
    assert findings["prometheus_client"].status == "missing"
    assert findings["prometheus_client"].advice == "pip install 'kvstow[metrics]'"


def installed(versions: dict[str, str | None]) -> Callable[[str], str | None]:
    return versions.get


def test_every_extra_exists_in_the_metadata() -> None:
    ours = importlib.metadata.metadata("kvstow").get_all("Provides-Extra") or []
    assert {extra for extra, _ in checks._EXTRAS.values()} <= set(ours)
