"""The models of one `pagestream serve`: the one of --model, or those of --models-file, with the workers of each. One is
named as `demo`, a .gguf file, a directory, or ORG/NAME on the hub.

It is used at the start of `serve`, before the workers. It knows names and where files are, and nothing of networks.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from msgspec.structs import replace

from pagestream.demo_model import DEMO_MODEL_NAME, demo_model_directory, prepare_demo_model
from pagestream.gguf_model import ModelUnavailable, convert_once, converted_directory
from pagestream.hub_model import DEFAULT_REVISION, hub_directory, is_hub_name, prepare_hub_model
from pagestream.phases import PhaseReport
from pagestream.serve_settings import DEMO, SET_BY_SERVE, ServeSettings
from shared.models_file import ModelEntry, check_names, read_models
from shared.settings import SettingsError

_SIZE_FLAG = "--tensor-parallel-size"
_OWN_FLAGS = SET_BY_SERVE | {"--model", "--served-model-name"}


@dataclass(frozen=True)
class ModelSource:
    """`directory` is known before it exists, so that a gateway can be started to tell of the preparation."""

    name: str
    directory: Path
    prepare: Callable[[PhaseReport], Awaitable[object]]  # raises ModelUnavailable


def find_model(model: str, revision: str = DEFAULT_REVISION) -> ModelSource:
    """Raises ModelUnavailable for what is none of them. `revision`: of a model on the hub. What is here goes first."""
    if model == DEMO:
        return ModelSource(DEMO_MODEL_NAME, demo_model_directory(), prepare_demo_model)
    path = Path(model).expanduser().resolve()
    if path.is_file() and path.suffix == ".gguf":
        target = converted_directory(path)
        return ModelSource(path.stem, target, lambda report: convert_once(path, target, report))
    if path.is_dir():
        return ModelSource(path.name, path, lambda report: _check_directory(path))
    if is_hub_name(model) and not path.exists():
        directory = hub_directory(model, revision)
        return ModelSource(model, directory, lambda report: prepare_hub_model(model, revision, report))
    kind = "is no model directory and no .gguf file" if path.exists() else "does not exist"
    raise ModelUnavailable(f"{model} {kind}; give a directory, a .gguf file, ORG/NAME, or the word {DEMO}")


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
    worker_flags: tuple[str, ...] = ()  # of this model's workers alone
    tensor_parallel_size: int = 1  # ranks of each worker

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def num_ranks(self) -> int:
        """Processes that have a part of the model, of all workers."""
        return self.num_workers * self.tensor_parallel_size

    @property
    def resolved(self) -> ModelEntry:
        """For a gateway, which takes directories only: those of downloads and .gguf files may come later."""
        return replace(self.entry, model=str(self.source.directory), names=self.names)


def served_models(settings: ServeSettings) -> list[ServedModel]:
    """Raises SettingsError, and ModelUnavailable for what is no model."""
    if settings.models_file is not None:
        entries = read_models(settings.models_file)
    else:
        entries = [ModelEntry(model=settings.model or DEMO, names=settings.served_model_name)]
    models = [_served(entry, settings) for entry in entries]
    check_names(name for model in models for name in model.names)
    return models


def files_folder(models: Sequence[ServedModel]) -> str:
    """One a set of models: whoever serves other ones would answer the lines of its batches with 404."""
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
            raise SettingsError(f"--models-file: worker.{key}: is set by serve itself")
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
    raise SettingsError(f"--models-file: worker.{_SIZE_FLAG.removeprefix('--')}: 1 or more; got {value!r}")
