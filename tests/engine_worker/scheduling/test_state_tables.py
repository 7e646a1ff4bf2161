"""When a recurrent state may be continued: only one of the same tokens, which an earlier step has written."""

from engine_worker.kv.checkpoints import StateHit
from engine_worker.kv.group_hits import GroupHit
from engine_worker.kv.prefix_cache import PrefixMatch, cache_root, extend_digests
from engine_worker.kv.sequence import Sequence
from engine_worker.kv.state_tables import StateTables
from tests.builders import make_prompt, make_sequence

BLOCK_SIZE, STEP = 16, 5


def begun(tables: StateTables, prompt: list[int], num_computed_tokens: int) -> Sequence:
    """Return a sequence whose state is that after `num_computed_tokens`."""
    sequence = with_digests(prompt)
    tables.begin(sequence, StateHit(), 0)
    tables.take_moves()
    sequence.kv.num_computed_tokens = num_computed_tokens
    return sequence


def with_digests(prompt: list[int]) -> Sequence:
    sequence = make_sequence(prompt)
    sequence.kv.cache_root = cache_root("", "")
    extend_digests(sequence, len(prompt) // BLOCK_SIZE, BLOCK_SIZE)
    return sequence


def hit(tables: StateTables, prompt: list[int], step: int) -> int:
    """Return the tokens of the longest hit, if the KV of the whole prompt is cached."""
    return tables.longest_hit(with_digests(prompt), cached(prompt), len(prompt), step, lambda index: True).num_tokens


def cached(prompt: list[int]) -> PrefixMatch:
    """Return the match of a prompt whose KV is cached."""
    blocks = list(range(1, len(prompt) // BLOCK_SIZE + 1))
    return PrefixMatch(len(blocks), (GroupHit(0, blocks),))


def test_checkpoint_is_a_hit_from_the_next_step_on() -> None:
    tables, prompt = StateTables(5, BLOCK_SIZE), make_prompt(100)
    sequence = begun(tables, prompt, 64)
    tables.checkpoint(sequence, STEP)
    assert hit(tables, prompt, STEP) == 0, "the copy runs in this step"
    (copy,) = tables.take_moves().copies
    assert copy.source_block_id == sequence.kv.state_block
    assert hit(tables, prompt, STEP + 1) == 64
    tables.check_integrity([sequence])


def test_no_checkpoint_takes_the_place_of_a_sequence() -> None:
    tables, prompt = StateTables(2, BLOCK_SIZE), make_prompt(100)
    sequence = begun(tables, prompt, 64)
    tables.checkpoint(sequence, STEP)
    assert tables.take_moves().copies == [] and hit(tables, prompt, STEP + 1) == 0


def test_end_is_a_hit_for_its_own_tokens_alone() -> None:
    tables, prompt = StateTables(5, BLOCK_SIZE), make_prompt(100)
    sequence = begun(tables, prompt, 70)
    tables.release(sequence, STEP - 1)
    tables.take_moves()
    assert hit(tables, prompt[:75], STEP) == 70
    assert hit(tables, [*prompt[:69], 1, *prompt[70:75]], STEP) == 0
    assert hit(tables, prompt[:69], STEP) == 0
    tables.discard(sequence)
    assert hit(tables, prompt[:75], STEP) == 0
    tables.check_integrity([])


def test_state_after_an_unknown_token_is_dropped() -> None:
    """An aborted sequence may have computed its token in flight, which nobody will ever know."""
    tables, prompt = StateTables(5, BLOCK_SIZE), make_prompt(64)
    sequence = begun(tables, prompt, 65)
    tables.release(sequence, STEP - 1)
    assert hit(tables, prompt, STEP) == 0
    tables.check_integrity([])


def test_fork_that_ends_before_its_copy_leaves_no_checkpoint() -> None:
    tables, prompt = StateTables(5, BLOCK_SIZE), make_prompt(64)
    parent, child = begun(tables, prompt, 64), with_digests(prompt)
    tables.fork(parent, child)
    child.kv.num_computed_tokens = 64
    assert tables.take_moves().copies == [], "the parent's state is computed in this step"
    tables.release(child, STEP)
    assert hit(tables, prompt, STEP + 1) == 0
    assert len(tables.take_moves().copies) == 1
    tables.check_integrity([parent])


def test_last_checkpoint_becomes_the_state_that_continues_from_it() -> None:
    tables, prompt = StateTables(2, BLOCK_SIZE), make_prompt(100)
    first = begun(tables, prompt, 64)
    block_id = first.kv.state_block
    tables.release(first, STEP - 1)
    tables.take_moves()
    second = with_digests(prompt)
    tables.begin(second, tables.longest_hit(second, cached(prompt), 99, STEP, lambda index: True), 64)
    assert second.kv.state_block == block_id and tables.take_moves().copies == []
    assert hit(tables, prompt, STEP + 1) == 0
    tables.check_integrity([second])


def test_state_without_the_tokens_of_a_step_with_drafts_is_a_hit_before_them() -> None:
    """The pending tokens may end in another block than the state, whose block is then copied if it can be."""
    tables, prompt = StateTables(3, BLOCK_SIZE), make_prompt(100)
    sequence = begun(tables, prompt, 82)
    sequence.kv.num_pending_tokens = 4
    tables.release(sequence, STEP - 1)
    assert hit(tables, prompt, STEP) == 78 and sequence.kv.num_pending_tokens == 0
    without_block = tables.longest_hit(
        with_digests(prompt), cached(prompt), len(prompt), STEP, lambda index: index != 4
    )
    assert without_block.num_tokens == 0
    match = cached(prompt).shortened(78, BLOCK_SIZE)
    assert (match.block_ids, match.copied_block_ids, match.num_copied_tokens) == ([1, 2, 3, 4], (5,), 14)
