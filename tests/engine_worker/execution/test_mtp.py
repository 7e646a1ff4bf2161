"""Multi-token prediction: drafts are those of transformers' layers, in hybrids and mixtures, and no answer changes."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from engine_worker.__main__ import main
from engine_worker.execution.settings import DraftSettings
from engine_worker.execution.step.model_runner import ModelRunner
from engine_worker.kv.preemption import PreemptionMode
from engine_worker.model.draft_head.files import DraftHeadFiles
from tests.builders import drafting_by, make_request
from tests.engine_worker.execution.draft_heads import DRAFT_TOKENS
from tests.engine_worker.execution.mtp_heads import MtpReference, write_mtp
from tests.engine_worker.execution.reference import make_engine, make_runner, run_engine_to_end, write_model
from tests.engine_worker.execution.test_draft_head import (
    AHEAD,
    NUM_DRAFTS,
    OF_TWO,
    ROOMY,
    Recorder,
    num_right,
    requests,
    run,
)
from tests.engine_worker.model.families import write_family
from tests.engine_worker.model.family_cases import NATIVE

# Files of Qwen3.5 stack the experts of the network; those of the layer are stacked or not.
FAMILIES = {
    "qwen3_5_text": False,
    "qwen3_5_moe_text": False,
    "qwen3_5_moe_text, stacked": True,
    "qwen3_next": False,
    "glm4_moe": False,
}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose logits prefer two tokens, so that about half of the drafts are right."""
    directory = write_family(tmp_path_factory.mktemp("mtp"), NATIVE[request.param.split(",")[0]])
    return write_mtp(directory, DRAFT_TOKENS, is_stacked=FAMILIES[request.param])


def with_mtp(model: Path, **options: Any) -> ModelRunner:
    drafts = DraftSettings(num_drafts=NUM_DRAFTS, head=DraftHeadFiles("mtp", model))
    return make_runner(model, drafts=drafts, **{"num_blocks": 256, "block_size": 8, **options})


def without_drafts(model: Path) -> ModelRunner:
    return make_runner(model, num_blocks=256, block_size=8)


def check_drafts(recorder: Recorder, model: Path) -> None:
    reference = MtpReference(model)
    longest_first = sorted(recorder.made, key=lambda one: -len(one[0]))  # the reference computes only those
    wrong = [made for known, made in longest_first if made != reference.drafts(known, NUM_DRAFTS)]
    # Two logits that differ by a rounding error fall either way.
    assert len(wrong) <= len(recorder.made) // 50, f"{len(wrong)} of {len(recorder.made)}"


@AHEAD
def test_drafts_are_those_of_transformers(model: Path, ahead: bool) -> None:
    """Of chunked prompts, wrong and right drafts, and prefixes that were in the cache."""
    recorder, wanted = Recorder(NUM_DRAFTS), requests(6, **OF_TWO)
    shared = wanted[-1].prompt_token_ids
    wanted.append(make_request([*shared, 5, 6], "shared", max_tokens=9, seed=1))
    plain, _ = run(without_drafts(model), wanted)
    drafted, engine = run(with_mtp(model), wanted, recorder, ahead=ahead)
    assert drafted.tokens == plain.tokens and num_right(engine) > 5
    check_drafts(recorder, model)


@pytest.mark.tp
@pytest.mark.e2e
@pytest.mark.parametrize(
    ("model", "ahead", "by_experts"),
    [("qwen3_5_moe_text", False, False), ("qwen3_5_moe_text, stacked", True, False), ("glm4_moe", True, True)],
    indirect=["model"],
)
def test_drafts_of_two_ranks_are_those_of_transformers(model: Path, ahead: bool, by_experts: bool) -> None:
    recorder, wanted = Recorder(NUM_DRAFTS), requests(6, **OF_TWO)
    runner = with_mtp(model, tensor_parallel_size=2, enable_expert_parallel=by_experts)
    assert runner.group is not None
    with closing(runner.group):
        plain, _ = run(runner, wanted)
        drafted, engine = run(runner, wanted, recorder, ahead=ahead)
    assert drafted.tokens == plain.tokens and num_right(engine) > 5
    check_drafts(recorder, model)


@pytest.mark.parametrize("model", ["qwen3_5_text", "glm4_moe"], indirect=True)
@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
def test_drafts_of_preempted_requests_are_those_of_transformers(model: Path, mode: PreemptionMode) -> None:
    """The keys and values of the layer move with those of the network, and with its states."""
    recorder, wanted = Recorder(NUM_DRAFTS), requests(8, **{**OF_TWO, "max_tokens": 30})
    plain, _ = run(without_drafts(model), wanted)
    runner = with_mtp(model, num_blocks=12, num_host_blocks=64, num_host_states=8)
    drafted, engine = run(runner, wanted, recorder, ahead=True, preemption_mode=mode)
    assert sum(engine.stats().counters.preemptions.values()) > 0
    assert drafted.tokens == plain.tokens and num_right(engine) > 5
    check_drafts(recorder, model)


@AHEAD
@pytest.mark.parametrize("model", ["qwen3_5_text"], indirect=True)
def test_next_turn_continues_where_an_end_was_found(model: Path, ahead: bool) -> None:
    """Also if the next step was in flight: it applies the tokens before it, and its own wait beside the state."""
    config: dict[str, Any] = {**ROOMY, "async_scheduling": ahead}
    drafting = drafting_by(Recorder(NUM_DRAFTS), NUM_DRAFTS, max_samples=16, may_run_ahead=ahead)
    engine, alone = (
        make_engine(with_mtp(model), drafting=drafting, **config),
        make_engine(without_drafts(model), **ROOMY),
    )
    prompt, num_known = list(range(10, 80)), 0
    for turn in range(8):
        params = {"max_tokens": 40, "seed": turn, "temperature": 1.0, "stop_token_ids": (9,)}
        request = make_request(prompt, f"t{turn}", allowed_token_ids=DRAFT_TOKENS, logit_bias={9: -2.0}, **params)
        before = engine.stats().kv_totals.device_hit_tokens
        answer = run_engine_to_end(engine, [request]).tokens[request.request_id]
        assert answer == run_engine_to_end(alone, [request]).tokens[request.request_id]
        assert answer[-1] == 9 or len(answer) == 40
        hit = engine.stats().kv_totals.device_hit_tokens - before
        assert hit >= num_known - 1 - NUM_DRAFTS, "all but the last step of the turn before"
        num_known = len(prompt) + len(answer)
        prompt = [*prompt, *answer, *range(100 + 20 * turn, 113 + 20 * turn)]


def test_check_wants_the_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_mtp(write_family(tmp_path / "model", NATIVE["qwen3_5_text"]))
    check = ["--device", "cpu", "--check", "--speculative-config", json.dumps({"method": "mtp"}), "--model"]
    assert main([*check, str(directory)]) == 0
    stored = load_file(directory / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in stored.items() if name != "mtp.fc.weight"}, directory / "model.safetensors"
    )
    assert main([*check, str(directory)]) != 0
    assert "the safetensors files have no mtp.fc.weight" in capsys.readouterr().err
    assert main([*check, str(write_model(tmp_path / "llama"))]) != 0
    assert "its family or its config.json has none" in capsys.readouterr().err
