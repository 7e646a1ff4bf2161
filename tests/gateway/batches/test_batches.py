"""/v1/files and /v1/batches with the openai client: results, errors, limits, owners, gateway restart."""

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from gateway.apis.files.batches import CreateBatchBody
from gateway.batches.driver import lines as batch_lines
from gateway.batches.driver.line_answers import KIND_OF_ENDPOINT
from shared.messages import GenerationRequest, StreamEvent, TokenEvent, encoded_vector
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
    write_keys,
)
from tests.gateway.conftest import Gateway
from tests.gateway.fake_inference import FakeInferenceClient, finish, says


@pytest.fixture
async def gateway(start_gateway: Callable[..., Any], tmp_path: Path) -> Gateway:
    gateway: Gateway = await start_gateway(FakeInferenceClient(says([5, 6], [7])), files_dir=tmp_path / "kept")
    return gateway


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(gateway) as opened:
        yield opened


async def test_batch_runs_from_input_file_to_results(client: openai.AsyncOpenAI, gateway: Gateway) -> None:
    content = jsonl(*(line(f"line-{number}") for number in range(150)), line("bad", temperature=9))
    batch = await ended(client, await begun(client, content, metadata={"what": "night"}))
    assert (batch.status, batch.endpoint, batch.completion_window) == ("completed", ENDPOINT, "24h")
    assert batch.metadata == {"what": "night"} and batch.errors is None and batch.expires_at is None
    assert batch.request_counts is not None and batch.request_counts.to_dict() == {
        "completed": 150, "failed": 1, "total": 151,
    }  # fmt: skip
    times = [batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at]
    assert times == sorted(time for time in times if time is not None)
    good = await results(client, batch.output_file_id)
    assert set(good) == {f"line-{number}" for number in range(150)}
    assert good["line-7"]["error"] is None and good["line-7"]["response"]["status_code"] == 200
    body = good["line-7"]["response"]["body"]
    assert body["object"] == "text_completion" and body["usage"]["completion_tokens"] == 3
    assert body["id"].endswith(good["line-7"]["response"]["request_id"])
    (bad,) = (await results(client, batch.error_file_id)).values()
    assert bad["response"]["status_code"] == 400 and bad["response"]["body"]["error"]["param"] == "temperature"
    assert {request.priority_class for request in gateway.engine.requests} == {"batch"}
    assert (
        gateway.metric("pagestream_time_to_first_token_seconds_count", **{"class": "batch"}) == 0
    )  # no client waits for these answers


