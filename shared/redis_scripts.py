"""The atomic scripts of the protocol, with typed arguments and replies. All but TAKE are safe to repeat.

    accept   gateway   store and queue requests                cancel   gateway   end a request, or release it
    attach   gateway   become a holder of a kept request       prolong  gateway   extend the life of a kept answer
    register worker    make an incarnation known               take     worker    read entries, by priority
    claim    worker    bodies and journals of read entries     level    worker    report its load, read its peers'
    unclaim  worker    return requests that it has not started
    emit     worker    one step's tokens: journal, publish     finish   worker    the end of requests
    tick     both      the fleet clock; a worker's beat
    reap     both      end an incarnation, requeue its requests
    gone     worker    requests whose gateway is gone     limit    gateway   spend an API key's limits

The .lua file of a script documents it. This module builds key names, orders arguments, and converts replies.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from importlib.resources import files
from itertools import chain
from typing import Any

import msgpack
import msgspec
from redis.asyncio import Redis

from shared.capabilities import Abilities
from shared.messages import PROTOCOL_VERSION, EventBatch, StreamEvent, encode
from shared.model_identity import ModelDiffers
from shared.new_requests import GRACE_SECONDS, RETAINED_SECONDS, NewRequest, RetentionTerms, Share
from shared.redis_keys import GROUP, INTERACTIVE, NEWER, PRIORITY_CLASSES, RESUMED, RedisKeys
from shared.shares import ALPHA

# Common code that precedes a script.
BEGINNINGS: dict[str, tuple[str, ...]] = {
    "claim": ("homes", "ownership"),
    "emit": ("ownership", "publish"),
    "finish": ("ownership", "publish"),
    "accept": ("waiting", "account", "homes"),
    "take": ("waiting", "entries", "homes", "order"),
    "cancel": ("waiting",),
    "level": ("waiting",),
    "attach": ("entries", "homes", "requeue"),
    "reap": ("entries", "homes", "requeue", "ownership"),
    "unclaim": ("entries", "homes", "requeue", "ownership"),
}
SCRIPT_NAMES = (
    *("accept", "attach", "prolong", "register", "take", "level", "claim", "unclaim", "emit", "finish"),
    *("cancel", "reap", "tick", "gone", "limit"),
)
KEEP_DEAD_SECONDS = 86_400  # of a dead letter's body: a day for an operator to examine it
ACCOUNT_SECONDS = 7_200  # life of an account after its last request; the few requests that live longer do not count
BARE_REQUEST_BYTES = 1_024  # of a request besides body, record and journal: fields, names, entries of queue and account
# Tokens that each choice costs in fair queueing; otherwise a thousand short prompts would cost as much as a long one.
PLACE_TOKENS = 128
FLOW = "k:"  # prefix of a flow; the beginning of the API key's hash follows, or nothing without keys
FLOW_DIGITS = 16  # 64 bits distinguish the keys of one server, and keep entries short
MAX_CRASHES = 2  # crashes without a new token before a request must run alone
MAX_ATTEMPTS = 10


class Fenced(Exception):
    """The store does not count this worker incarnation as alive: drop every sequence and register again."""


class NameTaken(Exception):
    """The client's name for this request already belongs to another one."""

    def __init__(self, request_id: str, fingerprint: str) -> None:
        super().__init__(request_id)
        self.request_id = request_id
        self.fingerprint = fingerprint


class QueueShareExceeded(Exception):
    """The API key would exceed its share of the queue places. Nothing was stored."""

    def __init__(self, max_places: int) -> None:
        super().__init__(f"{max_places} places")
        self.max_places = max_places


class StartsTooLate(Exception):
    """More requests wait before this one than may. Nothing was stored."""

    def __init__(self, num_ahead: int) -> None:
        super().__init__(f"{num_ahead} requests wait before it")
        self.num_ahead = num_ahead


class AcceptStatus(StrEnum):
    OK = "OK"
    DUP = "DUP"  # already stored: a repeated call
    BUSY = "BUSY"  # the queue is full; nothing was stored
    FULL = "FULL"  # the API key has reached its limit of bytes; nothing was stored


