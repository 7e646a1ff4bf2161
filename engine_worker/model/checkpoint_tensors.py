"""Names and shapes of the tensors that a network reads from its checkpoint, in layer order.

A quantized linear layer has the tensors of its scheme (weight_format.py).
"""

import math
from collections import Counter
from collections.abc import Iterator

from engine_worker.model.spec import ModelSpec
from engine_worker.model.specs.part import Role, Shape, TensorSpec
from engine_worker.model.weight_format import (
    GPTQ_GROUPS,
    GPTQ_SCALES,
    INPUT_SCALE,
    WEIGHT_SCALE,
    Int4Scheme,
    Packing,
    Scheme,
    TensorForm,
)


def network_tensors(spec: ModelSpec) -> Iterator[TensorSpec]:
    """Yield all tensors in layer order, without the scales of quantized weights."""
    names, embedding = spec.names, (spec.vocab_size, spec.hidden_size)
    yield TensorSpec(names.embedding, embedding)
    for index, layer in enumerate(spec.layers):
        prefix = names.layer.format(index=index)
        for tensor in layer.tensors(names, spec.hidden_size):
            yield TensorSpec(prefix + tensor.name, tensor.shape, tensor.product, tensor.of_experts)
    yield TensorSpec(names.norm, (spec.hidden_size,))
    if not spec.tie_word_embeddings:
        yield TensorSpec(names.head, embedding, Role.HEAD)


def checkpoint_forms(spec: ModelSpec) -> dict[str, TensorForm]:
    """Return all tensors with their shapes and accepted dtypes."""
    found: dict[str, TensorForm] = {}
    for tensor in network_tensors(spec):
        scheme = _stored_scheme(spec, tensor)
        if scheme is None:
            found[tensor.name] = TensorForm(tensor.shape)
        else:
            found |= {_module(tensor) + suffix: form for suffix, form in scheme.tensors(tensor.shape).items()}
    return found


def checkpoint_tensors(spec: ModelSpec) -> dict[str, Shape]:
    """Return all tensors with their shapes."""
    return {name: form.shape for name, form in checkpoint_forms(spec).items()}


def scale_names(spec: ModelSpec) -> list[str]:
    """Return the names of all float scales."""
    suffixes = (f".{WEIGHT_SCALE}", f".{INPUT_SCALE}", GPTQ_SCALES)
    return [name for name in checkpoint_forms(spec) if name.endswith(suffixes)]


def group_indices(spec: ModelSpec) -> dict[int, list[str]]:
    """Return the names of GPTQ's group indices, by the number of inputs per group."""
    found: dict[int, list[str]] = {}
    for tensor in network_tensors(spec):
        scheme = _stored_scheme(spec, tensor)
        if isinstance(scheme, Int4Scheme) and scheme.packing is Packing.GPTQ:
            found.setdefault(scheme.group, []).append(_module(tensor) + GPTQ_GROUPS)
    return found


def weights_bytes(spec: ModelSpec, itemsize: int) -> int:
    """Return the size of all weights on a device that multiplies quantized weights as they are stored.

    The output head stays in 16 or 32 bits whatever the checkpoint has. `itemsize` is the size of an element that is not
    quantized.
    """
    total, stored = spec.num_parameters() * itemsize, spec.quantization
    if stored.is_dequantized:
        return total
    for tensor in network_tensors(spec):
        is_layer = tensor.product not in {None, Role.HEAD}
        if is_layer and (scheme := stored.scheme_of(_module(tensor))) is not None:
            if stored.in_groups and isinstance(scheme, Int4Scheme):
                size = scheme.bytes_in_groups(tensor.shape)
            elif stored.is_online and isinstance(scheme, Int4Scheme):
                size = scheme.bytes_while_loading(tensor.shape, itemsize, of_experts=tensor.of_experts)
            else:
                size = scheme.num_bytes(tensor.shape)
            total += size - math.prod(tensor.shape) * itemsize
    return total


def int4_groups(spec: ModelSpec) -> Counter[int]:
    """Return how many weights get groups of so many inputs while they load; 0: they stay in 16 bits."""
    found: Counter[int] = Counter()
    for tensor in network_tensors(spec):
        scheme = spec.quantization.scheme_of(_module(tensor)) if tensor.product not in {None, Role.HEAD} else None
        if isinstance(scheme, Int4Scheme):
            found[scheme.group_that_divides(tensor.shape[-1])] += 1
    return found


def _stored_scheme(spec: ModelSpec, tensor: TensorSpec) -> Scheme | None:
    return spec.quantization.stored_scheme(_module(tensor)) if tensor.product is not None else None


def _module(tensor: TensorSpec) -> str:
    return tensor.name.removesuffix(".weight")
