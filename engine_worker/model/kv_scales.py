"""The scales of an fp8 KV cache that a checkpoint may have: where they are, one of keys and one of values a layer.

compressed-tensors writes `self_attn.k_scale` and `v_scale`, modelopt `self_attn.k_proj.k_scale` and
`self_attn.v_proj.v_scale`, older files one `self_attn.kv_scale`. They are no weights: a cache of 16 bits leaves them.
"""

from collections.abc import Mapping

KV_SCALE_SUFFIXES = (".k_scale", ".v_scale", ".kv_scale", ".q_scale")
_KEYS = ("self_attn.k_scale", "self_attn.attn.k_scale", "self_attn.k_proj.k_scale", "self_attn.kv_scale")
_VALUES = ("self_attn.v_scale", "self_attn.attn.v_scale", "self_attn.v_proj.v_scale", "self_attn.kv_scale")


def kv_scale_names(stored: Mapping[str, object], layer: str) -> tuple[str | None, str | None]:
    """The names of the scales of keys and of values in `stored`; None where there is none.

    `layer`: what the names of its tensors begin with, as NamesSpec.layer with its index.
    """
    keys = next((layer + name for name in _KEYS if layer + name in stored), None)
    values = next((layer + name for name in _VALUES if layer + name in stored), None)
    return keys, values
