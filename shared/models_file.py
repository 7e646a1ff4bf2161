"""Read the file of --models-file: several models behind one gateway, each with its own queue and workers.

    [[models]]
    model = "/models/qwen"              # a value of --model
    names = ["qwen", "gpt-4o-mini"]     # name and aliases; default: the directory's name
    max_model_len = 8192                # this and the next five override the flags of the same name
    chat_template = "/models/tools.jinja"
    tool_call_parser = "hermes"
    reasoning_parser = "qwen3"
    generation_config = "none"
    task = "embed"
    workers = 2                         # number of workers; only for `pagestream serve`
    worker = { kv-cache-memory-bytes = "4G" }   # further flags of `pagestream worker` for this model

The programs check the values.
"""

import json
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec

from shared.settings import SettingsError


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    model: Annotated[str, msgspec.Meta(min_length=1)]
    names: tuple[str, ...] = ()
    max_model_len: Annotated[int, msgspec.Meta(ge=1)] | None = None
    chat_template: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    generation_config: str | None = None
    task: str | None = None
    workers: Annotated[int, msgspec.Meta(ge=1)] | None = None
    worker: dict[str, str | int | float | bool] = {}


class _ModelsFile(msgspec.Struct, forbid_unknown_fields=True):
    models: Annotated[list[ModelEntry], msgspec.Meta(min_length=1)]


def read_models(path: Path) -> list[ModelEntry]:
    """Read the entries of a file.

    Raises:
        SettingsError: If the file cannot be read or is invalid; the message names the file and the problem.
    """
    try:
        return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _ModelsFile).models
    except OSError as error:
        raise SettingsError(f"--models-file {path}: {error.strerror}") from error
    except ValueError as error:  # TOMLDecodeError, UnicodeDecodeError and msgspec's ValidationError are ValueErrors
        raise SettingsError(f"--models-file {path}: {error}") from error


def models_text(entries: Iterable[ModelEntry]) -> str:
    """Return `entries` as text for read_models()."""
    tables = []
    for entry in entries:
        fields: dict[str, Any] = msgspec.to_builtins(entry)
        worker = fields.pop("worker", {})
        lines = ["[[models]]", *(f"{key} = {_toml(value)}" for key, value in fields.items())]
        if worker:
            lines += ["[models.worker]", *(f"{_toml(key)} = {_toml(value)}" for key, value in worker.items())]
        tables.append("\n".join(lines))
    return "\n\n".join(tables) + "\n"


def check_names(names: Iterable[str]) -> None:
    """Check the names of all models.

    Raises:
        SettingsError: If a name is invalid or duplicate.
    """
    seen = set()
    for name in names:
        if not name or len(name) > 255 or any(character in "{}," or not character.isprintable() for character in name):
            raise SettingsError(
                f"model name {name[:80]!r}: expected 1 to 255 printable characters without braces and commas"
            )
        if name in seen:
            raise SettingsError(f"model name {name!r}: used twice; names and aliases must be unique")
        seen.add(name)


def _toml(value: Any) -> str:
    # JSON's strings, numbers, booleans, and lists are valid TOML, except that TOML requires DEL to be escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
