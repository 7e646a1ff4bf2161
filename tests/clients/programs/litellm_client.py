"""Use litellm: URL MODEL -> what it received, as JSON."""

import json
import sys
from typing import Any

import litellm

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def main(url: str, model: str) -> dict[str, Any]:
    options: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": "none", "temperature": 0, "max_retries": 0}
    asked: dict[str, Any] = {"messages": QUESTION, "max_tokens": 30, **options}
    texts = {}
    for provider in ("openai", "hosted_vllm"):
        answer = litellm.completion(model=f"{provider}/{model}", top_k=1, **asked)
        texts[provider] = answer.choices[0].message.content
    stream = litellm.completion(model=f"openai/{model}", stream=True, stream_options={"include_usage": True}, **asked)
    chunks = list(stream)
    scored = litellm.completion(model=f"openai/{model}", logprobs=True, top_logprobs=2, **asked)
    completion = litellm.text_completion(
        model=f"text-completion-openai/{model}", prompt="1 2 3 4", max_tokens=4, **options
    )
    return {
        "texts": texts,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        "usage": answer.usage.model_dump(include={"prompt_tokens", "completion_tokens"}),
        "streamed_usage": chunks[-1].usage.model_dump(include={"prompt_tokens", "completion_tokens"}),
        "scored": "".join(entry["token"] for entry in scored.choices[0].logprobs["content"]),
        "completion": completion.choices[0].text,
        "errors": [
            error_of(litellm.NotFoundError, model="openai/nothing", **asked),
            error_of(litellm.BadRequestError, model=f"openai/{model}", **{**asked, "temperature": 3}),
            error_of(litellm.ContextWindowExceededError, model=f"openai/{model}", **{**asked, "max_tokens": 10**6}),
        ],
    }


def error_of(kind: type[Exception], **asked: Any) -> str | None:
    try:
        litellm.completion(**asked)
    except kind as error:
        return type(error).__name__
    return None


print(json.dumps(main(*sys.argv[1:])))
