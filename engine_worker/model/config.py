"""The shape of a Llama-architecture network, read from a model directory's config.json and generation_config.json.

Says what the layers need to know and refuses, with a ValueError that names the key, every feature they do not have:
a model that would answer nonsense must not start. Knows nothing of tensors or devices.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How the rotary frequencies are stretched. `llama3` uses all fields, `linear` only `factor`."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    dtype: str  # what the weights were saved in: bfloat16, float16 or float32
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_directory(cls, directory: Path) -> "ModelConfig":
        config = _read_json(directory / "config.json")
        generation_path = directory / "generation_config.json"
        generation = _read_json(generation_path) if generation_path.exists() else {}
        return cls.from_json(config, generation)

    @classmethod
    def from_json(cls, config: Mapping[str, Any], generation: Mapping[str, Any]) -> "ModelConfig":
        _refuse_unsupported(config)
        num_heads = _positive_int(config, "num_attention_heads")
        num_kv_heads = config.get("num_key_value_heads") or num_heads
        hidden_size = _positive_int(config, "hidden_size")
        if num_heads % num_kv_heads:
            raise ValueError(f"config.json: {num_heads} attention heads cannot share {num_kv_heads} key/value heads")
        head_dim = config.get("head_dim") or hidden_size // num_heads
        if head_dim % 2:
            raise ValueError(f"config.json: head_dim {head_dim} is odd; rotary embedding turns pairs")
        # transformers 5 writes rope_parameters; older versions wrote rope_theta and rope_scaling beside each other.
        rope = config.get("rope_parameters") or {}
        return cls(
            vocab_size=_positive_int(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_positive_int(config, "intermediate_size"),
            num_layers=_positive_int(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=_positive_int(config, "max_position_embeddings"),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
            rope_scaling=_rope_scaling(rope or config.get("rope_scaling") or {}),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch."),
            eos_token_ids=_token_ids(generation.get("eos_token_id", config.get("eos_token_id"))),
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: --model must be a model directory") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object")
    return content


def _positive_int(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value <= 0:
        raise ValueError(f"config.json: {key} must be a positive integer, not {value!r}")
    return value


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    model_type = config.get("model_type")
    if model_type != "llama":
        raise ValueError(f"config.json: model_type {model_type!r} is not supported; only 'llama' is")
    for key, only in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False), ("sliding_window", None)):
        if config.get(key, only) != only:
            raise ValueError(f"config.json: {key} = {config[key]!r} is not supported; only {only!r} is")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method")
        raise ValueError(f"config.json: quantization_config ({method!r}) is not supported; use unquantised weights")


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise ValueError(f"config.json: rope type {kind!r} is not supported; 'default', 'linear' and 'llama3' are")
    keys = ("factor",)
    if kind == "llama3":
        keys += ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [key for key in keys if key not in rope]
    if missing:
        raise ValueError(f"config.json: rope type {kind!r} needs {', '.join(missing)}")
    return RopeScaling(kind=kind, **{key: rope[key] for key in keys})


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
