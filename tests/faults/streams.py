"""Many streams at once over all gateways of a site, each compared with the answer of an undisturbed server."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from tokenizers import Tokenizer

from tests.faults.mixed_requests import MixedRequest, RequestMix
from tests.faults.site import MODEL, Site
from tests.faults.stream_client import Answer, StreamClient, empty_answer

SEED = 31


class Streams:
    """Streams over all gateways, each with the text that an undisturbed server gives."""

    def __init__(self, site: Site, client: StreamClient, requests: list[MixedRequest]) -> None:
        self._site = site
        self._requests = requests
        self._answers = [empty_answer(request.body) for request in requests]
        self._tasks = [
            asyncio.create_task(client.complete(request.body, answer))
            for request, answer in zip(requests, self._answers, strict=True)
        ]

    async def have_begun(self) -> None:
        async with asyncio.timeout(60):
            while not all(any(answer.texts) for answer in self._answers):
                await asyncio.sleep(0.02)

    async def are_whole(self, max_silence_seconds: float) -> None:
        """Return whether all streams are complete, none broke, and no process has ended."""
        try:
            async with asyncio.timeout(120):
                answers: list[Answer] = await asyncio.gather(*self._tasks)
            differences = [one.difference(answer) for one, answer in zip(self._requests, answers, strict=True)]
            assert differences == [""] * len(answers)
            silences = sorted(answer.longest_silence_seconds for answer in answers)
            print(f"silent for at most {silences[-1]:.1f} s, {silences[len(silences) // 2]:.1f} s in the middle")
            assert silences[-1] <= max_silence_seconds, silences
            assert sum(answer.num_resumes for answer in answers) == 0
            assert not self._site.fleet.has_lost_one()
        except (AssertionError, TimeoutError):
            print(self._site.fleet.all_logs())
            raise


Start = Callable[[Site, int], Awaitable[Streams]]


@asynccontextmanager
async def starting_streams(model: Path) -> AsyncIterator[Start]:
    """Yield a function that starts streams and returns when each has a token."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    mix = RequestMix(random.Random(SEED), tokenizer, MODEL, max_tokens=260)
    source = random.Random(SEED)
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def start(site: Site, num_streams: int) -> Streams:
            client = StreamClient(session, site.urls, source)
            streams = Streams(site, client, [mix.draw() for _ in range(num_streams)])
            await streams.have_begun()
            return streams

        yield start
