"""Metrics of a worker under load: block states add up at every scrape, and swaps match the KV events."""

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import Valkey
from tests.monitoring.loaded_stack import NUM_BLOCKS, NUM_HOST_BLOCKS, LoadedStack, loaded_stack

NUM_SCRAPES = 150  # about 5 s of load, with more than 10 different active block counts
NUM_SCRAPES_BETWEEN_EVENTS = 10  # more would lose events of the ring of 4,096
Families = dict[str, dict[tuple[str, ...], float]]


@pytest.fixture
def stack(tmp_path: Path, valkey: Valkey) -> Iterator[LoadedStack]:
    with loaded_stack(tmp_path, valkey) as stack:
        yield stack


def scrape(stack: LoadedStack) -> Families:
    """Return values by family and labels, without the labels of the worker and its model."""
    text = stack.get("engine_worker", "/metrics").decode()
    return {
        family.name.removeprefix("pagestream_"): {
            tuple(value for name, value in sample.labels.items() if name not in ("worker", "model")): sample.value
            for sample in family.samples
        }
        for family in text_string_to_metric_families(text)
    }


class Events:
    """Count blocks by (kind, reason) of all KV events, read before they leave the worker's ring."""

    def __init__(self, stack: LoadedStack) -> None:
        self._stack = stack
        self._last = 0
        self.blocks: Counter[tuple[str, str]] = Counter()

    def read(self) -> None:
        page: dict[str, Any] = json.loads(self._stack.get("engine_worker", f"/debug/kv/events?since={self._last}"))
        assert page["num_lost"] == 0
        self._last = page["last"]
        for event in page["events"]:
            self.blocks[event["kind"], event["reason"]] += event["num_blocks"]

    def of(self, *kinds: str) -> int:
        return sum(blocks for (kind, _), blocks in self.blocks.items() if kind in kinds)


def test_scraped_blocks_add_up_and_swaps_match_events(stack: LoadedStack) -> None:
    events, active = Events(stack), set()
    for number in range(NUM_SCRAPES):
        families = scrape(stack)
        assert sum(families["kv_blocks"].values()) == families["kv_capacity_blocks"]["cpu",] == NUM_BLOCKS - 1
        assert sum(families["kv_host_blocks"].values()) == NUM_HOST_BLOCKS - 1
        active.add(families["kv_blocks"]["cpu", "active"])
        if number % NUM_SCRAPES_BETWEEN_EVENTS == 0:
            events.read()
    assert len(active) > 10  # the worker was not idle
    stack.stop_load()
    while any(scrape(stack)["requests"].values()):
        time.sleep(0.05)  # another process reports the requests of disconnected clients
    events.read()
    families = scrape(stack)
    assert families["kv_swap_blocks"]["out",] == events.of("swap_out") + events.blocks["evict", "to the host"] > 0
    assert families["kv_swap_blocks"]["in",] == events.of("swap_in", "fetch") > 0
    assert families["kv_evicted_blocks"]["cpu",] == events.of("evict") > 0
    assert families["kv_copy_on_write_blocks"][()] == events.of("copy") > 0
