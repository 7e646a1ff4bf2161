"""Check the Prometheus files with Prometheus: promtool, its rule tests and a running server."""

import asyncio
import json
import re
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from gateway.batches.driver.metrics import DriverMetrics
from gateway.metrics import DeliveryCollector, GatewayMetrics, ModelMetrics
from gateway.store.stream_table import DeliveryCounts, StreamTable
from monitoring.build_dashboards import DASHBOARDS
from tests.conftest import Valkey
from tests.monitoring.loaded_stack import MODEL, LoadedStack, loaded_stack
from tests.monitoring.loaded_worker import LoadedWorker
from tests.monitoring.prometheus_server import RULES, Query, installed_program, running_prometheus
from tests.monitoring.test_dashboards_and_alerts import expressions
from tests.patience import PATIENCE_SECONDS

EVENTS_SECONDS = 300.0  # until every counted event has happened: 20 s on two idle cores
pytestmark = pytest.mark.timeout(600)
# These conditions do not occur in the load; an alert whose condition is not met has no data.
EMPTY_BY_NATURE = {
    "PagestreamNoWorker": "a worker serves",
    "PagestreamGatewayDown": "all are scraped",
    "PagestreamWorkerStalled": "it steps",
    "PagestreamRankDown": "the only rank is there",
    "PagestreamRedisDown": "the store answers",
    "PagestreamOwnerTaskDown": "the tasks run",
    "PagestreamQueueBacklog": "requests wait for milliseconds",
    "PagestreamKVCacheNearlyFull": "it may be, between two preemptions, or not",
    "PagestreamPreemptionStorm": "as the scheduler decides",
    "PagestreamSwapThrashing": "as the scheduler decides",
    "PagestreamKVLeak": "requests are in the engine",
    "PagestreamHighTTFT": "first tokens come within a second",
    "PagestreamErrorRate": "as the clients' pace decides",
    "PagestreamDeadLetters": "no request kills its worker",
    "PagestreamStoreNearlyFull": "the test's store has no limit",
    "PagestreamWorkerFlapping": "the worker lives once",
    "PagestreamBatchesNotDriven": "no batch is open",
}


@pytest.fixture
def promtool(request: pytest.FixtureRequest) -> str:
    return installed_program(request.config, "promtool")


def run(command: list[str], **options: Any) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_configuration_is_valid(promtool: str) -> None:
    run([promtool, "check", "config", str(RULES / "prometheus.yml")])


def test_alert_fires_on_its_condition(promtool: str) -> None:
    run([promtool, "test", "rules", str(RULES / "alerts_test.yml")])
    tested = {
        case["alertname"]
        for test in yaml.safe_load((RULES / "alerts_test.yml").read_text())["tests"]
        for case in test["alert_rule_test"]
        if case["exp_alerts"]
    }
    alerts = yaml.safe_load((RULES / "alerts.yml").read_text())["groups"][0]["rules"]
    assert {alert["alert"] for alert in alerts} == tested


def test_promtool_accepts_metric_names(promtool: str) -> None:
    for registry in (LoadedWorker().metrics.registry, _gateway().exposed):
        # The client library exports process_* and python_*.
        ours = [line for line in generate_latest(registry).decode().splitlines() if "pagestream_" in line]
        run([promtool, "check", "metrics"], input="\n".join(ours) + "\n")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, valkey_server: Valkey) -> Iterator[LoadedStack]:
    with loaded_stack(tmp_path_factory.mktemp("loaded"), valkey_server) as stack:
        yield stack


@pytest.fixture(scope="module")
def query(
    request: pytest.FixtureRequest, stack: LoadedStack, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Query]:
    """Query a real server that scrapes a worker and a gateway under load."""
    program = installed_program(request.config, "prometheus")
    jobs = {job: [port] for job, port in stack.ports.items()}
    with running_prometheus(program, tmp_path_factory.mktemp("prometheus"), jobs, "250ms") as ask:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not ask("count_over_time(pagestream_worker_up[10s]) > 20"):  # rates exist
            assert time.monotonic() < deadline
            time.sleep(0.1)  # polls an external process
        yield ask


