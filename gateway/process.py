"""What the gateway and the batch driver share as processes: event loop, clients of the store, tasks, and a clean end.

return run(settings, parent_pid, serve(settings))           # main()
return await serve_app(program, runner, addresses, ...)     # the end of serve()
"""

import asyncio
import logging
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from aiohttp import web

from gateway.freed_memory import return_large_buffers
from gateway.http.listener import Listener, listen
from gateway.http.state import STATE, GatewayState
from gateway.model_service import ModelOptions
from gateway.settings import GatewaySettings
from gateway.store.acceptance import QueueRules
from gateway.store.inference_client import InferenceClient
from shared.garbage_collection import search_rarely
from shared.logs import configure_logging
from shared.processes import ParentGone, exit_with_parent
from shared.redis_client import Observe, connect
from shared.redis_keys import RedisKeys
from shared.tasks import cancel_and_wait

logger = logging.getLogger("gateway")

new_event_loop: Callable[[], asyncio.AbstractEventLoop]
try:
    import uvloop

    new_event_loop = uvloop.new_event_loop  # sends the writes of one loop iteration together, in C (ADR 144)
except ImportError:  # uvloop has no build for this system
    new_event_loop = asyncio.new_event_loop

EXIT_FAILED, EXIT_CANNOT_START = 1, 2
CLOSE_SECONDS = 2.0  # for connections, after the drain
DRAIN_REPORT_SECONDS = 2.0
# Connections waiting for accept(). With aiohttp's default of 128 a burst of 1,000 clients overflows, and TCP retries
# after 1 s and 3 s. The kernel caps the value at net.core.somaxconn, 4,096 by default.
LISTEN_BACKLOG = 4096


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int  # 0: a free port, which is logged
    is_shared: bool = False  # with other processes (SO_REUSEPORT)


def run(settings: GatewaySettings, parent_pid: int, serving: Coroutine[Any, Any, int]) -> int:
    """Run `serving` on the event loop, with logs and memory set up. Return the exit status."""
    configure_logging(settings.log_format)
    if settings.exit_with_parent:
        try:
            exit_with_parent(parent_pid)
        except ParentGone:
            serving.close()
            return 0
    return_large_buffers()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(serving)


def refuse_start(program: str, reason: object) -> int:
    """Write why the program cannot start, and return the exit status."""
    sys.stderr.write(f"{program}: error: {reason}\n")
    return EXIT_CANNOT_START


def clients_of(
    settings: GatewaySettings, models: Sequence[ModelOptions], observe: Observe
) -> dict[ModelOptions, InferenceClient]:
    """Return one client per model, with connections of its own; all share one gateway id.

    Args:
        settings: The gateway's settings.
        models: The models to serve.
        observe: See redis_client.connect().
    """
    gateway_id = secrets.token_hex(8)
    rules = QueueRules(
        settings.max_num_queued_reqs,
        settings.max_num_queued_tokens,
        settings.prefix_affinity,
        settings.durable_accept_timeout_seconds if settings.durable_accept == "replica" else None,
    )
    clients = {}
    for options in models:
        keys = RedisKeys(options.name, settings.store_namespace)
        connections = connect(settings.redis_url, hash_tag=keys.hash_tag, observe=observe)
        clients[options] = InferenceClient(connections, keys, gateway_id, queue_rules=rules)
    return clients


# -- cleanup contexts of an application


async def inference_clients(app: web.Application) -> AsyncIterator[None]:
    """Run the clients of the store as long as the application."""
    state = app[STATE]
    for service in state.models:
        await service.client.start(state.owners)
    yield
    await state.background.finish()
    state.close()
    await asyncio.gather(*(service.client.close() for service in state.models))


def owner_task(
    name: str,
    work: Callable[[], Coroutine[Any, Any, None]],
    then: Callable[[], object] = lambda: None,
    *,
    may_return: Callable[[], bool] = lambda: False,
) -> Callable[[web.Application], AsyncIterator[None]]:
    """Return a cleanup context that runs a task as long as the application, and calls `then` after it."""

    async def context(app: web.Application) -> AsyncIterator[None]:
        task = app[STATE].owners.start(name, work(), may_return=may_return)
        yield
        await cancel_and_wait([task])
        then()

    return context


