"""Check that a response matches an API's document, with no field too many or too few."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jsonschema

FOLDER = Path(__file__).parent


class Description:
    def __init__(
        self,
        name: str,
        *,
        more: Mapping[str, Mapping[str, Any]] | None = None,
        nullable: Mapping[str, Iterable[str]] | None = None,
    ) -> None:
        """Create a validator.

        `more` has field types beyond the document, by schema, or by "Schema.field" for the objects of a list.
        `nullable` has fields that may be null.
        """
        self._schemas: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
        for schema, fields in (more or {}).items():
            name, _, items_of = schema.partition(".")
            changed = self._schemas[name]
            if items_of:
                changed = changed["properties"][items_of]["items"]
            changed["properties"] |= fields
        for schema, names in (nullable or {}).items():
            properties = self._schemas[schema]["properties"]
            for field in names:
                properties[field] = {"anyOf": [properties[field], {"type": "null"}]}

    def check(self, name: str, data: Any) -> None:
        """Raise AssertionError with the error and its place, as deep within unions as it can be located."""
        validator = jsonschema.Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": self._schemas})
        error = jsonschema.exceptions.best_match(validator.iter_errors(data))
        assert error is None, f"{name} at {error.json_path}: {error.message[:400]}\n{json.dumps(data)[:2000]}"
