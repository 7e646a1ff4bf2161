"""The reported decode speed is measured with real steps."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from engine_worker.execution.load import speeds
from engine_worker.scheduling.batch import ScheduledBatch
from tests.engine_worker.execution.reference import make_runner, write_model


def test_decode_speed_is_best_of_single_sequence_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(write_model(tmp_path / "tiny"), num_blocks=8, block_size=16)
    executed: list[ScheduledBatch] = []
    monkeypatch.setattr(runner, "execute", executed.append)
    moments = iter([0.0, 0.5, 1.0, 1.02, 2.0, 2.1])
    monkeypatch.setattr(speeds, "time", SimpleNamespace(perf_counter=lambda: next(moments)))
    assert speeds.decode_tokens_per_second(runner) == pytest.approx(1 / 0.02)  # rounding of floats
    assert [(batch.num_tokens, len(batch.sequences)) for batch in executed] == [(1, 1)] * 3
