"""One served model's client of the store: puts its parts together and runs their tasks.

    client = InferenceClient(connect(url), RedisKeys("model name"), gateway_id)
    await client.start()
    stream = await client.submission.submit(request)
    await client.close()

Pub/sub is the fast path and may lose messages; the journals are authoritative. One task listens and never waits for the
store (listening.py). Another reads journals and repeats calls that the store has not answered (recovery.py).
"""

import asyncio
import time
from collections.abc import Callable

from gateway.fleet import Fleet
from gateway.store.acceptance import Acceptance, QueueRules
from gateway.store.duties import HeldAnswers, OverdueRequests, Withdrawals
from gateway.store.inbox import cancelled_event
from gateway.store.kv_watch import KVWatch
from gateway.store.listening import Listening
from gateway.store.recovery import QUIET_SECONDS, Recovery
from gateway.store.replication import Replication
from gateway.store.request_archive import RequestArchive
from gateway.store.serving_rate import ServingRate
from gateway.store.shared_limits import SharedLimits
from gateway.store.store_calls import StoreCalls
from gateway.store.store_probe import StoreHistory, StoreMemory, StoreProbe
from gateway.store.stream_table import DeliveryCounts, StreamTable
from gateway.store.submission import Submission
from gateway.work.owner_tasks import OwnerTasks
from shared.fleet_clock import FleetClock
from shared.redis_client import RedisConnections
from shared.redis_keys import RedisKeys
from shared.redis_scripts import RedisScripts
from shared.tasks import cancel_and_wait

CLOSE_SECONDS = 2.0
CUT_OFF_SECONDS = 10.0  # without any reply: longer than a failover of the store


class InferenceClient:
    def __init__(
        self,
        connections: RedisConnections,
        keys: RedisKeys,
        gateway_id: str,
        *,
        queue_rules: QueueRules | None = None,
        quiet_seconds: float = QUIET_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        scripts: RedisScripts | None = None,
    ) -> None:
        """Create the client of one served model.

        Args:
            connections: Connections to the store; close() closes them.
            keys: The model's key names.
            gateway_id: The id of this gateway.
            queue_rules: How requests are queued; None: the defaults.
            quiet_seconds: Time without events after which a stream's journal is read.
            clock: Monotonic clock, in seconds.
            scripts: Scripts to use instead of those of `connections`.
        """
        scripts = scripts or RedisScripts(connections.commands, keys)
        self._connections = connections
        self._calls = StoreCalls()
        self._fleet_clock = FleetClock(scripts.tick, clock)
        self._wake = asyncio.Event()
        self.counts = DeliveryCounts()
        self.fleet = Fleet(clock)
        self.store_memory = StoreMemory()
        self.history = StoreHistory(connections.commands, keys, self._calls, self._fleet_clock)
        self._owned: list[asyncio.Task[None]] = []
        self.kv = KVWatch(connections, keys, self.counts)
        self.probe = StoreProbe(connections.commands, keys, self._calls, self._fleet_clock, clock)
        self.streams = StreamTable(self._wake)
        self.archive = RequestArchive(connections.commands, keys, self._calls, self.streams)
        self.limits = SharedLimits(scripts, self._fleet_clock, self._calls)
        self._withdrawals = Withdrawals(scripts, self._wake)
        self.streams.on_failed = self._withdrawals.add
        self._held = HeldAnswers(scripts, clock)
        self._overdue = OverdueRequests(scripts, self._fleet_clock, self.streams, self.fleet.can_serve)
        self._listening = Listening(
            connections, keys, gateway_id, self.streams, self.fleet, self.counts, clock=clock
        )  # fmt: skip
        rules = queue_rules or QueueRules()
        replication = None
        if rules.replica_timeout_seconds is not None:
            replication = Replication(connections.blocking, keys, rules.replica_timeout_seconds)
        self._serving_rate = ServingRate(connections.commands, keys, self.fleet, clock)
        acceptance = Acceptance(
            scripts, gateway_id, self.fleet, rules, self._serving_rate, self._fleet_clock, replication
        )  # fmt: skip
        self._recovery = Recovery(
            self.streams, acceptance, self.archive, self._withdrawals, self._calls, self.counts,
            quiet_seconds=quiet_seconds, clock=clock,
        )  # fmt: skip
        self.submission = Submission(
            self.streams, acceptance, self._recovery, self._held, self._withdrawals, self._calls, clock=clock
        )  # fmt: skip

    async def start(self, owners: OwnerTasks | None = None) -> None:
        """Start the tasks under `owners`; return at once, even if the store is unavailable."""
        owners = owners or OwnerTasks()
        duties = [self._withdrawals.send, self._held.prolong, self._overdue.end]
        self._owned = [
            owners.start("store_primary", self._connections.follow_primary()),
            owners.start("listening", self._listening.run()),
            owners.start("recovery", self._recovery.run(self._wake, duties)),
            owners.start("fleet_clock", self._fleet_clock.run()),
            owners.start("store_memory", self.store_memory.watch(self._connections.commands)),
            owners.start("store_history", self.history.watch()),
            owners.start("serving_rate", self._serving_rate.watch()),
            owners.start("kv_watch", self.kv.run()),
        ]

    def is_cut_off(self) -> bool:
        """Return whether the store has been silent so long that another gateway can serve kept answers better."""
        return self._fleet_clock.silent_seconds() >= CUT_OFF_SECONDS

    async def close(self) -> None:
        """Withdraw running requests, except kept ones, and end the tasks and the connections."""
        self._held.clear()
        for stream in self.streams:
            self.streams.end(stream, cancelled_event(stream))
            if stream.terms is None:
                self._withdrawals.add(stream)
        await self._calls.try_within(CLOSE_SECONDS, self._withdrawals.send())
        await cancel_and_wait(self._owned)
        await self._calls.aclose()
        await self._listening.aclose()
        self.archive.close()
        await self._connections.aclose()
