"""Which tensors a network reads from its checkpoint: names and shapes, in the order of the layers. Pure.

What a checkpoint lacks, has too much or in another shape can be told from this before a byte of weights is read.

It is used at a worker's start, for the checks of a directory and for estimates. It knows the spec, and no values.
"""

from collections.abc import Iterator, Sequence

from engine_worker.model.spec import LayerSpec, ModelSpec, NamesSpec, QkNorm

Shape = tuple[int, ...]


def checkpoint_tensors(spec: ModelSpec) -> dict[str, Shape]:
    names, embedding = spec.names, (spec.vocab_size, spec.hidden_size)
    tensors: dict[str, Shape] = {names.embedding: embedding}
    for index, layer in enumerate(spec.layers):
        prefix = names.layer.format(index=index)
        tensors |= {prefix + name: shape for name, shape in _of_layer(layer, names, spec.hidden_size)}
    tensors[names.norm] = (spec.hidden_size,)
    return tensors if spec.tie_word_embeddings else {**tensors, names.head: embedding}


def _of_layer(layer: LayerSpec, names: NamesSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    attention, mlp = layer.attention, layer.mlp
    sizes = (attention.query_size, attention.kv_size, attention.kv_size)
    inner = (mlp.intermediate_size, mlp.intermediate_size)
    if layer.norms_before:
        yield f"{names.before_attention}.weight", (hidden,)
    yield from _linear(names.qkv, sizes, hidden, attention.qkv_bias)
    yield from _qk_norms(layer, names)
    yield from _linear((names.out,), (hidden,), attention.query_size, attention.out_bias)
    if layer.norms_after:
        yield f"{names.after_attention}.weight", (hidden,)
    if layer.norms_before:
        yield f"{names.before_mlp}.weight", (hidden,)
    yield from _linear(names.gate_up, inner, hidden, mlp.bias)
    yield from _linear((names.down,), (hidden,), mlp.intermediate_size, mlp.bias)
    if layer.norms_after:
        yield f"{names.after_mlp}.weight", (hidden,)


def _linear(names: Sequence[str], outputs: Sequence[int], inputs: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    """Yield the tensors of products that are one tensor each, or all together one."""
    rows = outputs if len(names) == len(outputs) else (sum(outputs),)
    for name, size in zip(names, rows, strict=True):
        yield f"{name}.weight", (size, inputs)
        if bias:
            yield f"{name}.bias", (size,)


def _qk_norms(layer: LayerSpec, names: NamesSpec) -> Iterator[tuple[str, Shape]]:
    attention = layer.attention
    if attention.qk_norm is QkNorm.HEAD:
        sizes = (attention.head_dim, attention.head_dim)
    elif attention.qk_norm is QkNorm.WHOLE:
        sizes = (attention.query_size, attention.kv_size)
    else:
        return
    yield f"{names.query_norm}.weight", sizes[:1]
    yield f"{names.key_norm}.weight", sizes[1:]
