"""`pagestream doctor` names the code of a CPU's layers."""

import json
from pathlib import Path

import pytest

from engine_worker.execution.load.layer_forms import describe_cpu_layers
from engine_worker.execution.settings import ExecutionSettings

LLAMA = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip
LFM2 = {**LLAMA, "model_type": "lfm2", "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
OLMOE = {**LLAMA, "model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2}


def described(directory: Path, config: dict[str, object], why_no_kernels: str = "") -> tuple[bool, str]:
    (directory / "config.json").write_text(json.dumps(config))
    return describe_cpu_layers(ExecutionSettings(model=directory), why_no_kernels)


@pytest.mark.parametrize(
    ("config", "why", "expected"),
    [
        (LLAMA, "", "C++ kernels"),
        (LLAMA, "no compiler", "torch operators, slower and not batch-invariant: no compiler"),
        ({**LLAMA, "head_dim": 12}, "", "head size 12 is not supported by the C++ kernels, which need a multiple of 8"),
        (LFM2, "", "C++ kernels"),
        (OLMOE, "", "one call per layer with 4- or 8-bit weights, else a loop in torch over the chosen ones"),
    ],
)
def test_cpu_layers_are_described(tmp_path: Path, config: dict[str, object], why: str, expected: str) -> None:
    is_compiled, form = described(tmp_path, config, why)
    assert form.endswith(expected) and is_compiled is form.startswith("C++")


def test_cpu_layers_of_unknown_model_are_empty(tmp_path: Path) -> None:
    assert described(tmp_path, {"model_type": "unknown to all"}) == (False, "")
    assert describe_cpu_layers(ExecutionSettings(model=tmp_path / "none"), "") == (False, "")
