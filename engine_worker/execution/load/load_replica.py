"""Load one rank's Replica from settings: load weights, size and allocate the KV cache, and capture graphs.

    plan = load_plan(settings, rank)                  checks everything that needs no weights
    loaded = load_replica(plan, report, ranks)

All ranks of a group run this in the same order, because measuring and capturing run collectives, and the number of
blocks is the minimum over the ranks.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine_worker.execution.load.kv_dtype_choice import chosen_kv_cache_dtype
from engine_worker.execution.load.load_drafts import (
    DraftHeadPlan,
    draft_bounds,
    draft_head_plan,
    draft_maker,
    with_draft_head,
)
from engine_worker.execution.load.quantization_choice import chosen_quantization
from engine_worker.execution.load.start_times import Report
from engine_worker.execution.load.step_memory import measure_step_bytes
from engine_worker.execution.ranks.same_model import check_same_model
from engine_worker.execution.settings import IN_GROUPS, NO_DRAFTS, DraftSettings, ExecutionSettings
from engine_worker.execution.step.cuda_graphs import GraphKey, graph_keys
from engine_worker.execution.step.draft_maker import DraftMaker, last_drafts
from engine_worker.execution.step.draft_steps import DraftSteps
from engine_worker.execution.step.host_pool import STAGING_BYTES_OF_STATES, staging_bytes
from engine_worker.execution.step.input_builder import HostInputs, StepInputs
from engine_worker.execution.step.kv_cache import (
    KVCache,
    cache_budget,
    check_cache_bytes,
    check_capacity,
    num_blocks_that_fit,
    num_host_blocks_that_fit,
)
from engine_worker.execution.step.memory import DeviceMemory, measure_memory
from engine_worker.execution.step.replica import Replica
from engine_worker.kv.layout import KVLayout, kv_cache_dtype, num_host_state_blocks_that_fit, num_state_blocks_that_fit
from engine_worker.model.attention_backend import refuse_attention
from engine_worker.model.devices import (
    check_convolutions,
    check_kv_dtype,
    check_quantization,
    check_weight_format,
    chosen_device,
)
from engine_worker.model.implementation import blueprint_from_directory
from engine_worker.model.quantization.grouped import why_no_kernels
from engine_worker.model.served_model import Blueprint, ServedModel, check_options
from engine_worker.model.spec import kv_layout
from engine_worker.model.tensor_parallel import SINGLE, TensorParallel
from engine_worker.model.weights import RandomWeights, SafetensorsWeights
from kernels.draft_inputs_reference import LastDrafts
from shared.model_files import checked_max_model_len

if TYPE_CHECKING:
    from engine_worker.execution.step.persistent_inputs import PersistentInputs

logger = logging.getLogger("worker")

GRAPHS_SHARE = 0.8  # of the warm-up's time
_LOGIT_BYTES = 4  # float32
_GRAPH_BYTES = 8 * 2**20  # launches of a graph and its part of the pool: 1.5 and 3.2 MiB (8B, H200)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """Settings and model that were checked against each other, on this rank's device."""

    settings: ExecutionSettings  # without values that depend on the device: ranks of other hosts receive them
    blueprint: Blueprint
    device: torch.device
    max_model_len: int
    drafts: DraftSettings = NO_DRAFTS
    draft_head: DraftHeadPlan | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Return the type that the model computes in."""
        return _DTYPES[self.settings.dtype]


@dataclass(frozen=True, kw_only=True)
class LoadedReplica:
    replica: Replica
    weights_bytes: int
    quantization: str  # of the linear layers: none, fp8, int4, int8 or as-stored
    drafts: DraftMaker | None  # if they are made on the device


def load_plan(settings: ExecutionSettings, rank: int = 0, drafts: DraftSettings = NO_DRAFTS) -> LoadPlan:
    """Check settings, model, and machine against each other.

    Raises:
        ValueError: If they do not fit together; the message names the setting.
    """
    device = _device(settings, rank)
    settings = _with_quantization(settings, device)
    blueprint = blueprint_from_directory(
        settings.model,
        settings.model_impl,
        settings.quantization,
        settings.enable_expert_parallel,
        settings.int4_group(device.type),
    )
    check_options(blueprint, vars(settings))
    blueprint.check_tensor_parallel_size(settings.tensor_parallel_size)
    check_quantization(settings.quantization, device.type)
    settings = settings.for_device(device.type)
    if not blueprint.is_capturable:
        settings = replace(settings, cudagraph_mode="none")
    settings = _with_dtypes(settings, blueprint, device)
    max_model_len = checked_max_model_len(settings.max_model_len, blueprint.shape.max_position_embeddings)
    refuse_attention(blueprint.shape.attentions, blueprint.shape.dtype, device.type)
    check_convolutions(blueprint.shape, kv_cache_dtype(settings.kv_cache_dtype, settings.dtype))
    return LoadPlan(
        settings=settings,
        blueprint=blueprint,
        device=device,
        max_model_len=max_model_len,
        drafts=drafts,
        draft_head=draft_head_plan(drafts, blueprint, settings),
    )


def _with_quantization(settings: ExecutionSettings, device: torch.device) -> ExecutionSettings:
    """Resolve `auto`, and log the reason."""
    choice = chosen_quantization(settings, device.type, why_no_kernels)
    if choice.reason:
        logger.log(logging.WARNING if choice.lacks_kernels else logging.INFO, "%s", choice.reason)
    return replace(settings, quantization=choice.quantization)


def _with_dtypes(settings: ExecutionSettings, blueprint: Blueprint, device: torch.device) -> ExecutionSettings:
    """Resolve `auto` of both types. Logs the reason if one is not the checkpoint's type."""
    saved = blueprint.shape.dtype
    has_4_bits = blueprint.weight_kind == "int4" or settings.quantization == "as-stored"
    if settings.dtype == "auto" and saved == "float16" and has_4_bits and device.type == "cuda":
        logger.info("--dtype auto is bfloat16, the type of the kernels for 4-bit weights; the checkpoint has float16")
        settings = replace(settings, dtype="bfloat16")
    choice = chosen_kv_cache_dtype(settings, saved)
    if choice.reason:
        logger.info("%s", choice.reason)
    return replace(settings, kv_cache_dtype=choice.kv_cache_dtype, dtype=_name(_dtype(settings, saved, device)))


