"""Tiny random Llama models and transformers as the reference for generated tokens.

    write_model(directory, ...)                write a model directory with random weights
    Reference(directory).shortfalls(p, o)      for each token of output o after prompt p: best logit - its logit, fp32

transformers is imported inside functions: its import costs 3 CPU seconds, and processes such as ranks do not need it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine_worker.engine import Engine
from engine_worker.execution.load.load import load_model_runner
from engine_worker.execution.settings import NO_DRAFTS, DraftSettings, ExecutionSettings
from engine_worker.execution.step.model_runner import ModelRunner
from engine_worker.kv.kv_allocator import KVAllocator
from engine_worker.kv.kv_cache_manager import KVCacheManager
from engine_worker.kv.layout import KVLayout, kv_cache_dtype, num_host_state_blocks_that_fit, num_state_blocks_that_fit
from engine_worker.kv.preemption import HostTierConfig, OffloadedPrefixes, PreemptionMode
from engine_worker.model.draft_head.read import read_draft_head
from engine_worker.model.implementation import blueprint_from_directory
from engine_worker.model.spec import ModelSpec, kv_layout
from engine_worker.scheduling.scheduler import Scheduler, SchedulerConfig
from engine_worker.scheduling.speculation.drafting import Drafting
from shared.messages import GenerationRequest
from tests.builders import Transcript, run_to_end
from tests.tiny_model import VOCAB_SIZE, write_tiny_model

_MAX_NUM_SEQS, _MAX_STATES = 16, 65

TINY = {
    "vocab_size": 1000,
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,  # not hidden_size / heads
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    # Ten times the default deviation spreads logits over +-10, so that a wrong token misses the argmax by over 1e-3.
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_model(directory: Path, *, max_shard_size: str = "50GB", **changes: Any) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 - see above

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**{**TINY, **changes}))
    for name, parameter in model.named_parameters():
        if "norm" in name:  # ones would hide a norm weight that is not applied
            parameter.data.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(len(name)))
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


def write_model_of_words(directory: Path, **changes: Any) -> Path:
    """Write a model with the tokenizer of tests/tiny_model.py."""
    return write_model(write_tiny_model(directory), vocab_size=VOCAB_SIZE, **changes)


def load_transformers(directory: Path, **options: Any) -> Any:
    """Load a causal model of transformers; `options` as of from_pretrained()."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - see above

    model = AutoModelForCausalLM.from_pretrained(directory, **options)
    apply_swiglu_limit(model)
    return model


def apply_swiglu_limit(model: Any) -> None:
    """Set the limit of gpt-oss's experts to that of the config: some releases of transformers always use 7.0.

    Their config has the field only if the checkpoint does.
    """
    limit = getattr(model.config, "swiglu_limit", None)
    if model.config.model_type == "gpt_oss" and limit is not None:
        for layer in model.get_decoder().layers:
            layer.mlp.experts.limit = limit


class Reference:
    def __init__(self, directory: Path, *, attention: str | None = None) -> None:
        """Load the model. `attention` names a transformers attention function (default: transformers' choice)."""
        self._model = load_transformers(directory, dtype=torch.float32, attn_implementation=attention)
        self._shortfalls: dict[tuple[tuple[int, ...], tuple[int, ...]], list[float]] = {}

    @torch.inference_mode()
    def logits(self, token_ids: list[int], num_last: int) -> torch.Tensor:
        return self._model(torch.tensor([token_ids]), logits_to_keep=num_last).logits[0]

    def shortfalls(self, prompt: list[int], output: list[int]) -> list[float]:
        key = (tuple(prompt), tuple(output))
        if key not in self._shortfalls:
            logits = self.logits(prompt + output[:-1], len(output))
            chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
            self._shortfalls[key] = (logits.amax(-1) - chosen).tolist()
        return self._shortfalls[key]


