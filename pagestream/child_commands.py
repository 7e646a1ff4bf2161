"""The command lines of the gateway and the workers that `pagestream serve` runs."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from pagestream.child_process import ChildCommand
from pagestream.directories import state_directory
from pagestream.gpus import environ_of_worker, visible_gpus
from pagestream.model_source import ModelSource
from pagestream.serve_settings import PassedFlags, ServeSettings

# Every worker that any `serve` runs is called so: what one of them left in the embedded store is known to be orphaned.
WORKER_ID_PREFIX = "serve"


def worker_base_id(fleet_id: str, number: int, life: int) -> str:
    """The id of one life of one worker; its incarnations append `.0`, `.1`, ..."""
    return f"{WORKER_ID_PREFIX}.{fleet_id}-{number}-{life}"


class ChildCommands:
    def __init__(
        self, settings: ServeSettings, flags: PassedFlags, config_path: Path | None, source: ModelSource, url: str
    ) -> None:
        self._settings = settings
        self._flags = flags
        self._url = url
        self._common = ["--model", str(source.directory)]
        name = settings.served_model_name or source.name
        # One a model: whoever serves another one would answer the lines of its batches with 404.
        self._files_dir = settings.files_dir or state_directory() / "files" / quote(name, safe="")
        self._common += ["--served-model-name", name]
        self._common += ["--drain-seconds", str(settings.drain_seconds), "--log-format", settings.log_format]
        if settings.otlp_traces_endpoint:
            self._common += ["--otlp-traces-endpoint", settings.otlp_traces_endpoint]
        if settings.vllm_metric_names:
            self._common += ["--vllm-metric-names"]
        if settings.max_model_len is not None:
            self._common += ["--max-model-len", str(settings.max_model_len)]
        if config_path is not None:
            self._common += ["--config", str(config_path)]

    def gateway(self, name: str) -> ChildCommand:
        address = ["--host", self._settings.host, "--port", str(self._settings.port)]
        if self._settings.gateways > 1:
            address += ["--reuse-port", "--own-port", "0"]  # a scrape of the shared one meets now this, now that one
        files = ["--files-dir", str(self._files_dir)]
        return self._command(name, "gateway", [*self._common, *address, *files, *self._flags.gateway])

    def worker(self, number: int, base_id: str) -> ChildCommand:
        argv = [*self._common, "--worker-id", base_id]
        if not self._flags.worker_has("--metrics-port"):
            argv += ["--metrics-port", "0"]  # several workers share this machine: each takes a free one and prints it
        if self._settings.workers > 1 and not self._flags.worker_has("--num-threads"):
            share = len(os.sched_getaffinity(0)) // self._settings.workers if hasattr(os, "sched_getaffinity") else 1
            argv += ["--num-threads", str(max(1, share))]
        environ = environ_of_worker(number, os.environ, visible_gpus(os.environ))
        return self._command(f"worker-{number}", "engine_worker", [*argv, *self._flags.worker], environ)

    def _command(
        self, name: str, module: str, arguments: Sequence[str], environ: Mapping[str, str] = os.environ
    ) -> ChildCommand:
        # By its environment: the URL may hold a password, and every user of this machine can read a command line.
        return _python(name, module, arguments, {**environ, "PAGESTREAM_REDIS_URL": self._url})


def _python(name: str, module: str, arguments: Sequence[str], environ: Mapping[str, str]) -> ChildCommand:
    # -P: a folder called `gateway` or `shared` in the user's current directory must not stand in for ours.
    argv = [sys.executable, "-P", "-m", module, *arguments]
    return ChildCommand(name=name, argv=argv, environ={**environ, "PYTHONUNBUFFERED": "1"})
