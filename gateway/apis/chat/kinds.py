"""The kind of answers of OpenAI's chat completions."""

from gateway.pipeline.answer_kind import AnswerKind
from gateway.pipeline.request import ChatBody, parse_chat
from gateway.pipeline.response_format import ChatFormat

CHAT = AnswerKind("chat.completion", parse_chat, ChatFormat, frozenset(ChatBody.__struct_fields__))
