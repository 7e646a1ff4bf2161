"""Draft heads: their drafts are those of the formulas in plain torch, and no answer changes."""

import json
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tokenizers import Tokenizer

from engine_worker.__main__ import main
from engine_worker.engine import Engine
from engine_worker.execution.load.load import load_model_runner
from engine_worker.execution.settings import DraftSettings, ExecutionSettings
from engine_worker.execution.step.model_runner import ModelRunner
from engine_worker.kv.preemption import PreemptionMode
from engine_worker.kv.sequence import Sequence
from engine_worker.model.draft_head.files import DraftHeadFiles
from engine_worker.scheduling.speculation.config import SpeculativeConfig
from engine_worker.scheduling.speculation.proposers.executor import ExecutorProposer
from shared.messages import GenerationRequest, Grammar, GrammarKind
from tests.builders import Transcript, drafting_by, make_request
from tests.engine_worker.execution.draft_heads import DRAFT_TOKENS, HeadReference, write_head
from tests.engine_worker.execution.reference import (
    make_engine,
    make_runner,
    run_engine_to_end,
    write_model,
    write_model_of_words,
)
from tests.engine_worker.model.families import write_family
from tests.engine_worker.model.family_cases import NATIVE

VOCAB_SIZE, NUM_DRAFTS = 128, 3
ROOMY: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16}  # prompts are computed in chunks
# A random head is right by chance: about every second draft, where only two tokens are possible.
AHEAD = pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
OF_TWO: dict[str, Any] = {"allowed_token_ids": DRAFT_TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("target"), vocab_size=VOCAB_SIZE, num_hidden_layers=8)


class Recorder(ExecutorProposer):
    """Keeps what follows which tokens."""

    def __init__(self, num_drafts: int) -> None:
        super().__init__(SpeculativeConfig(method="eagle3", model="head", num_speculative_tokens=num_drafts))
        self.made: list[tuple[list[int], list[int]]] = []

    def received(self, sequence: Sequence, drafts: list[int]) -> None:
        self.made.append((sequence.token_ids(0, sequence.num_known_tokens), drafts))
        super().received(sequence, drafts)


def requests(count: int, prefix: str = "r", **params: Any) -> list[GenerationRequest]:
    random = Random(7)
    prompts = [[random.randrange(3, VOCAB_SIZE) for _ in range(random.choice([1, 9, 40]))] for _ in range(count)]
    return [
        make_request(prompt, f"{prefix}{number:02}", **{"max_tokens": random.randint(1, 30), "seed": number, **params})
        for number, prompt in enumerate(prompts)
    ]


def run(
    runner: ModelRunner,
    wanted: list[GenerationRequest],
    proposer: ExecutorProposer | None = None,
    *,
    ahead: bool = False,
    **config: Any,
) -> tuple[Transcript, Engine]:
    """Return the answers, and the engine; with `ahead`, a step begins before the last one's tokens are known."""
    drafting = None
    if proposer is not None:
        drafting = drafting_by(proposer, proposer.num_made, max_samples=16, may_run_ahead=ahead)
    engine = make_engine(runner, drafting=drafting, async_scheduling=ahead, **{**ROOMY, **config})
    transcript = run_engine_to_end(engine, wanted)
    assert engine.stats().kv_cache.num_active_blocks == 0
    return transcript, engine


def num_right(engine: Engine) -> int:
    return sum(engine.stats().speculation.accepted)


def check_drafts(recorder: Recorder, reference: HeadReference) -> None:
    wrong = [made for known, made in recorder.made if made != reference.drafts(known, NUM_DRAFTS)]
    # Two logits that differ by a rounding error fall either way.
    assert len(wrong) <= len(recorder.made) // 50, f"{len(wrong)} of {len(recorder.made)}"


def with_head(target: Path, head: Path, num_drafts: int = NUM_DRAFTS, **options: Any) -> ModelRunner:
    settings = DraftSettings(num_drafts=num_drafts, head=DraftHeadFiles("eagle3", head))
    return make_runner(target, drafts=settings, **{"num_blocks": 256, "block_size": 8, **options})


