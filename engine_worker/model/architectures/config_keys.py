"""Read values from config.json, with errors that name the key. Shared by all families."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from engine_worker.model.specs.attention import RopeScaling, RopeSpec
from engine_worker.model.specs.mlp import GateKind

Config = Mapping[str, Any]
Kind = TypeVar("Kind")

# transformers' names of layer types
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"

# transformers' names.
_ACTIVATIONS = {GateKind.SILU: ("silu",), GateKind.GELU_TANH: ("gelu_pytorch_tanh",)}

_SCALING_KEYS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor"),
}


def positive_int(config: Config, key: str) -> int:
    """Return a required value.

    Raises:
        ValueError: If it is missing or not a positive integer.
    """
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"config.json: {key} must be a positive integer, not {value!r}")
    return value


def number_of(config: Config, key: str, default: float = 0.0) -> float:
    """Return a number >= 0, or `default` if the key is missing or null.

    Raises:
        ValueError: If the value is not such a number.
    """
    value = default if config.get(key) is None else config[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise ValueError(f"config.json: {key} must be a number >= 0, not {value!r}")
    return float(value)


def refuse_unsupported(config: Config, has: GateKind = GateKind.SILU) -> None:
    """Refuse any activation but the family's own, which would otherwise be replaced silently.

    Raises:
        ValueError: If config.json has another activation.
    """
    for key in ("hidden_act", "hidden_activation"):
        activation = config.get(key)
        if activation not in {None, *_ACTIVATIONS[has]}:
            named = " and ".join(map(repr, _ACTIVATIONS[has]))
            verb = "is" if len(_ACTIVATIONS[has]) == 1 else "are"
            raise ValueError(f"config.json: {key} = {activation!r} is not supported; only {named} {verb}")


def refuse_windows(config: Config) -> None:
    """Refuse sliding windows, for networks that have none.

    Raises:
        ValueError: If config.json has a window that takes effect.
    """
    window = config.get("sliding_window")
    is_used = config.get("use_sliding_window", True)
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if kinds or (is_used and window is not None and window < config.get("max_position_embeddings", 0)):
        raise ValueError(f"config.json: sliding_window = {window!r} is not supported; only full attention is")


def windows_of(config: Config, layer_types: Sequence[str]) -> tuple[int, ...]:
    """Return the window of each layer: 0 for full attention, and if no sequence can exceed the window.

    Raises:
        ValueError: If layer_types has an unknown type or a wrong length.
    """
    slides = by_layer_type(config, layer_types, {FULL: False, SLIDING: True})
    if not any(slides):
        return (0,) * len(layer_types)
    window = positive_int(config, "sliding_window")
    window = window if window < positive_int(config, "max_position_embeddings") else 0
    return tuple(window if is_sliding else 0 for is_sliding in slides)


def by_layer_type(config: Config, layer_types: Sequence[str], kinds: Mapping[str, Kind]) -> list[Kind]:
    """Return for each layer the value that `kinds` has for its type.

    Raises:
        ValueError: If layer_types has an unknown type or a wrong length.
    """
    if unknown := sorted(set(layer_types) - set(kinds)):
        supported = " and ".join(map(repr, kinds))
        raise ValueError(f"config.json: layer_types has {unknown[0]!r}; supported: {supported}")
    if len(layer_types) != positive_int(config, "num_hidden_layers"):
        raise ValueError(
            f"config.json: layer_types has {len(layer_types)} entries for {config['num_hidden_layers']} layers"
        )
    return [kinds[kind] for kind in layer_types]


def mixers_by_type(config: Config, layer_types: Sequence[str], kinds: Mapping[str, Kind]) -> list[Kind]:
    """Return the mixer of each layer.

    Raises:
        ValueError: As by_layer_type(), or if no layer attends: the KV heads of attention set the size of a block.
    """
    mixers = by_layer_type(config, layer_types, kinds)
    if FULL not in layer_types:
        raise ValueError(f"config.json: layer_types must have {FULL!r} at least once")
    return mixers


def layer_types_of(config: Config, default: Callable[[int], bool]) -> list[str]:
    """Return config.json's layer_types; without them, a layer slides if `default` of its index is true."""
    stated = config.get("layer_types")
    if stated is not None:
        return list(stated)
    return [SLIDING if default(index) else FULL for index in range(positive_int(config, "num_hidden_layers"))]


def head_dim_of(config: Config) -> int:
    """Return the size of a head, which must be even."""
    head_dim = config.get("head_dim") or positive_int(config, "hidden_size") // positive_int(
        config, "num_attention_heads"
    )
    if head_dim % 2:
        raise ValueError(f"config.json: head_dim {head_dim} must be even for rotary embedding")
    return int(head_dim)


def num_kv_heads_of(config: Config) -> int:
    """Return the number of KV heads, which must divide the number of heads."""
    num_heads = positive_int(config, "num_attention_heads")
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise ValueError(
            f"config.json: num_attention_heads {num_heads} must be a multiple of num_key_value_heads {num_kv_heads}"
        )
    return int(num_kv_heads)


def rope_of(config: Config, *, interleaved: bool = False, default_theta: float = 10_000.0) -> RopeSpec:
    """Read rope_parameters (transformers 5), or rope_theta and rope_scaling (older versions)."""
    rope = config.get("rope_parameters") or {}
    scaling = rope or config.get("rope_scaling") or {}
    partial = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    return RopeSpec(
        dim=int(head_dim_of(config) * partial),
        theta=float(rope.get("rope_theta") or config.get("rope_theta") or default_theta),
        scaling=_scaling(scaling, config),
        interleaved=interleaved,
    )


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Return one or several token ids as a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _scaling(rope: Config, config: Config) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "su":  # name in Phi-3's first files
        kind = "longrope"
    if kind not in _SCALING_KEYS:
        names = "', '".join(["default", *_SCALING_KEYS])
        raise ValueError(f"config.json: rope_type {kind!r} is not supported; supported: '{names}'")
    if missing := [key for key in _SCALING_KEYS[kind] if rope.get(key) is None]:
        raise ValueError(f"config.json: rope_type {kind!r} needs {', '.join(missing)}")
    if kind == "longrope":
        return _longrope(rope, config)
    if kind == "yarn":
        return _yarn(rope)
    kind_here = "by_wavelength" if kind == "llama3" else kind
    return RopeScaling(kind=kind_here, **{key: rope[key] for key in _SCALING_KEYS[kind]})


def _yarn(rope: Config) -> RopeScaling:
    """Compute attention_factor like transformers: mscale / mscale_all_dim if both exist."""
    factor = float(rope["factor"])
    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        mscale, mscale_all = rope.get("mscale"), rope.get("mscale_all_dim")
        attention_factor = _yarn_mscale(factor, 1.0)
        if mscale and mscale_all:
            attention_factor = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        truncate=bool(rope.get("truncate", True)),
        original_max_position_embeddings=rope["original_max_position_embeddings"],
        attention_factor=float(attention_factor),
    )


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(rope: Config, config: Config) -> RopeScaling:
    """Use the long factors if the model has more positions than it was first trained with, else the short ones.

    transformers switches from short to long within a sequence, which would make cached keys stale. vLLM and this engine
    use one of them for all sequences.
    """
    longest = positive_int(config, "max_position_embeddings")
    original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings") or longest
    factor = rope.get("factor") or longest / original
    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    factors = rope["long_factor"] if longest > original else rope["short_factor"]
    return RopeScaling(
        kind="longrope",
        factors=tuple(map(float, factors)),
        original_max_position_embeddings=original,
        attention_factor=float(attention_factor),
    )
