"""Use Ollama's client: URL MODEL -> what it reads of chats, streams, calls, formats and errors, as JSON."""

import json
import sys
from typing import Any

import ollama

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
OPTIONS = {"temperature": 0, "num_predict": 40}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Paris", "Rome"]}},
    "required": ["name"],
    "additionalProperties": False,
}


def get_capital(country: str) -> str:
    """Return the capital of a country.

    Args:
        country: The country.
    """
    return country


def error_of(client: ollama.Client, **asked: Any) -> list[Any]:
    try:
        client.chat(messages=QUESTION, **asked)
    except ollama.ResponseError as error:
        return [error.status_code, error.error]
    return []


def main(url: str, model: str) -> dict[str, Any]:
    client = ollama.Client(host=url)
    whole = client.chat(model=model, messages=QUESTION, options=OPTIONS)
    streamed = list(client.chat(model=model, messages=QUESTION, options=OPTIONS, stream=True))
    formatted = client.chat(model=model, messages=QUESTION, options=OPTIONS, format=SCHEMA)
    with_tools = client.chat(model=model, messages=QUESTION, options=OPTIONS, tools=[get_capital])
    return {
        "text": whole.message.content,
        "counts": [whole.prompt_eval_count, whole.eval_count, whole.done_reason],
        "streamed": "".join(part.message.content or "" for part in streamed),
        "streamed_counts": [streamed[-1].prompt_eval_count, streamed[-1].eval_count, streamed[-1].done],
        "formatted": json.loads(formatted.message.content or ""),
        "with_tools": bool(with_tools.message.content or with_tools.message.tool_calls),
        "generated": client.generate(model=model, prompt="5 6 7", raw=True, options=OPTIONS).response,
        "models": [one.model for one in client.list().models],
        "error": error_of(client, model="other"),
        "context": error_of(client, model=model, options={"num_ctx": 10**6}),
    }


print(json.dumps(main(*sys.argv[1:])))
