"""A gateway of the chat API alone answers a chat, and imports no module of another API."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_model import IM_END

PROGRAM = """
import asyncio, json, sys
from pathlib import Path

import aiohttp
from aiohttp import web

from gateway.apis.chat.routes import API
from gateway.app import RUNNER_OPTIONS, create_app
from gateway.model_service import model_options
from gateway.settings import GatewaySettings
from tests.gateway.fake_inference import FakeInferenceClient, says

async def main(model, ids):
    settings = GatewaySettings(model=model, port=0)
    clients = dict.fromkeys(model_options(settings), FakeInferenceClient(says(ids)))
    runner = web.AppRunner(create_app(settings, clients, (API,)), **RUNNER_OPTIONS)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    await asyncio.gather(*(service.loaded.wait() for service in runner.app[STATE].models))
    host, port = runner.addresses[0][:2]
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with aiohttp.ClientSession() as session:
        async with session.post(f"http://{host}:{port}/v1/chat/completions", json=body) as reply:
            text = await reply.text()
    await runner.cleanup()
    return reply.status, text

from gateway.http.state import STATE
status, text = asyncio.run(main(Path(sys.argv[1]), json.loads(sys.argv[2])))
apis = sorted({name.split(".")[2] for name in sys.modules if name.startswith("gateway.apis.")})
print(json.dumps([status, text.count("data: "), apis]))
"""


def chat_alone(model: Path, planted: str = "") -> tuple[int, int, list[str]]:
    """Answer a chat in a new process; return the status, the number of events, and the loaded APIs."""
    command = [sys.executable, "-c", planted + PROGRAM, str(model), json.dumps([5, 7, IM_END])]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    status, num_events, apis = json.loads(done.stdout)
    return status, num_events, apis


@pytest.mark.e2e
def test_chat_imports_no_module_of_another_api(tiny_model_dir: Path) -> None:
    status, num_events, apis = chat_alone(tiny_model_dir)
    assert status == 200 and num_events >= 4
    assert apis == ["chat"]


@pytest.mark.e2e
def test_import_of_another_api_is_found(tiny_model_dir: Path) -> None:
    _, _, apis = chat_alone(tiny_model_dir, "import gateway.apis.completions.schema\n")
    assert apis == ["chat", "completions"]
