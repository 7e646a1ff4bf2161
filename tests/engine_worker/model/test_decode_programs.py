"""Decode steps on a CPU are recorded once per number of rows, and have the bits of steps that are not."""

import logging
from pathlib import Path

import pytest

from engine_worker.execution.step.model_runner import ModelRunner
from shared.messages import GenerationRequest, TokenEvent
from tests.builders import make_request
from tests.engine_worker.execution.reference import make_engine, make_runner
from tests.engine_worker.model.families import prompts, write_family
from tests.engine_worker.model.family_cases import NATIVE
from tests.engine_worker.model.test_grouped import needs_library


def scored(runner: ModelRunner, requests: list[GenerationRequest]) -> list[TokenEvent]:
    """Return the events of all requests with their log-probabilities, in the order of the requests."""
    engine = make_engine(runner, max_num_seqs=8, max_num_batched_tokens=64)
    for request in requests:
        engine.add_request(request)
    events: dict[str, list[TokenEvent]] = {request.request_id: [] for request in requests}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenEvent):
                events[event.request_id].append(event)
    return [event for own in events.values() for event in own]


@needs_library
@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        ("qwen3", "auto"),
        ("qwen3_moe", "int8"),
        ("qwen3_moe", "int4"),
        ("qwen3_5_text", "auto"),
        ("qwen3_5_text", "int8"),
        ("qwen3_next", "int8"),
        ("lfm2", "auto"),
        ("lfm2_moe", "int8"),
        ("granite", "auto"),
        ("granitemoehybrid, dense, biases, rotary", "auto"),
    ],
)
def test_recorded_steps_have_the_bits_of_others(
    family: str, quantization: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each request alone: all its steps but the prompt's are recorded. Together: in batches, and beside prompts.

    At the end sequences end one by one, so the rows of a step and the blocks of its states change.
    """
    caplog.set_level(logging.INFO, logger="worker")
    runner = make_runner(write_family(tmp_path, NATIVE[family]), num_blocks=64, quantization=quantization)
    requests = [
        make_request(prompt, f"p{index}", max_tokens=8 + 3 * index, ignore_eos=True, logprobs=2)
        for index, prompt in enumerate(prompts(300))
    ]
    together = scored(runner, requests)
    assert together == [event for request in requests for event in scored(runner, [request])]
    assert "not recorded" not in caplog.text
