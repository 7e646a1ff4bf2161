"""The kind of answers of OpenAI's chat completions."""

from gateway.apis.chat.format import ChatFormat
from gateway.apis.chat.schema import parse_chat
from gateway.pipeline.answer_kind import AnswerKind, short_messages, stored_fields
from gateway.pipeline.chat_request import ChatBody

CHAT = AnswerKind("chat.completion", parse_chat, ChatFormat, stored_fields(ChatBody), {"messages": short_messages})
