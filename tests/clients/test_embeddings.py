"""`pagestream serve` with an embedding model and a reranker: clients, transformers' values, and a killed worker."""

import concurrent.futures
import json
import math
import signal
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from tokenizers import Tokenizer

from gateway.apis.embeddings.schema import DEFAULT_INSTRUCTION, PAIR
from tests.clients.conftest import CLIENTS, run_client
from tests.e2e.test_serve import Serve
from tests.embedding_model import write_embedding_model_of_words
from tests.engine_worker.execution.reference import Reference, write_model_of_words

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(sys.platform != "linux", reason="finds workers by their command lines, as on Linux"),
]
QUERY = "the capital"
DOCUMENTS = ["Paris is the capital of France.", "Rome", "the user and the assistant"]


@pytest.fixture(scope="module")
def models() -> Iterator[Path]:
    """Yield a directory of two models; tmp_path is too long for a unix socket."""
    with tempfile.TemporaryDirectory(prefix="ps-") as name:
        directory = Path(name)
        write_embedding_model_of_words(directory / "vec")
        config = write_model_of_words(directory / "rank") / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "classifier_from_token": ["n", "y"]}))
        yield directory


@pytest.fixture(scope="module")
def serve(models: Path) -> Iterator[Serve]:
    file = models / "models.toml"
    entries = (f'[[models]]\nmodel = "{models / name}"\nnames = ["{name}"]\n' for name in ("vec", "rank"))
    file.write_text("".join(f'{entry}worker = {{ kv-cache-memory-bytes = "8M" }}\n' for entry in entries))
    one = Serve(models, "--models-file", str(file))
    one.wait_for_line("Ready after")
    yield one
    one.close()


@pytest.fixture(scope="module")
def vectors(models: Path) -> np.ndarray[Any, Any]:
    """Return transformers' vectors of DOCUMENTS."""
    from transformers import AutoModel  # noqa: PLC0415 - takes seconds

    model = AutoModel.from_pretrained(models / "vec", dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(models / "vec" / "tokenizer.json"))
    with torch.inference_mode():
        hidden = [model(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0, -1] for text in DOCUMENTS]
    return torch.nn.functional.normalize(torch.stack(hidden)).numpy()


@pytest.fixture(scope="module")
def scores(models: Path) -> list[float]:
    """Return transformers' probability of y among n and y, for each of DOCUMENTS."""
    reference = Reference(models / "rank")
    tokenizer = Tokenizer.from_file(str(models / "rank" / "tokenizer.json"))
    answers = [tokenizer.token_to_id(token) for token in "ny"]
    texts = [PAIR.format(instruction=DEFAULT_INSTRUCTION, query=QUERY, document=document) for document in DOCUMENTS]
    prompts = [tokenizer.encode(text).ids for text in texts]
    logits = [reference.logits(prompt, 1)[0][answers] for prompt in prompts]
    return [torch.softmax(both, 0)[1].item() for both in logits]


def assert_same(found: Any, expected: np.ndarray[Any, Any]) -> None:
    cosines = (np.array(found) * expected).sum(axis=1)
    assert (cosines >= 0.9999).all(), cosines


def post(serve: Serve, path: str, **body: Any) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{serve.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def test_openai_client_reads_the_vectors_of_transformers(serve: Serve, vectors: np.ndarray[Any, Any]) -> None:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{serve.port}/v1", api_key="none", max_retries=0) as client:
        found = client.embeddings.create(model="vec", input=DOCUMENTS)
        assert_same([item.embedding for item in found.data], vectors)
        short = client.embeddings.create(model="vec", input=DOCUMENTS, dimensions=16, encoding_format="float")
    expected = vectors[:, :16] / np.linalg.norm(vectors[:, :16], axis=1, keepdims=True)
    assert_same([item.embedding for item in short.data], expected)
    assert found.usage.prompt_tokens == found.usage.total_tokens == short.usage.total_tokens > len(DOCUMENTS)


def test_scores_are_those_of_transformers(serve: Serve, scores: list[float]) -> None:
    answer = post(serve, "/score", model="rank", text_1=QUERY, text_2=DOCUMENTS)
    found = [item["score"] for item in answer["data"]]
    assert max(found) - min(found) > 1e-3
    assert found == pytest.approx(scores, abs=1e-4)  # float32 on both sides; the order of sums differs


def test_litellm_reads_vectors_and_ranks(serve: Serve, vectors: np.ndarray[Any, Any], scores: list[float]) -> None:
    url = f"http://127.0.0.1:{serve.port}"
    saw = run_client(CLIENTS / "bin" / "python", "litellm_embeddings.py", url, "vec", "rank", QUERY, *DOCUMENTS)
    for found in saw["vectors"].values():
        assert_same(found, vectors)
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[:2]
    for provider, ranks in saw["ranks"].items():
        assert [index for index, _ in ranks] == best, provider
        assert all(math.isclose(score, scores[index], abs_tol=1e-4) for index, score in ranks), provider


def test_killed_worker_loses_no_vector(serve: Serve, vectors: np.ndarray[Any, Any]) -> None:
    (worker,) = [one for one in serve.workers() if "vec" in one.cmdline()]
    worker.send_signal(signal.SIGSTOP)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        answer = pool.submit(post, serve, "/v1/embeddings", model="vec", input=DOCUMENTS * 30)
        worker.kill()
        found = [item["embedding"] for item in answer.result()["data"]]
    assert_same(found, np.tile(vectors, (30, 1)))
