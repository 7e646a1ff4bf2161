"""Convert writers' lists of module names to regular expressions that match whole names."""

import re
from collections.abc import Iterable
from fnmatch import translate
from typing import Any

from engine_worker.model.checkpoint import text_name


def exact_or_regex(names: Any, key: str) -> tuple[str, ...]:
    """Convert compressed-tensors' lists: whole names, or `re:` and an expression for the start of a name."""
    return tuple(_regex(name, key) if name.startswith("re:") else re.escape(_bare(name)) for name in _names(names, key))


def within(names: Any, key: str) -> tuple[str, ...]:
    """Convert fp8 lists of transformers and vLLM: names or their last parts with all submodules, or `re:` as above.

    Parts are whole words: `mlp.gate` is the router of a mixture of experts and does not match `mlp.gate_proj`.
    """
    return tuple(
        _regex(name, key) if name.startswith("re:") else rf"(?:.*\.)?{re.escape(_bare(name))}(?:\..*)?"
        for name in _names(names, key)
    )


def wildcards(names: Any, key: str) -> tuple[str, ...]:
    """Convert modelopt's lists: names with `*`, with all submodules."""
    found: Iterable[str] = [_bare(name) for name in _names(names, key)]
    return tuple(pattern for name in found for pattern in (translate(name), translate(f"{name}.*")))


def _names(names: Any, key: str) -> list[str]:
    if not isinstance(names or [], list) or not all(isinstance(name, str) for name in names or []):
        raise ValueError(f"config.json: {key} must be a list of module names, not {names!r}")
    return list(names or [])


def _regex(name: str, key: str) -> str:
    expression = name.removeprefix("re:")
    try:
        re.compile(expression)
    except re.error as error:
        raise ValueError(f"config.json: {key} has {name!r}, which is not a valid regular expression: {error}") from None
    return f"(?:{expression}).*"


def _bare(name: str) -> str:
    """Return the language model's name of a module; modules of other parts keep their names and never match."""
    return (text_name(f"{name}.") or f"{name}.").removesuffix(".")
