"""Fair shares: a worker whose slots one key fills still claims and starts the next request of each other key."""

from msgspec import structs

from shared.messages import GenerationRequest
from shared.redis_client import RedisConnections
from shared.redis_keys import RedisKeys
from tests.builders import expected_output, make_request
from tests.engine_worker.worker_harness import FOREVER_STEPS, WorkerHarness, eventually


def of_key(tenant: str, count: int, max_tokens: int = 100, **fields: int) -> list[GenerationRequest]:
    return [
        structs.replace(
            make_request(3, f"{tenant}{n}", max_tokens=max_tokens, ignore_eos=True), tenant=tenant, **fields
        )
        for n in range(count)
    ]


async def fill(harness: WorkerHarness, requests: list[GenerationRequest], num_slots: int) -> int:
    """Fill all slots with `requests`. Return the number of started steps; the last one blocks."""
    await harness.submit_all(*requests)
    await eventually(lambda: harness.num_held >= num_slots)
    harness.gate.allow(6)
    await eventually(lambda: len(harness.gate.batches) == 7)
    assert len(harness.gate.batches[-1]) == num_slots
    return 7


async def test_shares_other_key_starts_within_two_steps(connections: RedisConnections, keys: RedisKeys) -> None:
    hostile, other = of_key("a", 40), of_key("b", 1, max_tokens=1)
    async with WorkerHarness(connections, keys, num_steps=0, max_num_seqs=4).serving() as harness:
        num_steps = await fill(harness, hostile, 4)
        await harness.submit_all(*other)
        await eventually(lambda: "b0" in harness.worker.tenants())
        harness.gate.allow(3)
        await eventually(lambda: len(harness.gate.batches) == num_steps + 3)
        assert any("b0" in batch for batch in harness.gate.batches[num_steps : num_steps + 2])
        harness.gate.allow(FOREVER_STEPS)
        for request in (*hostile, *other):
            assert (await harness.finish(request.request_id))[0] == expected_output(request)


async def test_shares_key_at_its_limit_does_not_block_others(connections: RedisConnections, keys: RedisKeys) -> None:
    limited, others = of_key("a", 40, max_tokens=20, tenant_max_running=1), of_key("b", 20, max_tokens=20)
    async with WorkerHarness(connections, keys, max_num_seqs=4).serving() as harness:
        await harness.submit_all(*limited)
        await harness.submit_all(*others)
        for request in (*others, *limited):
            assert (await harness.finish(request.request_id))[0] == expected_output(request)
        batches = harness.gate.batches
        assert max(sum(name[0] == "a" for name in batch) for batch in batches) == 1
        assert sum(len(batch) == 4 for batch in batches) >= 100  # three slots of b beside one of a: 20 * 20 / 3


async def test_shares_full_worker_claims_one_request_per_key(connections: RedisConnections, keys: RedisKeys) -> None:
    async with WorkerHarness(connections, keys, num_steps=0, max_num_seqs=4).serving() as harness:
        await fill(harness, of_key("a", 40), 4)
        for tenant in "bcde":
            await harness.submit_all(*of_key(tenant, 20, max_tokens=1))
        await eventually(lambda: {"b0", "c0", "d0", "e0"} <= harness.worker.tenants().keys())
        others = [name for name in harness.worker.tenants() if name[0] != "a"]
        assert len(others) == 4 and harness.num_held <= 2 * 4 + 4
