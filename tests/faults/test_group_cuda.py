"""A group on two GPUs loses a rank: both GPUs' memory becomes free, and the next group continues its streams."""

import asyncio
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.builders import make_prompt
from tests.e2e.reader import Reader
from tests.engine_worker.execution.reference import write_model_of_words
from tests.faults.conftest import StartWorld, World
from tests.faults.group_site import FLAGS, PATIENCE_SECONDS, Groups, outputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.tp,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two CUDA devices here"),
]
# Later ones hold. A step takes about 1 ms; with this many, a rank dies in the middle of all streams.
ON_GPUS = [*FLAGS, "--device", "cuda", "--max-model-len", "2048", "--max-num-batched-tokens", "64"]
ON_GPUS += ["--swap-space-bytes", "0"]
NUM_TOKENS = 1600
MEMORY_SECONDS = 5.0
# Memory that drivers and other processes may allocate or free meanwhile; a rank's context has several hundred MiB.
SLACK_BYTES = 64 * 2**20


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 2}
    return write_model_of_words(tmp_path_factory.mktemp("models") / "tiny", **sizes)


def used_bytes() -> list[int]:
    """Return what all processes together use of both devices."""
    found = [torch.cuda.mem_get_info(device) for device in range(2)]
    return [total - free for free, total in found]


async def seconds_until_free(before: list[int], used: Callable[[], list[int]] = used_bytes) -> float:
    """Return the seconds until no device has more in use than `before`."""
    started = time.monotonic()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while any(now > then + SLACK_BYTES for now, then in zip(used(), before, strict=True)):
            await asyncio.sleep(0.01)
    return time.monotonic() - started


def read(world: World) -> list[Reader]:
    prompts = [[20 + token % 200 for token in make_prompt(length, first=7 * length)] for length in (3, 40, 200)]
    return [Reader(world.client, prompt, max_tokens=NUM_TOKENS) for prompt in prompts]


async def test_killed_rank_frees_gpus_and_streams_continue(start_world: StartWorld, model_dir: Path) -> None:
    before = used_bytes()  # including this process's contexts
    groups = Groups(world := await start_world(), model_dir, ON_GPUS)
    groups.start("w0")
    await world.has_ready("w0")
    assert all(now > then + SLACK_BYTES for now, then in zip(used_bytes(), before, strict=True))
    undisturbed = await outputs(read(world))

    for number, rank in enumerate((1, 0)):
        readers = read(world)
        await world.all_have(readers, 20)
        status = await groups.kill(f"w{number}", rank)
        seconds = await seconds_until_free(before)
        print(f"both GPUs were free {seconds:.2f} s after the group of rank {rank} was gone")
        assert seconds <= MEMORY_SECONDS
        assert status == (1 if rank else -signal.SIGKILL)
        assert any(len(reader.tokens) < NUM_TOKENS for reader in readers)
        groups.start(f"w{number + 1}")
        assert await outputs(readers) == undisturbed
        assert max(await world.attempts(readers)) == 2
    await world.nothing_is_left()


@pytest.mark.parametrize("phase", ["load", "warmup"])
@pytest.mark.parametrize("rank", [0, 1])
async def test_rank_killed_at_its_start_frees_gpus(
    start_world: StartWorld, model_dir: Path, phase: str, rank: int
) -> None:
    """Kill it before the first step; graphs are captured in the warm-up."""
    before = used_bytes()
    groups = Groups(await start_world(), model_dir, ON_GPUS)
    status = await groups.kill_while("w0", phase, rank)
    assert await seconds_until_free(before) <= MEMORY_SECONDS
    assert status == (1 if rank else -signal.SIGKILL)
