"""Defaults of sampling as a model's makers would have them, for requests that do not say: generation_config.json. Pure.

The fields are those that vLLM takes from there; `do_sample` is not among them: a request without a temperature is
sampled. Does not know who uses them: requests/planning.py puts them where a request names nothing.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from shared.model_files import Json, ModelFilesError


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """None: as the API has it. Ranges are those of the API."""

    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None
    max_new_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None


def generation_defaults(source: str, file: Json) -> dict[str, Any]:
    """Fields by name, without those that are as the API has them. `source`: as --generation-config names it; `file`:
    generation_config.json. Raises ModelFilesError."""
    if source != "auto":
        return {}
    try:
        return msgspec.to_builtins(msgspec.convert(file, GenerationDefaults))  # type: ignore[no-any-return]
    except msgspec.ValidationError as error:
        raise ModelFilesError(
            f"generation_config.json: {error}; --generation-config none leaves its defaults alone"
        ) from error
