"""A plain token costs the gateway few calls of functions, which are counted here, since times are the machine's."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import gateway as gateway_package
from gateway import loop_scheduler
from shared.messages import TokenEvent
from tests.gateway.conftest import Gateway
from tests.gateway.fake_inference import finish

MESSAGES = [{"role": "user", "content": "hi"}]
NUM_TOKENS = 5
GATEWAY = Path(gateway_package.__file__).parent


def gateway_calls(work: Callable[[], None]) -> int:
    """Calls of the gateway's functions that `work` makes."""
    count = 0

    def heard(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event == "call" and Path(frame.f_code.co_filename).is_relative_to(GATEWAY)

    sys.setprofile(heard)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    ("path", "body", "most"),
    [
        ("/v1/completions", {"prompt": "hi"}, 16),
        ("/v1/chat/completions", {"messages": MESSAGES}, 16),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9}, 21),
        ("/v1/responses", {"input": "hi", "store": False}, 21),
    ],
)
async def test_a_plain_token_is_few_calls(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], most: int
) -> None:
    """From its event to the bytes on their way; 8 more if it is asked for all that a token may be."""
    monkeypatch.setattr(loop_scheduler, "SLICE_SECONDS", 1_000.0)  # however slow the machine is, no token waits
    async with gateway.session.post(path, json={"model": "tiny", "stream": True, **body}) as response:
        assert response.status == 200, await response.text()
        stream = await gateway.engine.next_stream()
        events = [TokenEvent(stream.request.request_id, index, [70 + index]) for index in range(NUM_TOKENS)]
        stream.send(events[0])
        while b"delta" not in (told := await response.content.readany()) and b"text" not in told:
            pass
        calls = [gateway_calls(partial(stream.send, event)) for event in events[1:]]
        stream.send(finish(stream.request, NUM_TOKENS))
        await response.text()
    assert max(calls) <= most
