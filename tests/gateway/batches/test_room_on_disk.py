"""Disk space is reserved before it is used, visible to all gateways, shared among keys, and returned."""

import asyncio
import errno
import io
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from gateway.apis.files import uploads
from gateway.batches.driver import driver
from gateway.batches.storage import batch_store, file_store
from gateway.batches.storage.disk import ENTRY_BYTES
from tests.gateway.batches.batch_clients import (
    ENDPOINT,
    KEYS,
    RETENTION_SECONDS,
    begun,
    client_of,
    ended,
    jsonl,
    line,
    results,
    storage_of,
    write_keys,
)
from tests.gateway.conftest import Gateway
from tests.gateway.fake_inference import FakeInferenceClient, says
from tests.patience import PATIENCE_SECONDS

MIB = 2**20


def used_on_disk(kept: Path) -> int:
    """Return the used bytes without the catalog, counted as `du` does."""
    paths = [path for path in kept.rglob("*") if path.is_file() and not path.name.startswith("catalog")]
    return sum(path.stat().st_size for path in paths)


@pytest.fixture
def may_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Return an event; until it is set, finished batches stay open in the catalog."""
    event, end = threading.Event(), batch_store.BatchStore.end

    def late(store: batch_store.BatchStore, folder: batch_store.BatchFolder) -> None:
        assert event.wait(PATIENCE_SECONDS)
        end(store, folder)

    monkeypatch.setattr(batch_store.BatchStore, "end", late)
    yield event
    event.set()


async def uploaded(gateway: Gateway, num_bytes: int, *, is_declared: bool = True) -> int:
    """Upload a file; return the HTTP status."""

    async def chunks() -> AsyncIterator[bytes]:
        for chunk in (head, b"x" * num_bytes, tail):
            yield chunk

    head = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
    head += b'Content-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    tail = b"\r\n--b--\r\n"
    data = io.BytesIO(head + b"x" * num_bytes + tail) if is_declared else chunks()
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    async with gateway.session.post("/v1/files", data=data, headers=headers) as reply:
        await reply.read()
        return reply.status


@pytest.mark.parametrize("is_declared", [True, False])
async def test_concurrent_uploads_see_each_other(
    start_gateway: Callable[..., Any], tmp_path: Path, is_declared: bool
) -> None:
    """Use two gateways: of 16 uploads of 4.5 MB, four fit into 20 MiB."""
    gateways = [await start_gateway(files_dir=tmp_path, max_files_bytes=20 * MIB) for _ in range(2)]
    uploads = [uploaded(gateways[number % 2], 4_500_000, is_declared=is_declared) for number in range(16)]
    statuses = await asyncio.gather(*uploads)
    assert set(statuses) == {200, 413} and statuses.count(200) <= 4
    assert used_on_disk(tmp_path) <= 20 * MIB
    while await uploaded(gateways[0], 4_500_000) == 200:  # reservations of the refused uploads are free
        statuses.append(200)
    assert statuses.count(200) == 4
    assert not list((tmp_path / "parts").iterdir())


async def test_oversized_upload_is_refused_before_it_is_read(start_gateway: Callable[..., Any], tmp_path: Path) -> None:
    gateway: Gateway = await start_gateway(files_dir=tmp_path, max_files_bytes=MIB)
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(
        b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2000000\r\n"
        b"Content-Type: multipart/form-data; boundary=b\r\n\r\n"
    )
    assert b"413" in await reader.readline()  # although no byte of it has arrived
    writer.close()
    await writer.wait_closed()


async def test_aborted_upload_leaves_nothing(start_gateway: Callable[..., Any], tmp_path: Path) -> None:
    """Abort at every stage: before the reservation, during it, and while bytes are written."""
    gateway: Gateway = await start_gateway(files_dir=tmp_path)
    num_open = len(os.listdir("/proc/self/fd"))
    storage = storage_of(tmp_path)
    head = (
        b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2000000\r\n"
        b"Content-Type: multipart/form-data; boundary=b\r\n\r\n"
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    )
    for number in range(40):
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(head + b"x" * 25_000 * number)
        await writer.drain()
        for _ in range(number):
            await asyncio.sleep(0)
        writer.transport.abort()
    while storage.used_bytes() or list((tmp_path / "parts").iterdir()):
        await asyncio.sleep(0.02)
    assert await uploaded(gateway, 10) == 200
    storage.close()
    assert len(os.listdir("/proc/self/fd")) <= num_open + 4  # descriptors of SQLite and sockets, not one per upload


async def test_keys_leave_room_to_each_other(start_gateway: Callable[..., Any], tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", *KEYS)
    gateway: Gateway = await start_gateway(files_dir=tmp_path / "kept", api_keys_file=keys, max_files_bytes=12 * MIB)
    async with client_of(gateway, KEYS["team-a"]) as greedy, client_of(gateway, KEYS["team-b"]) as other:
        kept = []
        with pytest.raises(openai.APIStatusError) as refused:
            while True:
                kept.append(await greedy.files.create(file=b"x" * MIB, purpose="batch"))
        assert (refused.value.status_code, refused.value.code) == (413, "files_full")
        assert len(kept) == 5  # and their catalog entries
        for _ in range(2):
            await other.files.create(file=b"x" * MIB, purpose="batch")
        await greedy.files.delete(kept[0].id)
        await greedy.files.delete(kept[1].id)
        await greedy.files.create(file=b"x" * MIB, purpose="batch")


async def test_key_has_a_maximum_of_bytes(start_gateway: Callable[..., Any], tmp_path: Path) -> None:
    gateway: Gateway = await start_gateway(files_dir=tmp_path, max_files_bytes_per_key=3 * MIB)
    statuses = [await uploaded(gateway, MIB) for _ in range(3)]
    assert statuses == [200, 200, 413]


async def test_batch_without_room_for_results_has_one_per_line(
    start_gateway: Callable[..., Any], tmp_path: Path
) -> None:
    """Some answers fit beside the input; the other lines get an error for the missing space."""
    engine = FakeInferenceClient(says([5] * 40))
    gateway: Gateway = await start_gateway(engine, files_dir=tmp_path, max_files_bytes=115_000, max_batch_concurrency=2)
    ids = [f"{number}-{'x' * 200}" for number in range(40)]
    async with client_of(gateway) as client:
        content = jsonl(*(line(custom_id, n=8, max_tokens=40) for custom_id in ids))
        batch = await ended(client, await begun(client, content))
        assert batch.status == "completed" and batch.request_counts is not None
        assert batch.request_counts.completed + batch.request_counts.failed == len(ids)
        answered = await results(client, batch.output_file_id)
        refused = await results(client, batch.error_file_id)
        assert {one["error"]["code"] for one in refused.values()} == {"files_full"}
        assert set(answered) | set(refused) == set(ids)
        assert len(engine.requests) < len(ids)  # without space nothing more is computed
        assert used_on_disk(tmp_path) <= 115_000


async def test_batch_without_any_room_is_refused_before_computation(
    start_gateway: Callable[..., Any], tmp_path: Path, may_end: threading.Event
) -> None:
    gateway: Gateway = await start_gateway(files_dir=tmp_path, max_files_bytes=200_000)
    async with client_of(gateway) as client:
        batch = await ended(client, await begun(client, jsonl(*(line(f"{number}") for number in range(300)))))
        assert batch.errors is not None and batch.errors.data is not None
        assert (batch.status, batch.errors.data[0].code) == ("failed", "files_full")
        big = await client.files.create(file=b"x" * 100_000, purpose="batch")
        may_end.set()
        with pytest.raises(openai.APIStatusError) as refused:
            await client.batches.create(input_file_id=big.id, endpoint=ENDPOINT, completion_window="24h")
        assert (refused.value.status_code, refused.value.code) == (413, "files_full")
        assert gateway.engine.requests == []


async def test_completed_batch_has_already_released_its_room(
    start_gateway: Callable[..., Any], tmp_path: Path, may_end: threading.Event
) -> None:
    gateway: Gateway = await start_gateway(FakeInferenceClient(says([5])), files_dir=tmp_path)
    async with client_of(gateway) as client:
        batch = await begun(client, jsonl(*(line(f"{number}") for number in range(30))))
        assert (await ended(client, batch)).status == "completed"
        with closing(storage_of(tmp_path)) as storage:
            used_at_first = storage.used_bytes()
            may_end.set()
            await client.delete(f"/batches/{batch.id}", cast_to=object)
            assert used_at_first - storage.used_bytes() == 4 * ENTRY_BYTES


async def test_ended_batch_returns_its_room(start_gateway: Callable[..., Any], tmp_path: Path) -> None:
    gateway: Gateway = await start_gateway(FakeInferenceClient(says([5])), files_dir=tmp_path)
    async with client_of(gateway) as client:
        batch = await begun(client, jsonl(*map(line, "abc")))
        with pytest.raises(openai.ConflictError) as refused:
            await client.delete(f"/batches/{batch.id}", cast_to=object)
            raise AssertionError("it may have ended before")
        assert refused.value.code == "batch_not_ended"
        batch = await ended(client, batch)
        assert batch.output_file_id is not None
        deleted = await client.delete(f"/batches/{batch.id}", cast_to=object)
        assert deleted == {"id": batch.id, "object": "batch", "deleted": True}
        with pytest.raises(openai.NotFoundError):
            await client.batches.retrieve(batch.id)
        assert (await client.batches.list()).data == [] and not list((tmp_path / "batches").iterdir())
        for file in (await client.files.list()).data:
            await client.files.delete(file.id)
    storage = storage_of(tmp_path)
    assert storage.used_bytes() == 0 == used_on_disk(tmp_path)
    storage.close()


async def test_key_has_a_maximum_number_of_batches(
    start_gateway: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_store, "MAX_BATCHES_PER_KEY", 2)
    gateway: Gateway = await start_gateway(FakeInferenceClient(says([5])), files_dir=tmp_path)
    async with client_of(gateway) as client:
        batches = [await ended(client, await begun(client, jsonl(line("a")))) for _ in range(2)]
        with pytest.raises(openai.APIStatusError) as refused:
            await begun(client, jsonl(line("a")))
        assert (refused.value.status_code, refused.value.code) == (413, "too_many_batches")
        assert len(list((tmp_path / "batches").iterdir())) == 2
        await client.delete(f"/batches/{batches[0].id}", cast_to=object)
        await begun(client, jsonl(line("a")))


async def test_expired_files_and_batches_are_deleted(
    start_gateway: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Delete files, ended batches and the remains of an upload to a killed gateway, but no running batch."""
    gateway: Gateway = await start_gateway(FakeInferenceClient(says([5])), files_dir=tmp_path)
    async with client_of(gateway) as client:
        soon = await client.files.create(
            file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )
        assert soon.expires_at == soon.created_at + 3600
        expiring = {"anchor": "created_at", "seconds": 7200}
        done = await ended(client, await begun(client, jsonl(line("a")), output_expires_after=expiring))
        assert done.output_file_id is not None
        output = await client.files.retrieve(done.output_file_id)
        assert output.expires_at == output.created_at + 7200
        gateway.engine.script = None
        running = await begun(client, jsonl(line("a")))
        await gateway.engine.next_stream()
        left = tmp_path / "parts" / "part-left"
        left.write_bytes(b"x")
        os.utime(left, (0, 0))
        storage = storage_of(tmp_path)
        first, second = soon.created_at + 3600, output.created_at + 7200
        # the newest entry; on a busy machine it is seconds younger than the first
        last = int(time.time()) + RETENTION_SECONDS
        for now, num_files in ((first - 1, 4), (first + 2, 3), (second + 2, 2), (last + 2, 0)):
            with monkeypatch.context() as later:
                for module in (file_store, batch_store):
                    later.setattr(module.time, "time", _later(now))
                storage.tidy()
            assert len((await client.files.list()).data) == num_files, now - soon.created_at
        assert [batch.id for batch in (await client.batches.list()).data] == [running.id]
        assert not left.exists()
        storage.close()


