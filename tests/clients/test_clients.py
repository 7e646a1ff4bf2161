"""Run real clients against SmolLM2, each in its own process: chat, streams, logprobs, usage, errors."""

import pytest

from tests.clients.conftest import Served
from tests.e2e.fleet import MODEL

pytestmark = pytest.mark.timeout(400)

PARIS = "The capital of France is Paris."
NUM_PROMPT_TOKENS, NUM_ANSWER_TOKENS = 37, 8


def test_langchain_client_reads_answers(served: Served) -> None:
    saw = served.seen_by("langchain_client.py")
    assert saw["text"] == saw["streamed"] == saw["scored"] == saw["batch"][0] == PARIS
    assert saw["finish_reason"] == "stop" and saw["num_top"] == 2 and saw["batch"][1]
    for usage in (saw["usage"], saw["streamed_usage"]):
        assert (usage["input_tokens"], usage["output_tokens"]) == (NUM_PROMPT_TOKENS, NUM_ANSWER_TOKENS)
    assert saw["completion"].startswith(" 5 6")
    assert saw["error"] == "model_not_found"
    assert saw["town"]["name"] in ("Paris", "Rome") and isinstance(saw["town"]["is_capital"], bool)


def test_litellm_client_reads_answers(served: Served) -> None:
    saw = served.seen_by("litellm_client.py")
    assert saw["texts"] == {"openai": PARIS, "hosted_vllm": PARIS}
    assert saw["streamed"] == saw["scored"] == PARIS
    assert saw["usage"] == saw["streamed_usage"]
    assert saw["usage"] == {"prompt_tokens": NUM_PROMPT_TOKENS, "completion_tokens": NUM_ANSWER_TOKENS}
    assert saw["completion"].startswith(" 5 6")
    assert saw["errors"] == ["NotFoundError", "BadRequestError", "ContextWindowExceededError"]


def test_llm_client_reads_answers(served: Served) -> None:
    saw = served.seen_by("llm_client.py")
    assert saw["text"] == saw["streamed"] == PARIS


def test_ollama_client_reads_answers(served: Served) -> None:
    saw = served.seen_by("ollama_client.py")
    assert saw["text"] == saw["streamed"] == PARIS
    assert saw["counts"] == [NUM_PROMPT_TOKENS, NUM_ANSWER_TOKENS, "stop"]
    assert saw["streamed_counts"] == [NUM_PROMPT_TOKENS, NUM_ANSWER_TOKENS, True]
    assert saw["formatted"]["name"] in ("Paris", "Rome") and saw["with_tools"]
    assert saw["generated"].startswith(" 8 9") and saw["models"] == [MODEL]
    assert saw["error"][0] == 404 and saw["context"][0] == 400 and "options.num_ctx" in saw["context"][1]


def test_openai_npm_client_reads_answers(served: Served) -> None:
    saw = served.seen_by_npm("openai_client.mjs")
    assert saw["text"] == saw["streamed"] == saw["scored"] == PARIS
    assert saw["usage"] == [[NUM_PROMPT_TOKENS, NUM_ANSWER_TOKENS]] * 2
    assert saw["completion"].startswith(" 5 6") and saw["models"] == [MODEL]
    assert saw["error"] == ["BadRequestError", 400, "invalid_value", "temperature"]
    assert saw["requestId"]
    responses = saw["responses"]
    assert responses["texts"] == [PARIS] * 3 and responses["status"] == ["completed"] * 3
    assert responses["usage"] == [NUM_PROMPT_TOKENS, NUM_ANSWER_TOKENS]
    assert responses["follows"] and responses["gone"] == 404
    assert [kind.removeprefix("response.") for kind in responses["kinds"]] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip


def test_anthropic_client_reads_answers(served: Served) -> None:
    saw = served.seen_by("anthropic_client.py")
    assert saw["text"] == saw["streamed"] == PARIS
    assert saw["final"] == ["end_turn", NUM_ANSWER_TOKENS]
    assert saw["usage"] == [NUM_PROMPT_TOKENS, NUM_ANSWER_TOKENS] and saw["counted"] == NUM_PROMPT_TOKENS
    assert saw["names"] == [
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    assert saw["stopped"] == ["The capital of France is", "stop_sequence", " Paris"]
    assert saw["with_system"] in ("end_turn", "max_tokens")
    assert saw["errors"] == [["NotFoundError", "not_found_error"], ["BadRequestError", "invalid_request_error"]]
    assert saw["parsed"] in (["capital", "country"], ["max_tokens"])  # so small a model may not stop by itself
    assert set(saw["stop_reasons"]) <= {"end_turn", "max_tokens"}
    assert saw["model"] == ["model", MODEL, "active", False] and saw["created_in"] >= 2024
    assert all(request_id.startswith("req_") for request_id in saw["ids"]) and saw["ids"][2] == saw["ids"][3]
    assert len(set(saw["ids"])) == 3


def test_instructor_follows_the_schema(served: Served) -> None:
    """Follow the schema, whatever a model this small would write unconstrained."""
    saw = served.seen_by("instructor_client.py")
    assert len(saw) == 2
    for town in saw.values():
        assert set(town) == {"name", "country", "is_capital"}
        assert town["name"] in ("Paris", "Rome") and town["country"] in ("France", "Italy", "Spain")
        assert isinstance(town["is_capital"], bool)
