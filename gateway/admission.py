"""Who is let in: admit(load, limits) -> Admitted | Rejected. Pure.

This is the gateway's own view, asked before any tokenizing. The queue's cap is not decided here: only the store's
ACCEPT knows the queue's true length, and it refuses with BUSY.
"""

from dataclasses import dataclass

from gateway.errors import RateLimited, Unavailable

RETRY_AFTER_SECONDS = {
    "draining": 1,  # another gateway, or this one restarted, answers at once
    "gateway_full": 2,
    "queue_full": 2,
    "queue_timeout": 5,  # it has waited already
    "starting": 2,
    "no_worker": 5,  # a restart with cached weights takes about this long on two cores
    "store_unavailable": 2,
    "name_contended": 1,
    "store_full": 5,  # room comes as requests end, and ended ones leave after ten minutes
}
SHARE_RETRY_AFTER_SECONDS = 10


@dataclass(frozen=True)
class Load:
    """What the gateway sees at this moment."""

    draining: bool
    model_loaded: bool  # the tokenizer is there
    ready_workers: int
    was_ready: bool  # a worker has been ready since this gateway began
    is_waited_for: bool  # the next one: requests are taken while none is ready
    open_requests: int  # this one too
    store_has_room: bool


@dataclass(frozen=True)
class Limits:
    max_open_requests: int


@dataclass(frozen=True)
class Admitted:
    pass


@dataclass(frozen=True)
class Rejected:
    reason: str
    message: str

    @property
    def retry_after_seconds(self) -> int:
        return RETRY_AFTER_SECONDS[self.reason]


def admit(load: Load, limits: Limits) -> Admitted | Rejected:
    if load.draining:
        return Rejected("draining", "This gateway is shutting down.")
    if not load.model_loaded or (load.ready_workers == 0 and not load.was_ready):
        return Rejected("starting", "The model is being loaded; GET /ready tells how far it is.")
    if load.ready_workers == 0 and not load.is_waited_for:
        return Rejected("no_worker", "No engine worker is ready.")
    if not load.store_has_room:
        return Rejected("store_full", "The request store is nearly full; its room is kept for open requests.")
    if load.open_requests > limits.max_open_requests:
        return Rejected("gateway_full", f"This gateway holds {limits.max_open_requests} open requests, its limit.")
    return Admitted()


def unavailable(reason: str, message: str) -> Unavailable:
    return Unavailable(message, code=reason, retry_after_seconds=RETRY_AFTER_SECONDS[reason])


def share_full(max_bytes: int) -> RateLimited:
    return RateLimited(
        f"What this key's requests hold in the store would be more than its share, {max_bytes} bytes; they leave it "
        "ten minutes after their end.",
        code="store_share_exceeded",
        retry_after_seconds=SHARE_RETRY_AFTER_SECONDS,
    )
