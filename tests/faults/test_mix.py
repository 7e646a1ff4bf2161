"""A minute of everything at once. `make soak` is the same for longer, with another seed each time."""

from pathlib import Path

import pytest

from tests.faults.mix import is_whole, run_mix

pytestmark = pytest.mark.timeout(600)
SEED = 5754  # the same faults and requests in each run, so that what fails is the change
NUM_DISASTERS = 10  # a busy machine is given the time for them


async def test_a_minute_of_random_faults_changes_no_answer(demo_model_dir: Path, tmp_path: Path) -> None:
    report = await run_mix(
        tmp_path, demo_model_dir, seconds=60, num_streams=100, seed=SEED, least_disasters=NUM_DISASTERS
    )
    assert is_whole(report), report
    assert report["complete"] == 100 and sum(report["disasters"].values()) >= NUM_DISASTERS, report
