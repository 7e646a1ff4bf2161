"""Long journals are decoded beside the event loop, those of one key one after another."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from gateway.store.request_archive import RequestArchive, stored_request
from gateway.work.reader_pool import INLINE_BYTES
from shared.messages import FinishEvent, FinishReason, GenerationRequest, JournalFrame, SamplingParams, Usage, encode


def request_of(tenant: str) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=9, seed=0)
    return GenerationRequest(request_id="a", prompt_token_ids=[1], sampling=sampling, tenant=tenant)


def journal_of(num_tokens: int) -> bytes:
    return b"".join(encode(JournalFrame(index, [5])) for index in range(num_tokens))


async def test_long_journals_are_decoded_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    unused: Any = None
    archive: Any = RequestArchive(unused, unused, unused, unused)
    threads: dict[str, int] = {}
    may_end = threading.Event()

    def decode(request: GenerationRequest, stored: Any, journal: bytes, known: Sequence[int]) -> str:
        threads[f"{request.tenant}{len(journal) > INLINE_BYTES}"] = threading.get_ident()
        if request.tenant == "slow":
            may_end.wait()
        return request.tenant

    monkeypatch.setattr("gateway.store.request_archive.stored_answer", decode)
    long, short = journal_of(INLINE_BYTES), journal_of(9)
    slow = [asyncio.create_task(archive.decoded(request_of("slow"), [], long)) for _ in range(9)]
    await asyncio.sleep(0)
    # nobody waits for the nine journals of another key
    assert await archive.decoded(request_of("other"), [], long) == "other"
    assert await archive.decoded(request_of("other"), [], short) == "other"
    assert not any(task.done() for task in slow)
    may_end.set()
    assert await asyncio.gather(*slow) == ["slow"] * 9
    assert threads["otherFalse"] == threading.get_ident() != threads["otherTrue"]
    archive.close()


def test_length_of_an_ended_answer_is_that_of_its_end() -> None:
    end = FinishEvent("a", FinishReason.STOP, Usage(prompt_tokens=1, completion_tokens=30), 0)
    fields = [b"done", encode(end), None, encode(request_of("key")), None, None, None]
    stored = stored_request(fields, None, num_tokens=29)  # the last token is on its way to the reader here
    assert stored is not None and stored.num_tokens == 30
