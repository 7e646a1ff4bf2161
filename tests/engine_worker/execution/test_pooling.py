"""Vectors of prompts: equal to those of transformers, in any batch, with chunks, cached prefixes, and preemption."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from engine_worker.kv.preemption import PreemptionMode
from shared.messages import ErrorEvent, FinishEvent, GenerationRequest, Pooling, TokenEvent, decoded_vector
from shared.model_files import ModelFilesError, Task, task_of
from tests.builders import make_request
from tests.embedding_model import write_embedding_model
from tests.engine_worker.execution.reference import make_engine, make_runner, write_model

# float32 on both sides; the order of sums differs.
ATOL = 1e-4


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embedding_model(tmp_path_factory.mktemp("embedding"))


class Reference:
    def __init__(self, directory: Path) -> None:
        from transformers import AutoModel  # noqa: PLC0415 - takes seconds

        self._model = AutoModel.from_pretrained(directory, dtype=torch.float32)

    @torch.inference_mode()
    def vector(self, token_ids: list[int], dimensions: int = 0) -> np.ndarray[Any, Any]:
        hidden = self._model(torch.tensor([token_ids])).last_hidden_state[0, -1]
        return torch.nn.functional.normalize(hidden[: dimensions or None], dim=0).numpy()


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Reference:
    return Reference(model_dir)


def pooled(length: int, request_id: str, dimensions: int = 0) -> GenerationRequest:
    return structs.replace(make_request(length, request_id, max_tokens=1), pooling=Pooling(dimensions=dimensions))


def run(engine: Any, requests: list[GenerationRequest]) -> tuple[dict[str, Any], dict[str, FinishEvent]]:
    """Return the vectors, or the tokens of requests without one, and the ends, by request id."""
    found: dict[str, Any] = {}
    ends: dict[str, FinishEvent] = {}
    for request in requests:
        engine.add_request(request)
    wanted = {request.request_id for request in requests if request.pooling is not None}
    while engine.has_work:
        for event in engine.step():
            assert not isinstance(event, ErrorEvent), event
            if isinstance(event, FinishEvent):
                ends[event.request_id] = event
            elif event.request_id in wanted:
                assert isinstance(event, TokenEvent) and event.logprobs is not None and len(event.token_ids) == 1
                found[event.request_id] = np.frombuffer(decoded_vector(event.logprobs[0]), "<f4")
            else:
                found.setdefault(event.request_id, []).extend(event.token_ids)
        engine.check_integrity()
    return found, ends


def assert_equal(reference: Reference, requests: list[GenerationRequest], found: dict[str, Any]) -> None:
    for request in requests:
        if request.pooling is not None:
            expected = reference.vector(request.prompt_token_ids, request.pooling.dimensions)
            vector = found[request.request_id]
            np.testing.assert_allclose(vector, expected, atol=ATOL)
            assert float(vector @ expected) >= 0.9999
            assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_vectors_beside_generation_equal_transformers(
    model_dir: Path, reference: Reference, async_scheduling: bool
) -> None:
    runner = make_runner(model_dir, num_blocks=64, block_size=8)
    config: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "async_scheduling": async_scheduling}
    texts = [
        make_request(9, "a", max_tokens=12, ignore_eos=True, logprobs=1),
        make_request(30, "b", max_tokens=6, ignore_eos=True),
    ]
    alone, _ = run(make_engine(runner, **config), texts)
    vectors = [pooled(1, "c"), pooled(7, "d"), pooled(50, "e", dimensions=16), pooled(16, "f")]  # e: in chunks
    found, ends = run(make_engine(runner, **config), [texts[0], *vectors, texts[1]])
    assert_equal(reference, vectors, found)
    assert len(found["e"]) == 16
    assert {name: found[name] for name in "ab"} == alone
    assert ends["e"].usage.prompt_tokens == 50


def test_vector_after_cached_prefix_is_equal(model_dir: Path, reference: Reference) -> None:
    engine = make_engine(make_runner(model_dir, num_blocks=64, block_size=8), max_num_seqs=8, max_num_batched_tokens=64)
    request = pooled(40, "a")
    run(engine, [request])
    again = structs.replace(request, request_id="again")
    found, ends = run(engine, [again])
    assert ends["again"].usage.cached_tokens == 39
    assert_equal(reference, [again], found)


@pytest.mark.parametrize("mode", PreemptionMode)
def test_vectors_under_preemption_are_equal(model_dir: Path, reference: Reference, mode: PreemptionMode) -> None:
    runner = make_runner(model_dir, num_blocks=12, block_size=8, num_host_blocks=12)
    engine = make_engine(runner, max_num_seqs=4, max_num_batched_tokens=16, preemption_mode=mode)
    texts = [make_request(20, f"t{number}", max_tokens=40, ignore_eos=True) for number in range(2)]
    vectors = [pooled(50, "a"), pooled(45, "b")]
    found, _ = run(engine, [*texts, *vectors])
    assert sum(engine.stats().counters.preemptions.values()) > 0
    assert_equal(reference, vectors, found)


def test_vectors_of_transformers_backend_are_equal(model_dir: Path, reference: Reference) -> None:
    engine = make_engine(
        make_runner(model_dir, num_blocks=64, block_size=8, model_impl="transformers"),
        max_num_seqs=8,
        max_num_batched_tokens=16,
    )
    vectors = [pooled(7, "a"), pooled(40, "b")]
    found, _ = run(engine, [make_request(9, "t", max_tokens=5, ignore_eos=True), *vectors])
    assert_equal(reference, vectors, found)


def test_task_comes_from_the_files(model_dir: Path, tmp_path: Path) -> None:
    assert task_of(model_dir) is Task.EMBED
    assert task_of(write_model(tmp_path / "text")) is Task.GENERATE
    config = tmp_path / "text" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "classifier_from_token": ["no", "yes"]}))
    assert task_of(tmp_path / "text") is Task.SCORE
    other = write_embedding_model(tmp_path / "mean", pooling="pooling_mode_mean_tokens")
    with pytest.raises(ModelFilesError, match=r"expected pooling_mode_lasttoken, .*; got pooling_mode_mean_tokens"):
        task_of(other)