# -- from the start to the end of an application


async def serve_app(
    program: str,
    runner: web.AppRunner,
    addresses: Sequence[Address],
    settle: Callable[[], Coroutine[Any, Any, None]],
) -> int:
    """Serve until a signal or a failure, then drain.

    Args:
        program: Its name, for error messages.
        runner: Of the application; not set up.
        addresses: Where to listen.
        settle: Runs once the models are loaded.

    Returns:
        The exit status.
    """
    await runner.setup()
    state = runner.app[STATE]
    listeners: list[Listener] = []
    try:
        try:
            for address in addresses:
                listeners.append(await listen_at(runner, address, _names(state)))
        except OSError as error:
            sys.stderr.write(f"{program}: cannot listen on {error}\n")
            return EXIT_FAILED
        shared = [listener for listener, address in zip(listeners, addresses, strict=True) if address.is_shared]
        is_drained = await _until_drained(state, shared, settle)
        if state.owners.failed.is_set():
            _end_at_once(EXIT_CANNOT_START if state.owners.is_refused else EXIT_FAILED)
        return 0 if is_drained else EXIT_FAILED
    finally:
        await _close(listeners)
        await runner.cleanup()


async def listen_at(runner: web.AppRunner, address: Address, label: str) -> Listener:
    """Listen, and log the address with `label`. The message of the OSError that it raises names the address."""
    try:
        listener = await listen(
            address.host, address.port, _protocol_of(runner), backlog=LISTEN_BACKLOG, reuse_port=address.is_shared
        )
    except OSError as error:
        raise OSError(f"{address.host}:{address.port}: {error.strerror}") from error
    logger.info("listening on http://%s:%s", *listener.address, extra={"model": label})
    return listener


async def _close(listeners: Sequence[Listener]) -> None:
    for listener in listeners:
        await listener.close()


def _protocol_of(runner: web.AppRunner) -> web.Server:
    assert runner.server is not None, "the runner is set up"
    return runner.server


def _names(state: GatewayState) -> str:
    return ", ".join(service.name for service in state.models)


def _end_at_once(status: int) -> NoReturn:
    """Exit without cleanup, which could wait for the task that failed. Clients resume at another gateway."""
    logging.shutdown()
    os._exit(status)


async def _until_drained(
    state: GatewayState, shared: Sequence[Listener], settle: Callable[[], Coroutine[Any, Any, None]]
) -> bool:
    """Serve until a signal, then drain. Return False if the model cannot be served or an owner task failed.

    New requests get 503 `draining`, but on ports that are shared with other gateways, which get their connections.
    """
    settling = state.owners.start("settle", _settle(state, settle), may_return=lambda: True)
    try:
        if not await _until_signal(state):
            return False
    finally:
        settling.cancel()
    state.open_requests.draining = True
    await _close(shared)
    await _until_first(_drain(state), state.owners.failed.wait())
    return not state.owners.failed.is_set()


async def _drain(state: GatewayState) -> None:
    drain_seconds, waited_seconds = state.settings.drain_seconds, 0.0
    while waited_seconds < drain_seconds:
        step_seconds = min(DRAIN_REPORT_SECONDS, drain_seconds - waited_seconds)
        if await state.open_requests.wait_idle(step_seconds):
            return
        waited_seconds += step_seconds
        logger.info("drain: %d requests are open after %g s", state.open_requests.num_open, waited_seconds)
    if not await state.open_requests.wait_idle(0):
        logger.warning("drain: timeout reached after %g s; some streams are still open", drain_seconds)


async def _settle(state: GatewayState, then: Callable[[], Coroutine[Any, Any, None]]) -> None:
    await state.models_loaded.wait()
    search_rarely()
    await then()


async def _until_signal(state: GatewayState) -> bool:
    """Return whether a signal came; False if the model cannot be served or an owner task failed."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await _until_first(stop.wait(), state.model_failed.wait(), state.owners.failed.wait())
    return stop.is_set() and not state.owners.failed.is_set()


async def _until_first(*waits: Coroutine[Any, Any, object]) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_and_wait(tasks)
