"""The bodies of embeddings, rerank, and score. Pure.

What the engine reports with the token of each prompt, a vector or log-probabilities, is encoded as it comes.
"""

import base64
import math
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import structs

from gateway.pipeline.choice_writer import ChoiceDelta
from gateway.pipeline.response_format import NOTHING, Body, ChoiceResult, ReplyHeader, ResponseFormat, UsageCount
from shared.messages import EncodedLogprobs, decoded_logprobs, decoded_vector

_encode = msgspec.json.encode


class _ListFormat(ResponseFormat):
    """A body with one item per prompt."""

    id_prefix: str

    def __init__(self, header: ReplyHeader) -> None:
        self._header = header
        self._repeated = header.repeated
        self._items: dict[int, Any] = {}  # by prompt

    def collect(self, update: ChoiceDelta) -> ChoiceDelta:
        for entry in update.logprobs:
            assert entry.scores is not None, "the engine reports each token of these requests"
            self._items[update.index] = self._item(entry.scores)
        return structs.replace(update, logprobs=())

    def _item(self, report: EncodedLogprobs) -> Any:
        """Return what body() needs of a prompt's report."""
        raise NotImplementedError

    def _fields(self, usage: UsageCount) -> dict[str, Any]:
        raise NotImplementedError

    def body(self, choices: Iterable[ChoiceResult], usage: UsageCount, extra: Mapping[str, Any] = NOTHING) -> Body:
        header = self._header
        used = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
        head = {"id": self.id_prefix + header.response_id, "created": header.created, "model": header.model}
        return _encode({**head, **self._fields(usage), "usage": used})

    def _in_order(self) -> list[Any]:
        return [self._items[index] for index in range(len(self._items))]


class EmbeddingFormat(_ListFormat):
    id_prefix = "embd-"

    def _item(self, report: EncodedLogprobs) -> msgspec.Raw:
        values = decoded_vector(report)
        if self._repeated["encoding_format"] == "base64":
            return msgspec.Raw(_encode(base64.b64encode(values).decode()))
        return msgspec.Raw(_encode(array("f", values).tolist()))

    def _fields(self, usage: UsageCount) -> dict[str, Any]:
        items = enumerate(self._in_order())
        data = [{"object": "embedding", "index": index, "embedding": embedding} for index, embedding in items]
        return {"object": "list", "data": data}


class _ScoresFormat(_ListFormat):
    def _item(self, report: EncodedLogprobs) -> float:
        """Return the probability of yes among the tokens for no and yes."""
        (scores,) = decoded_logprobs([report])
        no, yes = scores.top_logprobs
        return 1.0 / (1.0 + math.exp(min(no - yes, 700.0)))


class ScoreFormat(_ScoresFormat):
    id_prefix = "score-"

    def _fields(self, usage: UsageCount) -> dict[str, Any]:
        data = [{"object": "score", "index": index, "score": score} for index, score in enumerate(self._in_order())]
        return {"object": "list", "data": data}


class RerankFormat(_ScoresFormat):
    id_prefix = "rerank-"

    def _fields(self, usage: UsageCount) -> dict[str, Any]:
        documents = self._repeated.get("documents")
        ranked = sorted(enumerate(self._in_order()), key=lambda item: (-item[1], item[0]))[: self._repeated["top_n"]]
        return {
            "results": [
                {"index": index, "relevance_score": score}
                | ({} if documents is None else {"document": {"text": documents[index]}})
                for index, score in ranked
            ]
        }
