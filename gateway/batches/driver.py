"""One batch, from its first check to its files of results. Runs where the batch's lock is held, and nowhere else.

    validating    every line is read; problems of form end it as `failed`
    in_progress   lines are answered, at most so many at one time; each result is appended as it comes
    finalizing    the results become files; `completed`, or `cancelled` where somebody asked for that

Whatever step is cut off is done again by the next driver: what has a result is not asked again, what is in flight is
attached to. A line that was not begun before a cancel has the error `batch_cancelled`, so each has exactly one result.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

from gateway.auth.rate_limits import Account
from gateway.batches.batch_store import BatchFolder
from gateway.batches.disk import to_the_end
from gateway.batches.file_store import FileStore
from gateway.batches.line_answers import LineAnswers, LineResult
from gateway.batches.lines import BatchLine, LineChecks, LineReader
from gateway.batches.records import BatchProblem, BatchProgress, unix_seconds
from shared.result_file import ResultFile
from shared.tasks import cancel_and_wait

logger = logging.getLogger("gateway")

WATCH_SECONDS = 0.5


class BatchDriver:
    def __init__(
        self,
        folder: BatchFolder,
        files: FileStore,
        answers: LineAnswers,
        account: Callable[[], Account | None],
        max_lines_in_flight: int,
        count_result: Callable[[str], None],
    ) -> None:
        """`account`: what the batch is charged to; None once its key is no more, which cancels it. `count_result`: told
        of each new one whether it is answered, failed or cancelled."""
        self._folder = folder
        self._files = files
        self._answers = answers
        self._account = account
        self._max_lines_in_flight = max_lines_in_flight
        self._count_result = count_result
        self._progress = BatchProgress()
        self._in_flight: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Raises OSError for a disk that fails, and may be run again. Cancel it: another gateway goes on."""
        self._progress = await asyncio.to_thread(self._folder.read_progress)
        if self._progress.status == "validating":
            await self._validate()
        if self._progress.status == "in_progress":
            await self._answer_lines()
        if self._progress.status == "finalizing":
            await to_the_end(self._finalize)
            logger.info("batch %s: %s", self._folder.record.id, self._progress.status)

    # -- validating

    async def _validate(self) -> None:
        checks = LineChecks()
        async for line in self._lines():
            checks.take(line)
            if checks.are_over:
                break
        checks.end()
        progress, now = self._progress, unix_seconds()
        if checks.problems:
            progress.problems, progress.status, progress.failed_at = checks.problems, "failed", now
            self._folder.input_path.unlink(missing_ok=True)
        else:
            progress.total, progress.status, progress.in_progress_at = checks.num_lines, "in_progress", now
        await self._write_progress()

    async def _lines(self) -> AsyncIterator[BatchLine | BatchProblem]:
        reader = LineReader(self._folder.input_path, self._folder.record.endpoint)
        while chunk := await asyncio.to_thread(reader.next_chunk):
            for line in chunk:
                yield line

    # -- answering

    async def _answer_lines(self) -> None:
        results = _Results(self._folder, self._progress, self._count_result)
        try:
            await to_the_end(results.open)
            await self._answer_beside_watch(results)
        finally:
            await to_the_end(results.close)
        self._progress.status, self._progress.finalizing_at = "finalizing", unix_seconds()
        await self._write_progress()

    async def _answer_beside_watch(self, results: "_Results") -> None:
        watch = asyncio.create_task(self._watch())
        try:
            async with asyncio.TaskGroup() as group:
                await self._begin_lines(group, results)
        finally:
            await cancel_and_wait([watch])

    async def _begin_lines(self, group: asyncio.TaskGroup, results: "_Results") -> None:
        room = asyncio.Semaphore(self._max_lines_in_flight)
        answered = results.custom_ids()
        async for line in self._lines():
            assert isinstance(line, BatchLine), "the file was validated"
            if line.custom_id in answered:
                continue
            await room.acquire()
            account = self._account()
            if account is None or self._is_cancelling():
                results.add_cancelled(line)
                room.release()
                continue
            task = group.create_task(self._answer(line, account, results))
            self._in_flight.add(task)
            task.add_done_callback(self._in_flight.discard)
            task.add_done_callback(lambda _: room.release())

    async def _answer(self, line: BatchLine, account: Account, results: "_Results") -> None:
        try:
            result = await self._answers.answer(line, account)
        except asyncio.CancelledError:
            if not self._answers.is_withdrawing:
                raise
            results.add_cancelled(line)
            return
        results.add(line, result)
        if result.forget is not None:  # now that it is on the disk it would only take the room of others
            await result.forget()

    async def _watch(self) -> None:
        """Tells how far it is, and hears of a cancel."""
        told = -1
        while True:
            if self._is_cancelling() and not self._answers.is_withdrawing:
                self._answers.is_withdrawing = True
                for task in self._in_flight:
                    task.cancel()
            if (num_results := self._progress.completed + self._progress.failed) != told:
                with contextlib.suppress(OSError):  # results that cannot be written are told by their own writing
                    await self._write_progress(is_durable=False)  # for those who look; it is counted again from results
                told = num_results
            await asyncio.sleep(WATCH_SECONDS)

    def _is_cancelling(self) -> bool:
        return self._folder.is_cancelling or self._account() is None

    # -- finalizing

    def _finalize(self) -> None:
        folder, progress, record = self._folder, self._progress, self._folder.record
        for path, file_id, name, count in (
            (folder.output_path, record.output_file_id, "output", progress.completed),
            (folder.errors_path, record.error_file_id, "errors", progress.failed),
        ):
            if count:
                filename = f"{record.id}_{name}.jsonl"
                self._files.adopt(path, file_id, record.owner_key_hash, filename, "batch_output")
            path.unlink(missing_ok=True)
        progress.has_output, progress.has_errors = progress.completed > 0, progress.failed > 0
        if self._is_cancelling():
            progress.status, progress.cancelled_at = "cancelled", unix_seconds()
        else:
            progress.status, progress.completed_at = "completed", unix_seconds()
        folder.input_path.unlink(missing_ok=True)
        folder.write_progress(progress)

    async def _write_progress(self, *, is_durable: bool = True) -> None:
        await to_the_end(self._folder.write_progress, self._progress, is_durable=is_durable)


