"""A minute of all random faults at once. `make soak` runs longer, with another seed each time."""

from pathlib import Path

import pytest

from tests.faults.mix import is_whole, run_mix

pytestmark = pytest.mark.timeout(600)
SEED = 5754  # the same faults and requests in each run, so that a failure comes from the change under test
NUM_DISASTERS = 10  # the time limit suits a busy machine


@pytest.mark.long
async def test_minute_of_random_faults_changes_no_answer(demo_model_dir: Path, tmp_path: Path) -> None:
    report = await run_mix(
        tmp_path, demo_model_dir, seconds=60, num_streams=100, seed=SEED, least_disasters=NUM_DISASTERS
    )
    assert is_whole(report), report
    assert report["complete"] == 100 and sum(report["disasters"].values()) >= NUM_DISASTERS, report
