"""The part of each rank in a model: its shape, and the part of every tensor in the checkpoint.

Queries, keys, values, gate and up are split by outputs, the following layers by inputs, so those give partial sums. The
head is split by tokens; norms and the embedding are replicated. With fewer KV heads than ranks, several ranks have the
same one. The bias of a partial sum belongs to rank 0.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from engine_worker.model.checkpoint_tensors import Shape
from engine_worker.model.spec import AttentionSpec, LayerSpec, ModelSpec, QkNorm
from engine_worker.model.weight_format import BLOCK, WEIGHT_SCALE, ScalePer, WeightFormat

# The head rows of a rank are a multiple of this, so that rows of float32 logits are aligned for the library's fast
# kernels.
_HEAD_ROWS_MULTIPLE = 64

Range = tuple[int, int]  # [start, end)


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows (dimension 0) or columns (dimension 1) of a tensor: its `ranges`, concatenated."""

    dim: int
    ranges: tuple[Range, ...]

    def shape(self, whole: Shape) -> Shape:
        size = sum(end - start for start, end in self.ranges)
        return (*whole[: self.dim], size, *whole[self.dim + 1 :])


NOTHING = Part(0, ())


def valid_tensor_parallel_sizes(spec: ModelSpec) -> list[int]:
    """Return the sizes that divide heads and MLP width and, with block scales, keep blocks whole."""
    layers = set(spec.layers)
    most = min(layer.attention.num_heads for layer in layers)
    sizes = [size for size in range(1, most + 1) if all(_divides(size, layer) for layer in layers)]
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
    layer = spec.layers[0]
    facts = f"{spec.num_heads} heads, {spec.num_kv_heads} kv heads, {layer.mlp.intermediate_size} intermediate"
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
    layers = tuple(_local_layer(layer, size) for layer in spec.layers)
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
        parts |= {prefix + name: part for name, part in _layer_parts(spec, layer, rank, size)}
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


def _divides(size: int, layer: LayerSpec) -> bool:
    attention, num_kv_heads = layer.attention, layer.attention.num_kv_heads
    heads_fit = attention.num_heads % size == 0 and (num_kv_heads % size == 0 or size % num_kv_heads == 0)
    return heads_fit and layer.mlp.intermediate_size % size == 0


def _has_blocks(spec: ModelSpec) -> bool:
    return any(group.scheme.per is ScalePer.BLOCK for group in spec.quantization.groups)


def _keeps_blocks(spec: ModelSpec, layer: LayerSpec, size: int) -> bool:
    """Return whether each rank's part of each linear layer starts at a block, and so does each range in it."""
    parts = [part for rank in range(size) for _, part in _layer_parts(spec, layer, rank, size)]
    starts = [start for part in parts for start, _ in part.ranges]
    inner = [end - start for part in parts for start, end in part.ranges[:-1]]
    return not any(edge % BLOCK for edge in (*starts, *inner))


def _local_layer(layer: LayerSpec, size: int) -> LayerSpec:
    attention = replace(
        layer.attention,
        num_heads=layer.attention.num_heads // size,
        num_kv_heads=max(1, layer.attention.num_kv_heads // size),
    )
    mlp = replace(layer.mlp, intermediate_size=layer.mlp.intermediate_size // size)
    return replace(layer, attention=attention, mlp=mlp)


def _head_rows(vocab_size: int, rank: int, size: int) -> Range:
    rows = padded_head_rows(vocab_size, size)
    return min(rank * rows, vocab_size), min((rank + 1) * rows, vocab_size)


def _layer_parts(spec: ModelSpec, layer: LayerSpec, rank: int, size: int) -> Iterator[tuple[str, Part]]:
    names, attention = spec.names, layer.attention
    inner, queries = layer.mlp.intermediate_size, attention.query_size
    kv_range = _kv_range(attention, rank, size)
    qkv = (_share(queries, rank, size), kv_range, kv_range)
    gate_up = (_share(inner, rank, size),) * 2
    yield from _by_outputs(names.qkv, (queries, attention.kv_size, attention.kv_size), qkv)
    if attention.qk_norm is QkNorm.WHOLE:
        yield f"{names.query_norm}.weight", Part(0, qkv[:1])
        yield f"{names.key_norm}.weight", Part(0, qkv[1:2])
    if attention.sinks:
        yield names.sinks, Part(0, (_share(attention.num_heads, rank, size),))
    yield from _by_inputs(names.out, queries, rank, size)
    yield from _by_outputs(names.gate_up, (inner, inner), gate_up)
    yield from _by_inputs(names.down, inner, rank, size)


def _by_outputs(names: Sequence[str], outputs: Sequence[int], mine: Sequence[Range]) -> Iterator[tuple[str, Part]]:
    """Yield the parts of linear layers that are separate, or fused into one tensor."""
    if len(names) == len(outputs):
        parts = [Part(0, (rows,)) for rows in mine]
    else:
        starts = [sum(outputs[:index]) for index in range(len(outputs))]
        parts = [Part(0, tuple((at + first, at + end) for at, (first, end) in zip(starts, mine, strict=True)))]
    for name, part in zip(names, parts, strict=True):
        yield f"{name}.weight", part
        yield f"{name}.bias", part


def _by_inputs(name: str, inputs: int, rank: int, size: int) -> Iterator[tuple[str, Part]]:
    yield f"{name}.weight", Part(1, (_share(inputs, rank, size),))
    if rank > 0:
        yield f"{name}.bias", NOTHING


def _share(length: int, rank: int, size: int) -> Range:
    return rank * length // size, (rank + 1) * length // size


def _kv_range(attention: AttentionSpec, rank: int, size: int) -> Range:
    """Return the rows of the key (or value) heads that the rank's queries attend to."""
    first = rank * attention.num_kv_heads // size
    num_heads = max(1, attention.num_kv_heads // size)
    return first * attention.head_dim, (first + num_heads) * attention.head_dim


def _listed(sizes: Sequence[int]) -> str:
    *first, last = map(str, sizes)
    return f"{', '.join(first)} or {last}" if first else last
