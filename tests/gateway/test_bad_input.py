"""Invalid requests get an exact status, code and field. A concurrent stream stays unchanged."""

import asyncio
import gzip
import io
import json
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from gateway.http.json_body import MAX_BODY_BYTES
from gateway.text.served_model import ServedModel
from shared.messages import TokenEvent
from tests.gateway.conftest import MAX_MODEL_LEN, VOCAB_SIZE, Gateway
from tests.gateway.fake_inference import finish
from tests.gateway.test_routes_inference import read_events

CHAT_URL = "/v1/chat/completions"
TEXT_URL = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


@dataclass(frozen=True)
class Bad:
    name: str
    status: int
    code: str
    param: str | None = None
    says: str = ""  # the message names the allowed values
    body: bytes = b""
    url: str = CHAT_URL
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})


def chat(name: str, code: str, param: str | None, says: str = "", **fields: Any) -> Bad:
    return Bad(name, 400, code, param, says, json.dumps({"messages": HI, **fields}).encode())


def text(name: str, code: str, param: str | None, says: str = "", **fields: Any) -> Bad:
    return Bad(name, 400, code, param, says, json.dumps({"prompt": "hi", **fields}).encode(), TEXT_URL)


def raw(name: str, body: bytes, code: str, param: str | None = None, says: str = "") -> Bad:
    return Bad(name, 400, code, param, says, body)


def field_value(value: str) -> bytes:
    return b'{"messages":[{"role":"user","content":"hi"}],' + value.encode() + b"}"


VALUE, JSON, UNSUPPORTED, MISSING = (
    "invalid_value",
    "invalid_json",
    "unsupported_parameter",
    "missing_required_parameter",
)
CONTEXT = "context_length_exceeded"
TOKEN_A = 67  # "a" in the tiny tokenizer