async def test_chat_batch_returns_results(client: openai.AsyncOpenAI) -> None:
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    one: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat}
    streamed = one | {"custom_id": "b", "body": chat | {"stream": True}}
    named = one | {"custom_id": "c", "body": chat | {"model": "gpt-4"}}
    batch = await ended(client, await begun(client, jsonl(one, streamed, named), "/v1/chat/completions"))
    good, bad = await results(client, batch.output_file_id), await results(client, batch.error_file_id)
    assert good["a"]["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert bad["b"]["response"]["body"]["error"]["param"] == "stream"
    assert bad["c"]["response"]["status_code"] == 404 and set(bad) == {"b", "c"}


async def test_responses_batch_returns_results(client: openai.AsyncOpenAI) -> None:
    body = {"model": "tiny", "input": "hi"}
    one: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": body}
    unknown = one | {"custom_id": "b", "body": body | {"previous_response_id": "resp_" + "0" * 32}}
    batch = await ended(client, await begun(client, jsonl(one, unknown), "/v1/responses"))
    good, bad = await results(client, batch.output_file_id), await results(client, batch.error_file_id)
    assert good["a"]["response"]["body"]["object"] == "response"
    assert bad["b"]["response"]["body"]["error"]["param"] == "previous_response_id"


async def test_embeddings_batch_returns_vectors(start_gateway: Callable[..., Any], tmp_path: Path) -> None:
    def script(request: GenerationRequest) -> Iterable[StreamEvent]:
        vector = encoded_vector(struct.pack("<2f", len(request.prompt_token_ids), 0.5))
        yield TokenEvent(request.request_id, 0, [7], logprobs=[vector])
        yield finish(request, 1)

    gateway = await start_gateway(FakeInferenceClient(script), files_dir=tmp_path / "kept", task="embed")
    one: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings"}
    async with client_of(gateway) as client:
        lines = jsonl(one | {"body": {"input": [[5, 6, 7], [8]]}}, one | {"custom_id": "b", "body": {"input": []}})
        batch = await ended(client, await begun(client, lines, "/v1/embeddings"))
        good, bad = await results(client, batch.output_file_id), await results(client, batch.error_file_id)
    assert [item["embedding"] for item in good["a"]["response"]["body"]["data"]] == [[3.0, 0.5], [1.0, 0.5]]
    assert bad["b"]["response"]["body"]["error"]["param"] == "input"


@pytest.mark.parametrize(
    ("content", "code", "param", "number"),
    [
        (b"", "empty_file", "input_file_id", None),
        (b"\n \n", "empty_file", "input_file_id", None),
        (b"{", "invalid_json_line", None, 1),
        (jsonl(line("a")) + b"\n\n[]", "invalid_value", None, 3),
        (jsonl(line("a"), line("a")), "duplicate_custom_id", "custom_id", 2),
        (jsonl(line("a", endpoint="/v1/chat/completions")), "invalid_value", "url", 1),
        (jsonl(line("")), "invalid_value", "custom_id", 1),
        (jsonl({**line("a"), "method": "GET"}), "invalid_value", "method", 1),
        (jsonl({**line("a"), "body": [1]}), "invalid_value", "body", 1),
        (jsonl({"custom_id": "a", "method": "POST", "url": ENDPOINT}), "missing_required_parameter", "body", 1),
        (b'{"custom_id": "\xff"}', "invalid_json_line", None, 1),
        (b" " * 3_000_000 + b"{}", "line_too_large", None, 1),
    ],
)
async def test_malformed_file_fails_before_computation(
    client: openai.AsyncOpenAI, gateway: Gateway, content: bytes, code: str, param: str | None, number: int | None
) -> None:
    batch = await ended(client, await begun(client, content))
    assert batch.status == "failed" and batch.failed_at is not None
    assert batch.errors is not None and batch.errors.data is not None
    (problem,) = batch.errors.data
    assert (problem.code, problem.param, problem.line) == (code, param, number)
    assert gateway.engine.requests == [] and batch.output_file_id is None and batch.error_file_id is None


async def test_batch_has_a_maximum_number_of_lines(client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_lines, "MAX_LINES", 3)
    batch = await ended(client, await begun(client, jsonl(*(line(str(number)) for number in range(5)))))
    assert batch.errors is not None and batch.errors.data is not None
    assert [problem.code for problem in batch.errors.data] == ["too_many_requests"]
    assert (await ended(client, await begun(client, jsonl(*map(line, "abc"))))).status == "completed"


async def test_files_are_listed_read_and_deleted(client: openai.AsyncOpenAI) -> None:
    contents = [jsonl(line(str(number))) for number in range(3)]
    files = [await client.files.create(file=(f"{n}.jsonl", c), purpose="batch") for n, c in enumerate(contents)]
    listed = await client.files.list()
    assert [file.filename for file in listed.data] == ["2.jsonl", "1.jsonl", "0.jsonl"]
    assert listed.data[0] == files[2] == await client.files.retrieve(files[2].id)
    assert files[0].expires_at == files[0].created_at + RETENTION_SECONDS
    assert files[0].to_dict() | {"id": "", "created_at": 0, "expires_at": 0} == {
        "id": "", "object": "file", "bytes": len(contents[0]), "created_at": 0, "filename": "0.jsonl",
        "purpose": "batch", "status": "processed", "expires_at": 0, "status_details": None,
    }  # fmt: skip
    first = await client.files.list(order="asc", limit=2)
    assert [file.id for file in first.data] == [files[0].id, files[1].id] and first.has_next_page()
    assert [file.id for file in (await first.get_next_page()).data] == [files[2].id]
    assert (await client.files.list(purpose="batch_output")).data == []
    assert (await client.files.content(files[1].id)).content == contents[1]
    deleted = await client.files.delete(files[1].id)
    assert deleted.deleted and deleted.id == files[1].id
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError) as refused:
            await call(files[1].id)
        assert refused.value.code == "file_not_found"


