"""The official OpenAI client reads chunks of a real worker: usage in each chunk, and the end token."""

from typing import Any

import pytest

from tests.clients.conftest import Served
from tests.clients.test_openai_client import PARIS
from tests.e2e.fleet import MODEL

pytestmark = pytest.mark.timeout(900)

CONTINUOUS: Any = {"include_usage": True, "continuous_usage_stats": True}


def test_every_chunk_has_growing_usage(served: Served) -> None:
    """Check usage in every chunk, as vLLM's own tests do."""
    asked: Any = {"model": MODEL, "temperature": 0, "stream": True, "stream_options": CONTINUOUS}
    with served.client() as client:
        cut: Any = client.chat.completions.create(
            **asked, messages=PARIS, max_completion_tokens=10, extra_body={"min_tokens": 10}
        )
        ended: Any = client.chat.completions.create(**asked, messages=PARIS, max_completion_tokens=30)
        text: Any = client.completions.create(**asked, prompt="The capital of France is", max_tokens=10)
        for stream, max_tokens in ((cut, 10), (ended, 30), (text, 10)):
            last = 0
            for chunk in stream:
                now = chunk.usage.completion_tokens
                assert last == 0 or now > last or (not chunk.choices and now == last)
                assert chunk.usage.total_tokens == chunk.usage.prompt_tokens + now
                assert chunk.system_fingerprint.startswith("fp_")
                last = now
            assert 0 < last <= max_tokens


def test_completion_end_token_is_scored_in_the_last_chunk(served: Served) -> None:
    question = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    asked: Any = {"model": MODEL, "prompt": question, "temperature": 0, "max_tokens": 30, "logprobs": 1}
    asked["extra_body"] = {"return_tokens_as_token_ids": True}
    with served.client() as client:
        whole = client.completions.create(**asked)
        choices = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]
    (choice,) = whole.choices
    assert whole.usage is not None and choice.logprobs is not None and choice.finish_reason == "stop"
    assert len(choice.logprobs.tokens or []) == whole.usage.completion_tokens
    assert all(part.text for part in choices[:-1]) and choices[-1].finish_reason == "stop"
    assert [token for part in choices for token in part.logprobs.tokens or []] == choice.logprobs.tokens
    assert all(token.startswith("token_id:") for token in choice.logprobs.tokens or [])