def make_runner(
    directory: Path,
    *,
    num_blocks: int,
    block_size: int = 16,
    dtype: str = "float32",
    num_host_blocks: int = 0,
    num_host_states: int = 0,
    model_impl: str = "auto",
    drafts: DraftSettings = NO_DRAFTS,
    **options: Any,
) -> ModelRunner:
    """Load a runner on the CPU.

    Args:
        directory: The model.
        num_blocks: KV blocks for the scheduler; the padding block 0 is added.
        block_size: Tokens per block.
        dtype: The model's dtype.
        num_host_blocks: Blocks of the swap space; the padding block is added.
        num_host_states: Blocks of recurrent states in the swap space, likewise; the KV blocks take the rest.
        model_impl: "auto", "native", or "transformers".
        drafts: How many tokens may be drafted, and by which head.
        options: Other fields of ExecutionSettings, such as tensor_parallel_size.
    """
    config = blueprint_from_directory(directory, model_impl).shape
    if drafts.head is not None:
        assert isinstance(config, ModelSpec), "heads need the native implementation"
        config = config.followed_by(read_draft_head(drafts.head, config).layer)
    kv_dtype = kv_cache_dtype(options.get("kv_cache_dtype", "auto"), dtype)
    layout = kv_layout(config, block_size, kv_dtype, num_drafts=drafts.num_drafts)
    longest = layout.spans(16).max_tokens(num_blocks, config.max_position_embeddings)
    settings = ExecutionSettings(
        model=directory,
        device="cpu",
        dtype=dtype,
        model_impl=model_impl,
        block_size=block_size,
        kv_cache_memory_bytes=cache_bytes(layout, num_blocks + 1) // options.get("tensor_parallel_size", 1),  # per rank
        swap_space_bytes=swap_space_bytes(layout, num_host_blocks, num_host_states),
        max_model_len=longest,
        max_num_seqs=_MAX_NUM_SEQS,  # for the sampler; the scheduler has its own limit
        max_num_batched_tokens=16,
        **options,
    )
    return load_model_runner(settings, lambda phase, progress, detail: None, drafts=drafts)


def cache_bytes(layout: KVLayout, num_blocks: int, max_num_seqs: int = _MAX_NUM_SEQS) -> int:
    """Return the bytes of a cache with so many KV blocks, beside the recurrent states that it also holds."""
    for num_states in range(_MAX_STATES + 1):
        num_bytes = num_blocks * layout.block_bytes + num_states * layout.state_bytes
        if num_state_blocks_that_fit(num_bytes, layout.state_bytes, max_num_seqs) == num_states:
            return num_bytes
    raise AssertionError("no number of states fits")


def swap_space_bytes(layout: KVLayout, num_blocks: int, num_states: int) -> int:
    """Return the bytes of a host pool with so many usable blocks, or so many states and the KV blocks beside them."""
    if not num_states or not layout.state_bytes:
        return (num_blocks + 1) * layout.block_bytes if num_blocks else 0
    num_bytes = (num_states + 1) * layout.state_bytes
    while num_host_state_blocks_that_fit(num_bytes, layout.state_bytes) <= num_states:
        num_bytes += layout.state_bytes
    return num_bytes


def generate(runner: ModelRunner, requests: list[GenerationRequest], **config: Any) -> tuple[dict[str, list[int]], int]:
    """Return the outputs by request id and the number of preemptions."""
    engine = make_engine(runner, **config)
    transcript = run_engine_to_end(engine, requests)
    return transcript.tokens, sum(engine.stats().counters.preemptions.values())


def run_engine(runner: ModelRunner, requests: list[GenerationRequest], **config: Any) -> Transcript:
    return run_engine_to_end(make_engine(runner, **config), requests)


def run_engine_to_end(engine: Engine, requests: list[GenerationRequest]) -> Transcript:
    for request in requests:
        engine.add_request(request)
    return run_to_end(engine)


def make_engine(
    runner: ModelRunner,
    *,
    enable_prefix_caching: bool = True,
    preemption_mode: PreemptionMode = PreemptionMode.SWAP,
    offloaded_prefixes: OffloadedPrefixes = OffloadedPrefixes.REUSED,
    async_scheduling: bool = False,
    drafting: Callable[[KVAllocator, SchedulerConfig], Drafting] | None = None,
    num_state_blocks: int | None = None,
    **config: int,
) -> Engine:
    """Create an engine. It can swap if the runner has a host pool. `num_state_blocks`: default: all of the runner's."""
    host_tier = HostTierConfig(
        num_blocks=runner.num_host_blocks,
        num_state_blocks=runner.num_host_state_blocks,
        preemption_mode=preemption_mode,
        offloaded_prefixes=offloaded_prefixes,
    )
    manager = KVCacheManager(
        runner.num_blocks,
        runner.block_size,
        windows=runner.windows,
        max_new_tokens=config["max_num_batched_tokens"],
        enable_prefix_caching=enable_prefix_caching,
        host_tier=host_tier if runner.num_host_blocks else None,
        num_state_blocks=runner.num_state_blocks if num_state_blocks is None else num_state_blocks,
    )
    limits = SchedulerConfig(max_model_len=runner.max_model_len, **config)
    scheduler = Scheduler(limits, manager, drafting(manager, limits) if drafting is not None else None)
    vocab_size = runner.model_spec.vocab_size
    return Engine(
        scheduler,
        runner,
        eos_token_ids=(),
        vocab_size=vocab_size,
        clock=lambda: 0.0,
        async_scheduling=async_scheduling,
    )
