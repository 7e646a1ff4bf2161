"""transformers with the same weights: a timed peer, and the fp32 reference of greedy tokens."""

import time
from pathlib import Path

import torch
from transformers import AutoConfig, GenerationConfig, LlamaForCausalLM

from bench.engine.side import Run
from engine_worker.execution.step.model_runner import ModelRunner
from engine_worker.model.weights import RandomWeights


def load_transformers(directory: Path, runner: ModelRunner, dtype: torch.dtype, load_format: str) -> LlamaForCausalLM:
    """Load the model on the runner's device, with the runner's weights, in `dtype`."""
    device = torch.device(runner.device_type)
    if load_format != "dummy":
        return LlamaForCausalLM.from_pretrained(directory, dtype=dtype).to(device)
    config = AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    # The engine's random numbers, which depend on the name and the dtype of a tensor.
    weights = RandomWeights(device, getattr(torch, runner.dtype_name))
    model.to_empty(device=device).to(dtype)
    model.model.rotary_emb = type(model.model.rotary_emb)(config, device=device)
    for name, parameter in model.named_parameters():
        parameter.data = weights.get(name, tuple(parameter.shape)).to(dtype)
    return model.eval()


@torch.inference_mode()
def run_transformers(model: LlamaForCausalLM, prompts: list[list[int]], output_tokens: int) -> Run:
    """Generate with a static batch; the prefill is timed by a run with one output token."""
    to_first, _ = _generate(model, prompts, 1)
    seconds, outputs = _generate(model, prompts, output_tokens)
    return Run(min(to_first, seconds), seconds, sum(len(output) - 1 for output in outputs), outputs)


@torch.inference_mode()
def shortfalls(model: LlamaForCausalLM, prompt: list[int], output: list[int]) -> tuple[list[float], float]:
    """Return per token the best logit minus its own for the same prefix, and the deviation of these logits."""
    token_ids = torch.tensor([prompt + output[:-1]], device=model.device)
    logits = model(token_ids, logits_to_keep=len(output)).logits[0].float()
    chosen = logits.gather(1, torch.tensor(output, device=model.device)[:, None])[:, 0]
    return (logits.amax(-1) - chosen).tolist(), float(logits.std())


def _generate(model: LlamaForCausalLM, prompts: list[list[int]], output_tokens: int) -> tuple[float, list[list[int]]]:
    token_ids = torch.tensor(prompts, device=model.device)
    length = GenerationConfig(max_new_tokens=output_tokens, min_new_tokens=output_tokens, do_sample=False)
    started = time.perf_counter()
    output = model.generate(token_ids, attention_mask=torch.ones_like(token_ids), generation_config=length)
    outputs = output[:, token_ids.shape[1] :].tolist()  # also waits for the device
    return time.perf_counter() - started, outputs