def _later(now: float) -> Callable[[], float]:
    return lambda: now


async def test_full_disk_is_reported_and_nothing_is_left(
    start_gateway: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway: Gateway = await start_gateway(files_dir=tmp_path)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for module, name in ((os, "write"), (os, "fsync"), (file_store, "write_whole")):
        with monkeypatch.context() as broken:
            broken.setattr(module, name, full)
            assert await uploaded(gateway, 1000) == 507
        assert used_on_disk(tmp_path) == 0, name
    storage = storage_of(tmp_path)
    assert storage.used_bytes() == 0
    assert await uploaded(gateway, 1000) == 200
    assert storage.used_bytes() == 1000 + 2 * ENTRY_BYTES
    storage.close()


async def test_lost_catalog_is_rebuilt(start_gateway: Callable[..., Any], tmp_path: Path) -> None:
    """This includes directories of a release that had no catalog."""
    gateway: Gateway = await start_gateway(FakeInferenceClient(says([5])), files_dir=tmp_path / "kept")
    async with client_of(gateway) as client:
        batch = await ended(client, await begun(client, jsonl(line("a"))))
        before = [file.id for file in (await client.files.list()).data]
    (tmp_path / "kept").rename(tmp_path / "moved")
    (tmp_path / "moved" / "catalog.sqlite").unlink()
    second: Gateway = await start_gateway(files_dir=tmp_path / "moved")
    async with client_of(second) as client:
        assert [file.id for file in (await client.files.list()).data] == before and len(before) == 2
        assert [one.id for one in (await client.batches.list()).data] == [batch.id]
        assert second.metric("pagestream_gateway_files_limit_bytes") == 4 * 2**30
        while not second.metric("pagestream_gateway_files_bytes"):
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    "parts",
    [
        [("purpose", "batch"), ("purpose", "batch"), ("file", b"x")],
        [*((f"field{number}", "x") for number in range(17)), ("file", b"x")],
        [("n" * 9000, "x"), ("file", b"x")],
    ],
)
async def test_malformed_form_is_refused(
    start_gateway: Callable[..., Any], tmp_path: Path, parts: list[tuple[str, Any]]
) -> None:
    gateway: Gateway = await start_gateway(files_dir=tmp_path)
    form = aiohttp.FormData(default_to_multipart=True)
    for name, value in parts:
        form.add_field(name, value, filename="in" if name == "file" else None)
    async with gateway.session.post("/v1/files", data=form) as reply:
        assert reply.status == 400, await reply.text()
    assert used_on_disk(tmp_path) == 0