def _quantization(plan: LoadPlan) -> str:
    if plan.settings.quantization in IN_GROUPS:
        return plan.settings.quantization
    return plan.blueprint.weight_kind or "none"


def prepare_process(settings: ExecutionSettings) -> None:
    """Apply process-wide options that must be set before the device is used."""
    if settings.deterministic:
        use_batch_invariant_products()
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)


def load_replica(
    plan: LoadPlan,
    report: Report,
    ranks: TensorParallel = SINGLE,
    sample: Callable[[Tensor, int], object] | None = None,
) -> LoadedReplica:
    """Load this rank's part of the model.

    Args:
        plan: The checked settings.
        report: Called with (phase, progress from 0 to 1, detail).
        ranks: The group of this rank.
        sample: Samples synthetic rows of the largest step's logits, to measure its memory. Rank 0 only.

    Raises:
        ValueError: If the model does not fit this machine.
    """
    settings, device, max_model_len = plan.settings, plan.device, plan.max_model_len
    report("load", 0.0, "weights")
    kind = "int4 at load" if settings.quantization == "int4" else plan.blueprint.weight_kind
    check_weight_format(plan.blueprint.weight_format, kind, device, plan.dtype)
    kv_dtype = _kv_dtype(plan)
    if settings.kv_cache_memory_bytes is not None:
        check_cache_bytes(settings.kv_cache_memory_bytes, measure_memory(device, 0))
    check_same_model(settings.model, settings.load_format, ranks)
    if plan.drafts.head is not None and plan.drafts.head.directory != settings.model:
        check_same_model(plan.drafts.head.directory, settings.load_format, ranks, "--speculative-config: model")
    weights = _weights(plan, report)
    model = plan.blueprint.build(weights, max_model_len, settings.deterministic, ranks)
    weights_bytes = weights.loaded_bytes
    if plan.draft_head is not None:
        of_head = partial(report, "load")
        model, head_bytes = with_draft_head(model, plan.draft_head, max_model_len, settings, of_head, ranks)
        weights_bytes += head_bytes
    loaded = f"{weights_bytes / 2**20:,.0f} MiB of {_name(model.dtype)} weights on {device}"
    loaded += f", linear layers in {plan.blueprint.weight_format}" if plan.blueprint.weight_format else ""
    loaded += f", rank {ranks.rank} of {ranks.size}" if ranks.size > 1 else ""
    report("load", 1.0, f"{loaded}, {plan.blueprint.implementation} implementation")
    report("allocate_kv", 0.0, "")
    layout = kv_layout(model.spec, settings.block_size, kv_dtype, num_drafts=plan.drafts.num_drafts)
    step_bytes = _step_bytes(plan, model, kv_dtype, sample) if device.type == "cuda" else 0
    searched_bytes = plan.drafts.searched_bytes(settings.bounds.max_num_samples, max_model_len)
    reserved_bytes = step_bytes + searched_bytes + _staging_bytes(settings, layout, device)
    memory = measure_memory(device, weights_bytes, reserved_bytes)
    kv_cache = _allocate_kv_cache(plan, layout, memory, ranks)
    report("allocate_kv", 1.0, _description(kv_cache))
    report("warmup", 0.0, "graphs" if device.type == "cuda" else "")
    replica, graphs, drafts = _replica(plan, model, kv_cache, ranks)
    for progress, detail in graphs:
        report("warmup", GRAPHS_SHARE * progress, detail)
    return LoadedReplica(replica=replica, weights_bytes=weights_bytes, quantization=_quantization(plan), drafts=drafts)


