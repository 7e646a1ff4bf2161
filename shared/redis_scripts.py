"""The atomic scripts of the protocol, called with types. Each but TAKE may be repeated blindly after a lost reply.

    accept   gateway   store requests and queue them           cancel   gateway   end one, or let go of it
    attach   gateway   hold a kept request too                 prolong  gateway   keep what a kept answer is made of
    register worker    make an incarnation known               take     worker    read entries, highest class first
    claim    worker    bodies and journals of read entries     level    worker    what it holds, and its peers
    unclaim  worker    give back what it has not started
    emit     worker    one step's tokens: journal, publish     finish   worker    the end of requests
    tick     anyone    the fleet's clock
    reap     anyone    end an incarnation, requeue its requests

What each does is told at the top of its .lua file in the folder of the same name. This module only names keys, orders
arguments and types replies; it decides nothing, and it repeats nothing.

Each walk but a block's calls the store by it. It knows no text and no HTTP.
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
from shared.new_requests import RETAINED_SECONDS, NewRequest, RetentionTerms, Share
from shared.redis_keys import GROUP, INTERACTIVE, NEWER, PRIORITY_CLASSES, RESUMED, RedisKeys
from shared.shares import ALPHA

# Put before a script.
BEGINNINGS: dict[str, tuple[str, ...]] = {
    "emit": ("publish",),
    "finish": ("publish",),
    "accept": ("waiting", "account"),
    "take": ("waiting", "order"),
    "cancel": ("waiting",),
    "level": ("waiting",),
    "attach": ("requeue",),
    "reap": ("requeue",),
    "unclaim": ("requeue",),
}
SCRIPT_NAMES = (
    *("accept", "attach", "prolong", "register", "take", "level", "claim", "unclaim", "emit", "finish"),
    *("cancel", "reap", "tick"),
)
KEEP_DEAD_SECONDS = 86_400  # those of a dead letter: a day for somebody to look at what killed its workers
ACCOUNT_SECONDS = 7_200  # what a key's requests hold, counted since its last one; a few live longer, uncounted then
BARE_REQUEST_BYTES = 1_024  # of the store beside body, record and journal: fields, names, entries of queue and account
# For which a choice's place counts in turns: else a thousand short prompts would cost as much as one long one.
PLACE_TOKENS = 128
FLOW = "k:"  # before the beginning of a key's hash, which is empty where nobody has a key
FLOW_DIGITS = 16  # 64 bits tell the keys of one server apart, and an entry is shorter
MAX_STRIKES = 2  # crashes without a new token before a request has to run alone
MAX_ATTEMPTS = 10


class Fenced(Exception):
    """The store no longer counts this worker incarnation as alive: drop every sequence and register anew."""


class NameTaken(Exception):
    """The client's name for this request already names another one."""

    def __init__(self, request_id: str, fingerprint: str) -> None:
        super().__init__(request_id)
        self.request_id = request_id
        self.fingerprint = fingerprint


class QueueShareExceeded(Exception):
    """The key would hold more than its share of the queue places; nothing was stored."""

    def __init__(self, max_places: int) -> None:
        super().__init__(f"{max_places} places")
        self.max_places = max_places


class AcceptStatus(StrEnum):
    OK = "OK"
    DUP = "DUP"  # stored already: a repeat
    BUSY = "BUSY"  # the queue is at its cap; nothing was stored
    FULL = "FULL"  # so is what their key may hold; nothing was stored


class AttachStatus(IntEnum):
    """The outcome of ATTACH; a request goes on unless it is 0."""

    ENDED = 0  # or unknown: there is nothing more to come of it
    HELD = 1
    QUEUED_AGAIN = 2


class ReapMode(StrEnum):
    CRASH = "crash"  # counts an attempt, and a strike where no new token was journalled
    DRAIN = "drain"  # the worker hands its requests back


@dataclass(frozen=True, slots=True)
class QueueEntry:
    queue: str
    entry_id: bytes
    request_id: str  # empty if somebody deleted the entry while it was pending
    solo: bool
    queued_ms: int = 0  # when it came into the queues, by the store's clock
    needs: int = 0  # bits of capabilities.py
    context_tokens: int = 0  # 0: not known
    flow: str = ""  # the key that it has its turn by


