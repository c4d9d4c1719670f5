"""What the dashboard and the rules of `examples/monitoring/` ask Prometheus for."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "examples" / "monitoring"
RULES = MONITORING / "kvstow-rules.yaml"
DASHBOARD = MONITORING / "grafana" / "dashboards" / "kvstow.json"
# `make tools` unpacks Debian's there.
TOOLS = ROOT / ".venv" / "debian" / "usr" / "bin"
PROMTOOL = shutil.which("promtool", path=f"{os.environ['PATH']}{os.pathsep}{TOOLS}")
NO_PROMTOOL = "no promtool: install Debian's package prometheus, or run make tools"


def rules() -> Iterator[dict[str, Any]]:
    """Yield each rule."""
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        yield from group["rules"]


def panels() -> Iterator[dict[str, Any]]:
    """Yield each panel of the dashboard that is no heading."""
    dashboard = json.loads(DASHBOARD.read_text())
    yield from (panel for panel in dashboard["panels"] if panel["type"] != "row")


def expressions() -> list[str]:
    """Return the expressions of the dashboard, with values for Grafana's variables."""
    found = [target["expr"] for panel in panels() for target in panel["targets"]]
    return [text.replace("$__rate_interval", "5m").replace("$instance", ".*") for text in found]


def names(expression: str) -> set[str]:
    """Return the metrics that an expression names."""
    return set(re.findall(r"\b(?:kvstow|vllm)[_:][\w:]+", expression))


def family(name: str) -> str:
    """Return the metric of which a sample of Prometheus is a part."""
    return re.sub(r"_(?:bucket|sum|count)$", "", name)
