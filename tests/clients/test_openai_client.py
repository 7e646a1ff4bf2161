"""The official OpenAI client with a real gateway, store, worker and model (SmolLM2)."""

import asyncio
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from pydantic import BaseModel, Field
from tokenizers import Tokenizer

from tests.clients.conftest import Served
from tests.e2e.fleet import MODEL
from tests.engine_worker.execution.reference import Reference
from tests.gateway.test_bad_input import MALFORMED, NUMBERS, OTHER_FIELDS, Bad
from tests.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.timeout(900)

PARIS: Any = [{"role": "user", "content": "What is the capital of France?"}]


def test_chat_is_answered(served: Served) -> None:
    with served.client() as client:
        answer = client.chat.completions.create(model=MODEL, messages=PARIS, temperature=0, max_tokens=30)
        stream = client.chat.completions.create(model=MODEL, messages=PARIS, temperature=0, max_tokens=30, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert streamed == answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"


def test_completion_is_answered(served: Served) -> None:
    with served.client() as client:
        options: Any = {"model": MODEL, "temperature": 0, "max_tokens": 6}
        answer = client.completions.create(prompt=["The capital of France is", "1 2 3 4"], **options)
        stream = client.completions.create(prompt="1 2 3 4", stream=True, **options)
        streamed = "".join(chunk.choices[0].text for chunk in stream)
    assert answer.choices[0].text.startswith(" Paris")
    assert answer.choices[1].text == streamed == " 5 6 7"[: len(streamed)] or streamed.startswith(" 5 6 7")
    assert {choice.finish_reason for choice in answer.choices} == {"length"}


def test_logprobs_equal_transformers(served: Served, demo_model_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(demo_model_dir / "tokenizer.json"))
    prompt = tokenizer.encode("The capital of France is", add_special_tokens=False).ids
    asked: Any = {"model": MODEL, "prompt": prompt, "seed": 5, "max_tokens": 6, "logprobs": 3}
    with served.client() as client:
        choice = client.completions.create(**asked).choices[0]
        streamed = [chunk.choices[0].logprobs for chunk in client.completions.create(**asked, stream=True)]
    reported = choice.logprobs
    assert reported is not None and reported.tokens is not None and "".join(reported.tokens) == choice.text
    assert [token for part in streamed if part for token in part.tokens or []] == reported.tokens
    # The second request hits the prefix cache: other batch shapes round differently.
    streamed_logprobs = [logprob for part in streamed if part for logprob in part.token_logprobs or []]
    assert streamed_logprobs == pytest.approx(reported.token_logprobs, abs=1e-3)
    output = tokenizer.encode(choice.text, add_special_tokens=False).ids
    assert [tokenizer.decode([token_id]) for token_id in output] == reported.tokens
    reference = Reference(demo_model_dir).logits(prompt + output[:-1], len(output)).log_softmax(-1)
    chosen = reference.gather(1, torch.tensor(output)[:, None]).squeeze(1)
    # fp32 on both sides with another order of sums: logits differ by up to 1e-4.
    assert reported.token_logprobs == pytest.approx(chosen.tolist(), abs=1e-3)
    for exact, top in zip(reference, reported.top_logprobs or [], strict=True):
        likeliest = exact.topk(3)
        expected = {
            tokenizer.decode([token_id]): logprob
            for logprob, token_id in zip(*(t.tolist() for t in likeliest), strict=True)
        }
        assert {text: top[text] for text in expected} == pytest.approx(expected, abs=1e-3)


def test_chat_logprobs_streamed_equal_whole(served: Served) -> None:
    with served.client() as client:
        asked: Any = {"model": MODEL, "messages": PARIS, "temperature": 0, "max_tokens": 30, "logprobs": True}
        choice = client.chat.completions.create(**asked, top_logprobs=2).choices[0]
        stream = client.chat.completions.create(**asked, top_logprobs=2, stream=True)
        streamed = [entry for chunk in stream for entry in getattr(chunk.choices[0].logprobs, "content", None) or []]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content).decode() == choice.message.content
    assert [entry.token for entry in streamed] == [entry.token for entry in choice.logprobs.content]
    for entry in choice.logprobs.content:  # greedy: the chosen token is the most likely
        assert (entry.token, entry.logprob) == (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob)
        assert len(entry.top_logprobs) == 2


