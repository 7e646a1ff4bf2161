"""Admission: a short request starts within a few steps beside requests of many sequences, with 64 running slots."""

from typing import Any

import pytest

from engine_worker.engine import Engine
from shared.messages import FinishEvent, GenerationRequest
from tests.builders import FakeModelRunner, Transcript, expected_beams, expected_output, make_engine, make_request

SHAPE: dict[str, Any] = {"num_blocks": 6001, "block_size": 16}
MAX_STEPS = 10  # until a one-token request finishes


class Served:
    """An engine with 64 slots and the events that its clients received."""

    def __init__(self, *, async_scheduling: bool) -> None:
        self.engine: Engine = make_engine(
            FakeModelRunner(**SHAPE),
            **SHAPE,
            max_num_seqs=64,
            max_num_batched_tokens=512,
            max_prefill_tokens_with_decodes=256,
            max_model_len=2048,
            async_scheduling=async_scheduling,
        )
        self.transcript = Transcript()
        self.requests: list[GenerationRequest] = []

    def add(self, prompt: int, **sampling: Any) -> GenerationRequest:
        request = make_request(prompt, f"r{len(self.requests)}", **{"ignore_eos": True, "seed": 5, **sampling})
        self.requests.append(request)
        self.engine.add_request(request)
        return request

    def step(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            self.transcript.add(self.engine.step())
            self.engine.check_integrity()

    def steps_until(self, request: GenerationRequest) -> int:
        for number in range(1, 1000):
            self.step()
            if request.request_id in self.transcript.ends:
                return number
        raise AssertionError(f"{request.request_id} did not end")

    def check_tokens(self) -> None:
        """Run to the end and compare each output with that of the request alone."""
        while self.engine.has_work:
            self.step()
        for request in self.requests:
            choices = range(request.sampling.n)
            if request.sampling.use_beam_search:
                expected = [output for output, _ in expected_beams(request, max_num_tokens=2048)]
            else:
                expected = [expected_output(request, choice=choice, max_num_tokens=2048) for choice in choices]
            assert isinstance(self.transcript.ends[request.request_id], FinishEvent)
            assert [self.transcript.choice(request.request_id, choice) for choice in choices] == expected


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def served(request: pytest.FixtureRequest) -> Served:
    return Served(async_scheduling=request.param)


def test_short_request_starts_beside_many_parallel_samples(served: Served) -> None:
    for _ in range(8):
        served.add(40, max_tokens=120)
    served.step(3)
    for _ in range(8):
        served.add(40, n=8, max_tokens=500, temperature=1.0)
    served.step(5)
    assert served.steps_until(served.add(10, max_tokens=1)) <= MAX_STEPS
    served.check_tokens()


def test_short_request_starts_beside_wide_beams(served: Served) -> None:
    for _ in range(8):
        served.add(40, max_tokens=120)
    served.step(3)
    served.add(40, use_beam_search=True, beam_width=32, n=32, max_tokens=30)
    served.step(5)
    assert served.steps_until(served.add(10, max_tokens=1)) <= MAX_STEPS
    served.check_tokens()


def test_short_request_starts_before_waiting_beams(served: Served) -> None:
    streams = [served.add(40, max_tokens=40 + 3 * number) for number in range(64)]
    served.step(12)
    assert served.engine.stats().num_running == 64
    beams = served.add(40, use_beam_search=True, beam_width=32, n=32, max_tokens=10)
    served.step(5)
    short = served.add(10, max_tokens=1)
    served.steps_until(streams[0])
    assert served.steps_until(short) <= MAX_STEPS
    later = [served.add(10, max_tokens=200) for _ in range(64)]
    served.steps_until(beams)  # the later requests did not delay the beams
    assert sum(request.request_id in served.transcript.ends for request in later) == 0
    served.check_tokens()


def test_waiting_beams_reserve_every_second_free_slot(served: Served) -> None:
    streams = [served.add(4, max_tokens=20 + number) for number in range(64)]
    served.step(2)
    beams = served.add(4, use_beam_search=True, beam_width=8, n=8, max_tokens=2)
    later = [served.add(4, max_tokens=400) for _ in range(60)]
    served.steps_until(beams)
    num_ended = sum(request.request_id in served.transcript.ends for request in streams)
    num_started = sum(bool(served.transcript.tokens.get(request.request_id)) for request in later)
    assert 15 <= num_ended <= 20 and 7 <= num_started <= 10


def test_resumed_sequence_does_not_recompute_prompt_logprobs(served: Served) -> None:
    request = served.add(40, n=3, max_tokens=5, temperature=1.0, prompt_logprobs=1)
    num_scores = 0
    while served.engine.has_work:
        events = served.engine.step()
        num_scores += sum(bool(getattr(event, "prompt_logprobs", None)) for event in events)
        served.transcript.add(events)
    assert num_scores == 1 and request.request_id in served.transcript.ends
