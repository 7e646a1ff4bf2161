"""Grammars in the engine: every output is in its language, for every schedule."""

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import pytest
import torch
from tokenizers import Tokenizer

from engine_worker.execution.load.load import load_model_runner
from engine_worker.execution.sampling import grammar_compiler
from engine_worker.execution.sampling.grammar_compiler import GrammarCompiler
from engine_worker.execution.sampling.grammar_masks import GrammarMasks
from engine_worker.execution.sampling.sampled_sequence import SampledSequence
from engine_worker.execution.settings import ExecutionSettings
from engine_worker.execution.step.model_runner import ModelRunner
from engine_worker.kv.preemption import PreemptionMode
from engine_worker.kv.sequence import Sequence
from shared.grammars import GrammarError
from shared.messages import ErrorEvent, FinishEvent, FinishReason, GenerationRequest, Grammar, GrammarKind, StoredChoice
from tests.builders import Transcript, drafting_by, make_request, make_sequence, run_to_end
from tests.engine_worker.execution.reference import (
    make_engine,
    make_runner,
    run_engine,
    run_engine_to_end,
    write_model_of_words,
)
from tests.proposers import FunctionProposer
from tests.tiny_model import IM_END, VOCAB_SIZE

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["red", "green", 3]}, "maxItems": 4},
        "size": {"type": "integer", "minimum": -20, "maximum": 300},
    },
    "required": ["name", "tags", "size"],
    "additionalProperties": False,
}


