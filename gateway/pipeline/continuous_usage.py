"""`continuous_usage_stats`: the usage so far in every chunk of a stream. Pure.

As in vLLM, each chunk of a choice counts more tokens than the one before: tokens that came together are counted one by
one, and an end without a token is merged into the chunk of the last token. That chunk waits for its end only if it must
be the last one.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from msgspec import structs

from gateway.errors import GatewayError
from gateway.pipeline.choice_progress import ChoiceUpdate
from gateway.pipeline.request import CompletionRequest
from gateway.pipeline.response_format import UsageCount


class Counted(Protocol):
    """The part of Generation used here."""

    @property
    def usage(self) -> UsageCount: ...

    def has_all_tokens(self, index: int) -> bool: ...


class ContinuousUsage:
    def __init__(self, request: CompletionRequest, counted: Counted) -> None:
        """Count the tokens of one stream."""
        # Samples that best_of drops are not sent, but they are counted, all when the last one has ended.
        self._counts_sent = not request.choices.is_best_of
        self._counted = counted
        self._num_sent = 0
        self._failure: GatewayError | None = None
        self._last: dict[int, ChoiceUpdate] = {}  # of each choice, until it is known whether its end came with it

    @property
    def so_far(self) -> UsageCount:
        """The usage with the tokens sent so far; more may have been generated."""
        usage = self._counted.usage
        return replace(usage, completion_tokens=self._num_sent) if self._counts_sent else usage

    def with_tokens_of(self, update: ChoiceUpdate) -> UsageCount:
        self._num_sent += len(update.token_ids)
        return self.so_far

    def with_ends(self, ready: Iterable[Sequence[ChoiceUpdate]]) -> Iterator[Sequence[ChoiceUpdate]]:
        """Join the last update of each choice with its end.

        An error of `ready` is raised after the updates before it. A caller that stops early continues with the next
        `ready`.
        """
        try:
            for updates in ready if self._failure is None else ():
                if sent := [known for update in updates for known in self._after(update)]:
                    yield sent
        except GatewayError as error:
            self._failure = error  # kept, because a caller may stop before it is raised
        yield from self._rest()
        if self._failure is not None:
            raise self._failure

    def _after(self, update: ChoiceUpdate) -> Iterator[ChoiceUpdate]:
        before = self._last.pop(update.index, None)
        if before is not None and (update.reason is None or update.token_ids):
            yield before
            before = None
        if update.reason is None:
            self._last[update.index] = update
        else:
            yield update if before is None else _joined(before, update)

    def _rest(self) -> Iterator[Sequence[ChoiceUpdate]]:
        """But those that wait for their end, unless there will be none."""
        waits = {index for index in self._last if self._failure is None and self._counted.has_all_tokens(index)}
        rest = [update for index, update in self._last.items() if index not in waits]
        self._last = {index: self._last[index] for index in waits}
        if rest:
            yield rest


def _joined(update: ChoiceUpdate, end: ChoiceUpdate) -> ChoiceUpdate:
    return structs.replace(
        end,
        text=update.text + end.text,
        logprobs=(*update.logprobs, *end.logprobs),
        token_ids=update.token_ids,
        reasoning=update.reasoning + end.reasoning,
        tool_calls=(*update.tool_calls, *end.tool_calls),
    )


def continuous_usage(request: CompletionRequest, counted: Counted) -> ContinuousUsage | None:
    """None: the request does not ask for it."""
    return ContinuousUsage(request, counted) if request.continuous_usage else None
