"""Drafts of models with recurrent layers: a wrong one changes no token, no log-probability and no state."""

from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest

from engine_worker.engine import Engine
from engine_worker.execution.settings import DraftSettings
from engine_worker.execution.step.model_runner import ModelRunner
from engine_worker.kv.preemption import PreemptionMode
from engine_worker.kv.sequence import Sequence
from engine_worker.model import compiled_step
from kernels.cpu.build import NoLibrary
from shared.messages import GenerationRequest
from tests.builders import Transcript, drafting_by, make_prompt, make_request
from tests.engine_worker.execution.reference import make_engine, make_runner, run_engine_to_end
from tests.engine_worker.model.families import write_family
from tests.engine_worker.model.family_cases import NATIVE
from tests.proposers import FunctionProposer

MAX_DRAFTS = 3
SIZES: dict[str, Any] = {"max_num_seqs": 6, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module", params=["qwen3_5_text", "qwen3_next", "granitemoehybrid", "nemotron_h"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("hybrid"), NATIVE[request.param])


def runner_of(directory: Path, num_blocks: int = 400, **options: Any) -> ModelRunner:
    drafts = DraftSettings(num_drafts=MAX_DRAFTS)
    return make_runner(directory, num_blocks=num_blocks, block_size=16, num_threads=1, drafts=drafts, **options)


def mostly_right(known: Transcript, error_ratio: float) -> FunctionProposer:
    """Propose the known answers, with some tokens replaced by others."""
    random = Random(7)

    def propose(sequence: Sequence) -> list[int]:
        right = known.choice(sequence.request_id, sequence.sequence_index)[sequence.num_output_tokens :]
        wanted = right[: random.randint(0, MAX_DRAFTS)]
        return [3 if random.random() < error_ratio else token_id for token_id in wanted]

    return FunctionProposer(propose)


def engine_of(runner: ModelRunner, proposer: FunctionProposer | None, **config: Any) -> Engine:
    drafting = drafting_by(proposer, MAX_DRAFTS, max_samples=16) if proposer is not None else None
    return make_engine(runner, drafting=drafting, **{**SIZES, **config})


def requests() -> list[GenerationRequest]:
    """Return prompts of one and of several chunks, drawn greedily and by seeds, one with several choices."""
    prompts = [make_prompt(5 + 19 * number, first=90 * number) for number in range(7)]
    return [
        make_request(
            prompt,
            f"r{number}",
            max_tokens=20 + 3 * number,
            ignore_eos=True,
            temperature=1.0 if number % 2 else 0.0,
            seed=number,
            n=3 if number == 3 else 1,
            logprobs=2 if number == 5 else None,
        )
        for number, prompt in enumerate(prompts)
    ]


def answers(transcript: Transcript) -> Any:
    return transcript.tokens, transcript.others, transcript.choice_ends


@pytest.fixture(scope="module")
def plain(directory: Path) -> Transcript:
    """Return the answers without drafts."""
    runner = make_runner(directory, num_blocks=400, block_size=16, num_threads=1)
    return run_engine_to_end(engine_of(runner, None), requests())


@pytest.mark.parametrize("error_ratio", [0.0, 0.4, 1.0])
def test_drafts_change_no_answer(directory: Path, plain: Transcript, error_ratio: float) -> None:
    engine = engine_of(runner_of(directory), mostly_right(plain, error_ratio))
    assert answers(run_engine_to_end(engine, requests())) == answers(plain)
    assert sum(engine.stats().speculation.accepted) > 0 or error_ratio == 1.0


@pytest.mark.parametrize("mode", list(PreemptionMode))
def test_preempted_requests_go_on_with_the_same_tokens(
    directory: Path, plain: Transcript, mode: PreemptionMode
) -> None:
    """Also between a step with drafts and the next one, when the state lacks tokens."""
    runner = runner_of(directory, 13, num_host_blocks=64, num_host_states=8)
    engine = engine_of(runner, mostly_right(plain, 0.4), preemption_mode=mode)
    assert answers(run_engine_to_end(engine, requests())) == answers(plain)
    assert sum(engine.stats().counters.preemptions.values()) > 0


def test_next_turn_continues_where_the_state_ended(directory: Path) -> None:
    """The kept state lacks the tokens of the last step if it had drafts; they may cross the end of a block."""
    prompt, known = make_prompt(70), dict[str, list[int]]()
    alone = make_runner(directory, num_blocks=400, block_size=16, num_threads=1)
    proposer = FunctionProposer(lambda sequence: known[sequence.request_id][sequence.num_output_tokens :])
    engine, num_computed = engine_of(runner_of(directory), proposer), 0
    for turn in range(6):
        request = make_request(prompt, f"t{turn}", max_tokens=11, ignore_eos=True)
        known |= run_engine_to_end(engine_of(alone, None), [request]).tokens
        right, before = known[request.request_id], engine.stats().kv_totals.device_hit_tokens
        assert run_engine_to_end(engine, [request]).tokens[request.request_id] == right
        hit = engine.stats().kv_totals.device_hit_tokens - before
        assert num_computed - MAX_DRAFTS - 1 <= hit <= num_computed, "the answer before, but for its last step"
        num_computed = len(prompt) + len(right) - 1
        prompt = [*prompt, *right, *make_prompt(13, first=400 + 20 * turn)]


@pytest.mark.tp
@pytest.mark.e2e
@pytest.mark.parametrize("directory", ["qwen3_next"], indirect=True)  # its heads divide among two ranks
def test_ranks_share_the_states_of_drafts(directory: Path, plain: Transcript) -> None:
    runner = runner_of(directory, tensor_parallel_size=2)
    assert runner.group is not None
    with closing(runner.group):
        engine = engine_of(runner, mostly_right(plain, 0.4))
        assert answers(run_engine_to_end(engine, requests())) == answers(plain)


def test_torch_serves_drafts_where_the_compiled_kernels_do_not(
    directory: Path, plain: Transcript, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise NoLibrary("none in this test")

    monkeypatch.setattr(compiled_step, "step_kernels", none)
    engine = engine_of(runner_of(directory), mostly_right(plain, 0.4))
    assert answers(run_engine_to_end(engine, requests())) == answers(plain)
