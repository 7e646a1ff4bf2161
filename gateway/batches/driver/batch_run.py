"""The life of one batch, from validation to its result files. Runs only in the driver that holds the batch's lock.

    validating    every line is read; a malformed line ends the batch as `failed`
    in_progress   lines are answered, a bounded number at a time; each result is appended as it arrives
    finalizing    the results become files; the batch ends as `completed` or `cancelled`

The next driver repeats an interrupted step: it skips lines with results and attaches to lines in flight. A line that
had not started before a cancel gets the error `batch_cancelled`, so each line has exactly one result. A batch may yield
before its end, to another owner's batch or until its key may spend again; it then holds no resources here.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial

from gateway.auth.rate_limits import Account
from gateway.batches.driver.fair_slots import Room
from gateway.batches.driver.line_answers import Later, LineAnswers
from gateway.batches.driver.lines import BatchLine, LineChecks, LineReader
from gateway.batches.driver.metrics import DriverMetrics
from gateway.batches.driver.results import BatchResults
from gateway.batches.storage.batch_store import BatchFolder
from gateway.batches.storage.disk import Lease, to_the_end
from gateway.batches.storage.quota import StorageFull
from gateway.batches.storage.records import BatchProblem, BatchProgress, Resume, unix_seconds
from gateway.batches.storage.storage import Storage
from shared.tasks import cancel_and_wait

logger = logging.getLogger("gateway")

WATCH_SECONDS = 0.5
STEADY_SECONDS = 60.0  # liveness probes end a driver that hangs before this time
MAX_CRASHES = 3  # drivers that ended while driving a batch; one or two may have had other causes
GATEWAY_STOPPED = "gateway_stopped"
FULL = "files_full"
_FULL_MESSAGE = "No disk space for the result. Delete files and send the line again."
_GATEWAY_STOPPED_MESSAGE = f"The batch driver stopped {MAX_CRASHES} times while it ran this batch. It is not retried."


class BatchRun:
    def __init__(
        self,
        folder: BatchFolder,
        lease: Lease,
        storage: Storage,
        answers: LineAnswers,
        account: Callable[[], Account | None],
        max_lines_in_flight: int,
        metrics: DriverMetrics,
    ) -> None:
        """Create the run.

        Args:
            folder: The batch.
            lease: Its lock.
            storage: Files and batches.
            answers: Answers the lines.
            account: Returns the account to charge, or None while the key is unknown.
            max_lines_in_flight: Limit of concurrent lines.
            metrics: Counts the results.
        """
        self.pause_seconds = 0.0  # after it yielded: seconds until its key may spend again
        self._folder = folder
        self._lease = lease
        self._files = storage.files
        self._batches = storage.batches
        self._answers = answers
        self._account = account
        self._room = Room(max_lines_in_flight)
        self._metrics = metrics
        self._progress = BatchProgress()
        self._in_flight: dict[int, asyncio.Task[None]] = {}  # by line number
        self._left: list[BatchLine] = []  # lines without a result when the batch yielded
        self._is_full = False  # True once there is no space for more results

    def give_way(self) -> None:
        """Start no more lines, and yield when those in flight have ended."""
        self._answers.leaving.set()

    async def run(self) -> None:
        """Run until the batch ends or yields. After cancellation or an OSError it may be run again, anywhere."""
        self._progress = await asyncio.to_thread(self._folder.read_progress)
        if self._progress.status == "validating":
            await self._validate()
        if self._progress.status == "in_progress":
            await self._answer_lines()
        if self._progress.status == "finalizing":
            await to_the_end(self._finalize)
            logger.info("batch %s: %s", self._folder.record.id, self._progress.status)

    @property
    def _exceeded_crash_limit(self) -> bool:
        return self._lease.num_crashes >= MAX_CRASHES

    # -- validating

    async def _validate(self) -> None:
        checks = await self._checked()
        progress, now = self._progress, unix_seconds()
        if checks.problems:
            progress.problems, progress.status, progress.failed_at = checks.problems, "failed", now
            self._folder.input_path.unlink(missing_ok=True)
            await to_the_end(self._batches.release, self._folder)
        else:
            progress.total, progress.status, progress.in_progress_at = checks.num_lines, "in_progress", now
            progress.failure_bytes = checks.failure_bytes
        await self._write_progress()
        if checks.problems:
            await to_the_end(self._batches.end, self._folder)

    async def _checked(self) -> LineChecks:
        checks = LineChecks()
        if self._exceeded_crash_limit:
            checks.problems.append(BatchProblem(code=GATEWAY_STOPPED, message=_GATEWAY_STOPPED_MESSAGE))
            return checks
        async for line in self._lines(Resume()):
            checks.take(line)
            if checks.are_over:
                break
        checks.end()
        if not checks.problems:
            try:
                await to_the_end(self._batches.reserve, self._folder, checks.failure_bytes)
            except StorageFull as error:
                checks.problems.append(BatchProblem(code=error.code, message=error.message))
        return checks

    async def _lines(self, resume: Resume) -> AsyncIterator[BatchLine | BatchProblem]:
        record = self._folder.record
        reader = LineReader(self._folder.input_path, record.endpoint, number=resume.number, offset=resume.offset)
        while not reader.is_over:
            for line in await asyncio.to_thread(reader.next_chunk):
                yield line

    # -- answering

    async def _answer_lines(self) -> None:
        reserve = partial(self._batches.reserve, self._folder)
        results = BatchResults(self._folder, self._progress, reserve, self._metrics)
        try:
            resume = await to_the_end(results.open)
            await self._answer_beside_watch(results, resume)
            if self._left:
                self._progress.resume = results.resume_at(min(self._left, key=lambda line: line.number))
        finally:
            await to_the_end(results.close)
        if not self._left:
            self._progress.status, self._progress.finalizing_at = "finalizing", unix_seconds()
        await self._write_progress()

    async def _answer_beside_watch(self, results: BatchResults, resume: Resume) -> None:
        watch = asyncio.create_task(self._watch())
        try:
            async with asyncio.TaskGroup() as group:
                await self._begin_lines(group, results, resume)
        finally:
            await cancel_and_wait([watch])

    async def _begin_lines(self, group: asyncio.TaskGroup, results: BatchResults, resume: Resume) -> None:
        async for line in self._lines(resume):
            assert isinstance(line, BatchLine), "the file was validated"
            if results.has(line):
                continue
            if self._exceeded_crash_limit:
                results.add_failure(line, GATEWAY_STOPPED, _GATEWAY_STOPPED_MESSAGE)
                continue
            if self._is_full:
                results.add_failure(line, FULL, _FULL_MESSAGE)
                continue
            await self._room.enter(len(line.body))
            if not self._begin(group, line, results):
                self._room.leave(len(line.body))
            if self._left:
                return

    def _begin(self, group: asyncio.TaskGroup, line: BatchLine, results: BatchResults) -> bool:
        account = self._account()
        if self._folder.is_cancelling:
            _add_cancelled(results, line)
        elif account is None or self._answers.leaving.is_set():
            self._left.append(line)
        else:
            self._in_flight[line.number] = task = group.create_task(self._answer(line, account, results))
            task.add_done_callback(lambda _: self._room.leave(len(line.body)))
            return True
        return False

    async def _answer(self, line: BatchLine, account: Account, results: BatchResults) -> None:
        try:
            result = await self._answers.answer(line, account)
        except Later as later:
            self._leave(line, later.seconds)
            return
        except asyncio.CancelledError:
            if not self._answers.is_withdrawing:
                raise
            if self._folder.is_cancelling:
                _add_cancelled(results, line)
            else:
                self._leave(line)
            return
        finally:
            del self._in_flight[line.number]
        try:
            await results.make_room(line, result)
            results.add(line, result)
        except StorageFull:
            self._is_full = True
            results.add_failure(line, FULL, _FULL_MESSAGE)
        if result.forget is not None:  # the result is on disk: free its space in the store
            await result.forget()

    def _leave(self, line: BatchLine, seconds: float = 0.0) -> None:
        self._left.append(line)
        self.pause_seconds = max(self.pause_seconds, seconds)
        self.give_way()

    async def _watch(self) -> None:
        """Write the progress, and withdraw lines in flight after a cancel or when the key is gone."""
        num_written, began_at = -1, asyncio.get_running_loop().time()
        while True:
            if self._folder.is_cancelling or self._account() is None:
                self._withdraw()
            if (num_results := self._progress.completed + self._progress.failed) != num_written:
                with contextlib.suppress(OSError):  # writing the results reports a failing disk
                    await self._write_progress(is_durable=False)  # for display only; results are the truth
                num_written = num_results
            if asyncio.get_running_loop().time() - began_at >= STEADY_SECONDS:
                self._lease.forgive()
            await asyncio.sleep(WATCH_SECONDS)

    def _withdraw(self) -> None:
        self._answers.is_withdrawing = True
        for task in self._in_flight.values():
            if not task.cancelling():
                task.cancel()

    # -- finalizing

    def _finalize(self) -> None:
        folder, progress, record = self._folder, self._progress, self._folder.record
        for path, file_id, name, count in (
            (folder.output_path, record.output_file_id, "output", progress.completed),
            (folder.errors_path, record.error_file_id, "errors", progress.failed),
        ):
            if count:
                filename = f"{record.id}_{name}.jsonl"
                expires_seconds = record.output_expires_seconds
                self._files.adopt(path, file_id, record.owner_key_hash, filename, "batch_output", expires_seconds)
            path.unlink(missing_ok=True)
        progress.has_output, progress.has_errors = progress.completed > 0, progress.failed > 0
        progress.resume = Resume()
        if folder.is_cancelling:
            progress.status, progress.cancelled_at = "cancelled", unix_seconds()
        else:
            progress.status, progress.completed_at = "completed", unix_seconds()
        folder.input_path.unlink(missing_ok=True)
        self._batches.release(folder)
        folder.write_progress(progress)
        self._batches.end(folder)

    async def _write_progress(self, *, is_durable: bool = True) -> None:
        await to_the_end(self._folder.write_progress, self._progress, is_durable=is_durable)


def _add_cancelled(results: BatchResults, line: BatchLine) -> None:
    message = "The batch was cancelled before this request was answered."
    results.add_failure(line, "batch_cancelled", message, count_as="cancelled")
