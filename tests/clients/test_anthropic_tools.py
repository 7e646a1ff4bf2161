"""The Anthropic client uses tools and thinking; a scripted engine plays a reasoning model."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import CLIENTS, run_client
from tests.gateway.conftest import start_gateway, tiny_model_dir  # noqa: F401  fixtures
from tests.gateway.fake_inference import says
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.timeout(400)

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TEXT = f"<think>\nHm.\n</think>\n\nI look. {CALL}"


async def test_anthropic_client_with_tools_gets_two_turns(start_gateway: Any, tmp_path: Path) -> None:  # noqa: F811
    model = write_tiny_model(tmp_path / "tiny", max_model_len=4096)
    gateway = await start_gateway(model=model, reasoning_parser="qwen3")
    encoder = gateway.service.require_model().encoder
    token_ids = encoder.encode_text(TEXT)
    gateway.engine.script = says(*([token_id] for token_id in token_ids))
    python, url = CLIENTS / "bin" / "python", f"http://127.0.0.1:{gateway.port}"
    saw = await asyncio.to_thread(run_client, python, "anthropic_tools.py", url, "tiny")
    assert (
        saw["blocks"]
        == saw["streamed"]
        == [
            {"type": "thinking", "thinking": "Hm.\n", "signature": ""},
            {"type": "text", "text": "I look. "},
            {"type": "tool_use", "name": "get_weather", "input": {"city": "Rome"}},
        ]
    )
    assert saw["deltas"] == ["thinking_delta", "text_delta", "input_json_delta"]
    assert saw["stop_reasons"] == ["tool_use"] * 3 and saw["usage"] == [len(token_ids)] * 2
    prompt = encoder.decode(gateway.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert f"{CALL}<|im_end|>" in prompt
    assert "<tool_response>\nsunny\n</tool_response>" in prompt and "Hm." not in prompt
