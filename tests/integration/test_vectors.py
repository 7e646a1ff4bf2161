"""Vectors through a real store: in the journal, computed again after a takeover, and read at another gateway."""

import asyncio
import base64
from pathlib import Path

from tests.builders import expected_output, fake_vector, make_request
from tests.engine_worker.worker_harness import FOREVER_STEPS, eventually
from tests.integration.conftest import VOCAB_SIZE, World, nothing_is_left
from tests.patience import PATIENCE_SECONDS

PROMPTS = [[5 + number] * 30 for number in range(8)]


def vector_of(prompt: list[int]) -> bytes:
    request = make_request(prompt, max_tokens=1, ignore_eos=True)
    return fake_vector(expected_output(request, vocab_size=VOCAB_SIZE)[0], len(prompt))


async def test_fenced_worker_loses_no_vector(world: World, demo_model_dir: Path) -> None:
    worker = world.worker
    body = {"input": PROMPTS, "encoding_format": "base64", "detach_seconds": 60}
    expected = [base64.b64encode(vector_of(prompt)).decode() for prompt in PROMPTS]
    async with world.another_gateway(demo_model_dir, task="embed") as gateway, asyncio.timeout(PATIENCE_SECONDS):
        posted = asyncio.create_task(gateway.post("/v1/embeddings", body))
        worker.gate.allow(2)  # 64 tokens each: some vectors are in the journal, others are not
        await eventually(lambda: len(worker.gate.batches) == 3)
        await worker.scripts.redis.delete(world.keys.fence(worker.incarnations[0]))
        worker.gate.allow(FOREVER_STEPS)
        status, answer = await posted
        assert (status, [item["embedding"] for item in answer["data"]]) == (200, expected)
        assert answer["usage"] == {"prompt_tokens": 240, "total_tokens": 240}
        assert len(worker.incarnations) == 2
        answer_id = answer["id"].removeprefix("embd-")
        _, kept = await world.gateways[0].shown(answer_id)
        assert kept["state"] == "finished" and kept["result"] == answer
        async with gateway.session.get(f"/v1/requests/{answer_id}/events") as reply:
            assert (reply.status, (await reply.json())["error"]["param"]) == (400, "id")
        await nothing_is_left(world)
