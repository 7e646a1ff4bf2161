"""Prefix hits of a model with recurrent states, beside those of a dense model on the same requests."""

from random import Random
from typing import Any

import pytest

from engine_worker.engine import Engine
from engine_worker.kv.preemption import HostTierConfig
from shared.messages import FinishEvent, TokenEvent
from tests.builders import EOS_TOKEN_ID, VOCAB_SIZE, FakeModelRunner, drafting_by, make_engine, make_request, run_to_end
from tests.proposers import FakeHead

SIZES: dict[str, Any] = {"num_blocks": 6_000, "block_size": 16}
MIN_HIT_RATIO = 0.95  # of the tokens that a dense model finds


def engine_with(num_state_blocks: int, num_host_states: int = 0) -> Engine:
    runner = FakeModelRunner(**SIZES, num_state_blocks=num_state_blocks)
    limits: dict[str, Any] = {"max_num_batched_tokens": 2048, "max_model_len": 16_000, "max_num_seqs": 8}
    host_tier = HostTierConfig(num_blocks=2, num_state_blocks=num_host_states) if num_host_states else None
    kinds: dict[str, Any] = {"num_state_blocks": num_state_blocks, "host_tier": host_tier}
    return make_engine(runner, **SIZES, **limits, **kinds, eos_token_ids=())


def answer(engine: Engine, prompt: list[int], num_tokens: int = 20) -> tuple[list[int], int]:
    """Return the tokens of an answer, and how many of the prompt's were cached."""
    engine.add_request(make_request(prompt, max_tokens=num_tokens, ignore_eos=True))
    events = [event for _ in iter(lambda: engine.has_work, False) for event in engine.step()]
    engine.check_integrity()
    tokens = [token_id for event in events if isinstance(event, TokenEvent) for token_id in event.token_ids]
    (end,) = (event for event in events if isinstance(event, FinishEvent))
    return tokens, end.usage.cached_tokens


def draw(random: Random, num_tokens: int) -> list[int]:
    return random.choices(range(3, VOCAB_SIZE), k=num_tokens)


@pytest.mark.parametrize("num_suffix_tokens", [40, 376, 1296])
@pytest.mark.parametrize("num_prefix_tokens", [1024, 1500, 3000, 8192])
def test_third_request_with_a_prefix_finds_it(num_prefix_tokens: int, num_suffix_tokens: int) -> None:
    hits = []
    for num_state_blocks in (0, 33):
        random, engine = Random(1), engine_with(num_state_blocks)
        prefix = draw(random, num_prefix_tokens)
        hits.append([answer(engine, prefix + draw(random, num_suffix_tokens))[1] for _ in range(5)])
    dense, hybrid = hits
    assert dense[1] >= num_prefix_tokens
    assert sum(hybrid[2:]) >= MIN_HIT_RATIO * sum(dense[2:])


@pytest.mark.parametrize(("num_states", "num_host_states"), [(33, 0), (4, 33)], ids=["device", "host"])
def test_turns_of_chats_find_all_but_the_last_token(num_states: int, num_host_states: int) -> None:
    """Three chats of six turns in turns; the model ends each answer, whose last token was never computed.

    In host memory are the states that a device with three of them evicts.
    """
    hits = []
    for sizes in ((0, 0), (num_states, num_host_states)):
        random, engine, found = Random(2), engine_with(*sizes), 0
        system = draw(random, 700)
        chats = [[*system, *draw(random, 90)] for _ in range(3)]
        for turn in range(6):
            for number, prompt in enumerate(chats):
                tokens, cached = answer(engine, prompt, 150)
                found += cached if turn or number == 2 else 0
                chats[number] = [*prompt, *tokens, *draw(random, 60)]
        hits.append(found)
    dense, hybrid = hits
    assert hybrid >= MIN_HIT_RATIO * dense


