"""Ranks of one host read a checkpoint from disk once together, by the kernel's count of fetched bytes.

The other ranks find in the page cache what one has read: the embedding and norms, which all have, and pages that hold
columns of several ranks.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_worker.model.implementation import blueprint_from_directory
from engine_worker.model.spec import kv_layout
from engine_worker.model.tensor_parallel import SINGLE, TensorParallel
from engine_worker.model.weights import SafetensorsWeights
from tests.engine_worker.execution.reference import write_model
from tests.engine_worker.model.named_weights import BLOCK_SIZE, step
from tests.engine_worker.model.ranks import Ranks

pytestmark = pytest.mark.tp
TRIES = 4
# 60 MB, against some KB of files that Python opens meanwhile. A row of `o` and `down` is less than a page per rank.
SIZES: dict[str, Any] = {
    "vocab_size": 4000, "hidden_size": 768, "intermediate_size": 1536, "num_hidden_layers": 2,
    "num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 64,
}  # fmt: skip
CHECKPOINTS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32, an untied head": (torch.float32, {}),
    "bfloat16, an untied head, several files": (torch.bfloat16, {"max_shard_size": "20MB"}),
    "bfloat16, a tied head": (torch.bfloat16, {"tie_word_embeddings": True}),
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(3) as started:
        yield started


@pytest.fixture(params=CHECKPOINTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    dtype, changes = CHECKPOINTS[request.param]
    directory = write_model(tmp_path / "model", **SIZES, **changes)
    for path in directory.glob("*.safetensors"):
        save_file({name: tensor.to(dtype) for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    return directory


def disk_bytes(ranks: TensorParallel, directory: Path) -> int:
    """Return the bytes fetched for loading this rank's part and running one step of every token."""
    ranks.minimum(0)  # barrier: all ranks have taken their first count
    before = _fetched_bytes()
    weights = SafetensorsWeights(directory, torch.device("cpu"), torch.float32, lambda share, detail: None)
    model = blueprint_from_directory(directory).build(weights, 64, is_deterministic=False, tensor_parallel=ranks)
    layout = kv_layout(model.spec, BLOCK_SIZE, "float32", max_groups=1)
    device = model.attach(torch.zeros(layout.pool_shape(9)))
    model.forward(step(0, list(range(20))), device)  # reads the rows that are used in place in the file
    return _fetched_bytes() - before


def _fetched_bytes() -> int:
    (line,) = [line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("read_bytes:")]
    return int(line.split()[1])


def forget(directory: Path) -> int:
    """Drop the weights from the page cache; return their size in bytes."""
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())  # dirty pages are not dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def test_ranks_read_a_checkpoint_once(ranks: Ranks, checkpoint: Path) -> None:
    size = forget(checkpoint)
    if disk_bytes(SINGLE, checkpoint) < 0.5 * size:
        pytest.skip("the temporary directory is on no disk: the kernel fetches nothing")
    for num_ranks in (2, 3):
        assert 0.5 * size < min_fetched(ranks, num_ranks, checkpoint, size) <= 1.1 * size


def min_fetched(ranks: Ranks, num_ranks: int, checkpoint: Path, size: int) -> int:
    """Return the minimum over some loads, since a process may once fetch pages of libraries too."""
    sums = []
    for _ in range(TRIES):
        forget(checkpoint)
        fetched = ranks.run(num_ranks, disk_bytes, checkpoint)
        print(f"{num_ranks} ranks: {[round(part / size, 3) for part in fetched]} of {size:,} bytes")
        sums.append(sum(fetched))
        if sums[-1] <= 1.1 * size:
            break
    return min(sums)
