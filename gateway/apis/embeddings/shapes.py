"""The shapes of embeddings, rerank, and score, for the API description; format.py writes the bytes."""

from typing import Literal

import msgspec


class PromptUsageBody(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class _ListBody(msgspec.Struct, kw_only=True):
    id: str
    created: int
    model: str
    usage: PromptUsageBody


class VectorBody(msgspec.Struct, kw_only=True):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str  # base64: little-endian float32


class EmbeddingsBody(_ListBody, kw_only=True):
    object: Literal["list"]
    data: list[VectorBody]


class PairScoreBody(msgspec.Struct, kw_only=True):
    object: Literal["score"]
    index: int
    score: float  # probability of yes


class ScoresBody(_ListBody, kw_only=True):
    object: Literal["list"]
    data: list[PairScoreBody]


class RankedTextBody(msgspec.Struct, kw_only=True):
    text: str


class RankedBody(msgspec.Struct, kw_only=True, omit_defaults=True):
    index: int  # in the request's documents
    relevance_score: float  # probability of yes
    document: RankedTextBody | None = None  # unless return_documents is false


class RanksBody(_ListBody, kw_only=True):
    results: list[RankedBody]
