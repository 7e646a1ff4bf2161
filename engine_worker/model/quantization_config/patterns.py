"""Lists of modules as writers of checkpoints give them -> regular expressions of whole names. Pure.

It is used by the files beside it, at a worker's start. It does not know which modules a network has.
"""

import re
from collections.abc import Iterable
from fnmatch import translate
from typing import Any

from engine_worker.model.checkpoint import text_name


def exact_or_regex(names: Any, key: str) -> tuple[str, ...]:
    """compressed-tensors': a whole name, or `re:` and an expression of its beginning."""
    return tuple(_regex(name, key) if name.startswith("re:") else re.escape(_bare(name)) for name in _names(names, key))


def within(names: Any, key: str) -> tuple[str, ...]:
    """transformers' and vLLM's of fp8: a name or the last parts of names, with all modules inside; or `re:` as above.

    Not a part of a word: `mlp.gate` is the router of a network of experts, and no `mlp.gate_proj`.
    """
    return tuple(
        _regex(name, key) if name.startswith("re:") else rf"(?:.*\.)?{re.escape(_bare(name))}(?:\..*)?"
        for name in _names(names, key)
    )


def wildcards(names: Any, key: str) -> tuple[str, ...]:
    """modelopt's: names with `*`, with all modules inside."""
    found: Iterable[str] = [_bare(name) for name in _names(names, key)]
    return tuple(pattern for name in found for pattern in (translate(name), translate(f"{name}.*")))


def _names(names: Any, key: str) -> list[str]:
    if not isinstance(names or [], list) or not all(isinstance(name, str) for name in names or []):
        raise ValueError(f"config.json: {key} must be a list of names of modules, not {names!r}")
    return list(names or [])


def _regex(name: str, key: str) -> str:
    expression = name.removeprefix("re:")
    try:
        re.compile(expression)
    except re.error as error:
        raise ValueError(f"config.json: {key} has {name!r}, which is no regular expression: {error}") from None
    return f"(?:{expression}).*"


def _bare(name: str) -> str:
    """The language model's own name of a module of a checkpoint of several parts; of others their own, never met."""
    return (text_name(f"{name}.") or f"{name}.").removesuffix(".")
