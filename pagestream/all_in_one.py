"""`pagestream serve`: a store, gateways, and workers as child processes, from start to an orderly stop.

    start   store -> gateways (so that /ready reports the progress) -> models -> workers -> the first READY -> banner
    watch   a dead child is restarted; the requests of a dead worker are requeued before its successor starts
    batches their driver starts with the first batch; without it everything else continues
    stop    gateways (open streams end) -> workers -> store, on Ctrl-C, SIGTERM, or if a child cannot be kept alive

Only the order is here: process_supervisor.py runs children, embedded_store.py the store, served_models.py the models.
"""

import asyncio
import contextlib
import itertools
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from secrets import token_hex

from pagestream import banner
from pagestream.address import (
    AddressInUse,
    base_url,
    ready_status,
    require_free_metrics_ports,
    require_free_port,
)
from pagestream.child_checks import ChildRefused, check_children
from pagestream.child_commands import WORKER_ID_PREFIX, ChildCommands, fleet_prefix, usable_cores, worker_base_id
from pagestream.child_process import ChildCommand
from pagestream.directories import state_directory
from pagestream.embedded_store import EmbeddedStore, StoreError
from pagestream.fleet_link import FleetLink
from pagestream.former_fleets import FleetFiles
from pagestream.gateway_count import GatewayCount, count_gateways, counts_for_keys
from pagestream.gguf_model import ModelUnavailable
from pagestream.gpus import check_gpus, visible_gpus
from pagestream.installation import foreign_packages
from pagestream.phases import PhaseConsole
from pagestream.process_supervisor import ChildGaveUp, ProcessSupervisor, SupervisedChild
from pagestream.restart_policy import CANNOT_START, GiveUp, RestartPolicy
from pagestream.serve_settings import PassedFlags, ServeSettings
from pagestream.served_models import ServedModel, served_models
from shared.messages import WorkerHeartbeat, WorkerPhase
from shared.model_files import ModelFilesError
from shared.model_identity import ModelDiffers, files_identity
from shared.models_file import models_text
from shared.open_batches import has_open_batch
from shared.redis_keys import RedisKeys
from shared.settings import SettingsError
from shared.ticks import next_tick

STOP_MARGIN_SECONDS = 5.0  # beyond the children's own drain time: closing connections, ending threads
GATEWAY_POLL_SECONDS, READY_POLL_SECONDS = 0.1, 0.02
BATCH_POLL_SECONDS = 1.0
HTTP_OK = 200
PROBES_A_GATEWAY = 6  # e^-6: a gateway is missed once in 400 starts
_GATEWAY_RANK, _WORKER_RANK = 0, 1
_IS_INFO = re.compile(r"[\d:]+ INFO ")  # a line of shared/logs.py


def serve(settings: ServeSettings, flags: PassedFlags, config_path: Path | None) -> int:
    """Serve until Ctrl-C or SIGTERM.

    Returns:
        The exit status: 0 after a signal, 1 if a part could not be started or kept alive, 2 if the settings do not fit
        the store.
    """
    console = PhaseConsole(sys.stdout)
    try:
        asyncio.run(_until_signal(settings, flags, config_path, console))
    except (StoreError, ModelUnavailable, SettingsError, ChildGaveUp, AddressInUse) as error:
        console.print(f"pagestream serve: {error}")
        return error.exit_status if isinstance(error, ChildGaveUp) else 1
    except (ModelDiffers, ChildRefused) as error:
        console.print(f"pagestream serve: {error}")
        return CANNOT_START
    return 0


async def _until_signal(
    settings: ServeSettings, flags: PassedFlags, config_path: Path | None, console: PhaseConsole
) -> None:
    """Serve; the first signal starts an orderly stop, a second one kills the remaining children."""
    all_in_one = _AllInOne(settings, flags, config_path, console)
    serving = asyncio.create_task(all_in_one.run())
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if serving.cancelling():
            all_in_one.supervisor.kill()
        else:
            serving.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    with contextlib.suppress(asyncio.CancelledError):
        await serving


