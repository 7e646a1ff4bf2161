"""The lock files match the supported Python versions, and the GPU lock matches the measured versions."""

import json
import re
from pathlib import Path

import pytest

from requirements.lock import MEASURED_ON_GPU, PYTHON, PYTHON_TOO, TORCH_CPU_HASHES, with_torch_of_each_python

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "requirements"
RESULTS = ROOT / "bench" / "results"


def pins(name: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==(\S+)", (REQUIREMENTS / name).read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", ["serve.txt", "engine-cpu.txt", "dev.txt"])
def test_cpu_torch_has_a_hash_for_each_python(name: str) -> None:
    text = (REQUIREMENTS / name).read_text()
    (block,) = re.findall(r"^torch==(\S+) \\\n((?: +--hash=\S+(?: \\)?\n)+)", text, re.MULTILINE)
    assert re.findall(r"sha256:(\w+)", block[1]) == [
        TORCH_CPU_HASHES[block[0]][python] for python in (PYTHON, PYTHON_TOO)
    ]


def test_torch_with_unknown_hashes_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"torch 9\.0\+cpu: TORCH_CPU_HASHES"):
        with_torch_of_each_python("torch==9.0+cpu \\\n    --hash=sha256:00\n")


def test_gpu_lock_has_the_measured_torch_and_triton() -> None:
    versions: dict[str, set[str]] = {"torch": set(), "triton": set()}
    sources = [source for path in RESULTS.glob("*.json") for source in json.loads(path.read_text())["sources"]]
    for source in sources:
        if source["raw"].startswith("h200/"):
            for name in versions.keys() & source["versions"].keys():
                versions[name] |= {version.partition("+")[0] for version in source["versions"][name].split(", ")}
    locked = pins("engine-gpu.txt")
    assert {name: {locked[name]} for name in versions} == versions
    assert "".join(f"{name}=={locked[name]}\n" for name in versions) == MEASURED_ON_GPU
    assert pins("dev.txt")["triton"] == locked["triton"]
    assert not any("triton" in pins(name) for name in ("serve.txt", "engine-cpu.txt"))  # 640 MB, only for GPUs
    # An installation without a lock must not take a torch that requires another Triton.
    allowed = re.search(r'"triton>=([\d.]+),<([\d.]+);', (ROOT / "pyproject.toml").read_text())
    assert allowed and allowed[1] == "3.6" and allowed[2] == "3.7" and locked["triton"].startswith("3.6.")


def test_python_versions_match_the_documents() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert 'requires-python = ">=3.11,<3.13"' in project
    makefile = (ROOT / "Makefile").read_text()
    assert json.dumps([[3, 11], [3, 12]]).replace("[", "(").replace("]", ")") in makefile
    for name in ("README.md", "docs/quickstart.md"):
        assert f"Python {PYTHON} or {PYTHON_TOO}" in (ROOT / name).read_text()
