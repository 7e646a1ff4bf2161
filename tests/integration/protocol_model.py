"""A small fleet with injected faults, built from the product's transport and a real server.

Only the engine, the clients, and the faults are simulated. The engine draws random tokens, so attempts never agree.
Faults: lost replies to applied commands, lost pub/sub messages, kills at any await, workers that sleep until they are
reaped and then continue, repeated ACCEPT calls, cancels, requests that crash their worker, and failovers to a replica
that lacks the last writes. `run_world` raises Violation if a client's stream differs from the journal, or if anything
remains in the store. After a failover, answers that ended right before it are not compared, because a replica may lack
their ends, and a stream may end with the error that says that its tokens were lost.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, cast

from redis.asyncio import Redis
from redis.exceptions import ConnectionError

from engine_worker.transport.claims import Claims
from engine_worker.transport.reaper import Reaper
from engine_worker.transport.request_stream import RequestStream
from engine_worker.transport.token_publisher import TokenPublisher
from gateway.store.inbox import Inbox, StreamState
from gateway.store.inference_client import InferenceClient
from gateway.store.recovery import DIVERGED_MESSAGE
from gateway.store.store_calls import StoreUnavailable
from shared.messages import (
    ErrorEvent,
    FinishEvent,
    FinishReason,
    FormatError,
    GenerationRequest,
    SamplingParams,
    TokenEvent,
    Usage,
    WorkerHeartbeat,
    WorkerPhase,
    decode_event_batch,
    decode_terminal_event,
    encode,
    journal_choices,
)
from shared.new_requests import Share
from shared.reaping import list_worker_ids, reap_worker
from shared.redis_client import RedisConnections, connect
from shared.redis_keys import GROUP, RedisKeys
from shared.redis_scripts import Demand, Fenced, GatewayMessage, QueueEntry, RedisScripts
from shared.subscription import Message, Subscription
from shared.tasks import cancel_and_wait
from tests.engine_worker.transport.presence import FixedPresence
from tests.inbox_reader import InboxReader

LOST_REPLY_RATIO = 0.10
LOST_MESSAGE_RATIO = 0.15
SPEED = 20  # the product's timeouts pass 20 times as fast
CAPACITY = 4  # sequences per worker
GIVEN_BACK_RATIO = 0.1
MAX_CUT_OFFS = 5  # per request: it must progress between two, or it would never end
CUT_OFF = b"cut off: "  # published on a gateway's channel with the id of a request whose journal was deleted
POISON_AT_ONCE, POISON_LATER, POISON_LATER_INDEX = 666, 667, 3


class Violation(AssertionError):
    """The protocol broke a guarantee."""


class FailingStore(Protocol):
    async def catch_up(self) -> None: ...
    async def fail_over(self) -> None: ...
    async def resume(self) -> None: ...


class Crash(Exception):
    """A simulated engine crash caused by a poisonous request."""


@dataclass
class Faults:
    """Differences from the product: none, or one mutant."""

    lua: Mapping[str, str] | None = None
    publishes_before_journal: bool = False
    inbox_class: type[Inbox] = Inbox
    never_rereads: bool = False
    failover_seconds: float = 0.0  # maximum interval between failovers; 0 disables them
    # Maximum interval between cut-offs of gateways; 0 disables them. A returning gateway would hide that a mutant has
    # lost its request, and some mutants must be detected by zombies alone.
    cut_off_seconds: float = 0.04
    claims_what_runs: bool = False  # also claims second entries, which the worker then ignores
    num_spared_workers: int = 1  # never killed: only these show whether entries of lost reads are found again

    @property
    def stream_class(self) -> type[RequestStream]:
        if self.claims_what_runs:
            return HastyRequestStream
        return ForgetfulRequestStream if self.never_rereads else RequestStream


@dataclass
class Tally:
    requests: int = 0
    kills: int = 0
    crashes: int = 0
    fenced: int = 0
    cancels: int = 0
    cut_offs: int = 0
    given_back: int = 0
    failovers: int = 0
    torn: int = 0  # streams that ended with the error that their tokens were lost
    lost_replies: int = 0
    lost_messages: int = 0
    journal_reads: int = 0
    events: int = 0
    repeated_tokens: int = 0
    dead_letters: int = 0
    innocent_dead_letters: int = 0
    homes: int = 0  # prefixes that have one at the end
    last_progress: float = field(default_factory=time.monotonic)


def fast_clock() -> float:
    return time.monotonic() * SPEED


async def fast_sleep(seconds: float) -> None:
    await asyncio.sleep(seconds / SPEED)


class LossyScripts(RedisScripts):
    """Applies every script and sometimes loses its reply."""

    def __init__(self, world: "World", connections: RedisConnections) -> None:
        super().__init__(connections.commands, world.keys, world.faults.lua)
        self._world = world

    async def emit(self, worker_id: str, step: int, frames: Any, messages: Sequence[GatewayMessage]) -> list[str]:
        if self._world.faults.publishes_before_journal:
            for message in messages:
                await self.redis.publish(self.keys.gateway_channel(message.gateway_id), message.blob)
            messages = []
        return await super().emit(worker_id, step, frames, messages)

    async def cancel(self, request_id: str, *arguments: Any, **options: Any) -> bool:
        try:
            return await super().cancel(request_id, *arguments, **options)
        finally:  # also after a lost reply: the next journal of the request is a new one
            await self.redis.publish(self.keys.gateway_channel("gateway0"), CUT_OFF + request_id.encode())

    async def _call(self, *arguments: Any) -> Any:
        reply = await super()._call(*arguments)
        self._world.maybe_lose_reply()
        return reply


class LossyReader:
    def __init__(self, world: "World", redis: Any) -> None:
        self._world = world
        self._redis = redis

    async def xreadgroup(self, *arguments: Any, **options: Any) -> Any:
        reply = await self._redis.xreadgroup(*arguments, **options)
        self._world.maybe_lose_reply()
        return reply


class LossyClient(InferenceClient):
    def __init__(self, world: "World", gateway_id: str) -> None:
        scripts = LossyScripts(world, world.connections)
        super().__init__(world.connections, world.keys, gateway_id, clock=fast_clock, scripts=scripts)
        self.gateway_id = gateway_id
        self._world = world
        self._handle = self._listening.handle_message
        self._listening.handle_message = self._handle_message  # type: ignore[method-assign]

    async def _handle_message(self, message: Message) -> None:
        if message.data.startswith(CUT_OFF):
            return  # a message for the auditor
        if self._world.random.random() < LOST_MESSAGE_RATIO:
            self._world.tally.lost_messages += 1
        else:
            await self._handle(message)


class GapBlindInbox(Inbox):
    __slots__ = ()

    def _take(self, choice: Any, start: int, *rest: Any) -> bool:
        return super()._take(choice, min(start, len(choice.tokens)), *rest)


class TrustingInbox(Inbox):
    """Takes a journal with other tokens than its reader has."""

    __slots__ = ()

    def _differs(self, choices: Any, terminal: Any) -> bool:
        return False


class ForgetfulRequestStream(RequestStream):
    async def _reread_own_pending(self) -> None:
        return None


class HastyRequestStream(RequestStream):
    @property
    def _claimable(self) -> list[QueueEntry]:
        return self._backlog

    def _judge(self, entry: QueueEntry, *rest: Any) -> None:
        if self._claims.get(entry.request_id) is None:
            super()._judge(entry, *rest)


class SimulatedWorker:
    """One worker process with several incarnations, until it is killed or crashes."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.worker_id = ""
        self.awake = asyncio.Event()
        self.awake.set()
        self.killed = asyncio.Event()

    async def run(self) -> None:
        connections = connect(self.world.url)
        try:
            while True:
                try:
                    await self._live(connections)
                except Fenced:
                    self.world.tally.fenced += 1
        finally:
            await connections.aclose()

    async def _live(self, connections: RedisConnections) -> None:
        world = self.world
        scripts = LossyScripts(world, connections)
        self.worker_id = f"w.{world.random.getrandbits(64):x}"
        await world.until_answered(lambda: scripts.register(self.worker_id))
        claims = Claims()
        reader = replace(connections, blocking=cast(Redis, LossyReader(world, connections.blocking)))
        stream_class = world.faults.stream_class
        requests = stream_class(reader, scripts, self.worker_id, claims, clock=fast_clock)
        tokens = TokenPublisher(scripts, self.worker_id, claims, sleep=fast_sleep)
        running: dict[str, tuple[GenerationRequest, list[int]]] = {}
        while True:
            await self.awake.wait()
            claimed = await requests.claim(world.draw_demand(CAPACITY - len(running)), block=not running)
            given_back = {claim.request.request_id for claim in claimed if world.random.random() < GIVEN_BACK_RATIO}
            for claim in claimed:
                if claim.request.request_id not in given_back:
                    running[claim.request.request_id] = (claim.request, list(claim.stored[0].token_ids))
            if given_back:
                await world.give_back(requests, given_back)
            events = [event for request, output in running.values() for event in self._sample(request, output)]
            await asyncio.sleep(world.random.random() * 0.003)
            await self.awake.wait()  # a zombie wakes up here with a computed step
            cancelled = await tokens.emit(events)
            endings = [_ending(*running[request_id], FinishReason.CANCELLED) for request_id in cancelled]
            endings += [
                _ending(request, output, FinishReason.LENGTH)
                for request_id, (request, output) in running.items()
                if len(output) >= request.sampling.max_tokens and request_id not in cancelled
            ]
            await tokens.finish(endings)
            for ending in endings:
                del running[ending.request_id]

    def _sample(self, request: GenerationRequest, output: list[int]) -> list[TokenEvent]:
        kind = request.prompt_token_ids[0]
        if kind == POISON_AT_ONCE or (kind == POISON_LATER and len(output) == POISON_LATER_INDEX):
            raise Crash
        if len(output) >= request.sampling.max_tokens:
            return []  # the previous attempt died between its last token and FINISH
        output.append(self.world.random.randrange(50_000))
        return [TokenEvent(request.request_id, len(output) - 1, output[-1:])]


