"""The models of one `pagestream serve`: the one of --model, or those of --models-file, with the workers of each.

It is used at the start of `serve`. It knows names and directories, and nothing of networks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from msgspec.structs import replace

from pagestream.model_source import ModelSource, find_model
from pagestream.serve_settings import DEMO, SET_BY_SERVE, ServeSettings
from shared.models_file import ModelEntry, check_names, read_models
from shared.settings import SettingsError

_SIZE_FLAG = "--tensor-parallel-size"
_OWN_FLAGS = SET_BY_SERVE | {"--model", "--served-model-name"}


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
