"""Names and shapes of the tensors that a network reads from its checkpoint, in layer order.

An fp8 linear layer has its scales beside its weight (weight_format.py).
"""

import math
from collections.abc import Iterator

from engine_worker.model.spec import ModelSpec
from engine_worker.model.specs.part import Role, Shape, TensorSpec
from engine_worker.model.weight_format import INPUT_SCALE, WEIGHT_SCALE, Fp8Scheme

_SCALE_BYTES = 4  # float32


def network_tensors(spec: ModelSpec) -> Iterator[TensorSpec]:
    """Yield all tensors in layer order, without the scales of quantized weights."""
    names, embedding = spec.names, (spec.vocab_size, spec.hidden_size)
    yield TensorSpec(names.embedding, embedding)
    for index, layer in enumerate(spec.layers):
        prefix = names.layer.format(index=index)
        for tensor in layer.tensors(names, spec.hidden_size):
            yield TensorSpec(prefix + tensor.name, tensor.shape, tensor.product)
    yield TensorSpec(names.norm, (spec.hidden_size,))
    if not spec.tie_word_embeddings:
        yield TensorSpec(names.head, embedding, Role.HEAD)


def checkpoint_tensors(spec: ModelSpec) -> dict[str, Shape]:
    """Return all tensors with their shapes."""
    return {tensor.name: tensor.shape for tensor in network_tensors(spec)} | _scales(spec)


def scale_names(spec: ModelSpec) -> list[str]:
    """Return the names of all fp8 scales."""
    return list(_scales(spec))


def fp8_modules(spec: ModelSpec) -> dict[str, Fp8Scheme]:
    """Return the linear layers that are fp8 in the checkpoint, by module name."""
    return {_module(tensor): scheme for tensor, scheme in _fp8_weights(spec)}


def weights_bytes(spec: ModelSpec, itemsize: int) -> int:
    """Return the size of all weights on a device that supports fp8.

    The output head stays in 16 or 32 bits whatever the checkpoint has. `itemsize` is the size of an element that is not
    fp8.
    """
    total, stored = spec.num_parameters() * itemsize, spec.quantization
    if stored.is_dequantized:
        return total
    for tensor in network_tensors(spec):
        is_layer = tensor.product not in {None, Role.HEAD}
        if is_layer and (scheme := stored.scheme_of(_module(tensor))) is not None:
            total -= math.prod(tensor.shape) * (itemsize - 1)
            total += math.prod(scheme.scale_shape(*tensor.shape)) * _SCALE_BYTES
    return total


def _scales(spec: ModelSpec) -> dict[str, Shape]:
    scales: dict[str, Shape] = {}
    for tensor, scheme in _fp8_weights(spec):
        scales[f"{_module(tensor)}.{WEIGHT_SCALE}"] = scheme.scale_shape(*tensor.shape)
        if scheme.has_input_scale:
            scales[f"{_module(tensor)}.{INPUT_SCALE}"] = ()
    return scales


def _fp8_weights(spec: ModelSpec) -> Iterator[tuple[TensorSpec, Fp8Scheme]]:
    for tensor in network_tensors(spec):
        scheme = spec.quantization.stored_scheme(_module(tensor)) if tensor.product is not None else None
        if scheme is not None:
            yield tensor, scheme


def _module(tensor: TensorSpec) -> str:
    return tensor.name.removesuffix(".weight")