def test_choices_of_one_prompt_streamed_equal_whole(served: Served) -> None:
    with served.client() as client:
        asked: Any = {"model": MODEL, "messages": PARIS, "n": 3, "seed": 4, "temperature": 1.2, "max_tokens": 12}
        answer = client.chat.completions.create(**asked)
        stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        *chunks, last = list(stream)
        lone = client.chat.completions.create(**{**asked, "n": 1})
    texts, reasons = ["", "", ""], dict[int, str]()
    for chunk in chunks:
        (choice,) = chunk.choices
        assert choice.index not in reasons, "a chunk after the end of its choice"
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason is not None:
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in answer.choices] and len(set(texts)) == 3
    assert reasons == {choice.index: choice.finish_reason for choice in answer.choices}
    assert lone.choices[0].message.content == texts[0]
    assert last.usage is not None and answer.usage is not None and lone.usage is not None
    assert last.usage.completion_tokens == answer.usage.completion_tokens
    assert last.usage.prompt_tokens == lone.usage.prompt_tokens  # the prompt counts once


def test_best_of_and_beam_search_return_choices(served: Served) -> None:
    asked: Any = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 6}
    with served.client() as client:
        best = client.completions.create(**asked, n=2, best_of=5, seed=1, logprobs=0)
        beams = client.completions.create(**asked, n=2, best_of=4, extra_body={"use_beam_search": True})
        streamed = client.completions.create(**asked, n=2, best_of=4, stream=True, extra_body={"use_beam_search": True})
        texts = ["", ""]
        for chunk in streamed:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(**asked, temperature=0.5, extra_body={"use_beam_search": True})
    sums = [sum(choice.logprobs.token_logprobs or []) for choice in best.choices if choice.logprobs]
    assert len(sums) == 2 and sums[0] >= sums[1]
    assert best.usage is not None and best.usage.completion_tokens == 5 * 6
    assert beams.choices[0].text.startswith(" Paris") and texts == [choice.text for choice in beams.choices]
    assert len(set(texts)) == 2
    assert refused.value.param == "temperature"


async def test_async_streams_run_concurrently(served: Served) -> None:
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:

        async def ask() -> str:
            stream = await client.chat.completions.create(
                model=MODEL, messages=PARIS, temperature=0, max_tokens=30, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        answers = await asyncio.gather(*(ask() for _ in range(4)))
    assert len(set(answers)) == 1 and "Paris" in answers[0]


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


def test_json_schema_at_temperature_1_is_followed(served: Served) -> None:
    asked: Any = [{"role": "user", "content": "Invent a person."}]
    with served.client() as client:
        answer = client.chat.completions.parse(model=MODEL, messages=asked, response_format=Person, seed=1, n=3)
    people = [choice.message.parsed for choice in answer.choices]
    assert all(isinstance(person, Person) for person in people) and len({repr(person) for person in people}) > 1
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add_person"}}])
def test_forced_tool_call_streamed_equals_whole(served: Served, choice: Any) -> None:
    function = {"name": "add_person", "description": "Adds a person", "parameters": Person.model_json_schema()}
    asked: Any = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Add Ada, who is 36."}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": 0,
    }
    with served.client() as client:
        (whole,) = client.chat.completions.create(**asked).choices
        with client.chat.completions.stream(**asked) as stream:
            streamed = stream.get_final_completion().choices[0]
    (call,) = whole.message.tool_calls or []
    assert call.type == "function" and call.function.name == "add_person"
    Person.model_validate_json(call.function.arguments)
    (again,) = streamed.message.tool_calls or []
    assert (again.function.name, again.function.arguments) == (call.function.name, call.function.arguments)
    assert whole.finish_reason == streamed.finish_reason == "tool_calls"


