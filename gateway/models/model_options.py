"""What is told of each served model at the start: its names, its directory, how its text is read."""

from dataclasses import dataclass
from pathlib import Path

from gateway.settings import GatewaySettings


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
    return (
        ModelOptions(
            names=(settings.model_name,),
            directory=settings.model,
            max_model_len=settings.max_model_len,
            tool_call_parser=settings.tool_call_parser,
            reasoning_parser=settings.reasoning_parser,
        ),
    )
