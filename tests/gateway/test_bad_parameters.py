"""Fields of chat and completions with a wrong type or a value out of bounds get a 400 that names the field.

The bounds are repeated here on purpose, not read from the code. All cases use one gateway; a stream stays open, and
its tokens arrive between the requests.
"""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gateway.text.served_model import ServedModel
from shared.messages import TokenEvent
from tests.gateway.conftest import MAX_MODEL_LEN, VOCAB_SIZE, Gateway
from tests.gateway.fake_inference import finish
from tests.gateway.test_routes_inference import read_events

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BASE = {CHAT: b'"messages":[{"role":"user","content":"hi"}]', TEXT: b'"prompt":"hi"'}
INT_MAX = 2**31
BEAMS = b'"use_beam_search":true,'

INTEGERS = {  # the nearest values out of bounds
    "n": (0, 65),
    "best_of": (0, 65),
    "top_k": (-2, INT_MAX),
    "seed": (-(2**63) - 1, 2**63),
    "max_tokens": (-1, INT_MAX),
    "min_tokens": (-1, INT_MAX),
}
NUMBERS = {
    "temperature": (-0.001, 2.001),
    "top_p": (0, 1.001),
    "min_p": (-0.001, 1.001),
    "presence_penalty": (-2.001, 2.001),
    "frequency_penalty": (-2.001, 2.001),
    "repetition_penalty": (0, 10.001),
    "length_penalty": (-10.001, 10.001),
}
SWITCHES = ("stream", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "add_special_tokens",
            "use_beam_search")  # fmt: skip
TEXTS = {"model": None, "cache_salt": 128}
NO_INTEGER = ("true", '"1"', "1.5", "[1]", "{}", "1e400", "-0.5", str(10**30), str(-(10**30)), str(2**64))
NO_NUMBER = ("false", '"1"', "[1]", "{}", "1e308", "-1e308", "1e400", "-1e400")
NO_SWITCH = ("1", "0", '"true"', "[]", "{}", "1.0")
NO_TEXT = ("1", "true", "[]", "{}", '["a"]')
ODD = {
    "stop": ("1", "true", "{}", "[1]", "[null]", '[["a"]]', '[""]', '["a","b","c","d","e"]', f'"{"x" * 257}"',
             f'["a","{"x" * 257}"]', '""'),
    "stop_token_ids": ("1", '"1"', "{}", '["1"]', "[-1]", "[1.5]", "[true]", f"[{INT_MAX}]", f"[{VOCAB_SIZE}]",
                       f"[{','.join(['1'] * 129)}]"),
    "logit_bias": ("1", '"x"', "[]", "[[1,2]]", '{"1":"2"}', '{"1":true}', '{"1":null}', '{"1":[1]}', '{"1":100.1}',
                   '{"1":-100.1}', '{"1":1e400}', '{"":1}', '{"a":1}', '{" 1":1}', '{"1 ":1}', '{"+1":1}', '{"-1":1}',
                   '{"1.0":1}', '{"1e1":1}', '{"0x1":1}', '{"\\uff11":1}', '{"\\u0661":1}', '{"1_0":1}',
                   f'{{"{VOCAB_SIZE}":1}}', f'{{"{2**64}":1}}', '{"\\u0000":1}'),
    "stream_options": ("1", '"x"', "[]", "true", '{"include_usage":1}', '{"include_usage":"true"}',
                       '{"continuous_usage_stats":1}', '{"include_usage":[]}'),
    "allowed_token_ids": ("1", '"1"', "{}", "[]", '["1"]', "[-1]", "[1.5]", "[true]", f"[{INT_MAX}]",
                          f"[{VOCAB_SIZE}]"),
    "bad_words": ("1", '"x"', "{}", "[1]", "[null]", '[""]', f'["{"x" * 257}"]', json.dumps(["x"] * 501)),
    "early_stopping": ('"often"', "1", "[]", "{}", '"Never"'),
}  # fmt: skip
OF_CHAT = {
    "messages": ("1", '"hi"', "{}", "true", "[]", "[1]", '["hi"]', "[null]", "[[]]", '[{"content":"x"}]',
                 '[{"role":"user"}]',
                 '[{"role":1,"content":"x"}]', '[{"role":"root","content":"x"}]', '[{"role":"","content":"x"}]',
                 '[{"role":"USER","content":"x"}]', '[{"role":"user ","content":"x"}]', '[{"role":"user","content":1}]',
                 '[{"role":"user","content":{}}]', '[{"role":"user","content":true}]',
                 '[{"role":"user","content":["x"]}]',
                 '[{"role":"user","content":[{"text":"x"}]}]', '[{"role":"user","content":[{"type":"text"}]}]',
                 '[{"role":"user","content":[{"type":"text","text":1}]}]', '[{"role":"user","content":[{"type":1}]}]',
                 '[{"role":"user","content":[{"type":"audio"}]}]', '[{"role":"user","content":"x","name":1}]',
                 '[{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://169.254.169.254/"}}]}]',
                 '[{"role":"user","content":[{"type":"image_url","image_url":{"url":"file:///etc/passwd"}}]}]',
                 '[{"role":"user","content":"\\ud800"}]', '[{"role":"user","content":"\\udc00\\ud800"}]'),
    "max_completion_tokens": (*NO_INTEGER, "-1", "0", str(INT_MAX)),
    "top_logprobs": (*NO_INTEGER, "-1", "21"),
    "logprobs": NO_SWITCH,
    "add_generation_prompt": NO_SWITCH,
    "continue_final_message": NO_SWITCH,
}  # fmt: skip
OF_TEXT = {
    "prompt": ("1", "true", "{}", "null", "[]", '[""]', '["a",1]', '["a",["b"]]', "[1,[2]]", '[["a"]]', "[[[1]]]",
               "[[1],[]]",
               "[null]", "[1.5]", "[true]", "[-1]", f"[{VOCAB_SIZE}]", f"[[1],[{VOCAB_SIZE}]]", f"[{INT_MAX}]",
               str([5] * MAX_MODEL_LEN), str(["a"] * 33).replace("'", '"'), '"\\ud800"', '["\\udfff"]'),
    "logprobs": (*NO_INTEGER, "-1", "21"),
    "echo": NO_SWITCH,
}  # fmt: skip
EXTRA = {"length_penalty": BEAMS, "early_stopping": BEAMS, "top_logprobs": b'"logprobs":true,'}
EXTRA["stream_options"] = b'"stream":true,'


