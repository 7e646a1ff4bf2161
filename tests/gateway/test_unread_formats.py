"""A chat format without a parser is refused before generation; completions with the same model are served."""

import json
from pathlib import Path
from typing import Any

from gateway.text.parsers.unread_formats import unread_format
from tests.gateway.fake_inference import says
from tests.tiny_model import write_tiny_model

TEMPLATE = "{% for m in messages %}<|start|>{{ m.role }}<|channel|>final<|message|>{{ m.content }}<|end|>{% endfor %}"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


async def test_harmony_chats_get_501_and_completions_200(start_gateway: Any, tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "tiny")
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    gateway = await start_gateway(model=directory)
    async with gateway.session.post("/v1/chat/completions", json=CHAT) as response:
        assert response.status == 501
        error = (await response.json())["error"]
    assert error["code"] == "not_served" and "harmony" in error["message"]
    gateway.engine.script = says([5], [6])
    async with gateway.session.post("/v1/completions", json={"prompt": "hi"}) as response:
        assert response.status == 200


def test_readable_formats_are_not_refused() -> None:
    assert [unread_format(source) for source in ("", "<|im_start|>", "[TOOL_CALLS]")] == [""] * 3
