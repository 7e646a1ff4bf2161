"""The changes of llama.cpp's converter to a family's checkpoints. The package `gguf` knows its names of tensors.

It is used when a GGUF file is converted, before anything is served.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class GgufFamily:
    """`class_name` is transformers' class of the causal model; `config` what every such model's config.json says."""

    model_type: str
    class_name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    # Whether rows of Q and K stand so that a rotary pair is neighbours (2i, 2i + 1); Hugging Face keeps the halves
    # apart (i, i + head_dim / 2).
    has_adjacent_pairs: bool = False
    # config.json's keys that follow from the others, where llama.cpp has them in its code.
    derived: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: {}
    # The converter adds this to the weights of norms.
    norm_offset: float = 0.0
    # In SentencePiece vocabularies: control tokens that do not swallow white space behind them. None: none swallows it.
    tokens_that_keep_space: frozenset[str] | None = None
