"""A model directory as the gateway needs it: tokenizer, chat template, end-of-sequence ids, and context length.

It reads tokenizer.json, tokenizer_config.json, chat_template.jinja, config.json and generation_config.json, never
weights. A directory is renamed into place, so it is complete once config.json exists.

GET /tokenizer_info follows vLLM's format, from which lm-eval takes special tokens and the template. Only fields of
tokenizer_config.json that define tokenization are returned, because others may contain local paths. Sampling defaults
are the fields that vLLM takes from generation_config.json; `do_sample` is ignored, so a request without a temperature
is sampled.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import jinja2
import msgspec
from msgspec import Meta
from tokenizers import Tokenizer

from gateway.text.chat_template import ChatTemplate
from gateway.text.parsers.formats import CallFormat, ReasoningFormat, call_format, reasoning_format
from gateway.text.tokenization import PromptEncoder
from shared.grammars import check_grammar
from shared.messages import Grammar, GrammarKind
from shared.model_files import (
    Json,
    ModelFilesError,
    Task,
    checked_max_model_len,
    read_json,
    read_model_files,
)
from shared.version import VERSION


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling defaults of a model; None keeps the API's default. Ranges are those of the API."""

    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None
    max_new_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None


def generation_defaults(source: str, file: Json) -> dict[str, Any]:
    """Return the model's sampling defaults by field name.

    Args:
        source: Value of --generation-config.
        file: Content of generation_config.json.

    Raises:
        ModelFilesError: If a value is out of range.
    """
    if source != "auto":
        return {}
    try:
        return msgspec.to_builtins(msgspec.convert(file, GenerationDefaults))  # type: ignore[no-any-return]
    except msgspec.ValidationError as error:
        raise ModelFilesError(f"generation_config.json: {error}; --generation-config none ignores this file") from error


SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_MORE_TOKENS = ("cls_token", "sep_token", "mask_token")
_FLAGS = (
    "add_bos_token",
    "add_eos_token",
    "add_prefix_space",
    "clean_up_tokenization_spaces",
    "legacy",
    "spaces_between_special_tokens",
    "split_special_tokens",
    "use_default_system_prompt",
)
_WORDS = {"errors": ("strict", "ignore", "replace"), "padding_side": ("left", "right")}
_GENERIC_CLASS = "PreTrainedTokenizerFast"  # the transformers class that reads any tokenizer.json


def tokenizer_info(config: Mapping[str, Any], tokenizer: Tokenizer, chat_template: str | None) -> dict[str, Any]:
    """Return the body of GET /tokenizer_info from an unvalidated tokenizer_config.json."""
    named = config.get("tokenizer_class")
    is_name = isinstance(named, str) and named.isidentifier()
    more = config.get("additional_special_tokens")
    added = tokenizer.get_added_tokens_decoder()
    info: dict[str, Any] = {"tokenizer_class": named if is_name else _GENERIC_CLASS}
    info |= {name: token_text(config.get(name)) for name in SPECIAL_TOKENS}  # null if absent
    info |= {name: text for name in _MORE_TOKENS if (text := token_text(config.get(name))) is not None}
    if isinstance(more, list):
        info["additional_special_tokens"] = [text for token in more if (text := token_text(token)) is not None]
    info |= {name: config[name] for name in _FLAGS if isinstance(config.get(name), bool)}
    info |= {name: config[name] for name, words in _WORDS.items() if config.get(name) in words}
    longest = config.get("model_max_length")
    if isinstance(longest, int | float) and not isinstance(longest, bool) and 0 < longest < float("inf"):
        info["model_max_length"] = int(longest)
    info["added_tokens_decoder"] = {str(token_id): added[token_id].content for token_id in sorted(added)}
    return info | ({"chat_template": chat_template} if chat_template else {})


def token_text(token: Any) -> str | None:
    """Return the text of a special token, which is stored as a string or as an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


_PROCESSOR_TEMPLATE = "chat_template.json"  # of models that also see images
_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    _PROCESSOR_TEMPLATE,
    "model.safetensors.index.json",
)


@dataclass(frozen=True, slots=True)
class LoadedFrom:
    """The arguments of load_served_model()."""

    directory: Path
    max_model_len: int
    generation_config: str
    chat_template: Path | None


@dataclass(frozen=True, slots=True)
class ServedModel:
    encoder: PromptEncoder
    eos_token_ids: frozenset[int]
    max_model_len: int
    vocab_size: int  # width of the logits; token ids must be smaller
    hidden_size: int  # of a vector; 0: config.json does not say
    answers: tuple[str, str]  # the tokens for no and yes, of a model with the task score
    fingerprint: str  # digest of the files read here and of the release
    tokenizer_info: dict[str, Any]
    defaults: dict[str, Any]  # sampling defaults by field name
    tool_call_parser: str = "auto"  # value of --tool-call-parser
    reasoning_parser: str = "auto"  # value of --reasoning-parser
    task: Task = Task.GENERATE
    loaded_from: LoadedFrom | None = None

    @property
    def calls(self) -> CallFormat:
        """How the model writes tool calls."""
        return call_format(self.tool_call_parser, self.encoder.tools_template)

    @property
    def reasoning(self) -> ReasoningFormat | None:
        """How the model writes reasoning; None if reasoning is not parsed."""
        return reasoning_format(self.reasoning_parser, self.encoder.template_source)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the source and the options; each process loads the files once."""
        options = {field.name: getattr(self, field.name) for field in fields(self) if field.default is not MISSING}
        return _sent_model, (self.loaded_from, options)


