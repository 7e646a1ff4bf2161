"""Use langchain-openai: URL MODEL -> what it received, as JSON."""

import json
import sys
from typing import Any, Literal

import openai
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel


class Town(BaseModel):
    name: Literal["Paris", "Rome"]
    is_capital: bool


QUESTION = "What is the capital of France?"


def main(url: str, model: str) -> dict[str, Any]:
    options: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0, "temperature": 0}
    chat = ChatOpenAI(model=model, max_completion_tokens=30, **options)
    answer = chat.invoke(QUESTION)
    chunks = list(chat.stream(QUESTION, stream_usage=True))
    scored = chat.bind(logprobs=True, top_logprobs=2).invoke(QUESTION).response_metadata["logprobs"]["content"]
    batch = chat.batch([QUESTION, "Say hello."])
    town = ChatOpenAI(model=model, max_completion_tokens=80, **options).with_structured_output(
        Town, method="json_schema"
    )
    completion = OpenAI(model=model, max_tokens=4, **options).invoke("1 2 3 4")
    try:
        ChatOpenAI(model="nothing", **options).invoke(QUESTION)
        error = None
    except openai.NotFoundError as raised:
        error = raised.code
    return {
        "text": answer.content,
        "streamed": "".join(str(chunk.content) for chunk in chunks),
        "usage": answer.usage_metadata,
        "streamed_usage": next(chunk.usage_metadata for chunk in reversed(chunks) if chunk.usage_metadata),
        "finish_reason": answer.response_metadata["finish_reason"],
        "scored": "".join(entry["token"] for entry in scored),
        "num_top": {len(entry["top_logprobs"]) for entry in scored}.pop(),
        "batch": [message.content for message in batch],
        "completion": completion,
        "town": town.invoke('Describe Paris in one line, as {"name":"Paris","is_capital":true} would.').model_dump(),
        "error": error,
    }


print(json.dumps(main(*sys.argv[1:])))
