"""A family whose checkpoints have one tensor per expert or stack them: both forms give the same tokens."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_worker.model.preflight import check_files
from shared.model_files import ModelFilesError
from tests.builders import make_prompt, make_request
from tests.engine_worker.execution.reference import generate, make_runner
from tests.engine_worker.model.families import write_family
from tests.engine_worker.model.family_cases import NATIVE

LAYER = "model.layers.{}.mlp.experts"


def stack_experts(directory: Path, target: Path) -> None:
    """Write the checkpoint of `directory` as those of text and images are: nested, with two tensors per layer."""
    config = json.loads((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors")
    for layer in range(config["num_hidden_layers"]):
        prefix, numbers = LAYER.format(layer), range(config["num_experts"])
        taken = {
            name: [tensors.pop(f"{prefix}.{number}.{name}.weight") for number in numbers]
            for name in ("gate_proj", "up_proj", "down_proj")
        }
        pairs = zip(taken["gate_proj"], taken["up_proj"], strict=True)
        tensors[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        tensors[f"{prefix}.down_proj"] = torch.stack(taken["down_proj"])
    nested = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    target.mkdir()
    save_file(nested | {"model.visual.patch.weight": torch.zeros(2, 2)}, target / "model.safetensors")
    whole = {"model_type": "qwen3_5_moe", "text_config": config, "vision_config": {}}
    (target / "config.json").write_text(json.dumps(whole))
    if (directory / "generation_config.json").exists():
        shutil.copy(directory / "generation_config.json", target)


def test_stacked_experts_give_the_tokens_of_separate_ones(tmp_path: Path) -> None:
    directory, stacked = write_family(tmp_path / "separate", NATIVE["qwen3_5_moe_text"]), tmp_path / "stacked"
    stack_experts(directory, stacked)
    answers = []
    for model in (directory, stacked):
        check_files(model, tensor_parallel_size=2)
        runner = make_runner(model, num_blocks=100, num_threads=1)
        request = make_request(make_prompt(40), "r", max_tokens=20, ignore_eos=True)
        answers.append(generate(runner, [request], max_num_seqs=2, max_num_batched_tokens=64)[0])
    assert answers[0] == answers[1]


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    directory = write_family(tmp_path / "separate", NATIVE["qwen3_5_moe_text"])
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ModelFilesError, match=r"have no model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight"):
        check_files(directory)
