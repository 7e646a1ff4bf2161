"""A chat template that loops, recurses or grows without limit ends with an error. Usual templates pass."""

import asyncio
import json
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.text.chat_template import (
    ChatMessage,
    ChatTemplate,
    ChatTemplateError,
    LimitedEnvironment,
    TemplateLimit,
    limited,
    written,
)
from tests.idle_seconds import idle_seconds
from tests.patience import PATIENCE_SECONDS

MESSAGES: list[ChatMessage] = [ChatMessage(role="user", content=f"message {number}") for number in range(100)]
NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% if false %}x{% endif %}{% endfor %}{% endfor %}"


def render(source: str, seconds: float = 0.2) -> str:
    template = LimitedEnvironment(extensions=["jinja2.ext.loopcontrols"]).from_string(source)
    with limited(seconds):
        return written(template.generate(messages=MESSAGES), 10_000)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (NESTED, "too long"),
        ("{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}", "too long"),
        ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}", "too long"),
        ("{% for m in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 40 else '' }}{% endfor %}", "too long"),
        ("{% for a in range(9999) %}{{ messages[0].content }}{% endfor %}", "more than 10000 characters"),
        ("{% set n = 10 ** 9 %}{{ 'a' * n }}", "too large"),
        ("{% set n = 9 ** (9 ** 9) %}", "too large"),
        ("{% set n = 2 %}{{ n ** 99999 }}", "too large"),
        ("{% set s = namespace(t='aa') %}{% for a in range(99) %}{% set s.t = s.t + s.t %}{% endfor %}", "too large"),
        ("{% set s = namespace(t='aa') %}{% for a in range(99) %}{% set s.t = s.t ~ s.t %}{% endfor %}", "more than"),
        ("{% set s = namespace(t=[1]) %}{% for a in range(99) %}{% set s.t = s.t + s.t %}{% endfor %}", "too large"),
        (
            "{% set tick = 1 %}{% set measured = 1 %}" + NESTED,
            "too long",
        ),  # a template cannot shadow the names of the watch
    ],
)
def test_endless_template_is_stopped(source: str, says: str) -> None:
    def refused() -> None:
        with pytest.raises(TemplateLimit, match=says):
            render(source, seconds=0.2 if says == "too long" else 60.0)

    assert idle_seconds(refused) < 5.0  # it would take hours, or gigabytes


def test_usual_templates_render_unchanged() -> None:
    source = (
        "{% for m in messages %}{% if loop.first %}<{% endif %}{{ loop.index }}/{{ loop.length }} {{ m.content + ';' }}"
        "{% if loop.last %}{{ '>' * 3 ~ loop.index }}{% endif %}{% endfor %}"
        "{% macro twice(x) %}{{ x * 2 }}{% endmacro %}{{ twice('ab') }}{{ 3 * 4 + 2 ** 3 }}"
        "{% macro inside() %}[{{ caller() }}]{% endmacro %}{% call inside() %}x{% endcall %}"
    )
    expected = "<" + "".join(f"{n}/100 message {n - 1};" for n in range(1, 101)) + ">>>100" + "abab20[x]"
    assert render(source, seconds=10) == expected


@pytest.mark.parametrize(
    "source",
    [NESTED, "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ 1 / 0 }}", "{{ [].pop() }}", "{{ 1 | first }}"],
)  # fmt: skip
def test_template_failure_becomes_a_refusal(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.text.chat_template.RENDER_SECONDS", 0.1)
    with pytest.raises(ChatTemplateError, match="the model's chat template refuses"):
        ChatTemplate(source, {}).render(MESSAGES)


def test_template_error_message_is_truncated() -> None:
    with pytest.raises(ChatTemplateError) as refused:
        ChatTemplate("{{ raise_exception('x' * 100000) }}", {}).render(MESSAGES)
    assert len(str(refused.value)) < 300


def test_long_chat_yields_once_per_message(tiny_model, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[None] = []
    monkeypatch.setattr("gateway.text.chat_template._deadline", CountedDeadline(turns))
    messages = [{"role": "user", "content": "hello"}] * 4096
    tiny_model.encoder.render_chat(messages, add_generation_prompt=True, continue_final_message=False)
    assert len(turns) == 4096


class CountedDeadline:
    """A deadline that never expires and counts its checks."""

    def __init__(self, looks: list[None]) -> None:
        self._looks = looks

    def set(self, _: float) -> None: ...

    def reset(self, _: None) -> None: ...

    def get(self) -> float:
        self._looks.append(None)
        return math.inf


class StandingClock:
    def __init__(self) -> None:
        self.stands, self.num_looks = True, 0
        self._ends_at = math.inf

    def monotonic(self) -> float:
        if not self.num_looks:
            self._ends_at = time.monotonic() + PATIENCE_SECONDS
        self.num_looks += 1
        return 0.0 if self.stands and time.monotonic() < self._ends_at else math.inf


async def test_template_rendering_does_not_block_others(
    start_gateway: Callable[..., Any], tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template's clock stops until others are answered. Without its own thread, it would end after a minute."""
    clock = StandingClock()
    monkeypatch.setattr("gateway.text.chat_template.time", clock)
    model = shutil.copytree(tiny_model_dir, tmp_path / "hostile")
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": NESTED}))
    gateway = await start_gateway(model=model)

    async def chat() -> int:
        body = {"messages": [{"role": "user", "content": "x"}] * 65}
        async with gateway.session.post("/v1/chat/completions", json=body) as response:
            assert (response.status, (await response.json())["error"]["param"]) == (400, "messages")
        return response.status

    asked = asyncio.create_task(chat())
    while not clock.num_looks:
        await asyncio.sleep(0.01)
    for _ in range(5):
        async with gateway.session.get("/v1/models") as response:
            assert response.status == 200
    assert not asked.done()
    clock.stands = False
    assert await asked == 400