@dataclass(frozen=True, slots=True)
class Demand:
    """The requests that a worker wants of the queues."""

    requests: int
    background_requests: int | None = None  # of them, the most of the last class; None: as many
    room: int | None = None  # that it could hold more, now or soon; None: just these
    background_room: int | None = None
    prompt_tokens: int | None = None  # of interactive prompts, that are enough for now; None: any number
    likely_prompt_tokens: int = 0  # of one whose entry does not tell
    others: int = 0  # beside these: the next request of each key that is not one of `waiting_tenants`
    waiting_tenants: frozenset[str] = frozenset()  # keys by name, of which requests wait at the worker

    @property
    def of_last(self) -> int:
        asked = self.requests if self.background_requests is None else self.background_requests
        return max(0, min(self.requests, asked))

    def counts(self) -> list[int]:
        room = self.requests if self.room is None else self.room
        background_room = self.of_last if self.background_room is None else self.background_room
        return [self.requests, room, self.of_last, background_room]


@dataclass(frozen=True, slots=True)
class Taken:
    entries: list[QueueEntry]
    allowance: int  # entries that it could still have had: 0 = peers that hold less go first
    batch_allowance: int
    others_wait: bool  # that it may not have


@dataclass(frozen=True, slots=True)
class ClaimReply:
    body: bytes
    gateway_id: str
    attempt: int
    solo: bool
    journal: bytes


class StepFrame(msgspec.Struct, frozen=True, gc=False):
    """The tokens that one engine step adds to a request's journal. One a token: a struct, as those are made in C."""

    request_id: str
    entry_id: bytes  # that it was claimed by
    data: bytes


@dataclass(frozen=True, slots=True)
class Ending:
    """One request's end: its queue entry, and its terminal event (empty for an entry without a request)."""

    request_id: str
    queue: str
    entry_id: bytes
    terminal_event: bytes = b""


@dataclass(frozen=True, slots=True)
class PendingEntry:
    """An entry of a dead worker, and what its client gets if it becomes a dead letter."""

    request_id: str
    entry_id: bytes
    error_event: bytes
    error_blob: bytes


@dataclass(frozen=True, slots=True)
class ReapReply:
    requeued: int
    dead_letters: int
    dropped: int  # cancelled meanwhile
    remaining: int  # still pending for the worker


@dataclass(frozen=True, slots=True)
class GatewayMessage:
    """Events for one gateway: bytes that end with their list, and of each event the request and its bytes."""

    gateway_id: str
    blob: bytes
    parts: Sequence[tuple[int, int]]  # (position of its request in the call, number of bytes)


