"""All APIs. A new one is a folder with a module `routes` that has `API`, and one name here."""

from collections.abc import Mapping
from importlib import import_module

from gateway.pipeline.answer_kind import AnswerKind
from gateway.pipeline.api import Api


def _loaded(name: str) -> Api:
    api: Api = import_module(f"gateway.apis.{name}.routes").API
    return api


APIS: tuple[Api, ...] = tuple(
    map(
        _loaded,
        (
            "chat",
            "completions",
            "embeddings",
            "anthropic",
            "responses",
            "requests",
            "models",
            "tokenize",
            "files",
            "ollama",
            "unserved",
        ),
    )
)
ALL_KINDS: Mapping[str, AnswerKind] = {kind.name: kind for api in APIS for kind in api.kinds}
