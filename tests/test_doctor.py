"""The checks of `kvstow doctor` that need no GPU. tests/transfer/cuda/simulated has the others."""

import importlib
import importlib.metadata
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kvstow import cli
from kvstow.doctor import Finding, checks, diagnose
from kvstow.doctor.findings import run_check
from kvstow.doctor.flag import flag_findings, vllm_keys

NO_DRIVER, ONE_GPU = checks.Driver(None), checks.Driver(13000, num_devices=1)


def machine(patch: pytest.MonkeyPatch, driver: checks.Driver) -> None:
    """Simulate a machine with this driver."""
    patch.setattr(checks.Driver, "found", lambda: driver)


def found(**options: Any) -> dict[str, Finding]:
    return {finding.name: finding for finding in diagnose(**options)}


class _NoCupy:
    """Finds no cupy, as if it were not installed."""

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        if name.partition(".")[0] == "cupy":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def remove_cupy(patch: pytest.MonkeyPatch) -> None:
    """Make `import cupy` fail.

    A None in `sys.modules` would do that, too. But other packages take any entry for a sign that
    cupy is loaded. torch comes first, because it looks into every loaded module while it loads. One
    of those can be a part of cupy that loads itself at the first look, and half a torch would stay.
    """
    with suppress(ImportError):
        importlib.import_module("torch")
    patch.delitem(sys.modules, "cupy", raising=False)
    patch.setattr(sys, "meta_path", [_NoCupy, *sys.meta_path])


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
    monkeypatch.delenv("COLUMNS", raising=False)

    assert cli.main(["doctor"]) == 1
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert all(line == line.rstrip() for line in lines)
    advice = [finding.advice for finding in found().values() if len(finding.advice) > 52]
    assert advice, "a line of 80 columns has room for all"
    for one in advice:  # nothing cuts a command in two for grep
        assert any(one in line for line in lines), one
    assert "cupy is not installed, so kvstow cannot use the GPU." in printed
    assert "pip install 'kvstow[cuda12]'" in printed
    assert found()["cupy"].status == "broken"
    monkeypatch.setenv("COLUMNS", "20")
    flag = json.dumps(FLAG | {"kv_connector_extra_config": {"cpu_bytes_to_use_per_rank": 0}})
    cli.main(["doctor", "--kv-transfer-config", flag])
    printed = capsys.readouterr().out
    assert "broken" in printed
    assert "kv_connector_extra_config.cpu_bytes_to_use_per_rankis0" in "".join(printed.split())


@pytest.mark.parametrize(
    ("setting", "status"),
    [
        ("always [madvise] never\n", "ok"),
        ("[always] madvise never\n", "ok"),
        ("always madvise [never]\n", "missing"),
        (None, "missing"),
    ],
)
def test_system_without_large_pages_gets_advice(
    setting: str | None, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, NO_DRIVER)
    remove_cupy(monkeypatch)
    file = tmp_path / "enabled"
    if setting is not None:
        file.write_text(setting)
    monkeypatch.setattr(checks, "_LARGE_PAGES", file)
    finding = found()["large pages"]
    assert finding.status == status
    assert finding.advice == ("" if status == "ok" else f"as root: echo madvise > {file}")


FLAG = {
    "kv_connector": "KVStowConnector",
    "kv_connector_module_path": "kvstow.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"cpu_bytes_to_use": "24GiB"},
}
OTHER = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}
DISK = {
    "type": "KVStowDisk",
    "module_path": "kvstow.vllm.secondary_tier",
    "path": "/mnt/slots",
    "max_bytes": "1MiB",
    "backpressure": {},
}
TIB = 1 << 40
MULTI = FLAG | {"kv_connector": "MultiConnector", "kv_connector_module_path": None}


def with_disk(spec: str | None = "TieringOffloadingSpec", **changed: object) -> dict[str, object]:
    """Return a flag of vLLM's own connector with a disk of kvstow below it."""
    extra: dict[str, object] = {"secondary_tiers": [{"type": "fs"}, DISK | changed]}
    if spec is not None:
        extra["spec_name"] = spec
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


@pytest.fixture(autouse=True)
def _has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstow.doctor.flag.free_memory", lambda: TIB)


