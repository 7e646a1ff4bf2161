"""The supervisor's line to the store: it hears the workers' heartbeats, tells its own phases, and reaps its own dead.

Pub/sub is enough here: a missed heartbeat is followed by the next one a second later. The store may come and go; this
link waits for it. In a takeover under `serve` this is the step that gives the dead worker's requests back, at once and
not after missed beats. It decides nothing about anyone's life, and knows no requests.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial

from redis.exceptions import RedisError

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
    def __init__(self, url: str, model_name: str, on_heartbeat: Callable[[WorkerHeartbeat], None]) -> None:
        self._connections = connect(url)
        self._keys = RedisKeys(model_name)
        self._on_heartbeat = on_heartbeat
        self._own_phase: WorkerHeartbeat | None = None
        self._changed = asyncio.Event()
        self._heard: set[str] = set()  # ids of workers

    def announce(self, phase: WorkerPhase, progress: float, detail: str) -> None:
        """Tell every gateway what is being prepared, from now on once a second."""
        self._own_phase = WorkerHeartbeat(worker_id=SUPERVISOR_ID, phase=phase, progress=progress, detail=detail)
        self._changed.set()

    def fall_silent(self) -> None:
        """The workers speak for themselves from now on."""
        self._own_phase = None

    async def run(self) -> None:
        """Owner task of both connections, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen())
            tasks.create_task(self._beat())

    async def store_answers(self) -> str:
        """Empty if it does, else what is wrong."""
        try:
            await self._connections.commands.ping()
        except (RedisError, OSError) as error:
            return str(error)
        return ""

    async def reap(self, worker_id_prefix: str) -> int:
        """Requeue at once what the dead workers `PREFIX.*` held; how many requests. 0 if the store is away."""
        try:
            reaped = await reap_workers_with_prefix(self._connections.commands, self._keys, worker_id_prefix)
            return sum(summary.requeued for summary in reaped.values())
        except (RedisError, OSError) as error:
            # The other workers' reapers find the dead one too, only later.
            logger.warning("could not requeue the requests of %s at once: %s", worker_id_prefix, error)
            return 0

    async def refuse_other_model(self, identity: Mapping[str, str]) -> None:
        """Raise ModelDiffers if the queue of this model name serves another model. Needs run()."""
        scripts = RedisScripts(self._connections.commands, self._keys)
        try:
            await refuse_other_model(partial(scripts.compare_identity, identity), self._heard)
        except (RedisError, OSError) as error:
            logger.warning("model identity: left to the workers, because the store does not answer: %s", error)

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
                            self._hear(message["data"])
            except (RedisError, OSError):
                await asyncio.sleep(RETRY_SECONDS)

    def _hear(self, data: bytes) -> None:
        try:
            heartbeat = decode_heartbeat(data)
        except FormatError as error:
            logger.warning("a heartbeat that is none: %s", error)
            return
        if heartbeat.worker_id != SUPERVISOR_ID:
            self._heard.add(heartbeat.worker_id)
            self._on_heartbeat(heartbeat)

    async def _beat(self) -> None:
        while True:
            self._changed.clear()
            if self._own_phase is not None:
                try:
                    await self._connections.commands.publish(self._keys.heartbeat_channel, encode(self._own_phase))
                except (RedisError, OSError):
                    logger.debug("the store is away; the phase is told again in a second")
            try:
                async with asyncio.timeout(BEAT_SECONDS if self._own_phase is not None else None):
                    await self._changed.wait()
            except TimeoutError:
                continue
