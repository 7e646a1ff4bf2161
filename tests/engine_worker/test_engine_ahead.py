"""Async scheduling: the engine runs one step ahead, gives the same events, and discards unneeded results."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from engine_worker.engine import Engine, StepHandle
from engine_worker.scheduling.batch import ScheduledBatch, StepResult
from shared.messages import ErrorCode, ErrorEvent, FinishEvent, FinishReason, TokenEvent, Usage
from tests.builders import FakeModelRunner, Transcript, expected_output, make_engine, make_request, run_to_end

LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


@dataclass
class LoggedRunner:
    """A FakeModelRunner that logs when each batch is submitted and collected."""

    runner: FakeModelRunner
    log: list[str]
    before_collect: Callable[[int], None] = lambda number: None
    num_steps: int = 0

    def submit(self, batch: ScheduledBatch) -> StepHandle:
        number, self.num_steps = self.num_steps, self.num_steps + 1
        self.log.append(f"submit {number}")
        return LoggedStep(self, number, self.runner.submit(batch))


@dataclass
class LoggedStep:
    runner: LoggedRunner
    number: int
    step: StepHandle

    def collect(self) -> StepResult:
        self.runner.log.append(f"collect {self.number}")
        self.runner.before_collect(self.number)
        return self.step.collect()


def ahead(runner: FakeModelRunner | LoggedRunner | None = None, **config: Any) -> Engine:
    return make_engine(runner, async_scheduling=True, **config)


def test_async_batch_is_submitted_before_previous_collect() -> None:
    log: list[str] = []
    engine = ahead(LoggedRunner(FakeModelRunner(), log))
    engine.add_request(make_request(5, max_tokens=3, ignore_eos=True))
    run_to_end(engine)
    assert log == ["submit 0", "submit 1", "collect 0", "submit 2", "collect 1", "collect 2"]


def test_async_events_arrive_one_step_later() -> None:
    engine = ahead()
    engine.add_request(request := make_request(5, "a", max_tokens=2, ignore_eos=True))
    first, second = expected_output(request)
    assert [(engine.step(), engine.has_work) for _ in range(3)] == [
        ([], True),
        ([TokenEvent("a", 0, [first])], True),
        ([TokenEvent("a", 1, [second]), FinishEvent("a", LENGTH, Usage(prompt_tokens=5, completion_tokens=2))], False),
    ]


def test_async_stats_describe_the_collected_step() -> None:
    engine = ahead()
    engine.add_request(make_request(5, max_tokens=2, ignore_eos=True))
    assert [(engine.step(), engine.last_step.num_tokens)[1] for _ in range(4)] == [0, 5, 1, 0]
    assert engine.stats().counters.steps == 2


def test_async_end_by_length_costs_no_extra_step() -> None:
    runner = FakeModelRunner()
    engine = ahead(runner, max_model_len=9)
    engine.add_request(make_request(5, "a", max_tokens=3, ignore_eos=True))
    engine.add_request(make_request(5, "b", max_tokens=100, ignore_eos=True))
    transcript = run_to_end(engine)
    assert {name: len(tokens) for name, tokens in transcript.tokens.items()} == {"a": 3, "b": 4}
    assert runner.num_computed_tokens == 5 + 2 + 5 + 3


def test_async_token_after_stop_is_dropped() -> None:
    runner = FakeModelRunner()
    engine = ahead(runner)
    tokens = expected_output(make_request(5, "a", ignore_eos=True))
    engine.add_request(make_request(5, "a", ignore_eos=True, stop_token_ids=(tokens[2],)))
    transcript = run_to_end(engine)
    assert transcript.tokens == {"a": tokens[:3]}
    assert transcript.ends == {"a": FinishEvent("a", STOP, Usage(prompt_tokens=5, completion_tokens=3))}
    assert runner.num_computed_tokens == 5 + 3  # the third result is discarded
    assert engine.stats().counters.generated_tokens == 3
    assert engine.stats().kv_cache.num_active_blocks == 0


def test_async_abort_in_flight_frees_blocks_without_event() -> None:
    engine = ahead()
    engine.add_request(make_request(9, "a", max_tokens=50, ignore_eos=True))
    engine.step()
    engine.abort_request("a")
    engine.check_integrity()
    assert engine.stats().kv_cache.num_active_blocks == 0
    assert engine.has_work  # the step in flight
    assert engine.step() == []
    assert not engine.has_work


def test_async_aborted_id_in_flight_can_be_reused() -> None:
    engine = ahead()
    engine.add_request(make_request(9, "a", max_tokens=50, ignore_eos=True))
    engine.step()
    engine.step()
    engine.abort_request("a")
    engine.add_request(request := make_request(7, "a", max_tokens=4, ignore_eos=True))
    assert run_to_end(engine).tokens == {"a": expected_output(request)}


def test_async_sampling_failure_ends_only_its_request() -> None:
    runner = FakeModelRunner()
    engine = ahead(runner)
    engine.add_request(make_request(5, "a", ignore_eos=True))
    engine.add_request(bystander := make_request(6, "b", ignore_eos=True))
    transcript = Transcript()
    transcript.add(engine.step())
    runner.failures["a"] = "grammar left no token"
    run_to_end(engine, transcript)
    assert transcript.ends["a"] == ErrorEvent("a", ErrorCode.REQUEST_FAILED, "grammar left no token")
    assert len(transcript.tokens["a"]) == 1
    assert transcript.tokens["b"] == expected_output(bystander)


def test_async_exception_in_flight_reaches_caller() -> None:
    def break_down(number: int) -> None:
        if number == 1:
            raise RuntimeError("device lost")

    engine = ahead(LoggedRunner(FakeModelRunner(), [], before_collect=break_down))
    engine.add_request(make_request())
    engine.step()
    assert len(engine.step()) == 1
    with pytest.raises(RuntimeError, match="device lost"):
        engine.step()


def tokens_until_preemption(engine: Engine) -> int:
    """Return the number of tokens sent for "b" when it is preempted while one of its samples is in flight."""
    transcript = Transcript()
    while not engine.stats().counters.preemptions["recompute"]:
        transcript.add(engine.step())
    (preempted,) = engine._scheduler._policy
    assert preempted.request_id == "b" and not preempted.sequences[0].num_inflight_tokens
    return len(transcript.tokens["b"])


def test_async_sample_of_preempted_sequence_is_kept() -> None:
    config: dict[str, Any] = {"num_blocks": 8, "block_size": 4}
    requests = [make_request(8, name, max_tokens=12, ignore_eos=True) for name in ("a", "b")]
    first, second = ahead(**config), ahead(**config)
    for request in requests:
        first.add_request(request)
        second.add_request(request)
    num_tokens = tokens_until_preemption(first)
    assert run_to_end(second).tokens == {request.request_id: expected_output(request) for request in requests}
    # The last token of b is in flight when b is preempted, so b ends while it waits.
    third = ahead(**config)
    stop = expected_output(requests[1])[num_tokens - 1]
    third.add_request(requests[0])
    third.add_request(ending := make_request(8, "b", max_tokens=12, ignore_eos=True, stop_token_ids=(stop,)))
    transcript = run_to_end(third)
    assert transcript.tokens == {"a": expected_output(requests[0]), "b": expected_output(ending)}
    assert third.stats().counters.preemptions["recompute"] == 1 and len(transcript.tokens["b"]) == num_tokens


def test_async_beam_search_steps_are_sequential() -> None:
    log: list[str] = []
    engine = ahead(LoggedRunner(FakeModelRunner(), log))
    engine.add_request(make_request(5, "a", max_tokens=4, ignore_eos=True))
    transcript = Transcript()
    transcript.add(engine.step())
    beams = {"temperature": 0.0, "use_beam_search": True, "beam_width": 2}
    engine.add_request(make_request(5, "beams", max_tokens=2, ignore_eos=True, **beams))
    run_to_end(engine, transcript)
    assert log[:6] == ["submit 0", "submit 1", "collect 0", "collect 1", "submit 2", "collect 2"]
    assert len(transcript.tokens["a"]) == 4


def test_async_penalties_keep_step_ahead() -> None:
    log: list[str] = []
    engine = ahead(LoggedRunner(FakeModelRunner(), log))
    engine.add_request(make_request(5, max_tokens=3, ignore_eos=True, repetition_penalty=1.3, presence_penalty=0.5))
    run_to_end(engine)
    assert log == ["submit 0", "submit 1", "collect 0", "submit 2", "collect 1", "collect 2"]
