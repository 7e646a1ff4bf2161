"""A failure in one answer's text ends that answer with one error. Concurrent answers are unaffected."""

import asyncio
from typing import Any

import pytest

from gateway.text.output_text import ByteLevelDetokenizer, StopStrings
from gateway.text.served_model import ServedModel
from tests.gateway.conftest import Gateway
from tests.gateway.fake_inference import says
from tests.patience import PATIENCE_SECONDS

BODY = {"prompt": "a", "max_tokens": 5}
INTERNAL = b'"code":"internal"'


async def stream(gateway: Gateway, **fields: Any) -> bytes:
    async with gateway.session.post("/v1/completions", json={**BODY, "stream": True, **fields}) as response:
        assert response.status == 200
        return await response.read()


@pytest.mark.parametrize("broken", ["detokenizer", "stop strings"])
async def test_exception_in_a_stream_is_its_only_error_event(
    gateway: Gateway, tiny_model: ServedModel, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    hello, fatal = tiny_model.encoder.encode_text("a"), tiny_model.encoder.encode_text("b")
    gateway.engine.script = lambda request: says(hello, fatal if request.sampling.seed == 666 else hello)(request)

    def break_(kind: Any, given: object) -> None:
        push = kind.push

        def fail_on_fatal(self: Any, piece: Any) -> Any:
            if piece == given:
                raise RuntimeError("/srv/secret")
            return push(self, piece)

        monkeypatch.setattr(kind, "push", fail_on_fatal)

    break_(ByteLevelDetokenizer, fatal[0]) if broken == "detokenizer" else break_(StopStrings, "b")
    neighbor, victim, other = await asyncio.gather(
        stream(gateway), stream(gateway, seed=666, stop="zz"), stream(gateway, n=2)
    )
    assert victim.count(INTERNAL) == 1 and b"secret" not in victim
    assert victim.endswith(b"data: [DONE]\n\n") and victim.count(b"[DONE]") == 1
    for whole in (neighbor, other):
        assert b'"finish_reason":"stop"' in whole and b"error" not in whole and whole.endswith(b"data: [DONE]\n\n")
    async with gateway.session.post("/v1/completions", json={**BODY, "seed": 666, "stop": "zz"}) as response:
        assert response.status == 500 and INTERNAL in (await response.read()).replace(b": ", b":")
    assert await gateway.state.open_requests.wait_idle(10.0)
    assert len(gateway.engine.cancelled) >= 2  # the engine stops work for the two that failed


async def test_queued_request_is_withdrawn_if_its_response_fails(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("/srv/secret")

    monkeypatch.setattr("gateway.pipeline.answer.message_parsers", fail)
    async with gateway.session.post("/v1/completions", json=BODY) as response:
        assert response.status == 500 and b"secret" not in await response.read()
    (request,) = gateway.engine.requests
    assert await asyncio.wait_for(gateway.engine.next_cancellation(), PATIENCE_SECONDS) == request.request_id
