"""Inputs of drafts: the tokens after each row of a step, and places of the passes of a draft head.

    begin_drafts()    once per step: the next tokens, and the last row of each sequence whose drafts were right
    place_drafts()    before each further pass: its positions, slots and lengths

A step that checks drafts has a row and a sample for the token before them and for each draft.
"""

from kernels.draft_inputs_reference import (
    DraftPlaces,
    LastDrafts,
    SampledStep,
    begin_drafts_reference,
    place_drafts_reference,
)


def begin_drafts(step: SampledStep, last: LastDrafts) -> None:
    """Write the token after each token of a step, and the rows from which the sequences are continued.

    A draft stands if it and all drafts before it equal the sample at their place.

    Args:
        step: The step.
        last: `next_token_ids`, `kept_rows` and `kept_positions` are written.
    """
    if not step.token_ids.is_cuda:
        begin_drafts_reference(step, last)
        return
    from kernels.draft_inputs_triton import begin_drafts_triton  # noqa: PLC0415 - imports triton, which a CPU worker lacks

    begin_drafts_triton(step, last)


def place_drafts(places: DraftPlaces, number: int, max_len: int, block_size: int) -> None:
    """Write positions, lengths and slots of draft `number` >= 1 of each sequence.

    A sequence without a block there has block 0 in its table, which nothing reads.

    Args:
        places: `positions`, `seq_lens` and `slot_mapping` are written.
        number: Tokens after the kept row.
        max_len: Maximum length of a sequence; later drafts share its last position.
        block_size: Slots per block.
    """
    if not places.positions.is_cuda:
        place_drafts_reference(places, number, max_len, block_size)
        return
    from kernels.draft_inputs_triton import place_drafts_triton  # noqa: PLC0415 - as above

    place_drafts_triton(places, number, max_len, block_size)
