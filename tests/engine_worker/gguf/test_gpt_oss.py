"""gpt-oss from a GGUF file is its published checkpoint, byte for byte."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from engine_worker.convert_gguf import convert
from engine_worker.gguf.config import end_token_ids
from engine_worker.gguf.metadata import ConversionError, GgufFile
from engine_worker.model.architectures import spec_from_directory
from engine_worker.model.checkpoint import check_checkpoint, stored_tensors
from tests.engine_worker.gguf.files import architecture_number, finish
from tests.engine_worker.model.test_grouped import logits_of, needs_library
from tests.engine_worker.model.test_mxfp4_weights import PUBLISHED

LAYERS, EXPERTS, HIDDEN, INNER = 2, 3, 64, 96
TOKENS = ["<|return|>", "<|end|>", "<|call|>", "<|endoftext|>", "a", "b", "ab"]


def checkpoint() -> tuple[dict[str, object], dict[str, Tensor]]:
    """Return the config.json and the tensors of a tiny gpt-oss as published."""
    config = AutoConfig.for_model(
        "gpt_oss", num_hidden_layers=LAYERS, hidden_size=HIDDEN, intermediate_size=INNER, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, num_local_experts=EXPERTS, num_experts_per_tok=2, vocab_size=1024,
        sliding_window=9, max_position_embeddings=512, tie_word_embeddings=False, eos_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
    tensors, generator = {}, torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = parameter.shape
            groups = (experts, outputs, inputs // 32)
            tensors[f"{name}_blocks"] = torch.randint(256, (*groups, 16), generator=generator, dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(121, 126, groups, generator=generator, dtype=torch.uint8)
        else:
            tensors[name] = (0.3 * torch.randn(parameter.shape, generator=generator)).bfloat16()
    return {**config.to_dict(), "quantization_config": PUBLISHED}, tensors


def written_as_llama_cpp_does(path: Path, tensors: dict[str, Tensor], kind: Kind = Kind.MXFP4) -> None:
    writer = gguf.GGUFWriter(path, "gpt-oss")
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_expert_feed_forward_length(INNER)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(2)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(32)
    writer.add_value_length(32)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_sliding_window(9)
    writer.add_rope_freq_base(150_000.0)
    writer.add_rope_scaling_factor(32.0)
    writer.add_rope_scaling_orig_ctx_len(4096)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    write_vocabulary(writer)
    table = gguf.get_tensor_name_map(architecture_number("gpt-oss"), LAYERS)
    for name, tensor in tensors.items():
        if ".mlp.experts." not in name:
            known = table.get_name(name, try_suffixes=(".weight", ".bias")) or ""
            writer.add_tensor(f"{known}.weight" if name.endswith("sinks") else known, tensor.float().numpy())
    for layer in range(LAYERS):
        prefix, target = f"model.layers.{layer}.mlp.experts", f"blk.{layer}.ffn_{{}}_exps"
        blocks = {name: packed(tensors, f"{prefix}.{name}_proj") for name in ("gate_up", "down")}
        biases = {name: tensors[f"{prefix}.{name}_proj_bias"].float().numpy() for name in ("gate_up", "down")}
        for part, whole, rows in (
            ("gate", "gate_up", slice(0, None, 2)),
            ("up", "gate_up", slice(1, None, 2)),
            ("down", "down", slice(None)),
        ):
            values = blocks[whole][:, rows]
            if kind is not Kind.MXFP4:
                values = gguf.quantize(gguf.dequantize(values, Kind.MXFP4), kind)
            writer.add_tensor(target.format(part) + ".weight", values, raw_dtype=kind)
            writer.add_tensor(target.format(part) + ".bias", biases[whole][:, rows])
    finish(writer)


def packed(tensors: dict[str, Tensor], name: str) -> np.ndarray:
    """Return blocks of llama.cpp's layout, [experts, rows, bytes]: a scale, then the two halves of 32 numbers."""
    stored, scales = tensors[f"{name}_blocks"].numpy(), tensors[f"{name}_scales"].numpy()
    numbers = np.stack((stored & 15, stored >> 4), axis=-1).reshape(*stored.shape[:-1], 32)
    halves = numbers[..., :16] | numbers[..., 16:] << 4
    found: np.ndarray = np.concatenate((scales[..., None], halves), axis=-1).reshape(*scales.shape[:2], -1)
    return found


def write_vocabulary(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-4o")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 4 + [gguf.TokenType.NORMAL] * 3)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the converted directory, and the published one."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    config, tensors = checkpoint()
    published = folder / "published"
    published.mkdir()
    (published / "config.json").write_text(json.dumps(config, default=str))
    save_file(tensors, published / "model.safetensors", {"format": "pt"})
    written_as_llama_cpp_does(folder / "m.gguf", tensors)
    convert(folder / "m.gguf", folder / "model", lambda progress, detail: None)
    return folder / "model", published


def test_converted_tensors_are_the_published_ones(directories: tuple[Path, Path]) -> None:
    found, wanted = (load_file(directory / "model.safetensors") for directory in directories)
    assert found.keys() == wanted.keys()
    assert {name: tensor.dtype for name, tensor in found.items()} == {name: one.dtype for name, one in wanted.items()}
    assert [name for name, tensor in wanted.items() if not torch.equal(found[name], tensor)] == []


def test_converted_configuration_gives_the_same_model(directories: tuple[Path, Path]) -> None:
    found, wanted = (spec_from_directory(directory) for directory in directories)
    assert replace(found, eos_token_ids=wanted.eos_token_ids) == wanted
    check_checkpoint(found, stored_tensors(directories[0]))


@needs_library
def test_converted_model_computes_the_same_logits(directories: tuple[Path, Path]) -> None:
    found, wanted = (logits_of(directory, "auto") for directory in directories)
    assert torch.equal(found, wanted)


def test_end_of_a_message_does_not_end_an_answer(directories: tuple[Path, Path]) -> None:
    file = GgufFile(directories[0].with_name("m.gguf"))
    assert [TOKENS[token_id] for token_id in end_token_ids(file)] == ["<|return|>", "<|call|>", "<|endoftext|>"]


def lacks_sinks(tensors: dict[str, Tensor], path: Path) -> None:
    written_as_llama_cpp_does(path, {name: one for name, one in tensors.items() if not name.endswith("sinks")})


def has_other_experts(tensors: dict[str, Tensor], path: Path) -> None:
    written_as_llama_cpp_does(path, tensors, Kind.Q8_0)


@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (lacks_sinks, "the GGUF file has no blk.0.attn_sinks"),
        (has_other_experts, "blk.0.ffn_gate_exps.weight has type Q8_0; experts of this family need MXFP4"),
    ],
)
def test_what_cannot_be_converted_is_named(
    write: Callable[[dict[str, Tensor], Path], None], problem: str, tmp_path: Path
) -> None:
    write(checkpoint()[1], tmp_path / "m.gguf")
    with pytest.raises(ConversionError, match=problem):
        convert(tmp_path / "m.gguf", tmp_path / "model", lambda progress, detail: None)
