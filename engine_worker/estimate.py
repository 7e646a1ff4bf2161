"""Estimate a model's device memory and how many sequences fit, from config.json and weight headers.

No torch and no device are needed. The result has the parameters, the bytes of weights, KV per token and block, and the
number of sequences of several lengths. A worker measures instead: it sizes the KV cache by the memory that is free
after the weights are loaded.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from engine_worker.execution.load.kv_dtype_choice import chosen_kv_cache_dtype
from engine_worker.execution.load.quantization_choice import chosen_quantization
from engine_worker.execution.settings import (
    CUDA_MEMORY_RATIO,
    IN_GROUPS,
    MAX_NUM_SEQS,
    MIN_SAMPLES,
    MODEL_IMPLS,
    NO_DRAFTS,
    QUANTIZATIONS,
    DraftSettings,
    ExecutionSettings,
)
from engine_worker.kv.layout import ITEMSIZES, KV_CACHE_DTYPES, KVLayout, kv_cache_dtype, num_state_blocks_that_fit
from engine_worker.kv.span import KVSpan
from engine_worker.model.draft_head.read import read_draft_head
from engine_worker.model.implementation import blueprint_from_directory
from engine_worker.model.preflight import check_files
from engine_worker.model.spec import ModelShape, ModelSpec, kv_layout
from engine_worker.model.weight_format import INT4_GROUPS
from engine_worker.scheduling.speculation.setting import parse_speculative_config
from engine_worker.settings import draft_settings
from shared.settings import SettingsError, parse_bytes, parse_count

if TYPE_CHECKING:
    from engine_worker.model.served_model import Blueprint

_UNLIMITED_TOKENS = 2**40
SHORTER_TOKENS = (1024, 4096, 16384)
WEIGHT_DTYPES = ("bfloat16", "float16", "float32")


class DoesNotFit(ValueError):
    """The weights alone, or the weights and one sequence, exceed the memory."""


@dataclass(frozen=True, kw_only=True)
class DevicePart:
    """What a device holds."""

    shape: ModelShape  # of its keys, values and states
    weights_bytes: int
    weight_format: str = ""  # of quantized linear layers
    num_devices: int = 1  # that share the model
    draft_head_bytes: int = 0
    num_drafts: int = 0  # the most of a sequence and step


@dataclass(frozen=True, kw_only=True)
class GroupEstimate:
    """Layers that keep the same tokens of a sequence."""

    layers: int
    window: int  # tokens visible to a token; 0: all before it
    bytes_per_token: int
    max_sequence_bytes: int | None  # that a decoding sequence keeps; None: they grow with its length


@dataclass(frozen=True, kw_only=True)
class Estimate:
    parameters: int
    dtype: str
    kv_cache_dtype: str
    weights_bytes: int
    kv_bytes_per_token: int
    kv_block_bytes: int
    kv_cache_bytes: int
    kv_blocks: int
    max_model_len: int
    sequences_at_tokens: dict[int, int]  # length in tokens -> number of concurrent sequences
    weight_format: str = ""  # of quantized linear layers
    window: int = 0  # widest window if every layer has one; a sequence keeps no more
    kv_groups: tuple[GroupEstimate, ...] = ()
    tensor_parallel_size: int = 1  # with several devices, all bytes are per device
    state_bytes: int = 0  # of the recurrent layers of one sequence
    num_states: int = 0  # live ones and checkpoints
    token_counts_bytes: int = 0  # for penalties: 2 bytes per vocabulary token and running slot
    searched_bytes: int = 0  # tokens of sequences, which drafts are found in
    draft_head_bytes: int = 0

    @property
    def kv_cache_tokens(self) -> int:
        return self.kv_blocks * self.kv_block_bytes // self.kv_bytes_per_token


def estimate(
    config: ModelShape,
    *,
    memory_bytes: int,
    block_size: int,
    max_model_len: int,
    dtype: str,
    kv_dtype: str = "auto",
    part: DevicePart | None = None,
) -> Estimate:
    """Estimate the memory of a model on one device.

    `memory_bytes` is the memory of one device for weights and KV; `block_size` and `max_model_len` are in tokens.
    Without `part`, a device holds all of `config` in `dtype`. Recurrent states are counted for the default number of
    running slots.

    Raises:
        DoesNotFit: If one sequence of `max_model_len` tokens does not fit.
    """
    part = part or DevicePart(shape=config, weights_bytes=config.num_parameters() * ITEMSIZES[dtype])
    weights_bytes = part.weights_bytes + part.draft_head_bytes
    layout = kv_layout(part.shape, block_size, kv_cache_dtype(kv_dtype, dtype), num_drafts=part.num_drafts)
    cache_bytes = memory_bytes - weights_bytes
    num_states = num_state_blocks_that_fit(max(0, cache_bytes), layout.state_bytes, MAX_NUM_SEQS["cuda"])
    kv_bytes = cache_bytes - num_states * layout.state_bytes
    blocks = max(0, kv_bytes // layout.block_bytes - 1)  # one block is padding
    # For decoding, one token per step; during prefill a sequence holds a step's tokens more than its window.
    needed = {tokens: layout.max_blocks(tokens, 1) for tokens in sorted({*SHORTER_TOKENS, max_model_len})}
    most = num_states - 1 if num_states else blocks  # one state is zeros
    fitting = {tokens: min(blocks // num_blocks, most) for tokens, num_blocks in needed.items()}
    if not fitting[max_model_len]:
        needed_bytes = needed[max_model_len] * layout.block_bytes
        raise _does_not_fit(
            weights_bytes, kv_bytes, max_model_len, needed_bytes, layout.spans(1).max_tokens(blocks, max_model_len)
        )
    return Estimate(
        parameters=config.num_parameters(),
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype(kv_dtype, dtype),
        weights_bytes=part.weights_bytes,
        kv_bytes_per_token=layout.token_bytes,
        kv_block_bytes=layout.block_bytes,
        kv_cache_bytes=kv_bytes,
        kv_blocks=blocks,
        max_model_len=max_model_len,
        sequences_at_tokens={tokens: count for tokens, count in fitting.items() if tokens <= max_model_len},
        tensor_parallel_size=part.num_devices,
        state_bytes=layout.state_bytes,
        num_states=max(0, num_states - 1),
        weight_format=part.weight_format,
        window=_widest_window(layout),
        kv_groups=_groups(layout, part.shape.cache_owners),
        draft_head_bytes=part.draft_head_bytes,
    )


def _widest_window(layout: KVLayout) -> int:
    """Return the widest window if every layer has one, else 0."""
    windows = [group.window for group in layout.groups]
    return min(windows, default=0) and max(windows)


def _groups(layout: KVLayout, owners: Sequence[int]) -> tuple[GroupEstimate, ...]:
    """Return the groups of layers; those with equal windows are added up. `owners`: see ModelShape.cache_owners."""
    counts = Counter(group.window for group in layout.groups)
    token_bytes, found = layout.groups[0].block_bytes(1), []
    for window, count in counts.items():
        layers = {owners[layer] for group in layout.groups if group.window == window for layer in group.layers}
        span = KVSpan(layout.block_size, window)
        kept = span.max_blocks(_UNLIMITED_TOKENS) * layout.block_bytes * count if window else None
        found.append(
            GroupEstimate(
                layers=len(layers),
                window=window,
                bytes_per_token=token_bytes * count,
                max_sequence_bytes=kept,
            )
        )
    return tuple(found)


def _does_not_fit(
    weights_bytes: int, kv_bytes: int, max_model_len: int, needed_bytes: int, fitting_tokens: int
) -> DoesNotFit:
    return DoesNotFit(
        f"The weights take {weights_bytes / 2**30:.1f} GiB and leave {max(0, kv_bytes) / 2**30:.1f} GiB for KV; "
        f"one sequence of {max_model_len} tokens needs {needed_bytes / 2**30:.1f} GiB. "
        + (f"Set --max-model-len {fitting_tokens} or less." if fitting_tokens else "Use more or larger devices.")
    )


def main(argv: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    try:
        load_format = "auto" if any(options.model.glob("*.safetensors*")) else "dummy"
        notes = _decide_quantization(options, load_format)
        check_files(
            options.model,
            options.model_impl,
            load_format,
            options.tensor_parallel_size,
            options.quantization,
            options.enable_expert_parallel,
        )
        blueprint = blueprint_from_directory(
            options.model,
            options.model_impl,
            options.quantization,
            options.enable_expert_parallel,
            ExecutionSettings(model=options.model, int4_group_size=options.int4_group_size).int4_group(options.device),
        )
        notes += _decide_types(options, blueprint)
        found = _estimate(options, blueprint, options.tensor_parallel_size)
    except (SettingsError, ValueError) as error:  # DoesNotFit, an invalid quantity, or an unsupported model
        sys.stderr.write(f"pagestream estimate: {error}\n")
        return 1
    sys.stdout.write(json.dumps(asdict(found), indent=2) + "\n" if options.json else _text(found) + notes)
    if options.tensor_parallel_size > 1 and not options.json:
        sys.stdout.write(_advice(options, blueprint, found))
    return 0


def _decide_types(options: argparse.Namespace, blueprint: "Blueprint") -> str:
    """Resolve `auto` dtypes in place and return a note for the user."""
    settings = ExecutionSettings(
        model=options.model, dtype=options.dtype or "auto", quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype, device=_multiplied_on(options),
    )  # fmt: skip
    choice = chosen_kv_cache_dtype(settings, blueprint.shape.dtype)
    options.kv_cache_dtype = choice.kv_cache_dtype
    if options.quantization in IN_GROUPS and _multiplied_on(options) == "cpu":
        options.dtype = options.dtype or "float32"
    return f"{choice.reason}\n" if choice.reason else ""


def _multiplied_on(options: argparse.Namespace) -> str:
    """Return the device type; int8, which only a CPU multiplies, does not need `--device cpu`."""
    return "cpu" if options.quantization == "int8" else str(options.device)


def _decide_quantization(options: argparse.Namespace, load_format: str) -> str:
    """Resolve `--quantization auto` in place and return a note for the user."""
    settings = ExecutionSettings(
        model=options.model, model_impl=options.model_impl, load_format=load_format, dtype=options.dtype or "auto",
        quantization=options.quantization, tensor_parallel_size=options.tensor_parallel_size,
    )  # fmt: skip
    device = _multiplied_on(options)
    choice = chosen_quantization(settings, device, why_no_kernels=lambda: "")
    options.quantization = choice.quantization
    if device == "cpu":
        return f"{choice.reason}\n" if choice.reason else ""
    on_cpu = chosen_quantization(settings, "cpu", why_no_kernels=lambda: "").quantization
    hint = "Use --device cpu for a CPU, which multiplies 4- and 8-bit weights directly."
    return "".join(f"{line}\n" for line in (choice.reason, hint if on_cpu == "as-stored" else "") if line)


def _estimate(options: argparse.Namespace, blueprint: "Blueprint", size: int) -> Estimate:
    config = blueprint.shape
    length = parse_count(options.max_model_len) if options.max_model_len else config.max_position_embeddings
    max_num_seqs = parse_count(options.max_num_seqs) if options.max_num_seqs else MAX_NUM_SEQS[options.device]
    num_samples = max(max_num_seqs, MIN_SAMPLES)
    token_counts_bytes = 2 * num_samples * config.vocab_size
    drafts = _draft_settings(options)
    searched_bytes = drafts.searched_bytes(num_samples, length)
    memory_bytes = int(parse_bytes(options.gpu_memory) * options.gpu_memory_utilization)
    dtype = options.dtype or config.dtype
    found = estimate(
        config,
        memory_bytes=memory_bytes - token_counts_bytes - searched_bytes,
        block_size=options.block_size,
        max_model_len=length,
        dtype=dtype,
        kv_dtype=options.kv_cache_dtype,
        part=_part(drafts, blueprint, size, ITEMSIZES[dtype]),
    )
    return replace(found, token_counts_bytes=token_counts_bytes, searched_bytes=searched_bytes)


def _draft_settings(options: argparse.Namespace) -> DraftSettings:
    if not options.speculative_config:
        return NO_DRAFTS
    config = parse_speculative_config(options.speculative_config)
    config.check_place(options.device)
    return draft_settings(config, options.model)


def _part(drafts: DraftSettings, blueprint: "Blueprint", size: int, itemsize: int) -> DevicePart:
    """Return what one of `size` devices holds; `itemsize` is that of unquantized weights."""
    part = DevicePart(
        shape=blueprint.share(size),
        weights_bytes=blueprint.weights_bytes(size, itemsize),
        weight_format=blueprint.weight_format,
        num_devices=size,
        num_drafts=drafts.num_drafts,
    )
    if drafts.head is None:
        return part
    spec = read_draft_head(drafts.head, blueprint.shape, load_format="dummy")
    assert isinstance(part.shape, ModelSpec), "checked with the head"
    if size > 1:
        spec = replace(spec, layer=spec.layer.share(0, size))
    # In the dtype of unquantized weights: quantized layers for multi-token prediction take less.
    head_bytes = spec.num_parameters(part.shape.hidden_size) * itemsize
    return replace(part, shape=part.shape.followed_by(spec.layer), draft_head_bytes=head_bytes)


def _text(found: Estimate) -> str:
    linear = f", linear layers in {found.weight_format}" if found.weight_format else ""
    weights, kv_cache = (num_bytes / 2**30 for num_bytes in (found.weights_bytes, found.kv_cache_bytes))
    counts = found.token_counts_bytes / 2**30
    token, block = found.kv_bytes_per_token / 1024, found.kv_block_bytes / 1024
    lines = [
        f"weights     {weights:8.2f} GiB   {found.parameters / 1e9:.2f} G parameters in {found.dtype}{linear}",
        f"counts      {counts:8.2f} GiB   token counts for penalties",
        f"KV cache    {kv_cache:8.2f} GiB   {found.kv_cache_tokens:,} tokens in {found.kv_blocks:,} blocks",
        f"KV          {token:8.1f} KiB per token, {block:.0f} KiB per block, in {found.kv_cache_dtype}",
    ]
    if found.num_states:
        size, total = found.state_bytes / 2**20, found.state_bytes * (found.num_states + 1) / 2**30
        lines.append(f"states      {total:8.2f} GiB   {found.num_states:,} of {size:.1f} MiB, one per running sequence")
    if found.draft_head_bytes:
        lines.insert(1, f"draft head  {found.draft_head_bytes / 2**30:8.2f} GiB   for --speculative-config")
    if found.searched_bytes:
        lines.insert(2, f"tokens      {found.searched_bytes / 2**30:8.2f} GiB   searched for drafts")
    lines += [_group_line(group) for group in found.kv_groups if any(each.window for each in found.kv_groups)]
    if found.tensor_parallel_size > 1:
        lines.insert(0, f"per device, with {found.tensor_parallel_size} devices sharing the model:")
    lines += [f"sequences   {count:8,} of {tokens:,} tokens" for tokens, count in found.sequences_at_tokens.items()]
    return "\n".join(lines) + "\n"


def _group_line(group: GroupEstimate) -> str:
    keeps = (
        "of every token"
        if group.max_sequence_bytes is None
        else (
            f"in a window of {group.window:,} tokens: at most {group.max_sequence_bytes / 2**20:.1f} MiB per sequence"
        )
    )
    return f"  {group.layers:4} layers{group.bytes_per_token / 1024:8.1f} KiB per token, {keeps}"


def _advice(options: argparse.Namespace, blueprint: "Blueprint", shared: Estimate) -> str:
    """Compare one worker per device with a group that shares the model."""
    size = shared.tensor_parallel_size
    try:
        alone = _estimate(options, blueprint, 1)
    except DoesNotFit:
        return f"The model does not fit one device; it needs a group such as these {size} devices.\n"
    together = size * alone.kv_cache_tokens
    return (
        f"The model fits one device: {size} workers with one device each have {together:,} tokens of KV in total and "
        f"usually a higher throughput; a group of {size} has {shared.kv_cache_tokens:,} tokens of KV and less time "
        "between tokens.\n"
    )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pagestream estimate", description="Estimate the memory of a model.")
    parser.add_argument("model", type=Path, metavar="PATH", help="model directory; config.json is enough")
    parser.add_argument(
        "--model-impl",
        default="auto",
        choices=MODEL_IMPLS,
        help="model implementation, as for a worker (default: %(default)s)",
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="device type (default: %(default)s)")
    parser.add_argument(
        "--max-num-seqs", default="", metavar="N", help="running slots, as for a worker (default: that of --device)"
    )
    parser.add_argument(
        "--gpu-memory",
        default="80G",
        metavar="BYTES",
        help="memory of one device in bytes, e.g. 80G (default: %(default)s)",
    )
    parser.add_argument(
        "--gpu-memory-utilization",
        type=float,
        metavar="RATIO",
        default=CUDA_MEMORY_RATIO,
        help="share of the memory for weights and KV (default: %(default)s)",
    )
    parser.add_argument(
        "--max-model-len",
        default="",
        metavar="N",
        help="longest prompt and output in tokens (default: the model's maximum)",
    )
    _add_format_options(parser)
    return parser


def _add_format_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of weight and KV formats, and --json."""
    parser.add_argument("--dtype", choices=WEIGHT_DTYPES, help="dtype of the weights (default: as saved)")
    parser.add_argument(
        "--quantization",
        default="auto",
        choices=QUANTIZATIONS,
        help="weight format, as for a worker (default: %(default)s)",
    )
    parser.add_argument(
        "--int4-group-size",
        metavar="N",
        type=int,
        choices=INT4_GROUPS[::-1],
        help="inputs per scale of --quantization int4, as for a worker (default: the largest that divides)",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        default="auto",
        choices=KV_CACHE_DTYPES,
        help="KV cache dtype, as for a worker (default: %(default)s)",
    )
    parser.add_argument(
        "--block-size", type=int, default=16, choices=(8, 16, 32, 64), help="tokens per KV block (default: %(default)s)"
    )
    parser.add_argument(
        "--enable-expert-parallel", action="store_true", help="devices share whole experts (default: their inner size)"
    )
    parser.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="devices that share the model (default: %(default)s)",
    )
    parser.add_argument(
        "--speculative-config", default="", metavar="JSON", help="drafts, as for a worker (default: none)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


if __name__ == "__main__":
    sys.exit(main())
