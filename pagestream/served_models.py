"""The models of one `pagestream serve` with their workers: the model of --model, or those of --models-file.

A model is `demo`, a .gguf file, a directory, or ORG/NAME[:TAG] on the hub.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from msgspec.structs import replace

from pagestream.demo_model import DEMO_MODEL_NAME, demo_model_directory, prepare_demo_model
from pagestream.gguf_model import ModelUnavailable, convert_once, converted_directory
from pagestream.hub_model import DEFAULT_REVISION, hub_model
from pagestream.phases import PhaseConsole, PhaseReport
from pagestream.serve_settings import DEMO, SET_BY_SERVE, ServeSettings
from shared.models_file import ModelEntry, check_names, read_models
from shared.settings import SettingsError

_SIZE_FLAG = "--tensor-parallel-size"
_OWN_FLAGS = SET_BY_SERVE | {"--model", "--served-model-name"}


@dataclass(frozen=True)
class ModelSource:
    """A model and its preparation. `directory` may not exist yet, so that gateways start before the preparation."""

    name: str
    directory: Path
    prepare: Callable[[PhaseReport], Awaitable[object]]  # raises ModelUnavailable


def find_model(model: str, revision: str = DEFAULT_REVISION) -> ModelSource:
    """Find a model; local files have precedence over the hub.

    Args:
        model: A directory, a .gguf file, ORG/NAME[:TAG], or `demo`.
        revision: Branch, tag, or commit on the hub.

    Raises:
        ModelUnavailable: If `model` is none of these.
    """
    if model == DEMO:
        return ModelSource(DEMO_MODEL_NAME, demo_model_directory(), prepare_demo_model)
    path = Path(model).expanduser().resolve()
    if path.is_file() and path.suffix == ".gguf":
        target = converted_directory(path)
        return ModelSource(path.stem, target, lambda report: convert_once(path, target, report))
    if path.is_dir():
        return ModelSource(path.name, path, lambda report: _check_directory(path))
    if not path.exists() and (on_hub := hub_model(model, revision)) is not None:
        return ModelSource(model, on_hub.directory, on_hub.prepare)
    kind = "is not a model directory or .gguf file" if path.exists() else "does not exist"
    raise ModelUnavailable(f"--model: {model} {kind}; expected a directory, a .gguf file, ORG/NAME[:TAG], or {DEMO}")


def prepared_directory(model: str, console: PhaseConsole) -> Path:
    """Return the directory of a model, downloaded and converted if necessary. Raises ModelUnavailable."""
    source = find_model(model)
    asyncio.run(_prepare(source, console))
    return source.directory


async def _prepare(source: ModelSource, console: PhaseConsole) -> None:
    def report(phase: str, progress: float, detail: str) -> None:
        console.update("model", phase, progress, detail)

    await source.prepare(report)
    console.end("model")


async def _check_directory(path: Path) -> None:
    missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]
    if missing:
        raise ModelUnavailable(f"{path} has no {' and no '.join(missing)}")


@dataclass(frozen=True)
class ServedModel:
    names: tuple[str, ...]
    source: ModelSource
    entry: ModelEntry
    num_workers: int
    worker_flags: tuple[str, ...] = ()  # only for this model's workers
    tensor_parallel_size: int = 1  # ranks of each worker

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks of all workers."""
        return self.num_workers * self.tensor_parallel_size

    @property
    def resolved(self) -> ModelEntry:
        """Return the entry for a gateway, which accepts directories only. The directory may not exist yet."""
        return replace(self.entry, model=str(self.source.directory), names=self.names)


def served_models(settings: ServeSettings) -> list[ServedModel]:
    """Return the models of the settings.

    Raises:
        SettingsError: If --models-file is invalid.
        ModelUnavailable: If a model cannot be found.
    """
    if settings.models_file is not None:
        entries = read_models(settings.models_file)
    else:
        entries = [ModelEntry(model=settings.model or DEMO, names=settings.served_model_name)]
    models = [_served(entry, settings) for entry in entries]
    check_names(name for model in models for name in model.names)
    return models


def files_folder(models: Sequence[ServedModel]) -> str:
    """Return the folder of a set of models; with other models, lines of its batches would fail with 404."""
    return quote("+".join(sorted(model.name for model in models)), safe="")


def _served(entry: ModelEntry, settings: ServeSettings) -> ServedModel:
    source = find_model(entry.model, settings.revision)
    flags: list[str] = []
    size = settings.tensor_parallel_size
    for key, value in entry.worker.items():
        flag = "--" + key.replace("_", "-")
        if flag == _SIZE_FLAG:
            size = _size(value)
            continue
        if flag in _OWN_FLAGS:
            raise SettingsError(f"--models-file: worker.{key}: set by serve; remove it")
        if isinstance(value, bool):
            flags.append(flag if value else "--no-" + flag.removeprefix("--"))
        else:
            flags += [flag, str(value)]
    return ServedModel(
        entry.names or (source.name,), source, entry, entry.workers or settings.workers, tuple(flags), size
    )


def _size(value: object) -> int:
    if isinstance(value, int) and value >= 1:
        return value
    raise SettingsError(f"--models-file: worker.{_SIZE_FLAG.removeprefix('--')}: expected 1 or more, got {value!r}")
