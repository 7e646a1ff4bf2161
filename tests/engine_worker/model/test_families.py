"""Every family of networks against transformers: tiny random models, greedy in fp32, through the whole engine.

The configurations cross what families differ in: biases, tied heads, norms of queries and keys, partial, neighbouring
and absent rotation, fused tensors, factors, odd numbers of heads. The scheduler's freedoms (chunks, preemption by swap
and by recompute, forks, prefix hits) change nothing that is generated.
"""

from pathlib import Path

import pytest

from engine_worker.model.architectures import MODULES
from tests.engine_worker.model.families import Case, check_schedules, write_family

YARN = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64,
    "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
# One factor for each of the 12 frequencies of three quarters of a head of 32. transformers takes the long ones for what
# is longer than the original context, which every answer here is.
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + i / 12 for i in range(12)], "long_factor": [2.0 + i / 3 for i in range(12)],
    "original_max_position_embeddings": 8,
}  # fmt: skip


CASES = {
    "llama": Case("llama"),
    "llama with biases": Case("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with yarn": Case("llama", {"rope_parameters": YARN}),
    "mistral": Case("mistral", {"sliding_window": None}),
    "qwen2": Case("qwen2", {"tie_word_embeddings": True}),
    "qwen2 of 7 heads a kv head": Case("qwen2", {"num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": None,
                                                 "hidden_size": 112}),
    "qwen3": Case("qwen3"),
    "qwen3 tied, with biases": Case("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "phi3": Case("phi3", {"head_dim": None, "hidden_size": 192}),
    "phi3 with longrope": Case("phi3", {"head_dim": None, "hidden_size": 192, "rope_parameters": LONGROPE,
                                        "original_max_position_embeddings": 8}),
    "smollm3": Case("smollm3", {"num_hidden_layers": 5, "head_dim": None, "hidden_size": 96}),
    "granite": Case("granite", {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4,
                                "logits_scaling": 0.5, "head_dim": None, "hidden_size": 96}),
    "olmo2": Case("olmo2", {"head_dim": None, "hidden_size": 96}),
    "seed_oss": Case("seed_oss", {"attention_bias": True, "attention_out_bias": True}),
    "glm": Case("glm", {"head_dim": 32}),
    "glm4": Case("glm4", {"head_dim": 32}),
    "ernie4_5": Case("ernie4_5", {"use_bias": True, "tie_word_embeddings": True}),
    "helium": Case("helium", {"head_dim": 16, "hidden_size": 96, "attention_bias": True, "mlp_bias": True}),
}  # fmt: skip


@pytest.fixture(scope="module", params=CASES)
def family_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("family"), CASES[request.param])


def test_every_family_is_tried() -> None:
    assert {case.model_type for case in CASES.values()} == set(MODULES)


def test_greedy_tokens_are_those_of_transformers_whatever_the_schedule(family_dir: Path) -> None:
    check_schedules(family_dir)
