"""Read the scales of an fp8 KV cache from a checkpoint: one for keys and one for values per layer.

compressed-tensors writes `self_attn.k_scale` and `v_scale`, modelopt `self_attn.k_proj.k_scale` and
`self_attn.v_proj.v_scale`, older files one `self_attn.kv_scale`. A 16-bit cache ignores them.
"""

import math

import torch

from engine_worker.model.spec import ModelSpec
from engine_worker.model.weights import WeightSource
from kernels.fp8_kv import KVScales

_KEYS = ("self_attn.k_scale", "self_attn.attn.k_scale", "self_attn.k_proj.k_scale", "self_attn.kv_scale")
_VALUES = ("self_attn.v_scale", "self_attn.attn.v_scale", "self_attn.v_proj.v_scale", "self_attn.kv_scale")


def read_kv_scales(source: WeightSource, spec: ModelSpec) -> tuple[KVScales, ...]:
    """Return the scales per layer; 1 if the checkpoint has none.

    Raises:
        ValueError: If a scale is not finite and positive.
    """
    layers = [spec.names.layer.format(index=index) for index in range(spec.num_layers)]
    return tuple(KVScales(_scale(source, layer, _KEYS), _scale(source, layer, _VALUES)) for layer in layers)


def _scale(source: WeightSource, layer: str, suffixes: tuple[str, ...]) -> float:
    name = next((layer + suffix for suffix in suffixes if layer + suffix in source.names), None)
    if name is None:
        return 1.0
    stored = source.get(name, (), dtype=torch.float32)
    source.keep_as(stored.nbytes, 0)  # kept as a Python number, not as a tensor
    scale = stored.item()
    if not math.isfinite(scale) or scale <= 0:
        raise ValueError(f"{name} is {scale}; KV scales must be finite and positive")
    return scale
