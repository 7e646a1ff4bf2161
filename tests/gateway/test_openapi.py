"""/openapi.json is complete, valid and true. schemathesis checks a gateway with a scripted engine against it."""

import asyncio
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.gateway.conftest import Gateway
from tests.gateway.fake_inference import says

SCHEMATHESIS = Path(sys.executable).with_name("schemathesis")


@pytest.fixture
async def gateway(start_gateway: Callable[..., Any], tmp_path: Path) -> Gateway:
    """Start a gateway with every route."""
    gateway: Gateway = await start_gateway(files_dir=tmp_path / "kept")
    return gateway


async def description(gateway: Gateway) -> dict[str, Any]:
    async with gateway.session.get("/openapi.json") as response:
        assert response.status == 200
        return await response.json()


async def test_every_route_is_described(gateway: Gateway) -> None:
    """A failure lists the routes without an entry in OPERATIONS of their module."""
    paths = (await description(gateway))["paths"]
    described = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    routes = {(method, path) for method, path in gateway.routes if method != "HEAD"}
    assert described == routes


async def test_every_reference_is_defined(gateway: Gateway) -> None:
    document = await description(gateway)
    names = set(document["components"]["schemas"])
    used = set()

    def look(value: object) -> None:
        if isinstance(value, dict):
            if "$ref" in value:
                used.add(value["$ref"].removeprefix("#/components/schemas/"))
            for item in value.values():
                look(item)
        elif isinstance(value, list):
            for item in value:
                look(item)

    look(document)
    assert used <= names
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


async def test_described_bounds_equal_the_checks(gateway: Gateway) -> None:
    document = await description(gateway)
    fields = document["components"]["schemas"]["ChatBody"]["properties"]
    assert fields["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0.0, "maximum": 2.0}
    assert fields["messages"]["minItems"] == 1
    operation = document["paths"]["/v1/chat/completions"]["post"]
    assert set(operation["responses"]) >= {"200", "400", "401", "403", "404", "408", "413", "415", "429", "500", "503"}
    assert document["paths"]["/livez"]["get"]["security"] == []


HI = {"messages": [{"role": "user", "content": "hi"}]}
ANSWERED = [
    ("POST", "/v1/chat/completions", HI),
    ("POST", "/v1/chat/completions", HI | {"n": 2, "logprobs": True, "top_logprobs": 2}),
    ("POST", "/v1/completions", {"prompt": "hi", "logprobs": 1, "echo": False}),
    ("POST", "/v1/tokenize", {"prompt": "hi", "return_token_strs": True}),
    ("POST", "/detokenize", {"tokens": [5, 6]}),
    *(("GET", path, None) for path in ("/v1/models", "/models/tiny", "/livez", "/ready", "/readyz", "/version")),
    ("GET", "/v1/models/gpt", None),
    ("POST", "/v1/completions", {}),
    ("POST", "/v1/embeddings", {}),
]


@pytest.mark.parametrize(("method", "path", "body"), ANSWERED, ids=lambda value: str(value)[:40])
async def test_usual_answer_matches_its_description(
    gateway: Gateway, method: str, path: str, body: dict[str, Any] | None
) -> None:
    gateway.engine.script = says([5, 6], [7])
    document = await description(gateway)
    async with gateway.session.request(method, path, json=body) as response:
        answer, status = await response.json(), response.status
    described = next(d for p, d in document["paths"].items() if re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", p), path))
    schema = described[method.lower()]["responses"][str(status)]["content"]["application/json"]["schema"]
    jsonschema.validate(answer, schema | {"components": document["components"]}, jsonschema.Draft202012Validator)


@pytest.mark.timeout(600)  # thousands of requests by a separate process: 10 CPU seconds, longer on a busy machine
async def test_any_answer_matches_its_description_without_faults(gateway: Gateway, tmp_path: Path) -> None:
    gateway.engine.script = says([5, 6], [7])
    # /debug/kv/stream is endless, sounds, images and some of /api answer 501 by design, and some routes have several
    # paths. The other routes get valid and invalid bodies.
    command = [
        str(SCHEMATHESIS), "run", f"http://127.0.0.1:{gateway.port}/openapi.json", "--phases=examples,coverage,fuzzing",
        "--checks=not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
        "negative_data_rejection,unsupported_method",
        "--exclude-path-regex=^/(debug/.*|v1/(audio|images)/.*|v1/rerank|v2/rerank|v1/score|api/(pull|push|create|copy|delete|embed.*)|tokenize|detokenize|tokenizer_info|models.*)$",
        "--max-examples=3", "--seed=1", "--no-color", "--workers=1",
    ]  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        *command, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    report, _ = await process.communicate()
    assert process.returncode == 0, report.decode()[-6000:]
