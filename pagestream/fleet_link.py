"""The supervisor's connection to the store: read workers' heartbeats, publish start phases, and reap dead workers.

A missed heartbeat does not matter, because the next follows a second later. The requests of a dead worker are requeued
at once, without waiting for missed heartbeats. If the store is unavailable, the link waits for it.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial

from redis.exceptions import RedisError

from shared.live_workers import LiveWorkers
from shared.messages import FormatError, WorkerHeartbeat, WorkerPhase, decode_heartbeat, encode
from shared.model_identity import refuse_other_model
from shared.reaping import reap_workers_with_prefix
from shared.redis_client import connect
from shared.redis_keys import RedisKeys
from shared.redis_scripts import RedisScripts

SUPERVISOR_ID = "supervisor"
BEAT_SECONDS = 1.0
RETRY_SECONDS = 0.5

logger = logging.getLogger(__name__)


class FleetLink:
    def __init__(self, url: str, keys: RedisKeys, on_heartbeat: Callable[[WorkerHeartbeat], None]) -> None:
        self._connections = connect(url, hash_tag=keys.hash_tag)
        self._keys = keys
        self._on_heartbeat = on_heartbeat
        self._own_phase: WorkerHeartbeat | None = None
        self._changed = asyncio.Event()

    def announce(self, phase: WorkerPhase, progress: float, detail: str) -> None:
        """Publish the current phase to all gateways, once a second."""
        self._own_phase = WorkerHeartbeat(worker_id=SUPERVISOR_ID, phase=phase, progress=progress, detail=detail)
        self._changed.set()

    def stop_announcing(self) -> None:
        """Stop announce(), because workers publish their own phases."""
        self._own_phase = None

    async def run(self) -> None:
        """Run until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen())
            tasks.create_task(self._beat())
            tasks.create_task(self._connections.follow_primary())

    async def store_answers(self) -> str:
        """Return an empty text if the store answers, else the error."""
        try:
            await self._connections.commands.ping()
        except (RedisError, OSError) as error:
            return str(error)
        return ""

    async def reap(self, worker_id_prefix: str) -> int:
        """Requeue the requests of the dead workers `PREFIX.*`.

        Returns:
            The number of requests; 0 if the store is unavailable.
        """
        try:
            reaped = await reap_workers_with_prefix(self._connections.commands, self._keys, worker_id_prefix)
            return sum(summary.requeued for summary in reaped.values())
        except (RedisError, OSError) as error:
            # The reapers of other workers requeue them later.
            logger.warning("worker %s: requeue failed; peers will requeue: %s", worker_id_prefix, error)
            return 0

    async def refuse_other_model(self, identity: Mapping[str, str]) -> None:
        """Raise ModelDiffers if the queue of this model name serves another model."""
        scripts = RedisScripts(self._connections.commands, self._keys)
        try:
            await refuse_other_model(partial(scripts.compare_identity, identity), LiveWorkers(scripts).ids)
        except (RedisError, OSError) as error:
            logger.warning("model identity: not compared; workers will compare it: %s", error)

    async def aclose(self) -> None:
        await self._connections.aclose()

    async def _listen(self) -> None:
        while True:
            try:
                async with self._connections.subscriber.pubsub() as channel:
                    await channel.subscribe(self._keys.heartbeat_channel)
                    while True:
                        message = await channel.get_message(ignore_subscribe_messages=True, timeout=None)
                        if message is not None:
                            self._handle_heartbeat(message["data"])
            except (RedisError, OSError):
                await asyncio.sleep(RETRY_SECONDS)

    def _handle_heartbeat(self, data: bytes) -> None:
        try:
            heartbeat = decode_heartbeat(data)
        except FormatError as error:
            logger.warning("heartbeat: invalid: %s", error)
            return
        if heartbeat.worker_id != SUPERVISOR_ID:
            self._on_heartbeat(heartbeat)

    async def _beat(self) -> None:
        while True:
            self._changed.clear()
            if self._own_phase is not None:
                try:
                    await self._connections.commands.publish(self._keys.heartbeat_channel, encode(self._own_phase))
                except (RedisError, OSError):
                    logger.debug("phase: not published; retrying in %s s", BEAT_SECONDS)
            try:
                async with asyncio.timeout(BEAT_SECONDS if self._own_phase is not None else None):
                    await self._changed.wait()
            except TimeoutError:
                continue
