"""Decoders without a file of their own here: run by transformers, with this engine's attention, KV and weights.

As of the families that have one, greedy tokens in float32 are those of transformers by itself: in one batch, in chunks,
preempted by swap and by recompute, forked, with prefix hits. What attention here cannot do is refused by name.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine_worker.model.implementation import blueprint, blueprint_from_directory
from engine_worker.model.transformers_backend.library import ModelNotServed
from tests.engine_worker.execution.reference import TINY
from tests.engine_worker.model.families import Case, check_schedules, write_family

CPU = torch.device("cpu")
# num_key_value_heads is no key of theirs.
PLAIN = {"num_key_value_heads": 6, "head_dim": None}
CASES = {
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
}  # fmt: skip


@pytest.fixture(scope="module", params=CASES)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("model"), CASES[request.param])


def test_greedy_tokens_are_those_of_transformers_whatever_the_schedule(model_dir: Path) -> None:
    assert blueprint_from_directory(model_dir).implementation == "transformers"
    check_schedules(model_dir)


def test_a_family_runs_the_same_either_way(tmp_path: Path) -> None:
    directory = write_family(tmp_path, Case("llama", {"attention_bias": True}))
    assert blueprint_from_directory(directory).implementation == "native"
    assert check_schedules(directory, "native") == check_schedules(directory, "transformers")
    native, other = (blueprint_from_directory(directory, wanted).shape for wanted in ("native", "transformers"))
    fields = ("vocab_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_position_embeddings", "dtype")
    assert {name: getattr(native, name) for name in fields} == {name: getattr(other, name) for name in fields}
    assert native.num_parameters() == other.num_parameters()
    assert native.eos_token_ids == other.eos_token_ids


@pytest.mark.parametrize(
    ("model_type", "changes", "named"),
    [
        ("falcon", {}, "makes no falcon"),
        ("bloom", {}, "it takes no position_ids"),
        ("gemma2", {"head_dim": 32, "sliding_window": 64}, "sliding_window = 64"),
        ("gemma2", {"head_dim": 32, "layer_types": ["full_attention"] * 3}, "attention with softcap"),
        ("cohere2", {"sliding_window": 64}, "sliding_window = 64"),
        ("gpt_oss", {}, "layers of experts"),
        ("granite_swa", {"layer_types": ["full_attention"] * 3, "sliding_window": None}, "attention with s_aux"),
        ("mamba", {}, "keeps a state"),
        ("falcon_h1", {}, "keeps a state"),
        ("lfm2", {"full_attn_idxs": [0]}, "layer_types has 'conv'"),
        ("bert", {"is_decoder": False}, "tokens attend to those after them"),
        ("deepseek_v3", {"n_routed_experts": 4, "first_k_dense_replace": 3}, "and values of"),
        ("diffllama", {}, "calls attention 6 times for 3 layers"),
        ("phi", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope type 'dynamic'"),
        ("made_up", {}, "model_type 'made_up' is no causal language model of transformers"),
        ("t5", {}, "model_type 't5' is no causal language model"),
    ],
)
def test_what_attention_here_cannot_do_is_refused_before_weights(
    model_type: str, changes: dict[str, Any], named: str
) -> None:
    config = {**TINY, "head_dim": None, "pad_token_id": 0, "model_type": model_type, **changes}
    with pytest.raises(ModelNotServed) as refusal:
        blueprint({key: value for key, value in config.items() if value is not None or key in changes}, {})
    assert named in str(refusal.value)
    assert len(str(refusal.value)) < 400
