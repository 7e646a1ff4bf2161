"""The values that KEDA reads through the components `gpu` and `keda` equal the unfinished requests of each queue.

A canceled request that a worker has read counts until the worker releases it in its next step.
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from redis.asyncio import Redis

from gateway.store.store_probe import read_queue_stats
from shared.new_requests import NewRequest, RetentionTerms
from shared.reaping import reap_worker
from shared.redis_client import RedisConnections
from shared.redis_keys import NEWER, PRIORITY_CLASSES, QUEUE_NAMES, RESUMED, RedisKeys
from shared.redis_scripts import Demand, Ending, QueueEntry, ReapMode, RedisScripts
from tests.deploy.kustomizations import with_components

MODEL = "model"  # of the component `gpu`
NUM_HISTORIES, NUM_ACTIONS = 200, 40
WORKERS = ("w0.1", "w1.1")


@pytest.fixture(scope="module")
def scaled_object(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    built = with_components(tmp_path_factory.mktemp("built"), "gpu", "keda")
    (found,) = [item for item in built if item["kind"] == "ScaledObject"]
    return found


async def as_keda_reads(redis: Redis, trigger: dict[str, Any], stream: str = "") -> int:
    """Return what KEDA's redis-streams scaler reads.

    Without a group it is the stream's length; with `lagCount` it is the group's lag, where go-redis reads an unknown
    lag as 0; otherwise it is the group's pending entries.
    """
    metadata, stream = trigger["metadata"], stream or trigger["metadata"]["stream"]
    if "consumerGroup" not in metadata:
        return await redis.xlen(stream)
    if "lagCount" in metadata:
        groups = await redis.xinfo_groups(stream)
        return next(group["lag"] or 0 for group in groups if group["name"].decode() == metadata["consumerGroup"])
    return (await redis.xpending(stream, metadata["consumerGroup"]))["pending"]


@dataclass
class History:
    """A store on which random actions run in random order, with the expected state beside it."""

    scripts: RedisScripts
    random: random.Random
    queue_of: dict[str, str] = field(default_factory=dict)  # by unfinished request
    class_of: dict[str, str] = field(default_factory=dict)
    held: dict[str, dict[str, QueueEntry]] = field(default_factory=lambda: {worker: {} for worker in WORKERS})
    needs: dict[str, int] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)  # cancelled but still held
    num_accepted: int = 0

    async def act(self) -> None:
        actions = (self.accept, self.take, self.finish, self.cancel, self.give_back, self.lose_worker)
        await self.random.choices(actions, weights=(8, 4, 5, 3, 2, 1))[0]()

    async def accept(self) -> None:
        priority_class = self.random.choice(PRIORITY_CLASSES)
        request_id, self.num_accepted = f"r{self.num_accepted}", self.num_accepted + 1
        terms = RetentionTerms(b"record", "holder") if self.random.random() < 0.3 else None
        new = NewRequest(request_id, b"body", terms=terms, needs=int(self.random.random() < 0.2))
        queue_name = NEWER if new.needs else priority_class
        await self.scripts.accept_all([new], gateway_id="g", priority_class=priority_class, queue_name=queue_name)
        self.class_of[request_id], self.queue_of[request_id] = priority_class, queue_name
        self.needs[request_id] = new.needs

    async def take(self) -> None:
        worker = self.random.choice(WORKERS)
        entries = (await self.scripts.take(worker, Demand(self.random.randint(1, 6)))).entries
        self.held[worker] |= {entry.request_id: entry for entry in entries}
        await self.scripts.claim(worker, entries)

    async def finish(self) -> None:
        """Finish random held requests and all canceled ones, which a worker releases in its next step."""
        worker = self.random.choice(WORKERS)
        held = self.held[worker]
        some = self.random.sample(sorted(held), min(len(held), self.random.randint(1, 3)))
        ended = [(id_, held[id_]) for id_ in {*some, *(held.keys() & self.cancelled)}]
        endings = [Ending(id_, entry.queue, entry.entry_id, b"end") for id_, entry in ended]
        await self.scripts.finish(worker, endings, [])
        for request_id, _ in ended:
            del held[request_id], self.queue_of[request_id]
            self.cancelled.discard(request_id)

    async def cancel(self) -> None:
        if not (alive := sorted(self.queue_of.keys() - self.cancelled)):
            return
        request_id = self.random.choice(alive)
        await self.scripts.cancel(request_id, self.class_of[request_id], event=b"end")
        if any(request_id in held for held in self.held.values()):
            self.cancelled.add(request_id)
        else:
            del self.queue_of[request_id]

    async def give_back(self) -> None:
        """Return requests that have not started; they are queued before all others unless canceled."""
        worker = self.random.choice(WORKERS)
        held = self.held[worker]
        entries = [held.pop(id_) for id_ in self.random.sample(sorted(held), min(len(held), self.random.randint(1, 2)))]
        await self.scripts.unclaim(worker, entries)
        for entry in entries:
            if entry.request_id in self.cancelled:
                self.cancelled.discard(entry.request_id)
                del self.queue_of[entry.request_id]
            else:
                self.queue_of[entry.request_id] = NEWER if self.needs[entry.request_id] else RESUMED

    async def lose_worker(self) -> None:
        """Reap a worker that crashed or drains; its requests are queued before all others or become dead letters."""
        worker = self.random.choice(WORKERS)
        await reap_worker(self.scripts, worker, ReapMode.DRAIN if self.random.random() < 0.5 else ReapMode.CRASH)
        for request_id in self.held[worker]:
            stored: Any = await self.scripts.redis.hmget(self.scripts.keys.request(request_id), "state")
            if request_id in self.cancelled or stored[0] == b"done":
                del self.queue_of[request_id]
            else:
                self.queue_of[request_id] = NEWER if self.needs[request_id] else RESUMED
        self.cancelled -= self.held[worker].keys()
        self.held[worker] = {}
        await self.scripts.register(worker)


async def new_history(connections: RedisConnections, keys: RedisKeys, seed: int) -> History:
    await connections.commands.flushall()
    history = History(RedisScripts(connections.commands, keys), random.Random(seed))
    for worker in WORKERS:
        await history.scripts.register(worker)
    return history


async def test_triggers_count_unfinished_requests(connections: RedisConnections, scaled_object: dict[str, Any]) -> None:
    triggers, keys = scaled_object["spec"]["triggers"], RedisKeys(MODEL)
    num_resumed = num_ended = 0
    for seed in range(NUM_HISTORIES):
        history = await new_history(connections, keys, seed)
        for number in range(NUM_ACTIONS):
            await history.act()
            if number % 5 == 4:
                truth = Counter(map(keys.queue, history.queue_of.values()))
                for trigger in triggers:
                    stream = trigger["metadata"]["stream"]
                    assert await as_keda_reads(connections.commands, trigger) == truth[stream], (seed, number, stream)
        num_resumed += truth[keys.queue(RESUMED)]
        num_ended += history.num_accepted - len(history.queue_of)
    assert num_resumed > 100 and num_ended > 1000  # otherwise the history covers too little


async def test_gateway_metric_matches_the_triggers(connections: RedisConnections) -> None:
    """The metric serves deployments that scale by Prometheus."""
    keys = RedisKeys("org/model:7b")
    for seed in range(20):
        history = await new_history(connections, keys, seed)
        for _ in range(NUM_ACTIONS):
            await history.act()
        truth = Counter(history.queue_of.values())
        stats = await read_queue_stats(connections.commands, keys)
        assert {name: load.unfinished for name, load in stats.queues.items()} == {
            name: truth[name] for name in QUEUE_NAMES
        }
        assert stats.all.pending == sum(map(len, history.held.values()))
        assert stats.all.unfinished == len(history.queue_of)


def test_triggers_cover_all_queues_without_lag(scaled_object: dict[str, Any]) -> None:
    triggers = scaled_object["spec"]["triggers"]
    assert sorted(trigger["metadata"]["stream"] for trigger in triggers) == sorted(RedisKeys(MODEL).queues)
    for trigger in triggers:
        assert trigger["type"] == "redis-streams"
        assert trigger["metadata"]["stream"] == RedisKeys(MODEL).queue(trigger["name"])
        assert not {"lagCount", "consumerGroup", "pendingEntriesCount"} & trigger["metadata"].keys()


def test_scaling_formula_counts_each_queue_once(scaled_object: dict[str, Any]) -> None:
    modifiers = scaled_object["spec"]["advanced"]["scalingModifiers"]
    weights = {}
    for term in modifiers["formula"].split(" + "):
        name, _, divisor = term.partition(" / ")
        weights[name] = 1 / int(divisor or 1)
    assert weights == {"interactive": 1, "resumed": 1, "newer": 1, "batch": 1 / 8}
    assert weights.keys() == {trigger["name"] for trigger in scaled_object["spec"]["triggers"]}
    assert float(modifiers["target"]) > 0 == float(modifiers["activationTarget"])


@pytest.mark.parametrize("name", ["a:b", "org/model:7b", "modèle 1", "a}b", "{a}", "a{b"])
async def test_model_names_with_key_separators_do_not_collide(
    connections: RedisConnections, scaled_object: dict[str, Any], name: str
) -> None:
    if set("{}") & set(name):
        with pytest.raises(ValueError, match="without braces"):
            RedisKeys(name)
        return
    keys = RedisKeys(name)
    scripts = RedisScripts(connections.commands, keys)
    await scripts.accept("a", b"body", gateway_id="g", priority_class="interactive")
    for trigger in scaled_object["spec"]["triggers"]:
        stream = trigger["metadata"]["stream"].replace(MODEL, name)
        assert await as_keda_reads(connections.commands, trigger, stream) == (trigger["name"] == "interactive")


async def test_missing_queues_count_as_zero(connections: RedisConnections, scaled_object: dict[str, Any]) -> None:
    for trigger in scaled_object["spec"]["triggers"]:
        assert await as_keda_reads(connections.commands, trigger) == 0
    assert (await read_queue_stats(connections.commands, RedisKeys(MODEL))).all.unfinished == 0
