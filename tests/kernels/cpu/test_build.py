"""The library of C++ kernels: its name, its cache, and the errors when it cannot be built."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu import build
from kernels.cpu.__main__ import look, made
from pagestream.directories import cache_directory

COMPILED_HERE = platform.machine() in {"x86_64", "AMD64"}
needs_x86 = pytest.mark.skipif(not COMPILED_HERE, reason="the kernels are for x86-64")


@pytest.mark.parametrize("cache_home", ["/big", "", "rel"])
def test_build_cache_is_shared_by_all_programs(monkeypatch: pytest.MonkeyPatch, cache_home: str) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", cache_home)
    assert build.cache_directory() == cache_directory() / "kernels"


def test_library_name_depends_on_sources_and_flags(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    names = [build.library_name()]
    for file, text in (("a.cpp", "int a;"), ("a.h", ""), ("a.cpp", "int b;")):
        (tmp_path / file).write_text(text)
        names.append(build.library_name())
    monkeypatch.setattr(build, "FLAGS", ("-O0",))
    names.append(build.library_name())
    assert len(set(names)) == 5
    (tmp_path / "notes.txt").write_text("no source")
    assert build.library_name() == names[-1]


def test_unsupported_processor_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(build.NoLibrary, match="need x86-64, and this machine is aarch64"):
        build.compiler()


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return an empty source folder without a prebuilt library, and an empty cache."""
    folder = tmp_path / "kernels" / "csrc"
    folder.mkdir(parents=True)
    monkeypatch.setattr(build, "SOURCES", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


@needs_x86
def test_missing_compiler_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, sources: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    message = (
        False,
        "none; falling back to torch operators, which are slower: "
        "no C++ compiler found (tried g++, clang++, c++); install one, e.g. apt-get install g++",
    )
    assert look() == message
    assert made(None) == message


@needs_x86
@pytest.mark.e2e  # starts a compiler
def test_compiler_failure_is_quoted_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, sources: Path) -> None:
    (sources / "broken.cpp").write_text("#error no such kernel\n")
    is_there, message = made(None)
    assert not is_there
    assert "no such kernel" in message
    assert list(build.cache_directory().iterdir()) == []
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert made(None)[1].endswith("cannot run /no/such/compiler: No such file or directory")


@needs_x86
@pytest.mark.e2e
def test_library_is_built_once_and_appears_whole(sources: Path) -> None:
    (sources / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    path = build.build()
    assert path == build.installed_library()
    assert [path] == list(build.cache_directory().iterdir())
    assert build.build() == path


def test_library_is_built_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from kernels.cpu.__main__ import main; main(['--beside'])"
    message = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert message.startswith("C++ kernels: ") and (not COMPILED_HERE or message.strip().endswith(build.library_name()))
