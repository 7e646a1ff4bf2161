"""The compliance tests of Open Responses for text and tools, with a scripted engine.

A response must match the specification, end well, and contain the requested items. A stream must be valid event by
event and report each step of a call. The tests of images and of WebSocket are omitted: the server has neither.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.conftest import Gateway
from tests.gateway.responses import WEATHER, model_says
from tests.gateway.test_spec_bodies import check_event, check_response, events, said
from tests.tiny_model import write_tiny_model

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
CALL_STEPS = [
    "response.output_item.added", "response.function_call_arguments.delta", "response.function_call_arguments.done",
    "response.output_item.done",
]  # fmt: skip


def item(role: str, content: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content}


@pytest.fixture
async def gateway(start_gateway: Callable[..., Any], tmp_path: Path) -> Gateway:
    model = write_tiny_model(tmp_path / "roomy", max_model_len=4096)
    return await start_gateway(model=model)


@pytest.mark.parametrize(
    "items",
    [
        [item("user", "Say hello.")],
        [item("system", "Be short."), item("user", "Say hello.")],
        [item("developer", "Be short."), item("user", "Say hello.")],
        [item("user", "I am Ann."), item("assistant", "Hello Ann."), item("user", "Who am I?")],
    ],
)
async def test_text_response_passes_the_compliance_tests(gateway: Gateway, items: list[dict[str, Any]]) -> None:
    model_says(gateway, "Hello.")
    body = {"model": "roomy", "input": items}
    whole, streamed = await said(gateway, "/v1/responses", body), await events(gateway, "/v1/responses", body)
    check_response(whole)
    for event in streamed:
        check_event(event)
    for response in (whole, streamed[-1]["response"]):
        assert response["status"] == "completed" and response["completed_at"] >= response["created_at"]
        assert [part["type"] for part in response["output"]] == ["message"]


async def test_tool_response_passes_the_compliance_tests(gateway: Gateway) -> None:
    model_says(gateway, CALL)
    tool = {name: value for name, value in WEATHER.items() if name != "strict"}
    body = {"model": "roomy", "input": [item("user", "Oslo?")], "tools": [tool]}
    whole, streamed = await said(gateway, "/v1/responses", body), await events(gateway, "/v1/responses", body)
    check_response(whole)
    for event in streamed:
        check_event(event)
    assert [part["type"] for part in whole["output"]] == ["function_call"]
    kinds = [event["type"] for event in streamed]
    assert [kind for kind in dict.fromkeys(kinds) if kind in CALL_STEPS] == CALL_STEPS
    for event in streamed:
        if event["type"] in ("response.output_item.added", "response.output_item.done"):
            assert event["item"]["type"] == "function_call"
