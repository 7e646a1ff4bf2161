"""Proposers, the measured gain, the limits of drafts, and wrong values of --speculative-config."""

import json
from typing import Any

import pytest

from engine_worker.kv.sequence import Sequence
from engine_worker.scheduling.settings import SchedulingSettings
from engine_worker.scheduling.speculation.config import SpeculativeConfig
from engine_worker.scheduling.speculation.draft_chances import DraftChances
from engine_worker.scheduling.speculation.draft_gain import DraftGain
from engine_worker.scheduling.speculation.proposers import PROPOSERS
from engine_worker.scheduling.speculation.totals import SpeculationTotals
from shared.settings import SettingsError
from tests.builders import (
    VOCAB_SIZE,
    drafting_by,
    expected_output,
    make_engine,
    make_request,
    make_sequence,
    run_to_end,
)
from tests.proposers import FunctionProposer, OracleProposer


def proposed(method: str, token_ids: list[int], max_drafts: int = 3, **config: Any) -> list[int]:
    proposer = PROPOSERS[method](SpeculativeConfig(method=method, **config))
    return proposer.propose(make_sequence(token_ids), max_drafts)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [
        ([1, 2, 3, 4, 9, 1, 2], [3, 4]),  # suffix: as many as were equal
        ([1, 2, 3, 9, 8, 1, 2, 7, 9, 8, 1, 2], [7, 9]),  # the longest match, not the first
        ([5, 6, 5, 6, 5, 6], [5, 6]),  # the match that enough tokens follow
        ([1, 2, 3, 4], []),
        ([1, 2, 3, 9, 3], []),  # one equal token is fewer than two
        ([7], []),
    ],
)
def test_proposers_continue_an_earlier_text(method: str, token_ids: list[int], expected: list[int]) -> None:
    assert proposed(method, token_ids)[: len(expected)] == expected
    assert bool(proposed(method, token_ids)) is bool(expected)


def test_short_matches_get_as_many_drafts_as_they_have_tokens() -> None:
    repeated = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    for length in (2, 3):
        assert proposed("ngram", [*repeated, *repeated[:length]], max_drafts=5) == repeated[length : 2 * length]
    assert proposed("ngram", [*repeated, *repeated[:4]], max_drafts=5) == repeated[4:9]  # prompt_lookup_max
    assert proposed("suffix", [*repeated, *repeated[:4]], max_drafts=5) == repeated[4:8]


def test_proposer_never_exceeds_the_drafts_it_may_make() -> None:
    assert proposed("ngram", [1, 2, 3, 4, 5, 6, 1, 2], max_drafts=1) == [3]
    assert proposed("suffix", [1, 2, 3, 4, 5, 6, 1, 2, 3, 4], max_drafts=1) == [5]


def ended(token_ids: list[int], root: bytes) -> Sequence:
    sequence = make_sequence([99], output_token_ids=token_ids)
    sequence.kv.cache_root = root
    return sequence


def test_suffix_finds_texts_that_ended_of_the_same_tenant_only() -> None:
    proposer = PROPOSERS["suffix"](SpeculativeConfig(method="suffix"))
    first = ended([1, 2, 3, 4, 5], b"a")
    proposer.propose(first, 3)
    proposer.ended([first])
    assert proposer.propose(ended([8, 2, 3], b"a"), 3) == [4, 5]
    assert proposer.propose(ended([8, 2, 3], b"b"), 3) == []


def test_gain_turns_drafts_off_and_tries_again() -> None:
    gain, states = DraftGain(1.05, runs_ahead=False), []
    for _ in range(420):
        is_on = gain.is_on(4)
        states.append(is_on)
        num = 8 if is_on else 4
        gain.record(4, num, num, 0.03 if is_on else 0.01)  # twice the tokens, thrice the time
    # The first step of each length is not timed, since it prepares its kernels.
    assert states[:18] == [False] * 9 + [True] * 9
    assert not any(states[18:402]) and states[402:410] == [True] * 8 and not any(states[410:])


@pytest.mark.parametrize("size", [4, 200])
def test_gain_needs_two_steps_to_see_that_wrong_drafts_cannot_pay(size: int) -> None:
    """In batches of all sizes, and one step in 400 after that."""
    gain, states = DraftGain(1.05, runs_ahead=False), []
    for step in range(811):
        num_sequences = 4 if step < 20 else size
        states.append(gain.is_on(num_sequences))
        gain.record(num_sequences, num_sequences + 3 * states[-1], num_sequences, 0.01)
    assert [step for step, is_on in enumerate(states) if is_on] == [9, 10, 400, 800]


