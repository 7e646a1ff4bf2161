"""/v1/responses on a real store with OpenAI's client: read, continued, cancelled, and deleted at any gateway."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from gateway.apis.responses import history as responses_history
from gateway.pipeline import kept
from shared.messages import FinishEvent, decode_terminal_event
from tests.engine_worker.worker_harness import FOREVER_STEPS
from tests.gateway.responses import URL, checked_events, checked_response
from tests.integration.conftest import CHAT, World, nothing_is_left
from tests.integration.test_kept_requests import write_keys
from tests.patience import PATIENCE_SECONDS

GREEDY: dict[str, Any] = {"temperature": 0, "max_output_tokens": 12, "extra_body": {"ignore_eos": True}}


@pytest.fixture
async def clients(world: World) -> AsyncIterator[list[openai.AsyncOpenAI]]:
    """Return one client for each gateway."""
    async with AsyncExitStack() as stack:
        opened = []
        for gateway in world.gateways:
            client = openai.AsyncOpenAI(
                base_url=f"{gateway.session._base_url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_SECONDS
            )
            opened.append(await stack.enter_async_context(client))
        yield opened


async def make(client: openai.AsyncOpenAI, world: World, **fields: Any) -> Any:
    return await client.responses.create(model=world.keys.model_name, **{"input": "Hi", **GREEDY, **fields})


async def eventually(client: openai.AsyncOpenAI, response_id: str, *statuses: str) -> Response:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            response = await client.responses.retrieve(response_id)
            if response.status in statuses:
                return response
            await asyncio.sleep(0.01)


async def raw_events(world: World, response_id: str, **query: Any) -> list[Any]:
    params = {"stream": "true", **query}
    async with world.gateways[1].session.get(f"{URL}/{response_id}", params=params) as reply:
        assert reply.status == 200, await reply.text()
        return checked_events(await reply.text())


async def test_stored_response_is_equal_at_another_gateway(world: World, clients: Any) -> None:
    world.worker.gate.allow(FOREVER_STEPS)
    made = await make(clients[0], world, metadata={"a": "b"}, instructions="be")
    read = await clients[1].responses.retrieve(made.id)
    assert read == made and made.status == "incomplete" and made.usage.output_tokens == 12
    checked_response(read.model_dump(exclude_unset=True))


async def test_response_stream_can_be_read_again_after_any_event(world: World, clients: Any) -> None:
    world.worker.gate.allow(FOREVER_STEPS)
    events = [event async for event in await make(clients[0], world, stream=True)]
    whole = await raw_events(world, events[0].response.id)
    assert [event.model_dump() for event in whole] == [event.model_dump() for event in events]
    for number in range(len(events) - 1):
        rest = await raw_events(world, events[0].response.id, starting_after=number)
        assert rest == whole[number + 1 :], number
    assert await raw_events(world, events[0].response.id, starting_after=10_000) == whole[-1:]


async def test_background_response_is_queued_then_readable(world: World, clients: Any) -> None:
    named: dict[str, Any] = {"background": True, "extra_headers": {"Idempotency-Key": "k"}}
    made = await make(clients[0], world, **named)
    assert (made.status, made.background, made.output) == ("queued", True, [])
    again = await make(clients[1], world, **named)  # a repeat returns the current state
    assert again.id == made.id and again.status in ("queued", "in_progress")
    with pytest.raises(openai.BadRequestError) as early:
        await make(clients[1], world, previous_response_id=made.id)
    assert early.value.param == "previous_response_id" and "only one that has ended" in early.value.message
    world.worker.gate.allow(3)
    running = await eventually(clients[1], made.id, "in_progress")
    assert running.output == [] and running.usage is None
    world.worker.gate.allow(FOREVER_STEPS)
    ended = await eventually(clients[1], made.id, "incomplete")
    assert ended.usage is not None and ended.usage.output_tokens == 12 and ended.output_text
    assert [event.type for event in await raw_events(world, made.id)][-1] == "response.incomplete"
    same = await make(clients[1], world)
    assert same.output_text == ended.output_text


async def test_background_response_outlives_reader_and_gateway(world: World, clients: Any, demo_model_dir: Any) -> None:
    async with world.another_gateway(demo_model_dir) as leaving:
        body = {"input": "Hi", "background": True, "max_output_tokens": 12, "temperature": 0, "ignore_eos": True}
        async with leaving.streaming(URL, body) as reader:
            created = await reader.next()
    assert created is not None and created.chunk["type"] == "response.created"
    world.worker.gate.allow(FOREVER_STEPS)
    ended = await eventually(clients[1], created.chunk["response"]["id"], "incomplete")
    assert ended.output_text == (await make(clients[0], world)).output_text


async def test_foreground_response_ends_with_its_reader(world: World, clients: Any) -> None:
    stream = await make(clients[0], world, stream=True)
    created = await anext(aiter(stream))
    await stream.close()
    assert (await eventually(clients[1], created.response.id, "cancelled")).output == []
    world.worker.gate.allow(FOREVER_STEPS)  # a step with it may have begun
    await nothing_is_left(world)


async def test_response_can_be_cancelled_at_another_gateway(world: World, clients: Any) -> None:
    made = await make(clients[0], world, background=True)
    cancelled = await clients[1].responses.cancel(made.id)
    assert (cancelled.id, cancelled.status, cancelled.error) == (made.id, "cancelled", None)
    running = await make(clients[0], world, background=True)
    await clients[1].responses.delete(running.id)  # also cancels it
    world.worker.gate.allow(FOREVER_STEPS)
    await nothing_is_left(world)
    assert (await clients[0].responses.retrieve(made.id)).status == "cancelled"
    last = (await raw_events(world, made.id))[-1]
    assert (last.type, last.response.status) == ("response.failed", "cancelled")
    ended = await eventually(clients[0], (await make(clients[0], world, background=True)).id, "incomplete")
    assert await clients[1].responses.cancel(ended.id) == ended  # unchanged


async def test_stored_conversation_can_be_counted_and_compacted(world: World, clients: Any) -> None:
    world.worker.gate.allow(FOREVER_STEPS)
    model = world.keys.model_name
    first = await make(clients[0], world)
    counted = await clients[1].responses.input_tokens.count(previous_response_id=first.id, input="And?")
    second = await make(clients[1], world, input="And?", previous_response_id=first.id)
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", second.usage.input_tokens)
    compacted = await clients[0].responses.compact(
        model=model, previous_response_id=second.id, extra_body={"max_output_tokens": 5}
    )
    assert [item.type for item in compacted.output] == ["message", "message", "compaction"]
    assert compacted.usage.output_tokens == 5 and compacted.usage.input_tokens > second.usage.input_tokens
    # The client's type covers only output items, which those of a user are not.
    items = [item.model_dump(exclude_unset=True, warnings=False) for item in compacted.output]
    third = await make(clients[1], world, input=[*items, {"role": "user", "content": "So?"}])
    assert third.status == "incomplete"
    fourth = await make(clients[0], world, input="Again?", previous_response_id=third.id)
    listed = [item async for item in clients[1].responses.input_items.list(fourth.id, order="asc")]
    assert [item.type for item in listed] == ["message", "message", "compaction", "message", "message", "message"]


async def test_compaction_repeated_by_idempotency_key_is_equal(world: World, clients: Any) -> None:
    world.worker.gate.allow(FOREVER_STEPS)
    named = {"extra_headers": {"Idempotency-Key": "k"}, "extra_body": {"max_output_tokens": 5}}
    compacted = [await client.responses.compact(model=world.keys.model_name, input="Hi", **named) for client in clients]
    assert compacted[0] == compacted[1]
    async with world.gateways[1].session.get(f"/v1/requests/{compacted[0].id}/events") as reply:
        (data,) = [line[6:] for line in (await reply.text()).split("\n") if line.startswith("data: ")]
    assert json.loads(data) == compacted[1].model_dump(exclude_unset=True, warnings=False)


async def test_synchronous_response_cannot_be_cancelled(world: World, clients: Any) -> None:
    stream = await make(clients[0], world, stream=True)
    created = await anext(aiter(stream))
    for _ in ("running", "ended"):
        with pytest.raises(openai.BadRequestError) as refused:
            await clients[1].responses.cancel(created.response.id)
        assert refused.value.param == "id" and "background=true" in refused.value.message
        world.worker.gate.allow(FOREVER_STEPS)
        await eventually(clients[1], created.response.id, "incomplete")  # it continues after the refusal


async def test_response_completed_at_is_equal_everywhere(world: World, clients: Any) -> None:
    world.worker.gate.allow(FOREVER_STEPS)
    cut = await make(clients[0], world)
    assert cut.completed_at is None  # because it is incomplete
    ended_by = {"stop": [cut.output_text[1:3]], "ignore_eos": True}
    before = int(time.time())
    made = await make(clients[0], world, extra_body=ended_by)
    assert made.status == "completed" and before <= made.completed_at <= time.time()
    streamed = [event async for event in await make(clients[0], world, extra_body=ended_by, stream=True)][-1].response
    for response in (made, streamed):
        assert await clients[1].responses.retrieve(response.id) == response
        assert (await raw_events(world, response.id))[-1].response.completed_at == response.completed_at
    stored: Any = await world.connections.commands.hget(world.keys.request(cut.id[5:]), "terminal")
    end = decode_terminal_event(stored)
    assert isinstance(end, FinishEvent) and before - 60 <= end.ended_at <= time.time()  # set by the worker


async def test_response_continues_a_previous_response(world: World, clients: Any) -> None:
    world.worker.gate.allow(FOREVER_STEPS)
    first = await make(clients[0], world, instructions="be brief")
    second = await make(clients[1], world, input="And?", previous_response_id=first.id)
    third = await make(clients[0], world, input="So?", previous_response_id=second.id)
    said = [
        {"role": "user", "content": "Hi"}, {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And?"}, {"role": "assistant", "content": second.output_text},
        {"role": "user", "content": "So?"},
    ]  # fmt: skip
    by_hand = await make(clients[1], world, input=said)
    assert third.output_text == by_hand.output_text
    assert third.usage.input_tokens == by_hand.usage.input_tokens  # instructions are not inherited
    assert (third.previous_response_id, third.instructions) == (second.id, None)
    items = [item async for item in clients[0].responses.input_items.list(third.id, order="asc", limit=2)]
    assert [(item.type, item.role, item.content[0].text) for item in items] == [
        ("message", message["role"], message["content"]) for message in said
    ]
    assert len({item.id for item in items}) == 5
    newest = await clients[0].responses.input_items.list(third.id, limit=1)
    assert newest.data[0].id == items[-1].id and newest.has_more


async def test_response_continues_after_earlier_one_was_deleted(world: World, clients: Any) -> None:
    world.worker.gate.allow(FOREVER_STEPS)
    first = await make(clients[0], world)
    second = await make(clients[0], world, input="And?", previous_response_id=first.id)
    await clients[1].responses.delete(first.id)
    third = await make(clients[1], world, input="So?", previous_response_id=second.id)
    assert third.usage.input_tokens > second.usage.input_tokens
    with pytest.raises(openai.BadRequestError) as gone:
        await make(clients[1], world, previous_response_id=first.id)
    assert (gone.value.code, gone.value.param) == ("previous_response_not_found", "previous_response_id")


async def test_response_deleted_or_not_stored_is_not_found(world: World, clients: Any) -> None:
    world.worker.gate.allow(FOREVER_STEPS)
    deleted = await make(clients[0], world)
    named = {"Idempotency-Key": "k"}  # retained for a repeat, but not readable
    unstored = await make(clients[0], world, store=False, extra_headers=named)
    assert await clients[1].responses.delete(deleted.id) is None
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "detach_seconds": 1}
    _, chat = await world.gateways[0].post(CHAT, body)  # retained, but not a response
    for response_id in (deleted.id, unstored.id, chat["id"]):
        for call in (clients[0].responses.retrieve, clients[1].responses.delete, clients[0].responses.cancel):
            with pytest.raises(openai.NotFoundError):
                await call(response_id)
    request_id = deleted.id.removeprefix("resp_")
    redis = world.connections.commands
    assert not await redis.exists(world.keys.journal(request_id))
    assert await redis.hmget(world.keys.request(request_id), ["body", "record"]) == [None, None]
    assert 0 < await redis.ttl(world.keys.request(request_id)) <= 600


async def test_response_of_another_key_is_not_found(world: World, demo_model_dir: Any, tmp_path: Any) -> None:
    names = {name: f"sk-{name}-0123456789abcdef" for name in ("one", "two")}
    world.worker.gate.allow(FOREVER_STEPS)
    async with world.another_gateway(demo_model_dir, api_keys_file=write_keys(tmp_path, names)) as gateway:
        one, two = ({"Authorization": f"Bearer {key}"} for key in names.values())
        body = {"input": "Hi", "max_output_tokens": 3}
        _, mine = await gateway.post(URL, body, **one)
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
            async with gateway.session.request(method, f"{URL}/{mine['id']}{path}", headers=two) as reply:
                assert reply.status == 404, (method, path)
        status, error = await gateway.post(URL, {**body, "previous_response_id": mine["id"]}, **two)
        assert (status, error["error"]["code"]) == (400, "previous_response_not_found")
        async with gateway.session.get(f"{URL}/{mine['id']}", headers=one) as reply:
            assert reply.status == 200


async def test_long_conversations_are_processed_off_event_loop(
    world: World, clients: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, set[int]] = {}
    for module, name in ((responses_history, "_merged"), (kept, "_read")):
        monkeypatch.setattr(module, name, _watched(getattr(module, name), threads.setdefault(name, set())))
    world.worker.gate.allow(FOREVER_STEPS)
    monkeypatch.setattr("gateway.work.reader_pool.INLINE_BYTES", 0)  # treats every conversation as long
    first = await make(clients[0], world)
    second = await make(clients[0], world, previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert all(ids and threading.get_ident() not in ids for ids in threads.values()), threads


def _watched(work: Callable[..., Any], threads: set[int]) -> Callable[..., Any]:
    def watched(*arguments: Any) -> Any:
        threads.add(threading.get_ident())
        return work(*arguments)

    return watched
