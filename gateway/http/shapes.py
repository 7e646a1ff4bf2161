"""The shapes of errors and probes, for the API description.

Schemathesis checks real answers against them: additional fields are allowed, missing or different ones are not.
"""

from typing import Any

import msgspec


class ErrorDetail(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None  # the invalid field, such as messages[0].role
    code: str | None


class ErrorBody(msgspec.Struct, kw_only=True):
    """The shape of every error."""

    error: ErrorDetail


class StateBody(msgspec.Struct, kw_only=True):
    state: str


class LoadBody(msgspec.Struct, kw_only=True):
    server_load: int


class ReadinessBody(StateBody, kw_only=True):
    phase: str
    progress: float
    detail: str
    elapsed_s: float
    workers: list[dict[str, Any]]
    models: dict[str, str]  # name -> state


class StoreReadinessBody(StateBody, kw_only=True):
    store_write_seconds: float | None  # null: the write failed
    ready_workers: int
    ready_models: int  # those that take requests
    models: int


class VersionBody(msgspec.Struct, kw_only=True):
    version: str
