"""Drafts that the device finds in its own table of tokens: they are those of the search on the host."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from engine_worker.engine import Engine
from engine_worker.execution.settings import DraftSettings
from engine_worker.execution.step.model_runner import ModelRunner
from engine_worker.execution.step.ngram_drafts import TokenRows
from engine_worker.kv.preemption import PreemptionMode
from engine_worker.kv.sequence import Sequence
from engine_worker.scheduling.speculation.config import SpeculativeConfig
from engine_worker.scheduling.speculation.draft_gain import DraftGain
from engine_worker.scheduling.speculation.proposers.executor import ExecutorProposer
from engine_worker.scheduling.speculation.proposers.ngram import NgramProposer
from tests.builders import Transcript, drafting_by, make_sequence
from tests.engine_worker.execution.reference import make_engine, make_runner, run_engine_to_end, write_model
from tests.engine_worker.execution.test_speculation import MAX_SAMPLES, VOCAB_SIZE, answers, mixed_requests
from tests.engine_worker.model.families import write_family
from tests.engine_worker.model.family_cases import NATIVE
from tests.proposers import FlickeringGain

NUM_DRAFTS, SHORTEST, NUM_REQUESTS = 3, 1, 30
ROOMY: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16}  # prompts are computed in chunks
AHEAD = pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"), vocab_size=VOCAB_SIZE)


class CheckedProposer(ExecutorProposer):
    """Compares what the executor found with the search on the host, which may find fewer tokens, or none."""

    def __init__(self) -> None:
        super().__init__(SpeculativeConfig(method="ngram_gpu", num_speculative_tokens=NUM_DRAFTS))
        self.num_equal, self.different = 0, list[tuple[list[int], list[int], list[int]]]()

    def received(self, sequence: Sequence, drafts: list[int]) -> None:
        known = sequence.token_ids(0, sequence.num_known_tokens)
        config = SpeculativeConfig(method="ngram", prompt_lookup_min=SHORTEST)
        expected = NgramProposer(config).propose(make_sequence(known), NUM_DRAFTS) or known[-1:] * NUM_DRAFTS
        if drafts[: len(expected)] == expected:
            self.num_equal += 1
        else:
            self.different.append((known, drafts, expected))
        super().received(sequence, drafts)


def searching(directory: Path, **options: Any) -> ModelRunner:
    settings = DraftSettings(num_drafts=NUM_DRAFTS, ngram_lengths=(SHORTEST, 4))
    return make_runner(directory, drafts=settings, **{"num_blocks": 512, "block_size": 8, **options})


def run(
    runner: ModelRunner, proposer: ExecutorProposer, gain: DraftGain | None = None, *, ahead: bool, **config: Any
) -> tuple[Transcript, Engine]:
    drafting = drafting_by(proposer, NUM_DRAFTS, gain, max_samples=MAX_SAMPLES, may_run_ahead=ahead)
    engine = make_engine(runner, drafting=drafting, async_scheduling=ahead, **{**ROOMY, **config})
    return run_engine_to_end(engine, mixed_requests(NUM_REQUESTS)), engine


@AHEAD
@pytest.mark.parametrize("pauses", [False, True], ids=["", "pauses"])
def test_the_device_finds_what_the_host_finds(directory: Path, ahead: bool, pauses: bool) -> None:
    """Of every kind of request, also after pauses, in which the device does not follow."""
    plain = run_engine_to_end(
        make_engine(make_runner(directory, num_blocks=512), **ROOMY), mixed_requests(NUM_REQUESTS)
    )
    proposer, gain = CheckedProposer(), FlickeringGain(3) if pauses else None
    found, engine = run(searching(directory), proposer, gain, ahead=ahead)
    assert answers(found) == answers(plain)
    assert not proposer.different[:1] and proposer.num_equal > 150
    assert sum(engine.stats().speculation.accepted) > 10 or pauses


@AHEAD
@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
def test_preempted_sequences_are_still_found(directory: Path, mode: PreemptionMode, ahead: bool) -> None:
    plain = run_engine_to_end(
        make_engine(make_runner(directory, num_blocks=512), **ROOMY), mixed_requests(NUM_REQUESTS)
    )
    small, proposer = searching(directory, num_blocks=24, num_host_blocks=64), CheckedProposer()
    found, engine = run(small, proposer, ahead=ahead, preemption_mode=mode)
    assert sum(engine.stats().counters.preemptions.values()) > 0
    assert answers(found) == answers(plain) and not proposer.different[:1]


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_models_without_a_head_of_any_kind_are_searched(tmp_path: Path, model_impl: str) -> None:
    """Of recurrent layers the device takes back the states of wrong drafts."""
    target = write_family(tmp_path, NATIVE["qwen3_next" if model_impl == "native" else "llama"])
    options: dict[str, Any] = {"model_impl": model_impl, "num_blocks": 512, "block_size": 8}
    plain = run_engine_to_end(make_engine(make_runner(target, **options), **ROOMY), mixed_requests(NUM_REQUESTS))
    runner, proposer = searching(target, **options), CheckedProposer()
    for ahead in (False, True):
        found, _ = run(runner, proposer, ahead=ahead)
        assert answers(found) == answers(plain) and not proposer.different[:1]


@pytest.mark.tp
@pytest.mark.e2e
def test_rank_0_searches_for_all_ranks(directory: Path) -> None:
    runner, proposer = searching(directory, tensor_parallel_size=2), CheckedProposer()
    assert runner.group is not None
    with closing(runner.group):
        plain = run_engine_to_end(make_engine(runner, **ROOMY), mixed_requests(NUM_REQUESTS))
        for ahead in (False, True):
            found, engine = run(runner, proposer, ahead=ahead)
            assert answers(found) == answers(plain) and not proposer.different[:1]
            assert sum(engine.stats().speculation.accepted) > 10


def test_a_row_is_taken_from_the_sequence_that_drafted_longest_ago() -> None:
    rows, (first, second, third) = TokenRows(2), [make_sequence([5, 6, 7]) for _ in range(3)]
    assert rows.of([first, second], 1)[0].tolist() == [0, 1]
    numbers, missing = rows.of([second], 2)
    assert numbers.tolist() == [1] and not missing  # the device wrote the tokens of step 1
    numbers, missing = rows.of([second, third], 3)
    assert numbers.tolist() == [1, 0] and missing == {0: (0, [5, 6, 7])}
    second.output_token_ids.append(8)
    assert rows.of([second], 5)[1] == {1: (3, [8])}  # it was not part of step 4