def test_gain_needs_two_steps_to_see_that_drafts_are_much_too_slow() -> None:
    """Three tokens in six times the time, as in large batches on a CPU."""
    gain, states = DraftGain(1.05, runs_ahead=False), []
    for _ in range(500):
        is_on = gain.is_on(16)
        states.append(is_on)
        gain.record(16, 64 if is_on else 16, 48 if is_on else 16, 0.06 if is_on else 0.01)
    assert [step for step, is_on in enumerate(states) if is_on] == [9, 10, 401, 402]


def test_gain_of_drafts_that_become_right_is_found() -> None:
    gain = DraftGain(1.05, runs_ahead=False)
    for step in range(500):
        is_on = gain.is_on(4)
        gain.record(4, 16 if is_on else 4, 16 if is_on and step > 20 else 4, 0.012 if is_on else 0.01)
    assert gain.is_on(4)


def test_gain_counts_all_tokens_of_all_steps() -> None:
    """Half of the steps give one token in twice the time, half give seven: 4 tokens in 2 steps' time pay."""
    gain = DraftGain(1.05, runs_ahead=False)
    for step in range(16):
        is_on = gain.is_on(1)
        gain.record(1, 8 if is_on else 1, (1 if step % 2 else 7) if is_on else 1, 0.02 if is_on else 0.01)
    assert gain.is_on(1) and not gain.is_on(32)


def test_drafts_need_the_chance_that_their_rows_cost() -> None:
    """A row takes 6 ms. Plain steps give a token in 10 ms, so a draft must be right in 6 of 10 cases."""
    gain = DraftGain(1.05, runs_ahead=False)
    assert gain.needed_chance(16) == 0.0  # not known yet: drafts show it
    for step in range(40):
        num_drafts = 5 * (step % 8) if step >= 8 else 0
        gain.record(16, 16 + num_drafts, 16, 0.16 + 0.006 * num_drafts)
    assert gain.needed_chance(16) == pytest.approx(0.6)
    assert gain.needed_chance(1) == 0.0
    for _ in range(400):  # steps of one length tell nothing about a row
        gain.record(16, 16, 16, 0.16)
    assert gain.needed_chance(16) == pytest.approx(0.6)


def test_drafts_of_slow_rows_are_still_tried() -> None:
    """A row that took longer than a plain token, perhaps by accident, does not end drafting."""
    gain, chances, sequence = DraftGain(1.05, runs_ahead=False), DraftChances(), make_sequence([1])
    for num_rows in (4, 16) * 3:
        gain.record(4, num_rows, 4, 0.04 * num_rows)
    assert chances.num_worth(sequence, gain.needed_chance(4)) == 0
    sequence.output_token_ids += [7] * 400
    chances.verified(sequence, 1, 0)
    assert chances.num_worth(sequence, gain.needed_chance(4)) == 0
    sequence.output_token_ids += [7] * 100
    assert chances.num_worth(sequence, gain.needed_chance(4)) >= 1


def test_steps_that_ran_ahead_do_not_tell_what_a_row_costs() -> None:
    gain = DraftGain(1.05, runs_ahead=True)
    for _ in range(8):
        gain.record(4, 4, 4, 0.01)
    for num_rows in (8, 16) * 8:  # 10 ms more than plain ones, because they wait for the host
        gain.record(4, num_rows, num_rows, 0.02 + 0.0001 * num_rows)
    assert gain.needed_chance(4) == pytest.approx(0.0001 / (0.02 / 12 + 0.0001), rel=0.1)


def test_wrong_drafts_become_fewer_and_right_ones_more() -> None:
    chances, sequence, numbers = DraftChances(), make_sequence([1]), []
    for num_accepted in (0, 0, 0, 0, 7, 7):
        numbers.append(chances.num_worth(sequence, 0.5))
        chances.verified(sequence, 7, num_accepted)
        sequence.output_token_ids += [7] * (1 + num_accepted)
    assert numbers == sorted(numbers[:5], reverse=True) + numbers[5:] and numbers[0] > numbers[4] == 0 < numbers[5]
    assert chances.num_worth(sequence, 0.0) > 7  # nothing is known about the cost
    chances.ended([sequence])
    assert chances.num_worth(sequence, 0.5) == numbers[0]


