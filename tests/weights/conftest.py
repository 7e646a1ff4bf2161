"""Real weights that `make weights` has fetched; tests that need them are optional (marker `weights`)."""

from pathlib import Path

import pytest

from engine_worker.convert_gguf import convert
from tests.weights.fetch import GEMMA, QWEN, Weights


def _fetched(weights: Weights, config: pytest.Config) -> Path:
    if config.option.markexpr != "weights":
        pytest.skip("takes minutes and is asked for by name: -m weights")
    if not weights.path.is_file():
        pytest.skip(f"{weights.path} is not there: `make weights` fetches it")
    return weights.path


@pytest.fixture(scope="session")
def qwen_gguf(pytestconfig: pytest.Config) -> Path:
    return _fetched(QWEN, pytestconfig)


@pytest.fixture(scope="session")
def gemma_gguf(pytestconfig: pytest.Config) -> Path:
    return _fetched(GEMMA, pytestconfig)


@pytest.fixture(scope="session")
def qwen_dir(qwen_gguf: Path) -> Path:
    return _converted(qwen_gguf)


@pytest.fixture(scope="session")
def gemma_dir(gemma_gguf: Path) -> Path:
    return _converted(gemma_gguf)


def _converted(file: Path) -> Path:
    """Convert the file once per machine, completely or not at all."""
    directory = file.with_suffix("")
    if not directory.is_dir():
        convert(file, directory, lambda progress, detail: None)
    return directory
