"""How a model without a word for tools in its chat template is told of them: the way Hermes' models were taught. Pure.

The tools become a system text, calls of earlier answers <tool_call> tags, and results a user's <tool_response>.
Templates that take `tools` do all of this themselves, and better.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gateway.text.chat_template import ChatMessage

_INSTRUCTIONS = (
    "You can call these functions:\n<tools>\n{tools}\n</tools>\n"
    "To call one, answer with its name and its arguments as JSON between tags:\n"
    '<tool_call>\n{{"name": "the name", "arguments": {{}}}}\n</tool_call>'
)


def told_of_tools(messages: Sequence[ChatMessage], tools: Iterable[Mapping[str, Any]]) -> list[ChatMessage]:
    """The same chat without tool messages and calls."""
    told = [_in_words(message) for message in messages]
    definitions = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    if not definitions:
        return told
    instructions = _INSTRUCTIONS.format(tools=definitions)
    if told and told[0]["role"] == "system":
        return [ChatMessage(role="system", content=f"{told[0]['content']}\n\n{instructions}"), *told[1:]]
    return [ChatMessage(role="system", content=instructions), *told]


def _in_words(message: ChatMessage) -> ChatMessage:
    if message["role"] == "tool":
        return ChatMessage(role="user", content=f"<tool_response>\n{message['content']}\n</tool_response>")
    if "tool_calls" not in message:
        return message
    functions = [json.dumps(call["function"], ensure_ascii=False) for call in message["tool_calls"]]
    calls = [f"<tool_call>\n{function}\n</tool_call>" for function in functions]
    return ChatMessage(role=message["role"], content="\n".join([*filter(None, [message["content"]]), *calls]))
