"""Prometheus and promtool, installed or unpacked from Debian's package, and a running server that answers queries."""

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.serving.free_port import free_port
from tests.monitoring.test_dashboards_and_alerts import MONITORING
from tests.patience import PATIENCE_SECONDS

RULES = MONITORING / "prometheus"
Query = Callable[[str], list[Any]]


def installed_program(config: pytest.Config, name: str) -> str:
    """Return the path of `promtool` or `prometheus`."""
    if (found := shutil.which(name)) is not None:
        return found
    unpacked = Path(config.cache.mkdir("prometheus"))
    inside = unpacked / "usr" / "bin" / name
    if not inside.exists():
        _unpack_debian_package(unpacked)
    return str(inside)


@contextmanager
def running_prometheus(
    program: str, directory: Path, jobs: Mapping[str, Sequence[int]], interval: str
) -> Iterator[Query]:
    """Yield a query function of a server that evaluates our alerts.

    Args:
        program: Path of `prometheus`.
        directory: For its configuration, data and log.
        jobs: Ports to scrape, by job.
        interval: Between two scrapes, as in "250ms".
    """
    config = {
        "global": {"scrape_interval": interval, "evaluation_interval": "1s"},
        "rule_files": [str(RULES / "alerts.yml")],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in ports]}]}
            for job, ports in jobs.items()
        ],
    }
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    options = [f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data"]
    options.append(f"--web.listen-address=127.0.0.1:{port}")
    with (directory / "log").open("wb") as log:
        server = subprocess.Popen([program, *options], stdout=log, stderr=log)
    try:
        ask = _queries_of(port)
        _until_workers_are_scraped(ask, directory / "log")
        yield ask
    finally:
        server.kill()
        server.wait()


def _unpack_debian_package(directory: Path) -> None:
    if shutil.which("apt-get") is None:
        pytest.skip("neither Prometheus nor apt-get is on this machine")
    download = ["apt-get", "download", "prometheus"]
    done = subprocess.run(download, cwd=directory, capture_output=True, text=True, check=False)
    packages = list(directory.glob("prometheus_*.deb"))
    if done.returncode != 0 or not packages:
        pytest.skip(f"Prometheus cannot be had: {done.stderr.strip()[-200:]}")
    subprocess.run(["dpkg", "-x", packages[0].name, "."], cwd=directory, check=True)


def _queries_of(port: int) -> Query:
    def ask(expression: str) -> list[Any]:
        url = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as reply:
            found: list[Any] = json.load(reply)["data"]["result"]
        return found

    return ask


def _until_workers_are_scraped(ask: Query, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        try:
            if ask("count_over_time(pagestream_worker_up[1m]) > 2"):
                return
        except OSError:
            pass
        time.sleep(0.1)  # polls an external process
    raise AssertionError("Prometheus scraped nothing:\n" + log.read_text()[-2000:])