class LimitVerdict(StrEnum):
    OK = "OK"
    REQUESTS = "REQUESTS"  # the key has no request left
    TOKENS = "TOKENS"  # the key is in debt


@dataclass(frozen=True, slots=True)
class LimitReply:
    verdict: LimitVerdict
    wait_seconds: float  # until the refused call succeeds
    tokens_left: float  # negative: a debt


class AttachStatus(IntEnum):
    """The result of ATTACH."""

    ENDED = 0  # ended or unknown
    HELD = 1
    QUEUED_AGAIN = 2


class ReapMode(StrEnum):
    CRASH = "crash"  # counts an attempt, and a crash if no new token is in the journal
    DRAIN = "drain"  # the worker returns its requests


@dataclass(frozen=True, slots=True)
class QueueEntry:
    queue: str
    entry_id: bytes
    request_id: str  # empty if the entry was deleted while it was pending
    solo: bool  # whether the request must run alone
    queued_ms: int = 0  # time of queueing, by the store's clock
    needs: int = 0  # bits of capabilities.py
    context_tokens: int = 0  # 0: not known
    flow: str = ""  # flow in fair queueing: the API key
    home: str | None = None  # worker that probably has its prefix; "": none; None: its gateway wakes no worker
    prefix_key: bytes = b""  # hexadecimal digits


@dataclass(frozen=True, slots=True)
class Beat:
    """The reply to a worker's tick."""

    seconds: float  # the fleet clock
    observes: bool  # whether this worker is the observer
    has_peers: bool


@dataclass(frozen=True, slots=True)
class GoneRequest:
    """An unfinished request whose gateway does not listen."""

    request_id: str
    gateway_id: str
    grace_seconds: float
    priority_class: str


@dataclass(frozen=True, slots=True)
class GonePage:
    """A page of a queue."""

    queue_length: int
    last_entry: str  # after which the next page begins; empty: none follows
    requests: list[GoneRequest]


@dataclass(frozen=True, slots=True)
class Demand:
    """The demand of a worker."""

    requests: int  # maximum to read
    background_requests: int | None = None  # maximum of these in the last class; None: no separate limit
    room: int | None = None  # requests that it could hold in addition, now or soon; None: `requests`
    background_room: int | None = None
    prompt_tokens: int | None = None  # interactive prompt tokens after which it reads no more; None: no limit
    likely_prompt_tokens: int = 0  # assumed for an entry without a length
    others: int = 0  # additional requests: the next one of each API key that is not in `waiting_tenants`
    waiting_tenants: frozenset[str] = frozenset()  # names of API keys whose requests wait at the worker

    @property
    def of_last(self) -> int:
        asked = self.requests if self.background_requests is None else self.background_requests
        return max(0, min(self.requests, asked))

    @property
    def most_room(self) -> int:
        """Requests that it would take in addition now or soon; while there are any, gateways wake the worker."""
        return max(self.requests, self.room or 0)

    def counts(self) -> list[int]:
        return [self.requests, self.most_room, self.of_last, max(self.of_last, self.background_room or 0)]


@dataclass(frozen=True, slots=True)
class Taken:
    entries: list[QueueEntry]
    allowance: int  # entries that it could still have read; 0 = less loaded peers go first
    batch_allowance: int
    others_wait: bool  # whether entries wait that it must leave to peers


@dataclass(frozen=True, slots=True)
class ClaimReply:
    body: bytes
    gateway_id: str
    attempt: int
    solo: bool
    journal: bytes


