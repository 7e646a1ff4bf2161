"""Use instructor: URL MODEL -> a typed object from a chat."""

import json
import sys
from typing import Any, Literal

import instructor
import openai
from pydantic import BaseModel


class Town(BaseModel):
    name: Literal["Paris", "Rome"]
    country: Literal["France", "Italy", "Spain"]
    is_capital: bool


QUESTION = 'Describe Paris in one line, as {"name":"Paris","country":"France","is_capital":true} would.'


def main(url: str, model: str) -> dict[str, Any]:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    asked: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 80,
        "response_model": Town,
        "max_retries": 1,
    }
    found = {}
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):  # the second mode names its tool in tool_choice
        found[mode.value] = instructor.from_openai(client, mode=mode).chat.completions.create(**asked).model_dump()
    return found


print(json.dumps(main(*sys.argv[1:])))
