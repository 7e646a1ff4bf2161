"""The size of weights in groups of 32 inputs, before they are read and without torch.

A linear layer is as large as its blocks; packing (kernels/cpu/linear.py, kernels/w4a16) only reorders them. For stored
blocks, the file's header is read. A layer of which a part is not in groups stays in 16 or 32 bits, and parts in several
formats share the larger one. On a CPU (quantization/grouped.py), the output head is held in addition to the weight that
it is made from. On a GPU (quantization/blocks_cuda.py), only 4 bits are multiplied as stored.
"""

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from engine_worker.model.checkpoint_tensors import checkpoint_tensors, network_tensors
from engine_worker.model.spec import ModelSpec
from engine_worker.model.specs.part import Role, Shape

GROUP, OUTPUTS = 32, 16  # inputs per scale, outputs per block
_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}  # ggml-common.h
_INT4, _INT8 = "Q4_1", "Q8_0"  # same number of bytes
_TYPES_OF_GPUS = {"Q4_0", "Q4_1"}
_TILE = 64  # of outputs and inputs, of the GPU's kernels


def grouped_weights_bytes(spec: ModelSpec, itemsize: int) -> int:
    """Return the size of all weights; `itemsize` is the size of an element outside groups."""
    tensors, stored = checkpoint_tensors(spec), spec.quantization
    if stored.blocks is not None and not stored.in_groups:
        return _bytes_on_gpu(spec, itemsize, tensors, stored_types(stored.blocks))
    head = spec.names.embedding if spec.tie_word_embeddings else spec.names.head
    rounded = dict.fromkeys(tensors, _INT4 if stored.has_4_bits else _INT8) | {head: _INT8}
    types = rounded if stored.blocks is None else stored_types(stored.blocks)
    total = sum(map(math.prod, tensors.values())) * itemsize
    for names, halves in _linear_layers(spec):
        if size := _in_groups(names, halves, tensors, types):
            total += size - sum(math.prod(tensors[name]) for name in names) * itemsize
    return total + _in_groups((head,), 1, tensors, types)


def block_shapes(blocks: Path) -> dict[str, Shape]:
    """Return the shapes of the tensors in a file of stored blocks, from its header."""
    header = _header(blocks)
    shapes: dict[str, Shape] = {}
    for name, type_ in header.get("__metadata__", {}).items():
        rows, size = header[name]["shape"]
        shapes[name] = rows, size // _BLOCK_BYTES[type_] * GROUP
    return shapes


def why_not_on_gpu(types: Collection[str], rows: int, inputs: int) -> str:
    """Return why a GPU does not multiply blocks of these types, [rows, inputs], or an empty string."""
    if not set(types) <= _TYPES_OF_GPUS:
        return "some of its parts have no blocks of 4 bits"
    if rows % _TILE or inputs % _TILE:
        return f"it has {rows} outputs and {inputs} inputs, and the kernels need multiples of {_TILE}"
    return ""


def _bytes_on_gpu(spec: ModelSpec, itemsize: int, tensors: Mapping[str, Shape], types: Mapping[str, str]) -> int:
    total = sum(map(math.prod, tensors.values())) * itemsize
    for names, _ in _linear_layers(spec, has_experts=False):  # they have 16 bits
        found = {types.get(name, "") for name in names}
        rows, inputs = sum(tensors[name][-2] for name in names), tensors[names[0]][-1]
        if not why_not_on_gpu(found, rows, inputs):
            total += rows * (inputs // GROUP * max(_BLOCK_BYTES[one] for one in found) - inputs * itemsize)
    return total


def stored_types(blocks: Path) -> Mapping[str, str]:
    """Return tensor names with their block types, from the header of a safetensors file."""
    found: dict[str, str] = _header(blocks).get("__metadata__", {})
    return found


def _header(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        header: dict[str, Any] = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    return header


def _linear_layers(spec: ModelSpec, *, has_experts: bool = True) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield the parts of each linear layer, and the number of halves of its outputs."""
    weights = (tensor for tensor in network_tensors(spec) if tensor.product not in {None, Role.HEAD})
    for (product, of_experts), parts in groupby(weights, lambda tensor: (tensor.product, tensor.of_experts)):
        if has_experts or not of_experts:
            yield tuple(tensor.name for tensor in parts), 2 if product is Role.GATE_UP else 1


def _in_groups(names: Sequence[str], halves: int, tensors: Mapping[str, Shape], types: Mapping[str, str]) -> int:
    """Return the bytes of a layer, or 0 if it stays in 16 or 32 bits. Each half is padded to 16 rows."""
    found = {types.get(name, "") for name in names}
    if not found <= _BLOCK_BYTES.keys():
        return 0
    block = max(_BLOCK_BYTES[one] for one in found)
    *experts, _, inputs = tensors[names[0]]
    rows = sum(tensors[name][-2] for name in names)
    padded = halves * -(-rows // (halves * OUTPUTS)) * OUTPUTS
    return math.prod(experts) * padded * -(-inputs // GROUP) * block
