"""Model types under test, the implementation that runs each, and the refused ones with their messages.

    NATIVE                 model types with a file in engine_worker/model/architectures
    THROUGH_TRANSFORMERS   some of the others
    REFUSED                (model type, changes, words of the error message)

A case holds the config.json fields that differ from reference.TINY. The documentation is generated from this module,
so it does not import torch.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    model_type: str
    changes: dict[str, Any] = field(default_factory=dict)


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


DELTA = {
    "num_hidden_layers": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}  # fmt: skip
MAMBA = {
    "num_hidden_layers": 4, "mamba_n_heads": 8, "mamba_d_head": "auto", "mamba_n_groups": 1, "mamba_d_state": 16,
    "layer_types": ["mamba", "attention", "mamba", "mamba"], "shared_intermediate_size": 40, "head_dim": None,
    "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 2.0,
}  # fmt: skip
NEMOTRON = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"], "n_groups": 2,
    "mamba_num_heads": 6, "mamba_head_dim": 12, "ssm_state_size": 16, "head_dim": 16, "num_hidden_layers": None,
}  # fmt: skip
SHARED_EXPERT = {
    "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
}  # fmt: skip
TWO_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]

NATIVE = {
    "llama": Case("llama"),
    "llama with biases": Case("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with yarn": Case("llama", {"rope_parameters": YARN}),
    "llama, 7 heads of 80": Case("llama", {"head_dim": 80, "num_attention_heads": 7, "num_key_value_heads": 1,
                                           "hidden_size": 112}),
    "llama, heads of 96": Case("llama", {"head_dim": 96, "num_hidden_layers": 2}),
    "llama, heads of 128": Case("llama", {"head_dim": 128, "num_hidden_layers": 2}),
    "llama, heads of 256": Case("llama", {"head_dim": 256, "num_hidden_layers": 2, "num_attention_heads": 2,
                                          "num_key_value_heads": 1}),
    "mistral": Case("mistral", {"sliding_window": None}),
    "mistral with a window": Case("mistral", {"sliding_window": 11}),
    "ministral, of two types": Case("ministral", {"sliding_window": 20, "layer_types": TWO_TYPES}),
    "ministral3": Case("ministral3", {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.4}}),
    "ministral3 with a window": Case("ministral3", {"sliding_window": 12, "rope_parameters": {
        "rope_type": "default", "rope_theta": 10_000.0, "original_max_position_embeddings": 16,
        "llama_4_scaling_beta": 0.5}}),
    "gemma2": Case("gemma2", {"head_dim": 32, "sliding_window": 24, "tie_word_embeddings": True,
                              "query_pre_attn_scalar": 20, "attn_logit_softcapping": 4.0,
                              "final_logit_softcapping": 3.0}),
    "gemma2, heads of 256": Case("gemma2", {"head_dim": 256, "num_hidden_layers": 2, "num_attention_heads": 2,
                                            "num_key_value_heads": 1, "sliding_window": 128}),
    "gemma3_text": Case("gemma3_text", {"head_dim": 32, "num_hidden_layers": 7, "sliding_window": 9,
                                        "tie_word_embeddings": True, "query_pre_attn_scalar": 24}),
    "gemma3_text, a linear rope, biases": Case("gemma3_text", {
        "head_dim": 16, "layer_types": TWO_TYPES, "sliding_window": 40, "attention_bias": True,
        "final_logit_softcapping": 2.0, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0}}}),
    "qwen2": Case("qwen2", {"tie_word_embeddings": True}),
    "qwen2 of 7 heads a kv head": Case("qwen2", {"num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": None,
                                                 "hidden_size": 112}),
    "qwen3": Case("qwen3"),
    "qwen3 tied, with biases": Case("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen2 with windows from layer 1 on": Case("qwen2", {"use_sliding_window": True, "sliding_window": 17,
                                                         "max_window_layers": 1}),
    "qwen3 with a window in layer 2": Case("qwen3", {"use_sliding_window": True, "sliding_window": 32,
                                                     "max_window_layers": 2}),
    "phi3 with a window": Case("phi3", {"head_dim": None, "hidden_size": 192, "sliding_window": 19}),
    "phi3": Case("phi3", {"head_dim": None, "hidden_size": 192}),
    "phi3 with longrope": Case("phi3", {"head_dim": None, "hidden_size": 192, "rope_parameters": LONGROPE,
                                        "original_max_position_embeddings": 8}),
    "smollm3": Case("smollm3", {"num_hidden_layers": 5, "head_dim": None, "hidden_size": 96}),
    "smollm3 with windows": Case("smollm3", {"num_hidden_layers": 5, "head_dim": None, "hidden_size": 96,
                                             "use_sliding_window": True, "sliding_window": 21}),
    "granite": Case("granite", {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4,
                                "logits_scaling": 0.5, "head_dim": None, "hidden_size": 96}),
    "granite_swa": Case("granite_swa", {"attention_multiplier": 0.2, "residual_multiplier": 0.4, "head_dim": None,
                                        "num_hidden_layers": 5, "sliding_window": 19, "tie_word_embeddings": True}),
    "granite_swa, a short window, bases by layer": Case("granite_swa", {
        "attention_multiplier": 0.2, "head_dim": None, "sliding_window": 5, "layer_types": TWO_TYPES,
        "layer_rope_theta": [10_000.0, 0, 500.0], "attention_bias": True}),
    "olmo2": Case("olmo2", {"head_dim": None, "hidden_size": 96}),
    "olmo3": Case("olmo3", {"head_dim": None, "hidden_size": 96, "num_hidden_layers": 4, "sliding_window": 25}),
    "olmo3 with yarn": Case("olmo3", {"head_dim": None, "hidden_size": 96, "sliding_window": 50,
                                      "layer_types": TWO_TYPES, "rope_parameters": {"full_attention": YARN}}),
    "seed_oss": Case("seed_oss", {"attention_bias": True, "attention_out_bias": True}),
    "glm": Case("glm", {"head_dim": 32}),
    "glm4": Case("glm4", {"head_dim": 32}),
    "ernie4_5": Case("ernie4_5", {"use_bias": True, "tie_word_embeddings": True}),
    "helium": Case("helium", {"head_dim": 16, "hidden_size": 96, "attention_bias": True, "mlp_bias": True}),
    # Numbers of experts that are no powers of two. Each expert's rows of the router are scaled, so loads are uneven.
    "qwen3_moe": Case("qwen3_moe", {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                                    "norm_topk_prob": True}),
    "qwen3_moe, some layers dense": Case("qwen3_moe", {
        "num_experts": 6, "num_experts_per_tok": 1, "moe_intermediate_size": 40, "decoder_sparse_step": 2,
        "num_hidden_layers": 4, "mlp_only_layers": [3], "norm_topk_prob": False, "attention_bias": True}),
    "qwen3_moe with a window": Case("qwen3_moe", {
        "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "use_sliding_window": True,
        "sliding_window": 20}),
    "mixtral": Case("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": None}),
    "mixtral with a window": Case("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 1, "sliding_window": 13}),
    "olmoe": Case("olmoe", {"num_experts": 7, "num_experts_per_tok": 3, "head_dim": None}),
    "lfm2": Case("lfm2", {"head_dim": None, "layer_types": ["conv", "full_attention", "conv"], "conv_bias": True,
                          "num_key_value_heads": 3, "block_multiple_of": 8}),
    "lfm2, wide filters in two parts": Case("lfm2", {
        "head_dim": None, "num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"],
        "conv_L_cache": 5, "block_auto_adjust_ff_dim": False, "num_key_value_heads": 2,
        "num_attention_heads": 6}),
    "lfm2_moe": Case("lfm2_moe", {
        "head_dim": None, "layer_types": ["conv", "full_attention", "conv"], "num_experts": 5,
        "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_dense_layers": 1}),
    # A shared expert of the size of the others is one of them.
    "qwen3_next": Case("qwen3_next", {**DELTA, **SHARED_EXPERT, "shared_expert_intermediate_size": 24}),
    "qwen3_next, two dense layers, a short filter": Case("qwen3_next", {
        **DELTA, **SHARED_EXPERT, "mlp_only_layers": [0, 3], "linear_conv_kernel_dim": 2, "norm_topk_prob": False,
        "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]}),
    "qwen3_5_text": Case("qwen3_5_text", {**DELTA, "tie_word_embeddings": True, "attention_bias": True}),
    "qwen3_5_text, a head of keys per head of values": Case("qwen3_5_text", {
        **DELTA, "linear_num_key_heads": 4, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1_000.0, "partial_rotary_factor": 0.5}}),
    "qwen3_5_moe_text": Case("qwen3_5_moe_text", {**DELTA, **SHARED_EXPERT}),
    "granitemoe": Case("granitemoe", {
        "num_local_experts": 5, "num_experts_per_tok": 2, "embedding_multiplier": 3.0, "attention_multiplier": 0.2,
        "residual_multiplier": 0.4, "logits_scaling": 2.0, "head_dim": None}),
    "granitemoehybrid": Case("granitemoehybrid", {**MAMBA, "num_local_experts": 5, "num_experts_per_tok": 2}),
    # transformers 5.17 norms all groups together, 5.23 each alone; nemotron_h has several in both.
    "granitemoehybrid, dense, biases, rotary": Case("granitemoehybrid", {
        **MAMBA, "num_local_experts": 0, "mamba_proj_bias": True, "mamba_d_conv": 2,
        "position_embedding_type": "rope"}),
    "granitemoehybrid, dense, no filter biases": Case("granitemoehybrid", {
        **MAMBA, "num_local_experts": 0, "mamba_conv_bias": False}),
    "granitemoehybrid, attention only": Case("granitemoehybrid", {
        **MAMBA, "num_local_experts": 0, "layer_types": ["attention"] * 4}),
    "nemotron_h": Case("nemotron_h", {**NEMOTRON}),
    "nemotron_h, ends with attention": Case("nemotron_h", {
        **NEMOTRON, "layers_block_type": ["mlp", "linear_attention", "linear_attention", "full_attention"],
        "use_conv_bias": False, "mlp_bias": True, "conv_kernel": 2}),
    "nemotron_h, experts": Case("nemotron_h", {
        **NEMOTRON, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "n_routed_experts": 6,
        "num_experts_per_tok": 3, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40,
        "routed_scaling_factor": 2.5}),
    "nemotron_h, experts in groups, biases": Case("nemotron_h", {
        **NEMOTRON, "layers_block_type": ["moe", "full_attention", "linear_attention", "mlp"], "n_routed_experts": 8,
        "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 20, "mlp_bias": True,
        "moe_shared_expert_intermediate_size": 24, "norm_topk_prob": False}),
    "glm4_moe": Case("glm4_moe", {
        "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_group": 3, "topk_group": 2,
        "routed_scaling_factor": 1.7, "first_k_dense_replace": 1, "attention_bias": True, "use_qk_norm": True}),
    "glm4_moe, one group": Case("glm4_moe", {
        "n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": False, "first_k_dense_replace": 0, "n_shared_experts": 2}),
    "gpt_oss": Case("gpt_oss", {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 40,
                                "sliding_window": 19, "rope_parameters": {**YARN, "truncate": False}}),
    "gpt_oss, a short window, a low limit": Case("gpt_oss", {
        "num_local_experts": 3, "num_experts_per_tok": 1, "intermediate_size": 24, "sliding_window": 5,
        "layer_types": TWO_TYPES, "swiglu_limit": 1.5, "attention_bias": False}),
}  # fmt: skip

# Their config has no num_key_value_heads.
PLAIN = {"num_key_value_heads": 6, "head_dim": None}
THROUGH_TRANSFORMERS = {
    "opt": Case("opt", {**PLAIN, "ffn_dim": 96, "word_embed_proj_dim": 96}),
    "opt with norms after, projected": Case("opt", {**PLAIN, "ffn_dim": 96, "word_embed_proj_dim": 48,
                                                    "do_layer_norm_before": False, "tie_word_embeddings": True}),
    "gpt2": Case("gpt2", {**PLAIN, "n_inner": 96, "tie_word_embeddings": True}),
    "stablelm, a quarter rotated": Case("stablelm", {"head_dim": None, "use_qkv_bias": True, "hidden_size": 192}),
    "gpt_neox, parallel": Case("gpt_neox", {**PLAIN, "hidden_size": 192, "num_key_value_heads": 6}),
    "cohere, scaled logits": Case("cohere", {"head_dim": None, "use_qk_norm": True, "logit_scale": 0.5}),
    "phi": Case("phi", {"head_dim": None, "hidden_size": 192}),
    "gpt_bigcode, one kv head": Case("gpt_bigcode", {"head_dim": None, "n_inner": 96, "multi_query": True}),
    "starcoder2": Case("starcoder2", {"head_dim": None, "use_bias": True}),
    "olmo, norms without weights": Case("olmo", {"head_dim": None, "clip_qkv": 3.0}),
    "gemma": Case("gemma", {"head_dim": 32}),
    "nemotron": Case("nemotron", {"head_dim": 16}),
    "cohere2, windows": Case("cohere2", {"head_dim": None, "sliding_window": 18}),
    "vaultgemma, windows and caps": Case("vaultgemma", {"head_dim": 32, "sliding_window": 24,
                                                        "attn_logit_softcapping": 4.0}),
}  # fmt: skip

REFUSED = [
    ("falcon", {}, "falcon computes attention itself"),
    ("bloom", {}, "it takes no position_ids"),
    ("gpt_oss", {}, "mixture-of-experts layers"),
    ("granite_swa", {"layer_types": ["full_attention"] * 3, "sliding_window": None}, "attention with s_aux"),
    ("mamba", {}, "layer_types has 'linear_attention'"),
    ("falcon_h1", {}, "layer_types has 'hybrid'"),
    ("lfm2", {"full_attn_idxs": [0]}, "layer_types has 'conv'"),
    ("bert", {"is_decoder": False}, "tokens attend to those after them"),
    ("deepseek_v3", {"n_routed_experts": 4, "first_k_dense_replace": 3}, "elements and values"),
    ("diffllama", {}, "calls attention 6 times for 3 layers"),
    ("phi", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope type 'dynamic'"),
    ("made_up", {}, "model_type 'made_up' is not a causal language model of transformers"),
    ("t5", {}, "model_type 't5' is not a causal language model"),
]
