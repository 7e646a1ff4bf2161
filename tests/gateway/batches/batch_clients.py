"""Client-side helpers for the tests of batches."""

import asyncio
import json
from pathlib import Path
from typing import Any, Literal

import msgspec
import openai
from openai.types import Batch

from gateway.auth.api_keys import digest_of
from gateway.batches.storage.batch_store import BatchFolder
from gateway.batches.storage.quota import Quota
from gateway.batches.storage.records import BatchRecord
from gateway.batches.storage.storage import Storage
from tests.gateway.conftest import Gateway

RETENTION_SECONDS = 30 * 24 * 3600
ENDPOINT: Literal["/v1/completions"] = "/v1/completions"
KEYS = {"team-a": "a" * 20, "team-b": "b" * 20}


def line(custom_id: str, endpoint: str = ENDPOINT, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": endpoint, "body": {"model": "tiny", "prompt": "hi"} | body}


def jsonl(*lines: dict[str, Any]) -> bytes:
    return b"\n".join(json.dumps(one).encode() for one in lines)


def client_of(gateway: Gateway, key: str = "none") -> openai.AsyncOpenAI:
    plain = openai.DefaultAsyncHttpxClient(verify=False)  # loading the system's certificates takes 50 ms each time
    url = f"http://127.0.0.1:{gateway.port}/v1"
    return openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, http_client=plain)


async def begun(client: openai.AsyncOpenAI, content: bytes, endpoint: Any = ENDPOINT, **options: Any) -> Batch:
    uploaded = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(input_file_id=uploaded.id, endpoint=endpoint, completion_window="24h", **options)


async def ended(client: openai.AsyncOpenAI, batch: Batch) -> Batch:
    while batch.status not in ("failed", "completed", "cancelled"):
        await asyncio.sleep(0.02)  # as users do
        batch = await client.batches.retrieve(batch.id)
    return batch


async def results(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    found = [json.loads(text) for text in (await client.files.content(file_id)).text.splitlines()]
    by_id = {result["custom_id"]: result for result in found}
    assert len(by_id) == len(found)
    return by_id


def write_keys(path: Path, *names: str, more: str = "") -> Path:
    entries = [f'[[keys]]\nname = "{name}"\nsha256 = "{digest_of(KEYS[name].encode())}"\n{more}' for name in names]
    path.write_text("\n".join(entries))
    return path


def storage_of(kept: Path, max_bytes: int = 2**40) -> Storage:
    """Open the storage beside the gateways that own the directory. The caller closes it."""
    return Storage(kept, Quota(max_bytes), RETENTION_SECONDS)


def folder_of(kept: Path, batch_id: str) -> BatchFolder:
    path = kept / "batches" / batch_id
    return BatchFolder(path, msgspec.json.decode((path / "batch.json").read_bytes(), type=BatchRecord))
