"""The gateway's options: one frozen object, read once at start from flags, environment and file (shared/settings.py).

Flags keep vLLM's names where both have the option. Does not know how an option is used.

It is read before any walk.
"""

from dataclasses import dataclass
from pathlib import Path

from shared.settings import SettingsError, parse_bytes, parse_count, setting

TOOL_CALL_PARSERS = ("auto", "hermes", "llama3_json", "mistral")
GENERATION_CONFIGS = ("auto", "vllm", "none")
REASONING_PARSERS = ("", "qwen3", "deepseek_r1")
NO_WORKER = ("wait", "refuse")
MIN_BYTES_IN_FLIGHT = 4 * 2**20


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    model: Path | None = setting(
        None, parse=Path, help="model directory: tokenizer.json, tokenizer_config.json, config.json"
    )
    served_model_name: tuple[str, ...] = setting(
        (), help="name in the API and in the Redis keys, and aliases of it; default: the directory's name"
    )
    models_file: Path | None = setting(None, parse=Path, help="TOML file of several models, instead of --model")
    redis_url: str = setting("redis://127.0.0.1:6379/0", help="the store; unix:///path/to/socket works too")
    host: str = setting("127.0.0.1", help="address to listen on")
    port: int = setting(8000, parse=int, help="port to listen on; 0 takes a free one and prints it")
    reuse_port: bool = setting(False, help="share the port with other gateways that say so too (SO_REUSEPORT)")
    own_port: int | None = setting(
        None, parse=int, help="listen here as well, alone, for /metrics of this process; 0 takes a free one"
    )

    api_key: str = setting("", secret=True, help="a key that every request must show; better as PAGESTREAM_API_KEY")
    api_keys_file: Path | None = setting(None, parse=Path, help="TOML file of keys and limits; read again on change")
    ui: bool = setting(True, help="the page at /: playground and live map of the KV blocks")
    allowed_hosts: tuple[str, ...] = setting(
        (), help="without keys, further names by which requests may call this server, with commas"
    )
    allow_unauthenticated: bool = setting(False, help="without keys, listen beyond loopback all the same")

    max_model_len: int | None = setting(None, parse=parse_count, help="prompt + output at most; default: the model's")
    max_num_queued_reqs: int = setting(
        1024, parse=parse_count, help="requests that may wait in each queue; keys divide them"
    )
    max_num_streams: int = setting(4096, parse=parse_count, help="requests open here before 503 gateway_full")
    max_bytes_in_flight: int = setting(
        256 * 2**20, parse=parse_bytes, help="bytes of bodies being received or not yet sent before 503 gateway_full"
    )
    sse_keep_alive_seconds: float = setting(10.0, parse=float, help="silence on a stream before a comment is sent")
    write_stall_seconds: float = setting(30.0, parse=float, help="a client that reads nothing for so long is dropped")
    body_timeout_seconds: float = setting(10.0, parse=float, help="time for a client to send its request body")
    max_num_queued_tokens: int | None = setting(
        None, parse=parse_count, help="tokens of prompts that wait here before 503 queue_full; default: no limit"
    )
    default_timeout_seconds: float = setting(0.0, parse=float, help="time for a whole answer; 0: as long as it takes")
    default_queue_timeout_seconds: float = setting(0.0, parse=float, help="time until a worker begins; 0: any")
    no_worker: str = setting(
        "wait", choices=NO_WORKER,
        help="while none is ready, but one was: requests wait for the next worker, or get 503 no_worker at once",
    )  # fmt: skip
    no_worker_wait_seconds: float = setting(
        120.0, parse=float, help="for how long a worker is waited for, and one request that names no time in the queue"
    )
    max_timeout_seconds: float = setting(3600.0, parse=float, help="the most of both that a request may ask for")
    default_detach_seconds: float = setting(
        60.0, parse=float, help="a request with an Idempotency-Key outlives its client's connection by so long"
    )
    max_detach_seconds: float = setting(3600.0, parse=float, help="the most that a request may ask for")
    drain_seconds: float = setting(30.0, parse=float, help="time after SIGTERM for open streams to end")
    tool_call_parser: str = setting(
        "auto", choices=TOOL_CALL_PARSERS,
        help="how the model writes tool calls of its own accord; auto: as its chat template says",
    )  # fmt: skip
    reasoning_parser: str = setting(
        "", choices=REASONING_PARSERS, help="how the model marks its reasoning; default: it has none"
    )
    generation_config: str = setting(
        "auto", choices=GENERATION_CONFIGS,
        help="what a request leaves out of temperature, top_p, top_k, min_p, repetition_penalty and max_tokens is as "
        "the model's generation_config.json says (auto), or as the API says (vllm or none)",
    )  # fmt: skip
    force_include_usage: bool = setting(False, help="send usage at the end of every stream")

    files_dir: Path | None = setting(
        None, parse=Path, help="for /v1/files and /v1/batches, shared by all gateways; default: neither is served"
    )
    max_file_bytes: int = setting(200 * 2**20, parse=parse_bytes, help="size of an uploaded file")
    max_files_bytes: int = setting(4 * 2**30, parse=parse_bytes, help="files and batches together, of all keys")
    max_files_bytes_per_key: int | None = setting(
        None, parse=parse_bytes, help="of one key; default: as many as it leaves free, so one alone has half"
    )
    files_retention_seconds: float = setting(
        30 * 24 * 3600.0, parse=float, help="files, and batches that have ended, are deleted after so long"
    )
    max_batch_concurrency: int = setting(64, parse=parse_count, help="requests of batches in flight at one time here")

    exit_with_parent: bool = setting(False, help="end when the parent process ends (Linux)")
    log_format: str = setting("text", choices=("text", "json"), help="log lines for people or for machines")
    otlp_traces_endpoint: str = setting("", help="OpenTelemetry collector for traces: http://HOST:4318/v1/traces")
    vllm_metric_names: bool = setting(False, help="metrics once more under vLLM's names, on /metrics")

    def __post_init__(self) -> None:
        _require((self.model is None) != (self.models_file is None), "--model", "it or --models-file", self.model)
        _require(
            self.models_file is None or not self.served_model_name,
            "--served-model-name", "none beside --models-file, which has the names", self.served_model_name,
        )  # fmt: skip
        _require(0 <= self.port <= 65535, "--port", "0 to 65535", self.port)
        _require(0 <= (self.own_port or 0) <= 65535, "--own-port", "0 to 65535", self.own_port)
        for flag, count in (
            ("--max-model-len", self.max_model_len),
            ("--max-num-queued-reqs", self.max_num_queued_reqs),
            ("--max-num-queued-tokens", self.max_num_queued_tokens),
            ("--max-num-streams", self.max_num_streams),
            ("--max-file-bytes", self.max_file_bytes),
            ("--max-files-bytes", self.max_files_bytes),
            ("--max-files-bytes-per-key", self.max_files_bytes_per_key),
            ("--max-batch-concurrency", self.max_batch_concurrency),
        ):
            _require(count is None or count >= 1, flag, "at least 1", count)
        _require(
            self.max_bytes_in_flight >= MIN_BYTES_IN_FLIGHT,
            "--max-bytes-in-flight", f"at least {MIN_BYTES_IN_FLIGHT}, room for two of the largest bodies",
            self.max_bytes_in_flight,
        )  # fmt: skip
        for flag, seconds in (
            ("--sse-keep-alive-seconds", self.sse_keep_alive_seconds),
            ("--write-stall-seconds", self.write_stall_seconds),
            ("--body-timeout-seconds", self.body_timeout_seconds),
            ("--no-worker-wait-seconds", self.no_worker_wait_seconds),
        ):
            _require(seconds > 0, flag, "over 0", seconds)
        kept_seconds = self.files_retention_seconds
        _require(kept_seconds >= 3600, "--files-retention-seconds", "3600 or more", kept_seconds)
        for flag, seconds in (
            ("--drain-seconds", self.drain_seconds),
            ("--default-detach-seconds", self.default_detach_seconds),
            ("--max-detach-seconds", self.max_detach_seconds),
            ("--default-timeout-seconds", self.default_timeout_seconds),
            ("--default-queue-timeout-seconds", self.default_queue_timeout_seconds),
            ("--max-timeout-seconds", self.max_timeout_seconds),
        ):
            _require(seconds >= 0, flag, "0 or more", seconds)


def _require(holds: bool, flag: str, expected: str, value: object) -> None:
    if not holds:
        raise SettingsError(f"{flag}: expected {expected}, got {value}")
