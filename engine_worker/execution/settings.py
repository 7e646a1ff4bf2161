"""The options of what runs on the device: the model, its KV pool, the largest step. A part of the worker's settings.

load.py takes them whole. What depends on the device stays None until `for_device` fills it in. Flags keep vLLM's names
where both have the option. Nothing here imports torch; it does not know how an option is used.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from engine_worker.kv.layout import KV_CACHE_DTYPES
from shared.settings import SettingsError, parse_bytes, parse_count, setting

KV_BLOCK_SIZES_TOKENS = (8, 16, 32, 64)
IN_GROUPS = ("int8", "as-stored")  # weights of 4 and 8 bits with scales for groups of inputs, on a CPU
QUANTIZATIONS = ("auto", "none", "fp8", *IN_GROUPS)
MODEL_IMPLS = ("auto", "native", "transformers")
CUDAGRAPH_MODES = ("none", "full_decode_only", "full")

# By device.
MAX_NUM_SEQS = {"cpu": 64, "cuda": 1024}
MAX_NUM_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}
# A CPU has no other memory to swap to: it is better given to the KV cache.
SWAP_SPACE_BYTES = {"cpu": 0, "cuda": 4 * 2**30}
# Of a GPU's memory, for all of a worker there; the rest is for fragmentation. As vLLM, which does not count graphs.
CUDA_MEMORY_RATIO = 0.92


@dataclass(frozen=True, kw_only=True)
class StepBounds:
    """The most that one step computes."""

    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, kw_only=True)
class ExecutionSettings:
    model: Path = setting(help="model directory: config.json and *.safetensors")
    device: str = setting("auto", choices=("auto", "cpu", "cuda"), help="where the model runs; auto: cuda if present")
    dtype: str = setting(
        "auto", choices=("auto", "float32", "bfloat16", "float16"), help="type that the model computes in"
    )
    model_impl: str = setting(
        "auto",
        choices=MODEL_IMPLS,
        help="whose code runs the model; auto: this program's where it has the family, else that of transformers",
    )
    load_format: str = setting("auto", choices=("auto", "dummy"), help="dummy: random weights of the config's shape")
    quantization: str = setting(
        "auto",
        choices=QUANTIZATIONS,
        help="weights of products; auto: as the checkpoint has them, GGUF on a CPU as-stored where C++ kernels are, "
        "else 16 bits; none: 16 bits; fp8: quantized while loading; on a CPU, int8: quantized while loading; "
        "as-stored: GGUF's Q4_0, Q4_1 and Q8_0 as they are",
    )
    max_model_len: int | None = setting(None, parse=parse_count, help="longest prompt + output; default: the model's")
    tensor_parallel_size: int = setting(
        1, help="GPUs that share the model, a process each; must divide its heads and its intermediate size"
    )
    rendezvous_endpoint: str = setting(
        "", help="HOST:PORT where the ranks of a group on several hosts meet; rank 0 listens there; default: one host"
    )
    num_threads: int | None = setting(None, help="CPU threads of the model; default: the physical cores")

    kv_cache_dtype: str = setting(
        "auto",
        choices=KV_CACHE_DTYPES,
        help="type of keys and values in the KV cache; auto: as --dtype, of as-stored and int8 bfloat16 unless --dtype "
        "names a type; fp8: half the bytes, so twice the tokens",
    )
    block_size: int = setting(16, choices=KV_BLOCK_SIZES_TOKENS, help="tokens in a KV block")
    kv_cache_memory_bytes: int | None = setting(None, parse=parse_bytes, help="size of the KV cache, such as 2G")
    kv_cache_memory_ratio: float | None = setting(
        None,
        aliases=("--gpu-memory-utilization",),
        help="cuda: share of all memory for weights, activations and KV; cpu: share of the free memory for the KV",
    )
    swap_space_bytes: int | None = setting(
        None,
        parse=parse_bytes,
        help="host memory for the KV of preempted sequences and evicted prefixes; default: 4G on cuda, none on cpu",
    )
    max_num_seqs: int | None = setting(
        None,
        parse=parse_count,
        help=f"sequences in a step; default: {MAX_NUM_SEQS['cpu']} on cpu, {MAX_NUM_SEQS['cuda']} on cuda",
    )
    max_num_batched_tokens: int | None = setting(
        None,
        parse=parse_count,
        help=f"token budget of a step; default: {MAX_NUM_BATCHED_TOKENS['cpu']} on cpu, "
        f"{MAX_NUM_BATCHED_TOKENS['cuda']} on cuda",
    )
    deterministic: bool = setting(False, help="no bit of a result depends on the batch or its steps (cuda only)")
    cudagraph_mode: str = setting(
        "full",
        choices=CUDAGRAPH_MODES,
        help="steps that run as CUDA graphs: none, those that only decode, or small ones with prompts too",
    )
    enforce_eager: bool = setting(False, help="the same as --cudagraph-mode none")

    def __post_init__(self) -> None:
        for flag in _AT_LEAST_ONE:
            check_at_least_one(flag, getattr(self, flag))
        if self.rendezvous_endpoint:
            parse_endpoint(self.rendezvous_endpoint)
            if self.tensor_parallel_size == 1:
                raise SettingsError("--rendezvous-endpoint: is of groups; give --tensor-parallel-size 2 or more")
        if self.kv_cache_memory_ratio is not None and not 0.0 < self.kv_cache_memory_ratio <= 1.0:
            raise SettingsError(f"--kv-cache-memory-ratio: over 0 and at most 1; got {self.kv_cache_memory_ratio}")
        if self.kv_cache_memory_bytes is not None and self.kv_cache_memory_ratio is not None:
            raise SettingsError("--kv-cache-memory-bytes and --kv-cache-memory-ratio exclude each other")
        if self.swap_space_bytes is not None and self.swap_space_bytes < 0:
            raise SettingsError(f"--swap-space-bytes: 0 or more; got {self.swap_space_bytes}")

    @property
    def bounds(self) -> StepBounds:
        """The largest step; known once the device is."""
        assert self.max_num_seqs is not None and self.max_num_batched_tokens is not None, "for_device() comes first"
        return StepBounds(max_num_seqs=self.max_num_seqs, max_num_batched_tokens=self.max_num_batched_tokens)

    @property
    def graph_mode(self) -> str:
        """One of CUDAGRAPH_MODES."""
        return "none" if self.enforce_eager else self.cudagraph_mode

    def for_device(self, device: str) -> "ExecutionSettings":
        """Return these settings with every None that depends on the device (`cpu` or `cuda`) filled in.

        Raises SettingsError for what the device cannot do, or for a step that cannot hold its sequences.
        """
        most_seqs, most_tokens = MAX_NUM_SEQS[device], MAX_NUM_BATCHED_TOKENS[device]
        seqs = self.max_num_seqs or min(most_seqs, self.max_num_batched_tokens or most_seqs)
        tokens = self.max_num_batched_tokens or max(most_tokens, seqs)
        if tokens < seqs:
            raise SettingsError(f"--max-num-batched-tokens: at least --max-num-seqs, {seqs}; got {tokens}")
        if self.deterministic and device != "cuda":
            raise SettingsError("--deterministic: only on cuda; on a cpu bits depend on the batch")
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
        raise SettingsError(f"--rendezvous-endpoint: HOST:PORT with a port from 1 to 65535; got {text!r}")
    return host, int(port)


def check_at_least_one(field: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise SettingsError(f"--{field.replace('_', '-')}: at least 1; got {value}")