async def test_batches_are_listed_in_pages(client: openai.AsyncOpenAI) -> None:
    batches = [await begun(client, jsonl(line("a"))) for _ in range(3)]
    page = await client.batches.list(limit=2)
    assert [batch.id for batch in page.data] == [batches[2].id, batches[1].id] and page.has_next_page()
    assert [batch.id async for batch in page] == [batch.id for batch in reversed(batches)]


async def test_input_file_may_be_deleted_while_its_batch_runs(
    client: openai.AsyncOpenAI, gateway: Gateway, tmp_path: Path
) -> None:
    gateway.engine.script = None
    batch = await begun(client, jsonl(line("a")))
    stream = await gateway.engine.next_stream()
    await client.files.delete(batch.input_file_id)
    stream.send(finish(stream.request, 0))
    batch = await ended(client, batch)
    assert batch.status == "completed"
    assert sorted(path.name for path in (tmp_path / "kept" / "batches" / batch.id).iterdir()) == [
        "batch.json", "lock", "progress.json",
    ]  # fmt: skip


async def test_cancelled_batch_withdraws_requests_in_flight(start_gateway: Callable[..., Any], tmp_path: Path) -> None:
    gateway = await start_gateway(files_dir=tmp_path / "kept", max_batch_concurrency=3)
    async with client_of(gateway) as client:
        batch = await begun(client, jsonl(*map(line, "abcdefgh")))
        streams = [await gateway.engine.next_stream() for _ in range(3)]
        streams[0].send(finish(streams[0].request, 0))
        streams.append(await gateway.engine.next_stream())  # in the place of the finished line
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        batch = await ended(client, batch)
        assert batch.status == "cancelled" and batch.cancelled_at is not None and batch.cancelling_at is not None
        assert set(await results(client, batch.output_file_id)) == {"a"}
        errors = await results(client, batch.error_file_id)
        assert set(errors) == set("bcdefgh") and {e["error"]["code"] for e in errors.values()} == {"batch_cancelled"}
        for result, num_lines in (("answered", 1), ("failed", 0), ("cancelled", 7)):
            assert gateway.driver.metric("pagestream_gateway_batch_lines_total", result=result) == num_lines
        assert sorted(gateway.engine.cancelled) == sorted(stream.request.request_id for stream in streams[1:])
        assert (await client.batches.cancel(batch.id)).status == "cancelled"  # a second cancel has the same result


async def test_ended_batch_cannot_be_cancelled(client: openai.AsyncOpenAI) -> None:
    batch = await ended(client, await begun(client, jsonl(line("a"))))
    with pytest.raises(openai.ConflictError) as refused:
        await client.batches.cancel(batch.id)
    assert refused.value.code == "batch_ended"


async def test_another_gateway_continues_after_the_last_result(
    start_gateway: Callable[..., Any], tmp_path: Path
) -> None:
    first = await start_gateway(files_dir=tmp_path, max_batch_concurrency=1)
    async with client_of(first) as client:
        batch = await begun(client, jsonl(*map(line, "abc")))
        stream = await first.engine.next_stream()
        second = await start_gateway(FakeInferenceClient(says([5])), files_dir=tmp_path)
        stream.send(finish(stream.request, 0))
        await first.engine.next_stream()  # `b` is in flight, because only one gateway drives the batch
        assert second.engine.requests == []
        await first.driver.stop()  # and so it releases the batch
        batch = await ended(client, batch)
        assert set(await results(client, batch.output_file_id)) == set("abc")
        assert len(second.engine.requests) == 2 and first.engine.cancelled == []