def check_alike(devices: Sequence[str]) -> None:
    """Raise ValueError if the GPUs of a group have different names, because all would wait for the slowest."""
    if len(set(devices)) > 1:
        raise ValueError(
            f"--tensor-parallel-size {len(devices)}: the GPUs of a group must be alike; found {', '.join(devices)}"
        )


def _device(settings: ExecutionSettings, rank: int) -> torch.device:
    """Return the device of a rank without starting CUDA, because prepare_process() must run before that."""
    size, has_cuda = settings.tensor_parallel_size, torch.cuda.is_available()
    device = chosen_device(settings.device, has_cuda=has_cuda)
    if device != "cuda" or size == 1:
        return torch.device(device)
    found = torch.cuda.device_count()
    if settings.rendezvous_endpoint:  # each host has the same number of GPUs, and ranks in their order
        return torch.device(device, rank % found)
    if size > found:
        raise ValueError(
            f"--tensor-parallel-size: expected at most {max(found, 1)}, got {size}; this process sees {found} GPUs. "
            "Check CUDA_VISIBLE_DEVICES, or use --device cpu"
        )
    return torch.device(device, rank)


def _replica(
    plan: LoadPlan, model: ServedModel, kv_cache: KVCache, ranks: TensorParallel
) -> tuple[Replica, Iterator[tuple[float, str]], DraftMaker | None]:
    """Return the replica, an iterator that captures its graphs, and what makes drafts."""
    settings, bounds, max_model_len = plan.settings, plan.settings.bounds, plan.max_model_len
    graphs = _graph_keys(settings) if plan.device.type == "cuda" else []
    max_rows = max([bounds.max_num_samples, *(key.size for key in graphs)])
    limits = max_rows, bounds.max_num_batched_tokens, max_model_len
    making = draft_bounds(plan.drafts, kv_cache, limits)
    last = last_drafts(making, plan.device) if plan.drafts.are_made_on_device else None
    inputs, persistent = _inputs(plan, kv_cache, max_rows, last)
    replica = Replica(model, kv_cache, inputs, max_model_len)
    drafts = draft_maker(plan.drafts, model, replica.device, making, last, ranks) if last is not None else None
    if not graphs or persistent is None:
        return replica, iter(()), drafts
    captures = replica.capture_graphs(persistent, graphs, has_logits=ranks.rank == 0)
    if isinstance(drafts, DraftSteps):  # a search has three kernels, which are launched as fast as a graph
        captures = chain(captures, drafts.capture_graphs(persistent, graphs))
    return replica, captures, drafts


