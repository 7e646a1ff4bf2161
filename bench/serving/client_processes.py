"""Run one load in several client processes, so that the server is the bottleneck.

Python streams about 20,000 events per second on a core. Times are comparable between the processes, because
time.perf_counter is one clock for the whole machine on Linux.
"""

import asyncio
import multiprocessing
import time
from dataclasses import dataclass

import aiohttp

from bench.serving.streaming_request import RequestResult, Target, send
from bench.workload import PlannedRequest

START_SECONDS = 0.5  # until every process is up: they are forked
SILENCE_SECONDS = 300.0  # of silence that fails a request


@dataclass(frozen=True)
class Share:
    url: str
    model: str
    started_at: float  # time.perf_counter at the start of the load
    requests: list[PlannedRequest]


def run_load(url: str, model: str, requests: list[PlannedRequest], num_processes: int) -> list[RequestResult]:
    """Send each request at its arrival time, whatever happened to earlier ones."""
    started_at = time.perf_counter() + START_SECONDS
    shares = [Share(url, model, started_at, requests[index::num_processes]) for index in range(num_processes)]
    with multiprocessing.get_context("fork").Pool(num_processes) as pool:
        return [result for results in pool.map(_run_share, shares, chunksize=1) for result in results]


def _run_share(share: Share) -> list[RequestResult]:
    return asyncio.run(_send_all(share))


async def _send_all(share: Share) -> list[RequestResult]:
    timeout = aiohttp.ClientTimeout(total=None, sock_read=SILENCE_SECONDS)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=2**20) as session:
        target = Target(session=session, url=share.url, model=share.model, chat=False)
        return list(await asyncio.gather(*(_at_its_time(target, share, request) for request in share.requests)))


async def _at_its_time(target: Target, share: Share, request: PlannedRequest) -> RequestResult:
    await asyncio.sleep(share.started_at + request.arrival_seconds - time.perf_counter())
    return await send(target, request)