def test_drafts_end_at_a_stop_token_and_at_max_tokens() -> None:
    request = make_request(5, "a", max_tokens=9, ignore_eos=True)
    tokens = expected_output(request)
    for options in ({"stop_token_ids": (tokens[4],)}, {"max_tokens": 3}):
        engine = make_engine(drafting=drafting_by(OracleProposer(), max_drafts=7))
        engine.add_request(make_request(5, "a", **{"max_tokens": 9, "ignore_eos": True, **options}))
        assert run_to_end(engine).tokens["a"] == tokens[: 5 if "stop_token_ids" in options else 3]
        engine.check_integrity()


def test_drafts_leave_half_of_the_free_tokens_to_prompts() -> None:
    drafted: list[int] = []
    engine = make_engine(
        drafting=drafting_by(FunctionProposer(lambda _: [7] * 7), max_drafts=7), max_num_batched_tokens=9
    )
    engine.add_request(make_request(4, "decodes", max_tokens=40, ignore_eos=True))
    engine.step()
    engine.add_request(make_request(60, "prompt", max_tokens=1, ignore_eos=True))
    while "prompt" in engine.request_ids:
        engine.step()
        drafted.append(engine.last_step.num_tokens)
    assert max(drafted) <= 9
    assert len(drafted) <= 16  # 60 tokens in chunks of at least 4


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ("ngram", "JSON object such as"),
        ({}, "missing required field `method`"),
        ({"method": "eagle"}, "method: expected one of ngram, ngram_gpu, suffix, eagle3, mtp; got 'eagle'"),
        ({"method": "ngram", "num_speculative_tokens": 8}, "num_speculative_tokens: expected 1 to 7; got 8"),
        ({"method": "ngram", "num_speculative_tokens": "3"}, r"Expected `int`, got `str` - at `\$.num_speculative_tok"),
        ({"method": "ngram", "prompt_lookup_min": 5}, r"at most prompt_lookup_max \(4\); got 5"),
        ({"method": "ngram", "model": "x"}, "model: method ngram has no model of its own; got 'x'"),
        ({"method": "eagle3"}, "model: method eagle3 needs the directory of its head; got ''"),
        ({"method": "ngram", "draft": "x"}, "unknown field `draft`"),
        ({"method": "suffix", "min_gain": -1}, "min_gain: expected 0 or more; got -1"),
    ],
)
def test_wrong_configuration_is_refused(config: Any, problem: str) -> None:
    text = config if isinstance(config, str) else json.dumps(config)
    with pytest.raises(SettingsError, match=problem):
        SchedulingSettings(speculative_config=text)


def test_more_drafts_than_a_gpu_checks_are_refused() -> None:
    settings = SchedulingSettings(speculative_config='{"method": "ngram", "num_speculative_tokens": 4}')
    assert settings.for_device("cpu", 0).speculation is not None
    with pytest.raises(SettingsError, match="num_speculative_tokens: expected 1 to 3 on cuda; got 4"):
        settings.for_device("cuda", 0)


def test_drafts_that_a_device_cannot_make_are_refused() -> None:
    settings = SchedulingSettings(speculative_config='{"method": "ngram_gpu"}')
    with pytest.raises(SettingsError, match="method: ngram_gpu needs --device cuda; use ngram"):
        settings.for_device("cpu", 0)


def test_drafts_are_counted_by_position() -> None:
    request = make_request(5, "a", max_tokens=4, ignore_eos=True)
    tokens = expected_output(request)

    def one_right(sequence: Sequence) -> list[int]:
        known = sequence.num_output_tokens
        return [tokens[known], (tokens[known + 1] + 1) % VOCAB_SIZE]

    engine = make_engine(drafting=drafting_by(FunctionProposer(one_right), max_drafts=3))
    engine.add_request(request)
    assert run_to_end(engine).tokens["a"] == tokens
    # The first step gives one token, the second a right draft and one more; the last token needs no draft.
    assert engine.stats().speculation == SpeculationTotals(drafts=1, drafted=[1, 1, 0], accepted=[1, 0, 0])
