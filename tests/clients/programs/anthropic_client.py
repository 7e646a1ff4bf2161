"""Use the anthropic client: URL MODEL -> what it received, as JSON."""

import json
import sys
from typing import Any

import anthropic
import pydantic

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]


class Capital(pydantic.BaseModel):
    capital: str
    country: str


def of_other_forms(client: anthropic.Anthropic, asked: dict[str, Any]) -> dict[str, Any]:
    """Send typed output, system messages, documents, model requests and request ids."""
    asked = {**asked, "max_tokens": 60}
    parsed = client.messages.parse(**asked, output_format=Capital)
    source: Any = {"type": "text", "media_type": "text/plain", "data": "Paris is the capital of France."}
    document: Any = {"role": "user", "content": [{"type": "document", "source": source}, {"type": "text", "text": "?"}]}
    reminder: Any = {"role": "system", "content": "You are terse."}
    answer = client.messages.create(
        **{**asked, "messages": [*QUESTION, reminder]}, thinking={"type": "adaptive"}, output_config={"effort": "low"}
    )
    read = client.messages.create(**{**asked, "messages": [document]})
    page = client.models.list(limit=1)
    (model,) = list(page)
    ids = [parsed._request_id, read._request_id]
    try:
        client.messages.create(**{**asked, "messages": [{"role": "user", "content": ""}]})
    except anthropic.BadRequestError as error:
        ids += [error.request_id, error.body["request_id"]]
    return {
        "parsed": sorted(parsed.parsed_output.model_dump()) if parsed.parsed_output else [parsed.stop_reason],
        "stop_reasons": [answer.stop_reason, read.stop_reason],
        "model": [model.type, model.display_name, client.models.retrieve(model.id).lifecycle, page.has_more],
        "created_in": model.created_at.year,
        "ids": ids,
    }


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
        **of_other_forms(client, asked),
    }


print(json.dumps(main(*sys.argv[1:])))
