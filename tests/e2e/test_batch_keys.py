"""/v1/batches while gateway and driver are killed, restarted without keys, and then with them: nothing is lost."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from gateway.auth.api_keys import digest_of
from tests.conftest import Valkey
from tests.e2e.batch_load import WORKER, begun, check_results, start_driver
from tests.e2e.fleet import Fleet, running_fleet
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.timeout(600)
NUM_LINES = 300
KEY = "k" * 20


@pytest.fixture
def fleet(valkey: Valkey, tmp_path: Path) -> Iterator[Fleet]:
    model = write_tiny_model(tmp_path / "tiny")
    (tmp_path / "keys").write_text(f'[[keys]]\nname = "team"\nsha256 = "{digest_of(KEY.encode())}"\n')
    with running_fleet(tmp_path / "logs") as fleet:
        common = ["--model", str(model), "--served-model-name", "tiny", "--redis-url", valkey.url]
        slow = ["--script-step-seconds", "0.02", "--metrics-port", "0"]
        fleet.start("w0", WORKER, *common, "--worker-id", "w0", *slow, PYTHONPATH=".")
        yield fleet


async def restart(fleet: Fleet, valkey: Valkey, tmp_path: Path, *flags: str) -> None:
    for name in {"gateway", "driver"} & fleet.processes.keys():
        fleet.processes[name].kill()
        fleet.processes[name].wait()
    common = ["--model", str(tmp_path / "tiny"), "--served-model-name", "tiny", "--redis-url", valkey.url]
    common += ["--files-dir", str(tmp_path / "files"), *flags]
    fleet.start("gateway", "-m", "gateway", *common, "--port", str(fleet.port))
    start_driver(fleet, "driver", *common)
    async with client(fleet) as anybody:
        while True:
            assert not fleet.has_lost_one(), fleet.all_logs()
            try:
                await anybody.models.list()
                return
            except openai.APIError:
                await asyncio.sleep(0.05)  # polls a starting process


def client(fleet: Fleet) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{fleet.port}/v1", api_key=KEY)


async def test_restart_without_keys_loses_no_batch_line(fleet: Fleet, valkey: Valkey, tmp_path: Path) -> None:
    keys = ["--api-keys-file", str(tmp_path / "keys")]
    await restart(fleet, valkey, tmp_path, *keys)
    async with client(fleet) as owner:
        batch = await begun(owner, NUM_LINES)
    written = tmp_path / "files" / "batches" / batch.id / "output.jsonl"
    while not written.exists() or written.read_bytes().count(b"\n") < 20:
        await asyncio.sleep(0.01)  # polls a file of another process
    await restart(fleet, valkey, tmp_path)
    async with client(fleet) as anybody:  # another batch has ended, so this driver has read all batches
        own = await begun(anybody, 5)
        while own.status != "completed":
            own = await anybody.batches.retrieve(own.id)
            await asyncio.sleep(0.05)
    await restart(fleet, valkey, tmp_path, *keys)
    async with client(fleet) as owner:
        batch = await owner.batches.retrieve(batch.id)
        while batch.status != "completed":
            assert batch.status in ("validating", "in_progress", "finalizing"), fleet.all_logs()
            await asyncio.sleep(0.05)  # polls as a client does
            batch = await owner.batches.retrieve(batch.id)
        assert batch.output_file_id is not None and batch.error_file_id is None
        check_results((await owner.files.content(batch.output_file_id)).text, NUM_LINES)
