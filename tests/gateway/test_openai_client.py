"""The official OpenAI client against a gateway with a fake engine. The client's types check our response format."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from gateway.store.store_calls import QueueFull
from gateway.text.served_model import ServedModel
from shared.messages import ErrorCode, ErrorEvent, FinishReason, TokenEvent
from tests.gateway.conftest import Gateway
from tests.gateway.fake_inference import finish, says

HI: Any = [{"role": "user", "content": "What is the capital of France?"}]


def base_url(gateway: Gateway) -> str:
    return f"{gateway.session._base_url}/v1"


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=base_url(gateway), api_key="none", max_retries=0) as opened:
        yield opened


async def test_models_are_listed(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).owned_by == "pagestream"


async def test_chat_answer_has_openais_types(
    client: openai.AsyncOpenAI, gateway: Gateway, tiny_model: ServedModel
) -> None:
    gateway.engine.script = says(tiny_model.encoder.encode_text("It is Paris."), reason=FinishReason.LENGTH)
    answer = await client.chat.completions.create(model="tiny", messages=HI, n=2, extra_body={"top_k": 5})
    assert [(choice.message.content, choice.finish_reason) for choice in answer.choices] == [
        ("It is Paris.", "length")
    ] * 2
    assert answer._request_id and answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert gateway.engine.requests[0].sampling.top_k == 5
    openai.types.chat.ChatCompletion.model_validate(answer.model_dump(), strict=True)


async def test_chat_stream_has_openais_types(
    client: openai.AsyncOpenAI, gateway: Gateway, tiny_model: ServedModel
) -> None:
    gateway.engine.script = says(*[[token] for token in tiny_model.encoder.encode_text("Paris é")])
    stream = await client.chat.completions.create(
        model="tiny", messages=HI, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Paris é"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    for chunk in chunks:
        openai.types.chat.ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)


async def test_completion_has_openais_types(
    client: openai.AsyncOpenAI, gateway: Gateway, tiny_model: ServedModel
) -> None:
    gateway.engine.script = says(tiny_model.encoder.encode_text(" Paris"))
    answer = await client.completions.create(model="tiny", prompt=["a", "b"])
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, " Paris"), (1, " Paris")]
    stream = await client.completions.create(model="tiny", prompt=[5, 6], stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == " Paris"


async def test_blocking_client_reads_a_stream(gateway: Gateway, tiny_model: ServedModel) -> None:
    gateway.engine.script = says(tiny_model.encoder.encode_text("Paris"))

    def ask() -> tuple[str | None, str]:
        with openai.OpenAI(base_url=base_url(gateway), api_key="none", max_retries=0) as client:
            answer = client.chat.completions.create(model="tiny", messages=HI)
            stream = client.chat.completions.create(model="tiny", messages=HI, stream=True)
            return answer.choices[0].message.content, "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    assert await asyncio.to_thread(ask) == ("Paris", "Paris")


async def test_errors_raise_the_clients_classes(client: openai.AsyncOpenAI, gateway: Gateway) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="tiny", messages=HI, temperature=3)
    assert (bad.value.code, bad.value.param, bad.value.type) == (
        "invalid_value",
        "temperature",
        "invalid_request_error",
    )
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="gpt-5", messages=HI)
    assert missing.value.code == "model_not_found"
    gateway.engine.submit_error = QueueFull("cap")
    with pytest.raises(openai.InternalServerError) as full:
        await client.chat.completions.create(model="tiny", messages=HI)
    assert (full.value.status_code, full.value.code) == (503, "queue_full")


async def test_client_retries_a_refusal(gateway: Gateway, tiny_model: ServedModel) -> None:
    submit = gateway.engine.submit
    gateway.engine.script = says(tiny_model.encoder.encode_text("Paris"))
    refusals = [QueueFull("cap")]

    async def refuses_once(request: Any, **options: Any) -> Any:
        gateway.engine.submit_error = refusals.pop() if refusals else None
        return await submit(request, **options)

    gateway.engine.submit = refuses_once  # type: ignore[method-assign]
    async with openai.AsyncOpenAI(base_url=base_url(gateway), api_key="none", max_retries=1) as client:
        answer = await client.chat.completions.create(model="tiny", messages=HI)
    assert answer.choices[0].message.content == "Paris"


async def test_error_within_a_stream_raises(client: openai.AsyncOpenAI, gateway: Gateway) -> None:
    def breaks(request: Any) -> Any:
        yield TokenEvent(request.request_id, 0, [70])
        yield ErrorEvent(request.request_id, ErrorCode.REQUEST_FAILED, "")

    gateway.engine.script = breaks
    stream = await client.chat.completions.create(model="tiny", messages=HI, stream=True)
    with pytest.raises(openai.APIError) as error:
        async for _ in stream:
            pass
    assert error.value.code == "request_failed"


async def test_client_that_leaves_a_stream_cancels(client: openai.AsyncOpenAI, gateway: Gateway) -> None:
    stream = await client.chat.completions.create(model="tiny", messages=HI, stream=True)
    request = (await gateway.engine.next_stream()).request
    await stream.close()
    assert await gateway.engine.next_cancellation() == request.request_id


async def test_keep_alive_comments_are_skipped(start_gateway: Any, tiny_model: ServedModel) -> None:
    gateway = await start_gateway(sse_keep_alive_seconds=0.001)
    async with openai.AsyncOpenAI(base_url=base_url(gateway), api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(model="tiny", messages=HI, stream=True)
        source = await gateway.engine.next_stream()
        await asyncio.sleep(0.6)  # one tick of the watch: this test is about real time
        source.send(TokenEvent(source.request.request_id, 0, tiny_model.encoder.encode_text("a")))
        source.send(finish(source.request, 1))
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "a"