MALFORMED = [
    raw("empty body", b"", JSON, says="empty"),
    raw("blank body", b" \n", JSON, says="empty"),
    raw("not JSON", b"hello", JSON),
    raw("cut off", b'{"messages":[{"role":"us', JSON),
    raw("trailing data", field_value('"n":1') + b" x", JSON),
    raw("trailing comma", field_value('"n":1,'), JSON),
    raw("single quotes", b"{'messages':[]}", JSON),
    raw("byte order mark", b"\xef\xbb\xbf{}", JSON),
    raw("UTF-16", '{"messages":[]}'.encode("utf-16"), JSON),
    raw("invalid UTF-8", b'{"messages":[{"role":"user","content":"\xff"}]}', JSON),
    raw("NaN", field_value('"temperature":NaN'), JSON),
    raw("Infinity", field_value('"temperature":Infinity'), JSON),
    raw("null body", b"null", VALUE, says="object"),
    raw("array body", b"[]", VALUE, says="object"),
    raw("text body", b'"hi"', VALUE, says="object"),
    raw("depth 33", field_value('"x":' + "[" * 32 + "]" * 32), JSON, says="32 levels"),
    raw("depth 60,000", b"[" * 60_000, JSON, says="32 levels"),
    raw("brackets in a string", field_value('"y":"]]\\"]","x":' + "[" * 32 + "]" * 32), JSON, says="32 levels"),
    raw("unclosed string", field_value('"x":' + "[" * 32 + '"' + '\\"' * 100), JSON, says="32 levels"),
    raw("100,000 arrays", b"[" * 100_000, JSON, says="at most 65536"),
    raw("700,000 empty objects", field_value('"x":[' + "{}," * 690_000 + "{}]"), JSON, says="at most 65536"),
    raw("257 fields", field_value(",".join(f'"x{i}":1' for i in range(256))), VALUE, says="256 fields"),
    raw("a long name", field_value(f'"{"x" * 257}":1'), VALUE, says="256 characters"),
    raw("invalid UTF-8 in an unread field", b'{"messages":[{"role":"user","content":"x"}],"x":"\xff"}', JSON),
    raw("a value that looks like a path", field_value('"tool_choice":" - at `$.n` - at `$.n"'), VALUE, "tool_choice"),
    raw("deep objects", b'{"a":' * 5_000 + b"1" + b"}" * 5_000, JSON, says="32 levels"),
    raw("5,000 digits", field_value('"x":' + "9" * 5_000), JSON),
    raw("duplicate key", field_value('"n":1,"n":2'), VALUE, "n", "more than once"),
    raw("duplicate escaped key", field_value('"n":1,"\\u006e":2'), VALUE, "n", "more than once"),
    raw("number beyond float", field_value('"temperature":1e999'), VALUE, "temperature", "out of range"),
    raw(
        "lone surrogate",
        rb'{"messages":[{"role":"user","content":"\ud800"}]}',
        VALUE,
        "messages[0].content",
        "surrogate",
    ),
    raw("lone low surrogate", field_value(r'"stop":["\udc00x"]'), VALUE, "stop[0]", "surrogate"),
    raw("lone surrogate in a key", field_value(r'"metadata":{"\ud800":1}'), VALUE, "metadata", "surrogate"),
]
ARGUMENTS = [
    ("depth 33", '{"a":' * 33 + "1" + "}" * 33, "32 levels"),
    ("depth 3,000", '{"a":' + "[" * 3_000 + "]" * 3_000 + "}", "32 levels"),
    ("not closed", '{"a":' + "[" * 3_000, "32 levels"),
    ("a list", "[1]", "object"),
    ("invalid JSON", "{'a': 1}", "JSON object as text"),
    ("NaN", '{"a":NaN}', "JSON object as text"),
    ("a lone surrogate", '{"a":"\\ud800"}', "JSON object as text"),
    ("5,000 digits", '{"a":' + "9" * 5_000 + "}", "1024 digits"),
    ("a large exponent", '{"a":1e999}', "out of range"),
]
MESSAGES = [
    raw("no messages", b"{}", MISSING, "messages"),
    chat("null messages", VALUE, "messages", "array", messages=None),
    chat("empty messages", VALUE, "messages", ">= 1", messages=[]),
    chat("messages as text", VALUE, "messages", "array", messages="hi"),
    chat("message as text", VALUE, "messages[0]", "object", messages=["hi"]),
    chat("no role", MISSING, "messages[1].role", messages=[*HI, {"content": "x"}]),
    chat("unknown effort", VALUE, "reasoning_effort", "banana", messages=HI, reasoning_effort="banana"),
    chat("unknown verbosity", VALUE, "verbosity", "loud", messages=HI, verbosity="loud"),
    chat("an adapter", UNSUPPORTED, "lora_request", "null", messages=HI, lora_request={}),
    chat("unknown role", VALUE, "messages[0].role", "assistant", messages=[{"role": "root", "content": "x"}]),
    chat("content is a number", VALUE, "messages[0].content", "str", messages=[{"role": "user", "content": 3}]),
    chat("content is an object", VALUE, "messages[0].content", "str", messages=[{"role": "user", "content": {}}]),
    chat("null user content", VALUE, "messages[0].content", "text", messages=[{"role": "user", "content": None}]),
    chat(
        "image part",
        UNSUPPORTED,
        "messages[0].content[1].type",
        "expected 'text'; this server reads text only",
        messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}],
    ),
    chat(
        "text part without text",
        VALUE,
        "messages[0].content[0].text",
        messages=[{"role": "user", "content": [{"type": "text"}]}],
    ),
    chat(
        "tool calls",
        VALUE,
        "messages[0].tool_calls[0].function.arguments",
        messages=[{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "[1]"}}]}],
    ),
    *(
        chat(
            f"arguments: {name}",
            VALUE,
            "messages[0].tool_calls[0].function.arguments",
            says,
            messages=[{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": text}}]}],
        )
        for name, text, says in ARGUMENTS
    ),
    *(
        Bad(
            f"item arguments: {name}",
            400,
            VALUE,
            "input[0].arguments",
            says,
            json.dumps(
                {
                    "input": [
                        {"type": "function_call", "call_id": "1", "name": "f", "arguments": text},
                    ]
                }
            ).encode(),
            "/v1/responses",
        )
        for name, text, says in ARGUMENTS
    ),
    chat(
        "continue calls",
        VALUE,
        "messages[0].tool_calls",
        "cannot be continued",
        continue_final_message=True,
        messages=[{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}],
    ),
    chat("too many messages", VALUE, "messages", "4096", messages=HI * 4097),
    chat(
        "continue and prompt", VALUE, "continue_final_message", continue_final_message=True, add_generation_prompt=True
    ),
]
PROMPTS = [
    Bad("no prompt", 400, MISSING, "prompt", body=b"{}", url=TEXT_URL),
    text("null prompt", VALUE, "prompt", "str", prompt=None),
    text("empty text", VALUE, "prompt", "at least one", prompt=""),
    text("empty list", VALUE, "prompt", "is an empty list", prompt=[]),
    text("an empty list of ids", VALUE, "prompt", "at least one", prompt=[[]]),
    text("mixed list", VALUE, "prompt", "mixes", prompt=["a", 1]),
    text("float id", VALUE, "prompt[0]", "int", prompt=[1.5]),
    text("bool id", VALUE, "prompt[0]", "int", prompt=[True]),
    text("negative id", VALUE, "prompt[0]", ">= 0", prompt=[-1]),
    text("id out of the vocabulary", VALUE, "prompt", f"0..{VOCAB_SIZE - 1}", prompt=[VOCAB_SIZE]),
    text("huge id", VALUE, "prompt[0]", prompt=[2**40]),
    text("33 prompts", VALUE, "prompt", "at most 32", prompt=["a"] * 33),
    text("72 choices", VALUE, "n", "at most 64", prompt=["a"] * 9, n=8),
    text("ids as long as the context", CONTEXT, "prompt", str(MAX_MODEL_LEN), prompt=[5] * MAX_MODEL_LEN),
    text("text far beyond the context", CONTEXT, "prompt", "at least", prompt="a" * 1_000_000),
    chat("long message", CONTEXT, "messages", str(MAX_MODEL_LEN), messages=[{"role": "user", "content": "z" * 260}]),
    text("prompt and answer", CONTEXT, "max_tokens", "257 tokens", prompt=[5] * 250, max_tokens=7),
    chat("answer beyond the context", CONTEXT, "max_completion_tokens", "requested", max_completion_tokens=10_000),
    text("suffix", UNSUPPORTED, "suffix", suffix="x"),
    text("no answer and no echo", VALUE, "max_tokens", "echo", max_tokens=0),
    text("prompt truncated to nothing", VALUE, "truncate_prompt_tokens", "1 or more", truncate_prompt_tokens=0),
    chat("reserved template variable", VALUE, "chat_template_kwargs.messages", chat_template_kwargs={"messages": []}),
    chat("priority by name", VALUE, "priority", "int", priority="batch"),
    text("21 logprobs", VALUE, "logprobs", "<= 20", logprobs=21),
    text("logprobs is bool", VALUE, "logprobs", "int", logprobs=True),
    text("tokens named without logprobs", VALUE, "logprob_token_ids", "logprobs", logprob_token_ids=[1]),
    chat("tokens named, logprobs off", VALUE, "logprob_token_ids", "logprobs", logprob_token_ids=[1], logprobs=False),
    text("tokens named, echo", VALUE, "logprob_token_ids", "echo", logprob_token_ids=[1], logprobs=1, echo=True),
    text("129 named tokens", VALUE, "logprob_token_ids", "<= 128", logprob_token_ids=[1] * 129, logprobs=1),
    text("named token out of the vocabulary", VALUE, "logprob_token_ids", logprob_token_ids=[VOCAB_SIZE], logprobs=1),
    chat("bad words with beams", VALUE, "bad_words", "use_beam_search", bad_words=["a"], use_beam_search=True),
    chat("allowed tokens with beams", VALUE, "allowed_token_ids", allowed_token_ids=[9], use_beam_search=True),
    chat("every token forbidden", VALUE, "bad_words", "every one", bad_words=["a"], allowed_token_ids=[TOKEN_A]),
    text("top_logprobs in a completion", UNSUPPORTED, "top_logprobs", top_logprobs=5),
]
NUMBERS = [
    chat("n is bool", VALUE, "n", "int", n=True),
    chat("n is text", VALUE, "n", "int", n="1"),
    chat("n is float", VALUE, "n", "int", n=1.0),
    chat("n is 0", VALUE, "n", ">= 1", n=0),
    chat("n is 9", VALUE, "n", "<= 8", n=9),
    chat("n is huge", VALUE, "n", "<= 64", n=2**64),
    chat("temperature below 0", VALUE, "temperature", ">= 0", temperature=-0.1),
    chat("temperature over 2", VALUE, "temperature", "<= 2", temperature=2.1),
    chat("temperature is bool", VALUE, "temperature", "float", temperature=True),
    chat("temperature is text", VALUE, "temperature", "float", temperature="hot"),
    chat("top_p is 0", VALUE, "top_p", "> 0", top_p=0),
    chat("top_p over 1", VALUE, "top_p", "<= 1", top_p=1.5),
    chat("top_k is -2", VALUE, "top_k", ">= -1", top_k=-2),
    chat("min_p over 1", VALUE, "min_p", "<= 1", min_p=1.01),
    chat("presence_penalty", VALUE, "presence_penalty", ">= -2", presence_penalty=-3),
    chat("frequency_penalty", VALUE, "frequency_penalty", "<= 2", frequency_penalty=2.5),
    chat("repetition_penalty", VALUE, "repetition_penalty", "> 0", repetition_penalty=0),
    chat("max_tokens is 0", VALUE, "max_tokens", ">= 1", max_tokens=0),
    chat("max_tokens is -1", VALUE, "max_tokens", ">= 1", max_tokens=-1),
    chat("max_tokens is 2**63", VALUE, "max_tokens", max_tokens=2**63),
    chat("min_tokens over max_tokens", VALUE, "min_tokens", "max_tokens", min_tokens=6, max_tokens=5),
    chat("seed beyond int64", VALUE, "seed", "9223372036854775807", seed=2**63),
    chat("seed is float", VALUE, "seed", "int", seed=1.5),
    chat("stop id out of the vocabulary", VALUE, "stop_token_ids", "0..", stop_token_ids=[VOCAB_SIZE]),
    chat("logit_bias id out of the vocabulary", VALUE, "logit_bias", "0..", logit_bias={str(VOCAB_SIZE): 1}),
    chat("logit_bias id is negative", VALUE, "logit_bias", "0..", logit_bias={"-1": 1}),
    chat("logit_bias id is not an integer", VALUE, "logit_bias", "0..", logit_bias={"1.5": 1}),
    chat("logit_bias over 100", VALUE, "logit_bias", "<= 100", logit_bias={"1": 1e9}),
    chat("logit_bias is text", VALUE, "logit_bias", "float", logit_bias={"1": "x"}),
    chat("301 biases", VALUE, "logit_bias", "<= 300", logit_bias={str(i): 0 for i in range(301)}),
]
OTHER_FIELDS = [
    chat("empty stop", VALUE, "stop", ">= 1", stop=""),
    chat("an empty stop", VALUE, "stop[1]", ">= 1", stop=["a", ""]),
    chat("5 stops", VALUE, "stop", "<= 4", stop=list("abcde")),
    chat("long stop", VALUE, "stop", "<= 256", stop="x" * 10_000),
    chat("stop is a number", VALUE, "stop", "str", stop=3),
    chat("stream is text", VALUE, "stream", "bool", stream="yes"),
    chat("stream_options without stream", VALUE, "stream_options", "stream", stream_options={"include_usage": True}),
    chat(
        "include_usage is a number",
        VALUE,
        "stream_options.include_usage",
        stream=True,
        stream_options={"include_usage": 1},
    ),
    chat("logprobs is a number", VALUE, "logprobs", "bool", logprobs=1),
    chat("top_logprobs without logprobs", VALUE, "top_logprobs", "logprobs is true", top_logprobs=5),
    chat("21 top_logprobs", VALUE, "top_logprobs", "<= 20", logprobs=True, top_logprobs=21),
    chat("top_logprobs below 0", VALUE, "top_logprobs", ">= 0", logprobs=True, top_logprobs=-1),
    chat("tool of another type", VALUE, "tools[0].type", tools=[{"type": "retrieval"}]),
    chat("tool_choice without tools", VALUE, "tool_choice", tool_choice="required"),
    text("tools in a completion", UNSUPPORTED, "tools", tools=[{"type": "function", "function": {"name": "f"}}]),
    chat("unknown response format", VALUE, "response_format.type", response_format={"type": "xml"}),
    chat("chat template in the request", UNSUPPORTED, "chat_template", chat_template="{{ 7*7 }}"),
    chat("guided_json is a number", VALUE, "guided_json", guided_json=1),
    chat("21 prompt_logprobs", VALUE, "prompt_logprobs", "<= 20", prompt_logprobs=21),
    chat("prompt_logprobs streamed", VALUE, "prompt_logprobs", "stream", prompt_logprobs=0, stream=True),
    text("best_of below n", VALUE, "best_of", "at least n", best_of=1, n=2),
    text("best_of is 9", VALUE, "best_of", "<= 8", best_of=9),
    text("best_of is 65", VALUE, "best_of", "<= 64", best_of=65, use_beam_search=True),
    text("beams of all prompts", VALUE, "best_of", "at most 64", prompt=["a"] * 2, best_of=33, use_beam_search=True),
    text("use_beam_search is text", VALUE, "use_beam_search", "bool", use_beam_search="yes"),
    text("early_stopping is text", VALUE, "early_stopping", use_beam_search=True, early_stopping="often"),
    text("length_penalty without beams", VALUE, "length_penalty", "without use_beam_search", length_penalty=2.0),
    chat("early_stopping without beams", VALUE, "early_stopping", "without use_beam_search", early_stopping=True),
    *(
        chat(f"{name} with beams", VALUE, name, "with use_beam_search", use_beam_search=True, n=2, **{name: value})
        for name, value in {
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 5,
            "min_p": 0.1,
            "presence_penalty": 1,
            "frequency_penalty": -1,
            "repetition_penalty": 1.1,
            "logit_bias": {"1": 1},
            "min_tokens": 1,
            "stop": ["x"],
        }.items()
    ),
    Bad(
        "unknown model", 404, "model_not_found", "model", "tiny", json.dumps({"messages": HI, "model": "gpt"}).encode()
    ),
    chat("model is a number", VALUE, "model", "str", model=3),
]
HTTP = [
    Bad("unknown URL", 404, "unknown_url", url="/v1/audio", body=b"{}"),
    Bad("sound", 501, "not_served", says="text only", url="/v1/audio/speech", body=b"{}"),
    Bad("unknown model by id", 404, "model_not_found", "model", url="/v1/models/gpt", method="GET"),
    Bad("GET", 405, "method_not_allowed", says="POST", method="GET"),
    Bad("DELETE", 405, "method_not_allowed", says="POST", method="DELETE"),
    Bad("body too large", 413, "body_too_large", says=str(MAX_BODY_BYTES), body=b" " * (MAX_BODY_BYTES + 1)),
    Bad(
        "compressed",
        415,
        "unsupported_media_type",
        says="Content-Encoding",
        headers={"Content-Encoding": "gzip", "Content-Type": "application/json"},
        body=gzip.compress(b"{}"),
    ),
    Bad(
        "form",
        415,
        "unsupported_media_type",
        says="application/json",
        headers={"Content-Type": "application/x-www-form-urlencoded"},
        body=b"{}",
    ),
    Bad(
        "latin-1",
        415,
        "unsupported_media_type",
        headers={"Content-Type": "application/json; charset=latin1"},
        body=b"{}",
    ),
    Bad("tokenize nothing", 400, MISSING, "prompt", url="/tokenize", body=b"{}"),
    Bad(
        "tokenize both",
        400,
        VALUE,
        "prompt",
        url="/tokenize",
        body=json.dumps({"prompt": "a", "messages": HI}).encode(),
    ),
    Bad("detokenize nothing", 400, MISSING, "tokens", url="/detokenize", body=b"{}"),
    Bad("detokenize text", 400, VALUE, "tokens[0]", url="/detokenize", body=b'{"tokens":["a"]}'),
    Bad("detokenize out of range", 400, VALUE, "tokens", "0..", url="/detokenize", body=b'{"tokens":[99999]}'),
]
CASES = [*MALFORMED, *MESSAGES, *PROMPTS, *NUMBERS, *OTHER_FIELDS, *HTTP]
TYPES = {
    400: "invalid_request_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    501: "invalid_request_error",
}


async def send(session: aiohttp.ClientSession, bad: Bad) -> tuple[int, Any]:
    async with session.request(bad.method, bad.url, data=io.BytesIO(bad.body), headers=bad.headers) as response:
        assert response.headers["x-request-id"]
        return response.status, await response.json()


@pytest.mark.parametrize("bad", CASES, ids=lambda bad: bad.name)
async def test_invalid_request_is_refused_with_status_and_field(gateway: Gateway, bad: Bad) -> None:
    status, body = await send(gateway.session, bad)
    error = body["error"]
    assert (status, error["code"], error["param"]) == (bad.status, bad.code, bad.param), error["message"]
    assert error["type"] == TYPES[status]
    assert set(body) == {"error"} and set(error) == {"message", "type", "param", "code"}
    assert bad.says in error["message"]
    assert len(error["message"]) < 500
    assert gateway.engine.requests == []


async def test_invalid_requests_leave_a_stream_unchanged(gateway: Gateway, tiny_model: ServedModel) -> None:
    """Send one token before and one after each invalid request: 2 x cases tokens arrive, in order, and nothing else."""
    characters = "".join(chr(ord("a") + index % 26) for index in range(2 * len(CASES)))
    assert len(CASES) >= 60
    body = {"prompt": "hi", "stream": True, "max_tokens": 250}
    async with gateway.session.post("/v1/completions", json=body) as response:
        stream = await gateway.engine.next_stream()
        reading = asyncio.create_task(read_events(response))
        for index, bad in enumerate(CASES):
            for position in (2 * index, 2 * index + 1):
                token_ids = tiny_model.encoder.encode_text(characters[position])
                stream.send(TokenEvent(stream.request.request_id, position, token_ids))
                if position % 2 == 0:
                    assert (await send(gateway.session, bad))[0] == bad.status
        stream.send(finish(stream.request, len(characters)))
        events = await reading
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == characters
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert gateway.engine.cancelled == []


async def test_values_next_to_refused_ones_are_accepted(gateway: Gateway) -> None:
    gateway.engine.script = lambda request: [finish(request, 0)]
    good: list[dict[str, Any]] = [
        {"n": 8, "temperature": 2, "top_p": 1.0, "min_p": 1, "presence_penalty": -2, "frequency_penalty": 2.0},
        {"temperature": 0, "top_p": 1e-9, "top_k": 0, "seed": -(2**63), "min_tokens": 5, "max_tokens": 5},
        {"seed": 2**63 - 1, "stop": list("abcd"), "logit_bias": {str(i): -100 for i in range(300)}},
        {"use_beam_search": True, "n": 2, "best_of": 64, "temperature": 0, "top_p": 1, "stop": [], "top_k": -1},
        {"use_beam_search": True, "n": 64, "length_penalty": -10, "early_stopping": "never", "max_tokens": 1},
        {"use_beam_search": False, "length_penalty": 1, "early_stopping": False, "best_of": 1},
        {"stop": [], "stop_token_ids": [VOCAB_SIZE - 1], "logprobs": False, "tools": [], "tool_choice": "auto"},
        {"logprobs": True, "top_logprobs": 20},
        {"top_logprobs": 0},
        {"response_format": {"type": "text"}, "x": json.loads("[" * 31 + "]" * 31), "stream_options": None},
        {"messages": [{"role": "developer", "content": [{"type": "text", "text": "\u0000\ufffe\u202e"}]}]},
        {"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": None}]},
        {name: None for name in ("n", "stop", "seed", "logit_bias", "stream", "max_tokens", "tools", "best_of")},
    ]
    for fields in good:
        async with gateway.session.post(CHAT_URL, json={"messages": HI, **fields}) as response:
            assert response.status == 200, await response.text()
    for prompt, max_tokens in (([5] * (MAX_MODEL_LEN - 1), None), ([5] * (MAX_MODEL_LEN - 1), 1), ([[5], [6]], 2)):
        async with gateway.session.post(TEXT_URL, json={"prompt": prompt, "max_tokens": max_tokens}) as response:
            assert response.status == 200, await response.text()
    async with gateway.session.post(
        CHAT_URL, data=json.dumps({"messages": HI}), skip_auto_headers=["Content-Type"]
    ) as r:
        assert r.status == 200


async def test_incomplete_body_is_refused(start_gateway: Any) -> None:
    gateway = await start_gateway(body_timeout_seconds=0.05)

    async def stalls() -> Any:
        yield b"{"
        await asyncio.sleep(30)

    async with gateway.session.post(CHAT_URL, data=stalls(), headers={"Content-Type": "application/json"}) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (408, "request_timeout")
