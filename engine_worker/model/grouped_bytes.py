"""The size of weights in groups of 32 inputs on a CPU (quantization/grouped.py), before they are read: no torch.

A product is as large as its blocks, which packing (kernels/cpu/linear.py) only puts in another order. Of a file of
stored blocks the header is read. Parts of one product in several formats have 16 or 32 bits. The head is held beside
the weight that it is made of.

It is used for estimates. It knows names and shapes, and no values.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from engine_worker.model.checkpoint_tensors import Shape, checkpoint_tensors
from engine_worker.model.spec import ModelSpec

GROUP, OUTPUTS = 32, 16  # inputs that share a scale, outputs of a block
_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}  # ggml-common.h
_INT8 = "Q8_0"  # has as many bytes


def grouped_weights_bytes(spec: ModelSpec, itemsize: int) -> int:
    """The size of all weights; `itemsize`: bytes of an element that is in no group."""
    tensors, blocks = checkpoint_tensors(spec), spec.quantization.blocks
    types = stored_types(blocks) if blocks is not None else dict.fromkeys(tensors, _INT8)
    total = sum(map(math.prod, tensors.values())) * itemsize
    for names, halves in _products(spec):
        if size := _in_groups(names, halves, tensors, types):
            total += size - sum(math.prod(tensors[name]) for name in names) * itemsize
    head = spec.names.embedding if spec.tie_word_embeddings else spec.names.head
    return total + _in_groups((head,), 1, tensors, types)


def stored_types(blocks: Path) -> Mapping[str, str]:
    """Names of tensors -> types of blocks, from the header of a safetensors file."""
    with blocks.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    found: dict[str, str] = header.get("__metadata__", {})
    return found


def _products(spec: ModelSpec) -> Iterator[tuple[tuple[str, ...], int]]:
    """The names of a product's parts, and how many halves its outputs have."""
    names = spec.names
    modules = ((names.qkv, 1), ((names.out,), 1), (names.gate_up, 2), ((names.down,), 1))
    for index in range(len(spec.layers)):
        prefix = names.layer.format(index=index)
        for parts, halves in modules:
            yield tuple(f"{prefix}{name}.weight" for name in parts), halves


def _in_groups(names: Sequence[str], halves: int, tensors: Mapping[str, Shape], types: Mapping[str, str]) -> int:
    """Bytes of a product; 0 where it stays in 16 or 32 bits. Each half ends with rows of zeros up to 16."""
    found = {types.get(name, "") for name in names}
    if len(found) > 1 or not found <= _BLOCK_BYTES.keys():
        return 0
    (block,) = (_BLOCK_BYTES[one] for one in found)
    rows = sum(tensors[name][0] for name in names)
    padded = halves * -(-rows // (halves * OUTPUTS)) * OUTPUTS
    return padded * -(-tensors[names[0]][1] // GROUP) * block
