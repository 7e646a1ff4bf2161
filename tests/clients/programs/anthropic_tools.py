"""Use the anthropic client with tools and thinking: URL MODEL -> what it received in two turns, as JSON."""

import json
import sys
from typing import Any

import anthropic

TOOL: Any = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
QUESTION: Any = {"role": "user", "content": "Rome?"}


def main(url: str, model: str) -> dict[str, Any]:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    asked: dict[str, Any] = {"model": model, "max_tokens": 2000, "tools": [TOOL], "thinking": thinking}
    answer = client.messages.create(**asked, messages=[QUESTION])
    with client.messages.stream(**asked, messages=[QUESTION]) as stream:
        deltas = [event.delta.type for event in stream if event.type == "content_block_delta"]
        streamed = stream.get_final_message()
    used = streamed.content[-1]
    result: Any = {"type": "tool_result", "tool_use_id": used.id, "content": "sunny"}
    turns: Any = [QUESTION, {"role": "assistant", "content": streamed.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(**asked, messages=turns)
    return {
        "blocks": [block.model_dump(exclude={"id"}, exclude_none=True) for block in answer.content],
        "streamed": [block.model_dump(exclude={"id"}, exclude_none=True) for block in streamed.content],
        "deltas": list(dict.fromkeys(deltas)),
        "stop_reasons": [answer.stop_reason, streamed.stop_reason, second.stop_reason],
        "usage": [answer.usage.output_tokens, streamed.usage.output_tokens],
    }


print(json.dumps(main(*sys.argv[1:])))
