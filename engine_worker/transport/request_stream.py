"""Claims requests from the priority queues for one worker incarnation. (Signatures first; bodies follow.)"""

from engine_worker.transport.claims import ClaimedRequest


class RequestStream:
    async def claim(self, max_requests: int, *, block: bool = False) -> list[ClaimedRequest]:
        """At most `max_requests` new requests, highest class first; with `block`, waits up to 1 s for the first one.

        Own task only (never cancel it but at shutdown). Raises Fenced. Cancelled and unreadable entries are finished here.
        """
        raise NotImplementedError

    async def hand_back(self) -> None:
        """Give up this incarnation: every unfinished request goes back to the queue without counting an attempt."""
        raise NotImplementedError
