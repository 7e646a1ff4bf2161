"""Model families: config.json's `model_type` -> the module that makes its ModelSpec.

A family is one file with spec(config, generation) and one line here. Modules are imported on demand.
"""

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from engine_worker.model.architectures.config_types import check_types
from engine_worker.model.architectures.gguf_family import GgufFamily
from engine_worker.model.quantization_config import weight_format
from engine_worker.model.spec import ModelSpec
from shared.model_files import read_model_files

MODULES = {
    "ernie4_5": "ernie",
    "gemma2": "gemma",
    "gemma3_text": "gemma",
    "glm": "glm4",
    "glm4": "glm4",
    "glm4_moe": "glm4_moe",
    "gpt_oss": "gpt_oss",
    "granite": "granite",
    "granitemoe": "granitemoe",
    "granitemoehybrid": "granitemoehybrid",
    "granite_swa": "granite_swa",
    "helium": "helium",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2_moe",
    "llama": "llama",
    "ministral": "mistral",
    "ministral3": "ministral3",
    "mistral": "mistral",
    "mixtral": "mixtral",
    "nemotron_h": "nemotron_h",
    "olmo2": "olmo2",
    "olmo3": "olmo3",
    "olmoe": "olmoe",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_5_moe_text": "qwen3_next",
    "qwen3_5_text": "qwen3_next",
    "qwen3_moe": "qwen3_moe",
    "qwen3_next": "qwen3_next",
    "seed_oss": "seed_oss",
    "smollm3": "smollm3",
}

_GEMMA4 = (
    "Gemma 4 is not supported: its global layers have heads of 512 and other KV heads, and its router has a norm and "
    "scales; Gemma 3 is supported"
)
# Families that would load incompletely or as something else, with the reason.
REFUSED = {"gemma4_text": _GEMMA4, "gemma4_unified_text": _GEMMA4}

# llama.cpp's names of the families whose module has a GGUF.
GGUF_MODULES = {
    "gemma3": "gemma", "gpt-oss": "gpt_oss", "lfm2": "lfm2", "llama": "llama", "phi3": "phi3", "qwen2": "qwen2",
    "qwen3": "qwen3", "qwen3moe": "qwen3_moe",
}  # fmt: skip


def has_family(config: Mapping[str, Any]) -> bool:
    """Return whether config.json's model_type has a family here, or is refused here by name."""
    return str(config.get("model_type")) in (MODULES | REFUSED)


def spec_from_directory(directory: Path) -> ModelSpec:
    """Return the ModelSpec of a model directory.

    Raises:
        ValueError: If config.json has something that is not supported.
    """
    files = read_model_files(directory)
    return spec_from_json(files.config, files.generation)


def spec_from_json(config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelSpec:
    """Return the ModelSpec of config.json and generation_config.json.

    Raises:
        ValueError: If config.json has something that is not supported.
    """
    model_type = str(config.get("model_type"))
    if reason := REFUSED.get(model_type):
        raise ValueError(f"config.json: {reason}")
    if model_type not in MODULES:
        names = ", ".join(MODULES)
        raise ValueError(f"config.json: model_type {model_type!r} is not supported; supported: {names}")
    check_types(config)
    spec: ModelSpec = import_module(f"{__name__}.{MODULES[model_type]}").spec(config, generation)
    return replace(spec, quantization=weight_format(config))


def gguf_family_of(architecture: str) -> GgufFamily:
    """Return the family of a GGUF file's `general.architecture`.

    Raises:
        ValueError: If the family cannot be read from GGUF.
    """
    if architecture not in GGUF_MODULES:
        raise ValueError(f"GGUF architecture {architecture!r} is not supported; supported: {', '.join(GGUF_MODULES)}")
    family: GgufFamily = import_module(f"{__name__}.{GGUF_MODULES[architecture]}").GGUF
    return family