async def test_batch_lines_wait_while_no_worker_can_answer(
    client: openai.AsyncOpenAI, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.batches.driver.line_answers.MAX_PAUSE_SECONDS", 0.05)
    workers, gateway.engine.workers = gateway.engine.workers, []
    batch = await begun(client, jsonl(*map(line, "ab")))
    while batch.status != "in_progress":
        await asyncio.sleep(0.02)
        batch = await client.batches.retrieve(batch.id)
    gateway.engine.workers = workers
    assert set(await results(client, (await ended(client, batch)).output_file_id)) == {"a", "b"}


async def test_files_and_batches_are_private_to_their_key(start_gateway: Callable[..., Any], tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", *KEYS)
    engine = FakeInferenceClient(says([5]))
    gateway = await start_gateway(engine, files_dir=tmp_path / "kept", api_keys_file=keys)
    async with client_of(gateway, KEYS["team-a"]) as mine, client_of(gateway, KEYS["team-b"]) as other:
        batch = await ended(mine, await begun(mine, jsonl(line("a"))))
        assert {request.tenant for request in engine.requests} == {"team-a"}
        assert batch.output_file_id is not None
        for call, argument in (
            (other.files.retrieve, batch.output_file_id),
            (other.files.content, batch.output_file_id),
            (other.files.delete, batch.input_file_id),
            (other.batches.retrieve, batch.id),
            (other.batches.cancel, batch.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await call(argument)
        with pytest.raises(openai.BadRequestError) as refused:
            await other.batches.create(input_file_id=batch.input_file_id, endpoint=ENDPOINT, completion_window="24h")
        assert refused.value.param == "input_file_id"
        assert (await other.files.list()).data == [] and (await other.batches.list()).data == []


async def test_key_reaches_the_scheduler_with_its_limits(start_gateway: Callable[..., Any], tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", "team-a", more="max_concurrent = 2\nweight = 3.0")
    gateway = await start_gateway(files_dir=tmp_path / "kept", api_keys_file=keys)
    async with client_of(gateway, KEYS["team-a"]) as client:
        batch = await begun(client, jsonl(*map(line, "abc")))
        streams = [await gateway.engine.next_stream() for _ in range(3)]
        own = asyncio.create_task(client.completions.create(model="tiny", prompt="hi"))
        streams.append(await gateway.engine.next_stream())
        assert [stream.request.priority_class for stream in streams] == ["batch"] * 3 + ["interactive"]
        requests = [stream.request for stream in streams]
        senders = {(request.tenant, request.tenant_weight, request.tenant_max_running) for request in requests}
        assert senders == {("team-a", 3.0, 2)}
        for stream in streams:
            stream.send(finish(stream.request, 0))
        await own
        assert set(await results(client, (await ended(client, batch)).output_file_id)) == set("abc")


async def test_invalid_upload_is_refused(start_gateway: Callable[..., Any], tmp_path: Path) -> None:
    gateway = await start_gateway(files_dir=tmp_path, max_file_bytes=1000, max_files_bytes=19_000)

    async def refused(**parts: Any) -> tuple[int, str, str | None]:
        form = aiohttp.FormData(default_to_multipart=True)
        for name, value in parts.items():
            form.add_field(name, value, filename="in.jsonl" if name == "file" else None)
        async with gateway.session.post("/v1/files", data=form) as reply:
            error = (await reply.json())["error"]
            return reply.status, error["code"], error["param"]

    assert await refused(purpose="batch") == (400, "missing_required_parameter", "file")
    assert await refused(file=b"x") == (400, "missing_required_parameter", "purpose")
    assert await refused(purpose="fine-tune", file=b"x") == (400, "invalid_value", "purpose")
    assert await refused(file=b"x" * 1001, purpose="batch") == (413, "body_too_large", "file")
    assert await refused(purpose="b" * 2000, file=b"x") == (400, "invalid_value", "purpose")
    for anchor, seconds, param in (
        ("created_at", "3599", "seconds"),
        ("created_at", "2592001", "seconds"),
        ("created_at", "²", "seconds"),
        ("created_at", "", "seconds"),
        ("last_used", "3600", "anchor"),
    ):
        expiring = {"expires_after[anchor]": anchor, "expires_after[seconds]": seconds}
        found = await refused(**expiring, purpose="batch", file=b"x")
        assert found == (400, "invalid_value", f"expires_after[{param}]")
    for headers, data in (
        ({"Content-Type": "application/json"}, b"{}"),
        ({"Content-Type": "multipart/form-data; boundary=a", "Content-Encoding": "gzip"}, b"x"),
        ({"Content-Type": "multipart/form-data"}, b"x"),
        ({"Content-Type": "multipart/form-data; boundary=a"}, b"no boundary"),
        ({"Content-Type": "multipart/form-data; boundary=a"}, b"--a\r\nContent-Disposition: form-data"),
    ):
        async with gateway.session.post("/v1/files", data=data, headers=headers) as reply:
            assert reply.status in (400, 415), await reply.text()
    assert list((tmp_path / "parts").iterdir()) == [] == list((tmp_path / "files").iterdir())
    async with client_of(gateway) as client:
        await client.files.create(file=b"x" * 1000, purpose="batch")
        await client.files.create(file=b"x" * 1000, purpose="batch")
    assert await refused(file=b"x" * 1000, purpose="batch") == (413, "files_full", "file")


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input_file_id": "file-../../x"}, "input_file_id"),
        ({"input_file_id": None}, "input_file_id"),
        ({"endpoint": "/v1/rerank"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3599}}, "output_expires_after.seconds"),
        ({"output_expires_after": {"anchor": "used", "seconds": 3600}}, "output_expires_after.anchor"),
    ],
)
async def test_invalid_batch_is_refused(
    client: openai.AsyncOpenAI, gateway: Gateway, changes: dict[str, Any], param: str
) -> None:
    uploaded = await client.files.create(file=b"{}", purpose="batch")
    body = {"input_file_id": uploaded.id, "endpoint": ENDPOINT, "completion_window": "24h"} | changes
    async with gateway.session.post("/v1/batches", json=body) as reply:
        assert reply.status == 400 and (await reply.json())["error"]["param"] == param


@pytest.mark.parametrize(
    ("path", "status", "param"),
    [
        ("/v1/batches?limit=0", 400, "limit"),
        ("/v1/batches?limit=101", 400, "limit"),
        ("/v1/batches?limit=²", 400, "limit"),
        ("/v1/batches?after=batch_x", 400, "after"),
        ("/v1/files?order=up", 400, "order"),
        ("/v1/files/..%2Fbatches", 404, "id"),
        ("/v1/files/file-" + "0" * 32, 404, "id"),
        ("/v1/batches/batch_" + "0" * 32, 404, "id"),
    ],
)
async def test_unknown_id_is_not_found(gateway: Gateway, path: str, status: int, param: str) -> None:
    async with gateway.session.get(path) as reply:
        assert (reply.status, (await reply.json())["error"]["param"]) == (status, param)


async def test_path_as_an_id_is_not_found(client: openai.AsyncOpenAI, gateway: Gateway) -> None:
    uploaded = await client.files.create(file=b"{}", purpose="batch")
    for path in (f"..%2Ffiles%2F{uploaded.id}", f".%2F{uploaded.id}"):
        async with gateway.session.get(f"/v1/files/{path}") as reply:
            assert reply.status == 404


async def test_files_routes_without_a_directory_are_refused(start_gateway: Callable[..., Any]) -> None:
    gateway = await start_gateway()
    async with gateway.session.get("/v1/files") as reply:
        assert (reply.status, (await reply.json())["error"]["code"]) == (404, "unknown_url")


def test_unsupported_batch_endpoint_is_refused() -> None:
    assert set(CreateBatchBody.__annotations__["endpoint"].__args__) == set(KIND_OF_ENDPOINT)
