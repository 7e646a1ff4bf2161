"""anthropic, as a program: URL MODEL -> what it saw, as JSON."""

import json
import sys
from typing import Any

import anthropic

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]


def main(url: str, model: str) -> dict[str, Any]:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": model, "messages": QUESTION, "max_tokens": 30, "extra_body": {"temperature": 0}}
    answer = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        streamed = "".join(stream.text_stream)
        final = stream.get_final_message()
    names = [event.type for event in client.messages.create(**asked, stream=True)]
    stopped = client.messages.create(**{**asked, "stop_sequences": [" Paris"]})
    counted = client.messages.count_tokens(model=model, messages=QUESTION)
    with_system = client.messages.create(**asked, system="You are terse.")
    errors = []
    for change in ({"model": "nothing"}, {"extra_body": {"temperature": 3}}):
        try:
            client.messages.create(**{**asked, **change})
        except anthropic.APIStatusError as error:
            errors.append([type(error).__name__, error.body["error"]["type"]])
    return {
        "text": answer.content[0].text,
        "streamed": streamed,
        "final": [final.stop_reason, final.usage.output_tokens],
        "usage": [answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0), answer.usage.output_tokens],
        "names": list(dict.fromkeys(names)),
        "stopped": [stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence],
        "counted": counted.input_tokens,
        "with_system": with_system.stop_reason,
        "errors": errors,
    }


print(json.dumps(main(*sys.argv[1:])))
