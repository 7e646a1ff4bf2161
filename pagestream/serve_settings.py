"""The settings of `pagestream serve`, and the assignment of further flags to gateways and workers.

Every flag of `pagestream gateway` and `pagestream worker` is accepted by `serve`. Their settings are not imported here,
because they are other packages; tests/test_architecture.py compares the names below with theirs.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.redis_keys import store_namespace
from shared.settings import SettingsError, parse_bytes, parse_count, setting
from shared.store_address import store_url
from shared.tracing import collector_url

DEMO = "demo"
MAX_WORKERS = 64
MAX_GATEWAYS = 32

GATEWAY_FLAGS = frozenset(
    {
        "--max-num-queued-reqs",
        "--open-routes",
        "--max-num-streams",
        "--max-bytes-in-flight",
        "--sse-keep-alive-seconds",
        "--write-stall-seconds",
        "--body-timeout-seconds",
        "--max-num-queued-tokens",
        "--prefix-affinity",
        "--durable-accept",
        "--durable-accept-timeout-seconds",
        "--default-timeout-seconds",
        "--default-queue-timeout-seconds",
        "--no-worker",
        "--no-worker-wait-seconds",
        "--max-timeout-seconds",
        "--default-detach-seconds",
        "--max-detach-seconds",
        "--max-file-bytes",
        "--max-files-bytes",
        "--max-files-bytes-per-key",
        "--files-retention-seconds",
        "--max-batch-concurrency",
        "--chat-template",
        "--tool-call-parser",
        "--reasoning-parser",
        "--generation-config",
        "--task",
        "--force-include-usage",
        "--ui",
        "--ui-history",
        "--api-key",
        "--api-keys-file",
        "--allowed-hosts",
        "--allow-unauthenticated",
    }
)
SET_BY_SERVE = frozenset({"--worker-id", "--check", "--exit-with-parent", "--reuse-port", "--own-port"})


def parse_gateways(text: str) -> int | None:
    return None if text == "auto" else int(text)


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    model: str = setting(
        "", help="model directory, .gguf file, ORG/NAME[:TAG] on the Hugging Face hub, or demo; default: demo"
    )
    revision: str = setting("main", help="branch, tag or commit of a model on the Hugging Face hub")
    served_model_name: tuple[str, ...] = setting(
        (), help="model name in the API, and aliases; default: the name of the model"
    )
    models_file: Path | None = setting(None, parse=Path, help="TOML file of several models; replaces --model")
    host: str = setting("127.0.0.1", help="address to listen on")
    port: int = setting(8000, help="port to listen on")
    metrics_port: int | None = setting(
        None,
        help="port of the first worker's /metrics; the next workers have the next ports; 0: free ports, which are "
        "logged; default: --port + 1",
    )
    gateways: int | None = setting(
        None,
        parse=parse_gateways,
        help="number of gateway processes, or auto; default: two per GPU worker, limited by cores; one with a single "
        "worker",
    )
    workers: int = setting(1, help="number of engine workers per model; each uses its own GPUs")
    tensor_parallel_size: int = setting(
        1, help="number of GPUs per worker, which share the model; must divide heads and intermediate size"
    )
    redis_url: str = setting(
        "",
        parse=store_url,
        help="URL of a running Redis or Valkey, redis+sentinel://HOST:PORT,HOST:PORT/SERVICE, or "
        "redis+cluster://HOST:PORT,HOST:PORT; default: an embedded Valkey",
    )
    store_namespace: str = setting(
        "", parse=store_namespace, help="prefix of all names in the store, so that deployments can share one"
    )
    store_max_memory_bytes: int = setting(
        256 * 2**20, parse=parse_bytes, help="memory limit of the embedded store, in bytes"
    )
    max_model_len: int | None = setting(
        None, parse=parse_count, help="maximum of prompt and output, in tokens; default: the model's"
    )
    files_dir: Path | None = setting(
        None,
        parse=Path,
        help="directory of /v1/files and /v1/batches; default: one per model in the user's state directory",
    )
    drain_seconds: float = setting(30.0, help="time limit for running requests after SIGTERM, in seconds")
    log_format: str = setting("text", choices=("text", "json"), help="format of log lines")
    otlp_traces_endpoint: str = setting(
        "", parse=collector_url, help="URL of an OpenTelemetry collector, for example http://HOST:4318/v1/traces"
    )
    vllm_metric_names: bool = setting(False, help="also export metrics under vLLM's names on /metrics")

    def __post_init__(self) -> None:
        # With 0 this program would not know the gateway's port.
        if not 1 <= self.port <= 65535:
            raise SettingsError(f"--port: expected 1 to 65535, got {self.port}")
        if self.metrics_port is not None and not 0 <= self.metrics_port <= 65535:
            raise SettingsError(f"--metrics-port: expected 0 to 65535, got {self.metrics_port}")
        if self.models_file is not None and (self.model or self.served_model_name):
            raise SettingsError(
                "--models-file: it contains the models and their names; remove --model and --served-model-name"
            )
        if not 1 <= self.workers <= MAX_WORKERS:
            raise SettingsError(f"--workers: expected 1 to {MAX_WORKERS}, got {self.workers}")
        if self.tensor_parallel_size < 1:
            raise SettingsError(f"--tensor-parallel-size: expected at least 1, got {self.tensor_parallel_size}")
        if self.gateways is not None and not 1 <= self.gateways <= MAX_GATEWAYS:
            raise SettingsError(f"--gateways: expected auto, or 1 to {MAX_GATEWAYS}, got {self.gateways}")
        if self.drain_seconds < 0:
            raise SettingsError(f"--drain-seconds: expected 0 or more, got {self.drain_seconds}")

    def metrics_port_of(self, worker: int) -> int:
        """Return the port of a worker's /metrics; 0: any free port."""
        if self.metrics_port == 0:
            return 0
        return (self.metrics_port or self.port + 1) + worker

    @property
    def num_gateways(self) -> int:
        """Return the number of gateways; 1 until --gateways auto is resolved (gateway_count.py)."""
        return self.gateways or 1


