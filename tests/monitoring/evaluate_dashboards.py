"""Print which panels of given Grafana dashboards have data: `python -m tests.monitoring.evaluate_dashboards FILE...`.

It serves a model by two workers with vLLM's metric names and drafts, sends requests, and asks a real Prometheus. With
the dashboards of vLLM's repository (examples/observability) it tells what their users see after a move to Pagestream.
"""

import argparse
import itertools
import json
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from bench.serving.free_port import free_port
from tests.e2e.fleet import START_SECONDS, Fleet, running_fleet
from tests.monitoring.prometheus_server import Query, running_prometheus

LOAD_SECONDS = 60.0
NUM_CLIENTS, MAX_TOKENS = 3, 20
SPECULATION = '{"method": "ngram", "num_speculative_tokens": 3}'
DURATIONS = {"$__rate_interval": "30s", "$__interval": "30s", "$__range": "60s"}
# Grafana replaces a template variable by the viewer's choice: here any label value, and the median.
LABEL_VARIABLE = re.compile(r'=~?"\$\{?\w+\}?(:\w+)?"')
NUMBER_VARIABLE = re.compile(r"\$\{?(percentile|quantile\w*)\}?")


@dataclass(frozen=True)
class PanelQuery:
    dashboard: str
    panel: str
    expression: str

    def prometheus_expression(self) -> str:
        text = self.expression
        for variable, duration in DURATIONS.items():
            text = text.replace(variable, duration)
        return NUMBER_VARIABLE.sub("0.5", LABEL_VARIABLE.sub('=~".*"', text))


def panel_queries(file: Path) -> Iterator[PanelQuery]:
    """Yield the queries of all panels of a Grafana dashboard, also of panels within rows."""
    waiting: list[dict[str, Any]] = list(json.loads(file.read_text())["panels"])
    while waiting:
        panel = waiting.pop()
        waiting += panel.get("panels", [])
        for target in panel.get("targets", []):
            if "expr" in target:
                yield PanelQuery(file.name, panel.get("title", ""), target["expr"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="Grafana dashboard as JSON")
    parser.add_argument("--model", default="demo", help="what `pagestream serve` serves; default: demo")
    arguments = parser.parse_args()
    queries = [query for file in arguments.files for query in panel_queries(file)]
    with tempfile.TemporaryDirectory() as directory, loaded_prometheus(Path(directory), arguments.model) as ask:
        without_data = [query for query in queries if not ask(query.prometheus_expression())]
    for query in sorted(without_data, key=lambda query: (query.dashboard, query.panel)):
        print(f"no data: {query.dashboard}: {query.panel}: {query.expression}")
    print(f"{len(queries) - len(without_data)} of {len(queries)} queries have data")


@contextmanager
def loaded_prometheus(directory: Path, model: str) -> Iterator[Query]:
    """Yield queries to a Prometheus that has watched two loaded workers and their gateway for `LOAD_SECONDS`."""
    program = shutil.which("prometheus")
    if program is None:
        raise SystemExit("prometheus is not installed")
    metrics_ports = _two_neighboring_ports()
    with running_fleet(directory / "logs") as fleet:
        flags = ["--workers", "2", "--metrics-port", str(metrics_ports[0]), "--vllm-metric-names"]
        flags += ["--speculative-config", SPECULATION, "--port", str(fleet.port)]
        fleet.start("serve", "-m", "pagestream", "serve", model, *flags)
        served_name = _served_model_name(fleet)
        jobs = {"gateway": [fleet.port], "engine_worker": metrics_ports}
        with running_prometheus(program, directory, jobs, "1s") as ask, _load(fleet.port, served_name):
            time.sleep(LOAD_SECONDS)
            yield ask


def _two_neighboring_ports() -> list[int]:
    first = free_port()
    return [first, first + 1]


def _served_model_name(fleet: Fleet) -> str:
    deadline = time.monotonic() + START_SECONDS
    with openai.OpenAI(base_url=f"http://127.0.0.1:{fleet.port}/v1", api_key="none") as client:
        while time.monotonic() < deadline and not fleet.has_lost_one():
            try:
                client.get(f"http://127.0.0.1:{fleet.port}/readyz", cast_to=object)
                return client.models.list().data[0].id
            except openai.APIError:
                time.sleep(0.2)  # polls another process
    raise SystemExit("the server did not start:\n" + fleet.all_logs())


@contextmanager
def _load(port: int, model: str) -> Iterator[None]:
    """Ask from several clients until the context exits: one or two choices, and prompts that come again."""
    stopping = threading.Event()

    def ask_until_stopped(client_number: int) -> None:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client:
            for number in itertools.takewhile(lambda _: not stopping.is_set(), itertools.count()):
                prompt = f"Story {client_number} of the lighthouse keeper, part {number % 3}. " * 6
                client.completions.create(model=model, prompt=prompt, max_tokens=MAX_TOKENS, n=1 + number % 2)

    clients = [threading.Thread(target=ask_until_stopped, args=(number,)) for number in range(NUM_CLIENTS)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        stopping.set()
        for client in clients:
            client.join()


if __name__ == "__main__":
    main()
