"""Coding agents, each with its default settings and a scripted model: each edits a file.

Their requests, without long texts, are written to tests/clients/recorded and sent again by
tests/gateway/test_recorded_agents.py.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from prometheus_client import CollectorRegistry

from gateway.apis.registry import APIS
from gateway.app import RUNNER_OPTIONS, create_app
from gateway.auth.access import Access
from gateway.metrics import GatewayMetrics
from gateway.model_service import model_options
from gateway.settings import GatewaySettings
from tests.gateway.fake_inference import FakeInferenceClient
from tests.peers.peer import Environment, PeerFailed, Report, Served, expect
from tests.scripted_model import TEXT, ScriptedModel, write_scripted_model

PACKAGE = "aider-chat"
MODEL = "scripted"
TASK = "Write hello to hello.txt"
RECORDED = Path(__file__).parent.parent / "clients" / "recorded"
_LARGE_CONTEXT = 131_072  # tokens; the longest prompt has 20,000
_SMALL_CONTEXT = 32_768  # Claude Code asks for an answer of 32,000
_KEPT_CHARACTERS = 40
_KEPT_HEADERS = ("accept", "anthropic-beta", "anthropic-version", "content-type", "originator")
_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{24,}")  # of a session, a device, or a call
_HOP_HEADERS = ("host", "content-length", "content-encoding", "transfer-encoding")


@dataclass(frozen=True, slots=True)
class Agent:
    """One program; in `command`, `variables` and `files`, {url} is the server's address without /v1."""

    command: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)  # by path in its home directory
    before: tuple[str, ...] = ()  # a command that stores its settings


def _npm(name: str) -> str:
    """Return the path of a program of npm's packages, from the environment's bin directory.

    Scripts of packages, which would copy Claude Code and opencode to .bin, do not run.
    """
    return f"../node_modules/{name}"


