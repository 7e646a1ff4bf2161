"""The batches that this gateway drives: a bounded number of those that no other gateway drives.

Any gateway takes over a batch as soon as its lock is free. Owners get equal shares of the driven batches and of the
lines in flight (fair_slots.py). A batch whose key may not spend now, or is unknown here, waits in the directory and
holds no slot.
"""

import asyncio
import logging
import math
import time
from dataclasses import dataclass
from functools import partial

from aiohttp import web

from gateway.auth.access import Access
from gateway.auth.rate_limits import Account
from gateway.batches.driver.batch_run import BatchDriver, Read
from gateway.batches.driver.fair_slots import FairSlots, Turn, batch_to_yield, num_of
from gateway.batches.driver.line_answers import LineAnswers
from gateway.batches.storage.batch_store import BatchFolder, Storage
from gateway.batches.storage.catalog import OpenBatch, Quota
from gateway.batches.storage.disk import Lease, to_the_end
from gateway.http.state import GatewayState
from gateway.settings import GatewaySettings
from shared.tasks import cancel_and_wait
from shared.ticks import until_tick

logger = logging.getLogger("gateway")

POLL_SECONDS = 1.0
QUIET_POLL_SECONDS = 5.0  # while no batch of any gateway is open, because each poll wakes a thread
RETRY_SECONDS = 5.0  # after a disk error
MAX_DRIVEN = 16  # plus at most as many that are yielding
LOOKAHEAD = 4 * MAX_DRIVEN  # batches considered per owner, because other gateways may drive the first ones
TIDY_SECONDS = 60.0
UNMADE_NS = 3600 * 10**9  # a batch that is incomplete for this long was left by a killed gateway
# A missing key usually comes back: the key file is being edited, or a gateway started without it. A batch cancelled too
# early is lost to its owner; one cancelled late only takes disk space.
WITHDRAWN_SECONDS = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class _Seen:
    num_open: int  # open batches of all gateways
    waiting: list[BatchFolder]  # batches that may be driven now
    used_bytes: int  # of all files and batches


class BatchService:
    def __init__(self, settings: GatewaySettings, state: GatewayState, access: Access) -> None:
        """Open the storage; raise OSError."""
        assert settings.files_dir is not None
        quota = Quota(settings.max_files_bytes, settings.max_files_bytes_per_key)
        self.storage = Storage(settings.files_dir, quota, int(settings.files_retention_seconds))
        self.max_file_bytes = settings.max_file_bytes
        self._state = state
        self._access = access
        self._max_lines = settings.max_batch_concurrency
        self._slots = FairSlots(settings.max_batch_concurrency, has_owners=access.needs_key)
        self._driven: dict[str, tuple[asyncio.Task[None], BatchDriver]] = {}
        self._turns: dict[str, Turn] = {}  # driven batches that have not been asked to yield
        self._parked: dict[str, tuple[Account, float]] = {}  # owner -> account that may not spend, until when
        self._changed = asyncio.Event()
        self._tidied_at = -math.inf
        state.metrics.batches.set_function(lambda: len(self._driven))
        state.metrics.files_limit.set(settings.max_files_bytes)

    def wake(self) -> None:
        """Look for batches now, because one was created."""
        self._changed.set()

    async def run(self) -> None:
        """Drive batches until cancelled; a draining gateway leaves them to others at once."""
        try:
            while not self._state.open_requests.draining:
                self._changed.clear()
                is_quiet = False
                try:
                    seen = await to_the_end(self._look, frozenset(self._driven))
                    is_quiet = not seen.num_open
                    self._state.metrics.files_bytes.set(seen.used_bytes)
                    self._begin_waiting(seen.waiting)
                    await self._tidy()
                except OSError as error:
                    logger.error("cannot read the batches: %s", error)
                try:
                    async with asyncio.timeout(until_tick(QUIET_POLL_SECONDS if is_quiet else POLL_SECONDS)):
                        await self._changed.wait()
                except TimeoutError:
                    pass
        finally:
            await cancel_and_wait([task for task, _ in self._driven.values()])

    def close(self) -> None:
        """Close the storage, after run() has ended."""
        self.storage.close()

    async def _tidy(self) -> None:
        if time.monotonic() - self._tidied_at >= TIDY_SECONDS:
            self._tidied_at = time.monotonic()
            await to_the_end(self.storage.tidy)

    def _look(self, driven: frozenset[str]) -> _Seen:
        """Collect everything in one call, for one thread."""
        listed = self.storage.batches.open_batches(LOOKAHEAD)
        return _Seen(len(listed), self._waiting(listed, driven), self.storage.used_bytes())

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

    def _waiting(self, open_batches: list[OpenBatch], driven: frozenset[str]) -> list[BatchFolder]:
        """Return the batches that may be driven now."""
        waiting = list[BatchFolder]()
        for listed in open_batches:
            folder = None if listed.id in driven else self.storage.batches.open(listed.id)
            if folder is None:
                if time.time_ns() - listed.created_ns > UNMADE_NS and listed.id not in driven:
                    self.storage.batches.delete(listed.id)
            elif folder.read_progress().has_ended:  # its driver stopped before the last step
                self.storage.batches.end(folder)
            elif self._may_be_driven(folder):
                waiting.append(folder)
        return waiting

    def _may_be_driven(self, folder: BatchFolder) -> bool:
        owner = folder.record.owner_key_hash
        if folder.is_cancelling:
            return True
        if (account := self._access.batch_account(owner)) is not None:
            parked, until = self._parked.get(owner, (account, 0.0))
            return parked is not account or until <= time.monotonic()  # a changed key has a new account
        if self._access.needs_key and folder.seconds_without_key() >= WITHDRAWN_SECONDS:
            self.storage.batches.cancel(folder)
        return False

    def _begin(self, folder: BatchFolder, lease: Lease) -> None:
        record = folder.record
        answers = LineAnswers(self._state, record.id, record.endpoint, self._slots)
        account = partial(self._access.batch_account, record.owner_key_hash)
        read: Read = partial(self._state.pool.run, ("batches of", record.owner_key_hash), None)
        driver = BatchDriver(folder, lease, self.storage, answers, read, account, self._max_lines, self._count_result)
        task = asyncio.create_task(self._drive(driver, folder, lease))
        self._driven[record.id] = task, driver
        self._turns[record.id] = Turn(record.id, record.owner_key_hash, time.monotonic())

        def end(_: asyncio.Task[None]) -> None:
            del self._driven[record.id]
            self._turns.pop(record.id, None)
            self._changed.set()

        task.add_done_callback(end)

    async def _drive(self, driver: BatchDriver, folder: BatchFolder, lease: Lease) -> None:
        record = folder.record
        account = self._access.batch_account(record.owner_key_hash)
        try:
            if account is not None:
                await asyncio.to_thread(folder.has_key)
            await driver.run()
        except Exception:  # usually a full disk; the next holder of the lock continues
            logger.exception("batch %s: stopped; will be retried", record.id)
            await asyncio.sleep(RETRY_SECONDS)
        finally:
            if driver.pause_seconds and account is not None:
                self._parked[record.owner_key_hash] = account, time.monotonic() + driver.pause_seconds
            lease.end()

    def _count_result(self, result: str) -> None:
        self._state.metrics.batch_lines.labels(result).inc()


BATCHES = web.AppKey("BATCHES", BatchService)