@AHEAD
@pytest.mark.parametrize(
    ("changes", "prefix"),
    [
        ({}, "midlayer."),
        ({"norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 7]}, "midlayer."),
        ({}, "layers.0."),
    ],
)
def test_drafts_are_those_of_the_formulas(tmp_path: Path, target: Path, changes: Any, prefix: str, ahead: bool) -> None:
    """Of chunked prompts, wrong and right drafts, and prefixes that were in the cache."""
    head = write_head(tmp_path / "head", target, prefix=prefix, **changes)
    reference = HeadReference(write_head(tmp_path / "as_midlayer", target, **changes), target)
    recorder, runner = Recorder(NUM_DRAFTS), with_head(target, head)
    wanted = requests(6)
    shared = wanted[-1].prompt_token_ids
    run(runner, [*wanted, make_request([*shared, 5, 6], "shared", max_tokens=9, seed=1)], recorder, ahead=ahead)
    assert len(recorder.made) > 60
    check_drafts(recorder, reference)


@AHEAD
def test_drafts_of_a_hybrid_are_those_of_the_formulas(tmp_path: Path, ahead: bool) -> None:
    """A wrong draft also never reaches the recurrent states."""
    target = write_family(tmp_path / "target", NATIVE["qwen3_next"])
    head = write_head(tmp_path / "head", target, tokens=DRAFT_TOKENS)
    recorder, wanted = Recorder(NUM_DRAFTS), requests(6, **OF_TWO)
    plain, _ = run(make_runner(target, num_blocks=256, block_size=8), wanted)
    drafted, engine = run(with_head(target, head), wanted, recorder, ahead=ahead)
    assert drafted.tokens == plain.tokens and num_right(engine) > 10
    reference = HeadReference(head, target)
    assert [made for _, made in recorder.made] == [reference.drafts(known, NUM_DRAFTS) for known, _ in recorder.made]


@pytest.mark.tp
@pytest.mark.e2e
def test_drafts_of_two_ranks_are_those_of_the_formulas(tmp_path: Path, target: Path) -> None:
    """Layers pass parts of sums on, which the head reads summed."""
    head = write_head(tmp_path / "head", target, tokens=DRAFT_TOKENS)
    recorder, wanted = Recorder(NUM_DRAFTS), requests(6, **OF_TWO)
    runner = with_head(target, head, tensor_parallel_size=2)
    assert runner.group is not None
    with closing(runner.group):
        plain, _ = run(runner, wanted)
        for ahead in (False, True):
            drafted, engine = run(runner, wanted, recorder, ahead=ahead)
            assert drafted.tokens == plain.tokens and num_right(engine) > 10
    check_drafts(recorder, HeadReference(head, target))


@AHEAD
@pytest.mark.parametrize("num_drafts", [1, 3, 7])
def test_right_drafts_are_followed_by_the_drafts_of_the_formulas(
    tmp_path: Path, target: Path, num_drafts: int, ahead: bool
) -> None:
    head = write_head(tmp_path / "head", target, tokens=DRAFT_TOKENS)
    reference = HeadReference(head, target)
    recorder = Recorder(num_drafts)
    _, engine = run(with_head(target, head, num_drafts), requests(6, **OF_TWO), recorder, ahead=ahead)
    assert num_right(engine) > 10
    assert [made for _, made in recorder.made] == [reference.drafts(known, num_drafts) for known, _ in recorder.made]


@AHEAD
@pytest.mark.parametrize("tokens", [(), DRAFT_TOKENS])
def test_drafts_change_no_answer(tmp_path: Path, target: Path, tokens: tuple[int, ...], ahead: bool) -> None:
    head = write_head(tmp_path / "head", target, tokens=tokens)
    wanted = [
        *requests(24, temperature=1.0, **(OF_TWO if tokens else {})),
        *requests(8, prefix="g", temperature=0.0, **(OF_TWO if tokens else {})),
        make_request([5, 6, 7, 8, 9], "several", n=3, max_tokens=20, seed=1, logprobs=2, **OF_TWO),
        make_request([5, 6, 7], "penalized", max_tokens=20, seed=2, repetition_penalty=1.2),
        make_request([5, 6, 7, 8], "stops", max_tokens=40, seed=2, stop_token_ids=(9,), allowed_token_ids=DRAFT_TOKENS),
    ]
    plain, _ = run(make_runner(target, num_blocks=256, block_size=8), wanted)
    drafted, engine = run(with_head(target, head), wanted, Recorder(NUM_DRAFTS), ahead=ahead)
    assert drafted.tokens == plain.tokens and drafted.others == plain.others
    assert num_right(engine) > 10 or not tokens


@AHEAD
def test_drafts_change_no_output_of_a_grammar(tmp_path: Path, ahead: bool) -> None:
    """A mask depends on the tokens before it, so no step runs ahead of drafts that the host does not know."""
    target = write_model_of_words(tmp_path / "target", num_hidden_layers=8)
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    tokens = tuple(tokenizer.encode("01", add_special_tokens=False).ids)
    assert len(tokens) == 2
    head = write_head(tmp_path / "head", target, tokens=tokens)
    grammar = Grammar(GrammarKind.REGEX, "(0|1|00|11){20,40}")
    wanted = [
        make_request([5, 6, number], f"r{number}", max_tokens=50, seed=number, temperature=1.0, grammar=grammar)
        for number in range(3, 9)
    ]
    plain, _ = run(make_runner(target, num_blocks=256, block_size=8), wanted)
    drafted, engine = run(with_head(target, head), wanted, Recorder(NUM_DRAFTS), ahead=ahead)
    assert drafted.tokens == plain.tokens and num_right(engine) > 10


@AHEAD
@pytest.mark.parametrize("mode", list(PreemptionMode))
def test_drafts_of_preempted_requests_are_those_of_the_formulas(
    tmp_path: Path, target: Path, mode: PreemptionMode, ahead: bool
) -> None:
    """The keys and values of the head move with those of the target."""
    head = write_head(tmp_path / "head", target, tokens=DRAFT_TOKENS)
    reference, recorder = HeadReference(head, target), Recorder(NUM_DRAFTS)
    wanted = requests(8, **{**OF_TWO, "max_tokens": 30})
    plain, _ = run(make_runner(target, num_blocks=256, block_size=8), wanted)
    runner = with_head(target, head, num_blocks=12, num_host_blocks=64)
    drafted, engine = run(runner, wanted, recorder, ahead=ahead, preemption_mode=mode)
    assert sum(engine.stats().counters.preemptions.values()) > 0
    assert drafted.tokens == plain.tokens
    assert [made for _, made in recorder.made] == [reference.drafts(known, NUM_DRAFTS) for known, _ in recorder.made]


def test_head_stores_its_keys_and_values_also_while_drafts_pause(tmp_path: Path, target: Path) -> None:
    head = write_head(tmp_path / "head", target, tokens=DRAFT_TOKENS)
    reference, recorder = HeadReference(head, target), Recorder(NUM_DRAFTS)
    runner = with_head(target, head)
    prompt = list(range(3, 40))
    run(runner, [make_request(prompt, "paused", max_tokens=1, seed=1)])  # without drafts
    run(runner, [make_request(prompt, "drafts", max_tokens=30, seed=1, **OF_TWO)], recorder)
    assert [made for _, made in recorder.made] == [reference.drafts(known, NUM_DRAFTS) for known, _ in recorder.made]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architectures: expected one with Eagle3 in its name"),
        ({"hidden_size": 64}, "hidden_size: expected 96, that of --model; got 64"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: expected 2, that of --model; got 3"),
        ({"vocab_size": 64}, "vocab_size: expected 128, that of --model; got 64"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 8]}, r"expected layers from 0 to 7; got \[0, 8\]"),
        ({"draft_vocab_size": 16}, "lm_head.weight has shape"),
    ],
)
def test_head_that_does_not_fit_is_refused(tmp_path: Path, target: Path, changes: Any, problem: str) -> None:
    head = write_head(tmp_path / "head", target)
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=problem):
        with_head(target, head)


