"""Carries each engine step's events to the journal and the gateways, exactly once. (Signatures first; bodies follow.)"""

from collections.abc import Sequence

from shared.messages import ErrorEvent, FinishEvent, TokenEvent


class TokenPublisher:
    async def emit(self, events: Sequence[TokenEvent]) -> list[str]:
        """Journal and publish one engine step's tokens (one script call, whatever the batch size).

        Returns the ids of requests that were cancelled: abort them, then `finish` them with FinishReason.CANCELLED.
        Held and retried while the store is away; raises Fenced when fenced or after 10 s without any reply.
        Counts its own steps: call it once per engine step that made tokens, one call at a time.
        """
        raise NotImplementedError

    async def finish(self, events: Sequence[FinishEvent | ErrorEvent]) -> None:
        """Acknowledge, store and publish the end of requests; call after the emit of their last tokens.

        `usage.completion_tokens` must count all output tokens, those of earlier attempts included.
        """
        raise NotImplementedError
