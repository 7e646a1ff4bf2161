"""Checkpoints written by compressed-tensors itself from a random model, and what transformers reads from them.

The hand-written layouts (fp8_checkpoints.py) have the same names, shapes and types; `make dev` installs the package.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine_worker.model.preflight import check_files
from tests.builders import make_request
from tests.engine_worker.execution.reference import generate, make_runner
from tests.engine_worker.model.families import write_family
from tests.engine_worker.model.family_cases import Case
from tests.engine_worker.model.fp8_checkpoints import (
    LAYOUTS,
    LLAMA,
    PER_GROUP,
    PER_TOKEN,
    PHI3,
    STATIC,
    compressed,
    exact_weight,
    write_fp8,
)

PROMPT = [(7 * index * index + 3) % 1000 for index in range(40)]
NUM_TOKENS = 24
OF_KV = (".k_scale", ".v_scale")


def write_compressed(directory: Path, config: dict[str, Any], case: Case) -> Path:
    """Write a checkpoint by the library alone: it quantizes, names and stores; its observer sets the weight scales."""
    package = pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed: make dev")
    quantization = package.quantization
    model = AutoModelForCausalLM.from_pretrained(write_family(directory / "exact", case))
    quantization_config = quantization.QuantizationConfig(**{**config, "quantization_status": "frozen"})
    quantization.apply_quantization_config(model, quantization_config)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            _observe(quantization, module)
    compressor = package.compressors.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(directory / "fp8")
    compressor.update_config(directory / "fp8")
    return directory / "fp8"


def _observe(quantization: Any, module: Any) -> None:
    weights = module.quantization_scheme.weights
    observed = module.weight
    if weights.strategy == "channel":
        low, high = observed.amin(1, keepdim=True), observed.amax(1, keepdim=True)
    elif weights.strategy == "tensor":
        low, high = observed.amin()[None], observed.amax()[None]
    elif weights.strategy == "group":
        groups = observed.unflatten(1, (-1, weights.group_size))
        low, high = groups.amin(2), groups.amax(2)
    else:
        rows, columns = (-(-size // 128) * 128 for size in observed.shape)
        padded = torch.zeros(rows, columns)
        padded[: observed.shape[0], : observed.shape[1]] = observed.detach()
        blocks = padded.view(rows // 128, 128, columns // 128, 128)
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    scale, zero_point = quantization.utils.calculate_qparams(low, high, weights)
    module.weight_scale.data.copy_(scale)
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data.copy_(zero_point)
    if hasattr(module, "input_scale"):
        module.input_scale.data.fill_(0.125)


CONFIGS = {
    "compressed-tensors, rows": compressed("channel", PER_TOKEN),
    "compressed-tensors, tensors": compressed("tensor", PER_TOKEN),
    "compressed-tensors, tensors, static": compressed("tensor", STATIC),
    "compressed-tensors, blocks": compressed("block", PER_GROUP, block_structure=[128, 128]),
}


def greedy(directory: Path) -> list[int]:
    runner = make_runner(directory, num_blocks=8)
    requests = [make_request(PROMPT, "p", max_tokens=NUM_TOKENS, ignore_eos=True)]
    return generate(runner, requests, max_num_seqs=2, max_num_batched_tokens=64)[0]["p"]


@torch.inference_mode()
def greedy_of(model: Any) -> list[int]:
    found = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0
    )
    return found[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("case", [LLAMA, PHI3], ids=lambda case: case.model_type)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)  # from the library
def test_compressed_tensors_checkpoint_is_read(name: str, case: Case, tmp_path: Path) -> None:
    directory = write_compressed(tmp_path, CONFIGS[name], case)
    tensors = load_file(directory / "model.safetensors")
    by_hand = load_file(write_fp8(tmp_path / "by hand", LAYOUTS[name], case).directory / "model.safetensors")
    assert kinds(tensors) == kinds({key: tensor for key, tensor in by_hand.items() if not key.endswith(OF_KV)})
    check_files(directory)
    exact = AutoModelForCausalLM.from_pretrained(tmp_path / "exact", dtype=torch.float32)
    for key, parameter in exact.named_parameters():
        module = key.removesuffix(".weight")
        if f"{module}.weight_scale" in tensors:
            parameter.data.copy_(exact_weight(tensors, module, LAYOUTS[name]))
    assert greedy(directory) == greedy_of(exact)


def kinds(tensors: dict[str, Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


@pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)  # from the library
def test_transformers_reads_the_same_weights(tmp_path: Path) -> None:
    """The library's model also quantizes inputs, unlike a CPU here; its weights are put into one that does not."""
    directory = write_compressed(tmp_path, CONFIGS["compressed-tensors, rows"], LLAMA)
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    greedy_of(theirs)  # dequantizes the weights in its first step
    weights = {name: tensor for name, tensor in theirs.state_dict().items() if not name.endswith("_scale")}
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "exact", dtype=torch.float32)
    plain.load_state_dict(weights)
    assert greedy(directory) == greedy_of(plain)
