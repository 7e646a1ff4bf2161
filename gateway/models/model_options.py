"""What is told of each served model at the start: its names, its directory, how its text is read."""

from dataclasses import dataclass
from pathlib import Path

from gateway.settings import REASONING_PARSERS, TOOL_CALL_PARSERS, GatewaySettings
from shared.models_file import ModelEntry, check_names, read_models
from shared.settings import SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    names: tuple[str, ...]  # the first is in answers, in metrics and in the store's keys; the others are aliases
    directory: Path
    max_model_len: int | None = None  # None: the model's own
    tool_call_parser: str = "auto"
    reasoning_parser: str = ""

    @property
    def name(self) -> str:
        return self.names[0]


def model_options(settings: GatewaySettings) -> tuple[ModelOptions, ...]:
    """Of --model, or of each entry of --models-file. Raises SettingsError."""
    if settings.models_file is not None:
        entries = read_models(settings.models_file)
    else:
        assert settings.model is not None, "settings have one of them"
        entries = [ModelEntry(model=str(settings.model), names=settings.served_model_name)]
    options = tuple(_options(entry, settings) for entry in entries)
    check_names(name for model in options for name in model.names)
    return options


def _options(entry: ModelEntry, settings: GatewaySettings) -> ModelOptions:
    directory = Path(entry.model)
    tool_call_parser, reasoning_parser = entry.tool_call_parser, entry.reasoning_parser
    return ModelOptions(
        names=entry.names or (directory.resolve().name,),
        directory=directory,
        max_model_len=entry.max_model_len or settings.max_model_len,
        tool_call_parser=_one_of(TOOL_CALL_PARSERS, tool_call_parser, "tool_call_parser") or settings.tool_call_parser,
        reasoning_parser=settings.reasoning_parser
        if reasoning_parser is None
        else _one_of(REASONING_PARSERS, reasoning_parser, "reasoning_parser"),
    )


def _one_of(known: tuple[str, ...], value: str | None, field: str) -> str:
    if value is not None and value not in known:
        raise SettingsError(f"--models-file: {field} is {value!r}; expected one of {', '.join(filter(None, known))}")
    return value or ""
