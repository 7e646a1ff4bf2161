"""Find the last tokens of sequences earlier in them, on the device, and draft what followed there.

    record_tokens()    writes the tokens of a step that stand to a table
    ngram_drafts()     searches the table

The same search as that of scheduling/speculation/proposers/ngram.py, which runs on the host and must know all tokens.
"""

from torch import Tensor

from kernels.draft_inputs_reference import LastDrafts, SampledStep
from kernels.ngram_drafts_reference import (
    NgramLengths,
    TokenTable,
    ngram_drafts_reference,
    record_tokens_reference,
)


def record_tokens(step: SampledStep, last: LastDrafts, table: TokenTable) -> None:
    """Write the tokens of the step's Q sequences that stand, and the one after them, at their positions.

    Args:
        step: The step.
        last: What begin_drafts() wrote of it.
        table: `token_ids` is written.
    """
    if not step.token_ids.is_cuda:
        record_tokens_reference(step, last, table)
        return
    from kernels.ngram_drafts_triton import record_tokens_triton  # noqa: PLC0415 - imports triton, which a CPU worker lacks

    record_tokens_triton(step, last, table)


def ngram_drafts(last: LastDrafts, table: TokenTable, lengths: NgramLengths, drafts: Tensor) -> None:
    """Write the drafts of Q sequences.

    The longest end of a sequence, of at most `lengths.most` tokens, that occurred before is continued as it was there;
    of equally long ones the latest, but one that all drafts follow precedes those with fewer. After the end of the
    sequence the drafts repeat. Without a match the last token is the draft: a step has room for some draft anyway.

    Args:
        last: What begin_drafts() wrote.
        table: What record_tokens() wrote.
        lengths: Of a match.
        drafts: [D, Q] int64, written; D may be 0.
    """
    if not len(drafts):
        return
    if not drafts.is_cuda:
        ngram_drafts_reference(last, table, lengths, drafts)
        return
    from kernels.ngram_drafts_triton import ngram_drafts_triton  # noqa: PLC0415 - as above

    ngram_drafts_triton(last, table, lengths, drafts)
