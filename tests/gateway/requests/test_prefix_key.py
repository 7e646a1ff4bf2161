"""The turns of a conversation have one key, and other conversations have others."""

import json
from typing import Any

from gateway.apis.chat.schema import parse_chat
from gateway.apis.completions.schema import parse_completion
from gateway.http.json_body import decode_body
from gateway.pipeline.plan import plan_requests
from gateway.pipeline.prefix_key import MIN_TOKENS, PREFIX_TOKENS
from gateway.text.served_model import ModelLimits

LIMITS = ModelLimits(max_model_len=2**20, vocab_size=2**31)
SYSTEM, FIRST = {"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}
TURNS = [SYSTEM, FIRST, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "More"}]


def chat_key(messages: list[Any], *, num_tokens: int = MIN_TOKENS, **fields: Any) -> bytes:
    request = parse_chat(decode_body(json.dumps({"messages": messages, **fields}).encode()))
    return plan_requests(request, [[1] * num_tokens], LIMITS)[0].prefix_key


def completion_keys(*prompts: list[int], **fields: Any) -> list[bytes]:
    request = parse_completion(decode_body(json.dumps({"prompt": prompts, **fields}).encode()))
    return [planned.prefix_key for planned in plan_requests(request, list(prompts), LIMITS)]


def test_turns_of_a_conversation_have_one_key() -> None:
    first = chat_key(TURNS[:2])
    assert len(first) == 8
    assert chat_key(TURNS, num_tokens=900) == first


def test_another_system_message_user_tool_or_salt_has_another_key() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    keys = {
        chat_key(TURNS),
        chat_key(TURNS[1:]),
        chat_key([SYSTEM, {"role": "user", "content": "Hello!"}]),
        chat_key(TURNS, tools=[tool]),
        chat_key(TURNS, cache_salt="other"),
    }
    assert len(keys) == 5


def test_conversation_without_user_message_has_a_key() -> None:
    assert chat_key([SYSTEM]) != chat_key([SYSTEM, FIRST])


def test_token_ids_have_the_key_of_their_beginning() -> None:
    same = [7] * PREFIX_TOKENS
    one, other, third = completion_keys([*same, 1], [*same, 2], [8, *same])
    assert one == other != third


def test_client_can_name_the_key() -> None:
    one, other = completion_keys([1] * MIN_TOKENS, [2] * MIN_TOKENS, prompt_cache_key="mine")
    assert one == other == chat_key(TURNS, prompt_cache_key="mine") != chat_key(TURNS, prompt_cache_key="yours")


def test_short_prompt_has_no_key() -> None:
    assert completion_keys([1] * (MIN_TOKENS - 1), prompt_cache_key="mine") == [b""]
