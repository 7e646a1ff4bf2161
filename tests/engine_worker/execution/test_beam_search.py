"""Beam search equals transformers token for token, and parallel samples equal single requests."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from engine_worker.execution.step.model_runner import ModelRunner
from engine_worker.kv.preemption import PreemptionMode
from shared.choice_seeds import choice_seed
from shared.messages import GenerationRequest
from tests.builders import Transcript, make_prompt, make_request
from tests.engine_worker.execution.reference import (
    make_engine,
    make_runner,
    run_engine,
    run_engine_to_end,
    write_model,
)

PROMPTS = [[10 + token_id % 69 for token_id in make_prompt(size, first=5 * size)] for size in (1, 7, 16, 33)]
EOS_TOKEN_IDS = list(range(2, 10))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # 80 tokens, eight of them EOS: searches end early, with outputs of many lengths. Half the logit spread of other
    # tests keeps beams close, so that they change places.
    sizes: dict[str, Any] = {"vocab_size": 80, "num_hidden_layers": 2, "initializer_range": 0.1}
    return write_model(tmp_path_factory.mktemp("beams"), **sizes, eos_token_id=EOS_TOKEN_IDS)


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


@pytest.fixture(scope="module")
def runner(model_dir: Path) -> ModelRunner:
    return make_runner(model_dir, num_blocks=200, block_size=8)


def beams_of(reference: LlamaForCausalLM, prompt: list[int], width: int, max_tokens: int, **options: Any) -> list[Any]:
    with torch.inference_mode():
        answers = reference.generate(
            torch.tensor([prompt]),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=79,
            **options,
        )
    outputs = [answer[len(prompt) :].tolist() for answer in answers]
    return [_cut(output, options.get("eos_token_id", EOS_TOKEN_IDS)) for output in outputs]


def _cut(output: list[int], eos_token_ids: list[int]) -> list[int]:
    """Remove the padding after the end."""
    ends = [index for index, token_id in enumerate(output) if token_id in eos_token_ids]
    return output[: ends[0] + 1] if ends else output


def answers_of(transcript: Transcript, request: GenerationRequest) -> list[list[int]]:
    return [transcript.choice(request.request_id, choice) for choice in range(request.sampling.n)]


def beam_requests(width: int, **sampling: Any) -> list[GenerationRequest]:
    defaults = {"max_tokens": 24, "n": width, "stop_token_ids": tuple(EOS_TOKEN_IDS)}
    return [
        make_request(prompt, use_beam_search=True, beam_width=width, **{**defaults, **sampling}) for prompt in PROMPTS
    ]


WIDTHS, LENGTH_PENALTIES, EARLY_STOPPING = (2, 4, 8), (1.0, 0.0, 2.0, -1.0), (False, True, "never")
# Pairwise coverage: twelve of 36 searches contain each pair of values, which exposes an error in one option or between
# two.
SEARCHES = [
    (width, length_penalty, EARLY_STOPPING[(i + j) % 3])
    for i, width in enumerate(WIDTHS)
    for j, length_penalty in enumerate(LENGTH_PENALTIES)
]


@pytest.mark.parametrize(("width", "length_penalty", "early_stopping"), SEARCHES)
def test_beam_search_outputs_equal_transformers(
    runner: ModelRunner, reference: LlamaForCausalLM, width: int, length_penalty: float, early_stopping: Any
) -> None:
    search = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    requests = beam_requests(width, **search)
    transcript = run_engine(runner, requests, max_num_seqs=32, max_num_batched_tokens=40)
    for request in requests:
        expected = beams_of(reference, request.prompt_token_ids, width, 24, **search)
        assert answers_of(transcript, request) == expected


def test_beam_search_reference_outputs_have_many_lengths(reference: LlamaForCausalLM) -> None:
    """The comparison with transformers needs outputs of different lengths to be meaningful."""
    lengths = {len(output) for prompt in PROMPTS for output in beams_of(reference, prompt, 8, 24)}
    assert len(lengths) > 5 and min(lengths) < 8 and max(lengths) == 24


@pytest.mark.parametrize(
    "schedule",
    [
        {"async_scheduling": True},
        {"max_num_batched_tokens": 8, "max_num_seqs": 8},
        {"enable_prefix_caching": False},
        {"preemption_mode": PreemptionMode.RECOMPUTE},
        {"preemption_mode": PreemptionMode.SWAP},
    ],
    ids=str,
)
def test_beam_search_schedule_does_not_change_outputs(
    model_dir: Path, runner: ModelRunner, schedule: dict[str, Any]
) -> None:
    requests = [*beam_requests(4, n=2), *(sampled(prompt, n=3) for prompt in PROMPTS)]
    config: dict[str, Any] = {"max_num_seqs": 32, "max_num_batched_tokens": 40}
    expected = run_engine(runner, requests, **config)
    tight = make_runner(model_dir, num_blocks=40, block_size=4, num_host_blocks=96)
    engine = make_engine(tight, **{**config, **schedule})
    transcript = run_engine_to_end(engine, requests)
    assert [answers_of(transcript, request) for request in requests] == [
        answers_of(expected, request) for request in requests
    ]
    assert "preemption_mode" not in schedule or sum(engine.stats().counters.preemptions.values()) > 0


def sampled(prompt: list[int], **sampling: Any) -> GenerationRequest:
    return make_request(prompt, **{"max_tokens": 20, "temperature": 1.0, "seed": 7, "ignore_eos": True, **sampling})


def test_parallel_samples_equal_requests_with_derived_seeds(runner: ModelRunner) -> None:
    groups = [sampled(prompt, n=3) for prompt in PROMPTS]
    together = run_engine(runner, groups, max_num_seqs=32, max_num_batched_tokens=40)
    for group in groups:
        lone = [
            make_request(
                group.prompt_token_ids, max_tokens=20, temperature=1.0, ignore_eos=True, seed=choice_seed(7, i)
            )
            for i in range(3)
        ]
        alone = run_engine(runner, lone, max_num_seqs=32, max_num_batched_tokens=40)
        assert answers_of(together, group) == [alone.tokens[request.request_id] for request in lone]
        assert len({tuple(answer) for answer in answers_of(together, group)}) == 3
