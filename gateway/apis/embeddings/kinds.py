"""The kinds of answers of embeddings, rerank, and score."""

from collections.abc import Mapping
from typing import Any

from gateway.apis.embeddings.format import EmbeddingFormat, RerankFormat, ScoreFormat
from gateway.apis.embeddings.schema import (
    EmbeddingBody,
    RerankBody,
    ScoreBody,
    parse_embedding,
    parse_rerank,
    parse_score,
)
from gateway.pipeline.answer_kind import SOME_TEXT, AnswerKind, stored_fields


def _short(texts: Any, given: Mapping[str, Any]) -> Any:
    """Keep the number of texts."""
    return SOME_TEXT if isinstance(texts, str) or isinstance(texts[0], int) else [SOME_TEXT] * len(texts)


def _short_documents(documents: Any, given: Mapping[str, Any]) -> Any:
    return [SOME_TEXT] * len(documents) if given.get("return_documents") is False else documents


EMBEDDING = AnswerKind(
    "embedding",
    parse_embedding,
    EmbeddingFormat,
    stored_fields(EmbeddingBody),
    {"input": _short},
    ids="input",
    has_events=False,
)
RERANK = AnswerKind(
    "rerank",
    parse_rerank,
    RerankFormat,
    stored_fields(RerankBody) - {"instruction"},
    {"query": _short, "documents": _short_documents},
    has_events=False,
)
SCORE = AnswerKind(
    "score",
    parse_score,
    ScoreFormat,
    stored_fields(ScoreBody) - {"instruction"},
    dict.fromkeys(("text_1", "text_2", "queries", "documents"), _short),
    has_events=False,
)
