"""Descriptions of a model: its tokenizer in vLLM's format, and the system fingerprint."""

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest

from gateway.text.served_model import load_served_model
from tests.gateway.conftest import CHAT_TEMPLATE, Gateway
from tests.gateway.fake_inference import says
from tests.tiny_model import write_tiny_model

KEY = "k" * 8 + "-of-this-test"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("url", ["/tokenizer_info", "/v1/tokenizer_info", "/tokenizer_info?model=tiny"])
async def test_tokenizer_info_has_what_clients_need(gateway: Gateway, url: str) -> None:
    async with gateway.session.get(url) as response:
        assert response.status == 200
        info = await response.json()
    assert isinstance(info["tokenizer_class"], str) and info["tokenizer_class"]
    assert (info["eos_token"], info["chat_template"]) == ("<|im_end|>", CHAT_TEMPLATE)
    assert {"bos_token", "pad_token", "unk_token"} <= set(info)
    for token_id, text in info["added_tokens_decoder"].items():
        async with gateway.session.post("/tokenize", json={"prompt": text, "add_special_tokens": False}) as response:
            assert (await response.json())["tokens"] == [int(token_id)]


async def test_remote_tokenizer_builds_the_same_prompts(gateway: Gateway) -> None:
    """Special tokens and template come from `/tokenizer_info`, everything else from `/tokenize`, as in lm-eval."""
    async with gateway.session.get("/tokenizer_info") as response:
        info = await response.json()

    async def tokens_of(**body: Any) -> list[int]:
        async with gateway.session.post("/tokenize", json=body) as response:
            return (await response.json())["tokens"]

    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(info["chat_template"])
    prompt = template.render(messages=CHAT["messages"], add_generation_prompt=True)
    assert await tokens_of(prompt=prompt, add_special_tokens=False) == await tokens_of(messages=CHAT["messages"])
    assert len(await tokens_of(prompt=info["eos_token"], add_special_tokens=False)) == 1


async def test_tokenizer_info_requires_a_key_and_names_a_model(start_gateway: Any) -> None:
    gateway = await start_gateway(api_key=KEY)
    async with gateway.session.get("/tokenizer_info") as response:
        assert response.status == 401
    headers = {"Authorization": f"Bearer {KEY}"}
    for name, status in (("tiny", 200), ("other", 404)):
        async with gateway.session.get("/tokenizer_info", params={"model": name}, headers=headers) as response:
            assert response.status == status


def test_tokenizer_info_exposes_only_tokenizer_settings(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "tiny")
    config = {
        "tokenizer_class": "../x",
        "name_or_path": "/home/me/private",
        "vocab_file": "/home/me/vocab.json",
        "auto_map": {"AutoTokenizer": "me/private--code.Tokenizer"},
        "token": "hf_secret",
        "errors": "/home/me",
        "add_bos_token": "yes",
        "add_prefix_space": True,
        "padding_side": "left",
        "eos_token": {"content": "<|im_end|>", "lstrip": False},
        "pad_token": ["x"],
        "additional_special_tokens": ["<|im_start|>", {"content": "<|im_end|>"}, 7],
        "model_max_length": 1e30,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    info = load_served_model(directory).tokenizer_info
    added = info.pop("added_tokens_decoder")
    assert sorted(added.values()) == ["<|endoftext|>", "<|im_end|>", "<|im_start|>"]
    assert info == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "unk_token": None,
        "pad_token": None,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "add_prefix_space": True,
        "padding_side": "left",
        "model_max_length": int(1e30),
    }
    for limit in (float("inf"), -1, True, "many"):
        (directory / "tokenizer_config.json").write_text(json.dumps({"model_max_length": limit}))
        assert "model_max_length" not in load_served_model(directory).tokenizer_info


async def test_every_body_and_chunk_has_the_fingerprint(gateway: Gateway) -> None:
    gateway.engine.script = says([70], [71])
    fingerprints = set()
    for url, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "hi"})):
        async with gateway.session.post(url, json=body) as response:
            fingerprints.add((await response.json())["system_fingerprint"])
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with gateway.session.post(url, json=streamed) as response:
            events = (await response.text()).split("\n\n")
        data = [event.removeprefix("data: ") for event in events if event and "[DONE]" not in event]
        fingerprints |= {json.loads(line)["system_fingerprint"] for line in data}
    assert fingerprints == {gateway.service.require_model().fingerprint}


def test_fingerprint_depends_only_on_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, same = (write_tiny_model(tmp_path / name) for name in ("one", "same"))
    before = load_served_model(one).fingerprint
    assert before == load_served_model(same).fingerprint and len(before) == len("fp_0123456789")
    config = json.loads((same / "config.json").read_text())
    (same / "config.json").write_text(json.dumps({**config, "torch_dtype": "float16"}))
    assert load_served_model(same).fingerprint != before
    monkeypatch.setattr("gateway.text.served_model.VERSION", "99")
    assert load_served_model(one).fingerprint != before
