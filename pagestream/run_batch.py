"""`pagestream run-batch`: send the requests of a file to a running server at batch priority.

    pagestream run-batch -i requests.jsonl -o results.jsonl [--url http://127.0.0.1:8000] [--concurrency 64]

Each line gets exactly one result, even if the server, a worker, or this program stops: run it again with the same
files. A busy server is asked until it answers. One that does not answer at all is given up after ten minutes, and the
next run asks it again. Each request has its own Idempotency-Key, so an answer that was lost on the way is read from the
store instead of being computed again. Lines are in OpenAI's batch format:

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
"""

import argparse
import asyncio
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from pagestream.file_lock import file_lock
from shared.result_file import ResultFile, ResultFileError

MAX_SILENT_ATTEMPTS = 20  # without any answer; with pauses up to MAX_PAUSE_SECONDS an outage of ten minutes
MAX_PAUSE_SECONDS = 30.0
PROGRESS_SECONDS = 1.0
NO_ANSWER = "no_answer"
_REPEATED = frozenset((408, 429, 500, 502, 503, 504))
URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


class BatchFileError(ValueError):
    """An invalid batch file; the message names the line."""


@dataclass(frozen=True, slots=True)
class BatchLine:
    custom_id: str
    url: str
    body: bytes
    key: str  # equal in every run over the same line, so that the server computes it once


def read_lines(path: Path) -> list[BatchLine]:
    """Read and check all lines before any request is sent; raise BatchFileError."""
    lines: dict[str, BatchLine] = {}
    for number, text in enumerate(_texts(path), start=1):
        line = _line(text, f"{path}, line {number}")
        if line.custom_id in lines:
            raise BatchFileError(f"{path}, line {number}: custom_id {line.custom_id!r} is used twice")
        lines[line.custom_id] = line
    if not lines:
        raise BatchFileError(f"{path}: contains no requests")
    return list(lines.values())


def _texts(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from (text for text in file if text.strip())
    except OSError as error:
        raise BatchFileError(f"{path}: {error.strerror}") from error


def _line(text: bytes, where: str) -> BatchLine:
    fields = _object(text, where)
    custom_id, url, body = fields.get("custom_id"), fields.get("url"), fields.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise BatchFileError(f"{where}: custom_id: expected a text")
    if fields.get("method", "POST") != "POST" or url not in URLS:
        raise BatchFileError(f"{where}: url: expected a POST of {', '.join(URLS)}; got {url!r}")
    if not isinstance(body, dict) or body.get("stream"):
        raise BatchFileError(f"{where}: body: expected the JSON object of a request without stream")
    encoded = json.dumps(body).encode()
    digest = hashlib.blake2b(b"\0".join((custom_id.encode(), url.encode(), encoded)), digest_size=16)
    return BatchLine(custom_id, url, encoded, f"batch-{digest.hexdigest()}")


def _object(text: bytes, where: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise BatchFileError(f"{where}: {error}") from error
    if not isinstance(fields, dict):
        raise BatchFileError(f"{where}: expected a JSON object")
    return fields


class Batch:
    def __init__(self, session: aiohttp.ClientSession, results: ResultFile, concurrency: int) -> None:
        self.num_answered, self.num_failed = 0, 0
        self._session = session
        self._results = results
        self._concurrency = concurrency

    async def run(self, lines: Sequence[BatchLine]) -> None:
        waiting = iter(lines)
        async with asyncio.TaskGroup() as workers:
            for _ in range(self._concurrency):
                workers.create_task(self._work(waiting))

    async def _work(self, waiting: Any) -> None:
        for line in waiting:
            await self._answer(line)

    async def _answer(self, line: BatchLine) -> None:
        problem, num_silent, num_refused = "", 0, 0
        while num_silent < MAX_SILENT_ATTEMPTS:
            pause_seconds = min(MAX_PAUSE_SECONDS, 0.5 * 2 ** min(num_silent + num_refused, 6))
            try:
                async with self._session.post(line.url, data=line.body, headers={"Idempotency-Key": line.key}) as reply:
                    text = await reply.text()
                    if reply.status not in _REPEATED or reply.headers.get("x-should-retry") == "false":
                        self._write(line, reply, text)
                        return
                    num_silent, num_refused = 0, num_refused + 1
                    pause_seconds = float(reply.headers.get("Retry-After", pause_seconds))
            except (aiohttp.ClientError, TimeoutError) as error:
                num_silent += 1
                problem = f"{type(error).__name__}: {error}"
            await asyncio.sleep(pause_seconds)
        self.num_failed += 1
        self._results.add_failure(line.custom_id, NO_ANSWER, f"{MAX_SILENT_ATTEMPTS} attempts; at last {problem}")

    def _write(self, line: BatchLine, reply: aiohttp.ClientResponse, text: str) -> None:
        self.num_answered += 1
        self.num_failed += reply.status != 200
        try:
            body = json.loads(text)
        except ValueError:
            body = text  # from a proxy
        encoded = json.dumps(body).encode()  # on one line
        self._results.add(line.custom_id, reply.headers.get("x-request-id", ""), reply.status, encoded)


async def run(input_path: Path, output_path: Path, url: str, api_key: str, concurrency: int) -> int:
    """Run the batch and return the number of failed lines; raise BatchFileError or ResultFileError."""
    lines = read_lines(input_path)
    headers = {"Content-Type": "application/json", "x-priority": "batch"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    async with file_lock(output_path.with_name(output_path.name + ".lock")):
        results = ResultFile(output_path, repeated=(NO_ANSWER,))
        try:
            left = [line for line in lines if line.custom_id not in results.custom_ids]
            sys.stderr.write(f"{len(lines)} requests, {len(lines) - len(left)} already answered\n")
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
            async with aiohttp.ClientSession(url, headers=headers, timeout=timeout) as session:
                batch = Batch(session, results, concurrency)
                progress = asyncio.create_task(_show_progress(batch, len(left)))
                try:
                    await batch.run(left)
                finally:
                    progress.cancel()
        finally:
            results.close()
    sys.stderr.write(f"{batch.num_answered} answered, {batch.num_failed} failed: {output_path}\n")
    return batch.num_failed


async def _show_progress(batch: Batch, num_lines: int) -> None:
    while True:
        await asyncio.sleep(PROGRESS_SECONDS)
        sys.stderr.write(f"{batch.num_answered} of {num_lines} answered, {batch.num_failed} failed\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.concurrency < 1:
        parser.error("--concurrency: expected 1 or more")
    api_key = os.environ.get("PAGESTREAM_API_KEY", "")
    try:
        failed = asyncio.run(run(args.input_file, args.output_file, args.url, api_key, args.concurrency))
    except (BatchFileError, ResultFileError) as error:
        sys.stderr.write(f"pagestream run-batch: error: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("stopped; run it again to continue\n")
        return 130
    return 1 if failed else 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pagestream run-batch", description="Run a batch file at low priority.")
    parser.add_argument(
        "-i", "--input-file", type=Path, required=True, metavar="PATH", help="JSON lines in OpenAI's batch format"
    )
    parser.add_argument(
        "-o", "--output-file", type=Path, required=True, metavar="PATH", help="results; lines in it are not sent again"
    )
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", metavar="URL", help="server URL without /v1 (default: %(default)s)"
    )
    parser.add_argument(
        "--concurrency", type=int, default=64, metavar="N", help="concurrent requests (default: %(default)s)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