@pytest.mark.parametrize(("num_system_tokens", "num_hit_tokens"), [(900, 896), (130, 0), (17_000, 16_384)])
def test_second_chat_finds_the_state_after_the_system_message(num_system_tokens: int, num_hit_tokens: int) -> None:
    """A short message is computed again, and a long one has a checkpoint each 2,048 tokens."""
    sizes: dict[str, Any] = {"num_blocks": 6_000, "block_size": 16, "num_state_blocks": 33}
    engine = make_engine(FakeModelRunner(**sizes), **sizes, max_num_batched_tokens=2_048, max_model_len=20_000)
    random, found = Random(6), list[int]()
    system = [token_id for token_id in draw(random, 2 * num_system_tokens) if token_id != EOS_TOKEN_ID]
    for number in range(2):
        prompt = [*system[: num_system_tokens - 1], EOS_TOKEN_ID, *draw(random, 300)]
        engine.add_request(make_request(prompt, f"{number}", max_tokens=1))
        events = [event for _ in iter(lambda: engine.has_work, False) for event in engine.step()]
        found += [event.usage.cached_tokens for event in events if isinstance(event, FinishEvent)]
    assert found == [0, num_hit_tokens]


def test_hit_in_a_pool_without_room_for_its_copy_is_dropped() -> None:
    """The second request needs all six blocks; a hit would hold one of them as the source of a copy."""
    sizes: dict[str, Any] = {"num_blocks": 7, "block_size": 8, "num_state_blocks": 5}
    engine = make_engine(FakeModelRunner(**sizes), **sizes, max_model_len=48, eos_token_ids=())
    prompt = draw(Random(3), 20)
    tokens, _ = answer(engine, prompt, 9)
    second = [*prompt, *tokens[:8], *draw(Random(4), 19)]
    found, cached = answer(engine, second, 1)
    assert len(found) == 1 and cached == 0


def test_state_within_a_block_that_this_step_fills_is_no_hit() -> None:
    """Its KV was evicted. The first of two turns computes it again, and the copy for the second would run before that.

    The fake model checks the tokens of each state and block that it reads.
    """
    sizes: dict[str, Any] = {"num_blocks": 40, "block_size": 4, "num_state_blocks": 9}
    engine = make_engine(FakeModelRunner(**sizes), **sizes, max_model_len=156, eos_token_ids=())
    prompt = draw(Random(6), 10)
    tokens, _ = answer(engine, prompt, 2)  # 11 tokens are computed
    answer(engine, draw(Random(7), 150), 6)
    turns = [[*prompt, *tokens, *draw(Random(8 + turn), 5)] for turn in range(2)]
    expected = [answer(engine_with(9), turn)[0] for turn in turns]
    for number, turn in enumerate(turns):
        engine.add_request(make_request(turn, f"{number}", max_tokens=20, ignore_eos=True))
    answers = run_to_end(engine).tokens
    assert [answers[f"{number}"] for number in range(2)] == expected


@pytest.mark.parametrize("num_before", range(1, 9))
def test_turn_after_an_end_among_right_drafts_finds_a_state_of_its_tokens(num_before: int) -> None:
    """The step in flight has followed drafts after the end, which were right too: the model goes on past any token.

    The fake model checks the tokens of each state that it reads.
    """
    prompt, sizes = draw(Random(5), 30), {**SIZES, "num_state_blocks": 33}
    going_on, _ = answer(engine_with(33), prompt, 40)
    assert going_on[num_before] not in going_on[:num_before]
    engine = make_engine(
        FakeModelRunner(**sizes, draft_error_ratio=0.0),
        **sizes,
        max_model_len=2_048,
        eos_token_ids=(),
        drafting=drafting_by(FakeHead(3), may_run_ahead=True),
        async_scheduling=True,
    )
    engine.add_request(make_request(prompt, "first", max_tokens=40, stop_token_ids=(going_on[num_before],)))
    assert run_to_end(engine).tokens["first"] == going_on[: num_before + 1]
    again, _ = answer(engine, [*prompt, *going_on[:20]], 20)
    assert again == going_on[20:]
