"""Settings of execution on the device: model, KV pool, and largest step. A part of the worker's settings.

Values that depend on the device stay None until for_device() sets them. Flags have vLLM's names if vLLM has the option.
Nothing here imports torch.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from engine_worker.kv.layout import KV_CACHE_DTYPES
from engine_worker.model.draft_head.files import DraftHeadFiles
from engine_worker.model.weight_format import INT4_GROUPS, METHODS
from shared.settings import SettingsError, parse_bytes, parse_count, setting

KV_BLOCK_SIZES_TOKENS = (8, 16, 32, 64)
IN_GROUPS = ("int4", "int8", "as-stored")  # 4- and 8-bit weights with a scale per group of inputs; int4 also on GPUs
QUANTIZATIONS = ("auto", "none", "fp8", "mxfp4", *METHODS, *IN_GROUPS)
MODEL_IMPLS = ("auto", "native", "transformers")
CUDAGRAPH_MODES = ("none", "full_decode_only", "full")

# By device.
MAX_NUM_SEQS = {"cpu": 64, "cuda": 1024}
MAX_NUM_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}
MIN_SAMPLES = 16  # of a step, however few its sequences: two sequences with 7 drafts each
# On a CPU swap space is the same memory as the KV cache, which uses it better.
SWAP_SPACE_BYTES = {"cpu": 0, "cuda": 4 * 2**30}
# Share of a GPU's memory for a worker; the rest is for fragmentation. vLLM's default, which does not count graphs.
CUDA_MEMORY_RATIO = 0.92


@dataclass(frozen=True, kw_only=True)
class StepBounds:
    """The limits of one step."""

    max_num_seqs: int
    max_num_batched_tokens: int

    @property
    def max_num_samples(self) -> int:
        """The most tokens to sample: one per sequence, and one per draft; few sequences leave room for some drafts."""
        return min(max(self.max_num_seqs, MIN_SAMPLES), self.max_num_batched_tokens)


@dataclass(frozen=True, kw_only=True)
class DraftSettings:
    """How many tokens are drafted, and what makes them on the device, if anything; from --speculative-config."""

    num_drafts: int  # for each sequence and step, at most
    head: DraftHeadFiles | None = None  # to load beside the model
    ngram_lengths: tuple[int, int] | None = None  # to search for: the fewest and the most of the last tokens

    @property
    def are_made_on_device(self) -> bool:
        return self.head is not None or self.ngram_lengths is not None

    def searched_bytes(self, num_sequences: int, max_model_len: int) -> int:
        """Return the bytes of the tokens that the device keeps and searches."""
        return 4 * num_sequences * max_model_len if self.ngram_lengths is not None else 0


NO_DRAFTS = DraftSettings(num_drafts=0)


@dataclass(frozen=True, kw_only=True)
class ExecutionSettings:
    model: Path = setting(help="model directory with config.json and *.safetensors")
    device: str = setting("auto", choices=("auto", "cpu", "cuda"), help="device of the model; auto: cuda if present")
    dtype: str = setting(
        "auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="compute type of the model; auto: the checkpoint's",
    )
    model_impl: str = setting(
        "auto",
        choices=MODEL_IMPLS,
        help="implementation of the model; auto: native if the model family is supported, else transformers",
    )
    load_format: str = setting(
        "auto", choices=("auto", "dummy"), help="source of the weights; dummy: random weights of the config's shape"
    )
    quantization: str = setting(
        "auto",
        choices=QUANTIZATIONS,
        help="weights of linear layers; auto: the checkpoint's (GGUF, and 4 bits on a CPU: as-stored if possible); "
        "none: 16 bits; fp8, int4, int8 (CPU): quantized at load; mxfp4, awq, gptq, compressed-tensors: required of "
        "the checkpoint; as-stored: GGUF blocks (GPU: of 4 bits) and 4-bit integers in place",
    )
    int4_group_size: int | None = setting(
        None,
        choices=INT4_GROUPS[::-1],
        help="inputs per scale of --quantization int4; default: 128 on cuda, or the largest that divides a layer's "
        "inputs; 32 on cpu",
    )
    max_model_len: int | None = setting(
        None, parse=parse_count, help="maximum of prompt and output, in tokens; default: the model's"
    )
    tensor_parallel_size: int = setting(
        1, help="number of GPUs that share the model, one process each; must divide heads and intermediate size"
    )
    enable_expert_parallel: bool = setting(
        False, help="ranks share whole experts instead of the inner size of each; needs --tensor-parallel-size"
    )
    rendezvous_endpoint: str = setting(
        "", metavar="HOST:PORT", help="address of rank 0, where ranks on several hosts meet; default: one host"
    )
    num_threads: int | None = setting(None, help="number of CPU threads of the model; default: the physical cores")

    kv_cache_dtype: str = setting(
        "auto",
        choices=KV_CACHE_DTYPES,
        help="type of the KV cache; auto: --dtype, or bfloat16 for as-stored and int8 if --dtype is auto; fp8: half "
        "the bytes, so twice the tokens",
    )
    block_size: int = setting(16, choices=KV_BLOCK_SIZES_TOKENS, help="size of a KV block, in tokens")
    kv_cache_memory_bytes: int | None = setting(
        None, parse=parse_bytes, help="size of the KV cache in bytes, for example 2G"
    )
    kv_cache_memory_ratio: float | None = setting(
        None,
        aliases=("--gpu-memory-utilization",),
        help="cuda: share of total memory for weights, activations and KV cache; cpu: share of free memory for KV",
    )
    swap_space_bytes: int | None = setting(
        None,
        parse=parse_bytes,
        help="host memory for KV and states of preempted sequences and evicted prefixes, in bytes; "
        "default: 4G on cuda, 0 on cpu",
    )
    max_num_seqs: int | None = setting(
        None,
        parse=parse_count,
        help=f"maximum of sequences in a step; default: {MAX_NUM_SEQS['cpu']} on cpu, {MAX_NUM_SEQS['cuda']} on cuda",
    )
    max_num_batched_tokens: int | None = setting(
        None,
        parse=parse_count,
        help=f"maximum of tokens in a step; default: {MAX_NUM_BATCHED_TOKENS['cpu']} on cpu, "
        f"{MAX_NUM_BATCHED_TOKENS['cuda']} on cuda",
    )
    deterministic: bool = setting(False, help="make results independent of the batch, bit by bit (cuda only)")
    cudagraph_mode: str = setting(
        "full",
        choices=CUDAGRAPH_MODES,
        help="steps that run as CUDA graphs: none, decode steps, or also small steps with prompts",
    )
    enforce_eager: bool = setting(False, help="same as --cudagraph-mode none")

    def __post_init__(self) -> None:
        for flag in _AT_LEAST_ONE:
            check_at_least_one(flag, getattr(self, flag))
        if self.rendezvous_endpoint:
            parse_endpoint(self.rendezvous_endpoint)
            if self.tensor_parallel_size == 1:
                raise SettingsError("--rendezvous-endpoint: needs --tensor-parallel-size 2 or more; got 1")
        if self.enable_expert_parallel and self.tensor_parallel_size == 1:
            raise SettingsError("--enable-expert-parallel: needs --tensor-parallel-size 2 or more; got 1")
        if self.kv_cache_memory_ratio is not None and not 0.0 < self.kv_cache_memory_ratio <= 1.0:
            raise SettingsError(
                f"--kv-cache-memory-ratio: expected over 0 and at most 1, got {self.kv_cache_memory_ratio}"
            )
        if self.kv_cache_memory_bytes is not None and self.kv_cache_memory_ratio is not None:
            raise SettingsError("--kv-cache-memory-bytes and --kv-cache-memory-ratio: set only one of them")
        if self.swap_space_bytes is not None and self.swap_space_bytes < 0:
            raise SettingsError(f"--swap-space-bytes: expected 0 or more, got {self.swap_space_bytes}")

    @property
    def bounds(self) -> StepBounds:
        """Return the limits of a step. Call on the result of for_device()."""
        assert self.max_num_seqs is not None and self.max_num_batched_tokens is not None, "for_device() comes first"
        return StepBounds(max_num_seqs=self.max_num_seqs, max_num_batched_tokens=self.max_num_batched_tokens)

    def int4_group(self, device: str) -> int:
        """Return the most inputs per scale of `--quantization int4` on a GPU; 0 on a CPU, which has groups of 32."""
        return 0 if device == "cpu" else self.int4_group_size or max(INT4_GROUPS)

    @property
    def graph_mode(self) -> str:
        """Return one of CUDAGRAPH_MODES."""
        return "none" if self.enforce_eager else self.cudagraph_mode

    def for_device(self, device: str) -> "ExecutionSettings":
        """Return these settings with all values that depend on the device (`cpu` or `cuda`).

        Raises:
            SettingsError: If the device does not support a setting, or a step cannot hold its sequences.
        """
        default_seqs, default_tokens = MAX_NUM_SEQS[device], MAX_NUM_BATCHED_TOKENS[device]
        seqs = self.max_num_seqs or min(default_seqs, self.max_num_batched_tokens or default_seqs)
        tokens = self.max_num_batched_tokens or max(default_tokens, seqs)
        if tokens < seqs:
            raise SettingsError(f"--max-num-batched-tokens: expected at least --max-num-seqs ({seqs}), got {tokens}")
        if device == "cpu" and self.int4_group_size not in {None, min(INT4_GROUPS)}:
            raise SettingsError(f"--int4-group-size: expected 32 on cpu, got {self.int4_group_size}")
        if self.deterministic and device != "cuda":
            raise SettingsError(f"--deterministic: needs --device cuda; got {device}")
        return replace(
            self,
            device=device,
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            swap_space_bytes=SWAP_SPACE_BYTES[device] if self.swap_space_bytes is None else self.swap_space_bytes,
        )


_AT_LEAST_ONE = (
    "max_model_len",
    "tensor_parallel_size",
    "num_threads",
    "kv_cache_memory_bytes",
    "max_num_seqs",
    "max_num_batched_tokens",
)


def parse_endpoint(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise SettingsError(f"--rendezvous-endpoint: expected HOST:PORT with a port from 1 to 65535, got {text!r}")
    return host, int(port)


def check_at_least_one(field: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise SettingsError(f"--{field.replace('_', '-')}: expected at least 1, got {value}")
