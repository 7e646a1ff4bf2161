"""The command line: what it starts, what it refuses, how fast it starts."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from pagestream import cli
from shared.version import VERSION


def test_help_imports_nothing_heavy() -> None:
    code = """
import sys
from pagestream.cli import main
try: main(["--help"])
except SystemExit: pass
print(sorted({"torch", "asyncio", "redis", "aiohttp", "numpy", "msgspec"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", ["gateway", "worker", "bench"])
def test_programs_replace_this_process(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda program, argv: became.append([program, *argv]))
    monkeypatch.setenv("PYTHONPATH", "")  # `bench` sets it for the process that replaces this one
    cli.main([command, "--port", "9000", "--help"])
    module = {"worker": "engine_worker"}.get(command, command)
    assert became == [[sys.executable, sys.executable, "-P", "-m", module, "--port", "9000", "--help"]]


def test_version_prints_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"pagestream {VERSION}\n"


def test_serve_help_names_the_other_programs_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "demo", "--help"]) == 0
    text = capsys.readouterr().out
    assert "--workers" in text
    assert "`pagestream gateway`" in " ".join(text.split())


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["serve", "--workers", "0"], "--workers: expected 1 to 64, got 0"),
        (["serve", "--tensor-parallel-size", "0"], "--tensor-parallel-size: expected at least 1, got 0"),
        (["serve", "demo", "other"], "unexpected argument 'other'"),
        (["serve", "--worker-id", "x"], "--worker-id: set by serve"),
    ],
)
def test_serve_refuses_wrong_options_at_once(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 2
    assert says in capsys.readouterr().err


def test_serve_refuses_a_missing_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "/nowhere/model"]) == 1
    assert capsys.readouterr().out.startswith("pagestream serve: --model: /nowhere/model does not exist; expected ")


def test_config_show_prints_values_and_origins_of_all_programs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PAGESTREAM_PORT", "9001")
    assert cli.main(["config", "show", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert list(shown) == ["serve", "gateway", "worker", "batches"]
    assert shown["serve"]["port"] == shown["gateway"]["port"] == {"value": "9001", "origin": "env PAGESTREAM_PORT"}
    assert shown["worker"]["block_size"] == {"value": "16", "origin": "default"}


def test_config_show_of_one_program_takes_its_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "p.toml"
    file.write_text("[serve]\nworkers = 3\n")
    assert cli.main(["config", "show", "serve", "--config", str(file), "--port", "9002"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["workers", "3", "file", str(file)] for line in lines)
    assert any(line.split() == ["port", "9002", "flag"] for line in lines)


def test_config_show_of_a_wrong_value_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGESTREAM_WORKERS", "many")
    assert cli.main(["config", "show", "serve"]) == 2


def test_estimate_takes_a_gguf_file_and_the_demo(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Sequence[str]] = []

    def run(command: str, arguments: Sequence[str]) -> int:
        started.append(arguments)
        return 0

    monkeypatch.setattr(cli, "_program", run)
    monkeypatch.setattr("pagestream.served_models.prepared_directory", lambda model, console: tmp_path / model)
    assert cli.main(["estimate", "demo", "--device", "cpu"]) == cli.main(["estimate", "models/one"]) == 0
    assert started == [[str(tmp_path / "demo"), "--device", "cpu"], ["models/one"]]
    monkeypatch.undo()
    assert cli.main(["estimate", "missing.gguf"]) == 1
    assert "missing.gguf does not exist" in capsys.readouterr().err
