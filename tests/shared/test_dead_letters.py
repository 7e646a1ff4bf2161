"""Dead letters on a real server, created by REAP."""

import pytest

from shared.dead_letters import DeadLetters, NoSuchLetter
from shared.messages import GenerationRequest, SamplingParams, decode_request, encode
from shared.reaping import reap_worker
from shared.redis_client import RedisConnections
from shared.redis_keys import RedisKeys
from shared.redis_scripts import KEEP_DEAD_SECONDS, Demand, RedisScripts


def request(request_id: str) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=5, seed=1)
    return GenerationRequest(request_id=request_id, prompt_token_ids=[7, 8, 9], sampling=sampling)


async def kill_three_workers_with(scripts: RedisScripts, request_id: str) -> None:
    body = encode(request(request_id))
    await scripts.accept(request_id, body, gateway_id="g", priority_class="interactive")
    for life in range(3):
        worker_id = f"{request_id}-{life}"
        await scripts.register(worker_id)
        entries = (await scripts.take(worker_id, Demand(10))).entries
        await scripts.claim(worker_id, entries)
        await reap_worker(scripts, worker_id)


@pytest.fixture
def letters(connections: RedisConnections, keys: RedisKeys) -> DeadLetters:
    return DeadLetters(connections.commands, keys)


async def test_dead_letters_are_listed_newest_first(
    letters: DeadLetters, scripts: RedisScripts, connections: RedisConnections, keys: RedisKeys
) -> None:
    for request_id in ("first", "second"):
        await kill_three_workers_with(scripts, request_id)
    listed = await letters.list()
    assert [letter.request_id for letter in listed] == ["second", "first"]
    assert (listed[0].worker_id, listed[0].attempts, listed[0].strikes) == ("second-2", 3, 3)
    assert listed[0].journal_bytes == 0
    assert await letters.request(listed[0]) == request("second")
    kept_seconds = await connections.commands.ttl(keys.request("second"))
    assert KEEP_DEAD_SECONDS - 60 < kept_seconds <= KEEP_DEAD_SECONDS


async def test_dead_letter_retry_creates_new_request(
    letters: DeadLetters, scripts: RedisScripts, connections: RedisConnections, keys: RedisKeys
) -> None:
    await kill_three_workers_with(scripts, "poison")
    new_id = await letters.retry(await letters.find("poison"))
    assert await letters.list() == []
    await scripts.register("w")
    (entry,) = (await scripts.take("w", Demand(10))).entries
    assert entry.request_id == new_id
    (claimed,) = await scripts.claim("w", [entry])
    assert claimed is not None
    again = decode_request(claimed.body)
    assert (again.request_id, again.prompt_token_ids, claimed.attempt) == (new_id, [7, 8, 9], 1)
    assert await connections.commands.exists(keys.request("poison"), keys.journal("poison")) == 0


async def test_dead_letter_drop_leaves_nothing(
    letters: DeadLetters, scripts: RedisScripts, connections: RedisConnections, keys: RedisKeys
) -> None:
    await kill_three_workers_with(scripts, "poison")
    await letters.drop(await letters.find("poison"))
    assert await letters.list() == []
    with pytest.raises(NoSuchLetter, match="no dead letter of request poison"):
        await letters.find("poison")
    assert await connections.commands.exists(keys.request("poison")) == 0


async def test_dead_letter_retry_after_body_expired_is_refused(
    letters: DeadLetters, scripts: RedisScripts, connections: RedisConnections, keys: RedisKeys
) -> None:
    await kill_three_workers_with(scripts, "poison")
    await connections.commands.unlink(keys.request("poison"))
    letter = await letters.find("poison")
    with pytest.raises(NoSuchLetter, match="has expired"):
        await letters.retry(letter)
    assert await letters.list() == [letter]
