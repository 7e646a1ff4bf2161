"""Use openai or anthropic: URL MODEL PACKAGE -> the answer after a retry, and the seconds until the retry."""

import json
import sys
import time
from typing import Any

import anthropic
import openai

HI: Any = [{"role": "user", "content": "hi"}]


def main(url: str, model: str, package: str) -> dict[str, Any]:
    started = time.monotonic()
    if package == "openai":
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=1)
        text = client.chat.completions.create(model=model, messages=HI).choices[0].message.content
    else:
        client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=1)
        text = client.messages.create(model=model, messages=HI, max_tokens=9).content[0].text
    return {"text": text, "seconds": time.monotonic() - started}


print(json.dumps(main(*sys.argv[1:])))
