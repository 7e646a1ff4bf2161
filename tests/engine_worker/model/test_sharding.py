"""The part of every tensor that a rank has, and the valid tensor parallel sizes of a model."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from engine_worker.model.architectures import MODULES, spec_from_json
from engine_worker.model.checkpoint_tensors import checkpoint_tensors
from engine_worker.model.preflight import check_files
from engine_worker.model.sharding import (
    check_tensor_parallel_size,
    padded_head_rows,
    sharded,
    tensor_parts,
    valid_tensor_parallel_sizes,
)
from engine_worker.model.spec import ModelSpec, kv_layout
from engine_worker.model.specs.part import Part
from tests.engine_worker.execution.reference import write_model

SHAPE = {
    "vocab_size": 1000, "hidden_size": 96, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 12,
    "num_key_value_heads": 6, "head_dim": 8, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip


def spec_of(model_type: str = "llama", **changes: Any) -> ModelSpec:
    return spec_from_json({**SHAPE, "model_type": model_type, **changes}, {})


@pytest.mark.parametrize(
    ("heads", "kv_heads", "intermediate", "valid"),
    [
        (9, 3, 1536, [1, 3]),  # SmolLM2 135M; 9 does not divide 1,536
        (32, 8, 14336, [1, 2, 4, 8, 16, 32]),
        (14, 2, 4864, [1, 2]),  # Qwen2.5 0.5B
        (12, 2, 96, [1, 2, 4, 6, 12]),  # three ranks cannot share two KV heads equally
        (7, 1, 70, [1, 7]),
        (6, 6, 97, [1]),
    ],
)
def test_tensor_parallel_sizes_divide_heads_and_width(
    heads: int, kv_heads: int, intermediate: int, valid: list[int]
) -> None:
    spec = spec_of(num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=intermediate)
    assert valid_tensor_parallel_sizes(spec) == valid


@pytest.mark.parametrize(
    ("model_type", "heads", "kv_heads", "head_dim", "intermediate", "valid"),
    [
        ("llama", 32, 8, 128, 12288, [1, 2, 4, 8, 16, 32]),
        ("llama", 32, 8, 128, 9728, [1, 2, 4]),  # 76 blocks: the sixth rank of eight would start inside a block
        ("llama", 8, 8, 64, 1024, [1, 2, 4]),  # eight ranks have one head of 64 each
        ("llama", 4, 4, 64, 320, [1]),
        ("phi3", 4, 4, 64, 512, [1, 2]),
        ("phi3", 12, 6, 64, 768, [1, 3]),  # two ranks have three KV heads each: 192 rows of keys before the values
    ],
)
def test_tensor_parallel_sizes_keep_fp8_blocks(
    model_type: str, heads: int, kv_heads: int, head_dim: int, intermediate: int, valid: list[int]
) -> None:
    spec = spec_of(
        model_type,
        hidden_size=heads * head_dim,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate,
        quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
    )
    assert valid_tensor_parallel_sizes(spec) == valid
    with pytest.raises(ValueError, match=r"--tensor-parallel-size may be .* scales per block of 128"):
        check_tensor_parallel_size(spec, 64)


@pytest.mark.parametrize("size", [-1, 0, 2, 9, 1000])
def test_invalid_tensor_parallel_size_is_refused(size: int) -> None:
    spec = spec_of(num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536)
    with pytest.raises(ValueError) as refused:
        check_tensor_parallel_size(spec, size)
    facts = "9 heads, 3 kv heads, 1536 intermediate"
    assert str(refused.value) == f"--tensor-parallel-size may be 1 or 3, not {size}: the model has {facts}"


def test_invalid_size_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    directory = write_model(tmp_path)
    check_files(directory, tensor_parallel_size=2)
    with pytest.raises(ValueError, match="may be 1, 2 or 6, not 5"):
        check_files(directory, tensor_parallel_size=5)
    with pytest.raises(ValueError, match="--tensor-parallel-size must be 1, not 2: only natively implemented"):
        check_files(directory, "transformers", tensor_parallel_size=2)


def test_single_rank_has_the_whole_model() -> None:
    spec = spec_of()
    assert sharded(spec, 0, 1) is spec
    assert tensor_parts(spec, 0, 1) == {}


# Biases wherever the family supports them.
CHANGES = {
    "attention_bias": True, "attention_out_bias": True, "mlp_bias": True, "use_bias": True, "num_experts": 5,
    "num_local_experts": 5, "n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    "block_auto_adjust_ff_dim": False, "full_attention_interval": 2, "linear_num_key_heads": 12,
    "linear_num_value_heads": 24, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 96, "shared_intermediate_size": 96, "mamba_n_heads": 24, "mamba_n_groups": 12,
    "mamba_d_state": 8, "n_groups": 12, "mamba_num_heads": 24, "mamba_head_dim": 8, "ssm_state_size": 8,
    "hybrid_override_pattern": "M-*",
}  # fmt: skip
OF_TYPE = {"granitemoehybrid": {"layer_types": ["mamba", "attention"]}}
REPLICATED = ("norm.weight", "layernorm.weight", "embed_tokens.weight", "gate.weight", "router.weight",
              "router.layer.weight", "embeddings.weight", "norm_f.weight")  # fmt: skip


@pytest.mark.parametrize("size", [2, 3, 6, 12])
@pytest.mark.parametrize("model_type", sorted(MODULES))
def test_shards_hold_every_element_once(model_type: str, size: int) -> None:
    """Except norms, routers and the embedding, which all ranks have, and KV heads when there are fewer than ranks."""
    spec = spec_of(model_type, **CHANGES, **OF_TYPE.get(model_type, {}))
    by_rank = [tensor_parts(spec, rank, size) for rank in range(size)]
    for name, shape in checkpoint_tensors(spec).items():
        parts = [parts.get(name) for parts in by_rank]
        if None in parts:
            assert name.endswith(REPLICATED) or "bias" in name, name
            continue
        taken = Counter(index for part in parts if part for bounds in part.ranges for index in range(*bounds))
        dims = {part.dim for part in parts if part and part.ranges}
        assert len(dims) == 1 and sorted(taken) == list(range(shape[dims.pop()])), name
        most = (
            max(1, size // spec.num_kv_heads)
            if any(word in name for word in ("k_proj", "v_proj", "qkv", "k_norm"))
            else 1
        )
        assert set(taken.values()) <= {1, most}, name


@pytest.mark.parametrize("size", [2, 3, 12])
@pytest.mark.parametrize("model_type", sorted(MODULES))
def test_rank_counts_its_own_parameters(model_type: str, size: int) -> None:
    """The parameter count of a rank's spec equals the elements of its parts, except biases that only rank 0 has."""
    spec = spec_of(model_type, **CHANGES, **OF_TYPE.get(model_type, {}))
    parts = tensor_parts(spec, 0, size)
    shapes = checkpoint_tensors(spec)
    elements = sum(math.prod(parts[name].shape(shape) if name in parts else shape) for name, shape in shapes.items())
    assert sharded(spec, 0, size).num_parameters() == elements