def test_panels_and_alerts_find_data(query: Query) -> None:
    wanted = [(where, expression) for where, expression in expressions() if where not in EMPTY_BY_NATURE]
    deadline = time.monotonic() + EVENTS_SECONDS
    while empty := [(where, expression) for where, expression in wanted if not query(_selected(expression))]:
        assert time.monotonic() < deadline, empty
        wanted = empty
        time.sleep(0.25)  # between two scrapes


@pytest.mark.parametrize(
    "counter",
    [
        'pagestream_kv_swap_blocks_total{direction="out"}',
        'pagestream_kv_swap_blocks_total{direction="in"}',
        'pagestream_kv_swap_duration_seconds_count{direction="out"}',
        'pagestream_kv_swap_duration_seconds_count{direction="in"}',
        'pagestream_kv_block_lifetime_seconds_count{state="active"}',
        'pagestream_kv_block_lifetime_seconds_count{state="cached"}',
        'pagestream_preemptions_total{mode="swap"}',
        "pagestream_kv_copy_on_write_blocks_total",
        'pagestream_requests_finished_total{reason="error"}',
        'pagestream_requests_finished_total{reason="cancelled"}',
        'pagestream_http_request_duration_seconds_count{code="400"}',
        "pagestream_gateway_client_disconnects_total",
    ],
)
def test_load_has_swaps_beams_and_failures(query: Query, counter: str) -> None:
    deadline = time.monotonic() + EVENTS_SECONDS
    while not query(f"{counter} > 0"):
        assert time.monotonic() < deadline
        time.sleep(0.25)  # between two scrapes


def test_dashboard_variables_find_values(query: Query) -> None:
    dashboard = json.loads((DASHBOARDS / "kv.json").read_text())
    for variable in dashboard["templating"]["list"][1:]:
        metric, label = variable["query"]["query"].removeprefix("label_values(").removesuffix(")").rsplit(", ", 1)
        found = {series["metric"][label] for series in query(_selected(metric))}
        expected = {"job": {"gateway", "engine_worker", "batches"}, "model": {MODEL}}.get(variable["name"], found)
        assert found == expected and len(found) == len(expected) > 0


def _selected(expression: str) -> str:
    return re.sub(r"\$(job|model|worker)", ".*", expression).replace("[5m]", "[10s]")


def _gateway() -> GatewayMetrics:
    """Return metrics of two models, whose families are merged, and of a batch driver."""
    gateway = GatewayMetrics(CollectorRegistry())
    DriverMetrics(gateway.registry)
    for name in ("a", "b"):
        metrics = gateway.of_model(name)
        metrics.registry.register(DeliveryCollector(DeliveryCounts(), StreamTable(asyncio.Event())))
        _serve_one_request(gateway, metrics)
    return gateway


def _serve_one_request(gateway: GatewayMetrics, metrics: ModelMetrics) -> None:
    metrics.time_to_first_token.labels("interactive").observe(0.5)
    for histogram in (metrics.inter_token_latency, metrics.time_per_output_token,
                      metrics.request_duration, metrics.prompt_tokens, metrics.generation_tokens):  # fmt: skip
        histogram.observe(0.5)
    metrics.choices_finished.labels("stop").inc()
    metrics.rejected.labels("queue_full").inc()
    gateway.http_duration.labels("/v1/completions", "POST", "200").observe(0.5)
    gateway.open_requests.labels("/v1/completions").set(1)
    gateway.redis_up.set(1)
    metrics.ready_workers.set(1)
    metrics.queue_unfinished.labels("all").set(3)
    metrics.queue_depth.labels("all").set(2)
    metrics.queue_pending.labels("all").set(1)
