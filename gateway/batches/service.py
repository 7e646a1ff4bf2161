"""The batches that this gateway drives: those in the directory that no other gateway does, a few at one time.

A batch is begun by the gateway that created it, and taken over by any other as soon as its lock is free. Its owner may
have others waiting: of several owners the one with the fewest running comes first.
"""

import asyncio
import logging
import os
from collections import Counter
from functools import partial

from aiohttp import web

from gateway.auth.access import Access
from gateway.batches.batch_store import BatchFolder, BatchStore
from gateway.batches.driver import BatchDriver
from gateway.batches.file_store import FileStore
from gateway.batches.line_answers import LineAnswers
from gateway.settings import GatewaySettings
from gateway.state import GatewayState
from shared.tasks import cancel_and_wait

logger = logging.getLogger("gateway")

POLL_SECONDS = 1.0
RETRY_SECONDS = 5.0  # after a failure of the disk
MAX_DRIVEN = 16


class BatchService:
    def __init__(self, settings: GatewaySettings, state: GatewayState, access: Access) -> None:
        assert settings.files_dir is not None
        self.files = FileStore(settings.files_dir)
        self.batches = BatchStore(settings.files_dir)
        self.max_file_bytes = settings.max_file_bytes
        self.max_files_bytes = settings.max_files_bytes
        self._state = state
        self._access = access
        self._max_lines = settings.max_batch_concurrency
        self._slots = asyncio.Semaphore(settings.max_batch_concurrency)
        self._driven: dict[str, asyncio.Task[None]] = {}
        self._owners: dict[str, str] = {}  # of the driven, by id
        self._ended: set[str] = set()
        self._changed = asyncio.Event()
        state.metrics.batches.set_function(lambda: len(self._driven))

    def prepare(self) -> None:
        """Raises OSError."""
        self.files.prepare()
        self.batches.prepare()

    def wake(self) -> None:
        """There is a new batch."""
        self._changed.set()

    async def run(self) -> None:
        """Until it is cancelled; a gateway that drains leaves its batches to others at once."""
        try:
            while not self._state.open_requests.draining:
                self._changed.clear()
                try:
                    await self._begin_waiting()
                except OSError as error:
                    logger.error("cannot read the batches: %s", error)
                try:
                    async with asyncio.timeout(POLL_SECONDS):
                        await self._changed.wait()
                except TimeoutError:
                    pass
        finally:
            await cancel_and_wait(self._driven.values())

    async def _begin_waiting(self) -> None:
        if len(self._driven) >= MAX_DRIVEN:
            return
        known = self._ended | self._driven.keys()
        waiting, ended = await asyncio.to_thread(self._unended, known)
        self._ended |= ended
        while waiting and len(self._driven) < MAX_DRIVEN:
            running = Counter(self._owners.values())
            folder = min(waiting, key=lambda folder: (running[folder.record.owner_key_hash], folder.record.created_ns))
            waiting.remove(folder)
            if (lock := folder.try_lock()) is not None:
                self._begin(folder, lock)

    def _unended(self, known: set[str]) -> tuple[list[BatchFolder], set[str]]:
        waiting, ended = list[BatchFolder](), set[str]()
        for name in self.batches.names():
            folder = None if name in known else self.batches.open(name)
            if folder is None:
                continue
            if folder.read_progress().has_ended:
                ended.add(name)
            else:
                waiting.append(folder)
        return waiting, ended

    def _begin(self, folder: BatchFolder, lock: int) -> None:
        batch_id = folder.record.id
        task = asyncio.create_task(self._drive(folder, lock))
        self._driven[batch_id] = task
        self._owners[batch_id] = folder.record.owner_key_hash

        def end(_: asyncio.Task[None]) -> None:
            del self._driven[batch_id], self._owners[batch_id]
            self._changed.set()

        task.add_done_callback(end)

    async def _drive(self, folder: BatchFolder, lock: int) -> None:
        record = folder.record
        try:
            answers = LineAnswers(self._state, record.id, record.endpoint, self._slots)
            account = partial(self._access.batch_account, record.owner_key_hash)
            driver = BatchDriver(folder, self.files, answers, account, self._max_lines, self._count_result)
            await driver.run()
        except Exception:  # a full disk, most of all: whoever holds the lock next goes on where this one ended
            logger.exception("batch %s stopped; it is tried again", record.id)
            await asyncio.sleep(RETRY_SECONDS)
        finally:
            os.close(lock)

    def _count_result(self, result: str) -> None:
        self._state.metrics.batch_lines.labels(result).inc()


BATCHES = web.AppKey("BATCHES", BatchService)
