"""Retained requests: resumed at another gateway after any event, read after their end, and repeated by name."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from gateway.auth.api_keys import digest_of
from tests.engine_worker.worker_harness import FOREVER_STEPS
from tests.integration.conftest import CHAT, COMPLETIONS, Event, World, nothing_is_left
from tests.patience import PATIENCE_SECONDS

HI = [{"role": "user", "content": "Hi"}]
GREEDY = {"prompt": "Hi", "max_tokens": 30, "temperature": 0, "ignore_eos": True, "detach_seconds": 60}


def by_choice(events: list[Event]) -> dict[int, list[str]]:
    """Group the events by choice, because the order between choices is not defined."""
    grouped: dict[int, list[str]] = {}
    for event in events:
        choices = event.chunk["choices"] if event.data != "[DONE]" else []
        grouped.setdefault(choices[0]["index"] if choices else -1, []).append(event.data)
    return grouped


async def eventually_state(world: World, request_id: str, state: str) -> dict[str, Any]:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            _, shown = await world.gateways[1].shown(request_id)
            if shown["state"] == state:
                return shown
            await asyncio.sleep(0.01)


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (COMPLETIONS, {**GREEDY, "max_tokens": 12}),
    "chat": (CHAT, {"messages": HI, "max_tokens": 12, "seed": 5, "detach_seconds": 0}),
    "n": (CHAT, {"messages": HI, "max_tokens": 6, "seed": 5, "n": 3, "ignore_eos": True, "detach_seconds": 9}),
    "prompts": (COMPLETIONS, {**GREEDY, "prompt": ["one", "two"], "echo": True, "max_tokens": 5}),
    "logprobs": (COMPLETIONS, {**GREEDY, "logprobs": 2, "max_tokens": 7}),
    "best_of": (COMPLETIONS, {**GREEDY, "temperature": 1, "seed": 1, "best_of": 3, "n": 2, "max_tokens": 5}),
    "beams": (COMPLETIONS, {**GREEDY, "use_beam_search": True, "n": 2, "best_of": 3, "max_tokens": 5}),
}


@pytest.mark.parametrize("name", BODIES)
async def test_stream_resumed_after_any_event_gives_the_rest(world: World, name: str) -> None:
    world.worker.gate.allow(FOREVER_STEPS)
    route, body = BODIES[name]
    body = {**body, "stream_options": {"include_usage": True}}
    async with world.gateways[0].streaming(route, body) as reader:
        request_id, events = reader.request_id, await reader.rest()
    assert events[-1] == Event("end", "[DONE]") and len({event.event_id for event in events}) == len(events)
    assert by_choice(await world.gateways[1].events(request_id)) == by_choice(events)
    for cut in range(len(events) - 1):
        rest = await world.gateways[1].events(request_id, events[cut].event_id)
        assert by_choice(rest) == by_choice(events[cut + 1 :]), cut


async def test_running_stream_continues_at_another_gateway(world: World) -> None:
    world.worker.gate.allow(10)
    async with world.gateways[0].streaming(COMPLETIONS, GREEDY) as reader:
        first = await reader.take(8)
    resumed = asyncio.create_task(world.gateways[1].events(reader.request_id, first[-1].event_id))
    world.worker.gate.allow(FOREVER_STEPS)
    rest = await asyncio.wait_for(resumed, PATIENCE_SECONDS)
    text = "".join(event.chunk["choices"][0]["text"] for event in [*first, *rest[:-2]])
    _, shown = await world.gateways[0].shown(reader.request_id)
    assert shown["state"] == "finished" and shown["completion_tokens"] == 30
    assert shown["result"]["choices"][0] == {
        "index": 0, "text": text, "logprobs": None, "finish_reason": "length",
        "prompt_logprobs": None, "prompt_token_ids": None,
    }  # fmt: skip


async def test_attached_gateway_gets_tokens_without_journal_reads(world: World) -> None:
    """The worker publishes to both gateways; the journal is only for missed tokens."""
    world.worker.gate.allow(4)
    async with world.gateways[0].streaming(COMPLETIONS, GREEDY) as reader:
        first = await reader.take(3)
    client = world.gateways[1].client
    async with world.gateways[1].session.get(
        f"/v1/requests/{reader.request_id}/events", headers={"Last-Event-ID": first[-1].event_id}
    ) as reply:
        attached = type(reader)(reply)
        await attached.take(1)  # the fourth token, from the journal
        num_reads = client.counts.num_journal_reads
        for _ in range(10):
            world.worker.gate.allow(1)
            await attached.take(1)
        assert client.counts.num_journal_reads - num_reads <= 2  # the hint and the first token may race


@pytest.mark.parametrize("num_losses", [1, pytest.param(70, marks=pytest.mark.long)])
async def test_request_of_a_lost_store_is_not_unknown_until_it_returns(world: World, num_losses: int) -> None:
    """Clients that ask another gateway must try again, not give up with 404."""
    store = world.connections.commands
    refusals: list[tuple[int, str]] = []
    async with world.gateways[0].streaming(COMPLETIONS, {**GREEDY, "max_tokens": 400}) as reader:
        for number in range(num_losses):
            world.worker.gate.allow(4)  # the worker drops the result of a step that a loss interrupts
            await reader.take(2)
            names = [name async for name in store.scan_iter(f"{{{world.keys.model_name}}}:*")]
            await store.unlink(*names)
            async with asyncio.timeout(PATIENCE_SECONDS):
                while (found := await world.gateways[1].shown(reader.request_id))[0] != 200:
                    refusals.append((found[0], found[1]["error"]["code"]))
                    await asyncio.sleep(0.02)  # polls another gateway
            assert found[1]["completion_tokens"] >= 2 * (number + 1)
    assert set(refusals) == {(503, "store_recovering")}


async def test_unknown_request_of_an_old_store_is_not_found(world: World) -> None:
    assert (await world.gateways[0].shown("0" * 32))[0] == 404


async def test_retained_result_equals_unstreamed_response(world: World) -> None:
    world.worker.gate.allow(FOREVER_STEPS)
    body = {"messages": HI, "seed": 3, "max_tokens": 9, "detach_seconds": 1}
    status, answer = await world.gateways[0].post(CHAT, body)
    assert status == 200
    _, shown = await world.gateways[1].shown(answer["id"])
    assert shown["result"] == answer
    assert shown["id"] == answer["id"].removeprefix("chatcmpl-") and shown["kind"] == "chat.completion"


async def test_request_state_while_running_has_counts(world: World) -> None:
    async with world.gateways[0].streaming(COMPLETIONS, GREEDY) as reader:
        _, shown = await world.gateways[1].shown(reader.request_id)
        assert shown["state"] in ("queued", "running") and shown["completion_tokens"] == 0
        world.worker.gate.allow(3)
        await reader.take(3)
        _, shown = await world.gateways[1].shown(reader.request_id)
        assert (shown["state"], shown["completion_tokens"], shown["result"]) == ("running", 3, None)


class TestLeaving:
    async def test_detached_request_continues_alone(self, world: World) -> None:
        async with world.gateways[0].streaming(COMPLETIONS, GREEDY) as reader:
            pass
        world.worker.gate.allow(FOREVER_STEPS)
        shown = await eventually_state(world, reader.request_id, "finished")
        assert shown["completion_tokens"] == 30

    async def test_detached_request_is_cancelled_after_grace(self, world: World) -> None:
        world.worker.gate.allow(3)
        async with world.gateways[0].streaming(COMPLETIONS, {**GREEDY, "detach_seconds": 0.2}) as reader:
            events = await reader.take(3)
        shown = await eventually_state(world, reader.request_id, "cancelled")
        assert shown["error"]["code"] == "request_cancelled"
        world.worker.gate.allow(FOREVER_STEPS)
        await nothing_is_left(world)
        again = await world.gateways[1].events(reader.request_id)
        assert again[: len(events)] == events and again[-2].chunk["error"]["code"] == "request_cancelled"

    async def test_detached_request_with_another_reader_continues(self, world: World) -> None:
        world.worker.gate.allow(2)
        body = {**GREEDY, "detach_seconds": 0}
        async with world.gateways[0].streaming(COMPLETIONS, body) as reader:
            await reader.take(2)
            attached = asyncio.create_task(world.gateways[1].events(reader.request_id))
            async with asyncio.timeout(PATIENCE_SECONDS):
                while len(await holders(world, reader.request_id)) < 2:
                    await asyncio.sleep(0.01)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(await holders(world, reader.request_id)) > 1:
                await asyncio.sleep(0.01)
        world.worker.gate.allow(FOREVER_STEPS)
        assert len(await asyncio.wait_for(attached, PATIENCE_SECONDS)) == 32  # 30 tokens, end, [DONE]

    async def test_one_of_the_readers_that_left_goes_on(self, world: World) -> None:
        world.worker.gate.allow(2)
        async with world.gateways[0].streaming(COMPLETIONS, GREEDY) as reader:
            await reader.take(2)
            path, streams = f"/v1/requests/{reader.request_id}/events", world.gateways[1].client.streams
            async with AsyncExitStack() as attached:
                for _ in range(5):
                    reply = await attached.enter_async_context(world.gateways[1].session.get(path))
                    await type(reader)(reply).take(2)
                assert len(streams.of(reader.request_id)) == 5
            async with asyncio.timeout(PATIENCE_SECONDS):
                while len(streams.of(reader.request_id)) > 1 or len(await holders(world, reader.request_id)) > 2:
                    await asyncio.sleep(0.01)
        world.worker.gate.allow(FOREVER_STEPS)
        assert (await eventually_state(world, reader.request_id, "finished"))["completion_tokens"] == 30

    async def test_grace_time_is_that_of_the_last_reader(self, world: World) -> None:
        grace_seconds, apart_seconds = 0.8, 0.6
        world.worker.gate.allow(2)
        clock = asyncio.get_running_loop().time
        async with world.gateways[0].streaming(COMPLETIONS, {**GREEDY, "detach_seconds": grace_seconds}) as reader:
            await reader.take(2)
            path = f"/v1/requests/{reader.request_id}/events"
            later = await world.gateways[0].session.get(path)
            await type(reader)(later).take(2)
        await asyncio.sleep(apart_seconds)
        left_at = clock()
        later.close()
        await eventually_state(world, reader.request_id, "cancelled")
        assert clock() - left_at >= grace_seconds - 0.01  # uvloop's clock has milliseconds

    async def test_stop_string_ends_request_without_reader(self, world: World) -> None:
        world.worker.gate.allow(FOREVER_STEPS)
        _, whole = await world.gateways[0].post(COMPLETIONS, GREEDY)
        text = whole["choices"][0]["text"]
        stop = text[len(text) // 2 :][:3]
        async with world.gateways[0].streaming(COMPLETIONS, {**GREEDY, "stop": stop}) as reader:
            pass
        shown = await eventually_state(world, reader.request_id, "finished")
        assert shown["result"]["choices"][0]["text"] == text[: text.index(stop)]
        assert shown["result"]["choices"][0]["finish_reason"] == "stop"
        await nothing_is_left(world)
        assert shown == (await world.gateways[0].shown(reader.request_id))[1]

    async def test_request_without_retention_ends_with_connection(self, world: World) -> None:
        body = {**GREEDY, "detach_seconds": None}
        async with world.gateways[0].streaming(COMPLETIONS, body) as reader:
            assert "Content-Location" not in reader.reply.headers
        world.worker.gate.allow(FOREVER_STEPS)
        await nothing_is_left(world)

    async def test_stopping_gateway_leaves_requests_to_others(self, world: World, demo_model_dir: Any) -> None:
        world.worker.gate.allow(4)
        async with world.another_gateway(demo_model_dir) as leaving, leaving.streaming(COMPLETIONS, GREEDY) as reader:
            first = await reader.take(3)
        world.worker.gate.allow(FOREVER_STEPS)
        rest = await world.gateways[1].events(reader.request_id, first[-1].event_id)
        whole = await world.gateways[0].events(reader.request_id)
        assert first + rest == whole


class TestCancel:
    async def test_cancel_at_another_gateway_ends_stream(self, world: World) -> None:
        world.worker.gate.allow(3)
        async with world.gateways[0].streaming(COMPLETIONS, GREEDY) as reader:
            await reader.take(3)
            status, shown = await world.gateways[1].shown(reader.request_id, "DELETE")
            assert (status, shown["state"], shown["error"]["code"]) == (200, "cancelled", "request_cancelled")
            rest = await reader.rest()
        assert rest[-2].chunk["error"]["code"] == "request_cancelled" and rest[-1].event_id == "end"
        world.worker.gate.allow(FOREVER_STEPS)
        await nothing_is_left(world)

    async def test_cancel_after_end_keeps_the_result(self, world: World) -> None:
        world.worker.gate.allow(FOREVER_STEPS)
        _, answer = await world.gateways[0].post(COMPLETIONS, GREEDY)
        _, shown = await world.gateways[1].shown(answer["id"], "DELETE")
        assert shown["state"] == "finished" and shown["result"] == answer


class TestIdempotency:
    async def test_idempotency_repeat_gets_same_response(self, world: World) -> None:
        world.worker.gate.allow(FOREVER_STEPS)
        body = {"messages": HI, "max_tokens": 8}
        answers = [await gateway.post(CHAT, body, Idempotency_Key="k") for gateway in world.gateways]
        assert answers[0] == answers[1] and answers[0][0] == 200
        _, another = await world.gateways[0].post(CHAT, body, Idempotency_Key="other")
        assert another["id"] != answers[0][1]["id"]

    async def test_idempotency_concurrent_repeats_are_one_request(self, world: World) -> None:
        world.worker.gate.allow(FOREVER_STEPS)
        body = {"messages": HI, "max_tokens": 8}
        posts = [gateway.post(CHAT, body, Idempotency_Key="k") for gateway in world.gateways * 4]
        answers = await asyncio.gather(*posts)
        assert len({answer["id"] for _, answer in answers}) == 1 and {status for status, _ in answers} == {200}

    async def test_idempotency_repeat_attaches_to_running_request(self, world: World) -> None:
        body = {**GREEDY, "detach_seconds": None}
        world.worker.gate.allow(3)
        async with world.gateways[0].streaming(COMPLETIONS, body, Idempotency_Key="k") as reader:
            first = await reader.take(3)
        world.worker.gate.allow(FOREVER_STEPS)
        headers = {"Idempotency_Key": "k", "Last_Event_ID": first[-1].event_id}
        async with world.gateways[1].streaming(COMPLETIONS, body, **headers) as again:
            assert again.request_id == reader.request_id
            rest = await again.rest()
        assert len(first + rest) == 32 and rest[0].chunk["id"] == first[0].chunk["id"]

    async def test_idempotency_other_body_is_refused(self, world: World) -> None:
        world.worker.gate.allow(FOREVER_STEPS)
        await world.gateways[0].post(COMPLETIONS, GREEDY, Idempotency_Key="k")
        status, error = await world.gateways[1].post(COMPLETIONS, {**GREEDY, "seed": 1}, Idempotency_Key="k")
        assert (status, error["error"]["code"]) == (409, "idempotency_key_reused")

    async def test_idempotency_ignores_order_of_fields(self, world: World) -> None:
        world.worker.gate.allow(FOREVER_STEPS)
        first = await world.gateways[0].post(COMPLETIONS, GREEDY, Idempotency_Key="k")
        assert await world.gateways[1].post(COMPLETIONS, dict(reversed(GREEDY.items())), Idempotency_Key="k") == first

    async def test_idempotency_key_of_lost_request_is_free(self, world: World) -> None:
        world.worker.gate.allow(FOREVER_STEPS)
        _, first = await world.gateways[0].post(COMPLETIONS, GREEDY, Idempotency_Key="k")
        request_id = first["id"].removeprefix("cmpl-")
        await world.connections.commands.unlink(world.keys.request(request_id))
        status, second = await world.gateways[0].post(COMPLETIONS, GREEDY, Idempotency_Key="k")
        assert status == 200 and second["id"] != first["id"]
        assert await world.gateways[1].post(COMPLETIONS, GREEDY, Idempotency_Key="k") == (200, second)


async def test_retention_invalid_header_or_field_is_refused(world: World) -> None:
    cases: list[tuple[dict[str, str], dict[str, Any], str]] = [
        ({"Idempotency_Key": ""}, {}, "Idempotency-Key"),
        ({"Idempotency_Key": "k" * 256}, {}, "Idempotency-Key"),
        ({"Idempotency_Key": "a b"}, {}, "Idempotency-Key"),
        ({}, {"detach_seconds": -1}, "detach_seconds"),
        ({}, {"detach_seconds": 3601}, "detach_seconds"),
        ({}, {"detach_seconds": "5"}, "detach_seconds"),
        ({"Last_Event_ID": "5"}, {}, "Last-Event-ID"),
        ({"Last_Event_ID": "5-x"}, {}, "Last-Event-ID"),
    ]
    for headers, changes, param in cases:
        status, error = await world.gateways[0].post(COMPLETIONS, {**GREEDY, **changes}, **headers)
        assert (status, error["error"]["param"]) == (400, param)


async def test_events_after_the_last_event_give_204(world: World) -> None:
    world.worker.gate.allow(FOREVER_STEPS)
    _, answer = await world.gateways[0].post(COMPLETIONS, GREEDY)
    url = f"/v1/requests/{answer['id']}/events"
    async with world.gateways[1].session.get(url, headers={"Last-Event-ID": "end"}) as reply:
        assert (reply.status, await reply.read()) == (204, b"")


async def test_request_of_another_key_is_not_found(world: World, demo_model_dir: Any, tmp_path: Any) -> None:
    names = {name: f"sk-{name}-0123456789abcdef" for name in ("one", "two")}
    keys_file = write_keys(tmp_path, names)
    world.worker.gate.allow(FOREVER_STEPS)
    async with world.another_gateway(demo_model_dir, api_keys_file=keys_file) as gateway:
        one, two = ({"Authorization": f"Bearer {key}"} for key in names.values())
        _, answer = await gateway.post(COMPLETIONS, GREEDY, Idempotency_Key="k", **one)
        assert (await gateway.shown(answer["id"], **one))[0] == 200
        for method in ("GET", "DELETE"):
            status, error = await gateway.shown(answer["id"], method, **two)
            assert (status, error["error"]["code"]) == (404, "request_not_found")
        async with gateway.session.get(f"/v1/requests/{answer['id']}/events", headers=two) as reply:
            assert reply.status == 404
        _, other = await gateway.post(COMPLETIONS, GREEDY, Idempotency_Key="k", **two)
        assert other["id"] != answer["id"]
        assert (await gateway.shown("f" * 32, **one))[0] == (await gateway.shown("x", **one))[0] == 404


def write_keys(directory: Any, keys: dict[str, str]) -> Any:
    path = directory / "keys.toml"
    path.write_text(
        "\n".join(f'[[keys]]\nname = "{name}"\nsha256 = "{digest_of(key.encode())}"' for name, key in keys.items())
    )
    return path


async def holders(world: World, request_id: str) -> list[bytes]:
    fields: list[Any] = await world.connections.commands.hkeys(world.keys.request(request_id))
    return [name for name in fields if name.startswith(b"h:")]
