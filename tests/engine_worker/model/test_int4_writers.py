"""4-bit checkpoints written by compressed-tensors itself from a random model, and what transformers reads from them.

The hand-written layouts (int4_checkpoints.py) have the same names, shapes and types; `make dev` installs the package.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine_worker.model.preflight import check_files
from tests.engine_worker.model.int4_checkpoints import LAYOUTS, LLAMA, compressed, write_int4
from tests.engine_worker.model.test_fp8_writers import greedy, greedy_of, kinds, write_compressed

CONFIGS = {
    "compressed-tensors, groups of 128": compressed(128, symmetric=True),
    "compressed-tensors, rows": compressed(0, symmetric=True),
    "compressed-tensors, zero points": compressed(64, symmetric=False),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)  # from the library
def test_compressed_tensors_checkpoint_is_read(name: str, tmp_path: Path) -> None:
    directory = write_compressed(tmp_path, CONFIGS[name], LLAMA)
    tensors = load_file(directory / "model.safetensors")
    by_hand = load_file(write_int4(tmp_path / "by hand", LAYOUTS[name]).directory / "model.safetensors")
    assert without_dtypes(kinds(tensors)) == without_dtypes(kinds(by_hand))
    check_files(directory)
    exact = AutoModelForCausalLM.from_pretrained(tmp_path / "exact", dtype=torch.float32)
    for key, parameter in exact.named_parameters():
        if (module := key.removesuffix(".weight")) + ".weight_packed" in tensors:
            parameter.data.copy_(unpacked(tensors, module, parameter.shape))
    assert greedy(directory) == greedy_of(exact)
    if CONFIGS[name]["config_groups"]["group_0"]["weights"]["symmetric"]:  # transformers cannot read packed zero points
        theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        assert greedy_of(theirs) == greedy_of(exact)


def unpacked(tensors: dict[str, Tensor], module: str, shape: torch.Size) -> Tensor:
    """Return a weight by the library's unpacking."""
    unpack = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers").unpack_from_int32
    values, scales = unpack(tensors[f"{module}.weight_packed"], 4, shape), tensors[f"{module}.weight_scale"]
    repeats = shape[1] // scales.shape[1]
    zeros: Tensor | int = 0
    if (packed := tensors.get(f"{module}.weight_zero_point")) is not None:
        zeros = unpack(packed, 4, scales.shape, packed_dim=0).repeat_interleave(repeats, 1)
    return (values.float() - zeros) * scales.repeat_interleave(repeats, 1)


def without_dtypes(found: dict[str, Any]) -> dict[str, Any]:
    """Scales have the model's type, which is float32 here."""
    return {name: shape if name.endswith("scale") else (shape, dtype) for name, (shape, dtype) in found.items()}