def _inputs(
    plan: LoadPlan, kv_cache: KVCache, max_rows: int, last: LastDrafts | None
) -> "tuple[StepInputs, PersistentInputs | None]":
    """Return the inputs of steps, again if graphs can read them. `last`: what drafts leave for the next step."""
    settings, device = plan.settings, plan.device
    if device.type != "cuda":
        return HostInputs(settings.block_size, last, 1 + plan.drafts.num_drafts), None
    from engine_worker.execution.step import persistent_inputs  # noqa: PLC0415 - imports triton

    bounds = persistent_inputs.InputBounds(
        max_rows=max_rows,
        max_tokens=settings.bounds.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        block_size=settings.block_size,
        num_groups=len(kv_cache.layout.groups),
        max_joined=1 + plan.drafts.num_drafts,
    )
    has_states = kv_cache.num_state_blocks > 0
    persistent = persistent_inputs.PersistentInputs(bounds, device, has_states=has_states, last_drafts=last)
    return persistent, persistent


def _graph_keys(settings: ExecutionSettings) -> list[GraphKey]:
    return graph_keys(settings.graph_mode, settings.bounds)


def _step_bytes(
    plan: LoadPlan, model: ServedModel, kv_dtype: str, sample: Callable[[Tensor, int], object] | None
) -> int:
    peak = measure_step_bytes(model, kv_dtype, sample, plan.device, plan.settings.bounds, plan.max_model_len)
    keys = _graph_keys(plan.settings)
    num_logits = max((key.num_logits for key in keys), default=0)
    return peak + len(keys) * _GRAPH_BYTES + num_logits * model.spec.vocab_size * _LOGIT_BYTES


def _dtype(settings: ExecutionSettings, saved: str, device: torch.device) -> torch.dtype:
    if settings.dtype != "auto":
        return _DTYPES[settings.dtype]
    if settings.quantization in IN_GROUPS and device.type == "cpu":
        # Their linear layers use integers: bfloat16 activations are no faster, and lead to ties between tokens.
        return torch.float32
    if saved not in _DTYPES:
        raise ValueError(f"config.json: dtype: expected one of {', '.join(_DTYPES)}; got {saved!r}")
    if device.type == "cpu" and saved != "float32":
        # oneDNN has bf16 kernels only with AVX-512; emulated ones are slower than float32.
        return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
    return _DTYPES[saved]


def _kv_dtype(plan: LoadPlan) -> str:
    """Return the type of the KV cache. Starts CUDA, so call it after prepare_process().

    Raises:
        ValueError: If the device has no kernels for the type.
    """
    computed = _name(plan.dtype)
    kv_dtype = kv_cache_dtype(plan.settings.kv_cache_dtype, computed)
    on_cuda = plan.device.type == "cuda"
    check_kv_dtype(kv_dtype, computed, torch.cuda.get_device_capability(plan.device) if on_cuda else None)
    return kv_dtype


def _weights(plan: LoadPlan, report: Report) -> SafetensorsWeights | RandomWeights:
    if plan.settings.load_format == "dummy":
        return RandomWeights(plan.device, plan.dtype)
    return SafetensorsWeights(plan.settings.model, plan.device, plan.dtype, partial(report, "load"))


