"""The shapes of models, for the API description."""

from typing import Literal

import msgspec


class ModelBody(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None  # null: not loaded yet
    generation_defaults: dict[str, float] = {}  # from generation_config.json, if it has any


class ModelListBody(msgspec.Struct, kw_only=True):
    object: Literal["list"]
    data: list[ModelBody]