@dataclass(frozen=True)
class PassedFlags:
    gateway: tuple[str, ...]
    worker: tuple[str, ...]

    def worker_has(self, flag: str) -> bool:
        return _is_among(flag, self.worker)

    @property
    def is_for_cpu(self) -> bool:
        return "--device cpu" in " ".join(self.worker).replace("--device=", "--device ")

    def load_format(self, environ: Mapping[str, str], config_path: Path | None) -> str:
        """Return the workers' --load-format, from the flag, the variable, or --config."""
        words = " ".join(self.worker).replace("=", " ").split()
        if "--load-format" in words[:-1]:
            return words[words.index("--load-format") + 1]
        if name := environ.get("PAGESTREAM_LOAD_FORMAT"):
            return name
        content = tomllib.loads(config_path.read_text(encoding="utf-8")) if config_path else {}
        named = {name.replace("-", "_"): value for name, value in (content | content.get("worker", {})).items()}
        return str(named.get("load_format", "auto"))

    def gateway_has(self, flag: str) -> bool:
        return _is_among(flag, self.gateway)


def _is_among(flag: str, words: Sequence[str]) -> bool:
    return any(word == flag or word.startswith(flag + "=") for word in words)


def split_flags(words: Sequence[str]) -> PassedFlags:
    """Assign words that are not options of `serve` to gateways and workers. A flag includes the words after it.

    Raises:
        SettingsError: If a flag is set by `serve`, or a word belongs to no flag.
    """
    gateway: list[str] = []
    worker: list[str] = []
    target: list[str] | None = None
    for word in words:
        if word.startswith("--"):
            flag = word.partition("=")[0]
            positive = "--" + flag.removeprefix("--no-").removeprefix("--")
            if flag in SET_BY_SERVE or positive in SET_BY_SERVE:
                raise SettingsError(f"{positive}: set by serve; remove it")
            target = gateway if flag in GATEWAY_FLAGS or positive in GATEWAY_FLAGS else worker
        if target is None:
            raise SettingsError(
                f"unexpected argument {word!r}: the model must come first, as in `serve MODEL --flag ...`"
            )
        target.append(word)
    return PassedFlags(tuple(gateway), tuple(worker))
