"""Every family on a GPU in float32 generates the tokens of transformers on a CPU.

With and without CUDA graphs, in chunks, and in a pool so small that sequences are preempted, by recompute or by swap.
"""

from pathlib import Path

import pytest
import torch

from engine_worker.execution.load.load import load_model_runner
from engine_worker.execution.settings import CUDAGRAPH_MODES, ExecutionSettings
from engine_worker.model.implementation import blueprint_from_directory
from engine_worker.model.spec import kv_layout
from tests.builders import make_request
from tests.engine_worker.execution.reference import (
    Reference,
    cache_bytes,
    make_engine,
    run_engine_to_end,
    swap_space_bytes,
)
from tests.engine_worker.model.families import FP32_MARGIN, prompts, write_family
from tests.engine_worker.model.family_cases import NATIVE, THROUGH_TRANSFORMERS, Case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
CASES = {**NATIVE, **THROUGH_TRANSFORMERS}
# name: (blocks of 16 tokens, tokens per step, sequences in host memory, schedules a step ahead)
SCHEDULES = {
    "all at once": (64, 512, 0, False),
    "chunks": (64, 24, 0, False),
    "preempted": (14, 512, 0, False),
    "swapped": (14, 512, 8, True),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_on_the_gpu_match_transformers(name: str, tmp_path: Path) -> None:
    directory = write_family(tmp_path, CASES[name])
    layout = kv_layout(blueprint_from_directory(directory, "auto").shape, 16, "float32")
    # Sequences windowed in every layer hold few blocks and are admitted only when all fit.
    must_yield = set() if any(group.window for group in layout.groups) else {"preempted", "swapped"}
    outputs = {}
    for mode in CUDAGRAPH_MODES:
        for schedule, (num_blocks, max_num_batched_tokens, num_on_host, is_ahead) in SCHEDULES.items():
            settings = ExecutionSettings(
                model=directory,
                device="cuda",
                dtype="float32",
                kv_cache_memory_bytes=cache_bytes(layout, num_blocks * len(layout.groups), 8),
                swap_space_bytes=swap_space_bytes(
                    layout, 13 * num_on_host * len(layout.groups), num_on_host if layout.state_bytes else 0
                ),
                max_model_len=208,
                max_num_seqs=8,
                max_num_batched_tokens=max_num_batched_tokens,
                cudagraph_mode=mode,
            )
            runner = load_model_runner(settings, lambda phase, progress, detail: None)
            engine = make_engine(
                runner, max_num_seqs=8, max_num_batched_tokens=max_num_batched_tokens, async_scheduling=is_ahead
            )
            requests = [
                make_request(prompt, f"p{index}", max_tokens=40, ignore_eos=True)
                for index, prompt in enumerate(prompts(runner.model_spec.vocab_size))
            ]
            outputs[mode, schedule] = run_engine_to_end(engine, requests).tokens
            if len(layout.groups) == 1:
                counters = engine.stats().counters
                assert (sum(counters.preemptions.values()) > 0) == (schedule in must_yield)
                assert schedule != "swapped" or counters.recomputed_tokens == 0
    # transformers' SDPA attention silently omits softcaps in some versions (5.17).
    reference = Reference(directory, attention="eager")
    for way, found in outputs.items():
        for request in requests:
            worst = max(reference.shortfalls(request.prompt_token_ids, found[request.request_id]))
            assert worst < FP32_MARGIN, (way, request.request_id)


@pytest.mark.parametrize("inner_of_shared", [128, 256])
def test_graphs_change_no_token_of_a_hybrid_with_fp8_experts(tmp_path: Path, inner_of_shared: int) -> None:
    """Norms give the router plain rows, and experts fp8. In graphs, a wide shared expert runs beside the others."""
    sizes = {
        "hidden_size": 256, "head_dim": 64, "num_hidden_layers": 4, "linear_key_head_dim": 64,
        "linear_value_head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_experts": 12,
        "num_experts_per_tok": 3, "moe_intermediate_size": 128, "shared_expert_intermediate_size": inner_of_shared,
    }  # fmt: skip
    directory = write_family(tmp_path, Case("qwen3_5_moe_text", sizes))
    transcripts = []
    for mode in ("none", "full_decode_only"):
        settings = ExecutionSettings(
            model=directory, device="cuda", dtype="bfloat16", quantization="fp8", cudagraph_mode=mode, max_num_seqs=8,
            kv_cache_memory_bytes=2**26, max_model_len=208,
        )  # fmt: skip
        runner = load_model_runner(settings, lambda phase, progress, detail: None)
        # As many as a graph has rows, and all of one length, so that both ways have the same products.
        requests = [
            make_request([*range(number, number + 30)], f"p{number}", max_tokens=40, ignore_eos=True)
            for number in range(8)
        ]
        found = run_engine_to_end(make_engine(runner, max_num_seqs=8, max_num_batched_tokens=512), requests)
        transcripts.append(found.tokens)
    assert transcripts[0] == transcripts[1]
