"""The two result files of a batch and their counts; an append is one small write to the page cache on the event loop.

Disk space is reserved before a result is written. Enough for one error per line is reserved at the start.
"""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from gateway.batches.driver.line_answers import LineResult
from gateway.batches.driver.lines import BatchLine, failure_bytes
from gateway.batches.driver.metrics import DriverMetrics
from gateway.batches.storage.batch_store import BatchFolder
from gateway.batches.storage.disk import to_the_end
from gateway.batches.storage.quota import StorageFull
from gateway.batches.storage.records import BatchProgress, Resume
from shared.result_file import ResultFile

STEP_BYTES = 2**20  # reserved at a time


class BatchResults:
    def __init__(
        self, folder: BatchFolder, progress: BatchProgress, reserve: Callable[[int], None],
        metrics: DriverMetrics,
    ) -> None:  # fmt: skip
        """Create the results.

        Args:
            folder: The batch.
            progress: Its state, whose counts are updated.
            reserve: Reserves a total number of bytes for results or raises StorageFull; blocking.
            metrics: Counts each new result.
        """
        self._folder = folder
        self._progress = progress
        self._reserve = reserve
        self._reserved_bytes = 0
        self._reserving = asyncio.Lock()
        self._metrics = metrics
        self._files = contextlib.ExitStack()
        self._known = Resume()
        self._done: set[int] = set()

    def open(self) -> Resume:
        """Open the files and return the position to continue at; blocking, because later results are read."""
        resume = self._progress.resume
        num_output_bytes, num_error_bytes = _size(self._folder.output_path), _size(self._folder.errors_path)
        if num_output_bytes >= resume.output_bytes and num_error_bytes >= resume.error_bytes:
            self._known = resume  # otherwise the machine lost some results, and all remaining ones are read
        self._output = ResultFile(self._folder.output_path, known_bytes=self._known.output_bytes)
        self._files.callback(self._output.close)
        self._errors = ResultFile(self._folder.errors_path, known_bytes=self._known.error_bytes)
        self._files.callback(self._errors.close)
        self._done = set(self._known.done)
        self._tell_progress()
        return self._known

    def has(self, line: BatchLine) -> bool:
        if line.custom_id in self._output.custom_ids or line.custom_id in self._errors.custom_ids:
            self._done.add(line.number)
        return line.number in self._done

    async def make_room(self, line: BatchLine, result: LineResult) -> None:
        """Reserve space for a result before add(); raise StorageFull."""
        num_bytes = len(result.body) + failure_bytes(line.custom_id)
        async with self._reserving:
            needed = self._output.num_bytes + self._errors.num_bytes + num_bytes
            if needed > self._reserved_bytes:
                try:
                    await self._take(needed + STEP_BYTES)
                except StorageFull:
                    await self._take(needed)  # the exact size may still fit

    async def _take(self, num_bytes: int) -> None:
        await to_the_end(self._reserve, self._progress.failure_bytes + num_bytes)
        self._reserved_bytes = num_bytes

    def add(self, line: BatchLine, result: LineResult) -> None:
        is_answered = result.status == 200
        file = self._output if is_answered else self._errors
        file.add(line.custom_id, result.request_id, result.status, result.body)
        self._count(line, "answered" if is_answered else "failed")

    def add_failure(self, line: BatchLine, code: str, message: str, *, count_as: str = "failed") -> None:
        self._errors.add_failure(line.custom_id, code, message)
        self._count(line, count_as)

    def resume_at(self, line: BatchLine) -> Resume:
        """Return the position of `line`, given that all earlier lines have results."""
        return Resume(
            number=line.number,
            offset=line.offset,
            done=sorted(number for number in self._done if number > line.number),
            output_bytes=self._output.num_bytes,
            error_bytes=self._errors.num_bytes,
            completed=self._progress.completed,
            failed=self._progress.failed,
        )

    def close(self) -> None:
        self._files.close()

    def _count(self, line: BatchLine, result: str) -> None:
        self._done.add(line.number)
        self._metrics.lines.labels(result).inc()
        self._tell_progress()

    def _tell_progress(self) -> None:
        self._progress.completed = self._known.completed + len(self._output.custom_ids)
        self._progress.failed = self._known.failed + len(self._errors.custom_ids)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
