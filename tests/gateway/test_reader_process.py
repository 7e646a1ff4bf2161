"""Work in another process: results, exceptions, transferred data, saved CPU time, and process lifetime."""

import asyncio
import gc
import os
import pickle
import signal
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.apis.completions.kinds import COMPLETION
from gateway.apis.registry import ALL_KINDS
from gateway.errors import GatewayError, InternalError, InvalidJson, MethodNotAllowed, RateLimited, Unavailable
from gateway.http import json_body
from gateway.pipeline.plan import encode_prompts
from gateway.text.served_model import ModelLimits, ServedModel
from gateway.work.reader_pool import ReaderPool
from gateway.work.reader_process import NICENESS, ReaderProcess
from tests.gateway.fake_inference import says
from tests.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.e2e  # it starts processes


@pytest.fixture
def process() -> Iterator[ReaderProcess]:
    made = ReaderProcess()
    yield made
    made.end()


@pytest.fixture
async def processes() -> AsyncIterator[ReaderPool]:
    made = ReaderPool(ReaderProcess, max_readers=2)
    yield made
    made.close()


def test_work_returns_its_result_and_raises_its_exception(process: ReaderProcess) -> None:
    body = process.run(partial(COMPLETION.decode, b'{"prompt":[1,2]}'))
    assert process.run(partial(COMPLETION.parse, body)) == COMPLETION.parse(body)
    with pytest.raises(InvalidJson) as caught:
        process.run(partial(COMPLETION.decode, b"{"))
    assert caught.value.body()["error"]["code"] == "invalid_json"
    with pytest.raises(ZeroDivisionError) as unexpected:
        process.run(partial(divmod, 1, 0))
    assert "reader_process" in unexpected.value.__notes__[0], "the log names the process"