@pytest.mark.parametrize(
    ("flag", "problems"),
    [
        (FLAG, []),
        (MULTI | {"kv_connector_extra_config": {"connectors": [FLAG, OTHER]}}, []),
        (
            MULTI
            | {"kv_connector_extra_config": {"connectors": [OTHER, FLAG | {"kv_role": None}, 5]}},
            [
                "kv_role of connectors[1] is None, and vLLM refuses it.",
                "kv_connector of connectors[2] is None, and vLLM refuses it.",
                "kv_role of connectors[2] is None, and vLLM refuses it.",
            ],
        ),
        (
            MULTI | {"kv_connector_extra_config": {"connectors": [FLAG, FLAG]}},
            ["It names KVStowConnector 2 times."],
        ),
        ([FLAG], ["It names KVStowConnector 0 times."]),
        (MULTI | {"kv_connector_extra_config": None}, ["It names KVStowConnector 0 times."]),
        (
            FLAG | {"kv_role": "kv_producer", "kv_load_failure_policy": "fail"},
            ["kv_role is 'kv_producer', and", "A request whose load fails will end with an error"],
        ),
        (FLAG | {"kv_connector_module_path": "kvstow"}, ["kv_connector_module_path is 'kvstow'"]),
        (
            FLAG | {"kv_connector_extra_config": {"cpu_byte_to_use": 1}},
            [
                "kv_connector_extra_config has no option 'cpu_byte_to_use': did you mean "
                "'cpu_bytes_to_use'?"
            ],
        ),
        (
            FLAG | {"kv_connector_extra_config": {"shared": "redis://user:a: b@x"}},
            ["kv_connector_extra_config.shared: the URL of the shared tier contains credentials"],
        ),
        (FLAG | {"kv_connector_extra_config": 24}, ["kv_connector_extra_config is 24, and vLLM"]),
        (
            FLAG | {"kv_connector_extra_config": {"cpu_bytes_to_use": TIB + 1}},
            ["cpu_bytes_to_use is 1,024.00 GiB, and 1,024.00 GiB of memory are free here, so"],
        ),
        (
            FLAG | {"kv_connector_extra_config": {"cpu_bytes_to_use": 32}},
            ["cpu_bytes_to_use is 32 bytes, and a block takes 4,096 or more."],
        ),
        (
            FLAG | {"kv_connector_extra_config": {"disk_path": "/no", "disk_bytes_to_use": 9999}},
            ["disk_path is '/no', and this user finds no such folder here, so a server that runs"],
        ),
        (
            FLAG | {"kv_connector_extra_config": {"disk_path": "/", "disk_bytes_to_use": 1 << 62}},
            ["disk_bytes_to_use is 4,294,967,296.00 GiB, and the file system of / has "],
        ),
        (
            FLAG
            | {
                "kv_connector_extra_config": {
                    "preserve_on_sleep": True,
                    "weights_version_path": "/no/version",
                }
            },
            ["weights_version_path is '/no/version', and this user finds no such file here, so a"],
        ),
        (
            FLAG | {"kv_connector_extra_config": {"cpu_bytes_to_use_per_rank": "2TiB"}},
            ["cpu_bytes_to_use_per_rank is 2,048.00 GiB, and 1,024.00 GiB of memory are free"],
        ),
        (FLAG | {"kv_connector_extra_config": {"cpu_bytes_to_use": TIB}}, []),
        (FLAG | {"kv_connector_extra_config": {"cpu_bytes_to_use": "2TiB", "observe": True}}, []),
        (FLAG | {"kv_connector_extra_config": {"num_cpu_blocks": 1 << 20}}, []),
        (
            FLAG | {"kv_connector_extra_config": {"num_cpu_blocks": 1 << 31}},
            ["kv_connector_extra_config.num_cpu_blocks is 2147483648, and it must be a whole num"],
        ),
        (
            FLAG | {"cpu_bytes_to_use": 1},
            ["cpu_bytes_to_use is an option of kvstow, and it is outside of kv_connector_extra"],
        ),
        (
            MULTI
            | {"disk_path": "/x"}
            | {"kv_connector_extra_config": {"connectors": [FLAG | {"shared": "redis://x"}]}},
            ["disk_path is an option of kvstow", "shared is an option of kvstow"],
        ),
        (FLAG | {"kv_load_failure_policy": "recomputed"}, ["kv_load_failure_policy is 'recomp"]),
        (with_disk(), []),
        (MULTI | {"kv_connector_extra_config": {"connectors": [FLAG, with_disk()]}}, []),
        (with_disk(type="fs"), ["It names KVStowConnector 0 times."]),
        (
            MULTI | {"kv_connector_extra_config": {"connectors": [FLAG, with_disk(path=None)]}},
            ["the secondary tier KVStowDisk has no path; add it beside its type."],
        ),
        (
            with_disk(module_path=None, max_bytes="x"),
            ["module_path of secondary_tiers[1] is None, and", "max_bytes is 'x', which is no"],
        ),
        (
            with_disk(weights_version_paht="/x", size=1),
            [
                "secondary_tiers[1] ignores 'weights_version_paht'.",
                "secondary_tiers[1] ignores 'size'.",
            ],
        ),
        (
            with_disk(path="/no/slots"),
            ["the folder of path of secondary_tiers[1] is '/no', and this user finds no such"],
        ),
        (
            with_disk(max_bytes=1 << 62),
            ["max_bytes of secondary_tiers[1] is 4,294,967,296.00 GiB, and the file system of"],
        ),
        (with_disk(on_mismatch=["reset"]), ["on_mismatch is ['reset']; pass 'refuse', or"]),
        (with_disk(None), ["spec_name is None, and vLLM has secondary tiers with Tiering"]),
        (
            MULTI | {"kv_connector_extra_config": {"connectors": [with_disk("CPUOffloadingSpec")]}},
            ["spec_name of connectors[0] is 'CPUOffloadingSpec', and"],
        ),
    ],
)
def test_flag_is_checked_before_a_server_starts(flag: object, problems: list[str]) -> None:
    findings = list(flag_findings(json.dumps(flag)))
    if not problems:
        assert [finding.status for finding in findings] == ["ok"]
        return
    for finding, problem in zip(findings, problems, strict=True):
        assert finding.says.startswith(problem)
        assert "?." not in finding.says
        assert finding.advice
        assert finding.status != "ok"