class _Results:
    """Both files of results, and their counts: an append is one small write into the page cache, done in the loop."""

    def __init__(self, folder: BatchFolder, progress: BatchProgress, count_result: Callable[[str], None]) -> None:
        self._folder = folder
        self._progress = progress
        self._count_result = count_result
        self._files = contextlib.ExitStack()

    def open(self) -> None:
        """In a thread: all results that there are are read."""
        self._output = ResultFile(self._folder.output_path)
        self._files.callback(self._output.close)
        self._errors = ResultFile(self._folder.errors_path)
        self._files.callback(self._errors.close)
        self._tell_progress()

    def custom_ids(self) -> frozenset[str]:
        return frozenset(self._output.custom_ids | self._errors.custom_ids)

    def add(self, line: BatchLine, result: LineResult) -> None:
        is_answered = result.status == 200
        file = self._output if is_answered else self._errors
        file.add(line.custom_id, result.request_id, result.status, result.body)
        self._count("answered" if is_answered else "failed")

    def add_cancelled(self, line: BatchLine) -> None:
        message = "The batch was cancelled before this request had its answer."
        self._errors.add_failure(line.custom_id, "batch_cancelled", message)
        self._count("cancelled")

    def close(self) -> None:
        self._files.close()

    def _count(self, result: str) -> None:
        self._count_result(result)
        self._tell_progress()

    def _tell_progress(self) -> None:
        self._progress.completed, self._progress.failed = len(self._output.custom_ids), len(self._errors.custom_ids)
