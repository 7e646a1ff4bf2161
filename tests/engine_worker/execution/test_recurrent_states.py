"""Recurrent layers: chunks, hits, forks and preemptions change no bit, and checkpoints lie where prompts continue."""

from pathlib import Path
from typing import Any

import pytest

from engine_worker.engine import Engine
from engine_worker.execution.step.model_runner import ModelRunner
from engine_worker.kv.preemption import OffloadedPrefixes
from engine_worker.model.architectures import spec_from_json
from engine_worker.model.spec import kv_layout
from shared.messages import ErrorEvent, StoredChoice, TokenEvent
from tests.builders import Transcript, make_prompt, make_request, run_to_end
from tests.engine_worker.execution.reference import make_engine, make_runner, run_engine_to_end
from tests.engine_worker.model.families import write_family
from tests.engine_worker.model.family_cases import NATIVE

PROMPT = make_prompt(200)


@pytest.fixture(scope="module", params=["qwen3_5_text", "qwen3_next", "granitemoehybrid", "nemotron_h"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a dense model, one with experts, or two with Mamba-2."""
    return write_family(tmp_path_factory.mktemp("hybrid"), NATIVE[request.param])


@pytest.fixture(scope="module")
def runner(directory: Path) -> ModelRunner:
    return make_runner(directory, num_blocks=400, block_size=16, num_threads=1)


def answer(engine: Engine, prompt: list[int], name: str, num_tokens: int = 6) -> tuple[list[int], Any, int]:
    """Return the tokens of an answer, their logprobs, and how many tokens of the prompt were cached."""
    before = engine.stats().kv_totals.device_hit_tokens
    engine.add_request(make_request(prompt, name, max_tokens=num_tokens, ignore_eos=True, logprobs=3))
    events = [event for _ in iter(lambda: engine.has_work, False) for event in engine.step()]
    engine.check_integrity()
    tokens = [event for event in events if isinstance(event, TokenEvent)]
    found = [token_id for event in tokens for token_id in event.token_ids]
    logprobs = [encoded for event in tokens for encoded in event.logprobs or ()]
    assert len(found) == len(logprobs) == num_tokens
    return found, logprobs, engine.stats().kv_totals.device_hit_tokens - before


@pytest.fixture(scope="module")
def other(directory: Path) -> ModelRunner:
    """Return a runner for answers without a cache: engines of one runner overwrite each other's blocks."""
    return make_runner(directory, num_blocks=400, block_size=16, num_threads=1)


def fresh(runner: ModelRunner, budget: int = 64, **options: Any) -> Engine:
    return make_engine(runner, max_num_seqs=4, max_num_batched_tokens=budget, **options)


@pytest.mark.parametrize("is_async", [False, True])
def test_hit_gives_the_bits_of_a_miss(runner: ModelRunner, other: ModelRunner, is_async: bool) -> None:
    """Prompts share 1 to 200 tokens with a cached one: at, before and after checkpoints and the edges of blocks."""
    for num_shared in (1, 63, 64, 65, 130, 192, 199, 200):
        prompt = [*PROMPT[:num_shared], *make_prompt(20, first=500)]
        engine = fresh(runner, async_scheduling=is_async)
        answer(engine, PROMPT, "first", 3)
        hit, miss = answer(engine, prompt, "second"), answer(fresh(other, 24), prompt, "alone")
        assert hit[:2] == miss[:2], num_shared
        assert miss[2] == 0 and hit[2] == (192 if num_shared >= 192 else 0), num_shared
        again = answer(engine, [*prompt[:-1], 7], "third")
        assert again[:2] == answer(fresh(other), [*prompt[:-1], 7], "alone")[:2]
        assert again[2] == (len(prompt) - 1) // 64 * 64, "the second request left a checkpoint"


def test_third_request_with_a_prefix_hits_where_the_first_two_diverged(runner: ModelRunner, other: ModelRunner) -> None:
    engine = fresh(runner)
    hits = []
    for number in range(3):
        prompt = [*PROMPT[:150], *make_prompt(90, first=300 + 100 * number)]
        found = answer(engine, prompt, f"r{number}")
        assert found[:2] == answer(fresh(other), prompt, "alone")[:2]
        hits.append(found[2])
    assert hits == [0, 0, 128]
    assert engine.stats().kv_totals.hit_tokens_lost_for_state == 150 + 150 - 128


def test_each_turn_of_a_chat_continues_at_the_end_of_the_last(runner: ModelRunner, other: ModelRunner) -> None:
    engine, prompt, computed = fresh(runner), PROMPT[:75], 0
    for turn in range(4):
        found = answer(engine, prompt, f"t{turn}", 9)
        assert found[:2] == answer(fresh(other), prompt, "alone", 9)[:2]
        assert found[2] == computed, "all but the last token of the answer before, which was never computed"
        computed = len(prompt) + 8
        prompt = [*prompt, *found[0], *make_prompt(13, first=400 + 20 * turn)]


def test_preempted_sequences_continue_with_the_same_tokens(directory: Path) -> None:
    prompts = [make_prompt(40 + 9 * number, first=100 * number) for number in range(4)]
    requests = [
        make_request(prompt, f"p{number}", max_tokens=40, ignore_eos=True) for number, prompt in enumerate(prompts)
    ]
    outputs = []
    for num_blocks in (100, 22):
        engine = make_engine(
            make_runner(directory, num_blocks=num_blocks, num_threads=1), max_num_seqs=4, max_num_batched_tokens=64
        )
        outputs.append(run_engine_to_end(engine, requests).tokens)
        engine.check_integrity()
    assert sum(engine.stats().counters.preemptions.values()) > 0
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_swapped_sequences_continue_without_computing_again(directory: Path, is_async: bool) -> None:
    """With choices that forked a step before, too: the copy of their state may be pending when they are swapped."""
    prompts = [make_prompt(40 + 9 * number, first=100 * number) for number in range(4)]
    requests = [
        make_request(prompt, f"p{number}", max_tokens=40, n=1 + number % 2, temperature=1.0, seed=7, ignore_eos=True)
        for number, prompt in enumerate(prompts)
    ]
    sizes: dict[str, Any] = {"max_num_seqs": 6, "max_num_batched_tokens": 64, "async_scheduling": is_async}
    expected = run_engine_to_end(
        make_engine(make_runner(directory, num_blocks=100, num_threads=1), **sizes), requests
    ).tokens
    runner = make_runner(directory, num_blocks=22, num_host_states=12, num_threads=1)
    engine = make_engine(runner, **sizes)
    assert run_engine_to_end(engine, requests).tokens == expected
    engine.check_integrity()
    counters, totals = engine.stats().counters, engine.stats().kv_totals
    assert sum(counters.preemptions.values()) > 0 and counters.recomputed_tokens == 0
    assert totals.stored_states > 0 and totals.fetched_states > 0


def test_evicted_checkpoint_comes_back_from_the_host(directory: Path, other: ModelRunner) -> None:
    """Chats of more sequences than the device has states; each turn continues where the last one ended."""
    engine = make_engine(
        make_runner(directory, num_blocks=400, num_host_states=40, num_threads=1),
        max_num_seqs=4,
        max_num_batched_tokens=64,
        offloaded_prefixes=OffloadedPrefixes.ALL,
        num_state_blocks=7,
    )
    chats = [make_prompt(70, first=90 * number) for number in range(10)]
    for turn in range(3):
        for number, prompt in enumerate(chats):
            found = answer(engine, prompt, f"c{number}.{turn}", 5)
            assert found[:2] == answer(fresh(other), prompt, "alone", 5)[:2]
            assert found[2] == (len(prompt) - 10 if turn else 0), "all but the new message and the last token"
            chats[number] = [*prompt, *found[0], *make_prompt(9, first=400 + 20 * turn)]
    assert engine.stats().kv_totals.fetched_states == 20, "all later turns of ten chats"


def test_forks_and_takeover_change_no_token(runner: ModelRunner) -> None:
    sampled = make_request(PROMPT, "n", max_tokens=20, n=3, temperature=1.0, seed=5, ignore_eos=True)
    together = run_engine_to_end(fresh(runner), [sampled])
    one_slot = make_engine(runner, max_num_seqs=1, max_num_batched_tokens=64)
    assert run_engine_to_end(one_slot, [sampled]).tokens == together.tokens
    request = make_request(PROMPT, "taken", max_tokens=30, ignore_eos=True)
    expected = run_engine_to_end(fresh(runner, 16), [request])
    engine, transcript = fresh(runner), Transcript()
    sent = expected.tokens["taken"][:11]
    engine.add_request(request, [StoredChoice(list(sent))])
    transcript.resume("taken", sent)
    assert run_to_end(engine, transcript).tokens == expected.tokens


def test_more_sequences_than_states_wait_and_end(directory: Path) -> None:
    """A pool of eight states serves twelve requests, and evicts checkpoints for them."""
    runner = make_runner(directory, num_blocks=30, num_threads=1)
    assert runner.num_state_blocks < 12
    requests = [make_request(make_prompt(70, first=9 * n), f"r{n}", max_tokens=5, ignore_eos=True) for n in range(12)]
    engine = make_engine(runner, max_num_seqs=16, max_num_batched_tokens=64)
    tokens = run_engine_to_end(engine, requests).tokens
    engine.check_integrity()
    assert {name: len(found) for name, found in tokens.items()} == {f"r{n}": 5 for n in range(12)}


def test_without_a_prefix_cache_there_are_no_checkpoints(runner: ModelRunner) -> None:
    engine = fresh(runner, enable_prefix_caching=False)
    assert answer(engine, PROMPT, "first")[:2] == answer(engine, PROMPT, "second")[:2]
    assert engine.stats().kv_totals.device_hit_tokens == 0


def test_beam_search_is_refused_with_the_reason(runner: ModelRunner) -> None:
    engine = fresh(runner)
    engine.add_request(make_request(PROMPT, "beams", use_beam_search=True, n=2, beam_width=2, max_tokens=4))
    (event,) = engine.step()
    assert isinstance(event, ErrorEvent) and "not supported by models with recurrent states" in event.message


def test_state_bytes_of_published_shapes() -> None:
    """Qwen3.6-35B-A3B: 30 layers of 32 heads of 128 x 128, and 3 inputs of 8,192 channels, in float32."""
    config = {
        "model_type": "qwen3_5_text", "vocab_size": 64, "hidden_size": 2048, "num_hidden_layers": 40,
        "num_attention_heads": 16, "num_key_value_heads": 2, "intermediate_size": 512, "max_position_embeddings": 4096,
    }  # fmt: skip
    layout = kv_layout(spec_from_json(config, {}), 16, "bfloat16")
    assert layout.state_bytes == 4 * 30 * (32 * 128 * 128 + 3 * 8192)
    assert layout.groups[0].block_bytes(16) == 10 * 2 * 2 * 256 * 16 * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["conv"] * 4}, "layer_types has 'conv'; supported: 'full_attention' and 'linear_attention'"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types must have 'full_attention' at least once"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 4 layers"),
        ({"linear_num_value_heads": 15}, "linear_num_value_heads 15 must be a multiple of linear_num_key_heads 16"),
    ],
)
def test_invalid_config_is_refused(changes: dict[str, Any], message: str) -> None:
    config = {
        "model_type": "qwen3_5_text", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        spec_from_json({**config, **changes}, {})