def is_of_schema(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


# name -> (grammar, check whether a text matches it)
LANGUAGES: dict[str, tuple[Grammar, Callable[[str], object]]] = {
    "schema": (Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)), is_of_schema),
    "regex": (Grammar(GrammarKind.REGEX, r"\d{3}-[xyz]{2,9}é?"), re.compile(r"\d{3}-[xyz]{2,9}é?").fullmatch),
    "choice": (Grammar(GrammarKind.CHOICE, '["the end", "of"]'), ("the end", "of").__contains__),
    "grammar": (Grammar(GrammarKind.GRAMMAR, 'start: "(" start ")" | /[ab]/'), re.compile(r"\(*[ab]\)*").fullmatch),
    "schema too": (Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)), is_of_schema),
}
PROMPT = list(range(20, 35))
CONFIG: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_of_words(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def runner(model_dir: Path) -> ModelRunner:
    return make_runner(model_dir, num_blocks=200, block_size=8)


def requests() -> list[GenerationRequest]:
    """Return a request with three sequences for each language, and one without a grammar."""
    sampling = {"temperature": 1.0, "max_tokens": 120, "stop_token_ids": (IM_END,), "n": 3}
    return [
        *(make_request(PROMPT, name, seed=1, grammar=grammar, **sampling) for name, (grammar, _) in LANGUAGES.items()),
        make_request(PROMPT, "free", seed=1, **{**sampling, "max_tokens": 30}),
    ]


def texts(model_dir: Path, transcript: Transcript) -> dict[str, list[str]]:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    choices = {(name, 0): ids for name, ids in transcript.tokens.items()} | transcript.others
    found: dict[str, list[str]] = {}
    for (name, _), token_ids in sorted(choices.items()):
        if name in LANGUAGES:
            assert token_ids[-1] == IM_END, f"{name}: {tokenizer.decode(token_ids)} has no end"
            found.setdefault(name, []).append(tokenizer.decode(token_ids[:-1]))
    return found


@pytest.fixture(scope="module")
def expected(runner: ModelRunner) -> Transcript:
    return run_engine(runner, requests(), **CONFIG)


def test_grammar_outputs_are_in_their_language(model_dir: Path, expected: Transcript) -> None:
    found = texts(model_dir, expected)
    for name, (_, is_in_language) in LANGUAGES.items():
        assert len(found[name]) == 3
        assert all(is_in_language(text) for text in found[name]), found[name]
    assert len(set(found["schema"])) == 3  # each sequence has its own matcher
    assert {end.reason for end in expected.ends.values() if isinstance(end, FinishEvent)} == {
        FinishReason.STOP,
        FinishReason.LENGTH,  # of the request without a grammar
    }


def test_grammar_async_scheduling_gives_same_outputs(runner: ModelRunner, expected: Transcript) -> None:
    found = run_engine(runner, requests(), async_scheduling=True, **CONFIG)
    assert (found.tokens, found.others) == (expected.tokens, expected.others)


def drafts_of(known: Transcript, error_ratio: float) -> FunctionProposer:
    """Propose the known output with some random tokens in it. Grammars forbid most of those."""
    random = Random(7)

    def propose(sequence: Sequence) -> list[int]:
        right = known.choice(sequence.request_id, sequence.sequence_index)[sequence.num_output_tokens :]
        return [random.randrange(VOCAB_SIZE) if random.random() < error_ratio else token_id for token_id in right]

    return FunctionProposer(propose)


@pytest.mark.parametrize("max_drafts", [1, 3, 7])
@pytest.mark.parametrize("error_ratio", [0.0, 0.3, 1.0])
def test_drafts_change_no_output_of_a_grammar(
    runner: ModelRunner, expected: Transcript, error_ratio: float, max_drafts: int
) -> None:
    drafting = drafting_by(drafts_of(expected, error_ratio), max_drafts, max_samples=32)
    engine = make_engine(runner, drafting=drafting, **CONFIG)
    found = run_engine_to_end(engine, requests())
    assert (found.tokens, found.others, found.choice_ends) == (expected.tokens, expected.others, expected.choice_ends)
    assert error_ratio == 1.0 or sum(engine.stats().speculation.accepted) > 0


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
def test_tokens_that_a_grammar_forces_are_drafts(runner: ModelRunner, ahead: bool) -> None:
    properties = {f"{color}_and_a_long_name": {"type": "boolean"} for color in ("red", "green")}
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    wanted = [make_request(PROMPT, "a", seed=1, grammar=grammar, max_tokens=200, stop_token_ids=(IM_END,), n=3)]
    found, steps = [], []
    for num_drafts in (0, 7):
        drafting = drafting_by(FunctionProposer(lambda _: []), num_drafts, max_samples=32) if num_drafts else None
        engine = make_engine(runner, drafting=drafting, async_scheduling=ahead, **CONFIG)
        transcript = run_engine_to_end(engine, wanted)
        found.append((transcript.tokens, transcript.others))
        steps.append(engine.stats().counters.steps)
    assert found[0] == found[1]
    assert steps[1] < 0.6 * steps[0]  # long names, which have many tokens


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("num_host_blocks", [0, 96], ids=["recompute", "swap"])
def test_grammar_preempted_sequences_continue(
    model_dir: Path, expected: Transcript, num_host_blocks: int, ahead: bool
) -> None:
    runner = make_runner(model_dir, num_blocks=36, block_size=8, num_host_blocks=num_host_blocks)
    mode = PreemptionMode.SWAP if num_host_blocks else PreemptionMode.RECOMPUTE
    engine = make_engine(runner, preemption_mode=mode, async_scheduling=ahead, **CONFIG)
    found = run_engine_to_end(engine, requests())
    assert sum(engine.stats().counters.preemptions.values()) > 0
    assert (found.tokens, found.others) == (expected.tokens, expected.others)


def test_grammar_resumed_request_advances_over_journal(runner: ModelRunner, expected: Transcript) -> None:
    request = next(request for request in requests() if request.request_id == "schema")
    whole = [expected.choice("schema", choice) for choice in range(3)]
    engine, transcript = make_engine(runner, **CONFIG), Transcript()
    stored = [StoredChoice(token_ids=token_ids[:cut]) for token_ids, cut in zip(whole, (1, 9, 14), strict=True)]
    for choice, kept in enumerate(stored):
        transcript.resume("schema", kept.token_ids, choice)
    engine.add_request(request, stored)
    run_to_end(engine, transcript)
    assert [transcript.choice("schema", choice) for choice in range(3)] == whole


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        (Grammar(GrammarKind.REGEX, "(?=a)b"), "look-around"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"not": {}}'), "Unimplemented keys"),
        (Grammar(GrammarKind.JSON_SCHEMA, "{"), "EOF"),
        (Grammar(GrammarKind.GRAMMAR, "start: other"), "other"),
        (Grammar(GrammarKind.REGEX, "a" * 70_000), "at most 65536"),
    ],
)
def test_grammar_unsupported_ends_only_its_request(
    runner: ModelRunner, expected: Transcript, grammar: Grammar, problem: str
) -> None:
    bad = make_request(PROMPT, "bad", grammar=grammar)
    found = run_engine(runner, [bad, *requests()], **CONFIG)
    end = found.ends.pop("bad")
    assert isinstance(end, ErrorEvent) and problem in end.message
    assert (found.tokens, found.others) == (expected.tokens, expected.others)


def test_grammar_mismatched_journal_ends_request(runner: ModelRunner) -> None:
    engine = make_engine(runner, **CONFIG)
    request = make_request(PROMPT, "strayed", grammar=LANGUAGES["regex"][0])
    engine.add_request(request, [StoredChoice(token_ids=[ord("x")])])
    (end,) = run_to_end(engine, Transcript(tokens={"strayed": [ord("x")]})).ends.values()
    assert isinstance(end, ErrorEvent) and end.message.startswith("grammar:")


