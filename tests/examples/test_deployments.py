"""The examples of a deployment fit their published schemas, kvstow's options and each other."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from tests.examples.monitoring import DASHBOARD, MONITORING, ROOT

import kvstow
from kvstow.vllm.options import Options

EXAMPLES = ROOT / "examples"
COMPOSE = EXAMPLES / "compose.yaml"
MANIFEST = EXAMPLES / "kubernetes.yaml"
SHARED_COMPOSE = EXAMPLES / "compose-shared.yaml"
SHARED_MANIFEST = EXAMPLES / "kubernetes-shared.yaml"
UNIT = EXAMPLES / "vllm-kvstow.service"
GIB = 1 << 30


def run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def compose(path: Path = COMPOSE) -> dict[str, Any]:
    found = yaml.safe_load(path.read_text())
    assert isinstance(found, dict)
    return found


def deployment(path: Path = MANIFEST) -> dict[str, Any]:
    """Return the specification of a manifest's servers."""
    parts = yaml.safe_load_all(path.read_text())
    found, *_ = (part["spec"] for part in parts if part["kind"] == "Deployment")
    assert isinstance(found, dict)
    return found


def manifest_arguments(path: Path = MANIFEST) -> list[str]:
    (container,) = deployment(path)["template"]["spec"]["containers"]
    return [*container["command"], *container["args"]]


def unit() -> dict[str, str]:
    """Return the settings of the unit, each once."""
    text = UNIT.read_text().replace("\\\n", " ")
    settings = re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE)
    assert len(settings) == len(dict(settings))
    return dict(settings)


def commands() -> Iterator[tuple[str, list[str]]]:
    vllm = compose()["services"]["vllm"]
    yield "compose", [*vllm["entrypoint"], *vllm["command"]]
    yield "kubernetes", manifest_arguments()
    for server in ("vllm-1", "vllm-2"):
        vllm = compose(SHARED_COMPOSE)["services"][server]
        yield f"{server} of two", [*vllm["entrypoint"], *vllm["command"]]
    yield "kubernetes, two", manifest_arguments(SHARED_MANIFEST)
    # shlex and systemd agree about single quotes.
    yield "systemd", shlex.split(unit()["ExecStart"])


@pytest.mark.parametrize(("where", "command"), list(commands()))
def test_each_deployment_starts_a_server_with_a_tier(where: str, command: list[str]) -> None:
    assert Path(command[0]).name == "vllm" and command[1] == "serve"
    flag = json.loads(command[command.index("--kv-transfer-config") + 1])
    options = Options.parse(flag.pop("kv_connector_extra_config"))
    assert options.cpu_bytes_to_use == 32 * GIB
    assert flag == {
        "kv_connector": "KVStowConnector",
        "kv_connector_module_path": "kvstow.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    # Without it vLLM kills its engine, and the engine closes nothing.
    (patience,) = re.findall(r"--shutdown-timeout=(\d+)", " ".join(command))
    assert int(patience) < grace_s(where)


def grace_s(where: str) -> int:
    """Return how long a deployment lets the server end by itself."""
    if where == "compose":
        return int(compose()["services"]["vllm"]["stop_grace_period"].removesuffix("s"))
    if where.startswith("vllm-"):
        server = compose(SHARED_COMPOSE)["services"][where.split(maxsplit=1)[0]]
        return int(server["stop_grace_period"].removesuffix("s"))
    if where == "systemd":
        return int(unit()["TimeoutStopSec"])
    path = SHARED_MANIFEST if where.endswith("two") else MANIFEST
    (found,) = re.findall(r"terminationGracePeriodSeconds: (\d+)", path.read_text())
    return int(found)


def test_each_deployment_lets_kvstow_pin_its_memory() -> None:
    assert compose()["services"]["vllm"]["ulimits"] == {"memlock": -1}
    assert unit()["LimitMEMLOCK"] == "infinity"
    assert "capabilities: {add: [IPC_LOCK]}" in MANIFEST.read_text()


# -- compose -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [COMPOSE, SHARED_COMPOSE])
def test_the_compose_file_fits_its_published_schema(path: Path) -> None:
    run(
        *(sys.executable, "-m", "check_jsonschema"),
        *("--builtin-schema", "vendor.compose-spec", path),
    )


def test_the_compose_file_mounts_files_that_exist_where_their_readers_look() -> None:
    mounts = {}
    for service in ("prometheus", "grafana"):
        for volume in compose()["services"][service]["volumes"]:
            source, target, *_ = volume.split(":")
            if source.startswith("."):
                assert (EXAMPLES / source).exists(), volume
                mounts[target] = EXAMPLES / source
            else:
                assert source in compose()["volumes"]
    provisioning, dashboards = (
        mounts["/etc/grafana/provisioning"],
        mounts["/var/lib/grafana/dashboards"],
    )
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "kvstow.yaml").read_text())[
        "providers"
    ]
    assert mounts[provider["options"]["path"]] == dashboards == DASHBOARD.parent
    home = compose()["services"]["grafana"]["environment"][
        "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"
    ]
    assert home == f"/var/lib/grafana/dashboards/{DASHBOARD.name}"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())[
        "datasources"
    ]
    services = compose()["services"]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in services
    (scraped,) = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())["scrape_configs"]
    assert scraped["static_configs"] == [{"targets": ["vllm:8000"]}]
    assert "--port=8000" in services["vllm"]["command"]


