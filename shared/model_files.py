"""Read the JSON files of a model directory, for gateway, worker, and estimate.

In a checkpoint of several parts (for example text and images), the language model is in `text_config`. Only that part
is served, so it is unwrapped here.

The files of sentence-transformers, modules.json and the config.json of its Pooling module, mark an embedding model.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeAlias

Json: TypeAlias = Mapping[str, Any]

# Fields of the whole checkpoint, which may be missing in `text_config`.
_OF_THE_WHOLE = (
    "bos_token_id", "dtype", "eos_token_id", "pad_token_id", "quantization_config", "tie_word_embeddings",
    "torch_dtype",
)  # fmt: skip

# Published files omit defaults of transformers' configuration classes; a gateway needs these.
_DEFAULTS: Mapping[str, Json] = {"gemma3_text": {"vocab_size": 262_208, "max_position_embeddings": 131_072}}


_LAST_TOKEN = "pooling_mode_lasttoken"


class Task(StrEnum):
    """What a model is served for: `--task`."""

    GENERATE = "generate"
    EMBED = "embed"  # vectors of texts
    SCORE = "score"  # the probability that the model answers yes


class ModelFilesError(ValueError):
    """The directory cannot be served; the message names the file and the problem."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    config: Json  # of the language model
    generation: Json  # empty without generation_config.json

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Return the ids of generation_config.json, which has precedence, else of config.json."""
        value = self.generation.get("eos_token_id", self.config.get("eos_token_id"))
        if value is None:
            return ()
        return tuple(value) if isinstance(value, list) else (value,)


def read_model_files(directory: Path) -> ModelFiles:
    """Read the files of a model directory.

    Raises:
        ModelFilesError: If it has no valid config.json.
    """
    config = directory / "config.json"
    if not config.is_file():
        what = "is not a directory" if directory.exists() else "does not exist"
        what = "has no config.json" if directory.is_dir() else what
        raise ModelFilesError(f"--model: {directory} {what}; expected a model directory in Hugging Face format")
    generation = directory / "generation_config.json"
    known = _with_modelopt(text_part(read_json(config)), directory / "hf_quant_config.json")
    if _pooling_module(directory) is not None:
        known = {**known, "tie_word_embeddings": True}  # the checkpoint has no head
    return ModelFiles(known, read_json(generation) if generation.is_file() else {})


def checked_max_model_len(max_model_len: int | None, longest: int) -> int:
    """Return the context length to serve: --max-model-len, or the model's. Raises ModelFilesError if it is longer."""
    if max_model_len is not None and max_model_len > longest:
        raise ModelFilesError(
            f"--max-model-len: expected at most {longest}, the model's positions; got {max_model_len}"
        )
    return max_model_len or longest


def task_of(directory: Path) -> Task:
    """Return the task that the files of a model directory name.

    Raises:
        ModelFilesError: If it is an embedding model that does not pool the last token.
    """
    module = _pooling_module(directory)
    if module is None:
        return Task.SCORE if "classifier_from_token" in read_model_files(directory).config else Task.GENERATE
    modes = read_json(directory / module / "config.json")
    used = [name for name, value in modes.items() if name.startswith("pooling_mode_") and value is True]
    if used != [_LAST_TOKEN]:
        raise ModelFilesError(
            f"{module}/config.json: expected {_LAST_TOKEN}, the only supported pooling; got {', '.join(used) or 'none'}"
        )
    return Task.EMBED


def _pooling_module(directory: Path) -> str | None:
    """Return the folder of the Pooling module of sentence-transformers."""
    path = directory / "modules.json"
    modules = _read(path) if path.is_file() else []
    for module in modules if isinstance(modules, list) else ():
        if isinstance(module, dict) and str(module.get("type")).endswith(".Pooling"):
            return str(module.get("path"))
    return None


def _with_modelopt(config: Json, beside: Path) -> Json:
    """Add the quantization that NVIDIA's modelopt writes to a separate file; config.json has it since 2025 only."""
    if config.get("quantization_config") or not beside.is_file():
        return config
    return {**config, "quantization_config": {"quant_method": "modelopt", **read_json(beside)}}


def text_part(config: Json) -> Json:
    """Return the part of config.json about the language model."""
    inner = config.get("text_config")
    if not isinstance(inner, dict):
        return _with_defaults(config)
    return _with_defaults({key: config[key] for key in _OF_THE_WHOLE if key in config} | inner)


def _with_defaults(config: Json) -> Json:
    model_type = config.get("model_type")
    found = _DEFAULTS.get(model_type) if isinstance(model_type, str) else None
    return config if found is None else {**found, **config}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ModelFilesError: If the file is not a JSON object.
    """
    content = _read(path)
    if not isinstance(content, dict):
        raise ModelFilesError(f"{path} is not a JSON object")
    return content


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFilesError(f"{path} is not JSON: {error}") from error
