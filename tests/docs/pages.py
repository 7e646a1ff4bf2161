"""The generated parts of docs/, between marks: python -m tests.docs.pages writes them, a test compares them.

docs/reference/metrics.md        every metric, and vLLM's names
docs/reference/configuration.md  every setting of every program
docs/reference/families.md       model types with a file, and those of the tests' table without one
docs/reference/api.md            every route of the gateway
"""

import asyncio
import re
from collections.abc import Iterable
from dataclasses import MISSING, Field
from importlib import import_module
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from engine_worker.model.architectures import MODULES
from engine_worker.settings import WorkerSettings
from gateway.apis.registry import APIS
from gateway.app import operations_of
from gateway.batches.driver.metrics import DriverMetrics
from gateway.batches.driver.settings import DriverSettings
from gateway.metrics import DeliveryCollector, GatewayMetrics, ModelMetrics
from gateway.settings import GatewaySettings
from gateway.store.stream_table import DeliveryCounts, StreamTable
from pagestream.serve_settings import ServeSettings
from shared.settings import options
from shared.vllm_metric_names import ALIASES
from tests.engine_worker.model.family_cases import REFUSED, THROUGH_TRANSFORMERS
from tests.monitoring.loaded_worker import LoadedWorker

DOCS = Path(__file__).parents[2] / "docs"
PROGRAMS: dict[str, tuple[Field[Any], ...]] = {
    "serve": options(ServeSettings),
    "gateway": options(GatewaySettings),
    "worker": options(WorkerSettings),
    "batches": options(DriverSettings)[len(options(GatewaySettings)) :],  # beside those of the gateway
}
_BOUND = ("worker", "model")  # every worker metric has these labels


def pages() -> dict[str, dict[str, str]]:
    """Return file -> name of a mark -> generated text between the marks."""
    return {
        "reference/metrics.md": {
            "worker": worker_metrics(),
            "gateway": gateway_metrics(),
            "models": model_metrics(),
            "batches": batch_metrics(),
            "vllm": vllm_names(),
        },
        "reference/configuration.md": {program: settings(program) for program in PROGRAMS},
        "reference/families.md": {"native": native_families(), "others": other_families()},
        "reference/api.md": {"routes": routes()},
    }


def routes() -> str:
    """Return rows of method, path, and what the route does."""
    served = operations_of(APIS)
    operations = sorted({(one.path, one.method, one.summary) for one in served})
    shown = ((f"`{method} {re.sub(r':[^}]*}', '}', path)}`", _escaped(summary)) for path, method, summary in operations)
    return _table(("route", "what"), shown)


def native_families() -> str:
    """Return a table of model type, file, and its first paragraph."""
    rows = []
    for model_type, module in MODULES.items():
        docstring = import_module(f"engine_worker.model.architectures.{module}").__doc__ or ""
        text = " ".join(docstring.split("\n\n")[0].split())
        rows.append((f"`{model_type}`", f"`architectures/{module}.py`", text))
    return _table(("`model_type`", "file", "what it is"), rows)


def other_families() -> str:
    """Return a table of types without a file that the tests try: served or refused."""
    served = sorted({case.model_type for case in THROUGH_TRANSFORMERS.values()})
    rows = [(f"`{model_type}`", "transformers", "") for model_type in served]
    rows += [(f"`{model_type}`", "refused", words) for model_type, changes, words in REFUSED if not changes]
    return _table(("`model_type`", "way", "words of the refusal"), rows)


def worker_metrics() -> str:
    return _metrics(LoadedWorker().metrics.registry)


def gateway_metrics() -> str:
    return _metrics(GatewayMetrics(CollectorRegistry()).registry)


def batch_metrics() -> str:
    registry = CollectorRegistry()
    DriverMetrics(registry)
    return _metrics(registry)


def model_metrics() -> str:
    registry = ModelMetrics(CollectorRegistry()).registry
    registry.register(DeliveryCollector(DeliveryCounts(), StreamTable(asyncio.Event())))
    return _metrics(registry)


def vllm_names() -> str:
    return _table(("vLLM", "here"), ((f"`vllm:{alias.theirs}`", _of(alias.ours, alias.only)) for alias in ALIASES))


def settings(program: str) -> str:
    rows = ((f"`{_flag(field)}`", _default(field), _escaped(field.metadata["help"])) for field in PROGRAMS[program])
    return _table(("flag", "default", "what"), rows)


def _metrics(registry: CollectorRegistry) -> str:
    ours = sorted(
        (family for family in registry.collect() if family.name.startswith("pagestream_")), key=lambda f: f.name
    )
    return _table(
        ("metric", "type", "labels", "what"),
        (
            (f"`{_exposed_name(family)}`", family.type, _labels(family), _escaped(family.documentation))
            for family in ours
        ),
    )


def _exposed_name(family: Metric) -> str:
    return family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")


def _labels(family: Metric) -> str:
    collected = {label for sample in family.samples for label in sample.labels}
    declared = _DECLARED.get(family.name.removeprefix("pagestream_"), set())  # a metric without a child has no sample
    return ", ".join(f"`{label}`" for label in sorted(collected | declared) if label not in (*_BOUND, "le"))


_DECLARED = {
    metric._name.removeprefix("pagestream_"): set(metric._labelnames)
    for kind in (GatewayMetrics, ModelMetrics, DriverMetrics)
    for metric in vars(kind(CollectorRegistry())).values()
    if hasattr(metric, "_labelnames")
}


def _of(name: str, only: dict[str, tuple[str, ...]]) -> str:
    chosen = ",".join(f'{label}=~"{"|".join(values)}"' for label, values in only.items())
    return f"`pagestream_{name}" + (f"{{{chosen}}}`" if chosen else "`").replace("|", "\\|")


def _flag(field: Field[Any]) -> str:
    return "--" + field.name.replace("_", "-")


def _default(field: Field[Any]) -> str:
    if field.default is MISSING:
        return "needed"
    value = field.default
    shown = (
        str(value).lower()
        if isinstance(value, bool)
        else ",".join(map(str, value))
        if isinstance(value, tuple)
        else value
    )
    return "–" if shown in (None, "") else f"`{shown}`"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def filled(text: str, parts: dict[str, str]) -> str:
    for mark, content in parts.items():
        begin, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->"
        assert begin in text and end in text, mark
        text = re.sub(f"(?s){begin}.*?{end}", (begin + content + end).replace("\\", r"\\"), text)
    return text


if __name__ == "__main__":
    for name, parts in pages().items():
        path = DOCS / name
        path.write_text(filled(path.read_text(), parts))