def test_passed_on_body_is_not_decoded_here(process: ReaderProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    data = msgspec.json.encode({"prompt": list(range(100_000)), "max_tokens": 1})
    expected = COMPLETION.parse(COMPLETION.decode(data))
    monkeypatch.setattr(json_body, "_decoder", None)
    body = process.run(partial(COMPLETION.decode, data))
    assert (body.names, body.num_bytes) == (frozenset({"prompt", "max_tokens"}), len(data))
    assert len(pickle.dumps(body)) < len(data) + 1000
    assert process.run(partial(COMPLETION.parse, body)) == expected
    monkeypatch.undo()
    assert body.given == msgspec.json.decode(data)


def test_one_process_serves_serial_work_at_low_priority(process: ReaderProcess) -> None:
    process_id = process.run(os.getpid)
    assert process_id != os.getpid()
    assert process.run(os.getpid) == process_id
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert process.run(partial(os.getpriority, os.PRIO_PROCESS, 0)) == min(19, own + NICENESS)


async def test_concurrent_work_gets_a_second_process(processes: ReaderPool, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    first = await processes.run("a", None, os.getpid)
    reading = asyncio.create_task(processes.run("a", None, partial(Path.read_bytes, tmp_path / "fifo")))
    with await asyncio.to_thread((tmp_path / "fifo").open, "wb"):  # waits for a reader: one process is busy then
        second = await processes.run("b", None, os.getpid)
        assert second != first
        assert not reading.done()
    assert await reading == b""
    assert await processes.run("c", None, os.getpid) in (first, second)


async def test_one_idle_process_is_prepared_up_to_the_maximum(processes: ReaderPool, tmp_path: Path) -> None:
    """Each preparation creates a directory, which the test counts."""
    os.mkfifo(tmp_path / "fifo")
    (prepared := tmp_path / "prepared").mkdir()

    async def wait_for(count: int) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(list(prepared.iterdir())) < count:
                await asyncio.sleep(0.01)

    processes.keep_one_ready(partial(tempfile.mkdtemp, dir=prepared))
    await wait_for(1)  # before there is any work
    reading = asyncio.create_task(processes.run("a", None, partial(Path.read_bytes, tmp_path / "fifo")))
    with await asyncio.to_thread((tmp_path / "fifo").open, "wb"):
        await wait_for(2)
        first = await processes.run("b", None, os.getpid)
        assert await processes.run("b", None, os.getpid) == first
    assert await reading == b""
    assert len({await processes.run("c", None, os.getpid) for _ in range(3)} | {first}) <= 2
    assert len(list(prepared.iterdir())) == 2


async def test_failed_preparation_does_not_affect_work(processes: ReaderPool) -> None:
    processes.keep_one_ready(partial(divmod, 1, 0))
    assert await processes.run("a", None, partial(int, "7")) == 7


async def test_reader_is_prepared_once_models_and_worker_are_ready(
    start_gateway: Callable[..., Any], process: ReaderProcess
) -> None:
    readers = _Prepared()
    gateway = await start_gateway(readers=readers)
    keeping = asyncio.create_task(gateway.state.keep_reader_ready(*ALL_KINDS.values()))
    await asyncio.sleep(0)
    assert readers.first_works == []
    gateway.engine.was_ready.set()
    await keeping
    (work,) = readers.first_works
    assert process.run(work) is None


class _Prepared(ReaderPool):
    """Collects what its readers would run first."""

    def __init__(self) -> None:
        super().__init__()
        self.first_works: list[Any] = []

    def keep_one_ready(self, first_work: Any) -> None:
        self.first_works.append(first_work)


def test_killed_process_fails_only_its_own_work(process: ReaderProcess) -> None:
    with pytest.raises(InternalError):
        process.run(partial(os._exit, 3))
    assert process.run(partial(int, "7")) == 7


def test_unpicklable_result_is_an_error_and_work_continues(process: ReaderProcess) -> None:
    with pytest.raises(RuntimeError, match="pickle"):
        process.run(threading.Lock)
    assert process.run(partial(int, "7")) == 7


async def test_closed_pool_leaves_no_process(processes: ReaderPool) -> None:
    process_id = await processes.run("a", None, os.getpid)
    waiting = asyncio.create_task(processes.run("a", None, partial(time.sleep, PATIENCE_SECONDS)))
    await asyncio.sleep(0)
    processes.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)
    with pytest.raises(InternalError):
        await waiting


def test_process_that_starts_while_its_reader_ends_is_ended(
    process: ReaderProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class EndsMeanwhile(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            process.end()
            super().__init__(*args, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", EndsMeanwhile)
    with pytest.raises(InternalError):
        process.run(os.getpid)
    assert [its.returncode for its in started] == [-signal.SIGKILL]


def test_model_is_sent_by_name(tiny_model: ServedModel, process: ReaderProcess) -> None:
    model = replace(tiny_model, tool_call_parser="mistral")
    assert len(pickle.dumps(model)) < 1000
    request = COMPLETION.parse(COMPLETION.decode(b'{"prompt":"a b","seed":1}'))
    asked = partial(encode_prompts, model, ModelLimits(model.max_model_len, model.vocab_size), request)
    assert process.run(asked) == asked()
    for name in {field.name for field in fields(model)} - {"encoder"}:
        assert process.run(partial(getattr, model, name)) == getattr(model, name)


@pytest.mark.parametrize(
    "error",
    [
        RateLimited("m", code="c", retry_after_seconds=3),
        Unavailable("m", code="c", retry_after_seconds=3),
        MethodNotAllowed("m", allowed="GET"),
        InternalError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_across_the_pipe_are_equal(error: GatewayError) -> None:
    sent = pickle.loads(pickle.dumps(error))
    assert type(sent) is type(error)
    assert (sent.body(), sent.headers(), sent.args) == (error.body(), error.headers(), error.args)


def test_refused_body_costs_this_process_little(process: ReaderProcess) -> None:
    """Measure processor time, which a busy machine does not change: decoding here takes 40 ms or more."""
    data = msgspec.json.encode({"prompt": "x", "unknown": [""] * 600_000})
    process.run(os.getpid)

    def seconds_of(run: object) -> float:
        began_at = time.thread_time()
        with pytest.raises(InvalidJson):
            run(partial(COMPLETION.decode, data))  # type: ignore[operator]
        return time.thread_time() - began_at

    here = min(seconds_of(lambda work: work()) for _ in range(3))
    there = min(seconds_of(process.run) for _ in range(3))
    assert there < here / 3


def test_error_holds_no_reference_to_its_work(process: ReaderProcess) -> None:
    gc.collect()
    gc.disable()
    try:
        work = partial(COMPLETION.decode, b"{" * 100)
        is_there = weakref.ref(work)
        try:
            process.run(work)
        except InvalidJson as error:
            is_error_there = weakref.ref(error)
        del work
        assert is_there() is None and is_error_there() is None
    finally:
        gc.enable()


LONG = "a b " * 4_000
MESSAGES = [{"role": "user", "content": LONG}]
ROUTES = {
    "/v1/chat/completions": {"messages": MESSAGES, "truncate_prompt_tokens": 5},
    "/v1/completions": {"prompt": LONG, "truncate_prompt_tokens": 5, "max_tokens": 1, "guided_regex": "a+"},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": MESSAGES},
    "/v1/responses": {"input": LONG, "store": False},
    "/v1/responses/input_tokens": {"input": LONG},
    "/tokenize": {"prompt": LONG},
    "/detokenize": {"tokens": [5, 6] * 4_000},
}


class _Counted:
    """A reader that counts the work and runs it in a process that the tests share."""

    def __init__(self, process: ReaderProcess) -> None:
        self.num_works = 0
        self._process = process

    def run(self, work: Any) -> Any:
        self.num_works += 1
        return self._process.run(work)

    def end(self) -> None:
        """Leave the process to the next test."""


@pytest.fixture(scope="module")
def started() -> Iterator[ReaderProcess]:
    made = ReaderProcess()
    yield made
    made.end()


@pytest.mark.parametrize("route", ROUTES)
async def test_each_route_reads_long_bodies_in_processes(
    start_gateway: Callable[..., Any], started: ReaderProcess, route: str
) -> None:
    reader = _Counted(started)
    apart, here = await start_gateway(readers=ReaderPool(lambda: reader, 1)), await start_gateway()
    replies = []
    for gateway in (apart, here):
        gateway.engine.script = says([5])
        async with gateway.session.post(route, json=ROUTES[route], headers={"Idempotency-Key": "a"}) as reply:
            replies.append((reply.status, _without_its_own(await reply.json())))
    assert replies[0] == replies[1]
    assert reader.num_works > 0


def _without_its_own(body: dict[str, Any]) -> dict[str, Any]:
    own = ("id", "request_id", "created", "created_at", "completed_at")
    return {name: value for name, value in body.items() if name not in own}


async def test_short_bodies_are_read_in_this_process(start_gateway: Callable[..., Any], started: ReaderProcess) -> None:
    reader = _Counted(started)
    gateway = await start_gateway(readers=ReaderPool(lambda: reader, 1))
    gateway.engine.script = says([5])
    async with gateway.session.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}) as reply:
        assert reply.status == 200
    assert reader.num_works == 0
