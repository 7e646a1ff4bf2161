"""From settings to a ModelRunner that is ready to serve: load weights, size and allocate the KV cache, warm up.

Each phase reports its progress; a pool that cannot hold max_model_len tokens is refused with the measured numbers.

It is used once, at a worker's start. It knows all parts of this folder, and no request.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from engine_worker.execution.cuda_graphs import GraphKey, graph_keys
from engine_worker.execution.host_pool import staging_bytes
from engine_worker.execution.input_builder import HostInputs
from engine_worker.execution.kv_cache import (
    KVCache,
    check_capacity,
    num_blocks_that_fit,
    num_host_blocks_that_fit,
)
from engine_worker.execution.memory import DeviceMemory, measure_memory
from engine_worker.execution.model_runner import ModelRunner
from engine_worker.execution.replica import Replica
from engine_worker.execution.sampler import Sampler
from engine_worker.execution.settings import ExecutionSettings
from engine_worker.execution.speeds import measure_speeds
from engine_worker.execution.step_memory import measure_step_bytes
from engine_worker.execution.warmup import warm_up
from engine_worker.kv.layout import KVLayout
from engine_worker.model.devices import check_shape, chosen_device
from engine_worker.model.implementation import blueprint_from_directory
from engine_worker.model.served_model import ServedModel, check_options
from engine_worker.model.spec import ModelShape, kv_layout
from engine_worker.model.weights import RandomWeights, SafetensorsWeights

if TYPE_CHECKING:
    from engine_worker.execution.grammar_masks import GrammarMasks

Report = Callable[[str, float, str], None]  # phase ("load" | "allocate_kv" | "warmup"), progress 0..1, detail

_GRAPHS_SHARE = 0.8  # of the time of the warm-up
_GRAPH_BYTES = 16 * 2**20  # of a graph's launches and its share of their common pool; 8B-shaped model, H200

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model_runner(settings: ExecutionSettings, report: Report) -> ModelRunner:
    """Raises ValueError with what of settings, model and machine does not fit together."""
    blueprint = blueprint_from_directory(settings.model, settings.model_impl)
    check_options(blueprint, vars(settings))
    device = torch.device(chosen_device(settings.device, has_cuda=torch.cuda.is_available()))
    settings = settings.for_device(device.type)
    if not blueprint.is_capturable:
        settings = replace(settings, cudagraph_mode="none")
    config = blueprint.shape
    max_model_len = _max_model_len(settings, config)
    check_shape(config, device.type)
    if settings.deterministic:
        use_batch_invariant_products()
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    weights = _weights(settings, config, device, report)
    model = blueprint.build(weights, max_model_len, settings.deterministic)
    loaded = f"{weights.loaded_bytes / 2**20:,.0f} MiB of {_name(model.dtype)} weights on {device}"
    report("load", 1.0, f"{loaded}, {blueprint.implementation} implementation")
    grammars = _grammar_masks(settings, config, device)
    sampler = Sampler(config.vocab_size, config.eos_token_ids, device, grammars)
    layout = kv_layout(model.spec, settings.block_size, _name(model.dtype))
    step_bytes = _step_bytes(settings, model, sampler, max_model_len) if device.type == "cuda" else 0
    memory = measure_memory(device, weights.loaded_bytes, step_bytes + _staging_bytes(settings, layout, device))
    kv_cache = _allocate_kv_cache(settings, layout, memory, max_model_len)
    report("allocate_kv", 1.0, _description(kv_cache))
    runner, graphs = _runner(settings, model, kv_cache, sampler, max_model_len, weights.loaded_bytes)
    for progress, detail in graphs:
        report("warmup", _GRAPHS_SHARE * progress, detail)
    for progress, detail in warm_up(runner, settings.bounds):
        report("warmup", 1.0 - (1.0 - _GRAPHS_SHARE) * (1.0 - progress), detail)
    runner.compile_grammar = grammars.compile if grammars is not None else None
    if kv_cache.host is not None:
        runner.speeds = measure_speeds(runner, kv_cache)
    return runner


def _grammar_masks(settings: ExecutionSettings, config: ModelShape, device: torch.device) -> "GrammarMasks | None":
    """None where llguidance is not installed: such a worker refuses grammars and serves everything else."""
    if find_spec("llguidance") is None:
        return None
    from engine_worker.execution.grammar_compiler import GrammarCompiler  # noqa: PLC0415 - see above
    from engine_worker.execution.grammar_masks import GrammarMasks  # noqa: PLC0415

    compiler = GrammarCompiler(settings.model, config.vocab_size, config.eos_token_ids)
    return GrammarMasks(compiler, config.vocab_size, device)


def _runner(
    settings: ExecutionSettings,
    model: ServedModel,
    kv_cache: KVCache,
    sampler: Sampler,
    max_model_len: int,
    weights_bytes: int,
) -> tuple[ModelRunner, Iterator[tuple[float, str]]]:
    """The runner, and the capture of its graphs, still to be done."""
    device = kv_cache.pool.device
    if device.type != "cuda":
        inputs = HostInputs(settings.block_size)
        return ModelRunner(Replica(model, kv_cache, inputs, max_model_len), sampler, weights_bytes), iter(())
    from engine_worker.execution.persistent_inputs import PersistentInputs  # noqa: PLC0415 - imports triton

    graphs, bounds = _graph_keys(settings), settings.bounds
    max_rows = max([bounds.max_num_seqs, *(key.size for key in graphs)])
    persistent = PersistentInputs(max_rows, bounds.max_num_batched_tokens, max_model_len, settings.block_size, device)
    replica = Replica(model, kv_cache, persistent, max_model_len)
    captures = replica.capture_graphs(persistent, graphs) if graphs else iter(())
    return ModelRunner(replica, sampler, weights_bytes), captures


def _graph_keys(settings: ExecutionSettings) -> list[GraphKey]:
    return graph_keys(settings.graph_mode, settings.bounds)


def _step_bytes(settings: ExecutionSettings, model: ServedModel, sampler: Sampler, max_model_len: int) -> int:
    peak = measure_step_bytes(model, sampler, sampler.device, settings.bounds, max_model_len)
    return peak + len(_graph_keys(settings)) * _GRAPH_BYTES


def _max_model_len(settings: ExecutionSettings, config: ModelShape) -> int:
    longest = config.max_position_embeddings
    if settings.max_model_len is None:
        return longest
    if settings.max_model_len > longest:
        raise ValueError(f"--max-model-len {settings.max_model_len} is over the model's {longest} positions")
    return settings.max_model_len


def _dtype(name: str, saved: str, device: torch.device) -> torch.dtype:
    if name != "auto":
        return _DTYPES[name]
    if saved not in _DTYPES:
        raise ValueError(f"config.json: dtype {saved!r} is not supported; {', '.join(_DTYPES)} are")
    if device.type == "cpu" and saved != "float32":
        # Without AVX512 oneDNN has no bf16 kernels, and emulated ones are slower than float32.
        return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
    return _DTYPES[saved]


def _weights(
    settings: ExecutionSettings, config: ModelShape, device: torch.device, report: Report
) -> SafetensorsWeights | RandomWeights:
    dtype = _dtype(settings.dtype, config.dtype, device)
    if settings.load_format == "dummy":
        return RandomWeights(device, dtype)
    return SafetensorsWeights(settings.model, device, dtype, partial(report, "load"))


def _staging_bytes(settings: ExecutionSettings, layout: KVLayout, device: torch.device) -> int:
    if device.type != "cuda" or not settings.swap_space_bytes:
        return 0
    return staging_bytes(settings.swap_space_bytes // layout.block_bytes, layout.block_bytes)


def _allocate_kv_cache(
    settings: ExecutionSettings, layout: KVLayout, memory: DeviceMemory, max_model_len: int
) -> KVCache:
    num_blocks = num_blocks_that_fit(
        memory,
        layout.block_bytes,
        settings.kv_cache_memory_bytes,
        settings.kv_cache_memory_ratio,
        max_blocks=settings.bounds.max_num_seqs * layout.blocks_of(max_model_len) + 1,
    )
    check_capacity(num_blocks, layout, max_model_len, memory)
    num_host_blocks = num_host_blocks_that_fit(settings.swap_space_bytes or 0, layout.block_bytes)
    return KVCache(layout, num_blocks, memory.device, num_host_blocks)


def _description(kv_cache: KVCache) -> str:
    slots = (kv_cache.num_blocks - 1) * kv_cache.block_size
    mib = kv_cache.pool.nbytes / 2**20
    text = f"{mib:,.0f} MiB: {kv_cache.num_blocks - 1:,} blocks of {kv_cache.block_size} tokens = {slots:,} tokens"
    return f"{text}, {kv_cache.num_host_blocks - 1:,} blocks more on the host" if kv_cache.num_host_blocks else text


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def use_batch_invariant_products() -> None:
    """Make rows of a matrix product independent of how many rows there are, for the whole process.

    cuBLAS chooses a kernel by the number of rows. On Hopper its kernels agree bit by bit, but for those that split the
    inputs and add the parts: with almost no workspace there is nowhere to put parts (ADR 0027). It reads the variables
    when CUDA starts, so RuntimeError is raised after that. skinny_linear never splits.
    """
    if torch.cuda.is_initialized():
        raise RuntimeError("batch-invariant products must be chosen before CUDA starts in this process")
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    os.environ["CUBLASLT_WORKSPACE_SIZE"] = "1"
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
