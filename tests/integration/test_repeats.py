"""Idempotency keys: repeats get one response, and a refused request can be repeated successfully."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from redis.exceptions import ConnectionError

from shared.messages import GenerationRequest
from shared.new_requests import PROLONG_SECONDS, RETAINED_SECONDS, RetentionTerms
from shared.redis_scripts import RedisScripts
from tests.engine_worker.worker_harness import FOREVER_STEPS, eventually
from tests.integration.conftest import COMPLETIONS, World
from tests.patience import PATIENCE_SECONDS

SHORT = {"prompt": "Hi", "max_tokens": 2, "temperature": 0, "ignore_eos": True}
LONG = {**SHORT, "max_tokens": 30, "detach_seconds": 0}
TWO_PROMPTS = {**SHORT, "prompt": ["one", "two"]}
NUM_ROUNDS, ROUNDS_AT_ONCE = 1000, 8


class TestTwoBodiesOfOneName:
    async def test_idempotency_race_of_two_bodies_refuses_one(self, world: World) -> None:
        """Race a thousand times at two gateways, both past the name check before either request is accepted."""
        world.worker.gate.allow(FOREVER_STEPS)
        rounds = asyncio.Semaphore(ROUNDS_AT_ONCE)
        bodies = [{**SHORT, "max_tokens": 1, "prompt": prompt} for prompt in ("ALPHA", "BRAVO")]

        async def race(number: int) -> tuple[int, ...]:
            async with rounds:
                await world.beat()
                posts = [
                    gateway.post(COMPLETIONS, body, Idempotency_Key=f"k{number}")
                    for gateway, body in zip(world.gateways, bodies[:: 1 if number % 2 else -1], strict=True)
                ]
                replies = await asyncio.gather(*posts)
            assert {reply.get("error", {}).get("code") for _, reply in replies} == {None, "idempotency_key_reused"}
            return tuple(sorted(status for status, _ in replies))

        ends = await asyncio.gather(*(race(number) for number in range(NUM_ROUNDS)))
        assert ends == [(200, 409)] * NUM_ROUNDS

    async def test_idempotency_race_gives_each_body_its_own_result(self, world: World) -> None:
        world.worker.gate.allow(FOREVER_STEPS)
        bodies = [{**SHORT, "prompt": prompt, "echo": True} for prompt in ("ALPHA", "BRAVO")] * 4
        posts = [
            gateway.post(COMPLETIONS, body, Idempotency_Key="k")
            for body in bodies
            for gateway in world.gateways
        ]  # fmt: skip
        replies = await asyncio.gather(*posts)
        asked = [body["prompt"] for body in bodies for _ in world.gateways]
        (winner,) = {reply["choices"][0]["text"][:5] for status, reply in replies if status == 200}
        assert [status for status, _ in replies] == [200 if prompt == winner else 409 for prompt in asked]


class TestAfterARefusal:
    """A request whose refusal says "try again" succeeds when it is repeated."""

    async def test_repeat_after_full_queue_succeeds(self, one_slot: World, demo_model_dir: Path) -> None:
        """Requests that a worker has read take no place, so four are sent to have two wait."""
        world = one_slot
        redis, queue = world.connections.commands, world.keys.queue("interactive")
        async with world.another_gateway(demo_model_dir, max_num_queued_reqs=3) as gateway:
            others = [asyncio.create_task(gateway.post(COMPLETIONS, SHORT)) for _ in range(4)]
            await becomes(partial(redis.xlen, queue), 4)
            await eventually(lambda: world.worker.gate.batches)
            status, error = await gateway.post(COMPLETIONS, TWO_PROMPTS, Idempotency_Key="k")
            assert (status, error["error"]["code"]) == (503, "queue_full")
            assert await redis.xlen(queue) == 4, "no prompt was accepted"
            world.worker.gate.allow(FOREVER_STEPS)
            await asyncio.gather(*others)
            status, answer = await gateway.post(COMPLETIONS, TWO_PROMPTS, Idempotency_Key="k")
            assert (status, len(answer["choices"])) == (200, 2)
            assert await world.gateways[1].post(COMPLETIONS, TWO_PROMPTS, Idempotency_Key="k") == (200, answer)

    async def test_more_prompts_than_queue_places_are_accepted_when_empty(
        self, world: World, demo_model_dir: Path
    ) -> None:
        """An empty queue accepts them; otherwise they never could be."""
        world.worker.gate.allow(FOREVER_STEPS)
        async with world.another_gateway(demo_model_dir, max_num_queued_reqs=1) as gateway:
            status, answer = await gateway.post(COMPLETIONS, TWO_PROMPTS)
        assert (status, len(answer["choices"])) == (200, 2)

    async def test_repeat_after_lost_store_replies_succeeds(self, world: World) -> None:
        """The store has accepted the request. It is withdrawn when the store answers; a token would be an answer."""
        with lost_replies(world.gateways[0].scripts, "accept"):
            status, error = await world.gateways[0].post(COMPLETIONS, TWO_PROMPTS, Idempotency_Key="k")
        assert (status, error["error"]["code"]) == (503, "store_unavailable")
        world.worker.gate.allow(FOREVER_STEPS)
        for gateway in world.gateways:
            status, answer = await gateway.post(COMPLETIONS, TWO_PROMPTS, Idempotency_Key="k")
            assert (status, len(answer["choices"])) == (200, 2)

    async def test_repeat_after_queue_timeout_succeeds(self, one_slot: World) -> None:
        body = {**SHORT, "queue_timeout_seconds": 2.0}  # also the time that the repeat may wait for its step
        first = asyncio.create_task(one_slot.gateways[0].post(COMPLETIONS, SHORT))
        await eventually(lambda: one_slot.worker.gate.batches)
        status, error = await one_slot.gateways[0].post(COMPLETIONS, body, Idempotency_Key="k")
        assert (status, error["error"]["code"]) == (503, "queue_timeout")
        one_slot.worker.gate.allow(FOREVER_STEPS)
        await first
        repeats = [await gateway.post(COMPLETIONS, body, Idempotency_Key="k") for gateway in one_slot.gateways]
        assert repeats[0] == repeats[1] and repeats[0][0] == 200

    async def test_repeat_after_draining_succeeds(self, world: World) -> None:
        world.worker.gate.allow(FOREVER_STEPS)
        open_requests = world.gateways[0].state.open_requests
        open_requests.draining = True
        status, error = await world.gateways[0].post(COMPLETIONS, SHORT, Idempotency_Key="k")
        assert (status, error["error"]["code"]) == (503, "draining")
        open_requests.draining = False
        assert (await world.gateways[0].post(COMPLETIONS, SHORT, Idempotency_Key="k"))[0] == 200


class TestAnswersThatNobodyHad:
    async def test_repeat_after_client_left_starts_again(self, world: World) -> None:
        world.worker.gate.allow(1)
        async with world.gateways[0].streaming(COMPLETIONS, LONG, Idempotency_Key="k") as reader:
            await reader.take(1)
        await becomes(partial(stored_state, world, reader.request_id), b"done")
        world.worker.gate.allow(FOREVER_STEPS)
        async with world.gateways[1].streaming(COMPLETIONS, LONG, Idempotency_Key="k") as again:
            assert again.request_id != reader.request_id and len(await again.rest()) == 32  # 30 tokens, end, [DONE]

    async def test_repeat_attaching_too_late_starts_again(self, world: World) -> None:
        """The last holder releases the request between the name check and the attachment."""
        world.worker.gate.allow(1)
        other = world.gateways[1].client.submission
        attach_all, num_attached = other.attach_all, 0
        async with world.gateways[0].streaming(COMPLETIONS, LONG, Idempotency_Key="k") as reader:
            await reader.take(1)

            async def too_late(requests: Sequence[GenerationRequest], terms_of_each: Sequence[RetentionTerms]) -> Any:
                nonlocal num_attached
                num_attached += 1
                reader.reply.close()
                await becomes(partial(stored_state, world, reader.request_id), b"done")
                world.worker.gate.allow(FOREVER_STEPS)
                return await attach_all(requests, terms_of_each)

            other.attach_all = too_late  # type: ignore[method-assign]
            async with world.gateways[1].streaming(COMPLETIONS, LONG, Idempotency_Key="k") as again:
                assert again.request_id != reader.request_id and len(await again.rest()) == 32
        assert num_attached == 1

    async def test_repeat_of_cancelled_request_stays_cancelled(self, world: World) -> None:
        async with world.gateways[0].streaming(COMPLETIONS, SHORT, Idempotency_Key="k") as reader:
            await world.gateways[1].shown(reader.request_id, "DELETE")
            await reader.rest()
        async with world.gateways[1].streaming(COMPLETIONS, SHORT, Idempotency_Key="k") as again:
            assert again.request_id == reader.request_id
            assert (await again.rest())[-2].chunk["error"]["code"] == "request_cancelled"

    async def test_repeat_with_lost_prompt_starts_again(self, world: World) -> None:
        world.worker.gate.allow(FOREVER_STEPS)
        _, answer = await world.gateways[0].post(COMPLETIONS, TWO_PROMPTS, Idempotency_Key="k")
        answer_id = answer["id"].removeprefix("cmpl-")
        first = world.keys.request(answer_id).encode()
        (second,) = [key for key in await stored_keys(world, "r") if key != first]
        await world.connections.commands.unlink(second)
        assert (await world.gateways[1].shown(answer_id))[0] == 404
        status, again = await world.gateways[1].post(COMPLETIONS, TWO_PROMPTS, Idempotency_Key="k")
        assert status == 200 and again["id"] != answer["id"]
        assert sum(gateway.client.counts.num_restored_requests for gateway in world.gateways) == 0


async def test_idempotency_name_expires_with_its_response(world: World) -> None:
    ttl = world.connections.commands.ttl
    posted = asyncio.create_task(world.gateways[0].post(COMPLETIONS, TWO_PROMPTS, Idempotency_Key="k"))
    await becomes(lambda: num_stored(world, "i"), 1)
    (name,) = await stored_keys(world, "i")
    assert RETAINED_SECONDS < await ttl(name) <= RETAINED_SECONDS + 60 + 2 * PROLONG_SECONDS  # --default-detach-seconds
    world.worker.gate.allow(FOREVER_STEPS)
    await posted
    await becomes(lambda: is_at_most(ttl(name), RETAINED_SECONDS), True)
    lives = [await ttl(key) for key in (*await stored_keys(world, "r"), name)]
    assert len(lives) == 3 and min(lives) > RETAINED_SECONDS - 5 and max(lives) - min(lives) <= 1


@contextmanager
def lost_replies(scripts: RedisScripts, script: str) -> Iterator[None]:
    """Lose the replies of `script` after the store applied it."""
    call = scripts._call

    async def lossy(name: str, *arguments: Any) -> Any:
        reply = await call(name, *arguments)
        if name == script:
            raise ConnectionError("the reply was lost")
        return reply

    scripts._call = lossy  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        scripts._call = call  # type: ignore[method-assign]


async def becomes(ask: Callable[[], Awaitable[Any]], expected: Any) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await ask() != expected:
            await asyncio.sleep(0.01)


async def stored_state(world: World, request_id: str) -> bytes | None:
    state: Any = await world.connections.commands.hget(world.keys.request(request_id), "state")
    return state


async def stored_keys(world: World, kind: str) -> list[bytes]:
    """Return the store keys of a kind: r for requests, i for names."""
    pattern = world.keys.request("*").replace(":r:", f":{kind}:").replace("{", "[{]").replace("}", "[}]")
    return [key async for key in world.connections.commands.scan_iter(pattern)]


async def num_stored(world: World, kind: str) -> int:
    return len(await stored_keys(world, kind))


async def is_at_most(number: Awaitable[Any], limit: int) -> bool:
    return bool(await number <= limit)
