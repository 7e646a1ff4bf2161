"""The gateway's settings: one frozen object, read at start from flags, environment, and file (shared/settings.py).

Flags have vLLM's name where vLLM has the same option.
"""

from dataclasses import dataclass
from pathlib import Path

from shared.model_files import Task
from shared.redis_keys import store_namespace
from shared.settings import SettingsError, parse_bytes, parse_count, setting
from shared.store_address import store_url
from shared.tracing import collector_url

TOOL_CALL_PARSERS = (
    "auto", "hermes", "llama3_json", "mistral", "qwen3_coder", "qwen3_xml", "glm45", "glm47", "gemma4", "lfm2",
    "deepseek_v3", "deepseek_v31", "harmony", "openai",
)  # fmt: skip
GENERATION_CONFIGS = ("auto", "vllm", "none")
REASONING_PARSERS = (
    "auto", "none", "qwen3", "deepseek_r1", "glm45", "gemma4", "mistral", "harmony", "openai_gptoss",
)  # fmt: skip
TASKS = ("auto", *Task)
DURABLE_ACCEPT = ("primary", "replica")
NO_WORKER = ("wait", "refuse", "queue")
MIN_BYTES_IN_FLIGHT = 4 * 2**20
# Routes that --open-routes may name: scrapes and the probes of other engines, which send no key.
OPENABLE_ROUTES = ("/health", "/load", "/metrics", "/ping", "/ready", "/version")


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    model: Path | None = setting(
        None, parse=Path, help="model directory with tokenizer.json, tokenizer_config.json, and config.json"
    )
    served_model_name: tuple[str, ...] = setting(
        (), help="model name in the API and in store keys, then aliases; default: the directory's name"
    )
    models_file: Path | None = setting(None, parse=Path, help="TOML file of several models; replaces --model")
    redis_url: str = setting(
        "redis://127.0.0.1:6379/0",
        parse=store_url,
        help="URL of the store: redis://, rediss://, unix:///PATH, redis+sentinel://HOST:PORT,HOST:PORT/SERVICE, or "
        "redis+cluster://HOST:PORT,HOST:PORT",
    )
    store_namespace: str = setting(
        "", parse=store_namespace, help="prefix of all names in the store, so that deployments can share one"
    )
    host: str = setting("127.0.0.1", help="address to listen on")
    port: int = setting(8000, parse=int, help="port to listen on; 0: a free port, which is logged")
    reuse_port: bool = setting(False, help="share the port with other gateways that set this (SO_REUSEPORT)")
    own_port: int | None = setting(
        None, parse=int, help="second port, not shared, for this process's /metrics; 0: a free port; default: none"
    )

    api_key: str = setting("", secret=True, help="API key required of every request; prefer PAGESTREAM_API_KEY")
    api_keys_file: Path | None = setting(
        None, parse=Path, help="TOML file of API keys and their limits; reloaded when it changes"
    )
    ui: bool = setting(True, help="serve the web page at /: playground and live map of KV blocks")
    ui_history: bool = setting(True, help="let the page keep its conversations in the browser's local storage")
    allowed_hosts: tuple[str, ...] = setting(
        (), help="additional Host names to accept while no API key is set, separated by commas"
    )
    open_routes: tuple[str, ...] = setting(
        (), help=f"routes that need no API key, separated by commas, of {', '.join(OPENABLE_ROUTES)}"
    )
    allow_unauthenticated: bool = setting(False, help="allow a non-loopback --host without API keys")

    max_model_len: int | None = setting(
        None, parse=parse_count, help="maximum prompt plus output tokens; default: the model's"
    )
    max_num_queued_reqs: int = setting(
        1024, parse=parse_count, help="maximum waiting requests per queue, divided between API keys"
    )
    max_num_streams: int = setting(4096, parse=parse_count, help="maximum open requests, then 503 gateway_full")
    max_bytes_in_flight: int = setting(
        256 * 2**20,
        parse=parse_bytes,
        help="maximum bytes of bodies being received or not yet sent, then 503 gateway_full",
    )
    sse_keep_alive_seconds: float = setting(10.0, parse=float, help="silence on a stream before a comment is sent")
    write_stall_seconds: float = setting(30.0, parse=float, help="disconnect a client that reads nothing for this long")
    body_timeout_seconds: float = setting(10.0, parse=float, help="maximum time to receive a request body")
    max_num_queued_tokens: int | None = setting(
        None,
        parse=parse_count,
        help="maximum prompt tokens waiting at this gateway, then 503 queue_full; default: no limit",
    )
    prefix_affinity: bool = setting(
        True, help="prefer the worker that served a prompt with the same beginning, whose prefix cache has it"
    )
    durable_accept: str = setting(
        "primary", choices=DURABLE_ACCEPT,
        help="what has a request before it is accepted: the store's primary, or also a replica, else 503 "
        "store_not_replicated",
    )  # fmt: skip
    durable_accept_timeout_seconds: float = setting(
        0.5, parse=float, help="maximum time for a replica to confirm a request"
    )
    default_timeout_seconds: float = setting(
        0.0, parse=float, help="default `timeout_seconds` of a request: time for the whole answer; 0: no limit"
    )
    default_queue_timeout_seconds: float = setting(
        0.0, parse=float, help="default `queue_timeout_seconds` of a request: time until a worker starts; 0: no limit"
    )
    no_worker: str = setting(
        "wait", choices=NO_WORKER,
        help="requests while no worker is ready, after one was: wait for the next for --no-worker-wait-seconds; refuse "
        "with 503 no_worker; queue: always accept them, because a scaler starts workers for what waits",
    )  # fmt: skip
    no_worker_wait_seconds: float = setting(
        120.0,
        parse=float,
        help="time to accept requests without a ready worker (wait), and queue timeout of those that set none",
    )
    max_timeout_seconds: float = setting(
        3600.0, parse=float, help="upper bound for `timeout_seconds` and `queue_timeout_seconds`"
    )
    default_detach_seconds: float = setting(
        60.0, parse=float, help="time that a request with an Idempotency-Key continues after its client disconnects"
    )
    max_detach_seconds: float = setting(3600.0, parse=float, help="upper bound for `detach_seconds`")
    drain_seconds: float = setting(30.0, parse=float, help="time for open streams to end after SIGTERM")
    chat_template: Path | None = setting(
        None, parse=Path, help="Jinja file to use instead of the model's chat template"
    )
    tool_call_parser: str = setting(
        "auto", choices=TOOL_CALL_PARSERS,
        help="format of the model's tool calls; auto: from its chat template",
    )  # fmt: skip
    reasoning_parser: str = setting(
        "auto",
        choices=REASONING_PARSERS,
        help="format of the model's reasoning; auto: from its chat template; none: reasoning stays in the text",
    )
    generation_config: str = setting(
        "auto", choices=GENERATION_CONFIGS,
        help="defaults of temperature, top_p, top_k, min_p, repetition_penalty, and max_tokens: auto: the model's "
        "generation_config.json; vllm or none: the API's",
    )  # fmt: skip
    task: str = setting(
        "auto", choices=TASKS,
        help="what the model is served for: generate text, embed, or score (rerank); auto: from its files",
    )  # fmt: skip
    force_include_usage: bool = setting(False, help="send usage at the end of every stream")

    files_dir: Path | None = setting(
        None, parse=Path, help="directory of /v1/files and /v1/batches, shared by all gateways; default: not served"
    )
    max_file_bytes: int = setting(200 * 2**20, parse=parse_bytes, help="maximum size of an uploaded file")
    max_files_bytes: int = setting(
        4 * 2**30, parse=parse_bytes, help="disk quota of files and batches, of all API keys together"
    )
    max_files_bytes_per_key: int | None = setting(
        None, parse=parse_bytes, help="disk quota per API key; default: half of the free quota"
    )
    files_retention_seconds: float = setting(
        30 * 24 * 3600.0, parse=float, help="age at which files and ended batches are deleted"
    )
    max_batch_concurrency: int = setting(64, parse=parse_count, help="maximum batch requests in flight at this gateway")

    check: bool = setting(False, help="check settings and keys, then exit: 0, or 2 with the reason")
    exit_with_parent: bool = setting(False, help="exit when the parent process ends (Linux)")
    log_format: str = setting("text", choices=("text", "json"), help="format of log lines")
    otlp_traces_endpoint: str = setting(
        "",
        parse=collector_url,
        help="OpenTelemetry collector for traces, such as http://HOST:4318/v1/traces; default: no traces",
    )
    vllm_metric_names: bool = setting(False, help="also expose metrics under vLLM's names on /metrics")

    def __post_init__(self) -> None:
        if (self.model is None) == (self.models_file is None):
            raise SettingsError(
                f"Set exactly one of --model and --models-file; got {self.model} and {self.models_file}"
            )
        _require(
            self.models_file is None or not self.served_model_name,
            "--served-model-name", "no value, because --models-file has the names", self.served_model_name,
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
        for route in self.open_routes:
            _require(route in OPENABLE_ROUTES, "--open-routes", f"routes of {', '.join(OPENABLE_ROUTES)}", route)
        _require(
            self.max_bytes_in_flight >= MIN_BYTES_IN_FLIGHT,
            "--max-bytes-in-flight", f"at least {MIN_BYTES_IN_FLIGHT}, the size of two bodies of maximum size",
            self.max_bytes_in_flight,
        )  # fmt: skip
        for flag, seconds in (
            ("--sse-keep-alive-seconds", self.sse_keep_alive_seconds),
            ("--write-stall-seconds", self.write_stall_seconds),
            ("--body-timeout-seconds", self.body_timeout_seconds),
            ("--no-worker-wait-seconds", self.no_worker_wait_seconds),
            ("--durable-accept-timeout-seconds", self.durable_accept_timeout_seconds),
        ):
            _require(seconds > 0, flag, "more than 0", seconds)
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
