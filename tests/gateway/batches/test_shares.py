"""Batches of one key leave room for other keys: time slices, slots in flight, and none for a key in debt."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.batches.driver.driver import MAX_DRIVEN
from tests.gateway.batches.batch_clients import KEYS, begun, client_of, ended, jsonl, line, results, write_keys
from tests.gateway.conftest import Gateway
from tests.gateway.fake_inference import FakeInferenceClient, finish, says


def write_limits(path: Path, limits_of_a: str) -> Path:
    write_keys(path, "team-a", more=limits_of_a + "\n")
    limited = path.read_text()
    write_keys(path, "team-b")
    path.write_text(limited + path.read_text())
    return path


@pytest.mark.parametrize("num_gateways", [1, 2])
async def test_batches_of_a_key_in_debt_hold_no_slot(
    start_gateway: Callable[..., Any], tmp_path: Path, num_gateways: int
) -> None:
    keys = write_limits(tmp_path / "keys", "tokens_per_minute = 1")
    gateways: list[Gateway] = [
        await start_gateway(FakeInferenceClient(says([5])), files_dir=tmp_path / "kept", api_keys_file=keys)
        for _ in range(num_gateways)
    ]
    async with client_of(gateways[0], KEYS["team-a"]) as spent, client_of(gateways[0], KEYS["team-b"]) as other:
        slow = [await begun(spent, jsonl(*map(line, "abc"))) for _ in range(MAX_DRIVEN * num_gateways)]
        for gateway in gateways:
            while gateway.driver.metric("pagestream_gateway_batches"):
                await asyncio.sleep(0.02)  # until all batches are released
        batch = await ended(other, await begun(other, jsonl(*map(line, "xy"))))
        assert set(await results(other, batch.output_file_id)) == {"x", "y"}
        statuses = {(await spent.batches.retrieve(one.id)).status for one in slow}
        assert statuses <= {"validating", "in_progress"}


@pytest.mark.parametrize("num_gateways", [1, 2])
async def test_long_batches_yield_and_resume(
    start_gateway: Callable[..., Any], tmp_path: Path, num_gateways: int
) -> None:
    """Serve another key's batch even if one key drives all batches with all lines in flight."""
    keys = write_keys(tmp_path / "keys", *KEYS)
    gateways: list[Gateway] = [
        await start_gateway(files_dir=tmp_path / "kept", api_keys_file=keys, max_batch_concurrency=8)
        for _ in range(num_gateways)
    ]
    async with client_of(gateways[0], KEYS["team-a"]) as busy, client_of(gateways[0], KEYS["team-b"]) as other:
        long = [await begun(busy, jsonl(*map(line, "abcdefghijkl"))) for _ in range(MAX_DRIVEN * num_gateways)]
        held = [[await gateway.engine.next_stream() for _ in range(7)] for gateway in gateways]
        for gateway in gateways:
            while gateway.driver.metric("pagestream_gateway_batches") != MAX_DRIVEN:
                await asyncio.sleep(0.02)
        batch = await begun(other, jsonl(*map(line, "xy")))
        for _ in "xy":
            asked = [asyncio.create_task(gateway.engine.next_stream()) for gateway in gateways]
            done, pending = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            for task in pending:
                task.cancel()
            for task in done:
                stream = task.result()
                assert stream.request.tenant == "team-b"
                stream.send(finish(stream.request, 0))
        batch = await ended(other, batch)
        assert set(await results(other, batch.output_file_id)) == {"x", "y"}
        for gateway, streams in zip(gateways, held, strict=True):
            gateway.engine.script = says([5])
            for stream in streams:
                stream.send(finish(stream.request, 0))
        for begun_batch in long:
            batch = await ended(busy, begun_batch)
            assert batch.status == "completed"
            assert set(await results(busy, batch.output_file_id)) == set("abcdefghijkl")


async def test_resumed_batch_reads_only_later_results(start_gateway: Callable[..., Any], tmp_path: Path) -> None:
    """Do not read what precedes the resumption again: it may have changed by then."""
    keys = write_limits(tmp_path / "keys", "tokens_per_minute = 1")
    engine = FakeInferenceClient(says([5]))
    gateway: Gateway = await start_gateway(
        engine, files_dir=tmp_path / "kept", api_keys_file=keys, max_batch_concurrency=1
    )
    async with client_of(gateway, KEYS["team-a"]) as client:
        batch = await begun(client, jsonl(*(line(f"line-{number}") for number in range(20))))
        folder = tmp_path / "kept" / "batches" / batch.id
        while gateway.driver.metric("pagestream_gateway_batches") or not (folder / "output.jsonl").exists():
            await asyncio.sleep(0.02)
        progress = json.loads((folder / "progress.json").read_text())
        resume, num_results = progress["resume"], progress["completed"]
        assert 0 < num_results < 20 and resume["number"] == num_results + 1
        assert resume["output_bytes"] == (folder / "output.jsonl").stat().st_size
        input_bytes = (folder / "input.jsonl").read_bytes()
        (folder / "input.jsonl").write_bytes(b"!" * resume["offset"] + input_bytes[resume["offset"] :])
        with (folder / "output.jsonl").open("r+b") as written:
            written.write(b"!" * resume["output_bytes"])
        write_keys(keys, "team-a")  # without a limit
    while not (tmp_path / "kept" / "files" / f"{_output_id(folder)}.json").exists():
        await asyncio.sleep(0.02)
    lines = (tmp_path / "kept" / "files" / f"{_output_id(folder)}.jsonl").read_bytes()[resume["output_bytes"] :]
    found = [json.loads(text)["custom_id"] for text in lines.splitlines()]
    assert found == [f"line-{number}" for number in range(num_results, 20)]


def _output_id(folder: Path) -> str:
    return str(json.loads((folder / "batch.json").read_text())["output_file_id"])
