"""Sampled SmolLM2 answers with one seed have the same text, logprobs and usage, streamed and whole."""

from typing import Any

import openai
import pytest

from tests.clients.conftest import Served
from tests.e2e.fleet import MODEL

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize("n", [1, 2])
def test_same_seed_streamed_equals_whole(served: Served, n: int) -> None:
    asked: Any = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Tell me of a river."}],
        "seed": 7,
        "n": n,
        "temperature": 1.1,
        "max_tokens": 12,
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": {"cache_salt": "same"},
    }
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        client.chat.completions.create(**asked)  # from here on the prompt is in the prefix cache
        whole = client.chat.completions.create(**asked)
        stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        *chunks, last = list(stream)
    assert last.usage == whole.usage
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        assert parts[-1].finish_reason == choice.finish_reason
        streamed = [entry for part in parts if part.logprobs for entry in part.logprobs.content or []]
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert [entry.token for entry in streamed] == [entry.token for entry in choice.logprobs.content]
        # The batch is the same, but a step may start with one choice or two: the last bit of a float differs.
        exact = [entry.logprob for entry in choice.logprobs.content]
        assert [entry.logprob for entry in streamed] == pytest.approx(exact, abs=1e-4)
