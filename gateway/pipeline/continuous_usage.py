"""`continuous_usage_stats`: the usage so far in every chunk of a stream. Pure.

As in vLLM, each chunk of a choice counts more tokens than the one before: tokens that came together are counted one by
one, and an end without a token is merged into the chunk of the last token. That chunk waits for its end only if it must
be the last one.
"""

from dataclasses import replace
from typing import Protocol

from msgspec import structs

from gateway.pipeline.choice_writer import ChoiceDelta, Stage
from gateway.pipeline.request import CompletionRequest
from gateway.pipeline.response_format import UsageCount


class Counted(Protocol):
    """The part of Answer used here."""

    @property
    def usage(self) -> UsageCount: ...

    def has_all_tokens(self, index: int) -> bool: ...


class ContinuousUsage:
    """Counts the tokens of one stream."""

    def __init__(self, request: CompletionRequest, counted: Counted) -> None:
        # Samples that best_of drops are not sent, but they are counted, all when the last one has ended.
        self._counts_sent = not request.choices.is_best_of
        self._counted = counted
        self._num_sent = 0

    @property
    def so_far(self) -> UsageCount:
        """The usage with the tokens sent so far; more may have been generated."""
        usage = self._counted.usage
        return replace(usage, completion_tokens=self._num_sent) if self._counts_sent else usage

    def with_tokens_of(self, delta: ChoiceDelta) -> UsageCount:
        self._num_sent += len(delta.token_ids)
        return self.so_far


class EndJoiner(Stage):
    """Joins the last delta of each choice with its end."""

    holds_back = True

    def __init__(self, counted: Counted, output: Stage) -> None:
        self._counted = counted
        self._output = output
        self._last: dict[int, ChoiceDelta] = {}  # of each choice, until it is known whether its end came with it

    def write(self, delta: ChoiceDelta, out: bytearray) -> None:
        """Pass on the delta before this one, and this one if it ends its choice."""
        before = self._last.pop(delta.index, None)
        if before is not None and (delta.reason is None or delta.token_ids):
            self._output.write(before, out)
            before = None
        if delta.reason is None:
            self._last[delta.index] = delta
        else:
            self._output.write(delta if before is None else _joined(before, delta), out)

    def flush(self, out: bytearray, *, is_last: bool = False) -> None:
        """Pass on what is held, but not what waits for its end, unless there will be none."""
        held, self._last = self._last, {}
        for index, delta in held.items():
            if is_last or not self._counted.has_all_tokens(index):
                self._output.write(delta, out)
            else:
                self._last[index] = delta


def _joined(delta: ChoiceDelta, end: ChoiceDelta) -> ChoiceDelta:
    return structs.replace(
        end,
        text=delta.text + end.text,
        logprobs=(*delta.logprobs, *end.logprobs),
        token_ids=delta.token_ids,
        reasoning=delta.reasoning + end.reasoning,
        tool_calls=(*delta.tool_calls, *end.tool_calls),
    )
