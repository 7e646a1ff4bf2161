"""Coding agents' requests, as `make peers` recorded them: each gets the tool call, then the end."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.fake_inference import FakeInferenceClient
from tests.scripted_model import ScriptedModel, write_scripted_model

AGENTS = sorted((Path(__file__).parent.parent / "clients" / "recorded").glob("*.json"))
ENDS = {  # of a stream whose answer is complete
    "/v1/chat/completions": "data: [DONE]",
    "/v1/messages": '"type":"message_stop"',
    "/v1/responses": "event: response.completed",
}


def without_spaces(text: str) -> str:
    return text.replace('": ', '":')


@pytest.mark.parametrize("recorded", AGENTS, ids=lambda path: path.stem)
async def test_recorded_requests_get_calls_and_answers(
    start_gateway: Callable[..., Any], tmp_path: Path, recorded: Path
) -> None:
    directory = write_scripted_model(tmp_path / "scripted", max_model_len=100_000)
    model = ScriptedModel(directory, tmp_path / "hello.txt")
    gateway = await start_gateway(FakeInferenceClient(model), model=directory)
    session = json.loads(recorded.read_text())
    answers = []
    for request in session["requests"]:
        method, path, headers = request["method"], request["path"], request["headers"]
        async with gateway.session.request(method, path, headers=headers, json=request["body"]) as answer:
            text = without_spaces(await answer.text())
            assert answer.status == request["status"], text
            if request["body"].get("stream"):
                assert ENDS[path.partition("?")[0]] in text
        answers.append(text)
    assert model.said == session["said"]
    tools = [
        (said, text) for said, text in zip(model.said, answers, strict=True) if " " not in said and "." not in said
    ]
    assert tools or recorded.stem == "aider"  # it has no tools: the file is in its answer
    assert all(f'"name":"{tool}"' in text for tool, text in tools)


def test_six_agents_are_recorded() -> None:
    assert [path.stem for path in AGENTS] == ["aider", "claude-code", "cline", "codex", "opencode", "qwen-code"]