FORM = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"%s\r\n\r\nx\r\n--b--\r\n'
)
FEW, MANY = uploads.MAX_FORM_LINES // 2, uploads.MAX_FORM_LINES


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"\r\n" * FEW + FORM % b"", 200),
        (b"\r\n" * MANY + FORM % b"", 400),
        (b"\r\n" * 500_000, 400),
        (FORM % (b"\r\nX: " + b"y" * 1_000), 200),
        (FORM % (b"\r\nX: " + b"y" * 1_100), 400),
    ],
)
async def test_form_around_a_file_is_limited(
    start_gateway: Callable[..., Any], tmp_path: Path, body: bytes, status: int
) -> None:
    """Form data is read line by line on the event loop, and its headers by a quadratic parser."""
    gateway: Gateway = await start_gateway(files_dir=tmp_path)
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    async with gateway.session.post("/v1/files", data=body, headers=headers) as reply:
        assert reply.status == status, await reply.text()


async def test_uploads_of_one_key_are_written_one_at_a_time(
    start_gateway: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other keys find a free thread, however many uploads one key has."""
    begun, may_go, write = threading.Semaphore(0), threading.Event(), file_store.Part.write

    def slow(part: file_store.Part, data: bytes, *, more: int) -> None:
        begun.release()
        may_go.wait(PATIENCE_SECONDS)  # or the threads of a failed test would never end
        write(part, data, more=more)

    monkeypatch.setattr(file_store.Part, "write", slow)
    gateway: Gateway = await start_gateway(files_dir=tmp_path)
    tasks = [asyncio.create_task(uploaded(gateway, 1000)) for _ in range(3)]
    await asyncio.to_thread(begun.acquire)
    while gateway.state.pool.num_waiting < 2:
        await asyncio.sleep(0.01)
    assert not begun.acquire(blocking=False)
    assert await gateway.state.pool.run("another key", None, partial(int, "7")) == 7
    may_go.set()
    assert await asyncio.gather(*tasks) == [200, 200, 200]


async def test_file_name_is_text_for_any_bytes(start_gateway: Callable[..., Any], tmp_path: Path) -> None:
    gateway: Gateway = await start_gateway(files_dir=tmp_path)
    body = (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="\xff\xfe.jsonl"\r\n\r\nx\r\n--b--\r\n'
    )
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    async with gateway.session.post("/v1/files", data=body, headers=headers) as reply:
        assert reply.status == 200, await reply.text()
        assert (await reply.json())["filename"].endswith(".jsonl")
    async with gateway.session.get("/v1/files") as reply:
        assert len((await reply.json())["data"]) == 1


async def test_service_opens_few_of_many_waiting_batches(start_gateway: Callable[..., Any], tmp_path: Path) -> None:
    """Each second, open some of the thousands that wait for their owner, not all."""
    kept, storage = tmp_path / "kept", storage_of(tmp_path / "kept")
    (tmp_path / "in").write_bytes(jsonl(line("a")))
    for _ in range(3 * driver.LOOKAHEAD):
        storage.batches.create("a" * 64, ENDPOINT, "file-" + "0" * 32, tmp_path / "in", "24h", None)
    assert len(storage.batches.open_batches(driver.LOOKAHEAD)) == driver.LOOKAHEAD
    gateway: Gateway = await start_gateway(FakeInferenceClient(says([5])), files_dir=kept)
    async with client_of(gateway) as client:
        assert (await ended(client, await begun(client, jsonl(line("a"))))).status == "completed"
    storage.close()
