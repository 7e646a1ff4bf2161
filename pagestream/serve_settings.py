"""The options of `pagestream serve`, and which of the further flags go to the gateway and which to the workers.

Every flag of `pagestream gateway` and `pagestream worker` may be given to `serve`. The two programs are other packages,
whose settings are not imported here; tests/test_architecture.py holds the names below against theirs.

It is read at the start of `serve`. It knows the names of options, and not how one is used.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.settings import SettingsError, parse_bytes, parse_count, setting

DEMO = "demo"
MAX_WORKERS = 64
MAX_GATEWAYS = 32

GATEWAY_FLAGS = frozenset(
    {
        "--max-num-queued-reqs",
        "--max-num-streams",
        "--max-bytes-in-flight",
        "--sse-keep-alive-seconds",
        "--write-stall-seconds",
        "--body-timeout-seconds",
        "--max-num-queued-tokens",
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
        "--tool-call-parser",
        "--reasoning-parser",
        "--generation-config",
        "--force-include-usage",
        "--ui",
        "--api-key",
        "--api-keys-file",
        "--allowed-hosts",
        "--allow-unauthenticated",
    }
)
SET_BY_SERVE = frozenset({"--worker-id", "--exit-with-parent", "--reuse-port", "--own-port"})


def parse_gateways(text: str) -> int | None:
    return None if text == "auto" else int(text)


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    model: str = setting(
        "", help="a model directory, a .gguf file, ORG/NAME on the Hugging Face hub, or the word demo; default: demo"
    )
    revision: str = setting("main", help="branch, tag or commit of a model on the Hugging Face hub")
    served_model_name: tuple[str, ...] = setting(
        (), help="name in the API, and aliases of it; default: the model's own"
    )
    models_file: Path | None = setting(None, parse=Path, help="TOML file of several models, instead of --model")
    host: str = setting("127.0.0.1", help="address to listen on")
    port: int = setting(8000, help="port to listen on")
    gateways: int | None = setting(
        None,
        parse=parse_gateways,
        help="gateway processes that share the port, about one for 20,000 tokens/s; default, or auto: two for each "
        "of several workers on GPUs as far as cores reach, else one",
    )
    workers: int = setting(1, help="engine workers to run, of each model; of several GPUs each takes one")
    tensor_parallel_size: int = setting(
        1, help="GPUs of each worker, which share its model; must divide its heads and its intermediate size"
    )
    redis_url: str = setting("", help="a running Redis or Valkey; default: an embedded Valkey of your own")
    store_max_memory_bytes: int = setting(256 * 2**20, parse=parse_bytes, help="memory of the embedded store")
    max_model_len: int | None = setting(
        None, parse=parse_count, help="longest prompt + output; default: the model's own"
    )
    files_dir: Path | None = setting(
        None, parse=Path, help="for /v1/files and /v1/batches; default: with the state of this user, one a model"
    )
    drain_seconds: float = setting(30.0, help="time after SIGTERM for running requests to end")
    log_format: str = setting("text", choices=("text", "json"), help="log lines for people or for machines")
    otlp_traces_endpoint: str = setting("", help="OpenTelemetry collector for traces: http://HOST:4318/v1/traces")
    vllm_metric_names: bool = setting(False, help="metrics once more under vLLM's names, on /metrics")

    def __post_init__(self) -> None:
        # 0 would hide from this program on which port the gateway answers.
        if not 1 <= self.port <= 65535:
            raise SettingsError(f"--port: expected 1 to 65535, got {self.port}")
        if self.models_file is not None and (self.model or self.served_model_name):
            raise SettingsError("--models-file: has the models and their names; give no --model beside it")
        if not 1 <= self.workers <= MAX_WORKERS:
            raise SettingsError(f"--workers: expected 1 to {MAX_WORKERS}, got {self.workers}")
        if self.tensor_parallel_size < 1:
            raise SettingsError(f"--tensor-parallel-size: at least 1; got {self.tensor_parallel_size}")
        if self.gateways is not None and not 1 <= self.gateways <= MAX_GATEWAYS:
            raise SettingsError(f"--gateways: expected auto, or 1 to {MAX_GATEWAYS}, got {self.gateways}")
        if self.drain_seconds < 0:
            raise SettingsError(f"--drain-seconds: expected 0 or more, got {self.drain_seconds}")

    @property
    def num_gateways(self) -> int:
        """1 until --gateways auto is decided (gateway_count.py)."""
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
        """Return the workers' --load-format: of the flag, the variable or --config."""
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
    """Who gets which of the words that are no option of `serve`: a flag takes the words after it along."""
    gateway: list[str] = []
    worker: list[str] = []
    target: list[str] | None = None
    for word in words:
        if word.startswith("--"):
            name = "--" + word.partition("=")[0].removeprefix("--no-").removeprefix("--")
            if name in SET_BY_SERVE:
                raise SettingsError(f"{name}: is set by serve itself")
            target = gateway if name in GATEWAY_FLAGS else worker
        if target is None:
            raise SettingsError(f"unexpected argument {word!r}: the model comes first, as in `serve MODEL --flag ...`")
        target.append(word)
    return PassedFlags(tuple(gateway), tuple(worker))
