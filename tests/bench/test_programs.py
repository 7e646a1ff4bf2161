"""Errors of bench programs whose packages are not installed."""

import sys
from pathlib import Path

import pytest

from bench.__main__ import main


@pytest.mark.parametrize("argv", [["engine", "--check"], ["engine", "--compare", "transformers"], ["served-exactness"]])
def test_missing_bench_package_is_named(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # as when it is not installed
    monkeypatch.delitem(sys.modules, "bench.serving.served_exactness", raising=False)
    assert main([argv[0], "--model", str(tmp_path), *argv[1:]]) == 2
    assert f"bench {argv[0]} needs the package transformers" in capsys.readouterr().err


def test_peer_package_is_needed_only_for_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"config\.json"):
        main(["engine", "--model", str(tmp_path)])


def test_missing_own_module_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bench.engine.side", None)
    monkeypatch.delitem(sys.modules, "bench.engine.throughput", raising=False)
    with pytest.raises(ModuleNotFoundError):
        main(["engine"])
