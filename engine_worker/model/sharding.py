"""The part of each rank in a model: its shape, and the part of every tensor in the checkpoint.

A layer's parts say how ranks share them (specs/). The head is split by tokens; norms and the embedding are replicated.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from engine_worker.model.spec import LayerSpec, ModelSpec
from engine_worker.model.specs.part import Part, Range
from engine_worker.model.weight_format import BLOCK, WEIGHT_SCALE, ScalePer, WeightFormat

# The head rows of a rank are a multiple of this, so that rows of float32 logits are aligned for the library's fast
# kernels.
_HEAD_ROWS_MULTIPLE = 64


def valid_tensor_parallel_sizes(spec: ModelSpec) -> list[int]:
    """Return the sizes that divide heads and MLP width and, with block scales, keep blocks whole."""
    layers = set(spec.layers)
    sizes = [size for size in range(1, spec.num_heads + 1) if all(layer.fits(size) for layer in layers)]
    if not _has_blocks(spec):
        return sizes
    head = spec.quantization.stored_scheme(spec.names.head.removesuffix(".weight"))
    if head is not None and head.per is ScalePer.BLOCK and not spec.tie_word_embeddings:
        return [1]  # the head is split by other numbers than blocks
    return [size for size in sizes if size == 1 or all(_keeps_blocks(spec, layer, size) for layer in layers)]


def check_tensor_parallel_size(spec: ModelSpec, size: int) -> None:
    """Check the number of ranks.

    Raises:
        ValueError: With the valid sizes, if `size` is not one.
    """
    valid = valid_tensor_parallel_sizes(spec)
    if size in valid:
        return
    facts = ", ".join(dict.fromkeys(layer.sizes for layer in spec.layers))
    facts += f", scales per block of {BLOCK}" if _has_blocks(spec) else ""
    raise ValueError(f"--tensor-parallel-size may be {_listed(valid)}, not {size}: the model has {facts}")


def check_one_rank(size: int) -> None:
    """Check the number of ranks, for models that run through transformers.

    Raises:
        ValueError: If `size` is not 1.
    """
    if size != 1:
        raise ValueError(
            f"--tensor-parallel-size must be 1, not {size}: only natively implemented models support several devices, "
            "because it is unknown what transformers' layers sum over"
        )


def sharded(spec: ModelSpec, rank: int, size: int) -> ModelSpec:
    """Return a rank's part of the spec.

    Raises:
        ValueError: As check_tensor_parallel_size().
    """
    check_tensor_parallel_size(spec, size)
    if size == 1:
        return spec
    layers = tuple(layer.share(rank, size) for layer in spec.layers)
    return replace(spec, layers=layers, head_rows=_head_rows(spec.vocab_size, rank, size))


def padded_head_rows(vocab_size: int, size: int) -> int:
    """Return the head rows per rank, including padding rows without a token."""
    return -(-vocab_size // (size * _HEAD_ROWS_MULTIPLE)) * _HEAD_ROWS_MULTIPLE


def tensor_parts(spec: ModelSpec, rank: int, size: int) -> dict[str, Part]:
    """Return a rank's part of each tensor of the whole model `spec`; tensors not listed are replicated."""
    parts: dict[str, Part] = {}
    if size == 1:
        return parts
    for index, layer in enumerate(spec.layers):
        prefix = spec.names.layer.format(index=index)
        parts |= {prefix + name: part for name, part in layer.parts(spec.names, spec.hidden_size, rank, size)}
    if not spec.tie_word_embeddings:
        parts[spec.names.head] = Part(0, (_head_rows(spec.vocab_size, rank, size),))
    return parts | dict(_scale_parts(parts, spec.quantization))


def _scale_parts(parts: Mapping[str, Part], stored: WeightFormat) -> Iterator[tuple[str, Part]]:
    """Yield the parts of scales; scales that belong to no part of a weight are replicated."""
    for name, part in parts.items():
        module = name.removesuffix(".weight")
        scheme = stored.stored_scheme(module) if name.endswith(".weight") else None
        if scheme is None:
            continue
        if scheme.per is ScalePer.ROW and part.dim == 0:
            yield f"{module}.{WEIGHT_SCALE}", part
        if scheme.per is ScalePer.BLOCK:
            blocks = tuple((start // BLOCK, -(-end // BLOCK)) for start, end in part.ranges)
            yield f"{module}.{WEIGHT_SCALE}", Part(part.dim, blocks)


def _has_blocks(spec: ModelSpec) -> bool:
    return any(group.scheme.per is ScalePer.BLOCK for group in spec.quantization.groups)


def _keeps_blocks(spec: ModelSpec, layer: LayerSpec, size: int) -> bool:
    """Return whether each rank's part of each linear layer starts at a block, and so does each range in it."""
    ranks = (layer.parts(spec.names, spec.hidden_size, rank, size) for rank in range(size))
    parts = [part for rank in ranks for _, part in rank]
    starts = [start for part in parts for start, _ in part.ranges]
    inner = [end - start for part in parts for start, end in part.ranges[:-1]]
    return not any(edge % BLOCK for edge in (*starts, *inner))


def _head_rows(vocab_size: int, rank: int, size: int) -> Range:
    rows = padded_head_rows(vocab_size, size)
    return min(rank * rows, vocab_size), min((rank + 1) * rows, vocab_size)


def _listed(sizes: Sequence[int]) -> str:
    *first, last = map(str, sizes)
    return f"{', '.join(first)} or {last}" if first else last
