"""Find the tensors of a GGUF file by their Hugging Face names, and dequantize them.

The ModelSpec gives the expected tensors, and the package `gguf` llama.cpp's names for them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import gguf
import numpy as np

from engine_worker.gguf.config import ROPE_TENSORS
from engine_worker.gguf.metadata import ConversionError, GgufFile
from engine_worker.model.architectures.gguf_family import GgufFamily
from engine_worker.model.checkpoint_tensors import checkpoint_tensors
from engine_worker.model.spec import ModelSpec

_AT_ONCE = 2**18  # numbers: their intermediate results stay in a cache, which takes a tenth of the time
_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<number>\d+)\.(?P<part>.*)")


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the checkpoint and its source in the GGUF file.

    Attributes:
        name: Hugging Face name.
        shape: Shape in the checkpoint.
        source: The GGUF tensor.
        num_heads: Heads whose rotary permutation must be undone, or 0.
        offset: What llama.cpp's converter added to the values.
        expert: Which matrix of a source with those of all experts; None: the source is one tensor.
    """

    name: str
    shape: tuple[int, ...]
    source: gguf.ReaderTensor
    num_heads: int = 0
    offset: float = 0.0
    expert: int | None = None

    @property
    def kind(self) -> gguf.GGMLQuantizationType:
        return gguf.GGMLQuantizationType(self.source.tensor_type)

    @property
    def data(self) -> np.ndarray:
        """The numbers or the bytes of the blocks, a row of the tensor in each row."""
        # A plain array, because gguf makes thousands of views of it, and a view of a memmap takes longer.
        whole = np.asarray(self.source.data)
        return whole if self.expert is None else whole[self.expert]


def tensors_of(file: GgufFile, spec: ModelSpec, family: GgufFamily, apart: Mapping[str, Sequence[str]]) -> list[Tensor]:
    """Return the tensors of a model, without those `apart`, which are names of the checkpoint with their sources.

    Raises:
        ConversionError: If a tensor is missing, has another shape, or is unused.
    """
    table = gguf.get_tensor_name_map(_architecture(file.architecture), spec.num_layers)
    num_experts = file.of_model("expert_count", 0)
    wanted = {name: shape for name, shape in checkpoint_tensors(spec).items() if name not in apart}
    found = [_find(file, table, name, shape, num_experts) for name, shape in wanted.items()]
    used = {tensor.source.name for tensor in found}.union(ROPE_TENSORS, *apart.values())
    surplus = sorted(file.tensors.keys() - used)
    if surplus:
        names = f"{len(surplus)} tensors with no place in {family.class_name}: {', '.join(surplus[:4])}"
        raise ConversionError(f"the GGUF file has {names}")
    if family.norm_offset:
        found = [replace(each, offset=family.norm_offset) if _is_norm(each) else each for each in found]
    if not family.has_adjacent_pairs:
        return found
    heads = {"attn_q": spec.num_heads, "attn_k": spec.num_kv_heads}
    return [replace(each, num_heads=heads.get(each.source.name.split(".")[-2], 0)) for each in found]


def stored_rows(tensor: Tensor) -> np.ndarray:
    """Return the numbers or the bytes of the blocks of each row, in the order of the checkpoint."""
    return undo_rotary_permutation(tensor.data, tensor.num_heads) if tensor.num_heads else tensor.data


def values_of(tensor: Tensor, rows: np.ndarray) -> np.ndarray:
    """Return the numbers of some stored_rows() of a tensor, float32.

    Raises:
        ConversionError: If its type cannot be dequantized.
    """
    try:
        values = gguf.dequantize(rows, tensor.kind)
    except NotImplementedError:
        name = tensor.source.name
        raise ConversionError(f"tensor {name}: type {tensor.kind.name} cannot be dequantized") from None
    return values - np.float32(tensor.offset) if tensor.offset else values


def undo_rotary_permutation(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder rows from adjacent rotary pairs (llama.cpp) to split halves (Hugging Face)."""
    head_dim = rows.shape[0] // num_heads
    pairs = rows.reshape(num_heads, head_dim // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _architecture(name: str) -> gguf.MODEL_ARCH:
    return next(architecture for architecture, known in gguf.MODEL_ARCH_NAMES.items() if known == name)


def _find(file: GgufFile, table: gguf.TensorNameMap, name: str, shape: tuple[int, ...], num_experts: int) -> Tensor:
    of_expert = _EXPERT.fullmatch(name)
    joined = f"{of_expert['experts']}.{of_expert['part']}" if of_expert else name
    known = table.get_name(joined, try_suffixes=(".weight", ".bias"))
    source = file.tensors.get(known or "") or file.tensors.get(f"{known}.weight")  # a checkpoint's sinks have no suffix
    if source is None:
        raise ConversionError(f"the GGUF file has no {known or name}")
    found = tuple(int(size) for size in reversed(source.shape))  # GGUF lists the fastest dimension first
    wanted = (num_experts, *shape) if of_expert else shape
    if found not in {wanted, _without_ones(wanted)}:
        raise ConversionError(f"tensor {known} has shape {found}; the file's metadata imply {wanted}")
    return Tensor(name, shape, source, expert=int(of_expert["number"]) if of_expert else None)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a convolution's filters as llama.cpp's converter stores them."""
    return tuple(size for size in shape if size > 1)


def _is_norm(tensor: Tensor) -> bool:
    return tensor.source.name.endswith("norm.weight")


def to_bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """Return the upper 16 bits of finite float32 values, rounded to nearest even as torch does."""
    all_bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).reshape(-1)
    found = np.empty(all_bits.shape, np.uint16)
    for start in range(0, len(all_bits), _AT_ONCE):
        bits = all_bits[start : start + _AT_ONCE]
        found[start : start + _AT_ONCE] = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return found.reshape(values.shape)
