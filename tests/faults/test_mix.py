"""A minute of everything at once. `make soak` is the same for longer; a seed that failed is run again with --seed."""

import random
from pathlib import Path

import pytest

from tests.faults.mix import is_whole, run_mix

pytestmark = pytest.mark.timeout(600)


async def test_a_minute_of_random_faults_changes_no_answer(demo_model_dir: Path, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    report = await run_mix(tmp_path, demo_model_dir, seconds=60, num_streams=100, seed=seed)
    assert is_whole(report), report
    assert report["complete"] == 100 and sum(report["disasters"].values()) >= 10, report
