"""bench step-channel measures a real follower's channel."""

import json
from pathlib import Path

import pytest

from bench.__main__ import main

pytestmark = pytest.mark.e2e


def test_it_tells_what_a_message_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "channel.json"
    assert main(["step-channel", "--rows", "1", "3", "--messages", "20", "--out", str(out)]) == 0
    results = json.loads(out.read_text())["results"]
    assert [found["sequences"] for found in results] == [1, 3]
    for found in results:
        assert 0 < found["send_us"]["p50"] <= found["all_us"]["p50"]
    assert "with encoding p50" in capsys.readouterr().out
