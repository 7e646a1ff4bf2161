"""The share of each rank of a group in a model: in its shape, and in every tensor of its checkpoint. Pure.

    sharded(spec, rank, size)        the rank's own ModelSpec: its heads, its share of the inner width, its logits
    tensor_parts(spec, rank, size)   by name, the part of each tensor that the rank reads
    check_tensor_parallel_size()     refuses a size that does not divide the model, with those that do

Queries, keys, values, gate and up are split by outputs, the products behind them by inputs, so that these are partial
sums; the head is split by tokens; norms and the embedding are everywhere. Where heads of keys and values are fewer than
ranks, several ranks have the same one. A bias of a partial sum is rank 0's.

Used at a worker's start and in estimates. It knows no tensor, no process and no device.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from engine_worker.model.checkpoint_tensors import Shape
from engine_worker.model.spec import AttentionSpec, LayerSpec, ModelSpec, QkNorm
from engine_worker.model.weight_format import BLOCK, WEIGHT_SCALE, ScalePer, WeightFormat

# Rows of the head that a rank has are a multiple of this: rows of float32 logits then begin where the library's fast
# kernels can write them.
_HEAD_ROWS_MULTIPLE = 64

Range = tuple[int, int]  # from the first up to the second


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows (dimension 0) or columns (dimension 1) of a tensor: `ranges`, one behind another."""

    dim: int
    ranges: tuple[Range, ...]

    def shape(self, whole: Shape) -> Shape:
        size = sum(end - start for start, end in self.ranges)
        return (*whole[: self.dim], size, *whole[self.dim + 1 :])


NOTHING = Part(0, ())


def valid_tensor_parallel_sizes(spec: ModelSpec) -> list[int]:
    layers = set(spec.layers)
    most = min(layer.attention.num_heads for layer in layers)
    sizes = [size for size in range(1, most + 1) if all(_divides(size, layer) for layer in layers)]
    if not _has_blocks(spec):
        return sizes
    head = spec.quantization.stored_scheme(spec.names.head.removesuffix(".weight"))
    if head is not None and head.per is ScalePer.BLOCK and not spec.tie_word_embeddings:
        return [1]  # its tokens are shared by other numbers than blocks have
    return [size for size in sizes if size == 1 or all(_keeps_blocks(spec, layer, size) for layer in layers)]


def check_tensor_parallel_size(spec: ModelSpec, size: int) -> None:
    """Raises ValueError with the sizes that there may be."""
    valid = valid_tensor_parallel_sizes(spec)
    if size in valid:
        return
    layer = spec.layers[0]
    facts = f"{spec.num_heads} heads, {spec.num_kv_heads} kv heads, {layer.mlp.intermediate_size} intermediate"
    facts += f", blocks of {BLOCK} with a scale each" if _has_blocks(spec) else ""
    raise ValueError(f"{facts}: --tensor-parallel-size may be {_listed(valid)}, not {size}")


def check_one_rank(size: int) -> None:
    """For networks of transformers: raises ValueError where `size` is not 1."""
    if size != 1:
        raise ValueError(
            f"--tensor-parallel-size may be 1, not {size}: what the layers of transformers sum over is not known; only "
            "models with an implementation of their own here are shared by several devices"
        )


def sharded(spec: ModelSpec, rank: int, size: int) -> ModelSpec:
    """Raises ValueError as check_tensor_parallel_size() does."""
    check_tensor_parallel_size(spec, size)
    if size == 1:
        return spec
    layers = tuple(_local_layer(layer, size) for layer in spec.layers)
    return replace(spec, layers=layers, head_rows=_head_rows(spec.vocab_size, rank, size))


def padded_head_rows(vocab_size: int, size: int) -> int:
    """Rows of the head on each of several ranks, with those at the end that stand for no token."""
    return -(-vocab_size // (size * _HEAD_ROWS_MULTIPLE)) * _HEAD_ROWS_MULTIPLE


def tensor_parts(spec: ModelSpec, rank: int, size: int) -> dict[str, Part]:
    """`spec`: of the whole model. A tensor that is not here the rank has whole."""
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
    """Yield the parts of scales; a rank has all that belong to no part of a weight alone."""
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
    """Whether every rank's part of every product begins with a block, and so does what lies behind it there."""
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
    yield from _by_inputs(names.out, queries, rank, size)
    yield from _by_outputs(names.gate_up, (inner, inner), gate_up)
    yield from _by_inputs(names.down, inner, rank, size)


def _by_outputs(names: Sequence[str], outputs: Sequence[int], mine: Sequence[Range]) -> Iterator[tuple[str, Part]]:
    """Yield the parts of products that are one tensor each, or all together one."""
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
    """Rows of the rank's heads of keys, or of values; those that its queries attend to."""
    first = rank * attention.num_kv_heads // size
    num_heads = max(1, attention.num_kv_heads // size)
    return first * attention.head_dim, (first + num_heads) * attention.head_dim


def _listed(sizes: Sequence[int]) -> str:
    *most, last = map(str, sizes)
    return f"{', '.join(most)} or {last}" if most else last