def test_the_compose_file_opens_no_port_to_other_machines() -> None:
    ports = [port for service in compose()["services"].values() for port in service["ports"]]
    assert len(ports) == 3 and all(port.startswith("127.0.0.1:") for port in ports)


def test_the_compose_file_builds_the_image_that_the_dockerfile_describes() -> None:
    vllm = compose()["services"]["vllm"]
    dockerfile = EXAMPLES / vllm["build"]["dockerfile"].removeprefix("../examples/")
    assert (EXAMPLES / vllm["build"]["context"]).resolve() == ROOT / "dist"
    assert f" -t {vllm['image']} dist\n" in dockerfile.read_text()
    assert vllm["image"].endswith(f":{kvstow.__version__}")


# -- Kubernetes --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [MANIFEST, SHARED_MANIFEST])
def test_the_manifest_fits_the_schemas_of_the_oldest_and_the_newest_kubernetes(path: Path) -> None:
    import kubernetes_validate  # type: ignore[import-untyped] # noqa: PLC0415 - slow
    from kubernetes_validate.utils import (  # type: ignore[import-untyped] # noqa: PLC0415
        all_versions,
    )

    versions = all_versions()
    for part in yaml.safe_load_all(path.read_text()):
        for version in (versions[0], versions[-1]):
            kubernetes_validate.validate(part, version, strict=True)
        part["spec"]["replicaz"] = 1  # the negative control
        with pytest.raises(kubernetes_validate.ValidationError, match="replicaz"):
            kubernetes_validate.validate(part, versions[-1], strict=True)


@pytest.mark.parametrize("path", [MANIFEST, SHARED_MANIFEST])
def test_kubernetes_waits_longer_for_a_rollout_than_for_a_start(path: Path) -> None:
    servers = deployment(path)
    (container,) = servers["template"]["spec"]["containers"]
    probe = container["startupProbe"]
    start_s = probe["periodSeconds"] * probe["failureThreshold"]
    assert servers["progressDeadlineSeconds"] > start_s


@pytest.mark.parametrize("path", [MANIFEST, SHARED_MANIFEST])
def test_no_service_sets_a_variable_that_vllm_takes_for_its_own(path: Path) -> None:
    services = [it for it in yaml.safe_load_all(path.read_text()) if it["kind"] == "Service"]
    assert any(service["metadata"]["name"].startswith("vllm-") for service in services)
    assert deployment(path)["template"]["spec"]["enableServiceLinks"] is False


# -- two servers that share blocks -------------------------------------------------------------


def test_the_servers_name_the_store_that_is_beside_them() -> None:
    services = compose(SHARED_COMPOSE)["services"]
    assert shared_of(services["vllm-1"]["command"]) == "redis://valkey:6379"
    assert "valkey" in services and "ports" not in services["valkey"]
    ports = [port for service in services.values() for port in service.get("ports", ())]
    assert len(ports) == 2 and all(port.startswith("127.0.0.1:") for port in ports)
    parts = {
        (part["kind"], part["metadata"]["name"]): part
        for part in yaml.safe_load_all(SHARED_MANIFEST.read_text())
    }
    assert shared_of(manifest_arguments(SHARED_MANIFEST)) == "redis://kvstow-valkey:6379"
    assert ("Service", "kvstow-valkey") in parts
    policy = parts["NetworkPolicy", "kvstow-valkey"]["spec"]
    store = parts["Deployment", "kvstow-valkey"]["spec"]["template"]["metadata"]["labels"]
    servers = parts["Deployment", "vllm-kvstow"]["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"] == store
    assert policy["ingress"][0]["from"] == [{"podSelector": {"matchLabels": servers}}]


def test_one_of_two_servers_serves_while_the_other_is_replaced() -> None:
    servers = deployment(SHARED_MANIFEST)
    assert servers["replicas"] == 2
    # A surge would wait for the GPU of a server that nobody stops.
    rolling = {"maxSurge": 0, "maxUnavailable": 1}
    assert servers["strategy"] == {"type": "RollingUpdate", "rollingUpdate": rolling}


def shared_of(command: list[str]) -> str | None:
    flag = json.loads(command[command.index("--kv-transfer-config") + 1])
    return Options.parse(flag["kv_connector_extra_config"]).shared


@pytest.mark.parametrize("path", [SHARED_COMPOSE, SHARED_MANIFEST])
def test_the_store_has_a_bound_and_a_password_that_no_file_holds(path: Path) -> None:
    text = path.read_text()
    assert "--maxmemory\n" in text and "allkeys-lru" in text and "--requirepass" in text
    assert not re.search(r"redis://[^\s\"]*@", text)


# -- systemd -----------------------------------------------------------------------------------


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze here")
def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    program = unit()["ExecStart"].split()[0]
    file = tmp_path / UNIT.name
    file.write_text(UNIT.read_text().replace(program, "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", file], capture_output=True, check=False, text=True
    )
    # It also reads the units of this machine, which are not ours to judge.
    assert UNIT.name not in done.stderr, done.stderr
    file.write_text(file.read_text().replace("[Service]", "[Service]\nKillMod=mixed"))
    done = subprocess.run(
        ["systemd-analyze", "verify", file], capture_output=True, check=False, text=True
    )
    assert "KillMod" in done.stderr, "the negative control"