def test_grammar_masks_allow_exactly_the_grammar(model_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    masks = GrammarMasks(GrammarCompiler(model_dir, VOCAB_SIZE, [IM_END]), VOCAB_SIZE, torch.device("cpu"))
    begin = make_sequence(3, grammar=Grammar(GrammarKind.CHOICE, '["ab", "a", "b"]'))
    after_a = make_sequence(3, output_token_ids=[_id(tokenizer, "a")], grammar=begin.sampling.grammar)
    found, problems = masks.of([begin, make_sequence(3), after_a], [0, 0, 1], dict)
    assert found is not None and problems == {} and found.rows.tolist() == [0, 2]
    bits = (found.masks[:, :, None] >> torch.arange(32)) & 1
    allowed = [row.nonzero().flatten().tolist() for row in bits.flatten(1)]
    a, b = _id(tokenizer, "a"), _id(tokenizer, "b")
    assert allowed == [sorted([a, b]), sorted([IM_END, b])]


def test_grammar_token_in_flight_counts_as_output(model_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    masks = GrammarMasks(GrammarCompiler(model_dir, VOCAB_SIZE, [IM_END]), VOCAB_SIZE, torch.device("cpu"))
    going, ending = (make_sequence(3, eos_token_ids=[IM_END], grammar=Grammar(GrammarKind.REGEX, "ab?")) for _ in "12")
    in_flight: dict[SampledSequence, int] = {going: _id(tokenizer, "a"), ending: IM_END}
    found, problems = masks.of([going, ending], [1, 1], lambda: in_flight)
    assert found is not None and problems == {}
    assert found.rows.tolist() == [0]  # a sample after the end is dropped
    assert found.masks[0, 0] == 1 << IM_END


def test_grammar_masks_begun_early_equal_plain_masks(model_dir: Path) -> None:
    compiler = GrammarCompiler(model_dir, VOCAB_SIZE, [IM_END])
    a = _id(Tokenizer.from_file(str(model_dir / "tokenizer.json")), "a")
    grammar = Grammar(GrammarKind.REGEX, "ab?c*")
    sequences = [make_sequence(3, grammar=grammar), make_sequence(3, output_token_ids=[a], grammar=grammar)]
    bad = make_sequence(3, "bad", output_token_ids=[a, a], grammar=grammar)
    begun, plain = (GrammarMasks(compiler, VOCAB_SIZE, torch.device("cpu")) for _ in "12")
    for rows, indices in (([*sequences, bad], [0, 1, 2]), (sequences, [0, 1])):
        begun.begin(rows, indices)
        found, problems = begun.of(rows, indices, dict)
        expected, same_problems = plain.of(rows, indices, dict)
        assert found is not None and expected is not None
        assert torch.equal(found.masks, expected.masks) and torch.equal(found.rows, expected.rows)
        assert problems == same_problems and list(problems) == ["bad"][: len(rows) - 2]
    begun.begin(sequences, [0, 1])
    found, _ = begun.of(sequences[1:], [1], dict)  # a batch that differs from the one begun
    assert found is not None and expected is not None
    assert found.rows.tolist() == [0] and torch.equal(found.masks, expected.masks[1:])


def test_grammar_unneeded_fill_ends_before_next_fill(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both fills would write to the same buffer and matchers."""
    masks = GrammarMasks(GrammarCompiler(model_dir, VOCAB_SIZE, [IM_END]), VOCAB_SIZE, torch.device("cpu"))
    sequences = [make_sequence(3, grammar=Grammar(GrammarKind.REGEX, "ab?c*")) for _ in range(2)]
    fill, asked, overlaps = masks._fill, threading.Event(), list[bool]()

    def watched(wanted: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            asked.set()
        else:  # the main thread must not start its fill during this time
            overlaps.append(asked.wait(0.2))
        return fill(wanted)

    monkeypatch.setattr(masks, "_fill", watched)
    masks.begin(sequences, [0, 0])
    masks.of(sequences[1:], [0], dict)
    asked.clear()
    masks.begin(sequences, [0, 0])
    masks.keep_only(sequences[1:])
    assert masks._begun is None and masks.of(sequences[1:], [0], dict)[0] is not None
    assert overlaps == [False, False]


def test_grammar_cache_evicts_least_recently_used(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_CACHED_BYTES", 2 * grammar_compiler._cost_bytes(_regex("a")))
    compiler = GrammarCompiler(model_dir, VOCAB_SIZE, [IM_END])
    a = compiler.compile(_regex("a"))
    b = compiler.compile(_regex("b"))
    assert compiler.compile(_regex("a")) is a
    compiler.compile(_regex("c"))
    assert len(compiler._cache) == 2
    assert compiler.compile(_regex("a")) is a
    assert compiler.compile(_regex("b")) is not b


def test_grammar_compiler_names_missing_tokenizer_or_eos(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(GrammarError, match=r"tokenizer\.json"):
        GrammarCompiler(tmp_path, VOCAB_SIZE, [IM_END]).compile(_regex("a"))
    with pytest.raises(GrammarError, match="no end-of-sequence token"):
        GrammarCompiler(model_dir, VOCAB_SIZE, []).compile(_regex("a"))


def _id(tokenizer: Tokenizer, text: str) -> int:
    token_id = tokenizer.token_to_id(text)
    assert token_id is not None
    return token_id


def _regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
def test_grammar_outputs_on_gpu_equal_cpu(model_dir: Path, expected: Transcript, ahead: bool) -> None:
    settings = ExecutionSettings(
        model=model_dir,
        device="cuda",
        dtype="float32",
        block_size=8,
        kv_cache_memory_bytes=2**24,
        swap_space_bytes=0,
        max_model_len=512,
        **CONFIG,
    )
    runner = load_model_runner(settings, lambda phase, progress, detail: None)
    found = run_engine(runner, requests(), async_scheduling=ahead, **CONFIG)
    assert (found.tokens, found.others) == (expected.tokens, expected.others)
