"""The dashboard and the rules name what kvstow exports, all of it, and Prometheus can read them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from tests.examples.monitoring import (
    DASHBOARD,
    MONITORING,
    NO_PROMTOOL,
    PROMTOOL,
    ROOT,
    RULES,
    expressions,
    family,
    names,
    panels,
    rules,
)

from kvstow.observability.metrics import ALL_METRICS, SHADOW_HIT_RATIO

needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason=NO_PROMTOOL)
EXPORTED = {metric.name: metric for metric in ALL_METRICS}
RECORDED = {rule["record"] for rule in rules() if "record" in rule}
ASKED = [rule["expr"] for rule in rules()] + expressions()


def promtool(*arguments: str | Path) -> None:
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, *arguments], capture_output=True, check=False, text=True, cwd=MONITORING
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("expression", ASKED)
def test_an_expression_names_only_metrics_that_are_exported(expression: str) -> None:
    own = {family(name) for name in names(expression) if name.startswith("kvstow")}
    assert own <= EXPORTED.keys() | RECORDED


def test_the_dashboard_shows_every_metric() -> None:
    shown = {family(name) for expression in expressions() for name in names(expression)}
    assert EXPORTED.keys() - shown == set(), f"add a panel to {DASHBOARD}"


@pytest.mark.parametrize("expression", ASKED)
def test_an_expression_uses_only_labels_and_values_that_exist(expression: str) -> None:
    for name, text in re.findall(r"\b(kvstow_\w+)\{(.*?)\}", expression):
        metric = EXPORTED[family(name)]
        for label, value in re.findall(r'(\w+)!?=~?"(.*?)"', text):
            if label == metric.label:
                assert value in metric.keys or metric is SHADOW_HIT_RATIO, (name, value)
            else:
                assert label == "instance", f"{name} has no label {label}"


def test_each_panel_has_a_place_of_its_own() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {
            (at["x"] + column, at["y"] + row) for column in range(at["w"]) for row in range(at["h"])
        }
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in panels()}) == len(list(panels()))


def test_a_stock_beside_rates_has_an_axis_of_its_own() -> None:
    """Thousands of blocks beside some a second would leave the rates at the bottom."""
    for panel in panels():
        rates = [("rate(" in target["expr"], target["refId"]) for target in panel["targets"]]
        stocks = {name for is_rate, name in rates if not is_rate}
        if len(stocks) < len(rates):
            right = [
                override["matcher"]["options"]
                for override in panel["fieldConfig"]["overrides"]
                if {"id": "custom.axisPlacement", "value": "right"} in override["properties"]
            ]
            assert set(right) == stocks, panel["title"]


def test_a_line_for_each_server_names_it() -> None:
    """Two servers would otherwise draw two lines of one name."""
    for panel in panels():
        for target in panel["targets"]:
            if not re.match(r"sum\b|histogram_quantile\(", target["expr"]):
                assert "{{instance}} {{engine}}" in target["legendFormat"], target


def test_every_alert_is_tested_and_documented() -> None:
    tested = (MONITORING / "kvstow-rules-test.yaml").read_text()
    page = (MONITORING.parents[1] / "docs" / "how-to" / "monitor.md").read_text()
    alerts = [rule["alert"] for rule in rules() if "alert" in rule]
    assert len(alerts) == len(set(alerts)) > 5
    for alert in alerts:
        assert f'alertname="{alert}"' in tested and f"`{alert}`" in page, alert
    assert [name for name in RECORDED if name not in tested] == []


def test_each_alert_says_how_grave_it_is_and_what_to_do() -> None:
    for rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in {"info", "warning", "critical"}
            assert rule["annotations"].keys() == {"runbook", "summary", "description"}


def test_each_alert_names_a_section_that_exists() -> None:
    for rule in rules():
        if "alert" in rule:
            page, _, anchor = rule["annotations"]["runbook"].partition("#")
            headings = re.findall(r"^#+ (.*)", (ROOT / page).read_text(), re.MULTILINE)
            assert rule["alert"] in headings and anchor == rule["alert"].lower(), rule["alert"]


def test_each_alert_names_the_server() -> None:
    for rule in rules():
        if "alert" in rule:
            assert "{{ $labels.instance }}" in rule["annotations"]["summary"], rule["alert"]


@needs_promtool
def test_prometheus_reads_its_configuration_and_the_rules() -> None:
    promtool("check", "config", "prometheus.yaml")
    promtool("check", "rules", RULES)


@needs_promtool
def test_the_alerts_fire_when_they_should() -> None:
    promtool("test", "rules", "kvstow-rules-test.yaml")


@needs_promtool
def test_prometheus_reads_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    found = [{"record": f"panel:{i}", "expr": text} for i, text in enumerate(expressions())]
    file = tmp_path / "panels.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": found}]}))
    promtool("check", "rules", file)


@needs_promtool
def test_an_alert_that_never_fires_is_noticed(tmp_path: Path) -> None:
    """The negative control."""
    for name in ("kvstow-rules.yaml", "kvstow-rules-test.yaml"):
        text = (MONITORING / name).read_text()
        (tmp_path / name).write_text(
            text.replace("blocks_in_quarantine > 0", "blocks_in_quarantine > 9")
        )
    with pytest.raises(AssertionError, match="KvstowCopiesHang"):
        promtool("test", "rules", tmp_path / "kvstow-rules-test.yaml")
