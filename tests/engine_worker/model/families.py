"""Tiny random models of any model type, and the schedules under which each must match transformers."""

from pathlib import Path
from typing import Any

import torch

from engine_worker.kv.preemption import PreemptionMode
from engine_worker.model.implementation import blueprint_from_directory
from engine_worker.model.spec import kv_layout
from tests.builders import make_request
from tests.engine_worker.execution.reference import TINY, Reference, make_engine, make_runner, run_engine_to_end
from tests.engine_worker.model.family_cases import Case

FP32_MARGIN = 1e-3  # two summation orders differ by about 1e-5 here


def write_family(directory: Path, case: Case) -> Path:
    """Write a random model with random norms and biases, so that a missing one changes the result."""
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 - as in reference.py

    options = {key: value for key, value in {**TINY, **case.changes}.items() if value is not None or key != "head_dim"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(case.model_type, pad_token_id=0, **options)
        model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "norm" in name.lower() or ".ln_" in name:
            parameter.data.uniform_(0.5, 1.5, generator=generator)
        elif name.endswith(".sinks"):
            parameter.data.normal_(0.0, 2.0, generator=generator)
        elif name.endswith((".bias", "_bias")):
            parameter.data.normal_(0.0, 0.3, generator=generator)
        elif name.endswith((".gate.weight", "router.weight")):
            spread_experts(parameter.data)
    for name, buffer in model.named_buffers():
        if name.endswith(("correction_bias", "expert_bias")):
            buffer.uniform_(-0.2, 0.2, generator=generator)
    model.save_pretrained(directory)
    return directory


def spread_experts(router: torch.Tensor) -> None:
    """Scale the rows of a router [E, H] from 3 to 0, so that the load of experts is uneven."""
    router.mul_(torch.linspace(3.0, 0.0, len(router))[:, None])


def prompts(vocab_size: int) -> list[list[int]]:
    """Return prompts around block and chunk edges, and beyond the context of yarn and longrope; two share one."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(3, vocab_size, (300,), generator=generator).tolist()
    return [tokens[:1], tokens[:16], tokens[:33], [*tokens[:33], 7], tokens[40:170]]


SCHEDULES: dict[str, dict[str, Any]] = {
    "all at once": {"num_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 512},
    "chunks": {"num_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 24},
    "recompute": {"num_blocks": 13, "max_num_seqs": 8, "max_num_batched_tokens": 512},
    "swap": {"num_blocks": 13, "max_num_seqs": 8, "max_num_batched_tokens": 512, "num_host_blocks": 32},
}


def check_schedules(
    directory: Path, model_impl: str = "auto", *, must_preempt: bool = True
) -> dict[tuple[str, int], list[int]]:
    """Check that greedy float32 tokens match transformers in every schedule; return them by request and choice.

    `must_preempt`: Check that "recompute" and "swap" preempt, and the others do not. With several groups, 40 tokens fit
    into the blocks that an admission leaves free.
    """
    reference = Reference(directory)
    layout = kv_layout(blueprint_from_directory(directory, model_impl).shape, 8, "float32")
    is_windowed = any(group.window for group in layout.groups)
    outputs: dict[str, dict[tuple[str, int], list[int]]] = {}
    for name, options in SCHEDULES.items():
        schedule = dict(options)
        num_blocks = schedule.pop("num_blocks") * len(layout.groups)
        num_host_blocks = schedule.pop("num_host_blocks", 0) * len(layout.groups)
        if is_windowed and name in {"recompute", "swap"}:
            # Windowed sequences hold fewer blocks, but must be preempted here too.
            schedule["max_num_batched_tokens"] = 8
            num_blocks = 2 * layout.max_blocks(200, 8)
        runner = make_runner(
            directory,
            num_blocks=num_blocks,
            block_size=8 if is_windowed else 16,
            num_host_blocks=num_host_blocks,
            model_impl=model_impl,
            num_threads=1,  # a second thread costs more than it saves at 96 columns
        )
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
        if must_preempt and len(layout.groups) == 1:
            assert (sum(counters.preemptions.values()) > 0) == (name in {"recompute", "swap"})
    for name, found in outputs.items():
        assert found == outputs["all at once"], name
    for request in requests:
        worst = max(reference.shortfalls(request.prompt_token_ids, outputs["all at once"][request.request_id, 0]))
        assert worst < FP32_MARGIN, request.request_id
    return outputs["all at once"]
