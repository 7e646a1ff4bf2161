"""A tiny random Qwen3 in the form of Qwen3-Embedding: a bare decoder with the files of sentence-transformers."""

import json
from pathlib import Path

import torch

from tests.tiny_model import write_tiny_model

SIZE = 64  # of a vector


def write_embedding_model(directory: Path, *, pooling: str = "pooling_mode_lasttoken", vocab_size: int = 1000) -> Path:
    """Write a directory without a tokenizer; its checkpoint has no head, and names without `model.`."""
    from transformers import Qwen3Config, Qwen3Model  # noqa: PLC0415 - takes seconds

    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=SIZE,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        initializer_range=0.2,
        architectures=["Qwen3ForCausalLM"],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3Model(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # ones would hide a norm weight that is not applied
            parameter.data.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(len(name)))
    model.save_pretrained(directory)
    written = json.loads((directory / "config.json").read_text())
    files = {
        "config.json": {**written, "architectures": ["Qwen3ForCausalLM"]},
        "modules.json": [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
            {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
        ],
        "1_Pooling/config.json": {"word_embedding_dimension": SIZE, pooling: True, "include_prompt": True},
    }
    (directory / "1_Pooling").mkdir()
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    return directory


def write_embedding_model_of_words(directory: Path) -> Path:
    """Write a model with the tokenizer of tests/tiny_model.py."""
    return write_embedding_model(write_tiny_model(directory), vocab_size=320)