def test_head_that_ranks_cannot_share_is_refused(tmp_path: Path, target: Path) -> None:
    head = write_head(tmp_path / "head", target, intermediate_size=81)
    with pytest.raises(ValueError, match=r"--tensor-parallel-size: 2 does not divide the draft head's .* 81"):
        with_head(target, head, tensor_parallel_size=2)


def test_check_refuses_a_head_of_another_model(
    tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = write_head(tmp_path / "head", target)
    check = ["--model", str(target), "--device", "cpu", "--check", "--speculative-config"]
    assert main([*check, json.dumps({"method": "eagle3", "model": str(head)})]) == 0
    (head / "model.safetensors").unlink()
    assert main([*check, json.dumps({"method": "eagle3", "model": str(head)})]) != 0
    assert "has no *.safetensors" in capsys.readouterr().err


def test_a_head_of_a_model_in_transformers_is_refused(tmp_path: Path, target: Path) -> None:
    settings = ExecutionSettings(model=target, device="cpu", model_impl="transformers")
    drafts = DraftSettings(num_drafts=3, head=DraftHeadFiles("eagle3", write_head(tmp_path / "head", target)))
    with pytest.raises(ValueError, match="needs --model-impl native"):
        load_model_runner(settings, lambda phase, progress, detail: None, drafts=drafts)
