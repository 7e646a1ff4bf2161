"""Convert GGUF files to model directories: the demo model, and small files written with gguf's own writer."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from engine_worker.convert_gguf import convert, main
from engine_worker.gguf.metadata import ConversionError
from engine_worker.gguf.weights import to_bfloat16_bits, undo_rotary_permutation
from engine_worker.model.architectures import spec_from_directory

HIDDEN, HEADS, KV_HEADS, INNER, LAYERS, HEAD_DIM = 64, 4, 2, 96, 2, 16
TOKENS = ["<|end|>", "a", "b", "ab", "Ġ", "1", "2", "12"]


def permuted_as_llama_cpp_does(weight: np.ndarray, num_heads: int) -> np.ndarray:
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    architecture: str = "llama",
    pre: str = "smollm",
    kinds: Mapping[str, gguf.GGMLQuantizationType] = MappingProxyType({}),
    **extra: np.ndarray,
) -> dict[str, Any]:
    """Write a random model; return its tensors with Hugging Face names and row order.

    `kinds`: types of tensors by their name in a block; others are float32.
    """
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (len(TOKENS) - 1))
    writer.add_token_merges(["a b", "1 2"])
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages }}")
    source = np.random.default_rng(0)
    expected = {}

    def add(gguf_name: str, name: str, *shape: int, heads: int | None = None) -> None:
        values = source.standard_normal(shape).astype(np.float32)
        expected[name] = values
        if kind := kinds.get(gguf_name.split(".")[-2]):
            writer.add_tensor(gguf_name, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name, permuted_as_llama_cpp_does(values, heads) if heads else values)

    add("token_embd.weight", "model.embed_tokens.weight", len(TOKENS), HIDDEN)
    add("output_norm.weight", "model.norm.weight", HIDDEN)
    for layer in range(LAYERS):
        prefix, block = f"model.layers.{layer}", f"blk.{layer}"
        add(f"{block}.attn_norm.weight", f"{prefix}.input_layernorm.weight", HIDDEN)
        add(f"{block}.attn_q.weight", f"{prefix}.self_attn.q_proj.weight", HIDDEN, HIDDEN, heads=HEADS)
        add(f"{block}.attn_k.weight", f"{prefix}.self_attn.k_proj.weight", 32, HIDDEN, heads=KV_HEADS)
        add(f"{block}.attn_v.weight", f"{prefix}.self_attn.v_proj.weight", 32, HIDDEN)
        add(f"{block}.attn_output.weight", f"{prefix}.self_attn.o_proj.weight", HIDDEN, HIDDEN)
        add(f"{block}.ffn_norm.weight", f"{prefix}.post_attention_layernorm.weight", HIDDEN)
        add(f"{block}.ffn_gate.weight", f"{prefix}.mlp.gate_proj.weight", INNER, HIDDEN)
        add(f"{block}.ffn_up.weight", f"{prefix}.mlp.up_proj.weight", INNER, HIDDEN)
        add(f"{block}.ffn_down.weight", f"{prefix}.mlp.down_proj.weight", HIDDEN, INNER)
    for name, values in extra.items():
        writer.add_tensor(name.replace("__", "."), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def silent(progress: float, detail: str) -> None:
    assert 0.0 <= progress <= 1.0 and detail


def test_converted_tensors_have_hugging_face_names(tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "m.gguf")
    convert(tmp_path / "m.gguf", tmp_path / "model", silent)
    converted = load_file(tmp_path / "model" / "model.safetensors")
    assert converted.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(converted[name], torch.from_numpy(values)), name  # stored as float32 in the file


def test_converted_configuration_and_tokenizer(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    convert(tmp_path / "m.gguf", tmp_path / "model", silent)
    config = spec_from_directory(tmp_path / "model")
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (LAYERS, HEADS, KV_HEADS, 16)
    assert (config.norm_eps, config.tie_word_embeddings, config.eos_token_ids) == (1e-5, True, (0,))
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    # "12" has a merge, but SmolLM's pre-tokenizer splits digits before merging.
    assert tokenizer.encode("ab 12<|end|>").ids == [3, 4, 5, 6, 0]
    assert tokenizer.decode([3, 4, 5, 6]) == "ab 12"
    tokenizer_config = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    assert tokenizer_config["eos_token"] == "<|end|>" and tokenizer_config["chat_template"] == "{{ messages }}"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"architecture": "mamba"}, "'mamba' is not supported; supported: gemma3, gpt-oss, lfm2, llama"),
        ({"architecture": "qwen2"}, r"no blk\.0\.attn_q\.bias"),
        ({"pre": "deepseek-llm"}, "deepseek-llm"),
        ({"rope_freqs__weight": np.ones(9, np.float32)}, r"rope_freqs\.weight must have 8 float32 values"),
        ({"blk__0__attn_q__bias": np.ones(64, np.float32)}, r"no blk\.0\.attn_k\.bias"),
        ({"blk__0__attn_q_norm__weight": np.ones(16, np.float32)}, r"no place in Llama.*blk\.0\.attn_q_norm\.weight"),
        ({"blk__2__attn_norm__weight": np.ones(64, np.float32)}, r"no place in Llama.*blk\.2\.attn_norm\.weight"),
        ({"output__weight": np.ones((8, 63), np.float32)}, r"output\.weight has shape \(8, 63\)"),
    ],
)
def test_unsupported_gguf_is_refused(changes: dict[str, Any], word: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", **changes)
    with pytest.raises(ValueError, match=word):
        convert(tmp_path / "m.gguf", tmp_path / "models" / "model", silent)
    assert list((tmp_path / "models").glob("*")) == []


def test_interrupted_conversion_leaves_nothing(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")

    def interrupt(progress: float, detail: str) -> None:
        if detail.startswith("converted"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "m.gguf", tmp_path / "models" / "model", interrupt)
    assert list((tmp_path / "models").iterdir()) == []


def test_existing_directory_is_not_overwritten(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").write_text("keep")
    with pytest.raises(ConversionError, match="already exists"):
        convert(tmp_path / "m.gguf", tmp_path / "model", silent)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all, but long enough for a header" * 9])
def test_non_gguf_file_is_refused_on_the_command_line(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    assert main([str(tmp_path / "m.gguf"), str(tmp_path / "model")]) == 1
    assert "not a readable GGUF file" in capsys.readouterr().err
    assert main([str(tmp_path / "absent.gguf"), str(tmp_path / "model")]) == 1
    assert "does not exist" in capsys.readouterr().err


def test_rounding_to_bfloat16_matches_torch() -> None:
    values = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    halfway = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0xBF808000], dtype=np.uint32).view(np.float32)
    values = np.concatenate((values, halfway, [np.float32(0.0), np.float32(-0.0)])).astype(np.float32)
    expected = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    assert np.array_equal(to_bfloat16_bits(values), expected)


def test_rotary_permutation_is_undone() -> None:
    weight = np.arange(2 * HEAD_DIM * 3, dtype=np.float32).reshape(2 * HEAD_DIM, 3)
    assert np.array_equal(undo_rotary_permutation(permuted_as_llama_cpp_does(weight, 2), 2), weight)


@pytest.mark.parametrize(
    "text",
    ["Hello, world!", "Grüße 東京 🎉 na\u0301ive", "def f(x):\n    return x**2\n\n\tpass", "  two   12 ½", "\0\u200b"],
)
def test_demo_tokenizer_round_trips(text: str, demo_model_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(demo_model_dir / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_demo_tokenizer_has_its_special_tokens(demo_model_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(demo_model_dir / "tokenizer.json"))
    # "\nuser" etc. as in the model's chat template; ids as given by transformers for the same file.
    assert tokenizer.encode("<|im_start|>user\nhi 123<|im_end|>\n").ids[:3] == [1, 4093, 198]
    assert [tokenizer.token_to_id(token) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == [0, 1, 2]
