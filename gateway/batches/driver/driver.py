"""The batches that this process drives: a bounded number of those that no other driver holds.

Any driver takes over a batch as soon as its lock is free. Owners get equal shares of the driven batches and of the
lines in flight (fair_slots.py). A batch whose key may not spend now, or is unknown here, waits in the directory and
holds no slot.
"""

import asyncio
import logging
import time
from functools import partial

from gateway.auth.access import Access
from gateway.auth.rate_limits import Account
from gateway.batches.driver.batch_run import BatchRun
from gateway.batches.driver.fair_slots import FairSlots, Turn, batch_to_yield, num_of
from gateway.batches.driver.line_answers import LineAnswers
from gateway.batches.driver.metrics import DriverMetrics
from gateway.batches.storage.batch_store import BatchFolder
from gateway.batches.storage.catalog import OpenBatch
from gateway.batches.storage.disk import Lease, to_the_end
from gateway.batches.storage.storage import Storage
from gateway.http.state import GatewayState
from shared.tasks import cancel_and_wait
from shared.ticks import until_tick

logger = logging.getLogger("gateway")

POLL_SECONDS = 1.0
RETRY_SECONDS = 5.0  # after a disk error
MAX_DRIVEN = 16  # plus at most as many that are yielding
LOOKAHEAD = 4 * MAX_DRIVEN  # batches considered per owner, because other drivers may hold the first ones
UNMADE_NS = 3600 * 10**9  # a batch that is incomplete for this long was left by a killed gateway
# A missing key usually comes back: the key file is being edited, or a driver started without it. A batch cancelled too
# early is lost to its owner; one cancelled late only takes disk space.
WITHDRAWN_SECONDS = 24 * 3600.0


class BatchDriver:
    def __init__(
        self, storage: Storage, state: GatewayState, access: Access, metrics: DriverMetrics, max_lines: int
    ) -> None:
        """Create the driver; at most `max_lines` lines of all its batches are in flight."""
        self._batches = storage.batches
        self._storage = storage
        self._state = state
        self._access = access
        self._metrics = metrics
        self._max_lines = max_lines
        self._slots = FairSlots(max_lines, has_owners=access.needs_key)
        self._driven: dict[str, tuple[asyncio.Task[None], BatchRun]] = {}
        self._turns: dict[str, Turn] = {}  # driven batches that have not been asked to yield
        self._parked: dict[str, tuple[Account, float]] = {}  # owner -> account that may not spend, until when
        self._ended = asyncio.Event()  # a driven batch has ended or yielded
        metrics.batches.set_function(lambda: len(self._driven))

    async def run(self) -> None:
        """Drive batches until cancelled; then leave them to other drivers at once."""
        try:
            while True:
                self._ended.clear()
                try:
                    self._begin_waiting(await to_the_end(self._waiting, frozenset(self._driven)))
                except OSError as error:
                    logger.error("cannot read the batches: %s", error)
                try:
                    async with asyncio.timeout(until_tick(POLL_SECONDS)):
                        await self._ended.wait()
                except TimeoutError:
                    pass
        finally:
            await cancel_and_wait([task for task, _ in self._driven.values()])

    def _begin_waiting(self, waiting: list[BatchFolder]) -> None:
        waiting.sort(key=lambda folder: folder.record.created_ns)
        while waiting and len(self._driven) < 2 * MAX_DRIVEN:
            turns = list(self._turns.values())
            folder = min(waiting, key=lambda folder: num_of(folder.record.owner_key_hash, turns))
            waiting.remove(folder)
            is_full = len(turns) >= MAX_DRIVEN
            leaver = batch_to_yield(turns, folder.record.owner_key_hash, time.monotonic()) if is_full else None
            if is_full and leaver is None:
                return  # no other waiting owner has fewer
            if (lease := folder.try_lock()) is not None:
                if leaver is not None:
                    self._driven[leaver.batch_id][1].give_way()
                    del self._turns[leaver.batch_id]
                self._begin(folder, lease)

    def _waiting(self, driven: frozenset[str]) -> list[BatchFolder]:
        """Return the batches that may be driven now. Blocking."""
        folders = [
            self._waiting_folder(batch) for batch in self._batches.open_batches(LOOKAHEAD) if batch.id not in driven
        ]
        return [folder for folder in folders if folder is not None]

    def _waiting_folder(self, batch: OpenBatch) -> BatchFolder | None:
        folder = self._batches.open(batch.id)
        if folder is None:
            if time.time_ns() - batch.created_ns > UNMADE_NS:
                self._batches.delete(batch.id)
        elif folder.read_progress().has_ended:  # its driver stopped before the last step
            self._batches.end(folder)
        elif self._may_be_driven(folder):
            return folder
        return None

    def _may_be_driven(self, folder: BatchFolder) -> bool:
        owner = folder.record.owner_key_hash
        if folder.is_cancelling:
            return True
        if (account := self._access.batch_account(owner)) is not None:
            parked, until = self._parked.get(owner, (account, 0.0))
            return parked is not account or until <= time.monotonic()  # a changed key has a new account
        if self._access.needs_key and folder.seconds_without_key() >= WITHDRAWN_SECONDS:
            self._batches.cancel(folder)
        return False

    def _begin(self, folder: BatchFolder, lease: Lease) -> None:
        record = folder.record
        answers = LineAnswers(self._state, record.id, record.endpoint, self._slots)
        account = partial(self._access.batch_account, record.owner_key_hash)
        run = BatchRun(folder, lease, self._storage, answers, account, self._max_lines, self._metrics)
        task = asyncio.create_task(self._drive(run, folder, lease))
        self._driven[record.id] = task, run
        self._turns[record.id] = Turn(record.id, record.owner_key_hash, time.monotonic())

        def end(_: asyncio.Task[None]) -> None:
            del self._driven[record.id]
            self._turns.pop(record.id, None)
            self._ended.set()

        task.add_done_callback(end)

    async def _drive(self, run: BatchRun, folder: BatchFolder, lease: Lease) -> None:
        record = folder.record
        account = self._access.batch_account(record.owner_key_hash)
        try:
            if account is not None:
                await asyncio.to_thread(folder.has_key)
            await run.run()
        except Exception:  # usually a full disk; the next holder of the lock continues
            logger.exception("batch %s: stopped; will be retried", record.id)
            await asyncio.sleep(RETRY_SECONDS)
        finally:
            if run.pause_seconds and account is not None:
                self._parked[record.owner_key_hash] = account, time.monotonic() + run.pause_seconds
            lease.end()
