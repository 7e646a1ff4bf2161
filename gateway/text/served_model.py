"""What the gateway needs of a model directory: tokenizer, chat template, end-of-sequence ids, context length.

Reads tokenizer.json, tokenizer_config.json, chat_template.jinja, config.json and generation_config.json; never weights.
The directory appears as a whole (it is renamed into place), so it is complete once config.json is there.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.text.chat_template import ChatTemplate
from gateway.text.tokenization import PromptEncoder


class ModelFilesError(ValueError):
    """The directory is there, but cannot be served; the message names the file."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    encoder: PromptEncoder
    eos_token_ids: frozenset[int]
    max_model_len: int
    vocab_size: int  # width of the logits: ids that the engine takes
    tells_thoughts: bool = False  # by the option of a reasoning parser


def is_complete(directory: Path) -> bool:
    return (directory / "config.json").is_file() and (directory / "tokenizer.json").is_file()


def load_served_model(directory: Path, *, max_model_len: int | None = None) -> ServedModel:
    """Raises ModelFilesError. Takes 0.3 s for a vocabulary of 49,152, so not on an event loop."""
    config = _read_json(directory / "config.json")
    generation = _read_json(directory / "generation_config.json", default={})
    try:
        own_max_model_len, vocab_size = int(config["max_position_embeddings"]), int(config["vocab_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise ModelFilesError(f"config.json: {error!r}") from error
    if max_model_len is not None and max_model_len > own_max_model_len:
        raise ModelFilesError(f"--max-model-len: {max_model_len} is more than the model's own {own_max_model_len}")
    return ServedModel(
        encoder=_encoder(directory),
        eos_token_ids=_token_ids(generation.get("eos_token_id", config.get("eos_token_id"))),
        max_model_len=max_model_len or own_max_model_len,
        vocab_size=vocab_size,
    )


def _encoder(directory: Path) -> PromptEncoder:
    tokenizer_config = _read_json(directory / "tokenizer_config.json", default={})
    source = _template_source(directory, tokenizer_config)
    special_tokens = {
        name: text
        for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        if (text := _token_text(tokenizer_config.get(name))) is not None
    }
    try:
        chat_template = ChatTemplate(source, special_tokens) if source else None
        return PromptEncoder((directory / "tokenizer.json").read_text(encoding="utf-8"), chat_template)
    except Exception as error:  # tokenizers raises bare Exception, jinja2 its own
        raise ModelFilesError(f"tokenizer.json or the chat template: {error}") from error


def _template_source(directory: Path, tokenizer_config: dict[str, Any]) -> str | None:
    own_file = directory / "chat_template.jinja"
    if own_file.is_file():
        return own_file.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):  # several named ones
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return template


def _token_text(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _token_ids(value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset(value) if isinstance(value, list) else frozenset((value,))


def _read_json(path: Path, default: dict[str, Any] | None = None) -> dict[str, Any]:
    if default is not None and not path.is_file():
        return default
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFilesError(f"{path.name}: {error}") from error
    if not isinstance(content, dict):
        raise ModelFilesError(f"{path.name}: expected a JSON object")
    return content
