"""Whether what the server says is what a document of its API describes, with no field too many or too few."""

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
        """`more`: fields of a schema beyond the document's, with their types; `nullable`: fields that may be null."""
        self._schemas: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
        for schema, fields in (more or {}).items():
            self._schemas[schema]["properties"] |= fields
        for schema, names in (nullable or {}).items():
            properties = self._schemas[schema]["properties"]
            for field in names:
                properties[field] = {"anyOf": [properties[field], {"type": "null"}]}

    def check(self, name: str, data: Any) -> None:
        """Raises AssertionError with what is wrong and where, as deep within unions as it can be told."""
        validator = jsonschema.Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": self._schemas})
        error = jsonschema.exceptions.best_match(validator.iter_errors(data))
        assert error is None, f"{name} at {error.json_path}: {error.message[:400]}\n{json.dumps(data)[:2000]}"
