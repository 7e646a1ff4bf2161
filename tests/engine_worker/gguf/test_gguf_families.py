"""Every GGUF family and quantization generates the greedy tokens of transformers on the same weights."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from engine_worker.convert_gguf import convert
from engine_worker.gguf.metadata import ConversionError
from engine_worker.model.architectures import GGUF_MODULES, spec_from_directory
from engine_worker.model.checkpoint import check_checkpoint, stored_tensors
from engine_worker.model.implementation import blueprint_from_directory
from engine_worker.model.weight_format import STORED_BLOCKS
from engine_worker.model.weights import SafetensorsWeights
from tests.builders import make_request
from tests.engine_worker.execution.reference import Reference, generate, make_runner
from tests.engine_worker.gguf.files import tiny_options, write_gguf
from tests.engine_worker.model.test_grouped import logits_of, needs_library

FP32_MARGIN = 1e-3  # two summation orders differ by about 1e-5 here
FACTORS = [1.0 + i / 4 for i in range(32)]  # one per rotated pair of a head of 64
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": FACTORS, "long_factor": [2 * f for f in FACTORS],
    "original_max_position_embeddings": 4, "attention_factor": 1.25,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    architecture: str
    kind: Kind
    changes: dict[str, Any] = field(default_factory=dict)


EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 64, "norm_topk_prob": True,
}  # fmt: skip
CONVOLUTIONS = {
    "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 4,
    "tie_word_embeddings": True, "block_auto_adjust_ff_dim": False,
}  # fmt: skip
CASES = [
    Case("lfm2", Kind.F32, CONVOLUTIONS),
    Case("lfm2", Kind.Q8_0, CONVOLUTIONS),
    Case("llama", Kind.F16),
    Case("llama", Kind.Q8_0, {"tie_word_embeddings": True}),
    Case("llama", Kind.Q4_K, {"attention_bias": True, "mlp_bias": True}),
    Case("llama", Kind.Q4_0, {"rope_parameters": LONGROPE | {"long_factor": FACTORS, "attention_factor": 1.0}}),
    Case("qwen2", Kind.BF16, {"tie_word_embeddings": True}),
    Case("qwen2", Kind.Q5_0, {"num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 14 * 32}),
    Case("qwen2", Kind.Q6_K),
    Case("qwen3", Kind.F32, {"head_dim": 32}),
    Case("qwen3", Kind.Q4_1, {"head_dim": 128}),
    Case("qwen3", Kind.Q5_K, {"head_dim": 64}),
    Case(
        "gemma3",
        Kind.Q8_0,
        {
            "head_dim": 64,
            "num_hidden_layers": 7,
            "sliding_window": 9,
            "query_pre_attn_scalar": 64,
            "tie_word_embeddings": True,
        },
    ),
    Case(
        "gemma3",
        Kind.Q5_0,
        {
            "head_dim": 32,
            "sliding_window": 20,
            "query_pre_attn_scalar": 32,
            "layer_types": ["sliding_attention"] * 2,
            "tie_word_embeddings": True,
            "rope_parameters": {"sliding_attention": {"rope_theta": 500.0}},
        },
    ),
    Case("qwen3moe", Kind.BF16, EXPERTS),
    Case("qwen3moe", Kind.Q4_1, EXPERTS),
    Case("qwen3moe", Kind.Q8_0, EXPERTS),
    Case("phi3", Kind.Q5_1),
    Case("phi3", Kind.Q8_0, {"rope_parameters": LONGROPE, "original_max_position_embeddings": 4}),
]


MODEL_TYPES = {"gemma3": "gemma3_text", "qwen3moe": "qwen3_moe"}  # where llama.cpp uses another name


def tiny(case: Case) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            MODEL_TYPES.get(case.architecture, case.architecture), **tiny_options(**case.changes)
        )
        model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5, generator=generator)
        elif name.endswith(".bias"):
            parameter.data.normal_(0.0, 0.3, generator=generator)
    return model


def add_parameters(case: Case, writer: gguf.GGUFWriter) -> None:
    """Add what llama.cpp's converter adds: rope factors, one table for Llama 3 and two for Phi-3; a filter's width."""
    if case.architecture == "lfm2":
        writer.add_shortconv_l_cache(case.changes["conv_L_cache"])
    if case.architecture == "gemma3":
        writer.add_sliding_window(case.changes["sliding_window"])
        for rope in case.changes.get("rope_parameters", {}).values():
            writer.add_float32("gemma3.rope.freq_base_swa", rope["rope_theta"])
        return
    rope = case.changes.get("rope_parameters")
    if rope is None:
        return
    if case.architecture == "llama":
        writer.add_tensor("rope_freqs.weight", np.array(FACTORS, np.float32))
        return
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_attn_factors(rope["attention_factor"])
    for name in ("long", "short"):
        writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.architecture}-{case.kind.name}")
def test_greedy_tokens_match_transformers(case: Case, tmp_path: Path) -> None:
    model = tiny(case)
    write_gguf(tmp_path / "m.gguf", model, case.architecture, case.kind, lambda writer: add_parameters(case, writer))
    model.save_pretrained(tmp_path / "reference")
    convert(tmp_path / "m.gguf", tmp_path / "model", lambda progress, detail: None)
    runner = make_runner(tmp_path / "model", num_blocks=32)
    prompt = torch.randint(3, 320, (33,), generator=torch.Generator().manual_seed(2)).tolist()
    requests = [make_request(prompt[:n], f"p{n}", max_tokens=30, ignore_eos=True) for n in (1, 5, 33)]
    outputs, _ = generate(runner, requests, max_num_seqs=4, max_num_batched_tokens=16)
    reference = Reference(tmp_path / "reference")
    for request in requests:
        worst = max(reference.shortfalls(request.prompt_token_ids, outputs[request.request_id]))
        assert worst < FP32_MARGIN, request.request_id


@needs_library
@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q6_K, Kind.Q4_1])
def test_experts_are_kept_and_multiplied_in_blocks(kind: Kind, tmp_path: Path) -> None:
    """All experts are chosen, so that no choice is near a tie."""
    case = Case(
        "qwen3moe", kind, EXPERTS | {"moe_intermediate_size": 256, "num_experts_per_tok": 4, "vocab_size": 1024}
    )
    write_gguf(tmp_path / "m.gguf", tiny(case), case.architecture, kind)
    convert(tmp_path / "m.gguf", tmp_path / "model", lambda progress, detail: None)
    found = stored_tensors(tmp_path / "model")
    assert {tensor.path.name for name, tensor in found.items() if ".experts." in name} == {STORED_BLOCKS}
    check_checkpoint(spec_from_directory(tmp_path / "model"), found)
    exact, stored = logits_of(tmp_path / "model", "none"), logits_of(tmp_path / "model", "as-stored")
    # Blocks of Q6_K are rounded to 8 bits, other layers of `none` to bfloat16.
    assert float((exact - stored).std()) < 0.1 * float(exact.std())
    blueprint = blueprint_from_directory(tmp_path / "model", quantization="as-stored")
    source = SafetensorsWeights(tmp_path / "model", torch.device("cpu"), torch.float32, lambda progress, detail: None)
    blueprint.build(source, 64, False)
    assert blueprint.weights_bytes(1, 4) == source.loaded_bytes


def test_experts_where_the_family_has_none_are_refused(tmp_path: Path) -> None:
    def add_experts(writer: gguf.GGUFWriter) -> None:
        writer.add_expert_count(4)

    write_gguf(tmp_path / "m.gguf", tiny(Case("qwen3", Kind.F32)), "qwen3", Kind.F32, add_experts)
    with pytest.raises(ConversionError, match="GGUF architecture 'qwen3' with experts is not supported"):
        convert(tmp_path / "m.gguf", tmp_path / "model", lambda progress, detail: None)


def test_one_number_of_kv_heads_for_all_layers_is_refused_where_each_has_its_own(tmp_path: Path) -> None:
    case = Case("lfm2", Kind.F32, CONVOLUTIONS | {"layer_types": ["full_attention"] * 3})
    write_gguf(tmp_path / "m.gguf", tiny(case), "lfm2", Kind.F32, lambda writer: add_parameters(case, writer))
    with pytest.raises(ConversionError, match="must have a value for each layer"):
        convert(tmp_path / "m.gguf", tmp_path / "model", lambda progress, detail: None)


def test_every_family_and_quantization_has_a_case() -> None:
    assert {case.architecture for case in CASES} | {"gpt-oss"} == set(GGUF_MODULES)  # test_gpt_oss.py
    wanted = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
    assert {case.kind.name for case in CASES} == set(wanted)
