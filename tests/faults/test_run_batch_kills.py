"""`pagestream run-batch` is killed at random moments, and its server's queue is full: each line has one result."""

import asyncio
import random
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from pathlib import Path

import pytest

from tests.e2e.batch_load import batch_lines, check_results
from tests.faults.site import ROOT, running_site
from tests.tiny_model import write_tiny_model

NUM_LINES = 200
SEED = 39
WORKER_FLAGS = ["--max-num-seqs", "4", "--dead-after-seconds", "3"]
QUEUE_FLAGS = ["--max-num-queued-reqs", "8"]  # a run sends 64 at a time


async def begun(argv: list[str]) -> Process:
    return await asyncio.create_subprocess_exec(sys.executable, *argv, cwd=ROOT, stderr=DEVNULL)


@pytest.mark.parametrize(
    ("num_kills", "step_seconds", "full_seconds"),
    [(5, 0.15, 5.0), pytest.param(20, 0.8, 300.0, marks=pytest.mark.long)],
)
@pytest.mark.timeout(900)
async def test_killed_runs_and_a_full_queue_leave_one_result_per_line(
    tmp_path: Path, num_kills: int, step_seconds: float, full_seconds: float
) -> None:
    requests, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_text("\n".join(batch_lines(NUM_LINES)))
    moments = random.Random(SEED)
    model = write_tiny_model(tmp_path / "tiny")
    flags = ["--script-step-seconds", str(step_seconds), *WORKER_FLAGS]  # so slow that lines are left after all kills
    async with running_site(
        tmp_path, model, name="tiny", num_workers=1, worker_flags=flags, gateway_flags=QUEUE_FLAGS
    ) as site:
        argv = ["-m", "pagestream", "run-batch", "-i", str(requests), "-o", str(results), "--url", site.urls[0]]
        for kill in range(num_kills):
            run = await begun(argv)
            await asyncio.sleep(moments.uniform(0.3, 1.5))  # the moment of the kill
            run.kill()
            await run.wait()
            if kill == num_kills // 2:
                await site.end(site.worker_names[0], signal.SIGKILL)
        num_before = len(results.read_text().splitlines())
        assert num_before < NUM_LINES, "nothing was left to do"
        run = await begun(argv)
        await asyncio.sleep(full_seconds)  # length of the fault: nobody takes what fills the queue
        assert run.returncode is None
        site.start_worker()
        assert await run.wait() == 0
        check_results(results.read_text(), NUM_LINES)
        await site.nothing_is_left()
