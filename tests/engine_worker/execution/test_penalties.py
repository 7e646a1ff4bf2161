"""Greedy outputs with penalties equal transformers: async, after preemption, with n > 1, and after a takeover."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LogitsProcessorList

from engine_worker.engine import Engine
from engine_worker.execution.step.model_runner import ModelRunner
from engine_worker.kv.preemption import PreemptionMode
from shared.messages import StoredChoice, TokenEvent
from tests.builders import make_request, run_to_end
from tests.engine_worker.execution.reference import make_engine, make_runner, write_model

PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.25}
PROMPTS = [[(7 * number + place * place) % 900 + 3 for place in range(20 + 9 * number)] for number in range(4)]
OUTPUT_TOKENS = 40
CONFIG: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64}


class OutputPenalties:
    """OpenAI's presence and frequency penalties, which transformers lacks."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(input_ids[0, self._num_prompt_tokens :], minlength=scores.shape[1])
        frequency, presence = PENALTIES["frequency_penalty"], PENALTIES["presence_penalty"]
        return scores - frequency * counts - presence * (counts > 0)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    texts = []
    for prompt in PROMPTS:
        output = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=OUTPUT_TOKENS, pad_token_id=0,
            repetition_penalty=PENALTIES["repetition_penalty"],
            logits_processor=LogitsProcessorList([OutputPenalties(len(prompt))]),
        )  # fmt: skip
        texts.append(output[0, len(prompt) :].tolist())
    return texts


@pytest.fixture(scope="module")
def runner(model_dir: Path) -> ModelRunner:
    return make_runner(model_dir, num_blocks=40, block_size=8, num_host_blocks=40)


@pytest.fixture(scope="module")
def small_runner(model_dir: Path) -> ModelRunner:
    return make_runner(model_dir, num_blocks=24, block_size=8, num_host_blocks=40)


def request(number: int, **changes: Any) -> Any:
    sampling = {"max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "temperature": 0.0, **PENALTIES, **changes}
    return make_request(PROMPTS[number], str(number), **sampling)


def outputs_of(engine: Engine, num_choices: int) -> list[list[int]]:
    """Run the only request of `engine` and return the output of each sequence."""
    outputs: list[list[int]] = [[] for _ in range(num_choices)]
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenEvent):
                outputs[event.choice] += event.token_ids
    return outputs


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    "mode", [None, PreemptionMode.SWAP, PreemptionMode.RECOMPUTE], ids=["roomy", "swap", "recompute"]
)
def test_penalties_greedy_outputs_equal_transformers(
    runner: ModelRunner,
    small_runner: ModelRunner,
    expected: list[list[int]],
    mode: PreemptionMode | None,
    async_scheduling: bool,
) -> None:
    pool: dict[str, Any] = {"preemption_mode": mode} if mode is not None else {}
    engine = make_engine(small_runner if pool else runner, async_scheduling=async_scheduling, **CONFIG, **pool)
    for number in range(len(PROMPTS)):
        engine.add_request(request(number))
    tokens = run_to_end(engine).tokens
    assert [tokens[str(number)] for number in range(len(PROMPTS))] == expected
    preemptions = sum(engine.stats().counters.preemptions.values())
    assert (preemptions > 0) == (mode is not None)


def test_penalties_resumed_request_counts_journal_tokens(runner: ModelRunner, expected: list[list[int]]) -> None:
    engine = make_engine(runner, async_scheduling=True, **CONFIG)
    engine.add_request(request(2), [StoredChoice(token_ids=expected[2][:17])])
    assert outputs_of(engine, 1) == [expected[2][17:]]


def test_penalties_are_counted_per_sequence(runner: ModelRunner, expected: list[list[int]]) -> None:
    engine = make_engine(runner, async_scheduling=True, **CONFIG)
    engine.add_request(request(1, n=3))
    assert outputs_of(engine, 3) == [expected[1]] * 3
