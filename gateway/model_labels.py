"""The metrics of several models as one collector: families of a name are joined, told apart by the label `model`.

The label is added at a scrape, so that what happens once a token need not look for it. Families that have a
`model_name` already, as vLLM's have, stay as they are.
"""

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

LABEL = "model"
_OWN_LABEL = "model_name"


class ByModel(Collector):
    def __init__(self) -> None:
        self._sources: list[tuple[str, Collector]] = []

    def add(self, model: str, source: Collector) -> None:
        self._sources.append((model, source))

    def describe(self) -> list[Metric]:
        return []  # or the registry would collect at registration

    def collect(self) -> Iterator[Metric]:
        joined: dict[str, Metric] = {}
        for model, source in self._sources:
            for family in source.collect():
                whole = joined.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                whole.samples += [
                    sample if _OWN_LABEL in sample.labels else sample._replace(labels={LABEL: model, **sample.labels})
                    for sample in family.samples
                ]
        yield from joined.values()
