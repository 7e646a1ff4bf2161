"""The kind of answers of OpenAI's text completions."""

from gateway.pipeline.answer_kind import AnswerKind
from gateway.pipeline.request import CompletionBody, parse_completion
from gateway.pipeline.response_format import CompletionFormat

COMPLETION = AnswerKind(
    "text_completion", parse_completion, CompletionFormat, frozenset(CompletionBody.__struct_fields__), ids="prompt"
)
