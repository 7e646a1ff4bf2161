"""bench/summarize.py: medians and spreads by case, with origin and versions."""

import json

import pytest

from bench import summarize

LINES = """
{"what": "origin", "command": "python -m bench x --out /tmp/x.json", "commit": "abc1234", "torch": "2.11.0"}
{"what": "decode", "batch": 1, "mean_ms": 4.0, "steps": 10}
{"what": "decode", "batch": 1, "mean_ms": 6.0, "steps": 10}
{"what": "decode", "batch": 8, "mean_ms": 7.5, "steps": 10}
"""


def test_repetitions_become_median_and_spread() -> None:
    found = summarize.summary_of("h200/x.jsonl", LINES)
    assert found["figures"] == {
        "what=decode batch=1": {"mean_ms": {"median": 5, "spread": [4, 6]}},
        "what=decode batch=8": {"mean_ms": 7.5},
    }
    assert (found["raw"], found["commit"]) == ("h200/x.jsonl", "abc1234")
    assert found["command"] == "python -m bench x --out PATH"
    assert (found["versions"], found["runs"]) == ({"torch": "2.11.0"}, 2)


def test_a_commit_of_a_record_is_part_of_its_case() -> None:
    text = json.dumps({"runs": [{"commit": "a", "us": 1.0}, {"commit": "b", "us": 2.0}]})
    assert summarize.summary_of("x.json", text)["figures"] == {"commit=a": {"us": 1}, "commit=b": {"us": 2}}


def test_named_groups_are_cases_and_fields_can_be_left_out() -> None:
    text = json.dumps({"patterns": {"deep-json": {"alone": {"p50": 1.0, "mean": 3.0}, "p99_ratio": 1.2}}})
    found = summarize.summary_of("x.json", text, frozenset({"mean"}))["figures"]
    assert found == {"patterns deep-json": {"alone.p50": 1, "p99_ratio": 1.2}}


def test_a_summary_is_written_and_appended(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summarize, "RESULTS", tmp_path)
    (tmp_path / "a.jsonl").write_text(LINES)
    (tmp_path / "b.json").write_text(json.dumps({"commit": "def5678", "seconds": 0.12345678}))
    assert summarize.main(["topic", "a.jsonl", "--raw-commit", "abc1234"]) == 0
    assert summarize.main(["topic", "b.json", "--raw-commit", "def5678", "--append"]) == 0
    written = json.loads((tmp_path / "topic.json").read_text())
    assert [source["raw"] for source in written["sources"]] == ["a.jsonl", "b.json"]
    assert written["sources"][1]["figures"] == {"": {"seconds": 0.12346}}
    assert [source["raw_commit"] for source in written["sources"]] == ["abc1234", "def5678"]


def test_only_matching_cases_are_kept(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summarize, "RESULTS", tmp_path)
    (tmp_path / "a.jsonl").write_text(LINES)
    summarize.main(["topic", "a.jsonl", "--raw-commit", "abc1234", "--cases", "batch=8"])
    (source,) = json.loads((tmp_path / "topic.json").read_text())["sources"]
    assert list(source["figures"]) == ["what=decode batch=8"]