_CODEX_SETTINGS = """\
model = "scripted"
model_provider = "pagestream"
[model_providers.pagestream]
name = "Pagestream"
base_url = "{url}/v1"
wire_api = "responses"
"""
_OPENCODE_SETTINGS = {
    "provider": {
        "pagestream": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{url}/v1", "apiKey": "unused"},
            "models": {MODEL: {"name": MODEL}},
        }
    }
}
AGENTS = {
    "codex": Agent(
        (_npm(".bin/codex"), "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", TASK),
        files={".codex/config.toml": _CODEX_SETTINGS},
    ),
    "claude-code": Agent(
        (_npm("@anthropic-ai/claude-code-linux-x64/claude"), "-p", "--dangerously-skip-permissions", TASK),
        {
            "ANTHROPIC_BASE_URL": "{url}",
            "ANTHROPIC_AUTH_TOKEN": "unused",
            "ANTHROPIC_MODEL": MODEL,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "IS_SANDBOX": "1",  # otherwise it does not write files as root
        },
    ),
    "opencode": Agent(
        (_npm("opencode-linux-x64/bin/opencode"), "run", "-m", f"pagestream/{MODEL}", TASK),
        files={".config/opencode/opencode.json": json.dumps(_OPENCODE_SETTINGS)},
    ),
    "qwen-code": Agent(
        (_npm(".bin/qwen"), "--auth-type", "openai", "--yolo", "-p", TASK),
        {"OPENAI_BASE_URL": "{url}/v1", "OPENAI_MODEL": MODEL},
    ),
    "cline": Agent(
        (_npm(".bin/cline"), "-y", TASK),
        before=(
            *(_npm(".bin/cline"), "auth", "--provider", "openai", "--apikey", "unused", "--modelid", MODEL),
            *("--baseurl", "{url}/v1"),
        ),
    ),
    "aider": Agent(
        ("aider", "--model", f"openai/{MODEL}", "--yes-always", "--no-git", "--no-check-update",
         "--no-show-model-warnings", "--analytics-disable", "--message", TASK, "hello.txt"),
        {"OPENAI_API_BASE": "{url}/v1"},
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Session:
    """What one agent sent, in order, and what it was answered."""

    requests: Sequence[Mapping[str, Any]]
    said: Sequence[str]


def run(served: Served, environment: Environment) -> Report:
    """Run every agent, and Claude Code again with a context that its first request exceeds."""
    sessions = {name: asyncio.run(_session(name, environment, served.model, _LARGE_CONTEXT)) for name in AGENTS}
    for name, session in sessions.items():
        statuses = {request["status"] for request in session.requests}
        expect(f"statuses of {name}", statuses, {200})
        RECORDED.mkdir(exist_ok=True)
        recorded = {"said": session.said, "requests": session.requests}
        (RECORDED / f"{name}.json").write_text(json.dumps(recorded, indent=1, ensure_ascii=False) + "\n")
    retried = asyncio.run(_session("claude-code", environment, served.model, _SMALL_CONTEXT))
    answered = [request["status"] for request in retried.requests if request["path"].startswith("/v1/messages")]
    expect("Claude Code's statuses with a small context", answered[:2], [400, 200])
    lines = [f"{name}: {len(session.requests)} requests, said {session.said}" for name, session in sessions.items()]
    lines.append(f"claude-code, context of {_SMALL_CONTEXT} tokens: {answered}")
    return Report(f"{len(sessions)} agents each wrote the file", "\n".join(lines) + "\n")


async def _session(name: str, environment: Environment, tokenizer_of: Path, max_model_len: int) -> Session:
    """Run one agent; raise PeerFailed unless it writes the file."""
    home = environment.folder / f"{name}-{max_model_len}"
    work = home / "work"
    work.mkdir(parents=True)
    directory = write_scripted_model(home / MODEL, max_model_len, tokenizer_of)
    model = ScriptedModel(directory, work / "hello.txt")
    engine = FakeInferenceClient(model)
    async with _gateway(directory, engine) as port, _recorder(port, home) as (url, requests):
        agent = AGENTS[name]
        for path, content in agent.files.items():
            (home / path).parent.mkdir(parents=True, exist_ok=True)
            (home / path).write_text(content.replace("{url}", url))
        variables = {key: value.replace("{url}", url) for key, value in agent.variables.items()} | {"HOME": str(home)}
        own = Environment(environment.name, work)
        for command in filter(None, (agent.before, agent.command)):
            program, *arguments = (word.replace("{url}", url) for word in command)
            await asyncio.to_thread(own.run, program, *arguments, variables=variables)
    if not (work / "hello.txt").exists() or (work / "hello.txt").read_text() != TEXT:
        raise PeerFailed(f"{name} did not write the file:\n{(work / 'output.txt').read_text()[-3000:]}")
    return Session(requests, model.said)


@asynccontextmanager
async def _gateway(directory: Path, engine: FakeInferenceClient) -> AsyncIterator[int]:
    settings = GatewaySettings(model=directory, port=0)
    clients: Any = {option: engine for option in model_options(settings)}
    metrics = GatewayMetrics(CollectorRegistry())
    app = create_app(settings, clients, APIS, metrics, Access(settings.api_key, settings.api_keys_file))
    async with _served(app, **RUNNER_OPTIONS) as port:
        yield port


@asynccontextmanager
async def _recorder(port: int, home: Path) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """Forward requests to a port; yield its own address and the list of requests, without private and long texts."""
    requests: list[dict[str, Any]] = []

    async def forward(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_HEADERS}
        record: dict[str, Any] = {"method": request.method, "path": request.path_qs, "headers": _kept(headers)}
        if body:
            record["body"] = _shortened(json.loads(body), str(home))
        requests.append(record)
        async with session.request(request.method, request.rel_url, headers=headers, data=body or None) as answer:
            record["status"] = answer.status
            reply = web.StreamResponse(status=answer.status)
            reply.headers.update({k: v for k, v in answer.headers.items() if k.lower() not in _HOP_HEADERS})
            await reply.prepare(request)
            async for data in answer.content.iter_any():
                await reply.write(data)
            return reply

    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", forward)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session, _served(app) as own_port:
        yield f"http://127.0.0.1:{own_port}", requests


@asynccontextmanager
async def _served(app: web.Application, **options: Any) -> AsyncIterator[int]:
    runner = web.AppRunner(app, shutdown_timeout=0.5, **options)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items() if name.lower() in _KEPT_HEADERS}


def _shortened(value: Any, home: str, key: str = "") -> Any:
    """Return JSON with the beginnings of long texts, without ids and paths; arguments of calls stay whole."""
    if isinstance(value, Mapping):
        return {name: _shortened(item, home, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_shortened(item, home, key) for item in value]
    if not isinstance(value, str):
        return value
    text = _ID.sub("0", value.replace(home, "/home/user"))
    return text if key == "arguments" or len(text) <= 2 * _KEPT_CHARACTERS else text[:_KEPT_CHARACTERS] + "..."
