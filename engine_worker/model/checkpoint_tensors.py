"""Names and shapes of the tensors that a network reads from its checkpoint, in layer order.

An fp8 linear layer has its scales beside its weight (weight_format.py).
"""

import math
from collections.abc import Iterator, Mapping, Sequence

from engine_worker.model.spec import LayerSpec, ModelSpec, NamesSpec, QkNorm
from engine_worker.model.weight_format import INPUT_SCALE, WEIGHT_SCALE, Fp8Scheme

Shape = tuple[int, ...]

_SCALE_BYTES = 4  # float32


def checkpoint_tensors(spec: ModelSpec) -> dict[str, Shape]:
    """Return all tensors with their shapes."""
    tensors = _dense_tensors(spec)
    return tensors | _scales(_fp8_modules(spec, tensors), tensors)


def scale_names(spec: ModelSpec) -> list[str]:
    """Return the names of all fp8 scales."""
    tensors = _dense_tensors(spec)
    return list(_scales(_fp8_modules(spec, tensors), tensors))


def _scales(modules: Mapping[str, Fp8Scheme], tensors: Mapping[str, Shape]) -> dict[str, Shape]:
    scales: dict[str, Shape] = {}
    for module, scheme in modules.items():
        rows, columns = tensors[f"{module}.weight"]
        scales[f"{module}.{WEIGHT_SCALE}"] = scheme.scale_shape(rows, columns)
        if scheme.has_input_scale:
            scales[f"{module}.{INPUT_SCALE}"] = ()
    return scales


def fp8_modules(spec: ModelSpec) -> dict[str, Fp8Scheme]:
    """Return the linear layers that are fp8 in the checkpoint, by module name."""
    return _fp8_modules(spec, _dense_tensors(spec))


def weights_bytes(spec: ModelSpec, itemsize: int) -> int:
    """Return the size of all weights on a device that supports fp8.

    The output head stays in 16 or 32 bits whatever the checkpoint has. `itemsize` is the size of an element that is not
    fp8.
    """
    tensors, stored = _dense_tensors(spec), spec.quantization
    dense_bytes = spec.num_parameters() * itemsize
    if stored.is_dequantized:
        return dense_bytes
    schemes = {module: scheme for module in _linear_layers(spec, tensors) if (scheme := stored.scheme_of(module))}
    shapes = {module: tensors[f"{module}.weight"] for module in schemes if f"{module}.weight" != spec.names.head}
    scales = sum(math.prod(schemes[module].scale_shape(rows, columns)) for module, (rows, columns) in shapes.items())
    return dense_bytes - sum(map(math.prod, shapes.values())) * (itemsize - 1) + scales * _SCALE_BYTES


def _fp8_modules(spec: ModelSpec, tensors: Mapping[str, Shape]) -> dict[str, Fp8Scheme]:
    schemes = {module: spec.quantization.stored_scheme(module) for module in _linear_layers(spec, tensors)}
    return {module: scheme for module, scheme in schemes.items() if scheme is not None}


def _linear_layers(spec: ModelSpec, tensors: Mapping[str, Shape]) -> list[str]:
    modules = [name for name, shape in tensors.items() if len(shape) == 2 and name != spec.names.embedding]
    return [name.removesuffix(".weight") for name in modules]


def _dense_tensors(spec: ModelSpec) -> dict[str, Shape]:
    names, embedding = spec.names, (spec.vocab_size, spec.hidden_size)
    tensors: dict[str, Shape] = {names.embedding: embedding}
    for index, layer in enumerate(spec.layers):
        prefix = names.layer.format(index=index)
        tensors |= {prefix + name: shape for name, shape in _of_layer(layer, names, spec.hidden_size)}
    tensors[names.norm] = (spec.hidden_size,)
    return tensors if spec.tie_word_embeddings else {**tensors, names.head: embedding}


def _of_layer(layer: LayerSpec, names: NamesSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    attention, mlp = layer.attention, layer.mlp
    sizes = (attention.query_size, attention.kv_size, attention.kv_size)
    inner = (mlp.intermediate_size, mlp.intermediate_size)
    if layer.norms_before:
        yield f"{names.before_attention}.weight", (hidden,)
    yield from _linear(names.qkv, sizes, hidden, attention.qkv_bias)
    yield from _qk_norms(layer, names)
    if attention.sinks:
        yield names.sinks, (attention.num_heads,)
    yield from _linear((names.out,), (hidden,), attention.query_size, attention.out_bias)
    if layer.norms_after:
        yield f"{names.after_attention}.weight", (hidden,)
    if layer.norms_before:
        yield f"{names.before_mlp}.weight", (hidden,)
    yield from _linear(names.gate_up, inner, hidden, mlp.bias)
    yield from _linear((names.down,), (hidden,), mlp.intermediate_size, mlp.bias)
    if layer.norms_after:
        yield f"{names.after_mlp}.weight", (hidden,)


def _linear(names: Sequence[str], outputs: Sequence[int], inputs: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    """Yield the tensors of linear layers that are separate, or fused into one tensor."""
    rows = outputs if len(names) == len(outputs) else (sum(outputs),)
    for name, size in zip(names, rows, strict=True):
        yield f"{name}.weight", (size, inputs)
        if bias:
            yield f"{name}.bias", (size,)


def _qk_norms(layer: LayerSpec, names: NamesSpec) -> Iterator[tuple[str, Shape]]:
    attention = layer.attention
    if attention.qk_norm is QkNorm.HEAD:
        sizes = (attention.head_dim, attention.head_dim)
    elif attention.qk_norm is QkNorm.WHOLE:
        sizes = (attention.query_size, attention.kv_size)
    else:
        return
    yield f"{names.query_norm}.weight", sizes[:1]
    yield f"{names.key_norm}.weight", sizes[1:]
