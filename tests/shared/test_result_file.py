"""Result files of batches: recovery after an interrupted write, and refusal of other files."""

import json
from pathlib import Path

import pytest

from shared.result_file import ResultFile, ResultFileError


def test_result_file_continues_after_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "out"
    results = ResultFile(path)
    results.add("a", "1", 200, b'{"x":1}')
    results.add_failure("b", "no_answer", "gone")
    results.close()
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"custom_id": "c", "resp')
    again = ResultFile(path)
    assert again.custom_ids == {"a", "b"}
    again.add("c", "3", 400, b"{}")
    again.close()
    assert path.read_bytes().startswith(whole)
    statuses = [
        (found["custom_id"], (found["response"] or {}).get("status_code"))
        for found in map(json.loads, path.read_text().splitlines())
    ]
    assert statuses == [("a", 200), ("b", None), ("c", 400)]


def test_result_file_other_content_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text('{"hello": 1}\n')
    with pytest.raises(ResultFileError, match="another file"):
        ResultFile(path)
    assert path.read_text() == '{"hello": 1}\n'


def test_failures_that_are_repeated_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "out"
    results = ResultFile(path)
    results.add("a", "1", 200, b"{}")
    results.add_failure("b", "no_answer", "gone")
    results.add_failure("c", "invalid", "never")
    results.close()
    again = ResultFile(path, repeated=("no_answer",))
    assert again.custom_ids == {"a", "c"}
    again.add("b", "2", 200, b"{}")
    again.close()
    assert [json.loads(line)["custom_id"] for line in path.read_text().splitlines()] == ["a", "c", "b"]
