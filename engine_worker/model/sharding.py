"""The part of each rank in a model: its shape, and the part of every tensor in the checkpoint.

A layer's parts say how ranks share them (specs/). The head is split by tokens; norms and the embedding are replicated.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from engine_worker.model.checkpoint_tensors import network_tensors
from engine_worker.model.spec import LayerSpec, ModelSpec
from engine_worker.model.specs.experts import MIN_EXPERT_COLUMNS, ExpertsSpec
from engine_worker.model.specs.part import NOTHING, Part, Range

# The head rows of a rank are a multiple of this, so that rows of float32 logits are aligned for the library's fast
# kernels.
_HEAD_ROWS_MULTIPLE = 64


def valid_tensor_parallel_sizes(spec: ModelSpec) -> list[int]:
    """Return the sizes that divide heads and MLP width and, with block scales, keep blocks whole."""
    layers = set(spec.layers)
    sizes = [size for size in range(1, spec.num_heads + 1) if all(layer.fits(size) for layer in layers)]
    if not _granules(spec):
        return sizes
    head = spec.quantization.stored_scheme(spec.names.head.removesuffix(".weight"))
    if head is not None and head.granule[0] > 1 and not spec.tie_word_embeddings:
        return [1]  # the head is split by other numbers than blocks
    first = {layer: spec.layers.index(layer) for layer in layers}
    return [size for size in sizes if size == 1 or all(_keeps_granules(spec, index, size) for index in first.values())]


def check_tensor_parallel_size(spec: ModelSpec, size: int) -> None:
    """Check the number of ranks.

    Raises:
        ValueError: With the valid sizes, if `size` is not one.
    """
    valid = valid_tensor_parallel_sizes(spec)
    if size in valid:
        return
    facts = ", ".join(dict.fromkeys(layer.sizes for layer in spec.layers))
    facts += "".join(f", scales per block of {rows} x {columns}" for rows, columns in set(_granules(spec)))
    raise ValueError(f"--tensor-parallel-size may be {_listed(valid)}, not {size}: the model has {facts}")


def with_expert_shares(spec: ModelSpec, enable_expert_parallel: bool) -> ModelSpec:
    """Return `spec` with the inner columns of an expert that no rank may cut, and whether ranks share whole experts."""
    columns = max((MIN_EXPERT_COLUMNS, *(max(granule) for granule in _granules(spec))))

    def shared(layer: LayerSpec) -> LayerSpec:
        if not isinstance(layer.mlp, ExpertsSpec):
            return layer
        return replace(layer, mlp=replace(layer.mlp, granule=columns, by_experts=enable_expert_parallel))

    mtp = spec.mtp and replace(spec.mtp, layer=shared(spec.mtp.layer))
    return replace(spec, layers=tuple(map(shared, spec.layers)), mtp=mtp)


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
    mtp = spec.mtp and replace(spec.mtp, layer=spec.mtp.layer.share(rank, size))
    return replace(spec, layers=layers, head_rows=_head_rows(spec.vocab_size, rank, size), mtp=mtp)


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
    return parts | dict(_parts_of_schemes(spec, parts))


def _parts_of_schemes(spec: ModelSpec, parts: Mapping[str, Part]) -> Iterator[tuple[str, Part]]:
    """Yield the parts of the tensors of quantized weights."""
    for tensor in network_tensors(spec):
        module = tensor.name.removesuffix(".weight")
        scheme = spec.quantization.stored_scheme(module) if tensor.product is not None else None
        if scheme is not None and tensor.name in parts:
            part = parts[tensor.name]
            found = scheme.parts(part) if part != NOTHING else dict.fromkeys(scheme.tensors(tensor.shape), NOTHING)
            yield from ((module + suffix, part) for suffix, part in found.items())


def _granules(spec: ModelSpec) -> list[tuple[int, int]]:
    """Return the rows and columns that no rank may cut, of schemes that have such."""
    return [group.scheme.granule for group in spec.quantization.groups if group.scheme.granule != (1, 1)]


def _keeps_granules(spec: ModelSpec, index: int, size: int) -> bool:
    """Return whether each rank's part of each linear layer of a layer starts at a granule, and each range in it."""
    prefix, layer = spec.names.layer.format(index=index), spec.layers[index]
    units: dict[tuple[str, int], int] = {}  # by name and dimension
    for tensor in layer.tensors(spec.names, spec.hidden_size):
        scheme = spec.quantization.stored_scheme(prefix + tensor.name.removesuffix(".weight"))
        if scheme is not None and tensor.product is not None:
            rows = len(tensor.shape) - 2
            units |= dict(zip(((tensor.name, rows), (tensor.name, rows + 1)), scheme.granule, strict=True))
    for rank in range(size):
        for name, part in layer.parts(spec.names, spec.hidden_size, rank, size):
            edges = [start for start, _ in part.ranges] + [end - start for start, end in part.ranges[:-1]]
            if any(edge % units.get((name, part.dim), 1) for edge in edges):
                return False
    return True


def _head_rows(vocab_size: int, rank: int, size: int) -> Range:
    rows = padded_head_rows(vocab_size, size)
    return min(rank * rows, vocab_size), min((rank + 1) * rows, vocab_size)


def _listed(sizes: Sequence[int]) -> str:
    *first, last = map(str, sizes)
    return f"{', '.join(first)} or {last}" if first else last
