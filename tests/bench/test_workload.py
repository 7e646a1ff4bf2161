"""Generated and recorded workloads."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from bench.workload import Workload, WorkloadError, read_trace, take_lengths

LENGTHS = [(3, 5)] * 400


def workload(**changes: object) -> Workload:
    return Workload(**{"lengths": LENGTHS, "token_ids": range(100, 110), "seed": 1, **changes})  # type: ignore[arg-type]


def test_load_depends_only_on_the_seed() -> None:
    assert list(workload().requests(5.0)) == list(workload().requests(5.0))
    assert list(workload().requests(5.0)) != list(workload(seed=2).requests(5.0))


def test_warm_up_prompts_differ_from_the_run() -> None:
    warm_up, measured = (next(workload(lengths=[(50, 1)]).requests(1.0, name)).prompt for name in ("warm-up", "rate 1"))
    assert warm_up != measured


def test_prompts_have_the_requested_length() -> None:
    for request in workload().requests(1.0):
        assert len(request.prompt) == request.prompt_tokens == 3
        assert set(request.prompt) <= set(range(100, 110))
    assert len(str(next(workload(chat=True).requests(1.0)).prompt).split()) == 3


def test_arrivals_are_poisson_with_the_rate() -> None:
    arrivals = [request.arrival_seconds for request in workload().requests(20.0)]
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    # Exponential gaps have mean = deviation = 1/20 s; the mean of 399 has a standard error of 5 %, so 20 % is four of
    # them.
    assert mean == pytest.approx(1 / 20, rel=0.2)
    assert deviation == pytest.approx(1 / 20, rel=0.2)


def test_infinite_rate_sends_all_at_once() -> None:
    assert {request.arrival_seconds for request in workload().requests(float("inf"))} == {0.0}


def test_trace_is_a_list_of_pairs_or_an_object(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text(json.dumps([[1, 2], [3, 4]]))
    (tmp_path / "object.json").write_text(json.dumps({"meta": {}, "pairs": [[1, 2], [3, 4]]}))
    assert read_trace(tmp_path / "list.json") == read_trace(tmp_path / "object.json") == [(1, 2), (3, 4)]


@pytest.mark.parametrize("text", ["", "[]", "[[1]]", "[[1, 0]]", '{"pair": []}', "[5]", '[["a", 1]]'])
def test_invalid_trace_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(WorkloadError):
        read_trace(path)


def test_lengths_repeat_when_too_few() -> None:
    assert take_lengths([(1, 1), (2, 2)], 3) == [(1, 1), (2, 2), (1, 1)]
