"""Prompt logprobs equal transformers in chunks, in mixed batches, and for any number of rows at once."""

from pathlib import Path

import pytest
import torch

from engine_worker.execution.load.load import load_model_runner
from engine_worker.execution.sampling import prompt_scores
from engine_worker.execution.settings import ExecutionSettings
from engine_worker.execution.step.model_runner import ModelRunner
from engine_worker.model.served_model import StepOutput
from engine_worker.scheduling.batch import ScheduledSequence
from shared.messages import EncodedLogprobs, GenerationRequest, TokenEvent, decoded_logprobs, scores_by_index
from tests.builders import make_request, make_sequence
from tests.engine_worker.execution.reference import Reference, make_engine, make_runner, write_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


ON_A_GPU = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")],
)


@pytest.fixture(params=["cpu", ON_A_GPU])
def runner(model_dir: Path, request: pytest.FixtureRequest) -> ModelRunner:
    if request.param == "cpu":
        return make_runner(model_dir, num_blocks=64, block_size=8)
    settings = ExecutionSettings(
        model=model_dir,
        device="cuda",
        dtype="float32",
        kv_cache_memory_bytes=2**24,
        swap_space_bytes=0,
        max_model_len=256,
    )
    return load_model_runner(settings, lambda phase, progress, detail: None)


def scores(runner: ModelRunner, requests: list[GenerationRequest]) -> dict[str, dict[int, EncodedLogprobs]]:
    engine = make_engine(runner, max_num_seqs=4, max_num_batched_tokens=24)
    for request in requests:
        engine.add_request(request)
    found: dict[str, dict[int, EncodedLogprobs]] = {}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenEvent):
                found.setdefault(event.request_id, {}).update(scores_by_index(event.prompt_logprobs))
    return found


@pytest.mark.parametrize("rows_at_once", [5, 64])
def test_prompt_logprobs_equal_transformers(
    runner: ModelRunner, model_dir: Path, monkeypatch: pytest.MonkeyPatch, rows_at_once: int
) -> None:
    monkeypatch.setattr(prompt_scores, "ROWS_AT_ONCE", rows_at_once)
    requests = [
        make_request(61, "long", max_tokens=2, prompt_logprobs=3),
        make_request(7, "plain", max_tokens=12),
        make_request(19, "short", max_tokens=2, prompt_logprobs=0),
    ]
    found = scores(runner, requests)
    assert found["plain"] == {}
    reference = Reference(model_dir)
    for request, num_top in ((requests[0], 3), (requests[2], 0)):
        prompt = request.prompt_token_ids
        exact = reference.logits(prompt, len(prompt)).log_softmax(-1)[:-1]
        got = decoded_logprobs([found[request.request_id][index] for index in range(1, len(prompt))])
        chosen = exact.gather(1, torch.tensor(prompt[1:])[:, None]).squeeze(1)
        # Both sides use fp32 with different orders of summation: logits of +-10 differ by 1e-4.
        assert [score.logprob for score in got] == pytest.approx(chosen.tolist(), abs=1e-3)
        top = exact.topk(num_top)
        assert [list(score.top_token_ids) for score in got] == top.indices.tolist()
        flat = [logprob for score in got for logprob in score.top_logprobs]
        assert flat == pytest.approx(top.values.flatten().tolist(), abs=1e-3)


def test_prompt_logprobs_do_not_change_the_answer(runner: ModelRunner) -> None:
    prompt = make_request(30).prompt_token_ids

    def answer(**sampling: int) -> list[int]:
        engine = make_engine(runner, max_num_seqs=4, max_num_batched_tokens=24)
        engine.add_request(make_request(prompt, "a", max_tokens=8, ignore_eos=True, **sampling))
        events = [event for _ in range(20) for event in engine.step()]
        return [token for event in events if isinstance(event, TokenEvent) for token in event.token_ids]

    assert answer() == answer(prompt_logprobs=2)


def test_prompt_logprobs_skip_tokens_sent_before() -> None:
    sequence = make_sequence([10, 11, 12, 13, 14, 15], prompt_logprobs=0)
    sequence.num_scored_tokens = 4
    before = make_sequence([20, 21, 22])
    rows = [ScheduledSequence(before, 0, 3, True), ScheduledSequence(sequence, 0, 6, True)]
    scores = prompt_scores.PromptScores(rows, torch.device("cpu"))
    asked: list[int] = []

    def logits_of(wanted: torch.Tensor) -> torch.Tensor:
        asked.extend(wanted.tolist())
        return torch.zeros(len(wanted), 32)

    scores.launch(StepOutput(logits=logits_of, hidden=logits_of))
    ((scored, result),) = scores.collect()
    assert scored is sequence and (result.start, len(result.tokens)) == (4, 2)
    assert asked == [3 + 3, 3 + 4]  # after three rows of `before`: the positions that predict tokens 4 and 5