def gateway_message(
    gateway_id: str, worker_id: str, step: int, events: Sequence[StreamEvent], positions: Mapping[str, int]
) -> GatewayMessage:
    """An EventBatch of which the store can leave out some. `positions`: of their requests in the call, by id."""
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
    return QueueEntry(
        queue.decode(),
        entry_id,
        request_id,
        fields.get(b"s") == b"1",
        queued_ms,
        int(fields.get(b"n", 0)),
        int(fields.get(b"l", 0)),
        flow,
    )


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
    ) -> AcceptStatus:
        """accept_all() of one request."""
        new = NewRequest(request_id, body, journal, terms)
        return await self.accept_all([new], gateway_id=gateway_id, priority_class=priority_class, max_queued=max_queued)

    async def accept_all(
        self,
        requests: Sequence[NewRequest],
        *,
        gateway_id: str,
        priority_class: str,
        max_queued: int = -1,
        share: Share | None = None,
        queue_name: str = "",
    ) -> AcceptStatus:
        """All or none, in one queue: that of their class, or NEWER if `queue_name` is that. The first one's terms have
        the name of all. Without a share they are neither counted nor given turns. Raises NameTaken or
        QueueShareExceeded."""
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
        keys = [self.keys.queue(queue_name), name, account, *turns, *pairs]
        arguments: list[Any] = [gateway_id, first.owner_key_hash, priority_class, max_queued]
        arguments += [first.fingerprint, first.stale_id, first.name_seconds]
        arguments += [
            "" if max_bytes is None else max_bytes,
            ACCOUNT_SECONDS,
            BARE_REQUEST_BYTES,
            *self._pair(""),
            flow,
            ALPHA * weight if share and share.divides_queue else "",
        ]
        for request in requests:
            terms = request.terms or _NOT_KEPT
            arguments += [request.request_id, request.body, request.journal]
            arguments += [terms.record, terms.holder, terms.grace_seconds, request.reserved_bytes]
            cost = (request.num_prompt_tokens + PLACE_TOKENS * request.num_choices) / weight
            arguments += [request.num_prompt_tokens, cost if queue_name == INTERACTIVE else ""]
            arguments += [request.needs, request.context_tokens]
        status, echoed_id, *other = await self._call("accept", keys, arguments)
        if echoed_id.decode() != first_id:
            raise RuntimeError(f"the store answered for another request than {first_id}")
        if status == b"SAME":
            raise NameTaken(*(part.decode() for part in other))
        if status == b"SHARE":
            raise QueueShareExceeded(*other)
        return AcceptStatus(status.decode())

    async def prolong(self, request_ids: Sequence[str], name: str, name_seconds: int) -> None:
        """Prolong the life of a kept answer: its requests that have ended for RETAINED_SECONDS, and its client's name
        for it, if it has one, for `name_seconds`."""
        first = self.keys.client_name(name) if name else self.keys.request(request_ids[0])
        arguments = [request_ids[0], name_seconds, RETAINED_SECONDS]
        await self._call("prolong", [first, *self._pairs(request_ids)], arguments)

    async def attach(self, request_id: str, holder: str, gateway_id: str, *, again: bool = False) -> AttachStatus:
        """`again`: this gateway held it before, so that it goes on if it ended only because nobody seemed to."""
        keys = [*self._pair(request_id), self.keys.queue(RESUMED), self.keys.queue(NEWER)]
        arguments = [request_id, holder, gateway_id, self.keys.control_channel_prefix, int(again)]
        return AttachStatus(await self._call("attach", keys, arguments))

    async def register(self, worker_id: str, identity: Mapping[str, str] | None = None) -> None:
        """Make a worker incarnation known. `identity`: of its model; without one it is not compared. Raises
        ModelDiffers."""
        fields = chain.from_iterable((identity or {}).items())
        keys = [self.keys.fence(worker_id), self.keys.model, *self.keys.queues]
        reply = await self._call("register", keys, [GROUP, worker_id, self.keys.fence(""), *fields])
        if reply[0] == b"DIFFERS":
            name, stored = reply[1].decode(), reply[2].decode()
            live_ids = tuple(id_.decode() for id_ in reply[4:])
            raise ModelDiffers(self.keys.model_name, name, stored, (identity or {})[name], int(reply[3]), live_ids)

    async def compare_identity(self, identity: Mapping[str, str]) -> None:
        """Raise ModelDiffers where register() of a worker with these fields would raise it now."""
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
        """Read new entries without waiting, a share that leaves peers theirs. `num_held`: requests that it has. What
        the worker cannot serve is left to others. `waiting_flows`: those of `demand.waiting_tenants`.

        Not to be repeated: read the own pending entries instead.
        """
        arguments = [worker_id, GROUP, num_held, int(is_impatient), *demand.counts(), self._prefixes[0]]
        arguments += ["" if demand.prompt_tokens is None else demand.prompt_tokens, demand.likely_prompt_tokens]
        arguments += [abilities.capabilities, abilities.max_model_len, demand.others, *waiting_flows]
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
        """Return what the emptiest peer with room for more holds; None if there is none, or if something
        waits that it can take."""
        keys = [self.keys.held[0], self.keys.queue(RESUMED), self.keys.queue(INTERACTIVE)]
        reply = await self._fenced_call("level", worker_id, keys, [worker_id, num_held, room])
        return None if reply[1] < 0 else int(reply[1])

    async def unclaim(self, worker_id: str, entries: Sequence[QueueEntry], *, queue_name: str = RESUMED) -> int:
        """Oldest first. Returns how many requests are queued again now (a repeat finds none). `queue_name`: NEWER for
        those that the worker cannot serve."""
        keys: list[str] = [self.keys.queue(queue_name), self.keys.queue(NEWER)]
        arguments: list[Any] = [worker_id, GROUP]
        for entry in entries:
            keys += [entry.queue, self.keys.request(entry.request_id)]
            arguments += [entry.entry_id, entry.request_id]
        return int((await self._fenced_call("unclaim", worker_id, keys, arguments))[1])

    async def claim(self, worker_id: str, entries: Sequence[QueueEntry]) -> list[ClaimReply | None]:
        """In the order of `entries`; None = cancelled, already over, or accepted anew since with another entry."""
        keys = self._pairs(entry.request_id for entry in entries)
        reply = await self._fenced_call("claim", worker_id, keys, [worker_id, *(entry.entry_id for entry in entries)])
        return [_claim_reply(fields) if fields else None for fields in reply[1:]]

    async def emit(
        self, worker_id: str, step: int, frames: Sequence[StepFrame], messages: Sequence[GatewayMessage]
    ) -> list[str]:
        """`frames`: one a request. Returns the ids of requests that are not this worker's any more: nothing of them is
        journalled or published."""
        request_ids = [frame.request_id for frame in frames]
        arguments: list[Any] = [worker_id, step]
        for frame in frames:
            arguments += (frame.entry_id, frame.data)
        arguments += self._messages(messages)
        reply = await self._fenced_call("emit", worker_id, self._pairs(request_ids), arguments)
        if reply[0] == b"GAP":
            raise Fenced(f"the store knows {worker_id} at step {reply[1]}, not {step - 1}: it lost steps")
        return [request_ids[position] for position in reply[1:]]

    async def finish(self, worker_id: str, endings: Sequence[Ending], messages: Sequence[GatewayMessage]) -> int:
        """Returns how many of their entries went now (a repeat finds none)."""
        keys: list[str] = []
        arguments: list[Any] = [worker_id, GROUP, RETAINED_SECONDS]
        for ending in endings:
            keys += [ending.queue, *self._pair(ending.request_id)]
            arguments += [ending.entry_id, ending.terminal_event]
        reply = await self._fenced_call("finish", worker_id, keys, [*arguments, *self._messages(messages)])
        return int(reply[1])

    async def cancel(
        self, request_id: str, priority_class: str, *, holder: str = "", gone_gateway_id: str = "",
        event: bytes = b"", blob: bytes = b"", only_unstarted: bool = False,
    ) -> bool:  # fmt: skip
        """For one holder, for all of a gateway that is gone, or for all there are. `event`: the end that a kept
        request gets, and `blob` its message to the gateways of holders. `only_unstarted`: not if a worker has it, or
        had it and left tokens."""
        queues = [self.keys.queue(name) for name in (priority_class, RESUMED, NEWER)]
        keys = [*self._pair(request_id), *self.keys.turns(priority_class), *queues]
        arguments: list[Any] = [request_id, GROUP, self.keys.control_channel_prefix, holder, event, blob]
        arguments += [self.keys.gateway_channel_prefix, RETAINED_SECONDS, gone_gateway_id, int(only_unstarted)]
        return bool(await self._call("cancel", keys, arguments))

    async def reap(self, worker_id: str, queue: str, entries: Sequence[PendingEntry], mode: ReapMode) -> ReapReply:
        keys = [self.keys.fence(worker_id), self.keys.dead_letters, self.keys.queue(RESUMED), queue, *self.keys.held]
        keys.append(self.keys.queue(NEWER))
        keys += self._pairs([entry.request_id for entry in entries])
        arguments: list[Any] = [worker_id, GROUP, mode, MAX_STRIKES, MAX_ATTEMPTS, KEEP_DEAD_SECONDS]
        arguments.append(self.keys.gateway_channel_prefix)
        for entry in entries:
            arguments += [entry.entry_id, entry.request_id, entry.error_event, entry.error_blob]
        return ReapReply(*(await self._call("reap", keys, arguments)))

    async def tick(self, seconds: float) -> float:
        """The fleet's clock, in seconds, which is at least the caller's count now."""
        return float(await self._call("tick", [self.keys.clock], [round(seconds * 1000)])) / 1000

    async def _fenced_call(self, name: str, worker_id: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        reply = await self._call(name, [self.keys.fence(worker_id), *keys], arguments)
        if reply[0] == b"FENCED":
            raise Fenced(f"{worker_id} has no fence in the store")
        return reply

    async def _call(self, name: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        return await self._scripts[name](keys=keys, args=arguments)

    def _pair(self, request_id: str) -> tuple[str, str]:
        return self.keys.request(request_id), self.keys.journal(request_id)

    def _pairs(self, request_ids: Iterable[str]) -> list[str]:
        request_prefix, journal_prefix = self._prefixes  # for 1,000 requests a step a third of the time of _pair()
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
