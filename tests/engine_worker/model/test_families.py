"""Every family of networks against transformers: tiny random models, greedy in fp32, through the whole engine.

The configurations cross what families differ in: biases, tied heads, norms of queries and keys, partial, neighbouring
and absent rotation, fused tensors, factors, odd numbers of heads. The scheduler's freedoms (chunks, preemption by swap
and by recompute, forks, prefix hits) change nothing that is generated.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine_worker.model.architectures import MODULES
from engine_worker.scheduling.preemption import PreemptionMode
from tests.builders import make_request
from tests.engine_worker.execution.reference import TINY, Reference, make_engine, make_runner, run_engine_to_end

FP32_MARGIN = 1e-3  # two different orders of summation differ by about 1e-5 here

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


@dataclass(frozen=True)
class Case:
    model_type: str
    changes: dict[str, Any] = field(default_factory=dict)


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


def write_family(directory: Path, case: Case) -> Path:
    """A random model; norms and biases are random too, or a missing one would not show."""
    options = {key: value for key, value in {**TINY, **case.changes}.items() if value is not None or key != "head_dim"}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(case.model_type, pad_token_id=0, **options)
        model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5, generator=generator)
        elif name.endswith(".bias"):
            parameter.data.normal_(0.0, 0.3, generator=generator)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module", params=CASES)
def family_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("family"), CASES[request.param])


def test_every_family_is_tried() -> None:
    assert {case.model_type for case in CASES.values()} == set(MODULES)


def prompts(vocab_size: int) -> list[list[int]]:
    """Around the edges of blocks and chunks, and beyond the context that yarn and longrope stretch; two share one."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(3, vocab_size, (300,), generator=generator).tolist()
    return [tokens[:1], tokens[:16], tokens[:33], [*tokens[:33], 7], tokens[40:170]]


SCHEDULES: dict[str, dict[str, Any]] = {
    "all at once": {"num_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 512},
    "chunks": {"num_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 24},
    "recompute": {"num_blocks": 13, "max_num_seqs": 8, "max_num_batched_tokens": 512},
    "swap": {"num_blocks": 13, "max_num_seqs": 8, "max_num_batched_tokens": 512, "num_host_blocks": 32},
}


def test_greedy_tokens_are_those_of_transformers_whatever_the_schedule(family_dir: Path) -> None:
    reference = Reference(family_dir)
    outputs: dict[str, dict[tuple[str, int], list[int]]] = {}
    for name, options in SCHEDULES.items():
        schedule = dict(options)
        num_blocks, num_host_blocks = schedule.pop("num_blocks"), schedule.pop("num_host_blocks", 0)
        runner = make_runner(family_dir, num_blocks=num_blocks, num_host_blocks=num_host_blocks)
        mode = PreemptionMode.SWAP if num_host_blocks else PreemptionMode.RECOMPUTE
        engine = make_engine(runner, preemption_mode=mode, **schedule)
        requests = [
            make_request(prompt, f"p{index}", max_tokens=40, ignore_eos=True, n=2 if index == 2 else 1)
            for index, prompt in enumerate(prompts(runner.model_spec.vocab_size))
        ]
        transcript = run_engine_to_end(engine, requests)
        outputs[name] = {
            (request.request_id, choice): transcript.choice(request.request_id, choice)
            for request in requests
            for choice in range(request.sampling.n)
        }
        counters = engine.stats().counters
        assert (sum(counters.preemptions.values()) > 0) == (name in {"recompute", "swap"})
    for name, found in outputs.items():
        assert found == outputs["all at once"], name
    for request in requests:
        worst = max(reference.shortfalls(request.prompt_token_ids, outputs["all at once"][request.request_id, 0]))
        assert worst < FP32_MARGIN, request.request_id
