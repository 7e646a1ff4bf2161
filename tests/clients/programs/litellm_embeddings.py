"""Use litellm for vectors and ranks: URL EMBEDDER RANKER QUERY DOCUMENT... -> what it received, as JSON."""

import json
import sys
from typing import Any

import litellm


def main(url: str, embedder: str, ranker: str, query: str, *documents: str) -> dict[str, Any]:
    options: dict[str, Any] = {"api_key": "none", "max_retries": 0}
    vectors = {
        provider: litellm.embedding(
            model=f"{provider}/{embedder}", input=list(documents), api_base=f"{url}/v1", **options
        )
        for provider in ("openai", "hosted_vllm")
    }
    ranks = {
        provider: litellm.rerank(
            model=f"{provider}/{ranker}", query=query, documents=list(documents), top_n=2, api_base=base, **options
        )
        for provider, base in (("hosted_vllm", url), ("cohere", url), ("jina_ai", f"{url}/v1/rerank"))
    }
    return {
        "vectors": {name: [item["embedding"] for item in answer.data] for name, answer in vectors.items()},
        "usage": vectors["openai"].usage.model_dump(include={"prompt_tokens", "total_tokens"}),
        "ranks": {
            name: [[result["index"], result["relevance_score"]] for result in answer.results or ()]
            for name, answer in ranks.items()
        },
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