def _ending(request: GenerationRequest, output: list[int], reason: FinishReason) -> FinishEvent:
    usage = Usage(prompt_tokens=len(request.prompt_token_ids), completion_tokens=len(output))
    return FinishEvent(request.request_id, reason, usage)


class World:
    def __init__(self, url: str, keys: RedisKeys, seed: int, faults: Faults) -> None:
        self.url = url
        self.keys = keys
        self.random = random.Random(seed)
        self.faults = faults
        self.tally = Tally()
        self.connections = connect(url)
        self.scripts = LossyScripts(self, self.connections)
        self.gateways = [LossyClient(self, f"gateway{number}") for number in range(3)]
        self.workers = [SimulatedWorker(self) for _ in range(4)]
        self.worker_tasks: dict[int, asyncio.Task[None]] = {}
        self.answers: dict[str, list[int]] = {}  # tokens that clients received, without cancelled requests
        self.endings: dict[str, FinishEvent | ErrorEvent] = {}
        self.poisons: set[str] = set()
        self.cancelled: set[str] = set()
        self.cut_offs: Counter[str] = Counter()
        self.published: list[TokenEvent] = []
        self.ended_at: dict[str, float] = {}
        self.failing_over = asyncio.Lock()
        self.gaps_at_failover = [-1] * len(self.gateways)

    def maybe_lose_reply(self) -> None:
        if self.random.random() < LOST_REPLY_RATIO:
            self.tally.lost_replies += 1
            raise ConnectionError("the reply was lost")

    async def until_answered(self, call: Callable[[], Any]) -> Any:
        while True:
            try:
                return await call()
            except ConnectionError:
                await asyncio.sleep(0)

    # -- sharing

    def draw_demand(self, num_free: int) -> Demand:
        """Return a demand; sometimes with an absurd number."""
        room = self.random.choice([num_free, num_free, num_free, 0, 10**9]) if num_free else 0
        return Demand(num_free, room=room)

    async def give_back(self, requests: RequestStream, request_ids: set[str]) -> None:
        self.tally.given_back += len(request_ids)
        await requests.unclaim(request_ids)

    # -- disasters

    async def _go_on(self, num_events: int) -> None:
        """Wait for progress between faults. Otherwise a busy machine would kill every attempt of a request."""
        due = self.tally.events + num_events
        while self.tally.events < due:
            await asyncio.sleep(0.002)

    async def keep_worker(self, slot: int) -> None:
        """Supervise one worker: when it ends, requeue its requests and start a new one."""
        while True:
            self.workers[slot] = worker = SimulatedWorker(self)
            self.worker_tasks[slot] = task = asyncio.create_task(worker.run())
            killed = asyncio.create_task(worker.killed.wait())
            try:
                await asyncio.wait([task, killed], return_when=asyncio.FIRST_COMPLETED)
            finally:
                await cancel_and_wait([task, killed])
            if not task.cancelled() and not isinstance(task.exception(), Crash):
                raise task.exception() or RuntimeError("a worker ended by itself")
            self.tally.crashes += not task.cancelled()
            await asyncio.sleep(self.random.random() * 0.02)
            await self.until_answered(partial(reap_worker, self.scripts, worker.worker_id))

    async def bring_disasters(self) -> None:
        while True:
            await asyncio.sleep(self.random.random() * 0.08)
            await self._go_on(12)
            slot = self.random.randrange(self.faults.num_spared_workers, len(self.workers))
            if self.random.random() < 0.5:
                self.tally.kills += 1
                self.workers[slot].killed.set()
            else:
                worker = self.workers[slot]
                worker.awake.clear()
                await asyncio.sleep(self.random.random() * 0.01)
                await self.until_answered(partial(reap_worker, self.scripts, worker.worker_id))
                await asyncio.sleep(self.random.random() * 0.03)
                worker.awake.set()

    async def cut_off_gateways(self) -> None:
        """End requests of gateways that seemed to be gone and return at once."""
        while True:
            await asyncio.sleep(self.random.random() * self.faults.cut_off_seconds)
            await self._go_on(3)
            client = self.random.choice(self.gateways)
            accepted = [stream.request for stream in client.streams if stream.state is not StreamState.PENDING]
            candidates = [request for request in accepted if self.cut_offs[request.request_id] < MAX_CUT_OFFS]
            if not candidates:
                continue
            request, gateway_id = self.random.choice(candidates), client.gateway_id
            self.tally.cut_offs += 1
            self.cut_offs[request.request_id] += 1
            with suppress(ConnectionError):  # a lost reply, or no store
                await self.scripts.cancel(request.request_id, request.priority_class, gone_gateway_id=gateway_id)
            client.streams.need_journals(client.streams.of(request.request_id))

    async def fail_over(self, store: "FailingStore") -> None:
        while True:
            await asyncio.sleep(self.random.random() * self.faults.failover_seconds)
            await self._go_on(50)
            async with self.failing_over:
                replicated_at = time.monotonic()  # what ends later may be lost
                await store.catch_up()
                await asyncio.sleep(self.random.random() * 0.02)
                await store.fail_over()
                self.tally.failovers += 1
                self.gaps_at_failover = [client.counts.num_gaps for client in self.gateways]
                for request_id in [name for name, ended_at in self.ended_at.items() if ended_at > replicated_at]:
                    self.answers.pop(request_id, None)
                await store.resume()

    def _knows_the_store(self, client: InferenceClient) -> bool:
        """Return whether the gateway has heard of the last failover: before, it may pass on ends that are lost."""
        number = next(number for number, gateway in enumerate(self.gateways) if gateway is client)
        return client.counts.num_gaps > self.gaps_at_failover[number]

    async def _reap_silent(self) -> None:
        """Reap what no worker is any longer: the replica may lack its end, or the step that its worker waits for."""
        for worker_id in await list_worker_ids(self.connections.commands, self.keys):
            if worker_id not in {worker.worker_id for worker in self.workers}:
                await reap_worker(self.scripts, worker_id)

    async def reap_zombies(self) -> None:
        """Run the product's reaper without heartbeats; bring_disasters() decides which workers die.

        After a failover, workers also end silently.
        """
        reaper = Reaper(self.connections, self.keys, FixedPresence())
        while True:
            await asyncio.sleep(0.1)
            await reaper.tick(could_hear=False)
            if self.faults.failover_seconds:
                await self.until_answered(self._reap_silent)

    async def send_heartbeats(self) -> None:
        """Let gateways know of several ready workers: then they wake workers, and ACCEPT names homes."""
        while True:
            for number in range(2):
                beat = encode(WorkerHeartbeat(worker_id=f"known.{number}", phase=WorkerPhase.READY))
                with suppress(ConnectionError):
                    await self.connections.commands.publish(self.keys.heartbeat_channel, beat)
            await asyncio.sleep(0.1)

    # -- clients

    async def be_client(self, num_requests: int) -> None:
        for _ in range(num_requests):
            request, client = self._draw_request(), self.random.choice(self.gateways)
            try:
                share = Share(self.random.choice(["", "a", "b"]))  # the key whose turns the request uses
                (stream,) = await client.submission.submit_all([request], share=share)
            except StoreUnavailable:
                self.cancelled.add(request.request_id)  # three lost replies in a row: the client received a 503
                continue
            self.tally.requests += 1
            await self._read(client, stream)
            self.tally.repeated_tokens += stream.num_repeated_tokens

    def _draw_request(self) -> GenerationRequest:
        kind = self.random.choices([1, POISON_AT_ONCE, POISON_LATER], [0.97, 0.015, 0.015])[0]
        request_id = f"{self.random.getrandbits(128):032x}"
        if kind != 1:
            self.poisons.add(request_id)
        return GenerationRequest(
            request_id=request_id,
            prompt_token_ids=[kind, 2, 3],
            prefix_key=bytes([self.random.randrange(3)]) * 8,
            sampling=SamplingParams(max_tokens=self.random.randint(4 if kind != 1 else 1, 25), seed=0),
            priority_class=self.random.choice(["interactive", "batch"]),
        )

    async def _read(self, client: InferenceClient, stream: Inbox) -> None:
        stream.__class__ = self.faults.inbox_class
        request_id = stream.request_id
        cancel_at = self.random.randrange(20) if self.random.random() < 0.1 else None
        if cancel_at is None and self.random.random() < 0.1:
            await self._accept_again(stream.request)
        tokens: list[int] = []
        terminal = None
        async for event in InboxReader(stream):
            self.tally.events += 1
            self.tally.last_progress = time.monotonic()
            _require(terminal is None, f"{request_id} got {event} after its end")
            if isinstance(event, TokenEvent):
                _require(event.index == len(tokens), f"{request_id} got index {event.index} at {len(tokens)}")
                tokens += event.token_ids
                if cancel_at is not None and len(tokens) >= cancel_at:
                    self.tally.cancels += 1
                    self.cancelled.add(request_id)
                    await client.submission.release(stream)
            else:
                terminal = event
        if terminal is None:
            raise Violation(f"{request_id} has no end")
        if self.faults.failover_seconds and is_torn(terminal):
            self.tally.torn += 1
        elif request_id not in self.cancelled and self._knows_the_store(client):
            self.answers[request_id], self.endings[request_id] = tokens, terminal
            self.ended_at[request_id] = time.monotonic()
            if not self.faults.failover_seconds:
                await self._check_answer(request_id)  # check_answers() repeats this at the end to detect later writes

    async def _accept_again(self, request: GenerationRequest) -> None:
        again = self.scripts.accept(
            request.request_id, encode(request), gateway_id="gateway0", priority_class=request.priority_class
        )
        with suppress(ConnectionError):
            await again

    # -- promises

    async def watch_progress(self, stall_seconds: float) -> None:
        while True:
            await asyncio.sleep(0.1)
            _require(time.monotonic() - self.tally.last_progress < stall_seconds, "stalled: no stream makes progress")

    async def listen_to_all(self) -> None:
        """Audit messages without losses: everything that is published must be in the journal."""
        connections = connect(self.url)
        channels = [self.keys.gateway_channel(f"gateway{number}") for number in range(len(self.gateways))]
        subscription = Subscription(connections.subscriber, channels)
        try:
            while True:
                message = await subscription.get(1.0)
                if isinstance(message, Message):
                    self._note(message.data)
        finally:
            await subscription.aclose()
            await connections.aclose()

    def _note(self, data: bytes) -> None:
        if data.startswith(CUT_OFF):  # earlier messages belong to a journal that no longer exists
            request_id = data.removeprefix(CUT_OFF).decode()
            self.published = [event for event in self.published if event.request_id != request_id]
        else:
            events = decode_event_batch(data).events
            self.published += [event for event in events if isinstance(event, TokenEvent)]

    async def check_answers(self) -> None:
        """Check that each answer is in its journal, and each published token too, unless the store lost some."""
        journals = {request_id: await self._check_answer(request_id) for request_id in self.answers}
        for event in self.published if not self.faults.failover_seconds else []:
            if (journal := journals.get(event.request_id)) is not None:
                held = journal[event.index : event.index + len(event.token_ids)]
                _require(held == event.token_ids, f"{event.request_id}: published tokens are not in the journal")

    async def _check_answer(self, request_id: str) -> list[int]:
        """Check one response and return the tokens of its journal."""
        stored: Any = await self.connections.commands.get(self.keys.journal(request_id))
        journal = self._decoded_journal(request_id, stored or b"")
        answer = self.answers[request_id]
        if self.faults.failover_seconds and isinstance(self.endings[request_id], ErrorEvent):
            answer = answer[: len(journal)]  # the last tokens were lost, and never generated again
        _require(answer == journal, f"{request_id}: the client's stream is not the journal: {answer}, {journal}")
        await self._check_end(request_id, len(journal))
        return journal

    def _decoded_journal(self, request_id: str, stored: bytes) -> list[int]:
        try:
            return journal_choices(stored, 1)[0].token_ids
        except FormatError as error:
            raise Violation(f"{request_id}: the journal is unreadable: {error}") from error

    async def _check_end(self, request_id: str, num_tokens: int) -> None:
        terminal = self.endings[request_id]
        stored: dict[Any, Any] = await self.connections.commands.hgetall(self.keys.request(request_id))
        _require(stored.get(b"state") == b"done", f"{request_id} ended but is not done")
        _require(decode_terminal_event(stored[b"terminal"]) == terminal, f"{request_id}: another end is stored")
        if isinstance(terminal, FinishEvent):
            _require(terminal.usage.completion_tokens == num_tokens, f"{request_id}: usage is wrong")
            _require(request_id not in self.poisons, f"{request_id} is poison and finished")
            return
        _require(int(stored[b"strikes"]) >= 3 or int(stored[b"attempt"]) >= 10, f"{request_id}: given up too early")

    async def check_store_is_empty(self, timeout_seconds: float) -> None:
        """Wait until the store is empty, because cancelled entries may need another claim or read to go."""
        redis = self.connections.commands
        deadline = time.monotonic() + timeout_seconds
        while True:
            left = {queue: await redis.xlen(queue) for queue in self.keys.queues}
            pending = {queue: (await redis.xpending(queue, GROUP))["pending"] for queue in self.keys.queues}
            names = await list_worker_ids(redis, self.keys)
            unfenced = [name for name in names if not await redis.exists(self.keys.fence(name))]
            if not any([*left.values(), *pending.values(), *unfenced]):
                return
            _require(time.monotonic() < deadline, f"left in the store: {left}, pending {pending}, zombies {unfenced}")
            await asyncio.sleep(0.05)