def test_kv_blocks_of_a_rank_hold_its_heads() -> None:
    spec = spec_of(num_key_value_heads=2)
    sizes = {size: kv_layout(sharded(spec, 0, size), 16, "float32").block_bytes for size in (1, 2, 4)}
    assert sizes[1] == 2 * sizes[2] == 2 * sizes[4]


def test_query_heads_are_on_the_rank_of_their_keys() -> None:
    spec = spec_of(num_key_value_heads=2)
    prefix = "model.layers.0.self_attn."
    parts = [tensor_parts(spec, rank, 4) for rank in range(4)]
    assert [part[f"{prefix}q_proj.weight"].ranges for part in parts] == [
        ((0, 24),),
        ((24, 48),),
        ((48, 72),),
        ((72, 96),),
    ]
    assert [part[f"{prefix}k_proj.weight"].ranges for part in parts] == [((0, 8),), ((0, 8),), ((8, 16),), ((8, 16),)]


def test_fused_tensors_are_sharded_part_by_part() -> None:
    spec = spec_of("phi3", num_key_value_heads=2)
    parts = tensor_parts(spec, 1, 2)
    assert parts["model.layers.0.self_attn.qkv_proj.weight"] == Part(0, ((48, 96), (104, 112), (120, 128)))
    assert parts["model.layers.0.mlp.gate_up_proj.weight"] == Part(0, ((48, 96), (144, 192)))


@pytest.mark.parametrize("vocab_size", [5, 64, 1000, 49_152, 128_256, 151_936])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_output_head_is_sharded_by_tokens(vocab_size: int, size: int) -> None:
    rows = [
        sharded(spec_of(vocab_size=vocab_size, num_attention_heads=24, num_key_value_heads=24), rank, size).head_rows
        for rank in range(size)
    ]
    assert [token for bounds in rows if bounds for token in range(*bounds)] == list(range(vocab_size))
    assert max(end - first for first, end in (bounds for bounds in rows if bounds)) <= padded_head_rows(
        vocab_size, size
    )
