"""Batch files: what is refused before anything is computed, and what a run that was cut off leaves."""

import json
from pathlib import Path
from typing import Any

import pytest

from pagestream.batch_file import BatchFileError, Results, read_lines


def line(custom_id: str = "a", **changes: Any) -> str:
    fields = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    return json.dumps({**fields, **changes})


def written(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines))
    return path


def test_a_line_has_the_same_key_in_every_run(tmp_path: Path) -> None:
    path = written(tmp_path / "in", line("a"), "", line("b"), line("c", body={"prompt": "y"}))
    lines = read_lines(path)
    assert [(one.custom_id, json.loads(one.body)["prompt"]) for one in lines] == [("a", "x"), ("b", "x"), ("c", "y")]
    assert read_lines(path) == lines and len({one.key for one in lines}) == 3


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "no request"),
        (["{"], "line 1"),
        (["[]"], "JSON object"),
        ([line(""), ""], "custom_id"),
        ([line("a"), line("a")], "line 2: custom_id 'a' is there twice"),
        ([line(url="/v1/models")], "url"),
        ([line(method="GET")], "url"),
        ([line(body=None)], "body"),
        ([line(body={"stream": True})], "without stream"),
    ],
)
def test_what_is_no_batch(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(BatchFileError, match=message):
        read_lines(written(tmp_path / "in", *lines))


def test_results_go_on_behind_the_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "out"
    results = Results(path)
    results.add("a", "1", 200, {"x": 1})
    results.add_failure("b", "no_answer", "gone")
    results.close()
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"custom_id": "c", "resp')
    again = Results(path)
    assert again.custom_ids == {"a", "b"}
    again.add("c", "3", 400, {})
    again.close()
    assert path.read_bytes().startswith(whole)
    statuses = [
        (found["custom_id"], (found["response"] or {}).get("status_code"))
        for found in map(json.loads, path.read_text().splitlines())
    ]
    assert statuses == [("a", 200), ("b", None), ("c", 400)]


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text('{"hello": 1}\n')
    with pytest.raises(BatchFileError, match="another file"):
        Results(path)
    assert path.read_text() == '{"hello": 1}\n'