def is_torn(terminal: FinishEvent | ErrorEvent) -> bool:
    return isinstance(terminal, ErrorEvent) and terminal.message == DIVERGED_MESSAGE


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise Violation(message)


async def run_world(
    url: str,
    keys: RedisKeys,
    *,
    seed: int,
    num_clients: int,
    requests_per_client: int,
    faults: Faults,
    stall_seconds: float,
    store: FailingStore | None = None,
) -> Tally:
    world = World(url, keys, seed, faults)
    for gateway in world.gateways:
        await gateway.start()
    background = [
        asyncio.create_task(world.listen_to_all()),
        asyncio.create_task(world.watch_progress(stall_seconds)),
        asyncio.create_task(world.reap_zombies()),
        asyncio.create_task(world.send_heartbeats()),
        *(asyncio.create_task(world.keep_worker(slot)) for slot in range(len(world.workers))),
    ]
    disasters = asyncio.create_task(_after_start(world))
    if faults.cut_off_seconds:
        background.append(asyncio.create_task(world.cut_off_gateways()))
    if store is not None:
        background.append(asyncio.create_task(world.fail_over(store)))
    clients = asyncio.gather(*(world.be_client(requests_per_client) for _ in range(num_clients)))
    try:
        await asyncio.wait(
            list[asyncio.Future[Any]]((clients, disasters, *background)), return_when=asyncio.FIRST_COMPLETED
        )
        for task in (disasters, *background):
            if task.done():
                task.result()
        await clients
        disasters.cancel()
        background[1].cancel()
        if store is not None:
            async with world.failing_over:
                await cancel_and_wait([background[-1]])
        for worker in world.workers:
            worker.awake.set()
        await world.check_answers()
        given_up = [request_id for request_id, end in world.endings.items() if isinstance(end, ErrorEvent)]
        world.tally.dead_letters = len(given_up)
        world.tally.innocent_dead_letters = len(set(given_up) - world.poisons)
        await world.check_store_is_empty(stall_seconds)
        world.tally.homes = await world.connections.commands.hlen(keys.homes)
    finally:
        world.tally.journal_reads = sum(gateway.counts.num_journal_reads for gateway in world.gateways)
        clients.cancel()
        await asyncio.gather(clients, return_exceptions=True)
        await cancel_and_wait([disasters, *background])
        await cancel_and_wait(world.worker_tasks.values())
        for gateway in world.gateways:
            await gateway.close()
        await world.connections.aclose()
    return world.tally


async def _after_start(world: World) -> None:
    while len(world.worker_tasks) < len(world.workers):
        await asyncio.sleep(0)
    await world.bring_disasters()
