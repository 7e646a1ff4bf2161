"""The models file (--models-file): its fields, its errors, and that written files are read back."""

from pathlib import Path

import pytest

from shared.models_file import ModelEntry, check_names, models_text, read_models
from shared.settings import SettingsError


def test_models_file_is_parsed(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(
        '[[models]]\nmodel = "/models/qwen"\nnames = ["qwen", "gpt-4o-mini"]\nmax_model_len = 8192\nworkers = 2\n'
        'worker = { kv-cache-memory-bytes = "4G", enforce-eager = true }\n'
        '[[models]]\nmodel = "demo"\n'
    )
    assert read_models(path) == [
        ModelEntry(
            model="/models/qwen",
            names=("qwen", "gpt-4o-mini"),
            max_model_len=8192,
            workers=2,
            worker={"kv-cache-memory-bytes": "4G", "enforce-eager": True},
        ),
        ModelEntry(model="demo"),
    ]


def test_models_file_round_trips(tmp_path: Path) -> None:
    entries = [
        ModelEntry(model='/a "b"\\c\x7f\té\U0001f600', names=("a", "b c"), tool_call_parser="hermes", workers=3),
        ModelEntry(model="/d", worker={"block size": 16, "swap": 0.5, "eager": False}),
    ]
    path = tmp_path / "models.toml"
    path.write_text(models_text(entries), encoding="utf-8")
    assert read_models(path) == entries


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "required field `models`"),
        ("models = []", "length >= 1"),
        ('[[models]]\nmodel = ""', "length >= 1"),
        ('[[models]]\nnames = ["a"]', "required field `model`"),
        ('[[models]]\nmodel = "a"\nname = "b"', "unknown field `name`"),
        ('[[models]]\nmodel = "a"\nworkers = 0', ">= 1"),
        ("[[models", "Expected ']]'"),
    ],
)
def test_models_file_error_names_the_file(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "models.toml"
    path.write_text(text)
    with pytest.raises(SettingsError) as refused:
        read_models(path)
    assert str(path) in str(refused.value) and problem in str(refused.value)


def test_models_file_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        read_models(tmp_path / "none.toml")


@pytest.mark.parametrize("names", [[""], ["a{b"], ["a,b"], ["a\nb"], ["x" * 256], ["a", "b", "a"]])
def test_model_names_invalid_are_refused(names: list[str]) -> None:
    with pytest.raises(SettingsError):
        check_names(names)
    check_names(["organisation/Model-1.5 (q4)", "é"])