@dataclass
class _AllInOne:
    settings: ServeSettings
    flags: PassedFlags
    config_path: Path | None
    console: PhaseConsole
    supervisor: ProcessSupervisor = field(default_factory=ProcessSupervisor)
    fleet_id: str = field(default_factory=lambda: token_hex(4))
    workers: dict[str, SupervisedChild] = field(default_factory=dict)  # by the id of the current process
    teams: list[list[SupervisedChild]] = field(default_factory=list)  # the workers of each model
    gateway_starts: asyncio.Event = field(default_factory=asyncio.Event)  # a gateway was started or restarted
    worker_is_ready: asyncio.Event = field(default_factory=asyncio.Event)  # another worker is ready

    async def run(self) -> None:
        started_at = time.monotonic()
        settings = self.settings
        models = served_models(settings)
        gpus = [] if self.flags.is_for_cpu else visible_gpus(os.environ)
        check_gpus(models, gpus)
        require_free_port(settings.host, settings.port)
        num_workers = sum(model.num_workers for model in models)
        metrics_ports = [settings.metrics_port_of(number) for number in range(num_workers)]
        require_free_metrics_ports(metrics_ports)
        gateways = self._count_gateways(num_workers, gpus)
        settings = self.settings = replace(settings, gateways=gateways.number)
        await self._check(models)
        self.console.print(banner.opening([model.name for model in models], gateways, num_workers))
        async with (
            self._foreign_packages_reported(),
            self._store() as (url, is_fresh),
            self._links(url, models) as links,
            self._children_stopped_at_the_end(),
        ):
            if is_fresh:
                for link in links:
                    await link.reap(WORKER_ID_PREFIX)  # workers of the previous store died with it
            for link, model in zip(links, models, strict=True):
                await self._refuse_other_model(link, model)
            with _models_file(models if settings.models_file else ()) as path:
                commands = ChildCommands(settings, self.flags, self.config_path, models, url, path)
                await self._start(models, links, commands)
                await self.supervisor.while_all_live(self._until_ready())
                address = base_url(settings.host, settings.port)
                self.supervisor.watch(self._drive_batches(commands), name="watch for batches")
                self.console.print(banner.ready(address, models[0].name, time.monotonic() - started_at, metrics_ports))
                await self.supervisor.while_all_live(asyncio.Event().wait())

    async def _check(self, models: Sequence[ServedModel]) -> None:
        """Raise ChildRefused for settings that a gateway or a worker would refuse after the store has started."""
        settings = self.settings
        with _models_file(models if settings.models_file else ()) as path:
            commands = ChildCommands(settings, self.flags, self.config_path, models, settings.redis_url, path)
            numbered = itertools.accumulate((model.num_workers for model in models[:-1]), initial=0)
            workers = [
                commands.worker(model, number, WORKER_ID_PREFIX) for model, number in zip(models, numbered, strict=True)
            ]
            await check_children([commands.gateway("gateway"), *workers])

    async def _refuse_other_model(self, link: FleetLink, model: ServedModel) -> None:
        """Raise ModelDiffers before one of our gateways uses workers of another model.

        A model that is not downloaded yet is compared by its workers.
        """
        load_format = self.flags.load_format(os.environ, self.config_path)
        try:
            identity = await asyncio.to_thread(files_identity, model.source.directory, load_format)
        except (ModelFilesError, OSError):
            return
        await link.refuse_other_model(identity)

    def _count_gateways(self, num_workers: int, gpus: Sequence[str]) -> GatewayCount:
        return count_gateways(
            self.settings.gateways,
            num_workers=num_workers,
            gpus=gpus,
            num_cores=usable_cores(),
            counts_for_keys=counts_for_keys(self.flags, os.environ, self.config_path),
        )

    @asynccontextmanager
    async def _foreign_packages_reported(self) -> AsyncIterator[None]:
        """Report them beside the start, and also if the start fails, because they may be the cause."""
        report = asyncio.create_task(self._report_foreign_packages())
        try:
            yield
        finally:
            await report

    async def _report_foreign_packages(self) -> None:
        for foreign in await asyncio.to_thread(foreign_packages):
            self.console.print(f"  warning   {foreign.message}\n            -> {foreign.hint}")

    @asynccontextmanager
    async def _store(self) -> AsyncIterator[tuple[str, bool]]:
        """Yield the URL of the store, and whether it was just started. An embedded one is kept alive."""
        if self.settings.redis_url:
            yield self.settings.redis_url, False
            return
        store = EmbeddedStore.at(state_directory() / "store", self.settings.store_max_memory_bytes)
        started_at = time.monotonic()
        is_fresh = await store.start()
        verb = "started" if is_fresh else "found running"
        self.console.print(f"  store     {verb} in {time.monotonic() - started_at:.1f} s: {store.url}")
        self.supervisor.watch(self._keep_alive(store), name="store")
        try:
            yield store.url, is_fresh
        finally:
            await store.stop()

    async def _keep_alive(self, store: EmbeddedStore) -> None:
        """Restart the store when it dies. Children reconnect and find all data of the append-only file."""
        deaths = RestartPolicy()
        while True:
            last_lines = await store.wait_until_gone()
            answer = deaths.after_death(time.monotonic(), exit_status=0, was_ready=True)
            if isinstance(answer, GiveUp):
                raise StoreError(f"embedded store: not restarted: {answer.reason}\n{last_lines}")
            self.console.print("  store     died")
            await asyncio.sleep(answer.delay_seconds)
            await store.start()
            self.console.print("  store     started again")

    @asynccontextmanager
    async def _links(self, url: str, models: Sequence[ServedModel]) -> AsyncIterator[list[FleetLink]]:
        async with AsyncExitStack() as stack:
            yield [await stack.enter_async_context(self._link(url, model.name)) for model in models]

    @asynccontextmanager
    async def _link(self, url: str, name: str) -> AsyncIterator[FleetLink]:
        link = FleetLink(url, RedisKeys(name, self.settings.store_namespace), self._on_heartbeat)
        try:
            if problem := await link.store_answers():
                raise StoreError(f"--redis-url: the store at {url} does not answer: {problem}")
            self.supervisor.watch(link.run(), name="link to the store")
            files = FleetFiles(state_directory() / "fleets", url, name)
            await _reap_former_fleets(link, files)
            with files.hold(self.fleet_id):
                yield link
        finally:
            await link.aclose()

    @asynccontextmanager
    async def _children_stopped_at_the_end(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            self.console.print("stopping the gateway, then the workers")
            await self.supervisor.stop(self.settings.drain_seconds + STOP_MARGIN_SECONDS)

    async def _start(self, models: Sequence[ServedModel], links: Sequence[FleetLink], commands: ChildCommands) -> None:
        gateways = [self._gateway(number, commands) for number in range(self.settings.num_gateways)]
        for gateway in gateways:
            self.supervisor.start(gateway, stop_rank=_GATEWAY_RANK)
        self.supervisor.watch(self._watch_gateways(gateways), name="watch over the gateways")
        numbers = itertools.count()  # of all workers
        for model, link in zip(models, links, strict=True):
            await self.supervisor.while_all_live(self._prepare(link, model))
            team = [self._worker(next(numbers), model, commands, link) for _ in range(model.num_workers)]
            self.teams.append(team)
            for worker in team:
                self.supervisor.start(worker, stop_rank=_WORKER_RANK)

    async def _prepare(self, link: FleetLink, model: ServedModel) -> None:
        def report(phase: str, progress: float, detail: str) -> None:
            self.console.update("model", phase, progress, detail)
            link.announce(WorkerPhase(phase), progress, detail)

        await model.source.prepare(report)
        self.console.end("model")
        link.stop_announcing()

    async def _drive_batches(self, commands: ChildCommands) -> None:
        """Start the batch driver once a batch has not ended: a new one, or one that a former `serve` left."""
        while not await asyncio.to_thread(has_open_batch, commands.files_dir):
            await next_tick(BATCH_POLL_SECONDS)

        async def after_death(_life: int, how: str) -> None:
            self.console.print(f"  batches   died ({how})")

        def command(_life: int) -> ChildCommand:
            child.is_ready = True  # nothing waits for it
            return commands.batches()

        child = SupervisedChild("batches", command, self._on_line, after_death, policy=RestartPolicy(may_give_up=False))
        self.supervisor.start(child, stop_rank=_GATEWAY_RANK)
        await asyncio.Event().wait()

    def _gateway(self, number: int, commands: ChildCommands) -> SupervisedChild:
        name = "gateway" if self.settings.num_gateways == 1 else f"gateway-{number}"

        async def after_death(_life: int, how: str) -> None:
            self.console.print(f"  {name:<9} died ({how})")

        def command(_life: int) -> ChildCommand:
            self.gateway_starts.set()
            return commands.gateway(name)

        return SupervisedChild(name, command, self._on_line, after_death)

    def _worker(self, number: int, model: ServedModel, commands: ChildCommands, link: FleetLink) -> SupervisedChild:
        def command(life: int) -> ChildCommand:
            base_id = worker_base_id(self.fleet_id, number, life)
            self.workers[base_id] = child
            return commands.worker(model, number, base_id)

        async def after_death(life: int, how: str) -> None:
            base_id = worker_base_id(self.fleet_id, number, life)
            self.workers.pop(base_id, None)
            self.console.abandon(child.name)
            requeued = await link.reap(base_id)
            self.console.print(f"  {child.name:<9} died ({how}); {requeued} requests requeued")

        async def when_stopped(life: int) -> None:
            requeued = await link.reap(worker_base_id(self.fleet_id, number, life))  # if it continues, it is fenced
            self.console.print(f"  {child.name:<9} is stopped by a signal; {requeued} requests requeued")

        child = SupervisedChild(f"worker-{number}", command, self._on_line, after_death, when_stopped)
        return child

    async def _watch_gateways(self, gateways: list[SupervisedChild]) -> None:
        """Mark gateways as ready when one answers with any status: a gateway reports the start of the other parts.

        Several gateways share one port, and they start alike, so one answer counts for all.
        """
        while True:
            await self.gateway_starts.wait()
            self.gateway_starts.clear()
            while not all(gateway.is_ready for gateway in gateways):
                answers = await ready_status(self.settings.host, self.settings.port) is not None
                for gateway in gateways:
                    gateway.is_ready = gateway.is_ready or answers
                await asyncio.sleep(GATEWAY_POLL_SECONDS)

    async def _until_ready(self) -> None:
        while not all(any(worker.is_ready for worker in team) for team in self.teams):
            self.worker_is_ready.clear()
            await self.worker_is_ready.wait()
        # On a shared port a probe reaches any gateway, so require enough good answers in a row to reach all of them.
        wanted = 1 if self.settings.num_gateways == 1 else PROBES_A_GATEWAY * self.settings.num_gateways
        num_good = 0
        while num_good < wanted:
            if await ready_status(self.settings.host, self.settings.port) == HTTP_OK:
                num_good += 1
            else:
                num_good = 0
                await asyncio.sleep(READY_POLL_SECONDS)

    def _on_heartbeat(self, heartbeat: WorkerHeartbeat) -> None:
        # A loading worker has no incarnation yet and sends heartbeats with its base id.
        base_id, _, _incarnation = heartbeat.worker_id.rpartition(".")
        worker = self.workers.get(base_id) or self.workers.get(heartbeat.worker_id)
        if worker is None or worker.is_ready:
            return
        if heartbeat.phase is WorkerPhase.READY:
            worker.is_ready = True
            self.worker_is_ready.set()
            self.console.end(worker.name)
            if heartbeat.detail:
                self.console.print(f"  {worker.name:<9} {heartbeat.detail}")
        else:
            self.console.update(worker.name, heartbeat.phase, heartbeat.progress, heartbeat.detail)

    def _on_line(self, name: str, line: str) -> None:
        if not _IS_INFO.match(line) or self._is_ready(name):  # before that the phases show the same
            self.console.print(f"{name} | {line}")

    def _is_ready(self, name: str) -> bool:
        return any(child.is_ready for child in self.supervisor.children if child.name == name)


async def _reap_former_fleets(link: FleetLink, files: FleetFiles) -> None:
    for fleet_id in files.dead():
        await link.reap(fleet_prefix(fleet_id))
        files.forget(fleet_id)


@contextmanager
def _models_file(models: Sequence[ServedModel]) -> Iterator[Path | None]:
    """Yield the path of a file with the resolved models for the gateways, or None without --models-file."""
    if not models:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="pagestream-") as directory:
        path = Path(directory) / "models.toml"
        path.write_text(models_text(model.resolved for model in models), encoding="utf-8")
        yield path
