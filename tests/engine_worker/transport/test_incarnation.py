"""Incarnations of a worker in the store: a new one requeues what earlier ones hold."""

from engine_worker.transport.incarnation import register
from shared.messages import encode
from shared.redis_client import RedisConnections
from shared.redis_keys import RESUMED, RedisKeys
from shared.redis_scripts import Demand, RedisScripts
from tests.builders import make_request


async def test_register_after_store_rollback_requeues_earlier_ids(
    connections: RedisConnections, keys: RedisKeys, scripts: RedisScripts
) -> None:
    """A promoted replica may not have stored that an earlier incarnation was handed back."""
    first = await register(connections, keys, "w")
    second = await register(connections, keys, "w", first)
    await scripts.register(first.worker_id)  # restores the state before the second incarnation
    await scripts.accept("a", encode(make_request(3, "a")), gateway_id="g", priority_class="interactive")
    await scripts.claim(first.worker_id, (await scripts.take(first.worker_id, Demand(1))).entries)
    third = await register(connections, keys, "w", second)
    assert third.former_ids == (first.worker_id, second.worker_id)
    assert await connections.commands.xlen(keys.queue(RESUMED)) == 1
