"""The JSON types of the numbers, strings, lists and objects in config.json, checked before a family reads them."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from engine_worker.model.architectures.config_keys import FULL, SLIDING


class _Type(NamedTuple):
    words: str
    accepts: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list_of(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple) and all(map(accepts, value))


_POSITIVE = _Type("a number above 0", lambda value: _is_number(value) and value > 0)
_POSITIVE_INTEGER = _Type("a positive integer", lambda value: _is_integer(value) and value > 0)
_TEXT = _Type("a string", lambda value: isinstance(value, str))
_TEXTS = _Type("a list of strings", _is_list_of(lambda value: isinstance(value, str)))
_NUMBERS = _Type("a list of numbers", _is_list_of(_is_number))
_TOKEN_IDS = _Type("an integer or a list of them", lambda value: _is_integer(value) or _is_list_of(_is_integer)(value))
_LIST = _Type("a list", lambda value: isinstance(value, list | tuple))
_OBJECT = _Type("an object", lambda value: isinstance(value, Mapping))

_TYPES = {
    _POSITIVE: (
        "attention_factor", "attention_multiplier", "beta_fast", "beta_slow", "block_ffn_dim_multiplier",
        "embedding_multiplier", "factor", "high_freq_factor", "layer_norm_epsilon", "logits_scaling", "low_freq_factor",
        "norm_eps", "partial_rotary_factor", "residual_multiplier", "rms_norm_eps", "rope_theta",
    ),
    _POSITIVE_INTEGER: ("head_dim", "num_key_value_heads", "original_max_position_embeddings"),
    _TEXT: ("hidden_act", "hidden_activation", "rope_type"),
    _TEXTS: ("layer_types", "layers_block_type"),
    _NUMBERS: ("long_factor", "mlp_only_layers", "no_rope_layers", "short_factor"),
    _LIST: ("time_step_limit",),  # transformers writes infinity as an object
    _TOKEN_IDS: ("eos_token_id",),
    _OBJECT: ("rope_parameters", "rope_scaling", FULL, SLIDING),
}  # fmt: skip
_TYPE_OF = {key: kind for kind, keys in _TYPES.items() for key in keys}


def check_types(config: Mapping[str, Any], inside: str = "") -> None:
    """Check the values that are present, and those of objects in them; null is that of a missing key.

    Raises:
        ValueError: If a value has another type. The message names the key and the type.
    """
    for key, value in config.items():
        kind = _TYPE_OF.get(key)
        if kind is None or value is None:
            continue
        if not kind.accepts(value):
            raise ValueError(f"config.json: {inside}{key} must be {kind.words}, not {value!r}")
        if kind is _OBJECT:
            check_types(value, f"{inside}{key}.")
