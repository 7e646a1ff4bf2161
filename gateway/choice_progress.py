"""One choice of an answer: its tokens in, its text and its one end out, and what is measured on the way.

Knows nothing of streams, HTTP or JSON.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.metrics import GatewayMetrics
from gateway.output_text import OutputText
from shared.messages import FinishReason


@dataclass(frozen=True, slots=True)
class ChoiceUpdate:
    index: int
    text: str
    reason: FinishReason | None  # set once, in the choice's last update


class ChoiceProgress:
    def __init__(self, index: int, output: OutputText, metrics: GatewayMetrics, arrived_at: float) -> None:
        self.finished = False
        self.stopped_early = False  # by a stop string: the engine does not know of it
        self._index = index
        self._output = output
        self._metrics = metrics
        self._arrived_at = arrived_at
        self._first_token_at = 0.0
        self._last_token_at = 0.0

    @property
    def num_tokens(self) -> int:
        return self._output.num_tokens

    def take(self, token_ids: Sequence[int], reason: FinishReason | None) -> list[ChoiceUpdate]:
        """An update for each of the next tokens, which are the last if there is a `reason`. Not to be called after the
        end. A client that counts or times tokens sees each, also when several came together or one has no text yet."""
        if token_ids:
            self._record_tokens(time.monotonic())
        updates: list[ChoiceUpdate] = []
        for token_id in token_ids:
            text = self._output.push((token_id,))
            if self._output.stopped:
                self.stopped_early = reason is None
                return [*updates, self._end(text, FinishReason.STOP)]
            updates.append(ChoiceUpdate(self._index, text, None))
        if reason is None:
            return updates
        text = updates.pop().text if updates else ""
        text += self._output.finish(reason)
        return [*updates, self._end(text, FinishReason.STOP if self._output.stopped else reason)]

    def record_end(self, reason: str) -> None:
        self.finished = True
        self._metrics.choices_finished.labels(reason).inc()

    def _end(self, text: str, reason: FinishReason) -> ChoiceUpdate:
        self.record_end(reason.value)
        self._metrics.generation_tokens.observe(self.num_tokens)
        if self.num_tokens > 1:
            self._metrics.time_per_output_token.observe(
                (self._last_token_at - self._first_token_at) / (self.num_tokens - 1)
            )
        self._metrics.request_duration.observe(time.monotonic() - self._arrived_at)
        return ChoiceUpdate(self._index, text, reason)

    def _record_tokens(self, now: float) -> None:
        if self._first_token_at:
            self._metrics.inter_token_latency.observe(now - self._last_token_at)
        else:
            self._first_token_at = now
            self._metrics.time_to_first_token.observe(now - self._arrived_at)
        self._last_token_at = now