@pytest.mark.parametrize("kind", ["tmpfs", "ceph"])
def test_folder_that_no_slot_file_may_lie_in_is_found(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("kvstow.doctor.flag.Files.file_system", lambda *_: kind)
    own = FLAG | {"kv_connector_extra_config": {"disk_path": "/", "disk_bytes_to_use": 9999}}
    for flag in (own, with_disk()):
        (finding,) = flag_findings(json.dumps(flag))
        assert f"is on {kind}, w" in finding.says
        assert finding.status == "missing"
        assert finding.advice.startswith("pass a path on a ")


def test_values_that_vllm_refuses_are_broken() -> None:
    kv_transfer = pytest.importorskip("vllm.config.kv_transfer")
    texts = [None, "", "1", "x", "kv_both", "kv_producer", "kv_any", "fail", "recompute", "fails"]
    values = [*texts, True, 0, 5, 5.0, 5.5, -1, 1e400, [], ["x"], {}, {"observe": True}]
    num_refused = 0
    for key in vllm_keys():
        for value in values:
            part = OTHER | {key: value}
            try:
                kv_transfer.KVTransferConfig(**part)
                is_refused = part["kv_connector"] is None
            except ValueError:
                is_refused = True
            num_refused += is_refused
            flag = MULTI | {"kv_connector_extra_config": {"connectors": [FLAG, part]}}
            broken = [one for one in flag_findings(json.dumps(flag)) if one.status == "broken"]
            assert bool(broken) == is_refused, (key, value, broken)
    assert num_refused > 50


def test_flag_that_lacks_a_role_is_broken() -> None:
    (finding,) = flag_findings(json.dumps({k: v for k, v in FLAG.items() if k != "kv_role"}))
    assert finding.says == "kv_role is None, and vLLM refuses it."


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("kv_connector_module", "did you mean 'kv_connector_module_path'?"),
        ("size", "use one of kv_connector, "),
    ],
)
def test_flag_with_a_key_that_vllm_lacks_is_broken(key: str, advice: str) -> None:
    pytest.importorskip("vllm.config.kv_transfer")
    (finding,) = flag_findings(json.dumps(FLAG | {key: "kvstow.vllm"}))
    assert finding.says == f"vLLM has no key {key!r} in this flag."
    assert finding.advice.startswith(advice)


def test_keys_of_the_flag_are_those_of_the_installed_vllm() -> None:
    kv_transfer = pytest.importorskip("vllm.config.kv_transfer")
    assert vllm_keys() == [field.name for field in fields(kv_transfer.KVTransferConfig)]


def test_flag_is_checked_without_a_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstow.doctor.flag.find_spec", lambda _: None)
    (finding,) = flag_findings(json.dumps(FLAG | {"unknown": 1}))
    assert finding.status == "ok"


@pytest.mark.parametrize(
    ("text", "why"),
    [("{kv_role: kv_both}", "Expecting property name"), ("[" * 100_000, "maximum recursion")],
)
def test_flag_that_is_no_json_is_broken(
    capsys: pytest.CaptureFixture[str], text: str, why: str
) -> None:
    assert cli.main(["doctor", "--json", "--kv-transfer-config", text]) == 1
    *_, last = json.loads(capsys.readouterr().out)["findings"]
    assert last["name"] == "flag"
    assert last["says"].startswith(f"It is no JSON: {why}")


def test_the_reference_explains_every_line() -> None:
    page = Path(__file__).parents[1] / "docs" / "reference" / "cli.md"
    section = page.read_text().split("## The lines of kvstow doctor\n")[1]
    assert [name for name in found(flag="{}") if f"`{name}`" not in section] == []


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


def test_a_signal_ends_the_command_and_is_no_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checks, "free_memory", lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert cli.main(["doctor"]) == 128 + signal.SIGTERM
    assert not capsys.readouterr().out


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
    assert findings["redis"].advice == "pip install 'kvstow[redis]'"


def installed(versions: dict[str, str | None]) -> Callable[[str], str | None]:
    return versions.get


def test_every_extra_exists_in_the_metadata() -> None:
    ours = importlib.metadata.metadata("kvstow").get_all("Provides-Extra") or []
    assert {extra for extra, _ in checks._EXTRAS.values()} <= set(ours)
