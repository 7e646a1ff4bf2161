"""Dashboards and alerts use only exported metrics, and every panel is complete."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client import CollectorRegistry

from gateway.batches.driver.metrics import DriverMetrics
from gateway.metrics import DeliveryCollector, GatewayMetrics, ModelMetrics
from gateway.store.stream_table import DeliveryCounts, StreamTable
from monitoring.build_dashboards import DASHBOARDS, build
from tests.monitoring.loaded_worker import LoadedWorker

MONITORING = Path(__file__).parents[2] / "monitoring"
COUNTER_SUFFIX = "_total"


def series_of(registry: CollectorRegistry) -> Iterator[tuple[str, str]]:
    """Yield (series name, metric type) of every series of a scrape, including those without a value yet."""
    for metric in registry.collect():
        if metric.type == "histogram":
            yield from ((metric.name + suffix, "histogram") for suffix in ("_bucket", "_sum", "_count"))
        else:
            yield metric.name + {"counter": COUNTER_SUFFIX, "info": "_info"}.get(metric.type, ""), metric.type


@pytest.fixture(scope="module")
def exported() -> dict[str, str]:
    gateway = GatewayMetrics(CollectorRegistry()).registry
    DriverMetrics(gateway)
    ModelMetrics(gateway)
    gateway.register(DeliveryCollector(DeliveryCounts(), StreamTable(asyncio.Event())))
    return dict([*series_of(LoadedWorker().metrics.registry), *series_of(gateway)])


def panels() -> list[tuple[str, dict[str, Any]]]:
    files = sorted(DASHBOARDS.glob("*.json"))
    return [(file.name, panel) for file in files for panel in json.loads(file.read_text())["panels"]]


def rules() -> list[dict[str, Any]]:
    content = yaml.safe_load((MONITORING / "prometheus" / "alerts.yml").read_text())
    return [rule for group in content["groups"] for rule in group["rules"]]


def expressions() -> list[tuple[str, str]]:
    of_panels = [
        (f"{file}: {panel['title']}", target["expr"].replace("$__rate_interval", "5m"))
        for file, panel in panels()
        for target in panel["targets"]
    ]
    return [*of_panels, *((rule["alert"], rule["expr"]) for rule in rules())]


def selectors(node: Any, inside_rate: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield (metric name, whether it is read through rate) of every selector of an expression."""
    if isinstance(node, promql_parser.VectorSelector):
        assert node.name
        yield node.name, inside_rate
    elif isinstance(node, promql_parser.MatrixSelector):
        yield from selectors(node.vector_selector, inside_rate)
    elif isinstance(node, promql_parser.Call):
        for argument in node.args:
            yield from selectors(argument, inside_rate or node.func.name in ("rate", "increase"))
    elif isinstance(node, promql_parser.BinaryExpr):
        yield from selectors(node.lhs, inside_rate)
        yield from selectors(node.rhs, inside_rate)
    elif isinstance(node, promql_parser.AggregateExpr | promql_parser.ParenExpr | promql_parser.UnaryExpr):
        yield from selectors(node.expr, inside_rate)
    else:
        assert isinstance(node, promql_parser.NumberLiteral | promql_parser.StringLiteral), type(node)


@pytest.mark.parametrize(("where", "expression"), expressions(), ids=lambda value: value[:40])
def test_queries_use_existing_metrics_and_rate_counters(where: str, expression: str, exported: dict[str, str]) -> None:
    found = list(selectors(promql_parser.parse(expression)))
    assert found, where
    for name, inside_rate in found:
        if name == "up":  # Prometheus's own, of each target
            continue
        assert name in exported, f"{where}: {name} is exported by nobody"
        accumulates = exported[name] in ("counter", "histogram")
        assert accumulates == inside_rate, f"{where}: {name} is a {exported[name]}"


@pytest.mark.parametrize("panel", [panel for _, panel in panels()], ids=lambda panel: panel["title"])
def test_panels_have_titles_units_and_descriptions(panel: dict[str, Any]) -> None:
    assert panel["title"] and panel["description"] and panel["targets"]
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    for target in panel["targets"]:
        assert target["legendFormat"]
        assert "job=~" in target["expr"], f"the variables select nothing of {target['expr']}"
        assert "[" not in target["expr"].replace("[$__rate_interval]", ""), "a window that scrapes may be missing from"
        # A sum of ratios over workers has no meaning.
        assert not ("_ratio" in target["expr"] and target["expr"].startswith("sum")), target["expr"]


def test_panels_do_not_overlap() -> None:
    cells = [
        (file, panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for file, panel in panels()
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for _, x, _ in cells) < 24


def test_committed_dashboards_match_the_builder() -> None:
    assert {file.name: file.read_text() for file in DASHBOARDS.glob("*.json")} == build()


def changes(given: Any, read: Any, path: str = "") -> Iterator[str]:
    """Yield the places whose value is missing or differs after reading; defaults that were added are no change."""
    if isinstance(given, dict) and isinstance(read, dict):
        for name, value in given.items():
            yield from changes(value, read[name], f"{path}.{name}") if name in read else (f"{path}.{name}",)
    elif isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        for index, pair in enumerate(zip(given, read, strict=True)):
            yield from changes(*pair, f"{path}[{index}]")
    elif given != read:
        yield path


def as_grafana_reads(dashboard: dict[str, Any]) -> Any:
    register_default_plugins()
    return json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))


@pytest.mark.parametrize("file", sorted(DASHBOARDS.glob("*.json")), ids=lambda file: file.stem)
def test_grafana_knows_each_field(file: Path) -> None:
    dashboard = json.loads(file.read_text())
    assert list(changes(dashboard, as_grafana_reads(dashboard))) == []
    defaults = dashboard["panels"][0]["fieldConfig"]["defaults"]
    defaults["misspelled"] = defaults.pop("unit")
    assert list(changes(dashboard, as_grafana_reads(dashboard))) == [".panels[0].fieldConfig.defaults.misspelled"]


def test_alerts_have_a_summary_and_an_action() -> None:
    assert len({rule["alert"] for rule in rules()}) == len(rules())
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"] and rule["annotations"]["description"]


def test_each_alert_has_a_section_of_the_guide() -> None:
    named = [rule["annotations"]["runbook_url"].partition("#") for rule in rules()]
    assert {path for path, _, _ in named} == {"docs/guides/alerts.md"}
    guide = (MONITORING.parent / "docs" / "guides" / "alerts.md").read_text()
    sections = re.findall(r"(?m)^## (\w+)$", guide)
    assert sorted(sections) == sorted(rule["alert"] for rule in rules())
    assert [anchor for _, _, anchor in named] == [rule["alert"].lower() for rule in rules()]


def test_dashboard_series_are_exported(exported: dict[str, str]) -> None:
    names = "kv_blocks kv_capacity_blocks kv_block_size_tokens kv_usage_ratio kv_internal_waste_ratio kv_sharing_ratio"
    names += " kv_swap_blocks_total kv_swap_bytes_total preemptions_total requests step_duration_seconds_bucket"
    assert {f"pagestream_{name}" for name in names.split()} <= exported.keys()
