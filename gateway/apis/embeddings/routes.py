"""POST /v1/embeddings, /rerank and /score; the last two also below /v1, and /rerank below /v2, as in vLLM."""

from gateway.apis.embeddings.kinds import EMBEDDING, RERANK, SCORE
from gateway.apis.embeddings.schema import EmbeddingBody, RerankBody, ScoreBody
from gateway.apis.embeddings.shapes import EmbeddingsBody, RanksBody, ScoresBody
from gateway.pipeline.api import Api
from gateway.pipeline.submit import generating

_EMBED = generating(
    "/v1/embeddings",
    EMBEDDING,
    "Compute the vectors of texts or token ids",
    body=EmbeddingBody,
    shape=EmbeddingsBody,
    media=(),
)
_RERANK = generating(
    "/rerank", RERANK, "Order documents by their relevance to a query", body=RerankBody, shape=RanksBody, media=()
)
_SCORE = generating("/score", SCORE, "Score pairs of texts", body=ScoreBody, shape=ScoresBody, media=())

API = Api(
    operations=(
        _EMBED,
        _RERANK,
        _RERANK.below("/v1"),
        _RERANK.below("/v2"),
        _SCORE,
        _SCORE.below("/v1"),
    ),
    kinds=(EMBEDDING, RERANK, SCORE),
)
