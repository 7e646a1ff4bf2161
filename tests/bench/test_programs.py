"""What is said where a program of the benchmarks lacks a package."""

import sys
from pathlib import Path

import pytest

from bench.__main__ import main


@pytest.mark.parametrize("argv", [["engine", "--check"], ["engine", "--compare", "transformers"], ["served-exactness"]])
def test_a_package_that_serving_does_not_need_is_named(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # as where it is not installed
    monkeypatch.delitem(sys.modules, "bench.serving.served_exactness", raising=False)
    assert main([argv[0], "--model", str(tmp_path), *argv[1:]]) == 2
    assert f"bench {argv[0]} needs the package transformers" in capsys.readouterr().err


def test_without_a_comparison_the_engine_is_measured_without_that_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"config\.json"):
        main(["engine", "--model", str(tmp_path)])


def test_a_missing_module_of_ours_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bench.engine.side", None)
    monkeypatch.delitem(sys.modules, "bench.engine.throughput", raising=False)
    with pytest.raises(ModuleNotFoundError):
        main(["engine"])