@dataclass(frozen=True)
class Wrong:
    url: str
    field: str
    value: str

    @property
    def body(self) -> bytes:
        own = b'"%s":%s' % (self.field.encode(), self.value.encode())
        base = b"" if self.field in ("messages", "prompt") else BASE[self.url] + b","
        return b"{" + base + EXTRA.get(self.field, b"") + own + b"}"


def values_of(field: str) -> Iterator[str]:
    if field in INTEGERS:
        yield from (*NO_INTEGER, *map(str, INTEGERS[field]))
    elif field in NUMBERS:
        yield from (*NO_NUMBER, *map(str, NUMBERS[field]))
    elif field in TEXTS:
        longest = TEXTS[field]
        yield from (*NO_TEXT, *([json.dumps("x" * (longest + 1))] if longest else []))
    else:
        yield from NO_SWITCH


def cases() -> Iterator[Wrong]:
    for url, own in ((CHAT, OF_CHAT), (TEXT, OF_TEXT)):
        for field in (*INTEGERS, *NUMBERS, *SWITCHES, *TEXTS):
            yield from (Wrong(url, field, value) for value in values_of(field))
        for field, values in (ODD | own).items():
            yield from (Wrong(url, field, value) for value in values)


CASES = list(cases())


def problem(wrong: Wrong, status: int, answer: Any) -> str | None:
    """Return a description of what is wrong, or ""."""
    error = answer["error"]
    if status != 400 or set(error) != {"message", "type", "param", "code"}:
        return f"{status} {answer}"
    if error["type"] != "invalid_request_error" or len(error["message"]) > 500:
        return f"{answer}"
    root = (error["param"] or "").split(".")[0].split("[")[0]
    return None if root == wrong.field else f"names {error['param']}: {error['message']}"


async def test_invalid_field_is_named_and_a_stream_unchanged(gateway: Gateway, tiny_model: ServedModel) -> None:
    assert len(CASES) >= 400
    characters = "".join(chr(ord("a") + index % 26) for index in range(len(CASES)))
    found = {}
    async with gateway.session.post(TEXT, json={"prompt": "hi", "stream": True}) as response:
        stream = await gateway.engine.next_stream()
        reading = asyncio.create_task(read_events(response))
        for index, wrong in enumerate(CASES):
            token_ids = tiny_model.encoder.encode_text(characters[index])
            stream.send(TokenEvent(stream.request.request_id, index, token_ids))
            headers = {"Content-Type": "application/json"}
            async with gateway.session.post(wrong.url, data=wrong.body, headers=headers) as refused:
                if what := problem(wrong, refused.status, await refused.json()):
                    found[f"{wrong.url} {wrong.field}={wrong.value[:60]}"] = what[:200]
        stream.send(finish(stream.request, len(CASES)))
        events = await reading
    assert found == {}
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == characters
    assert len(gateway.engine.requests) == 1 and gateway.engine.cancelled == []


async def test_body_cut_at_any_byte_is_invalid_json(gateway: Gateway) -> None:
    whole = b'{"messages":[{"role":"user","content":"h\\u00e9 \xc3\xa9"}],"n":1,"stop":["a"],"logit_bias":{"5":-1.5e0}}'
    headers = {"Content-Type": "application/json"}
    for end in range(len(whole)):
        async with gateway.session.post(CHAT, data=whole[:end], headers=headers) as refused:
            assert (refused.status, (await refused.json())["error"]["code"]) == (400, "invalid_json"), whole[:end]
    assert gateway.engine.requests == []


NASTY_TEXTS = [
    "\x00", "\ufffe\uffff", "\u202e\u2066", "\u200d" * 40, "a" + "\u0301" * 60, "e\u0301 \u00e9", "\r\n\r\ndata: x\n\n",
    "\u2028\u2029\x85\x0b\x0c", "data: [DONE]\n\n", "\N{FAMILY}\u200d\N{WOMAN}", "\U0010ffff", " " * 200, "\x1b[2J",
    "'; DROP TABLE x; --", "{{ 7 * 7 }}", "\\ud800",
]  # fmt: skip


async def test_unusual_text_stays_inside_its_event(gateway: Gateway, tiny_model: ServedModel) -> None:
    for text in NASTY_TEXTS:
        token_ids = tiny_model.encoder.encode_text(text, add_special_tokens=False)

        def script(request: Any, token_ids: list[int] = token_ids) -> Any:
            yield TokenEvent(request.request_id, 0, token_ids)
            yield finish(request, len(token_ids))

        gateway.engine.script = script
        body = {"prompt": text, "stream": True, "skip_special_tokens": False, "max_tokens": 16}
        async with gateway.session.post(TEXT, json=body) as response:
            assert response.status == 200, text
            raw = (await response.read()).decode()
        lines = [line for line in raw.split("\n") if line]
        assert all(line.startswith("data: ") for line in lines)
        assert len(raw.splitlines()) == raw.count("\n")  # no line breaks except those of the events
        chunks = [json.loads(line[6:]) for line in lines[:-1]]
        assert lines[-1] == "data: [DONE]"
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
