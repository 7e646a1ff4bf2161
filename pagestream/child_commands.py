"""The command lines and environments of the gateways, workers, and batch driver that `pagestream serve` runs."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pagestream.child_process import ChildCommand
from pagestream.directories import state_directory
from pagestream.gpus import environ_of_worker, groups_of_gpus, visible_gpus
from pagestream.nvlink import nvlinks
from pagestream.serve_settings import PassedFlags, ServeSettings
from pagestream.served_models import ServedModel, files_folder

# Prefix of the ids of all workers of any `serve`. With a new embedded store all their old requests are orphaned.
WORKER_ID_PREFIX = "serve"

# Threads of a linear layer that wait for each other spin for some 10 us and then sleep, unless the user's environment
# sets it. Without spinning a stream has half the tokens on an idle machine (19 instead of 45 per second on 2 cores);
# with OpenMP's default it has half of them on a busy one (14 instead of 23).
_SPINS = {"GOMP_SPINCOUNT": "5000"}
_SPIN_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")


def worker_base_id(fleet_id: str, number: int, life: int) -> str:
    """Return the id of one process of a worker; its incarnations append `.0`, `.1`, ..."""
    return f"{fleet_prefix(fleet_id)}.{number}-{life}"


def fleet_prefix(fleet_id: str) -> str:
    """Return the first part of the ids of all workers of one `serve`."""
    return f"{WORKER_ID_PREFIX}.{fleet_id}"


def usable_cores() -> int:
    """Return the number of CPUs that this process may use; 1 if it is unknown."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


class ChildCommands:
    def __init__(
        self,
        settings: ServeSettings,
        flags: PassedFlags,
        config_path: Path | None,
        models: Sequence[ServedModel],
        url: str,
        models_file: Path | None = None,
    ) -> None:
        """Prepare the commands.

        Args:
            settings: Settings of `serve`.
            flags: Further flags for gateways and workers.
            config_path: The file of --config.
            models: The served models.
            url: URL of the store.
            models_file: File of the models for the gateways, if there are several.
        """
        self._settings = settings
        self._flags = flags
        self._url = url
        self._models = models
        self._models_file = models_file
        self.files_dir = settings.files_dir or state_directory() / "files" / files_folder(models)
        self._common = ["--drain-seconds", str(settings.drain_seconds), "--log-format", settings.log_format]
        if settings.otlp_traces_endpoint:
            self._common += ["--otlp-traces-endpoint", settings.otlp_traces_endpoint]
        if settings.store_namespace:
            self._common += ["--store-namespace", settings.store_namespace]
        if settings.vllm_metric_names:
            self._common += ["--vllm-metric-names"]
        if config_path is not None:
            self._common += ["--config", str(config_path)]

    def gateway(self, name: str) -> ChildCommand:
        settings = self._settings
        address = ["--host", settings.host, "--port", str(settings.port)]
        if settings.num_gateways > 1:
            address += ["--reuse-port", "--own-port", "0"]  # a scrape of the shared port reaches any gateway
        return self._command(name, "gateway", self._of_a_gateway(*address))

    def batches(self) -> ChildCommand:
        """Return the command of the batch driver, which submits requests as a gateway with the same flags."""
        return self._command("batches", "gateway.batches.driver", self._of_a_gateway("--metrics-port", "0"))

    def _of_a_gateway(self, *address: str) -> list[str]:
        if self._models_file is not None:
            models = ["--models-file", str(self._models_file)]
        else:
            (model,) = self._models
            models = _model(model, model.names)
        models += _max_model_len(self._settings.max_model_len)
        return [*models, *self._common, *address, "--files-dir", str(self.files_dir), *self._flags.gateway]

    def worker(self, model: ServedModel, number: int, base_id: str) -> ChildCommand:
        """Return the command of a worker. `number` counts the workers of all models."""
        flags = PassedFlags((), (*self._flags.worker, *model.worker_flags))  # the flags of one model come last and win
        max_model_len = model.entry.max_model_len or self._settings.max_model_len
        argv = [*_model(model, [model.name]), *_max_model_len(max_model_len), *self._common, "--worker-id", base_id]
        if not flags.worker_has("--metrics-port"):
            argv += ["--metrics-port", str(self._settings.metrics_port_of(number))]
        size, num_ranks = model.tensor_parallel_size, sum(other.num_ranks for other in self._models)
        if size > 1:
            argv += ["--tensor-parallel-size", str(size)]
        if num_ranks > 1 and not flags.worker_has("--num-threads"):
            argv += ["--num-threads", str(max(1, usable_cores() // num_ranks))]
        environ = self._environ(number)
        return self._command(f"worker-{number}", "engine_worker", [*argv, *flags.worker], environ)

    def _environ(self, number: int) -> dict[str, str]:
        """Return the environment of a worker, with its GPUs."""
        sizes = [model.tensor_parallel_size for model in self._models for _ in range(model.num_workers)]
        gpus = visible_gpus(os.environ)
        links = nvlinks(gpus) if max(sizes) > 1 else ()
        spins = {} if any(name in os.environ for name in _SPIN_VARIABLES) else _SPINS
        return spins | environ_of_worker(groups_of_gpus(sizes, gpus, links)[number], os.environ, gpus)

    def _command(
        self, name: str, module: str, arguments: Sequence[str], environ: Mapping[str, str] = os.environ
    ) -> ChildCommand:
        # In the environment, because the URL may contain a password, and all users of the machine can read arguments.
        return _python(name, module, arguments, {**environ, "PAGESTREAM_REDIS_URL": self._url})


def _python(name: str, module: str, arguments: Sequence[str], environ: Mapping[str, str]) -> ChildCommand:
    # -P: a folder `gateway` or `shared` in the current directory must not be imported instead of ours.
    argv = [sys.executable, "-P", "-m", module, *arguments]
    return ChildCommand(name=name, argv=argv, environ={**environ, "PYTHONUNBUFFERED": "1"})


def _model(model: ServedModel, names: Sequence[str]) -> list[str]:
    return ["--model", str(model.source.directory), "--served-model-name", *names]


def _max_model_len(num_tokens: int | None) -> list[str]:
    return [] if num_tokens is None else ["--max-model-len", str(num_tokens)]
