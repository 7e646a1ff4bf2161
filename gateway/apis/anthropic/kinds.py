"""The kind of answers of Anthropic's Messages API."""

from gateway.apis.anthropic.format import AnthropicFormat
from gateway.apis.anthropic.schema import MessagesBody, parse_messages
from gateway.pipeline.answer_kind import AnswerKind, short_messages, stored_fields

MESSAGE = AnswerKind(
    "message", parse_messages, AnthropicFormat, stored_fields(MessagesBody) - {"system"}, {"messages": short_messages}
)
