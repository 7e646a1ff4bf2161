"""The experts of gpt-oss in a GGUF file, as its published checkpoint has them: MXFP4, without a loss.

llama.cpp keeps gate and up in two tensors, and in a block of 32 numbers first the scale, then bytes whose lower halves
are the first 16 numbers. The checkpoint alternates the rows of gate and up, has the scales in a tensor of their own,
and two neighbors in a byte. Source: ggml-common.h, block_mxfp4; transformers, integrations/mxfp4.py.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType, ReaderTensor

from engine_worker.gguf.metadata import ConversionError, GgufFile
from engine_worker.gguf.weights import to_bfloat16_bits
from engine_worker.model.weight_format import MXFP4_BLOCKS, MXFP4_SCALES

_GROUP, _BLOCK_BYTES = 32, 17  # numbers, and bytes of their block


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """A tensor of all experts of a layer.

    Attributes:
        name: Hugging Face name.
        dtype: safetensors' name.
        shape: Shape in the checkpoint.
        sources: GGUF tensors; the rows of two alternate.
        written: Makes what is written of the numbers or bytes of one expert, a row of it in each row.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    sources: tuple[ReaderTensor, ...]
    written: Callable[[np.ndarray], np.ndarray]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * (1 if self.dtype == "U8" else 2)

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes of each expert."""
        for expert in range(self.shape[0]):
            parts = [np.asarray(source.data)[expert] for source in self.sources]
            rows = np.stack([part.reshape(len(part), -1) for part in parts], axis=1).reshape(self.shape[1], -1)
            yield self.written(rows).tobytes()


def expert_tensors(file: GgufFile, num_layers: int) -> list[ExpertTensor]:
    """Return the tensors of all experts.

    Raises:
        ConversionError: If a tensor is missing, or has another type or shape than the file's metadata imply.
    """
    found: list[ExpertTensor] = []
    for layer in range(num_layers):
        for name, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            prefix = f"model.layers.{layer}.mlp.experts.{name}"
            sources = [f"blk.{layer}.ffn_{part}_exps" for part in parts]
            found += _weights(file, prefix, [f"{source}.weight" for source in sources])
            found.append(_biases(file, f"{prefix}_bias", [f"{source}.bias" for source in sources]))
    return found


def _weights(file: GgufFile, prefix: str, names: Sequence[str]) -> Iterator[ExpertTensor]:
    sources, shape = _sources(file, names, GGMLQuantizationType.MXFP4)
    groups = (*shape[:2], shape[2] // _GROUP)
    yield ExpertTensor(prefix + MXFP4_BLOCKS, "U8", (*groups, _GROUP // 2), sources, _numbers)
    yield ExpertTensor(prefix + MXFP4_SCALES, "U8", groups, sources, lambda rows: rows[:, ::_BLOCK_BYTES])


def _biases(file: GgufFile, name: str, names: Sequence[str]) -> ExpertTensor:
    sources, shape = _sources(file, names, GGMLQuantizationType.F32)
    return ExpertTensor(name, "BF16", shape, sources, to_bfloat16_bits)


def _sources(
    file: GgufFile, names: Sequence[str], kind: GGMLQuantizationType
) -> tuple[tuple[ReaderTensor, ...], tuple[int, ...]]:
    """Return tensors of this type and one shape, and the shape of all together."""
    num_experts = file.of_model_required("expert_count")
    for name in names:
        if name not in file.tensors:
            raise ConversionError(f"the GGUF file has no {name}")
        found = GGMLQuantizationType(file.tensors[name].tensor_type)
        if found is not kind:
            raise ConversionError(f"tensor {name} has type {found.name}; experts of this family need {kind.name}")
    sources = tuple(file.tensors[name] for name in names)
    shapes = sorted({tuple(int(size) for size in reversed(source.shape)) for source in sources})  # the fastest is first
    if len(shapes) > 1 or shapes[0][0] != num_experts:
        raise ConversionError(f"{' and '.join(names)} have shapes {shapes}, and the metadata {num_experts} experts")
    shape = shapes[0]
    return sources, (shape[0], len(sources) * shape[1], *shape[2:])


def _numbers(rows: np.ndarray) -> np.ndarray:
    """Return the bytes of the numbers of some rows of blocks, two neighbors in each."""
    halves = rows.reshape(len(rows), -1, _BLOCK_BYTES)[..., 1:]
    numbers = np.concatenate((halves & 15, halves >> 4), axis=-1)
    found: np.ndarray = numbers[..., ::2] | numbers[..., 1::2] << 4
    return found
