"""An agent sends tools and a response format in every turn; SmolLM2 either calls a tool or answers."""

import json
from typing import Annotated, Any

import openai
import pytest
from pydantic import BaseModel, StringConstraints

from tests.clients.conftest import Served
from tests.e2e.fleet import MODEL


class GetWeather(BaseModel):
    """The weather of a city."""

    city: Annotated[str, StringConstraints(max_length=16)]


class Answer(BaseModel):
    text: Annotated[str, StringConstraints(max_length=24)]
    is_sunny: bool


@pytest.mark.timeout(600)  # three answers of a single-threaded model on a busy machine
def test_agent_turn_calls_tool_or_answers(served: Served) -> None:
    tools = [openai.pydantic_function_tool(GetWeather, name="get_weather")]
    messages: list[Any] = [{"role": "user", "content": "Is it sunny in Rome? Look it up."}]
    kinds = []
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        for choice in ("required", "auto", "none"):
            completion = client.chat.completions.parse(
                model=MODEL, messages=messages, tools=tools, response_format=Answer, tool_choice=choice,
                parallel_tool_calls=False, max_tokens=100, temperature=0, seed=1,
            )  # fmt: skip
            (turn,) = completion.choices
            calls = turn.message.tool_calls or []
            kinds.append("call" if calls else "answer")
            if calls:
                assert turn.finish_reason == "tool_calls" and turn.message.content is None and len(calls) == 1
                assert isinstance(calls[0].function.parsed_arguments, GetWeather)
                call = calls[0].model_dump(include={"id", "type", "function"})
                messages.append({"role": "assistant", "tool_calls": [call]})
                messages.append({"role": "tool", "tool_call_id": calls[0].id, "content": json.dumps({"sky": "sunny"})})
            else:
                assert turn.finish_reason == "stop" and isinstance(turn.message.parsed, Answer)
                messages.append({"role": "assistant", "content": turn.message.content})
    assert kinds[0] == "call" and kinds[-1] == "answer"
