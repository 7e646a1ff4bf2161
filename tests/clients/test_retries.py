"""Clients retry after the seconds that a refusal names. A real gateway with a scripted engine."""

import asyncio
from typing import Any

import pytest

from gateway.fleet import RETRY_AFTER_SECONDS
from gateway.store.store_calls import QueueFull
from gateway.text.served_model import ServedModel
from tests.clients.conftest import CLIENTS, run_client
from tests.gateway.conftest import Gateway, gateway, start_gateway, tiny_model, tiny_model_dir  # noqa: F401  fixtures
from tests.gateway.fake_inference import says

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize("package", ["openai", "anthropic"])
async def test_refused_client_waits_and_retries(gateway: Gateway, tiny_model: ServedModel, package: str) -> None:  # noqa: F811
    gateway.engine.script = says(tiny_model.encoder.encode_text("Paris"))
    submit, refusals = gateway.engine.submit, [QueueFull("cap")]

    async def refuses_once(request: Any, **options: Any) -> Any:
        gateway.engine.submit_error = refusals.pop() if refusals else None
        return await submit(request, **options)

    gateway.engine.submit = refuses_once  # type: ignore[method-assign]
    python, url = CLIENTS / "bin" / "python", f"http://127.0.0.1:{gateway.port}"
    saw = await asyncio.to_thread(run_client, python, "retrying_client.py", url, "tiny", package)
    assert saw["text"] == "Paris" and refusals == []
    # The clients' own first pause is at most 1 s, so a longer wait comes from the header.
    assert saw["seconds"] >= RETRY_AFTER_SECONDS["queue_full"]
