"""Facts that pages are compared with: routes, errors, commands, flags, store names, metrics.

They come from the code's own tables, or from its syntax tree if there is no table.
"""

import ast
import inspect
import re
import subprocess
from collections import defaultdict
from functools import cache
from pathlib import Path

from bench.__main__ import PROGRAMS
from engine_worker.settings import WorkerSettings
from gateway import errors
from gateway.apis.registry import APIS
from gateway.app import operations_of
from gateway.batches.driver.settings import DriverSettings
from pagestream import cli
from pagestream.serve_settings import ServeSettings
from shared.redis_keys import INTERACTIVE, RedisKeys
from shared.settings import options
from tests.docs.pages import batch_metrics, gateway_metrics, model_metrics, worker_metrics

ROOT = Path(__file__).parents[2]
SETTINGS = {"serve": ServeSettings, "batches": DriverSettings, "worker": WorkerSettings}  # batches has the gateway's
# Flags that are no settings: common to the three programs (shared/settings.py) or to every parser.
COMMON_FLAGS = {"--config", "--show-config", "--help", "--version"}


@cache
def files() -> frozenset[str]:
    """Return tracked and new files and their folders, relative to the root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    names = {name for name in listed if (ROOT / name).exists()}
    folders = {str(parent) for name in names for parent in Path(name).parents}
    return frozenset(names | folders)


@cache
def routes() -> dict[str, dict[str, set[int]]]:
    """Return path -> method -> statuses of a gateway with every route and of a worker, with `{}` for parameters."""
    found: dict[str, dict[str, set[int]]] = defaultdict(dict)
    for operation in operations_of(APIS):
        statuses = {int(operation.status), *map(int, operation.other_statuses)}
        statuses |= {error.status for error in operation.errors}
        found[re.sub(r"\{[^}]*\}", "{}", operation.path)][operation.method] = statuses
    health = (ROOT / "engine_worker" / "health.py").read_text()
    for path in re.findall(r'web\.get\("([^"]+)"', health):
        found[path].setdefault("GET", set())
    return dict(found)


@cache
def error_codes() -> dict[int, set[str]]:
    """Return status -> codes from the tree at the top of gateway/errors.py."""
    found: dict[int, set[str]] = defaultdict(set)
    status = 0
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"[\s│├└─]+\w+ +(\d{3}) +([\w |]+)", line):
            status = int(match[1])
            found[status] |= set(re.findall(r"\w+", match[2].partition(", or")[0]))
        elif match := re.match(r"\s+│?\s+\| ([\w |]+)", line):
            found[status] |= set(re.findall(r"\w+", match[1]))
    return dict(found)


def raised_codes() -> set[tuple[int, str]]:
    """Return (status, code) that the gateway raises: the default of each class, and constants passed as `code`."""
    kinds = {
        name: kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.GatewayError)
    }
    found = {(kind.status, kind.default_code) for kind in kinds.values() if kind not in (errors.RateLimited,)}
    for path in sorted((ROOT / "gateway").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and (kind := kinds.get(ast.unparse(node.func).split(".")[-1])):
                found |= {
                    (kind.status, word.value.value)
                    for word in node.keywords
                    if word.arg == "code" and isinstance(word.value, ast.Constant) and isinstance(word.value.value, str)
                }
    return found


@cache
def flags() -> frozenset[str]:
    """Return the flags of every program and script of the repository."""
    found = set(COMMON_FLAGS)
    for settings in SETTINGS.values():
        for field in options(settings):
            flag = field.name.replace("_", "-")
            found |= {f"--{flag}", f"--no-{flag}", *field.metadata["aliases"]}
    for folder in ("pagestream", "engine_worker", "bench", "tests", "requirements"):
        for path in (ROOT / folder).rglob("*.py"):
            found |= set(re.findall(r'(?:add_argument|addoption)\(\s*(?:"-\w", )?"(--[\w-]+)"', path.read_text()))
    return frozenset(found)


@cache
def commands() -> frozenset[str]:
    """Return the commands of `pagestream`."""
    return frozenset(re.findall(r"(?m)^  ([\w-]+) ", cli._COMMANDS))


@cache
def make_targets() -> frozenset[str]:
    (line,) = re.findall(r"(?m)^\.PHONY: (.*)$", (ROOT / "Makefile").read_text())
    return frozenset(line.split())


def benchmarks() -> frozenset[str]:
    return frozenset(PROGRAMS)


@cache
def metrics() -> frozenset[str]:
    """Return metric names as they are exposed; histograms by their base name."""
    tables = worker_metrics() + gateway_metrics() + model_metrics() + batch_metrics()
    return frozenset(re.findall(r"`(pagestream_\w+)`", tables))


@cache
def redis_names() -> frozenset[str]:
    """Return every store name of the model `m`, with `*` for an id."""
    keys = RedisKeys("m")
    found: set[str] = set()
    for name, member in inspect.getmembers(RedisKeys):
        if name.startswith("_") or name in ("model_name", "namespace", "hash_tag"):
            continue
        if isinstance(member, property):
            value = getattr(keys, name)
            found |= set(value if isinstance(value, tuple) else [value])
        elif name == "queue":
            continue  # `queues` has them
        elif name == "turns":  # batches have no order
            order, _ = keys.turns(INTERACTIVE)
            found |= {order, f"{order}:*"}  # of all entries, and of those with a home
        else:
            found.add(getattr(keys, name)("*"))
    names = {name + "*" if name.endswith(":") else name for name in found}
    return frozenset(names | {"{m}:q:*", "{m}:q:*:times"})


def scripts() -> frozenset[str]:
    return frozenset(path.stem for path in (ROOT / "shared" / "redis_scripts").glob("*.lua"))


@cache
def decisions() -> dict[int, Path]:
    """Return number of a decision -> the file in docs/adr that holds it today."""
    return decision_map((ROOT / "docs" / "adr" / "README.md").read_text())


def decision_map(index: str) -> dict[int, Path]:
    """Read the rows `| [file](file) | title | numbers |` of the index."""
    rows = re.findall(r"(?m)^\| \[[^]]+\]\(([0-9]\S+\.md)\) \|.*\| ([\d, ]+) \|$", index)
    return {int(number): ROOT / "docs" / "adr" / name for name, numbers in rows for number in numbers.split(",")}