def _sent_model(loaded_from: LoadedFrom, options: dict[str, Any]) -> ServedModel:
    return replace(_loaded_here(loaded_from), **options)


@lru_cache
def _loaded_here(source: LoadedFrom) -> ServedModel:
    return load_served_model(
        source.directory,
        max_model_len=source.max_model_len,
        generation_config=source.generation_config,
        chat_template=source.chat_template,
    )


def is_complete(directory: Path) -> bool:
    return (directory / "config.json").is_file() and (directory / "tokenizer.json").is_file()


def load_served_model(
    directory: Path,
    *,
    max_model_len: int | None = None,
    generation_config: str = "auto",
    chat_template: Path | None = None,
) -> ServedModel:
    """Load a model directory; 0.3 s for a vocabulary of 49,152, so do not call it on an event loop.

    Args:
        directory: Directory with the model's files.
        max_model_len: Context length to serve, in tokens; default: the model's own.
        generation_config: Value of --generation-config.
        chat_template: A file to use instead of the model's template.

    Raises:
        ModelFilesError: If a file is invalid or the context length exceeds the model's.
    """
    files = read_model_files(directory)
    try:
        own_max_model_len, vocab_size = (int(files.config[key]) for key in ("max_position_embeddings", "vocab_size"))
    except (KeyError, TypeError, ValueError) as error:
        raise ModelFilesError(f"config.json: {error!r}") from error
    max_model_len = checked_max_model_len(max_model_len, own_max_model_len)
    tokenizer_file = directory / "tokenizer_config.json"
    tokenizer_config = read_json(tokenizer_file) if tokenizer_file.is_file() else {}
    source = read_chat_template(chat_template) if chat_template else _template_source(directory, tokenizer_config)
    encoder = _encoder(directory, tokenizer_config, source)
    return ServedModel(
        encoder=encoder,
        eos_token_ids=frozenset(files.eos_token_ids),
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        hidden_size=int(files.config.get("hidden_size") or 0),
        answers=_answers(files.config.get("classifier_from_token", ["no", "yes"])),
        fingerprint=_fingerprint([*(directory / name for name in _FILES), *([chat_template] if chat_template else [])]),
        tokenizer_info=tokenizer_info(tokenizer_config, encoder.tokenizer, source),
        defaults=generation_defaults(generation_config, files.generation),
        loaded_from=LoadedFrom(directory, max_model_len, generation_config, chat_template),
    )


def read_chat_template(path: Path) -> str:
    """Return a template; raise ModelFilesError if the file cannot be read or is none."""
    try:
        return ChatTemplate(path.read_text(encoding="utf-8"), {}).source
    except OSError as error:
        raise ModelFilesError(f"{path}: {error.strerror}") from error
    except (ValueError, jinja2.TemplateError) as error:
        raise ModelFilesError(f"{path}: {error}") from error


def _answers(tokens: Any) -> tuple[str, str]:
    """Read the field that vLLM takes from --hf-overrides."""
    try:
        return msgspec.convert(tokens, tuple[str, str])
    except msgspec.ValidationError as error:
        raise ModelFilesError(
            f"config.json: classifier_from_token: expected the tokens for no and yes; {error}"
        ) from error


def _encoder(directory: Path, tokenizer_config: dict[str, Any], source: str | None) -> PromptEncoder:
    special_tokens = {
        name: text for name in SPECIAL_TOKENS if (text := token_text(tokenizer_config.get(name))) is not None
    }
    try:
        chat_template = ChatTemplate(source, special_tokens) if source else None
        return PromptEncoder((directory / "tokenizer.json").read_text(encoding="utf-8"), chat_template)
    except Exception as error:  # tokenizers raises Exception itself
        raise ModelFilesError(f"tokenizer.json or the chat template: {error}") from error


def _fingerprint(files: Iterable[Path]) -> str:
    """Return a digest that is equal at all gateways of a release with these files."""
    digest = hashlib.sha256(VERSION.encode())
    for path in files:
        content = path.read_bytes() if path.is_file() else b""
        digest.update(len(content).to_bytes(8, "big") + content)
    return f"fp_{digest.hexdigest()[:10]}"


def _template_source(directory: Path, tokenizer_config: dict[str, Any]) -> str | None:
    own_file = directory / "chat_template.jinja"
    if own_file.is_file():
        return own_file.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if template is None and (of_processor := directory / _PROCESSOR_TEMPLATE).is_file():
        template = read_json(of_processor).get("chat_template")
    if isinstance(template, list):  # several named templates
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return template


@dataclass(frozen=True, slots=True)
class ModelLimits:
    max_model_len: int
    vocab_size: int
    max_beam_width: int | None = None  # None: no worker has said how many sequences it runs


def get_ready(models: Sequence[ServedModel], *_: object) -> None:
    """Load tokenizers and the grammar compiler, so that the first request does not pay for them."""
    for model in models:
        model.encoder.encode_text(" ", add_special_tokens=False)
    check_grammar(Grammar(GrammarKind.REGEX, "a"))
