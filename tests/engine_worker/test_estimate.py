"""Capacity estimates (`pagestream estimate`): parameters, KV bytes per token, and sequences that fit a device."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import cast
from unittest.mock import Mock

import pytest
import torch

from engine_worker.estimate import DoesNotFit, Estimate, estimate, main
from engine_worker.model.architectures import spec_from_json
from engine_worker.model.draft_head.files import DraftHeadFiles
from engine_worker.model.draft_head.head import load_draft_head
from engine_worker.model.draft_head.read import read_draft_head
from engine_worker.model.network import Network
from engine_worker.model.sharding import sharded
from engine_worker.model.spec import kv_layout
from engine_worker.model.tensor_parallel import TensorParallel
from engine_worker.model.weights import RandomWeights

LLAMA_8B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "dtype": "bfloat16",
}  # fmt: skip


def of_llama(memory_bytes: int = 141 * 10**9, **changes: object) -> Estimate:
    """Return the estimate for a device of `memory_bytes`; 90 % of it is for weights and KV."""
    config = spec_from_json(LLAMA_8B, {})
    usual = {"memory_bytes": int(memory_bytes * 0.9), "block_size": 16, "max_model_len": 8192}
    return estimate(config, **{**usual, "dtype": "bfloat16", **changes})  # type: ignore[arg-type]


def test_estimate_llama_8b_matches_model_card() -> None:
    found = of_llama()
    assert found.parameters == 8_030_261_248  # "8.03B" in the model's card
    assert found.kv_bytes_per_token == 131_072
    kv_bytes = int(141 * 10**9 * 0.9) - 2 * 8_030_261_248
    assert found.kv_blocks == kv_bytes // 2**21 - 1
    assert found.sequences_at_tokens == {
        1024: found.kv_blocks // 64,
        4096: found.kv_blocks // 256,
        8192: found.kv_blocks // 512,
    }


def test_estimate_sliding_window_limits_blocks_per_sequence() -> None:
    """Mistral 7B v0.1: a window of 4,096 tokens takes 257 blocks. One layer without a window needs all tokens."""
    mistral = {**LLAMA_8B, "model_type": "mistral", "max_position_embeddings": 32768, "sliding_window": 4096}
    options = {"memory_bytes": 40 * 2**30, "block_size": 16, "max_model_len": 32768, "dtype": "bfloat16"}
    found = estimate(spec_from_json(mistral, {}), **options)  # type: ignore[arg-type]
    assert (found.window, found.sequences_at_tokens[1024]) == (4096, found.kv_blocks // 64)
    assert found.sequences_at_tokens[16384] == found.sequences_at_tokens[32768] == found.kv_blocks // 257
    mixed = {**mistral, "model_type": "ministral", "layer_types": ["full_attention", *["sliding_attention"] * 31]}
    found = estimate(spec_from_json(mixed, {}), **options)  # type: ignore[arg-type]
    assert found.window == 0
    windowed, full = sorted(found.kv_groups, key=lambda group: -group.window)
    assert (windowed.layers, windowed.window, full.layers, full.max_sequence_bytes) == (31, 4096, 1, None)
    assert windowed.max_sequence_bytes is not None
    kept = windowed.max_sequence_bytes + 32768 * full.bytes_per_token  # of a sequence, in whole blocks
    assert found.sequences_at_tokens[32768] == found.kv_blocks * found.kv_block_bytes // kept


@pytest.mark.parametrize("tied", [False, True])
def test_estimate_agrees_with_loaded_weights(tied: bool) -> None:
    config = spec_from_json(
        {**LLAMA_8B, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}, {},
    )  # fmt: skip
    config = replace(config, tie_word_embeddings=tied)
    weights = RandomWeights(torch.device("cpu"), torch.float32)
    Network(config, weights, max_len=64)
    assert config.num_parameters() * 4 == weights.loaded_bytes
    found = estimate(config, memory_bytes=2**20, block_size=8, max_model_len=64, dtype="float32")
    assert found.kv_block_bytes == kv_layout(config, 8, "float32").block_bytes


def test_estimate_fp8_kv_cache_has_twice_the_tokens() -> None:
    wide, narrow = of_llama(), of_llama(kv_dtype="fp8")
    assert (narrow.kv_cache_dtype, narrow.kv_bytes_per_token) == ("float8_e4m3fn", wide.kv_bytes_per_token // 2)
    assert narrow.weights_bytes == wide.weights_bytes
    assert narrow.kv_blocks in {2 * wide.kv_blocks + 1, 2 * wide.kv_blocks + 2}  # each pool has one padding block


def test_estimate_too_large_model_is_refused_with_numbers() -> None:
    message = r"take 15.0 GiB and leave 3.9 GiB for KV; .* 131072 tokens needs 16.0 GiB"
    with pytest.raises(DoesNotFit, match=message) as refused:
        of_llama(memory_bytes=21 * 2**30, max_model_len=131072)
    advised = re.search(r"Set --max-model-len (\d+)", str(refused.value))
    assert advised is not None
    assert of_llama(memory_bytes=21 * 2**30, max_model_len=int(advised[1])).sequences_at_tokens[int(advised[1])] == 1
    with pytest.raises(DoesNotFit, match=r"leave 0.0 GiB for KV; .* Use more or larger devices"):
        of_llama(memory_bytes=8 * 2**30, max_model_len=1024)


def test_estimate_command_prints_text_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert main([str(tmp_path), "--gpu-memory", "80G", "--max-model-len", "8K", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["max_model_len"] == 8192
    assert main([str(tmp_path)]) == 0
    assert "8.03 G parameters in bfloat16" in capsys.readouterr().out
    assert main([str(tmp_path / "none")]) == 1
    assert "does not exist" in capsys.readouterr().err


def test_estimate_tensor_parallel_divides_weights_and_kv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    command = [str(tmp_path), "--gpu-memory", "141G", "--max-model-len", "8K"]

    def estimate_with(size: int) -> dict[str, int]:
        assert main([*command, "--tensor-parallel-size", str(size), "--json"]) == 0
        found: dict[str, int] = json.loads(capsys.readouterr().out)
        return found

    by_size = {size: estimate_with(size) for size in (1, 2, 16)}
    assert {size: found["kv_bytes_per_token"] for size, found in by_size.items()} == {1: 131072, 2: 65536, 16: 16384}
    assert {found["parameters"] for found in by_size.values()} == {8_030_261_248}
    replicated = 2 * (128256 + 65) * 4096  # the embedding and the norms, bfloat16
    assert by_size[2]["weights_bytes"] == (by_size[1]["weights_bytes"] - replicated) // 2 + replicated
    assert main([*command, "--tensor-parallel-size", "3"]) == 1
    assert "may be 1, 2, 4, 8, 16 or 32, not 3" in capsys.readouterr().err


def test_estimate_tensor_parallel_advice_depends_on_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    command = [str(tmp_path), "--max-model-len", "8K", "--tensor-parallel-size", "2", "--gpu-memory"]
    assert main([*command, "80G"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("per device, with 2 devices") and "2 workers with one device each" in text
    assert main([*command, "16G"]) == 0
    assert "The model does not fit one device" in capsys.readouterr().out


def test_estimate_does_not_import_torch() -> None:
    code = "import sys, engine_worker.estimate; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("quantization", ["auto", "fp8", "none"])
@pytest.mark.parametrize("size", [1, 2])
def test_estimate_fp8_weights_count_bytes_and_scales(
    quantization: str, size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = LLAMA_8B | ({} if quantization == "fp8" else {"quantization_config": stored})
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [str(tmp_path), "--max-model-len", "8K", "--quantization", quantization]
    assert main([*command, "--tensor-parallel-size", str(size), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {"qkv": 6144, "out": 4096, "gate_up": 28672, "down": 4096}
    columns = {"qkv": 4096, "out": 4096, "gate_up": 4096, "down": 14336}
    linear_weights = 32 * sum(rows[name] * columns[name] for name in rows)
    # Layers split by input columns keep all their scales on every rank.
    by_rows = 32 * (rows["qkv"] + rows["gate_up"] + size * (rows["out"] + rows["down"]))
    scales = {"auto": linear_weights // 128**2, "fp8": by_rows, "none": 0}[quantization]
    head = 128256 * 4096
    rest = 2 * ((8_030_261_248 - linear_weights - 2 * head) + head + head // size) if size == 1 else None
    expected = linear_weights // size * (2 if quantization == "none" else 1) + 4 * scales // size
    norms_and_embeddings = 2 * (head + head // size + 4096 * 65)
    assert rest in (None, norms_and_embeddings)
    assert found["weights_bytes"] == expected + norms_and_embeddings
    names = {"auto": "fp8, a scale per 128 x 128", "fp8": "fp8, quantized while loading", "none": ""}
    assert found["weight_format"] == names[quantization]


def test_estimate_int4_counts_scales_and_minima_of_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    found = {}
    for group in (32, 128):
        command = [str(tmp_path), "--json", "--quantization", "int4", "--int4-group-size", str(group)]
        assert main(command) == 0
        found[group] = json.loads(capsys.readouterr().out)
    linear_weights = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336)
    scales_bytes = 2 * linear_weights * (2 / 32 - 1 / 128)
    assert found[32]["weights_bytes"] - found[128]["weights_bytes"] == scales_bytes
    assert "32" in found[32]["weight_format"] and "128" in found[128]["weight_format"]


def test_estimate_token_counts_reduce_kv_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    found = []
    for max_num_seqs in ("20", "1020"):
        assert main([str(tmp_path), "--json", "--max-num-seqs", max_num_seqs]) == 0
        found.append(json.loads(capsys.readouterr().out))
    few, many = found
    vocab_size = int(str(LLAMA_8B["vocab_size"]))
    assert many["token_counts_bytes"] - few["token_counts_bytes"] == 2 * 1000 * vocab_size
    assert few["kv_cache_bytes"] - many["kv_cache_bytes"] == 2 * 1000 * vocab_size


QWEN3_5 = {
    "model_type": "qwen3_5_text", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, "dtype": "float32",
}  # fmt: skip
HEAD = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": 512, "hidden_size": 64,
    "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "draft_vocab_size": 100, "rms_norm_eps": 1e-6,
}  # fmt: skip


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("method", ["mtp", "eagle3"])
def test_estimate_counts_a_draft_head(
    method: str, size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its weights, its layer of each KV block, and the tokens that a step with drafts keeps beside a state."""
    head = tmp_path / "head"
    head.mkdir()
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_5))
    (head / "config.json").write_text(json.dumps(HEAD))
    config = {"method": method} | ({"model": str(head)} if method == "eagle3" else {})
    found = []
    for options in ([], ["--speculative-config", json.dumps(config)]):
        sizes = ["--gpu-memory", "1G", "--tensor-parallel-size", str(size)]
        assert main([str(tmp_path), "--json", *sizes, *options]) == 0
        found.append(json.loads(capsys.readouterr().out))
    plain, drafted = found
    target, ranks = spec_from_json(QWEN3_5, {}), cast(TensorParallel, Mock(rank=0, size=size))
    files = DraftHeadFiles(method, head if method == "eagle3" else tmp_path)
    spec = read_draft_head(files, target, load_format="dummy")
    weights = RandomWeights(torch.device("cpu"), torch.float32)
    network = Network(sharded(target, 0, size), RandomWeights(torch.device("cpu"), torch.float32), 64, ranks=ranks)
    load_draft_head(spec, network, weights, 64, ranks)
    assert drafted["draft_head_bytes"] == weights.loaded_bytes and plain["draft_head_bytes"] == 0
    assert drafted["weights_bytes"] == plain["weights_bytes"]
    assert drafted["kv_bytes_per_token"] == 2 * plain["kv_bytes_per_token"]  # one layer of four attends
    assert drafted["state_bytes"] > plain["state_bytes"]


def test_estimate_refuses_drafts_as_a_worker_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    command = [str(tmp_path), "--max-model-len", "8K", "--speculative-config"]
    assert main([*command, '{"method": "mtp"}']) == 1
    assert "mtp needs a model with a layer for multi-token prediction" in capsys.readouterr().err
    assert main([*command, '{"method": "ngram", "num_speculative_tokens": 7}']) == 1
    assert "expected 1 to 3 on cuda; got 7" in capsys.readouterr().err
