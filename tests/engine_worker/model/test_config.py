"""Read config.json into a ModelSpec, and refuse unsupported fields."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine_worker.model.architectures import spec_from_directory, spec_from_json
from engine_worker.model.spec import ModelSpec
from engine_worker.model.specs.attention import RopeScaling, RopeSpec

LLAMA = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
NEMOTRON = {
    "model_type": "nemotron_h", "hybrid_override_pattern": "M*E", "mamba_num_heads": 6, "mamba_head_dim": 8,
    "n_groups": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


def parse(generation: dict[str, Any] | None = None, **changes: Any) -> ModelSpec:
    return spec_from_json({**LLAMA, **changes}, generation or {})


def test_config_defaults_match_transformers() -> None:
    config = parse(num_key_value_heads=None)
    assert (config.num_kv_heads, config.head_dim) == (4, 16)
    assert config.attentions[0].rope == RopeSpec(dim=16, theta=10_000.0)
    assert not config.tie_word_embeddings


def test_rope_is_read_from_old_and_new_formats() -> None:
    scaling = RopeScaling(
        kind="by_wavelength",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=256,
    )
    old = parse(rope_theta=5e5, rope_scaling=LLAMA3_ROPE)
    new = parse(rope_parameters={**LLAMA3_ROPE, "rope_theta": 5e5})
    assert old == new
    assert new.attentions[0].rope == RopeSpec(dim=16, theta=5e5, scaling=scaling)


def test_generation_config_gives_the_eos_tokens() -> None:
    assert parse(eos_token_id=2).eos_token_ids == (2,)
    assert parse({"eos_token_id": [5, 6]}, eos_token_id=2).eos_token_ids == (5, 6)
    assert parse().eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"model_type": "mamba"}, "'mamba' is not supported; supported: .*llama"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"sliding_window": 256}, "sliding_window"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 0, "max_window_layers": 0},
            "sliding_window",
        ),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers"),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "conv"]}, "layer_types has 'conv'"),
        ({"model_type": "mistral", "layer_types": ["full_attention", "sliding_attention"]}, "'ministral'"),
        (
            {"model_type": "gemma3_text", "hidden_activation": "silu"},
            "hidden_activation = 'silu'.*'gelu_pytorch_tanh' is",
        ),
        ({"model_type": "gemma3_text", "hidden_act": None, "use_bidirectional_attention": True}, "bidirectional"),
        ({"model_type": "gemma3_text", "hidden_act": None, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn' needs original_max_position_embeddings"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads 3"),
        ({"head_dim": 15}, "15"),
        ({"head_dim": "64"}, "head_dim must be a positive integer, not '64'"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a number above 0, not '1e-5'"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": [4]}},
            r"rope_parameters\.factor must be a number above 0",
        ),
        ({"rope_scaling": 4}, "rope_scaling must be an object, not 4"),
        ({"layer_types": "full_attention"}, "layer_types must be a list of strings"),
        ({"eos_token_id": 1.5}, r"eos_token_id must be an integer or a list of them, not 1\.5"),
        ({**NEMOTRON, "n_groups": 4}, "mamba_num_heads 6 must be a multiple of n_groups 4"),
        ({**NEMOTRON, "moe_latent_size": 32}, "moe_latent_size = 32 is not supported"),
        ({**NEMOTRON, "num_experts_per_tok": 5}, "num_experts_per_tok must be 1 to 4"),
        ({**NEMOTRON, "n_group": 3}, "n_group 3 must divide n_routed_experts 4"),
        ({**NEMOTRON, "n_group": 4, "topk_group": 1}, "topk_group 1 groups must have num_experts_per_tok 2 experts"),
        ({**NEMOTRON, "mlp_hidden_act": "silu"}, "mlp_hidden_act = 'silu' is not supported; only 'relu2'"),
    ],
)
def test_unsupported_config_field_is_refused_by_name(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        parse(**changes)


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_directory_without_config_is_refused(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json"):
        spec_from_directory(tmp_path)


def test_config_reads_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert spec_from_directory(tmp_path).eos_token_ids == (9,)