def _staging_bytes(settings: ExecutionSettings, layout: KVLayout, device: torch.device) -> int:
    if device.type != "cuda" or not settings.swap_space_bytes:
        return 0
    num_bytes = settings.swap_space_bytes // settings.tensor_parallel_size
    of_states = num_host_state_blocks_that_fit(num_bytes, layout.state_bytes)
    return staging_bytes(num_bytes // layout.block_bytes, layout.block_bytes) + (
        staging_bytes(of_states, layout.state_bytes, STAGING_BYTES_OF_STATES) if of_states else 0
    )


def _allocate_kv_cache(plan: LoadPlan, layout: KVLayout, memory: DeviceMemory, ranks: TensorParallel) -> KVCache:
    """Allocate the same number of blocks on every rank: the minimum that fits."""
    settings, max_model_len = plan.settings, plan.max_model_len
    if memory.device.type == "cpu":  # the ranks share the host's memory
        memory = replace(memory, free_bytes=memory.free_bytes // ranks.size)
    budget = cache_budget(memory, settings.kv_cache_memory_bytes, settings.kv_cache_memory_ratio)
    fitting = num_state_blocks_that_fit(budget, layout.state_bytes, settings.bounds.max_num_seqs)
    num_states = ranks.minimum(fitting)
    # Every running slot at full length; also with a window, because freed blocks remain as cached prefixes.
    most = settings.bounds.max_num_seqs * layout.blocks_of(max_model_len) + 1
    num_blocks = num_blocks_that_fit(
        budget - num_states * layout.state_bytes,
        layout.block_bytes,
        most if settings.kv_cache_memory_bytes is None else None,
    )
    num_blocks = ranks.minimum(num_blocks)
    check_capacity(num_blocks, layout, max_model_len, settings.bounds.max_num_batched_tokens, memory)
    host_bytes = (settings.swap_space_bytes or 0) // ranks.size
    num_host_states = ranks.minimum(num_host_state_blocks_that_fit(host_bytes, layout.state_bytes))
    num_host_blocks = num_host_blocks_that_fit(host_bytes, layout.block_bytes, num_host_states * layout.state_bytes)
    return KVCache(layout, num_blocks, memory.device, ranks.minimum(num_host_blocks), num_states, num_host_states)


def _description(kv_cache: KVCache) -> str:
    num_groups = len(kv_cache.layout.groups)
    num_tokens = (kv_cache.num_blocks - 1) // num_groups * kv_cache.block_size
    mib = kv_cache.pool.nbytes / 2**20
    blocks = f"{kv_cache.num_blocks - 1:,} blocks of {kv_cache.block_size} tokens"
    groups = f" in {num_groups} groups of layers, without windows" if num_groups > 1 else ""
    text = f"{mib:,.0f} MiB of {_name(kv_cache.pool.dtype)}: {blocks} = {num_tokens:,} tokens{groups}"
    if kv_cache.num_state_blocks:
        text += f", {kv_cache.num_state_blocks - 1:,} recurrent states"
    if kv_cache.num_host_blocks:
        text += f", {kv_cache.num_host_blocks - 1:,} blocks more on the host"
    if kv_cache.num_host_state_blocks:
        text += f" and {kv_cache.num_host_state_blocks - 1:,} states"
    return text


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def use_batch_invariant_products() -> None:
    """Make each row of a matrix product independent of the number of rows, for the whole process.

    cuBLAS chooses a kernel by the number of rows. On Hopper all its kernels agree bit by bit, except those that split
    the inputs and add partial sums, and some for few rows. Without a workspace it cannot choose the former (ADR 0026);
    dense_cuda.py pads few rows. skinny_linear never splits.

    Raises:
        RuntimeError: If CUDA has started in this process, because cuBLAS reads its variables then.
    """
    chosen = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
    if torch.cuda.is_initialized() and not chosen.items() <= os.environ.items():  # already set for a second model
        raise RuntimeError("--deterministic: must be set before CUDA starts in this process")
    os.environ.update(chosen)
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
