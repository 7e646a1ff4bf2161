"""One incarnation of a worker in the store: its id, its fence, its claims.

incarnation = await register(connections, keys, "w0")
while True:
    try:
        claimed = await incarnation.requests.claim(demand)                # waits up to 1 s with block=True
        cancelled_ids = await incarnation.tokens.emit(token_events)       # once per engine step
        await incarnation.tokens.finish(finish_and_error_events)          # after the emit of the same step
    except Fenced:
        ...                                                               # drop every sequence
        incarnation = await register(connections, keys, "w0", previous=incarnation)
await incarnation.requests.hand_back()                                    # drain: requeue the rest
"""

import asyncio
import logging
import secrets
from dataclasses import dataclass

from redis.exceptions import RedisError

from engine_worker.transport.claims import Claims
from engine_worker.transport.fault_counts import FaultCounts
from engine_worker.transport.request_stream import RequestStream
from engine_worker.transport.token_publisher import SELF_FENCE_SECONDS, TokenPublisher
from engine_worker.transport.worker_profile import WorkerProfile
from shared.fleet_clock import FleetClock
from shared.reaping import reap_worker
from shared.redis_client import RedisConnections
from shared.redis_keys import RedisKeys
from shared.redis_scripts import ReapMode, RedisScripts
from shared.store_errors import StoreRetry

MAX_FORMER_IDS = 4  # a failover with two temporary primaries may take three incarnations

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Incarnation:
    worker_id: str
    claims: Claims
    requests: RequestStream
    tokens: TokenPublisher
    former_ids: tuple[str, ...] = ()  # of this process's earlier incarnations, oldest first


async def register(
    connections: RedisConnections,
    keys: RedisKeys,
    base_worker_id: str,
    previous: Incarnation | None = None,
    *,
    self_fence_seconds: float = SELF_FENCE_SECONDS,
    fleet_clock: FleetClock | None = None,
    faults: FaultCounts | None = None,
    profile: WorkerProfile | None = None,
) -> Incarnation:
    """Register a new worker id `BASE.<random>`, with its fence, groups, and consumers. Wait until the store answers.

    First requeue what earlier incarnations of this process hold: no other process knows that they have ended, and a
    store may have lost their hand-back in a failover.

    Raises:
        ModelDiffers: If the queue serves a model of another identity.
    """
    scripts = RedisScripts(connections.commands, keys)
    worker_id = f"{base_worker_id}.{secrets.token_hex(4)}"  # unique, because each incarnation needs its own fence
    former_ids = (*previous.former_ids, previous.worker_id)[-MAX_FORMER_IDS:] if previous is not None else ()
    is_running = previous is not None or (fleet_clock is not None and fleet_clock.is_set)
    retry = StoreRetry(has_succeeded=is_running)
    while True:
        try:
            for former_id in former_ids:
                await reap_worker(scripts, former_id, ReapMode.DRAIN)
            await scripts.register(worker_id, profile.identity if profile else None)
            break
        except (RedisError, OSError) as error:
            delay_seconds = retry.delay_after(error)
            logger.warning("register: store error; retrying in %.1f s: %s", delay_seconds, error)
        await asyncio.sleep(delay_seconds)
    logger.info("worker %s: registered", worker_id)
    claims = Claims()
    return Incarnation(
        worker_id=worker_id,
        claims=claims,
        requests=RequestStream(
            connections,
            scripts,
            worker_id,
            claims,
            fleet_clock=fleet_clock,
            faults=faults,
            profile=profile,
        ),
        tokens=TokenPublisher(scripts, worker_id, claims, self_fence_seconds=self_fence_seconds, faults=faults),
        former_ids=former_ids,
    )
