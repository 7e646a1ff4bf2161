"""Reduce an OpenAPI document to facts about responses: fields, their types, and which are required.

    python -m tests.spec.reduce openapi.yaml OUT.json NAME ...     NAME: a schema of a response

Descriptions, examples, defaults and bounds are dropped. Of a union of objects with a `type`, the types that this server
sends stay. An object has no other fields unless the document says so. `openai-2.3.0.json` comes from OpenAI's document
(openapi.documented.yml of 2026-05-31, MIT), `open-responses-2026-04-24.json` from the Open Responses specification
(openresponses.org, Apache 2.0).
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

SAID = frozenset(
    (
        "message", "function_call", "function_call_output", "reasoning", "compaction", "input_text", "output_text",
        "refusal", "reasoning_text", "text", "json_object", "json_schema", "function", "allowed_tools", "error",
        "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed",
        "response.output_item.added", "response.output_item.done", "response.content_part.added",
        "response.content_part.done", "response.output_text.delta", "response.output_text.done",
        "response.reasoning_text.delta", "response.reasoning_text.done", "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
    )
)  # fmt: skip
_REF = "#/components/schemas/"


class Reduction:
    def __init__(self, schemas: dict[str, Any]) -> None:
        self._schemas = schemas
        self.reduced: dict[str, Any] = {}

    def add(self, name: str) -> None:
        if name not in self.reduced:
            self.reduced[name] = {}  # being read; schemas refer to each other
            self.reduced[name] = self.of(self._schemas[name])

    def of(self, schema: dict[str, Any]) -> dict[str, Any]:
        if "$ref" in schema:
            name = schema["$ref"].removeprefix(_REF)
            self.add(name)
            return {"$ref": f"#/$defs/{name}"}
        if "allOf" in schema:
            return self.of(self._joined(schema["allOf"]))
        union = schema.get("anyOf") or schema.get("oneOf")
        if union:
            return {"anyOf": [self.of(branch) for branch in union if self._is_said(branch)]}
        reduced: dict[str, Any] = {key: schema[key] for key in ("type", "enum", "required") if key in schema}
        if "items" in schema:
            reduced["items"] = self.of(schema["items"])
        if "properties" in schema:
            reduced["properties"] = {name: self.of(value) for name, value in schema["properties"].items()}
            reduced["additionalProperties"] = bool(schema.get("additionalProperties"))
        return {"anyOf": [reduced, {"type": "null"}]} if schema.get("nullable") else reduced

    def _joined(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """Merge the parts of one object."""
        joined: dict[str, Any] = {"type": "object", "properties": {}, "required": []}
        for part in map(self._resolved, parts):
            whole = self._joined(part["allOf"]) if "allOf" in part else part
            if "properties" not in whole:
                return whole
            joined["properties"] |= whole["properties"]
            joined["required"] += whole.get("required", [])
        return joined

    def _resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        return self._schemas[schema["$ref"].removeprefix(_REF)] if "$ref" in schema else schema

    def _is_said(self, branch: dict[str, Any]) -> bool:
        kind = self._resolved(branch).get("properties", {}).get("type", {})
        values = kind.get("enum") or ([kind["const"]] if "const" in kind else [])
        return not values or not SAID.isdisjoint(values)


def main(document: str, out: str, *names: str) -> None:
    schemas = yaml.load(Path(document).read_text(), Loader=yaml.CSafeLoader)["components"]["schemas"]
    reduction = Reduction(schemas)
    for name in names:
        reduction.add(name)
    lines = (f"{json.dumps(name)}: {json.dumps(schema)}" for name, schema in sorted(reduction.reduced.items()))
    Path(out).write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
