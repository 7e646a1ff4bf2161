"""The kinds of answers of OpenAI's chat and text completions."""

from gateway.pipeline.answer_kind import AnswerKind
from gateway.pipeline.request import ChatBody, CompletionBody, parse_chat, parse_completion
from gateway.pipeline.response_format import ChatFormat, CompletionFormat

CHAT = AnswerKind("chat.completion", parse_chat, ChatFormat, frozenset(ChatBody.__struct_fields__))
COMPLETION = AnswerKind(
    "text_completion", parse_completion, CompletionFormat, frozenset(CompletionBody.__struct_fields__), ids="prompt"
)
