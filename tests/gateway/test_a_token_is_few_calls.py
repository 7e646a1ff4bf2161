"""A plain token costs the gateway few function calls. Calls are counted, because times depend on the machine."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import gateway as gateway_package
from gateway.work import loop_scheduler
from shared.messages import TokenEvent
from tests.gateway.conftest import Gateway
from tests.gateway.fake_inference import finish

MESSAGES = [{"role": "user", "content": "hi"}]
NUM_TOKENS = 5
GATEWAY = Path(gateway_package.__file__).parent


def gateway_calls(work: Callable[[], None]) -> int:
    """Count the calls of the gateway's functions during `work`."""
    count = 0

    def on_event(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event == "call" and Path(frame.f_code.co_filename).is_relative_to(GATEWAY)

    sys.setprofile(on_event)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    ("path", "body", "max_calls"),
    [
        ("/v1/completions", {"prompt": "hi"}, 16),
        ("/v1/chat/completions", {"messages": MESSAGES}, 16),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9}, 16),
        ("/v1/responses", {"input": "hi", "store": False}, 16),
    ],
)
async def test_plain_token_costs_few_calls(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], max_calls: int
) -> None:
    """Count from the event to the socket write; all optional token fields may add 8 calls."""
    monkeypatch.setattr(loop_scheduler, "SLICE_SECONDS", 1_000.0)  # no time slice ends, however slow the machine is
    async with gateway.session.post(path, json={"model": "tiny", "stream": True, **body}) as response:
        assert response.status == 200, await response.text()
        stream = await gateway.engine.next_stream()
        events = [TokenEvent(stream.request.request_id, index, [70 + index]) for index in range(NUM_TOKENS)]
        stream.send(events[0])
        while b"delta" not in (data := await response.content.readany()) and b"text" not in data:
            pass
        calls = [gateway_calls(partial(stream.send, event)) for event in events[1:]]
        stream.send(finish(stream.request, NUM_TOKENS))
        await response.text()
    assert max(calls) <= max_calls