def test_seeded_choices_repeat(served: Served) -> None:
    with served.client() as client:

        def sample() -> list[str]:
            options: Any = {"model": MODEL, "messages": PARIS, "n": 2, "seed": 11, "temperature": 1.5, "max_tokens": 8}
            return [choice.message.content or "" for choice in client.chat.completions.create(**options).choices]

        first = sample()
        assert first == sample() and first[0] != first[1]


def test_chat_turn_hits_prefix_cache_unless_salt_differs(served: Served) -> None:
    client = served.client()

    def ask(messages: list[Any], salt: str) -> tuple[str, int, int]:
        answer = client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=24, temperature=0, extra_body={"cache_salt": salt}
        )
        usage = answer.usage
        assert usage is not None and usage.prompt_tokens_details is not None
        cached = usage.prompt_tokens_details.cached_tokens
        assert cached is not None
        return str(answer.choices[0].message.content), usage.prompt_tokens, cached

    question = [{"role": "user", "content": "Name three rivers of Europe, and a town that lies on each of them."}]
    text, num_prompt_tokens, cached = ask(question, "a")
    assert cached == 0
    turn = [*question, {"role": "assistant", "content": text}, {"role": "user", "content": "And of Asia?"}]
    second, _, cached = ask(turn, "a")
    assert cached >= num_prompt_tokens
    assert ask(turn, "b") == (second, ask(turn, "a")[1], 0)  # the same answer, computed without the cache


def test_stop_string_ends_the_answer(served: Served) -> None:
    with served.client() as client:
        answer = client.completions.create(model=MODEL, prompt="1 2 3 4", temperature=0, max_tokens=30, stop=[" 7"])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (" 5 6", "stop")


def test_client_gets_errors_and_models(served: Served) -> None:
    with served.client() as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        with pytest.raises(openai.BadRequestError) as too_long:
            client.completions.create(model=MODEL, prompt="word " * 9000)
        assert (too_long.value.code, too_long.value.param) == ("context_length_exceeded", "prompt")
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("nothing")


def test_client_disconnect_frees_the_engine(served: Served) -> None:
    """Drop endless requests when their clients leave.

    If they still ran, as many new requests would not be answered in time.
    """
    with served.client() as client:
        for _ in range(3):
            stream = client.completions.create(
                model=MODEL, prompt="Once", max_tokens=8000, stream=True, extra_body={"ignore_eos": True}
            )
            next(iter(stream))
            stream.close()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        with urllib.request.urlopen(f"{served.url}/ready", timeout=PATIENCE_SECONDS) as answer:
            if b'"running": 0, "waiting": 0' in answer.read():
                return
        time.sleep(0.1)  # heartbeats arrive once per second
    pytest.fail("the engine still runs requests without clients")


def test_bad_requests_leave_a_stream_unchanged(served: Served) -> None:
    cases = [case for case in [*MALFORMED, *NUMBERS, *OTHER_FIELDS] if "vocabulary" not in case.name]
    assert len(cases) >= 60
    options: Any = {"model": MODEL, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 40}
    with served.client() as client:
        undisturbed = client.completions.create(**options).choices[0].text
        chunks = iter(client.completions.create(stream=True, **options))
        pieces = [next(chunks).choices[0].text]
        for case in cases:
            assert status_of(served, case) == case.status, case.name
        pieces += [chunk.choices[0].text for chunk in chunks]
    assert "".join(pieces) == undisturbed


def status_of(served: Served, case: Bad) -> int:
    request = urllib.request.Request(served.url + case.url, case.body, case.headers, method=case.method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_draining_gateway_finishes_the_open_stream(served: Served) -> None:
    with served.own_gateway("--drain-seconds", "60") as (client, gateway):
        stream = client.completions.create(
            model=MODEL, prompt="Once", max_tokens=20, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        chunks = iter(stream)
        next(chunks)
        gateway.send_signal(signal.SIGTERM)
        rest = list(chunks)
        assert rest[-1].choices[0].finish_reason == "length"
        assert gateway.wait(60) == 0