class StepFrame(msgspec.Struct, frozen=True, gc=False):
    """The tokens that one engine step adds to a request's journal. A struct, because it is built in C per token."""

    request_id: str
    entry_id: bytes  # of the claim
    data: bytes


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a request: its queue entry, and its terminal event (empty for an entry without a request)."""

    request_id: str
    queue: str
    entry_id: bytes
    terminal_event: bytes = b""


@dataclass(frozen=True, slots=True)
class PendingEntry:
    """An entry of a dead worker, and the error for its client if it becomes a dead letter."""

    request_id: str
    entry_id: bytes
    error_event: bytes
    error_blob: bytes


@dataclass(frozen=True, slots=True)
class ReapReply:
    requeued: int
    dead_letters: int
    dropped: int  # already cancelled
    has_more: int  # 1: entries are still pending for the worker


@dataclass(frozen=True, slots=True)
class GatewayMessage:
    """Events for one gateway: bytes that end with the list of events, and the request and size of each event."""

    gateway_id: str
    blob: bytes
    parts: Sequence[tuple[int, int]]  # (position of its request in the call, number of bytes)


def gateway_message(
    gateway_id: str, worker_id: str, step: int, events: Sequence[StreamEvent], positions: Mapping[str, int]
) -> GatewayMessage:
    """Return an EventBatch from which a script can remove events.

    Args:
        gateway_id: The receiver.
        worker_id: The sender.
        step: Step of the engine.
        events: The events.
        positions: Position of each request in the call, by id.
    """
    encoded = list(map(encode, events))
    head = encode(EventBatch(PROTOCOL_VERSION, worker_id, step, []))[:-1]  # the last byte is an empty list's header
    blob = b"".join((head, msgpack.Packer().pack_array_header(len(events)), *encoded))
    parts = [(positions[event.request_id], len(part)) for event, part in zip(events, encoded, strict=True)]
    return GatewayMessage(gateway_id, blob, parts)


_NOT_KEPT = RetentionTerms(b"", "")
ALL_ABILITIES = Abilities()


def queue_entry(queue: bytes, entry_id: bytes, fields: Mapping[bytes, bytes] | None) -> QueueEntry:
    fields = fields or {}
    queued_ms = int(fields.get(b"t") or entry_id.split(b"-")[0])
    request_id, flow = (fields.get(name, b"").decode() for name in (b"r", b"f"))
    home = fields.get(b"h")
    return QueueEntry(
        queue.decode(),
        entry_id,
        request_id,
        fields.get(b"s") == b"1",
        queued_ms,
        int(fields.get(b"n", 0)),
        int(fields.get(b"l", 0)),
        flow,
        None if home is None else home.decode(),
        fields.get(b"k", b""),
    )


def _accept_status(first_id: str, status: bytes, echoed_id: bytes, *other: Any) -> AcceptStatus:
    if echoed_id.decode() != first_id:
        raise RuntimeError(f"ACCEPT: expected a reply for request {first_id}, got one for another request")
    if status == b"SAME":
        raise NameTaken(*(part.decode() for part in other))
    if status == b"SHARE":
        raise QueueShareExceeded(*other)
    if status == b"LATE":
        raise StartsTooLate(*other)
    return AcceptStatus(status.decode())


def load_sources() -> dict[str, str]:
    folder = files("shared") / "redis_scripts"
    parts = {name: (*BEGINNINGS.get(name, ()), name) for name in SCRIPT_NAMES}
    return {name: "".join((folder / f"{part}.lua").read_text() for part in parts[name]) for name in parts}


class RedisScripts:
    def __init__(self, redis: Redis, keys: RedisKeys, sources: Mapping[str, str] | None = None) -> None:
        self.redis = redis
        self.keys = keys
        self._prefixes = self._pair("")
        # register_script sends EVALSHA and loads the text when the server does not know it (NOSCRIPT).
        self._scripts = {name: redis.register_script(text) for name, text in (sources or load_sources()).items()}

    async def accept(
        self,
        request_id: str,
        body: bytes,
        *,
        gateway_id: str,
        priority_class: str,
        max_queued: int = -1,
        journal: bytes = b"",
        terms: RetentionTerms | None = None,
        wakes: bool = True,
    ) -> AcceptStatus:
        """Store and queue one request: see accept_all()."""
        new = NewRequest(request_id, body, journal, terms)
        return await self.accept_all(
            [new], gateway_id=gateway_id, priority_class=priority_class, max_queued=max_queued, wakes=wakes
        )

    async def accept_all(
        self,
        requests: Sequence[NewRequest],
        *,
        gateway_id: str,
        priority_class: str,
        max_queued: int = -1,
        share: Share | None = None,
        queue_name: str = "",
        wakes: bool = True,
        most_ahead: int = -1,
    ) -> AcceptStatus:
        """Store and queue all requests of one answer, or none.

        Args:
            requests: The requests; the terms of the first contain the client's name for all.
            gateway_id: The gateway that receives their events.
            priority_class: One of PRIORITY_CLASSES.
            max_queued: Limit of waiting requests; -1 for no limit.
            share: Limits of the API key; without them the requests are neither counted nor ordered by key.
            queue_name: NEWER for requests with needs, else empty.
            wakes: Whether to send messages to waiting workers. A single worker needs none, and has no peer to prefer.
            most_ahead: Limit of the requests that are served before these; -1 for no limit.

        Raises:
            NameTaken: If the client's name belongs to another request.
            QueueShareExceeded: If the API key would hold too many queue places.
            StartsTooLate: If more than `most_ahead` requests wait before these.
        """
        queue_name = queue_name or priority_class
        first_id, first = requests[0].request_id, requests[0].terms or _NOT_KEPT
        name = self.keys.client_name(first.name) if first.name else self.keys.request(first_id)
        max_bytes, account = None, self.keys.request(first_id)
        if share is not None and share.max_bytes is not None:
            max_bytes, account = share.max_bytes, self.keys.account(share.owner_key_hash)
        flow = FLOW + share.owner_key_hash[:FLOW_DIGITS] if share and queue_name != NEWER else ""
        weight = share.weight if share else 1.0
        turns = [self.keys.request(first_id)] * 2 if queue_name == NEWER else self.keys.turns(priority_class)
        pairs = self._pairs([request.request_id for request in requests])
        held = self.keys.held[0 if priority_class == INTERACTIVE else 1]
        keys = [self.keys.queue(queue_name), name, account, *turns, self.keys.homes, *pairs]
        arguments: list[Any] = [gateway_id, first.owner_key_hash, priority_class, max_queued]
        arguments += [first.fingerprint, first.stale_id, first.name_seconds]
        arguments += [
            "" if max_bytes is None else max_bytes,
            ACCOUNT_SECONDS,
            BARE_REQUEST_BYTES,
            *self._pair(""),
            flow,
            ALPHA * weight if share and share.divides_queue else "",
            self.keys.control_channel_prefix if wakes else "",
            held,
        ]
        for request in requests:
            terms = request.terms or _NOT_KEPT
            arguments += [request.request_id, request.body, request.journal]
            arguments += [terms.record, terms.holder, terms.grace_seconds, request.reserved_bytes]
            cost = (request.num_prompt_tokens + PLACE_TOKENS * request.num_choices) / weight
            arguments += [request.num_prompt_tokens, cost if queue_name == INTERACTIVE else ""]
            arguments += [request.needs, request.context_tokens, request.prefix_key.hex()]
        arguments.append(most_ahead)
        return _accept_status(first_id, *await self._call("accept", keys, arguments))

    async def prolong(self, request_ids: Sequence[str], name: str, name_seconds: int) -> None:
        """Extend the life of a kept answer: its ended requests by RETAINED_SECONDS, its name by `name_seconds`."""
        first = self.keys.client_name(name) if name else self.keys.request(request_ids[0])
        arguments = [request_ids[0], name_seconds, RETAINED_SECONDS]
        await self._call("prolong", [first, *self._pairs(request_ids)], arguments)

    async def attach(self, request_id: str, holder: str, gateway_id: str, *, again: bool = False) -> AttachStatus:
        """Become a holder of a kept request.

        With `again` this gateway was a holder before: the request continues if it ended only because its holders'
        gateways seemed to be gone.
        """
        keys = [*self._pair(request_id), self.keys.queue(RESUMED), self.keys.queue(NEWER)]
        arguments = [request_id, holder, gateway_id, self.keys.control_channel_prefix, int(again), self.keys.held[0]]
        return AttachStatus(await self._call("attach", keys, arguments))

    async def register(self, worker_id: str, identity: Mapping[str, str] | None = None) -> None:
        """Make a worker incarnation known, and compare the identity of its model if it is given.

        Raises:
            ModelDiffers: If the queue serves another model.
        """
        fields = chain.from_iterable((identity or {}).items())
        keys = [self.keys.fence(worker_id), self.keys.model, *self.keys.queues]
        reply = await self._call("register", keys, [GROUP, worker_id, self.keys.fence(""), *fields])
        if reply[0] == b"DIFFERS":
            name, stored = reply[1].decode(), reply[2].decode()
            live_ids = tuple(id_.decode() for id_ in reply[4:])
            raise ModelDiffers(self.keys.model_name, name, stored, (identity or {})[name], int(reply[3]), live_ids)

    async def compare_identity(self, identity: Mapping[str, str]) -> None:
        """Raise ModelDiffers if register() with this identity would raise it now."""
        await self.register("", identity)

    async def take(
        self,
        worker_id: str,
        demand: Demand,
        *,
        num_held: int = 0,
        is_impatient: bool = False,
        abilities: Abilities = ALL_ABILITIES,
        waiting_flows: Iterable[str] = (),
    ) -> Taken:
        """Read new entries without a wait, by least-loaded dispatch among the workers.

        Do not repeat it after a lost reply: read the worker's pending entries instead.

        Args:
            worker_id: The caller.
            demand: Numbers of requests.
            num_held: Requests that the worker has.
            is_impatient: Whether to ignore peers that have not reported a higher load.
            abilities: What the worker can serve; other requests are left to its peers.
            waiting_flows: The flows of `demand.waiting_tenants`.

        Raises:
            Fenced: If the worker has no fence.
        """
        arguments = [worker_id, GROUP, num_held, int(is_impatient), *demand.counts(), self._prefixes[0]]
        arguments += ["" if demand.prompt_tokens is None else demand.prompt_tokens, demand.likely_prompt_tokens]
        arguments += [abilities.capabilities, abilities.max_model_len, demand.others]
        arguments += [self.keys.control_channel_prefix, *waiting_flows]
        _, times_of_last = self.keys.turns(PRIORITY_CLASSES[-1])
        keys = [*self.keys.held, *self.keys.turns(INTERACTIVE), times_of_last, *self.keys.queues]
        reply = await self._fenced_call("take", worker_id, keys, arguments)
        entries = [
            queue_entry(queue, entry_id, dict(zip(fields[::2], fields[1::2], strict=True)))
            for queue, entries in reply[1]
            for entry_id, fields in entries
        ]
        return Taken(entries, reply[2], reply[3], bool(reply[4]))

    async def level(self, worker_id: str, num_held: int, room: int) -> int | None:
        """Return the number of requests of the least loaded peer with room; None without one, or if requests wait."""
        keys = [self.keys.held[0], self.keys.queue(RESUMED), self.keys.queue(INTERACTIVE)]
        reply = await self._fenced_call("level", worker_id, keys, [worker_id, num_held, room])
        return None if reply[1] < 0 else int(reply[1])

    async def unclaim(self, worker_id: str, entries: Sequence[QueueEntry], *, queue_name: str = RESUMED) -> int:
        """Return requests to a queue. Returns the number of requeued ones; a repeated call finds none.

        Args:
            worker_id: The caller.
            entries: Entries that were not started, oldest first.
            queue_name: NEWER for requests that the worker cannot serve.
        """
        keys: list[str] = [self.keys.queue(queue_name), self.keys.queue(NEWER), self.keys.held[0]]
        arguments: list[Any] = [worker_id, GROUP, self.keys.control_channel_prefix]
        for entry in entries:
            keys += [entry.queue, self.keys.request(entry.request_id)]
            arguments += [entry.entry_id, entry.request_id]
        return int((await self._fenced_call("unclaim", worker_id, keys, arguments))[1])

    async def claim(self, worker_id: str, entries: Sequence[QueueEntry]) -> list[ClaimReply | None]:
        """Claim entries, and return their requests in the same order.

        An element is None if its request was cancelled, has ended, or was accepted again with another entry, or if a
        failover lost the delivery of the entry to this worker.
        """
        keys: list[str] = [self.keys.homes]
        arguments: list[Any] = [worker_id, GROUP]
        for entry in entries:
            keys += (entry.queue, *self._pair(entry.request_id))
            arguments += (entry.entry_id, entry.prefix_key)
        reply = await self._fenced_call("claim", worker_id, keys, arguments)
        return [_claim_reply(fields) if fields else None for fields in reply[1:]]

    async def emit(
        self, worker_id: str, step: int, frames: Sequence[StepFrame], messages: Sequence[GatewayMessage]
    ) -> list[str]:
        """Append one step's frames, at most one per request, to journals and publish the messages.

        Returns:
            Ids of requests that no longer belong to this worker; nothing was written or published for them.
        """
        request_ids = [frame.request_id for frame in frames]
        arguments: list[Any] = [worker_id, step]
        for frame in frames:
            arguments += (frame.entry_id, frame.data)
        arguments += self._messages(messages)
        reply = await self._fenced_call("emit", worker_id, self._pairs(request_ids), arguments, step - 1)
        return [request_ids[position] for position in reply[1:]]

    async def finish(
        self, worker_id: str, endings: Sequence[Ending], messages: Sequence[GatewayMessage], step: int | None = None
    ) -> int:
        """End requests and publish the messages. `step` is the last EMIT, which holds the last tokens of the requests.

        Returns:
            Number of removed entries; a repeated call finds none.
        """
        keys: list[str] = []
        arguments: list[Any] = [worker_id, "" if step is None else step, GROUP, RETAINED_SECONDS]
        for ending in endings:
            keys += [ending.queue, *self._pair(ending.request_id)]
            arguments += [ending.entry_id, ending.terminal_event]
        reply = await self._fenced_call("finish", worker_id, keys, [*arguments, *self._messages(messages)], step)
        return int(reply[1])

    async def cancel(
        self, request_id: str, priority_class: str, *, holder: str = "", gone_gateway_id: str = "",
        event: bytes = b"", blob: bytes = b"", only_unstarted: bool = False,
    ) -> bool:  # fmt: skip
        """Cancel a request. Returns whether it ended.

        Args:
            request_id: The request.
            priority_class: Its class.
            holder: Release it for this holder only; empty for all.
            gone_gateway_id: Release it for all holders of this gateway, which is gone.
            event: Terminal event of a kept request.
            blob: The same as a message for the gateways of its holders.
            only_unstarted: Do nothing if a worker has the request, or has generated tokens.
        """
        queues = [self.keys.queue(name) for name in (priority_class, RESUMED, NEWER)]
        keys = [*self._pair(request_id), *self.keys.turns(priority_class), *queues]
        arguments: list[Any] = [request_id, GROUP, self.keys.control_channel_prefix, holder, event, blob]
        arguments += [self.keys.gateway_channel_prefix, RETAINED_SECONDS, gone_gateway_id, int(only_unstarted)]
        return bool(await self._call("cancel", keys, arguments))

    async def reap(self, worker_id: str, queue: str, entries: Sequence[PendingEntry], mode: ReapMode) -> ReapReply:
        keys = [self.keys.fence(worker_id), self.keys.dead_letters, self.keys.queue(RESUMED), queue, *self.keys.held]
        keys += [self.keys.queue(NEWER), self.keys.turns(INTERACTIVE)[0]]
        keys += self._pairs([entry.request_id for entry in entries])
        arguments: list[Any] = [worker_id, GROUP, mode, MAX_CRASHES, MAX_ATTEMPTS, KEEP_DEAD_SECONDS]
        arguments += [self.keys.gateway_channel_prefix, self.keys.control_channel_prefix]
        for entry in entries:
            arguments += [entry.entry_id, entry.request_id, entry.error_event, entry.error_blob]
        return ReapReply(*(await self._call("reap", keys, arguments)))

    async def tick(self, seconds: float) -> float:
        """Return the fleet clock in seconds, which is at least the caller's `seconds`."""
        milliseconds, _, _ = await self._call("tick", [self.keys.clock], [round(seconds * 1000)])
        return float(milliseconds) / 1000

    async def beat(self, seconds: float, worker_id: str, *, lease_seconds: float, is_steady: bool) -> Beat:
        """Tick as a worker; `worker_id` is empty before it is registered."""
        keys = [self.keys.clock, self.keys.beats, self.keys.observer]
        arguments = [round(seconds * 1000), worker_id, round(lease_seconds * 1000), int(is_steady)]
        milliseconds, observes, num_workers = await self._call("tick", keys, arguments)
        return Beat(float(milliseconds) / 1000, bool(observes), num_workers > 1)

    async def beats(self) -> dict[str, float]:
        """Return the fleet clock's time of the last beat of each worker, in seconds."""
        found: Any = await self.redis.zrange(self.keys.beats, 0, -1, withscores=True)
        return {name.decode(): milliseconds / 1000 for name, milliseconds in found}

    async def forget_beats(self, worker_ids: Iterable[str]) -> None:
        if names := list(worker_ids):
            await self.redis.zrem(self.keys.beats, *names)

    async def limit(
        self,
        owner_key_hash: str,
        fleet_seconds: float,
        *,
        requests_per_minute: int,
        tokens_per_minute: int,
        num_requests: int,
        num_tokens: float,
        refuses_debt: bool,
    ) -> LimitReply:
        """Spend requests and tokens of an API key. A limit of 0 is none; negative tokens are returned."""
        arguments = [round(fleet_seconds * 1000), requests_per_minute, tokens_per_minute]
        arguments += [num_requests, round(num_tokens), int(refuses_debt)]
        verdict, wait, left = await self._call("limit", [self.keys.limits(owner_key_hash)], arguments)
        return LimitReply(LimitVerdict(verdict.decode()), wait / 1000, float(left))

    async def gone(self, queue: str, after: str, num_entries: int) -> GonePage:
        """Return a page of a queue.

        Args:
            queue: Name of the queue.
            after: Entry before the page; empty for the first.
            num_entries: Entries of a page.
        """
        start = f"({after}" if after else "-"
        arguments = [start, num_entries, self._prefixes[0], self.keys.gateway_channel_prefix]
        length, last, *rows = await self._call("gone", [queue], arguments)
        requests = [
            GoneRequest(request_id.decode(), gateway_id.decode(), float(grace or GRACE_SECONDS), class_.decode())
            for request_id, gateway_id, grace, class_ in rows
        ]
        return GonePage(length, last.decode(), requests)

    async def _fenced_call(
        self, name: str, worker_id: str, keys: Sequence[str], arguments: Sequence[Any], step: int | None = None
    ) -> Any:
        """Call a script that checks the fence, and perhaps that the store has applied `step`."""
        reply = await self._call(name, [self.keys.fence(worker_id), *keys], arguments)
        if reply[0] == b"FENCED":
            raise Fenced(f"worker {worker_id}: no fence in the store")
        if reply[0] == b"GAP":
            raise Fenced(f"worker {worker_id}: the store has step {reply[1]}, expected {step}; it lost steps")
        return reply

    async def _call(self, name: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        return await self._scripts[name](keys=keys, args=arguments)

    def _pair(self, request_id: str) -> tuple[str, str]:
        return self.keys.request(request_id), self.keys.journal(request_id)

    def _pairs(self, request_ids: Iterable[str]) -> list[str]:
        request_prefix, journal_prefix = self._prefixes  # takes a third of the time of _pair()
        return [key for id_ in request_ids for key in (request_prefix + id_, journal_prefix + id_)]

    def _messages(self, messages: Iterable[GatewayMessage]) -> list[str | bytes]:
        parts: list[str | bytes] = []
        for message in messages:
            layout = chain.from_iterable(message.parts)
            parts += [
                self.keys.gateway_channel(message.gateway_id),
                message.blob,
                struct.pack(f">{2 * len(message.parts)}I", *layout),
            ]
        return parts


def _claim_reply(fields: Sequence[bytes]) -> ClaimReply:
    body, gateway_id, attempt, solo, journal = fields
    return ClaimReply(body, gateway_id.decode(), int(attempt), solo == b"1", journal)
