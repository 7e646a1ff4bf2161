"""Batch files: what is refused before anything is computed."""

import json
from pathlib import Path
from typing import Any

import pytest

from pagestream.run_batch import BatchFileError, read_lines


def line(custom_id: str = "a", **changes: Any) -> str:
    fields = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    return json.dumps({**fields, **changes})


def written(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines))
    return path


def test_line_key_is_equal_in_every_run(tmp_path: Path) -> None:
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
        ([line("a"), line("a")], "line 2: custom_id 'a' is used twice"),
        ([line(url="/v1/models")], "url"),
        ([line(method="GET")], "url"),
        ([line(body=None)], "body"),
        ([line(body={"stream": True})], "without stream"),
    ],
)
def test_invalid_batch_file_is_refused(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(BatchFileError, match=message):
        read_lines(written(tmp_path / "in", *lines))
