"""Recorded logits of tiny models, which changes of the networks must keep.

`python -m tests.engine_worker.model.test_golden_logits` rewrites golden_logits.json. The commit that does so gives the
reason; only a corrected error is one. numpy's frozen generator draws the weights from each tensor's name, so they do
not depend on torch or transformers.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine_worker.model.architectures import MODULES
from engine_worker.model.implementation import blueprint
from engine_worker.model.spec import kv_layout
from tests.engine_worker.model.named_weights import BLOCK_SIZE, NamedWeights, attached, step

GOLDEN = Path(__file__).with_name("golden_logits.json")
NUM_PROMPT_TOKENS = 21
# AVX2, AVX512 and AMX sum in different orders, which changes logits of +-5 by 1e-5. A missing factor changes them by
# 1e-1, and the two likeliest tokens of a row differ by at least 3e-3.
TOLERANCE = 1e-3
SHAPE = {
    "vocab_size": 256, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip
ROPE = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
SHARED_EXPERT = {
    "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 32,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "ernie4_5": {"use_bias": True},
    "gemma2": {"sliding_window": 7, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 20, "hidden_size": 36},
    "gemma3_text": {"sliding_window": 5, "sliding_window_pattern": 3, "query_pre_attn_scalar": 20},
    "glm": {},
    "glm4": {},
    "glm4_moe": {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_group": 3,
                 "topk_group": 2, "routed_scaling_factor": 1.7},
    "gpt_oss": {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 7,
                "rope_parameters": {**YARN, "truncate": False}},
    "granite": {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4,
                "logits_scaling": 0.5},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 8,
        "mamba_d_head": "auto", "num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 32,
    },
    "granite_swa": {"sliding_window": 7, "num_hidden_layers": 4, "residual_multiplier": 0.4},
    "granitemoe": {"num_local_experts": 5, "num_experts_per_tok": 2, "residual_multiplier": 0.4},
    "helium": {"attention_bias": True},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16},
    "lfm2_moe": {"layer_types": ["full_attention", "conv", "conv"], "num_experts": 5, "num_experts_per_tok": 2,
                 "moe_intermediate_size": 24, "num_dense_layers": 1},
    "llama": {"rope_parameters": ROPE},
    "ministral": {"sliding_window": 6, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    "ministral3": {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.4}},
    "mistral": {"rope_parameters": YARN, "sliding_window": None},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "nemotron_h": {
        "hybrid_override_pattern": "M-*ME", "n_groups": 2, "mamba_num_heads": 6, "mamba_head_dim": 12,
        "ssm_state_size": 8, "n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 40,
    },
    "olmo2": {},
    "olmo3": {"sliding_window": 9, "num_hidden_layers": 4},
    "olmoe": {"num_experts": 7, "num_experts_per_tok": 3},
    "phi3": {"partial_rotary_factor": 0.75},
    "qwen2": {"num_attention_heads": 7, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen3": {},
    "qwen3_5_moe_text": {**DELTA, **SHARED_EXPERT},
    "qwen3_5_text": DELTA,
    "qwen3_moe": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    "qwen3_next": {**DELTA, **SHARED_EXPERT, "norm_topk_prob": False},
    "seed_oss": {"attention_out_bias": True},
    "smollm3": {"num_hidden_layers": 4},
}  # fmt: skip


def answers(model_type: str) -> dict[str, list[float]]:
    """Return each row's likeliest token, its logit and a sum over the vocabulary; of a prompt and one token after."""
    found = blueprint({**SHAPE, "model_type": model_type, **CASES[model_type]}, {}, "native")
    model = found.build(NamedWeights(), 64, is_deterministic=False)
    layout = kv_layout(found.shape, BLOCK_SIZE, "float32", max_groups=1)
    device = attached(model, layout)
    prompt = [(7 * index * index + 3) % SHAPE["vocab_size"] for index in range(NUM_PROMPT_TOKENS)]
    logits = torch.cat([model.forward(step(0, prompt), device), model.forward(step(len(prompt), [5]), device)])
    signs = torch.from_numpy(np.random.RandomState(0).choice([-1.0, 1.0], logits.shape[1]).astype(np.float32))
    return {
        "tokens": logits.argmax(-1).tolist(),
        "logits": [round(value, 5) for value in logits.amax(-1).tolist()],
        "mean of signed logits": [round(value, 5) for value in (logits @ signs / len(signs)).tolist()],
    }


def test_every_family_has_golden_logits() -> None:
    assert set(CASES) == set(MODULES) == set(json.loads(GOLDEN.read_text()))


@pytest.mark.parametrize("model_type", CASES)
def test_logits_match_the_golden_values(model_type: str) -> None:
    golden = json.loads(GOLDEN.read_text())[model_type]
    found = answers(model_type)
    assert found["tokens"] == golden["tokens"]
    for name in ("logits", "mean of signed logits"):
        assert found[name] == pytest.approx(golden[name], abs=TOLERANCE)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({model_type: answers(model_type) for model_type in CASES}) + "\n")
