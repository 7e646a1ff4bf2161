"""When a sequence is complete. Token ids only; stop strings are text and belong to the gateway."""

from engine_worker.scheduling.sequence import Sequence
from shared.messages import FinishReason


def finish_reason(sequence: Sequence, max_num_tokens: int) -> FinishReason | None:
    """Why `sequence` ends with the output it has now, or None. `max_num_tokens`: the longest a sequence can get here.

    The stop token itself is part of the output: the journal must show the next owner that the request was complete.
    """
    output, sampling = sequence.output_token_ids, sequence.sampling
    num_output = len(output)
    if num_output == 0:
        return None
    if output[-1] in sequence.stop_token_ids and num_output >= sampling.min_tokens:
        return FinishReason.STOP
    if num_output >= sampling.max_tokens or num_output + len(sequence.prompt_token_ids) >= max_num_tokens:
        return FinishReason.LENGTH
    return None


def ends_with_inflight_token(sequence: Sequence, max_num_tokens: int) -> bool:
    """Whether the token in flight is the last by length, whatever it is: nothing more is to be computed."""
    num_inflight = sequence.num_inflight_tokens
    return num_inflight > 0 and (
        sequence.num_output_tokens + num_inflight >= sequence.sampling.max_tokens
        or sequence.num_tokens >= max_num_tokens
    )
