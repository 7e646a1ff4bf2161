"""What llama.cpp's converter changes in a family's checkpoints."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class GgufFamily:
    """GGUF properties of one family.

    Attributes:
        model_type: transformers' model type.
        class_name: transformers' class of the causal model.
        config: config.json values that all such models share.
        keys: config.json names, and the metadata of the model that have their values.
        has_adjacent_pairs: Rows of Q and K have rotary pairs (2i, 2i + 1) instead of Hugging Face's (i, i + head_dim /
            2).
        derived: config.json values that follow from others and that llama.cpp has in its code.
        has_experts: The layers have experts; the file has one tensor for those of a layer.
        has_mxfp4: The experts are in MXFP4, as in the published checkpoint.
        has_kv_heads_by_layer: The file lists the KV heads of each layer: 0 where it has no attention. `derived` gets
            the list.
        norm_offset: What the converter adds to norm weights.
        tokens_that_keep_space: Control tokens of SentencePiece vocabularies that do not strip the following white
            space;
            None: no control token strips it.
    """

    model_type: str
    class_name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    has_adjacent_pairs: bool = False
    derived: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: {}
    has_experts: bool = False
    has_mxfp4: bool = False
    has_kv_heads_by_layer: bool = False
    norm_offset: float = 0.0
    tokens_that_keep_space: frozenset[str] | None = None
